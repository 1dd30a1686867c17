//! Confirmed rounds: how a leader knows that it still led after a given moment (DESIGN §5).
//!
//! A renewal or a read takes the next number of its group's counter. A frame to a follower gets the
//! number that is current when it is **handed to the kernel**, and only the accepting reply to that
//! very frame credits (follower, number). A number is confirmed once a quorum of the present voters,
//! both sets of a joint configuration, is credited with it or with a later one. Nothing here reads
//! a clock, and nothing is taken from the engine's own bookkeeping of acknowledgements, which can
//! credit the answer to an earlier request to a later one.
//!
//! A confirmed number also means that whatever any node may have told a client before is applied here:
//! a follower learns what is committed from this leader's frames alone, so what they announced when
//! the number was taken is waited for.
//!
//! Invariants:
//! - Every voter of a confirming quorum had granted no other leader when it accepted, and it
//!   accepted after the number was taken. So any later leader is elected after that moment.
//! - The leader counts itself only while its log storage has been asked to save no vote but this
//!   leadership's: `asked` is called before the vote is handed to the WAL.
//! - Frames of a past leadership are neither sent nor credited.
//! - Without a single waiter nothing is sent; one extra round at most is under way, whatever the
//!   number of waiters.

use std::cell::{RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet};
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::task::{Poll, Waker};

use leasehold_protocol::ids::NodeId;
use leasehold_protocol::planted;

use super::signal::Signal;
use super::types::{LeaderId, Leadership, LogId, Vote};

/// The rounds of one group on this node, and with them what it knows of its own leadership.
pub(crate) struct Rounds {
    me: u64,
    inner: RefCell<Inner>,
    changed: Signal,
    progress: Signal,
}

#[derive(Default)]
struct Inner {
    /// Whose vote the log storage was last asked to save.
    asked: Option<LeaderId>,
    /// That vote is this node's own and was asked for in this process's life, not merely recovered.
    own: bool,
    /// The first entry of that leadership is applied.
    established: bool,
    /// The WAL failed: this node leads no more in this process's life.
    failed: bool,
    voters: Vec<BTreeSet<u64>>,
    /// The last number taken.
    last: u64,
    /// The highest index that a frame of this leadership said is committed.
    announced: u64,
    /// The last index applied here.
    applied: u64,
    targets: BTreeMap<u64, Target>,
    waiters: BTreeMap<u64, Waker>,
    driver: Option<Waker>,
}

/// One follower under the present leadership.
#[derive(Clone, Copy, Default)]
struct Target {
    /// Frames that wait for their hand-over.
    queued: u32,
    /// The highest number handed to the kernel.
    sent: u64,
    /// The highest number accepted.
    credited: u64,
}

/// This leadership ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended;

impl Rounds {
    /// `recovered` is the vote that the WAL kept.
    pub(crate) fn new(me: NodeId, recovered: Option<&Vote>) -> Rc<Self> {
        let asked = recovered.map(|vote| vote.leader_id);
        let inner = RefCell::new(Inner { asked, ..Inner::default() });
        let (changed, progress) = (Signal::default(), Signal::default());
        Rc::new(Self { me: me.0, inner, changed, progress })
    }

    /// The log storage is asked to save `vote`. Must come before the WAL hears of it.
    pub(crate) fn asked(&self, vote: &Vote) {
        let mut inner = self.inner.borrow_mut();
        if inner.own && inner.asked == Some(vote.leader_id) {
            return;
        }
        // Planted (G1, G7): a leader counts itself, though it voted for another, until the engine's
        // metrics say that it is none.
        if planted!("self-count-from-metrics") && vote.leader_id.node_id != self.me {
            return;
        }
        inner.asked = Some(vote.leader_id);
        inner.own = vote.leader_id.node_id == self.me && !inner.failed;
        self.end(inner);
    }

    /// The WAL failed: nothing is confirmed any more.
    pub(crate) fn fail(&self) {
        let mut inner = self.inner.borrow_mut();
        inner.failed = true;
        inner.own = false;
        self.end(inner);
    }

    fn end(&self, mut inner: RefMut<'_, Inner>) {
        inner.established = false;
        inner.announced = 0;
        inner.targets.clear();
        let waiters = std::mem::take(&mut inner.waiters);
        let woken = waiters.into_values().chain(inner.driver.take()).collect::<Vec<_>>();
        drop(inner);
        woken.into_iter().for_each(Waker::wake);
        self.progress.raise();
        self.changed.raise();
    }

    /// The entry at `applied` was applied, by itself or within a snapshot.
    pub(crate) fn applied(&self, applied: &LogId) {
        let mut inner = self.inner.borrow_mut();
        inner.applied = inner.applied.max(applied.index);
        let first = !inner.established && inner.leads_as(&applied.leader_id);
        inner.established |= first;
        drop(inner);
        self.progress.raise();
        if first {
            self.changed.raise();
        }
    }

    /// The effective membership, committed or not, has these sets of voters.
    pub(crate) fn set_voters(&self, voters: Vec<BTreeSet<u64>>) {
        let mut inner = self.inner.borrow_mut();
        inner.voters = voters;
        let woken = inner.served(self.me);
        drop(inner);
        woken.into_iter().for_each(Waker::wake);
    }

    /// Raised when `leadership` changes.
    pub(crate) fn changed(&self) -> &Signal {
        &self.changed
    }

    /// This node's leadership, if it applied that leadership's first entry.
    pub(crate) fn leadership(&self) -> Option<Leadership> {
        let inner = self.inner.borrow();
        inner.asked.filter(|_| inner.established).map(|leader| Leadership::of(&leader))
    }

    /// Takes the next number and waits until it is confirmed, and until what was announced as
    /// committed by then is applied. Its caller acts before it awaits anything else.
    pub(crate) async fn confirm(&self, leadership: Leadership) -> Result<(), Ended> {
        let (number, announced) = self.take(leadership)?;
        self.confirmed(leadership, number).await?;
        // Planted (G7): what other nodes may have told already is not waited for.
        if planted!("read-from-a-lagging-apply") {
            return Ok(());
        }
        loop {
            let version = self.progress.version();
            if let Some(done) = self.caught_up(leadership, announced) {
                return done;
            }
            self.progress.since(version).await;
        }
    }

    fn caught_up(&self, leadership: Leadership, announced: u64) -> Option<Result<(), Ended>> {
        let inner = self.inner.borrow();
        if !inner.is_leadership(leadership) {
            return Some(Err(Ended));
        }
        (inner.applied >= announced).then_some(Ok(()))
    }

    async fn confirmed(&self, leadership: Leadership, number: u64) -> Result<(), Ended> {
        let guard = Waiting { rounds: self, number };
        poll_fn(|cx| {
            let mut inner = self.inner.borrow_mut();
            if !inner.is_leadership(leadership) {
                return Poll::Ready(Err(Ended));
            }
            if inner.confirmed(self.me) >= guard.number {
                return Poll::Ready(Ok(()));
            }
            inner.waiters.insert(guard.number, cx.waker().clone());
            if let Some(driver) = inner.driver.take() {
                driver.wake();
            }
            Poll::Pending
        })
        .await
    }

    fn take(&self, leadership: Leadership) -> Result<(u64, u64), Ended> {
        let mut inner = self.inner.borrow_mut();
        if !inner.is_leadership(leadership) {
            return Err(Ended);
        }
        inner.last += 1;
        Ok((inner.last, inner.announced))
    }

    /// Ready with the last number taken when somebody waits whom nothing queued or under way will
    /// serve. For one task: the one that starts extra rounds.
    pub(crate) fn wanted(&self) -> impl Future<Output = u64> + '_ {
        poll_fn(|cx| {
            let mut inner = self.inner.borrow_mut();
            if inner.wants_round(self.me) {
                return Poll::Ready(inner.last);
            }
            inner.driver = Some(cx.waker().clone());
            Poll::Pending
        })
    }

    /// Ready once `number` is confirmed or its leadership is over.
    pub(crate) fn settled(&self, number: u64) -> impl Future<Output = ()> + '_ {
        poll_fn(move |cx| {
            let mut inner = self.inner.borrow_mut();
            if inner.waiters.is_empty() || inner.confirmed(self.me) >= number {
                return Poll::Ready(());
            }
            inner.driver = Some(cx.waker().clone());
            Poll::Pending
        })
    }

    /// Registers a frame to `target` that carries `vote` and says that everything up to `committed`
    /// is, before it is queued.
    pub(crate) fn stamp(
        self: &Rc<Self>,
        target: u64,
        vote: &Vote,
        committed: Option<&LogId>,
    ) -> Rc<Stamp> {
        let leader = vote.leader_id;
        let mut inner = self.inner.borrow_mut();
        if inner.leads_as(&leader) {
            inner.announced = inner.announced.max(committed.map_or(0, |at| at.index));
            inner.targets.entry(target).or_default().queued += 1;
        }
        let state = RefCell::new(Carried::Queued);
        // Planted (G1): the number is taken when the frame is queued, not when it leaves.
        if planted!("stamp-at-enqueue") {
            state.replace(Carried::Sent(inner.last));
        }
        Rc::new(Stamp { rounds: self.clone(), target, leader, state })
    }
}

impl Inner {
    fn leads_as(&self, leader: &LeaderId) -> bool {
        self.own && self.asked.as_ref() == Some(leader)
    }

    fn is_leadership(&self, leadership: Leadership) -> bool {
        self.established && self.leads_as(&leadership.leader_id())
    }

    /// The highest number that a quorum of each set of voters is credited with.
    fn confirmed(&self, me: u64) -> u64 {
        self.quorum(me, |target| target.credited)
    }

    fn quorum(&self, me: u64, credit: impl Fn(&Target) -> u64) -> u64 {
        let of = |voter: &u64| match self.targets.get(voter) {
            _ if *voter == me && self.own => self.last,
            Some(target) => credit(target),
            None => 0,
        };
        let majority = |set: &BTreeSet<u64>| {
            let mut credits: Vec<u64> = set.iter().map(of).collect();
            credits.sort_unstable_by(|a, b| b.cmp(a));
            credits.get(set.len() / 2).copied().unwrap_or(0)
        };
        self.voters.iter().map(majority).min().unwrap_or(0)
    }

    fn wants_round(&self, me: u64) -> bool {
        let Some((&newest, _)) = self.waiters.last_key_value() else { return false };
        // Planted (G8): whoever waits, waits for the next heartbeat.
        if planted!("rounds-wait-for-heartbeats") {
            return false;
        }
        let last = self.last;
        self.quorum(me, |target| if target.queued > 0 { last } else { target.sent }) < newest
    }

    /// Takes out the waiters that are served now, and the driver if it may be.
    fn served(&mut self, me: u64) -> Vec<Waker> {
        let confirmed = self.confirmed(me);
        let later = self.waiters.split_off(&(confirmed + 1));
        let served = std::mem::replace(&mut self.waiters, later);
        served.into_values().chain(self.driver.take()).collect()
    }
}

/// Forgets a waiter whose future ended or was dropped.
struct Waiting<'a> {
    rounds: &'a Rounds,
    number: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.rounds.inner.borrow_mut().waiters.remove(&self.number);
    }
}

/// What one frame to one follower is worth.
pub(crate) struct Stamp {
    rounds: Rc<Rounds>,
    target: u64,
    leader: LeaderId,
    state: RefCell<Carried>,
}

#[derive(Clone, Copy)]
enum Carried {
    Queued,
    Sent(u64),
    Spent,
}

impl Stamp {
    /// Called right before the frame's bytes are handed to the kernel. False: the leadership that
    /// queued it is over and the frame must not be sent.
    pub(crate) fn hand_over(&self) -> bool {
        let mut inner = self.rounds.inner.borrow_mut();
        if !inner.leads_as(&self.leader) {
            self.state.replace(Carried::Spent);
            return false;
        }
        let last = inner.last;
        let target = inner.targets.entry(self.target).or_default();
        if planted!("stamp-at-enqueue") {
            target.queued = target.queued.saturating_sub(1);
            target.sent = target.sent.max(last);
            return true;
        }
        assert!(matches!(*self.state.borrow(), Carried::Queued), "a frame is handed over once");
        target.queued = target.queued.saturating_sub(1);
        target.sent = target.sent.max(last);
        self.state.replace(Carried::Sent(last));
        true
    }

    /// The follower accepted this very frame.
    pub(crate) fn accepted(&self) {
        let Carried::Sent(mut number) = self.state.replace(Carried::Spent) else { return };
        let mut inner = self.rounds.inner.borrow_mut();
        // Planted (G1, G7): an answer confirms whatever came before the answer did.
        if planted!("credit-at-the-answer") {
            number = inner.last;
        }
        if !inner.leads_as(&self.leader) {
            return;
        }
        let target = inner.targets.entry(self.target).or_default();
        target.credited = target.credited.max(number);
        let woken = inner.served(self.rounds.me);
        drop(inner);
        woken.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Stamp {
    fn drop(&mut self) {
        if !matches!(*self.state.borrow(), Carried::Queued) {
            return;
        }
        let mut inner = self.rounds.inner.borrow_mut();
        if !inner.leads_as(&self.leader) {
            return;
        }
        if let Some(target) = inner.targets.get_mut(&self.target) {
            target.queued = target.queued.saturating_sub(1);
        }
        let driver = inner.driver.take();
        drop(inner);
        driver.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests;
