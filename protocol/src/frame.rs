//! The frame: a length, a header, a body; the same for clients and for peers.
//!
//! ```text
//! offset  size  field
//!      0     4  length     u32, of all that follows: HEADER_LEN + body
//!      4     1  version    u8
//!      5     1  kind       u8, see `kind`
//!      6     2  flags      u16, 0 in version 1
//!      8     8  id         u64, the request's id; 0 belongs to no request
//!     16     4  checksum   CRC-32C of the bytes 4..16 and of the body
//!     20     -  body
//! ```
//!
//! All numbers are little-endian. This layout is the same in every protocol version.
//!
//! The decoder trusts the length only as far as its own limit: it allocates for bytes that came,
//! never for bytes that were announced. After its first error it is at its end, because the
//! length that would lead to the next frame cannot be trusted any more; it never resynchronises.

use alloc::vec::Vec;
use core::fmt;

use crate::error::ErrorCode;
use crate::ids::RequestId;
use crate::limits::HEADER_LEN;

/// Names the protocol in a hello: the bytes `LEASEHLD`, read as a little-endian number.
pub const MAGIC: u64 = u64::from_le_bytes(*b"LEASEHLD");
/// Lowest protocol version spoken by this build.
pub const VERSION_MIN: u8 = 1;
/// Highest protocol version spoken by this build.
pub const VERSION_MAX: u8 = 1;

/// Length of the length field.
pub const PREFIX_LEN: usize = 4;
/// Where a body starts, counted from its frame's first byte.
pub const BODY_AT: usize = PREFIX_LEN + HEADER_LEN;

const CHECKSUM_AT: usize = BODY_AT - 4;
/// A decoder's buffer larger than this is given back as soon as it is empty, so that one large
/// frame does not cost its memory for the rest of an idle connection's life.
const BUFFER_KEPT_MAX: usize = 16 * 1024;

/// A received frame; the body is borrowed from the decoder's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The protocol version of the body.
    pub version: u8,
    /// The type of the body, see `kind`.
    pub kind: u8,
    /// Reserved; 0 in version 1.
    pub flags: u16,
    /// The request's id.
    pub id: RequestId,
    /// The body, not yet validated.
    pub body: &'a [u8],
}

/// Another protocol that arrived on our port (recognised by its first four bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// An HTTP request.
    Http,
    /// A TLS handshake.
    Tls,
    /// An SSH banner.
    Ssh,
    /// Zeros.
    Zeros,
    /// Some other text.
    Text,
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Http => "an HTTP request",
            Self::Tls => "a TLS handshake",
            Self::Ssh => "an SSH banner",
            Self::Zeros => "a run of zeros",
            Self::Text => "text",
        })
    }
}

/// Why a byte stream cannot be read any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The stream opens with another protocol.
    #[error("this is a Leasehold port, and the stream opens with {0}")]
    Foreign(Foreign),
    /// The length is above the connection's limit.
    #[error("a frame's length of {length} is above the limit of {length_max} bytes")]
    TooLarge {
        /// The length that was announced, in bytes.
        length: u32,
        /// The limit, in bytes.
        length_max: usize,
    },
    /// The length is below that of a header.
    #[error("a frame's length of {length} is below the header's {} bytes", HEADER_LEN)]
    TooShort {
        /// The length that was announced, in bytes.
        length: u32,
    },
    /// The checksum does not match.
    #[error("a frame's checksum is {stated:#010x} and its bytes give {computed:#010x}")]
    BadChecksum {
        /// The checksum in the frame.
        stated: u32,
        /// The checksum of the received bytes.
        computed: u32,
    },
}

impl FrameError {
    /// The wire code of this error.
    pub const fn code(self) -> ErrorCode {
        match self {
            Self::TooLarge { .. } => ErrorCode::FRAME_TOO_LARGE,
            Self::BadChecksum { .. } => ErrorCode::BAD_CHECKSUM,
            Self::Foreign(_) | Self::TooShort { .. } => ErrorCode::MALFORMED,
        }
    }
}

/// Why a body was not framed. The output is as it was before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The body is longer than the receiver accepts.
    #[error("a body of {length} bytes is above the limit of {length_max}")]
    TooLarge {
        /// The body's length, in bytes.
        length: usize,
        /// The limit, in bytes.
        length_max: usize,
    },
}

/// What a frame's header says, without what is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The protocol version of the body.
    pub version: u8,
    /// The type of the body, see `kind`.
    pub kind: u8,
    /// Reserved; 0 in version 1.
    pub flags: u16,
    /// The request's id.
    pub id: RequestId,
}

impl Header {
    /// A header of the newest version this build speaks.
    pub const fn new(kind: u8, id: RequestId) -> Self {
        Self { version: VERSION_MAX, kind, flags: 0, id }
    }
}

/// Appends a frame to `out`. `write_body` appends the body where it belongs, so that no copy of it
/// is made; it must append only.
pub fn append(
    header: Header,
    body_max: usize,
    out: &mut Vec<u8>,
    write_body: impl FnOnce(&mut Vec<u8>),
) -> Result<(), EncodeError> {
    assert!(body_max <= u32::MAX as usize - HEADER_LEN, "a length fits its field");
    let start = out.len();
    out.extend_from_slice(&[0; PREFIX_LEN]);
    out.extend_from_slice(&[header.version, header.kind]);
    out.extend_from_slice(&header.flags.to_le_bytes());
    out.extend_from_slice(&header.id.0.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    write_body(out);
    let length = out.len().checked_sub(start + BODY_AT).expect("write_body appends only");
    if length > body_max {
        out.truncate(start);
        return Err(EncodeError::TooLarge { length, length_max: body_max });
    }
    let frame = &mut out[start..];
    let prefix = u32::try_from(HEADER_LEN + length).expect("checked against body_max");
    frame[..PREFIX_LEN].copy_from_slice(&prefix.to_le_bytes());
    let checksum = checksum(&frame[PREFIX_LEN..]);
    frame[CHECKSUM_AT..BODY_AT].copy_from_slice(&checksum.to_le_bytes());
    Ok(())
}

/// The checksum over a frame without its length field.
fn checksum(header_and_body: &[u8]) -> u32 {
    let (header, rest) = header_and_body.split_at(HEADER_LEN - 4);
    crc32c::crc32c_append(crc32c::crc32c(header), &rest[4..])
}

/// Cuts a byte stream into frames.
///
/// Take frames until there is none before feeding more: the buffer then never holds more than one
/// unfinished frame and one read.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Bytes of `buffer` already taken.
    taken: usize,
    body_max: usize,
    /// Nothing was taken yet: the stream may still turn out to be another protocol.
    at_start: bool,
    failed: Option<FrameError>,
}

impl Decoder {
    /// A decoder that refuses bodies longer than `body_max` bytes.
    pub const fn new(body_max: usize) -> Self {
        Self { buffer: Vec::new(), taken: 0, body_max, at_start: true, failed: None }
    }

    /// Changes the limit for the frames that follow: a connection may do more once it is known.
    pub const fn set_body_max(&mut self, body_max: usize) {
        self.body_max = body_max;
    }

    /// Takes received bytes. After an error they are dropped.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.failed.is_some() {
            return;
        }
        if self.taken > 0 && self.buffer.capacity() - self.buffer.len() < bytes.len() {
            self.buffer.drain(..self.taken);
            self.taken = 0;
        }
        self.reserve(bytes.len());
        self.buffer.extend_from_slice(bytes);
    }

    /// Grows by doubling as `Vec` does, but never past one frame and this read.
    fn reserve(&mut self, more: usize) {
        let needed = self.buffer.len() + more;
        if needed > self.buffer.capacity() {
            let bound = BODY_AT + self.body_max + more;
            let capacity = needed.max(bound.min(2 * self.buffer.capacity()));
            self.buffer.reserve_exact(capacity - self.buffer.len());
        }
    }

    /// The next whole frame; `None` until more bytes came. An error is final and is returned again
    /// by every later call.
    #[expect(clippy::should_implement_trait, reason = "it lends from the decoder; no iterator can")]
    pub fn next(&mut self) -> Result<Option<Frame<'_>>, FrameError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        match self.cut() {
            Ok(Some(end)) => {
                let start = self.taken;
                self.taken = end;
                self.at_start = false;
                Ok(Some(parse(&self.buffer[start..end])))
            }
            Ok(None) => {
                self.give_back();
                Ok(None)
            }
            Err(error) => {
                self.failed = Some(error);
                self.buffer = Vec::new();
                self.taken = 0;
                Err(error)
            }
        }
    }

    /// Where the frame at `taken` ends, if it is there as a whole and sound.
    fn cut(&self) -> Result<Option<usize>, FrameError> {
        let rest = &self.buffer[self.taken..];
        let Some(prefix) = rest.first_chunk::<PREFIX_LEN>() else {
            return Ok(None);
        };
        if self.at_start
            && let Some(foreign) = recognise(*prefix)
        {
            return Err(FrameError::Foreign(foreign));
        }
        let length = u32::from_le_bytes(*prefix);
        let length_max = HEADER_LEN + self.body_max;
        if length as usize > length_max {
            return Err(FrameError::TooLarge { length, length_max });
        }
        if (length as usize) < HEADER_LEN {
            return Err(FrameError::TooShort { length });
        }
        let end = PREFIX_LEN + length as usize;
        if rest.len() < end {
            return Ok(None);
        }
        let stated = u32_at(rest, CHECKSUM_AT);
        let computed = checksum(&rest[PREFIX_LEN..end]);
        // Planted (section 8 of the design): bytes that were hurt on the way are believed.
        if stated != computed && !crate::planted!("frame-checksum-unread") {
            return Err(FrameError::BadChecksum { stated, computed });
        }
        Ok(Some(self.taken + end))
    }

    /// Forgets taken bytes where that costs nothing.
    fn give_back(&mut self) {
        if self.taken == self.buffer.len() {
            self.taken = 0;
            if self.buffer.capacity() > BUFFER_KEPT_MAX {
                self.buffer = Vec::new();
            } else {
                self.buffer.clear();
            }
        }
    }

    /// Bytes received and not yet taken.
    pub fn buffered_len(&self) -> usize {
        self.buffer.len() - self.taken
    }

    /// Bytes of memory that the buffer has.
    pub fn buffer_capacity(&self) -> usize {
        self.buffer.capacity()
    }
}

/// Reads a frame whose length and checksum were accepted.
fn parse(frame: &[u8]) -> Frame<'_> {
    let id = frame[8..CHECKSUM_AT].try_into().expect("a header has eight bytes of id");
    Frame {
        version: frame[4],
        kind: frame[5],
        flags: u16::from_le_bytes([frame[6], frame[7]]),
        id: RequestId(u64::from_le_bytes(id)),
        body: &frame[BODY_AT..],
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// Names another protocol by its first four bytes. None of them is a length that a hello can have:
/// all but the zeros would be above 64 KiB.
const fn recognise(prefix: [u8; PREFIX_LEN]) -> Option<Foreign> {
    match &prefix {
        b"GET " | b"POST" | b"PUT " | b"HEAD" | b"DELE" | b"OPTI" | b"PATC" | b"CONN" | b"TRAC"
        | b"PRI " => Some(Foreign::Http),
        b"SSH-" => Some(Foreign::Ssh),
        [0x16, 0x03, 0..=4, _] => Some(Foreign::Tls),
        [0, 0, 0, 0] => Some(Foreign::Zeros),
        [a, b, c, d] if is_text(*a) && is_text(*b) && is_text(*c) && is_text(*d) => {
            Some(Foreign::Text)
        }
        _ => None,
    }
}

const fn is_text(byte: u8) -> bool {
    byte.is_ascii_graphic() || matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}
