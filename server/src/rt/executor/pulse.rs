//! The pulse of a core: a task that ticks.
//!
//! Why it must: glommio 0.9 may park with runnable tasks. If its preemption timer (100 ms) expires
//! between being armed and the first look at the run queue, which takes a thread that is not
//! scheduled for that long, `run_task_queues` reports that nothing ran, and the core sleeps until
//! some other event. The tick is such an event. It bounds a wrong park to one rest of the pulse:
//! `REST_BUSY` on a core that works, `REST_IDLE` on one that did not.
//!
//! The pulse alone is not enough: if its own timer has just fired, it waits in the very queue that
//! is forgotten, and nothing is left to wake the core. So it also leaves its waker with the
//! watchdog, which rings it from outside when the ticks stop.
//!
//! A core at rest is ticked rarely, so that an idle server costs next to nothing.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use openraft_rt::AsyncRuntime;

use super::super::clock::OsClock;
use super::super::glommio::GlommioRt;
use crate::env::Clock;

/// Between ticks of a core that works.
pub(super) const REST_BUSY: Duration = Duration::from_millis(4);

/// Between ticks of a core that has nothing to do.
pub(super) const REST_IDLE: Duration = Duration::from_millis(100);

/// A core that ran tasks for more than one part in this many of the last rest is at work.
const BUSY_SHARE: u32 = 20;

/// Set as beats when a core has ended, so that the watchdog lets it rest.
const RETIRED: u64 = u64::MAX;

/// What a core shows of itself to other threads.
#[derive(Debug, Default)]
pub struct CoreGauges {
    beats: AtomicU64,
    longest_gap_ns: AtomicU64,
    busy_ns: AtomicU64,
    tasks: AtomicU64,
    kicks: AtomicU64,
    /// The pulse's, while it lives. Locked by its core at its beginning and end only.
    waker: Mutex<Option<Waker>>,
}

impl CoreGauges {
    /// Ticks so far.
    pub fn beats(&self) -> u64 {
        self.beats.load(Ordering::Relaxed)
    }

    /// The longest time since the last call in which the core looked at neither timers nor
    /// sockets: its longest task, roughly, or its wait for a CPU. What is shorter than the pulse's
    /// rest (100 ms on an idle core) can go unseen.
    pub fn take_longest_gap(&self) -> Duration {
        Duration::from_nanos(self.longest_gap_ns.swap(0, Ordering::Relaxed))
    }

    /// Time spent in tasks so far.
    pub fn busy(&self) -> Duration {
        Duration::from_nanos(self.busy_ns.load(Ordering::Relaxed))
    }

    /// Turns given to tasks so far.
    pub fn tasks(&self) -> u64 {
        self.tasks.load(Ordering::Relaxed)
    }

    /// How often the watchdog had to wake a core whose ticks had stopped.
    pub fn kicks(&self) -> u64 {
        self.kicks.load(Ordering::Relaxed)
    }

    /// Wakes the core from another thread, whatever it waits for.
    pub(super) fn kick(&self) {
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(waker) = &*waker {
            waker.wake_by_ref();
            self.kicks.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn set_waker(&self, waker: Option<Waker>) {
        *self.waker.lock().unwrap_or_else(PoisonError::into_inner) = waker;
    }

    pub(super) fn is_retired(&self) -> bool {
        self.beats() == RETIRED
    }

    fn beat(&self, late: Duration, busy: Duration, tasks: u64) {
        self.beats.fetch_add(1, Ordering::Relaxed);
        self.longest_gap_ns.fetch_max(late.as_nanos() as u64, Ordering::Relaxed);
        self.busy_ns.fetch_add(busy.as_nanos() as u64, Ordering::Relaxed);
        self.tasks.fetch_add(tasks, Ordering::Relaxed);
    }
}

/// Marks the core as ended when dropped: from then on its silence means nothing, and its waker,
/// which must not outlive it, is gone.
pub(super) struct Retiring {
    gauges: Arc<CoreGauges>,
}

impl Retiring {
    pub(super) fn new(gauges: &Arc<CoreGauges>) -> Self {
        Self { gauges: Arc::clone(gauges) }
    }
}

impl Drop for Retiring {
    fn drop(&mut self) {
        self.gauges.set_waker(None);
        self.gauges.beats.store(RETIRED, Ordering::Relaxed);
    }
}

/// Ticks for ever.
pub(super) async fn run(gauges: Arc<CoreGauges>) {
    let waker = poll_fn(|cx| Poll::Ready(cx.waker().clone())).await;
    gauges.set_waker(Some(waker));
    let clock = OsClock;
    let mut rest = REST_BUSY;
    let mut last = clock.now();
    loop {
        GlommioRt::sleep(rest).await;
        let now = clock.now();
        let passed = now.since(last);
        last = now;
        // Reading glommio's counters resets them, so nobody else may.
        let stats = glommio::executor().executor_stats();
        let busy = stats.executor_runtime();
        gauges.beat(passed.saturating_sub(rest), busy, stats.tasks_executed());
        rest = next_rest(rest, passed, busy);
    }
}

/// Work shortens the rest at once; idleness lengthens it step by step.
fn next_rest(rest: Duration, passed: Duration, busy: Duration) -> Duration {
    if busy * BUSY_SHARE > passed { REST_BUSY } else { (rest * 2).min(REST_IDLE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_follow_the_load() {
        let ms = Duration::from_millis;
        let mut rest = REST_BUSY;
        let idle: Vec<Duration> = std::iter::repeat_with(|| {
            rest = next_rest(rest, rest, Duration::ZERO);
            rest
        })
        .take(6)
        .collect();
        assert_eq!(idle, [ms(8), ms(16), ms(32), ms(64), ms(100), ms(100)]);
        assert_eq!(next_rest(REST_IDLE, ms(100), ms(6)), REST_BUSY);
        assert_eq!(next_rest(REST_IDLE, ms(100), ms(5)), REST_IDLE);
    }

    #[test]
    fn the_longest_gap_is_taken_once() {
        let gauges = CoreGauges::default();
        gauges.beat(Duration::from_millis(7), Duration::from_millis(1), 3);
        gauges.beat(Duration::from_millis(2), Duration::from_millis(1), 4);
        assert_eq!(gauges.take_longest_gap(), Duration::from_millis(7));
        assert_eq!(gauges.take_longest_gap(), Duration::ZERO);
        assert_eq!((gauges.beats(), gauges.tasks()), (2, 7));
        assert_eq!(gauges.busy(), Duration::from_millis(2));
    }
}
