//! What may come next: every move of a profile's alphabet that the present state gives sense to.

use std::collections::BTreeSet;

use crate::Profile;
use crate::world::{Body, How, KEYS, Move, SLOT, Session, World, first_of_slot};

/// What a profile's clients do beside acquiring, cancelling, releasing and dying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// An acquire that does not wait.
    Try,
    /// An acquire with a lease of its own, and what such a lease can do.
    Own,
    /// A cancel that leaves a granted hold alone.
    CancelOnly,
    /// A cancel that comes before its acquire.
    CancelFirst,
    /// Releases with a wrong token, or by somebody who does not hold.
    WrongRelease,
    /// A command again under its number.
    Retry,
    /// Another body or another kind under a used number.
    Conflict,
    /// Floors and acknowledgements by themselves.
    Acks,
    /// Closing beside expiry, from which it differs by the reason alone.
    Close,
    /// Forced ends.
    Force,
    /// What must be refused whatever the state: wrong tokens, dead leases, nothing to end.
    Nonsense,
}

/// Slots of which a client still knows anything to repeat.
const SLOTS_KNOWN: u64 = 2;

struct Moves<'a> {
    world: &'a World,
    profile: &'a Profile,
    /// Holder's lease and token, and whether it is forced, by key.
    holders: Vec<Option<(u64, u64, bool)>>,
    list: Vec<Move>,
}

pub(crate) fn moves(world: &World, profile: &Profile) -> Vec<Move> {
    let holders = KEYS[..profile.keys].iter().map(|key| {
        let info = world.state.key_info(key.as_bytes());
        info.holders.first().map(|one| (one.lease.0, one.token.0, one.forced))
    });
    let mut moves = Moves { world, profile, holders: holders.collect(), list: Vec::new() };
    let live = world.sessions.iter().filter(|session| session.live).count();
    if live < profile.sessions {
        moves.list.push(Move::Open);
    }
    for (who, session) in world.sessions.iter().enumerate() {
        if session.live {
            moves.of_session(who, session);
        }
    }
    moves.of_own_leases();
    moves.of_operator();
    moves.nonsense();
    moves.list
}

impl Moves<'_> {
    fn has(&self, class: Class) -> bool {
        self.profile.classes.contains(&class)
    }

    fn send(&mut self, who: usize, number: u64, body: Body) {
        self.list.push(Move::Send { who, number, body });
    }

    fn of_session(&mut self, who: usize, session: &Session) {
        if slots(self.world, session).len() < self.profile.slots {
            self.acquires(who, session);
        }
        let known = session.next.saturating_sub(SLOTS_KNOWN * SLOT);
        for number in (known.max(1)..session.next).filter(|number| number % SLOT == 1) {
            self.of_slot(who, session, number);
        }
        self.releases(who, session);
        if self.has(Class::Acks) {
            self.acks(who, session);
        }
        let lease = session.id.0;
        self.list.push(Move::Expire { lease });
        if self.has(Class::Close) {
            self.list.push(Move::Close { lease });
        }
    }

    fn acquires(&mut self, who: usize, session: &Session) {
        let mut hows = vec![How::Wait];
        hows.extend(self.has(Class::Try).then_some(How::Try));
        hows.extend(self.has(Class::Own).then_some(How::Own));
        for key in 0..self.profile.keys {
            for how in &hows {
                self.send(who, session.next, Body::Acquire { key, how: *how });
            }
        }
        if self.has(Class::CancelFirst) {
            for release in [false, true] {
                self.send(who, session.next + 1, Body::Cancel { release });
            }
        }
        if self.has(Class::WrongRelease) {
            for key in 0..self.profile.keys {
                if let Some((lease, token, _)) = self.holders[key]
                    && lease != session.id.0
                {
                    self.send(who, session.next, Body::Release { key, token });
                }
            }
        }
    }

    /// What may follow in the slot of an acquire's number.
    fn of_slot(&mut self, who: usize, session: &Session, number: u64) {
        let acquire = session.sent.get(&number).map(|sent| sent.body);
        match acquire {
            Some(Body::Acquire { .. }) if !session.sent.contains_key(&(number + 1)) => {
                self.send(who, number + 1, Body::Cancel { release: true });
                if self.has(Class::CancelOnly) {
                    self.send(who, number + 1, Body::Cancel { release: false });
                }
            }
            None if session.sent.contains_key(&(number + 1)) => {
                self.send(who, number, Body::Acquire { key: 0, how: How::Wait });
            }
            _ => {}
        }
        let waits = self
            .world
            .state
            .holds(session.id)
            .is_some_and(|reply| reply.waits.iter().any(|waiting| waiting.0 == number));
        if waits || (self.has(Class::Nonsense) && acquire.is_some()) {
            self.list.push(Move::TimeOut { who, number });
        }
        for (number, sent) in session.sent.range(number..number + SLOT) {
            if self.has(Class::Retry) {
                self.send(who, *number, sent.body);
            }
            if self.has(Class::Conflict) {
                self.send(who, *number, another(sent.body, self.profile.keys));
                self.send(who, *number, another_kind(sent.body));
            }
        }
    }

    fn releases(&mut self, who: usize, session: &Session) {
        let Some(reply) = self.world.state.holds(session.id) else { return };
        for hold in reply.holds {
            let number = hold.number.0 + 2;
            if session.sent.contains_key(&number) {
                continue;
            }
            let key = KEYS.iter().position(|key| key.as_bytes() == hold.key).expect("a known key");
            self.send(who, number, Body::Release { key, token: hold.token.0 });
            if self.has(Class::WrongRelease) {
                self.send(who, number, Body::Release { key, token: hold.token.0 - 1 });
            }
        }
    }

    /// The floor at the last acquire, at its slot's end, and there with everything acknowledged.
    fn acks(&mut self, who: usize, session: &Session) {
        let end = session.next - 1;
        for floor in [end.saturating_sub(2), end] {
            if floor > session.floor {
                self.list.push(Move::Ack { who, floor, all: false });
            }
        }
        let memory = self.world.state.lease(session.id).expect("it is live").memory();
        if memory.into_iter().any(|one| one.keep || one.late) {
            self.list.push(Move::Ack { who, floor: end, all: true });
        }
    }

    fn of_own_leases(&mut self) {
        for key in 0..self.profile.keys {
            let Some((lease, token, _)) = self.holders[key] else { continue };
            if self.world.sessions.iter().any(|session| session.id.0 == lease) {
                continue;
            }
            self.list.push(Move::ReleaseOwn { lease, key, token });
            self.list.push(Move::Expire { lease });
            if self.has(Class::Nonsense) {
                self.list.push(Move::ReleaseOwn { lease, key, token: token - 1 });
                self.list.push(Move::Close { lease });
            }
        }
    }

    fn of_operator(&mut self) {
        if !self.has(Class::Force) {
            return;
        }
        for key in 0..self.profile.keys {
            let Some((_, token, forced)) = self.holders[key] else { continue };
            self.list.push(Move::Force { key, token, now: true });
            if !forced || self.has(Class::Nonsense) {
                self.list.push(Move::Force { key, token, now: false });
            }
            if forced || self.has(Class::Nonsense) {
                self.list.push(Move::EndForced { key, token });
            }
        }
    }

    fn nonsense(&mut self) {
        if !self.has(Class::Nonsense) {
            return;
        }
        for key in 0..self.profile.keys {
            let token = self.world.state.last_token().0 + 1;
            self.list.push(Move::Force { key, token, now: true });
        }
        let mut sessions = self.world.sessions.iter().enumerate();
        if let Some((who, dead)) = sessions.rfind(|(_, session)| !session.live) {
            let lease = dead.id.0;
            self.list.extend([Move::Close { lease }, Move::Expire { lease }]);
            self.send(who, dead.next, Body::Acquire { key: 0, how: How::Wait });
        }
    }
}

fn another(body: Body, keys: usize) -> Body {
    match body {
        Body::Acquire { key, how } if keys > 1 => Body::Acquire { key: 1 - key, how },
        Body::Acquire { key, how: How::Wait } => Body::Acquire { key, how: How::Try },
        Body::Acquire { key, .. } => Body::Acquire { key, how: How::Wait },
        Body::Cancel { release } => Body::Cancel { release: !release },
        Body::Release { key, token } => Body::Release { key, token: token + 1 },
    }
}

fn another_kind(body: Body) -> Body {
    match body {
        Body::Acquire { .. } | Body::Release { .. } => Body::Cancel { release: true },
        Body::Cancel { .. } => Body::Acquire { key: 0, how: How::Wait },
    }
}

/// The slots of which anything is left: numbers above the floor, remembered ones, holds, waits.
pub(crate) fn slots(world: &World, session: &Session) -> BTreeSet<u64> {
    let sent = session.sent.keys().copied().filter(|number| *number > session.floor);
    let mut numbers: BTreeSet<u64> = sent.map(first_of_slot).collect();
    if let Some(view) = world.state.lease(session.id) {
        numbers.extend(view.memory().map(|one| first_of_slot(one.number.0)));
    }
    if let Some(reply) = world.state.holds(session.id) {
        numbers.extend(reply.holds.iter().map(|hold| hold.number.0));
        numbers.extend(reply.waits.iter().map(|number| number.0));
    }
    numbers
}
