//! The client's side of a connection.
//!
//! Invariants: ids start at 1, rise, and are never reused on one connection; a request is in
//! flight until its final reply. A reply that cannot be read ends the connection, because what
//! became of its request is then unknown: the caller retries it elsewhere under its number.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::{CloseReason, Counters, NS_PER_MS, in_flight_max, swap_output};
use crate::codec::DecodeError;
use crate::error::ErrorCode;
use crate::frame::{Decoder, EncodeError, MAGIC, VERSION_MAX, VERSION_MIN};
use crate::ids::{ClusterId, RequestId};
use crate::limits::{
    HANDSHAKE_MS_MAX, IDLE_MS_MAX, IN_FLIGHT_MAX, OUTPUT_LEN_MAX, PING_AFTER_MS, REPLY_BODY_MAX,
};
use crate::reply::{Reply, ServerHello};
use crate::request::{ClientHello, Request};
use crate::shard::{KEY_HASH, check_shards};

/// What the driver has to act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientEvent {
    /// The handshake is made; requests may be sent.
    Hello(ServerHello),
    /// The answer to a request. Its id stays in flight if another follows (`Reply::is_final`).
    Reply {
        /// The request.
        id: RequestId,
        /// The answer.
        reply: Reply,
    },
    /// The cluster's nodes changed. Says the same as a hello, as the answering node knows it now.
    News(ServerHello),
    /// An answer that nothing waits for, such as a `Queued` after the outcome; to be ignored.
    Unmatched {
        /// The id it names.
        id: RequestId,
        /// The answer.
        reply: Reply,
    },
    /// The connection is over. Comes once; what became of the requests in flight is unknown.
    Closed(CloseReason),
}

/// Why a request was not sent. Nothing was put out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The handshake is not made yet, or the connection is over.
    #[error("the connection is not open")]
    NotOpen,
    /// The connection has `IN_FLIGHT_MAX` unanswered requests; those that renew or end something
    /// have `IN_FLIGHT_RESERVE` more.
    #[error("{IN_FLIGHT_MAX} requests of this connection await their answers")]
    TooManyInFlight,
    /// `OUTPUT_LEN_MAX` bytes of requests were not taken yet.
    #[error("the connection has {OUTPUT_LEN_MAX} bytes of unsent requests")]
    OutputFull,
    /// The request does not fit a frame.
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    AwaitHello { id: RequestId },
    Open { version: u8 },
    Over,
}

/// A received frame with its body read.
struct Received {
    version: u8,
    flags: u16,
    id: RequestId,
    reply: Result<Reply, DecodeError>,
}

/// The client's side of one connection.
#[derive(Debug)]
pub struct ClientConn {
    cluster: ClusterId,
    phase: Phase,
    decoder: Decoder,
    output: Vec<u8>,
    in_flight: BTreeSet<RequestId>,
    last_id: RequestId,
    /// The ping that keeps the connection open and has no answer yet.
    ping: Option<RequestId>,
    /// Something was sent since the last time a ping was considered.
    sent: bool,
    ping_ns: u64,
    deadline_ns: u64,
    fed_ns: u64,
    closed: Option<CloseReason>,
    counters: Counters,
}

impl ClientConn {
    /// A connection that was just made; its hello is in the output. `cluster` is the one that is
    /// expected, or `ClusterId::UNKNOWN` for any.
    pub fn new(cluster: ClusterId, auth: Vec<u8>, now_ns: u64) -> Result<Self, EncodeError> {
        let mut conn = Self {
            cluster,
            phase: Phase::Over,
            decoder: Decoder::new(REPLY_BODY_MAX),
            output: Vec::new(),
            in_flight: BTreeSet::new(),
            last_id: RequestId(0),
            ping: None,
            sent: false,
            ping_ns: u64::MAX,
            deadline_ns: now_ns.saturating_add(HANDSHAKE_MS_MAX * NS_PER_MS),
            fed_ns: now_ns,
            closed: None,
            counters: Counters::default(),
        };
        let hello = Request::Hello(ClientHello {
            magic: MAGIC,
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            cluster,
            features: 0,
            auth,
        });
        let id = conn.send(&hello)?;
        conn.phase = Phase::AwaitHello { id };
        Ok(conn)
    }

    /// Puts a request out and says under which id its answers will come.
    pub fn request(&mut self, request: &Request) -> Result<RequestId, RequestError> {
        if !self.is_open() {
            return Err(RequestError::NotOpen);
        }
        if self.in_flight.len() >= in_flight_max(request) {
            return Err(RequestError::TooManyInFlight);
        }
        if self.output.len() >= OUTPUT_LEN_MAX {
            return Err(RequestError::OutputFull);
        }
        let id = self.send(request)?;
        self.in_flight.insert(id);
        self.sent = true;
        Ok(id)
    }

    fn send(&mut self, request: &Request) -> Result<RequestId, EncodeError> {
        let before = self.output.len();
        let id = RequestId(self.last_id.0 + 1);
        request.encode_frame(id, &mut self.output)?;
        self.last_id = id;
        self.counters.frames_out += 1;
        self.counters.bytes_out += (self.output.len() - before) as u64;
        Ok(id)
    }

    /// Takes received bytes; poll events afterwards. Dropped once the connection is over.
    pub fn feed(&mut self, bytes: &[u8], now_ns: u64) {
        self.fed_ns = now_ns;
        self.counters.bytes_in += bytes.len() as u64;
        if self.phase != Phase::Over {
            self.decoder.feed(bytes);
        }
    }

    /// The next event; `None` until more bytes came.
    pub fn poll_event(&mut self) -> Option<ClientEvent> {
        loop {
            if self.phase == Phase::Over {
                return self.closed.take().map(ClientEvent::Closed);
            }
            let received = match self.decoder.next() {
                Ok(None) => return None,
                Ok(Some(frame)) => Received {
                    version: frame.version,
                    flags: frame.flags,
                    id: frame.id,
                    reply: Reply::decode(frame.kind, frame.body),
                },
                Err(error) => {
                    self.end(CloseReason::Frame(error));
                    continue;
                }
            };
            self.counters.frames_in += 1;
            if let Some(event) = self.take(received) {
                return Some(event);
            }
        }
    }

    fn take(&mut self, received: Received) -> Option<ClientEvent> {
        let reply = match received.reply {
            Ok(reply) => reply,
            Err(error) => return self.give_up(error.code(), format!("{error}")),
        };
        match (self.phase, reply) {
            (_, Reply::Error(error)) if received.id == RequestId(0) => {
                self.end(CloseReason::RefusedByPeer(error));
                None
            }
            (Phase::AwaitHello { id }, reply) => self.take_hello(id, received.id, reply),
            (Phase::Open { version }, reply) => {
                if received.version != version || received.flags != 0 {
                    let (version, flags) = (received.version, received.flags);
                    let message = format!("a frame of version {version}, flags {flags} came");
                    return self.give_up(ErrorCode::MALFORMED, message);
                }
                match reply {
                    Reply::Hello(hello) if received.id == RequestId(0) => self.take_news(hello),
                    reply => self.take_reply(received.id, reply),
                }
            }
            (Phase::Over, _) => None,
        }
    }

    fn take_hello(&mut self, sent: RequestId, id: RequestId, reply: Reply) -> Option<ClientEvent> {
        match reply {
            Reply::Error(error) if id == sent => {
                self.end(CloseReason::RefusedByPeer(error));
                None
            }
            Reply::Hello(hello) if id == sent => match self.check_hello(&hello) {
                Ok(()) => {
                    self.phase = Phase::Open { version: hello.version };
                    self.cluster = hello.cluster;
                    self.extend_deadline();
                    self.plan_ping(self.fed_ns);
                    Some(ClientEvent::Hello(hello))
                }
                Err((code, message)) => self.give_up(code, message),
            },
            _ => {
                let message = String::from("the first answer is not the one to the hello");
                self.give_up(ErrorCode::HANDSHAKE_EXPECTED, message)
            }
        }
    }

    /// A node may change what it told, but not which cluster it serves.
    fn take_news(&mut self, hello: ServerHello) -> Option<ClientEvent> {
        self.extend_deadline();
        match self.check_hello(&hello) {
            Ok(()) => Some(ClientEvent::News(hello)),
            Err((code, message)) => self.give_up(code, message),
        }
    }

    fn check_hello(&self, hello: &ServerHello) -> Result<(), (ErrorCode, String)> {
        if !(VERSION_MIN..=VERSION_MAX).contains(&hello.version) {
            let message = format!("the node chose version {}", hello.version);
            return Err((ErrorCode::UNSUPPORTED_VERSION, message));
        }
        if self.cluster != ClusterId::UNKNOWN && hello.cluster != self.cluster {
            let message = format!("the node belongs to cluster {}", hello.cluster);
            return Err((ErrorCode::WRONG_CLUSTER, message));
        }
        if hello.key_hash != KEY_HASH {
            let message = format!("the cluster uses key hash {}", hello.key_hash);
            return Err((ErrorCode::UNSUPPORTED_VERSION, message));
        }
        check_shards(hello.shards)
            .map_err(|code| (code, format!("a cluster of {} shards", hello.shards)))
    }

    fn take_reply(&mut self, id: RequestId, reply: Reply) -> Option<ClientEvent> {
        self.extend_deadline();
        if self.ping == Some(id) {
            self.ping = None;
            return None;
        }
        let known = if reply.is_final() {
            self.in_flight.remove(&id)
        } else {
            self.in_flight.contains(&id)
        };
        Some(if known {
            ClientEvent::Reply { id, reply }
        } else {
            ClientEvent::Unmatched { id, reply }
        })
    }

    fn give_up(&mut self, code: ErrorCode, message: String) -> Option<ClientEvent> {
        self.end(CloseReason::Refused { code, message });
        None
    }

    fn end(&mut self, reason: CloseReason) {
        self.phase = Phase::Over;
        self.closed = Some(reason);
        self.in_flight.clear();
        self.ping = None;
        self.decoder = Decoder::new(0);
    }

    fn extend_deadline(&mut self) {
        self.deadline_ns = self.fed_ns.saturating_add(IDLE_MS_MAX * NS_PER_MS);
    }

    fn plan_ping(&mut self, now_ns: u64) {
        self.ping_ns = now_ns.saturating_add(PING_AFTER_MS * NS_PER_MS);
        self.sent = false;
    }

    /// Tells the time: sends a ping if nothing was sent for a while, ends the connection if a
    /// deadline passed. Poll events and take output afterwards.
    pub fn tick(&mut self, now_ns: u64) {
        if self.phase == Phase::Over {
            return;
        }
        if now_ns >= self.deadline_ns {
            self.end(match self.phase {
                Phase::Open { .. } => CloseReason::IdleTimeout,
                _ => CloseReason::HandshakeTimeout,
            });
        } else if self.is_open() && now_ns >= self.ping_ns {
            if !self.sent && self.ping.is_none() {
                self.ping = Some(self.send(&Request::Ping).expect("an empty body fits"));
            }
            self.plan_ping(now_ns);
        }
    }

    /// When `tick` has something to do, if nothing comes before.
    pub fn next_deadline(&self) -> Option<u64> {
        match self.phase {
            Phase::AwaitHello { .. } => Some(self.deadline_ns),
            Phase::Open { .. } => Some(self.deadline_ns.min(self.ping_ns)),
            Phase::Over => None,
        }
    }

    /// Takes all output; `spare` is a buffer to reuse, best the one of the write before.
    pub fn take_output(&mut self, spare: Vec<u8>) -> Vec<u8> {
        swap_output(&mut self.output, spare)
    }

    /// Bytes of output not taken yet.
    pub const fn output_len(&self) -> usize {
        self.output.len()
    }

    /// Requests that await their final answer, pings of the connection's own not counted.
    pub fn in_flight_len(&self) -> usize {
        self.in_flight.len()
    }

    /// True once the handshake is made and until the connection is over.
    pub const fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open { .. })
    }

    /// True once the connection is over.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// What the connection has carried so far.
    pub const fn counters(&self) -> Counters {
        self.counters
    }
}
