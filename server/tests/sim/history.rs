//! What the clients saw, and what the checks found.

use std::cell::RefCell;

use leasehold_protocol::ids::{LeaseId, Number, Revision, Token};

/// One hold, as its client knows it. Times are true time.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) key: Vec<u8>,
    pub(crate) lease: LeaseId,
    pub(crate) token: Token,
    pub(crate) grant: Revision,
    /// First send of the acquire.
    pub(crate) asked_ns: u64,
    /// The client knows of its grant.
    pub(crate) known_ns: u64,
    /// First send of the release; the hold is sure from `known_ns` to here.
    pub(crate) released_ns: u64,
}

/// A change that a client was told of.
#[derive(Clone, Debug)]
pub(crate) enum Acked {
    Released { key: Vec<u8>, lease: LeaseId, token: Token, revision: Revision },
    Cancelled { lease: LeaseId, number: Number, revision: Revision },
    Opened { lease: LeaseId, revision: Revision },
    Closed { lease: LeaseId, revision: Revision },
}

#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) holds: RefCell<Vec<Held>>,
    pub(crate) acked: RefCell<Vec<Acked>>,
    /// Requests that had to be sent again, and answers that said `unknown`.
    pub(crate) retries: RefCell<u64>,
}

/// Broken guarantees, with what shows it.
#[derive(Debug, Default)]
pub(crate) struct Violations {
    list: RefCell<Vec<String>>,
}

impl Violations {
    pub(crate) fn add(&self, guarantee: &str, what: String) {
        self.list.borrow_mut().push(format!("{guarantee}: {what}"));
    }

    pub(crate) fn list(&self) -> Vec<String> {
        self.list.borrow().clone()
    }
}
