//! A simulated node's data directory, as far as it says whose it is, and how a fresh node comes to a
//! cluster: the server's own machine, over the server's own peer connections.
//!
//! Founding nodes find their promise in their directories: the founding itself is not simulated.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::birth::{BirthMember, BirthRecord, Plan};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::NodeId;
use leasehold_server::identity::{
    Birth, BirthError, BirthStore, BirthTransport, FileError, Promise, join,
};
use leasehold_server::net::BirthService;
use leasehold_server::raft::{Class, Peers};
use leasehold_server::rt::sim::SimRt;
use openraft_rt::AsyncRuntime;

use crate::node::SimEnv;

/// One question to one node takes at most this long, as in a real node.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);

/// What of a data directory outlives the process: on disk from the moment it is saved.
pub(crate) type Promised = Rc<RefCell<Option<Promise>>>;

/// Why a node does not come to its cluster.
pub(crate) enum Outside {
    /// A member says that it was removed, or that its place is taken.
    Refused,
    /// Something else, which a real process would end with.
    Failed(String),
}

struct Store(Promised);

impl BirthStore for Store {
    fn save(&mut self, promise: &Promise) -> Result<(), FileError> {
        self.0.replace(Some(promise.clone()));
        Ok(())
    }
}

/// One process's part in a birth.
pub(crate) struct Founding {
    birth: RefCell<Birth>,
    store: RefCell<Store>,
}

impl Founding {
    /// `nodes`: where it looks for the cluster. A directory whose promise names another disk (it was
    /// wiped) is a fresh one.
    pub(crate) fn new(me: BirthMember, mut plan: Plan, promised: Promised) -> Rc<Self> {
        if !plan.nodes.contains(&me.node) {
            plan.nodes.push(me.node);
            plan.nodes.sort();
        }
        let stored = promised.borrow().clone().filter(|promise| {
            promise.record.member(me.node).is_some_and(|member| member.disk == me.disk)
        });
        let birth = Birth::new(me, plan, stored).expect("a machine's configuration stays");
        Rc::new(Self { birth: RefCell::new(birth), store: RefCell::new(Store(promised)) })
    }

    /// Waits until the cluster admits this node.
    pub(crate) async fn join(&self, peers: Rc<Peers<SimEnv>>) -> Result<BirthRecord, Outside> {
        let me = self.birth.borrow().me().node;
        let nodes = self.birth.borrow().answer().plan.nodes;
        let nodes: Vec<NodeId> = nodes.into_iter().filter(|node| *node != me).collect();
        match join(&self.birth, &self.store, &Transport(peers), &nodes).await {
            Ok(record) => Ok(record),
            Err(BirthError::NotAdmitted { .. }) => Err(Outside::Refused),
            Err(error) => Err(Outside::Failed(error.to_string())),
        }
    }
}

impl BirthService for Founding {
    fn serve(&self, kind: u8, body: &[u8]) -> Result<Vec<u8>, ErrorCode> {
        let mut store = self.store.borrow_mut();
        let served = self.birth.borrow_mut().serve(kind, body, &mut *store);
        served.expect("nothing is wrong with what was saved")
    }
}

struct Transport(Rc<Peers<SimEnv>>);

impl BirthTransport for Transport {
    async fn ask(&self, node: NodeId, kind: u8, body: Vec<u8>) -> Option<Vec<u8>> {
        self.0.call(node, Class::Forward, kind, &body, ASK_TIMEOUT).await.ok()
    }

    async fn pause(&self, duration: Duration) {
        SimRt::sleep(duration).await;
    }
}
