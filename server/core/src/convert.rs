//! Changing the mode of a hold.
//!
//! A downgrade keeps the hold and its token: what the holder may do shrinks, so nothing that was
//! fenced by the token becomes wrong. An upgrade gives more than the token stood for, so it is a
//! new grant with a new token (G2), in one step with the end of the old one: nobody can come
//! between. It never waits, because two holders that wait for each other's end would wait for ever.

use leasehold_protocol::command::Caller;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{EndReason, EventKind};
use leasehold_protocol::ids::{LeaseId, Mode, Revision, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::planted;
use leasehold_protocol::shard::{check_key, check_mode};

use crate::blob::Key;
use crate::memory::Kind;
use crate::retry::{check_acks, print_of_convert};
use crate::state::{State, Step, TOKEN_MAX};
use crate::table::Waiter;

impl State {
    pub(crate) fn convert(
        &mut self,
        step: &mut Step<'_>,
        caller: &Caller,
        key: &[u8],
        token: Token,
        mode: Mode,
    ) -> Outcome {
        let checked = check_acks(caller).and(check_key(key).map(|_| ())).and(check_mode(mode));
        if let Err(code) = checked {
            return self.refusal(code, Token(0));
        }
        let print = print_of_convert(key, token, mode);
        let ticket = match self.admit(step, caller, Kind::Convert, print) {
            Ok(ticket) => ticket,
            Err(outcome) => return outcome,
        };
        let Some(key) = self.key_held_by(key, ticket.lease, token) else {
            let present = self.present_token(key);
            return self.remember_refusal(step, ticket, ErrorCode::NOT_OWNER, present);
        };
        self.raise(step);
        let (present, entered_again) = self.mode_of(&key, ticket.lease);
        let outcome = match (present, mode) {
            _ if present.permit_count().is_some() => {
                self.refusal(ErrorCode::MODE_MISMATCH, Token(0))
            }
            _ if present != mode && entered_again => {
                self.refusal(ErrorCode::HOLD_REENTERED, Token(0))
            }
            (Mode::EXCLUSIVE, Mode::SHARED) => self.downgrade(step, &key, ticket.lease, token),
            (Mode::SHARED, Mode::EXCLUSIVE) => self.upgrade(step, &key, ticket.lease),
            _ => Outcome::Changed { token, revision: Revision(self.revision) },
        };
        self.remember(step, ticket, outcome)
    }

    /// The mode, and whether it was entered more than once.
    fn mode_of(&self, key: &Key, lease: LeaseId) -> (Mode, bool) {
        let hold = self.keys.get(key).and_then(|entry| entry.holds.get(&lease));
        let hold = hold.expect("the caller knows the hold");
        (hold.mode, !hold.again.is_empty())
    }

    fn downgrade(
        &mut self,
        step: &mut Step<'_>,
        key: &Key,
        lease: LeaseId,
        token: Token,
    ) -> Outcome {
        let mode = Mode::SHARED;
        self.edit_hold(key, lease, |hold| hold.mode = mode);
        self.set_own(key, token.0, 0);
        self.emit(step, EventKind::Converted { key: key.to_vec(), lease, token, mode });
        // Planted (G4): shared waiters whom the hold would now let in wait on.
        if !planted!("downgrade-wakes-nobody") {
            self.hand_over(step, key);
        }
        Outcome::Changed { token, revision: Revision(self.revision) }
    }

    fn upgrade(&mut self, step: &mut Step<'_>, key: &Key, lease: LeaseId) -> Outcome {
        let entry = self.keys.get(key).expect("a held key is in the table");
        let hold = entry.holds.get(&lease).expect("the caller knows the hold");
        if hold.forced.is_some() {
            return self.refusal(ErrorCode::HOLD_FORCED, Token(0));
        }
        if let Some((token, _)) = entry.ghosts.first() {
            return self.refusal(ErrorCode::DELAYED, Token(*token));
        }
        if let Some((_, other)) = entry.holds.iter().find(|(holder, _)| **holder != lease) {
            // Planted: it waits for the other reader, who may wait for it.
            if planted!("upgrade-waits") {
                return Outcome::Queued { position: 0, revision: Revision(self.revision) };
            }
            return self.refusal(ErrorCode::UPGRADE_CONFLICT, other.token);
        }
        if self.last_token >= TOKEN_MAX {
            return self.refusal(ErrorCode::TOKENS_EXHAUSTED, Token(0));
        }
        let hold = self.take_hold(step, key, lease, (EndReason::Upgraded, false));
        let again = Waiter {
            lease,
            number: hold.number,
            part: hold.part,
            parts: 1,
            mode: Mode::EXCLUSIVE,
            own: None,
            value: hold.value,
            wait_ms: 0,
            delay_ms: hold.delay_ms,
        };
        Outcome::Granted(self.grant(step, key, 0, again))
    }
}
