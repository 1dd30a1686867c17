//! The cluster's birth over the peer connections of core 0.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::birth::{BirthMember, BirthRecord, Plan};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, NodeId};
use openraft::AsyncRuntime;

use super::Production;
use super::core::Who;
use super::stop::die;
use crate::config::Config;
use crate::env::{Clock, Env};
use crate::error::NodeError;
use crate::identity::{
    Birth, BirthError, BirthTransport, DataDir, Mint, build_unix_ms, found, join,
};
use crate::net::BirthService;
use crate::raft::{Class, Peers};
use crate::rt::clock::OsClock;

type Rt = <Production as Env>::Rt;

/// One question to one node takes at most this long.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);

/// The machine and where its promise is kept; shared with the service that answers peers.
pub(super) struct Founding {
    /// The machine.
    pub(super) birth: RefCell<Birth>,
    /// The data directory.
    pub(super) dir: RefCell<DataDir>,
}

impl Founding {
    /// For this node, from its configuration and its stored promise.
    pub(super) fn new(config: &Config, who: &Who, dir: DataDir) -> Result<Rc<Self>, BirthError> {
        let me = BirthMember {
            node: who.owner.node,
            disk: who.owner.disk,
            peer_addr: config.peer_advertise().to_string(),
            client_addr: config.client_advertise().to_string(),
        };
        let plan = Plan {
            name: config.cluster.name.clone(),
            nodes: config.cluster.peers.keys().copied().collect(),
            shards: config.cluster.shards,
            key_hash: leasehold_protocol::shard::KEY_HASH,
        };
        let birth = Birth::new(me, plan, dir.promise().cloned())?;
        let restores = dir.restore().is_some() && dir.promise().is_none();
        if restores && !birth.initialises() {
            return Err(BirthError::NotLowest(config.process.node_id));
        }
        Ok(Rc::new(Self { birth: RefCell::new(birth), dir: RefCell::new(dir) }))
    }

    /// Returns the record once this node may run its shards.
    pub(super) async fn run(
        &self,
        config: &Config,
        peers: Rc<Peers<Production>>,
    ) -> Result<BirthRecord, NodeError> {
        let token_floor = config.cluster.token_floor;
        let restore = self.dir.borrow().restore().copied();
        let mint = || {
            let mut cluster = [0; 16];
            getrandom::fill(&mut cluster).expect("the kernel has random bytes");
            Mint {
                cluster: ClusterId(cluster),
                wall_ms: OsClock.wall_ms(),
                earliest_ms: build_unix_ms(),
                token_floor,
                restore,
            }
        };
        let transport = PeerTransport(peers);
        if config.process.join {
            let nodes: Vec<NodeId> = config.cluster.peers.keys().copied().collect();
            return Ok(join(&self.birth, &self.dir, &transport, &nodes).await?);
        }
        Ok(found(&self.birth, &self.dir, &transport, mint).await?)
    }
}

impl BirthService for Founding {
    fn serve(&self, kind: u8, body: &[u8]) -> Result<Vec<u8>, ErrorCode> {
        let mut dir = self.dir.borrow_mut();
        let served = self.birth.borrow_mut().serve(kind, body, &mut *dir);
        served.unwrap_or_else(|error| {
            // The promise may or may not be on disk: only a restart can tell.
            die(error.exit(), format_args!("birth: {error}"))
        })
    }
}

struct PeerTransport(Rc<Peers<Production>>);

impl BirthTransport for PeerTransport {
    async fn ask(&self, node: NodeId, kind: u8, body: Vec<u8>) -> Option<Vec<u8>> {
        self.0.call(node, Class::Forward, kind, &body, ASK_TIMEOUT).await.ok()
    }

    async fn pause(&self, duration: Duration) {
        Rt::sleep(duration).await;
    }
}
