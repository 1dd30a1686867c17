//! The hold-set version and forced ends (DESIGN §4).

use super::super::{HoldChange, HoldState, LossCause, RiskCause, Wait};
use super::rig::*;

#[test]
fn an_unknown_version_extends_nothing_until_the_holds_are_read() {
    let mut rig = Rig::new();
    let (_, op, held) = rig.holding();
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    let before = held.cell.remaining(rig.now);
    rig.renewed(&renew, 4);
    assert_eq!(held.cell.remaining(rig.now), before, "not extended yet");
    let read = rig.take_holds();
    rig.holds(&read, 4, &[(5, false)]);
    assert_eq!(
        held.cell.remaining(rig.now),
        left_after(rig.now.since(renew.at)),
        "the acknowledged renewal counts once its version is known"
    );
    assert_eq!(rig.changes(op), []);
}

#[test]
fn a_hold_that_is_not_listed_is_lost_once() {
    let mut rig = Rig::new();
    let (_, op, held) = rig.holding();
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    rig.renewed(&renew, 2);
    let read = rig.take_holds();
    rig.holds(&read, 2, &[]);
    assert_eq!(rig.changes(op), [HoldChange::Lost(LossCause::Forced)]);
    assert_eq!(rig.state(&held), HoldState::Lost(LossCause::Forced));
    rig.advance(TTL);
    assert_eq!(rig.changes(op), []);
}

#[test]
fn a_read_that_is_older_than_the_renewal_is_repeated() {
    let mut rig = Rig::new();
    let (_, _, held) = rig.holding();
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    rig.renewed(&renew, 4);
    let before = held.cell.remaining(rig.now);
    let read = rig.take_holds();
    rig.holds(&read, 3, &[(5, false)]);
    assert_eq!(held.cell.remaining(rig.now), before);
    let read = rig.take_holds();
    rig.holds(&read, 5, &[(5, false)]);
    assert_eq!(held.cell.remaining(rig.now), before, "it was acknowledged at another version");
    let renew = rig.take_renew();
    rig.renewed(&renew, 5);
    assert!(held.cell.remaining(rig.now) > before);
}

#[test]
fn a_forced_hold_keeps_its_validity_and_gets_no_more() {
    let mut rig = Rig::new();
    let (session, op, held) = rig.holding();
    let other = rig.acquire(session, "k2", Wait::Unlimited);
    let acquire = rig.take_acquire();
    rig.grant(&acquire, 6, 1);
    let kept = rig.acquired(other).expect("granted");
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    let left = held.cell.remaining(rig.now);
    rig.renewed(&renew, 3);
    let read = rig.take_holds();
    rig.holds(&read, 3, &[(5, true), (6, false)]);
    assert_eq!(held.cell.remaining(rig.now), left);
    assert!(kept.cell.remaining(rig.now) > left);
    assert_eq!(rig.changes(op), [HoldChange::AtRisk]);
    assert!(matches!(rig.state(&held), HoldState::AtRisk { cause: RiskCause::Forced, .. }));
    let end = rig.now.after(left);
    while rig.now < end {
        rig.advance(ms(100));
        if rig.renewals() > 0 {
            let renew = rig.take_renew();
            rig.renewed(&renew, 3);
        }
    }
    assert_eq!(rig.changes(op), [HoldChange::Lost(LossCause::Forced)]);
    assert_eq!(rig.state(&kept), HoldState::Held);
    assert_eq!(rig.changes(other), []);
}

#[test]
fn a_waited_grant_is_reported_only_after_a_renewal_at_its_version() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let acquire = rig.take_acquire();
    rig.queued(&acquire);
    rig.advance(ms(500));
    rig.grant(&acquire, 5, 0);
    assert!(rig.try_acquired(op).is_none(), "not yet");
    let renew = rig.take_renew();
    rig.advance(ms(40));
    rig.renewed(&renew, 1);
    let held = rig.acquired(op).expect("current");
    assert_eq!(held.cell.remaining(rig.now), left_after(ms(40)));
}

#[test]
fn a_renewal_answered_before_the_grant_does_not_confirm_it() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let acquire = rig.take_acquire();
    rig.queued(&acquire);
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    rig.grant(&acquire, 5, 0);
    rig.renewed(&renew, 0);
    assert!(rig.try_acquired(op).is_none(), "that renewal saw the lease before the grant");
    assert!(
        rig.sent
            .iter()
            .all(|sent| !matches!(sent.request, leasehold_protocol::request::Request::Holds(_))),
        "a version that was known needs no read"
    );
    let renew = rig.take_renew();
    rig.renewed(&renew, 1);
    rig.acquired(op).expect("current");
}

#[test]
fn a_waited_grant_that_was_forced_meanwhile_is_never_reported_as_held() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::Unlimited);
    rig.opened();
    let acquire = rig.take_acquire();
    rig.queued(&acquire);
    rig.grant(&acquire, 5, 0);
    let renew = rig.take_renew();
    rig.renewed(&renew, 2);
    let read = rig.take_holds();
    rig.holds(&read, 2, &[]);
    let failure = rig.acquired(op).expect_err("gone");
    assert_eq!(failure.name(), "lease_lost");
}

#[test]
fn grants_that_arrive_out_of_order_are_settled_by_one_read() {
    let mut rig = Rig::new();
    let session = rig.session();
    let first = rig.acquire(session, "a", Wait::Unlimited);
    rig.opened();
    let one = rig.take_acquire();
    let second = rig.acquire(session, "b", Wait::Unlimited);
    let two = rig.take_acquire();
    rig.grant(&two, 6, 1);
    assert!(rig.try_acquired(second).is_none(), "the version before it is not known");
    let read = rig.take_holds();
    rig.holds(&read, 2, &[(5, false), (6, false)]);
    rig.grant(&one, 5, 0);
    assert!(rig.try_acquired(first).is_none());
    let renew = rig.take_renew();
    rig.renewed(&renew, 2);
    rig.acquired(second).expect("current");
    if rig.try_acquired(first).is_none() {
        let renew = rig.take_renew();
        rig.renewed(&renew, 2);
        rig.acquired(first).expect("current");
    }
    assert!(
        rig.find(|request| matches!(request, leasehold_protocol::request::Request::Holds(_)))
            .is_none(),
        "no second read"
    );
}
