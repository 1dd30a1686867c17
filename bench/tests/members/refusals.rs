//! What must be refused, with nothing changed; and a new node that cannot be reached.

use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process;
use leasehold_bench::wire::{Wire, refusal};
use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::ShardId;
use leasehold_protocol::member::{GroupGoal, GroupStepRequest, MemberCommand};
use leasehold_protocol::request::Request;
use leasehold_protocol::watch::{WatchFrom, WatchRequest};

use serde_json::Value;

use super::bare;
use super::rig;

/// The documented exit code of a node that was removed.
const NODE_REMOVED: i32 = 14;

#[test]
fn a_node_that_cannot_be_reached_costs_no_majority() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec { nodes: 1, ..Spec::default() }).expect("a cluster");
    // Never there.
    let nobody = ["member", "add", "7", "--peer", "127.0.0.1:1"];
    assert_eq!(rig::refused(&cluster, &[1], &nobody), "node_unreachable");
    // There when it is asked, but it reaches nobody that could admit it: with a vote it would be
    // half of two.
    let new = cluster.add_joining().expect("ports");
    let peer = cluster.addresses(new).peer.to_string();
    let command = cluster.command(new).expect("a command");
    let mut lost = std::process::Command::new(command.get_program());
    let others = |arg: &&std::ffi::OsStr| !arg.to_string_lossy().starts_with("--peers=");
    lost.args(command.get_args().filter(others)).arg(format!("--peers=1=127.0.0.1:1,{new}={peer}"));
    cluster.spawn_as(new, lost).expect("started");
    let add = ["member", "add", &new.to_string(), "--peer", &peer, "--no-wait"];
    bare::until("it is begun", || rig::run(&cluster, &[1], &add).1 == 0);
    let waits = || {
        let members = rig::done(&cluster, &[1], &["member", "list"]);
        let shard = &members["operation"]["shards"][0]["waits"];
        shard.as_str().is_some_and(|text| text.contains("has not begun to take the log"))
    };
    bare::until("the driver waits for it", waits);
    let members = rig::done(&cluster, &[1], &["member", "list"]);
    assert_eq!(rig::standing(&members, "voter"), [1]);
    let mut wire = bare::connect(cluster.addresses(1).client);
    let lease = bare::open_lease(&mut wire, 5_000);
    bare::grant(&mut wire, &lease, 1, "served");
    // A second change is refused meanwhile, this one can be given up, and then the next goes.
    let other = ["member", "add", "9", "--peer", "127.0.0.1:1"];
    let second = rig::refused(&cluster, &[1], &other);
    assert_eq!(second, "member_change_under_way");
    let members = rig::done(&cluster, &[1], &["member", "abort"]);
    assert_eq!(rig::standing(&members, "voter"), [1]);
    assert_eq!(rig::standing(&members, "removed"), [new]);
    cluster.kill(new).expect("killed");
    bare::grant(&mut wire, &lease, 4, "served too");
    let next = rig::add(&mut cluster, &[1]);
    assert_eq!(next, 3);
}

#[test]
fn what_must_not_be_is_refused_and_changes_nothing() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    // The first leader writes the table down a moment after the nodes are ready.
    let mut before = Value::Null;
    bare::until("the member table is there", || {
        before = rig::done(&cluster, &[1, 2, 3], &["member", "list"]);
        rig::standing(&before, "voter") == [1, 2, 3]
    });
    let peer = |cluster: &Cluster, node: u64| cluster.addresses(node).peer.to_string();
    let all = [1, 2, 3];
    let three = peer(&cluster, 3);
    assert_eq!(rig::refused(&cluster, &all, &["member", "remove", "9"]), "not_a_member");
    let used = ["member", "add", "3", "--peer", &three];
    assert_eq!(rig::refused(&cluster, &all, &used), "node_id_used");
    // From a client, what only leaders and drivers may ask.
    let mut wire = Wire::connect(cluster.addresses(1).client, PATIENCE).expect("connected");
    let fence = Command::Member(MemberCommand::Fence { version: u64::MAX });
    let reply = wire.call(&bare::command(fence), PATIENCE).expect("an answer");
    assert_eq!(refusal(&reply), Some(ErrorCode::INTERNAL_COMMAND));
    let step = GroupStepRequest {
        shard: ShardId(0),
        version: u64::MAX,
        goal: GroupGoal::Voters(Vec::new()),
        timeout_ms: 1_000,
    };
    let reply = wire.call(&Request::GroupStep(step), PATIENCE).expect("an answer");
    assert_eq!(refusal(&reply), Some(ErrorCode::INTERNAL_COMMAND));
    // Two of three are down: without the third, the one that is left would be alone of two.
    cluster.kill(3).expect("killed");
    let goes = ["member", "remove", "2"];
    assert_eq!(rig::refused(&cluster, &[1], &goes), "no_majority_left");
    cluster.spawn(3).expect("started again");
    cluster.wait_ready(PATIENCE).expect("ready again");
    let after = rig::done(&cluster, &all, &["member", "list"]);
    assert_eq!(before, after);

    // The last voter stays.
    rig::remove(&mut cluster, &[1, 2], 3);
    rig::remove(&mut cluster, &[1], 2);
    assert_eq!(rig::refused(&cluster, &[1], &["member", "remove", "1"]), "last_voter");
}

#[test]
fn a_removed_node_serves_nobody_and_does_not_start_again() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    // It is down when it is removed, and learns it when it comes back.
    cluster.kill(3).expect("killed");
    rig::done(&cluster, &[1, 2], &["member", "remove", "3"]);
    cluster.spawn(3).expect("started again");
    let out = || matches!(cluster.admin(3, "/readyz"), Ok((503, text)) if text.contains("removed from the cluster"));
    bare::until("it knows", out);
    let mut wire = Wire::connect(cluster.addresses(3).client, PATIENCE).expect("it says hello");
    let others = wire.hello().nodes.iter().filter(|node| node.node.0 < 3).count();
    assert_eq!(others, 2, "and names the others");
    let (shard, key, from) = (ShardId(0), b"key".to_vec(), WatchFrom::Now);
    let watch = Request::Watch(WatchRequest { shard, prefix: false, key, from });
    for request in [bare::transfer(1), watch] {
        let reply = wire.call(&request, PATIENCE).expect("an answer");
        assert_eq!(refusal(&reply), Some(ErrorCode::NODE_REMOVED), "{request:?}");
    }
    cluster.terminate(3, PATIENCE).expect("ended");
    cluster.spawn(3).expect("started");
    let status = cluster.wait_exit(3, PATIENCE).expect("it ends by itself");
    assert_eq!(status.code(), Some(NODE_REMOVED));
    assert!(cluster.log(3).contains("wipe it and add the node under a new id"));
}
