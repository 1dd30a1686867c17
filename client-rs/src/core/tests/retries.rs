//! Lost connections, other leaders, absent clusters; numbers, floor and acknowledgements (G5).

use std::collections::BTreeSet;

use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, NodeId, Number, Revision, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{ErrorReply, Reply};
use leasehold_protocol::request::Request;

use super::super::{CallRequest, Event, Wait};
use super::rig::*;

#[test]
fn a_broken_connection_repeats_the_same_number_and_body_elsewhere() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::For(ms(60_000)));
    rig.opened();
    let first = rig.take_acquire();
    rig.nodes.insert("n1:1".to_owned(), Node::Down);
    rig.break_conn(first.conn);
    rig.advance(ms(50));
    let second = rig.take_acquire();
    assert_ne!(first.conn, second.conn);
    assert_eq!(first.command(), second.command(), "wait, value, number: all as before");
    rig.grant(&second, 5, 0);
    assert!(rig.try_acquired(op).is_none(), "a retried grant may be old");
    rig.advance(ms(50));
    let renew = rig.take_renew();
    rig.renewed(&renew, 1);
    rig.acquired(op).expect("current");
}

#[test]
fn a_queued_acquire_is_sent_again_after_its_connection_broke_and_keeps_its_place() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let first = rig.take_acquire();
    rig.queued(&first);
    rig.break_conn(first.conn);
    rig.advance(ms(200));
    let second = rig.take_acquire();
    assert_eq!(second.caller().number, first.caller().number);
    rig.queued(&second);
    // A late frame of the old connection is not heard.
    rig.grant(&first, 99, 0);
    assert!(rig.try_acquired(op).is_none() && rig.renewals() == 0);
    rig.grant(&second, 5, 0);
    let renew = rig.take_renew();
    rig.renewed(&renew, 1);
    assert_eq!(rig.acquired(op).expect("current").cell.token(), Token(5));
}

/// A client that stays on one node hears that the others were replaced, and finds the new ones when
/// its own is gone.
#[test]
fn nodes_that_came_later_are_asked_when_all_that_were_known_are_gone() {
    let mut rig = Rig::new();
    let session = rig.session();
    rig.acquire(session, "k", Wait::For(ms(60_000)));
    rig.opened();
    let first = rig.take_acquire();
    assert_eq!(rig.conns[&first.conn], "n1:1");
    rig.queued(&first);
    let others: Vec<_> = rig.conns.keys().copied().filter(|conn| *conn != first.conn).collect();
    for conn in others {
        rig.break_conn(conn);
    }
    for (old, new) in [(2, 4), (3, 5)] {
        rig.nodes.insert(format!("n{old}:1"), Node::Down);
        rig.nodes.insert(format!("n{new}:1"), Node::Up(new));
    }
    let tried = rig.connects.len();
    rig.news(first.conn, &[1, 4, 5]);
    rig.advance(ms(1000));
    assert_eq!(rig.connects.len(), tried, "news alone open no connection");
    rig.nodes.insert("n1:1".to_owned(), Node::Down);
    rig.break_conn(first.conn);
    rig.advance(ms(200));
    let second = rig.take_acquire();
    let addr = rig.conns[&second.conn].as_str();
    assert!(["n4:1", "n5:1"].contains(&addr), "{addr}: {:?}", rig.connects);
    assert_eq!(first.caller().number, second.caller().number);
    let asked: Vec<_> = rig.connects[tried..].iter().map(|(_, addr)| addr.as_str()).collect();
    assert!(!asked.contains(&"n2:1") && !asked.contains(&"n3:1"), "they are gone: {asked:?}");
}

/// As many nodes may come and go as like: places of those that went are used again.
#[test]
fn addresses_of_nodes_that_went_make_room() {
    let mut rig = Rig::new();
    let session = rig.session();
    rig.acquire(session, "k", Wait::For(ms(60_000)));
    rig.opened();
    let first = rig.take_acquire();
    for newcomer in 4..200 {
        rig.news(first.conn, &[1, newcomer]);
    }
    rig.nodes.insert("n199:1".to_owned(), Node::Up(199));
    rig.nodes.insert("n1:1".to_owned(), Node::Down);
    rig.break_conn(first.conn);
    rig.advance(ms(200));
    let second = rig.take_acquire();
    assert_eq!(rig.conns[&second.conn], "n199:1");
}

#[test]
fn resync_sends_a_wait_again_at_once() {
    let mut rig = Rig::new();
    let session = rig.session();
    rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let first = rig.take_acquire();
    rig.queued(&first);
    rig.error(&first, ErrorCode::RESYNC, 0);
    let second = rig.take_acquire();
    assert_eq!(second.caller().number, first.caller().number);
}

#[test]
fn a_hint_is_followed_at_once_and_remembered() {
    let mut rig = Rig::new();
    let session = rig.session();
    rig.acquire(session, "k", Wait::Unlimited);
    let open = rig.take_open();
    assert_eq!(rig.conns[&open.conn], "n1:1", "the leader of the handshake");
    rig.error(&open, ErrorCode::NOT_LEADER, 3);
    let again = rig.take_open();
    assert_eq!(rig.conns[&again.conn], "n3:1");
    rig.outcome(&again, Outcome::Opened { lease: LeaseId(1), revision: Revision(1) });
    let acquire = rig.take_acquire();
    assert_eq!(rig.conns[&acquire.conn], "n3:1");
}

#[test]
fn hints_that_go_in_circles_are_not_followed_for_ever() {
    let mut rig = Rig::new();
    let session = rig.session();
    rig.acquire(session, "k", Wait::Unlimited);
    let mut rounds = 0;
    while let Some(open) = rig.find(|request| matches!(request, Request::Command(_))) {
        rounds += 1;
        assert!(rounds < 10, "a loop without a pause");
        let elsewhere = if rig.conns[&open.conn] == "n2:1" { 3 } else { 2 };
        rig.error(&open, ErrorCode::NOT_LEADER, elsewhere);
    }
    assert!(rounds >= 3);
    rig.advance(ms(50));
    rig.take_open();
}

#[test]
fn an_unanswered_request_goes_to_another_node() {
    let mut rig = Rig::new();
    let session = rig.session();
    rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let first = rig.take_acquire();
    rig.advance(ms(2600));
    let second = rig.take_acquire();
    assert_ne!(rig.conns[&first.conn], rig.conns[&second.conn]);
    assert_eq!(first.caller().number, second.caller().number);
    // The first answers after all.
    rig.refuse(&first, ErrorCode::HELD);
    assert!(matches!(rig.events.pop_front(), Some(Event::Acquired { result: Err(_), .. })));
}

#[test]
fn a_connection_that_never_comes_up_delays_little() {
    let mut rig = Rig::new();
    let session = rig.session();
    rig.nodes.insert("n1:1".to_owned(), Node::Black);
    // Node 1 leads, and the connection to it is gone.
    for conn in rig.conns.keys().copied().collect::<Vec<_>>() {
        rig.break_conn(conn);
    }
    rig.acquire(session, "k", Wait::Unlimited);
    rig.advance(ms(300));
    let open = rig.take_open();
    assert_ne!(rig.conns[&open.conn], "n1:1");
}

#[test]
fn a_silent_connection_with_a_waiting_acquire_is_found_out() {
    let mut rig = Rig::new();
    let session = rig.session();
    rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let first = rig.take_acquire();
    rig.queued(&first);
    let dead = first.conn;
    for _ in 0..60 {
        rig.advance(ms(100));
        // Only the dead connection's probes are not answered.
        while let Some(index) = rig.sent.iter().position(|sent| {
            sent.conn != dead && matches!(sent.request, Request::Ping | Request::Renew(_))
        }) {
            let sent = rig.sent.remove(index).expect("found");
            match sent.request {
                Request::Ping => rig.answer(&sent, &Reply::Pong),
                _ => rig.renewed(&sent, 0),
            }
        }
    }
    assert!(!rig.conns.contains_key(&dead), "given up");
    let second = rig.take_acquire();
    assert_ne!(second.conn, dead);
    assert_eq!(second.caller().number, first.caller().number);
}

#[test]
fn the_floor_follows_the_answers_and_waits_are_acknowledged() {
    let mut rig = Rig::new();
    let session = rig.session();
    let waiting = rig.acquire(session, "a", Wait::Unlimited);
    rig.opened();
    let wait = rig.take_acquire();
    assert_eq!((wait.caller().number, wait.caller().floor), (Number(1), Number(0)));
    rig.queued(&wait);
    rig.acquire(session, "b", Wait::Unlimited);
    let second = rig.take_acquire();
    assert_eq!((second.caller().number, second.caller().floor), (Number(4), Number(3)));
    rig.grant(&second, 6, 0);
    rig.grant(&wait, 7, 1);
    let renew = rig.take_renew();
    rig.renewed(&renew, 2);
    rig.acquired(waiting).expect("current");
    rig.acquire(session, "c", Wait::Unlimited);
    let third = rig.take_acquire();
    assert_eq!(third.caller().floor, Number(6));
    assert_eq!(third.caller().acks, [Number(1)]);
    rig.acquire(session, "d", Wait::Unlimited);
    let fourth = rig.take_acquire();
    assert_eq!(fourth.caller().acks, [Number(1)], "until an answer confirms it");
    rig.grant(&third, 8, 2);
    rig.acquire(session, "e", Wait::Unlimited);
    let fifth = rig.take_acquire();
    assert_eq!(fifth.caller().acks, []);
}

#[test]
fn an_acquire_beyond_the_window_waits_for_room() {
    let mut rig = Rig::new();
    let session = rig.session();
    rig.acquire(session, "first", Wait::Unlimited);
    rig.opened();
    let first = rig.take_acquire();
    for n in 0..4096 {
        rig.acquire(session, &format!("k{n}"), Wait::Unlimited);
    }
    assert_eq!(rig.sent.len(), 4095, "the window is full");
    let highest = rig.sent.iter().map(|sent| sent.caller().number.0 + 2).max();
    assert_eq!(highest, Some(3 * 4096));
    rig.grant(&first, 1, 0);
    assert_eq!(rig.sent.len(), 4096, "the floor moved");
}

#[test]
fn an_absent_cluster_costs_little_and_a_call_ends_by_its_deadline() {
    let mut rig = Rig::unconnected();
    for node in rig.nodes.values_mut() {
        *node = Node::Down;
    }
    let call = CallRequest { shard: None, request: Request::Ping, timeout: ms(60_000) };
    rig.core.call(rig.now, call).expect("room");
    let start = rig.now;
    rig.advance(ms(60_000));
    assert!(rig.connects.len() < 200, "{} connects in a minute", rig.connects.len());
    let late = rig.connects.iter().filter(|(at, _)| at.since(start) > ms(30_000)).count();
    assert!(late < 90, "{late} connects in its second half");
    let gaps: BTreeSet<_> =
        rig.connects.windows(2).map(|pair| pair[1].0.since(pair[0].0).as_millis()).collect();
    assert!(gaps.len() > rig.connects.len() / 3, "jittered");
    match rig.events.pop_front() {
        Some(Event::Answered { result: Err(failure), .. }) => {
            assert_eq!(failure.code, ErrorCode::UNREACHABLE);
            assert!(failure.message.contains('n'), "{failure}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_node_that_accepts_and_drops_is_not_hammered() {
    let mut rig = Rig::unconnected();
    rig.core
        .call(rig.now, CallRequest { shard: None, request: Request::Ping, timeout: ms(30_000) })
        .expect("room");
    let end = rig.now.after(ms(30_000));
    while rig.now < end {
        rig.advance(ms(10));
        while let Some(sent) = rig.sent.pop_front() {
            rig.break_conn(sent.conn);
        }
    }
    assert!(rig.connects.len() < 120, "{} connects in half a minute", rig.connects.len());
}

#[test]
fn another_cluster_is_refused_at_once() {
    let mut rig = Rig::new();
    let conns: Vec<_> = rig.conns.keys().copied().collect();
    for node in rig.nodes.values_mut() {
        *node = Node::Foreign;
    }
    for conn in conns {
        rig.break_conn(conn);
    }
    rig.core
        .call(rig.now, CallRequest { shard: None, request: Request::Ping, timeout: ms(10_000) })
        .expect("room");
    rig.advance(ms(500));
    match rig.events.pop_front() {
        Some(Event::Answered { result: Err(failure), .. }) => {
            assert_eq!(failure.code, ErrorCode::WRONG_CLUSTER);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_new_acquire_under_an_old_lease_is_refused_by_another_cluster_at_once() {
    let mut rig = Rig::new();
    let session = rig.session();
    let first = rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let sent = rig.take_acquire();
    rig.grant(&sent, 5, 0);
    rig.acquired(first).expect("granted");
    let conns: Vec<_> = rig.conns.keys().copied().collect();
    rig.nodes.values_mut().for_each(|node| *node = Node::Foreign);
    for conn in conns {
        rig.break_conn(conn);
    }
    let second = rig.acquire(session, "other", Wait::Unlimited);
    rig.advance(ms(500));
    assert_eq!(rig.acquired(second).expect_err("no such cluster").code, ErrorCode::WRONG_CLUSTER);
}

#[test]
fn a_repeated_forced_release_that_finds_nothing_has_succeeded() {
    let mut rig = Rig::new();
    let command = Command::ForceRelease {
        key: b"k".to_vec(),
        token: Token(5),
        who: b"me".to_vec(),
        why: b"test".to_vec(),
        now: false,
    };
    let request = super::super::exchange::as_request(SHARD, 0, command);
    rig.core
        .call(rig.now, CallRequest { shard: Some(SHARD), request, timeout: ms(10_000) })
        .expect("room");
    rig.turn();
    let first = rig.sent.pop_front().expect("sent");
    rig.break_conn(first.conn);
    rig.advance(ms(50));
    let second = rig.sent.pop_front().expect("sent again");
    rig.refuse(&second, ErrorCode::NOT_OWNER);
    let done = rig.events.pop_front();
    assert!(
        matches!(
            &done,
            Some(Event::Answered { result: Ok(Reply::Outcome(reply)), .. })
                if matches!(reply.outcome, Outcome::Forced { token: Token(5), passed_on: true, .. })
        ),
        "{done:?}"
    );
}

#[test]
fn no_quorum_is_retried_until_the_deadline_and_then_named() {
    let mut rig = Rig::new();
    rig.core
        .call(
            rig.now,
            CallRequest { shard: Some(SHARD), request: Request::Ping, timeout: ms(3_000) },
        )
        .expect("room");
    let mut attempts = 0;
    for _ in 0..300 {
        rig.advance(ms(10));
        while let Some(sent) = rig.sent.pop_front() {
            attempts += 1;
            rig.error(&sent, ErrorCode::NO_QUORUM, 0);
        }
    }
    assert!((6..40).contains(&attempts), "{attempts} attempts in 3 s");
    match rig.events.pop_front() {
        Some(Event::Answered { result: Err(failure), .. }) => {
            assert_eq!(failure.code, ErrorCode::NO_QUORUM);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_late_answer_of_an_earlier_attempt_does_not_hide_where_the_wait_is() {
    let mut rig = Rig::new();
    let session = rig.session();
    rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let first = rig.take_acquire();
    rig.advance(ms(2600));
    let second = rig.take_acquire();
    rig.queued(&second);
    rig.queued(&first);
    rig.error(&first, ErrorCode::RESYNC, 0);
    assert!(
        rig.find(|request| matches!(request, Request::Command(_))).is_none(),
        "the wait stands where it was sent last"
    );
    rig.break_conn(second.conn);
    rig.advance(ms(200));
    let third = rig.take_acquire();
    assert_eq!(third.caller().number, first.caller().number);
}

#[test]
fn pauses_stay_short_for_about_a_second_and_grow_then() {
    let mut rig = Rig::new();
    let call = CallRequest { shard: Some(SHARD), request: Request::Ping, timeout: ms(30_000) };
    rig.core.call(rig.now, call).expect("room");
    let mut sent = Vec::new();
    for _ in 0..20_000 {
        rig.advance(ms(1));
        while let Some(request) = rig.sent.pop_front() {
            sent.push(request.at);
            rig.error(&request, ErrorCode::NO_QUORUM, 0);
        }
    }
    let gaps: Vec<_> = sent.windows(2).map(|pair| pair[1].since(pair[0])).collect();
    assert!(gaps[..15].iter().all(|gap| *gap <= ms(82)), "{gaps:?}");
    assert!(gaps[25..].iter().all(|gap| *gap >= ms(499) && *gap <= ms(1_002)), "{gaps:?}");
}

#[test]
fn an_acquire_without_a_limit_outwaits_a_restored_cluster_and_no_other_silence() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let first = rig.take_acquire();
    let mut sent = first.clone();
    // Twice as long as a call may take.
    for _ in 0..20 {
        let (code, message) = (ErrorCode::QUARANTINED, String::new());
        let error = ErrorReply { code, message, leader: NodeId(0), retry_after_ms: 1_000 };
        rig.answer(&sent, &Reply::Error(error));
        rig.advance(ms(999));
        assert!(rig.find(|request| matches!(request, Request::Command(_))).is_none(), "too early");
        rig.advance(ms(200));
        assert!(rig.try_acquired(op).is_none(), "it waits");
        while let Some(renew) = rig.find(|request| matches!(request, Request::Renew(_))) {
            rig.renewed(&renew, 0);
        }
        sent = rig.take_acquire();
        assert_eq!(sent.caller().number, first.caller().number);
    }
    // Nobody answers any more: that is not waited for without end.
    rig.advance(ms(13_000));
    assert_eq!(rig.acquired(op).expect_err("no answer").code, ErrorCode::DEADLINE);
}

#[test]
fn an_acquire_with_a_limit_says_that_a_restored_cluster_grants_nothing_yet() {
    let mut rig = Rig::new();
    let session = rig.session();
    let quarantined = || {
        let (code, message) = (ErrorCode::QUARANTINED, "in 7 s".to_owned());
        Reply::Error(ErrorReply { code, message, leader: NodeId(0), retry_after_ms: 1_000 })
    };
    let tries = rig.acquire(session, "k", Wait::Try);
    rig.opened();
    let sent = rig.take_acquire();
    rig.answer(&sent, &quarantined());
    let failure = rig.acquired(tries).expect_err("nothing is granted");
    assert_eq!((failure.code, failure.message.as_str()), (ErrorCode::QUARANTINED, "in 7 s"));
    let waits = rig.acquire(session, "k", Wait::For(ms(1_500)));
    for _ in 0..2 {
        let sent = rig.take_acquire();
        rig.answer(&sent, &quarantined());
        rig.advance(ms(1_100));
    }
    assert_eq!(rig.acquired(waits).expect_err("still not").code, ErrorCode::QUARANTINED);
    // An attempt that may have been granted is no such refusal.
    let doubtful = rig.acquire(session, "k", Wait::Try);
    let sent = rig.take_acquire();
    rig.error(&sent, ErrorCode::DEADLINE, 0);
    rig.advance(ms(100));
    let sent = rig.take_acquire();
    rig.answer(&sent, &quarantined());
    assert!(rig.try_acquired(doubtful).is_none(), "it is asked again");
}
