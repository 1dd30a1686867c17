//! G8 behind a bridge: of five nodes the leader reaches one only, and one reaches nobody. The other
//! three are a majority that can talk, so they must elect another leader and serve.

use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::ShardId;
use leasehold_server::rt::sim::SimRt;
use openraft_rt::AsyncRuntime;

use crate::cluster::{Cluster, Link};
use crate::coverage::Seen;
use crate::history::History;
use crate::inject::both_ways;
use crate::judge;

/// Within this, simulated, the majority must serve.
const LIMIT: Duration = Duration::from_secs(10);

/// Calls of the shard that must succeed under the new leader.
const SERVED: u64 = 5;

/// Cuts the network so for a while, if five members are there, with the leader of one of the shards.
pub(crate) async fn serve(cluster: &Rc<Cluster>, history: &History) {
    let members = cluster.members();
    let whole = members.len() == cluster.voters().len()
        && members.iter().all(|member| member.running().is_some());
    let shards = judge::used_shards(cluster);
    let shard = shards[cluster.world.rng().below(shards.len() as u64) as usize];
    let Some(links) = links(cluster, shard).filter(|_| whole) else { return };
    cluster.timeline.note(format!("BRIDGE around the leader of shard {shard}"));
    let cut_ns = cluster.world.now_ns();
    for link in &links {
        cluster.cut_link(*link);
    }
    let served = async {
        while cluster.led_since(shard, cut_ns).is_some() {
            SimRt::sleep(Duration::from_millis(5)).await;
        }
        let before = history.served(shard);
        while history.served(shard) < before + SERVED {
            SimRt::sleep(Duration::from_millis(5)).await;
        }
    };
    if SimRt::timeout(LIMIT, served).await.is_ok() {
        cluster.coverage.count(Seen::BridgeServed);
    } else {
        let what = format!("a majority behind a bridge did not serve shard {shard} in {LIMIT:?}");
        cluster.violations.add("G8", &what);
    }
    cluster.timeline.note("the bridge is gone".to_owned());
    for link in links {
        cluster.heal_link(link);
    }
}

fn links(cluster: &Cluster, shard: ShardId) -> Option<Vec<Link>> {
    let leader = cluster.leader(shard)?.domain;
    let nodes: Vec<_> = cluster.members().iter().map(|machine| machine.domain).collect();
    let mut others: Vec<_> = nodes.iter().copied().filter(|node| *node != leader).collect();
    if others.len() != 4 {
        return None;
    }
    let mut draw = || others.swap_remove(cluster.world.rng().below(others.len() as u64) as usize);
    let (_bridge, alone) = (draw(), draw());
    let mut links = both_ways(&[leader], &others);
    links.extend(both_ways(&[alone], &nodes));
    Some(links)
}
