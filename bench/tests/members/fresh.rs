//! Who may be added: only a node with an id that was never used, which is configured alike and
//! whose data directory is fresh.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use leasehold_bench::cluster::{Cluster, Spec};
use leasehold_bench::process;

use super::bare;
use super::rig;

/// Starts one more node, with these flags instead of its own ones of the same name.
fn start(cluster: &mut Cluster, flags: impl Fn(&Cluster, u64) -> Vec<String>) -> u64 {
    let node = cluster.add_joining().expect("ports");
    let flags = flags(cluster, node);
    let name = |flag: &str| flag.split('=').next().expect("there is a first part").to_owned();
    let kept = |arg: &&OsStr| {
        let own = name(&arg.to_string_lossy());
        flags.iter().all(|flag| name(flag) != own)
    };
    let command = cluster.command(node).expect("a command");
    let mut changed = Command::new(command.get_program());
    changed.args(command.get_args().filter(kept)).args(&flags).stdin(Stdio::null());
    cluster.spawn_as(node, changed).expect("started");
    node
}

/// The name of the error with which it is refused.
fn add(cluster: &Cluster, node: u64, at: u64) -> String {
    let peer = cluster.addresses(at).peer.to_string();
    // One that is begun after all fails at once.
    rig::refused(cluster, &[1], &["member", "add", &node.to_string(), "--peer", &peer, "--no-wait"])
}

#[test]
fn a_node_that_is_configured_otherwise_or_belongs_elsewhere_is_not_fresh() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec { nodes: 1, ..Spec::default() }).expect("a cluster");
    let mut before = serde_json::Value::Null;
    bare::until("the member table is there", || {
        before = rig::done(&cluster, &[1], &["member", "list"]);
        rig::standing(&before, "voter") == [1]
    });
    let name = start(&mut cluster, |_, _| vec!["--cluster=other".to_owned()]);
    let shards = start(&mut cluster, |_, _| vec!["--shards=2".to_owned()]);
    // It has founded a cluster of its own.
    let elsewhere = start(&mut cluster, |cluster, node| {
        let peers = format!("--peers={node}={}", cluster.addresses(node).peer);
        vec!["--join=false".to_owned(), peers]
    });
    for node in [name, shards] {
        rig::waits_for_admission(&cluster, node);
    }
    let ready = || matches!(cluster.admin(elsewhere, "/readyz"), Ok((200, _)));
    bare::until("the other cluster is founded", ready);

    let cases = [
        ("another name", name, name),
        ("another number of shards", shards, shards),
        ("another cluster", elsewhere, elsewhere),
        ("another id", 9, name),
        ("a member", 9, 1),
    ];
    let said = cases.map(|(case, node, at)| (case, add(&cluster, node, at)));
    let expected = cases.map(|(case, ..)| (case, "node_not_fresh".to_owned()));
    assert_eq!(said, expected);
    assert_eq!(rig::done(&cluster, &[1], &["member", "list"]), before, "nothing was changed");
}

#[test]
fn an_id_is_used_up_by_a_change_that_was_given_up_and_by_a_removal() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec { nodes: 1, ..Spec::default() }).expect("a cluster");
    // It answers, but reaches nobody that admits it: so there is time to give it up.
    let given_up = start(&mut cluster, |cluster, node| {
        let own = cluster.addresses(node).peer;
        vec![format!("--peers=1=127.0.0.1:1,{node}={own}")]
    });
    let peer = cluster.addresses(given_up).peer.to_string();
    let begin = ["member", "add", &given_up.to_string(), "--peer", &peer, "--no-wait"];
    bare::until("it is begun", || rig::run(&cluster, &[1], &begin).1 == 0);
    let members = rig::done(&cluster, &[1], &["member", "abort"]);
    assert_eq!(rig::standing(&members, "removed"), [given_up], "INVALID: it was not given up");
    // It is still there, with a data directory that no cluster took.
    assert_eq!(add(&cluster, given_up, given_up), "node_id_used");

    let removed = rig::add(&mut cluster, &[1]);
    let members = rig::done(&cluster, &[1], &["member", "remove", &removed.to_string()]);
    assert_eq!(rig::standing(&members, "removed"), [given_up, removed]);
    // Also with a fresh directory.
    cluster.kill(removed).expect("killed");
    std::fs::remove_dir_all(cluster.data_dir(removed)).expect("wiped");
    cluster.spawn(removed).expect("started again");
    let answers = || cluster.admin(removed, "/readyz").is_ok();
    bare::until("it is there again", answers);
    assert_eq!(add(&cluster, removed, removed), "node_id_used");
    assert_eq!(rig::done(&cluster, &[1], &["member", "list"])["members"], members["members"]);
}
