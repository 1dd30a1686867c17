//! A shard's state as a stream of bytes: taken in bounded chunks, read in any pieces.
//!
//! **Taking one does not stop the core.** `Encoder::new` clones the tables, which shares every tree
//! node with the live ones and costs a few reference counts. Afterwards each write to the live
//! state copies the nodes on its path that are still shared: at most one path (some five nodes of
//! up to 32 entries, a few microseconds) per table it writes, once per node. The encoder works
//! whenever it is asked for the next chunk, on the frozen tables, and gives each node up once it is
//! written. Until then memory holds old nodes beside new ones: at worst twice the tables, while
//! keys and values are shared.
//!
//! Bytes, all little-endian:
//!
//! ```text
//! magic "LHSNAP\r\n"   version u32
//! block: payload length u32 | crc32c u32 | payload
//! block: ...
//! ```
//!
//! A payload is a sequence of items, each a u32 length and an rkyv archive. The first item is the
//! header (with the state's digest), the last the end mark (with the number of items). Each
//! checksum is continued from the block before, so that a block that is missing, doubled or in a
//! wrong place is found as surely as a changed one.
//!
//! The decoder trusts nothing: it allocates for bytes it was given, never for lengths it was told,
//! validates each archive, rebuilds the state, runs `invariants::check` over it and compares the
//! digest. Any defect is an error, never a panic and never half a state.

mod decode;
mod encode;
mod former;
mod item;

pub use decode::{Decoder, SnapshotError};
pub use encode::Encoder;

/// The format that this build writes. It reads this one and the one before.
pub const SNAPSHOT_VERSION: u32 = 3;
/// A block's payload is closed once it has this many bytes; so a chunk has at most this many plus
/// one item.
pub const CHUNK_LEN: usize = 64 * 1024;

/// The format before.
const FORMER_VERSION: u32 = 2;

const MAGIC: [u8; 8] = *b"LHSNAP\r\n";
const PRELUDE_LEN: usize = 12;
const BLOCK_HEADER_LEN: usize = 8;
/// Longest payload that the decoder accepts: a full chunk and the longest item.
const BLOCK_LEN_MAX: usize = CHUNK_LEN + 16 * 1024;

#[cfg(test)]
mod tests;
