//! Losing power, and dying without losing it.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::file::{PAGE_LEN, SECTOR_LEN};
use super::{FileRef, Names, SimDisk};

/// The smallest piece that is written whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tear {
    /// 4 KiB pages.
    Page,
    /// 512-byte sectors: a page may be half new.
    Sector,
}

/// A piece of a file that is not durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsynced {
    /// The file's name.
    pub name: String,
    /// The piece's first byte.
    pub offset: u64,
    len: usize,
}

impl SimDisk {
    /// Every piece that is not durable, in a stable order.
    pub fn unsynced(&self, tear: Tear) -> Vec<Unsynced> {
        let piece_len = match tear {
            Tear::Page => PAGE_LEN,
            Tear::Sector => SECTOR_LEN,
        };
        let names = self.inner.names.borrow();
        let pieces = names.iter().flat_map(|(name, file)| {
            let pieces = file.borrow().unsynced(piece_len);
            let unsynced = |(offset, len)| Unsynced { name: name.clone(), offset, len };
            pieces.into_iter().map(unsynced).collect::<Vec<_>>()
        });
        pieces.collect()
    }

    /// The device writes a piece back early, as it is now: what is stored over it later is again not
    /// durable, this is.
    pub fn write_back(&self, piece: &Unsynced) {
        if let Some(file) = self.inner.names.borrow().get(&piece.name) {
            file.borrow_mut().write_out((piece.offset, piece.len));
        }
    }

    /// Name changes since the directory was last synced.
    pub fn unsynced_names(&self) -> usize {
        self.inner.unsynced_names.borrow().len()
    }

    /// The disk as it is after losing power now: of what is not durable, the first `names_kept`
    /// name changes and the given pieces are there.
    #[must_use]
    pub fn image(&self, pieces_kept: &[Unsynced], names_kept: usize) -> Self {
        let names = self.names_after(names_kept);
        let volatile = self.inner.names.borrow();
        let mut copies: BTreeMap<*const _, FileRef> = BTreeMap::new();
        let copied = names.iter().map(|(name, file)| {
            let copy = copies.entry(Rc::as_ptr(file)).or_insert_with(|| {
                let mut copy = file.borrow().clone();
                let same = |piece: &&Unsynced| {
                    volatile.get(&piece.name).is_some_and(|named| Rc::ptr_eq(named, file))
                };
                for piece in pieces_kept.iter().filter(same) {
                    copy.write_out((piece.offset, piece.len));
                }
                copy.forget_volatile();
                Rc::new(copy.into())
            });
            (name.clone(), copy.clone())
        });
        let copied: Names = copied.collect();
        Self::with_names(self.inner.rng.fork(), self.inner.config.get(), copied)
    }

    fn names_after(&self, names_kept: usize) -> Names {
        let unsynced = self.inner.unsynced_names.borrow();
        match names_kept.checked_sub(1) {
            Some(newest) => unsynced[newest].clone(),
            None => self.inner.durable_names.borrow().clone(),
        }
    }

    /// Loses power: this disk becomes that image. Handles from before are dead.
    pub fn lose_power(&self, pieces_kept: &[Unsynced], names_kept: usize) {
        let image = self.image(pieces_kept, names_kept);
        let names = image.inner.names.borrow().clone();
        self.inner.durable_names.borrow_mut().clone_from(&names);
        *self.inner.names.borrow_mut() = names;
        self.inner.unsynced_names.borrow_mut().clear();
        self.inner.power_cycle.set(self.inner.power_cycle.get() + 1);
    }

    /// Loses power; what is kept is drawn from the seed, each piece by a coin.
    pub fn lose_power_at_random(&self, tear: Tear) {
        let rng = &self.inner.rng;
        let mut pieces = self.unsynced(tear);
        pieces.retain(|_| rng.chance(500));
        let names_kept = rng.below(self.unsynced_names() as u64 + 1) as usize;
        self.lose_power(&pieces, names_kept);
    }

    /// The disk as it is after the process dies now and the machine does not: what was written is
    /// there, durable or not, and so are the names.
    #[must_use]
    pub fn image_of_kill(&self) -> Self {
        let mut copies: BTreeMap<*const _, FileRef> = BTreeMap::new();
        let mut copy = |names: &Names| -> Names {
            let copied = names.iter().map(|(name, file)| {
                let copy = copies.entry(Rc::as_ptr(file)).or_insert_with(|| {
                    let mut copy = file.borrow().clone();
                    copy.abandon_sync();
                    Rc::new(copy.into())
                });
                (name.clone(), copy.clone())
            });
            copied.collect()
        };
        let names = copy(&self.inner.names.borrow());
        let durable_names = copy(&self.inner.durable_names.borrow());
        let unsynced_names = self.inner.unsynced_names.borrow().iter().map(copy).collect();
        let image = Self::with_names(self.inner.rng.fork(), self.inner.config.get(), names);
        *image.inner.durable_names.borrow_mut() = durable_names;
        *image.inner.unsynced_names.borrow_mut() = unsynced_names;
        image
    }

    /// The process dies, the machine does not: everything written is still to be seen, though not
    /// durable. Handles from before are dead.
    pub fn kill_process(&self) {
        for file in self.inner.names.borrow().values() {
            file.borrow_mut().abandon_sync();
        }
        self.inner.power_cycle.set(self.inner.power_cycle.get() + 1);
    }
}
