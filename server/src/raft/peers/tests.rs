//! What a node keeps of others: of those who prove nothing, and where the rest are reached.

use std::collections::BTreeMap;
use std::rc::Rc;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, ShardId};
use openraft::AsyncRuntime;

use super::{HandshakeError, Identity, Peers};
use crate::raft::suite::SimEnv;
use crate::raft::types::{Member, Membership};
use crate::rt::sim::{SimClock, SimRt, SimWorld, WorldConfig};
use crate::rt::sim_net::{SimNet, SimNetConfig};

fn identity(node: u64) -> Identity {
    Identity {
        cluster: ClusterId([1; 16]),
        node: NodeId(node),
        disk: DiskId([node as u8; 16]),
        boot: 1,
        nonce: [1; 16],
        secret: b"secret".as_slice().into(),
        peer_addr: "advertised:1".to_owned(),
        client_addr: "client:1".to_owned(),
    }
}

#[test]
fn a_configured_address_comes_first_then_the_membership_s_then_the_advertised_one() {
    SimRt::with_config(1, WorldConfig::default()).block_on(async {
        let peers = node_1();
        let used = |node: u64| peers.book.borrow()[&NodeId(node)].address();
        let member = |node: u64| {
            let peer_addr = "member:1".to_owned();
            (node, Member { disk: identity(node).disk, peer_addr, client_addr: String::new() })
        };
        peers.set_address(NodeId(2), "configured:1");
        for node in [2, 3] {
            peers.meet(&identity(node).public());
        }
        assert_eq!(used(2).as_deref(), Some("configured:1"));
        assert_eq!(used(3).as_deref(), Some("advertised:1"));
        let members: BTreeMap<_, _> = [2, 3].map(member).into();
        peers.learn(&Membership::new(vec![[2, 3].into()], members).expect("voters are nodes"));
        peers.meet(&identity(3).public());
        assert_eq!(used(2).as_deref(), Some("configured:1"));
        assert_eq!(used(3).as_deref(), Some("member:1"));
    });
}

fn node_1() -> Rc<Peers<SimEnv>> {
    let world = SimWorld::current();
    let domain = world.add_domain(std::time::Duration::from_secs(1), 0);
    let host = SimNet::new(&world, SimNetConfig::default()).host(domain);
    Peers::new(identity(1), host, SimClock, ShardId(0))
}

#[test]
fn made_up_node_ids_cost_no_memory() {
    SimRt::with_config(1, WorldConfig::default()).block_on(async {
        let peers = node_1();
        peers.set_address(NodeId(2), "node2:1");
        for node in 2..1_000 {
            let code = ErrorCode::AUTH_FAILED;
            let message = code.text().to_owned();
            peers.say(NodeId(node), &HandshakeError::Refused { node: NodeId(node), code, message });
        }
        assert_eq!(peers.said.borrow().len(), 2, "one for the known node, one for all others");
    });
}
