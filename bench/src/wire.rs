//! A blocking connection that speaks the protocol without any of the client library's care:
//! no retry, no renewal, no hint followed. For tests and for looking at a cluster.

use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use leasehold_protocol::conn::{ClientConn, ClientEvent};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, RequestId};
use leasehold_protocol::reply::{ErrorReply, Reply, ServerHello};
use leasehold_protocol::request::Request;

use crate::clock::{Deadline, now_ns};

/// Bytes read at a time.
const READ_LEN: usize = 16 * 1024;

/// An open connection.
#[derive(Debug)]
pub struct Wire {
    stream: TcpStream,
    conn: ClientConn,
    events: VecDeque<ClientEvent>,
    hello: ServerHello,
    spare: Vec<u8>,
}

impl Wire {
    /// Connects and makes the handshake.
    pub fn connect(addr: SocketAddr, limit: Duration) -> io::Result<Self> {
        Self::connect_to(addr, ClusterId::UNKNOWN, limit)
    }

    /// The same, to this cluster or none.
    pub fn connect_to(addr: SocketAddr, cluster: ClusterId, limit: Duration) -> io::Result<Self> {
        let deadline = Deadline::after(limit);
        let stream = TcpStream::connect_timeout(&addr, limit)?;
        stream.set_nodelay(true)?;
        let conn = ClientConn::new(cluster, Vec::new(), now_ns()).map_err(io::Error::other)?;
        let hello = ServerHello {
            version: 0,
            cluster: ClusterId::UNKNOWN,
            node: leasehold_protocol::ids::NodeId(0),
            shards: 0,
            key_hash: 0,
            features: 0,
            nodes: Vec::new(),
            leaders: Vec::new(),
            server_version: String::new(),
        };
        let mut wire = Self { stream, conn, events: VecDeque::new(), hello, spare: Vec::new() };
        wire.flush()?;
        match wire.next_event(deadline)? {
            Some(ClientEvent::Hello(hello)) => wire.hello = hello,
            Some(other) => return Err(io::Error::other(format!("no hello, but {other:?}"))),
            None => return Err(timed_out("no hello")),
        }
        Ok(wire)
    }

    /// What the node said of itself and its cluster.
    pub fn hello(&self) -> &ServerHello {
        &self.hello
    }

    /// Sends a request and does not wait.
    pub fn send(&mut self, request: &Request) -> io::Result<RequestId> {
        let id = self.conn.request(request).map_err(io::Error::other)?;
        self.flush()?;
        Ok(id)
    }

    /// Sends raw bytes, sound or not.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// The next answer, `None` if none comes in time. The connection's end is an error.
    pub fn recv(&mut self, deadline: Deadline) -> io::Result<Option<(RequestId, Reply)>> {
        loop {
            match self.next_event(deadline)? {
                Some(ClientEvent::Reply { id, reply }) => return Ok(Some((id, reply))),
                Some(ClientEvent::Closed(reason)) => return Err(closed(&reason.to_string())),
                Some(_) => {}
                None => return Ok(None),
            }
        }
    }

    /// Sends a request and returns its first answer.
    pub fn call(&mut self, request: &Request, limit: Duration) -> io::Result<Reply> {
        let deadline = Deadline::after(limit);
        let sent = self.send(request)?;
        loop {
            match self.recv(deadline)? {
                Some((id, reply)) if id == sent => return Ok(reply),
                Some(_) => {}
                None => return Err(timed_out("no answer")),
            }
        }
    }

    fn next_event(&mut self, deadline: Deadline) -> io::Result<Option<ClientEvent>> {
        let mut buffer = [0; READ_LEN];
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            // A read time-out of zero would mean none at all.
            let left = deadline.left().max(Duration::from_millis(1));
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(closed("the node closed the connection")),
                Ok(len) => self.conn.feed(&buffer[..len], now_ns()),
                Err(error) if is_time_out(&error) => {}
                Err(error) => return Err(error),
            }
            self.conn.tick(now_ns());
            while let Some(event) = self.conn.poll_event() {
                self.events.push_back(event);
            }
            self.flush()?;
            if self.events.is_empty() && deadline.passed() {
                return Ok(None);
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        let output = self.conn.take_output(std::mem::take(&mut self.spare));
        let result = self.stream.write_all(&output);
        self.spare = output;
        result
    }
}

/// The error of a reply, if it is one.
pub fn error_of(reply: &Reply) -> Option<&ErrorReply> {
    match reply {
        Reply::Error(error) => Some(error),
        _ => None,
    }
}

/// The code that a reply refuses with, whether the node or the state refused.
pub fn refusal(reply: &Reply) -> Option<ErrorCode> {
    use leasehold_protocol::outcome::Outcome;
    match reply {
        Reply::Error(error) => Some(error.code),
        Reply::Outcome(outcome) => match outcome.outcome {
            Outcome::Refused { code, .. } => Some(code),
            _ => None,
        },
        _ => None,
    }
}

fn is_time_out(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
}

fn closed(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, text.to_owned())
}

fn timed_out(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, text.to_owned())
}
