//! What operators do, through `leasehold pipe`: listings, forced ends, leaders and members.

use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process;
use serde_json::{Value, json};

use super::bare;
use super::pipes::Pipe;
use super::rig;

fn names(listing: &Value) -> Vec<&str> {
    let keys = listing["keys"].as_array().expect("a list");
    keys.iter().map(|key| key["key"].as_str().expect("a name")).collect()
}

#[test]
fn the_pipe_lists_ends_holds_by_force_and_moves_leaders() {
    let _alone = process::alone();
    let spec = Spec { shards: 3, ..Spec::default() };
    let cluster = Cluster::start(spec).expect("a cluster");
    let mut pipe = Pipe::start(&cluster, &[1, 2, 3]);
    let keys: Vec<String> = (0..9).map(|n| format!("jobs/{n}")).collect();
    for key in &keys {
        pipe.done(json!({ "op": "acquire", "key": key }));
    }
    pipe.done(json!({ "op": "acquire", "key": "other" }));

    // Page after page, over all shards, each key once and in order.
    let (mut seen, mut after) = (Vec::new(), String::new());
    loop {
        let page = pipe.done(json!({ "op": "ls", "prefix": "jobs/", "after": after, "limit": 4 }));
        seen.extend(names(&page).into_iter().map(str::to_owned));
        if page["more"] == false {
            break;
        }
        assert_eq!(names(&page).len(), 4, "{page}");
        after = seen.last().expect("a key").clone();
    }
    assert_eq!(seen, keys);
    let all = pipe.done(json!({ "op": "ls" }));
    assert_eq!((names(&all).len(), &all["more"]), (10, &json!(false)));
    let foreign = pipe.ask(json!({ "op": "ls", "prefix": "jobs/", "after": "other" }));
    assert_eq!(foreign["error"], "page_of_other_query", "{foreign}");

    // A session of one lease a shard; the limit is kept across shards.
    let sessions = pipe.done(json!({ "op": "sessions" }));
    let found = sessions["sessions"].as_array().expect("a list");
    assert!(found.iter().all(|session| session["label"] == "by-pipe"), "{sessions}");
    assert_eq!(
        found.iter().map(|session| session["holds"].as_u64()).sum::<Option<u64>>(),
        Some(10)
    );
    let one = pipe.done(json!({ "op": "sessions", "limit": 1 }));
    assert_eq!((one["sessions"].as_array().map(Vec::len), &one["more"]), (Some(1), &json!(true)));

    // A forced end that waits for the holder, and one that does not: both are told as losses.
    let forced = pipe.done(json!({
        "op": "force_release", "key": "jobs/0", "why": "stuck", "now": true,
    }));
    assert_eq!(forced["passed_on"], true, "{forced}");
    let lost = pipe.news("lost");
    assert_eq!((&lost["key"], &lost["token"]), (&json!("jobs/0"), &forced["token"]), "{lost}");
    let pending = pipe.done(json!({ "op": "force_release", "key": "jobs/1", "why": "stuck" }));
    assert_eq!(pending["passed_on"], false, "{pending}");
    let stale = pipe.ask(json!({
        "op": "force_release", "key": "jobs/2", "why": "stuck", "token": 1,
    }));
    assert_eq!(stale["error"], "not_owner", "{stale}");

    leaders(&cluster, &mut pipe);
}

/// Moves all leaders to one node, spreads them, and reads where they are.
fn leaders(cluster: &Cluster, pipe: &mut Pipe) {
    for shard in 0..3 {
        cluster.wait_leader(shard, PATIENCE).expect("a leader");
        // Also where it leads already.
        pipe.done(json!({ "op": "transfer_leader", "shard": shard, "to": 2 }));
        bare::until("node 2 leads", || cluster.leader(shard) == Some(2));
    }
    let spread = pipe.done(json!({ "op": "spread_leaders" }));
    assert_eq!(spread["moved"].as_array().map(Vec::len), Some(2), "{spread}");
    let leads = |node: &Value| {
        let shards = node["shards"].as_array().expect("a list");
        shards.iter().filter(|shard| shard["role"] == "leader").count()
    };
    bare::until("each leads one shard", || {
        let status = pipe.done(json!({ "op": "status" }));
        assert_eq!(status["shards"], 3, "{status}");
        status["nodes"].as_array().expect("a list").iter().all(|node| leads(node) == 1)
    });
    for (order, error) in [
        (json!({ "op": "transfer_leader", "shard": 3 }), "wrong_shard"),
        (json!({ "op": "transfer_leader", "to": 9 }), "no_such_node"),
        (json!({ "op": "transfer_leader", "to": 0 }), "malformed"),
        (json!({ "op": "status", "node": 1 }), "malformed"),
        (json!({ "op": "ls", "limit": 0 }), "malformed"),
    ] {
        let refused = pipe.ask(order);
        assert_eq!(refused["error"], error, "{refused}");
    }
}

#[test]
fn the_pipe_changes_the_members_and_tells_how_far_it_is() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    let mut pipe = Pipe::start(&cluster, &[1, 2, 3]);
    pipe.done(json!({ "op": "acquire", "key": "kept" }));
    let new = rig::spare(&mut cluster);
    let peer = cluster.addresses(new).peer.to_string();
    let begun = pipe.done(json!({ "op": "member_replace", "old": 3, "node": new, "peer": peer }));
    let operation = &begun["operation"];
    let over = pipe.news("member_done");
    assert_eq!(&over["operation"], operation, "{over}");
    assert_eq!(rig::standing(&over, "voter"), [1, 2, new]);
    let members = pipe.done(json!({ "op": "members" }));
    assert_eq!(members["operation"], Value::Null);
    assert_eq!(members["members"], over["members"]);
    rig::bury(&mut cluster, 3);

    // What is refused is not told of.
    let last = rig::spare(&mut cluster);
    let peer = cluster.addresses(last).peer.to_string();
    cluster.kill(last).expect("killed");
    let absent = pipe.ask(json!({ "op": "member_add", "node": last, "peer": peer }));
    assert_eq!(absent["error"], "node_unreachable", "{absent}");
    let used = pipe.ask(json!({ "op": "member_add", "node": 3, "peer": peer }));
    assert_eq!(used["error"], "node_id_used", "{used}");
    let unknown = pipe.ask(json!({ "op": "member_abort", "operation": 1 }));
    assert_eq!(unknown["ok"], false, "{unknown}");
    cluster.spawn(last).expect("started again");
    rig::waits_for_admission(&cluster, last);
    let begun = pipe.done(json!({ "op": "member_add", "node": last, "peer": peer }));
    let of_it = |line: &Value| line["operation"] == begun["operation"] && line["id"].is_null();
    let seen = pipe.until("news of it", of_it);
    assert_eq!((&seen["event"], &seen["add"]), (&json!("member_progress"), &json!(last)), "{seen}");
    assert_eq!(rig::standing(&pipe.news("member_done"), "voter"), [1, 2, new, last]);

    let begun = pipe.done(json!({ "op": "member_remove", "node": new }));
    let over = pipe.news("member_done");
    assert_eq!(over["operation"], begun["operation"], "{over}");
    assert_eq!(rig::standing(&over, "voter"), [1, 2, last]);
    rig::bury(&mut cluster, new);
    let held = pipe.done(json!({ "op": "remaining", "key": "kept" }));
    assert_eq!(held["state"], "held", "no session was lost by it: {held}");
}
