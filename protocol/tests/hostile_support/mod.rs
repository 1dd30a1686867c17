//! What the tests with hostile bytes share, in every crate that has some: an allocator that counts,
//! a generator whose seed fixes every mutation, the mutations, and the corpus of inputs that once
//! found something.
//!
//! `HOSTILE_SEED` shifts the seed of every such test, `HOSTILE_TIMES` multiplies how many mutations
//! each makes.

#![allow(dead_code, unreachable_pub, reason = "each test uses its part")]

pub mod frames;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt::Write as _;

/// Counts the bytes that the current thread has allocated.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let live = LIVE.get() + bytes;
    LIVE.set(live);
    PEAK.set(PEAK.get().max(live));
}

// SAFETY: every call is passed to the system's allocator unchanged; the counters are plain cells
// of the thread, whose access neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Memory that an action took.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Most bytes that were live at a time, beyond those live before.
    pub peak: usize,
    /// The largest single allocation.
    pub largest: usize,
}

/// Runs `action` on this thread and says what it took.
pub fn taken_by<T>(action: impl FnOnce() -> T) -> (T, Taken) {
    let before = LIVE.get();
    PEAK.set(before);
    LARGEST.set(0);
    let result = action();
    let peak = usize::try_from(PEAK.get() - before).expect("a peak is not below its start");
    (result, Taken { peak, largest: LARGEST.get() })
}

/// A small generator (splitmix64): the same seed gives the same mutations everywhere.
pub struct Random(pub u64);

impl Random {
    /// The generator of the test with that number, shifted by `HOSTILE_SEED`.
    pub fn of_test(number: u64) -> Self {
        Self(environment("HOSTILE_SEED", 0).wrapping_mul(1_000_003).wrapping_add(number))
    }

    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub const fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub const fn one_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    /// A count, length or offset that lies.
    pub fn lie(&mut self) -> u64 {
        *self.pick(&NUMBERS)
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

pub fn environment(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(value) => value.parse().unwrap_or_else(|_| panic!("{name} is a number, not {value:?}")),
        Err(_) => default,
    }
}

/// How many mutations a test makes whose usual number is `usual`.
pub fn times(usual: u64) -> u64 {
    usual * environment("HOSTILE_TIMES", 1)
}

/// Counts, lengths and offsets that lie: both ends, signs, and what overflows when something small
/// is added or when it is multiplied by an element's size.
const NUMBERS: [u64; 20] = [
    0,
    1,
    7,
    8,
    15,
    16,
    255,
    4_096,
    65_536,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_fff0,
    0xffff_fffe,
    0xffff_ffff,
    0x2000_0001,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX - 1,
    u64::MAX,
];

/// Changes `bytes` in one way: a bit, a byte, a number, a cut, an insertion, a piece doubled or
/// moved, a tail of `other` spliced on.
pub fn mutate_once(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    if bytes.is_empty() {
        bytes.push(random.next() as u8);
        return;
    }
    let at = random.below(bytes.len());
    match random.below(12) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.next() as u8,
        2 => put_number(random, bytes, at, 4),
        3 => put_number(random, bytes, at & !7, 8),
        4 => {
            let fields = at & !3;
            put_number(random, bytes, fields, 4);
        }
        5 => {
            // A small step of a pointer or a count.
            let step = random.below(33) as u8;
            bytes[at] = bytes[at].wrapping_add(step).wrapping_sub(16);
        }
        6 => bytes.truncate(at),
        7 => bytes.insert(at, random.next() as u8),
        8 if !other.is_empty() => {
            let tail = &other[random.below(other.len())..];
            bytes.truncate(at);
            bytes.extend_from_slice(tail);
        }
        9 => {
            let piece = piece(random, bytes, at);
            bytes.splice(at..at, piece);
        }
        10 => {
            let len = random.below(16).min(bytes.len() - at);
            bytes.drain(at..at + len);
        }
        _ => {
            let from = random.below(bytes.len());
            let len = random.below(bytes.len() - from.max(at) + 1);
            bytes.copy_within(from..from + len, at);
        }
    }
}

fn put_number(random: &mut Random, bytes: &mut [u8], at: usize, width: usize) {
    let number = random.lie().to_le_bytes();
    let len = width.min(bytes.len() - at);
    bytes[at..at + len].copy_from_slice(&number[..len]);
}

fn piece(random: &mut Random, bytes: &[u8], at: usize) -> Vec<u8> {
    let len = 1 + random.below(64).min(bytes.len() - at - 1);
    bytes[at..at + len].to_vec()
}

/// Drops, doubles, swaps or replaces parts of a stream: records, chunks, frames.
pub fn shuffle_once<T: Clone>(random: &mut Random, parts: &mut Vec<T>, others: &[T]) {
    if parts.is_empty() {
        parts.extend(others.first().cloned());
        return;
    }
    let (at, to) = (random.below(parts.len()), random.below(parts.len()));
    match random.below(5) {
        0 => drop(parts.remove(at)),
        1 => parts.insert(to, parts[at].clone()),
        2 => parts.swap(at, to),
        3 if !others.is_empty() => parts[at] = random.pick(others).clone(),
        4 if !others.is_empty() => parts.insert(at, random.pick(others).clone()),
        _ => parts.truncate(at),
    }
}

/// Shows the input of a test that panics, as a line for the corpus.
pub struct Shown<'a> {
    pub format: &'static str,
    pub bytes: &'a [u8],
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut hex = String::new();
            for byte in self.bytes.iter().take(4_096) {
                let _ = write!(hex, "{byte:02x}");
            }
            eprintln!("this input did it ({} bytes):\n{} {hex}", self.bytes.len(), self.format);
        }
    }
}

/// The inputs of one format in a corpus: lines of a format's name, a space and hexadecimal bytes;
/// `#` opens a line of comment.
pub fn corpus(text: &str, format: &str) -> Vec<Vec<u8>> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let of_format =
        lines.filter_map(|line| line.split_once(' ')).filter(|(name, _)| *name == format);
    of_format.map(|(_, hex)| bytes_of(hex.trim())).collect()
}

fn bytes_of(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).expect("ASCII"));
    digits.map(|pair| u8::from_str_radix(pair, 16).expect("hexadecimal")).collect()
}
