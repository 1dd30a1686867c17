//! The same search for modes, several keys, re-entry, lock-delays and what else a hold can have.
//!
//! Most of its clients acknowledge at once and never retry, so no command's outcome depends on retry
//! memory, and the shape of a state is what its keys show; those of two profiles read late, cancel
//! before they acquire and send everything again (`memory`). Every command of a
//! profile's alphabet that makes sense is tried on the state, on its copy out of a snapshot and on
//! the naive model; `rules` checks each step by itself. States are kept whole: the clones share
//! what they have in common.

mod memory;
mod moves;
mod rules;
mod shape;
mod world;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use leasehold_protocol::command::Command;
use leasehold_protocol::ids::Mode;
use leasehold_protocol::outcome::Outcome;

use rules::View;
use world::World;

/// One key of a request: which, how, and of how many permits.
pub(crate) type Part = (&'static str, Mode, u32);

/// An acquire that clients send.
#[derive(Clone, Copy)]
pub(crate) struct Ask {
    parts: &'static [Part],
    /// It waits, or decides at once.
    wait: bool,
    reentrant: bool,
    delay_ms: u32,
}

impl Ask {
    const fn waiting(parts: &'static [Part]) -> Self {
        Self { parts, wait: true, reentrant: false, delay_ms: 0 }
    }

    const fn at_once(parts: &'static [Part]) -> Self {
        Self { wait: false, ..Self::waiting(parts) }
    }

    const fn again(parts: &'static [Part]) -> Self {
        Self { reentrant: true, ..Self::waiting(parts) }
    }

    const fn delayed(parts: &'static [Part]) -> Self {
        Self { delay_ms: 5_000, ..Self::waiting(parts) }
    }
}

/// What beside acquiring, releasing, cancelling and dying.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Also {
    Convert,
    /// Limits from 1 to 3.
    Limits,
    /// The ends of delays, also of those that are over.
    Delays,
    Force,
    TimeOut,
    ReleaseAll,
    Values,
}

pub(crate) struct Profile {
    name: &'static str,
    keys: &'static [&'static str],
    sessions: usize,
    asks: &'static [Ask],
    also: &'static [Also],
    /// Clients raise floors and acknowledge by themselves, retry, and cancel what is to come.
    reads_late: bool,
    depth: usize,
    /// Command and outcome, or what was seen, that must have come up by then.
    required: &'static [&'static str],
}

const X: Mode = Mode::EXCLUSIVE;
const S: Mode = Mode::SHARED;
const P1: Mode = Mode::permits(1);
const P2: Mode = Mode::permits(2);

const LOCK: Profile = Profile {
    name: "readers, writers and conversions",
    keys: &["k"],
    sessions: 3,
    asks: &[
        Ask::waiting(&[("k", X, 0)]),
        Ask::waiting(&[("k", S, 0)]),
        Ask::at_once(&[("k", S, 0)]),
    ],
    also: &[Also::Convert, Also::Force],
    reads_late: false,
    depth: 10,
    required: &[
        "acquire: granted",
        "acquire: held",
        "acquire: queued",
        "convert: changed",
        "convert: granted",
        "convert: hold_forced",
        "convert: upgrade_conflict",
        "seen: an upgrade past a queue",
        "seen: several grants in a step",
    ],
};

const POOL: Profile = Profile {
    name: "permits and their limit",
    keys: &["p"],
    sessions: 3,
    asks: &[
        Ask::waiting(&[("p", P1, 2)]),
        Ask::waiting(&[("p", P2, 2)]),
        Ask::at_once(&[("p", P1, 3)]),
        Ask::at_once(&[("p", X, 0)]),
    ],
    also: &[Also::Limits],
    reads_late: false,
    depth: 9,
    required: &[
        "acquire: granted",
        "acquire: held",
        "acquire: limit_mismatch",
        "acquire: mode_mismatch",
        "acquire: queued",
        "seen: a wait above a lowered limit ends",
        "seen: several grants in a step",
        "set_limit: changed",
        "set_limit: not_in_use",
    ],
};

const AGAIN: Profile = Profile {
    name: "re-entry",
    keys: &["k"],
    sessions: 2,
    asks: &[Ask::again(&[("k", X, 0)]), Ask::again(&[("k", S, 0)]), Ask::waiting(&[("k", X, 0)])],
    also: &[Also::Convert, Also::Force, Also::ReleaseAll],
    reads_late: false,
    depth: 8,
    required: &[
        "acquire: already_held",
        "acquire: granted",
        "acquire: hold_forced",
        "acquire: queued",
        "convert: hold_reentered",
        "release: changed",
        "release: released",
        "release_all: changed",
        "release_all: released",
    ],
};

const DELAY: Profile = Profile {
    name: "lock-delays",
    keys: &["k", "p"],
    sessions: 2,
    asks: &[
        Ask::delayed(&[("k", X, 0)]),
        Ask::delayed(&[("k", S, 0)]),
        Ask::at_once(&[("k", S, 0)]),
        Ask::delayed(&[("p", P1, 2)]),
        Ask::at_once(&[("p", P2, 2)]),
    ],
    also: &[Also::Convert, Also::Delays, Also::Force],
    reads_late: false,
    depth: 6,
    required: &[
        "acquire: delayed",
        "acquire: granted",
        "acquire: queued",
        "convert: delayed",
        "end_delay: changed",
        "end_delay: not_delayed",
        "seen: a delay ends and lets waiters in",
    ],
};

const SEVERAL: Profile = Profile {
    name: "several keys at once",
    keys: &["k", "m", "p"],
    sessions: 3,
    asks: &[
        Ask::waiting(&[("k", X, 0), ("m", X, 0)]),
        Ask::waiting(&[("m", S, 0), ("p", P1, 1)]),
        Ask::at_once(&[("p", P1, 1), ("k", S, 0)]),
        Ask::waiting(&[("k", S, 0)]),
        Ask::waiting(&[("m", X, 0)]),
    ],
    also: &[Also::ReleaseAll, Also::TimeOut],
    reads_late: false,
    depth: 6,
    required: &[
        "acquire: already_held",
        "acquire: already_queued",
        "acquire: granted",
        "acquire: held",
        "acquire: queued",
        "cancel: cancelled",
        "release_all: released",
        "seen: a free key that waits for another",
        "seen: a hand-over of several keys",
        "seen: several grants in a step",
        "time_out: timed_out",
    ],
};

const VALUES: Profile = Profile {
    name: "values and requests to yield",
    keys: &["k"],
    sessions: 2,
    asks: &[Ask::waiting(&[("k", X, 0)]), Ask::waiting(&[("k", S, 0)])],
    also: &[Also::Values, Also::Convert, Also::Force],
    reads_late: false,
    depth: 7,
    required: &[
        "ask_yield: changed",
        "ask_yield: not_owner",
        "set_value: changed",
        "set_value: not_owner",
    ],
};

/// One lock in two modes, and all that can be late.
const LATE: Profile = Profile {
    name: "memory of readers and writers",
    keys: &["k"],
    sessions: 2,
    asks: &[Ask::waiting(&[("k", X, 0)]), Ask::waiting(&[("k", S, 0)])],
    also: &[],
    reads_late: true,
    depth: 5,
    required: &[
        "acquire: cancelled",
        "acquire: number_below_floor",
        "cancel: cancelled",
        "cancel: granted",
        "cancel: number_below_floor",
        "cancel: released",
        "release: released",
        "seen: a retry of a grant",
        "seen: a retry that waits",
    ],
};

/// The same of acquires of two keys.
const LATE_SEVERAL: Profile = Profile {
    name: "memory of several keys",
    keys: &["k", "m"],
    sessions: 2,
    asks: &[Ask::waiting(&[("k", X, 0), ("m", X, 0)]), Ask::waiting(&[("m", S, 0)])],
    also: &[],
    reads_late: true,
    depth: 5,
    required: &[
        "acquire: cancelled",
        "acquire: number_below_floor",
        "cancel: cancelled",
        "cancel: granted",
        "cancel: released",
        "release_all: released",
        "seen: a hand-over of several keys",
        "seen: a retry of a grant",
        "seen: a retry that waits",
    ],
};

/// A state to go on from, and the commands that lead to it.
struct Stand {
    world: World,
    depth: usize,
    path: Vec<Command>,
}

fn search(profile: &Profile) {
    let wanted = std::env::var("SEARCH_DEPTH").ok().and_then(|text| text.parse().ok());
    let depth = wanted.unwrap_or(profile.depth);
    let mut seen = BTreeMap::<String, u64>::new();
    let root = World::new(profile);
    let mut shapes = BTreeSet::from([shape::of(&root, profile)]);
    let mut stands = VecDeque::from([Stand { world: root, depth: 0, path: Vec::new() }]);
    let mut transitions = 0_u64;
    while let Some(stand) = stands.pop_front() {
        if stand.depth == depth {
            continue;
        }
        let before = View::of(&stand.world.state, profile);
        let copy = stand.world.through_snapshot().expect("it was found sound");
        for command in moves::moves(&stand.world, &before, profile) {
            transitions += 1;
            let tried = stand.world.step(&command, &copy).and_then(|(world, told)| {
                let after = View::of(&world.state, profile);
                rules::step((&before, &after), &command, &told)?;
                Ok((world, told, after))
            });
            let (world, told, after) = match tried {
                Ok(done) => done,
                Err(text) => {
                    let path: Vec<_> =
                        stand.path.iter().chain([&command]).map(|one| format!("{one:?}")).collect();
                    panic!("{}: {text}\n\n{}\n", profile.name, path.join("\n"));
                }
            };
            let name = format!("{}: {}", name_of(&command), outcome_of(&told.outcome));
            *seen.entry(name).or_default() += 1;
            for what in rules::seen((&before, &after), &command, &told) {
                *seen.entry(format!("seen: {what}")).or_default() += 1;
            }
            if shapes.insert(shape::of(&world, profile)) {
                let path = stand.path.iter().cloned().chain([command]).collect();
                stands.push_back(Stand { world, depth: stand.depth + 1, path });
            }
        }
    }
    println!(
        "{}: {} states, {transitions} transitions to depth {depth}",
        profile.name,
        shapes.len()
    );
    for (what, count) in &seen {
        println!("  {count:>8} {what}");
    }
    let missing: Vec<_> = profile.required.iter().filter(|one| !seen.contains_key(**one)).collect();
    assert!(missing.is_empty() || depth < profile.depth, "never came up: {missing:?}");
}

fn name_of(command: &Command) -> &'static str {
    match command {
        Command::AcquireAll { .. } => "acquire",
        Command::Cancel { .. } => "cancel",
        Command::Release { .. } => "release",
        Command::ReleaseAll { .. } => "release_all",
        Command::Convert { .. } => "convert",
        Command::SetLimit { .. } => "set_limit",
        Command::EndDelay { .. } => "end_delay",
        Command::SetValue { .. } => "set_value",
        Command::AskYield { .. } => "ask_yield",
        Command::ForceRelease { .. } => "force",
        Command::EndForced { .. } => "end_forced",
        Command::TimeOut { .. } => "time_out",
        Command::Expire { .. } => "expire",
        Command::Open { .. } => "open",
        other => unreachable!("no profile sends {other:?}"),
    }
}

fn outcome_of(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Opened { .. } => "opened",
        Outcome::Granted(_) => "granted",
        Outcome::Queued { .. } => "queued",
        Outcome::Cancelled { .. } => "cancelled",
        Outcome::TimedOut { .. } => "timed_out",
        Outcome::Released { .. } => "released",
        Outcome::Closed { .. } => "closed",
        Outcome::Forced { .. } => "forced",
        Outcome::Begun { .. } => "begun",
        Outcome::Changed { .. } => "changed",
        Outcome::Members { .. } => "members",
        Outcome::Refused { code, .. } => code.name(),
    }
}

#[test]
fn readers_writers_and_conversions() {
    search(&LOCK);
}

#[test]
fn permits_and_their_limit() {
    search(&POOL);
}

#[test]
fn re_entry() {
    search(&AGAIN);
}

#[test]
fn lock_delays() {
    search(&DELAY);
}

#[test]
fn several_keys_at_once() {
    search(&SEVERAL);
}

#[test]
fn memory_of_readers_and_writers() {
    search(&LATE);
}

#[test]
fn memory_of_several_keys() {
    search(&LATE_SEVERAL);
}

#[test]
fn values_and_requests_to_yield() {
    search(&VALUES);
}
