//! One path of the search: the real state, the naive model beside it, and what the clients know.
//!
//! A `Move` holds concrete numbers, tokens and lease ids, so a path replays by itself.

use std::collections::BTreeMap;

use leasehold_core::State;
use leasehold_core::snapshot::{Decoder, Encoder};
use leasehold_protocol::command::{Caller, Command, OwnLease};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, ShardId, Token};
use leasehold_protocol::outcome::Outcome;

use crate::naive::{self, Model};

/// Those of the scripts, so that a path can be kept as one.
pub(crate) const WALL_MS: u64 = 1_000;
pub(crate) const SECRET: Secret = Secret([7; 16]);
pub(crate) const TTL_MS: u32 = 5_000;
pub(crate) const OWN_TTL_MS: u32 = 2_000;
pub(crate) const WAIT_MS: u32 = 60_000;
pub(crate) const TOKEN_BASE: u64 = 100;
pub(crate) const KEYS: [&str; 2] = ["k", "m"];
/// Numbers of a slot: an acquire, its cancel, its release.
pub(crate) const SLOT: u64 = 3;

/// How an acquire asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum How {
    Try,
    Wait,
    /// Waits, and wants a lease of its own.
    Own,
}

/// A numbered command without its caller. Keys are indexes of `KEYS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    Acquire { key: usize, how: How },
    Cancel { release: bool },
    Release { key: usize, token: u64 },
}

/// One step. `who` is an index of `World::sessions`, in the order of their opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    Open,
    Send {
        who: usize,
        number: u64,
        body: Body,
    },
    /// A release under the number 0: refused, but its floor and acknowledgements count.
    Ack {
        who: usize,
        floor: u64,
        all: bool,
    },
    ReleaseOwn {
        lease: u64,
        key: usize,
        token: u64,
    },
    Close {
        lease: u64,
    },
    Expire {
        lease: u64,
    },
    Force {
        key: usize,
        token: u64,
        now: bool,
    },
    EndForced {
        key: usize,
        token: u64,
    },
    TimeOut {
        who: usize,
        number: u64,
    },
}

/// What a client sent under a number, and what it was told first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    pub(crate) body: Body,
    /// `None` while it waits.
    pub(crate) first: Option<Outcome>,
    /// It waited, or was executed below the floor: only an acknowledgement lets the state forget.
    outlives_floor: bool,
    /// Something was sent that may count as one.
    maybe_read: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Session {
    pub(crate) id: LeaseId,
    pub(crate) live: bool,
    /// The first number of the next slot.
    pub(crate) next: u64,
    pub(crate) floor: u64,
    pub(crate) sent: BTreeMap<u64, Sent>,
}

#[derive(Clone)]
pub(crate) struct World {
    pub(crate) state: State,
    model: Model,
    model_revision: u64,
    pub(crate) sessions: Vec<Session>,
    /// Each numbered command carries the highest floor and all acknowledgements.
    eager: bool,
}

/// What one step gave.
pub(crate) struct Told {
    pub(crate) command: Command,
    pub(crate) outcome: Outcome,
    pub(crate) events: Vec<Event>,
}

impl World {
    /// A shard that has begun, with so many sessions.
    pub(crate) fn new(sessions: usize, eager: bool) -> Self {
        let mut world = Self {
            state: State::new(ShardId(0)),
            model: Model::default(),
            model_revision: 0,
            sessions: Vec::new(),
            eager,
        };
        let begin = Command::Begin { token_base: Token(TOKEN_BASE) };
        world.state.apply(WALL_MS, &begin, &mut Vec::new());
        naive::apply(&mut world.model, &mut world.model_revision, WALL_MS, &begin);
        for _ in 0..sessions {
            let told = world.step(Move::Open);
            world.step_model(&told).expect("the model opens sessions too");
        }
        world
    }

    /// Applies a move to the state.
    pub(crate) fn step(&mut self, step: Move) -> Told {
        let command = self.command(step);
        let mut events = Vec::new();
        let known = caller_of(&command)
            .is_some_and(|caller| self.state.wait_result(caller.lease, caller.number).is_some());
        let outcome = self.state.apply(WALL_MS, &command, &mut events);
        self.learn(step, &command, outcome, &events);
        if let Move::Send { who, number, body } = step {
            self.sessions[who].learn_sent(number, body, outcome, known);
        }
        Told { command, outcome, events }
    }

    /// Applies the same command to the naive model, which must answer the same.
    pub(crate) fn step_model(&mut self, told: &Told) -> Result<(), String> {
        let Self { model, model_revision, .. } = self;
        let (outcome, kinds) = naive::apply(model, model_revision, WALL_MS, &told.command);
        if outcome != told.outcome {
            return Err(format!("the model answers {outcome:?}, the state {:?}", told.outcome));
        }
        if *model_revision != self.state.revision().0 {
            return Err(format!("the model is at revision {model_revision}"));
        }
        if !kinds.iter().eq(told.events.iter().map(|event| &event.kind)) {
            return Err(format!("the model's events are {kinds:?}, not {:?}", told.events));
        }
        Ok(())
    }

    /// True if the cancel of this acquire was executed before it.
    pub(crate) fn is_forestalled(&self, who: usize, number: u64) -> bool {
        let session = &self.sessions[who];
        let cancel = session.sent.get(&(number + 1)).map(|sent| sent.body);
        let cancelled = matches!(cancel, Some(Body::Cancel { .. }));
        let acquire = session.sent.get(&number).and_then(|sent| sent.first);
        let refused = matches!(acquire, Some(Outcome::Refused { code: ErrorCode::CANCELLED, .. }));
        session.live && cancelled && (refused || !session.sent.contains_key(&number))
    }

    /// The state as a snapshot brings it to another node.
    pub(crate) fn through_snapshot(&self) -> Result<State, String> {
        let mut decoder = Decoder::new();
        for chunk in Encoder::new(&self.state) {
            decoder.feed(&chunk).map_err(|error| format!("snapshot: {error}"))?;
        }
        let copy = decoder.finish().map_err(|error| format!("snapshot: {error}"))?;
        if copy.digest() == self.state.digest() {
            Ok(copy)
        } else {
            Err("a snapshot changed the digest".to_owned())
        }
    }

    pub(crate) fn command(&self, step: Move) -> Command {
        match step {
            Move::Open => Command::Open { ttl_ms: TTL_MS, secret: SECRET, label: Vec::new() },
            Move::Send { who, number, body } => {
                let (floor, acks) = self.read_before(who, number);
                body.command(self.caller(who, number, floor, acks))
            }
            Move::Ack { who, floor, all } => {
                let acks = if all { self.acks(who, floor) } else { Vec::new() };
                let body = Body::Release { key: 0, token: 0 };
                body.command(self.caller(who, 0, floor, acks))
            }
            Move::ReleaseOwn { lease, key, token } => Command::ReleaseOwn {
                lease: LeaseId(lease),
                secret: SECRET,
                key: bytes(key),
                token: Token(token),
            },
            Move::Close { lease } => Command::Close { lease: LeaseId(lease), secret: SECRET },
            Move::Expire { lease } => Command::Expire { lease: LeaseId(lease) },
            Move::Force { key, token, now } => Command::ForceRelease {
                key: bytes(key),
                token: Token(token),
                who: b"ops".to_vec(),
                why: b"search".to_vec(),
                now,
            },
            Move::EndForced { key, token } => {
                Command::EndForced { key: bytes(key), token: Token(token) }
            }
            Move::TimeOut { who, number } => {
                Command::TimeOut { lease: self.sessions[who].id, number: Number(number) }
            }
        }
    }

    fn caller(&self, who: usize, number: u64, floor: u64, acks: Vec<Number>) -> Caller {
        let lease = self.sessions[who].id;
        Caller { lease, secret: SECRET, number: Number(number), floor: Number(floor), acks }
    }

    /// Floor and acknowledgements of a command under this number.
    fn read_before(&self, who: usize, number: u64) -> (u64, Vec<Number>) {
        let session = &self.sessions[who];
        if !self.eager {
            return (session.floor, Vec::new());
        }
        let floor = session.floor.max(number.saturating_sub(1));
        (floor, self.acks(who, floor))
    }

    /// Everything remembered up to the floor, waits included: those must be ignored.
    fn acks(&self, who: usize, floor: u64) -> Vec<Number> {
        let view = self.state.lease(self.sessions[who].id);
        let memory = view.iter().flat_map(leasehold_core::LeaseView::memory);
        let kept = memory.filter(|one| (one.keep || one.late) && one.number.0 <= floor);
        kept.map(|one| one.number).collect()
    }

    /// What the clients know after the step.
    fn learn(&mut self, step: Move, command: &Command, outcome: Outcome, events: &[Event]) {
        if let (Move::Open, Outcome::Opened { lease, .. }) = (step, outcome) {
            let sent = BTreeMap::new();
            self.sessions.push(Session { id: lease, live: true, next: 1, floor: 0, sent });
        }
        if let Some((who, caller)) = step.who().zip(caller_of(command)) {
            let session = &mut self.sessions[who];
            if session.live {
                session.floor = session.floor.max(caller.floor.0);
                for ack in &caller.acks {
                    session.mark_read(ack.0, true);
                }
            }
        }
        for event in events {
            match event.kind {
                EventKind::WaitEnded { lease, number, outcome, .. } => {
                    let session = self.sessions.iter_mut().find(|one| one.id == lease);
                    let sent = session.and_then(|one| one.sent.get_mut(&number.0));
                    if let Some(sent) = sent {
                        sent.first = Some(outcome);
                    }
                }
                EventKind::LeaseEnded { lease, .. } => {
                    let ended = self.sessions.iter_mut().find(|one| one.id == lease);
                    if let Some(session) = ended {
                        session.live = false;
                    }
                }
                _ => {}
            }
        }
    }
}

impl Session {
    /// A number that the state did not know before was executed now, perhaps once more: below the
    /// floor a reserved number may be.
    fn learn_sent(&mut self, number: u64, body: Body, outcome: Outcome, known: bool) {
        let slot = first_of_slot(number);
        self.next = self.next.max(slot + SLOT);
        if number != slot {
            self.mark_read(slot, false);
        }
        let refused = [
            ErrorCode::NUMBER_BELOW_FLOOR,
            ErrorCode::NUMBER_CONFLICT,
            ErrorCode::NUMBER_BEYOND_WINDOW,
            ErrorCode::LEASE_DEAD,
        ];
        let executed = !matches!(outcome, Outcome::Refused { code, .. } if refused.contains(&code));
        if executed {
            let waited = matches!(outcome, Outcome::Queued { .. });
            let first = (!waited).then_some(outcome);
            let outlives_floor = waited || number <= self.floor;
            let sent = Sent { body, first, outlives_floor, maybe_read: false };
            if known {
                self.sent.entry(number).or_insert(sent);
            } else {
                self.sent.insert(number, sent);
            }
        }
    }

    /// An acknowledgement of a wait that goes on counts for nothing.
    fn mark_read(&mut self, number: u64, only_final: bool) {
        if let Some(sent) = self.sent.get_mut(&number) {
            sent.maybe_read |= sent.first.is_some() || !only_final;
        }
    }

    /// Whether the state must still know this number, whatever else it may forget (G5).
    pub(crate) fn must_be_remembered(&self, number: u64, sent: &Sent) -> bool {
        number > self.floor || (sent.outlives_floor && (sent.first.is_none() || !sent.maybe_read))
    }
}

impl Move {
    /// The session whose numbered command it is.
    pub(crate) fn who(self) -> Option<usize> {
        match self {
            Self::Send { who, .. } | Self::Ack { who, .. } => Some(who),
            _ => None,
        }
    }
}

impl Body {
    fn command(self, caller: Caller) -> Command {
        match self {
            Self::Acquire { key, how } => Command::Acquire {
                caller,
                key: bytes(key),
                mode: Mode::EXCLUSIVE,
                own: (how == How::Own).then_some(OwnLease { ttl_ms: OWN_TTL_MS, secret: SECRET }),
                value: Vec::new(),
                wait_ms: if how == How::Try { 0 } else { WAIT_MS },
            },
            Self::Cancel { release } => Command::Cancel { caller, release_if_granted: release },
            Self::Release { key, token } => {
                Command::Release { caller, key: bytes(key), token: Token(token) }
            }
        }
    }
}

pub(crate) fn caller_of(command: &Command) -> Option<&Caller> {
    match command {
        Command::Acquire { caller, .. }
        | Command::Cancel { caller, .. }
        | Command::Release { caller, .. } => Some(caller),
        _ => None,
    }
}

/// The acquire's number of the slot that a number lies in.
pub(crate) fn first_of_slot(number: u64) -> u64 {
    number - (number - 1) % SLOT
}

fn bytes(key: usize) -> Vec<u8> {
    KEYS[key].as_bytes().to_vec()
}
