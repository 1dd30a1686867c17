//! Connections: bytes in and out, the handshake, silence, and what becomes of the requests of a
//! connection that is lost.
//!
//! The protocol's own side (`ClientConn`) pairs requests and replies and keeps an idle connection
//! open. Here is what it cannot know: that a connection on which something is open and nothing is
//! heard for seconds is to be probed and given up long before it counts as idle.

use std::time::Duration;

use leasehold_protocol::conn::{ClientConn, ClientEvent, CloseReason, RequestError};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, RequestId};
use leasehold_protocol::reply::{Reply, ServerHello};
use leasehold_protocol::request::Request;

use super::exchange::State;
use super::route::{Choice, InFlight};
use super::{ConnId, Core, Output, Timer};
use crate::clock::BootTime;
use crate::error::Failure;

/// How long a connection may be silent, while something is open on it, before it is probed.
const PROBE_AFTER: Duration = Duration::from_secs(2);

impl Core {
    /// The byte stream is open: the handshake goes out.
    pub(crate) fn conn_up(&mut self, now: BootTime, conn: ConnId) {
        self.tick(now);
        let cluster = self.router.cluster;
        let Some(link) = self.router.conn(conn) else {
            return self.outputs.push_back(Output::Close { conn });
        };
        let wire = ClientConn::new(cluster, Vec::new(), self.now.0);
        link.wire = Some(wire.expect("a hello without proof fits its frame"));
        self.wants_write(conn);
    }

    /// The byte stream failed or ended.
    pub(crate) fn conn_down(&mut self, now: BootTime, conn: ConnId, why: &str) {
        self.tick(now);
        let message = format!("{}: {why}", self.router.addr_of(conn));
        self.lose_conn(conn, &Failure::new(ErrorCode::UNREACHABLE, message));
    }

    /// Bytes came.
    pub(crate) fn feed(&mut self, now: BootTime, conn: ConnId, bytes: &[u8]) {
        self.tick(now);
        if let Some(wire) = self.router.conn(conn).and_then(|link| link.wire.as_mut()) {
            wire.feed(bytes, self.now.0);
            self.read_events(conn);
        }
    }

    /// The bytes to write; `spare` is a buffer to reuse. Told by `Output::Write`.
    pub(crate) fn take_output(&mut self, conn: ConnId, spare: Vec<u8>) -> Vec<u8> {
        let Some(link) = self.router.conn(conn) else { return Vec::new() };
        link.writing = false;
        link.wire.as_mut().map_or_else(Vec::new, |wire| wire.take_output(spare))
    }

    /// Asks the driver, once, to come for output.
    fn wants_write(&mut self, conn: ConnId) {
        let Some(link) = self.router.conn(conn) else { return };
        let some = link.wire.as_ref().is_some_and(|wire| wire.output_len() > 0);
        if some && !std::mem::replace(&mut link.writing, true) {
            self.outputs.push_back(Output::Write { conn });
        }
    }

    /// Puts a request out on a connection that `choose` has found ready.
    pub(super) fn put_out(
        &mut self,
        conn: ConnId,
        request: &Request,
        what: InFlight,
    ) -> Result<(), RequestError> {
        let link = self.router.conn(conn).expect("just chosen");
        let id = link.wire.as_mut().expect("it is ready").request(request)?;
        let was_quiet = link.in_flight.is_empty();
        link.in_flight.insert(id, what);
        if was_quiet {
            link.quiet_since(self.now);
            self.watch_conn(conn);
        }
        self.wants_write(conn);
        Ok(())
    }

    fn read_events(&mut self, conn: ConnId) {
        while let Some(event) = self.next_event(conn) {
            match event {
                ClientEvent::Hello(hello) => self.take_hello(conn, &hello),
                ClientEvent::Reply { id, reply } => self.take_reply(conn, id, reply),
                ClientEvent::News(hello) => {
                    self.heard(conn);
                    self.router.learn_nodes(&hello.nodes);
                }
                // Nothing waits for it.
                ClientEvent::Unmatched { .. } => self.heard(conn),
                ClientEvent::Closed(reason) => {
                    let text = format!("{}: {reason}", self.router.addr_of(conn));
                    return self.close_conn(conn, &Failure::new(code_of(&reason), text));
                }
            }
        }
        self.wants_write(conn);
    }

    fn next_event(&mut self, conn: ConnId) -> Option<ClientEvent> {
        self.router.conn(conn)?.wire.as_mut()?.poll_event()
    }

    fn heard(&mut self, conn: ConnId) {
        let now = self.now;
        if let Some(link) = self.router.conn(conn) {
            link.last_heard = now;
        }
    }

    fn take_reply(&mut self, conn: ConnId, id: RequestId, reply: Reply) {
        self.heard(conn);
        let link = self.router.conn(conn).expect("it has just spoken");
        let what = if reply.is_final() {
            link.in_flight.remove(&id)
        } else {
            link.in_flight.get(&id).copied()
        };
        if let Some(InFlight::Exchange { exchange, sent_at }) = what {
            self.router.answered(conn);
            self.exchange_answered(conn, exchange, sent_at, reply);
        }
    }

    /// Drops a connection and repeats elsewhere what was open on it.
    fn lose_conn(&mut self, conn: ConnId, why: &Failure) {
        self.timers.cancel(Timer::Conn(conn));
        for id in self.router.drop_conn(conn, why, self.now, &mut self.rng) {
            let soon = self.retry_pause(1);
            let Some(exchange) = self.exchanges.get_mut(&id) else { continue };
            let pause = match exchange.state {
                State::Parked(at) if at == conn => Duration::ZERO,
                State::Sent(at) if at == conn => {
                    exchange.uncertain = true;
                    soon
                }
                // Many may wait on one node; they come back a little apart.
                State::Queued(at) if at == conn => {
                    exchange.uncertain = true;
                    self.rng.between(Duration::ZERO, Duration::from_millis(60))
                }
                _ => continue,
            };
            exchange.last = Some(why.clone());
            let owner = exchange.owner().clone();
            if let super::exchange::Owner::Watch(watch, shard) = owner {
                self.feed_detached(watch, shard);
            }
            self.note_risk(id, why.code);
            self.set_state(id, State::Resting, self.now.after(pause));
        }
    }

    pub(super) fn close_conn(&mut self, conn: ConnId, why: &Failure) {
        self.outputs.push_back(Output::Close { conn });
        self.lose_conn(conn, why);
    }

    /// Sets a connection's timer: a probe while something is open on it, else whatever the
    /// protocol wants.
    fn watch_conn(&mut self, conn: ConnId) {
        let attempt = self.timing.attempt;
        let Some(link) = self.router.conn(conn) else { return };
        let wire = link.wire.as_ref().and_then(ClientConn::next_deadline);
        let mut at = wire.map_or(BootTime::NEVER, BootTime);
        if !link.in_flight.is_empty() {
            at = at.min(self.now.after(PROBE_AFTER.min(attempt)));
        }
        self.timers.set(Timer::Conn(conn), at);
    }

    /// A connection took too long to be set up, may be silent for too long, or wants a ping.
    pub(super) fn conn_due(&mut self, conn: ConnId) {
        let (now, attempt) = (self.now, self.timing.attempt);
        let Some(link) = self.router.conn(conn) else { return };
        if !link.is_ready() {
            let message = format!("{}: no handshake in time", self.router.addr_of(conn));
            return self.close_conn(conn, &Failure::new(ErrorCode::UNREACHABLE, message));
        }
        let unanswered = link.probed.filter(|sent| link.last_heard < *sent);
        let (open, heard) = (!link.in_flight.is_empty(), link.last_heard);
        if open && unanswered.is_some_and(|sent| now.since(sent) >= attempt) {
            let message = format!("{}: the connection is silent", self.router.addr_of(conn));
            return self.close_conn(conn, &Failure::new(ErrorCode::UNREACHABLE, message));
        }
        if open && unanswered.is_none() && now.since(heard) >= PROBE_AFTER {
            link.probed = Some(now);
            // Without room for it, what is open already is the probe.
            let _ = self.put_out(conn, &Request::Ping, InFlight::Probe);
        }
        if let Some(wire) = self.router.conn(conn).and_then(|link| link.wire.as_mut()) {
            wire.tick(now.0);
        }
        self.read_events(conn);
        self.watch_conn(conn);
    }

    /// The handshake is made, if it is with the cluster that is known.
    fn take_hello(&mut self, conn: ConnId, hello: &ServerHello) {
        let known = self.router.cluster;
        let other = known != hello.cluster || self.router.shards != hello.shards;
        if known != ClusterId::UNKNOWN && other {
            let (addr, cluster) = (self.router.addr_of(conn), hello.cluster);
            let text = format!("{addr}: cluster {cluster} answers where {known} is expected");
            return self.close_conn(conn, &Failure::new(ErrorCode::WRONG_CLUSTER, text));
        }
        self.router.welcome(conn, hello, self.now);
        self.watch_conn(conn);
        let link = self.router.conn(conn).expect("just welcomed");
        for id in std::mem::take(&mut link.parked) {
            let Some(exchange) = self.exchanges.get(&id) else { continue };
            if exchange.state != State::Parked(conn) {
                continue;
            }
            // It has waited: a better node is taken only if its connection is there.
            let (shard, lane) = (exchange.shard, exchange.lane);
            match self.router.choose(shard, lane, None, self.now, &mut self.rng) {
                Choice::Use(better) => self.send(id, better),
                Choice::Park(_) | Choice::Connect(_) | Choice::Rest(_) => self.send(id, conn),
            }
        }
    }
}

/// The code of a connection's end.
fn code_of(reason: &CloseReason) -> ErrorCode {
    match reason {
        CloseReason::Frame(error) => error.code(),
        CloseReason::Refused { code, .. } => *code,
        CloseReason::RefusedByPeer(error) => error.code,
        _ => ErrorCode::UNREACHABLE,
    }
}
