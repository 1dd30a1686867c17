//! One file: pages with two images.

use std::rc::Rc;

/// Bytes of a page.
pub(super) const PAGE_LEN: usize = 4096;
/// Bytes of a sector, the smallest piece that a device writes whole.
pub(super) const SECTOR_LEN: usize = 512;

type Image = Rc<[u8; PAGE_LEN]>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Clean,
    /// The next sync writes it.
    Dirty,
    /// A sync of it failed: no later sync writes it.
    Lost,
}

#[derive(Clone)]
struct Page {
    volatile: Image,
    durable: Image,
    state: State,
}

/// See the module.
#[derive(Clone, Default)]
pub(super) struct File {
    pages: Vec<Page>,
    len: u64,
    /// Pages that the sync in flight covers.
    syncing: Option<Vec<usize>>,
}

impl File {
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Up to `len` bytes from `offset`, as a read past the page cache sees them: dirty pages are
    /// written first, lost ones are not.
    pub(super) fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let end = self.len.min(offset.saturating_add(len)) as usize;
        let start = (offset as usize).min(end);
        let byte = |at: usize| {
            let page = &self.pages[at / PAGE_LEN];
            let image = if page.state == State::Lost { &page.durable } else { &page.volatile };
            (image, at % PAGE_LEN)
        };
        let mut out = Vec::with_capacity(end - start);
        while start + out.len() < end {
            let (image, from) = byte(start + out.len());
            let piece = (PAGE_LEN - from).min(end - start - out.len());
            out.extend_from_slice(&image[from..from + piece]);
        }
        out
    }

    pub(super) fn append(&mut self, bytes: &[u8]) {
        let offset = self.len;
        self.len += bytes.len() as u64;
        // Pages of zeroes share one image: a segment costs no memory until it is written.
        let blank: Image = Rc::new([0; PAGE_LEN]);
        let pages_len = (self.len as usize).div_ceil(PAGE_LEN);
        let fresh = Page { volatile: blank.clone(), durable: blank, state: State::Dirty };
        self.pages.resize(pages_len, fresh);
        if bytes.iter().any(|byte| *byte != 0) {
            self.store(offset, bytes);
        }
    }

    /// Panics if the bytes do not fit or a sync is in flight.
    pub(super) fn store(&mut self, offset: u64, bytes: &[u8]) {
        assert!(self.syncing.is_none(), "a store while a sync is in flight");
        let end = offset + bytes.len() as u64;
        assert!(end <= self.len, "a store behind the end: {end} of {}", self.len);
        let mut rest = bytes;
        let mut at = offset as usize;
        while !rest.is_empty() {
            let page = &mut self.pages[at / PAGE_LEN];
            let (piece, later) = rest.split_at(rest.len().min(PAGE_LEN - at % PAGE_LEN));
            let image = Rc::make_mut(&mut page.volatile);
            image[at % PAGE_LEN..][..piece.len()].copy_from_slice(piece);
            page.state = State::Dirty;
            at += piece.len();
            rest = later;
        }
    }

    pub(super) fn begin_sync(&mut self) {
        assert!(self.syncing.is_none(), "one sync at a time");
        let dirty = (0..self.pages.len()).filter(|page| self.pages[*page].state == State::Dirty);
        self.syncing = Some(dirty.collect());
    }

    /// Returns the bytes written.
    pub(super) fn end_sync(&mut self, success: bool) -> u64 {
        let covered = self.syncing.take().expect("a sync was begun");
        for page in &covered {
            let page = &mut self.pages[*page];
            if success {
                page.durable = page.volatile.clone();
                page.state = State::Clean;
            } else {
                page.state = State::Lost;
            }
        }
        if success { (covered.len() * PAGE_LEN) as u64 } else { 0 }
    }

    pub(super) fn rot(&mut self, offset: u64, mask: u8) {
        let page = &mut self.pages[offset as usize / PAGE_LEN];
        for image in [&mut page.volatile, &mut page.durable] {
            Rc::make_mut(image)[offset as usize % PAGE_LEN] ^= mask;
        }
    }

    /// The first byte and the length of every piece that is not durable.
    pub(super) fn unsynced(&self, piece_len: usize) -> Vec<(u64, usize)> {
        let starts = (0..self.pages.len() * PAGE_LEN).step_by(piece_len);
        let differs = |start: &usize| {
            let page = &self.pages[start / PAGE_LEN];
            let piece = start % PAGE_LEN..start % PAGE_LEN + piece_len;
            page.state != State::Clean && page.volatile[piece.clone()] != page.durable[piece]
        };
        starts.filter(differs).map(|start| (start as u64, piece_len)).collect()
    }

    /// Makes one piece durable, as a device may do at any time.
    pub(super) fn write_out(&mut self, (start, len): (u64, usize)) {
        let page = &mut self.pages[start as usize / PAGE_LEN];
        let piece = start as usize % PAGE_LEN..start as usize % PAGE_LEN + len;
        let volatile = page.volatile.clone();
        Rc::make_mut(&mut page.durable)[piece.clone()].copy_from_slice(&volatile[piece]);
    }

    /// What is left without power.
    pub(super) fn forget_volatile(&mut self) {
        self.syncing = None;
        for page in &mut self.pages {
            page.volatile = page.durable.clone();
            page.state = State::Clean;
        }
    }

    /// What is left when only the process dies.
    pub(super) fn abandon_sync(&mut self) {
        self.syncing = None;
    }
}
