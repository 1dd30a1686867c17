//! `Yields`: requests to a holder to give up.

use std::time::Duration;

use leasehold_protocol::event::{EndReason, EventKind};
use leasehold_protocol::ids::{LeaseId, Mode, Token};
use leasehold_protocol::reply::KeyInfo;
use leasehold_protocol::request::Freshness;
use leasehold_protocol::watch::WatchEvent;

use crate::client::Client;
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
    client: Client,
    watch: Watch,
    hold: HoldWatch,
    key: Vec<u8>,
    /// Which of several keys that were granted at once, whose tokens follow each other.
    part: u64,
    /// The hold's lease; `None` if it was over from the start.
    lease: Option<LeaseId>,
    /// The last state did not show this hold.
    look: bool,
    told: Option<YieldAsked>,
}

impl Yields {
    pub(crate) fn new(client: Client, watch: Watch, hold: HoldWatch, of: YieldsOf) -> Self {
        let YieldsOf { key, part, lease } = of;
        Self { client, watch, hold, key, part, lease, look: false, told: None }
    }

    /// The token of the hold.
    pub fn token(&self) -> Token {
        Token(self.hold.token().0 + self.part)
    }

    /// The next request, at first one that was made before; the same one again is told once.
    /// `None` when the hold is over. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<Option<YieldAsked>, CallError> {
        loop {
            let found = if self.look { self.look().await? } else { self.hear().await? };
            let Found::Asked(asked) = found else { return Ok(None) };
            if let Some(asked) = asked
                && self.told.as_ref() != Some(&asked)
            {
                return Ok(Some(self.told.insert(asked).clone()));
            }
        }
    }

    /// What the watch tells next.
    async fn hear(&mut self) -> Result<Found, CallError> {
        let item = tokio::select! {
            item = self.watch.next() => item?,
            _ = self.hold.clone().lost() => return Ok(Found::Over),
        };
        let token = self.token();
        Ok(match item {
            // A state may be older than the grant, and shows the first holders only.
            WatchItem::State { keys, .. } => {
                let shown = keys.first().and_then(|info| in_state(token, info));
                self.look = shown.is_none();
                shown.unwrap_or(Found::Asked(None))
            }
            WatchItem::Change { events, .. } => in_change(token, events),
            _ => Found::Asked(None),
        })
    }

    /// Reads this one holder. Until that is answered, the look is due.
    async fn look(&mut self) -> Result<Found, CallError> {
        let Some(lease) = self.lease else { return Ok(Found::Over) };
        let before = LeaseId(lease.0 - 1);
        let read = tokio::select! {
            read = self.client.get_after(self.key.clone(), before, Freshness::Linearizable) => read?,
            _ = self.hold.clone().lost() => return Ok(Found::Over),
        };
        self.look = false;
        Ok(in_state(self.token(), &read.info).unwrap_or(Found::Over))
    }
}

/// Whose requests are wanted, see `Yields`.
pub(crate) struct YieldsOf {
    pub(crate) key: Vec<u8>,
    pub(crate) part: u64,
    pub(crate) lease: Option<LeaseId>,
}

enum Found {
    /// It holds; the last request, if there is one here.
    Asked(Option<YieldAsked>),
    /// The hold has ended.
    Over,
}

/// `None` if the hold is not among those that are shown.
fn in_state(token: Token, info: &KeyInfo) -> Option<Found> {
    let Some(holder) = info.holders.iter().find(|holder| holder.token == token) else {
        // An upgrade may be under way, and the token not known here yet: then it is a later one.
        let newer =
            info.holders.iter().any(|other| other.token > token && other.mode == Mode::EXCLUSIVE);
        return newer.then_some(Found::Asked(None));
    };
    Some(Found::Asked(holder.asked.as_ref().map(|asked| YieldAsked {
        who: asked.who.clone(),
        why: asked.why.clone(),
        within: Duration::from_millis(asked.within_ms.into()),
    })))
}

fn in_change(token: Token, events: Vec<WatchEvent>) -> Found {
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
                return Found::Over;
            }
            _ => {}
        }
    }
    Found::Asked(last)
}
