//! Snapshots of one group: building, keeping, loading and receiving them.
//!
//! Owns the files `snapshot-….snap` of its shard in the core's directory, and no other. A file is
//! complete under its name or not there at all (`Disk::draft`). At least the two newest are kept,
//! and every one that somebody reads. A damaged file is passed over at start in favour of an older
//! one; it is never sent and never spreads.

mod format;
mod receive;

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use leasehold_core::{State, snapshot};
use leasehold_protocol::peer::SNAPSHOT_CHUNK_MAX;
use openraft::storage::RaftSnapshotBuilder;
use openraft::type_config::TypeConfigExt;

pub(crate) use format::Owner;
pub(crate) use format::SnapshotError;
use format::{FileReader, FileWriter};
pub(crate) use receive::{Received, Receiving};

use super::convert;
use super::signal::Signal;
use super::types::{LeaderId, LogId, Member, RaftTypes, SnapshotMeta};
use crate::env::{Disk, Draft, Env};
use crate::wal::WalShard;

/// Snapshots that are kept though newer ones are there.
const KEPT: usize = 2;

/// A snapshot as the engine passes it on: on a disk, or just received and verified.
pub(crate) enum SnapshotFile<E: Env> {
    /// The file stays as long as this does.
    Published { source: Rc<Snapshots<E>>, name: Rc<str> },
    /// Not yet published.
    Received(Box<Received<E>>),
}

/// The snapshots of one group on this node's disk.
pub(crate) struct Snapshots<E: Env> {
    disk: E::Disk,
    wal: WalShard<E>,
    owner: Owner,
    /// Oldest first.
    kept: RefCell<Vec<(SnapshotMeta, Rc<str>)>>,
    /// Files that were passed over; they go when the next snapshot is there.
    damaged: RefCell<Vec<Rc<str>>>,
    /// Raised by each snapshot that counts from now on.
    pub(crate) published: Signal,
}

/// A snapshot's state, with what it covers.
pub(crate) struct Loaded {
    pub(crate) meta: SnapshotMeta,
    pub(crate) state: State,
}

impl<E: Env> Snapshots<E> {
    /// Finds the snapshots on the disk and loads the newest good one.
    pub(crate) async fn open(
        disk: E::Disk,
        wal: WalShard<E>,
        owner: Owner,
    ) -> io::Result<(Rc<Self>, Option<Loaded>)> {
        let names = names(&disk, owner).await?;
        let (kept, damaged, published) = Default::default();
        let this = Self { disk, wal, owner, kept, damaged, published };
        let mut newest = None;
        for name in names.into_iter().rev() {
            let found = match newest {
                None => this.load(&name).await.map(|loaded| {
                    let meta = loaded.meta.clone();
                    newest = Some(loaded);
                    meta
                }),
                Some(_) => this.peek(&name).await,
            };
            match found {
                Ok(meta) => this.kept.borrow_mut().insert(0, (meta, name.into())),
                Err(LoadError::Io(error)) => return Err(error),
                Err(LoadError::Bad(error)) => {
                    let shard = owner.shard.0;
                    tracing::error!(shard, file = name, "a snapshot is passed over: {error}");
                    this.damaged.borrow_mut().push(name.into());
                }
            }
        }
        Ok((Rc::new(this), newest))
    }

    /// The newest snapshot.
    pub(crate) fn current(self: &Rc<Self>) -> Option<Built<E>> {
        let kept = self.kept.borrow();
        let (meta, name) = kept.last()?;
        let snapshot = SnapshotFile::Published { source: self.clone(), name: name.clone() };
        Some(Built { meta: meta.clone(), snapshot })
    }

    /// What the snapshot before the newest one covers.
    pub(crate) fn previous(&self) -> Option<SnapshotMeta> {
        let kept = self.kept.borrow();
        kept.iter().nth_back(1).map(|(meta, _)| meta.clone())
    }

    /// Under which name a snapshot is published. One that covers what the newest covers does not
    /// replace it: a shard that stands still has two as well, so that all of its log can be cut.
    fn next_name(&self, last: Option<&LogId>) -> Rc<str> {
        let name = name(self.owner, last, SUFFIX);
        let kept = self.kept.borrow();
        let newest = kept.last().is_some_and(|(_, newest)| *newest == name);
        if newest { self::name(self.owner, last, SUFFIX_AGAIN) } else { name }
    }

    /// Up to `SNAPSHOT_CHUNK_MAX` bytes of a file; fewer only at its end.
    pub(crate) async fn read(&self, name: &str, offset: u64) -> io::Result<Vec<u8>> {
        self.disk.read_at(name, offset, SNAPSHOT_CHUNK_MAX).await
    }

    /// Makes a snapshot this group's own, durable under its name, and returns the state in it.
    pub(crate) async fn adopt(
        self: &Rc<Self>,
        meta: &SnapshotMeta,
        file: SnapshotFile<E>,
    ) -> Result<State, LoadError> {
        match file {
            SnapshotFile::Received(received) => Ok(received.publish(self).await?),
            SnapshotFile::Published { source, name } if Rc::ptr_eq(&source, self) => {
                Ok(self.load(&name).await?.state)
            }
            SnapshotFile::Published { source, name } => {
                let mut receiving = Receiving::begin(self, meta.clone()).await?;
                loop {
                    let bytes = source.read(&name, receiving.len()).await?;
                    if bytes.is_empty() {
                        break;
                    }
                    receiving.chunk(&bytes).await?;
                }
                Ok(receiving.finish()?.publish(self).await?)
            }
        }
    }

    async fn load(&self, name: &str) -> Result<Loaded, LoadError> {
        load(&self.disk, self.owner, name).await
    }

    /// What a file says it covers, without reading all of it.
    async fn peek(&self, name: &str) -> Result<SnapshotMeta, LoadError> {
        let mut reader = FileReader::new(self.owner);
        let bytes = self.disk.read_at(name, 0, 2 * SNAPSHOT_CHUNK_MAX).await?;
        reader.feed(&bytes, |_| Ok(()))?;
        Ok(reader.meta().cloned().ok_or(SnapshotError::Length)?)
    }

    async fn draft(&self, name: &str) -> io::Result<<E::Disk as Disk>::Draft> {
        self.disk.draft(name).await
    }

    /// A file was published: it counts from now on, and old ones go.
    async fn published(&self, meta: &SnapshotMeta, name: &Rc<str>) -> io::Result<()> {
        if let Some(last) = &meta.last_log_id {
            self.wal.snapshot_mark(&convert::log_id_record(last))?;
        }
        let old: Vec<Rc<str>> = {
            let mut kept = self.kept.borrow_mut();
            kept.retain(|(_, other)| other != name);
            kept.push((meta.clone(), name.clone()));
            kept.sort_by_key(|(meta, _)| meta.last_log_id);
            let surplus = kept.len().saturating_sub(KEPT);
            let unused = |(_, name): &(SnapshotMeta, Rc<str>)| Rc::strong_count(name) == 1;
            let old = kept.extract_if(..surplus, |entry| unused(entry));
            old.map(|(_, name)| name).collect()
        };
        self.published.raise();
        let damaged = self.damaged.take().into_iter().filter(|damaged| damaged != name);
        for name in old.into_iter().chain(damaged) {
            self.disk.remove(&name).await?;
        }
        Ok(())
    }
}

/// The files of an owner's snapshots, the newest last.
async fn names<D: Disk>(disk: &D, owner: Owner) -> io::Result<Vec<String>> {
    let prefix = name_prefix(owner);
    let mut names: Vec<String> = disk.list().await?;
    names.retain(|name| name.starts_with(&prefix) && name.ends_with(SUFFIX));
    names.sort();
    Ok(names)
}

async fn load<D: Disk>(disk: &D, owner: Owner, name: &str) -> Result<Loaded, LoadError> {
    let mut reader = FileReader::new(owner);
    let mut decoder = StateReader::new(owner);
    let mut offset = 0;
    loop {
        let bytes = disk.read_at(name, offset, SNAPSHOT_CHUNK_MAX).await?;
        reader.feed(&bytes, |chunk| decoder.feed(chunk))?;
        offset += bytes.len() as u64;
        if bytes.len() < SNAPSHOT_CHUNK_MAX {
            break;
        }
    }
    let (meta, digest) = reader.finish()?;
    Ok(Loaded { meta, state: decoder.finish(digest)? })
}

/// The newest sound snapshot on a disk that nobody uses, if there is one.
pub(crate) async fn newest<D: Disk>(disk: &D, owner: Owner) -> Result<Option<Loaded>, LoadError> {
    for name in names(disk, owner).await?.iter().rev() {
        match load(disk, owner, name).await {
            Ok(loaded) => return Ok(Some(loaded)),
            Err(LoadError::Bad(error)) => {
                tracing::warn!(shard = owner.shard.0, file = name, "passed over: {error}");
            }
            Err(error @ LoadError::Io(_)) => return Err(error),
        }
    }
    Ok(None)
}

/// Why a snapshot was not loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Bad(#[from] SnapshotError),
}

impl From<LoadError> for io::Error {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::Io(error) => error,
            LoadError::Bad(error) => Self::new(io::ErrorKind::InvalidData, error),
        }
    }
}

const SUFFIX: &str = ".snap";
/// Of a second snapshot at the same place.
const SUFFIX_AGAIN: &str = ".again.snap";

fn name_prefix(owner: Owner) -> String {
    format!("snapshot-{:05}-", owner.shard.0)
}

/// Names sort as what they cover.
fn name(owner: Owner, last: Option<&LogId>, suffix: &str) -> Rc<str> {
    let (index, term, node) =
        last.map_or((0, 0, 0), |last| (last.index, last.leader_id.term, last.leader_id.node_id));
    format!("{}{index:020}-{term:020}-{node:020}{suffix}", name_prefix(owner)).into()
}

/// Builds one snapshot from a frozen view of the state.
pub(crate) struct Builder<E: Env> {
    snapshots: Rc<Snapshots<E>>,
    meta: SnapshotMeta,
    digest: u64,
    encoder: snapshot::Encoder,
}

impl<E: Env> Builder<E> {
    pub(crate) fn new(snapshots: Rc<Snapshots<E>>, meta: SnapshotMeta, state: &State) -> Self {
        let encoder = snapshot::Encoder::new(state);
        Self { snapshots, meta, digest: state.digest(), encoder }
    }
}

impl<E: Env> RaftSnapshotBuilder<RaftTypes<E>> for Builder<E> {
    type SnapshotData = SnapshotFile<E>;

    async fn build_snapshot(&mut self) -> io::Result<Built<E>> {
        let snapshots = self.snapshots.clone();
        let name = snapshots.next_name(self.meta.last_log_id.as_ref());
        let mut draft = snapshots.draft(&name).await?;
        let (mut writer, bytes) = FileWriter::new(snapshots.owner, &self.meta);
        draft.write(&bytes).await?;
        for chunk in self.encoder.by_ref() {
            draft.write(&writer.chunk(&chunk)).await?;
            // Others get their turn however fast the disk is.
            RaftTypes::<E>::yield_now().await;
        }
        draft.write(&writer.finish(self.digest)).await?;
        draft.publish().await?;
        snapshots.published(&self.meta, &name).await?;
        let snapshot = SnapshotFile::Published { source: snapshots, name };
        Ok(Built { meta: self.meta.clone(), snapshot })
    }
}

/// A snapshot with what it covers.
pub(crate) type Built<E> = openraft::storage::Snapshot<LeaderId, u64, Member, SnapshotFile<E>>;

/// Decodes a state from verified pieces.
struct StateReader {
    owner: Owner,
    decoder: snapshot::Decoder,
}

impl StateReader {
    fn new(owner: Owner) -> Self {
        Self { owner, decoder: snapshot::Decoder::new() }
    }

    fn feed(&mut self, chunk: &[u8]) -> Result<(), SnapshotError> {
        self.decoder.feed(chunk).map_err(|error| SnapshotError::State(error.to_string()))
    }

    fn finish(self, digest: u64) -> Result<State, SnapshotError> {
        let state = self.decoder.finish();
        let state = state.map_err(|error| SnapshotError::State(error.to_string()))?;
        if state.digest() != digest || state.shard() != self.owner.shard {
            return Err(SnapshotError::State("its digest or its shard does not match".to_owned()));
        }
        Ok(state)
    }
}

#[cfg(test)]
mod crash;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
