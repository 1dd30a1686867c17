//! Bounded exhaustive search over the real state machine: every sequence of commands of an
//! alphabet, up to a depth, with equal states merged.
//!
//! Breadth first. From each distinct state every move that makes sense there is tried
//! (`search/moves.rs`), on the state and on its copy out of a snapshot: both must answer alike, and
//! like the naive model. Each step is checked by rules of its own (`search/check.rs`) and by the
//! state's invariants, and each changed state goes through a snapshot. `search/shape.rs` says
//! when two states are merged, and why that is sound.
//!
//! No single alphabet goes deep: each profile leaves out something else. `SEARCH_DEPTH` sets the
//! depth of all profiles; a failing path is printed as a script for `tests/scripts`.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use leasehold_core::State;
use leasehold_protocol::event::Event;
use leasehold_protocol::outcome::Outcome;

#[path = "search/check.rs"]
mod check;
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

use check::View;
use moves::Class;
use world::{Move, Told, WALL_MS, World};

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
        Class::Force,
        Class::Nonsense,
    ],
    depth: 3,
};

/// Queues and hand-overs of clients that acknowledge at once, so that memories stay small.
const QUEUES: Profile = Profile {
    name: "queues and hand-overs",
    keys: 2,
    sessions: 3,
    slots: 2,
    eager: true,
    classes: &[Class::Own, Class::CancelOnly, Class::Force],
    depth: 5,
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
    depth: 6,
};

/// How a distinct state was reached first.
#[derive(Clone, Copy)]
struct Node {
    parent: usize,
    step: Move,
}

/// A changed state whose shape was not known when its level began.
struct Found {
    shape: u128,
    node: Node,
}

struct Failure {
    node: Node,
    text: String,
}

/// What one thread brings back from its part of a level.
#[derive(Default)]
struct Part {
    found: Vec<Found>,
    transitions: u64,
    unchanged: u64,
    failure: Option<Failure>,
}

struct Search<'a> {
    profile: &'a Profile,
    /// The first is the root and stands for no move.
    nodes: Vec<Node>,
    shapes: BTreeSet<u128>,
}

impl Search<'_> {
    fn path(&self, mut index: usize) -> Vec<Move> {
        let mut path = Vec::new();
        while index != 0 {
            path.push(self.nodes[index].step);
            index = self.nodes[index].parent;
        }
        path.reverse();
        path
    }

    fn root(&self) -> World {
        World::new(self.profile.sessions, self.profile.eager)
    }

    fn replay(&self, index: usize) -> World {
        let mut world = self.root();
        for step in self.path(index) {
            let told = world.step(step);
            world.step_model(&told).expect("it was checked when it was found");
        }
        world
    }

    fn expand_all(&self, nodes: std::ops::Range<usize>) -> Part {
        let mut part = Part::default();
        let mut parent = (0, self.root());
        for index in nodes {
            let node = self.nodes[index];
            if parent.0 != node.parent {
                parent = (node.parent, self.replay(node.parent));
            }
            let mut world = parent.1.clone();
            if index != 0 {
                let told = world.step(node.step);
                world.step_model(&told).expect("it was checked when it was found");
            }
            self.expand(index, &world, &mut part);
            if part.failure.is_some() {
                break;
            }
        }
        part
    }

    fn expand(&self, index: usize, world: &World, part: &mut Part) {
        let view = View::of(&world.state).expect("it was checked when it was found");
        let copy = world.through_snapshot().expect("it was checked when it was found");
        for step in moves::moves(world, self.profile) {
            part.transitions += 1;
            let node = Node { parent: index, step };
            let tried = catch_unwind(AssertUnwindSafe(|| try_move(world, &view, &copy, step)));
            match tried {
                Ok(Ok(None)) => part.unchanged += 1,
                Ok(Ok(Some(shape))) => {
                    if !self.shapes.contains(&shape) {
                        part.found.push(Found { shape, node });
                    }
                }
                Ok(Err(text)) => return part.failure = Some(Failure { node, text }),
                Err(panic) => {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text =
                        text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
                    let text = format!("panic: {}", text.unwrap_or_default());
                    return part.failure = Some(Failure { node, text });
                }
            }
        }
    }

    /// One level on as many threads as there are cores, in an order that does not depend on them.
    fn level(&self, nodes: std::ops::Range<usize>) -> Vec<Part> {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let size = nodes.len().div_ceil(threads).max(1);
        let chunks: Vec<_> = nodes.clone().step_by(size).collect();
        thread::scope(|scope| {
            let running: Vec<_> = chunks
                .into_iter()
                .map(|start| {
                    let end = nodes.end.min(start + size);
                    scope.spawn(move || self.expand_all(start..end))
                })
                .collect();
            running.into_iter().map(|thread| thread.join().expect("a searcher")).collect()
        })
    }

    fn fail(&self, depth: usize, failure: &Failure) -> ! {
        let mut path = self.path(failure.node.parent);
        path.push(failure.node.step);
        let script = script::of(self.root(), &path);
        let name = self.profile.name;
        panic!("{name}, depth {depth}: {}\n\n{script}", failure.text)
    }
}

/// Takes one step and checks it; gives the new state's shape if anything changed.
fn try_move(
    former: &World,
    before: &View,
    copy: &State,
    step: Move,
) -> Result<Option<u128>, String> {
    let mut world = former.clone();
    let told = world.step(step);
    let after = View::of(&world.state)?;
    check::step(former, before, &world, &after, (step, &told))?;
    behaves_alike(copy, &world, &told)?;
    world.step_model(&told)?;
    if after.digest == before.digest {
        return Ok(None);
    }
    world.through_snapshot()?;
    Ok(Some(shape::of(&world, &after)))
}

/// The copy out of a snapshot answers the next command as the state itself did.
fn behaves_alike(copy: &State, world: &World, told: &Told) -> Result<(), String> {
    let mut copy = copy.clone();
    let mut events: Vec<Event> = Vec::new();
    let outcome: Outcome = copy.apply(WALL_MS, &told.command, &mut events);
    if outcome != told.outcome || events != told.events {
        return Err(format!("out of a snapshot: {outcome:?} {events:?}, not {:?}", told.outcome));
    }
    if copy.digest() != world.state.digest() {
        return Err("out of a snapshot: another digest".to_owned());
    }
    Ok(())
}

fn search(profile: &Profile) {
    let depth = std::env::var("SEARCH_DEPTH").ok().and_then(|text| text.parse().ok());
    let depth: usize = depth.unwrap_or(profile.depth);
    let root = Node { parent: 0, step: Move::Open };
    let mut search = Search { profile, nodes: vec![root], shapes: BTreeSet::new() };
    let world = search.root();
    search.shapes.insert(shape::of(&world, &View::of(&world.state).expect("a sound root")));
    let mut frontier = 0..1;
    let (mut transitions, mut unchanged) = (0, 0);
    println!("{}: {} keys, {} sessions", profile.name, profile.keys, profile.sessions);
    for level in 1..=depth {
        let parts = search.level(frontier.clone());
        frontier.start = frontier.end;
        for part in parts {
            transitions += part.transitions;
            unchanged += part.unchanged;
            for found in part.found {
                if search.shapes.insert(found.shape) {
                    search.nodes.push(found.node);
                }
            }
            if let Some(failure) = part.failure {
                search.fail(level, &failure);
            }
        }
        frontier.end = search.nodes.len();
        let states = search.nodes.len();
        let merged = transitions - unchanged + 1 - states as u64;
        println!(
            "  depth {level}: {} new states, {states} in all; {transitions} transitions, \
             {unchanged} without a change, {merged} merged",
            frontier.len()
        );
        if frontier.is_empty() {
            println!("  complete: no further state exists");
            break;
        }
    }
}

#[test]
fn the_whole_alphabet() {
    search(&WHOLE);
}

#[test]
fn queues_and_hand_overs() {
    search(&QUEUES);
}

#[test]
fn memory_and_floors() {
    search(&MEMORY);
}
