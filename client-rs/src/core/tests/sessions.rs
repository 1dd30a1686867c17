//! Sessions: their end, their lost leases, and holds with a lease of their own.

use leasehold_protocol::command::{Command, OwnLease};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, Mode, Number, Revision, Secret, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::request::Request;

use super::super::{Event, HoldChange, HoldState, LossCause, Options, Passed, RiskCause, Wait};
use super::rig::*;

fn closed() -> Outcome {
    Outcome::Closed { revision: Revision(9) }
}

#[test]
fn closing_gives_everything_back_and_stops_renewing() {
    let mut rig = Rig::new();
    let (session, op, held) = rig.holding();
    let waiting = rig.acquire(session, "k2", Wait::Unlimited);
    let wait = rig.take_acquire();
    rig.queued(&wait);
    rig.core.close_session(rig.now, session);
    rig.turn();
    assert_eq!(rig.lost(op), [LossCause::SessionClosed]);
    assert_eq!(rig.state(&held), HoldState::Lost(LossCause::SessionClosed));
    assert_eq!(rig.acquired(waiting).expect_err("closed").code, ErrorCode::LEASE_LOST);
    let close = rig.take_close();
    assert!(rig.events.is_empty(), "not confirmed yet");
    rig.outcome(&close, closed());
    assert!(matches!(rig.events.pop_front(), Some(Event::Closed { result: Ok(()), .. })));
    rig.advance(TTL * 3);
    assert_eq!(rig.renewals(), 0);
    assert!(rig.core.is_idle());
}

#[test]
fn closing_what_is_dead_already_is_done() {
    let mut rig = Rig::new();
    let (session, ..) = rig.holding();
    rig.core.close_session(rig.now, session);
    rig.turn();
    let close = rig.take_close();
    rig.refuse(&close, ErrorCode::LEASE_DEAD);
    assert!(rig.events.iter().any(|event| matches!(event, Event::Closed { result: Ok(()), .. })));
}

#[test]
fn a_close_without_an_answer_ends_by_its_deadline() {
    let mut rig = Rig::new();
    let (session, ..) = rig.holding();
    rig.core.close_session(rig.now, session);
    rig.advance(ms(10_000));
    let told = rig.events.iter().find_map(|event| match event {
        Event::Closed { result: Err(failure), .. } => Some(failure.code),
        _ => None,
    });
    assert_eq!(told, Some(ErrorCode::DEADLINE));
    assert_eq!(rig.renewals(), 0);
}

#[test]
fn a_session_that_was_never_used_closes_without_a_word() {
    let mut rig = Rig::new();
    let session = rig.session();
    rig.core.close_session(rig.now, session);
    rig.turn();
    assert!(rig.sent.is_empty());
    assert!(matches!(rig.events.pop_front(), Some(Event::Closed { result: Ok(()), .. })));
    let (key, value, options) = (b"k".to_vec(), Vec::new(), Options::PLAIN);
    let request = super::super::AcquireRequest {
        session,
        key,
        more: Vec::new(),
        value,
        wait: Wait::Try,
        own: None,
        options,
    };
    assert!(rig.core.acquire(rig.now, request).is_err());
}

#[test]
fn an_acquire_that_finds_its_lease_dead_moves_once_to_a_new_one() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let acquire = rig.take_acquire();
    rig.refuse(&acquire, ErrorCode::LEASE_DEAD);
    rig.opened_as(2);
    let again = rig.take_acquire();
    assert_eq!(again.caller().lease, LeaseId(2));
    assert_eq!(again.caller().number.0, 1, "a new lease, new numbers");
    rig.refuse(&again, ErrorCode::LEASE_DEAD);
    assert_eq!(rig.acquired(op).expect_err("twice is enough").code, ErrorCode::LEASE_LOST);
}

#[test]
fn a_wait_ends_with_its_lease_and_the_session_works_on() {
    let mut rig = Rig::new();
    let (session, held, _) = rig.holding();
    let waiting = rig.acquire(session, "k2", Wait::Unlimited);
    let wait = rig.take_acquire();
    rig.queued(&wait);
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    rig.not_renewed(&renew, ErrorCode::LEASE_DEAD);
    assert_eq!(rig.acquired(waiting).expect_err("lost").code, ErrorCode::LEASE_LOST);
    assert_eq!(rig.lost(held), [LossCause::LeaseDead]);
    let next = rig.acquire(session, "k3", Wait::Unlimited);
    rig.opened_as(2);
    let acquire = rig.take_acquire();
    rig.grant_to(&acquire, 2, 9, 0);
    rig.acquired(next).expect("granted under the new lease");
}

#[test]
fn waits_without_holds_outlive_a_missed_renewal_but_not_for_ever() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let acquire = rig.take_acquire();
    rig.queued(&acquire);
    rig.advance(TTL);
    assert!(rig.try_acquired(op).is_none(), "the lease may still live");
    assert!(rig.renewals() > 0, "and is still asked for");
    rig.advance(ms(10_000));
    assert_eq!(rig.acquired(op).expect_err("given up").code, ErrorCode::LEASE_LOST);
    rig.sent.clear();
    rig.advance(TTL);
    assert_eq!(rig.renewals(), 0);
}

#[test]
fn a_lease_that_never_opened_is_not_opened_for_nobody() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::For(ms(100)));
    rig.advance(ms(10_200));
    let failure = rig.acquired(op).expect_err("no answer");
    assert_eq!(failure.code, ErrorCode::DEADLINE);
    rig.sent.clear();
    rig.advance(TTL);
    assert!(rig.sent.iter().all(|sent| matches!(sent.request, Request::Ping)), "{:?}", rig.sent);
}

#[test]
fn an_own_lease_is_renewed_once_at_its_grant_and_then_only_when_asked() {
    let mut rig = Rig::new();
    let session = rig.session();
    let secret = Secret([3; 16]);
    let op = rig.acquire_with(session, "k", Wait::Unlimited, Some((TTL_MS, secret)));
    rig.opened();
    let acquire = rig.take_acquire();
    let own = Some(OwnLease { ttl_ms: TTL_MS as u32, secret });
    assert!(matches!(acquire.command(), Command::Acquire { own: sent, .. } if *sent == own));
    rig.grant_to(&acquire, 77, 5, 0);
    assert!(rig.try_acquired(op).is_none(), "its validity is not known yet");
    let renew = rig.take_renew();
    assert_eq!(renew.renew().items[0].lease, LeaseId(77));
    assert_eq!(renew.renew().items[0].secret, secret);
    rig.renewed(&renew, 1);
    let held = rig.acquired(op).expect("current");
    let granted_at = rig.now;

    rig.core.close_session(rig.now, session);
    rig.turn();
    let close = rig.take_close();
    rig.outcome(&close, closed());
    assert_eq!(rig.changes(op), [], "it outlives its session");

    rig.advance(TTL * 6 / 10);
    assert_eq!(rig.renewals(), 0);
    assert_eq!(rig.changes(op), [HoldChange::AtRisk]);
    assert!(matches!(rig.state(&held), HoldState::AtRisk { cause: RiskCause::NotRenewed, .. }));
    let call = rig.core.renew(rig.now, op).expect("held");
    rig.turn();
    let renew = rig.take_renew();
    rig.renewed(&renew, 1);
    assert!(rig.events.iter().any(
        |event| matches!(event, Event::Renewed { call: done, result: Ok(()) } if *done == call)
    ));
    assert_eq!(held.cell.remaining(rig.now), left_after(ms(0)));
    assert!(rig.now.since(granted_at) > TTL / 2);

    rig.core.release(rig.now, op, true).expect("held");
    rig.turn();
    let release = rig.take_release();
    assert!(matches!(
        release.command(),
        Command::ReleaseOwn { lease: LeaseId(77), token: Token(5), .. }
    ));
    rig.outcome(&release, Outcome::Released { token: Token(5), revision: Revision(3) });
    assert!(rig.events.iter().any(|event| matches!(event, Event::Released { result: Ok(()), .. })));
}

#[test]
fn an_own_lease_that_runs_out_is_lost_and_left_alone() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire_with(session, "k", Wait::Unlimited, Some((TTL_MS, Secret([3; 16]))));
    rig.opened();
    let acquire = rig.take_acquire();
    rig.grant_to(&acquire, 77, 5, 0);
    let renew = rig.take_renew();
    rig.renewed(&renew, 1);
    rig.acquired(op).expect("current");
    rig.sent.clear();
    let end = rig.now.after(TTL);
    while rig.now < end {
        rig.advance(ms(100));
        while let Some(renew) = rig.find(|request| matches!(request, Request::Renew(_))) {
            assert_eq!(renew.renew().items[0].lease, LeaseId(1), "only the session's own");
            rig.renewed(&renew, 1);
        }
    }
    assert_eq!(rig.changes(op), [HoldChange::AtRisk, HoldChange::Lost(LossCause::Expired)]);
    assert!(
        rig.sent.iter().all(|sent| matches!(sent.request, Request::Ping)),
        "another process may keep it: {:?}",
        rig.sent
    );
}

/// A client that has just been told of a hold knows nothing of its validity; and what it could not
/// confirm is not its own to give back.
#[test]
fn a_hold_that_is_taken_over_is_told_after_a_renewal_and_never_given_back_before() {
    let mut rig = Rig::new();
    let passed = Passed {
        key: b"k".to_vec(),
        mode: Mode::EXCLUSIVE,
        token: Token(5),
        floor: Token(5),
        number: Number(4),
        lease: LeaseId(77),
        secret: Secret([3; 16]),
        ttl_ms: TTL_MS as u32,
    };
    let op = rig.core.take_over(rig.now, passed.clone()).expect("room");
    rig.turn();
    let renew = rig.take_renew();
    assert_eq!(renew.renew().items[0].secret, passed.secret);
    assert!(rig.try_acquired(op).is_none(), "its validity is not known yet");
    rig.advance(ms(100));
    rig.renewed(&renew, 1);
    let held = rig.acquired(op).expect("current");
    assert_eq!(held.cell.remaining(rig.now), left_after(ms(100)), "counted from the send");
    assert_eq!(rig.core.hand_over(rig.now, op), Some(passed.clone()), "and on it goes");

    let op = rig.core.take_over(rig.now, passed.clone()).expect("room");
    rig.turn();
    rig.core.abandon(rig.now, op);
    rig.turn();
    let op = rig.core.take_over(rig.now, passed).expect("room");
    rig.advance(ms(11_000));
    assert!(rig.acquired(op).is_err(), "the cluster did not answer");
    rig.advance(TTL);
    let given_back = |sent: &Sent| matches!(sent.request, Request::Command(_));
    assert!(!rig.sent.iter().any(given_back), "{:?}", rig.sent);
}

/// What a handover says came as a text from outside.
#[test]
fn a_handover_with_absurd_numbers_or_a_mode_that_does_not_exist_does_no_harm() {
    let mut rig = Rig::new();
    let passed = Passed {
        key: b"k".to_vec(),
        mode: Mode::EXCLUSIVE,
        token: Token(u64::MAX),
        floor: Token(u64::MAX),
        number: Number(u64::MAX),
        lease: LeaseId(u64::MAX),
        secret: Secret([3; 16]),
        ttl_ms: TTL_MS as u32,
    };
    let unknown = Passed { mode: Mode(u32::MAX), ..passed.clone() };
    let refused = rig.core.take_over(rig.now, unknown).expect_err("no such mode");
    assert_eq!(refused.code, ErrorCode::UNSUPPORTED_MODE);
    let op = rig.core.take_over(rig.now, passed).expect("room");
    rig.turn();
    let renew = rig.take_renew();
    rig.renewed(&renew, 1);
    rig.acquired(op).expect("current");
    rig.core.release(rig.now, op, true).expect("held");
    rig.turn();
    let release = rig.take_release();
    assert!(matches!(release.command(), Command::ReleaseOwn { token: Token(u64::MAX), .. }));
    rig.refuse(&release, ErrorCode::NOT_OWNER);
}

#[test]
fn input_out_of_range_is_refused_before_anything_is_sent() {
    let mut rig = Rig::new();
    let session = rig.session();
    let refused = |rig: &mut Rig, key: &[u8], value: usize, own: Option<u64>| {
        let request = super::super::AcquireRequest {
            session,
            key: key.to_vec(),
            more: Vec::new(),
            value: vec![0; value],
            wait: Wait::Try,
            own: own.map(|ttl_ms| (ttl_ms, Secret([0; 16]))),
            options: Options::PLAIN,
        };
        rig.core.acquire(rig.now, request).expect_err("out of range").name()
    };
    assert_eq!(refused(&mut rig, b"", 0, None), "key_empty");
    assert_eq!(refused(&mut rig, &[b'x'; 513], 0, None), "key_too_long");
    assert_eq!(refused(&mut rig, &[0xff], 0, None), "key_not_utf8");
    assert_eq!(refused(&mut rig, b"k", 4097, None), "value_too_large");
    for ttl_ms in [0, 999, 600_001, 15_000_000_000, 1 << 63] {
        assert_eq!(refused(&mut rig, b"k", 0, Some(ttl_ms)), "ttl_out_of_range");
        let secret = Secret([0; 16]);
        let failure =
            rig.core.open_session(rig.now, ttl_ms, String::new(), secret).expect_err("range");
        assert!(failure.message.contains(&ttl_ms.to_string()), "{failure}");
        assert!(failure.message.contains("1,000 to 600,000"), "{failure}");
    }
    rig.turn();
    assert!(rig.sent.is_empty());
}

#[test]
fn a_lease_that_comes_after_its_session_has_gone_is_closed() {
    let mut rig = Rig::new();
    let session = rig.session();
    rig.acquire(session, "k", Wait::Unlimited);
    let open = rig.take_open();
    rig.core.close_session(rig.now, session);
    rig.turn();
    assert!(rig.events.iter().any(|event| matches!(event, Event::Closed { result: Ok(()), .. })));
    rig.outcome(&open, Outcome::Opened { lease: LeaseId(9), revision: Revision(1) });
    let close = rig.take_close();
    assert!(matches!(close.command(), Command::Close { lease: LeaseId(9), .. }));
    rig.outcome(&close, closed());
    assert!(rig.core.is_idle());
}

#[test]
fn a_wait_without_limit_still_needs_an_answer_in_time() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::Unlimited);
    for _ in 0..1000 {
        rig.advance(ms(10));
        while let Some(open) = rig.find(|request| matches!(request, Request::Command(_))) {
            rig.error(&open, ErrorCode::NO_QUORUM, 0);
        }
    }
    assert_eq!(rig.acquired(op).expect_err("no answer").code, ErrorCode::NO_QUORUM);
    // Once it is in the queue it waits on.
    let op = rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let acquire = rig.take_acquire();
    rig.queued(&acquire);
    for _ in 0..60 {
        rig.advance(ms(1000));
        while let Some(sent) =
            rig.find(|request| matches!(request, Request::Renew(_) | Request::Ping))
        {
            match sent.request {
                Request::Renew(_) => rig.renewed(&sent, 0),
                _ => rig.answer(&sent, &leasehold_protocol::reply::Reply::Pong),
            }
        }
    }
    assert!(rig.try_acquired(op).is_none(), "a minute is not too long");
}

#[test]
fn a_session_has_one_lease_in_each_shard_it_uses_and_loses_them_apart() {
    let mut rig = Rig::with_shards(2);
    let session = rig.session();
    let shard_of = |key: &str| leasehold_protocol::shard::shard_of(key.as_bytes(), 2).0;
    let in_shard = |shard: u32| {
        (0..1000).map(|n| format!("key{n}")).find(|key| shard_of(key) == shard).expect("some key")
    };
    let mut holds = Vec::new();
    for shard in 0..2 {
        let op = rig.acquire(session, &in_shard(shard), Wait::Unlimited);
        let open = rig.take_open();
        assert!(matches!(&open.request, Request::Command(body) if body.shard.0 == shard));
        // Leases of different shards may have the same id.
        rig.outcome(&open, Outcome::Opened { lease: LeaseId(1), revision: Revision(1) });
        let acquire = rig.take_acquire();
        assert_eq!(acquire.caller().number.0, 1, "numbers are a lease's own");
        rig.grant(&acquire, 5, 0);
        holds.push((op, rig.acquired(op).expect("granted")));
    }
    rig.advance(TTL / 3);
    let renewals = [rig.take_renew(), rig.take_renew()];
    assert_ne!(renewals[0].renew().shard, renewals[1].renew().shard, "a message for each shard");
    assert_eq!(renewals[0].conn, renewals[1].conn, "to the one leader of both");
    for renew in &renewals {
        if renew.renew().shard.0 == 0 {
            rig.renewed(renew, 1);
        } else {
            rig.not_renewed(renew, ErrorCode::LEASE_DEAD);
        }
    }
    assert_eq!(rig.lost(holds[1].0), [LossCause::LeaseDead]);
    assert_eq!(rig.state(&holds[0].1), HoldState::Held);
    rig.core.close_session(rig.now, session);
    rig.turn();
    let close = rig.take_close();
    assert!(matches!(&close.request, Request::Command(body) if body.shard.0 == 0));
}
