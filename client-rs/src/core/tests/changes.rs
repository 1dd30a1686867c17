//! Options of acquires, entries of one hold, and changes of holds.

use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{Mode, Number, Revision, Token};
use leasehold_protocol::outcome::Outcome;

use super::super::{HoldChange, HoldState, LossCause, Options, Wait, Wish};
use super::rig::*;

const SHARED: Options = Options { mode: Mode::SHARED, ..Options::PLAIN };
const REENTRANT: Options = Options { reentrant: true, ..Options::PLAIN };

fn changed(token: u64) -> Outcome {
    Outcome::Changed { token: Token(token), revision: Revision(1) }
}

/// A session that holds `k` shared, under token 5.
fn reading() -> (Rig, super::super::SessionId, super::super::OpId, super::super::Held) {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire_as(session, "k", Wait::Unlimited, None, SHARED);
    rig.opened();
    let acquire = rig.take_acquire();
    rig.grant(&acquire, 5, 0);
    let held = rig.acquired(op).expect("granted");
    (rig, session, op, held)
}

#[test]
fn options_travel_and_plain_acquires_stay_as_they_were() {
    let mut rig = Rig::new();
    let session = rig.session();
    rig.acquire_as(session, "r", Wait::Try, None, SHARED);
    rig.opened();
    let sent = rig.take_acquire();
    assert!(matches!(sent.command(), Command::Acquire { mode: Mode::SHARED, .. }));
    let permits = Options { mode: Mode::permits(2), limit: 5, reentrant: true, delay_ms: 700 };
    rig.acquire_as(session, "s", Wait::Try, None, permits);
    let sent = rig.take_acquire();
    let Command::AcquireAll { wants, delay_ms, .. } = sent.command() else { panic!("{sent:?}") };
    assert_eq!((wants.len(), *delay_ms), (1, 700));
    assert_eq!((wants[0].mode, wants[0].limit), (Mode::permits(2), 5));
    assert!(wants[0].reentrant);
}

#[test]
fn options_out_of_range_are_refused_with_what_was_given() {
    let mut rig = Rig::new();
    let session = rig.session();
    let refused = |rig: &mut Rig, options: Options, own: bool| {
        let own = own.then_some((TTL_MS, leasehold_protocol::ids::Secret([1; 16])));
        let (key, value, wait) = (b"k".to_vec(), Vec::new(), Wait::Try);
        let request = super::super::AcquireRequest {
            session,
            key,
            more: Vec::new(),
            value,
            wait,
            own,
            options,
        };
        rig.core.acquire(rig.now, request).expect_err("refused")
    };
    let permits = |count, limit| Options { mode: Mode::permits(count), limit, ..Options::PLAIN };
    for (count, limit) in [(0, 5), (6, 5), (1, 0), (1, 1025)] {
        let failure = refused(&mut rig, permits(count, limit), false);
        assert_eq!(failure.code, ErrorCode::PERMITS_OUT_OF_RANGE, "{count} of {limit}");
        assert!(failure.message.contains(&format!("{count} of {limit}")), "{failure}");
    }
    for delay_ms in [60_001, 1 << 32, u64::MAX] {
        let failure = refused(&mut rig, Options { delay_ms, ..Options::PLAIN }, false);
        assert_eq!(failure.code, ErrorCode::DELAY_OUT_OF_RANGE);
        assert!(failure.message.contains(&delay_ms.to_string()), "{failure}");
    }
    let failure = refused(&mut rig, REENTRANT, true);
    assert_eq!(failure.code, ErrorCode::BAD_COMBINATION);
    assert!(rig.sent.is_empty());
}

#[test]
fn a_limit_that_differs_is_refused_with_both_numbers() {
    let mut rig = Rig::new();
    let session = rig.session();
    let permits = Options { mode: Mode::permits(2), limit: 5, ..Options::PLAIN };
    let op = rig.acquire_as(session, "k", Wait::Try, None, permits);
    rig.opened();
    let acquire = rig.take_acquire();
    let (code, token) = (ErrorCode::LIMIT_MISMATCH, Token(3));
    rig.outcome(&acquire, Outcome::Refused { code, token, revision: Revision(1) });
    let failure = rig.acquired(op).expect_err("refused");
    assert!(failure.message.contains('3') && failure.message.contains('5'), "{failure}");
    assert_eq!(failure.token, Token(0), "there is no holder in it");
}

#[test]
fn entries_of_one_hold_share_its_token_and_are_given_back_one_by_one() {
    let mut rig = Rig::new();
    let (session, first, held) = rig.holding();
    let second = rig.acquire_as(session, "k", Wait::Unlimited, None, REENTRANT);
    let acquire = rig.take_acquire();
    rig.outcome(&acquire, entered(5, 1));
    let again = rig.acquired(second).expect("entered at once: the version is known");
    assert_eq!(again.cell.token(), held.cell.token());
    rig.core.release(rig.now, first, true).expect("held");
    rig.turn();
    let release = rig.take_release();
    assert_eq!(release.caller().number, Number(3), "that of its own acquire");
    rig.outcome(&release, changed(5));
    assert_eq!(rig.state(&again), HoldState::Held);
    rig.core.release(rig.now, second, true).expect("held");
    rig.turn();
    let release = rig.take_release();
    assert_eq!(release.caller().number, Number(6));
    rig.outcome(&release, Outcome::Released { token: Token(5), revision: Revision(1) });
}

#[test]
fn a_forced_end_ends_every_entry() {
    let mut rig = Rig::new();
    let (session, first, _) = rig.holding();
    let second = rig.acquire_as(session, "k", Wait::Unlimited, None, REENTRANT);
    let acquire = rig.take_acquire();
    rig.outcome(&acquire, entered(5, 1));
    let again = rig.acquired(second).expect("entered");
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    rig.renewed(&renew, 2);
    let read = rig.take_holds();
    rig.holds(&read, 2, &[]);
    assert_eq!(rig.changes(first), [HoldChange::Lost(LossCause::Forced)]);
    assert_eq!(rig.changes(second), [HoldChange::Lost(LossCause::Forced)]);
    assert_eq!(rig.state(&again), HoldState::Lost(LossCause::Forced));
}

#[test]
fn an_entry_that_is_heard_of_late_is_settled_by_a_read() {
    let mut rig = Rig::new();
    let (session, first, _) = rig.holding();
    let second = rig.acquire_as(session, "k", Wait::Unlimited, None, REENTRANT);
    let acquire = rig.take_acquire();
    // Something else was granted meanwhile, and the first entry has been given back.
    let other = rig.acquire(session, "k2", Wait::Unlimited);
    let another = rig.take_acquire();
    rig.grant(&another, 6, 1);
    rig.acquired(other).expect("granted");
    rig.core.release(rig.now, first, false).expect("held");
    rig.turn();
    let release = rig.take_release();
    rig.outcome(&release, changed(5));
    rig.outcome(&acquire, entered(5, 1));
    assert!(rig.try_acquired(second).is_none(), "its version is not the known one");
    let read = rig.take_holds();
    rig.holds(&read, 2, &[(5, false), (6, false)]);
    let renew = rig.take_renew();
    rig.renewed(&renew, 2);
    let held = rig.acquired(second).expect("current");
    assert_eq!(rig.state(&held), HoldState::Held);
}

#[test]
fn an_entry_at_the_version_of_the_last_read_is_current_at_once() {
    let mut rig = Rig::new();
    let (session, _, _) = rig.holding();
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    rig.renewed(&renew, 2);
    let read = rig.take_holds();
    rig.holds(&read, 2, &[(5, false)]);
    let second = rig.acquire_as(session, "k", Wait::Unlimited, None, REENTRANT);
    let acquire = rig.take_acquire();
    rig.outcome(&acquire, entered(5, 2));
    rig.acquired(second).expect("it held the key at that very version");
}

#[test]
fn a_downgrade_keeps_the_token_and_counts_from_the_call() {
    let mut rig = Rig::new();
    let (_, op, held) = rig.holding();
    let call = rig.change(op, Wish::Mode(Mode::SHARED));
    assert_eq!(held.cell.mode(), Mode::SHARED, "others may be let in before the answer");
    let sent = rig.take_change();
    let Command::Convert { token, mode, .. } = sent.command() else { panic!("{sent:?}") };
    assert_eq!((*token, *mode), (Token(5), Mode::SHARED));
    rig.outcome(&sent, changed(5));
    rig.changed(call).expect("changed");
    assert_eq!((held.cell.token(), held.cell.mode()), (Token(5), Mode::SHARED));
    assert_eq!(sent.caller().number, Number(4), "one of its own");
}

#[test]
fn a_refused_change_leaves_the_hold_as_it_was() {
    let mut rig = Rig::new();
    let (_, op, held) = rig.holding();
    let call = rig.change(op, Wish::Mode(Mode::SHARED));
    let sent = rig.take_change();
    rig.refuse(&sent, ErrorCode::HOLD_REENTERED);
    assert_eq!(rig.changed(call).expect_err("refused").code, ErrorCode::HOLD_REENTERED);
    assert_eq!(held.cell.mode(), Mode::EXCLUSIVE);
    assert_eq!(rig.state(&held), HoldState::Held);
}

#[test]
fn an_upgrade_is_told_with_its_new_token() {
    let (mut rig, _, op, held) = reading();
    let call = rig.change(op, Wish::Mode(Mode::EXCLUSIVE));
    let sent = rig.take_change();
    rig.grant(&sent, 9, 1);
    rig.changed(call).expect("upgraded");
    assert_eq!((held.cell.token(), held.cell.mode()), (Token(9), Mode::EXCLUSIVE));
    assert_eq!(held.cell.floor(), Token(9));
    rig.core.release(rig.now, op, true).expect("held");
    rig.turn();
    let release = rig.take_release();
    assert!(matches!(release.command(), Command::Release { token: Token(9), .. }));
    assert_eq!(release.caller().number, Number(3), "still that of the acquire");
}

#[test]
fn an_upgrade_beside_others_fails_at_once() {
    let (mut rig, _, op, held) = reading();
    let call = rig.change(op, Wish::Mode(Mode::EXCLUSIVE));
    let sent = rig.take_change();
    rig.refuse(&sent, ErrorCode::UPGRADE_CONFLICT);
    assert_eq!(rig.changed(call).expect_err("others").code, ErrorCode::UPGRADE_CONFLICT);
    assert_eq!((held.cell.token(), held.cell.mode()), (Token(5), Mode::SHARED));
}

#[test]
fn an_upgrade_that_was_retried_is_told_after_a_renewal_at_its_version() {
    let (mut rig, _, op, held) = reading();
    let call = rig.change(op, Wish::Mode(Mode::EXCLUSIVE));
    let first = rig.take_change();
    rig.error(&first, ErrorCode::OUTCOME_UNKNOWN, 0);
    rig.advance(ms(100));
    let again = rig.take_change();
    assert_eq!(again.caller().number, first.caller().number);
    rig.grant(&again, 9, 1);
    assert!(rig.try_changed(call).is_none(), "it may have been a while ago");
    assert_eq!((held.cell.token(), held.cell.mode()), (Token(5), Mode::SHARED));
    let renew = rig.take_renew();
    rig.renewed(&renew, 2);
    rig.changed(call).expect("current");
    assert_eq!((held.cell.token(), held.cell.mode()), (Token(9), Mode::EXCLUSIVE));
}

#[test]
fn a_read_that_shows_an_upgrade_before_its_answer_is_no_loss() {
    let (mut rig, _, op, held) = reading();
    while rig.renewals() == 0 {
        rig.advance(ms(50));
    }
    let renew = rig.take_renew();
    let call = rig.change(op, Wish::Mode(Mode::EXCLUSIVE));
    let sent = rig.take_change();
    rig.renewed(&renew, 2);
    let read = rig.take_holds();
    rig.holds(&read, 2, &[(9, false)]);
    assert_eq!(rig.changes(op), []);
    assert_eq!(rig.state(&held), HoldState::Held);
    rig.grant(&sent, 9, 1);
    assert!(rig.try_changed(call).is_none(), "a renewal shows first that it is current");
    let renew = rig.take_renew();
    rig.renewed(&renew, 2);
    rig.changed(call).expect("current");
    assert_eq!(held.cell.token(), Token(9));
}

#[test]
fn an_upgrade_that_is_forced_before_its_answer_comes_is_not_extended() {
    let (mut rig, _, op, held) = reading();
    rig.change(op, Wish::Mode(Mode::EXCLUSIVE));
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    let left = held.cell.remaining(rig.now);
    rig.renewed(&renew, 3);
    let read = rig.take_holds();
    rig.holds(&read, 3, &[(9, true)]);
    let renew =
        rig.find(|request| matches!(request, leasehold_protocol::request::Request::Renew(_)));
    if let Some(renew) = renew {
        rig.renewed(&renew, 3);
    }
    assert_eq!(held.cell.remaining(rig.now), left);
    assert_eq!(rig.changes(op), [HoldChange::AtRisk]);
}

#[test]
fn a_release_waits_for_a_change_on_its_way_and_names_the_token_in_force() {
    let (mut rig, _, op, _) = reading();
    let call = rig.change(op, Wish::Mode(Mode::EXCLUSIVE));
    let later = rig.change(op, Wish::Value(b"x".to_vec()));
    let sent = rig.take_change();
    rig.core.release(rig.now, op, true).expect("held");
    rig.turn();
    assert_eq!(rig.changed(later).expect_err("never sent").code, ErrorCode::LEASE_LOST);
    assert!(rig.sent.iter().all(|sent| !is_release(&sent.request)), "{:?}", rig.sent);
    rig.grant(&sent, 9, 1);
    rig.changed(call).expect("done before the release");
    let release = rig.take_release();
    assert!(matches!(release.command(), Command::Release { token: Token(9), .. }));
    rig.outcome(&release, Outcome::Released { token: Token(9), revision: Revision(1) });
}

#[test]
fn changes_go_out_one_after_the_other() {
    let mut rig = Rig::new();
    let (_, op, _) = rig.holding();
    let calls: Vec<_> = (0..3_u8).map(|n| rig.change(op, Wish::Value(vec![n]))).collect();
    for (n, call) in calls.into_iter().enumerate() {
        let sent = rig.take_change();
        let Command::SetValue { value, .. } = sent.command() else { panic!("{sent:?}") };
        assert_eq!(value, &[n as u8]);
        assert!(rig.sent.iter().all(|sent| !is_change(&sent.request)), "one at a time");
        rig.outcome(&sent, changed(5));
        rig.changed(call).expect("changed");
    }
}

#[test]
fn changes_of_one_hold_have_a_bound() {
    let mut rig = Rig::new();
    let (_, op, _) = rig.holding();
    for _ in 0..16 {
        rig.change(op, Wish::Value(Vec::new()));
    }
    let failure = rig.core.change(rig.now, op, Wish::Value(Vec::new())).expect_err("full");
    assert_eq!(failure.code, ErrorCode::BUSY);
}

#[test]
fn a_change_of_what_is_not_held_any_more_shows_the_loss() {
    let mut rig = Rig::new();
    let (_, op, _) = rig.holding();
    let call = rig.change(op, Wish::Value(b"x".to_vec()));
    let sent = rig.take_change();
    rig.refuse(&sent, ErrorCode::NOT_OWNER);
    assert_eq!(rig.changed(call).expect_err("gone").code, ErrorCode::NOT_OWNER);
    let read = rig.take_holds();
    rig.holds(&read, 2, &[]);
    assert_eq!(rig.lost(op), [LossCause::Forced]);
}

#[test]
fn a_change_ends_with_its_hold_and_its_number_does_not_hold_the_floor() {
    let mut rig = Rig::new();
    let (session, op, _) = rig.holding();
    let call = rig.change(op, Wish::Value(b"x".to_vec()));
    rig.take_change();
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    rig.renewed(&renew, 2);
    let read = rig.take_holds();
    rig.holds(&read, 2, &[]);
    assert_eq!(rig.changed(call).expect_err("lost").code, ErrorCode::LEASE_LOST);
    rig.acquire(session, "k2", Wait::Try);
    let acquire = rig.take_acquire();
    assert_eq!(acquire.caller().floor, Number(4), "all before it is settled");
    assert_eq!(acquire.caller().acks, [Number(4)], "and forgotten, whatever it was answered");
}

#[test]
fn a_cancel_that_came_too_late_to_matter_does_not_hold_the_floor() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire(session, "k", Wait::For(ms(100)));
    rig.opened();
    let acquire = rig.take_acquire();
    rig.advance(ms(100));
    rig.take_cancel();
    rig.outcome(&acquire, Outcome::TimedOut { revision: Revision(1) });
    assert_eq!(rig.acquired(op).expect_err("over").code, ErrorCode::TIMED_OUT);
    rig.acquire(session, "k2", Wait::Try);
    let acquire = rig.take_acquire();
    assert_eq!(acquire.caller().floor, Number(3), "its cancel's answer is not waited for");
}

/// A session that holds `a`, `b` and `c` at once, under tokens 5, 6 and 7.
fn holding_three() -> (Rig, super::super::OpId, super::super::Held) {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire_several(session, &["a", "b", "c"]);
    rig.opened();
    let acquire = rig.take_acquire();
    let Command::AcquireAll { wants, .. } = acquire.command() else { panic!("{acquire:?}") };
    assert_eq!(
        wants.iter().map(|want| want.key.as_slice()).collect::<Vec<_>>(),
        [b"a", b"b", b"c"]
    );
    rig.grant(&acquire, 5, 0);
    let held = rig.acquired(op).expect("granted");
    (rig, op, held)
}

#[test]
fn several_keys_are_one_hold_and_are_given_back_at_once() {
    let (mut rig, op, held) = holding_three();
    rig.advance(TTL / 2);
    assert_eq!(rig.changes(op), [HoldChange::AtRisk], "told once");
    assert!(matches!(rig.state(&held), HoldState::AtRisk { .. }));
    rig.core.release(rig.now, op, true).expect("held");
    rig.turn();
    let release = rig.take_release();
    let Command::ReleaseAll { acquire, .. } = release.command() else { panic!("{release:?}") };
    assert_eq!((*acquire, release.caller().number), (Number(1), Number(3)));
    // Each of its keys is on its way out.
    let session = rig.session();
    rig.acquire_several(session, &["c"]);
    rig.outcome(&release, Outcome::Released { token: Token(5), revision: Revision(1) });
}

#[test]
fn the_loss_of_one_key_of_several_is_the_loss_of_all_and_the_others_are_given_back() {
    let (mut rig, op, held) = holding_three();
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    rig.renewed(&renew, 2);
    let read = rig.take_holds();
    rig.holds(&read, 2, &[(5, false), (7, false)]);
    assert_eq!(rig.changes(op), [HoldChange::Lost(LossCause::Forced)]);
    assert_eq!(rig.state(&held), HoldState::Lost(LossCause::Forced));
    let release = rig.take_release();
    assert!(matches!(release.command(), Command::ReleaseAll { acquire: Number(1), .. }));
    rig.outcome(&release, Outcome::Released { token: Token(5), revision: Revision(1) });
    rig.advance(TTL);
    assert_eq!(rig.changes(op), []);
}

#[test]
fn a_key_of_several_whose_end_is_forced_caps_all() {
    let (mut rig, op, held) = holding_three();
    rig.advance(TTL / 3);
    let renew = rig.take_renew();
    let left = held.cell.remaining(rig.now);
    rig.renewed(&renew, 2);
    let read = rig.take_holds();
    rig.holds(&read, 2, &[(5, false), (6, true), (7, false)]);
    assert_eq!(held.cell.remaining(rig.now), left);
    assert_eq!(rig.changes(op), [HoldChange::AtRisk]);
    let end = rig.now.after(left);
    while rig.now < end {
        rig.advance(ms(100));
        if rig.renewals() > 0 {
            let renew = rig.take_renew();
            rig.renewed(&renew, 2);
        }
    }
    assert_eq!(rig.changes(op), [HoldChange::Lost(LossCause::Forced)]);
    rig.take_release();
}

#[test]
fn several_keys_heard_of_late_are_claimed_by_all_their_tokens() {
    let mut rig = Rig::new();
    let session = rig.session();
    let op = rig.acquire_several(session, &["a", "b"]);
    rig.opened();
    let acquire = rig.take_acquire();
    rig.queued(&acquire);
    while rig.renewals() == 0 {
        rig.advance(ms(50));
    }
    let renew = rig.take_renew();
    rig.renewed(&renew, 1);
    let read = rig.take_holds();
    rig.holds(&read, 1, &[(5, false), (6, false)]);
    rig.grant(&acquire, 5, 0);
    let renew = rig.take_renew();
    rig.renewed(&renew, 1);
    rig.acquired(op).expect("current");
    assert!(
        rig.find(|request| matches!(request, leasehold_protocol::request::Request::Holds(_)))
            .is_none(),
        "no second read"
    );
}

#[test]
fn keys_of_several_shards_and_keys_named_twice_are_refused_before_anything_is_sent() {
    let mut rig = Rig::with_shards(8);
    let session = rig.session();
    let refused = |rig: &mut Rig, keys: &[&str]| {
        let (key, value) = (keys[0].as_bytes().to_vec(), Vec::new());
        let more = keys[1..].iter().map(|key| further(key)).collect();
        let (wait, own, options) = (Wait::Try, None, Options::PLAIN);
        let request =
            super::super::AcquireRequest { session, key, more, value, wait, own, options };
        rig.core.acquire(rig.now, request).expect_err("refused").code
    };
    assert_eq!(refused(&mut rig, &["a", "b", "c", "d"]), ErrorCode::WRONG_SHARD);
    assert_eq!(refused(&mut rig, &["{t}a", "{t}b", "{t}a"]), ErrorCode::DUPLICATE_KEY);
    assert!(rig.sent.is_empty());
    rig.acquire_several(session, &["{t}a", "{t}b"]);
    rig.opened();
    rig.take_acquire();
}

fn is_release(request: &leasehold_protocol::request::Request) -> bool {
    use leasehold_protocol::request::{CommandRequest, Request};
    matches!(request, Request::Command(CommandRequest { command: Command::Release { .. }, .. }))
}

fn is_change(request: &leasehold_protocol::request::Request) -> bool {
    use leasehold_protocol::request::{CommandRequest, Request};
    matches!(
        request,
        Request::Command(CommandRequest {
            command: Command::Convert { .. } | Command::SetValue { .. },
            ..
        })
    )
}
