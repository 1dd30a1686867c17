//! The one timing wheel of a core, and each shard's entries in it.
//!
//! An entry is a wake-up, not a deadline: a renewal does not touch the wheel. When an entry comes
//! up, its shard looks at the present deadline and sets it again if that lies ahead. So a renewal
//! costs one table write, and each lease costs one wheel operation per TTL.
//!
//! Invariants: a shard has at most one entry per lease, wait and forced hold; what ends takes its
//! entry along; a shard that does not lead has none.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use leasehold_core::wheel::{Handle, Wheel};
use leasehold_protocol::ids::{LeaseId, Number, ShardId, Token};

use crate::env::MonoTime;

/// What a wheel entry is for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TimerKind {
    /// A lease's deadline.
    Lease(LeaseId),
    /// The wait limit of a queued acquire.
    Wait(LeaseId, Number),
    /// The last possible validity of a forced hold.
    Forced(Vec<u8>, Token),
    /// The end of a lock-delay.
    Delay(Vec<u8>, Token),
    /// The end of a restored cluster's waiting time.
    Quarantine,
}

/// One entry.
#[derive(Clone, Debug)]
pub struct Timer {
    /// The shard that set it.
    pub shard: ShardId,
    /// What for.
    pub kind: TimerKind,
}

/// A core's wheel; clones share it.
#[derive(Clone)]
pub struct CoreWheel(Rc<RefCell<Wheel<Timer>>>);

impl CoreWheel {
    /// An empty wheel that starts at `now`.
    pub fn new(now: MonoTime) -> Self {
        Self(Rc::new(RefCell::new(Wheel::new(now.0))))
    }

    /// Moves all entries that are due at `now` to `due`; their shards hear of them by `fired`.
    pub fn advance(&self, now: MonoTime, due: &mut Vec<Timer>) {
        self.0.borrow_mut().advance(now.0, due);
    }

    /// Entries waiting.
    pub fn len(&self) -> usize {
        self.0.borrow().len()
    }

    /// No entry waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One shard's entries.
pub struct ShardTimers {
    shard: ShardId,
    wheel: CoreWheel,
    handles: BTreeMap<TimerKind, (Handle, MonoTime)>,
}

impl ShardTimers {
    /// None yet.
    pub fn new(shard: ShardId, wheel: CoreWheel) -> Self {
        Self { shard, wheel, handles: BTreeMap::new() }
    }

    /// Wakes the shard at `at`, or soon after, instead of when it was to be woken for this before.
    pub fn set(&mut self, at: MonoTime, kind: TimerKind) {
        let timer = Timer { shard: self.shard, kind: kind.clone() };
        let mut wheel = self.wheel.0.borrow_mut();
        let handle = wheel.insert(at.0, timer);
        if let Some((former, _)) = self.handles.insert(kind, (handle, at)) {
            wheel.cancel(former);
        }
    }

    /// When the shard is to be woken for this, if it is.
    pub fn when(&self, kind: &TimerKind) -> Option<MonoTime> {
        self.handles.get(kind).map(|(_, at)| *at)
    }

    /// The entry came up.
    pub fn fired(&mut self, kind: &TimerKind) {
        self.handles.remove(kind);
    }

    /// What the entry was for is over.
    pub fn cancel(&mut self, kind: &TimerKind) {
        if let Some((handle, _)) = self.handles.remove(kind) {
            self.wheel.0.borrow_mut().cancel(handle);
        }
    }

    /// The leadership is over. O(entries).
    pub fn clear(&mut self) {
        let mut wheel = self.wheel.0.borrow_mut();
        for (handle, _) in std::mem::take(&mut self.handles).into_values() {
            wheel.cancel(handle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_has_one_entry_per_thing_and_takes_them_along() {
        let wheel = CoreWheel::new(MonoTime(0));
        let mut timers = ShardTimers::new(ShardId(3), wheel.clone());
        let lease = || TimerKind::Lease(LeaseId(1));
        let wait = TimerKind::Wait(LeaseId(1), Number(4));
        timers.set(MonoTime(1_000_000_000), lease());
        timers.set(MonoTime(9_000_000_000), lease());
        timers.set(MonoTime(1_000_000_000), wait.clone());
        assert_eq!(wheel.len(), 2, "the second time replaces the first");
        assert_eq!(timers.when(&lease()), Some(MonoTime(9_000_000_000)));
        timers.cancel(&wait);
        let mut due = Vec::new();
        wheel.advance(MonoTime(2_000_000_000), &mut due);
        assert!(due.is_empty(), "{due:?}");
        wheel.advance(MonoTime(10_000_000_000), &mut due);
        assert_eq!(due.iter().map(|timer| &timer.kind).collect::<Vec<_>>(), [&lease()]);
        timers.fired(&lease());
        timers.set(MonoTime(20_000_000_000), lease());
        timers.clear();
        assert!(wheel.is_empty());
    }
}
