//! Which nodes the clients of a core were told of, and how often that changed.
//!
//! A client asks for the cluster's nodes once, in its hello, and may then stay on one node for
//! months, while all the others are replaced. So a change is told on every open connection: else
//! such a client knows nobody when its node goes.

use std::cell::{Cell, RefCell};

use leasehold_protocol::reply::NodeAddress;

/// The nodes as they were named last. Changes are counted from 1, so 0 is "was told nothing".
#[derive(Default)]
pub(super) struct News {
    nodes: RefCell<Vec<NodeAddress>>,
    changes: Cell<u64>,
}

impl News {
    /// Takes the nodes as they are now; returns the number of the last change.
    pub(super) fn see(&self, nodes: &[NodeAddress]) -> u64 {
        if *self.nodes.borrow() != nodes {
            self.nodes.replace(nodes.to_vec());
            self.changes.set(self.changes.get() + 1);
        }
        self.changes.get()
    }
}
