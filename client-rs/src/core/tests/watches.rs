//! Watches: positions, gaps, moves to other nodes, users that do not take what they are told (G6).

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::EventKind;
use leasehold_protocol::ids::{ClusterId, Revision, ShardId};
use leasehold_protocol::reply::{KeyInfo, Reply};
use leasehold_protocol::request::Request;
use leasehold_protocol::watch::{
    Cursor, WatchEnd, WatchEndReason, WatchEvent, WatchEvents, WatchFrom, WatchNotice,
    WatchRequest, WatchState,
};

use super::super::WatchId;
use super::super::watch::{Begin, Item, Target};
use super::rig::*;

fn key() -> Target {
    Target { prefix: false, key: b"k".to_vec() }
}

fn everything() -> Target {
    Target { prefix: true, key: Vec::new() }
}

fn cursor(shard: u32, revision: u64) -> Vec<u8> {
    Cursor::of(CLUSTER, ShardId(shard), Revision(revision)).encode()
}

fn after(revision: u64) -> WatchFrom {
    WatchFrom::Cursor { cursor: cursor(0, revision) }
}

fn event(revision: u64, size: usize) -> WatchEvent {
    let kind = EventKind::Vacant { key: vec![b'k'; size] };
    WatchEvent { revision: Revision(revision), kind, label: String::new(), value: Vec::new() }
}

/// A frame with one small event at each of `at`, covering all up to `upto`.
fn events(at: &[u64], upto: u64, more: bool) -> Reply {
    let events = at.iter().map(|revision| event(*revision, 1)).collect();
    Reply::WatchEvents(WatchEvents { shard: SHARD, revision: Revision(upto), events, more })
}

fn page(revision: u64, first: bool, keys: &[&str], more: bool) -> Reply {
    let info = |key: &&str| KeyInfo {
        key: (*key).to_owned(),
        holders: vec![],
        holders_total: 0,
        waiters: vec![],
        waiters_total: 0,
        limit: 0,
        taken: 0,
        delays: vec![],
        delays_total: 0,
        last_end: None,
    };
    let keys = keys.iter().map(info).collect();
    Reply::WatchState(WatchState { shard: SHARD, revision: Revision(revision), first, keys, more })
}

fn notice(quorum: bool) -> Reply {
    Reply::WatchNotice(WatchNotice { shard: SHARD, quorum })
}

fn end(reason: WatchEndReason) -> Reply {
    Reply::WatchEnd(WatchEnd { shard: SHARD, reason })
}

impl Rig {
    fn watch(&mut self, target: Target, begin: &Begin) -> WatchId {
        let watch = self.core.watch(self.now, target, begin).expect("room");
        self.turn();
        watch
    }

    #[track_caller]
    fn take_watch(&mut self) -> (Sent, WatchRequest) {
        let sent = self.find(|request| matches!(request, Request::Watch(_))).expect("a watch");
        let Request::Watch(request) = sent.request.clone() else { unreachable!("just matched") };
        (sent, request)
    }

    /// Requests to end the watch that `sent` began.
    fn unwatched(&mut self, sent: &Sent) -> bool {
        let ends = |request: &Request| matches!(request, Request::Unwatch(unwatch) if unwatch.id == sent.id);
        self.find(ends).is_some_and(|unwatch| unwatch.conn == sent.conn)
    }

    /// All items that can be taken, in short.
    fn items(&mut self, watch: WatchId) -> Vec<String> {
        let mut items = Vec::new();
        while let Some(item) = self.core.take_item(self.now, watch) {
            items.push(match item {
                Ok(Item::Change { revision, events, .. }) => {
                    format!("{revision}x{}", events.len())
                }
                Ok(Item::State { revision, keys, first, last, .. }) => {
                    let keys: Vec<_> = keys.into_iter().map(|info| info.key).collect();
                    format!("state {revision} {first} {last} {}", keys.join(","))
                }
                Ok(Item::Progress { revision, .. }) => format!("at {revision}"),
                Ok(Item::NoQuorum) => "no_quorum".to_owned(),
                Ok(Item::Quorum) => "quorum".to_owned(),
                Err(failure) => {
                    items.push(format!("{}", failure.code));
                    break;
                }
            });
        }
        self.turn();
        items
    }
}

#[test]
fn changes_are_whole_and_positions_follow() {
    let mut rig = Rig::new();
    let watch = rig.watch(key(), &Begin::Now);
    let (sent, request) = rig.take_watch();
    assert_eq!(request.from, WatchFrom::Now);
    rig.answer(&sent, &events(&[], 7, false));
    rig.answer(&sent, &events(&[8, 8, 10], 10, false));
    rig.answer(&sent, &events(&[12, 12], 11, true));
    assert_eq!(rig.items(watch), ["at 7", "8x2", "10x1"], "12 is not whole yet");
    rig.answer(&sent, &events(&[12, 15], 16, false));
    rig.answer(&sent, &events(&[], 20, false));
    assert_eq!(rig.items(watch), ["12x3", "15x1", "at 20"], "one position for two");
    rig.core.unwatch(rig.now, watch);
    rig.turn();
    assert!(rig.unwatched(&sent));
}

#[test]
fn a_broken_connection_goes_on_elsewhere_from_the_last_whole_revision() {
    let mut rig = Rig::new();
    let watch = rig.watch(key(), &Begin::Now);
    let (first, _) = rig.take_watch();
    rig.answer(&first, &events(&[8], 9, false));
    rig.answer(&first, &events(&[12], 11, true));
    rig.break_conn(first.conn);
    rig.advance(ms(300));
    let (second, request) = rig.take_watch();
    assert_ne!(first.conn, second.conn);
    assert_eq!(request.from, after(9), "what was half told is told again");
    rig.answer(&second, &events(&[12, 12, 12], 13, false));
    assert_eq!(rig.items(watch), ["8x1", "at 9", "12x3", "at 13"]);
}

#[test]
fn a_node_that_is_not_up_to_date_is_left_and_the_user_is_told_once() {
    let mut rig = Rig::new();
    let watch = rig.watch(key(), &Begin::Now);
    let (first, _) = rig.take_watch();
    rig.answer(&first, &events(&[], 7, false));
    rig.answer(&first, &notice(true));
    assert_eq!(rig.items(watch), ["at 7"], "that it is up to date goes without saying");
    rig.answer(&first, &notice(false));
    assert_eq!(rig.items(watch), ["no_quorum"]);
    assert!(rig.unwatched(&first));
    // What the node still says does not count.
    rig.answer(&first, &events(&[8], 8, false));
    rig.advance(ms(300));
    let (second, request) = rig.take_watch();
    assert_ne!(rig.conns[&first.conn], rig.conns[&second.conn], "another node");
    assert_eq!(request.from, after(7));
    rig.answer(&second, &events(&[8], 9, false));
    assert_eq!(rig.items(watch), ["8x1", "at 9"], "nobody said yet that this is all");
    rig.answer(&second, &notice(true));
    assert_eq!(rig.items(watch), ["quorum"]);
}

#[test]
fn a_watch_that_nobody_answers_says_so_in_time() {
    let mut rig = Rig::new();
    let watch = rig.watch(key(), &Begin::Now);
    let (first, _) = rig.take_watch();
    rig.answer(&first, &events(&[], 7, false));
    for node in 1..=3 {
        rig.nodes.insert(format!("n{node}:1"), Node::Down);
    }
    // Whenever that happens: five seconds later it is said, and not before.
    rig.advance(ms(3_990));
    rig.break_conn(first.conn);
    rig.advance(ms(4_990));
    assert_eq!(rig.items(watch), ["at 7"]);
    rig.advance(ms(20));
    assert_eq!(rig.items(watch), ["no_quorum"]);
    for node in 1..=3 {
        rig.nodes.insert(format!("n{node}:1"), Node::Up(node));
    }
    let is_watch = |sent: &Sent| matches!(sent.request, Request::Watch(_));
    while !rig.sent.iter().any(is_watch) {
        rig.advance(ms(200));
    }
    let (second, request) = rig.take_watch();
    assert_eq!(request.from, after(7));
    rig.answer(&second, &events(&[], 8, false));
    rig.answer(&second, &notice(true));
    assert_eq!(rig.items(watch), ["at 8", "quorum"]);
}

#[test]
fn a_gap_is_a_state_in_pages_and_then_what_follows_it() {
    let mut rig = Rig::new();
    let mut begin = Cursor::of(CLUSTER, SHARD, Revision(3));
    begin.positions.insert(ShardId(9), Revision(1));
    let watch = rig.watch(everything(), &Begin::Cursor(begin));
    let (sent, request) = rig.take_watch();
    assert_eq!(request.from, after(3));
    rig.answer(&sent, &page(40, true, &["a", "b"], true));
    rig.answer(&sent, &end(WatchEndReason::Continue));
    let (sent, request) = rig.take_watch();
    let next = WatchFrom::Page { cursor: cursor(0, 40), after: b"b".to_vec() };
    assert_eq!(request.from, next);
    // The view is gone: a new state begins.
    rig.answer(&sent, &page(50, true, &["a"], true));
    rig.answer(&sent, &end(WatchEndReason::Continue));
    let (sent, _) = rig.take_watch();
    rig.answer(&sent, &page(50, false, &["c"], false));
    rig.answer(&sent, &events(&[51], 51, false));
    let told = rig.items(watch);
    let states = ["state 40 true false a,b", "state 50 true false a", "state 50 false true c"];
    assert_eq!(told[..3], states);
    assert_eq!(told[3..], ["51x1"]);
    rig.break_conn(sent.conn);
    rig.advance(ms(300));
    assert_eq!(rig.take_watch().1.from, after(51));
}

#[test]
fn a_user_that_takes_nothing_costs_little_and_goes_on_from_where_it_was() {
    let mut rig = Rig::new();
    let watch = rig.watch(key(), &Begin::Now);
    let (sent, _) = rig.take_watch();
    rig.answer(&sent, &events(&[], 7, false));
    let mut revision = 7;
    while !rig.unwatched(&sent) {
        revision += 1;
        let many = vec![event(revision, 100); 1_000];
        let told =
            WatchEvents { shard: SHARD, revision: Revision(revision), events: many, more: false };
        rig.answer(&sent, &Reply::WatchEvents(told));
        assert!(revision < 200, "no end of it");
    }
    rig.answer(&sent, &events(&[revision + 1], revision + 1, false));
    rig.advance(ms(12_000));
    assert!(rig.find(|request| matches!(request, Request::Watch(_))).is_none(), "it rests");
    let told = rig.items(watch);
    assert_eq!(told.len() as u64, revision - 6, "what was not heard is not there");
    let (_, request) = rig.take_watch();
    assert_eq!(request.from, after(revision));
    assert!(!told.contains(&"no_quorum".to_owned()));
}

#[test]
fn an_answer_to_an_attempt_that_was_given_up_is_not_heard_and_ends_there() {
    let mut rig = Rig::new();
    let watch = rig.watch(key(), &Begin::Now);
    let (slow, _) = rig.take_watch();
    // Its connection lives, but the answer does not come.
    for _ in 0..3 {
        rig.advance(ms(1_000));
        while let Some(ping) = rig.find(|request| matches!(request, Request::Ping)) {
            rig.answer(&ping, &Reply::Pong);
        }
    }
    let (second, _) = rig.take_watch();
    rig.answer(&slow, &events(&[8], 8, false));
    assert!(rig.unwatched(&slow));
    rig.answer(&second, &events(&[], 7, false));
    rig.answer(&second, &events(&[8], 8, false));
    assert_eq!(rig.items(watch), ["at 7", "8x1"], "once");
}

#[test]
fn cursors_and_targets_that_cannot_be_are_refused_at_once() {
    let mut rig = Rig::with_shards(2);
    let mut refused = |target: Target, begin: Begin| {
        rig.core.watch(rig.now, target, &begin).expect_err("it cannot be").code
    };
    let at = |cluster, shard| Begin::Cursor(Cursor::of(cluster, ShardId(shard), Revision(1)));
    let other = refused(everything(), at(ClusterId([9; 16]), 0));
    assert_eq!(other, ErrorCode::CURSOR_OF_OTHER_CLUSTER);
    assert_eq!(refused(everything(), at(CLUSTER, 0)), ErrorCode::CURSOR_MALFORMED);
    let empty = Target { prefix: false, key: Vec::new() };
    assert_eq!(refused(empty, Begin::Now), ErrorCode::KEY_EMPTY);
    let long = Target { prefix: true, key: vec![b'k'; 513] };
    assert_eq!(refused(long, Begin::Now), ErrorCode::KEY_TOO_LONG);
    assert!(rig.find(|request| matches!(request, Request::Watch(_))).is_none());
}

#[test]
fn what_the_node_refuses_for_good_is_the_end_of_the_watch() {
    let mut rig = Rig::new();
    let watch = rig.watch(key(), &Begin::Now);
    let (sent, _) = rig.take_watch();
    rig.answer(&sent, &events(&[8], 8, false));
    rig.error(&sent, ErrorCode::CURSOR_FROM_FUTURE, 0);
    let told = rig.items(watch);
    assert_eq!(told, ["8x1", "cursor_from_future (232)"]);
    assert_eq!(rig.items(watch), ["cursor_from_future (232)"], "it stays so");
    rig.core.unwatch(rig.now, watch);
    rig.turn();
    rig.core.assert_empty();
}

#[test]
fn many_watches_end_without_a_trace() {
    let mut rig = Rig::with_shards(3);
    for _ in 0..50 {
        let watches: Vec<_> = (0..20).map(|_| rig.watch(everything(), &Begin::State)).collect();
        for watch in watches {
            rig.core.unwatch(rig.now, watch);
        }
        rig.turn();
    }
    rig.core.assert_empty();
    let began = rig.sent.iter().filter(|sent| matches!(sent.request, Request::Watch(_))).count();
    let ended = rig.sent.iter().filter(|sent| matches!(sent.request, Request::Unwatch(_))).count();
    assert_eq!((began, ended), (3_000, 3_000));
}
