//! Watches of real processes (G6): watchers at all nodes while leaders die, cursors that move from
//! node to node, followers that come back by snapshot, watchers that go away or fall behind.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use leasehold::{
    Client, Cursor, Leader, Observed, Revision, ShardId, Watch, WatchFrom, WatchItem, WatchTarget,
};
use leasehold_bench::check::watch::{Told, Watched, check};
use leasehold_bench::clock::Deadline;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::contention::{Contention, Plan, key_name};
use leasehold_bench::history::Recorder;
use leasehold_bench::process;
use leasehold_bench::wire::{Wire, refusal};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, NodeId};
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;
use leasehold_protocol::watch::{
    Cursor as Positions, UnwatchRequest, WatchEndReason, WatchEvent, WatchFrom as From,
    WatchRequest,
};

const SHARD: ShardId = ShardId(0);

fn run(test: impl Future<Output = ()>) {
    let _alone = process::alone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(test);
}

async fn client(cluster: &Cluster) -> Client {
    Client::connect(&cluster.endpoint_list()).await.expect("the cluster answers")
}

/// Takes items until one fits; fails if none does in time.
async fn until(watch: &mut Watch, items: &mut Vec<WatchItem>, fits: impl Fn(&WatchItem) -> bool) {
    let found = async {
        loop {
            let item = watch.next().await.expect("the watch goes on");
            let done = fits(&item);
            items.push(item);
            if done {
                return;
            }
        }
    };
    let told = tokio::time::timeout(PATIENCE, found).await;
    assert!(told.is_ok(), "not told in time; last {:?}", items.last());
}

fn has_event(item: &WatchItem, name: &str) -> bool {
    match item {
        WatchItem::Change { events, .. } => {
            events.iter().any(|event| format!("{:?}", event.kind).starts_with(name))
        }
        _ => false,
    }
}

#[test]
fn a_key_is_watched_from_now_on() {
    run(async {
        let spec = Spec { shards: 3, ..Spec::default() }.flag("cores", 2);
        let cluster = Cluster::start(spec).expect("a cluster");
        let client = client(&cluster).await;
        let mut watch =
            client.watch(&WatchTarget::key("jobs/nightly"), &WatchFrom::Now).expect("it begins");
        let mut items = Vec::new();
        until(&mut watch, &mut items, |item| matches!(item, WatchItem::Progress { .. })).await;
        let begun = watch.cursor().expect("a position");

        let session =
            client.labelled_session(Duration::from_secs(10), "worker-3").expect("a session");
        let other = session.lock("jobs/hourly").acquire().await.expect("granted");
        let guard = session.lock("jobs/nightly").value("here").acquire().await.expect("granted");
        let token = guard.token();
        guard.release().await.expect("released");
        other.release().await.expect("released");
        until(&mut watch, &mut items, |item| has_event(item, "Vacant")).await;

        let events: Vec<_> = items
            .iter()
            .filter_map(|item| match item {
                WatchItem::Change { events, .. } => Some(events.clone()),
                _ => None,
            })
            .flatten()
            .collect();
        assert!(events.iter().all(|event| event.kind.key() == Some(b"jobs/nightly")));
        let granted = &events[0];
        assert_eq!((granted.label.as_str(), granted.value.as_slice()), ("worker-3", &b"here"[..]));
        assert!(format!("{:?}", granted.kind).contains(&format!("{token:?}")), "{granted:?}");
        assert_eq!(events[1].label, "worker-3");

        // The same again, from the position before it.
        let text = begun.to_string();
        let again = WatchFrom::Cursor(Cursor::parse(&text).expect("its own text"));
        let mut second = client.watch(&WatchTarget::key("jobs/nightly"), &again).expect("begins");
        let mut replayed = Vec::new();
        until(&mut second, &mut replayed, |item| has_event(item, "Vacant")).await;
        let watched = |name: &str, items: &[WatchItem]| Watched {
            name: name.to_owned(),
            prefix: false,
            key: b"jobs/nightly".to_vec(),
            after: BTreeMap::new(),
            items: items.to_vec(),
        };
        let told = check(&[watched("live", &items), watched("replayed", &replayed)]);
        let told: Told = told.expect("both were told the same");
        assert!(told.changes >= 4, "{told:?}");

        // Nothing is left behind at the nodes.
        drop((watch, second));
        let deadline = Deadline::after(PATIENCE);
        for id in cluster.ids() {
            while cluster.metric(id, "leasehold_watches", "").expect("a page") > 0.0 {
                assert!(!deadline.passed(), "node {id} still has watches");
                tokio::task::yield_now().await;
            }
        }
    });
}

/// Recipe B75: who comes late sees the present leader, and hears when there is none.
#[test]
fn a_late_observer_sees_who_leads_and_hears_when_nobody_does() {
    run(async {
        let cluster = Cluster::start(Spec { nodes: 1, ..Spec::default() }).expect("a node");
        let client = client(&cluster).await;
        let session = |label: &str| {
            client.labelled_session(Duration::from_secs(10), label).expect("a session")
        };
        let (first, second) = (session("first"), session("second"));
        let leads = first.lock("election").value("one").acquire().await.expect("elected");
        let next = tokio::spawn({
            let second = second.clone();
            async move { second.lock("election").value("two").acquire().await.expect("elected") }
        });
        let waits = async {
            while client.get("election").await.expect("a read").info.waiters.is_empty() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, waits).await.expect("it waits");
        leads.release().await.expect("resigned");
        let next = next.await.expect("no panic");
        let mut watch =
            client.watch(&WatchTarget::key("election"), &WatchFrom::State).expect("it begins");
        let mut items = Vec::new();
        until(&mut watch, &mut items, |item| matches!(item, WatchItem::State { .. })).await;
        let Some(WatchItem::State { keys, .. }) = items.first() else { panic!("{items:?}") };
        let [holder] = &keys[0].holders[..] else { panic!("{keys:?}") };
        assert_eq!((holder.token, holder.value.as_slice()), (next.token(), &b"two"[..]));
        next.release().await.expect("resigned");
        until(&mut watch, &mut items, |item| has_event(item, "Vacant")).await;
    });
}

/// B39: an operator ends a leadership by force, and the same session campaigns again at once. It is
/// another leadership, with a larger token, and observers at the other nodes see both.
#[test]
fn a_forced_leader_that_campaigns_again_is_another_leader_to_all_observers() {
    const ROUNDS: usize = 10;
    run(async {
        let cluster = Cluster::start(Spec::default()).expect("a cluster");
        let client = client(&cluster).await;
        let session = client.session(Duration::from_secs(10)).expect("a session");
        let (began, mut begun) = tokio::sync::mpsc::channel(3);
        let observers: Vec<_> = cluster
            .ids()
            .map(|id| {
                let endpoint = cluster.addresses(id).client.to_string();
                let began = began.clone();
                tokio::spawn(async move {
                    let client = Client::connect(&endpoint).await.expect("the node answers");
                    let mut observation = client.election("e").observe().expect("it begins");
                    let mut told = Vec::new();
                    while told.last().is_none_or(|leader: &Leader| leader.value != b"last") {
                        if let Observed::Leader(leader) = observation.next().await.expect("told") {
                            told.push(leader);
                            if told.len() == 1 {
                                began.send(()).await.expect("the test waits");
                            }
                        }
                    }
                    told
                })
            })
            .collect();
        let election = client.election("e");
        let mut tokens = Vec::new();
        for round in 0..=ROUNDS {
            let value = if round == ROUNDS { "last" } else { "candidate" };
            let leadership = election.campaign(&session, value).await.expect("elected");
            let token = leadership.token();
            tokens.push(token);
            if round == 0 {
                for _ in &observers {
                    begun.recv().await.expect("all of them watch from the first leader on");
                }
            }
            if round < ROUNDS {
                let forced = client.force_release("e", token, "operator", "stuck", true).await;
                forced.expect("forced");
            }
        }
        assert!(tokens.is_sorted_by(|former, next| former < next), "{tokens:?}");
        for observer in observers {
            let told = observer.await.expect("no panic");
            let told: Vec<_> = told.iter().map(|leader| leader.token).collect();
            assert_eq!(told, tokens, "each leadership, once, in order");
        }
    });
}

/// Watchers of the library, each with a client of its own, on a thread beside the test.
struct Watchers {
    stop: Arc<AtomicBool>,
    watched: Vec<Arc<Mutex<Watched>>>,
    thread: Option<JoinHandle<()>>,
}

/// What a watcher does.
#[derive(Clone)]
struct Manner {
    prefix: bool,
    key: String,
    /// Ends its watch after so many items and begins another one from its cursor.
    moves_after: Option<usize>,
}

impl Watchers {
    /// Returns when all of them have begun.
    fn start(endpoints: &str, manners: &[Manner]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let watched = manners.iter().enumerate().map(|(at, manner)| {
            Arc::new(Mutex::new(Watched {
                name: format!("watcher {at}"),
                prefix: manner.prefix,
                key: manner.key.as_bytes().to_vec(),
                after: BTreeMap::new(),
                items: Vec::new(),
            }))
        });
        let watched: Vec<_> = watched.collect();
        let work: Vec<_> = watched.iter().cloned().zip(manners.to_vec()).collect();
        let (ended, endpoints) = (Arc::clone(&stop), endpoints.to_owned());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async move {
                let mut tasks = tokio::task::JoinSet::new();
                for (watched, manner) in work {
                    tasks.spawn(follow(endpoints.clone(), watched, manner, Arc::clone(&ended)));
                }
                while let Some(done) = tasks.join_next().await {
                    done.expect("no watcher panics");
                }
            });
        });
        let this = Self { stop, watched, thread: Some(thread) };
        this.wait("did not begin", |watched| !watched.items.is_empty());
        this
    }

    fn wait(&self, what: &str, fits: impl Fn(&Watched) -> bool) {
        let deadline = Deadline::after(PATIENCE);
        for watched in &self.watched {
            loop {
                let watched = watched.lock().expect("no watcher panicked");
                if fits(&watched) {
                    break;
                }
                assert!(!deadline.passed(), "{} {what}: {:?}", watched.name, watched.items.last());
                drop(watched);
                std::thread::sleep(process::POLL);
            }
        }
    }

    /// Waits until all have been told everything up to these places, and ends.
    fn end(mut self, upto: &BTreeMap<ShardId, Revision>) -> Vec<Watched> {
        self.wait("was not told everything", |watched| {
            let at = places(&watched.items);
            upto.iter().all(|(shard, revision)| at.get(shard).is_none_or(|at| at >= revision))
                && !at.is_empty()
        });
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().expect("it runs").join().expect("no watcher panics");
        let taken = |watched: &Arc<Mutex<Watched>>| watched.lock().expect("over").clone();
        self.watched.iter().map(taken).collect()
    }
}

fn places(items: &[WatchItem]) -> BTreeMap<ShardId, Revision> {
    let place = |item: &WatchItem| match item {
        WatchItem::Change { shard, revision, .. }
        | WatchItem::State { shard, revision, .. }
        | WatchItem::Progress { shard, revision } => Some((*shard, *revision)),
        _ => None,
    };
    items.iter().filter_map(place).collect()
}

async fn follow(
    endpoints: String,
    watched: Arc<Mutex<Watched>>,
    manner: Manner,
    stop: Arc<AtomicBool>,
) {
    let target = if manner.prefix {
        WatchTarget::prefix(manner.key.clone())
    } else {
        WatchTarget::key(manner.key.clone())
    };
    let mut from = WatchFrom::Now;
    while !stop.load(Ordering::Relaxed) {
        // Each time by a client that chooses a node anew.
        let client = Client::connect(&endpoints).await.expect("the cluster answers");
        let mut watch = client.watch(&target, &from).expect("it begins");
        let mut items = 0;
        while !stop.load(Ordering::Relaxed) {
            let next = tokio::time::timeout(Duration::from_millis(100), watch.next()).await;
            if let Ok(item) = next {
                let item = item.expect("it goes on");
                watched.lock().expect("no one panicked").items.push(item);
                items += 1;
            }
            if manner.moves_after.is_some_and(|after| items >= after)
                && let Some(cursor) = watch.cursor()
            {
                from = WatchFrom::Cursor(cursor);
                break;
            }
        }
    }
}

/// The present revision of each shard, linearizably.
fn present(cluster: &Cluster, shards: u32) -> BTreeMap<ShardId, Revision> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let client = client(cluster).await;
        let mut present = BTreeMap::new();
        for shard in (0..shards).map(ShardId) {
            let fresh = leasehold::Freshness::Linearizable;
            let page = client.list_page(shard, b"", b"", 1, fresh).await.expect("a page");
            present.insert(shard, page.revision);
        }
        present
    })
}

#[test]
fn watchers_at_all_nodes_are_told_the_same_while_leaders_die() {
    const SHARDS: u32 = 2;
    let _alone = process::alone();
    let spec = Spec { shards: SHARDS, ..Spec::default() }.flag("cores", 2);
    let mut cluster = Cluster::start(spec).expect("a cluster");
    let everything = Manner { prefix: true, key: String::new(), moves_after: None };
    let one = Manner { prefix: false, key: key_name(0), moves_after: None };
    let some = Manner { key: "contended/".to_owned(), ..everything.clone() };
    let mover = Manner { moves_after: Some(40), ..everything.clone() };
    let mut manners = vec![everything; 4];
    manners.extend([one.clone(), one, some, mover.clone(), mover]);
    let watchers = Watchers::start(&cluster.endpoint_list(), &manners);

    let plan = Plan { clients: 6, keys: 4, ..Plan::default() };
    let load = Contention::start(&cluster.endpoints(), &Recorder::new(), &plan);
    assert!(load.progress(100, PATIENCE), "no progress at first");
    for round in 0..2 {
        let leader = cluster.wait_leader(round, PATIENCE).expect("a leader");
        cluster.kill(leader).expect("killed");
        assert!(load.progress(100, PATIENCE), "no progress without node {leader}");
        cluster.spawn(leader).expect("started again");
        cluster.wait_ready(PATIENCE).expect("ready");
        assert!(load.progress(50, PATIENCE), "no progress with node {leader}");
    }
    load.end();
    let upto = present(&cluster, SHARDS);
    let watched = watchers.end(&upto);
    let told = check(&watched).unwrap_or_else(|why| panic!("{why}"));
    assert!(told.changes > 9 * 200, "{told:?}");
    println!("{told:?}");
}

/// A watch of everything at one node, by hand: it stays there whatever the node says.
struct Stubborn {
    wire: Wire,
    cluster: ClusterId,
    at: Revision,
    partial: Vec<WatchEvent>,
    watched: Watched,
}

impl Stubborn {
    fn start(cluster: &Cluster, id: u64, after: Revision) -> Self {
        let wire = Wire::connect(cluster.endpoint(id), PATIENCE).expect("connected");
        let name = format!("the watcher at node {id}");
        let after_all = BTreeMap::from([(SHARD, after)]);
        let (prefix, key, items) = (true, Vec::new(), Vec::new());
        let watched = Watched { name, prefix, key, after: after_all, items };
        let cluster = wire.hello().cluster;
        let mut this = Self { wire, cluster, at: after, partial: Vec::new(), watched };
        this.ask();
        this
    }

    fn ask(&mut self) {
        let cursor = Positions::of(self.cluster, SHARD, self.at).encode();
        let (prefix, key, from) = (true, Vec::new(), From::Cursor { cursor });
        let request = Request::Watch(WatchRequest { shard: SHARD, prefix, key, from });
        self.wire.send(&request).expect("sent");
    }

    /// Reads until what was told fits.
    fn until(&mut self, what: &str, fits: impl Fn(&[WatchItem]) -> bool) {
        let deadline = Deadline::after(PATIENCE);
        while !fits(&self.watched.items) {
            let reply = self.wire.recv(deadline).expect("connected");
            let Some((_, reply)) = reply else {
                panic!("{what}; last {:?}", self.watched.items.last());
            };
            self.take(reply);
        }
    }

    fn take(&mut self, reply: Reply) {
        match reply {
            Reply::WatchEvents(told) => {
                self.partial.extend(told.events);
                if told.more {
                    return;
                }
                for event in self.partial.drain(..) {
                    match self.watched.items.last_mut() {
                        Some(WatchItem::Change { revision, events, .. })
                            if *revision == event.revision =>
                        {
                            events.push(event);
                        }
                        _ => self.watched.items.push(WatchItem::Change {
                            shard: SHARD,
                            revision: event.revision,
                            events: vec![event],
                        }),
                    }
                }
                self.at = told.revision;
                let (shard, revision) = (SHARD, told.revision);
                self.watched.items.push(WatchItem::Progress { shard, revision });
            }
            Reply::WatchState(told) => {
                assert!(!told.more, "few keys are in use");
                self.at = told.revision;
                self.watched.items.push(WatchItem::State {
                    shard: SHARD,
                    revision: told.revision,
                    keys: told.keys,
                    first: told.first,
                    last: true,
                });
            }
            Reply::WatchNotice(told) => self.watched.items.push(if told.quorum {
                WatchItem::Quorum
            } else {
                WatchItem::NoQuorum
            }),
            Reply::WatchEnd(end) => {
                assert_eq!(end.reason, WatchEndReason::Continue);
                self.partial.clear();
                self.ask();
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Recipes B72 and B76: a watcher at a follower that asks from ahead of it; the follower is cut
/// off until it can only come back by snapshot.
#[test]
fn a_node_that_is_cut_off_says_so_and_comes_back_with_a_state() {
    const SNAPSHOT_ENTRIES: u64 = 50;
    let _alone = process::alone();
    let spec = Spec { proxied_peers: true, ..Spec::default() }
        .flag("snapshot-entries", SNAPSHOT_ENTRIES)
        .flag("snapshot-keep-entries", 100);
    let cluster = Cluster::start(spec).expect("a cluster");
    let everything = Manner { prefix: true, key: String::new(), moves_after: None };
    let watchers = Watchers::start(&cluster.endpoint_list(), &[everything.clone(), everything]);
    let plan = Plan { clients: 4, keys: 3, ..Plan::default() };
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let follower = cluster.ids().find(|id| *id != leader).expect("three nodes");
    let others: Vec<_> =
        cluster.ids().filter(|id| *id != follower).map(|id| cluster.endpoint(id)).collect();
    let load = Contention::start(&others, &Recorder::new(), &plan);
    assert!(load.progress(50, PATIENCE), "no progress at first");

    cluster.links().isolate(follower);
    let status = cluster.status_of(follower).expect("it answers");
    let own = status.nodes.iter().find(|node| node.node == NodeId(follower)).expect("itself");
    let (applied, index) = (own.shards[0].applied_revision, own.shards[0].last_index);
    // One from ahead of it, one from where it is.
    let mut ahead = Stubborn::start(&cluster, follower, Revision(applied.0 + 1));
    let mut here = Stubborn::start(&cluster, follower, applied);
    let no_quorum = |items: &[WatchItem]| items.contains(&WatchItem::NoQuorum);
    ahead.until("it does not say that it is cut off", no_quorum);
    here.until("it does not say that it is cut off", no_quorum);

    let deadline = Deadline::after(PATIENCE);
    let purged = || cluster.metric(leader, "leasehold_shard_purged_index", "shard=\"0\"");
    while !purged().is_ok_and(|purged| purged > (index + SNAPSHOT_ENTRIES) as f64) {
        assert!(!deadline.passed(), "node {leader} cut nothing from its log");
        std::thread::sleep(process::POLL);
    }
    cluster.links().heal();
    let is_state = |item: &WatchItem| matches!(item, WatchItem::State { .. });
    let resynced = |items: &[WatchItem]| {
        let state = items.iter().position(is_state);
        state.is_some_and(|at| items[at..].contains(&WatchItem::Quorum))
    };
    ahead.until("it does not come back with a state", resynced);
    here.until("it does not come back with a state", resynced);
    assert!(load.progress(50, PATIENCE), "no progress in the end");
    load.end();
    let upto = present(&cluster, 1);
    let reached = |items: &[WatchItem]| places(items).get(&SHARD) >= upto.get(&SHARD);
    ahead.until("it does not tell everything", reached);
    here.until("it does not tell everything", reached);
    let mut watched = watchers.end(&upto);
    watched.extend([ahead.watched, here.watched]);
    let told = check(&watched).unwrap_or_else(|why| panic!("{why}"));
    assert!(told.states >= 2 && told.no_quorum >= 2, "{told:?}");
    println!("{told:?}");
}

fn watch_from(from: From) -> Request {
    Request::Watch(WatchRequest { shard: SHARD, prefix: true, key: b"jobs/".to_vec(), from })
}

/// Recipe B74, and what a node does not take.
#[test]
fn watches_end_with_their_connection_and_bad_cursors_are_refused() {
    const CYCLES: usize = 50;
    let _alone = process::alone();
    let cluster = Cluster::start(Spec { nodes: 1, ..Spec::default() }).expect("a node");
    let connect = || Wire::connect(cluster.endpoint(1), PATIENCE).expect("connected");
    for cycle in 0..CYCLES {
        let mut wire = connect();
        let mut begun = Vec::new();
        for _ in 0..100 {
            begun.push(wire.send(&watch_from(From::Now)).expect("sent"));
        }
        if cycle % 2 == 0 {
            for id in begun {
                wire.send(&Request::Unwatch(UnwatchRequest { id })).expect("sent");
            }
            let deadline = Deadline::after(PATIENCE);
            let mut ended = 0;
            while ended < 100 {
                let told = wire.recv(deadline).expect("connected").expect("told in time");
                ended += usize::from(told.1 == Reply::Unwatched);
            }
        }
    }
    let mut wire = connect();
    let first = wire.call(&watch_from(From::State), PATIENCE).expect("answered");
    let Reply::WatchState(state) = first else { panic!("{first:?}") };
    let cluster_id = wire.hello().cluster;
    let at = |cluster, shard, revision: u64| {
        Positions::of(cluster, ShardId(shard), Revision(revision)).encode()
    };
    let future = state.revision.0 + 1_000;
    let page = |after: &str| From::Page {
        cursor: at(cluster_id, 0, state.revision.0),
        after: after.as_bytes().to_vec(),
    };
    for (from, code) in [
        (From::Cursor { cursor: vec![1; 10] }, ErrorCode::CURSOR_MALFORMED),
        (From::Cursor { cursor: at(cluster_id, 1, 1) }, ErrorCode::CURSOR_MALFORMED),
        (From::Cursor { cursor: at(ClusterId([7; 16]), 0, 1) }, ErrorCode::CURSOR_OF_OTHER_CLUSTER),
        (From::Cursor { cursor: at(cluster_id, 0, future) }, ErrorCode::CURSOR_FROM_FUTURE),
        (page("other/key"), ErrorCode::PAGE_OF_OTHER_QUERY),
    ] {
        let reply = connect().call(&watch_from(from.clone()), PATIENCE).expect("answered");
        assert_eq!(refusal(&reply), Some(code), "{from:?}: {reply:?}");
    }
    let list = Request::List(leasehold_protocol::request::ListRequest {
        shard: SHARD,
        prefix: b"jobs/".to_vec(),
        after: b"other/key".to_vec(),
        limit: 10,
        freshness: leasehold::Freshness::Linearizable,
        timeout_ms: 5_000,
    });
    let reply = connect().call(&list, PATIENCE).expect("answered");
    assert_eq!(refusal(&reply), Some(ErrorCode::PAGE_OF_OTHER_QUERY), "{reply:?}");
    drop(wire);
    let deadline = Deadline::after(PATIENCE);
    while cluster.metric(1, "leasehold_watches", "").expect("a page") > 0.0 {
        assert!(!deadline.passed(), "watches are left behind");
        std::thread::sleep(process::POLL);
    }
}

/// The lines of a program's output, which is ended with it.
struct Lines {
    child: std::process::Child,
    out: std::io::BufReader<std::process::ChildStdout>,
}

impl Lines {
    fn start(cluster: &Cluster, arguments: &[&str]) -> Self {
        let mut child = std::process::Command::new(process::binary("leasehold").expect("built"))
            .env("LEASEHOLD_ENDPOINTS", cluster.endpoint_list())
            .args(arguments)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("it runs");
        let out = std::io::BufReader::new(child.stdout.take().expect("piped"));
        Self { child, out }
    }

    fn say(&mut self, line: &str) {
        use std::io::Write as _;
        let input = self.child.stdin.as_mut().expect("piped");
        writeln!(input, "{line}").expect("it listens");
    }

    /// The next line in which all of `words` are; `None` at the end.
    fn find(&mut self, words: &[&str]) -> Option<String> {
        use std::io::BufRead as _;
        loop {
            let mut line = String::new();
            if self.out.read_line(&mut line).expect("it speaks") == 0 {
                return None;
            }
            if words.iter().all(|word| line.contains(word)) {
                return Some(line);
            }
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_command_line_and_the_pipe_watch() {
    let _alone = process::alone();
    let spec = Spec { nodes: 1, shards: 2, ..Spec::default() };
    let cluster = Cluster::start(spec).expect("a node");
    let mut pipe = Lines::start(&cluster, &["pipe", "--label", "worker-3"]);
    let mut watch = Lines::start(&cluster, &["watch", "jobs/", "--prefix", "--json"]);
    for shard in 0..2 {
        watch.find(&["progress", &format!("\"shard\":{shard}")]).expect("it begins");
    }
    pipe.say(r#"{"id":1,"op":"watch","key":"jobs/a","from":"state"}"#);
    let state = pipe.find(&["\"state\"", "\"watch\":1"]).expect("it begins");
    assert!(state.contains("\"keys\":[]") && state.contains("\"last\":true"), "{state}");
    pipe.say(r#"{"id":2,"op":"acquire","key":"jobs/a","value":"here"}"#);
    // The answer and what the watch is told come in either order.
    let lines: Vec<_> = (0..2).map(|_| pipe.find(&["jobs/a"]).expect("granted and told")).collect();
    let change = lines.iter().find(|line| line.contains("\"watch\":1")).expect("told");
    assert!(lines.iter().any(|line| line.contains("\"id\":2")), "{lines:?}");
    assert!(change.contains("\"value\":\"here\"") && change.contains("worker-3"), "{change}");
    let seen = watch.find(&["\"granted\""]).expect("told");
    let seen: serde_json::Value = serde_json::from_str(&seen).expect("JSON");
    let cursor = seen["cursor"].as_str().expect("a cursor").to_owned();
    pipe.say(r#"{"id":3,"op":"release","key":"jobs/a"}"#);
    let ended = watch.find(&["\"ended\""]).expect("told");
    assert!(ended.contains("\"reason\":\"released\""), "{ended}");
    pipe.say(r#"{"id":4,"op":"cancel","target":1}"#);
    pipe.find(&["\"id\":1", "cancelled"]).expect("ended");

    // From where it was, in another process: that change again, and no other.
    let again = ["watch", "jobs/", "--prefix", "--json", "--from", &cursor, "--limit", "1"];
    let mut second = Lines::start(&cluster, &again);
    let told = second.find(&["\"change\""]).expect("told");
    assert_eq!(told, ended);
    assert!(second.find(&["change"]).is_none(), "it ends by itself");
    let mut refused = Lines::start(&cluster, &["watch", "--from", "00ff"]);
    assert!(refused.find(&["change"]).is_none());
    assert_eq!(refused.child.wait().expect("over").code(), Some(2));
}
