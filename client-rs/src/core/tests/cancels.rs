//! Cancels, dropped futures and releases, and what they race with.

use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{Number, Revision, Token};
use leasehold_protocol::outcome::Outcome;

use super::super::{Event, Wait};
use super::rig::*;

fn cancelled() -> Outcome {
    Outcome::Cancelled { revision: Revision(2) }
}

fn released(token: u64) -> Outcome {
    Outcome::Released { token: Token(token), revision: Revision(2) }
}

#[test]
fn a_wait_that_is_over_is_cancelled_under_its_reserved_number() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::For(ms(500)));
    rig.opened();
    let acquire = rig.take_acquire();
    assert_eq!(acquire.caller().number, Number(1));
    assert!(matches!(acquire.command(), Command::Acquire { wait_ms: 10_500, .. }));
    rig.queued(&acquire);
    rig.advance(ms(499));
    assert!(rig.sent.is_empty());
    rig.advance(ms(1));
    let cancel = rig.take_cancel();
    assert_eq!(cancel.caller().number, Number(2));
    assert!(matches!(cancel.command(), Command::Cancel { release_if_granted: false, .. }));
    assert!(rig.try_acquired(op).is_none(), "only the committed outcome counts");
    rig.outcome(&cancel, cancelled());
    assert_eq!(rig.acquired(op).expect_err("over").code, ErrorCode::TIMED_OUT);
}

#[test]
fn a_grant_that_beat_the_cancel_is_the_outcome() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::For(ms(500)));
    rig.opened();
    let acquire = rig.take_acquire();
    rig.queued(&acquire);
    rig.advance(ms(500));
    let cancel = rig.take_cancel();
    rig.outcome(&cancel, granted(1, 5, 0));
    let renew = rig.take_renew();
    rig.renewed(&renew, 1);
    assert_eq!(rig.acquired(op).expect("granted").cell.token(), Token(5));
    // The acquire's own reply comes as well, and changes nothing.
    rig.grant(&acquire, 5, 0);
    assert!(rig.events.is_empty());
}

#[test]
fn both_replies_of_a_lost_race_settle_once() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::For(ms(500)));
    rig.opened();
    let acquire = rig.take_acquire();
    rig.queued(&acquire);
    rig.advance(ms(500));
    let cancel = rig.take_cancel();
    rig.outcome(&acquire, Outcome::Cancelled { revision: Revision(2) });
    rig.outcome(&cancel, cancelled());
    assert_eq!(rig.acquired(op).expect_err("over").code, ErrorCode::TIMED_OUT);
    assert!(rig.events.is_empty());
}

#[test]
fn a_dropped_future_asks_to_release_what_may_have_been_granted() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let acquire = rig.take_acquire();
    rig.core.abandon(rig.now, op);
    rig.turn();
    let cancel = rig.take_cancel();
    assert!(matches!(cancel.command(), Command::Cancel { release_if_granted: true, .. }));
    // The grant was on its way.
    rig.grant(&acquire, 5, 0);
    assert!(rig.sent.is_empty(), "the cancel releases it: {:?}", rig.sent);
    rig.outcome(&cancel, released(5));
    assert!(rig.events.is_empty(), "nobody is told: {:?}", rig.events);
    // The session lives on, and the key can be asked for again.
    let again = rig.acquire(session, "k", Wait::Unlimited);
    let acquire = rig.take_acquire();
    assert_eq!(acquire.caller().number, Number(4));
    rig.grant(&acquire, 6, 1);
    rig.acquired(again).expect("granted");
}

#[test]
fn a_future_dropped_after_its_grant_was_reported_gives_the_hold_back() {
    let mut rig = Rig::new();
    let (_, op, held) = rig.holding();
    rig.core.abandon(rig.now, op);
    rig.turn();
    let release = rig.take_release();
    assert_eq!(release.caller().number, Number(3));
    drop(held);
    rig.outcome(&release, released(5));
    assert!(rig.events.is_empty());
}

#[test]
fn an_abandoned_acquire_whose_cancel_was_sent_already_is_released() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::For(ms(500)));
    rig.opened();
    let acquire = rig.take_acquire();
    rig.queued(&acquire);
    rig.advance(ms(500));
    let cancel = rig.take_cancel();
    rig.core.abandon(rig.now, op);
    rig.turn();
    assert!(rig.sent.is_empty(), "a cancel's body does not change");
    rig.outcome(&cancel, granted(1, 5, 0));
    let release = rig.take_release();
    rig.outcome(&release, released(5));
    assert!(rig.events.is_empty());
}

#[test]
fn an_unanswered_acquire_is_unknown_at_its_deadline_and_goes_on_being_cancelled() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::Try);
    rig.opened();
    rig.take_acquire();
    // Nothing is answered but the renewals.
    for _ in 0..100 {
        rig.advance(ms(100));
        while let Some(renew) =
            rig.find(|request| matches!(request, leasehold_protocol::request::Request::Renew(_)))
        {
            rig.renewed(&renew, 0);
        }
    }
    assert_eq!(rig.acquired(op).expect_err("no answer").code, ErrorCode::DEADLINE);
    let cancel = rig.take_cancel();
    assert!(matches!(cancel.command(), Command::Cancel { release_if_granted: true, .. }));
    rig.outcome(&cancel, released(5));
    assert!(rig.events.is_empty());
}

#[test]
fn a_release_is_confirmed_and_a_new_acquire_of_the_key_does_not_overtake_it() {
    let mut rig = Rig::new();
    let (session, op, held) = rig.holding();
    rig.core.release(rig.now, op, true).expect("held");
    rig.turn();
    assert_eq!(held.cell.remaining(rig.now), ms(0), "given back with the call");
    let release = rig.take_release();
    let again = rig.acquire(session, "k", Wait::Unlimited);
    let other = rig.acquire(session, "other", Wait::Unlimited);
    let acquire = rig.take_acquire();
    assert!(matches!(acquire.command(), Command::Acquire { key, .. } if key == b"other"));
    assert!(rig.sent.is_empty(), "the same key waits for its release");
    rig.outcome(&release, released(5));
    assert!(matches!(
        rig.events.pop_front(),
        Some(Event::Released { op: done, result: Ok(()) }) if done == op
    ));
    let acquire = rig.take_acquire();
    assert!(matches!(acquire.command(), Command::Acquire { key, .. } if key == b"k"));
    rig.grant(&acquire, 6, 1);
    rig.acquired(again).expect("granted");
    assert!(rig.try_acquired(other).is_none());
}

#[test]
fn a_release_that_is_repeated_and_finds_nothing_has_succeeded() {
    let mut rig = Rig::new();
    let (_, op, _) = rig.holding();
    rig.core.release(rig.now, op, true).expect("held");
    rig.turn();
    let first = rig.take_release();
    rig.break_conn(first.conn);
    rig.advance(ms(50));
    let second = rig.take_release();
    assert_eq!(first.caller().number, second.caller().number);
    rig.refuse(&second, ErrorCode::NOT_OWNER);
    let released = rig.events.pop_front();
    assert!(matches!(released, Some(Event::Released { result: Ok(()), .. })), "{released:?}");
}

#[test]
fn a_release_of_a_hold_that_was_forced_says_so() {
    let mut rig = Rig::new();
    let (_, op, _) = rig.holding();
    rig.core.release(rig.now, op, true).expect("held");
    rig.turn();
    let release = rig.take_release();
    rig.refuse(&release, ErrorCode::NOT_OWNER);
    match rig.events.pop_front() {
        Some(Event::Released { result: Err(failure), .. }) => {
            assert_eq!(failure.code, ErrorCode::NOT_OWNER);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_release_without_an_answer_is_unknown_at_its_deadline_and_goes_on() {
    let mut rig = Rig::new();
    let (_, op, _) = rig.holding();
    rig.core.release(rig.now, op, true).expect("held");
    rig.turn();
    for _ in 0..101 {
        rig.advance(ms(100));
        while let Some(renew) =
            rig.find(|request| matches!(request, leasehold_protocol::request::Request::Renew(_)))
        {
            rig.renewed(&renew, 1);
        }
    }
    match rig.events.pop_front() {
        Some(Event::Released { result: Err(failure), .. }) => {
            assert_eq!(failure.code, ErrorCode::DEADLINE);
        }
        other => panic!("{other:?}"),
    }
    rig.sent.clear();
    rig.advance(ms(3000));
    let release = rig.take_release();
    rig.outcome(&release, released(5));
    assert!(rig.events.is_empty());
}

#[test]
fn an_abandoned_acquire_does_not_let_another_overtake_the_release() {
    let mut rig = Rig::new();
    let (session, op, _) = rig.holding();
    rig.core.release(rig.now, op, false).expect("held");
    rig.turn();
    let release = rig.take_release();
    let second = rig.acquire(session, "k", Wait::Unlimited);
    let third = rig.acquire(session, "k", Wait::Unlimited);
    rig.core.abandon(rig.now, second);
    rig.turn();
    assert!(rig.sent.is_empty(), "the release has no answer yet: {:?}", rig.sent);
    rig.outcome(&release, released(5));
    let acquire = rig.take_acquire();
    rig.grant(&acquire, 6, 1);
    rig.acquired(third).expect("granted");
}

#[test]
fn a_cancel_without_an_answer_holds_the_same_key_back() {
    let mut rig = Rig::new();
    let session = rig.session();
    let first = rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let acquire = rig.take_acquire();
    rig.queued(&acquire);
    rig.core.abandon(rig.now, first);
    rig.turn();
    let cancel = rig.take_cancel();
    let second = rig.acquire(session, "k", Wait::Unlimited);
    assert!(rig.sent.is_empty(), "{:?}", rig.sent);
    rig.outcome(&cancel, cancelled());
    let acquire = rig.take_acquire();
    rig.grant(&acquire, 5, 0);
    rig.acquired(second).expect("granted");
}

#[test]
fn a_grant_that_its_cancel_gives_back_is_never_reported() {
    let mut rig = Rig::new();
    let (session, _, _) = rig.holding();
    let op = rig.acquire(session, "k2", Wait::Unlimited);
    let acquire = rig.take_acquire();
    rig.core.abandon(rig.now, op);
    rig.turn();
    let cancel = rig.take_cancel();
    rig.grant(&acquire, 6, 1);
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    rig.renewed(&renew, 2);
    assert!(rig.try_acquired(op).is_none(), "its caller has gone");
    rig.outcome(&cancel, released(6));
    assert!(rig.try_acquired(op).is_none());
}

#[test]
fn a_cancel_that_found_something_else_leaves_no_abandoned_hold() {
    let mut rig = Rig::new();
    let (session, _, _) = rig.holding();
    let op = rig.acquire(session, "k2", Wait::Unlimited);
    let acquire = rig.take_acquire();
    rig.core.abandon(rig.now, op);
    rig.turn();
    let cancel = rig.take_cancel();
    rig.grant(&acquire, 6, 1);
    rig.refuse(&cancel, ErrorCode::NOT_QUEUED);
    let release = rig.take_release();
    rig.outcome(&release, released(6));
    assert!(rig.try_acquired(op).is_none());
}

#[test]
fn a_hold_that_was_over_before_its_cancel_asked_is_a_loss() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::For(ms(500)));
    rig.opened();
    rig.take_acquire();
    rig.advance(ms(500));
    let cancel = rig.take_cancel();
    rig.refuse(&cancel, ErrorCode::NOT_QUEUED);
    assert_eq!(rig.acquired(op).expect_err("over").code, ErrorCode::LEASE_LOST);
}
