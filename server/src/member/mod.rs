//! The cluster's membership as a whole: who asks for a change, and who carries it out.
//!
//! One `Membership` per node, on the core of shard 0, whose state holds the member table. At the
//! leader of shard 0 it begins operations (`change`) and drives the one under way over all shards
//! (`driver`); a new leader goes on from the table. At every node it follows the table: a node that
//! was removed is refused by its peers. It never changes a group itself (`shard::member` does) and
//! keeps nothing that the table does not say. Invariant: an operation ends only when every shard is
//! where it should be.

mod change;
mod driver;

use std::cell::Cell;
use std::rc::{Rc, Weak};

use leasehold_protocol::birth::{BirthMember, BirthRecord, JoinAnswer};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::member::Standing;
use leasehold_protocol::peer::MemberEntry;
use leasehold_protocol::planted;

use crate::env::Env;
use crate::net::Router;
use crate::raft::Peers;
use crate::rt::channels::Notify;
use crate::shard::Shard;

/// See the module.
pub struct Membership<E: Env> {
    shard: Rc<Shard<E>>,
    router: Weak<Router<E>>,
    peers: Rc<Peers<E>>,
    record: Rc<BirthRecord>,
    /// The version of the table that the peers were told.
    followed: Cell<u64>,
    /// An operation may have begun.
    begun: Notify,
}

impl<E: Env> Membership<E> {
    /// Over shard 0 of this node, of the cluster of `record`.
    pub fn new(
        shard: Rc<Shard<E>>,
        router: &Rc<Router<E>>,
        peers: Rc<Peers<E>>,
        record: Rc<BirthRecord>,
    ) -> Rc<Self> {
        let router = Rc::downgrade(router);
        let (followed, begun) = (Cell::new(0), Notify::new());
        Rc::new(Self { shard, router, peers, record, followed, begun })
    }

    /// The answer to a node that asks to be admitted: the record that it belongs to, once an
    /// operation adds it.
    pub fn admit(&self, node: &BirthMember) -> JoinAnswer {
        let state = self.shard.state().borrow();
        let members = state.members();
        let Some(known) = members.node(node.node) else { return JoinAnswer::Unknown };
        if known.entry.disk != node.disk {
            return JoinAnswer::Refused(ErrorCode::NODE_ID_USED);
        }
        if known.standing == Standing::Removed {
            return JoinAnswer::Refused(ErrorCode::NODE_REMOVED);
        }
        let present = members.nodes().filter(|info| info.standing != Standing::Removed);
        let members = present.map(|info| founder(&info.entry)).collect();
        JoinAnswer::Admitted(BirthRecord { members, ..(*self.record).clone() })
    }

    /// Tells the peers' book who is a member no longer, when the table changed.
    fn follow(&self) {
        let state = self.shard.state().borrow();
        let members = state.members();
        if self.followed.replace(members.version()) == members.version() {
            return;
        }
        for info in members.nodes() {
            // Planted (identity): nobody is told who was removed.
            if info.standing == Standing::Removed && !planted!("removed-node-serves") {
                self.peers.set_removed(info.entry.node, info.entry.disk);
            } else {
                self.peers.set_disk(info.entry.node, info.entry.disk);
            }
        }
    }

    /// The other nodes that are members or are to be, by the table.
    fn others(&self) -> Vec<NodeId> {
        let state = self.shard.state().borrow();
        let present = state.members().nodes().filter(|info| info.standing != Standing::Removed);
        let present = present.map(|info| info.entry.node);
        present.filter(|node| *node != self.peers.node()).collect()
    }

    /// The nodes that vote, by the table.
    fn voters(&self) -> Vec<NodeId> {
        let state = self.shard.state().borrow();
        let votes = state.members().nodes().filter(|info| info.standing == Standing::Voter);
        votes.map(|info| info.entry.node).collect()
    }
}

fn founder(entry: &MemberEntry) -> BirthMember {
    BirthMember {
        node: entry.node,
        disk: entry.disk,
        peer_addr: entry.peer_addr.clone(),
        client_addr: entry.client_addr.clone(),
    }
}
