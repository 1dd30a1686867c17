//! The simulator's random numbers: splitmix64, written out so that a seed means the same run
//! whatever version of a random number library is used.

use std::cell::Cell;

/// A stream of numbers that follows from its seed.
#[derive(Clone, Debug)]
pub struct SimRng {
    state: Cell<u64>,
}

impl SimRng {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: Cell::new(seed) }
    }

    /// The next number.
    pub fn next(&self) -> u64 {
        let state = self.state.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.state.set(state);
        mix(state)
    }

    /// A number less than `limit`, which must not be 0.
    pub fn below(&self, limit: u64) -> u64 {
        assert!(limit > 0, "there is no number below 0");
        ((self.next() as u128 * limit as u128) >> 64) as u64
    }

    /// True in `permille` of 1000 cases.
    pub fn chance(&self, permille: u64) -> bool {
        self.below(1_000) < permille
    }

    /// A stream of its own that follows from this one.
    #[must_use]
    pub fn fork(&self) -> Self {
        Self::new(self.next())
    }
}

/// The finishing step of splitmix64: each input bit touches every output bit.
pub(super) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
