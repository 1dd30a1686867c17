//! The state of one shard, and the door through which every change enters: `apply`.
//!
//! Owns all replicated facts of the shard: leases with their retry memory, holds, queues, the
//! token counter, the revision. Deterministic: two states that applied the same commands are
//! equal. It never reads a clock, draws a random number or walks an unordered table; it stores
//! TTLs and queue order, never deadlines.
//!
//! Invariants (checked by `invariants::check`):
//! - The digest changes exactly when the revision does, by one per command. Retry memory and
//!   floors are state like everything else, so a command that only moves them raises the revision
//!   too; it has no events, and so wakes no watcher.
//! - A key's queue never has a satisfiable head after a command (no wake-up is ever missing).
//! - Every hold and every waiter belongs to a live lease, and the lease knows it.

use alloc::rc::Rc;
use alloc::vec::Vec;

use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::{LeaseId, Revision, ShardId, Token};
use leasehold_protocol::outcome::Outcome;

use crate::acquire::Request;
use crate::blob::{Key, Name};
use crate::cow::Map;
use crate::digest;
use crate::ends::Ends;
use crate::hash::Sum;
use crate::members::Members;
use crate::quarantine::Bases;
use crate::table::{Keys, Lease, Leases};

/// The highest token: tokens fit in a signed 64-bit column.
pub(crate) const TOKEN_MAX: u64 = i64::MAX as u64;
/// Holds, their further entries, lost ones with a lock-delay, and waiters of one shard together. At the limit the answer is `busy`.
pub(crate) const CLAIMS_MAX: usize = 4_000_000;

/// The replicated state of one shard. Cloning it is free: clones share everything until one of
/// them changes (see the snapshot encoder).
#[derive(Clone, Debug)]
pub struct State {
    pub(crate) shard: ShardId,
    pub(crate) revision: u64,
    pub(crate) begun: bool,
    pub(crate) last_token: u64,
    pub(crate) last_lease: u64,
    /// How long no key is granted after a restore, in milliseconds; 0 once that is over.
    pub(crate) quarantine_ms: u32,
    /// Hash sum of all items, kept along with them.
    pub(crate) sum: Sum,
    pub(crate) leases: Leases,
    pub(crate) keys: Keys,
    /// The same keys in the order of their bytes, for listings. Follows from `keys`.
    pub(crate) names: Map<Name, ()>,
    /// Forced holds that are not passed on yet, by token. Follows from `keys`.
    pub(crate) forced: Map<u64, (Key, LeaseId)>,
    /// Ghosts by token: their keys and how long each lasts, in milliseconds. Follows from `keys`.
    pub(crate) delays: Map<u64, (Key, u32)>,
    /// How each key's last hold that ended did, as far as it is remembered.
    pub(crate) ends: Ends,
    /// Waiters that will need a lease of their own. Follows from `keys`.
    pub(crate) own_waiters: usize,
    /// Holds, their further entries, ghosts and waiters. Follows from `keys`.
    pub(crate) claims: usize,
    /// The member table, and this shard's fence.
    pub(crate) members: Rc<Members>,
}

/// One command on its way through `apply`.
pub(crate) struct Step<'a> {
    pub(crate) wall_ms: u64,
    raised: bool,
    events: &'a mut Vec<Event>,
}

impl State {
    /// The state of a shard before its first command.
    pub fn new(shard: ShardId) -> Self {
        Self {
            shard,
            revision: 0,
            begun: false,
            last_token: 0,
            last_lease: 0,
            quarantine_ms: 0,
            sum: Sum::default(),
            leases: Map::default(),
            keys: Map::default(),
            names: Map::default(),
            forced: Map::default(),
            delays: Map::default(),
            ends: Ends::default(),
            own_waiters: 0,
            claims: 0,
            members: Rc::default(),
        }
    }

    /// Applies one command of the log and appends its events. `wall_ms` is the proposer's wall
    /// clock, kept for display and never compared.
    ///
    /// The state cannot know who proposed: that a client's `Begin`, `Expire`, `EndForced` or
    /// `TimeOut` never gets here (`internal_command`) is up to the server.
    pub fn apply(&mut self, wall_ms: u64, command: &Command, events: &mut Vec<Event>) -> Outcome {
        let mut step = Step { wall_ms, raised: false, events };
        let step = &mut step;
        if let Command::Begin { token_base } = command {
            return self.begin(step, *token_base);
        }
        if let Command::BeginRestored { token_base, lease_base, revision_base, quarantine_ms } =
            command
        {
            let bases = Bases { token: *token_base, lease: *lease_base, revision: *revision_base };
            return self.begin_restored(step, &bases, *quarantine_ms);
        }
        if !self.begun {
            return self.refusal(ErrorCode::NOT_READY, Token(0));
        }
        if self.keeps_out(command) {
            return self.refusal(ErrorCode::QUARANTINED, Token(0));
        }
        match command {
            Command::Begin { .. } | Command::BeginRestored { .. } => unreachable!("handled above"),
            Command::EndQuarantine => self.end_quarantine(step),
            Command::Open { ttl_ms, secret, label } => self.open(step, *ttl_ms, secret, label),
            Command::Acquire { caller, key, mode, own, value, wait_ms } => {
                let request = Request { mode: *mode, ..Request::plain(key, *own, value) };
                self.acquire(step, caller, &request, *wait_ms)
            }
            Command::AcquireAll { caller, wants, own, value, wait_ms, delay_ms } => {
                let request = Request { delay_ms: *delay_ms, ..Request::plain(&[], *own, value) };
                self.acquire_all(step, caller, wants, &request, *wait_ms)
            }
            Command::SetValue { caller, key, token, value } => {
                self.set_value(step, caller, key, *token, value)
            }
            Command::AskYield { key, token, who, why, within_ms } => {
                self.ask_yield(step, key, *token, (who, why), *within_ms)
            }
            Command::SetLimit { key, limit, who } => self.set_limit(step, key, *limit, who),
            Command::EndDelay { key, token } => self.end_delay(step, key, *token),
            Command::Cancel { caller, release_if_granted } => {
                self.cancel(step, caller, *release_if_granted)
            }
            Command::Release { caller, key, token } => self.release(step, caller, key, *token),
            Command::ReleaseOwn { lease, secret, key, token } => {
                self.release_own(step, *lease, secret, key, *token)
            }
            Command::Close { lease, secret } => self.close(step, *lease, secret),
            Command::ForceRelease { key, token, who, why, now } => {
                self.force_release(step, key, *token, (who, why), *now)
            }
            Command::Expire { lease } => self.expire(step, *lease),
            Command::EndForced { key, token } => self.end_forced(step, key, *token),
            Command::TimeOut { lease, number } => self.time_out(step, *lease, *number),
            Command::ReleaseAll { caller, acquire } => self.release_all(step, caller, *acquire),
            Command::Convert { caller, key, token, mode } => {
                self.convert(step, caller, key, *token, *mode)
            }
            Command::Member(command) => self.member(step, command),
        }
    }

    pub(crate) fn begin(&mut self, step: &mut Step<'_>, token_base: Token) -> Outcome {
        if self.begun {
            return self.refusal(ErrorCode::ALREADY_BEGUN, Token(0));
        }
        if token_base.0 >= TOKEN_MAX {
            return self.refusal(ErrorCode::TOKENS_EXHAUSTED, Token(0));
        }
        let revision = self.raise(step);
        self.begun = true;
        self.last_token = token_base.0;
        Outcome::Begun { revision }
    }

    /// Raises the revision, once per command, and returns it.
    pub(crate) fn raise(&mut self, step: &mut Step<'_>) -> Revision {
        self.revision += u64::from(!step.raised);
        step.raised = true;
        Revision(self.revision)
    }

    /// A refusal at the present revision.
    pub(crate) fn refusal(&self, code: ErrorCode, token: Token) -> Outcome {
        Outcome::Refused { code, token, revision: Revision(self.revision) }
    }

    pub(crate) fn emit(&self, step: &mut Step<'_>, kind: EventKind) {
        assert!(step.raised, "an event belongs to a change");
        step.events.push(Event { revision: Revision(self.revision), kind });
    }

    /// Changes a lease and keeps the digest in step.
    pub(crate) fn edit_lease<R>(
        &mut self,
        id: LeaseId,
        edit: impl FnOnce(&mut Lease, &mut Sum) -> R,
    ) -> R {
        let lease = self.leases.lease_mut(id).expect("the caller knows the lease to be live");
        self.sum.sub(digest::lease(lease));
        let result = edit(lease, &mut self.sum);
        self.sum.add(digest::lease(lease));
        result
    }

    /// The number of commands that changed this state.
    pub fn revision(&self) -> Revision {
        Revision(self.revision)
    }

    /// A hash of the whole state, kept incrementally. Equal states have equal digests.
    pub fn digest(&self) -> u64 {
        digest::whole(self, self.sum)
    }

    /// The token of the last grant, or the base if there was none.
    pub fn last_token(&self) -> Token {
        Token(self.last_token)
    }

    /// True once `Begin` was applied.
    pub fn begun(&self) -> bool {
        self.begun
    }

    /// The shard.
    pub fn shard(&self) -> ShardId {
        self.shard
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use leasehold_protocol::command::{Caller, OwnLease};
    use leasehold_protocol::ids::{Mode, Number, Secret};
    use leasehold_protocol::limits::LEASES_MAX;

    use super::*;

    const SECRET: Secret = Secret([1; 16]);

    fn apply(state: &mut State, command: &Command) -> Outcome {
        state.apply(0, command, &mut Vec::new())
    }

    fn open() -> Command {
        Command::Open { ttl_ms: 5_000, secret: SECRET, label: vec![] }
    }

    fn acquire(number: u64, own: bool) -> Command {
        let (floor, acks) = (Number(0), vec![]);
        let caller =
            Caller { lease: LeaseId(1), secret: SECRET, number: Number(number), floor, acks };
        let own = own.then_some(OwnLease { ttl_ms: 5_000, secret: SECRET });
        let key = number.to_le_bytes()[..1].to_vec();
        Command::Acquire { caller, key, mode: Mode::EXCLUSIVE, own, value: vec![], wait_ms: 0 }
    }

    fn ready() -> State {
        let mut state = State::new(ShardId(0));
        apply(&mut state, &Command::Begin { token_base: Token(100) });
        apply(&mut state, &open());
        state
    }

    fn code(outcome: &Outcome) -> Option<ErrorCode> {
        match outcome {
            Outcome::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Filling the real tables takes too long; the counters that are compared are set instead.
    #[test]
    fn leases_are_bounded_with_those_that_waiters_will_need() {
        let mut state = ready();
        state.own_waiters = LEASES_MAX - 2;
        assert_eq!(code(&apply(&mut state, &acquire(1, true))), None);
        assert_eq!(code(&apply(&mut state, &open())), Some(ErrorCode::LEASES_FULL));
        assert_eq!(code(&apply(&mut state, &acquire(4, true))), Some(ErrorCode::LEASES_FULL));
        assert_eq!(code(&apply(&mut state, &acquire(4, false))), None, "it was not remembered");
    }

    #[test]
    fn holds_and_waiters_are_bounded() {
        let mut state = ready();
        state.claims = CLAIMS_MAX - 1;
        assert_eq!(code(&apply(&mut state, &acquire(1, false))), None);
        assert_eq!(code(&apply(&mut state, &acquire(4, false))), Some(ErrorCode::BUSY));
        state.claims -= 1;
        assert_eq!(code(&apply(&mut state, &acquire(4, false))), None, "it was not remembered");
    }
}
