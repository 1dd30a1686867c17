//! Sets of a semaphore's slots, as they travel: bit `i` mod 8 of byte `i` / 8 is slot `i`, and
//! there are no bytes of zeros at the end.

use alloc::vec::Vec;

use leasehold_protocol::limits::PERMITS_MAX;

/// The slots of a semaphore that are taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken(Vec<u8>);

/// How many slots a set has.
pub(crate) fn count(set: &[u8]) -> u32 {
    set.iter().map(|byte| byte.count_ones()).sum()
}

/// Whether a set is written as it must be, and names only slots that can be.
pub(crate) fn is_sound(set: &[u8]) -> bool {
    set.len() <= PERMITS_MAX as usize / 8 && set.last().is_none_or(|last| *last != 0)
}

impl Taken {
    pub(crate) fn count(&self) -> u32 {
        count(&self.0)
    }

    /// Takes the `wanted` lowest free slots below `limit`; the caller knows that there are as many.
    pub(crate) fn take_lowest(&mut self, wanted: u32, limit: u32) -> Vec<u8> {
        let mut set = Vec::new();
        let mut missing = wanted;
        let free = (0..limit as usize).filter(|slot| !contains(&self.0, *slot));
        for slot in free.take(wanted as usize) {
            set.resize(slot / 8 + 1, 0);
            set[slot / 8] |= 1 << (slot % 8);
            missing -= 1;
        }
        assert!(missing == 0, "the semaphore has room for its grant (G1)");
        self.put(&set);
        set
    }

    /// Marks a set as taken; false if one of its slots was taken before.
    pub(crate) fn put(&mut self, set: &[u8]) -> bool {
        let free = self.0.iter().zip(set).all(|(taken, new)| taken & new == 0);
        self.0.resize(self.0.len().max(set.len()), 0);
        for (taken, new) in self.0.iter_mut().zip(set) {
            *taken |= new;
        }
        free
    }

    /// Gives a set back.
    pub(crate) fn give_back(&mut self, set: &[u8]) {
        for (taken, gone) in self.0.iter_mut().zip(set) {
            assert!(*taken & gone == *gone, "only what was taken is given back");
            *taken &= !gone;
        }
        while self.0.last() == Some(&0) {
            self.0.pop();
        }
    }
}

fn contains(set: &[u8], slot: usize) -> bool {
    set.get(slot / 8).is_some_and(|byte| byte >> (slot % 8) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_slots_are_taken_and_come_back() {
        let mut taken = Taken::default();
        assert_eq!(taken.take_lowest(3, 20), [0b111]);
        assert_eq!(taken.take_lowest(7, 20), [0b1111_1000, 0b11]);
        taken.give_back(&[0b111]);
        assert_eq!(taken.take_lowest(4, 20), [0b111, 0b100]);
        assert_eq!(taken.count(), 11);
        taken.give_back(&[0b1111_1000, 0b11]);
        taken.give_back(&[0b111, 0b100]);
        assert_eq!(taken, Taken::default());
    }

    #[test]
    fn all_slots_of_the_largest_semaphore_can_be_taken() {
        let mut taken = Taken::default();
        let all = taken.take_lowest(PERMITS_MAX, PERMITS_MAX);
        assert_eq!(count(&all), PERMITS_MAX);
        assert!(is_sound(&all));
        assert!(!is_sound(&[&all[..], &[1]].concat()));
        assert!(!is_sound(&[1, 0]));
    }

    #[test]
    fn a_slot_that_is_taken_twice_is_noticed() {
        let mut taken = Taken::default();
        assert!(taken.put(&[0b101]));
        assert!(taken.put(&[0b010, 0b1]));
        assert!(!taken.put(&[0, 0b1]));
    }
}
