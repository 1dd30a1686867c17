//! A node in this process: the real protocol and the real state machine, without Raft, disk and
//! failover, and with faults that can be planted. It tests the harness, not the server.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use leasehold_bench::clock::now_ns;
use leasehold_core::State;
use leasehold_protocol::command::Command;
use leasehold_protocol::conn::{ServerConn, ServerEvent};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::{ClusterId, LeaseId, NodeId, Number, RequestId, ShardId, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{
    ErrorReply, KeysReply, NodeAddress, NodeStatus, OutcomeReply, RenewReply, RenewResult, Reply,
    Role, ServerHello, ShardStatus, StatusReply,
};
use leasehold_protocol::request::{Freshness, GetRequest, RenewRequest, Request};
use leasehold_protocol::shard::KEY_HASH;

const CLUSTER: ClusterId = ClusterId([7; 16]);

/// Faults that make it wrong, or only rough.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    /// Every n-th answer is lost together with its connection; 0 for none.
    pub(crate) cut_every: u64,
    /// Every n-th grant is forgotten at once, as if it had never been durable.
    pub(crate) forget_every: u64,
    /// Leases end after this share of their TTL, in percent; 0 for the whole.
    pub(crate) early_percent: u64,
    /// After so many answers, nothing for so many milliseconds.
    pub(crate) pause: Option<(u64, u64)>,
    /// Every n-th read answers that nobody holds.
    pub(crate) blind_every: u64,
}

struct Link {
    conn: Mutex<ServerConn>,
    stream: TcpStream,
}

struct World {
    state: State,
    deadlines: BTreeMap<LeaseId, u64>,
    waits: BTreeMap<(LeaseId, Number), (Arc<Link>, RequestId)>,
    limits: BTreeMap<(LeaseId, Number), u64>,
    faults: Faults,
    answers: u64,
    grants: u64,
    reads: u64,
}

/// A request on its way to the thread that owns the state.
type Sent = (Arc<Link>, RequestId, Request);

/// A running fake node.
pub(crate) struct FakeNode {
    addr: SocketAddr,
    stop: Arc<AtomicBool>,
}

impl FakeNode {
    pub(crate) fn start(faults: Faults) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback works");
        let addr = listener.local_addr().expect("loopback works");
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = mpsc::channel();
        let stopped = Arc::clone(&stop);
        std::thread::spawn(move || World::new(faults).run(&receiver, &stopped));
        let stopped = Arc::clone(&stop);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let sender = sender.clone();
                std::thread::spawn(move || serve(stream, addr, &sender));
            }
        });
        Self { addr, stop }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.addr);
    }
}

fn serve(mut stream: TcpStream, addr: SocketAddr, sender: &mpsc::Sender<Sent>) {
    stream.set_nodelay(true).expect("loopback works");
    let conn = Mutex::new(ServerConn::new(CLUSTER, now_ns()));
    let link = Arc::new(Link { conn, stream: stream.try_clone().expect("loopback works") });
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return,
            Ok(len) => {
                link.conn.lock().expect("no panic under this lock").feed(&buffer[..len], now_ns());
            }
        }
        loop {
            let event = link.conn.lock().expect("no panic under this lock").poll_event();
            match event {
                None => break,
                Some(ServerEvent::Hello(_)) => {
                    link.conn.lock().expect("no panic under this lock").accept(hello(addr));
                }
                Some(ServerEvent::Request { id, request }) => {
                    if sender.send((Arc::clone(&link), id, request)).is_err() {
                        return;
                    }
                }
                Some(ServerEvent::Closed(_)) => {
                    let _ = link.flush();
                    return;
                }
            }
        }
        if link.flush().is_err() {
            return;
        }
    }
}

impl Link {
    fn flush(&self) -> io::Result<()> {
        let mut conn = self.conn.lock().expect("no panic under this lock");
        let output = conn.take_output(Vec::new());
        (&self.stream).write_all(&output)
    }
}

fn hello(addr: SocketAddr) -> ServerHello {
    ServerHello {
        version: 1,
        cluster: CLUSTER,
        node: NodeId(1),
        shards: 1,
        key_hash: KEY_HASH,
        features: 0,
        nodes: vec![NodeAddress { node: NodeId(1), client_addr: addr.to_string() }],
        leaders: Vec::new(),
        server_version: "fake".into(),
    }
}

impl World {
    fn new(faults: Faults) -> Self {
        let mut state = State::new(ShardId(0));
        state.apply(0, &Command::Begin { token_base: Token(1000) }, &mut Vec::new());
        Self {
            state,
            deadlines: BTreeMap::new(),
            waits: BTreeMap::new(),
            limits: BTreeMap::new(),
            faults,
            answers: 0,
            grants: 0,
            reads: 0,
        }
    }

    fn run(mut self, requests: &mpsc::Receiver<Sent>, stop: &AtomicBool) {
        while !stop.load(Ordering::SeqCst) {
            match requests.recv_timeout(Duration::from_millis(5)) {
                Ok((link, id, request)) => self.request(&link, id, request),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
            self.tick();
        }
    }

    fn request(&mut self, link: &Arc<Link>, id: RequestId, request: Request) {
        let reply = match request {
            Request::Command(request) => {
                let outcome = self.apply(&request.command);
                if let (Outcome::Queued { .. }, Command::Acquire { caller, .. }) =
                    (&outcome, &request.command)
                {
                    let wait = (caller.lease, caller.number);
                    self.waits.insert(wait, (Arc::clone(link), id));
                }
                Reply::Outcome(OutcomeReply { outcome, leader: NodeId(0) })
            }
            Request::Renew(renew) => self.renew(&renew),
            Request::Get(get) => self.get(&get),
            Request::List(list) => {
                let (keys, more) = self.state.list(&list.prefix, &list.after, list.limit as usize);
                let (shard, revision) = (ShardId(0), self.state.revision());
                Reply::Keys(KeysReply { shard, revision, stale: false, age_ms: None, keys, more })
            }
            Request::Status(_) => self.status(),
            Request::Holds(holds) => match self.state.holds(holds.lease) {
                Some(reply) => Reply::Holds(reply),
                None => Reply::Error(ErrorReply::new(ErrorCode::LEASE_DEAD, "the lease is dead")),
            },
            _ => Reply::Error(ErrorReply::new(ErrorCode::INTERNAL, "the fake cannot do this")),
        };
        self.answer(link, id, &reply);
    }

    fn answer(&mut self, link: &Arc<Link>, id: RequestId, reply: &Reply) {
        self.answers += 1;
        if let Some((after, pause_ms)) = self.faults.pause
            && after == self.answers
        {
            std::thread::sleep(Duration::from_millis(pause_ms));
        }
        if nth(self.faults.cut_every, self.answers) {
            let _ = link.stream.shutdown(std::net::Shutdown::Both);
            return;
        }
        link.conn.lock().expect("no panic under this lock").reply(id, reply);
        let _ = link.flush();
    }

    fn apply(&mut self, command: &Command) -> Outcome {
        let mut events = Vec::new();
        let outcome = self.state.apply(0, command, &mut events);
        self.follow(events);
        outcome
    }

    fn follow(&mut self, events: Vec<Event>) {
        for event in events {
            match event.kind {
                EventKind::LeaseOpened { lease, ttl_ms } => self.extend(lease, ttl_ms),
                EventKind::LeaseEnded { lease, .. } => {
                    self.deadlines.remove(&lease);
                }
                EventKind::Queued { lease, number, wait_ms, .. } if wait_ms != u32::MAX => {
                    let until = now_ns() + u64::from(wait_ms) * 1_000_000;
                    self.limits.insert((lease, number), until);
                }
                EventKind::WaitEnded { lease, number, outcome, .. } => {
                    self.limits.remove(&(lease, number));
                    if let Some((link, id)) = self.waits.remove(&(lease, number)) {
                        let leader = NodeId(0);
                        self.answer(&link, id, &Reply::Outcome(OutcomeReply { outcome, leader }));
                    }
                }
                EventKind::Granted { key, lease: _, token, .. } => {
                    self.grants += 1;
                    if nth(self.faults.forget_every, self.grants) {
                        let who = b"fault".to_vec();
                        let forget =
                            Command::ForceRelease { key, token, why: who.clone(), who, now: true };
                        self.apply(&forget);
                    }
                }
                _ => {}
            }
        }
    }

    fn extend(&mut self, lease: LeaseId, ttl_ms: u32) {
        let percent = if self.faults.early_percent == 0 { 100 } else { self.faults.early_percent };
        let ttl_ns = u64::from(ttl_ms) * 10_000 * percent;
        self.deadlines.insert(lease, now_ns() + ttl_ns);
    }

    fn renew(&mut self, renew: &RenewRequest) -> Reply {
        let results = renew.items.iter().map(|item| {
            let live = self.state.lease(item.lease).map(|lease| (lease.ttl_ms(), lease.version()));
            match live {
                Some((ttl_ms, version)) => {
                    self.extend(item.lease, ttl_ms);
                    RenewResult { lease: item.lease, error: None, ttl_ms, version }
                }
                None => RenewResult {
                    lease: item.lease,
                    error: Some(ErrorCode::LEASE_DEAD),
                    ttl_ms: 0,
                    version: item.version,
                },
            }
        });
        Reply::Renewed(RenewReply { results: results.collect(), leader: NodeId(0) })
    }

    fn get(&mut self, get: &GetRequest) -> Reply {
        self.reads += 1;
        let mut info = self.state.key_info_after(&get.key, get.holders_after);
        if nth(self.faults.blind_every, self.reads) {
            info.holders.clear();
        }
        Reply::Keys(KeysReply {
            shard: ShardId(0),
            revision: self.state.revision(),
            stale: get.freshness == Freshness::Stale,
            age_ms: None,
            keys: vec![info],
            more: false,
        })
    }

    fn status(&self) -> Reply {
        let shard = ShardStatus {
            shard: ShardId(0),
            role: Role::Leader,
            term: 1,
            leader: NodeId(1),
            last_index: 0,
            applied_index: 0,
            applied_revision: self.state.revision(),
            digest: self.state.digest(),
            snapshot_index: 0,
        };
        let node = NodeStatus {
            node: NodeId(1),
            client_addr: String::new(),
            reachable: true,
            version: "fake".into(),
            shards: vec![shard],
        };
        Reply::Status(StatusReply { cluster: CLUSTER, shards: 1, nodes: vec![node] })
    }

    fn tick(&mut self) {
        let now = now_ns();
        let late = |map: &BTreeMap<LeaseId, u64>| {
            map.iter().find(|(_, at)| **at <= now).map(|(lease, _)| *lease)
        };
        while let Some(lease) = late(&self.deadlines) {
            self.deadlines.remove(&lease);
            self.apply(&Command::Expire { lease });
        }
        let over: Vec<(LeaseId, Number)> =
            self.limits.iter().filter(|(_, at)| **at <= now).map(|(wait, _)| *wait).collect();
        for (lease, number) in over {
            self.limits.remove(&(lease, number));
            self.apply(&Command::TimeOut { lease, number });
        }
    }
}

fn nth(every: u64, count: u64) -> bool {
    every != 0 && count.is_multiple_of(every)
}
