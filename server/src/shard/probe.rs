//! Whether a majority still follows this node while it leads.
//!
//! The engine goes on calling a leader one that hears from nobody. Nothing is granted, renewed or
//! read on that belief, but it must not be told to others either: so a confirmed round is asked for
//! now and then, and while one stays without an answer, this node names no leader.

use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::NodeId;
use openraft::AsyncRuntime;

use super::Shard;
use crate::env::{Clock, Env};

/// How long a round may take before this node does not call itself the leader any more.
const UNHEARD_MAX: Duration = Duration::from_secs(2);

impl<E: Env> Shard<E> {
    /// Asks for a confirmed round if this node leads and none is under way for this purpose.
    pub fn probe(self: &Rc<Self>) {
        let Some(leadership) = self.leads().filter(|_| self.probing.get().is_none()) else {
            return;
        };
        self.probing.set(Some(self.clock.now()));
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            // It ends with a majority or with the leadership; both answer the question.
            let _ = shard.group.confirm(leadership).await;
            shard.probing.set(None);
        });
    }

    /// Who leads, for whoever asks: this node only while a majority follows it.
    pub fn known_leader(&self) -> Option<NodeId> {
        let leader = self.group.leader_hint()?;
        (leader != self.peers.node() || !self.is_unheard()).then_some(leader)
    }

    fn is_unheard(&self) -> bool {
        let since = self.probing.get();
        since.is_some_and(|since| self.clock.now().since(since) > UNHEARD_MAX)
    }
}
