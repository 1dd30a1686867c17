//! Virtual time: sleeping tasks, and the clock that a simulated machine sees.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::super::instant::TimeSource;
use super::SimInstant;
use super::domain::DomainId;
use super::world::SimWorld;
use crate::env::{Clock, MonoTime};

/// The wall clock's reading at true time 0: 2025-01-01.
const WALL_START_MS: u64 = 1_735_689_600_000;

/// Due time and order of registration.
pub(super) type TimerKey = (u64, u64);

/// All waiting sleeps.
#[derive(Debug, Default)]
pub(super) struct Timers {
    waiting: RefCell<BTreeMap<TimerKey, Waker>>,
}

impl Timers {
    pub(super) fn set(&self, key: TimerKey, waker: Waker) {
        let old = self.waiting.borrow_mut().insert(key, waker);
        drop(old);
    }

    pub(super) fn remove(&self, key: TimerKey) {
        let old = self.waiting.borrow_mut().remove(&key);
        drop(old);
    }

    /// When the first is due.
    pub(super) fn first_due_ns(&self) -> Option<u64> {
        self.waiting.borrow().first_key_value().map(|((due_ns, _), _)| *due_ns)
    }

    /// Wakes all that are due at `now_ns`.
    pub(super) fn fire(&self, now_ns: u64) {
        while self.first_due_ns().is_some_and(|due_ns| due_ns <= now_ns) {
            let first = self.waiting.borrow_mut().pop_first();
            let (_, waker) = first.expect("there is a first");
            waker.wake();
        }
    }
}

/// A sleep on the clock of the domain that began it.
#[derive(Debug)]
pub struct Sleep {
    world: SimWorld,
    key: TimerKey,
    /// Whose clock it is, and what that must show at least. None is true time.
    local: Option<(DomainId, u64)>,
}

impl Sleep {
    pub(super) fn lasting(duration: Duration) -> Self {
        let world = SimWorld::current();
        let (local_ns, key) = world.new_timer_after(duration);
        let local = Some((world.current_domain(), local_ns));
        Self { world, key, local }
    }

    /// A sleep that no skew of the domain's clock changes, for what is outside of machines.
    pub(in super::super) fn until_true(true_ns: u64) -> Self {
        let world = SimWorld::current();
        let key = world.new_timer_at(true_ns);
        Self { world, key, local: None }
    }

    pub(super) fn until(deadline: SimInstant) -> Self {
        Self::lasting(<SimInstant as openraft_rt::Instant>::now().until(deadline))
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.world.now_ns() >= self.key.0 {
            // The clock may have stood still or have become slow.
            let again = self.local.and_then(|(domain, ns)| self.world.timer_again(domain, ns));
            let Some(key) = again else { return Poll::Ready(()) };
            self.key = key;
        }
        self.world.timers().set(self.key, cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.world.timers().remove(self.key);
    }
}

/// The clock of the domain whose task asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct SimClock;

impl TimeSource for SimClock {
    fn now_ns() -> u64 {
        SimWorld::current().local_ns()
    }
}

impl Clock for SimClock {
    fn now(&self) -> MonoTime {
        MonoTime(Self::now_ns())
    }

    fn wall_ms(&self) -> u64 {
        let world = SimWorld::current();
        let shown = WALL_START_MS + world.now_ns() / 1_000_000;
        shown.saturating_add_signed(world.wall_offset_ms())
    }
}
