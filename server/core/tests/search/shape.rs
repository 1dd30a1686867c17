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

use std::collections::BTreeSet;

use leasehold_core::{Kind, Remembered};
use leasehold_protocol::outcome::Outcome;

use crate::check::View;
use crate::moves::slots;
use crate::world::{Body, How, KEYS, SLOT, Session, World};

const FNV_START: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const FNV_PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;

/// 128 bits are enough that two shapes never share a hash by chance.
pub(crate) fn of(world: &World, view: &View) -> u128 {
    let live = world.sessions.iter().filter(|session| session.live);
    let members: Vec<_> = live.map(|session| Member::new(world, view, session)).collect();
    let holders = KEYS.map(|key| {
        let holder = view.keys.get(key.as_bytes())?.holder.as_ref()?;
        let own = members.iter().all(|member| member.session.id != holder.lease);
        Some(Holder { token: holder.token, own, forced: holder.forced })
    });
    let straight = Shape { members: &members, holders, order: [0, 1] }.bytes();
    let crossed = Shape { members: &members, holders, order: [1, 0] }.bytes();
    let least = straight.min(crossed);
    least.iter().fold(FNV_START, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(FNV_PRIME))
}

#[derive(Clone, Copy)]
struct Holder {
    token: u64,
    own: bool,
    forced: bool,
}

/// A live session with what the state says of it.
struct Member<'a> {
    session: &'a Session,
    memory: Vec<Remembered>,
    slots: BTreeSet<u64>,
    /// What it has of each key: nothing, the hold, or a place in its queue.
    roles: [u8; 2],
    /// The key that an acquire's number holds or waits for.
    claims: Vec<(u64, usize)>,
}

impl<'a> Member<'a> {
    fn new(world: &World, view: &View, session: &'a Session) -> Self {
        let lease = session.id;
        let mut roles = [0; 2];
        let mut claims = Vec::new();
        for (key, name) in KEYS.into_iter().enumerate() {
            let Some(entry) = view.keys.get(name.as_bytes()) else { continue };
            if entry.holder.as_ref().is_some_and(|holder| holder.lease == lease) {
                roles[key] = 1;
            }
            if let Some(place) = entry.queue.iter().position(|(waiter, _)| *waiter == lease) {
                roles[key] = 2 + place as u8;
                claims.push((entry.queue[place].1.0, key));
            }
        }
        for hold in world.state.holds(lease).expect("it is live").holds {
            let key = KEYS.iter().position(|key| key.as_bytes() == hold.key);
            claims.push((hold.number.0, key.expect("a known key")));
        }
        let memory = world.state.lease(lease).expect("it is live").memory().collect();
        Self { session, memory, slots: slots(world, session), roles, claims }
    }
}

/// One reading of the state, with its keys in one of both orders.
struct Shape<'a> {
    members: &'a [Member<'a>],
    holders: [Option<Holder>; 2],
    order: [usize; 2],
}

impl Shape<'_> {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(128);
        for key in self.order {
            bytes.push(match self.holders[key] {
                None => 0,
                Some(holder) => 1 | u8::from(holder.own) << 1 | u8::from(holder.forced) << 2,
            });
        }
        let mut members: Vec<_> = self.members.iter().map(|member| self.member(member)).collect();
        members.sort_unstable();
        for member in members {
            bytes.push(member.len() as u8);
            bytes.extend(member);
        }
        bytes
    }

    /// A key's number in this order.
    fn key(&self, key: usize) -> u8 {
        u8::from(self.order[0] != key)
    }

    fn member(&self, member: &Member<'_>) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(32);
        bytes.extend(self.order.map(|key| member.roles[key]));
        for slot in &member.slots {
            let passed = (member.session.floor + 1).saturating_sub(*slot).min(SLOT);
            bytes.push(0x80 | passed as u8);
            let claim = member.claims.iter().find(|(number, _)| number == slot);
            bytes.push(claim.map_or(0, |(_, key)| 1 + self.key(*key)));
            for number in *slot..*slot + SLOT {
                let known = member.memory.iter().find(|one| one.number.0 == number);
                self.number(member.session, number, known, &mut bytes);
            }
        }
        bytes
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
        bytes.push(kind(one.kind) << 2 | u8::from(one.keep) << 1 | u8::from(one.late));
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
        self.holders[key].is_some_and(|holder| holder.token == token)
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

/// A number for what a remembered command was.
pub(crate) fn kind(kind: Kind) -> u8 {
    match kind {
        Kind::Acquire => 1,
        Kind::Forestalled => 2,
        Kind::Cancel => 3,
        Kind::Release => 4,
        Kind::Convert => 5,
        Kind::SetValue => 6,
    }
}
