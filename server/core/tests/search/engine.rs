//! The search itself: breadth first, level by level, on as many threads as there are cores.
//!
//! What it finds does not depend on the threads: each takes its own stretch of a level, and the
//! parts are put together in order. States hold pointers that threads cannot share, so a state is
//! kept as the path that leads to it.

use std::collections::BTreeSet;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use leasehold_core::State;

use crate::Profile;
use crate::check::{self, View};
use crate::cover::{Situation, cover};
use crate::moves::moves;
use crate::world::{Move, Told, WALL_MS, World};
use crate::{script, shape};

/// How a distinct state was reached first.
#[derive(Clone, Copy)]
struct Node {
    parent: usize,
    step: Move,
}

/// A state to go on from.
struct Stand {
    index: usize,
    world: World,
    view: View,
    /// The state out of a snapshot.
    copy: State,
}

/// What one thread brings back from its part of a level.
#[derive(Default)]
struct Part {
    /// Changed states whose shape was not known when the level began.
    found: Vec<(u128, Node)>,
    transitions: u64,
    unchanged: u64,
    seen: BTreeSet<Situation>,
    failure: Option<(Node, String)>,
}

struct Search<'a> {
    profile: &'a Profile,
    /// The first is the root and stands for no move.
    nodes: Vec<Node>,
    shapes: BTreeSet<u128>,
    transitions: u64,
    unchanged: u64,
    seen: BTreeSet<Situation>,
}

/// Searches to this depth, or until there is nothing new; panics with the script of a path on
/// which anything is wrong. Gives what was met.
pub(crate) fn search(profile: &Profile, depth: usize) -> BTreeSet<Situation> {
    println!("{}: {} keys, {} sessions", profile.name, profile.keys, profile.sessions);
    let mut search = Search {
        profile,
        nodes: vec![Node { parent: 0, step: Move::Open }],
        shapes: BTreeSet::new(),
        transitions: 0,
        unchanged: 0,
        seen: BTreeSet::new(),
    };
    let root = search.root();
    search.shapes.insert(shape::of(&root, &View::of(&root.state).expect("a sound root")));
    let mut level = 0..1;
    for depth in 1..=depth {
        let parts = search.expand_level(level.clone());
        level.start = level.end;
        for part in parts {
            search.take(part, depth);
        }
        level.end = search.nodes.len();
        search.report(depth, level.len());
        if level.is_empty() {
            println!("  complete: no further state exists");
            break;
        }
    }
    search.seen
}

impl Search<'_> {
    fn root(&self) -> World {
        World::new(self.profile.sessions, self.profile.eager)
    }

    fn path(&self, mut index: usize) -> Vec<Move> {
        let mut path = Vec::new();
        while index != 0 {
            path.push(self.nodes[index].step);
            index = self.nodes[index].parent;
        }
        path.reverse();
        path
    }

    fn expand_level(&self, nodes: Range<usize>) -> Vec<Part> {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let size = nodes.len().div_ceil(threads).max(1);
        let starts: Vec<_> = nodes.clone().step_by(size).collect();
        thread::scope(|scope| {
            let stretch = |start| start..nodes.end.min(start + size);
            let spawn = |start| scope.spawn(move || self.expand_stretch(start));
            let running: Vec<_> = starts.into_iter().map(stretch).map(spawn).collect();
            running.into_iter().map(|thread| thread.join().expect("a searcher")).collect()
        })
    }

    /// Neighbours mostly have one parent, so that most replays are one step long.
    fn expand_stretch(&self, nodes: Range<usize>) -> Part {
        let mut part = Part::default();
        let mut parent = (0, self.root());
        for index in nodes {
            let node = self.nodes[index];
            if parent.0 != node.parent {
                let mut world = self.root();
                self.path(node.parent).into_iter().for_each(|step| replay(&mut world, step));
                parent = (node.parent, world);
            }
            let mut world = parent.1.clone();
            if index != 0 {
                replay(&mut world, node.step);
            }
            self.expand(index, world, &mut part);
            if part.failure.is_some() {
                break;
            }
        }
        part
    }

    fn expand(&self, index: usize, world: World, part: &mut Part) {
        let view = View::of(&world.state).expect("it was checked when it was found");
        let copy = world.through_snapshot().expect("it was checked when it was found");
        let stand = Stand { index, world, view, copy };
        for step in moves(&stand.world, self.profile) {
            let tried = catch_unwind(AssertUnwindSafe(|| self.try_move(&stand, step, part)));
            let text = match tried {
                Ok(Ok(())) => continue,
                Ok(Err(text)) => text,
                Err(panic) => match panic.downcast::<String>() {
                    Ok(text) => format!("panic: {text}"),
                    Err(panic) => format!("panic: {:?}", panic.downcast::<&str>()),
                },
            };
            part.failure = Some((Node { parent: index, step }, text));
            return;
        }
    }

    /// Takes one step and checks it.
    fn try_move(&self, stand: &Stand, step: Move, part: &mut Part) -> Result<(), String> {
        let (former, before) = (&stand.world, &stand.view);
        let mut world = former.clone();
        let told = world.step(step);
        let after = View::of(&world.state)?;
        check::step((former, before), (&world, &after), (step, &told))?;
        behaves_alike(&stand.copy, &world, &told)?;
        world.step_model(&told)?;
        part.transitions += 1;
        cover(former, step, &told, &mut part.seen);
        if after.digest == before.digest {
            part.unchanged += 1;
            return Ok(());
        }
        let shape = shape::of(&world, &after);
        if !self.shapes.contains(&shape) {
            world.through_snapshot()?;
            part.found.push((shape, Node { parent: stand.index, step }));
        }
        Ok(())
    }

    fn take(&mut self, part: Part, depth: usize) {
        for (shape, node) in part.found {
            if self.shapes.insert(shape) {
                self.nodes.push(node);
            }
        }
        self.transitions += part.transitions;
        self.unchanged += part.unchanged;
        self.seen.extend(part.seen);
        if let Some((node, text)) = part.failure {
            let mut path = self.path(node.parent);
            path.push(node.step);
            let script = script::of(self.root(), &path);
            panic!("{}, depth {depth}: {text}\n\n{script}", self.profile.name);
        }
    }

    fn report(&self, depth: usize, new: usize) {
        let Self { transitions, unchanged, .. } = self;
        let states = self.nodes.len() as u64;
        let merged = transitions - unchanged + 1 - states;
        println!(
            "  depth {depth}: {new} new states, {states} in all; {transitions} transitions, \
             {unchanged} of them without a change, {merged} merged"
        );
    }
}

/// A step that was checked before.
fn replay(world: &mut World, step: Move) {
    let told = world.step(step);
    world.step_model(&told).expect("it was checked when it was found");
}

/// The copy out of a snapshot answers the next command as the state itself did.
fn behaves_alike(copy: &State, world: &World, told: &Told) -> Result<(), String> {
    let mut copy = copy.clone();
    let mut events = Vec::new();
    let outcome = copy.apply(WALL_MS, &told.command, &mut events);
    if outcome != told.outcome || events != told.events {
        return Err(format!("out of a snapshot: {outcome:?} {events:?}, not {:?}", told.outcome));
    }
    if copy.digest() != world.state.digest() {
        return Err("out of a snapshot: another digest".to_owned());
    }
    Ok(())
}
