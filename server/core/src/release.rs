//! How holds are given back or taken away.

use alloc::rc::Rc;

use leasehold_protocol::command::Caller;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{EndReason, EventKind};
use leasehold_protocol::ids::{LeaseId, Number, Revision, Secret, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::planted;
use leasehold_protocol::shard::{check_key, check_label, check_reason};

use crate::blob::{Blob, Key, KeyRef};
use crate::digest;
use crate::memory::Kind;
use crate::retry::{RESERVED, check_acks, print_of_release};
use crate::state::{State, Step};
use crate::table::{Asked, Forced};

impl State {
    pub(crate) fn release(
        &mut self,
        step: &mut Step<'_>,
        caller: &Caller,
        key: &[u8],
        token: Token,
    ) -> Outcome {
        if let Err(code) = check_acks(caller).and(check_key(key).map(|_| ())) {
            return self.refusal(code, Token(0));
        }
        let print = print_of_release(key, token);
        let ticket = match self.admit(step, caller, Kind::Release, print) {
            Ok(ticket) => ticket,
            Err(outcome) => return outcome,
        };
        let mut held = (ticket.lease, token);
        // Planted (G2): whatever the token, the present holder's hold ends.
        if planted!("stale-token-releases")
            && let Some((holder, hold)) =
                self.keys.get(&KeyRef::new(key)).and_then(|entry| entry.holds.first())
        {
            held = (*holder, hold.token);
        }
        let Some(key) = self.key_held_by(key, held.0, held.1) else {
            let present = self.present_token(key);
            return self.remember_refusal(step, ticket, ErrorCode::NOT_OWNER, present);
        };
        let acquire = Number(ticket.number.0.saturating_sub(RESERVED));
        let (acquire, outcome) = self.give_back(step, &key, held.0, acquire);
        // Who names the token has read the grant: its result needs no further acknowledgement.
        let (memory, sum) = self.memory_of(ticket.lease);
        memory.read_otherwise(ticket.lease, acquire, sum);
        self.remember(step, ticket, outcome)
    }

    /// Gives up one entry of a hold, that of this acquire if there is one: the hold ends with its
    /// last. Returns the acquire whose entry it was.
    pub(crate) fn give_back(
        &mut self,
        step: &mut Step<'_>,
        key: &Key,
        holder: LeaseId,
        acquire: Number,
    ) -> (Number, Outcome) {
        if let Some(left) = self.leave(step, key, holder, acquire) {
            return left;
        }
        let hold = self.end_hold(step, key, holder, (EndReason::Released, false));
        let (token, revision) = (hold.token, Revision(self.revision));
        (hold.number, Outcome::Released { token, revision })
    }

    /// Idempotent by token as far as the state can know: once the hold is over its own lease is
    /// gone too, and a retry is told `lease_dead`, which a client that asked to release takes as
    /// done.
    pub(crate) fn release_own(
        &mut self,
        step: &mut Step<'_>,
        lease: LeaseId,
        secret: &Secret,
        key: &[u8],
        token: Token,
    ) -> Outcome {
        let checked = check_key(key).and_then(|_| self.authenticate(lease, secret));
        if let Err(code) = checked {
            return self.refusal(code, Token(0));
        }
        let own = self.leases.get(&lease).is_some_and(|lease| lease.own);
        let Some(held) = self.key_held_by(key, lease, token).filter(|_| own) else {
            return self.refusal(ErrorCode::NOT_OWNER, self.present_token(key));
        };
        self.end_hold(step, &held, lease, (EndReason::Released, false));
        Outcome::Released { token, revision: Revision(self.revision) }
    }

    pub(crate) fn force_release(
        &mut self,
        step: &mut Step<'_>,
        key: &[u8],
        token: Token,
        (who, why): (&[u8], &[u8]),
        now: bool,
    ) -> Outcome {
        let checked = check_key(key).and(check_label(who)).and(check_reason(why));
        if let Err(code) = checked {
            return self.refusal(code, Token(0));
        }
        let Some((key, holder, forced)) = self.hold_of(key, token) else {
            return self.refusal(ErrorCode::NOT_OWNER, self.present_token(key));
        };
        if now {
            self.raise_version(holder);
            let reason = EndReason::Forced { who: who.to_vec(), why: why.to_vec() };
            self.end_hold(step, &key, holder, (reason, false));
        } else if forced.is_none() {
            let forced = Forced { who: Blob::new(who), why: Blob::new(why) };
            self.mark_forced(step, &key, holder, forced);
        }
        Outcome::Forced { token, passed_on: now, revision: Revision(self.revision) }
    }

    /// Takes a hold out of renewal: whoever reads it may not extend it any more.
    fn mark_forced(&mut self, step: &mut Step<'_>, key: &Key, holder: LeaseId, forced: Forced) {
        self.raise(step);
        // Planted (G1): the holder is not made to read its holds, and goes on extending this one.
        if !planted!("force-keeps-the-version") {
            self.raise_version(holder);
        }
        let entry = self.keys.entry_mut(key).expect("a held key is in the table");
        let hold = entry.holds.get_mut(&holder).expect("the caller knows the hold");
        let (who, why) = (forced.who.as_slice().to_vec(), forced.why.as_slice().to_vec());
        self.sum.sub(digest::hold(key, holder, hold));
        hold.forced = Some(Rc::new(forced));
        self.sum.add(digest::hold(key, holder, hold));
        let token = hold.token;
        self.forced.insert(token.0, (key.clone(), holder));
        let event = EventKind::ForcedPending { key: key.to_vec(), lease: holder, token, who, why };
        self.emit(step, event);
    }

    pub(crate) fn end_forced(&mut self, step: &mut Step<'_>, key: &[u8], token: Token) -> Outcome {
        let Some((key, holder, Some(forced))) = self.hold_of(key, token) else {
            return self.refusal(ErrorCode::NOT_OWNER, self.present_token(key));
        };
        let who = forced.who.as_slice().to_vec();
        let why = forced.why.as_slice().to_vec();
        self.end_hold(step, &key, holder, (EndReason::Forced { who, why }, true));
        Outcome::Forced { token, passed_on: true, revision: Revision(self.revision) }
    }

    fn raise_version(&mut self, lease: LeaseId) {
        self.edit_lease(lease, |lease, _| lease.version += 1);
    }

    /// The hold of a key under a token: shared key, holder, and how it was asked for last.
    pub(crate) fn asked_of(
        &self,
        key: &[u8],
        token: Token,
    ) -> Option<(Key, LeaseId, Option<Rc<Asked>>)> {
        let (key, entry) = self.keys.get_entry(&KeyRef::new(key))?;
        let (holder, hold) = entry.hold_of_token(token)?;
        Some((key.clone(), holder, hold.asked.clone()))
    }

    pub(crate) fn present_token(&self, key: &[u8]) -> Token {
        self.keys.get(&KeyRef::new(key)).map_or(Token(0), |entry| entry.present_token())
    }

    /// The shared key, if this lease holds it under this token.
    pub(crate) fn key_held_by(&self, key: &[u8], lease: LeaseId, token: Token) -> Option<Key> {
        let (key, entry) = self.keys.get_entry(&KeyRef::new(key))?;
        (entry.holds.get(&lease)?.token == token).then(|| key.clone())
    }

    /// The hold of a key under a token: shared key, holder, and how it is forced.
    fn hold_of(&self, key: &[u8], token: Token) -> Option<(Key, LeaseId, Option<Rc<Forced>>)> {
        let (key, entry) = self.keys.get_entry(&KeyRef::new(key))?;
        let mut found = entry.hold_of_token(token);
        // Planted (section 4 of the design): a retry of a forced release hits the next holder.
        if planted!("force-hits-any-token") {
            found = entry.holds.first().map(|(holder, hold)| (*holder, hold));
        }
        let (holder, hold) = found?;
        Some((key.clone(), holder, hold.forced.clone()))
    }
}
