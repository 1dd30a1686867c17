//! The 64-bit hash behind the state digest and behind the fingerprints of remembered requests.
//!
//! Part of the replicated format: nodes compare digests and keep fingerprints in snapshots, so a
//! change here is a new snapshot version. It is no defence against a lease's own owner, who alone
//! could make two of his requests collide.

const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
const START: u64 = 0xa076_1d64_78bd_642f;

/// One hash in the making. Every field is fed as a word, bytes with their length.
#[derive(Clone, Copy)]
pub(crate) struct Mix(u64);

fn fold(word: u64) -> u64 {
    let product = u128::from(word) * u128::from(MULTIPLIER);
    (product as u64) ^ ((product >> 64) as u64)
}

impl Mix {
    /// Starts the hash of an item of the kind `tag`.
    pub(crate) fn new(tag: u64) -> Self {
        Self(fold(START ^ tag))
    }

    pub(crate) fn word(self, word: u64) -> Self {
        Self(fold(self.0.rotate_left(23) ^ word))
    }

    pub(crate) fn bytes(self, bytes: &[u8]) -> Self {
        let mut mix = self.word(bytes.len() as u64);
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            mix = mix.word(u64::from_le_bytes(word.try_into().expect("chunks of 8")));
        }
        let rest = words.remainder();
        if rest.is_empty() {
            return mix;
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        mix.word(u64::from_le_bytes(last))
    }

    pub(crate) fn done(self) -> u64 {
        fold(self.0 ^ START)
    }
}

/// The sum of the hashes of a set of items: order-independent, so it is kept up to date by
/// adding what comes and subtracting what goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sum(pub(crate) u64);

impl Sum {
    pub(crate) fn add(&mut self, hash: u64) {
        self.0 = self.0.wrapping_add(hash);
    }

    pub(crate) fn sub(&mut self, hash: u64) {
        self.0 = self.0.wrapping_sub(hash);
    }
}
