//! A client's lease in one shard, or that of one hold, renewed on a connection of its own
//! (DESIGN §5).
//!
//! The client counts each TTL from before the send of the renewal that was acknowledged, on its
//! own clock and less its margin. It extends nothing while the hold-set version that a reply
//! carries is not the one it knows; it reads its holds first.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::command::Caller;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{HoldSetVersion, LeaseId, Mode, Number, Secret, ShardId, Token};
use leasehold_protocol::outcome::Grant;
use leasehold_protocol::reply::{HeldKey, RenewResult, Reply};
use leasehold_protocol::request::{HoldsRequest, RenewItem, RenewRequest, Request};
use leasehold_server::rt::channels::Notify;
use leasehold_server::rt::sim::{SimRt, SimWorld};
use openraft_rt::AsyncRuntime;

use crate::client::{Client, Line, TIMEOUT_MS};
use crate::history::Held;

/// No lease has this version: whatever a reply says, the holds are read.
const NOT_KNOWN: HoldSetVersion = HoldSetVersion(u64::MAX);

/// See the module.
pub(crate) struct Session {
    pub(crate) shard: ShardId,
    pub(crate) lease: LeaseId,
    pub(crate) secret: Secret,
    pub(crate) ttl_ms: u32,
    /// The hold's own, which others may end.
    own: bool,
    client: Rc<Client>,
    /// The next acquire's number.
    pub(crate) number: Cell<u64>,
    /// What it holds, as far as its client knows.
    holds: RefCell<Vec<Rc<Held>>>,
    /// Send of the last renewal (or open) that was acknowledged.
    renewed_ns: Cell<u64>,
    sure_until_ns: Cell<u64>,
    version: Cell<HoldSetVersion>,
    dead: Cell<bool>,
    closing: Cell<bool>,
    /// Renew without waiting for the next turn.
    hurry: Notify,
    /// A renewal was acknowledged, or the lease is dead.
    news: Notify,
}

impl Session {
    /// A lease whose opening was first sent at `sent_ns` and has been acknowledged.
    pub(crate) fn new(
        client: &Rc<Client>,
        (shard, lease): (ShardId, LeaseId),
        secret: Secret,
        ttl_ms: u32,
        sent_ns: u64,
    ) -> Rc<Self> {
        let session = Self {
            shard,
            lease,
            secret,
            ttl_ms,
            own: false,
            client: client.clone(),
            number: Cell::new(1),
            holds: RefCell::default(),
            renewed_ns: Cell::new(0),
            sure_until_ns: Cell::new(0),
            version: Cell::new(HoldSetVersion(0)),
            dead: Cell::new(false),
            closing: Cell::new(false),
            hurry: Notify::new(),
            news: Notify::new(),
        };
        session.extend(sent_ns);
        Rc::new(session)
    }

    /// The lease of one hold, whose acquire was first sent at `sent_ns`.
    pub(crate) fn of_hold(
        client: &Rc<Client>,
        shard: ShardId,
        grant: &Grant,
        (secret, ttl_ms): (Secret, u32),
        sent_ns: u64,
    ) -> Rc<Self> {
        let session = Self::new(client, (shard, grant.lease), secret, ttl_ms, sent_ns);
        let mut session = Rc::into_inner(session).expect("nobody has it yet");
        session.own = true;
        session.version.set(HoldSetVersion(1));
        Rc::new(session)
    }

    /// The caller of the command `offset` after the acquire under way.
    pub(crate) fn caller(&self, offset: u64) -> Caller {
        let number = self.number.get();
        Caller {
            lease: self.lease,
            secret: self.secret,
            number: Number(number + offset),
            floor: Number(number - 1),
            acks: vec![],
        }
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.get()
    }

    /// The cluster said that the lease is dead.
    pub(crate) fn die(&self) {
        if !self.dead.replace(true) && !self.closing.get() && !self.own {
            self.client.history.lost(self.client.id, self.shard, self.lease);
        }
        self.holds.take().iter().for_each(|held| held.end());
        self.news.notify_all();
        self.hurry.notify_one();
    }

    /// No more renewals, and nothing that it holds is sure any more.
    pub(crate) fn close(&self) {
        self.closing.set(true);
        self.holds.take().iter().for_each(|held| held.end());
        self.hurry.notify_one();
    }

    /// The margin of DESIGN's G3, and the client's clock may run fast.
    fn extend(&self, sent_ns: u64) {
        let lease = (self.shard, self.lease);
        self.client.history.renewed(self.client.id, lease, self.ttl_ms, sent_ns);
        self.client.witness.renewed(lease, self.ttl_ms, sent_ns);
        let ttl_ns = u64::from(self.ttl_ms) * 1_000_000;
        let margin_ns = (ttl_ns / 200).max(20_000_000);
        let local_ns = i128::from(ttl_ns - margin_ns);
        let true_ns = local_ns * 1_000_000 / (1_000_000 + i128::from(self.client.rate_ppm));
        let until_ns = sent_ns + true_ns as u64;
        self.renewed_ns.set(sent_ns.max(self.renewed_ns.get()));
        self.sure_until_ns.set(until_ns.max(self.sure_until_ns.get()));
        self.holds.borrow().iter().for_each(|held| held.extend(until_ns));
    }

    /// A grant's versions are adopted only if the one before is known. Otherwise the holds are read
    /// before anything is extended: the grant may be an old one, and what was read came before it.
    pub(crate) fn granted(&self, grant: &Grant) -> bool {
        if self.version.get() == grant.version_before {
            self.version.set(grant.version_after);
        }
        let known = self.version.get() == grant.version_after;
        if !known {
            self.version.set(NOT_KNOWN);
        }
        known
    }

    /// A hold of this lease: sure as long as the lease is, or, if its grant may be an old one, from
    /// the next renewal on.
    pub(crate) fn hold(&self, key: Vec<u8>, token: Token, current: bool) -> Rc<Held> {
        self.hold_in(Mode::EXCLUSIVE, key, token, current)
    }

    pub(crate) fn hold_in(
        &self,
        mode: Mode,
        key: Vec<u8>,
        token: Token,
        current: bool,
    ) -> Rc<Held> {
        let sure_until_ns = if current { self.sure_until_ns.get() } else { 0 };
        let held = Held::new(self.client.id as u32, (key, token, mode), sure_until_ns);
        self.holds.borrow_mut().push(held.clone());
        self.client.history.holds(&held);
        held
    }

    /// What it holds of these keys.
    pub(crate) fn holds_of(&self, keys: &[Vec<u8>]) -> Vec<Rc<Held>> {
        let holds = self.holds.borrow();
        holds.iter().filter(|held| keys.contains(&held.key)).cloned().collect()
    }

    /// A hold is given back: nothing extends it any more.
    pub(crate) fn give_back(&self, held: &Rc<Held>) {
        held.end();
        self.holds.borrow_mut().retain(|other| !Rc::ptr_eq(other, held));
    }

    /// Waits for a renewal that was sent from now on; false if the lease is dead.
    pub(crate) async fn confirmed(&self) -> bool {
        let from_ns = SimWorld::current().now_ns();
        while self.renewed_ns.get() < from_ns && !self.dead.get() && !self.closing.get() {
            self.hurry.notify_one();
            self.news.notified().await;
        }
        !self.dead.get()
    }

    /// Renews until the session ends. One task.
    pub(crate) async fn run(self: Rc<Self>) {
        let client = self.client.clone();
        let mut line = Line::new(&client);
        while !self.dead.get() && !self.closing.get() {
            let third_ms = u64::from(self.ttl_ms) / 3;
            let rest_ms = third_ms - client.rng.below(third_ms / 4);
            let rest = SimRt::sleep(Duration::from_millis(rest_ms));
            SimRt::select2(self.hurry.notified(), rest).await;
            if !self.dead.get() && !self.closing.get() {
                self.renew(&mut line).await;
            }
        }
    }

    /// Renews until something is settled.
    pub(crate) async fn renew(&self, line: &mut Line<'_>) {
        loop {
            let item =
                RenewItem { lease: self.lease, secret: self.secret, version: self.version.get() };
            let request =
                RenewRequest { shard: self.shard, timeout_ms: TIMEOUT_MS, items: vec![item] };
            // Each repetition counts from its own send.
            let sent_ns = SimWorld::current().now_ns();
            match line.try_once(&Request::Renew(request), None).await {
                Some(Reply::Renewed(reply)) => match self.take(reply.results[0], sent_ns) {
                    Some(true) => return,
                    Some(false) => return self.reread(line).await,
                    None => line.pause().await,
                },
                Some(other) => panic!("a renewal gave {other:?}"),
                None => line.pause().await,
            }
            if self.closing.get() {
                return;
            }
        }
    }

    /// `Some(true)` if it settled something, `Some(false)` if the version is not the known one.
    fn take(&self, result: RenewResult, sent_ns: u64) -> Option<bool> {
        match result.error {
            None if result.version == self.version.get() => {
                self.extend(sent_ns);
                self.news.notify_all();
                Some(true)
            }
            None => Some(false),
            Some(ErrorCode::LEASE_DEAD) => {
                self.die();
                Some(true)
            }
            Some(ErrorCode::LEASE_EXPIRING) => None,
            Some(code) => panic!("a renewal gave {code}"),
        }
    }

    async fn reread(&self, line: &mut Line<'_>) {
        let asked_ns = SimWorld::current().now_ns();
        let Self { shard, lease, secret, .. } = *self;
        let request = HoldsRequest { shard, lease, secret, timeout_ms: TIMEOUT_MS };
        let latest = self.client.witness.latest(shard);
        let reply = line.ask(&Request::Holds(request), None).await;
        self.client.witness.holds(latest, &reply);
        match reply {
            Reply::Holds(holds) => {
                let all = self.compare(&holds.holds, asked_ns);
                self.version.set(if all { holds.version } else { NOT_KNOWN });
                self.hurry.notify_one();
            }
            Reply::Error(error) if error.code == ErrorCode::LEASE_DEAD => self.die(),
            other => panic!("a reading of holds gave {other:?}"),
        }
    }

    /// What the lease did not hold any more, or is forced, is extended no more. Of what came after
    /// the question the answer says nothing: false if there is any.
    fn compare(&self, present: &[HeldKey], asked_ns: u64) -> bool {
        let mut all = true;
        self.holds.borrow_mut().retain(|held| {
            let kept = present.iter().find(|other| other.token == held.token);
            let goes_on = kept.map_or(held.told_ns >= asked_ns, |kept| !kept.forced);
            all &= kept.is_some() || !goes_on;
            if !goes_on {
                held.end();
            }
            goes_on
        });
        all
    }
}
