//! Where an answer goes: a connection of this core, another core, or a peer that forwarded.

use std::rc::Rc;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{ErrorReply, OutcomeReply, Reply};

/// Takes replies. A reply to a request that nobody waits for any more is dropped.
pub trait ReplySink {
    /// Sends `reply` under the request's id. Only `Outcome::Queued` may be followed by another.
    fn reply(&self, id: u64, reply: &Reply);

    /// Sends `reply`, to which another follows, unless those who should take it are too slow:
    /// then it is dropped, and the answer is false.
    fn offer(&self, id: u64, reply: &Reply) -> bool {
        self.reply(id, reply);
        true
    }
}

/// The address of one request's answer.
#[derive(Clone)]
pub struct ReplyTo {
    sink: Rc<dyn ReplySink>,
    id: u64,
}

impl ReplyTo {
    /// Answers go to `sink` under `id`.
    pub fn new(sink: Rc<dyn ReplySink>, id: u64) -> Self {
        Self { sink, id }
    }

    /// Sends any reply.
    pub fn send(&self, reply: &Reply) {
        self.sink.reply(self.id, reply);
    }

    /// Sends a reply that is dropped if the client is too slow for it; false if so.
    pub fn offer(&self, reply: &Reply) -> bool {
        self.sink.offer(self.id, reply)
    }

    /// Sends a command's outcome.
    pub fn outcome(&self, outcome: Outcome, leader: NodeId) {
        self.send(&Reply::Outcome(OutcomeReply { outcome, leader }));
    }

    /// Sends an error with the code's own text.
    pub fn error(&self, code: ErrorCode, leader: NodeId) {
        self.send(&error(code, code.text().to_owned(), leader, 0));
    }
}

/// An error reply.
pub fn error(code: ErrorCode, message: String, leader: NodeId, retry_after_ms: u32) -> Reply {
    Reply::Error(ErrorReply { code, message, leader, retry_after_ms })
}
