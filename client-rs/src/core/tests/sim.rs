//! Several clients against the real state machine, on virtual time, over a network that delays,
//! loses, breaks and goes silent, with processes that sleep and a cluster that has no quorum.
//!
//! Checked at every step: at most one client believes that it holds a key (G1), and whoever
//! believes it is the holder in the state machine, in a mode at least as strong; what holders of
//! one key believe goes together (readers, permits); no token is below a floor that was reported for
//! its key before (G2). At the end:
//! every acquire got one result in time, and nothing is left behind on either side.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::frame::Decoder;
use leasehold_protocol::ids::{Mode, RequestId, Secret, Token};
use leasehold_protocol::reply::{Holder, Reply};
use leasehold_protocol::request::{CommandRequest, Request};

use super::super::rng::Rng;
use super::super::{
    AcquireRequest, CallId, ConnId, Core, Event, Held, HoldChange, OpId, Options, Output,
    SessionId, Timing, Wait, Wish,
};
use super::authority::{Authority, error};
use super::rig::{frame, further, ms, requests, wire_decoder};
use crate::clock::BootTime;
use crate::error::Failure;

const CLIENTS: usize = 4;
/// Locks, and after them one semaphore.
const LOCKS: u64 = 3;
const PERMITS: u32 = 3;
const TTL_MS: u64 = 3_000;

/// What happened how often; a run that never met its subject proves nothing.
#[derive(Debug, Default)]
struct Seen {
    grants: u64,
    waits_granted: u64,
    refused: u64,
    timed_out: u64,
    lost: u64,
    lease_lost: u64,
    unknown: u64,
    breaks: u64,
    sleeps: u64,
    reads: u64,
    forced: u64,
    abandoned: u64,
    closes: u64,
    resyncs: u64,
    own: u64,
    renewed: u64,
    shared: u64,
    permits: u64,
    entered: u64,
    delayed: u64,
    downgraded: u64,
    upgraded: u64,
    upgrade_refused: u64,
    revalued: u64,
    several: u64,
}

enum Step {
    Arrives { client: usize, conn: ConnId, id: RequestId, request: Request },
    Replied { client: usize, conn: ConnId, id: RequestId, reply: Reply },
    Up { client: usize, conn: ConnId },
    Down { client: usize, conn: ConnId },
    Wake { client: usize },
    Act { client: usize },
    Tick,
    Weather,
}

struct Asked {
    /// Several are asked for at once, all exclusively.
    keys: Vec<u64>,
    options: Options,
    due: BootTime,
    waits: bool,
}

struct Client {
    core: Core,
    session: Option<SessionId>,
    asked: BTreeMap<OpId, Asked>,
    holds: BTreeMap<OpId, (Vec<u64>, Held)>,
    changes: BTreeMap<CallId, Wish>,
    /// Abandoned or given back: what is heard of them in the same moment is not asked for.
    gone: BTreeSet<OpId>,
    asleep_until: BootTime,
    wakes_at: BootTime,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Line {
    Open,
    /// Bytes vanish in both directions.
    Silent,
}

struct Sim {
    rng: Rng,
    now: BootTime,
    queue: BTreeMap<(BootTime, u64), Step>,
    sequence: u64,
    authority: Authority,
    clients: Vec<Client>,
    lines: BTreeMap<(usize, ConnId), Line>,
    decoders: BTreeMap<(usize, ConnId), Decoder>,
    /// The last delivery of each line and direction: bytes do not overtake each other.
    last: BTreeMap<(usize, ConnId, bool), BootTime>,
    quorum: bool,
    calm: bool,
    /// The highest floor reported for each key.
    floors: BTreeMap<u64, Token>,
    seen: Seen,
}

fn key_name(key: u64) -> String {
    format!("k{key}")
}

fn label(client: usize) -> String {
    format!("sim {client}")
}

fn line_key(client: usize, conn: ConnId) -> u64 {
    client as u64 * (1 << 40) + conn.0
}

impl Sim {
    fn new(seed: u64) -> Self {
        let addrs: Vec<String> = (1..=3).map(|n| format!("n{n}:1")).collect();
        let timing = Timing { connect: ms(500), attempt: ms(800), call: ms(4_000) };
        let client = |n: usize| Client {
            core: Core::new(timing, addrs.clone(), seed * 100 + n as u64),
            session: None,
            asked: BTreeMap::new(),
            holds: BTreeMap::new(),
            changes: BTreeMap::new(),
            gone: BTreeSet::new(),
            asleep_until: BootTime(0),
            wakes_at: BootTime::NEVER,
        };
        let mut sim = Self {
            rng: Rng::new(seed),
            now: BootTime(1_000_000_000_000),
            queue: BTreeMap::new(),
            sequence: 0,
            authority: Authority::new(addrs.clone()),
            clients: (0..CLIENTS).map(client).collect(),
            lines: BTreeMap::new(),
            decoders: BTreeMap::new(),
            last: BTreeMap::new(),
            quorum: true,
            calm: false,
            floors: BTreeMap::new(),
            seen: Seen::default(),
        };
        for client in 0..CLIENTS {
            let call = super::super::CallRequest {
                shard: None,
                request: Request::Ping,
                timeout: ms(4_000),
            };
            sim.clients[client].core.call(sim.now, call).expect("room");
            sim.after(client, |_| {});
            sim.at(ms(100), Step::Act { client });
        }
        sim.at(ms(10), Step::Tick);
        sim.at(ms(50), Step::Weather);
        sim
    }

    fn at(&mut self, delay: Duration, step: Step) {
        self.sequence += 1;
        self.queue.insert((self.now.after(delay), self.sequence), step);
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.rng.below(100) < percent
    }

    fn delay(&mut self) -> Duration {
        let long = !self.calm && self.rng.below(100) < 3;
        let most = if long { 900_000 } else { 8_000 };
        Duration::from_micros(100 + self.rng.below(most))
    }

    /// Puts a message on a line, behind what is on it already.
    fn carry(&mut self, client: usize, conn: ConnId, to_server: bool, step: Step) {
        match self.lines.get(&(client, conn)) {
            Some(Line::Open) => {}
            Some(Line::Silent) | None => return,
        }
        let arrival = self.now.after(self.delay());
        let last = self.last.entry((client, conn, to_server)).or_insert(arrival);
        *last = (*last).max(arrival);
        let at = *last;
        self.sequence += 1;
        self.queue.insert((at, self.sequence), step);
    }

    /// Lets a client act and carries out what follows.
    fn after(&mut self, client: usize, act: impl FnOnce(&mut Core)) {
        act(&mut self.clients[client].core);
        while let Some(output) = self.clients[client].core.poll_output() {
            match output {
                Output::Connect { conn, .. } => {
                    let delay = self.delay();
                    if !self.calm && self.chance(15) {
                        self.at(delay, Step::Down { client, conn });
                    } else {
                        self.lines.insert((client, conn), Line::Open);
                        self.at(delay, Step::Up { client, conn });
                    }
                }
                Output::Write { conn } => {
                    let bytes = self.clients[client].core.take_output(conn, Vec::new());
                    let decoder = self.decoders.entry((client, conn)).or_insert_with(wire_decoder);
                    for (id, request) in requests(decoder, &bytes) {
                        self.seen.reads += u64::from(matches!(request, Request::Holds(_)));
                        let step = Step::Arrives { client, conn, id, request };
                        self.carry(client, conn, true, step);
                    }
                }
                Output::Close { conn } => {
                    self.lines.remove(&(client, conn));
                    self.authority.drop_conn(line_key(client, conn));
                }
            }
        }
        while let Some(event) = self.clients[client].core.poll_event() {
            self.hear(client, event);
        }
        let next = self.clients[client].core.next_deadline().unwrap_or(BootTime::NEVER);
        if next < self.clients[client].wakes_at {
            self.clients[client].wakes_at = next;
            let delay = next.since(self.now);
            self.at(delay, Step::Wake { client });
        }
    }

    fn hear(&mut self, client: usize, event: Event) {
        match event {
            Event::Acquired { op, .. } | Event::Hold { op, .. }
                if self.clients[client].gone.contains(&op) => {}
            Event::Acquired { op, result } => {
                let asked = self.clients[client].asked.remove(&op).expect("asked for once");
                assert!(
                    self.now <= asked.due.max(self.clients[client].asleep_until).after(ms(50)),
                    "an acquire ends by its deadline"
                );
                match result {
                    Ok(held) => {
                        let options = asked.options;
                        self.raise_floors(&asked.keys, &held);
                        let mine = |(keys, of): &(Vec<u64>, Held)| {
                            *keys == asked.keys && of.cell.token() == held.cell.token()
                        };
                        let entered = self.clients[client].holds.values().any(mine);
                        self.seen.entered += u64::from(entered);
                        self.seen.shared += u64::from(options.mode == Mode::SHARED);
                        self.seen.permits += u64::from(options.limit > 0);
                        self.seen.grants += 1;
                        self.seen.waits_granted += u64::from(asked.waits);
                        self.seen.several += u64::from(asked.keys.len() > 1);
                        self.clients[client].holds.insert(op, (asked.keys, held));
                    }
                    Err(failure) => match failure.code {
                        ErrorCode::HELD => self.seen.refused += 1,
                        ErrorCode::TIMED_OUT => self.seen.timed_out += 1,
                        ErrorCode::LEASE_LOST => self.seen.lease_lost += 1,
                        ErrorCode::DEADLINE => self.seen.unknown += 1,
                        ErrorCode::ALREADY_HELD
                        | ErrorCode::ALREADY_QUEUED
                        | ErrorCode::HOLD_FORCED
                        | ErrorCode::DELAYED
                        | ErrorCode::BUSY
                        | ErrorCode::UNREACHABLE
                        | ErrorCode::NO_QUORUM => {}
                        other => panic!("an acquire failed with {other}"),
                    },
                }
            }
            Event::Hold { op, change: HoldChange::Lost(_) } => {
                let lost = self.clients[client].holds.remove(&op);
                assert!(lost.is_some(), "a hold is lost once");
                self.seen.lost += 1;
            }
            Event::Changed { call, result } => self.hear_change(client, call, &result),
            _ => {}
        }
    }

    fn hear_change(&mut self, client: usize, call: CallId, result: &Result<(), Failure>) {
        let wish = self.clients[client].changes.remove(&call).expect("asked for once");
        match (wish, result) {
            (Wish::Mode(Mode::SHARED), Ok(())) => self.seen.downgraded += 1,
            (Wish::Mode(_), Ok(())) => self.seen.upgraded += 1,
            (Wish::Value(_), Ok(())) => self.seen.revalued += 1,
            (_, Err(failure)) => match failure.code {
                ErrorCode::UPGRADE_CONFLICT => self.seen.upgrade_refused += 1,
                ErrorCode::DEADLINE
                | ErrorCode::LEASE_LOST
                | ErrorCode::LEASE_DEAD
                | ErrorCode::NOT_OWNER
                | ErrorCode::UNREACHABLE
                | ErrorCode::NO_QUORUM
                | ErrorCode::BUSY
                | ErrorCode::DELAYED
                | ErrorCode::HOLD_FORCED
                | ErrorCode::HOLD_REENTERED
                | ErrorCode::BAD_COMBINATION
                | ErrorCode::MODE_MISMATCH => {}
                other => panic!("a change failed with {other}"),
            },
        }
        let holds: Vec<_> = self.clients[client].holds.values().cloned().collect();
        for (keys, held) in holds {
            if !held.cell.remaining(self.now).is_zero() {
                self.raise_floors(&keys, &held);
            }
        }
    }

    /// What a guarded resource does when it sees a hold used.
    fn raise_floors(&mut self, keys: &[u64], held: &Held) {
        for (token, (at, key)) in (held.cell.token().0..).zip(keys.iter().enumerate()) {
            let floor = self.floors.entry(*key).or_default();
            // A semaphore is fenced slot by slot, which is not followed here.
            assert!(*key >= LOCKS || floor.0 <= token, "tokens keep above floors (G2)");
            let seen = if at == 0 { held.cell.floor() } else { Token(token) };
            *floor = (*floor).max(seen);
        }
    }

    /// G1, and that nobody believes what the state machine does not know.
    fn check(&self) {
        let mut believers: BTreeMap<u64, BTreeMap<usize, Mode>> = BTreeMap::new();
        for (index, client) in self.clients.iter().enumerate() {
            let valid = client.holds.values().filter(|(_, held)| {
                // Compared with the clock, as whoever relies on it does.
                !held.cell.remaining(self.now).is_zero()
            });
            let each = valid.flat_map(|(keys, held)| {
                let first = held.cell.token().0;
                (first..).zip(keys).map(|(token, key)| (key, Token(token), held.cell.mode()))
            });
            for (key, token, mode) in each {
                let believed = believers.entry(*key).or_default().entry(index).or_insert(mode);
                if mode == Mode::EXCLUSIVE {
                    *believed = mode;
                }
                let info = self.authority.state.key_info(key_name(*key).as_bytes());
                // An upgrade whose answer has not come holds more than is believed.
                let holds = |holder: &Holder| {
                    let upgraded = holder.label == label(index) && holder.token > token;
                    holder.token == token && (holder.mode == mode || mode == Mode::SHARED)
                        || upgraded && holder.mode == Mode::EXCLUSIVE && mode == Mode::SHARED
                };
                assert!(
                    info.holders.iter().any(holds),
                    "client {index} believes in {mode:?} under {token} of k{key}; the state has {:?}",
                    info.holders
                );
            }
        }
        for (key, modes) in believers {
            let alone = modes.len() == 1;
            let shared = modes.values().all(|mode| *mode == Mode::SHARED);
            let permits = modes.values().map(|mode| mode.permit_count());
            let fit = permits.sum::<Option<u32>>().is_some_and(|sum| sum <= PERMITS);
            assert!(alone || shared || fit, "these do not go together on k{key}: {modes:?} (G1)");
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Arrives { client, conn, id, request } => self.serve(client, conn, id, &request),
            Step::Replied { client, .. } | Step::Up { client, .. } | Step::Down { client, .. }
                if self.clients[client].asleep_until > self.now =>
            {
                let rest = self.clients[client].asleep_until.since(self.now);
                self.at(rest, step);
            }
            Step::Replied { client, conn, id, reply } => {
                let now = self.now;
                self.after(client, |core| core.feed(now, conn, &frame(id, &reply)));
            }
            Step::Up { client, conn } => {
                let now = self.now;
                self.after(client, |core| core.conn_up(now, conn));
            }
            Step::Down { client, conn } => {
                let now = self.now;
                self.lines.remove(&(client, conn));
                self.after(client, |core| core.conn_down(now, conn, "broken"));
            }
            Step::Wake { client } => {
                let asleep = self.clients[client].asleep_until;
                if asleep > self.now {
                    let rest = asleep.since(self.now);
                    return self.at(rest, Step::Wake { client });
                }
                self.clients[client].wakes_at = BootTime::NEVER;
                let now = self.now;
                self.after(client, |core| core.tick(now));
            }
            Step::Act { client } => self.act(client),
            Step::Tick => {
                let out = self.authority.tick(self.now.0);
                self.deliver(out);
                self.at(ms(10), Step::Tick);
            }
            Step::Weather => self.weather(),
        }
    }

    fn serve(&mut self, client: usize, conn: ConnId, id: RequestId, request: &Request) {
        let key = line_key(client, conn);
        let trouble = !self.calm && !matches!(request, Request::Hello(_) | Request::Ping);
        let code = if trouble && !self.quorum {
            Some(ErrorCode::NO_QUORUM)
        } else if trouble && self.chance(2) {
            Some(ErrorCode::OUTCOME_UNKNOWN)
        } else {
            None
        };
        let now = self.now.0;
        let Some(code) = code else {
            let out = self.authority.request(key, id, request, now);
            return self.deliver(out);
        };
        // Unknown: executed in every second case.
        if code == ErrorCode::OUTCOME_UNKNOWN && self.chance(50) {
            let mut out = self.authority.request(key, id, request, now);
            out.retain(|(conn, of, _)| (*conn, *of) != (key, id));
            self.deliver(out);
        }
        self.deliver(vec![(key, id, error(code))]);
    }

    fn deliver(&mut self, out: Vec<(u64, RequestId, Reply)>) {
        for (key, id, reply) in out {
            let (client, conn) = ((key >> 40) as usize, ConnId(key & ((1 << 40) - 1)));
            self.carry(client, conn, false, Step::Replied { client, conn, id, reply });
        }
    }

    /// Breaks lines, silences some, lets processes sleep, takes the quorum away, moves the leader.
    fn weather(&mut self) {
        if self.calm {
            return;
        }
        self.at(ms(50), Step::Weather);
        let lines: Vec<_> = self.lines.keys().copied().collect();
        for (client, conn) in lines {
            if self.chance(1) {
                self.seen.breaks += 1;
                self.authority.drop_conn(line_key(client, conn));
                if self.chance(30) {
                    self.lines.insert((client, conn), Line::Silent);
                } else {
                    self.lines.remove(&(client, conn));
                    self.at(ms(1), Step::Down { client, conn });
                }
            }
        }
        if self.rng.below(1000) < 6 {
            let client = self.rng.below(CLIENTS as u64) as usize;
            let sleep = ms(self.rng.below(2 * TTL_MS));
            let until = self.now.after(sleep);
            self.clients[client].asleep_until = self.clients[client].asleep_until.max(until);
            self.seen.sleeps += 1;
        }
        if self.rng.below(1000) < 8 {
            self.quorum = !self.quorum;
            self.authority.take_over(self.now.0);
            let out = self.authority.resync();
            self.seen.resyncs += out.len() as u64;
            self.deliver(out);
        } else if !self.quorum && self.chance(12) {
            self.quorum = true;
        }
    }

    /// A user of a client does something.
    fn act(&mut self, client: usize) {
        let pause = ms(5 + self.rng.below(120));
        self.at(pause, Step::Act { client });
        if self.calm || self.clients[client].asleep_until > self.now {
            return;
        }
        let now = self.now;
        match self.rng.below(100) {
            0..=53 => self.ask(client),
            75..=85 => self.change(client),
            54..=74 => {
                let held = self.clients[client].holds.keys().next().copied();
                if let Some(op) = held {
                    let awaited = self.chance(50);
                    self.clients[client].holds.remove(&op);
                    self.clients[client].gone.insert(op);
                    self.after(client, |core| {
                        // An error says that the clock ended it first.
                        let _ = core.release(now, op, awaited);
                    });
                }
            }
            86..=90 => {
                let asked = self.clients[client].asked.keys().next().copied();
                if let Some(op) = asked {
                    self.clients[client].asked.remove(&op);
                    self.clients[client].gone.insert(op);
                    self.seen.abandoned += 1;
                    self.after(client, |core| core.abandon(now, op));
                }
            }
            91 => {
                if let Some(session) = self.clients[client].session.take() {
                    self.seen.closes += 1;
                    self.after(client, |core| core.close_session(now, session));
                }
            }
            92..=94 => self.force(),
            95..=99 => {
                let held = self.clients[client].holds.keys().next().copied();
                if let Some(op) = held {
                    // It may have been lost by the clock in this very moment.
                    self.seen.renewed += 1;
                    self.after(client, |core| {
                        let _ = core.renew(now, op);
                    });
                }
            }
            _ => {}
        }
    }

    fn ask(&mut self, client: usize) {
        let now = self.now;
        if self.clients[client].core.shards() == 0 || self.clients[client].asked.len() > 3 {
            return;
        }
        let mine = &mut self.clients[client];
        let session = *mine.session.get_or_insert_with(|| {
            let secret = Secret([client as u8; 16]);
            mine.core.open_session(now, TTL_MS, label(client), secret).expect("in range")
        });
        let (keys, options) = if self.chance(15) {
            let first = self.rng.below(LOCKS);
            (vec![first, (first + 1) % LOCKS], Options::PLAIN)
        } else {
            let key = self.rng.below(LOCKS + 1);
            (vec![key], self.options(key))
        };
        let wait = match self.rng.below(3) {
            0 => Wait::Try,
            1 => Wait::For(ms(self.rng.below(3_000))),
            _ => Wait::For(ms(30_000)),
        };
        let due = match wait {
            Wait::For(wait) => now.after(wait).after(ms(4_000)),
            _ => now.after(ms(4_000)),
        };
        let own = (!options.reentrant && keys.len() == 1 && self.chance(15))
            .then(|| (TTL_MS, Secret([100 + client as u8; 16])));
        self.seen.own += u64::from(own.is_some());
        let request = AcquireRequest {
            session,
            key: key_name(keys[0]).into_bytes(),
            more: keys[1..].iter().map(|key| further(&key_name(*key))).collect(),
            value: Vec::new(),
            wait,
            own,
            options,
        };
        let op = self.clients[client].core.acquire(now, request).expect("accepted");
        self.clients[client]
            .asked
            .insert(op, Asked { keys, options, due, waits: wait != Wait::Try });
        self.after(client, |_| {});
    }

    fn options(&mut self, key: u64) -> Options {
        if key == LOCKS {
            let mode = Mode::permits(1 + self.rng.below(2) as u32);
            return Options { mode, limit: PERMITS, ..Options::PLAIN };
        }
        Options {
            mode: if self.chance(40) { Mode::SHARED } else { Mode::EXCLUSIVE },
            limit: 0,
            reentrant: self.chance(30),
            delay_ms: if self.chance(20) { 300 } else { 0 },
        }
    }

    /// A holder changes the mode or the value of what it has.
    fn change(&mut self, client: usize) {
        let held: Vec<OpId> = self.clients[client].holds.keys().copied().collect();
        if held.is_empty() {
            return;
        }
        let op = held[self.rng.below(held.len() as u64) as usize];
        let wish = match self.rng.below(5) {
            0..=1 => Wish::Mode(Mode::SHARED),
            2..=3 => Wish::Mode(Mode::EXCLUSIVE),
            _ => Wish::Value(vec![7]),
        };
        let now = self.now;
        // An own lease's hold cannot be changed, and the clock may have ended it.
        if let Ok(call) = self.clients[client].core.change(now, op, wish.clone()) {
            self.clients[client].changes.insert(call, wish);
        }
        self.after(client, |_| {});
    }

    /// An operator ends a hold, the careful way.
    fn force(&mut self) {
        let key = key_name(self.rng.below(LOCKS + 1)).into_bytes();
        let Some(holder) = self.authority.state.key_info(&key).holders.first().cloned() else {
            return;
        };
        self.seen.forced += 1;
        let (who, why) = (b"op".to_vec(), b"test".to_vec());
        let command = Command::ForceRelease { key, token: holder.token, who, why, now: false };
        let request = Request::Command(CommandRequest {
            shard: leasehold_protocol::ids::ShardId(0),
            timeout_ms: 0,
            command,
        });
        let now = self.now.0;
        let mut out = self.authority.request(u64::MAX, RequestId(1), &request, now);
        out.retain(|(conn, ..)| *conn != u64::MAX);
        self.deliver(out);
    }

    fn run_until(&mut self, end: BootTime) {
        while let Some((&(at, _), _)) = self.queue.first_key_value()
            && at <= end
        {
            let ((at, _), step) = self.queue.pop_first().expect("just seen");
            self.now = self.now.max(at);
            self.step(step);
            self.check();
        }
        self.now = end;
    }

    /// The weather clears, everybody goes home.
    fn finish(&mut self) {
        self.calm = true;
        self.quorum = true;
        let silent: Vec<_> = self.lines.iter().filter(|(_, line)| **line == Line::Silent).collect();
        let silent: Vec<_> = silent.into_iter().map(|(key, _)| *key).collect();
        for (client, conn) in silent {
            self.lines.remove(&(client, conn));
            self.at(ms(1), Step::Down { client, conn });
        }
        self.run_until(self.now.after(ms(45_000)));
        for client in 0..CLIENTS {
            assert!(self.clients[client].asked.is_empty(), "every acquire got its result");
            let now = self.now;
            if let Some(session) = self.clients[client].session.take() {
                self.after(client, |core| core.close_session(now, session));
            }
        }
        self.run_until(self.now.after(ms(20_000)));
        self.seen.delayed = self.authority.delays;
        assert_eq!(self.authority.state.leases_len(), 0, "no lease is left");
        assert_eq!(self.authority.state.keys_len(), 0, "no key is left");
        for client in &self.clients {
            assert!(client.holds.is_empty(), "a closed session's holds were told to be lost");
            client.core.assert_empty();
        }
    }
}

#[test]
fn nobody_believes_wrongly_and_nothing_is_left_behind() {
    let seeds = std::env::var("LEASEHOLD_SIM_SEEDS").ok();
    let seeds = seeds.map_or(6, |text| text.parse().expect("a number of seeds"));
    let first: u64 =
        std::env::var("LEASEHOLD_SIM_FIRST").map_or(1, |text| text.parse().expect("a seed"));
    let mut total = Seen::default();
    let mut kinds = BTreeSet::new();
    for seed in first..first + seeds {
        println!("seed {seed}");
        let mut sim = Sim::new(seed);
        sim.run_until(sim.now.after(ms(60_000)));
        sim.finish();
        println!("{:?}", sim.seen);
        total.add(&sim.seen);
        kinds.insert(sim.seen.grants);
    }
    total.demand();
    assert!(seeds == 1 || kinds.len() > 1, "seeds differ");
}

impl Seen {
    fn add(&mut self, other: &Self) {
        self.grants += other.grants;
        self.waits_granted += other.waits_granted;
        self.refused += other.refused;
        self.timed_out += other.timed_out;
        self.lost += other.lost;
        self.lease_lost += other.lease_lost;
        self.unknown += other.unknown;
        self.breaks += other.breaks;
        self.sleeps += other.sleeps;
        self.reads += other.reads;
        self.forced += other.forced;
        self.abandoned += other.abandoned;
        self.closes += other.closes;
        self.resyncs += other.resyncs;
        self.own += other.own;
        self.renewed += other.renewed;
        self.shared += other.shared;
        self.permits += other.permits;
        self.entered += other.entered;
        self.delayed += other.delayed;
        self.downgraded += other.downgraded;
        self.upgraded += other.upgraded;
        self.upgrade_refused += other.upgrade_refused;
        self.revalued += other.revalued;
        self.several += other.several;
    }

    fn demand(&self) {
        let must = [
            self.grants,
            self.waits_granted,
            self.refused,
            self.timed_out,
            self.lost,
            self.lease_lost,
            self.unknown,
            self.breaks,
            self.sleeps,
            self.reads,
            self.forced,
            self.abandoned,
            self.closes,
            self.resyncs,
            self.own,
            self.renewed,
            self.shared,
            self.permits,
            self.entered,
            self.delayed,
            self.downgraded,
            self.upgraded,
            self.upgrade_refused,
            self.revalued,
            self.several,
        ];
        assert!(must.iter().all(|count| *count > 0), "each must have happened: {self:?}");
    }
}
