//! Sessions: a TTL, a label, a secret, and one lease in each shard they use.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, Secret, ShardId};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{OutcomeReply, Reply};
use leasehold_protocol::shard::check_label;

use super::acquire::ttl;
use super::cell::LossCause;
use super::exchange::{Exchange, Owner};
use super::lease::refusal_of;
use super::route::Lane;
use super::{Core, Event, LeaseKey, SESSIONS_MAX, SessionId, Timer};
use crate::clock::BootTime;
use crate::error::Failure;

/// See the module.
#[derive(Debug)]
pub(crate) struct Session {
    pub(super) ttl: Duration,
    pub(super) label: String,
    pub(super) secret: Secret,
    pub(super) leases: BTreeMap<ShardId, LeaseKey>,
    pub(super) closing: bool,
    /// Closes without an answer.
    closes: usize,
}

impl Core {
    /// Makes a session. Nothing is sent: its leases are opened where it first needs them.
    pub(crate) fn open_session(
        &mut self,
        now: BootTime,
        ttl_ms: u64,
        label: String,
        secret: Secret,
    ) -> Result<SessionId, Failure> {
        self.tick(now);
        let ttl = Duration::from_millis(u64::from(ttl(ttl_ms)?));
        check_label(label.as_bytes()).map_err(Failure::of)?;
        if self.sessions.len() >= SESSIONS_MAX {
            let text = format!("this client has {SESSIONS_MAX} sessions already");
            return Err(Failure::new(ErrorCode::BUSY, text));
        }
        let id = SessionId(self.fresh());
        let leases = BTreeMap::new();
        let session = Session { ttl, label, secret, leases, closing: false, closes: 0 };
        self.sessions.insert(id, session);
        Ok(id)
    }

    /// Ends a session with all it holds and waits for; holds with a lease of their own stay.
    /// `Event::Closed` follows. From here on nothing renews it.
    pub(crate) fn close_session(&mut self, now: BootTime, id: SessionId) {
        self.tick(now);
        let Some(session) = self.sessions.get_mut(&id).filter(|session| !session.closing) else {
            return;
        };
        session.closing = true;
        let keys: Vec<LeaseKey> = session.leases.values().copied().collect();
        let longest = self.now.after(session.ttl);
        let mut open = Vec::new();
        for key in keys {
            let lease = &self.leases[&key];
            if let Some(id) = lease.id {
                open.push((lease.shard, id, lease.secret));
            }
            self.end_lease(key, LossCause::SessionClosed);
        }
        self.sessions.get_mut(&id).expect("still closing").closes = open.len();
        self.timers.set(Timer::Session(id), self.now.after(self.timing.call));
        for (shard, lease, secret) in &open {
            self.start_close(*shard, *lease, *secret, Some(id), longest);
        }
        if open.is_empty() {
            self.session_gone(id, Ok(()));
        }
    }

    /// Tells the cluster that a lease is not needed any more. After its TTL nobody needs to.
    pub(super) fn start_close(
        &mut self,
        shard: ShardId,
        lease: LeaseId,
        secret: Secret,
        session: Option<SessionId>,
        deadline: BootTime,
    ) {
        let owner = Owner::Close { shard, lease, secret, session };
        self.start(Exchange::new(owner, Some(shard), Lane::Lease, deadline));
    }

    pub(super) fn close_answered(
        &mut self,
        session: Option<SessionId>,
        result: Result<Reply, Failure>,
    ) {
        let Some(id) = session else { return };
        let Some(owner) = self.sessions.get_mut(&id) else { return };
        owner.closes -= 1;
        let last = owner.closes == 0;
        let failure = match result {
            Ok(Reply::Outcome(OutcomeReply { outcome: Outcome::Closed { .. }, .. })) => None,
            Ok(reply) => Some(refusal_of(&reply)),
            Err(failure) => Some(failure),
        };
        match failure {
            // Dead already is as good as closed.
            Some(failure) if failure.code != ErrorCode::LEASE_DEAD => {
                self.session_gone(id, Err(failure));
            }
            _ if last => self.session_gone(id, Ok(())),
            _ => {}
        }
    }

    /// A close that somebody waits for was not confirmed in time.
    pub(super) fn session_due(&mut self, id: SessionId) {
        self.session_gone(id, Err(Failure::of(ErrorCode::DEADLINE)));
    }

    fn session_gone(&mut self, id: SessionId, result: Result<(), Failure>) {
        self.timers.cancel(Timer::Session(id));
        if self.sessions.remove(&id).is_some() {
            self.events.push_back(Event::Closed { session: id, result });
        }
    }
}
