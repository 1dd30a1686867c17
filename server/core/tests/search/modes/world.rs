//! The real state, the naive model beside it, and the numbers that clients have used.

use std::collections::BTreeMap;

use leasehold_core::snapshot::{Decoder, Encoder};
use leasehold_core::{State, invariants};
use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::event::Event;
use leasehold_protocol::ids::{LeaseId, Number, ShardId, Token};
use leasehold_protocol::outcome::Outcome;

use super::Profile;
use crate::naive::{self, Model};
use crate::world::{SECRET, TOKEN_BASE, TTL_MS, WALL_MS};

#[derive(Clone)]
pub(crate) struct World {
    pub(crate) state: State,
    model: Model,
    model_revision: u64,
    /// Live sessions with the next number of each.
    pub(crate) sessions: BTreeMap<LeaseId, u64>,
}

/// What one command gave.
pub(crate) struct Told {
    pub(crate) outcome: Outcome,
    pub(crate) events: Vec<Event>,
}

pub(crate) fn open() -> Command {
    Command::Open { ttl_ms: TTL_MS, secret: SECRET, label: b"s".to_vec() }
}

impl World {
    pub(crate) fn new(profile: &Profile) -> Self {
        let mut world = Self {
            state: State::new(ShardId(0)),
            model: Model::default(),
            model_revision: 0,
            sessions: BTreeMap::new(),
        };
        world.apply(&Command::Begin { token_base: Token(TOKEN_BASE) }).expect("it begins");
        for _ in 0..profile.sessions {
            world.apply(&open()).expect("it opens");
        }
        world
    }

    /// The world after a command, compared with the model and with what `copy` does.
    pub(crate) fn step(&self, command: &Command, copy: &State) -> Result<(Self, Told), String> {
        let mut world = self.clone();
        let told = world.apply(command)?;
        let mut copy = copy.clone();
        let mut events = Vec::new();
        let outcome = copy.apply(WALL_MS, command, &mut events);
        if outcome != told.outcome || events != told.events {
            return Err(format!(
                "out of a snapshot: {outcome:?} {events:?}, not {:?}",
                told.outcome
            ));
        }
        if copy.digest() != world.state.digest() {
            return Err("out of a snapshot: another digest".to_owned());
        }
        Ok((world, told))
    }

    fn apply(&mut self, command: &Command) -> Result<Told, String> {
        let mut events = Vec::new();
        let outcome = self.state.apply(WALL_MS, command, &mut events);
        invariants::check(&self.state)?;
        let Self { model, model_revision, .. } = self;
        let (expected, kinds) = naive::apply(model, model_revision, WALL_MS, command);
        if outcome != expected {
            return Err(format!("the model answers {expected:?}, the state {outcome:?}"));
        }
        if *model_revision != self.state.revision().0 {
            return Err(format!("the model is at revision {model_revision}"));
        }
        if !kinds.iter().eq(events.iter().map(|event| &event.kind)) {
            return Err(format!("the model's events are {kinds:?}, not {events:?}"));
        }
        self.learn(command, &outcome);
        Ok(Told { outcome, events })
    }

    fn learn(&mut self, command: &Command, outcome: &Outcome) {
        if let Outcome::Opened { lease, .. } = outcome {
            self.sessions.insert(*lease, 1);
        }
        if let Command::AcquireAll { caller, .. }
        | Command::Release { caller, .. }
        | Command::ReleaseAll { caller, .. }
        | Command::Convert { caller, .. }
        | Command::SetValue { caller, .. } = command
        {
            self.sessions.insert(caller.lease, caller.number.0 + 3);
        }
        let state = &self.state;
        self.sessions.retain(|lease, _| state.lease(*lease).is_some());
    }

    /// The caller of a command under a fresh number, or under one that was reserved: everything
    /// that was told before has been read.
    pub(crate) fn caller(&self, lease: LeaseId, reserved: Option<u64>) -> Caller {
        let next = self.sessions[&lease];
        let memory = self.state.lease(lease).expect("it is live").memory();
        let read = memory.filter(|one| (one.keep || one.late) && one.outcome.is_some());
        Caller {
            lease,
            secret: SECRET,
            number: Number(reserved.unwrap_or(next)),
            floor: Number(next - 1),
            acks: read.map(|one| one.number).collect(),
        }
    }

    /// The state as a snapshot brings it to another node.
    pub(crate) fn through_snapshot(&self) -> Result<State, String> {
        let mut decoder = Decoder::new();
        for chunk in Encoder::new(&self.state) {
            decoder.feed(&chunk).map_err(|error| format!("snapshot: {error}"))?;
        }
        let copy = decoder.finish().map_err(|error| format!("snapshot: {error}"))?;
        let same = copy.digest() == self.state.digest();
        if same { Ok(copy) } else { Err("a snapshot changed the digest".to_owned()) }
    }
}
