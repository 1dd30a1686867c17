//! Connections: the handshake, silence, and what becomes of the requests of a connection that is
//! lost.

use std::time::Duration;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::frame::{MAGIC, VERSION_MAX, VERSION_MIN};
use leasehold_protocol::ids::{ClusterId, RequestId};
use leasehold_protocol::reply::{Reply, ServerHello};
use leasehold_protocol::request::{ClientHello, Request};
use leasehold_protocol::shard::{KEY_HASH_CRC32C, check_shards};

use super::exchange::{PROBE_AFTER, State};
use super::route::{Choice, InFlight, is_final_refusal};
use super::{ConnId, Core, Output, Timer};
use crate::clock::BootTime;
use crate::error::Failure;

impl Core {
    /// The byte stream is open: the handshake goes out.
    pub(crate) fn conn_up(&mut self, now: BootTime, conn: ConnId) {
        self.tick(now);
        let cluster = self.router.cluster;
        let Some(link) = self.router.conn(conn) else {
            return self.outputs.push_back(Output::Close { conn });
        };
        let id = RequestId(link.register(InFlight::Hello));
        let hello = ClientHello {
            magic: MAGIC,
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            cluster,
            features: 0,
            auth: Vec::new(),
        };
        self.outputs.push_back(Output::Send { conn, id, request: Request::Hello(hello) });
    }

    /// The byte stream failed or ended.
    pub(crate) fn conn_down(&mut self, now: BootTime, conn: ConnId, why: &str) {
        self.tick(now);
        let message = format!("{}: {why}", self.router.addr_of(conn));
        self.lose_conn(conn, &Failure::new(ErrorCode::UNREACHABLE, message));
    }

    /// Drops a connection and repeats elsewhere what was open on it.
    fn lose_conn(&mut self, conn: ConnId, why: &Failure) {
        let refusal = is_final_refusal(why.code).then(|| why.clone());
        self.timers.cancel(Timer::Conn(conn));
        for id in self.router.drop_conn(conn, refusal, self.now, &mut self.rng) {
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
            self.note_risk(id, why.code);
            self.set_state(id, State::Resting, self.now.after(pause));
        }
    }

    pub(super) fn close_conn(&mut self, conn: ConnId, why: &Failure) {
        self.outputs.push_back(Output::Close { conn });
        self.lose_conn(conn, why);
    }

    /// A connection took too long to be set up, or may be silent for too long.
    pub(super) fn conn_due(&mut self, conn: ConnId) {
        let (now, attempt) = (self.now, self.timing.attempt);
        let Some(link) = self.router.conn(conn) else { return };
        if !link.ready {
            let message = format!("{}: no handshake in time", self.router.addr_of(conn));
            return self.close_conn(conn, &Failure::new(ErrorCode::UNREACHABLE, message));
        }
        if link.in_flight.is_empty() {
            return;
        }
        let unanswered = link.ping_sent.filter(|sent| link.last_heard < *sent);
        if unanswered.is_some_and(|sent| now.since(sent) >= attempt) {
            let message = format!("{}: the connection is silent", self.router.addr_of(conn));
            return self.close_conn(conn, &Failure::new(ErrorCode::UNREACHABLE, message));
        }
        if unanswered.is_none() && now.since(link.last_heard) >= PROBE_AFTER {
            link.ping_sent = Some(now);
            let id = RequestId(link.register(InFlight::Ping));
            self.outputs.push_back(Output::Send { conn, id, request: Request::Ping });
        }
        self.timers.set(Timer::Conn(conn), now.after(PROBE_AFTER.min(attempt)));
    }

    pub(super) fn hello_answered(&mut self, conn: ConnId, reply: Reply) {
        let refusal = match reply {
            Reply::Hello(hello) => match self.check_hello(&hello) {
                Ok(()) => return self.welcome(conn, &hello),
                Err(refusal) => refusal,
            },
            Reply::Error(error) => Failure::new(error.code, error.message),
            _ => Failure::new(ErrorCode::MALFORMED, "the handshake was answered by something else"),
        };
        let message = format!("{}: {}", self.router.addr_of(conn), refusal.message);
        self.close_conn(conn, &Failure::new(refusal.code, message));
    }

    fn check_hello(&self, hello: &ServerHello) -> Result<(), Failure> {
        if !(VERSION_MIN..=VERSION_MAX).contains(&hello.version) {
            return Err(Failure::of(ErrorCode::UNSUPPORTED_VERSION));
        }
        if hello.key_hash != KEY_HASH_CRC32C || check_shards(hello.shards).is_err() {
            let text = "the cluster uses a key hash or a number of shards that is unknown here";
            return Err(Failure::new(ErrorCode::UNSUPPORTED_VERSION, text));
        }
        let known = self.router.cluster;
        if known != ClusterId::UNKNOWN
            && (known != hello.cluster || self.router.shards != hello.shards)
        {
            let text = format!("cluster {} answers where {known} is expected", hello.cluster);
            return Err(Failure::new(ErrorCode::WRONG_CLUSTER, text));
        }
        Ok(())
    }

    fn welcome(&mut self, conn: ConnId, hello: &ServerHello) {
        self.router.welcome(conn, hello, self.now);
        self.timers.cancel(Timer::Conn(conn));
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
