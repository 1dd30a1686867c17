//! What the clients saw, and what the checks found.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use leasehold_protocol::ids::{LeaseId, Number, Revision, ShardId, Token};

/// How long a client may rely on its session's lease. All times are true time.
#[derive(Debug)]
pub(crate) struct Validity {
    pub(crate) shard: ShardId,
    pub(crate) lease: LeaseId,
    pub(crate) ttl_ns: u64,
    /// Send of the last renewal (or open) that was acknowledged.
    pub(crate) renewed_ns: Cell<u64>,
    /// By the client's own clock and margin, sure until then.
    pub(crate) sure_until_ns: Cell<u64>,
}

/// One hold, as its client knows it.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) key: Vec<u8>,
    pub(crate) lease: LeaseId,
    pub(crate) token: Token,
    pub(crate) grant: Revision,
    /// First send of the acquire.
    pub(crate) asked_ns: u64,
    /// The client knows that it holds.
    pub(crate) known_ns: u64,
    pub(crate) validity: Rc<Validity>,
    /// First send of the release, and until when the hold was sure then.
    pub(crate) released: Cell<Option<(u64, u64)>>,
}

impl Held {
    pub(crate) fn shard(&self) -> ShardId {
        self.validity.shard
    }

    /// The end of the sure interval (G1).
    pub(crate) fn sure_until_ns(&self) -> u64 {
        match self.released.get() {
            Some((released_ns, sure_until_ns)) => released_ns.min(sure_until_ns),
            None => self.validity.sure_until_ns.get(),
        }
    }
}

/// A change that a client was told of.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Released { key: Vec<u8>, token: Token },
    WaitEnded { number: Number },
    Opened,
    Closed,
}

#[derive(Clone, Debug)]
pub(crate) struct Acked {
    pub(crate) shard: ShardId,
    pub(crate) lease: LeaseId,
    pub(crate) revision: Revision,
    /// When the client heard.
    pub(crate) heard_ns: u64,
    pub(crate) change: Change,
}

/// A linearizable read of one key.
#[derive(Clone, Debug)]
pub(crate) struct Read {
    pub(crate) shard: ShardId,
    pub(crate) key: Vec<u8>,
    pub(crate) asked_ns: u64,
    pub(crate) revision: Revision,
    pub(crate) holder: Option<(LeaseId, Token)>,
}

#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) holds: RefCell<Vec<Rc<Held>>>,
    pub(crate) acked: RefCell<Vec<Acked>>,
    pub(crate) reads: RefCell<Vec<Read>>,
    pub(crate) sessions: RefCell<Vec<Rc<Validity>>>,
    /// Requests that were sent again.
    pub(crate) retries: Cell<u64>,
    /// Requests whose connection broke, or that took too long, before their answer.
    pub(crate) unknown: Cell<u64>,
    /// Sessions that ended before their clients wanted.
    pub(crate) lost: Cell<u64>,
}

/// Broken guarantees, with what shows it.
#[derive(Debug, Default)]
pub(crate) struct Violations {
    list: RefCell<Vec<String>>,
}

impl Violations {
    pub(crate) fn add(&self, guarantee: &str, what: &str) {
        self.list.borrow_mut().push(format!("{guarantee}: {what}"));
    }

    pub(crate) fn list(&self) -> Vec<String> {
        self.list.borrow().clone()
    }
}
