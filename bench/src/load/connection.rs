//! One connection of the load: its session, its cycles, its schedule.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use leasehold_protocol::command::Command;
use leasehold_protocol::conn::{ClientConn, ClientEvent};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{
    ClusterId, HoldSetVersion, LeaseId, Number, RequestId, Secret, ShardId,
};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::{CommandRequest, RenewItem, RenewRequest, Request};

use super::session::Session;
use super::{Mode, Plan, Record};
use crate::clock::{Deadline, now_ns};
use crate::random;

/// Within this time the connection and its session are made.
const OPEN_LIMIT: Duration = Duration::from_secs(10);
/// Deadline that requests state.
const TIMEOUT_MS: u32 = 10_000;
/// Bytes read at a time.
const READ_LEN: usize = 256 * 1024;
/// Errors of one kind after which a run measures nothing but errors.
const ERRORS_MAX: u64 = 10_000;
/// The only shard that is loaded.
const SHARD: ShardId = ShardId(0);

/// What a request in flight is part of.
#[derive(Clone, Copy, Debug)]
enum Pending {
    Acquire { number: Number, key: usize, since_ns: u64 },
    Release { number: Number, since_ns: u64 },
    Renew,
}

pub(super) struct Connection {
    stream: TcpStream,
    conn: ClientConn,
    session: Session,
    mode: Mode,
    keys: Vec<Vec<u8>>,
    next_key: usize,
    value: Vec<u8>,
    pending: BTreeMap<RequestId, Pending>,
    /// Acquires that are due and not sent, by the time they were due.
    overdue: VecDeque<u64>,
    ttl_ms: u32,
    /// When the next acquire is due (open loop), and the time between two.
    due_ns: u64,
    interval_ns: f64,
    /// Acquires made due so far, and when the first one was.
    scheduled: u64,
    first_ns: u64,
    renew_ns: u64,
    /// Bytes that the kernel did not take yet.
    unsent: Vec<u8>,
    unsent_from: usize,
    buffer: Vec<u8>,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Connection {
    /// Connects and opens a session, blocking.
    pub(super) fn open(
        addr: SocketAddr,
        index: usize,
        plan: Plan,
        keys: Vec<Vec<u8>>,
    ) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&addr, OPEN_LIMIT)?;
        stream.set_nodelay(true)?;
        let conn = ClientConn::new(ClusterId::UNKNOWN, Vec::new(), now_ns());
        let secret = Secret(random::bytes());
        let interval_ns = match plan.mode {
            Mode::Open { ops_per_s } => 2e9 * plan.connections as f64 / ops_per_s,
            Mode::Closed { .. } => f64::INFINITY,
        };
        let mut connection = Self {
            stream,
            conn: conn.map_err(io::Error::other)?,
            session: Session::new(LeaseId(0), secret),
            mode: plan.mode,
            keys,
            next_key: 0,
            value: vec![b'v'; plan.value_len],
            pending: BTreeMap::new(),
            overdue: VecDeque::new(),
            due_ns: u64::MAX,
            interval_ns,
            scheduled: 0,
            // Connections are spread over one interval, so that their acquires do not coincide.
            first_ns: (interval_ns.min(1e9) * index as f64 / plan.connections as f64) as u64,
            ttl_ms: plan.ttl_ms,
            renew_ns: u64::MAX,
            unsent: Vec::new(),
            unsent_from: 0,
            buffer: vec![0; READ_LEN],
        };
        connection.open_session(secret)?;
        connection.stream.set_nonblocking(true)?;
        Ok(connection)
    }

    fn open_session(&mut self, secret: Secret) -> io::Result<()> {
        let deadline = Deadline::after(OPEN_LIMIT);
        let open = Command::Open { ttl_ms: self.ttl_ms, secret, label: b"bench".to_vec() };
        let open = Request::Command(CommandRequest {
            shard: SHARD,
            timeout_ms: TIMEOUT_MS,
            command: open,
        });
        self.stream.set_read_timeout(Some(OPEN_LIMIT))?;
        while !deadline.passed() {
            let output = self.conn.take_output(Vec::new());
            self.stream.write_all(&output)?;
            let len = self.stream.read(&mut self.buffer)?;
            if len == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.conn.feed(&self.buffer[..len], now_ns());
            while let Some(event) = self.conn.poll_event() {
                match event {
                    ClientEvent::Hello(_) => {
                        self.conn.request(&open).map_err(io::Error::other)?;
                    }
                    ClientEvent::Reply { reply: Reply::Outcome(reply), .. } => {
                        if let Outcome::Opened { lease, .. } = reply.outcome {
                            self.session = Session::new(lease, secret);
                            return Ok(());
                        }
                        return Err(io::Error::other(format!("no session: {:?}", reply.outcome)));
                    }
                    other => return Err(io::Error::other(format!("no session: {other:?}"))),
                }
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Starts the schedule, or the first cycles. The others took their time to connect: whoever
    /// came first is to be renewed now.
    pub(super) fn begin(&mut self, now: u64) {
        self.renew_ns = now;
        match self.mode {
            Mode::Open { .. } => {
                self.first_ns += now;
                self.due_ns = self.first_ns;
            }
            Mode::Closed { in_flight } => self.overdue.extend((0..in_flight).map(|_| now)),
        }
    }

    /// Ends the session with all it still holds, blocking, so that a later run finds its keys free.
    /// `patience` is what the cluster may need for all that was asked of it and is not done.
    pub(super) fn close(mut self, patience: Duration) -> io::Result<()> {
        let limit = OPEN_LIMIT + patience;
        let deadline = Deadline::after(limit);
        let (lease, secret) = (self.session.lease, self.session.secret);
        let command = Command::Close { lease, secret };
        let request = CommandRequest { shard: SHARD, timeout_ms: TIMEOUT_MS, command };
        let sent = self.conn.request(&Request::Command(request)).map_err(io::Error::other)?;
        self.stream.set_nonblocking(false)?;
        self.stream.set_read_timeout(Some(limit))?;
        while !deadline.passed() {
            self.flush()?;
            let len = self.stream.read(&mut self.buffer)?;
            self.conn.feed(&self.buffer[..len], now_ns());
            while let Some(event) = self.conn.poll_event() {
                match event {
                    ClientEvent::Reply { id, .. } if id == sent => return Ok(()),
                    ClientEvent::Closed(reason) => {
                        return Err(io::Error::other(reason.to_string()));
                    }
                    _ => {}
                }
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// When something is due.
    pub(super) fn next_due_ns(&self) -> u64 {
        self.due_ns.min(self.renew_ns)
    }

    /// Sends what is due.
    pub(super) fn turn(&mut self, now: u64, record: &mut Record) -> io::Result<()> {
        while self.due_ns <= now {
            self.overdue.push_back(self.due_ns);
            self.scheduled += 1;
            self.due_ns = self.first_ns + (self.scheduled as f64 * self.interval_ns) as u64;
        }
        while let Some(since_ns) = self.overdue.front().copied() {
            if !self.acquire(since_ns)? {
                break;
            }
            self.overdue.pop_front();
        }
        if self.renew_ns <= now {
            self.renew_ns = now + renew_every_ns(self.ttl_ms);
            self.renew()?;
        }
        self.conn.tick(now);
        self.events(now, record)?;
        self.flush()
    }

    /// False if the window has no room at present.
    fn acquire(&mut self, since_ns: u64) -> io::Result<bool> {
        let Some(number) = self.session.begin() else { return Ok(false) };
        let key = self.next_key;
        self.next_key = (key + 1) % self.keys.len();
        let command = self.session.acquire(number, &self.keys[key], &self.value);
        self.send(command, Pending::Acquire { number, key, since_ns })?;
        Ok(true)
    }

    fn renew(&mut self) -> io::Result<()> {
        let item = RenewItem {
            lease: self.session.lease,
            secret: self.session.secret,
            version: HoldSetVersion(0),
        };
        let request = RenewRequest { shard: SHARD, timeout_ms: TIMEOUT_MS, items: vec![item] };
        let id = self.conn.request(&Request::Renew(request)).map_err(io::Error::other)?;
        self.pending.insert(id, Pending::Renew);
        Ok(())
    }

    fn send(&mut self, command: Command, pending: Pending) -> io::Result<()> {
        let request = CommandRequest { shard: SHARD, timeout_ms: TIMEOUT_MS, command };
        let id = self.conn.request(&Request::Command(request)).map_err(io::Error::other)?;
        self.pending.insert(id, pending);
        Ok(())
    }

    /// Reads all that came, and sends what it leads to.
    pub(super) fn readable(&mut self, now: u64, record: &mut Record) -> io::Result<()> {
        loop {
            match self.stream.read(&mut self.buffer) {
                Ok(0) => return Err(io::Error::other("the node closed a connection of the load")),
                Ok(len) => self.conn.feed(&self.buffer[..len], now),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            self.events(now, record)?;
        }
        self.flush()
    }

    fn events(&mut self, now: u64, record: &mut Record) -> io::Result<()> {
        while let Some(event) = self.conn.poll_event() {
            match event {
                ClientEvent::Reply { id, reply } => self.reply(id, &reply, now, record)?,
                ClientEvent::Closed(reason) => return Err(io::Error::other(reason.to_string())),
                _ => {}
            }
        }
        Ok(())
    }

    fn reply(
        &mut self,
        id: RequestId,
        reply: &Reply,
        now: u64,
        record: &mut Record,
    ) -> io::Result<()> {
        let Some(pending) = self.pending.get(&id).copied() else { return Ok(()) };
        if let Reply::Outcome(reply) = reply
            && let Outcome::Queued { .. } = reply.outcome
        {
            return Ok(());
        }
        self.pending.remove(&id);
        match (pending, outcome_of(reply)) {
            (Pending::Acquire { number, key, since_ns }, Ok(Outcome::Granted(grant))) => {
                if since_ns >= record.from_ns {
                    record.acquire.record(now.saturating_sub(since_ns));
                }
                let command = self.session.release(number, &self.keys[key], grant.token);
                return self.send(command, Pending::Release { number, since_ns: now });
            }
            (Pending::Release { number, since_ns }, Ok(Outcome::Released { .. })) => {
                if since_ns >= record.from_ns {
                    record.release.record(now.saturating_sub(since_ns));
                }
                self.cycle_over(number, now)?;
            }
            (Pending::Renew, _) => {
                if let Reply::Renewed(renewed) = reply
                    && renewed.results.iter().all(|result| result.error.is_none())
                {
                    return Ok(());
                }
                return Err(io::Error::other(format!("a renewal was answered with {reply:?}")));
            }
            (Pending::Acquire { number, .. } | Pending::Release { number, .. }, outcome) => {
                let code = outcome.err().unwrap_or(ErrorCode::INTERNAL);
                let count = record.errors.entry(code.name().to_owned()).or_insert(0);
                *count += 1;
                // Excess that is refused is what a run beyond the possible is about.
                if *count > ERRORS_MAX && code != ErrorCode::BUSY {
                    return Err(io::Error::other(format!("more than {ERRORS_MAX} answers {code}")));
                }
                self.cycle_over(number, now)?;
            }
        }
        Ok(())
    }

    fn cycle_over(&mut self, number: Number, now: u64) -> io::Result<()> {
        self.session.end(number);
        if let Mode::Closed { .. } = self.mode
            && !self.acquire(now)?
        {
            self.overdue.push_back(now);
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        loop {
            if self.unsent_from == self.unsent.len() {
                let spare = std::mem::take(&mut self.unsent);
                self.unsent = self.conn.take_output(spare);
                self.unsent_from = 0;
                if self.unsent.is_empty() {
                    return Ok(());
                }
            }
            match self.stream.write(&self.unsent[self.unsent_from..]) {
                Ok(len) => self.unsent_from += len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Acquires that were due at or after `from_ns` and are not granted.
    pub(super) fn unfinished(&self, from_ns: u64) -> u64 {
        let waiting = self.overdue.iter().filter(|since| **since >= from_ns).count();
        let sent = self.pending.values().filter(
            |pending| matches!(pending, Pending::Acquire { since_ns, .. } if *since_ns >= from_ns),
        );
        (waiting + sent.count()) as u64
    }
}

/// The keys of a connection. Making many takes its time, in which no session should wait.
pub(super) fn keys(index: usize, plan: Plan) -> Vec<Vec<u8>> {
    (0..plan.keys).map(|key| format!("bench/{index:03}/{key:06}").into_bytes()).collect()
}

/// Time between two renewals: a quarter of the TTL.
fn renew_every_ns(ttl_ms: u32) -> u64 {
    u64::from(ttl_ms) * 250_000
}

fn outcome_of(reply: &Reply) -> Result<Outcome, ErrorCode> {
    match reply {
        Reply::Outcome(reply) => match reply.outcome {
            Outcome::Refused { code, .. } => Err(code),
            outcome => Ok(outcome),
        },
        Reply::Error(error) => Err(error.code),
        _ => Err(ErrorCode::INTERNAL),
    }
}
