//! Operations that fail on purpose.

use std::collections::BTreeMap;
use std::io;

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Io {
    /// Listing, reading, mapping.
    Read,
    /// Making a segment or beginning a draft.
    Create,
    /// Writing to a draft.
    Write,
    /// Syncing a segment.
    Sync,
    /// Syncing a file that is being made: a blank segment or a draft.
    SyncNew,
    /// Naming or renaming.
    Rename,
    /// Removing.
    Remove,
    /// Syncing the directory.
    SyncDir,
}

struct Fault {
    io: Io,
    /// Fails when that many operations of the kind were made.
    at: u64,
    kind: io::ErrorKind,
}

/// Counts operations and knows which fail.
#[derive(Default)]
pub(super) struct Faults {
    counts: BTreeMap<Io, u64>,
    planned: Vec<Fault>,
    struck: u64,
}

impl Faults {
    pub(super) fn add(&mut self, io: Io, nth: u64, kind: io::ErrorKind) {
        self.planned.push(Fault { io, at: self.count(io) + nth, kind });
    }

    /// Operations that failed.
    pub(super) fn struck(&self) -> u64 {
        self.struck
    }

    pub(super) fn clear(&mut self) {
        self.planned.clear();
    }

    pub(super) fn count(&self, io: Io) -> u64 {
        self.counts.get(&io).copied().unwrap_or_default()
    }

    /// One operation; errors if it is one that fails.
    pub(super) fn strike(&mut self, io: Io) -> io::Result<()> {
        let now = self.count(io);
        self.counts.insert(io, now + 1);
        match self.planned.iter().position(|fault| fault.io == io && fault.at == now) {
            Some(planned) => {
                let kind = self.planned.swap_remove(planned).kind;
                self.struck += 1;
                Err(io::Error::new(kind, format!("simulated failure of {io:?} number {now}")))
            }
            None => Ok(()),
        }
    }
}
