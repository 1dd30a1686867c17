//! The real state, the naive model beside it, and the numbers that clients have used.

use std::collections::BTreeMap;

use leasehold_core::snapshot::{Decoder, Encoder};
use leasehold_core::{State, invariants};
use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::{LeaseId, Number, ShardId, Token};
use leasehold_protocol::outcome::Outcome;

use super::Profile;
use super::memory::{Client, caller_of};
use crate::naive::{self, Model};
use crate::world::{SECRET, SLOT, TOKEN_BASE, TTL_MS, WALL_MS};

#[derive(Clone)]
pub(crate) struct World {
    pub(crate) state: State,
    model: Model,
    model_revision: u64,
    /// Live sessions.
    pub(crate) sessions: BTreeMap<LeaseId, Client>,
    reads_late: bool,
}

/// What one command gave.
pub(crate) struct Told {
    pub(crate) outcome: Outcome,
    pub(crate) events: Vec<Event>,
    /// The state knew the command's number before.
    pub(crate) again: bool,
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
            reads_late: profile.reads_late,
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
        self.judge(&world, command, &told)?;
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

    /// What clients that read late know of a step to `world`.
    fn judge(&self, world: &Self, command: &Command, told: &Told) -> Result<(), String> {
        if !self.reads_late {
            return Ok(());
        }
        if let Some(client) = caller_of(command).and_then(|one| self.sessions.get(&one.lease)) {
            let changed = self.state.digest() != world.state.digest();
            client.judge(command, told.outcome, changed)?;
        }
        world.sessions.iter().try_for_each(|(lease, client)| client.is_known(world, *lease))
    }

    fn apply(&mut self, command: &Command) -> Result<Told, String> {
        let mut events = Vec::new();
        let again = caller_of(command)
            .is_some_and(|one| self.state.wait_result(one.lease, one.number).is_some());
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
        let told = Told { outcome, events, again };
        self.learn(command, &told);
        Ok(told)
    }

    fn learn(&mut self, command: &Command, told: &Told) {
        if let Outcome::Opened { lease, .. } = told.outcome {
            self.sessions.insert(lease, Client::default());
        }
        let client = caller_of(command).and_then(|one| self.sessions.get_mut(&one.lease));
        match (client, command) {
            (Some(client), _) if self.reads_late => {
                client.learn(command, told.outcome, told.again);
            }
            // Its number is one of those that the acquire has reserved.
            (Some(_), Command::Cancel { .. }) | (None, _) => {}
            (Some(client), _) => {
                client.next = caller_of(command).map_or(client.next, |one| one.number.0 + SLOT);
            }
        }
        for event in told.events.iter().filter(|_| self.reads_late) {
            if let EventKind::WaitEnded { lease, number, outcome, .. } = event.kind
                && let Some(client) = self.sessions.get_mut(&lease)
            {
                client.ended(number, outcome);
            }
        }
        let state = &self.state;
        self.sessions.retain(|lease, _| state.lease(*lease).is_some());
    }

    /// The caller of a command under a fresh number, or under one that was reserved or used. A client
    /// that does not read late has read everything that was told before.
    pub(crate) fn caller(&self, lease: LeaseId, reserved: Option<u64>) -> Caller {
        let Client { next, floor, .. } = self.sessions[&lease];
        if self.reads_late {
            let number = Number(reserved.unwrap_or(next));
            let (floor, acks) = (Number(floor), vec![]);
            return Caller { lease, secret: SECRET, number, floor, acks };
        }
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
