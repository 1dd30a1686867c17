//! Which answer confirms what: the rules of DESIGN §5 one by one.

use std::cell::Cell;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;

use super::*;

const ME: Leadership = Leadership { term: 3, node: NodeId(1) };

fn vote(term: u64, node: u64, committed: bool) -> Vote {
    Vote { leader_id: LeaderId { term, node_id: node }, committed }
}

fn at(leadership: Leadership, index: u64) -> LogId {
    LogId::new(leadership.leader_id(), index)
}

fn voters(sets: &[&[u64]]) -> Vec<BTreeSet<u64>> {
    sets.iter().map(|set| set.iter().copied().collect()).collect()
}

/// Node 1 leads in term 3 with these sets of voters.
fn leading(sets: &[&[u64]]) -> Rc<Rounds> {
    let rounds = Rounds::new(NodeId(1), None);
    rounds.set_voters(voters(sets));
    rounds.asked(&vote(3, 1, false));
    rounds.asked(&vote(3, 1, true));
    rounds.applied(&at(ME, 1));
    assert_eq!(rounds.leadership(), Some(ME));
    rounds
}

/// A confirmation under way.
struct Confirm(LocalBoxFuture<'static, Result<(), Ended>>);

impl Confirm {
    fn new(rounds: &Rc<Rounds>) -> Self {
        let rounds = rounds.clone();
        let mut this = Self(async move { rounds.confirm(ME).await }.boxed_local());
        assert_eq!(this.poll(), None, "nothing was accepted yet");
        this
    }

    fn poll(&mut self) -> Option<Result<(), Ended>> {
        (&mut self.0).now_or_never()
    }
}

fn frame(rounds: &Rc<Rounds>, target: u64) -> Rc<Stamp> {
    rounds.stamp(target, &vote(3, 1, true), None)
}

#[test]
fn an_answer_credits_what_was_current_when_its_frame_was_handed_over() {
    let rounds = leading(&[&[1, 2, 3]]);
    let early = frame(&rounds, 2);
    assert!(early.hand_over());
    let mut renewal = Confirm::new(&rounds);
    early.accepted();
    assert_eq!(renewal.poll(), None, "the frame went out before the renewal came");

    // Queued before it, but handed to the kernel after it.
    let queued = frame(&rounds, 3);
    let mut later = Confirm::new(&rounds);
    assert!(queued.hand_over());
    queued.accepted();
    assert_eq!(renewal.poll(), Some(Ok(())), "node 3 and the leader are a quorum");
    assert_eq!(later.poll(), Some(Ok(())), "one round serves everybody who waits");
}

#[test]
fn an_early_answer_never_serves_a_later_number() {
    let rounds = leading(&[&[1, 2, 3]]);
    let frames: Vec<_> = [2, 3, 2, 3].map(|target| frame(&rounds, target)).into();
    assert!(frames.iter().all(|frame| frame.hand_over()));
    let mut renewal = Confirm::new(&rounds);
    for frame in &frames {
        frame.accepted();
    }
    assert_eq!(renewal.poll(), None);
    assert!(rounds.wanted().now_or_never().is_some(), "a round of its own is needed");
}

#[test]
fn an_answer_counts_once_and_only_after_the_hand_over() {
    let rounds = leading(&[&[1, 2, 3]]);
    let never_sent = frame(&rounds, 2);
    let mut renewal = Confirm::new(&rounds);
    never_sent.accepted();
    assert_eq!(renewal.poll(), None);
    let sent = frame(&rounds, 2);
    assert!(sent.hand_over());
    sent.accepted();
    assert_eq!(renewal.poll(), Some(Ok(())));
    let mut next = Confirm::new(&rounds);
    sent.accepted();
    assert_eq!(next.poll(), None, "the same answer again");
}

#[test]
fn both_sets_of_a_joint_membership_must_agree() {
    let rounds = leading(&[&[1, 2, 3], &[3, 4, 5]]);
    let mut renewal = Confirm::new(&rounds);
    let accept = |target| {
        let frame = frame(&rounds, target);
        assert!(frame.hand_over());
        frame.accepted();
    };
    accept(2);
    assert_eq!(renewal.poll(), None, "the leader is in the old set only");
    accept(4);
    assert_eq!(renewal.poll(), None);
    accept(5);
    assert_eq!(renewal.poll(), Some(Ok(())));
    // A change of the membership counts at once.
    let mut next = Confirm::new(&rounds);
    accept(2);
    assert_eq!(next.poll(), None);
    rounds.set_voters(voters(&[&[1, 2, 3]]));
    assert_eq!(next.poll(), Some(Ok(())));
}

#[test]
fn a_leader_that_is_no_voter_does_not_count_itself() {
    let rounds = leading(&[&[2, 3]]);
    let mut renewal = Confirm::new(&rounds);
    for target in [2, 3] {
        assert_eq!(renewal.poll(), None);
        let frame = frame(&rounds, target);
        assert!(frame.hand_over());
        frame.accepted();
    }
    assert_eq!(renewal.poll(), Some(Ok(())));
}

#[test]
fn a_vote_for_another_ends_everything_at_once() {
    let rounds = leading(&[&[1, 2, 3]]);
    let mut renewal = Confirm::new(&rounds);
    let queued = frame(&rounds, 2);
    let sent = frame(&rounds, 3);
    assert!(sent.hand_over());
    rounds.asked(&vote(4, 2, false));
    assert_eq!(rounds.leadership(), None);
    assert_eq!(renewal.poll(), Some(Err(Ended)));
    assert!(!queued.hand_over(), "frames of a past leadership are not sent");
    sent.accepted();
    assert_eq!(rounds.confirm(ME).now_or_never(), Some(Err(Ended)));

    // The same node leads again: nothing of before counts.
    rounds.asked(&vote(5, 1, true));
    let again = Leadership { term: 5, ..ME };
    assert_eq!(rounds.confirm(again).now_or_never(), Some(Err(Ended)), "nothing is applied");
    rounds.applied(&at(again, 2));
    let mut confirm = rounds.confirm(again).boxed_local();
    assert_eq!((&mut confirm).now_or_never(), None);
    sent.accepted();
    assert!(!queued.hand_over());
    assert_eq!((&mut confirm).now_or_never(), None);
}

#[test]
fn a_recovered_vote_is_no_leadership() {
    let rounds = Rounds::new(NodeId(1), Some(&vote(3, 1, true)));
    rounds.set_voters(voters(&[&[1]]));
    rounds.applied(&at(ME, 1));
    assert_eq!(rounds.leadership(), None, "it was given in an earlier life");
    assert_eq!(rounds.confirm(ME).now_or_never(), Some(Err(Ended)));
}

#[test]
fn a_single_voter_confirms_itself() {
    let rounds = leading(&[&[1]]);
    assert_eq!(rounds.confirm(ME).now_or_never(), Some(Ok(())));
}

#[test]
fn a_round_is_wanted_only_when_nothing_under_way_will_serve() {
    let rounds = leading(&[&[1, 2, 3]]);
    assert!(rounds.wanted().now_or_never().is_none(), "nobody waits");
    let queued = frame(&rounds, 2);
    let renewal = Confirm::new(&rounds);
    assert!(rounds.wanted().now_or_never().is_none(), "the queued frame will serve");
    assert!(queued.hand_over());
    assert!(rounds.wanted().now_or_never().is_none(), "it is under way");
    let later = Confirm::new(&rounds);
    assert_eq!(rounds.wanted().now_or_never(), Some(2));
    // A queued frame that is dropped serves nobody.
    let dropped = frame(&rounds, 3);
    assert!(rounds.wanted().now_or_never().is_none());
    drop(dropped);
    assert_eq!(rounds.wanted().now_or_never(), Some(2));
    drop((renewal, later));
    assert!(rounds.wanted().now_or_never().is_none(), "whoever gave up does not count");
}

#[test]
fn a_change_of_leadership_is_announced_once() {
    let rounds = Rounds::new(NodeId(1), None);
    let seen = Cell::new(rounds.changed().version());
    let changed = || seen.replace(rounds.changed().version()) != rounds.changed().version();
    rounds.set_voters(voters(&[&[1]]));
    rounds.asked(&vote(3, 1, true));
    assert!(changed());
    rounds.applied(&at(ME, 1));
    assert!(changed());
    rounds.applied(&at(ME, 1));
    rounds.asked(&vote(3, 1, true));
    assert!(!changed());
}

#[test]
fn a_failed_wal_ends_leadership_for_good() {
    let rounds = leading(&[&[1, 2, 3]]);
    let mut renewal = Confirm::new(&rounds);
    let sent = frame(&rounds, 2);
    assert!(sent.hand_over());
    rounds.fail();
    assert_eq!(renewal.poll(), Some(Err(Ended)));
    sent.accepted();
    assert_eq!(rounds.leadership(), None);
    rounds.asked(&vote(9, 1, true));
    rounds.applied(&at(Leadership { term: 9, ..ME }, 2));
    assert_eq!(rounds.leadership(), None);
}

#[test]
fn what_a_follower_may_have_told_its_client_is_applied_first() {
    let rounds = leading(&[&[1, 2, 3]]);
    let mut before = Confirm::new(&rounds);
    let frame = rounds.stamp(2, &vote(3, 1, true), Some(&at(ME, 7)));
    let mut after = Confirm::new(&rounds);
    assert!(frame.hand_over());
    frame.accepted();
    assert_eq!(before.poll(), Some(Ok(())), "nothing was announced when it came");
    rounds.applied(&at(ME, 6));
    assert_eq!(after.poll(), None, "node 2 may have applied entry 7 and said so");
    rounds.applied(&at(ME, 7));
    assert_eq!(after.poll(), Some(Ok(())));

    // Nothing is left waiting when the leadership ends.
    let _announced = rounds.stamp(2, &vote(3, 1, true), Some(&at(ME, 9)));
    let mut last = Confirm::new(&rounds);
    let frame = rounds.stamp(3, &vote(3, 1, true), None);
    assert!(frame.hand_over());
    frame.accepted();
    assert_eq!(last.poll(), None);
    rounds.asked(&vote(4, 2, false));
    assert_eq!(last.poll(), Some(Err(Ended)));
}
