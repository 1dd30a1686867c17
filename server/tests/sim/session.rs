//! A client's lease in one shard, renewed on a connection of its own (DESIGN §5).
//!
//! The client counts each TTL from before the send of the renewal that was acknowledged, on its
//! own clock and less its margin. It extends nothing while the hold-set version that a reply
//! carries is not the one it knows; it reads its holds first.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::command::Caller;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{HoldSetVersion, LeaseId, Number, Secret, ShardId};
use leasehold_protocol::outcome::Grant;
use leasehold_protocol::reply::{RenewResult, Reply};
use leasehold_protocol::request::{HoldsRequest, RenewItem, RenewRequest, Request};
use leasehold_server::rt::channels::Notify;
use leasehold_server::rt::sim::{SimRt, SimWorld};
use openraft_rt::AsyncRuntime;

use crate::client::{Client, Line, TIMEOUT_MS};
use crate::history::Validity;

/// See the module.
pub(crate) struct Session {
    pub(crate) shard: ShardId,
    pub(crate) lease: LeaseId,
    pub(crate) secret: Secret,
    pub(crate) validity: Rc<Validity>,
    /// The next acquire's number.
    pub(crate) number: Cell<u64>,
    version: Cell<HoldSetVersion>,
    dead: Cell<bool>,
    closing: Cell<bool>,
    /// Renew without waiting for the next turn.
    hurry: Notify,
    /// A renewal was acknowledged, or the lease is dead.
    news: Notify,
    rate_ppm: i32,
}

impl Session {
    /// A lease whose opening was first sent at `sent_ns`.
    pub(crate) fn new(
        client: &Client,
        shard: ShardId,
        lease: LeaseId,
        secret: Secret,
        sent_ns: u64,
    ) -> Rc<Self> {
        let validity = Rc::new(Validity {
            shard,
            lease,
            ttl_ns: u64::from(client.ttl_ms) * 1_000_000,
            renewed_ns: Cell::new(0),
            sure_until_ns: Cell::new(0),
        });
        client.history.sessions.borrow_mut().push(validity.clone());
        let session = Self {
            shard,
            lease,
            secret,
            validity,
            number: Cell::new(1),
            version: Cell::new(HoldSetVersion(0)),
            dead: Cell::new(false),
            closing: Cell::new(false),
            hurry: Notify::new(),
            news: Notify::new(),
            rate_ppm: client.rate_ppm,
        };
        session.extend(sent_ns);
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

    pub(crate) fn die(&self) {
        self.dead.set(true);
        self.news.notify_all();
        self.hurry.notify_one();
    }

    /// No more renewals.
    pub(crate) fn close(&self) {
        self.closing.set(true);
        self.hurry.notify_one();
    }

    /// The margin of DESIGN's G3, and the client's clock may run fast.
    fn extend(&self, sent_ns: u64) {
        let ttl_ns = self.validity.ttl_ns;
        let margin_ns = (ttl_ns / 200).max(20_000_000);
        let local_ns = i128::from(ttl_ns - margin_ns);
        let true_ns = local_ns * 1_000_000 / (1_000_000 + i128::from(self.rate_ppm));
        self.validity.renewed_ns.set(sent_ns.max(self.validity.renewed_ns.get()));
        let until_ns = sent_ns + true_ns as u64;
        self.validity.sure_until_ns.set(until_ns.max(self.validity.sure_until_ns.get()));
    }

    /// A grant's versions are adopted only if the one before is known.
    pub(crate) fn granted(&self, grant: &Grant) -> bool {
        if self.version.get() == grant.version_before {
            self.version.set(grant.version_after);
        }
        self.version.get() == grant.version_after
    }

    /// Waits for a renewal that was sent from now on; false if the lease is dead.
    pub(crate) async fn confirmed(&self) -> bool {
        let from_ns = SimWorld::current().now_ns();
        while self.validity.renewed_ns.get() < from_ns && !self.dead.get() {
            self.hurry.notify_one();
            self.news.notified().await;
        }
        !self.dead.get()
    }

    /// Renews until the session ends. One task.
    pub(crate) async fn run(self: Rc<Self>, client: Rc<Client>) {
        let mut line = Line::new(&client);
        while !self.dead.get() && !self.closing.get() {
            let third_ms = u64::from(client.ttl_ms) / 3;
            let rest_ms = third_ms - client.rng.below(third_ms / 4);
            let rest = SimRt::sleep(Duration::from_millis(rest_ms));
            SimRt::select2(self.hurry.notified(), rest).await;
            if !self.dead.get() && !self.closing.get() {
                self.renew(&mut line).await;
            }
        }
    }

    async fn renew(&self, line: &mut Line<'_>) {
        let item =
            RenewItem { lease: self.lease, secret: self.secret, version: self.version.get() };
        let request = RenewRequest { shard: self.shard, timeout_ms: TIMEOUT_MS, items: vec![item] };
        let request = Request::Renew(request);
        loop {
            // Each repetition counts from its own send.
            let sent_ns = SimWorld::current().now_ns();
            match line.try_once(&request).await {
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
        let (lease, secret) = (self.lease, self.secret);
        let request = HoldsRequest { shard: self.shard, lease, secret, timeout_ms: TIMEOUT_MS };
        match line.ask(&Request::Holds(request)).await {
            Reply::Holds(holds) => {
                self.version.set(holds.version);
                self.hurry.notify_one();
            }
            Reply::Error(error) if error.code == ErrorCode::LEASE_DEAD => self.die(),
            other => panic!("a reading of holds gave {other:?}"),
        }
    }
}
