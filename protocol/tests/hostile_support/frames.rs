//! Mutations of frames, and what decoding one may take.

use leasehold_protocol::codec::{self, Body};
use leasehold_protocol::frame::{BODY_AT, Decoder};

use super::{Random, Taken, mutate_once, shuffle_once, taken_by};

/// Bytes that the decoding of a body may have live at a time: a decoded list's element is less than
/// eight times as large as its archive. No single allocation may be larger either.
pub const fn decode_bound(body_len: usize) -> usize {
    8 * body_len + 256
}

/// Decodes a body and checks what that took.
pub fn decode_within_bound<T>(body: &[u8], decode: impl FnOnce(&[u8]) -> T) -> T {
    let (decoded, Taken { peak, largest }) = taken_by(|| decode(body));
    let bound = decode_bound(body.len());
    assert!(peak <= bound && largest <= bound, "{} bytes took {peak}, {largest}", body.len());
    decoded
}

/// Decodes a body as `T`. What was accepted is a value like any other: it encodes to something that
/// decodes to it.
pub fn check_as<T: Body + PartialEq + std::fmt::Debug>(body: &[u8]) -> bool {
    let Ok(value) = decode_within_bound(body, |body| codec::decode::<T>(body)) else {
        return false;
    };
    assert_eq!(codec::decode::<T>(&codec::encode(&value)).as_ref(), Ok(&value));
    true
}

/// Makes length and checksum fit, so that a mutation reaches the body's validation.
pub fn seal(frame: &mut [u8]) {
    if frame.len() < BODY_AT {
        return;
    }
    let length = u32::try_from(frame.len() - 4).expect("frames are short");
    frame[..4].copy_from_slice(&length.to_le_bytes());
    let checksum = crc32c::crc32c_append(crc32c::crc32c(&frame[4..16]), &frame[BODY_AT..]);
    frame[16..20].copy_from_slice(&checksum.to_le_bytes());
}

/// A mutation of one of `frames`; most have a length and a checksum that fit.
pub fn mutation(random: &mut Random, frames: &[Vec<u8>]) -> Vec<u8> {
    let mut frame = random.pick(frames).clone();
    for _ in 0..=random.below(4) {
        let other = random.pick(frames);
        mutate_once(random, &mut frame, other);
    }
    if !random.one_in(10) {
        seal(&mut frame);
    }
    frame
}

/// A few frames in a row, in an order that no honest side sends: doubled, swapped, left out; some
/// of them mutated.
pub fn sequence(random: &mut Random, script: &[Vec<u8>], others: &[Vec<u8>]) -> Vec<u8> {
    let mut frames = script.to_vec();
    for _ in 0..=random.below(3) {
        shuffle_once(random, &mut frames, others);
    }
    if !frames.is_empty() && random.one_in(2) {
        let at = random.below(frames.len());
        frames[at] = mutation(random, &frames[at..=at]);
    }
    let mut bytes = frames.concat();
    if random.one_in(8) && !bytes.is_empty() {
        bytes.truncate(random.below(bytes.len()));
    }
    bytes
}

/// What became of mutated frames.
#[derive(Debug, Default)]
pub struct Tally {
    pub unframed: u64,
    pub refused: u64,
    pub accepted: u64,
}

impl Tally {
    /// Reads the first frame of `bytes` with a limit; `decode` says whether the body was what its
    /// kind says.
    pub fn take(&mut self, bytes: &[u8], body_max: usize, decode: impl FnOnce(u8, &[u8]) -> bool) {
        let mut decoder = Decoder::new(body_max);
        let ((), Taken { peak, .. }) = taken_by(|| decoder.feed(bytes));
        assert!(peak <= 2 * bytes.len(), "{peak} for {} bytes", bytes.len());
        match decoder.next() {
            Ok(Some(frame)) if decode(frame.kind, frame.body) => self.accepted += 1,
            Ok(Some(_)) => self.refused += 1,
            Ok(None) | Err(_) => self.unframed += 1,
        }
    }

    /// Panics unless the mutations reached every layer: otherwise the test proves nothing.
    pub fn require_depth(&self) {
        println!("{self:?}");
        let few = (self.unframed + self.refused + self.accepted) / 100;
        assert!(self.unframed > few && self.refused > few && self.accepted > few, "{self:?}");
    }
}
