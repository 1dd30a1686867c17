//! Simulated clients: each keeps a session, takes keys in turn, reads now and then, and asks until
//! it knows.
//!
//! A client sends a command again under its number until it has an answer that is certain, to the
//! node it was pointed to or to any. It holds what it was granted for a while, gives it back, and
//! writes down what it was told and when. It may be stunned or killed at any moment.

mod line;
mod modes;
mod odd;
mod take;
mod watch;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use leasehold_bench::history::OpKind;
use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, Number, Secret, ShardId, Token};
use leasehold_protocol::limits::VALUE_LEN_MAX;
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::{CommandRequest, Freshness, GetRequest, Request};
use leasehold_protocol::shard::shard_of;
use leasehold_server::rt::sim::{DomainId, SimRng, SimRt, SimWorld};
use leasehold_server::rt::sim_net::SimHost;
use openraft_rt::AsyncRuntime;

use self::line::outcome;
pub(crate) use self::line::{Line, Wait};
pub(crate) use self::modes::MODE_KEYS;
use crate::feed::Feed;
use crate::history::{About, Call, History};
use crate::link::Link;
use crate::params::Params;
use crate::session::Session;
use crate::witness::Witness;

/// Within this a node answers.
pub(crate) const TIMEOUT_MS: u32 = 500;

/// A hold with a lease of its own, as one client tells another of it.
#[derive(Clone, Debug)]
struct Shared {
    shard: ShardId,
    lease: LeaseId,
    secret: Secret,
    key: Vec<u8>,
    token: Token,
}

/// What clients tell each other.
#[derive(Debug)]
pub(crate) struct Board {
    shared: RefCell<Vec<Shared>>,
    /// The limit of the pool, as they heard of it last.
    pool_limit: Cell<u32>,
}

impl Default for Board {
    fn default() -> Self {
        Self { shared: RefCell::default(), pool_limit: modes::first_limit() }
    }
}

pub(crate) struct Client {
    pub(crate) id: u64,
    pub(crate) host: SimHost,
    pub(crate) domain: DomainId,
    /// How fast its clock runs.
    pub(crate) rate_ppm: i32,
    pub(crate) ttl_ms: u32,
    pub(crate) rng: SimRng,
    pub(crate) params: Params,
    pub(crate) history: Rc<History>,
    pub(crate) board: Rc<Board>,
    pub(crate) witness: Rc<Witness>,
    /// Reads again and again, at most so long after one another, if at all.
    pub(crate) reads_ms: Option<u64>,
    /// Nodes that anybody ever heard of.
    pub(crate) known: Rc<RefCell<BTreeSet<u64>>>,
    /// What it watches.
    pub(crate) feeds: Vec<Rc<Feed>>,
    /// Set when the storm is over: what was kept is given back, so that every key can be served.
    pub(crate) calm: Rc<Cell<bool>>,
    /// Set when no further key is to be taken.
    pub(crate) stop: Rc<Cell<bool>>,
}

impl Client {
    pub(crate) async fn run(self: Rc<Self>) {
        if let Some(pause_ms) = self.reads_ms {
            drop(SimRt::spawn(self.clone().read_on(pause_ms)));
        }
        let watchers = self.feeds.iter().map(|feed| self.clone().watch_on(feed.clone()));
        let watchers: Vec<_> = watchers.map(SimRt::spawn).collect();
        let mut work = Work { line: Line::new(&self), me: self.clone(), sessions: BTreeMap::new() };
        let mut keeps = true;
        while !self.stop.get() {
            work.sessions.retain(|_, session| !session.is_dead());
            if self.calm.get() && std::mem::replace(&mut keeps, false) {
                work.close().await;
            }
            work.step().await;
            SimRt::sleep(Duration::from_millis(self.rng.below(20))).await;
        }
        // Some leave without a goodbye.
        if self.rng.chance(600) {
            work.close().await;
        }
        work.sessions.values().for_each(|session| session.close());
        for watcher in watchers {
            // If it was killed, so is this.
            let _ = watcher.await;
        }
    }

    async fn open(self: &Rc<Self>, shard: ShardId) -> Rc<Session> {
        let secret = Secret([self.id as u8; 16]);
        let (label, ttl_ms) = (self.label(), self.ttl_ms);
        let about = About { client: self.id, shard, ..About::default() };
        let call = self.history.call(about, OpKind::Open { ttl_ms });
        let open = command(shard, Command::Open { ttl_ms, secret, label });
        let sent_ns = SimWorld::current().now_ns();
        let answer = outcome(Line::new(self).ask(&open, Some(&call)).await);
        let Ok(Outcome::Opened { lease, .. }) = answer else {
            panic!("client {}: open gave {answer:?}", self.id)
        };
        call.opened(lease);
        call.answered(&answer);
        Session::new(self, (shard, lease), secret, ttl_ms, sent_ns)
    }

    /// Reads on a connection of its own, which stays where it is as long as it is answered.
    async fn read_on(self: Rc<Self>, pause_ms: u64) {
        let mut line = Line::new(&self);
        while !self.stop.get() {
            self.read(&mut line, &self.any_key()).await;
            SimRt::sleep(Duration::from_millis(self.rng.below(pause_ms))).await;
        }
    }

    /// The holder's token.
    async fn read(&self, line: &mut Line<'_>, key: &[u8]) -> Option<Token> {
        let shard = self.shard_of(key);
        let about = About { client: self.id, shard, key, ..About::default() };
        let call = self.history.call(about, OpKind::Get);
        let latest = self.witness.latest(shard);
        let freshness = Freshness::Linearizable;
        let get = GetRequest {
            key: key.to_vec(),
            holders_after: LeaseId(0),
            freshness,
            timeout_ms: TIMEOUT_MS,
        };
        match line.ask(&Request::Get(get), Some(&call)).await {
            Reply::Keys(reply) => {
                assert!(!reply.stale, "a linearizable read is not stale");
                let token = reply.keys[0].holders.first().map(|holder| holder.token);
                call.read(token, reply.revision.0);
                self.witness.read(latest, &reply);
                token
            }
            other => panic!("client {}: get gave {other:?}", self.id),
        }
    }

    /// Any node that there ever was, as far as clients know.
    fn any_node(&self) -> u64 {
        let known = self.known.borrow();
        let index = self.rng.below(known.len() as u64) as usize;
        *known.iter().nth(index).expect("the index is below the number")
    }

    /// Connects to a node and hears which others there are.
    async fn connect(&self, node: u64) -> Option<Link> {
        let link = Link::open(&self.host, node).await?;
        self.known.borrow_mut().extend(link.nodes());
        Some(link)
    }

    fn label(&self) -> Vec<u8> {
        format!("client {}", self.id).into_bytes()
    }

    fn shard_of(&self, key: &[u8]) -> ShardId {
        shard_of(key, self.params.shards)
    }

    fn any_key(&self) -> Vec<u8> {
        format!("key/{}", self.rng.below(self.params.keys)).into_bytes()
    }
}

/// What a client with this label gives a key with its acquire of this number: mostly little, now and
/// then nothing, or as much as fits.
pub(crate) fn value_of(label: &[u8], key: &[u8], number: Number) -> Vec<u8> {
    let number = number.0.to_le_bytes();
    let bytes = label.iter().chain(key).chain(&number);
    let seed = bytes.fold(0, |seed: u64, byte| seed.wrapping_mul(257).wrapping_add((*byte).into()));
    let rng = SimRng::new(seed);
    let len = if rng.chance(10) { VALUE_LEN_MAX } else { rng.below(100) as usize };
    (0..len).map(|_| rng.next() as u8).collect()
}

fn command(shard: ShardId, command: Command) -> Request {
    Request::Command(CommandRequest { shard, timeout_ms: TIMEOUT_MS, command })
}

/// The code of a refusal, wherever it was decided.
fn code_of(answer: &Result<Outcome, ErrorCode>) -> Option<ErrorCode> {
    match answer {
        Err(code) | Ok(Outcome::Refused { code, .. }) => Some(*code),
        Ok(_) => None,
    }
}

/// The session is over, whatever exactly the answer says.
fn is_over(answer: &Result<Outcome, ErrorCode>) -> bool {
    matches!(code_of(answer), Some(ErrorCode::LEASE_DEAD | ErrorCode::LEASE_LOST))
}

/// A client with its session: one lease in each shard where it ever took a key.
struct Work<'a> {
    line: Line<'a>,
    me: Rc<Client>,
    sessions: BTreeMap<ShardId, Rc<Session>>,
}

impl Work<'_> {
    async fn step(&mut self) {
        match self.me.rng.below(1_000) {
            0..130 => self.read().await,
            130..145 => self.close().await,
            145..165 => self.bad_input().await,
            165..178 => self.force().await,
            178..198 => self.use_shared().await,
            198..203 => self.open_many().await,
            203..430 => self.modes_once().await,
            _ => self.take_once().await,
        }
    }

    /// The lease of a shard, opened if there is none yet.
    async fn session(&mut self, shard: ShardId) -> Rc<Session> {
        if let Some(session) = self.sessions.get(&shard) {
            return session.clone();
        }
        let session = self.me.open(shard).await;
        self.sessions.insert(shard, session.clone());
        drop(SimRt::spawn(session.clone().run()));
        session
    }

    fn about<'a>(&self, session: &Session, key: &'a [u8]) -> About<'a> {
        let (shard, lease) = (session.shard, session.lease);
        About { client: self.me.id, shard, lease, number: None, key }
    }

    /// Sends a command until its outcome is certain, and records it.
    async fn settle(&mut self, shard: ShardId, body: Command, call: &Call) -> Answer {
        let answer = outcome(self.line.ask(&command(shard, body), Some(call)).await);
        call.answered(&answer);
        answer
    }

    async fn read(&mut self) {
        let key = self.me.any_key();
        self.read_key(&key).await;
    }

    /// The holder's token.
    async fn read_key(&mut self, key: &[u8]) -> Option<Token> {
        self.me.read(&mut self.line, key).await
    }

    /// Ends the session: every lease of it.
    async fn close(&mut self) {
        while let Some((shard, session)) = self.sessions.pop_first() {
            session.close();
            let call = self.me.history.call(self.about(&session, b""), OpKind::Close);
            let close = Command::Close { lease: session.lease, secret: session.secret };
            let answer = self.settle(shard, close, &call).await;
            // A retry of a close finds the lease dead.
            let closed = matches!(answer, Ok(Outcome::Closed { .. })) || is_over(&answer);
            assert!(closed, "client {}: close gave {answer:?}", self.me.id);
        }
    }
}

/// What a certain answer says.
type Answer = Result<Outcome, ErrorCode>;
