//! Bounded exhaustive search over the real state machine: every sequence of commands of an
//! alphabet, up to a depth, with equal states merged.
//!
//! Breadth first. From each distinct state every move that makes sense there is tried
//! (`search/moves.rs`), on the state and on its copy out of a snapshot: both must answer alike, and
//! like the naive model. Each step is checked by rules of its own (`search/check.rs`) and by the
//! state's invariants, and each distinct state goes through a snapshot. `search/shape.rs` says
//! when two states are merged, and why that is sound.
//!
//! No single alphabet goes deep: each profile leaves out something else. `SEARCH_DEPTH` sets the
//! depth of all profiles; a failing path is printed as a script for `tests/scripts`.

#[path = "search/check.rs"]
mod check;
#[path = "search/cover.rs"]
mod cover;
#[path = "search/engine.rs"]
mod engine;
#[path = "search/members.rs"]
mod members;
#[path = "search/modes/mod.rs"]
mod modes;
#[path = "search/moves.rs"]
mod moves;
#[path = "model/naive.rs"]
mod naive;
#[path = "search/script.rs"]
mod script;
#[path = "search/shape.rs"]
mod shape;
#[path = "search/world.rs"]
mod world;

use cover::Situation;
use moves::Class;
use world::{Body, How, Move, World};

/// One search: how much of everything, and what the clients do.
struct Profile {
    name: &'static str,
    keys: usize,
    sessions: usize,
    /// Slots (acquire, cancel, release) of one session that may be remembered at a time.
    slots: usize,
    /// Each numbered command carries the highest floor and all acknowledgements.
    eager: bool,
    classes: &'static [Class],
    depth: usize,
    /// What must have come up by then.
    required: &'static [Situation],
}

/// Everything, not deep.
const WHOLE: Profile = Profile {
    name: "whole alphabet",
    keys: 2,
    sessions: 3,
    slots: 2,
    eager: false,
    classes: &[
        Class::Try,
        Class::Own,
        Class::CancelOnly,
        Class::CancelFirst,
        Class::WrongRelease,
        Class::Retry,
        Class::Conflict,
        Class::Acks,
        Class::Close,
        Class::Force,
        Class::Nonsense,
    ],
    depth: 4,
    required: &[
        ("acquire", "already_held"),
        ("acquire", "already_queued"),
        ("acquire", "cancelled"),
        ("acquire", "granted"),
        ("acquire", "held"),
        ("acquire", "lease_dead"),
        ("acquire", "number_below_floor"),
        ("acquire", "number_conflict"),
        ("acquire", "queued"),
        ("acquire", "timed_out"),
        ("cancel", "cancelled"),
        ("cancel", "granted"),
        ("cancel", "held"),
        ("cancel", "not_queued"),
        ("cancel", "number_conflict"),
        ("cancel", "released"),
        ("cancel", "timed_out"),
        ("close", "closed"),
        ("close", "lease_dead"),
        ("end_forced", "forced"),
        ("end_forced", "not_owner"),
        ("expire", "closed"),
        ("force", "forced"),
        ("force_now", "forced"),
        ("force_now", "not_owner"),
        ("open", "opened"),
        ("release", "not_owner"),
        ("release", "number_conflict"),
        ("release", "released"),
        ("release_own", "not_owner"),
        ("release_own", "released"),
        ("seen", "a hand-over to an own lease"),
        ("time_out", "not_queued"),
        ("time_out", "timed_out"),
    ],
};

/// Queues and hand-overs of clients that acknowledge at once, so that memories stay small.
const QUEUES: Profile = Profile {
    name: "queues and hand-overs",
    keys: 2,
    sessions: 3,
    slots: 2,
    eager: true,
    classes: &[Class::Own, Class::CancelOnly, Class::Force],
    depth: 6,
    required: &[
        ("acquire", "queued"),
        ("cancel", "cancelled"),
        ("end_forced", "forced"),
        ("expire", "closed"),
        ("force", "forced"),
        ("force_now", "forced"),
        ("open", "opened"),
        ("release", "released"),
        ("release_own", "released"),
        ("seen", "a hand-over at a lease's end"),
        ("seen", "a hand-over to an own lease"),
        ("time_out", "timed_out"),
    ],
};

/// One key, two clients: retries, cancels and floors in every order.
const MEMORY: Profile = Profile {
    name: "memory and floors",
    keys: 1,
    sessions: 2,
    slots: 2,
    eager: false,
    classes: &[
        Class::CancelOnly,
        Class::CancelFirst,
        Class::WrongRelease,
        Class::Retry,
        Class::Acks,
    ],
    depth: 7,
    required: &[
        ("acquire", "cancelled"),
        ("acquire", "number_below_floor"),
        ("acquire", "timed_out"),
        ("cancel", "cancelled"),
        ("cancel", "granted"),
        ("cancel", "not_queued"),
        ("cancel", "number_below_floor"),
        ("cancel", "released"),
        ("release", "not_owner"),
        ("release", "released"),
        ("seen", "a cancel below the floor"),
        ("seen", "a release below the floor"),
        ("seen", "a retry of a grant"),
        ("seen", "a retry that waits"),
    ],
};

/// Searches a profile; a run in which a required situation never came up is no pass.
fn run(profile: &Profile) {
    let wanted = std::env::var("SEARCH_DEPTH").ok().and_then(|text| text.parse().ok());
    let depth = wanted.unwrap_or(profile.depth);
    let seen = engine::search(profile, depth);
    for (subject, what) in &seen {
        println!("  {subject}: {what}");
    }
    let missing: Vec<_> = profile.required.iter().filter(|one| !seen.contains(one)).collect();
    assert!(missing.is_empty() || depth < profile.depth, "never came up: {missing:?}");
}

#[test]
fn the_whole_alphabet() {
    run(&WHOLE);
}

#[test]
fn queues_and_hand_overs() {
    run(&QUEUES);
}

#[test]
fn memory_and_floors() {
    run(&MEMORY);
}

/// The words are those of `tests/scripts`.
#[test]
fn a_path_prints_as_a_script() {
    let acquire = |key, how| Body::Acquire { key, how };
    let path = [
        Move::Send { who: 0, number: 1, body: acquire(0, How::Try) },
        Move::Send { who: 1, number: 1, body: acquire(0, How::Own) },
        Move::Send { who: 1, number: 1, body: acquire(0, How::Own) },
        Move::Ack { who: 1, floor: 3, all: true },
        Move::Force { key: 0, token: 101, now: false },
        Move::EndForced { key: 0, token: 101 },
        Move::ReleaseOwn { lease: 3, key: 0, token: 102 },
        Move::Open,
        Move::Send { who: 2, number: 2, body: Body::Cancel { release: true } },
        Move::Send { who: 0, number: 3, body: Body::Release { key: 0, token: 101 } },
        Move::TimeOut { who: 1, number: 1 },
        Move::Close { lease: 4 },
        Move::Expire { lease: 2 },
    ];
    let expected = "begin 100\nopen a\nopen b\n\
        acquire a 1 k\n\
        acquire b 1 k wait=60000 own=2000\n\
        acquire b 1 k wait=60000 own=2000\n\
        release b 0 k 0 floor=3 acks=1\n\
        force k 101 who=ops why=search\n\
        end-forced k 101\n\
        release-own #3 k 102\n\
        open c\n\
        cancel c 2 release\n\
        release a 3 k 101\n\
        time-out b 1\n\
        close c\n\
        expire b\n\
        ----\n";
    assert_eq!(script::of(World::new(2, false), &path), expected);
}
