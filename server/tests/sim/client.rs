//! Simulated clients: each keeps a session, takes keys in turn, reads now and then, and asks until
//! it knows.
//!
//! A client sends a command again under its number until it has an answer that is certain, to the
//! node it was pointed to or to any. It holds what it was granted for a while, gives it back, and
//! writes down what it was told and when. It may be stunned or killed at any moment.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::command::Command;
use leasehold_protocol::error::{ErrorClass, ErrorCode};
use leasehold_protocol::ids::{Mode, Number, Revision, Secret, ShardId};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::reply::{OutcomeReply, Reply};
use leasehold_protocol::request::{CommandRequest, Freshness, GetRequest, Request};
use leasehold_protocol::shard::shard_of;
use leasehold_server::rt::channels::Receiver;
use leasehold_server::rt::sim::{DomainId, SimRng, SimRt, SimWorld};
use leasehold_server::rt::sim_net::SimHost;
use openraft_rt::{AsyncRuntime, MpscReceiver};

use crate::history::{Acked, Change, Held, History, Read};
use crate::link::Link;
use crate::params::Params;
use crate::session::Session;

/// Within this a node answers.
pub(crate) const TIMEOUT_MS: u32 = 500;

/// How long a client waits for one answer.
const PATIENCE: Duration = Duration::from_millis(700);

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
    /// Set when no further key is to be taken.
    pub(crate) stop: Rc<Cell<bool>>,
}

/// How an acquire ended.
enum Ending {
    /// Granted; true if at once, in the first answer.
    Granted(Grant, bool),
    Without,
    SessionOver,
}

impl Client {
    pub(crate) async fn run(self: Rc<Self>) {
        let mut work = Work { line: Line::new(&self), sessions: BTreeMap::new() };
        while !self.stop.get() {
            work.bury();
            if self.rng.chance(150) {
                work.read().await;
            } else if self.rng.chance(10) {
                work.close().await;
            } else {
                work.take_once(&self).await;
            }
            SimRt::sleep(Duration::from_millis(self.rng.below(20))).await;
        }
        work.close().await;
    }

    async fn open(&self, shard: ShardId) -> Rc<Session> {
        let secret = Secret([self.id as u8; 16]);
        let label = format!("client {}", self.id).into_bytes();
        let open = command(shard, Command::Open { ttl_ms: self.ttl_ms, secret, label });
        let sent_ns = SimWorld::current().now_ns();
        match Line::new(self).ask(&open).await {
            Reply::Outcome(OutcomeReply {
                outcome: Outcome::Opened { lease, revision }, ..
            }) => {
                let session = Session::new(self, shard, lease, secret, sent_ns);
                self.note(&session, revision, Change::Opened);
                session
            }
            other => panic!("client {}: open gave {other:?}", self.id),
        }
    }

    fn note(&self, session: &Session, revision: Revision, change: Change) {
        let heard_ns = SimWorld::current().now_ns();
        let Session { shard, lease, .. } = *session;
        let acked = Acked { shard, lease, revision, heard_ns, change };
        self.history.acked.borrow_mut().push(acked);
    }

    fn shard_of(&self, key: &[u8]) -> ShardId {
        shard_of(key, self.params.shards)
    }
}

fn command(shard: ShardId, command: Command) -> Request {
    Request::Command(CommandRequest { shard, timeout_ms: TIMEOUT_MS, command })
}

/// The session is over, whatever exactly the answer says.
fn is_over(code: ErrorCode) -> bool {
    matches!(code, ErrorCode::LEASE_DEAD | ErrorCode::LEASE_LOST)
}

/// A client with its session: one lease in each shard where it ever took a key.
struct Work<'a> {
    line: Line<'a>,
    sessions: BTreeMap<ShardId, Rc<Session>>,
}

impl Work<'_> {
    /// The lease of a shard, opened if there is none yet.
    async fn session(&mut self, shard: ShardId, client: &Rc<Client>) -> Rc<Session> {
        if let Some(session) = self.sessions.get(&shard) {
            return session.clone();
        }
        let session = client.open(shard).await;
        self.sessions.insert(shard, session.clone());
        drop(SimRt::spawn(session.clone().run(client.clone())));
        session
    }

    /// Forgets leases that ended before they were to.
    fn bury(&mut self) {
        let before = self.sessions.len();
        self.sessions.retain(|_, session| !session.is_dead());
        let lost = &self.line.client.history.lost;
        lost.set(lost.get() + (before - self.sessions.len()) as u64);
    }

    fn any_key(&self) -> Vec<u8> {
        let client = self.line.client;
        format!("key/{}", client.rng.below(client.params.keys)).into_bytes()
    }

    /// Takes one key and gives it back.
    async fn take_once(&mut self, client: &Rc<Client>) {
        let key = self.any_key();
        let session = self.session(client.shard_of(&key), client).await;
        let asked_ns = SimWorld::current().now_ns();
        let ending = self.acquire(&session, &key).await;
        if let Ending::Granted(grant, at_once) = ending {
            self.hold(&session, key, asked_ns, grant, at_once).await;
        } else if matches!(ending, Ending::SessionOver) {
            session.die();
        }
        session.number.set(session.number.get() + 3);
    }

    async fn hold(
        &mut self,
        session: &Session,
        key: Vec<u8>,
        asked_ns: u64,
        grant: Grant,
        at_once: bool,
    ) {
        // After a wait or a retry only a renewal tells whether the lease still lives.
        let sure = session.granted(&grant) && at_once;
        if !sure && !session.confirmed().await {
            return;
        }
        let held = Rc::new(Held {
            key,
            lease: session.lease,
            token: grant.token,
            grant: grant.revision,
            asked_ns,
            known_ns: SimWorld::current().now_ns(),
            validity: session.validity.clone(),
            released: Cell::new(None),
        });
        let client = self.line.client;
        client.history.holds.borrow_mut().push(held.clone());
        // Now and then for so long that only renewals keep the hold.
        let hold_ms = if client.rng.chance(8) { 6_000 } else { client.params.hold_ms_max };
        SimRt::sleep(Duration::from_millis(client.rng.below(hold_ms + 1))).await;
        self.release(session, &held).await;
    }

    async fn release(&mut self, session: &Session, held: &Held) {
        let now_ns = SimWorld::current().now_ns();
        held.released.set(Some((now_ns, held.validity.sure_until_ns.get())));
        let caller = session.caller(2);
        let release = Command::Release { caller, key: held.key.clone(), token: held.token };
        match outcome(self.line.ask(&command(session.shard, release)).await) {
            Ok(Outcome::Released { token, revision }) => {
                let change = Change::Released { key: held.key.clone(), token };
                self.line.client.note(session, revision, change);
            }
            Err(code) if is_over(code) => session.die(),
            other => panic!("client {}: release gave {other:?}", self.line.client.id),
        }
    }

    async fn acquire(&mut self, session: &Session, key: &[u8]) -> Ending {
        let rng = &self.line.client.rng;
        let patience_ms = if rng.chance(200) { 0 } else { 50 + rng.below(6_000) };
        let acquire = Command::Acquire {
            caller: session.caller(0),
            key: key.to_vec(),
            mode: Mode::EXCLUSIVE,
            own: None,
            value: self.line.client.id.to_le_bytes().to_vec(),
            wait_ms: patience_ms as u32,
        };
        let acquire = command(session.shard, acquire);
        let give_up_ns = SimWorld::current().now_ns() + patience_ms * 1_000_000;
        let mut first = true;
        let answer = self.line.ask_and_wait(&acquire, give_up_ns, &mut first).await;
        match answer.map(outcome) {
            Some(Ok(Outcome::Granted(grant))) => Ending::Granted(grant, first),
            Some(Ok(Outcome::TimedOut { .. }) | Err(ErrorCode::HELD)) => Ending::Without,
            Some(Err(code)) if is_over(code) => Ending::SessionOver,
            None if patience_ms > 0 => self.cancel(session).await,
            other => panic!("client {}: acquire gave {other:?}", self.line.client.id),
        }
    }

    async fn cancel(&mut self, session: &Session) -> Ending {
        let caller = session.caller(1);
        let cancel = Command::Cancel { caller, release_if_granted: false };
        let cancel = command(session.shard, cancel);
        match outcome(self.line.ask(&cancel).await) {
            Ok(Outcome::Cancelled { revision }) => {
                let change = Change::WaitEnded { number: Number(session.number.get()) };
                self.line.client.note(session, revision, change);
                Ending::Without
            }
            Ok(Outcome::Granted(grant)) => Ending::Granted(grant, false),
            Err(code) if is_over(code) => Ending::SessionOver,
            // The wait had ended by itself, or the acquire never arrived and never will be executed.
            Ok(Outcome::TimedOut { .. })
            | Err(ErrorCode::CANCELLED | ErrorCode::HELD | ErrorCode::TIMED_OUT) => Ending::Without,
            other => panic!("client {}: cancel gave {other:?}", self.line.client.id),
        }
    }

    async fn read(&mut self) {
        let key = self.any_key();
        let asked_ns = SimWorld::current().now_ns();
        let freshness = Freshness::Linearizable;
        let get = GetRequest { key: key.clone(), freshness, timeout_ms: TIMEOUT_MS };
        match self.line.ask(&Request::Get(get)).await {
            Reply::Keys(reply) => {
                assert!(!reply.stale, "a linearizable read is not stale");
                let holder = reply.keys[0].holders.first().map(|h| (h.lease, h.token));
                let read =
                    Read { shard: reply.shard, key, asked_ns, revision: reply.revision, holder };
                self.line.client.history.reads.borrow_mut().push(read);
            }
            other => panic!("client {}: get gave {other:?}", self.line.client.id),
        }
    }

    /// Ends the session: every lease of it.
    async fn close(&mut self) {
        while let Some((shard, session)) = self.sessions.pop_first() {
            session.close();
            let close = Command::Close { lease: session.lease, secret: session.secret };
            match outcome(self.line.ask(&command(shard, close)).await) {
                Ok(Outcome::Closed { revision }) => {
                    self.line.client.note(&session, revision, Change::Closed);
                }
                // A retry of a close finds the lease dead.
                Err(code) if is_over(code) => {}
                other => panic!("client {}: close gave {other:?}", self.line.client.id),
            }
        }
    }
}

/// What a definite answer says.
fn outcome(reply: Reply) -> Result<Outcome, ErrorCode> {
    match reply {
        Reply::Outcome(OutcomeReply { outcome: Outcome::Refused { code, .. }, .. }) => Err(code),
        Reply::Outcome(reply) => Ok(reply.outcome),
        Reply::Error(error) => Err(error.code),
        other => panic!("no outcome: {other:?}"),
    }
}

/// A code that a reply carries, if it carries one.
fn code_of(reply: &Reply) -> Option<ErrorCode> {
    match reply {
        Reply::Outcome(OutcomeReply { outcome: Outcome::Refused { code, .. }, .. }) => Some(*code),
        Reply::Error(error) => Some(error.code),
        _ => None,
    }
}

/// A client's way to the cluster: one connection at a time.
pub(crate) struct Line<'a> {
    pub(crate) client: &'a Client,
    link: Option<Link>,
    node: u64,
}

impl<'a> Line<'a> {
    pub(crate) fn new(client: &'a Client) -> Self {
        Self { client, link: None, node: 1 + client.rng.below(client.params.nodes) }
    }

    pub(crate) async fn pause(&self) {
        self.client.history.retries.set(self.client.history.retries.get() + 1);
        SimRt::sleep(Duration::from_millis(1 + self.client.rng.below(40))).await;
    }

    /// Asks until the answer is certain.
    pub(crate) async fn ask(&mut self, request: &Request) -> Reply {
        loop {
            if let Some(reply) = self.try_once(request).await {
                return reply;
            }
            self.pause().await;
        }
    }

    /// Sends once; `None` if the answer leaves anything open.
    pub(crate) async fn try_once(&mut self, request: &Request) -> Option<Reply> {
        let mut answers = self.send(request).await?;
        self.next(&mut answers, PATIENCE).await
    }

    /// The same for an acquire, through its wait; `None` when it is time to give up. `first` is
    /// true if the answer is the first one to the first send.
    async fn ask_and_wait(
        &mut self,
        request: &Request,
        give_up_ns: u64,
        first: &mut bool,
    ) -> Option<Reply> {
        loop {
            if let Some(mut answers) = self.send(request).await {
                let mut patience = PATIENCE;
                while let Some(reply) = self.next(&mut answers, patience).await {
                    if reply.is_final() {
                        return Some(reply);
                    }
                    *first = false;
                    if SimWorld::current().now_ns() >= give_up_ns {
                        return None;
                    }
                    // A wait that stays silent is asked for again, here or elsewhere.
                    patience = Duration::from_millis(200 + self.client.rng.below(2_000));
                }
            }
            *first = false;
            self.pause().await;
        }
    }

    async fn send(&mut self, request: &Request) -> Option<Receiver<Reply>> {
        if self.link.is_none() {
            self.link = Link::open(&self.client.host, self.node).await;
        }
        let sent = self.link.as_ref().map(|link| link.request(request));
        if sent.is_none() {
            self.turn();
        }
        sent
    }

    /// The next answer. Without one the connection is given up; a retryable one may name another
    /// node.
    async fn next(&mut self, answers: &mut Receiver<Reply>, patience: Duration) -> Option<Reply> {
        let Ok(Some(reply)) = SimRt::timeout(patience, answers.recv()).await else {
            self.client.history.unknown.set(self.client.history.unknown.get() + 1);
            self.turn();
            return None;
        };
        let open = code_of(&reply).is_some_and(|code| code.class() != ErrorClass::NotApplied);
        if !open {
            return Some(reply);
        }
        if let Reply::Error(error) = &reply {
            let leader = error.leader.0;
            // Not always where it is told to: any node takes any request.
            if leader > 0 && leader != self.node && self.client.rng.chance(700) {
                self.link = None;
                self.node = leader;
            }
        }
        None
    }

    /// To any node, over a new connection.
    fn turn(&mut self) {
        self.link = None;
        self.node = 1 + self.client.rng.below(self.client.params.nodes);
    }
}
