//! What a birth has to say to the operator.

use std::fmt;

use leasehold_protocol::birth::BirthReply;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId};

/// Something to log, given once per change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// These nodes have not answered, or not yet promised.
    WaitsFor(Vec<NodeId>),
    /// A cluster exists whose record has no place for this data directory.
    WaitsForAdmission {
        /// The node that told.
        by: NodeId,
        /// The existing cluster.
        cluster: ClusterId,
        /// The disk id that the cluster knows for this node, if any.
        known: Option<DiskId>,
        /// This directory's.
        own: DiskId,
    },
    /// A node is configured differently, or is bound to a record of another plan.
    Differs {
        /// The node.
        peer: NodeId,
        /// What differs.
        what: &'static str,
        /// Its value.
        theirs: String,
        /// This node's value.
        ours: String,
    },
    /// Another node answers under a peer's address.
    WrongNode {
        /// The node that was asked.
        asked: NodeId,
        /// The node that answered.
        found: NodeId,
    },
    /// Two nodes run on copies of one data directory.
    SameDisk {
        /// One.
        peer: NodeId,
        /// The other.
        other: NodeId,
    },
    /// A node cannot promise itself to this node's record.
    Refused {
        /// The node.
        peer: NodeId,
        /// Its reply.
        reply: BirthReply,
    },
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WaitsFor(nodes) => {
                let nodes: Vec<_> = nodes.iter().map(ToString::to_string).collect();
                write!(f, "the cluster's birth waits for node {}", nodes.join(", "))
            }
            Self::WaitsForAdmission { by, cluster, known: Some(known), own } => write!(
                f,
                "waits for admission: node {by} belongs to cluster {cluster}, which knows this \
                 node with disk {known}, but this data directory is disk {own}; it was wiped or \
                 replaced, and must not vote"
            ),
            Self::WaitsForAdmission { by, cluster, known: None, own } => write!(
                f,
                "waits for admission: node {by} belongs to cluster {cluster}, which does not know \
                 this node (disk {own})"
            ),
            Self::Differs { peer, what, theirs, ours } => {
                write!(f, "node {peer} has {what} {theirs}, but this node has {ours}")
            }
            Self::WrongNode { asked, found } => {
                write!(f, "node {found} answers at the address of node {asked}")
            }
            Self::SameDisk { peer, other } => {
                write!(f, "nodes {peer} and {other} run on copies of one data directory")
            }
            Self::Refused { peer, reply } => {
                write!(f, "node {peer} cannot join this cluster's birth: {}", reason(*reply))
            }
        }
    }
}

fn reason(reply: BirthReply) -> &'static str {
    match reply {
        BirthReply::Promised => "it has promised already",
        BirthReply::OtherRecord => "it belongs to another cluster",
        BirthReply::OtherPlan => "its cluster name, nodes or shards are configured differently",
        BirthReply::OtherDisk => "its data directory was replaced since it was first asked",
        BirthReply::Malformed => "it finds the record malformed",
    }
}
