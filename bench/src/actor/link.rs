//! The actor's connection: retries, hints, and the renewals that ride on it.

use std::io;
use std::time::Duration;

use leasehold_protocol::error::{ErrorClass, ErrorCode};
use leasehold_protocol::ids::{LeaseId, NodeId, RequestId};
use leasehold_protocol::outcome::Outcome as WireOutcome;
use leasehold_protocol::reply::{RenewReply, Reply};
use leasehold_protocol::request::{RenewItem, RenewRequest, Request};

use super::{Actor, TIMEOUT_MS};
use crate::clock::{Deadline, now_ns};
use crate::history::{Lost, Record, Renewal};
use crate::wire::Wire;

/// A request or a renewal without an answer for this long moves the actor to another node.
const SILENCE: Duration = Duration::from_millis(1_500);
/// Longest sleep before the stop flag is looked at again.
const TURN: Duration = Duration::from_millis(20);
/// Pause before a retry.
const BACK_OFF: Duration = Duration::from_millis(15);
/// Within this time a connection is made.
const CONNECT: Duration = Duration::from_millis(500);

/// A message on its way that restarts the lease's TTL.
#[derive(Clone, Copy, Debug)]
pub(super) struct RenewalSent {
    id: RequestId,
    send_ns: u64,
}

impl Actor {
    /// Sends a request until a final answer that is no reason to retry; `None` when stopped.
    /// `interim` says whether a reply is only an interim one.
    pub(super) fn ask(
        &mut self,
        request: &Request,
        deadline: Deadline,
        interim: &mut dyn FnMut(u32, &Reply) -> bool,
    ) -> (u32, Option<Reply>) {
        let mut attempts = 0;
        while !deadline.passed() && !self.stopped() {
            if !self.connect() {
                continue;
            }
            attempts += 1;
            match self.attempt(request, deadline, &mut |reply| interim(attempts, reply)) {
                Ok(Some(Reply::Error(error))) if error.code == ErrorCode::NODE_REMOVED => {
                    self.drop_wire();
                    std::thread::sleep(BACK_OFF);
                }
                Ok(Some(reply)) => match retry_hint(&reply) {
                    None => return (attempts, Some(reply)),
                    Some(leader) => self.follow(leader),
                },
                Ok(None) => {}
                Err(_) => self.drop_wire(),
            }
        }
        (attempts, None)
    }

    /// One send, and the wait for its answer. `None` when stopped.
    fn attempt(
        &mut self,
        request: &Request,
        deadline: Deadline,
        interim: &mut dyn FnMut(&Reply) -> bool,
    ) -> io::Result<Option<Reply>> {
        let wire = self.wire.as_mut().expect("connected before an attempt");
        let sent = wire.send(request)?;
        let mut silent = Some(Deadline::after(SILENCE));
        while !deadline.passed() && !self.stopped() {
            if let Some((id, reply)) = self.turn(deadline)? {
                if id == sent && !interim(&reply) {
                    return Ok(Some(reply));
                }
                silent = silent.filter(|_| id != sent);
            }
            if silent.is_some_and(Deadline::passed) {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(None)
    }

    /// Renews if it is time and reads one reply that is not a renewal's.
    pub(super) fn turn(&mut self, deadline: Deadline) -> io::Result<Option<(RequestId, Reply)>> {
        self.renew()?;
        let Some(wire) = self.wire.as_mut() else { return Err(io::ErrorKind::NotConnected.into()) };
        let until = Deadline::after(TURN.min(deadline.left()));
        let Some((id, reply)) = wire.recv(until)? else {
            return Ok(None);
        };
        let Some(renewal) = self.renewal.filter(|renewal| renewal.id == id) else {
            return Ok(Some((id, reply)));
        };
        self.renewal = None;
        match reply {
            Reply::Renewed(reply) => self.take_renewal(renewal, &reply),
            Reply::Error(error) if error.code.class() == ErrorClass::NotApplied => {
                return Err(io::Error::other(error.code.to_string()));
            }
            _ => {
                self.push_renewal(renewal, None);
                self.renew_at_ns = now_ns() + BACK_OFF.as_nanos() as u64;
            }
        }
        Ok(None)
    }

    fn renew(&mut self) -> io::Result<()> {
        let now = now_ns();
        if let Some(renewal) = self.renewal {
            let silent = now.saturating_sub(renewal.send_ns) > SILENCE.as_nanos() as u64;
            return if silent { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) };
        }
        if now < self.renew_at_ns || self.dead {
            return Ok(());
        }
        let item = RenewItem { lease: self.lease, secret: self.secret, version: self.version };
        let items = vec![item];
        let request = RenewRequest { shard: self.shard, timeout_ms: TIMEOUT_MS, items };
        let Some(wire) = self.wire.as_mut() else { return Err(io::ErrorKind::NotConnected.into()) };
        let id = wire.send(&Request::Renew(request))?;
        self.renewal = Some(RenewalSent { id, send_ns: now });
        Ok(())
    }

    fn take_renewal(&mut self, renewal: RenewalSent, reply: &RenewReply) {
        let Some(result) = reply.results.iter().find(|result| result.lease == self.lease) else {
            self.push_renewal(renewal, None);
            return;
        };
        match result.error {
            None => {
                self.version = result.version;
                self.push_renewal(renewal, Some(now_ns()));
                self.renew_at_ns = renewal.send_ns + u64::from(self.ttl_ms) * 1_000_000 / 3;
            }
            Some(ErrorCode::LEASE_DEAD) => {
                self.push_renewal(renewal, None);
                self.lost("lease_dead");
            }
            Some(_) => {
                self.push_renewal(renewal, None);
                self.renew_at_ns = now_ns() + BACK_OFF.as_nanos() as u64;
            }
        }
    }

    /// The lease's TTL was restarted by a message sent at that time.
    pub(super) fn renewed(&mut self, send_ns: u64) {
        self.push_renewal(RenewalSent { id: RequestId(0), send_ns }, Some(now_ns()));
        self.renew_at_ns = send_ns + u64::from(self.ttl_ms) * 1_000_000 / 3;
    }

    fn push_renewal(&self, renewal: RenewalSent, ack_ns: Option<u64>) {
        self.recorder.push(Record::Renewal(Renewal {
            client: self.client,
            shard: self.shard.0,
            lease: self.lease.0,
            ttl_ms: self.ttl_ms,
            send_ns: renewal.send_ns,
            ack_ns,
        }));
    }

    pub(super) fn lost(&mut self, cause: &str) {
        if self.dead || self.lease == LeaseId(0) {
            return;
        }
        self.dead = true;
        self.recorder.push(Record::Lost(Lost {
            client: self.client,
            shard: self.shard.0,
            lease: Some(self.lease.0),
            key: None,
            token: None,
            at_ns: now_ns(),
            cause: cause.to_owned(),
        }));
    }

    /// True if there is a connection; else the next node's turn has come.
    pub(super) fn connect(&mut self) -> bool {
        if self.wire.is_some() {
            return true;
        }
        if let Ok(wire) = Wire::connect(self.endpoints[self.target], CONNECT) {
            let nodes = wire.hello().nodes.iter();
            self.addresses
                .extend(nodes.filter_map(|node| Some((node.node, node.client_addr.parse().ok()?))));
            // Members come and go: who was never named by the caller is tried too.
            for addr in self.addresses.values() {
                if self.learns && !self.endpoints.contains(addr) {
                    self.endpoints.push(*addr);
                }
            }
            self.wire = Some(wire);
            return true;
        }
        self.target = (self.target + 1) % self.endpoints.len();
        std::thread::sleep(BACK_OFF);
        false
    }

    pub(super) fn drop_wire(&mut self) {
        self.wire = None;
        if let Some(renewal) = self.renewal.take() {
            self.push_renewal(renewal, None);
        }
        self.target = (self.target + 1) % self.endpoints.len();
    }

    /// Pauses, and goes to the leader if it is known.
    fn follow(&mut self, leader: NodeId) {
        std::thread::sleep(BACK_OFF);
        let addr = self.addresses.get(&leader);
        let index = addr.and_then(|addr| self.endpoints.iter().position(|other| other == addr));
        if let Some(index) = index.filter(|index| *index != self.target) {
            self.drop_wire();
            self.target = index;
        }
    }
}

/// The leader to try next if the reply is a reason to send the request again.
fn retry_hint(reply: &Reply) -> Option<NodeId> {
    match reply {
        Reply::Error(error) if error.code.class() != ErrorClass::NotApplied => Some(error.leader),
        Reply::Outcome(outcome) => match outcome.outcome {
            WireOutcome::Refused { code, .. } if code.class() != ErrorClass::NotApplied => {
                Some(outcome.leader)
            }
            _ => None,
        },
        _ => None,
    }
}
