//! The server's side of a client connection.
//!
//! Invariants: nothing but a hello is accepted before the driver's `accept`; every request that
//! was handed to the driver is in flight until its final answer, and an id is in flight once; at
//! most `IN_FLIGHT_MAX` are, and `IN_FLIGHT_RESERVE` more that renew or end something. A bad body
//! costs its own request only; bytes that cannot be framed, or an answer that could not be paired,
//! cost the connection.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::{CloseReason, Counters, NS_PER_MS, in_flight_max, swap_output};
use crate::codec::DecodeError;
use crate::error::ErrorCode;
use crate::frame::{Decoder, EncodeError, FrameError, MAGIC, VERSION_MAX, VERSION_MIN};
use crate::ids::{ClusterId, RequestId};
use crate::kind;
use crate::limits::{
    CLIENT_BODY_MAX, HANDSHAKE_MS_MAX, HELLO_BODY_MAX, IDLE_MS_MAX, OUTPUT_LEN_HIGH, OUTPUT_LEN_MAX,
};
use crate::reply::{ErrorReply, Reply, ServerHello};
use crate::request::{ClientHello, Request};

/// How long a client that overruns a limit is asked to wait, in milliseconds.
const RETRY_AFTER_MS: u32 = 50;

/// What the driver has to act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerEvent {
    /// A hello of a version and a cluster that fit. The driver checks `auth` and answers with
    /// `accept` or `refuse`; no request is read before.
    Hello(ClientHello),
    /// A request, in flight from now on; the driver answers with `reply`.
    Request {
        /// Under which to reply.
        id: RequestId,
        /// The request; never `Hello` or `Ping`.
        request: Request,
    },
    /// The connection is over: write the output that is left, then close the stream. Comes once;
    /// replies that are still owed are dropped.
    Closed(CloseReason),
}

/// What became of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is in the output.
    Sent,
    /// It was too long, or too much output waits: an error is in the output instead.
    Replaced(ErrorCode),
    /// Nobody waits for it: the id is not in flight or the connection is over.
    Dropped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    AwaitHello,
    HelloPending { id: RequestId, version: u8 },
    Open { version: u8 },
    Over,
}

/// A received frame with its body read.
struct Received {
    version: u8,
    kind: u8,
    flags: u16,
    id: RequestId,
    request: Result<Request, DecodeError>,
}

/// The server's side of one client connection.
#[derive(Debug)]
pub struct ServerConn {
    cluster: ClusterId,
    phase: Phase,
    decoder: Decoder,
    output: Vec<u8>,
    in_flight: BTreeSet<RequestId>,
    /// Until when the next whole frame must have come.
    deadline_ns: u64,
    /// The time of the last `feed`.
    fed_ns: u64,
    closed: Option<CloseReason>,
    counters: Counters,
}

impl ServerConn {
    /// A connection that was just accepted by a node of `cluster` (`ClusterId::UNKNOWN` while the
    /// node waits for its admission).
    pub const fn new(cluster: ClusterId, now_ns: u64) -> Self {
        Self {
            cluster,
            phase: Phase::AwaitHello,
            decoder: Decoder::new(HELLO_BODY_MAX),
            output: Vec::new(),
            in_flight: BTreeSet::new(),
            deadline_ns: now_ns.saturating_add(HANDSHAKE_MS_MAX * NS_PER_MS),
            fed_ns: now_ns,
            closed: None,
            counters: Counters { frames_in: 0, bytes_in: 0, frames_out: 0, bytes_out: 0 },
        }
    }

    /// Takes received bytes; poll events afterwards. Dropped once the connection is over.
    pub fn feed(&mut self, bytes: &[u8], now_ns: u64) {
        self.fed_ns = now_ns;
        self.counters.bytes_in += bytes.len() as u64;
        if self.phase != Phase::Over {
            self.decoder.feed(bytes);
        }
    }

    /// The next event. `None` until more bytes came, the hello was answered, or output was taken:
    /// poll again after each of these.
    pub fn poll_event(&mut self) -> Option<ServerEvent> {
        loop {
            if self.phase == Phase::Over {
                return self.closed.take().map(ServerEvent::Closed);
            }
            if !self.wants_frames() {
                return None;
            }
            let received = match self.decoder.next() {
                Ok(None) => return None,
                Ok(Some(frame)) => Received {
                    version: frame.version,
                    kind: frame.kind,
                    flags: frame.flags,
                    id: frame.id,
                    request: Request::decode(frame.kind, frame.body),
                },
                Err(error) => {
                    self.fail(error);
                    continue;
                }
            };
            self.counters.frames_in += 1;
            let event = match self.phase {
                Phase::Open { version } => self.take_request(version, received),
                _ => self.take_hello(received),
            };
            if event.is_some() {
                return event;
            }
        }
    }

    /// False while requests wait unread, because the hello is not answered yet or the client does
    /// not take its replies; the driver should then not read from the stream either.
    pub fn wants_frames(&self) -> bool {
        match self.phase {
            Phase::AwaitHello | Phase::Open { .. } => self.output.len() < OUTPUT_LEN_HIGH,
            Phase::HelloPending { .. } | Phase::Over => false,
        }
    }

    fn fail(&mut self, error: FrameError) {
        // Another protocol's peer could not read our answer.
        if !matches!(error, FrameError::Foreign(_)) {
            self.send_error(RequestId(0), ErrorReply::new(error.code(), format!("{error}")));
        }
        self.end(CloseReason::Frame(error));
    }

    fn take_hello(&mut self, received: Received) -> Option<ServerEvent> {
        let hello = match received.request {
            Ok(Request::Hello(hello)) => hello,
            Err(error) if received.kind == kind::HELLO => {
                self.refuse_as(received.id, ErrorReply::new(error.code(), format!("{error}")));
                return None;
            }
            _ => {
                let message = if kind::is_peer(received.kind) {
                    String::from("this is the client port, and a node's frame came")
                } else {
                    format!("the first frame is {}", kind::name(received.kind))
                };
                let error = ErrorReply::new(ErrorCode::HANDSHAKE_EXPECTED, message);
                self.refuse_as(received.id, error);
                return None;
            }
        };
        match self.check_hello(&hello) {
            Ok(version) => {
                self.phase = Phase::HelloPending { id: received.id, version };
                Some(ServerEvent::Hello(hello))
            }
            Err(error) => {
                self.refuse_as(received.id, error);
                None
            }
        }
    }

    /// The version to speak, or why there is none to speak with this client.
    fn check_hello(&self, hello: &ClientHello) -> Result<u8, ErrorReply> {
        if hello.magic != MAGIC {
            return Err(ErrorReply::new(ErrorCode::MALFORMED, "the hello's magic is not ours"));
        }
        let version = hello.version_max.min(VERSION_MAX);
        if version < hello.version_min.max(VERSION_MIN) {
            let (min, max) = (hello.version_min, hello.version_max);
            let message = format!(
                "this node speaks versions {VERSION_MIN} to {VERSION_MAX}, the client {min} to {max}"
            );
            return Err(ErrorReply::new(ErrorCode::UNSUPPORTED_VERSION, message));
        }
        // Planted (identity): a client of another cluster is let in.
        let any = crate::planted!("old-cluster-welcome");
        if hello.cluster == ClusterId::UNKNOWN || hello.cluster == self.cluster || any {
            return Ok(version);
        }
        if self.cluster == ClusterId::UNKNOWN {
            let message = "this node waits for its admission to a cluster";
            return Err(ErrorReply::new(ErrorCode::NOT_READY, message));
        }
        let message = format!(
            "this node belongs to cluster {}, the client expects {}",
            self.cluster, hello.cluster
        );
        Err(ErrorReply::new(ErrorCode::WRONG_CLUSTER, message))
    }

    /// Answers the hello; requests are read from now on. The version in `hello` is set to the
    /// negotiated one. No effect unless a hello waits for its answer.
    pub fn accept(&mut self, mut hello: ServerHello) {
        let Phase::HelloPending { id, version } = self.phase else { return };
        hello.version = version;
        self.phase = Phase::Open { version };
        self.decoder.set_body_max(CLIENT_BODY_MAX);
        self.extend_deadline();
        self.send(id, &Reply::Hello(hello)).expect("a cluster's nodes and shards fit a reply");
    }

    /// Says a hello again, because the cluster's nodes changed. False: the connection is not open, or
    /// its client does not take what it was sent; try again later.
    pub fn news(&mut self, mut hello: ServerHello) -> bool {
        let Phase::Open { version } = self.phase else { return false };
        if self.output.len() >= OUTPUT_LEN_HIGH {
            return false;
        }
        hello.version = version;
        self.send(RequestId(0), &Reply::Hello(hello)).expect("it fitted the first time");
        true
    }

    /// Ends the connection with an error: the answer to a hello, or a notice that belongs to no
    /// request (`shutting_down`, say).
    pub fn refuse(&mut self, error: ErrorReply) {
        match self.phase {
            Phase::HelloPending { id, .. } => self.refuse_as(id, error),
            Phase::AwaitHello | Phase::Open { .. } => self.refuse_as(RequestId(0), error),
            Phase::Over => {}
        }
    }

    fn take_request(&mut self, version: u8, received: Received) -> Option<ServerEvent> {
        let id = received.id;
        self.extend_deadline();
        if self.in_flight.contains(&id) {
            // An error under this id would be taken for the answer to the first request.
            let message = format!("request id {id} is in flight already");
            self.refuse_as(RequestId(0), ErrorReply::new(ErrorCode::MALFORMED, message));
            return None;
        }
        match self.check_request(version, received) {
            Ok(Request::Ping) => {
                self.send(id, &Reply::Pong).expect("an empty body fits");
                None
            }
            Ok(request) => {
                self.in_flight.insert(id);
                Some(ServerEvent::Request { id, request })
            }
            Err(error) => {
                self.send_error(id, error);
                None
            }
        }
    }

    fn check_request(&self, version: u8, received: Received) -> Result<Request, ErrorReply> {
        let malformed = |message: String| Err(ErrorReply::new(ErrorCode::MALFORMED, message));
        if received.version != version {
            let message = format!(
                "a frame of version {} came on a connection of version {version}",
                received.version
            );
            return Err(ErrorReply::new(ErrorCode::UNSUPPORTED_VERSION, message));
        }
        if received.flags != 0 {
            return malformed(format!("flags {:#06x} are not defined", received.flags));
        }
        if received.id == RequestId(0) {
            return malformed(String::from("a request's id is never 0"));
        }
        match received.request {
            Ok(Request::Hello(_)) => malformed(String::from("the hello was made before")),
            Ok(Request::Ping) => Ok(Request::Ping),
            Ok(request) if self.in_flight.len() >= in_flight_max(&request) => {
                let message =
                    format!("{} requests of this connection await answers", self.in_flight.len());
                let error = ErrorReply::new(ErrorCode::TOO_MANY_IN_FLIGHT, message);
                Err(ErrorReply { retry_after_ms: RETRY_AFTER_MS, ..error })
            }
            Ok(request) => Ok(request),
            Err(error) => Err(ErrorReply::new(error.code(), format!("{error}"))),
        }
    }

    /// Answers a request in flight. Unless the reply is one that another follows (`Queued`), the
    /// id is free afterwards.
    pub fn reply(&mut self, id: RequestId, reply: &Reply) -> Answer {
        let known = if reply.is_final() {
            self.in_flight.remove(&id)
        } else {
            self.in_flight.contains(&id)
        };
        if !known || !matches!(self.phase, Phase::Open { .. }) {
            return Answer::Dropped;
        }
        if self.output.len() >= OUTPUT_LEN_MAX && is_read(reply) {
            let message = "too many unread replies wait on this connection";
            let error = ErrorReply::new(ErrorCode::BUSY, message);
            self.send_error(id, ErrorReply { retry_after_ms: RETRY_AFTER_MS, ..error });
            return Answer::Replaced(ErrorCode::BUSY);
        }
        match self.send(id, reply) {
            Ok(()) => Answer::Sent,
            Err(error) => {
                let message = format!("the answer does not fit a frame: {error}");
                self.send_error(id, ErrorReply::new(ErrorCode::FRAME_TOO_LARGE, message));
                Answer::Replaced(ErrorCode::FRAME_TOO_LARGE)
            }
        }
    }

    fn send(&mut self, id: RequestId, reply: &Reply) -> Result<(), EncodeError> {
        let before = self.output.len();
        reply.encode_frame(id, &mut self.output)?;
        self.counters.frames_out += 1;
        self.counters.bytes_out += (self.output.len() - before) as u64;
        Ok(())
    }

    fn send_error(&mut self, id: RequestId, error: ErrorReply) {
        self.send(id, &Reply::Error(error)).expect("an error's message is bounded");
    }

    fn refuse_as(&mut self, id: RequestId, error: ErrorReply) {
        let reason = CloseReason::Refused { code: error.code, message: error.message.clone() };
        self.send_error(id, error);
        self.end(reason);
    }

    fn end(&mut self, reason: CloseReason) {
        self.phase = Phase::Over;
        self.closed = Some(reason);
        self.in_flight.clear();
        self.decoder = Decoder::new(0);
    }

    fn extend_deadline(&mut self) {
        self.deadline_ns = self.fed_ns.saturating_add(IDLE_MS_MAX * NS_PER_MS);
    }

    /// Takes all output; `spare` is a buffer to reuse, best the one of the write before. Poll
    /// events again afterwards.
    pub fn take_output(&mut self, spare: Vec<u8>) -> Vec<u8> {
        swap_output(&mut self.output, spare)
    }

    /// Bytes of output not taken yet.
    pub const fn output_len(&self) -> usize {
        self.output.len()
    }

    /// Tells the time; ends the connection if a deadline passed. Poll events afterwards.
    pub fn tick(&mut self, now_ns: u64) {
        if self.phase == Phase::Over || now_ns < self.deadline_ns {
            return;
        }
        let reason = match self.phase {
            Phase::Open { .. } => CloseReason::IdleTimeout,
            _ => CloseReason::HandshakeTimeout,
        };
        let code = match self.phase {
            Phase::Open { .. } => ErrorCode::DEADLINE,
            _ => ErrorCode::HANDSHAKE_EXPECTED,
        };
        self.send_error(RequestId(0), ErrorReply::new(code, format!("{reason}")));
        self.end(reason);
    }

    /// When `tick` has something to do, if no frame comes before.
    pub fn next_deadline(&self) -> Option<u64> {
        (self.phase != Phase::Over).then_some(self.deadline_ns)
    }

    /// Requests that await their final answer.
    pub fn in_flight_len(&self) -> usize {
        self.in_flight.len()
    }

    /// True if a final answer to this request is still owed.
    pub fn is_in_flight(&self, id: RequestId) -> bool {
        self.in_flight.contains(&id)
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

/// True for the replies that can be long and whose request changed nothing.
const fn is_read(reply: &Reply) -> bool {
    matches!(
        reply,
        Reply::Keys(_)
            | Reply::Sessions(_)
            | Reply::Holds(_)
            | Reply::Claim(_)
            | Reply::Backup(_)
            | Reply::Status(_)
    )
}
