//! The last end of each key: what is left to tell of a hold that is over.
//!
//! A table of bounded size beside the keys, for most keys are vacant when somebody asks why.
//! Nothing is ever decided by it, and every release pays for it, so it forgets in the cheapest
//! way: ends are put into a young generation, and when that is full it becomes the old one, which
//! is dropped whole. No end is looked for to make room for another.
//!
//! Invariants: each generation's sum is that of its ends' digests; the young one is never full.

use alloc::rc::Rc;

use leasehold_protocol::event::EndReason;
use leasehold_protocol::ids::{LeaseId, Revision};
use leasehold_protocol::limits::LAST_ENDS_MAX;
use leasehold_protocol::reply::LastEnd;

use crate::blob::{Blob, Key, KeyRef};
use crate::cow::{IntoIter, Map};
use crate::digest;
use crate::hash::Sum;
use crate::state::{State, Step};
use crate::table::{End, Hold};

/// Ends of a generation that is full.
pub(crate) const GENERATION_LEN: usize = LAST_ENDS_MAX / 2;

/// See the module. A key may be in both generations: the young one's end is its last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ends {
    young: Generation,
    old: Generation,
}

#[derive(Clone, Debug, Default)]
struct Generation {
    ends: Map<Key, Rc<End>>,
    sum: Sum,
}

impl Generation {
    fn put(&mut self, key: &Key, end: End) -> Option<Rc<End>> {
        self.sum.add(digest::end(key, &end));
        let former = self.ends.insert(key.clone(), Rc::new(end));
        if let Some(former) = &former {
            self.sum.sub(digest::end(key, former));
        }
        former
    }
}

impl Ends {
    /// The sum of all digests.
    fn sum(&self) -> u64 {
        self.young.sum.0.wrapping_add(self.old.sum.0)
    }

    fn put(&mut self, key: &Key, end: End) {
        self.young.put(key, end);
        if self.young.ends.len() == GENERATION_LEN {
            self.old = core::mem::take(&mut self.young);
        }
    }

    /// Puts an end into its generation as a snapshot tells it.
    pub(crate) fn restore(&mut self, key: &Key, end: End, old: bool) -> Result<(), &'static str> {
        let (generation, room) = if old {
            (&mut self.old, GENERATION_LEN)
        } else {
            (&mut self.young, GENERATION_LEN - 1)
        };
        if generation.ends.len() >= room {
            return Err("too many last ends");
        }
        generation.put(key, end).map_or(Ok(()), |_| Err("a last end comes twice"))
    }

    fn get(&self, key: &KeyRef<'_>) -> Option<&End> {
        self.young.ends.get(key).or_else(|| self.old.ends.get(key)).map(|end| &**end)
    }

    /// All ends.
    pub(crate) fn iter(&self) -> Iter {
        Iter { old: self.old.ends.clone().into_iter(), young: self.young.ends.clone().into_iter() }
    }

    /// Ends at hand, those that a later one of the same key hides included.
    pub(crate) fn len(&self) -> usize {
        self.young.ends.len() + self.old.ends.len()
    }

    /// Ends of the young generation.
    pub(crate) fn young_len(&self) -> usize {
        self.young.ends.len()
    }
}

/// Ends as they were, the old generation first; the flag says which are of it.
pub(crate) struct Iter {
    old: IntoIter<Key, Rc<End>>,
    young: IntoIter<Key, Rc<End>>,
}

impl Iterator for Iter {
    type Item = (Key, Rc<End>, bool);

    fn next(&mut self) -> Option<Self::Item> {
        let old = self.old.next().map(|(key, end)| (key, end, true));
        old.or_else(|| self.young.next().map(|(key, end)| (key, end, false)))
    }
}

impl State {
    /// Remembers the end of a hold, instead of the key's former one.
    pub(crate) fn remember_end(
        &mut self,
        step: &Step<'_>,
        (key, holder, label): (&Key, LeaseId, &Blob),
        hold: &Hold,
        reason: &EndReason,
    ) {
        let end = End {
            lease: holder,
            label: label.clone(),
            token: hold.token,
            mode: hold.mode,
            reason: reason.clone(),
            revision: self.revision,
            at_ms: step.wall_ms,
        };
        self.sum.sub(self.ends.sum());
        self.ends.put(key, end);
        self.sum.add(self.ends.sum());
    }

    /// How the key's last hold ended, if that is remembered.
    pub(crate) fn last_end(&self, key: &[u8]) -> Option<LastEnd> {
        let end = self.ends.get(&KeyRef::new(key))?;
        Some(LastEnd {
            lease: end.lease,
            label: end.label.text(),
            token: end.token,
            mode: end.mode,
            reason: end.reason.clone(),
            revision: Revision(end.revision),
            at_ms: end.at_ms,
        })
    }
}

#[cfg(test)]
mod tests {
    use alloc::format;

    use leasehold_protocol::ids::{Mode, Token};

    use super::*;

    fn key(n: usize) -> Key {
        KeyRef::new(format!("key {n}").as_bytes()).to_key()
    }

    fn end(token: u64) -> End {
        End {
            lease: LeaseId(1),
            label: Blob::default(),
            token: Token(token),
            mode: Mode::EXCLUSIVE,
            reason: EndReason::Released,
            revision: token,
            at_ms: 0,
        }
    }

    fn token(ends: &Ends, n: usize) -> Option<u64> {
        ends.get(&KeyRef::new(&key(n))).map(|end| end.token.0)
    }

    fn check_sums(ends: &Ends) {
        let mut sum = Sum::default();
        ends.iter().for_each(|(key, end, _)| sum.add(digest::end(&key, &end)));
        assert_eq!(sum.0, ends.sum());
    }

    #[test]
    fn the_latest_of_each_key_is_told_and_at_least_a_generation_is_kept() {
        let mut ends = Ends::default();
        for n in 0..=GENERATION_LEN {
            ends.put(&key(n), end(n as u64 + 1));
        }
        assert_eq!((ends.len(), ends.young_len()), (GENERATION_LEN + 1, 1));
        assert_eq!(token(&ends, 0), Some(1), "of the old generation");
        ends.put(&key(0), end(9_000));
        ends.put(&key(0), end(9_001));
        assert_eq!(token(&ends, 0), Some(9_001), "the young one hides it");
        check_sums(&ends);
        for n in GENERATION_LEN + 1..2 * GENERATION_LEN {
            ends.put(&key(n), end(n as u64 + 1));
        }
        assert_eq!((ends.len(), ends.young_len()), (GENERATION_LEN + 1, 1));
        assert_eq!(token(&ends, 1), None, "forgotten with its generation");
        assert_eq!(token(&ends, 0), Some(9_001));
        check_sums(&ends);
    }

    #[test]
    fn a_snapshot_gives_both_generations_back() {
        let mut ends = Ends::default();
        for n in 0..GENERATION_LEN + 5 {
            ends.put(&key(n % (GENERATION_LEN + 2)), end(n as u64 + 1));
        }
        let mut copy = Ends::default();
        for (key, end, old) in ends.iter() {
            assert_eq!(copy.restore(&key, (*end).clone(), old), Ok(()));
        }
        assert_eq!((copy.len(), copy.young_len(), copy.sum()), (ends.len(), 5, ends.sum()));
        assert!(copy.restore(&key(0), end(1), true).is_err(), "there is no room");
        assert!(copy.restore(&key(GENERATION_LEN), end(1), false).is_err(), "it comes twice");
    }
}
