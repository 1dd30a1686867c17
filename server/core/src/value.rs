//! What a hold carries beside its mode: its value, and the last request to give it up.

use alloc::rc::Rc;

use leasehold_protocol::command::Caller;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::EventKind;
use leasehold_protocol::ids::{Revision, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::planted;
use leasehold_protocol::shard::{check_key, check_label, check_reason, check_value};

use crate::blob::Blob;
use crate::memory::Kind;
use crate::retry::{check_acks, print_of_set_value};
use crate::state::{State, Step};
use crate::table::Asked;

impl State {
    pub(crate) fn set_value(
        &mut self,
        step: &mut Step<'_>,
        caller: &Caller,
        key: &[u8],
        token: Token,
        value: &[u8],
    ) -> Outcome {
        let checked = check_acks(caller).and(check_key(key).map(|_| ())).and(check_value(value));
        if let Err(code) = checked {
            return self.refusal(code, Token(0));
        }
        let print = print_of_set_value(key, token, value);
        let ticket = match self.admit(step, caller, Kind::SetValue, print) {
            Ok(ticket) => ticket,
            Err(outcome) => return outcome,
        };
        let Some(key) = self.key_held_by(key, ticket.lease, token) else {
            let present = self.present_token(key);
            return self.remember_refusal(step, ticket, ErrorCode::NOT_OWNER, present);
        };
        let revision = self.raise(step);
        let lease = ticket.lease;
        self.edit_hold(&key, lease, |hold| hold.value = Blob::new(value));
        let (name, value) = (key.to_vec(), value.to_vec());
        self.emit(step, EventKind::ValueChanged { key: name, lease, token, value });
        self.remember(step, ticket, Outcome::Changed { token, revision })
    }

    pub(crate) fn ask_yield(
        &mut self,
        step: &mut Step<'_>,
        key: &[u8],
        token: Token,
        (who, why): (&[u8], &[u8]),
        within_ms: u32,
    ) -> Outcome {
        let checked = check_key(key).and(check_label(who)).and(check_reason(why));
        if let Err(code) = checked {
            return self.refusal(code, Token(0));
        }
        let Some((key, lease, present)) = self.asked_of(key, token) else {
            return self.refusal(ErrorCode::NOT_OWNER, self.present_token(key));
        };
        let asked = Asked { who: Blob::new(who), why: Blob::new(why), within_ms };
        if present.is_none_or(|present| *present != asked) {
            self.raise(step);
            self.edit_hold(&key, lease, |hold| hold.asked = Some(Rc::new(asked)));
            let (key, who, why) = (key.to_vec(), who.to_vec(), why.to_vec());
            let event = EventKind::YieldAsked { key, lease, token, who, why, within_ms };
            // Planted (G6): the holder is not told that somebody asks.
            if !planted!("asked-holder-untold") {
                self.emit(step, event);
            }
        }
        Outcome::Changed { token, revision: Revision(self.revision) }
    }
}
