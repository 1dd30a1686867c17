//! The beginning of a shard, and the waiting time of a restored cluster's (DESIGN §4).
//!
//! The state keeps that nothing is granted, and for how long that lasts; each leader waits that
//! long from its own beginning, and ends it by a command under that very leadership. Acquires are
//! refused here already, so that those who try again and again cost no entry of the log; `apply`
//! refuses them in any case.

use std::time::Duration;

use leasehold_protocol::birth::{BirthRecord, Restored};
use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{NodeId, Token};
use leasehold_protocol::planted;
use leasehold_protocol::reply::Reply;

use super::Shard;
use crate::env::{Clock, Env};
use crate::lease::TimerKind;
use crate::net::error;

/// Who is refused may try again after this long.
const RETRY_AFTER_MS: u32 = 1_000;

/// How a shard begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beginning {
    /// The first token is above this.
    pub token_base: Token,
    /// What the cluster was restored from, if it was.
    pub restored: Option<Restored>,
}

impl From<Token> for Beginning {
    fn from(token_base: Token) -> Self {
        Self { token_base, restored: None }
    }
}

impl From<&BirthRecord> for Beginning {
    fn from(record: &BirthRecord) -> Self {
        Self { token_base: Token(record.token_base), restored: record.restored }
    }
}

impl Beginning {
    pub(super) fn command(&self) -> Command {
        let token_base = self.token_base;
        match self.restored {
            None => Command::Begin { token_base },
            Some(Restored { lease_base, revision_base, quarantine_ms, .. }) => {
                Command::BeginRestored { token_base, lease_base, revision_base, quarantine_ms }
            }
        }
    }
}

impl<E: Env> Shard<E> {
    /// The refusal of a command that could end in a grant while nothing is granted.
    pub(super) fn quarantined(&self, command: &Command) -> Option<Reply> {
        if !self.state.borrow().keeps_out(command) {
            return None;
        }
        let code = ErrorCode::QUARANTINED;
        let message = match self.quarantine_left() {
            None => code.text().to_owned(),
            Some(left) => {
                let text = code.text().trim_end_matches('.');
                format!("{text}: in {} s, unless the leader changes", left.as_secs() + 1)
            }
        };
        Some(error(code, message, NodeId(0), RETRY_AFTER_MS))
    }

    fn quarantine_left(&self) -> Option<Duration> {
        let at = self.timers.borrow().when(&TimerKind::Quarantine)?;
        Some(at.since(self.clock.now()))
    }

    /// Sets the timer, if there is something to wait for: from this leadership's beginning, whatever
    /// former leaders have waited.
    pub(super) fn set_quarantine(&self) {
        let mut quarantine_ms = self.state.borrow().quarantine_ms();
        // Planted (G1): a leader waits half of what the old leases may last.
        if planted!("quarantine-halved") {
            quarantine_ms /= 2;
        }
        if quarantine_ms > 0 {
            tracing::warn!(
                shard = self.id.0,
                quarantine_ms,
                "this cluster was restored: no key is granted until the old leases are over"
            );
            let wait = Duration::from_millis(u64::from(quarantine_ms));
            self.set_timer(self.clock.now().after(wait), TimerKind::Quarantine);
        }
    }

    pub(super) fn still_quarantined(&self) -> bool {
        self.state.borrow().quarantine_ms() > 0
    }

    /// What is to be said and done when it is over.
    pub(super) fn quarantine_ended(&self) {
        self.timers.borrow_mut().cancel(&TimerKind::Quarantine);
        tracing::info!(shard = self.id.0, "keys are granted from now on");
    }
}
