//! A hierarchical timing wheel: insert, renew and cancel in O(1), whatever the number of entries.
//!
//! Pure: time is an argument, in nanoseconds of a clock that never steps back. Time is cut into
//! ticks of 2^20 ns (1.05 ms). A deadline is rounded *up* to a tick and an entry fires only once
//! that tick is over, so nothing ever fires early; it may fire up to one tick late, plus what the
//! caller's `advance` comes late.
//!
//! Levels of 64 slots each: an entry lies in the level of the highest 6-bit digit in which its tick
//! differs from the present one, so all entries of a lower level are due before all of a higher
//! one, and the next slot to look at is found in a few instructions. When time reaches a slot of a
//! higher level, its entries move down; each moves at most once per level in its life.
//!
//! Entries of one tick fire in a fixed order (the same calls give the same order), which is not
//! always that of their insertion.
//!
//! Invariants: an entry is in exactly one list: the slot that its tick and the present one name,
//! or `overdue` if its tick is not ahead; a slot's bit is set exactly when its list is not empty.

use alloc::boxed::Box;
use alloc::vec::Vec;

const TICK_BITS: u32 = 20;
const DIGIT_BITS: u32 = 6;
const SLOTS_PER_LEVEL: usize = 1 << DIGIT_BITS;
/// Ticks have at most 64 - `TICK_BITS` bits.
const LEVELS: usize = 8;
const OVERDUE: usize = LEVELS * SLOTS_PER_LEVEL;
const NONE: u32 = u32::MAX;

/// Nanoseconds of one tick: an entry fires at most this much after its deadline, if `advance` is
/// called in time.
pub const TICK_NS: u64 = 1 << TICK_BITS;

/// Names an entry. A handle whose entry fired or was cancelled names nothing, for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    index: u32,
    generation: u32,
}

#[derive(Clone, Copy, Debug)]
struct List {
    head: u32,
    tail: u32,
}

#[derive(Clone, Debug)]
struct Entry<T> {
    /// `None` while the entry is free; `next` then links the free list.
    item: Option<T>,
    tick: u64,
    generation: u32,
    list: u32,
    prev: u32,
    next: u32,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Wheel<T> {
    now_tick: u64,
    entries: Vec<Entry<T>>,
    free: u32,
    len: usize,
    occupied: [u64; LEVELS],
    lists: Box<[List]>,
}

impl<T> Wheel<T> {
    /// An empty wheel that starts at `now_ns`.
    pub fn new(now_ns: u64) -> Self {
        Self {
            now_tick: now_ns >> TICK_BITS,
            entries: Vec::new(),
            free: NONE,
            len: 0,
            occupied: [0; LEVELS],
            lists: alloc::vec![List { head: NONE, tail: NONE }; OVERDUE + 1].into(),
        }
    }

    /// Entries that wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No entry waits.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds an entry. One whose deadline has passed fires at the next `advance`.
    ///
    /// # Panics
    /// If 2^32 - 1 entries wait already.
    pub fn insert(&mut self, deadline_ns: u64, item: T) -> Handle {
        let tick = tick_of(deadline_ns);
        let index = self.free;
        let index = if index == NONE {
            let index = u32::try_from(self.entries.len()).expect("fewer than 2^32 entries");
            assert!(index != NONE, "fewer than 2^32 - 1 entries");
            let (item, list) = (Some(item), 0);
            self.entries.push(Entry { item, tick, generation: 0, list, prev: NONE, next: NONE });
            index
        } else {
            let entry = &mut self.entries[index as usize];
            self.free = entry.next;
            entry.item = Some(item);
            entry.tick = tick;
            index
        };
        self.len += 1;
        self.link(index);
        Handle { index, generation: self.entries[index as usize].generation }
    }

    /// Moves an entry to another deadline, earlier or later. False if it fired or was cancelled.
    pub fn renew(&mut self, handle: Handle, deadline_ns: u64) -> bool {
        if !self.is_live(handle) {
            return false;
        }
        self.unlink(handle.index);
        self.entries[handle.index as usize].tick = tick_of(deadline_ns);
        self.link(handle.index);
        true
    }

    /// Takes an entry out. `None` if it fired or was cancelled.
    pub fn cancel(&mut self, handle: Handle) -> Option<T> {
        if !self.is_live(handle) {
            return None;
        }
        self.unlink(handle.index);
        Some(self.release(handle.index))
    }

    /// Moves time to `now_ns` and all entries that are due to the end of `due`, in the order of
    /// their ticks. A time before the present one changes nothing but fires what is overdue.
    pub fn advance(&mut self, now_ns: u64, due: &mut Vec<T>) {
        let target = now_ns >> TICK_BITS;
        self.fire_list(OVERDUE, due);
        while let Some((level, slot, tick)) = self.next_slot()
            && tick <= target
        {
            self.now_tick = tick;
            let list = level * SLOTS_PER_LEVEL + slot;
            if level == 0 {
                self.fire_list(list, due);
            } else {
                self.move_down(list);
                self.fire_list(OVERDUE, due);
            }
        }
        self.now_tick = self.now_tick.max(target);
    }

    /// No entry fires before this time, and an `advance` to it makes progress; `None` if no entry
    /// waits. May lie before the earliest deadline if that is far away.
    pub fn next_deadline(&self) -> Option<u64> {
        if self.lists[OVERDUE].head != NONE {
            return Some(self.now_tick << TICK_BITS);
        }
        self.next_slot().map(|(_, _, tick)| tick << TICK_BITS)
    }

    fn is_live(&self, handle: Handle) -> bool {
        self.entries
            .get(handle.index as usize)
            .is_some_and(|entry| entry.generation == handle.generation && entry.item.is_some())
    }

    /// The first occupied slot, as level, slot and the tick at which it begins.
    fn next_slot(&self) -> Option<(usize, usize, u64)> {
        let level = self.occupied.iter().position(|bits| *bits != 0)?;
        let slot = self.occupied[level].trailing_zeros() as usize;
        let shift = DIGIT_BITS * level as u32;
        let above = (self.now_tick >> shift >> DIGIT_BITS) << DIGIT_BITS;
        Some((level, slot, (above | slot as u64) << shift))
    }

    /// The list that an entry of this tick belongs to now.
    fn list_of(&self, tick: u64) -> usize {
        if tick <= self.now_tick {
            return OVERDUE;
        }
        let highest_bit = (tick ^ self.now_tick).ilog2();
        let level = (highest_bit / DIGIT_BITS) as usize;
        let slot = (tick >> (DIGIT_BITS * level as u32)) as usize % SLOTS_PER_LEVEL;
        level * SLOTS_PER_LEVEL + slot
    }

    fn link(&mut self, index: u32) {
        let number = self.list_of(self.entries[index as usize].tick);
        let list = &mut self.lists[number];
        let last = core::mem::replace(&mut list.tail, index);
        if last == NONE {
            list.head = index;
        } else {
            self.entries[last as usize].next = index;
        }
        let entry = &mut self.entries[index as usize];
        (entry.list, entry.prev, entry.next) = (number as u32, last, NONE);
        if number != OVERDUE {
            self.occupied[number / SLOTS_PER_LEVEL] |= 1 << (number % SLOTS_PER_LEVEL);
        }
    }

    fn unlink(&mut self, index: u32) {
        let Entry { list, prev, next, .. } = self.entries[index as usize];
        let number = list as usize;
        match prev {
            NONE => self.lists[number].head = next,
            prev => self.entries[prev as usize].next = next,
        }
        match next {
            NONE => self.lists[number].tail = prev,
            next => self.entries[next as usize].prev = prev,
        }
        if self.lists[number].head == NONE && number != OVERDUE {
            self.occupied[number / SLOTS_PER_LEVEL] &= !(1 << (number % SLOTS_PER_LEVEL));
        }
    }

    /// Frees an unlinked entry.
    fn release(&mut self, index: u32) -> T {
        let entry = &mut self.entries[index as usize];
        let item = entry.item.take().expect("a linked entry has an item");
        entry.generation = entry.generation.wrapping_add(1);
        entry.next = core::mem::replace(&mut self.free, index);
        self.len -= 1;
        item
    }

    fn fire_list(&mut self, list: usize, due: &mut Vec<T>) {
        while self.lists[list].head != NONE {
            let index = self.lists[list].head;
            assert!(self.entries[index as usize].tick <= self.now_tick, "nothing fires early");
            self.unlink(index);
            due.push(self.release(index));
        }
    }

    /// Time has reached the slot: each of its entries belongs into a lower level now.
    fn move_down(&mut self, list: usize) {
        while self.lists[list].head != NONE {
            let index = self.lists[list].head;
            self.unlink(index);
            self.link(index);
        }
    }
}

/// Rounded up, but into the last tick that a `u64` of nanoseconds can name.
fn tick_of(deadline_ns: u64) -> u64 {
    deadline_ns.div_ceil(TICK_NS).min(u64::MAX >> TICK_BITS)
}
