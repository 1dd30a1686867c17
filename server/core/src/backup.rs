//! What a backup of a cluster is worth: its bytes are read to the end, every shard's state is
//! rebuilt and checked, and what a restore needs of it is kept.
//!
//! A restored cluster takes over the counters alone. Leases, holds and queues end with the old
//! cluster, whose clients cannot know of the new one; so nothing of a state has to find its place
//! among another number of shards, and the states only say what there was.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use leasehold_protocol::backup::{BackupError, BackupHeader, BackupReader, Found};
use leasehold_protocol::ids::{LeaseId, ShardId};
use leasehold_protocol::planted;
use leasehold_protocol::reply::BackupShard;

use crate::snapshot::{Decoder, SnapshotError};
use crate::state::State;

/// Why a backup is of no use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsound {
    /// The file.
    #[error("{0}")]
    File(#[from] BackupError),
    /// A shard's state.
    #[error("shard {shard}: {error}")]
    State {
        /// The shard.
        shard: ShardId,
        /// What is wrong with it.
        error: SnapshotError,
    },
    /// A shard's state is not what its head says.
    #[error("shard {shard}: its state has {what}, its head says otherwise")]
    OtherState {
        /// The shard.
        shard: ShardId,
        /// What the state has.
        what: String,
    },
}

/// What a sound backup holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contents {
    /// The header.
    pub header: BackupHeader,
    /// Every shard, ascending.
    pub shards: Vec<ShardContents>,
}

/// One shard of a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardContents {
    /// Its head.
    pub about: BackupShard,
    /// Holds.
    pub holds: usize,
    /// Queued acquires.
    pub waiters: usize,
}

/// Reads a backup that is fed to it in pieces of any size.
#[derive(Default)]
pub struct Inspector {
    reader: BackupReader,
    shards: Vec<ShardContents>,
    open: Option<(BackupShard, Decoder)>,
}

impl Inspector {
    /// An inspector that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes. After an error it is of no use.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Unsound> {
        let Self { reader, shards, open } = self;
        reader.feed(bytes, |found| match found {
            Found::Header(_) => Ok(()),
            Found::Shard(about) => {
                *open = Some((about, Decoder::redacted()));
                Ok(())
            }
            Found::Piece(piece) => {
                let (about, decoder) = open.as_mut().expect("a piece belongs to a shard");
                let shard = about.shard;
                decoder.feed(piece).map_err(|error| Unsound::State { shard, error })
            }
            Found::ShardEnd => {
                let (about, decoder) = open.take().expect("a shard that ends was begun");
                let shard = about.shard;
                let state = decoder.finish().map_err(|error| Unsound::State { shard, error })?;
                let found = state.contents();
                // Planted (G2): the counters go on from what a head says, whatever its state has.
                if found.about != about && !planted!("backup-head-believed") {
                    let what = format!("{:?}", found.about);
                    return Err(Unsound::OtherState { shard, what });
                }
                shards.push(found);
                Ok(())
            }
        })
    }

    /// All bytes were fed.
    pub fn finish(self) -> Result<Contents, Unsound> {
        let header = self.reader.finish()?;
        Ok(Contents { header, shards: self.shards })
    }
}

impl State {
    /// What a restore says of this state. Walks all keys.
    pub fn contents(&self) -> ShardContents {
        let holds = self.keys.iter().map(|(_, entry)| entry.holds.len()).sum();
        let waiters = self.keys.iter().map(|(_, entry)| entry.queue.len()).sum();
        ShardContents { about: self.about(), holds, waiters }
    }

    /// What a backup says of this state.
    pub fn about(&self) -> BackupShard {
        BackupShard {
            shard: self.shard(),
            revision: self.revision(),
            last_token: self.last_token(),
            last_lease: LeaseId(self.last_lease),
            leases: self.leases.len() as u64,
            keys: self.keys.len() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use leasehold_protocol::backup::BackupWriter;
    use leasehold_protocol::command::{Caller, Command, OwnLease};
    use leasehold_protocol::ids::{ClusterId, Mode, Number, Secret, Token};

    use super::*;
    use crate::snapshot::Encoder;

    const SECRET: Secret = Secret(*b"never in backups");

    fn state() -> State {
        let mut state = State::new(ShardId(0));
        let mut apply = |command| state.apply(0, &command, &mut Vec::new());
        apply(Command::Begin { token_base: Token(1_000) });
        for _ in 1..=3 {
            apply(Command::Open { ttl_ms: 5_000, secret: SECRET, label: vec![b'a'] });
        }
        for lease in 1..=3 {
            let (lease, acks) = (LeaseId(lease), vec![]);
            let (number, floor) = (Number(1), Number(0));
            apply(Command::Acquire {
                caller: Caller { lease, secret: SECRET, number, floor, acks },
                key: b"k".to_vec(),
                mode: Mode::EXCLUSIVE,
                own: Some(OwnLease { ttl_ms: 5_000, secret: SECRET }),
                value: vec![],
                wait_ms: 9_000,
            });
        }
        state
    }

    fn backup(state: &State, about: &BackupShard) -> Vec<u8> {
        let (cluster, key_hash) = (ClusterId([1; 16]), 1);
        let header = BackupHeader { cluster, wall_ms: 5, shards: 1, key_hash };
        let (mut writer, mut bytes) = BackupWriter::new(&header);
        bytes.extend(writer.shard(about));
        for chunk in Encoder::redacted(state) {
            bytes.extend(writer.piece(&chunk));
        }
        bytes.extend(writer.shard_end());
        bytes.extend(writer.finish());
        bytes
    }

    fn inspect(bytes: &[u8]) -> Result<Contents, Unsound> {
        let mut inspector = Inspector::new();
        bytes.chunks(100).try_for_each(|bytes| inspector.feed(bytes))?;
        inspector.finish()
    }

    #[test]
    fn a_backup_says_what_there_was_and_holds_no_secret() {
        let state = state();
        let bytes = backup(&state, &state.about());
        let contents = inspect(&bytes).expect("a sound backup");
        let [shard] = contents.shards[..] else { panic!("{contents:?}") };
        assert_eq!(shard.about, state.about());
        assert_eq!((shard.about.leases, shard.about.keys), (4, 1));
        assert_eq!((shard.holds, shard.waiters), (1, 2));
        assert!(!bytes.windows(16).any(|window| window == SECRET.0));
    }

    #[test]
    fn a_head_that_lies_is_noticed() {
        let state = state();
        let lying = BackupShard { last_token: Token(5), ..state.about() };
        let error = inspect(&backup(&state, &lying)).expect_err("another token counter");
        assert!(matches!(error, Unsound::OtherState { .. }), "{error}");
        let lying = BackupShard { shard: ShardId(0), ..State::new(ShardId(0)).about() };
        assert!(inspect(&backup(&state, &lying)).is_err());
    }
}
