//! The library over real sockets, against a server of one node that can be made to break.

mod readme;
mod support;

use std::time::Duration;

use leasehold::{
    AcquireError, ChangeError, Client, ClusterId, Config, ConnectError, ErrorCode, Freshness,
    HoldState, LossCause, Mode, Observed, Session, Token, Yields,
};

use self::support::eventually;
use self::support::server::TestServer;

const TTL: Duration = Duration::from_secs(2);

async fn client(server: &TestServer) -> Client {
    let config = Config::new(&server.endpoint()).expect("valid").label("tester");
    Client::with_config(config).await.expect("the server answers")
}

async fn session(server: &TestServer) -> (Client, Session) {
    let client = client(server).await;
    let session = client.session(TTL).expect("in range");
    (client, session)
}

#[tokio::test]
async fn a_lock_is_taken_seen_and_given_back() {
    let server = TestServer::start();
    let (client, session) = session(&server).await;
    let guard = session.lock("jobs/1").value("worker").acquire().await.expect("free");
    assert_eq!(guard.key(), "jobs/1");
    assert_eq!(guard.token(), Token(1001));
    assert_eq!(guard.state(), HoldState::Held);
    assert!(guard.remaining() > TTL / 2 && guard.remaining() < TTL);
    let read = client.get("jobs/1").await.expect("readable");
    assert_eq!(read.info.holders.len(), 1);
    assert_eq!(read.info.holders[0].token, guard.token());
    assert_eq!(read.info.holders[0].value, b"worker");
    assert_eq!(read.info.holders[0].label, "tester");
    guard.release().await.expect("held");
    assert!(client.get("jobs/1").await.expect("readable").info.holders.is_empty());
    session.close().await.expect("confirmed");
    assert_eq!(server.leases(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_gets_the_lock_when_it_is_given_back_with_a_higher_token() {
    let server = TestServer::start();
    let (_first_client, first) = session(&server).await;
    let (_second_client, second) = session(&server).await;
    let guard = first.lock("k").acquire().await.expect("free");
    let refused = second.lock("k").try_acquire().await.expect_err("held");
    assert!(matches!(&refused, AcquireError::Held(failure) if failure.token == guard.token()));
    let waiting = tokio::spawn(async move { second.lock("k").acquire().await });
    eventually("the second waits", async || server.waiters("k") == 1).await;
    let token = guard.token();
    guard.release().await.expect("held");
    let next = waiting.await.expect("no panic").expect("granted");
    assert!(next.token() > token);
    assert_eq!(next.state(), HoldState::Held);
}

#[tokio::test]
async fn a_wait_ends_in_time_and_leaves_nothing() {
    let server = TestServer::start();
    let (_c1, first) = session(&server).await;
    let (_c2, second) = session(&server).await;
    let _guard = first.lock("k").acquire().await.expect("free");
    let error = second.lock("k").wait(Duration::from_millis(50)).acquire().await;
    assert!(matches!(error, Err(AcquireError::TimedOut(_))), "{error:?}");
    assert_eq!(server.waiters("k"), 0);
}

#[tokio::test]
async fn a_dropped_future_leaves_the_queue() {
    let server = TestServer::start();
    let (_c1, first) = session(&server).await;
    let (_c2, second) = session(&server).await;
    let guard = first.lock("k").acquire().await.expect("free");
    {
        let mut waiting = std::pin::pin!(second.lock("k").acquire());
        eventually("it waits", async || {
            let pending = futures_poll(waiting.as_mut()).await;
            assert!(pending, "not granted");
            server.waiters("k") == 1
        })
        .await;
    }
    eventually("it left", async || server.waiters("k") == 0).await;
    drop(guard);
    // The session of the dropped future works on.
    second.lock("k").acquire().await.expect("free again");
}

/// Polls once; true while it is pending.
async fn futures_poll<F: Future + Unpin>(future: F) -> bool {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|context| {
        std::task::Poll::Ready(future.as_mut().poll(context).is_pending())
    })
    .await
}

#[tokio::test]
async fn dropping_a_guard_and_dropping_a_session_give_everything_back() {
    let server = TestServer::start();
    let (_client, session) = session(&server).await;
    let first = session.lock("a").acquire().await.expect("free");
    let second = session.lock("b").acquire().await.expect("free");
    drop(first);
    eventually("a is free", async || server.tokens("a").is_empty()).await;
    assert_eq!(server.tokens("b").len(), 1);
    drop(session);
    assert_eq!(second.state(), HoldState::Held, "a guard keeps its session");
    drop(second);
    eventually("the lease is gone", async || server.leases() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_that_panics_gives_its_lock_back() {
    let server = TestServer::start();
    let (_client, session) = session(&server).await;
    let task = tokio::spawn(async move {
        let _guard = session.lock("k").acquire().await.expect("free");
        panic!("the work failed");
    });
    assert!(task.await.is_err());
    eventually("the lock is free", async || server.tokens("k").is_empty()).await;
    eventually("nothing renews", async || server.leases() == 0).await;
}

#[tokio::test]
async fn a_client_dropped_with_its_sessions_says_goodbye() {
    let server = TestServer::start();
    let (client, session) = session(&server).await;
    let guard = session.lock("k").acquire().await.expect("free");
    drop((client, session, guard));
    eventually("the lease is gone", async || server.leases() == 0).await;
}

#[tokio::test]
async fn broken_connections_cost_nothing() {
    let server = TestServer::start();
    let (_c1, first) = session(&server).await;
    let (_c2, second) = session(&server).await;
    let guard = first.lock("k").acquire().await.expect("free");
    let waiting = tokio::spawn(async move { second.lock("k").acquire().await });
    eventually("the second waits", async || server.waiters("k") == 1).await;
    for _ in 0..5 {
        let before = server.connects();
        server.cut();
        eventually("somebody came back", async || server.connects() > before).await;
    }
    assert_eq!(guard.state(), HoldState::Held);
    assert_eq!(server.waiters("k"), 1, "the place in the queue was kept");
    guard.release().await.expect("held");
    waiting.await.expect("no panic").expect("granted");
}

#[tokio::test]
async fn a_server_that_is_away_for_longer_than_the_ttl_costs_the_lock_once() {
    let server = TestServer::start();
    let client = client(&server).await;
    let session = client.session(Duration::from_secs(1)).expect("in range");
    let guard = session.lock("k").acquire().await.expect("free");
    let lease = client.get("k").await.expect("readable").info.holders[0].lease;
    server.down(true);
    assert_eq!(guard.lost().await, LossCause::Expired);
    assert_eq!(guard.lost().await, LossCause::Expired, "and again for whoever asks later");
    assert_eq!(guard.state(), HoldState::Lost(LossCause::Expired));
    assert_eq!(guard.remaining(), Duration::ZERO);
    let renewals = server.with(|authority| authority.renewals);
    server.down(false);
    let again = session.lock("k").acquire().await.expect("the session works on");
    assert!(again.token() > guard.token());
    let present = client.get("k").await.expect("readable").info.holders[0].lease;
    assert_ne!(present, lease, "under a new lease");
    let dead = server.with(move |authority| authority.state.lease(lease).is_none());
    assert!(dead, "the old one was closed or has ended");
    assert!(server.with(|authority| authority.renewals) <= renewals + 1);
    assert!(guard.release().await.is_err(), "there is nothing to give back");
}

#[tokio::test]
async fn closing_a_session_tells_its_guards() {
    let server = TestServer::start();
    let (_client, session) = session(&server).await;
    let guard = session.lock("k").acquire().await.expect("free");
    session.clone().close().await.expect("confirmed");
    assert_eq!(guard.lost().await, LossCause::SessionClosed);
    assert!(server.tokens("k").is_empty());
    let error = session.lock("k").acquire().await.expect_err("closed");
    assert_eq!(error.failure().code, ErrorCode::LEASE_DEAD);
}

#[tokio::test]
async fn an_own_lease_outlives_its_session_and_is_renewed_when_asked() {
    let server = TestServer::start();
    let (_client, session) = session(&server).await;
    let guard = session.lock("k").own_lease(Duration::from_secs(5)).acquire().await.expect("free");
    session.close().await.expect("confirmed");
    assert!(guard.remaining() > Duration::from_secs(3));
    assert!(!guard.is_renewed());
    let left = guard.renew().await.expect("renewed");
    assert!(left > Duration::from_secs(4));
    assert_eq!(server.tokens("k"), [guard.token().0]);
    guard.release().await.expect("held");
    assert_eq!(server.leases(), 0);
}

#[tokio::test]
async fn a_hold_with_its_own_lease_goes_from_one_client_to_another_under_its_token() {
    let server = TestServer::start();
    let (first, session) = session(&server).await;
    let guard = session.lock("k").own_lease(Duration::from_secs(5)).acquire().await.expect("free");
    let token = guard.token();
    let seen = guard.watch();
    let handover = guard.hand_over().expect("it has a lease of its own");
    assert_eq!((handover.key(), handover.token()), ("k", token));
    assert!(seen.remaining().is_zero(), "whoever let go of it does not count on it");
    drop((session, first));
    let second = client(&server).await;
    let text = handover.to_text();
    let guard = second.take_over(&text.parse().expect("sound")).await.expect("it lives");
    assert_eq!((guard.key(), guard.token(), guard.state()), ("k", token, HoldState::Held));
    assert!(guard.remaining() > Duration::from_secs(4) && !guard.is_renewed());
    assert_eq!(server.tokens("k"), [token.0]);
    guard.renew().await.expect("renewed");
    guard.release().await.expect("held");
    assert_eq!(server.leases(), 0);
    // What ended is not taken over, nor is another cluster's.
    let error = second.take_over(&handover).await.expect_err("it was given back");
    assert!(matches!(error, AcquireError::Lost(_)), "{error:?}");
    let other = TestServer::start();
    other.with(|authority| authority.cluster = ClusterId([8; 16]));
    let foreign = client(&other).await;
    let error = foreign.take_over(&handover).await.expect_err("another cluster");
    assert_eq!(error.failure().code, ErrorCode::WRONG_CLUSTER);
}

#[tokio::test]
async fn a_sessions_hold_is_not_handed_over_and_stays() {
    let server = TestServer::start();
    let (_client, session) = session(&server).await;
    let guard = session.lock("k").acquire().await.expect("free");
    let guard = guard.hand_over().expect_err("its session's lease carries it");
    assert_eq!(guard.state(), HoldState::Held);
    guard.release().await.expect("held");
}

#[tokio::test]
async fn a_forced_release_ends_the_hold_and_names_the_cause() {
    let server = TestServer::start();
    let (client, session) = session(&server).await;
    let guard = session.lock("k").acquire().await.expect("free");
    let wrong = client.force_release("k", Token(1), "me", "test", true).await.expect_err("other");
    assert_eq!(wrong.failure().code, ErrorCode::NOT_OWNER);
    assert_eq!(wrong.failure().token, guard.token());
    let forced = client.force_release("k", guard.token(), "me", "test", true).await.expect("held");
    assert!(forced.passed_on);
    assert_eq!(guard.lost().await, LossCause::Forced);
}

#[tokio::test]
async fn listings_and_status_are_read() {
    let server = TestServer::start();
    let (client, session) = session(&server).await;
    let mut guards = Vec::new();
    for n in 0..300 {
        guards.push(session.lock(format!("list/{n:03}")).acquire().await.expect("free"));
    }
    let _other = session.lock("other").acquire().await.expect("free");
    let keys = client.list("list/", 1000).await.expect("readable");
    assert_eq!(keys.len(), 300);
    assert!(keys.windows(2).all(|pair| pair[0].info.key < pair[1].info.key));
    assert_eq!(client.list("", 7).await.expect("readable").len(), 7);
    let sessions = client.sessions(10).await.expect("readable");
    assert_eq!((sessions.len(), sessions[0].1.holds), (1, 301));
    let status = client.status().await.expect("readable");
    assert_eq!((status.nodes.len(), status.shards), (1, 1));
    assert!(client.ping().await.expect("alive") < Duration::from_secs(10));
    client.transfer_leader(leasehold::ShardId(0), None).await.expect("moved");
}

#[tokio::test]
async fn one_reachable_endpoint_among_dead_ones_is_enough() {
    let server = TestServer::start();
    // Accepts and never says a word.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let list = format!("127.0.0.1:1,{},{}", silent.local_addr().expect("bound"), server.endpoint());
    for _ in 0..8 {
        let config = Config::new(&list).expect("valid").call_timeout(Duration::from_secs(2));
        let client = Client::with_config(config).await.expect("within two seconds");
        let session = client.session(TTL).expect("in range");
        session.lock("k").acquire().await.expect("free").release().await.expect("held");
    }
}

#[tokio::test]
async fn a_cluster_that_is_away_is_an_error_by_the_deadline() {
    let config =
        Config::new("127.0.0.1:1").expect("valid").call_timeout(Duration::from_millis(200));
    let error = Client::with_config(config).await.expect_err("nobody there");
    let ConnectError::Failed(failure) = error else { panic!("{error}") };
    assert_eq!(failure.code, ErrorCode::UNREACHABLE);
    assert!(failure.message.contains("127.0.0.1:1"), "{failure}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_tasks_of_one_session_exclude_each_other() {
    let server = TestServer::start();
    let client = client(&server).await;
    let inside = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
    let mut tasks = Vec::new();
    for _ in 0..16 {
        let session = client.session(Duration::from_secs(10)).expect("in range");
        let inside = std::sync::Arc::clone(&inside);
        tasks.push(tokio::spawn(async move {
            for _ in 0..20 {
                let guard = session.lock("k").acquire().await.expect("granted");
                let others = inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                assert_eq!(others, 0, "alone in here");
                tokio::task::yield_now().await;
                inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                guard.release().await.expect("held");
            }
        }));
    }
    for task in tasks {
        task.await.expect("no panic");
    }
    assert!(server.tokens("k").is_empty());
}

#[tokio::test]
async fn one_session_does_not_hold_a_key_twice() {
    let server = TestServer::start();
    let (_client, session) = session(&server).await;
    let guard = session.lock("k").acquire().await.expect("free");
    let error = session.lock("k").acquire().await.expect_err("held by itself");
    assert_eq!(error.failure().code, ErrorCode::ALREADY_HELD);
    assert_eq!(guard.state(), HoldState::Held);
    guard.release().await.expect("held");
    session.lock("k").acquire().await.expect("free again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_go_together_and_a_waiting_writer_is_not_passed() {
    let server = TestServer::start();
    let (_c1, first) = session(&server).await;
    let (_c2, second) = session(&server).await;
    let (_c3, third) = session(&server).await;
    let reader = first.lock("k").shared().acquire().await.expect("free");
    let other = second.lock("k").shared().acquire().await.expect("readers go together");
    assert_eq!((reader.mode(), other.mode()), (Mode::SHARED, Mode::SHARED));
    assert!(reader.floor() == other.floor() && reader.floor() < reader.token());
    let writing = tokio::spawn(async move { third.lock("k").acquire().await });
    eventually("the writer waits", async || server.waiters("k") == 1).await;
    other.release().await.expect("held");
    let late = second.lock("k").shared().try_acquire().await.expect_err("behind the writer");
    assert!(matches!(late, AcquireError::Held(_)), "{late}");
    reader.release().await.expect("held");
    let writer = writing.await.expect("no panic").expect("granted");
    assert_eq!((writer.mode(), writer.floor()), (Mode::EXCLUSIVE, writer.token()));
}

#[tokio::test]
async fn a_hold_is_downgraded_and_upgraded_and_beside_others_not() {
    let server = TestServer::start();
    let (_c1, first) = session(&server).await;
    let (_c2, second) = session(&server).await;
    let guard = first.lock("k").acquire().await.expect("free");
    let token = guard.token();
    guard.downgrade().await.expect("held");
    assert_eq!((guard.token(), guard.mode()), (token, Mode::SHARED));
    let reader = second.lock("k").shared().try_acquire().await.expect("let in");
    let conflict = guard.upgrade().await.expect_err("somebody reads");
    assert!(matches!(&conflict, ChangeError::Conflict(failure) if failure.token == reader.token()));
    assert_eq!(
        (guard.token(), guard.mode(), guard.state()),
        (token, Mode::SHARED, HoldState::Held)
    );
    reader.release().await.expect("held");
    let higher = guard.upgrade().await.expect("alone");
    assert!(higher > token);
    assert_eq!((guard.token(), guard.mode()), (higher, Mode::EXCLUSIVE));
    assert_eq!(server.tokens("k"), [higher.0]);
    guard.release().await.expect("held under its new token");
    assert!(server.tokens("k").is_empty());
}

#[tokio::test]
async fn a_semaphore_has_the_permits_that_were_stated_first() {
    let server = TestServer::start();
    let (client, first) = session(&server).await;
    let (_c2, second) = session(&server).await;
    let (_c3, third) = session(&server).await;
    let two = first.lock("s").permits(2, 3).acquire().await.expect("free");
    let other = second.lock("s").permits(1, 4).try_acquire().await.expect_err("another limit");
    assert_eq!(other.failure().code, ErrorCode::LIMIT_MISMATCH);
    assert!(other.failure().message.contains("3 permits"), "{other}");
    let one = second.lock("s").permits(1, 3).acquire().await.expect("one is left");
    let none = third.lock("s").permits(1, 3).try_acquire().await.expect_err("all are taken");
    assert!(matches!(none, AcquireError::Held(_)), "{none}");
    client.set_limit("s", 4, "tester").await.expect("in use");
    let last = third.lock("s").permits(1, 4).acquire().await.expect("there is one more now");
    let read = client.get("s").await.expect("readable").info;
    assert_eq!((read.limit, read.holders.len()), (4, 3));
    for guard in [two, one, last] {
        guard.release().await.expect("held");
    }
    let unused = client.set_limit("s", 4, "tester").await.expect_err("nobody uses it");
    assert_eq!(unused.failure().code, ErrorCode::NOT_IN_USE);
    let lock = first.lock("s").acquire().await.expect("a lock now");
    let mixed = second.lock("s").permits(1, 1).try_acquire().await.expect_err("it is a lock");
    assert_eq!(mixed.failure().code, ErrorCode::MODE_MISMATCH);
    lock.release().await.expect("held");
    for (count, limit) in [(0, 1), (2, 1), (1, 1025)] {
        let refused = first.lock("s").permits(count, limit).acquire().await.expect_err("range");
        assert_eq!(refused.failure().code, ErrorCode::PERMITS_OUT_OF_RANGE);
    }
}

#[tokio::test]
async fn a_session_enters_its_own_hold_only_when_it_asks_to() {
    let server = TestServer::start();
    let (_client, session) = session(&server).await;
    let outer = session.lock("k").acquire().await.expect("free");
    let inner = session.lock("k").reentrant().acquire().await.expect("its own");
    assert_eq!(inner.token(), outer.token());
    outer.release().await.expect("held");
    assert_eq!(server.tokens("k"), [inner.token().0], "one entry is left");
    assert_eq!(inner.state(), HoldState::Held);
    inner.release().await.expect("held");
    assert!(server.tokens("k").is_empty());
}

#[tokio::test]
async fn a_lost_hold_with_a_lock_delay_keeps_its_place() {
    let server = TestServer::start();
    let holder = client(&server).await;
    let (client, other) = session(&server).await;
    let lost = holder.session(Duration::from_secs(1)).expect("in range");
    let delay = Duration::from_mins(1);
    let guard = lost.lock("k").lock_delay(delay).acquire().await.expect("free");
    let token = guard.token();
    // Its renewals cease, and nothing gives it back.
    server.mute(true);
    guard.lost().await;
    server.mute(false);
    eventually("the loss is noticed", async || server.tokens("k").is_empty()).await;
    let read = client.get("k").await.expect("readable").info;
    assert_eq!(read.delays.iter().map(|delay| delay.token).collect::<Vec<_>>(), [token]);
    let refused = other.lock("k").try_acquire().await.expect_err("delayed");
    let AcquireError::Delayed(failure) = &refused else { panic!("{refused}") };
    let rest_ms = failure.rest_ms.expect("the cluster told it");
    assert!((1..=60_000).contains(&rest_ms), "{refused}");
    assert!(failure.message.contains(&rest_ms.to_string()), "{refused}");
    let clean = other.lock("clean").lock_delay(delay).acquire().await.expect("free");
    clean.release().await.expect("held");
    other.lock("clean").try_acquire().await.expect("no delay after a release");
    let refused = other.lock("k").lock_delay(Duration::from_secs(61)).acquire().await;
    assert_eq!(refused.expect_err("range").failure().code, ErrorCode::DELAY_OUT_OF_RANGE);
}

#[tokio::test]
async fn a_value_is_replaced_while_it_is_held() {
    let server = TestServer::start();
    let (client, session) = session(&server).await;
    let guard = session.lock("k").value("old").acquire().await.expect("free");
    guard.set_value("new").await.expect("held");
    assert_eq!(client.get("k").await.expect("readable").info.holders[0].value, b"new");
    let refused = guard.set_value(vec![0; 4097]).await.expect_err("too large");
    assert_eq!(refused.failure().code, ErrorCode::VALUE_TOO_LARGE);
    let own = session.lock("own").own_lease(TTL).acquire().await.expect("free");
    let refused = own.downgrade().await.expect_err("it has a lease of its own");
    assert_eq!(refused.failure().code, ErrorCode::BAD_COMBINATION);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_election_has_one_leader_at_a_time_and_the_next_one_follows_at_once() {
    let server = TestServer::start();
    let (client, first) = session(&server).await;
    let (_c2, second) = session(&server).await;
    let election = client.election("e");
    assert_eq!(election.leader().await.expect("readable"), None);
    let leads = election.campaign(&first, "one").await.expect("nobody else");
    let leader = election.leader().await.expect("readable").expect("elected");
    assert_eq!((leader.token, leader.value.as_slice()), (leads.token(), b"one".as_slice()));
    let (candidate, other) = (election.clone(), second.clone());
    let waiting = tokio::spawn(async move { candidate.campaign(&other, "two").await });
    eventually("it stands", async || server.waiters("e") == 1).await;
    let gives_up = election.campaign(&second, "late").wait(Duration::ZERO).await;
    assert_eq!(gives_up.expect_err("it stands").failure().code, ErrorCode::ALREADY_QUEUED);
    // Sent in the order of the calls, awaited or not.
    let (early, late) = (leads.proclaim("uno"), leads.proclaim("eins"));
    late.await.expect("leads");
    early.await.expect("led");
    assert_eq!(election.leader().await.expect("readable").expect("leads").value, b"eins");
    let token = leads.token();
    leads.resign().await.expect("led");
    let next = waiting.await.expect("no panic").expect("elected");
    assert!(next.token() > token);
    let leader = election.leader().await.expect("readable").expect("elected");
    assert_eq!((leader.token, leader.value.as_slice()), (next.token(), b"two".as_slice()));
    let large = next.proclaim(vec![0; 4097]).await.expect_err("too large");
    assert_eq!(large.failure().code, ErrorCode::VALUE_TOO_LARGE);
    let large = election.campaign(&first, vec![0; 4097]).await.expect_err("too large");
    assert_eq!(large.failure().code, ErrorCode::VALUE_TOO_LARGE);
    second.close().await.expect("confirmed");
    assert_eq!(next.lost().await, LossCause::SessionClosed);
    assert_eq!(election.leader().await.expect("readable"), None);
}

#[tokio::test]
async fn a_candidate_that_withdraws_is_never_elected() {
    let server = TestServer::start();
    let (client, first) = session(&server).await;
    let (_c2, second) = session(&server).await;
    let election = client.election("e");
    let leads = election.campaign(&first, "one").await.expect("nobody else");
    let late = election.campaign(&second, "two").wait(Duration::from_millis(30)).await;
    assert!(matches!(late, Err(AcquireError::TimedOut(_))), "{late:?}");
    leads.resign().await.expect("led");
    assert_eq!(election.leader().await.expect("readable"), None);
}

#[tokio::test]
async fn a_waiter_sees_its_place_and_whom_it_waits_for() {
    let server = TestServer::start();
    let (_c1, first) = session(&server).await;
    let (_c2, second) = session(&server).await;
    let (_c3, third) = session(&server).await;
    let guard = first.lock("k").acquire().await.expect("free");
    let ahead = second.lock("k").begin().expect("accepted");
    eventually("it waits", async || server.waiters("k") == 1).await;
    let behind = third.lock("k").begin().expect("accepted");
    eventually("so does this", async || server.waiters("k") == 2).await;
    let ticket = behind.ticket();
    let place = ticket.place().await.expect("readable").expect("it waits");
    assert_eq!((place.position, place.waiters_total), (1, 2));
    assert_eq!(place.holders[0].token, guard.token());
    let mut places = ticket.places(Duration::ZERO);
    let first_told = places.next().await.expect("readable").expect("it waits");
    assert_eq!((first_told.position, first_told.holders.len()), (1, 1));
    drop(ahead);
    let told = places.next().await.expect("readable").expect("it waits");
    assert_eq!((told.position, told.waiters_total), (0, 1), "told when it is another, not before");
    eventually("it left", async || server.waiters("k") == 1).await;
    assert_eq!(ticket.place().await.expect("readable").expect("it waits").position, 0);
    guard.release().await.expect("held");
    let granted = behind.granted().await.expect("free");
    assert_eq!(ticket.place().await.expect("readable"), None, "it holds");
    assert_eq!(places.next().await.expect("readable"), None, "and waits no more");
    granted.release().await.expect("held");
    assert_eq!(ticket.place().await.expect("readable"), None, "it is over");
    let permits = second.lock("s").permits(2, 3).acquire().await.expect("free");
    let other = third.lock("s").permits(1, 3).acquire().await.expect("free");
    assert_eq!(permits.slots().await.expect("held"), [0, 1]);
    assert_eq!(other.slots().await.expect("held"), [2]);
    let own = first.lock("own").own_lease(TTL).acquire().await.expect("free");
    assert_eq!(own.slots().await.expect("found under its own lease"), [0; 0]);
}

#[tokio::test]
async fn a_request_to_yield_names_the_hold_and_is_shown() {
    let server = TestServer::start();
    let (client, session) = session(&server).await;
    let guard = session.lock("k").acquire().await.expect("free");
    let within = Duration::from_secs(5);
    let wrong = client.ask_yield("k", Token(1), "me", "deploy", within).await.expect_err("other");
    assert_eq!(wrong.failure().code, ErrorCode::NOT_OWNER);
    client.ask_yield("k", guard.token(), "me", "deploy", within).await.expect("held");
    let read = client.get("k").await.expect("readable").info;
    let asked = read.holders[0].asked.as_ref().expect("shown");
    assert_eq!((asked.who.as_str(), asked.why.as_str(), asked.within_ms), ("me", "deploy", 5_000));
    assert_eq!(guard.state(), HoldState::Held, "nothing follows by itself");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_keys_are_granted_at_once_or_not_at_all() {
    let server = TestServer::start();
    let (_c1, first) = session(&server).await;
    let (_c2, second) = session(&server).await;
    let one = first.lock("b").acquire().await.expect("free");
    let refused = second.lock_all(["a", "b"]).try_acquire().await.expect_err("b is held");
    assert!(matches!(refused, AcquireError::Held(_)), "{refused}");
    assert!(server.tokens("a").is_empty(), "nothing of it");
    let all = second.lock_all(["a", "b"]).and_permits("s", 2, 3).value("v");
    let waiting = tokio::spawn(async move { all.acquire().await });
    eventually("it waits", async || server.waiters("a") == 1 && server.waiters("b") == 1).await;
    assert!(server.tokens("a").is_empty(), "while it waits it holds nothing");
    let behind = first.lock("a").try_acquire().await.expect_err("nobody passes it by");
    assert!(matches!(behind, AcquireError::Held(_)), "{behind}");
    one.release().await.expect("held");
    let all = waiting.await.expect("no panic").expect("granted");
    let holds = all.holds();
    assert_eq!(holds.iter().map(|(key, _)| *key).collect::<Vec<_>>(), ["a", "b", "s"]);
    for (key, (_, token)) in ["a", "b", "s"].into_iter().zip(&holds) {
        assert_eq!(server.tokens(key), [token.0]);
    }
    assert_eq!(all.slots().await.expect("held")[2], [0, 1]);
    assert_eq!(all.state(), HoldState::Held);
    all.release().await.expect("held");
    for key in ["a", "b", "s"] {
        assert!(server.tokens(key).is_empty());
    }
    let twice = first.lock_all(["a", "a"]).acquire().await.expect_err("twice");
    assert_eq!(twice.failure().code, ErrorCode::DUPLICATE_KEY);
    let none = first.lock_all(Vec::<String>::new()).acquire().await.expect_err("none");
    assert_eq!(none.failure().code, ErrorCode::BAD_COMBINATION);
    let many = first.lock_all((0..65).map(|n| format!("k{n}"))).acquire().await;
    assert_eq!(many.expect_err("too many").failure().code, ErrorCode::TOO_MANY_ITEMS);
}

#[tokio::test]
async fn one_key_of_several_that_is_forced_away_takes_the_others_along() {
    let server = TestServer::start();
    let (client, session) = session(&server).await;
    let all = session.lock_all(["a", "b", "c"]).acquire().await.expect("free");
    let (_, token) = all.holds()[1];
    client.force_release("b", token, "me", "test", true).await.expect("held");
    assert_eq!(all.lost().await, LossCause::Forced);
    eventually("the others are given back", async || {
        server.tokens("a").is_empty() && server.tokens("c").is_empty()
    })
    .await;
    assert!(all.release().await.is_err(), "there is nothing to give back");
}

#[tokio::test]
async fn keys_taken_one_after_the_other_are_all_given_back_when_one_is_not_granted() {
    let server = TestServer::start();
    let (_c1, first) = session(&server).await;
    let (_c2, second) = session(&server).await;
    let held = first.lock("b").acquire().await.expect("free");
    let wait = Duration::from_millis(30);
    let error =
        second.lock_each(["c", "b", "a"]).wait(wait).acquire().await.expect_err("b is held");
    assert!(
        matches!(&error, AcquireError::TimedOut(failure) if failure.message.starts_with("b: "))
    );
    eventually("a is given back", async || server.tokens("a").is_empty()).await;
    held.release().await.expect("held");
    let guards = second.lock_each(["c", "b", "a"]).acquire().await.expect("all are free");
    assert_eq!(guards.iter().map(leasehold::Guard::key).collect::<Vec<_>>(), ["a", "b", "c"]);
    let twice = first.lock_each(["x", "x"]).acquire().await.expect_err("twice");
    assert_eq!(twice.failure().code, ErrorCode::DUPLICATE_KEY);
}

#[tokio::test]
async fn an_observer_sees_each_leader_each_value_and_that_nobody_leads() {
    let server = TestServer::start();
    let (client, session) = session(&server).await;
    let election = client.election("e");
    let mut observation = election.observe().expect("accepted");
    assert_eq!(observation.next().await.expect("told"), Observed::Vacant);
    let leads = election.campaign(&session, "one").await.expect("nobody else");
    let Observed::Leader(leader) = observation.next().await.expect("told") else { panic!() };
    assert_eq!((leader.token, leader.value.as_slice()), (leads.token(), b"one".as_slice()));
    assert_eq!(leader.label, "tester");
    leads.proclaim("two").await.expect("leads");
    let Observed::Leader(leader) = observation.next().await.expect("told") else { panic!() };
    assert_eq!(leader.value, b"two");
    let mut late = election.observe().expect("accepted");
    assert!(
        matches!(late.next().await.expect("told"), Observed::Leader(now) if now.since_ms.is_some())
    );
    leads.resign().await.expect("led");
    assert_eq!(observation.next().await.expect("told"), Observed::Vacant);
    assert_eq!(late.next().await.expect("told"), Observed::Vacant);
}

#[tokio::test]
async fn a_holder_that_wants_to_know_hears_who_asks_it_to_yield() {
    let server = TestServer::start();
    let (client, session) = session(&server).await;
    let guard = session.lock("k").acquire().await.expect("free");
    let token = guard.token();
    let within = Duration::from_secs(5);
    client.ask_yield("k", token, "early", "a deploy", within).await.expect("held");
    let mut yields = guard.yields().expect("accepted");
    let asked = yields.next().await.expect("told").expect("held");
    assert_eq!(
        (asked.who.as_str(), asked.why.as_str(), asked.within),
        ("early", "a deploy", within)
    );
    client.ask_yield("k", token, "early", "a deploy", within).await.expect("held");
    client.ask_yield("k", token, "late", "now", Duration::ZERO).await.expect("held");
    let asked = yields.next().await.expect("told").expect("held");
    assert_eq!(asked.who, "late", "the same request is told once");
    guard.release().await.expect("held");
    assert_eq!(yields.next().await.expect("told"), None, "it is over");
}

#[tokio::test]
async fn a_watch_at_a_node_that_lags_ends_no_holders_requests_to_yield() {
    let server = TestServer::start();
    let (client, session) = session(&server).await;
    let guard = session.lock("k").acquire().await.expect("free");
    server.with(|authority| authority.watches_lag = true);
    let mut yields = guard.yields().expect("accepted");
    let waits = tokio::time::timeout(Duration::from_millis(300), yields.next()).await;
    assert!(waits.is_err(), "it holds, and nobody asks: {waits:?}");
    client.ask_yield("k", guard.token(), "ops", "now", Duration::ZERO).await.expect("held");
    assert_eq!(yields.next().await.expect("told").expect("held").who, "ops");
    guard.release().await.expect("held");
    assert_eq!(yields.next().await.expect("told"), None, "it is over");
}

#[tokio::test]
async fn a_holder_that_no_state_shows_hears_who_asks_it_to_yield() {
    let server = TestServer::start();
    let (client, session) = session(&server).await;
    let mut guards = Vec::new();
    for _ in 0..300 {
        let one = client.session(TTL).expect("a TTL in range");
        guards.push(one.lock("k").shared().acquire().await.expect("shared"));
    }
    let first = client.get("k").await.expect("read").info;
    assert_eq!((first.holders.len(), first.holders_total), (256, 300));
    let after = first.holders.last().expect("a page").lease;
    let rest = client.get_after("k", after, Freshness::Linearizable).await.expect("read").info;
    assert_eq!((rest.holders.len(), rest.holders_total), (44, 300));
    let last = rest.holders.last().expect("a page").token;
    let guard = guards.iter().find(|guard| guard.token() == last).expect("one of them");
    client.ask_yield("k", last, "ops", "a deploy", Duration::ZERO).await.expect("held");
    let mut yields = guard.yields().expect("accepted");
    assert_eq!(yields.next().await.expect("told").expect("held").why, "a deploy");
    client.ask_yield("k", last, "ops", "again", Duration::ZERO).await.expect("held");
    assert_eq!(yields.next().await.expect("told").expect("held").why, "again");
    session.close().await.expect("open");
}

#[tokio::test]
async fn several_keys_hear_each_who_asks_for_it() {
    let server = TestServer::start();
    let (client, session) = session(&server).await;
    let guard = session.lock_all(["{t}a", "{t}b"]).acquire().await.expect("free");
    let tokens: Vec<_> = guard.holds().iter().map(|(_, token)| *token).collect();
    let mut yields = guard.yields().expect("accepted");
    assert_eq!(yields.iter().map(Yields::token).collect::<Vec<_>>(), tokens);
    client.ask_yield("{t}b", tokens[1], "ops", "b", Duration::ZERO).await.expect("held");
    assert_eq!(yields[1].next().await.expect("told").expect("held").why, "b");
    guard.release().await.expect("held");
    for yields in &mut yields {
        assert_eq!(yields.next().await.expect("told"), None, "all are over");
    }
}
