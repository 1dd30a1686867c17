//! Groups of simulated nodes: election, replication, failover, restart, snapshots, transfer.

mod raft_support;

use leasehold_protocol::outcome::Outcome;
use raft_support::{Cluster, run};

#[test]
fn three_nodes_elect_and_replicate() {
    run(1, async {
        let cluster = Cluster::formed(3).await;
        for secret in 0..20 {
            cluster.open_lease(secret).await;
        }
        cluster.agree().await;
        let state = cluster.running(2).state;
        assert_eq!(state.borrow().leases_len(), 19, "the first open comes before begin");
    });
}

#[test]
fn another_node_takes_over_and_the_old_leader_catches_up() {
    run(2, async {
        let cluster = Cluster::formed(3).await;
        cluster.open_lease(0).await;
        cluster.open_lease(1).await;
        let (old, before) = cluster.leader().await;
        cluster.kill(old);
        let (new, after) = cluster.leader_but(old).await;
        assert_ne!(new, old);
        assert!(after > before);
        assert!(matches!(cluster.open_lease(2).await, Outcome::Opened { .. }));
        cluster.start(old).await.unwrap();
        cluster.agree().await;
        assert_eq!(cluster.running(old).state.borrow().leases_len(), 2);
    });
}
