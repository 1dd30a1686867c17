//! `Yields`: requests to a holder to give up.

use std::time::Duration;

use leasehold_protocol::event::{EndReason, EventKind};
use leasehold_protocol::ids::Token;
use leasehold_protocol::reply::KeyInfo;
use leasehold_protocol::watch::WatchEvent;

use crate::error::CallError;
use crate::guard::HoldWatch;
use crate::watch::{Watch, WatchItem};

/// Somebody asks the holder to give up. Nothing follows if it does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct YieldAsked {
    /// Who asks.
    pub who: String,
    /// Why.
    pub why: String,
    /// How soon, counted from when it was asked, which was a moment before it is told.
    pub within: Duration,
}

/// Requests to give up one hold, as a stream. It keeps the hold from nothing; dropping it ends it.
#[derive(Debug)]
pub struct Yields {
    watch: Watch,
    hold: HoldWatch,
    told: Option<YieldAsked>,
}

impl Yields {
    pub(crate) const fn new(watch: Watch, hold: HoldWatch) -> Self {
        Self { watch, hold, told: None }
    }

    /// The token of the hold.
    pub fn token(&self) -> Token {
        self.hold.token()
    }

    /// The next request, at first one that was made before; the same one again is told once.
    /// `None` when the hold is over. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<Option<YieldAsked>, CallError> {
        loop {
            let item = tokio::select! {
                item = self.watch.next() => item?,
                _ = self.hold.clone().lost() => return Ok(None),
            };
            let token = self.hold.token();
            let asked = match item {
                WatchItem::State { keys, .. } => match in_state(token, &keys) {
                    Ok(asked) => asked,
                    Err(Over) => return Ok(None),
                },
                WatchItem::Change { events, .. } => match in_change(token, events) {
                    Ok(asked) => asked,
                    Err(Over) => return Ok(None),
                },
                _ => None,
            };
            if let Some(asked) = asked
                && self.told.as_ref() != Some(&asked)
            {
                return Ok(Some(self.told.insert(asked).clone()));
            }
        }
    }
}

/// The hold has ended.
struct Over;

fn in_state(token: Token, keys: &[KeyInfo]) -> Result<Option<YieldAsked>, Over> {
    let mut holders = keys.iter().flat_map(|info| &info.holders);
    // An upgrade may be under way, and the token not known here yet: then it is a later one.
    let holder = holders.find(|holder| holder.token == token);
    let Some(holder) = holder else {
        let newer = keys.iter().flat_map(|info| &info.holders).any(|other| other.token > token);
        return if newer { Ok(None) } else { Err(Over) };
    };
    Ok(holder.asked.as_ref().map(|asked| YieldAsked {
        who: asked.who.clone(),
        why: asked.why.clone(),
        within: Duration::from_millis(asked.within_ms.into()),
    }))
}

fn in_change(token: Token, events: Vec<WatchEvent>) -> Result<Option<YieldAsked>, Over> {
    let mut last = None;
    for event in events {
        match event.kind {
            EventKind::YieldAsked { token: of, who, why, within_ms, .. } if of == token => {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                let within = Duration::from_millis(within_ms.into());
                last = Some(YieldAsked { who: text(&who), why: text(&why), within });
            }
            EventKind::Ended { token: of, reason, .. }
                if of == token && reason != EndReason::Upgraded =>
            {
                return Err(Over);
            }
            _ => {}
        }
    }
    Ok(last)
}
