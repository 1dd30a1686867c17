//! Validity: what extends it, what does not, and how it ends (G1, G3).

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::request::Request;

use super::super::{HoldChange, HoldState, LossCause, RiskCause, Wait};
use super::rig::*;

#[test]
fn a_grant_is_as_good_as_its_lease_from_before_the_send_of_the_open() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::Unlimited);
    rig.advance(ms(300));
    rig.opened();
    rig.advance(ms(100));
    let acquire = rig.take_acquire();
    rig.grant(&acquire, 5, 0);
    let held = rig.acquired(op).expect("granted");
    assert_eq!(held.cell.token().0, 5);
    assert_eq!(held.cell.remaining(rig.now), left_after(ms(400)));
    assert_eq!(rig.state(&held), HoldState::Held);
}

#[test]
fn a_renewal_counts_from_its_own_send_however_late_the_answer_is() {
    let mut rig = Rig::new();
    let (_, _, held) = rig.holding();
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    let early = renew.at;
    rig.advance(ms(700));
    let before = held.cell.remaining(rig.now);
    rig.renewed(&renew, 1);
    let remaining = held.cell.remaining(rig.now);
    assert!(remaining > before);
    assert_eq!(remaining, left_after(rig.now.since(early)));
}

#[test]
fn renewals_are_sent_every_third_of_the_ttl_with_jitter() {
    let mut rig = Rig::new();
    let (_, _, held) = rig.holding();
    let mut last = rig.now;
    let mut gaps = Vec::new();
    for _ in 0..20 {
        while rig.renewals() == 0 {
            rig.advance(ms(1));
        }
        let renew = rig.take_renew();
        gaps.push(renew.at.since(last));
        last = renew.at;
        rig.renewed(&renew, 1);
    }
    assert!(gaps.iter().all(|gap| *gap <= TTL / 3 && *gap >= TTL / 4), "{gaps:?}");
    gaps.sort();
    gaps.dedup();
    assert!(gaps.len() > 15, "jittered: {gaps:?}");
    assert_eq!(rig.state(&held), HoldState::Held);
}

#[test]
fn an_answer_to_an_earlier_attempt_counts_from_that_attempt() {
    let mut rig = Rig::new();
    let (_, _, held) = rig.holding();
    rig.advance(TTL / 3);
    let first = rig.take_renew();
    rig.advance(TTL / 4);
    let second = rig.take_renew();
    assert!(second.at > first.at);
    rig.renewed(&first, 1);
    assert_eq!(held.cell.remaining(rig.now), left_after(rig.now.since(first.at)));
}

#[test]
fn silence_leads_from_held_over_at_risk_to_lost_once_and_to_no_further_renewal() {
    let mut rig = Rig::new();
    let (_, op, held) = rig.holding();
    rig.advance(TTL / 2);
    assert_eq!(rig.changes(op), [HoldChange::AtRisk]);
    assert!(matches!(
        rig.state(&held),
        HoldState::AtRisk { cause: RiskCause::Unreachable, remaining } if remaining < TTL / 2
    ));
    rig.advance(TTL / 2);
    assert_eq!(rig.changes(op), [HoldChange::Lost(LossCause::Expired)]);
    assert_eq!(rig.state(&held), HoldState::Lost(LossCause::Expired));
    // The lease may still live at the cluster: it is told that nobody needs it.
    rig.take_close();
    rig.sent.clear();
    rig.advance(TTL * 5);
    assert_eq!(rig.renewals(), 0, "a lost lease is never renewed");
    assert_eq!(rig.changes(op), [], "lost once");
}

#[test]
fn a_late_renewal_makes_it_safe_again() {
    let mut rig = Rig::new();
    let (_, op, held) = rig.holding();
    rig.advance(TTL * 6 / 10);
    assert_eq!(rig.changes(op), [HoldChange::AtRisk]);
    let renew = std::iter::from_fn(|| rig.find(|request| matches!(request, Request::Renew(_))));
    let last = renew.last().expect("it kept trying");
    rig.renewed(&last, 1);
    assert_eq!(rig.changes(op), [HoldChange::Safe]);
    assert_eq!(rig.state(&held), HoldState::Held);
}

#[test]
fn no_quorum_is_named_as_the_cause() {
    let mut rig = Rig::new();
    let (_, _, held) = rig.holding();
    rig.advance(TTL / 3);
    for _ in 0..40 {
        rig.advance(ms(50));
        while let Some(renew) = rig.find(|request| matches!(request, Request::Renew(_))) {
            rig.error(&renew, ErrorCode::NO_QUORUM, 0);
        }
    }
    assert!(matches!(rig.state(&held), HoldState::AtRisk { cause: RiskCause::NoQuorum, .. }));
}

#[test]
fn after_a_sleep_past_the_ttl_the_first_look_shows_the_loss_and_no_answer_revives_it() {
    let mut rig = Rig::new();
    let (session, op, held) = rig.holding();
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    rig.sleep(TTL * 2);
    // The first call after the process wakes, before any timer or socket was looked at.
    assert_eq!(held.cell.remaining(rig.now), ms(0));
    assert_eq!(rig.state(&held), HoldState::Lost(LossCause::Expired));
    // The answer was in the socket all the time.
    rig.renewed(&renew, 1);
    assert_eq!(rig.lost(op), [LossCause::Expired]);
    assert_eq!(rig.state(&held), HoldState::Lost(LossCause::Expired));
    assert!(rig.core.release(rig.now, op, true).is_err(), "there is nothing to release");
    // The session itself goes on, with another lease.
    rig.acquire(session, "k2", Wait::Try);
    rig.opened_as(2);
    let acquire = rig.take_acquire();
    assert_eq!(acquire.caller().lease.0, 2);
    assert_eq!(acquire.caller().number.0, 1);
}

#[test]
fn a_readers_clock_ahead_of_the_answer_wins() {
    let mut rig = Rig::new();
    let (_, op, held) = rig.holding();
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    let until = rig.now.after(held.cell.remaining(rig.now));
    assert_eq!(held.cell.state(until), HoldState::Lost(LossCause::Expired));
    // The core's own clock is a little behind that reader's.
    rig.renewed(&renew, 1);
    assert_eq!(rig.lost(op), [LossCause::Expired]);
}

#[test]
fn a_dead_lease_ends_every_hold_once() {
    let mut rig = Rig::new();
    let (session, first, _) = rig.holding();
    let second = rig.acquire(session, "k2", Wait::Unlimited);
    let acquire = rig.take_acquire();
    rig.grant(&acquire, 6, 1);
    let held = rig.acquired(second).expect("granted");
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    rig.not_renewed(&renew, ErrorCode::LEASE_DEAD);
    assert_eq!(rig.lost(first), [LossCause::LeaseDead]);
    assert_eq!(rig.lost(second), [LossCause::LeaseDead]);
    assert_eq!(rig.state(&held), HoldState::Lost(LossCause::LeaseDead));
    rig.advance(TTL * 3);
    assert_eq!(rig.renewals(), 0);
    assert!(rig.events.is_empty(), "{:?}", rig.events);
}

#[test]
fn an_expiring_lease_is_asked_about_again_soon() {
    let mut rig = Rig::new();
    let (_, op, held) = rig.holding();
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    rig.not_renewed(&renew, ErrorCode::LEASE_EXPIRING);
    rig.advance(ms(150));
    let again = rig.take_renew();
    rig.renewed(&again, 1);
    assert_eq!(rig.state(&held), HoldState::Held);
    assert_eq!(rig.changes(op), []);
}

#[test]
fn sessions_of_one_client_share_a_renewal() {
    let mut rig = Rig::new();
    let mut holds = Vec::new();
    for lease in 1..=3 {
        let session = rig.session();
        let op = rig.acquire(session, &format!("k{lease}"), Wait::Unlimited);
        rig.opened_as(lease);
        let acquire = rig.take_acquire();
        rig.grant_to(&acquire, lease, 10 + lease, 0);
        holds.push(rig.acquired(op).expect("granted"));
    }
    rig.advance(TTL / 3);
    let mut renewed = 0;
    while let Some(renew) = rig.find(|request| matches!(request, Request::Renew(_))) {
        renewed += renew.renew().items.len();
        rig.renewed(&renew, 1);
    }
    assert!(renewed >= 3);
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    assert_eq!(renew.renew().items.len(), 3, "in step after the first round");
}
