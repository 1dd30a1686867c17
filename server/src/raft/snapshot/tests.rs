//! The snapshot file: round trips in pieces of any size, and bytes that are not what was written.

use leasehold_protocol::ids::{ClusterId, DiskId, ShardId};

use super::format::{FileReader, FileWriter, Owner, SnapshotError};
use crate::raft::types::{LeaderId, LogId, Member, Membership, SnapshotMeta, StoredMembership};

const OWNER: Owner = Owner { cluster: ClusterId([3; 16]), shard: ShardId(5) };

fn meta() -> SnapshotMeta {
    let at = |index| LogId::new(LeaderId { term: 4, node_id: 2 }, index);
    let member = |node: u64| Member {
        disk: DiskId([node as u8; 16]),
        peer_addr: format!("node{node}:1"),
        client_addr: String::new(),
    };
    let nodes = (1..=3).map(|node| (node, member(node)));
    let nodes: std::collections::BTreeMap<u64, Member> = nodes.collect();
    let membership = Membership::new(vec![[1, 2, 3].into()], nodes).expect("voters are nodes");
    SnapshotMeta {
        last_log_id: Some(at(99)),
        last_membership: StoredMembership::new(Some(at(7)), membership),
    }
}

fn file(chunks: &[&[u8]]) -> Vec<u8> {
    let (mut writer, mut bytes) = FileWriter::new(OWNER, &meta());
    for chunk in chunks {
        bytes.extend(writer.chunk(chunk));
    }
    bytes.extend(writer.finish(0x00d1_9e57));
    bytes
}

fn read(owner: Owner, bytes: &[u8], piece: usize) -> Result<(Vec<u8>, u64), SnapshotError> {
    let mut reader = FileReader::new(owner);
    let mut state = Vec::new();
    for piece in bytes.chunks(piece) {
        reader.feed(piece, |chunk| {
            state.extend_from_slice(chunk);
            Ok(())
        })?;
    }
    let (read, digest) = reader.finish()?;
    assert_eq!(read, meta());
    Ok((state, digest))
}

#[test]
fn a_file_reads_back_in_pieces_of_any_size() {
    let large = vec![9; 3 * 1024 * 1024 + 17];
    let bytes = file(&[b"one", b"", &large, b"three"]);
    let whole = [b"one".as_slice(), &large, b"three"].concat();
    for piece in [1 << 10, 4096, 262_144, bytes.len()] {
        assert_eq!(read(OWNER, &bytes, piece).expect("sound"), (whole.clone(), 0x00d1_9e57));
    }
    let small = file(&[b"one", b"two"]);
    for piece in 1..60 {
        assert_eq!(read(OWNER, &small, piece).expect("sound").0, b"onetwo");
    }
    assert_eq!(read(OWNER, &file(&[]), 7).expect("sound").0, b"");
}

#[test]
fn every_changed_byte_is_found() {
    let bytes = file(&[b"a chunk of the state", b"another"]);
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0x41;
        let read = read(OWNER, &changed, 50);
        assert!(read.is_err(), "byte {at} of {}: {read:?}", bytes.len());
    }
}

#[test]
fn a_file_that_is_cut_or_goes_on_is_no_snapshot() {
    let bytes = file(&[b"a chunk of the state", b"another"]);
    for len in 0..bytes.len() {
        assert_eq!(read(OWNER, &bytes[..len], 64), Err(SnapshotError::Length), "{len} bytes");
    }
    let longer = [bytes.as_slice(), b"x"].concat();
    assert_eq!(read(OWNER, &longer, 64), Err(SnapshotError::Length));
}

#[test]
fn another_owners_file_is_refused_with_both_names() {
    let bytes = file(&[b"state"]);
    let cluster = Owner { cluster: ClusterId([4; 16]), ..OWNER };
    let error = read(cluster, &bytes, 64).expect_err("of another cluster");
    assert!(error.to_string().contains(&OWNER.cluster.to_string()));
    assert!(error.to_string().contains(&cluster.cluster.to_string()));
    let shard = Owner { shard: ShardId(6), ..OWNER };
    let found = SnapshotError::Shard { found: ShardId(5), expected: ShardId(6) };
    assert_eq!(read(shard, &bytes, 64), Err(found));
}

#[test]
fn giant_lengths_are_refused_before_anything_is_kept() {
    let (_, header) = FileWriter::new(OWNER, &meta());
    let mut giant_cover = header.clone();
    giant_cover[32..36].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(read(OWNER, &giant_cover, 64), Err(SnapshotError::Damaged(32)));
    let mut giant_chunk = header.clone();
    giant_chunk.extend_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(read(OWNER, &giant_chunk, 64), Err(SnapshotError::Damaged(header.len() as u64)));
}
