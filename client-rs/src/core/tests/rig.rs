//! A core, a clock that the test moves, and a network in which the test answers by hand.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::frame::Decoder;
use leasehold_protocol::ids::{
    ClusterId, HoldSetVersion, LeaseId, Mode, NodeId, Number, RequestId, Revision, Secret, ShardId,
    Token,
};
use leasehold_protocol::limits::CLIENT_BODY_MAX;
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::reply::{
    ErrorReply, HeldKey, HoldsReply, LeaderHint, NodeAddress, OutcomeReply, RenewReply,
    RenewResult, Reply, ServerHello,
};
use leasehold_protocol::request::{CommandRequest, RenewRequest, Request};

use super::super::{
    AcquireRequest, CallId, ConnId, Core, Event, Further, Held, HoldChange, HoldState, LossCause,
    OpId, Options, Output, SessionId, Timing, Wait, Wish,
};
use crate::clock::BootTime;
use crate::error::Failure;

pub(super) const TTL_MS: u64 = 10_000;
pub(super) const TTL: Duration = Duration::from_millis(TTL_MS);
/// How long a hold is valid after the send of what was acknowledged: the TTL less 0.5 %.
const VALID: Duration = Duration::from_millis(TTL_MS - 50);
pub(super) const CLUSTER: ClusterId = ClusterId([7; 16]);
pub(super) const SHARD: ShardId = ShardId(0);

pub(super) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// What is left of a hold's validity this long after the send.
pub(super) const fn left_after(elapsed: Duration) -> Duration {
    VALID.saturating_sub(elapsed)
}

/// A request as it arrived.
#[derive(Clone, Debug)]
pub(super) struct Sent {
    pub(super) conn: ConnId,
    pub(super) id: RequestId,
    pub(super) at: BootTime,
    pub(super) request: Request,
}

impl Sent {
    pub(super) fn command(&self) -> &Command {
        match &self.request {
            Request::Command(CommandRequest { command, .. }) => command,
            other => panic!("not a command: {other:?}"),
        }
    }

    pub(super) fn caller(&self) -> &Caller {
        match self.command() {
            Command::Acquire { caller, .. }
            | Command::AcquireAll { caller, .. }
            | Command::Convert { caller, .. }
            | Command::SetValue { caller, .. }
            | Command::Cancel { caller, .. }
            | Command::Release { caller, .. }
            | Command::ReleaseAll { caller, .. } => caller,
            other => panic!("not numbered: {other:?}"),
        }
    }

    pub(super) fn renew(&self) -> &RenewRequest {
        match &self.request {
            Request::Renew(renew) => renew,
            other => panic!("not a renewal: {other:?}"),
        }
    }
}

/// How an address answers a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    /// It completes the handshake under this id.
    Up(u64),
    /// It refuses the connection.
    Down,
    /// It never answers.
    Black,
    /// It belongs to another cluster.
    Foreign,
}

pub(super) struct Rig {
    pub(super) core: Core,
    pub(super) now: BootTime,
    pub(super) nodes: BTreeMap<String, Node>,
    pub(super) sent: VecDeque<Sent>,
    pub(super) events: VecDeque<Event>,
    /// Every attempt to connect.
    pub(super) connects: Vec<(BootTime, String)>,
    pub(super) conns: BTreeMap<ConnId, String>,
    decoders: BTreeMap<ConnId, Decoder>,
    pub(super) leader: u64,
    pub(super) shards: u32,
    /// Whom all nodes name.
    members: Vec<u64>,
}

impl Rig {
    /// A core that knows a cluster of three nodes and one shard, led by node 1.
    pub(super) fn new() -> Self {
        Self::with_shards(1)
    }

    pub(super) fn with_shards(shards: u32) -> Self {
        let mut rig = Self::unconnected();
        rig.shards = shards;
        rig.call_ping();
        rig.events.clear();
        rig
    }

    pub(super) fn unconnected() -> Self {
        let timing = Timing { connect: ms(1000), attempt: ms(2000), call: ms(10_000) };
        let nodes = (1..=3).map(|n| (format!("n{n}:1"), Node::Up(n))).collect();
        Self {
            core: Core::new(timing, (1..=3).map(|n| format!("n{n}:1")).collect(), 42),
            now: BootTime(1_000_000_000_000),
            nodes,
            sent: VecDeque::new(),
            events: VecDeque::new(),
            connects: Vec::new(),
            conns: BTreeMap::new(),
            decoders: BTreeMap::new(),
            leader: 1,
            shards: 1,
            members: vec![1, 2, 3],
        }
    }

    pub(super) fn call_ping(&mut self) {
        let call =
            super::super::CallRequest { shard: None, request: Request::Ping, timeout: ms(10_000) };
        self.core.call(self.now, call).expect("room");
        self.turn();
        if let Some(ping) = self.find(|request| matches!(request, Request::Ping)) {
            self.answer(&ping, &Reply::Pong);
        }
    }

    fn hello(&self, node: u64) -> ServerHello {
        let address = |n: &u64| NodeAddress { node: NodeId(*n), client_addr: format!("n{n}:1") };
        ServerHello {
            version: 1,
            cluster: CLUSTER,
            node: NodeId(node),
            shards: self.shards,
            key_hash: 1,
            features: 0,
            nodes: self.members.iter().map(address).collect(),
            leaders: (0..self.shards)
                .map(|n| LeaderHint { shard: ShardId(n), leader: NodeId(self.leader) })
                .collect(),
            server_version: "test".to_owned(),
        }
    }

    /// Carries out what the core wants: connections and handshakes are answered by `nodes`,
    /// requests are kept for the test.
    pub(super) fn turn(&mut self) {
        for _ in 0..1_000 {
            while let Some(output) = self.core.poll_output() {
                self.carry_out(output);
            }
            self.events.extend(std::iter::from_fn(|| self.core.poll_event()));
            match self.core.next_deadline() {
                Some(at) if at <= self.now => self.core.tick(self.now),
                _ => return,
            }
        }
        panic!("the core spins: {:?}", self.core);
    }

    fn carry_out(&mut self, output: Output) {
        match output {
            Output::Connect { conn, addr } => {
                self.connects.push((self.now, addr.clone()));
                let node = self.nodes[&addr];
                self.conns.insert(conn, addr);
                match node {
                    Node::Up(_) | Node::Foreign => self.core.conn_up(self.now, conn),
                    Node::Down => self.core.conn_down(self.now, conn, "refused"),
                    Node::Black => {}
                }
            }
            Output::Write { conn } => {
                let bytes = self.core.take_output(conn, Vec::new());
                let decoder = self.decoders.entry(conn).or_insert_with(wire_decoder);
                for (id, request) in requests(decoder, &bytes) {
                    self.arrived(conn, id, request);
                }
            }
            Output::Close { conn } => {
                self.conns.remove(&conn);
            }
        }
    }

    fn arrived(&mut self, conn: ConnId, id: RequestId, request: Request) {
        if !matches!(request, Request::Hello(_)) {
            return self.sent.push_back(Sent { conn, id, at: self.now, request });
        }
        let hello = match self.nodes[&self.conns[&conn]] {
            Node::Up(node) => self.hello(node),
            Node::Foreign => ServerHello { cluster: ClusterId([9; 16]), ..self.hello(9) },
            other => panic!("{other:?} is not connected"),
        };
        self.core.feed(self.now, conn, &frame(id, &Reply::Hello(hello)));
    }

    /// These are the members now, and the node of a connection says so.
    pub(super) fn news(&mut self, conn: ConnId, members: &[u64]) {
        self.members = members.to_vec();
        let hello = Reply::Hello(self.hello(1));
        self.core.feed(self.now, conn, &frame(RequestId(0), &hello));
        self.turn();
    }

    /// Moves the clock, stopping at each deadline.
    pub(super) fn advance(&mut self, by: Duration) {
        let end = self.now.after(by);
        self.turn();
        while let Some(at) = self.core.next_deadline()
            && at <= end
        {
            self.now = at.max(self.now);
            self.core.tick(self.now);
            self.turn();
        }
        self.now = end;
    }

    /// Moves the clock without letting the core run, as a suspended process experiences it.
    pub(super) fn sleep(&mut self, by: Duration) {
        self.now = self.now.after(by);
    }

    /// Takes the first request that fits.
    pub(super) fn find(&mut self, fits: impl Fn(&Request) -> bool) -> Option<Sent> {
        let index = self.sent.iter().position(|sent| fits(&sent.request))?;
        self.sent.remove(index)
    }

    fn take(&mut self, what: &str, fits: impl Fn(&Command) -> bool) -> Sent {
        let found = self.find(|request| match request {
            Request::Command(CommandRequest { command, .. }) => fits(command),
            _ => false,
        });
        found.unwrap_or_else(|| panic!("no {what} among {:?}", self.sent))
    }

    pub(super) fn take_open(&mut self) -> Sent {
        self.take("open", |command| matches!(command, Command::Open { .. }))
    }

    pub(super) fn take_acquire(&mut self) -> Sent {
        self.take("acquire", |command| {
            matches!(command, Command::Acquire { .. } | Command::AcquireAll { .. })
        })
    }

    pub(super) fn take_cancel(&mut self) -> Sent {
        self.take("cancel", |command| matches!(command, Command::Cancel { .. }))
    }

    pub(super) fn take_release(&mut self) -> Sent {
        self.take("release", |command| {
            matches!(
                command,
                Command::Release { .. } | Command::ReleaseOwn { .. } | Command::ReleaseAll { .. }
            )
        })
    }

    pub(super) fn take_change(&mut self) -> Sent {
        self.take("change", |command| {
            matches!(command, Command::Convert { .. } | Command::SetValue { .. })
        })
    }

    pub(super) fn take_close(&mut self) -> Sent {
        self.take("close", |command| matches!(command, Command::Close { .. }))
    }

    pub(super) fn take_renew(&mut self) -> Sent {
        let found = self.find(|request| matches!(request, Request::Renew(_)));
        found.unwrap_or_else(|| panic!("no renewal among {:?}", self.sent))
    }

    pub(super) fn take_holds(&mut self) -> Sent {
        let found = self.find(|request| matches!(request, Request::Holds(_)));
        found.unwrap_or_else(|| panic!("no holds request among {:?}", self.sent))
    }

    /// Renewals sent and not taken yet.
    pub(super) fn renewals(&self) -> usize {
        self.sent.iter().filter(|sent| matches!(sent.request, Request::Renew(_))).count()
    }

    pub(super) fn answer(&mut self, sent: &Sent, reply: &Reply) {
        self.core.feed(self.now, sent.conn, &frame(sent.id, reply));
        self.turn();
    }

    pub(super) fn outcome(&mut self, sent: &Sent, outcome: Outcome) {
        self.answer(sent, &Reply::Outcome(OutcomeReply { outcome, leader: NodeId(0) }));
    }

    pub(super) fn refuse(&mut self, sent: &Sent, code: ErrorCode) {
        self.outcome(sent, Outcome::Refused { code, token: Token(0), revision: Revision(1) });
    }

    pub(super) fn error(&mut self, sent: &Sent, code: ErrorCode, leader: u64) {
        let leader = NodeId(leader);
        let message = code.text().to_owned();
        self.answer(sent, &Reply::Error(ErrorReply { code, message, leader, retry_after_ms: 0 }));
    }

    pub(super) fn grant(&mut self, sent: &Sent, token: u64, before: u64) {
        self.grant_to(sent, 1, token, before);
    }

    pub(super) fn grant_to(&mut self, sent: &Sent, lease: u64, token: u64, before: u64) {
        self.outcome(sent, granted(lease, token, before));
    }

    pub(super) fn queued(&mut self, sent: &Sent) {
        self.outcome(sent, Outcome::Queued { position: 0, revision: Revision(1) });
    }

    /// Acknowledges every lease of a renewal at this version.
    pub(super) fn renewed(&mut self, sent: &Sent, version: u64) {
        let items = sent.renew().items.iter();
        let results = items.map(|item| RenewResult {
            lease: item.lease,
            error: None,
            ttl_ms: TTL_MS as u32,
            version: HoldSetVersion(version),
        });
        let results = results.collect();
        self.answer(sent, &Reply::Renewed(RenewReply { results, leader: NodeId(0) }));
    }

    pub(super) fn not_renewed(&mut self, sent: &Sent, code: ErrorCode) {
        let items = sent.renew().items.iter();
        let results = items.map(|item| RenewResult {
            lease: item.lease,
            error: Some(code),
            ttl_ms: 0,
            version: HoldSetVersion(0),
        });
        let results = results.collect();
        self.answer(sent, &Reply::Renewed(RenewReply { results, leader: NodeId(0) }));
    }

    pub(super) fn holds(&mut self, sent: &Sent, version: u64, holds: &[(u64, bool)]) {
        let held = |&(token, forced): &(u64, bool)| HeldKey {
            key: b"k".to_vec(),
            token: Token(token),
            mode: Mode::EXCLUSIVE,
            number: Number(1),
            forced,
            slots: Vec::new(),
            entries: 1,
            asked: false,
            floor: Token(token),
        };
        let reply = HoldsReply {
            revision: Revision(1),
            version: HoldSetVersion(version),
            holds: holds.iter().map(held).collect(),
            waits: Vec::new(),
        };
        self.answer(sent, &Reply::Holds(reply));
    }

    pub(super) fn break_conn(&mut self, conn: ConnId) {
        self.conns.remove(&conn);
        self.core.conn_down(self.now, conn, "reset");
        self.turn();
    }

    pub(super) fn session(&mut self) -> SessionId {
        let secret = Secret([5; 16]);
        self.core.open_session(self.now, TTL_MS, "test".to_owned(), secret).expect("in range")
    }

    pub(super) fn acquire(&mut self, session: SessionId, key: &str, wait: Wait) -> OpId {
        self.acquire_with(session, key, wait, None)
    }

    pub(super) fn acquire_with(
        &mut self,
        session: SessionId,
        key: &str,
        wait: Wait,
        own: Option<(u64, Secret)>,
    ) -> OpId {
        self.acquire_as(session, key, wait, own, Options::PLAIN)
    }

    pub(super) fn acquire_as(
        &mut self,
        session: SessionId,
        key: &str,
        wait: Wait,
        own: Option<(u64, Secret)>,
        options: Options,
    ) -> OpId {
        let (key, value) = (key.as_bytes().to_vec(), b"v".to_vec());
        let request = AcquireRequest { session, key, more: Vec::new(), value, wait, own, options };
        let op = self.core.acquire(self.now, request).expect("accepted");
        self.turn();
        op
    }

    /// Answers the open that the first acquire of a session needs: lease 1.
    pub(super) fn opened(&mut self) {
        self.opened_as(1);
    }

    pub(super) fn opened_as(&mut self, lease: u64) {
        let open = self.take_open();
        self.outcome(&open, Outcome::Opened { lease: LeaseId(lease), revision: Revision(1) });
    }

    /// A session that holds `k` under token 5.
    pub(super) fn holding(&mut self) -> (SessionId, OpId, Held) {
        let session = self.session();
        let op = self.acquire(session, "k", Wait::Unlimited);
        self.opened();
        let acquire = self.take_acquire();
        self.grant(&acquire, 5, 0);
        let held = self.acquired(op).expect("granted");
        (session, op, held)
    }

    /// Takes the result of an acquire.
    pub(super) fn acquired(&mut self, op: OpId) -> Result<Held, Failure> {
        self.try_acquired(op).unwrap_or_else(|| panic!("no result among {:?}", self.events))
    }

    pub(super) fn try_acquired(&mut self, wanted: OpId) -> Option<Result<Held, Failure>> {
        let found = self
            .events
            .iter()
            .position(|event| matches!(event, Event::Acquired { op, .. } if *op == wanted))?;
        match self.events.remove(found) {
            Some(Event::Acquired { result, .. }) => Some(result),
            _ => None,
        }
    }

    pub(super) fn acquire_several(&mut self, session: SessionId, keys: &[&str]) -> OpId {
        let (key, value) = (keys[0].as_bytes().to_vec(), b"v".to_vec());
        let more = keys[1..].iter().map(|key| further(key)).collect();
        let (wait, own, options) = (Wait::Unlimited, None, Options::PLAIN);
        let request = AcquireRequest { session, key, more, value, wait, own, options };
        let op = self.core.acquire(self.now, request).expect("accepted");
        self.turn();
        op
    }

    /// Starts a change of a hold.
    pub(super) fn change(&mut self, op: OpId, wish: Wish) -> CallId {
        let call = self.core.change(self.now, op, wish).expect("accepted");
        self.turn();
        call
    }

    /// Takes the result of a change.
    pub(super) fn changed(&mut self, call: CallId) -> Result<(), Failure> {
        self.try_changed(call).unwrap_or_else(|| panic!("no result among {:?}", self.events))
    }

    pub(super) fn try_changed(&mut self, wanted: CallId) -> Option<Result<(), Failure>> {
        let fits = |event: &Event| matches!(event, Event::Changed { call, .. } if *call == wanted);
        let found = self.events.iter().position(fits)?;
        match self.events.remove(found) {
            Some(Event::Changed { result, .. }) => Some(result),
            _ => None,
        }
    }

    /// All changes of a hold so far.
    pub(super) fn changes(&mut self, wanted: OpId) -> Vec<HoldChange> {
        let mut changes = Vec::new();
        self.events.retain(|event| match event {
            Event::Hold { op, change } if *op == wanted => {
                changes.push(*change);
                false
            }
            _ => true,
        });
        changes
    }

    pub(super) fn lost(&mut self, op: OpId) -> Vec<LossCause> {
        let changes = self.changes(op).into_iter();
        changes
            .filter_map(|change| match change {
                HoldChange::Lost(cause) => Some(cause),
                _ => None,
            })
            .collect()
    }

    pub(super) fn state(&self, held: &Held) -> HoldState {
        held.cell.state(self.now)
    }
}

/// The server's side of a connection.
pub(super) fn wire_decoder() -> Decoder {
    Decoder::new(CLIENT_BODY_MAX)
}

/// The requests that bytes complete.
pub(super) fn requests(decoder: &mut Decoder, bytes: &[u8]) -> Vec<(RequestId, Request)> {
    decoder.feed(bytes);
    let mut found = Vec::new();
    while let Some(frame) = decoder.next().expect("a client sends sound frames") {
        let request = Request::decode(frame.kind, frame.body).expect("and sound bodies");
        found.push((frame.id, request));
    }
    found
}

/// A reply as bytes.
pub(super) fn frame(id: RequestId, reply: &Reply) -> Vec<u8> {
    let mut bytes = Vec::new();
    reply.encode_frame(id, &mut bytes).expect("it fits");
    bytes
}

/// A further key of an acquire of several, exclusively.
pub(super) fn further(key: &str) -> Further {
    Further { key: key.as_bytes().to_vec(), mode: Mode::EXCLUSIVE, limit: 0 }
}

/// The grant of a further entry of a hold: the version stays.
pub(super) fn entered(token: u64, version: u64) -> Outcome {
    match granted(1, token, version) {
        Outcome::Granted(grant) => {
            Outcome::Granted(Grant { version_after: grant.version_before, ..grant })
        }
        other => other,
    }
}

pub(super) fn granted(lease: u64, token: u64, before: u64) -> Outcome {
    Outcome::Granted(Grant {
        lease: LeaseId(lease),
        token: Token(token),
        revision: Revision(1),
        version_before: HoldSetVersion(before),
        version_after: HoldSetVersion(before + 1),
        floor: Token(token),
    })
}
