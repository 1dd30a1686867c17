//! A batch of commands as one entry of the log.
//!
//! Bytes: format version (1), wall clock of the proposer (u64), number of commands (u32), then each
//! command as a u32 length and its rkyv archive, exactly as it travelled; all little-endian. So a
//! batch is built command by command, its size known at any time.

use alloc::vec::Vec;

use leasehold_protocol::codec;
use leasehold_protocol::command::Command;

/// The format that `Batch::encode` writes.
pub const BATCH_VERSION: u8 = 1;

const HEADER_LEN: usize = 13;
const COUNT_AT: core::ops::Range<usize> = 9..13;

/// The content of one log entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The proposer's wall clock, in Unix milliseconds; for display only.
    pub wall_ms: u64,
    /// In the order in which they are applied.
    pub commands: Vec<Command>,
}

/// Why bytes are not a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The format version is not known here: written by a newer build.
    #[error("a batch of format version {0}; this build reads version {BATCH_VERSION}")]
    Version(u8),
    /// The bytes end within the batch, or go on after it.
    #[error("a batch whose length does not fit its content")]
    Length,
    /// A command is not what a command looks like.
    #[error("command {0} of a batch is malformed")]
    Malformed(u32),
}

impl Batch {
    /// The bytes for the log.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = BatchWriter::new(self.wall_ms);
        self.commands.iter().for_each(|command| writer.push(command));
        writer.finish()
    }

    /// Reads what `encode` wrote. Nothing is trusted: every command is validated, and nothing is
    /// allocated for counts and lengths that the bytes do not back.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        match bytes.first() {
            Some(&BATCH_VERSION) => {}
            Some(&version) => return Err(DecodeError::Version(version)),
            None => return Err(DecodeError::Length),
        }
        let (header, mut rest) = bytes.split_at_checked(HEADER_LEN).ok_or(DecodeError::Length)?;
        let wall_ms = u64::from_le_bytes(header[1..9].try_into().expect("8 bytes"));
        let count = u32::from_le_bytes(header[COUNT_AT].try_into().expect("4 bytes"));
        let mut commands = Vec::with_capacity((count as usize).min(rest.len() / 8));
        for index in 0..count {
            let (len, after) = rest.split_first_chunk().ok_or(DecodeError::Length)?;
            let len = u32::from_le_bytes(*len) as usize;
            let (archive, after) = after.split_at_checked(len).ok_or(DecodeError::Length)?;
            let command = codec::decode(archive).map_err(|_| DecodeError::Malformed(index))?;
            commands.push(command);
            rest = after;
        }
        if rest.is_empty() { Ok(Self { wall_ms, commands }) } else { Err(DecodeError::Length) }
    }
}

/// Builds a batch's bytes one command at a time.
#[derive(Clone, Debug)]
pub struct BatchWriter {
    bytes: Vec<u8>,
    count: u32,
}

impl BatchWriter {
    /// An empty batch.
    pub fn new(wall_ms: u64) -> Self {
        let mut bytes = Vec::with_capacity(1024);
        bytes.push(BATCH_VERSION);
        bytes.extend_from_slice(&wall_ms.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        Self { bytes, count: 0 }
    }

    /// Adds a command at the end.
    pub fn push(&mut self, command: &Command) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        codec::encode_into(command, &mut self.bytes);
        let len = (self.bytes.len() - start - 4) as u32;
        self.bytes[start..start + 4].copy_from_slice(&len.to_le_bytes());
        self.count += 1;
    }

    /// Commands so far.
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// True before the first command.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes so far, as they go to the log.
    pub fn byte_len(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes for the log.
    pub fn finish(mut self) -> Vec<u8> {
        self.bytes[COUNT_AT].copy_from_slice(&self.count.to_le_bytes());
        self.bytes
    }
}
