//! Drawing commands that mean something: an `Op` is a few small numbers, read in the light of what
//! happened so far, so that any part of a sequence still makes sense when the rest is shrunk away.

use std::collections::BTreeMap;

use leasehold_protocol::command::{Caller, Command, OwnLease, Want};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{EndReason, Event, EventKind};
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, Token};
use leasehold_protocol::outcome::Outcome;
use proptest::prelude::*;

use crate::draw_members;
use crate::naive::{Holder, Model};

const SECRET: Secret = Secret([3; 16]);
const KEYS: [&[u8]; 4] = [b"a", b"b", b"b/1", b"pool"];
/// The keys that are mostly locks; the last is mostly a semaphore.
const LOCKS: usize = 3;
const WINDOW: u64 = 3 * 4096;

pub(crate) fn keys() -> Vec<&'static [u8]> {
    KEYS.to_vec()
}

/// Kind of command, and four numbers that choose its parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    kind: u8,
    who: u8,
    which: u8,
    how: u8,
    ack: u8,
}

impl Arbitrary for Op {
    type Parameters = ();
    type Strategy = BoxedStrategy<Self>;

    fn arbitrary_with((): ()) -> BoxedStrategy<Self> {
        (0_u8..82, any::<u8>(), any::<u8>(), any::<u8>(), any::<u8>())
            .prop_map(|(kind, who, which, how, ack)| Self { kind, who, which, how, ack })
            .boxed()
    }
}

/// The clients' side: what was sent, which numbers are next.
#[derive(Default)]
pub(crate) struct Driver {
    leases: Vec<LeaseId>,
    sent: Vec<Command>,
    next: BTreeMap<LeaseId, u64>,
    floors: BTreeMap<LeaseId, u64>,
}

impl Driver {
    pub(crate) fn command(&mut self, step: usize, op: Op, model: &Model) -> Command {
        if step < 3 {
            return [open(5_000), begin(op), open(5_000)][step].clone();
        }
        let command = match op.kind {
            0..=1 if model.leases.len() < 7 => return open(1_000 + u32::from(op.how)),
            0..=13 => self.acquire(op, model),
            14..=18 => self.cancel(op, model),
            19..=24 => self.release(op, model),
            25..=29 => self.resend(op, model),
            30 => self.conflict(op),
            31..=32 => return self.release_own(op, model),
            33 => return self.end_lease(op, model),
            34..=35 => return force(op, model),
            36 => return end_forced(op, model),
            37..=38 => return self.time_out(op, model),
            39 if op.how < 128 => return Command::EndQuarantine,
            40..=43 => self.convert(op, model),
            44..=55 => self.acquire_all(op, model),
            56..=57 => return set_limit(op, model),
            58..=59 => return end_delay(op, model),
            60..=62 => self.set_value(op, model),
            63..=64 => return ask_yield(op, model),
            65..=72 => self.acquire_several(op, model),
            73..=75 => self.release_all(op, model),
            77..=81 => {
                let parts = [op.who, op.which, op.how, op.ack];
                return Command::Member(draw_members::command(parts, &model.members));
            }
            _ => return Command::Begin { token_base: Token(7) },
        };
        self.sent.push(command.clone());
        command
    }

    /// Learns what a client would: ids that came into the world.
    pub(crate) fn note(&mut self, _: &Command, _: &Outcome, events: &[Event]) {
        for event in events {
            if let EventKind::LeaseOpened { lease, .. } = event.kind {
                self.leases.push(lease);
            }
        }
    }

    /// Mostly a live session, sometimes any lease that ever was.
    fn lease(&self, who: u8, model: &Model) -> LeaseId {
        let sessions = model.leases.iter().filter(|lease| !lease.own).map(|lease| lease.id);
        let some: Vec<_> = if who < 230 { sessions.collect() } else { self.leases.clone() };
        some.get(usize::from(who) % some.len().max(1)).copied().unwrap_or(LeaseId(99))
    }

    /// Floor and acknowledgements of one request: mostly a careful client's.
    fn caller(&mut self, lease: LeaseId, number: u64, op: Op, model: &Model) -> Caller {
        let used = self.next.get(&lease).copied().unwrap_or(1) - 1;
        let known = self.floors.get(&lease).copied().unwrap_or(0);
        let floor = match op.ack {
            120..=169 => used.min(number.saturating_sub(1)).max(known),
            170..=199 if kind_is_cancel(op) => used,
            0..=119 | 170..=199 => known,
            200..=229 => used.saturating_sub(u64::from(op.ack % 5)),
            230..=239 => known.saturating_sub(2),
            240..=252 => number.saturating_sub(1),
            _ => used + 40,
        };
        let live = model.leases.iter().find(|one| one.id == lease);
        let results = live.map_or(Vec::new(), |live| {
            let read = live.memory.iter().filter(|(number, one)| {
                **number <= floor && (one.result.is_some() || op.ack.is_multiple_of(7))
            });
            read.map(|(number, _)| Number(*number)).take(5).collect()
        });
        let acks = match op.ack % 4 {
            0 | 1 => Vec::new(),
            2 => results,
            _ => vec![Number(u64::from(op.how)), Number(number)],
        };
        let floor_now = known.max(floor);
        self.floors.insert(lease, floor_now);
        let next = self.next.entry(lease).or_insert(1);
        *next = (*next).max(floor_now + 1);
        let secret = if op.who == 255 { Secret([0; 16]) } else { SECRET };
        Caller { lease, secret, number: Number(number), floor: Number(floor), acks }
    }

    fn take_number(&mut self, lease: LeaseId, numbers: u64) -> u64 {
        let next = self.next.entry(lease).or_insert(1);
        let number = *next;
        *next += numbers;
        number
    }

    fn acquire(&mut self, op: Op, model: &Model) -> Command {
        let lease = self.lease(op.who, model);
        let number = match op.which {
            0..=239 => self.take_number(lease, 3),
            240..=247 => u64::from(op.how) % 20,
            _ => {
                let floor = self.floors.get(&lease).copied().unwrap_or(0);
                floor + WINDOW - 3 + u64::from(op.how % 4)
            }
        };
        let own = op.how & 8 != 0 && op.how & 16 != 0;
        Command::Acquire {
            caller: self.caller(lease, number, op, model),
            key: KEYS[usize::from(op.which) % LOCKS].to_vec(),
            mode: if op.how & 3 == 1 || op.how & 32 != 0 { Mode::SHARED } else { Mode::EXCLUSIVE },
            own: own.then_some(OwnLease { ttl_ms: 2_000, secret: SECRET }),
            value: vec![op.how; usize::from(op.how % 3)],
            wait_ms: if op.how.is_multiple_of(4) { 0 } else { 60_000 },
        }
    }

    /// A semaphore's permits, or a lock with options.
    fn acquire_all(&mut self, op: Op, model: &Model) -> Command {
        let lease = self.lease(op.who, model);
        let number = self.take_number(lease, 3);
        let semaphore = op.which % 8 < 5;
        let limit = if op.which == 255 { 4 } else { 3 };
        let (key, mode, limit) = match (semaphore, op.which) {
            (true, 250..) => (KEYS[0], Mode::permits(1), 3),
            (true, _) => (KEYS[LOCKS], Mode::permits(1 + u32::from(op.how % 3)), limit),
            (false, 240..) => (KEYS[LOCKS], Mode::SHARED, 0),
            (false, _) => {
                let mode = if op.how & 1 == 0 { Mode::EXCLUSIVE } else { Mode::SHARED };
                (KEYS[usize::from(op.how) % LOCKS], mode, 0)
            }
        };
        let reentrant = op.how & 6 != 0;
        let own = op.how & 8 != 0 && op.how & 16 != 0;
        let want = Want { key: key.to_vec(), mode, limit, reentrant };
        Command::AcquireAll {
            caller: self.caller(lease, number, op, model),
            wants: vec![want],
            own: own.then_some(OwnLease { ttl_ms: 2_000, secret: SECRET }),
            value: vec![op.how; usize::from(op.how % 3)],
            wait_ms: if op.how.is_multiple_of(4) { 0 } else { 60_000 },
            delay_ms: if op.how & 32 == 0 && mode != Mode::SHARED { 0 } else { 5_000 },
        }
    }

    /// Two or three keys at once, from any of them on.
    fn acquire_several(&mut self, op: Op, model: &Model) -> Command {
        let lease = self.lease(op.who, model);
        let number = self.take_number(lease, 3);
        let count = 2 + usize::from(op.how & 64 != 0);
        let want = |index: usize| {
            let key = (usize::from(op.which) + index) % KEYS.len();
            let shared = op.how >> index & 1 == 1;
            let (mode, limit) = match (key == LOCKS, shared) {
                (true, _) => (Mode::permits(1 + u32::from(op.how % 2)), 3),
                (false, true) => (Mode::SHARED, 0),
                (false, false) => (Mode::EXCLUSIVE, 0),
            };
            let limit = if op.which == 255 { limit + 1 } else { limit };
            Want { key: KEYS[key].to_vec(), mode, limit, reentrant: false }
        };
        let mut wants: Vec<_> = (0..count).map(want).collect();
        wants.retain(|want| want.limit != 1);
        if wants.len() < 2 {
            wants = (0..2).map(|key| Want { limit: 0, mode: Mode::SHARED, ..want(key) }).collect();
        }
        Command::AcquireAll {
            caller: self.caller(lease, number, op, model),
            wants,
            own: None,
            value: vec![op.how; usize::from(op.how % 3)],
            wait_ms: if op.how.is_multiple_of(4) { 0 } else { 60_000 },
            delay_ms: if op.how & 32 == 0 { 0 } else { 5_000 },
        }
    }

    /// What an acquire holds, mostly under its reserved number; sometimes of one that holds nothing.
    fn release_all(&mut self, op: Op, model: &Model) -> Command {
        let holds = all_holds(model);
        let held = holds.get(usize::from(op.which) % holds.len().max(1));
        let (lease, acquire) = match held {
            Some((_, holder)) if op.how < 230 => (holder.lease, holder.number),
            _ => (self.lease(op.who, model), Number(1)),
        };
        let number =
            if op.how.is_multiple_of(4) { self.take_number(lease, 1) } else { acquire.0 + 2 };
        Command::ReleaseAll { caller: self.caller(lease, number, op, model), acquire }
    }

    /// Of an acquire that was sent, or of the next one, before it is.
    fn cancel(&mut self, op: Op, model: &Model) -> Command {
        let sent: Vec<_> = self.sent.iter().rev().filter_map(acquire_of).take(12).collect();
        let (lease, acquire) = sent.get(usize::from(op.which) % 14).copied().unwrap_or_else(|| {
            let lease = self.lease(op.who, model);
            (lease, self.next.get(&lease).copied().unwrap_or(1))
        });
        Command::Cancel {
            caller: self.caller(lease, acquire + 1, op, model),
            release_if_granted: op.how & 1 == 0,
        }
    }

    /// Of a hold there is, mostly under its reserved number; sometimes with something wrong.
    fn release(&mut self, op: Op, model: &Model) -> Command {
        let holds = all_holds(model);
        let Some((key, holder)) = holds.get(usize::from(op.which) % holds.len().max(1)) else {
            let lease = self.lease(op.who, model);
            let number = self.take_number(lease, 1);
            let caller = self.caller(lease, number, op, model);
            return Command::Release { caller, key: KEYS[0].to_vec(), token: Token(100) };
        };
        let lease = if op.how < 230 { holder.lease } else { self.lease(op.who, model) };
        let number = match op.how % 8 {
            0 => self.take_number(lease, 1),
            1 => self.next.get(&lease).copied().unwrap_or(1).saturating_sub(1),
            _ => holder.number.0 + 2,
        };
        let token = Token(holder.token.0 - u64::from(op.how % 16 == 15));
        let caller = self.caller(lease, number, op, model);
        Command::Release { caller, key: (*key).clone(), token }
    }

    /// Of a hold there is, to either mode; sometimes with something wrong.
    fn convert(&mut self, op: Op, model: &Model) -> Command {
        let holds = all_holds(model);
        let (key, holder) = match holds.get(usize::from(op.which) % holds.len().max(1)) {
            Some((key, holder)) => ((*key).clone(), Some(*holder)),
            None => (KEYS[0].to_vec(), None),
        };
        let lease = match holder {
            Some(holder) if op.how < 230 => holder.lease,
            _ => self.lease(op.who, model),
        };
        let number = self.take_number(lease, 1);
        let token = holder.map_or(Token(100), |holder| holder.token);
        let token = Token(token.0 - u64::from(op.how % 16 == 15));
        let mode = if op.how & 1 == 0 { Mode::EXCLUSIVE } else { Mode::SHARED };
        Command::Convert { caller: self.caller(lease, number, op, model), key, token, mode }
    }

    /// Like a change of mode, but of the value.
    fn set_value(&mut self, op: Op, model: &Model) -> Command {
        match self.convert(op, model) {
            Command::Convert { caller, key, token, .. } => {
                Command::SetValue { caller, key, token, value: vec![op.ack % 4; 2] }
            }
            other => other,
        }
    }

    /// The very same command again, with a newer floor.
    fn resend(&mut self, op: Op, model: &Model) -> Command {
        let recent = self.sent.len().min(20);
        if recent == 0 {
            return self.acquire(op, model);
        }
        let mut command = self.sent[self.sent.len() - 1 - usize::from(op.which) % recent].clone();
        if let Command::Acquire { caller, .. }
        | Command::Cancel { caller, .. }
        | Command::Release { caller, .. }
        | Command::Convert { caller, .. }
        | Command::AcquireAll { caller, .. }
        | Command::ReleaseAll { caller, .. }
        | Command::SetValue { caller, .. } = &mut command
        {
            *caller = self.caller(caller.lease, caller.number.0, op, model);
        }
        command
    }

    /// A number that was used, with another body.
    fn conflict(&mut self, op: Op) -> Command {
        let recent = self.sent.len().min(10);
        if recent == 0 {
            return open(1_000);
        }
        let mut command = self.sent[self.sent.len() - 1 - usize::from(op.which) % recent].clone();
        match &mut command {
            Command::Acquire { value, .. } => value.push(0xff),
            Command::AcquireAll { wants, .. } if wants.len() > 1 => wants.reverse(),
            Command::AcquireAll { wants, .. } => wants[0].reentrant ^= true,
            Command::ReleaseAll { acquire, .. } => acquire.0 += 1,
            Command::Cancel { release_if_granted, .. } => *release_if_granted ^= true,
            Command::Release { token, .. }
            | Command::Convert { token, .. }
            | Command::SetValue { token, .. } => token.0 += 1,
            _ => {}
        }
        command
    }

    fn release_own(&self, op: Op, model: &Model) -> Command {
        let own = all_holds(model).into_iter().filter(|(_, holder)| model.lease(holder.lease).own);
        let own: Vec<_> =
            own.map(|(key, holder)| (key.clone(), holder.lease, holder.token)).collect();
        let (key, lease, token) = match own.get(usize::from(op.which) % own.len().max(1)) {
            Some(found) if op.how < 220 => found.clone(),
            _ => (KEYS[0].to_vec(), self.lease(op.who, model), Token(101)),
        };
        let secret = if op.how % 8 == 7 { Secret([0; 16]) } else { SECRET };
        let token = Token(token.0 + u64::from(op.how % 8 == 6));
        Command::ReleaseOwn { lease, secret, key, token }
    }

    fn end_lease(&self, op: Op, model: &Model) -> Command {
        let lease = self.lease(op.who, model);
        if op.how & 1 == 0 {
            Command::Expire { lease }
        } else {
            let secret = if op.how > 240 { Secret([0; 16]) } else { SECRET };
            Command::Close { lease, secret }
        }
    }

    fn time_out(&self, op: Op, model: &Model) -> Command {
        let waiting = model.keys.values().flat_map(|entry| &entry.queue);
        let waiting: Vec<_> = waiting.map(|one| (one.lease, one.number)).collect();
        match waiting.get(usize::from(op.which) % waiting.len().max(1)) {
            Some(&(lease, number)) if op.how < 200 => Command::TimeOut { lease, number },
            _ => Command::TimeOut { lease: self.lease(op.who, model), number: Number(1) },
        }
    }
}

fn kind_is_cancel(op: Op) -> bool {
    (14..=18).contains(&op.kind)
}

fn open(ttl_ms: u32) -> Command {
    Command::Open { ttl_ms, secret: SECRET, label: b"label".to_vec() }
}

fn acquire_of(command: &Command) -> Option<(LeaseId, u64)> {
    match command {
        Command::Acquire { caller, .. } | Command::AcquireAll { caller, .. } => {
            Some((caller.lease, caller.number.0))
        }
        _ => None,
    }
}

/// Every hold with its key.
fn all_holds(model: &Model) -> Vec<(&Vec<u8>, &Holder)> {
    let mut all = Vec::new();
    for (key, entry) in &model.keys {
        all.extend(entry.holders.iter().map(|one| (key, one)));
    }
    all
}

/// A held key and its token, or something that is not held.
fn held(op: Op, model: &Model, forced: bool) -> (Vec<u8>, Token) {
    let holds = all_holds(model).into_iter();
    let wanted = holds.filter(|(_, holder)| !forced || holder.forced.is_some());
    let all: Vec<_> = wanted.map(|(key, holder)| (key.clone(), holder.token)).collect();
    match all.get(usize::from(op.which) % all.len().max(1)) {
        Some((key, token)) => (key.clone(), Token(token.0 - u64::from(op.how % 8 == 7))),
        None => (KEYS[1].to_vec(), Token(101)),
    }
}

fn force(op: Op, model: &Model) -> Command {
    let (key, token) = held(op, model, false);
    let (who, why) = (b"ops".to_vec(), vec![b'a' + op.how % 26]);
    Command::ForceRelease { key, token, who, why, now: op.ack.is_multiple_of(3) }
}

fn set_limit(op: Op, model: &Model) -> Command {
    let key = if op.how < 230 { KEYS[LOCKS] } else { KEYS[0] };
    let limit = model.keys.get(key).map_or(3, |entry| entry.limit);
    let limit = if op.ack & 1 == 0 { 1 + u32::from(op.which % 4) } else { limit.clamp(1, 4) };
    Command::SetLimit { key: key.to_vec(), limit, who: b"ops".to_vec() }
}

fn end_delay(op: Op, model: &Model) -> Command {
    let mut all = Vec::new();
    for (key, entry) in &model.keys {
        all.extend(entry.ghosts.iter().map(|ghost| (key.clone(), ghost.token)));
    }
    match all.get(usize::from(op.which) % all.len().max(1)) {
        Some((key, token)) => {
            let token = Token(token.0 - u64::from(op.how % 8 == 7));
            Command::EndDelay { key: key.clone(), token }
        }
        None => Command::EndDelay { key: KEYS[1].to_vec(), token: Token(101) },
    }
}

fn ask_yield(op: Op, model: &Model) -> Command {
    let (key, token) = held(op, model, false);
    let (who, why) = (vec![b'a' + op.ack % 2], b"please".to_vec());
    Command::AskYield { key, token, who, why, within_ms: u32::from(op.how % 2) }
}

fn end_forced(op: Op, model: &Model) -> Command {
    let (key, token) = held(op, model, !op.how.is_multiple_of(4));
    Command::EndForced { key, token }
}

/// One shard in eight is a restored cluster's.
fn begin(op: Op) -> Command {
    let token_base = Token(100);
    if op.how >= 32 {
        return Command::Begin { token_base };
    }
    let (lease_base, revision_base) = (u64::from(op.who), 0);
    let quarantine_ms = u32::from(op.how % 4) * 1_000;
    Command::BeginRestored { token_base, lease_base, revision_base, quarantine_ms }
}

fn kind_of(command: &Command) -> &'static str {
    match command {
        Command::Open { .. } => "open",
        Command::Acquire { .. } => "acquire",
        Command::Cancel { .. } => "cancel",
        Command::Release { .. } => "release",
        Command::ReleaseOwn { .. } => "release_own",
        Command::Close { .. } => "close",
        Command::ForceRelease { .. } => "force_release",
        Command::Begin { .. } => "begin",
        Command::Expire { .. } => "expire",
        Command::EndForced { .. } => "end_forced",
        Command::TimeOut { .. } => "time_out",
        Command::Convert { .. } => "convert",
        Command::AcquireAll { wants, .. } if wants.len() > 1 => "acquire_several",
        Command::AcquireAll { .. } => "acquire_all",
        Command::ReleaseAll { .. } => "release_all",
        Command::SetLimit { .. } => "set_limit",
        Command::EndDelay { .. } => "end_delay",
        Command::Member(_) => "member",
        Command::SetValue { .. } => "set_value",
        Command::AskYield { .. } => "ask_yield",
        Command::BeginRestored { .. } => "begin_restored",
        Command::EndQuarantine => "end_quarantine",
    }
}

fn name_of(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Opened { .. } => "opened".to_owned(),
        Outcome::Granted(_) => "granted".to_owned(),
        Outcome::Queued { .. } => "queued".to_owned(),
        Outcome::Cancelled { .. } => "cancelled".to_owned(),
        Outcome::TimedOut { .. } => "timed_out".to_owned(),
        Outcome::Released { .. } => "released".to_owned(),
        Outcome::Closed { .. } => "closed".to_owned(),
        Outcome::Forced { .. } => "forced".to_owned(),
        Outcome::Begun { .. } => "begun".to_owned(),
        Outcome::Changed { .. } => "changed".to_owned(),
        Outcome::Members { .. } => "members".to_owned(),
        Outcome::Refused { code, .. } => format!("refused {}", code.name()),
    }
}

/// Names what this step showed.
pub(crate) fn cover(
    command: &Command,
    outcome: &Outcome,
    events: &[Event],
    (before, after): (&Model, &Model),
    mut count: impl FnMut(&str),
) {
    count(&format!("{}: {}", kind_of(command), name_of(outcome)));
    if let Command::Acquire { caller, .. }
    | Command::Cancel { caller, .. }
    | Command::Release { caller, .. }
    | Command::Convert { caller, .. }
    | Command::AcquireAll { caller, .. }
    | Command::ReleaseAll { caller, .. }
    | Command::SetValue { caller, .. } = command
    {
        cover_numbered(command, caller, outcome, (before, after), &mut count);
    }
    let has = |wanted: fn(&EventKind) -> bool| events.iter().any(|event| wanted(&event.kind));
    let waited =
        has(|kind| matches!(kind, EventKind::WaitEnded { outcome: Outcome::Granted(_), .. }));
    if waited && has(|kind| matches!(kind, EventKind::LeaseOpened { .. })) {
        count("seen: a hand-over to an own lease");
    }
    draw_members::cover(command, outcome, (&before.members, &after.members), &mut count);
    cover_modes(command, events, (before, after), &mut count);
    cover_several(command, events, after, &mut count);
    if waited && matches!(command, Command::Expire { .. }) {
        count("seen: a hand-over on expiry");
    }
    if let Command::Expire { lease } = command
        && before.leases.iter().any(|one| one.id == *lease && one.own)
    {
        count("seen: an own lease expired");
    }
    for event in events {
        if let EventKind::Ended { key, token, reason: EndReason::Released, .. } = &event.kind
            && before.keys[key]
                .holders
                .iter()
                .any(|one| one.token == *token && one.forced.is_some())
        {
            count("seen: a forced hold released by its client");
        }
    }
}

fn cover_modes(
    command: &Command,
    events: &[Event],
    (before, after): (&Model, &Model),
    count: &mut impl FnMut(&str),
) {
    let granted = events.iter().filter(|event| matches!(event.kind, EventKind::Granted { .. }));
    if granted.count() > 1 {
        count("seen: several readers let in at once");
    }
    if after.keys.values().any(|entry| entry.holders.len() > 2) {
        count("seen: three readers");
    }
    let passed_on = events.iter().any(|event| matches!(event.kind, EventKind::WaitEnded { .. }));
    match command {
        Command::Convert { mode: Mode::SHARED, .. } if passed_on => {
            count("seen: a downgrade that lets readers in");
        }
        Command::Convert { key, mode: Mode::EXCLUSIVE, .. }
            if !events.is_empty() && !before.keys[key].queue.is_empty() =>
        {
            count("seen: an upgrade past a queue");
        }
        Command::Acquire { key, mode: Mode::SHARED, .. }
            if events.iter().any(|event| matches!(event.kind, EventKind::Queued { .. }))
                && before.keys[key].holders.iter().all(|one| one.mode == Mode::SHARED) =>
        {
            count("seen: a reader behind a waiting writer");
        }
        Command::Cancel { .. } | Command::Expire { .. } | Command::TimeOut { .. }
            if passed_on
                && !events.iter().any(|event| matches!(event.kind, EventKind::Ended { .. }))
                && events.iter().any(|event| matches!(event.kind, EventKind::Granted { .. })) =>
        {
            count("seen: the end of a waiting writer lets readers in");
        }
        Command::SetLimit { .. } if passed_on => {
            let granted = |event: &Event| matches!(event.kind, EventKind::Granted { .. });
            if events.iter().any(granted) {
                count("seen: a changed limit lets waiters in");
            }
            let refused = |event: &Event| match event.kind {
                EventKind::WaitEnded { outcome: Outcome::Refused { code, .. }, .. } => {
                    code == ErrorCode::PERMITS_ABOVE_LIMIT
                }
                _ => false,
            };
            if events.iter().any(refused) {
                count("seen: a lowered limit refuses who waits");
            }
        }
        Command::AskYield { .. } if before == after => count("seen: asked twice, told once"),
        Command::EndDelay { .. } if passed_on => count("seen: the end of a delay lets waiters in"),
        _ => {}
    }
    cover_holds(command, (before, after), count);
}

fn cover_several(command: &Command, events: &[Event], after: &Model, count: &mut impl FnMut(&str)) {
    let mut entries = after.keys.values();
    if entries.any(|entry| entry.holders.is_empty() && entry.ghosts.is_empty()) {
        count("seen: a free key that waits for another");
    }
    let mut waits = BTreeMap::<_, (usize, bool)>::new();
    for event in events {
        if let EventKind::WaitEnded { lease, number, outcome, .. } = event.kind {
            let wait = waits.entry((lease, number)).or_default();
            wait.0 += 1;
            wait.1 = matches!(outcome, Outcome::Granted(_));
        }
    }
    let several = |granted| waits.values().filter(|wait| wait.0 > 1 && wait.1 == granted).count();
    if several(true) > 0 {
        count("seen: a hand-over of several keys");
    }
    if several(true) > 1 {
        count("seen: two hand-overs of several keys in a step");
    }
    let granted = waits.values().any(|wait| wait.1);
    if several(false) > 0 && granted {
        count("seen: the end of a wait for several keys lets others in");
    }
    if several(false) > 0 && matches!(command, Command::SetLimit { .. }) {
        count("seen: a lowered limit refuses who waits for several keys");
    }
}

fn cover_holds(command: &Command, (before, after): (&Model, &Model), count: &mut impl FnMut(&str)) {
    let pool = |model: &Model| model.keys.get(KEYS[LOCKS]).cloned().unwrap_or_default();
    let taken = |model: &Model| -> usize {
        pool(model).holders.iter().map(|holder| holder.slots.len()).sum()
    };
    if taken(after) > pool(after).limit as usize {
        count("seen: more permits than a lowered limit");
    }
    if pool(after).holders.iter().any(|holder| holder.slots.len() > 1) {
        count("seen: a grant of several slots");
    }
    if pool(after).ghosts.iter().any(|_| taken(after) > 0) {
        count("seen: a semaphore with holds and a delay");
    }
    let entries = |model: &Model| -> usize {
        all_holds(model).iter().map(|(_, holder)| holder.again.len()).sum()
    };
    match command {
        Command::Cancel { .. } if entries(after) + 1 == entries(before) => {
            count("seen: a cancel that gives an entry back");
        }
        Command::Release { .. } if entries(after) + 1 == entries(before) => {
            count("seen: a release that gives an entry back");
            let first = |model: &Model| -> Vec<_> {
                all_holds(model).iter().map(|(_, one)| (one.token, one.number)).collect()
            };
            if first(after) != first(before) {
                count("seen: an entry that inherits the hold");
            }
        }
        Command::Expire { .. } | Command::Close { .. } if entries(after) < entries(before) => {
            count("seen: the end of a hold with several entries");
        }
        _ => {}
    }
}

fn cover_numbered(
    command: &Command,
    caller: &Caller,
    outcome: &Outcome,
    (before, after): (&Model, &Model),
    count: &mut impl FnMut(&str),
) {
    let Some(old) = before.leases.iter().find(|lease| lease.id == caller.lease) else { return };
    let Some(new) = after.leases.iter().find(|lease| lease.id == caller.lease) else { return };
    let refused = |wanted| matches!(outcome, Outcome::Refused { code, .. } if *code == wanted);
    let known = old.memory.contains_key(&caller.number.0);
    if known && before == after && !refused(ErrorCode::NUMBER_CONFLICT) {
        count("seen: a retry that changed nothing");
    }
    let executed = !known && new.memory.contains_key(&caller.number.0);
    let late = executed && caller.number.0 <= new.floor;
    match command {
        Command::Cancel { .. } if late => count("seen: a late cancel executed"),
        Command::Release { .. } if late => count("seen: a late release executed"),
        Command::Cancel { .. }
            if executed
                && !old.memory.contains_key(&(caller.number.0 - 1))
                && matches!(outcome, Outcome::Cancelled { .. }) =>
        {
            count("seen: a cancel before its acquire");
        }
        _ => {}
    }
    let passed = new.memory.iter().any(|(number, memory)| {
        *number > old.floor && *number <= new.floor && memory.result.is_none()
    });
    if passed {
        count("seen: a floor that passed a wait");
    }
}
