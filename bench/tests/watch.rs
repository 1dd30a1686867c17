//! Watches of real processes (G6): watchers at all nodes while leaders die, cursors that move from
//! node to node, followers that come back by snapshot, watchers that go away or fall behind.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold::{Client, Cursor, Watch, WatchFrom, WatchItem, WatchTarget};
use leasehold_bench::check::watch::{Told, Watched, check};
use leasehold_bench::clock::Deadline;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process;

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
        assert!(events.iter().all(|event| format!("{:?}", event.kind).contains("key: [106, ")));
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
