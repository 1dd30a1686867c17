//! The one timing wheel of a core, shared by its shards.
//!
//! An entry is a wake-up, not a deadline: a renewal does not touch the wheel. When an entry comes
//! up, its shard looks at the present deadline and puts the entry back if that lies ahead. So a
//! renewal costs one table write, and each lease costs one wheel operation per TTL.

use std::cell::RefCell;
use std::rc::Rc;

use leasehold_core::wheel::Wheel;
use leasehold_protocol::ids::{LeaseId, Number, ShardId, Token};

use crate::env::MonoTime;

/// What a wheel entry is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TimerKind {
    /// A lease's deadline.
    Lease(LeaseId),
    /// The wait limit of a queued acquire.
    Wait(LeaseId, Number),
    /// The last possible validity of a forced hold.
    Forced(Vec<u8>, Token),
}

/// One entry.
#[derive(Clone, Debug)]
pub struct Timer {
    /// The shard that asked.
    pub shard: ShardId,
    /// Its epoch then: entries of former leaderships are dropped when they come up.
    pub epoch: u64,
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

    /// Wakes `timer`'s shard at `at`, or soon after.
    pub fn insert(&self, at: MonoTime, timer: Timer) {
        self.0.borrow_mut().insert(at.0, timer);
    }

    /// Moves all entries that are due at `now` to `due`.
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
