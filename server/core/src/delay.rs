//! Lock-delays, and the size of semaphores: what keeps a place from being given away although
//! nobody holds it, and how many places there are.
//!
//! A hold that asked for a lock-delay and is lost leaves its place behind: a *ghost* of its mode
//! and with its slots, under its token. So it keeps out exactly what the hold kept out. The state
//! knows no time; the leader ends each delay by a command that names the loss, so that a late one
//! cannot end a newer delay.

use alloc::vec::Vec;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::EventKind;
use leasehold_protocol::ids::{LeaseId, Number, Revision, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::planted;
use leasehold_protocol::shard::{check_key, check_label, check_limit};

use crate::blob::{Key, KeyRef};
use crate::digest;
use crate::state::{State, Step};
use crate::table::{Ghost, Hold};

impl State {
    /// Leaves a lost hold's place taken. The hold is out of its key, its slots are given back.
    pub(crate) fn begin_delay(&mut self, step: &mut Step<'_>, key: &Key, hold: &Hold) {
        let (token, delay_ms) = (hold.token, hold.delay_ms);
        let ghost = Ghost { mode: hold.mode, slots: hold.slots.clone(), delay_ms };
        self.sum.add(digest::ghost(key, token, &ghost));
        self.claims += 1;
        self.delays.insert(token.0, (key.clone(), delay_ms));
        let entry = self.keys.entry_mut(key).expect("a held key is in the table");
        entry.taken.put(ghost.slots.as_slice());
        entry.ghosts.insert(token.0, ghost);
        self.emit(step, EventKind::DelayBegan { key: key.to_vec(), token, delay_ms });
    }

    pub(crate) fn end_delay(&mut self, step: &mut Step<'_>, key: &[u8], token: Token) -> Outcome {
        let found = self.keys.get_entry(&KeyRef::new(key));
        let mut token = token;
        // Planted (G3): a late end hits the delay that is there now.
        if planted!("stale-end-of-delay")
            && let Some((present, _)) = found.and_then(|(_, entry)| entry.ghosts.first())
        {
            token = Token(*present);
        }
        let found = found.filter(|(_, entry)| entry.ghosts.get(&token.0).is_some());
        let Some(key) = found.map(|(key, _)| key.clone()) else {
            return self.refusal(ErrorCode::NOT_DELAYED, Token(0));
        };
        let revision = self.raise(step);
        let entry = self.keys.entry_mut(&key).expect("it was found");
        let ghost = entry.ghosts.remove(&token.0).expect("it was found");
        entry.taken.give_back(ghost.slots.as_slice());
        self.sum.sub(digest::ghost(&key, token, &ghost));
        self.claims -= 1;
        self.delays.remove(&token.0);
        self.emit(step, EventKind::DelayEnded { key: key.to_vec(), token });
        self.hand_over(step, &key);
        Outcome::Changed { token, revision }
    }

    pub(crate) fn set_limit(
        &mut self,
        step: &mut Step<'_>,
        key: &[u8],
        limit: u32,
        who: &[u8],
    ) -> Outcome {
        let checked = check_key(key).and(check_label(who)).and(check_limit(limit));
        if let Err(code) = checked {
            return self.refusal(code, Token(0));
        }
        let Some((key, entry)) = self.keys.get_entry(&KeyRef::new(key)) else {
            return self.refusal(ErrorCode::NOT_IN_USE, Token(0));
        };
        let (key, floor, former) = (key.clone(), entry.floor, entry.limit);
        if former == 0 {
            return self.refusal(ErrorCode::MODE_MISMATCH, Token(0));
        }
        if former != limit {
            self.raise(step);
            self.set_own(&key, floor, limit);
            let event = EventKind::LimitChanged { key: key.to_vec(), limit, who: who.to_vec() };
            self.emit(step, event);
            let mut keys = alloc::vec![key.clone()];
            self.refuse_waits_above(step, &key, limit, &mut keys);
            self.hand_over_all(step, keys);
        }
        Outcome::Changed { token: Token(0), revision: Revision(self.revision) }
    }

    /// Ends the waits that could never be served any more; passing on the keys that they waited for
    /// is the caller's to do.
    fn refuse_waits_above(
        &mut self,
        step: &mut Step<'_>,
        key: &Key,
        limit: u32,
        freed: &mut Vec<Key>,
    ) {
        let entry = self.keys.get(key).expect("the caller knows the key");
        let above = entry.queue.iter().filter(|(_, waiter)| {
            waiter.mode.permit_count().is_some_and(|permits| permits > limit)
        });
        let above: Vec<(LeaseId, Number)> =
            above.map(|(_, waiter)| (waiter.lease, waiter.number)).collect();
        for (lease, number) in above {
            let token = Token(limit.into());
            let outcome = self.refusal(ErrorCode::PERMITS_ABOVE_LIMIT, token);
            freed.extend(self.drop_wait(step, lease, number, outcome));
        }
    }
}
