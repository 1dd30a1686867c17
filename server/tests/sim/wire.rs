//! How simulated clients talk to nodes: a length, a number, a body. One command a request.

use std::io;

use leasehold_core::Batch;
use leasehold_protocol::command::Command;
use leasehold_protocol::outcome::Outcome;
use leasehold_server::env::{ByteReader, ByteWriter};
use rkyv::rancor::Error;

const FRAME_LEN_MAX: usize = 64 * 1024;

/// What a node answers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    /// The command was applied.
    Done(Outcome),
    /// It was not; ask that node, or any.
    Elsewhere(Option<u64>),
    /// It was not: no quorum, or the node is busy.
    NotNow,
    /// It may have been.
    Unknown,
}

impl Answer {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (kind, body) = match self {
            Self::Done(outcome) => (0, outcome_bytes(outcome)),
            Self::Elsewhere(hint) => (1, hint.unwrap_or(0).to_le_bytes().to_vec()),
            Self::NotNow => (2, Vec::new()),
            Self::Unknown => (3, Vec::new()),
        };
        [vec![kind], body].concat()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Self {
        match bytes.split_first().expect("an answer has a kind") {
            (0, body) => {
                let outcome = rkyv::from_bytes::<Outcome, Error>(body);
                Self::Done(outcome.expect("the node encoded it"))
            }
            (1, body) => {
                let hint = u64::from_le_bytes(body.try_into().expect("eight bytes"));
                Self::Elsewhere((hint > 0).then_some(hint))
            }
            (2, _) => Self::NotNow,
            _ => Self::Unknown,
        }
    }
}

fn outcome_bytes(outcome: &Outcome) -> Vec<u8> {
    rkyv::to_bytes::<Error>(outcome).expect("an outcome is small").to_vec()
}

pub(crate) fn request(wall_ms: u64, command: &Command) -> Vec<u8> {
    Batch { wall_ms, commands: vec![command.clone()] }.encode()
}

pub(crate) async fn write_frame<W: ByteWriter>(
    writer: &mut W,
    number: u64,
    body: &[u8],
) -> io::Result<()> {
    let len = u32::try_from(body.len()).expect("bodies are small").to_le_bytes();
    writer.write_all(&[&len[..], &number.to_le_bytes(), body].concat()).await
}

/// The next frame; `None` at the stream's end.
pub(crate) async fn read_frame<R: ByteReader>(
    reader: &mut R,
) -> io::Result<Option<(u64, Vec<u8>)>> {
    let mut head = [0; 12];
    if !fill(reader, &mut head).await? {
        return Ok(None);
    }
    let (len, number) = head.split_at(4);
    let len = u32::from_le_bytes(len.try_into().expect("four bytes")) as usize;
    assert!(len <= FRAME_LEN_MAX, "frames of this test are small");
    let mut body = vec![0; len];
    if !fill(reader, &mut body).await? {
        return Ok(None);
    }
    Ok(Some((u64::from_le_bytes(number.try_into().expect("eight bytes")), body)))
}

async fn fill<R: ByteReader>(reader: &mut R, buf: &mut [u8]) -> io::Result<bool> {
    let mut filled = 0;
    while filled < buf.len() {
        match reader.read(&mut buf[filled..]).await? {
            0 => return Ok(false),
            len => filled += len,
        }
    }
    Ok(true)
}
