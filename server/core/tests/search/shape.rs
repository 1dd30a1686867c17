//! When two states are the same for the search.
//!
//! The shape leaves out what the state machine only raises, copies and compares for equality:
//! the revision; version numbers; tokens, of which it keeps only "that of this key's present hold"
//! or "over"; lease ids and the places of queues, of which it keeps the order that matters; numbers
//! of requests, of which it keeps slot, offset and side of the floor. Sessions are interchangeable,
//! and so are keys. This is sound as long as the code treats those values so, for then equal shapes
//! have equal futures up to names; what a step itself does with the values is checked before its
//! result is merged. Limits of counters and tables lie far outside (scripts and model have them).
//! Two things that clients know are left out too, for they can only be refused without a change:
//! which leases are dead, and what was sent under numbers that the state has forgotten.

use leasehold_core::{Kind, Remembered};
use leasehold_protocol::ids::LeaseId;
use leasehold_protocol::outcome::Outcome;

use crate::check::View;
use crate::moves::slots;
use crate::world::{Body, How, KEYS, SLOT, Session, World};

const FNV_START: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const FNV_PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;

/// 128 bits are enough that two shapes never share a hash by chance.
pub(crate) fn of(world: &World, view: &View) -> u128 {
    let straight = Shape { world, view, order: [0, 1] }.bytes();
    let crossed = Shape { world, view, order: [1, 0] }.bytes();
    let least = straight.min(crossed);
    least.iter().fold(FNV_START, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(FNV_PRIME))
}

/// One reading of the state, with its keys in one of both orders.
struct Shape<'a> {
    world: &'a World,
    view: &'a View,
    order: [usize; 2],
}

impl Shape<'_> {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(128);
        for key in self.order {
            let holder = self.holder(key);
            bytes.push(match holder {
                None => 0,
                Some((lease, _, forced)) => 1 + u8::from(self.is_own(lease)) * 2 + u8::from(forced),
            });
        }
        let live = self.world.sessions.iter().filter(|session| session.live);
        let mut sessions: Vec<_> = live.map(|session| self.session(session)).collect();
        sessions.sort_unstable();
        for session in sessions {
            bytes.push(session.len() as u8);
            bytes.extend(session);
        }
        bytes
    }

    fn holder(&self, key: usize) -> Option<(LeaseId, u64, bool)> {
        let holder = self.view.keys.get(KEYS[key].as_bytes())?.holder.as_ref()?;
        Some((holder.lease, holder.token, holder.forced))
    }

    fn is_own(&self, lease: LeaseId) -> bool {
        self.world.sessions.iter().all(|session| session.id != lease)
    }

    /// A key's number in this order.
    fn key(&self, key: usize) -> u8 {
        u8::from(self.order[0] != key)
    }

    fn session(&self, session: &Session) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(32);
        for key in self.order {
            bytes.push(self.role(session.id, key));
        }
        let lease = self.world.state.lease(session.id).expect("it is live");
        let memory: Vec<_> = lease.memory().collect();
        for slot in slots(self.world, session) {
            let passed = (session.floor + 1).saturating_sub(slot).min(SLOT);
            bytes.push(0x80 | passed as u8);
            bytes.push(self.claim(session.id, slot));
            for number in slot..slot + SLOT {
                let known = memory.iter().find(|one| one.number.0 == number);
                self.number(session, number, known, &mut bytes);
            }
        }
        bytes
    }

    /// What a session has of a key: nothing, the hold, or a place in its queue.
    fn role(&self, lease: LeaseId, key: usize) -> u8 {
        let Some(entry) = self.view.keys.get(KEYS[key].as_bytes()) else { return 0 };
        if entry.holder.as_ref().is_some_and(|holder| holder.lease == lease) {
            return 1;
        }
        let place = entry.queue.iter().position(|(waiter, _)| *waiter == lease);
        place.map_or(0, |place| 2 + place as u8)
    }

    /// The key that an acquire's number holds or waits for.
    fn claim(&self, lease: LeaseId, number: u64) -> u8 {
        let Some(reply) = self.world.state.holds(lease) else { return 0 };
        if reply.waits.iter().any(|one| one.0 == number) {
            let waits = |key: &usize| {
                let entry = self.view.keys.get(KEYS[*key].as_bytes());
                entry.is_some_and(|entry| {
                    entry.queue.iter().any(|(waiter, one)| *waiter == lease && one.0 == number)
                })
            };
            return (0..KEYS.len()).find(waits).map_or(0, |key| 1 + self.key(key));
        }
        let hold = reply.holds.iter().find(|hold| hold.number.0 == number);
        let key = hold.and_then(|hold| KEYS.iter().position(|key| key.as_bytes() == hold.key));
        key.map_or(0, |key| 3 + self.key(key))
    }

    fn number(
        &self,
        session: &Session,
        number: u64,
        known: Option<&Remembered>,
        bytes: &mut Vec<u8>,
    ) {
        let sent = session.sent.get(&number).filter(|_| known.is_some() || number > session.floor);
        let Some(one) = known else { return bytes.push(u8::from(sent.is_some())) };
        let kind = match one.kind {
            Kind::Acquire => 1,
            Kind::Forestalled => 2,
            Kind::Cancel => 3,
            Kind::Release => 4,
            Kind::Convert => 5,
        };
        bytes.push(kind << 2 | u8::from(one.keep) << 1 | u8::from(one.late));
        bytes.push(self.outcome(one.outcome));
        match sent.map(|sent| sent.body) {
            None => bytes.push(0),
            Some(Body::Acquire { key, how }) => {
                let how = match how {
                    How::Try => 1,
                    How::Wait => 2,
                    How::Own => 3,
                };
                bytes.push(how << 1 | self.key(key));
            }
            Some(Body::Cancel { release }) => bytes.push(8 + u8::from(release)),
            Some(Body::Release { key, token }) => {
                let present = self.is_present(key, token);
                bytes.push(10 + self.key(key) * 2 + u8::from(present));
            }
        }
    }

    fn is_present(&self, key: usize, token: u64) -> bool {
        self.holder(key).is_some_and(|(_, present, _)| present == token)
    }

    fn outcome(&self, outcome: Option<Outcome>) -> u8 {
        match outcome {
            None => 0,
            Some(Outcome::Granted(grant)) => {
                let held = |key: &usize| self.is_present(*key, grant.token.0);
                (0..KEYS.len()).find(held).map_or(1, |key| 2 + self.key(key))
            }
            Some(Outcome::Cancelled { .. }) => 4,
            Some(Outcome::TimedOut { .. }) => 5,
            Some(Outcome::Released { .. }) => 6,
            Some(Outcome::Refused { code, .. }) => 7 + (code.0 % 200) as u8,
            Some(_) => 255,
        }
    }
}
