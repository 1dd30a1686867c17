//! A snapshot on its way from the leader: written to a draft and decoded as it comes.
//!
//! Memory is bounded by the state itself and one chunk. Nothing of it counts before everything is
//! verified: checksums, owner, cover, state.

use std::io;
use std::rc::Rc;

use leasehold_core::State;
use leasehold_protocol::peer::SNAPSHOT_CHUNK_MAX;

use super::format::{FileReader, SnapshotError};
use super::{LoadError, SUFFIX, Snapshots, StateReader, name};
use crate::env::{Disk, Draft, Env};
use crate::raft::types::SnapshotMeta;

/// See the module.
pub(crate) struct Receiving<E: Env> {
    meta: SnapshotMeta,
    name: Rc<str>,
    draft: <E::Disk as Disk>::Draft,
    reader: FileReader,
    decoder: StateReader,
    len: u64,
}

/// A snapshot that came as a whole and is in order, not yet published.
pub(crate) struct Received<E: Env> {
    meta: SnapshotMeta,
    name: Rc<str>,
    draft: <E::Disk as Disk>::Draft,
    state: State,
}

impl<E: Env> Receiving<E> {
    /// Begins one that is announced to cover `meta`.
    pub(crate) async fn begin(snapshots: &Snapshots<E>, meta: SnapshotMeta) -> io::Result<Self> {
        let name = name(snapshots.owner, meta.last_log_id.as_ref(), SUFFIX);
        let draft = snapshots.draft(&name).await?;
        let reader = FileReader::new(snapshots.owner);
        let decoder = StateReader::new(snapshots.owner);
        Ok(Self { meta, name, draft, reader, decoder, len: 0 })
    }

    /// Bytes taken so far.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Takes the next bytes.
    pub(crate) async fn chunk(&mut self, bytes: &[u8]) -> Result<(), LoadError> {
        if bytes.len() > SNAPSHOT_CHUNK_MAX {
            return Err(SnapshotError::Length.into());
        }
        let decoder = &mut self.decoder;
        self.reader.feed(bytes, |chunk| decoder.feed(chunk))?;
        if self.reader.meta().is_some_and(|meta| *meta != self.meta) {
            return Err(SnapshotError::Announced.into());
        }
        self.draft.write(bytes).await?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// All bytes came.
    pub(crate) fn finish(self) -> Result<Received<E>, SnapshotError> {
        let (meta, digest) = self.reader.finish()?;
        let state = self.decoder.finish(digest)?;
        Ok(Received { meta, name: self.name, draft: self.draft, state })
    }
}

impl<E: Env> Received<E> {
    pub(crate) fn meta(&self) -> &SnapshotMeta {
        &self.meta
    }

    /// Makes it durable under its name; the state in it.
    pub(super) async fn publish(self, snapshots: &Snapshots<E>) -> io::Result<State> {
        self.draft.publish().await?;
        snapshots.published(&self.meta, &self.name).await?;
        Ok(self.state)
    }
}
