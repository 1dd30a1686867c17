//! What a node keeps of those who prove nothing.

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, ShardId};
use openraft::AsyncRuntime;

use super::{HandshakeError, Identity, Peers};
use crate::raft::suite::SimEnv;
use crate::rt::sim::{SimClock, SimRt, SimWorld, WorldConfig};
use crate::rt::sim_net::{SimNet, SimNetConfig};

#[test]
fn made_up_node_ids_cost_no_memory() {
    SimRt::with_config(1, WorldConfig::default()).block_on(async {
        let world = SimWorld::current();
        let domain = world.add_domain(std::time::Duration::from_secs(1), 0);
        let host = SimNet::new(&world, SimNetConfig::default()).host(domain);
        let identity = Identity {
            cluster: ClusterId([1; 16]),
            node: NodeId(1),
            disk: DiskId([1; 16]),
            boot: 1,
            nonce: [1; 16],
            secret: b"secret".as_slice().into(),
            peer_addr: "node1:1".to_owned(),
            client_addr: "client1:1".to_owned(),
        };
        let peers = Peers::<SimEnv>::new(identity, host, SimClock, ShardId(0));
        peers.set_address(NodeId(2), "node2:1");
        for node in 2..1_000 {
            let code = ErrorCode::AUTH_FAILED;
            let message = code.text().to_owned();
            peers.say(NodeId(node), &HandshakeError::Refused { node: NodeId(node), code, message });
        }
        assert_eq!(peers.said.borrow().len(), 2, "one for the known node, one for all others");
    });
}
