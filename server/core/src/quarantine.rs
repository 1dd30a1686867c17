//! The beginning of a restored cluster: its counters go on above the old cluster's, and no key is
//! granted until the old cluster's leases are over for certain.
//!
//! The old cluster may have granted and renewed after the backup was taken, and its holders may be
//! alive. None of them can be sure of a hold for longer than the longest TTL after its last
//! renewal (G1), so for that long everything that could be granted is refused. The state knows no
//! time: how long it lasts is kept, each leader waits that long from its own beginning, and then
//! ends it by a command.
//!
//! Invariant: while the quarantine lasts there is no hold and no waiter, since a restored state
//! begins without any; so it is enough to keep acquires out.

use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::EventKind;
use leasehold_protocol::ids::Token;
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::planted;

use crate::state::{State, Step, TOKEN_MAX};

/// Half of what a counter of ids or revisions may reach: a base above it would leave no room.
const BASE_MAX: u64 = 1 << 62;

/// Above what the counters of a restored shard go on.
pub(crate) struct Bases {
    pub(crate) token: Token,
    pub(crate) lease: u64,
    pub(crate) revision: u64,
}

impl State {
    pub(crate) fn begin_restored(
        &mut self,
        step: &mut Step<'_>,
        bases: &Bases,
        quarantine_ms: u32,
    ) -> Outcome {
        if bases.lease > BASE_MAX || bases.revision > BASE_MAX {
            return self.refusal(ErrorCode::MALFORMED, Token(0));
        }
        let begins = !self.begun && bases.token.0 < TOKEN_MAX;
        if begins {
            self.revision = bases.revision;
            // Planted (G1): ids of leases of the old cluster come again.
            self.last_lease = if planted!("restored-ids-come-again") { 0 } else { bases.lease };
            // Planted (G1): grants begin while the old cluster's holders may be sure.
            let waits = !planted!("restore-waits-for-nobody");
            self.quarantine_ms = if waits { quarantine_ms } else { 0 };
        }
        let outcome = self.begin(step, bases.token);
        if begins && quarantine_ms > 0 {
            self.emit(step, EventKind::QuarantineBegan { for_ms: quarantine_ms });
        }
        outcome
    }

    pub(crate) fn end_quarantine(&mut self, step: &mut Step<'_>) -> Outcome {
        if self.quarantine_ms == 0 {
            return self.refusal(ErrorCode::ALREADY_BEGUN, Token(0));
        }
        let revision = self.raise(step);
        self.quarantine_ms = 0;
        self.emit(step, EventKind::QuarantineEnded);
        Outcome::Changed { token: Token(0), revision }
    }

    /// The command could end in a grant, and nothing is granted yet.
    pub fn keeps_out(&self, command: &Command) -> bool {
        self.quarantine_ms > 0
            && matches!(command, Command::Acquire { .. } | Command::AcquireAll { .. })
    }

    /// How long no key is granted after a restore, in milliseconds from a leader's beginning; 0
    /// if that is over, or never was.
    pub fn quarantine_ms(&self) -> u32 {
        self.quarantine_ms
    }

    /// The id of the lease that was minted last, or the base if there was none.
    pub fn last_lease(&self) -> u64 {
        self.last_lease
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use leasehold_protocol::command::{Caller, Want};
    use leasehold_protocol::event::Event;
    use leasehold_protocol::ids::{LeaseId, Mode, Number, Revision, Secret, ShardId};

    use super::*;
    use crate::{invariants, snapshot};

    const WAIT_MS: u32 = 600_600;

    fn apply(state: &mut State, command: &Command) -> (Outcome, Vec<Event>) {
        let mut events = Vec::new();
        let outcome = state.apply(1, command, &mut events);
        invariants::check(state).expect("a sound state");
        (outcome, events)
    }

    fn restored(quarantine_ms: u32) -> State {
        let mut state = State::new(ShardId(0));
        let (outcome, events) = apply(&mut state, &begin(quarantine_ms));
        assert_eq!(outcome, Outcome::Begun { revision: Revision(901) });
        assert_eq!(events.len(), usize::from(quarantine_ms > 0));
        state
    }

    fn begin(quarantine_ms: u32) -> Command {
        let (token_base, lease_base, revision_base) = (Token(5_000), 70, 900);
        Command::BeginRestored { token_base, lease_base, revision_base, quarantine_ms }
    }

    fn caller(lease: LeaseId, number: u64) -> Caller {
        let (secret, floor, acks) = (Secret::default(), Number(0), vec![]);
        Caller { lease, secret, number: Number(number), floor, acks }
    }

    fn acquires(lease: LeaseId) -> [Command; 2] {
        let (key, mode, value) = (vec![b'k'], Mode::EXCLUSIVE, vec![]);
        let want = Want { key: vec![b'l'], mode, limit: 0, reentrant: false };
        [
            Command::Acquire {
                caller: caller(lease, 1),
                key,
                mode,
                own: None,
                value: value.clone(),
                wait_ms: u32::MAX,
            },
            Command::AcquireAll {
                caller: caller(lease, 4),
                wants: vec![want],
                own: None,
                value,
                wait_ms: 0,
                delay_ms: 0,
            },
        ]
    }

    fn open(state: &mut State) -> LeaseId {
        match apply(state, &open_command()).0 {
            Outcome::Opened { lease, .. } => lease,
            outcome => panic!("{outcome:?}"),
        }
    }

    fn refused(outcome: &Outcome) -> Option<ErrorCode> {
        match outcome {
            Outcome::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    #[test]
    fn nothing_is_granted_until_the_end_and_then_above_all_bases() {
        let mut state = restored(WAIT_MS);
        let lease = open(&mut state);
        assert_eq!(lease, LeaseId(71));
        let digest = state.digest();
        for command in acquires(lease) {
            let (outcome, events) = apply(&mut state, &command);
            assert_eq!((refused(&outcome), events.len()), (Some(ErrorCode::QUARANTINED), 0));
        }
        assert_eq!(state.digest(), digest, "a refusal is not remembered");
        let (outcome, events) = apply(&mut state, &Command::EndQuarantine);
        assert!(matches!(outcome, Outcome::Changed { .. }), "{outcome:?}");
        assert_eq!(events[0].kind, EventKind::QuarantineEnded);
        for (command, token) in acquires(lease).iter().zip(5_001..) {
            match apply(&mut state, command).0 {
                Outcome::Granted(grant) => assert_eq!(grant.token, Token(token)),
                outcome => panic!("{outcome:?}"),
            }
        }
        let (outcome, _) = apply(&mut state, &Command::EndQuarantine);
        assert_eq!(refused(&outcome), Some(ErrorCode::ALREADY_BEGUN), "it is over once");
    }

    #[test]
    fn an_operator_who_knows_better_waits_for_nothing() {
        let mut state = restored(0);
        let lease = open(&mut state);
        let (outcome, _) = apply(&mut state, &acquires(lease)[0]);
        assert!(matches!(outcome, Outcome::Granted(_)), "{outcome:?}");
    }

    #[test]
    fn a_shard_begins_once_and_within_its_range() {
        let mut state = restored(WAIT_MS);
        for command in [begin(0), Command::Begin { token_base: Token(9_000) }] {
            let (outcome, _) = apply(&mut state, &command);
            assert_eq!(refused(&outcome), Some(ErrorCode::ALREADY_BEGUN));
        }
        assert_eq!((state.quarantine_ms(), state.last_token()), (WAIT_MS, Token(5_000)));
        let with = |token, lease_base, revision_base| Command::BeginRestored {
            token_base: Token(token),
            lease_base,
            revision_base,
            quarantine_ms: 1,
        };
        for (command, code) in [
            (with(TOKEN_MAX, 1, 1), ErrorCode::TOKENS_EXHAUSTED),
            (with(1, BASE_MAX + 1, 1), ErrorCode::MALFORMED),
            (with(1, 1, BASE_MAX + 1), ErrorCode::MALFORMED),
        ] {
            let mut fresh = State::new(ShardId(0));
            assert_eq!(refused(&apply(&mut fresh, &command).0), Some(code));
            assert_eq!(fresh.digest(), State::new(ShardId(0)).digest(), "nothing changed");
        }
    }

    fn decoded(state: &State) -> State {
        let mut decoder = snapshot::Decoder::new();
        for chunk in snapshot::Encoder::new(state) {
            decoder.feed(&chunk).expect("sound bytes");
        }
        decoder.finish().expect("a sound state")
    }

    #[test]
    fn a_snapshot_carries_it_and_the_digest_covers_it() {
        let mut state = restored(WAIT_MS);
        open(&mut state);
        let mut again = decoded(&state);
        assert_eq!((again.quarantine_ms(), again.digest()), (WAIT_MS, state.digest()));
        apply(&mut again, &Command::EndQuarantine);
        let (over, revision) = (again.digest(), again.revision);
        apply(&mut state, &open_command());
        assert_eq!(state.revision, revision);
        assert_ne!(state.digest(), over);
        assert_eq!(decoded(&again).quarantine_ms(), 0);
    }

    fn open_command() -> Command {
        Command::Open { ttl_ms: 5_000, secret: Secret::default(), label: vec![] }
    }
}
