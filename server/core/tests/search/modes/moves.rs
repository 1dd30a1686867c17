//! Every command of a profile's alphabet that the present state gives sense to.

use leasehold_protocol::command::{Caller, Command, Want};
use leasehold_protocol::ids::{LeaseId, Mode, Number, Token};

use super::rules::{Holder, View};
use super::world::{World, open};
use super::{Also, Ask, Profile, memory};
use crate::world::WAIT_MS;

pub(crate) fn moves(world: &World, view: &View, profile: &Profile) -> Vec<Command> {
    let mut list = Vec::new();
    if world.sessions.len() < profile.sessions {
        list.push(open());
    }
    for lease in world.sessions.keys().copied() {
        list.push(Command::Expire { lease });
        if profile.reads_late {
            memory::moves(world, profile, lease, &mut list);
            continue;
        }
        list.extend(profile.asks.iter().map(|ask| acquire(world.caller(lease, None), ask)));
        waits(world, view, profile, (lease, &mut list));
        holds(world, view, profile, (lease, &mut list));
    }
    for key in profile.keys {
        operator(view, profile, key, &mut list);
    }
    list
}

pub(crate) fn acquire(caller: Caller, ask: &Ask) -> Command {
    let wants = ask.parts.iter().map(|(key, mode, limit)| Want {
        key: key.as_bytes().to_vec(),
        mode: *mode,
        limit: *limit,
        reentrant: ask.reentrant,
    });
    Command::AcquireAll {
        caller,
        wants: wants.collect(),
        own: None,
        value: Vec::new(),
        wait_ms: if ask.wait { WAIT_MS } else { 0 },
        delay_ms: ask.delay_ms,
    }
}

fn waits(
    world: &World,
    view: &View,
    profile: &Profile,
    (lease, list): (LeaseId, &mut Vec<Command>),
) {
    let mut numbers: Vec<Number> = Vec::new();
    for key in view.keys.values() {
        numbers.extend(key.queue.iter().filter(|one| one.lease == lease).map(|one| one.number));
    }
    numbers.sort_unstable();
    numbers.dedup();
    for number in numbers {
        let caller = world.caller(lease, Some(number.0 + 1));
        list.push(Command::Cancel { caller, release_if_granted: true });
        if profile.also.contains(&Also::TimeOut) {
            list.push(Command::TimeOut { lease, number });
        }
    }
}

fn holds(
    world: &World,
    view: &View,
    profile: &Profile,
    (lease, list): (LeaseId, &mut Vec<Command>),
) {
    let also = |what| profile.also.contains(&what);
    let caller = || world.caller(lease, None);
    let mut acquires = Vec::new();
    for (name, entry) in &view.keys {
        let Some(Holder { token, number, .. }) =
            entry.holders.iter().find(|one| one.lease == lease)
        else {
            continue;
        };
        let key = || name.as_bytes().to_vec();
        acquires.push(*number);
        list.push(Command::Release { caller: caller(), key: key(), token: *token });
        if also(Also::Convert) {
            for mode in [Mode::EXCLUSIVE, Mode::SHARED] {
                list.push(Command::Convert { caller: caller(), key: key(), token: *token, mode });
            }
        }
        if also(Also::Values) {
            for (value, token) in [(b"a", *token), (b"b", *token), (b"a", Token(token.0 + 1))] {
                let value = value.to_vec();
                list.push(Command::SetValue { caller: caller(), key: key(), token, value });
            }
        }
    }
    acquires.sort_unstable();
    acquires.dedup();
    if also(Also::ReleaseAll) {
        let all = acquires.into_iter();
        list.extend(all.map(|acquire| Command::ReleaseAll { caller: caller(), acquire }));
    }
}

fn operator(view: &View, profile: &Profile, name: &str, list: &mut Vec<Command>) {
    let also = |what| profile.also.contains(&what);
    let key = || name.as_bytes().to_vec();
    let entry = view.keys.get(name).cloned().unwrap_or_default();
    let who = || b"ops".to_vec();
    if also(Also::Limits) {
        list.extend((1..=3).map(|limit| Command::SetLimit { key: key(), limit, who: who() }));
    }
    if also(Also::Delays) {
        let tokens = entry.delays.keys().copied();
        // That of a former loss, which comes late.
        let stale = entry.delays.keys().next().map_or(view.last_token, |token| token.0 - 1);
        let all: Vec<_> = tokens.chain([Token(stale)]).collect();
        list.extend(all.into_iter().map(|token| Command::EndDelay { key: key(), token }));
    }
    for Holder { token, forced, .. } in &entry.holders {
        let token = *token;
        if also(Also::Force) {
            let force = |now| {
                let (who, why) = (who(), b"search".to_vec());
                Command::ForceRelease { key: key(), token, who, why, now }
            };
            list.push(force(true));
            list.push(if *forced {
                Command::EndForced { key: key(), token }
            } else {
                force(false)
            });
        }
        if also(Also::Values) {
            for (why, token) in [(b"a", token), (b"b", token), (b"a", Token(token.0 + 1))] {
                let why = why.to_vec();
                list.push(Command::AskYield { key: key(), token, who: who(), why, within_ms: 1 });
            }
        }
    }
}
