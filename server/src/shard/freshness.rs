//! How old is what this node has applied: for watchers, and for reads that take it as it is.
//!
//! Every node tells what it has applied; only the leader knows what there is. So while anybody
//! watches or has read it lately, this node asks the leader now and then, linearizably, for the
//! shard's revision, and compares. Once it has applied that, it has everything that was
//! acknowledged before it *asked*: that is the age it tells, and never less. If it has not been up
//! to date for `BEHIND_MAX` by that, its watchers are told `no_quorum`.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::Revision;
use leasehold_protocol::planted;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::{Freshness as Wanted, ListRequest, Request};
use openraft::AsyncRuntime;

use super::{Origin, Shard};
use crate::env::{Clock, Env, MonoTime};
use crate::rt::channels::Notify;

/// How often the leader is asked while anybody wants to know.
pub(super) const ASK_EVERY: Duration = Duration::from_millis(500);
/// How long one question may take.
const ASK_TIMEOUT_MS: u32 = 1_000;
/// For how long this node may not know to be up to date before its watchers are told.
const BEHIND_MAX: Duration = Duration::from_secs(3);
/// For how long after a stale read the age is kept known for the next one.
const READ_LATELY: Duration = Duration::from_secs(10);
/// How long a stale read waits for its age, if that was not kept known.
const AGE_WAIT: Duration = Duration::from_millis(50);

/// What a shard knows of it.
#[derive(Default)]
pub(super) struct Freshness {
    /// Everything that was acknowledged before is applied here.
    known: Cell<Option<MonoTime>>,
    /// The last stale read.
    read: Cell<Option<MonoTime>>,
    /// `known` has changed.
    told: Notify,
}

impl Freshness {
    fn is_known(&self, at: MonoTime) {
        self.known.set(self.known.get().max(Some(at)));
        self.told.notify_all();
    }
}

impl<E: Env> Shard<E> {
    /// Somebody reads what is here. True if its age is kept known already.
    pub(super) fn begin_stale_read(&self) -> bool {
        let lately = self.reads_stale();
        self.freshness.read.set(Some(self.clock.now()));
        if !lately {
            self.watched.notify_one();
        }
        lately || !self.hub.borrow().is_quiet()
    }

    /// Somebody has read what is here not long ago.
    fn reads_stale(&self) -> bool {
        let read = self.freshness.read.get();
        read.is_some_and(|at| self.clock.now().since(at) <= READ_LATELY)
    }

    /// Waits until the age is found out anew, but not for long.
    pub(super) async fn await_age(&self) {
        let read = self.freshness.read.get();
        let found = async {
            while self.freshness.known.get() < read {
                self.freshness.told.notified().await;
            }
        };
        let _found_or_not = E::Rt::timeout(AGE_WAIT, found).await;
    }

    /// How old the applied state is at most, in milliseconds; `None` if this is not known.
    pub(super) fn age_ms(&self) -> Option<u32> {
        let age = self.clock.now().since(self.freshness.known.get()?);
        // Planted (G7): what is read here and now is told to be of now.
        let age = if planted!("stale-age-of-now") { Duration::ZERO } else { age };
        // Rounded up: it is an upper bound.
        Some(u32::try_from(age.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX))
    }

    /// Finds out whether this node is up to date, as long as the shard lives. One task.
    pub async fn run_freshness(self: Rc<Self>) {
        loop {
            self.watched.notified().await;
            self.follow_freshness().await;
        }
    }

    /// Until nobody watches, nor reads a state, nor has read what is here for a while.
    async fn follow_freshness(&self) {
        let (mut tick, mut fresh_at) = (0, self.clock.now());
        // A revision that was the present one, and when it was asked for.
        let mut awaited: Option<(Revision, MonoTime)> = None;
        while !self.hub.borrow().is_quiet() || self.reads_stale() {
            let asked = self.clock.now();
            if let Ok(present) = self.present_revision().await
                && awaited.is_none()
            {
                awaited = Some((present, asked));
            }
            let mut known = false;
            if let Some((present, asked)) = awaited
                && self.hub.borrow().head() >= present
            {
                // Where it is now counts only if it got there soon.
                known = self.clock.now().since(asked) <= BEHIND_MAX;
                (fresh_at, awaited) = (fresh_at.max(asked), None);
                // Planted (G7): the age counts from the leader's answer, not from the question.
                let of_answer = planted!("stale-age-from-the-answer");
                self.freshness.is_known(if of_answer { self.clock.now() } else { asked });
            }
            if known {
                self.hub.borrow_mut().set_quorum(true);
            // Planted (G6): watchers are not told that what they hear may be late.
            } else if self.clock.now().since(fresh_at) > BEHIND_MAX && !planted!("no-quorum-untold")
            {
                self.hub.borrow_mut().set_quorum(false);
            }
            tick += 1;
            self.hub.borrow_mut().tick(tick, self.clock.now());
            self.to_tell.notify_one();
            E::Rt::sleep(ASK_EVERY).await;
        }
    }

    /// The shard's revision, linearizably.
    pub(super) async fn present_revision(&self) -> Result<Revision, ErrorCode> {
        if let Some(leadership) = self.leads() {
            self.confirmed(leadership, ASK_TIMEOUT_MS).await?;
            return Ok(self.state.borrow().revision());
        }
        let leader = self.elsewhere(Origin::Client).ok_or(ErrorCode::NO_QUORUM)?;
        // No key begins with this byte: an empty page, but at the present revision.
        let request = Request::List(ListRequest {
            shard: self.id,
            prefix: vec![0xff],
            after: Vec::new(),
            limit: 1,
            freshness: Wanted::Linearizable,
            timeout_ms: ASK_TIMEOUT_MS,
        });
        match self.ask(leader, &request, Self::timeout(ASK_TIMEOUT_MS)).await? {
            Reply::Keys(page) => Ok(page.revision),
            Reply::Error(error) => Err(error.code),
            _ => Err(ErrorCode::INTERNAL),
        }
    }
}
