//! What a node says that only follows: of which age a stale read is (G7), whether what its watchers
//! hear may be late (G6); and which pages nobody is given.

use leasehold_protocol::ids::Revision;
use leasehold_protocol::reply::KeysReply;
use leasehold_protocol::request::ListRequest;
use leasehold_protocol::watch::WatchNotice;
use leasehold_server::watch::{Start, Target, WatchName};

use super::*;

/// How late the follower hears.
const LATE: Duration = Duration::from_millis(200);

fn list(prefix: &[u8], after: &[u8], freshness: Freshness) -> Request {
    let (prefix, after, limit) = (prefix.to_vec(), after.to_vec(), 256);
    let timeout_ms = TIMEOUT_MS;
    Request::List(ListRequest { shard: SHARD, prefix, after, limit, freshness, timeout_ms })
}

/// The n-th acquire of a lease, of a key of its own.
fn acquire_own(lease: LeaseId, n: u64) -> Command {
    let number = 3 * n + 1;
    let floor = Number(number - 1);
    Command::Acquire {
        caller: Caller { floor, ..caller(lease, number) },
        key: format!("aged/{n:03}").into_bytes(),
        mode: Mode::EXCLUSIVE,
        own: None,
        value: vec![],
        wait_ms: 0,
    }
}

async fn read_stale(service: &Service, node: u64) -> KeysReply {
    let replies = service.ask(node, list(b"aged/", b"", Freshness::Stale));
    match replies.reply("a page", |reply| matches!(reply, Reply::Keys(_))).await {
        Reply::Keys(page) => page,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_stale_read_has_all_that_was_acknowledged_before_its_age() {
    run(70, async {
        let service = Service::start(3, |_| {}).await;
        let (leader, leadership) = service.cluster.leader().await;
        let follower = leader % 3 + 1;
        let lease = service.open_for(leader, 60_000).await;
        let domain = |node| service.cluster.machine(node).domain;
        service.cluster.net.set_delay(domain(leader), domain(follower), LATE, LATE);
        let mut acknowledged = Vec::new();
        let (mut aged, mut behind) = (0, 0);
        for n in 0..100 {
            let outcome = service.outcome(leader, acquire_own(lease, n)).await;
            assert!(matches!(outcome, Outcome::Granted(_)), "{outcome:?}");
            acknowledged.push(SimClock.now());
            for _ in 0..3 {
                sleep_ms(5).await;
                let asked = SimClock.now();
                let page = read_stale(&service, follower).await;
                behind += u64::from(page.keys.len() < acknowledged.len());
                let Some(age_ms) = page.age_ms else { continue };
                aged += 1;
                let age = Duration::from_millis(age_ms.into());
                let before = |at: &&_| asked.since(**at) > age;
                let known = acknowledged.iter().filter(before).count();
                let found = page.keys.len();
                assert!(found >= known, "{found} keys, {age_ms} ms old: {known} were acknowledged");
            }
        }
        assert!(aged > 100 && behind > 100, "INVALID: {aged} reads of known age, {behind} behind");
        assert_eq!(service.cluster.leader().await, (leader, leadership), "INVALID: it changed");
    });
}

/// What a watch was told last of its node.
fn noticed(watch: &Replies) -> Option<bool> {
    let told = watch.0.borrow();
    told.iter().rev().find_map(|reply| match reply {
        Reply::WatchNotice(WatchNotice { quorum, .. }) => Some(*quorum),
        _ => None,
    })
}

#[test]
fn watchers_hear_that_their_node_is_cut_off_and_that_it_is_not_any_more() {
    run(71, async {
        let service = Service::start(3, |_| {}).await;
        let (leader, _) = service.cluster.leader().await;
        let follower = leader % 3 + 1;
        let told = Replies::default();
        let (shard, to) =
            (service.shards[&follower].clone(), ReplyTo::new(Rc::new(told.clone()), 1));
        let all = Target::Prefix(vec![]);
        let name = WatchName { core: 0, id: 1 };
        let watch = async move { shard.watch(name, all, Start::After(Revision(0)), &to) };
        drop(service.cluster.world.spawn_in(service.cluster.machine(follower).domain, watch));
        until("it is up to date", || noticed(&told) == Some(true)).await;
        service.isolate(follower);
        until("what it hears may be late", || noticed(&told) == Some(false)).await;
        service.cluster.net.heal_all();
        until("it is up to date again", || noticed(&told) == Some(true)).await;
    });
}

/// Watchers, however many there are, delay no answer.
#[test]
fn who_asked_is_answered_before_who_watches_is_told() {
    run(73, async {
        let service = Service::start(1, |_| {}).await;
        let lease = service.open(1).await;
        let all = Replies::default();
        let to = || ReplyTo::new(Rc::new(all.clone()), 1);
        let (shard, watcher, name) =
            (service.shards[&1].clone(), to(), WatchName { core: 0, id: 1 });
        let everything = Target::Prefix(vec![]);
        let watch = async move { shard.watch(name, everything, Start::Now, &watcher) };
        drop(service.cluster.world.spawn_in(service.cluster.machine(1).domain, watch));
        until("it watches", || noticed(&all) == Some(true)).await;
        all.0.borrow_mut().clear();
        let (shard, caller, command) = (service.shards[&1].clone(), to(), acquire(lease, 1, 0));
        let request = CommandRequest { shard: SHARD, timeout_ms: TIMEOUT_MS, command };
        let ask = async move { shard.submit(Request::Command(request), caller, Origin::Client) };
        drop(service.cluster.world.spawn_in(service.cluster.machine(1).domain, ask));
        until("both are told", || all.0.borrow().len() >= 2).await;
        let told = all.0.borrow();
        assert!(matches!(told[0], Reply::Outcome(_)), "{told:?}");
        assert!(matches!(told[1], Reply::WatchEvents(_)), "{told:?}");
    });
}

#[test]
fn a_page_goes_on_after_a_key_of_its_own_query_only() {
    run(72, async {
        let service = Service::start(1, |_| {}).await;
        for freshness in [Freshness::Linearizable, Freshness::Stale] {
            let page = service.ask(1, list(b"jobs/", b"other/key", freshness));
            until("an answer", || page.last().is_some()).await;
            assert_eq!(page.error(), Some(ErrorCode::PAGE_OF_OTHER_QUERY), "{freshness:?}");
            let page = service.ask(1, list(b"jobs/", b"jobs/a", freshness));
            page.reply("a page", |reply| matches!(reply, Reply::Keys(_))).await;
        }
    });
}
