//! One pending time per key.

use std::collections::{BTreeMap, BTreeSet};

use crate::clock::BootTime;

/// A set of timers; setting one again moves it.
#[derive(Debug)]
pub(crate) struct Timers<K> {
    at: BTreeMap<K, BootTime>,
    order: BTreeSet<(BootTime, K)>,
}

impl<K: Copy + Ord> Timers<K> {
    pub(crate) const fn new() -> Self {
        Self { at: BTreeMap::new(), order: BTreeSet::new() }
    }

    /// Sets or moves; `BootTime::NEVER` cancels.
    pub(crate) fn set(&mut self, key: K, at: BootTime) {
        self.cancel(key);
        if at != BootTime::NEVER {
            self.at.insert(key, at);
            self.order.insert((at, key));
        }
    }

    pub(crate) fn cancel(&mut self, key: K) {
        if let Some(at) = self.at.remove(&key) {
            self.order.remove(&(at, key));
        }
    }

    /// Takes the earliest timer that is due.
    pub(crate) fn pop_due(&mut self, now: BootTime) -> Option<(BootTime, K)> {
        let (at, key) = *self.order.first()?;
        if at > now {
            return None;
        }
        self.cancel(key);
        Some((at, key))
    }

    pub(crate) fn get(&self, key: K) -> Option<BootTime> {
        self.at.get(&key).copied()
    }

    pub(crate) fn next(&self) -> Option<BootTime> {
        self.order.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_moves_and_fires_once() {
        let mut timers = Timers::new();
        timers.set('a', BootTime(10));
        timers.set('b', BootTime(20));
        timers.set('a', BootTime(30));
        assert_eq!(timers.next(), Some(BootTime(20)));
        assert_eq!(timers.pop_due(BootTime(25)), Some((BootTime(20), 'b')));
        assert_eq!(timers.pop_due(BootTime(25)), None);
        assert_eq!(timers.pop_due(BootTime(40)), Some((BootTime(30), 'a')));
        timers.set('a', BootTime(1));
        timers.set('a', BootTime::NEVER);
        assert_eq!(timers.next(), None);
    }
}
