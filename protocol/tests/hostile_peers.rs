//! Hostile bytes on the peer port: mutations of every frame that nodes send each other, those of the
//! handshake and of a cluster's birth among them. The handshake itself is a test of the server.

#![allow(clippy::unwrap_used, reason = "the helpers of a test are part of it")]

mod common;
mod hostile_support;

use common::{replies, requests};
use hostile_support::frames::{Tally, check_as, decode_within_bound, mutation};
use hostile_support::{Random, Shown, corpus, times};
use leasehold_protocol::birth::{
    self, BirthAnswer, BirthMember, BirthPropose, BirthRecord, BirthReply, Plan,
};
use leasehold_protocol::codec::{self, Body};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::frame::{self, Header, MAGIC};
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, RequestId, ShardId};
use leasehold_protocol::limits::PEER_BODY_MAX;
use leasehold_protocol::peer::{
    self, AppendAnswer, AppendRequest, Ballot, EntryBody, LogEntry, MemberEntry, Members,
    PeerHello, PeerIdentity, PeerProof, PeerRefusal, PeerWelcome, Position, SnapshotAnswer,
    SnapshotBegin, SnapshotChunk, SnapshotCover, SnapshotEnd, TransferAnswer, TransferRequest,
    VoteAnswer, VoteRequest,
};
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;

/// Inputs that once found something.
const CORPUS: &str = include_str!("hostile_support/corpus.txt");
/// A forwarded request of a client: its kind, then its body.
const FORWARD: u8 = peer::SERVICE_MIN;

const BALLOT: Ballot = Ballot { term: 7, node: NodeId(2), committed: true };
const SHARD: ShardId = ShardId(3);

const fn at(index: u64) -> Position {
    Position { term: 6, leader: NodeId(2), index }
}

fn identity(node: u64) -> PeerIdentity {
    PeerIdentity {
        cluster: ClusterId([1; 16]),
        node: NodeId(node),
        disk: DiskId([node as u8; 16]),
        boot: 5,
        nonce: [9; 16],
        peer_addr: format!("node{node}.example:7401"),
        client_addr: format!("node{node}.example:7400"),
    }
}

fn members() -> Members {
    let entry = |node: u64| MemberEntry {
        node: NodeId(node),
        disk: DiskId([node as u8; 16]),
        peer_addr: format!("node{node}.example:7401"),
        client_addr: format!("n{node}"),
    };
    Members { configs: vec![vec![1, 2, 3], vec![2, 3, 4]], nodes: (1..=4).map(entry).collect() }
}

fn record() -> BirthRecord {
    let member = |node: u64| BirthMember {
        node: NodeId(node),
        disk: DiskId([node as u8; 16]),
        peer_addr: format!("node{node}.example:7401"),
        client_addr: format!("node{node}.example:7400"),
    };
    BirthRecord {
        cluster: ClusterId([1; 16]),
        name: "production".into(),
        members: (1..=3).map(member).collect(),
        shards: 4,
        key_hash: 1,
        token_base: 1 << 40,
        restored: None,
    }
}

fn frame<T: Body>(kind: u8, body: &T) -> Vec<u8> {
    let mut out = Vec::new();
    let header = Header::new(kind, RequestId(77));
    codec::encode_frame(header, body, PEER_BODY_MAX, &mut out).unwrap();
    out
}

fn handshake() -> Vec<Vec<u8>> {
    let hello = PeerHello {
        magic: MAGIC,
        version_min: 1,
        version_max: 1,
        lane: 1,
        shard: SHARD,
        from: identity(1),
        to: NodeId(2),
        challenge: [3; 32],
    };
    let welcome = PeerWelcome { version: 1, from: identity(2), challenge: [4; 32], proof: [5; 32] };
    let refusal =
        PeerRefusal { code: ErrorCode::AUTH_FAILED, message: "the secret was not proved".into() };
    vec![
        frame(peer::HELLO, &hello),
        frame(peer::WELCOME, &welcome),
        frame(peer::PROOF, &PeerProof { proof: [6; 32] }),
        frame(peer::REFUSAL, &refusal),
        frame(peer::ERROR, &refusal),
    ]
}

fn requests_of_raft() -> Vec<Vec<u8>> {
    let bodies =
        [EntryBody::Blank, EntryBody::Batch(vec![1; 200]), EntryBody::Membership(members())];
    let entries = (12..).zip(bodies).map(|(index, body)| LogEntry { position: at(index), body });
    let append = AppendRequest {
        shard: SHARD,
        vote: BALLOT,
        previous: Some(at(11)),
        committed: Some(at(9)),
        entries: entries.collect(),
    };
    let heartbeat = AppendRequest { previous: None, entries: vec![], ..append.clone() };
    let vote = VoteRequest { shard: SHARD, vote: BALLOT, last: Some(at(11)), transfer: false };
    let cover = SnapshotCover { last: Some(at(99)), members_at: None, members: members() };
    vec![
        frame(peer::APPEND, &append),
        frame(peer::APPEND, &heartbeat),
        frame(peer::VOTE, &vote),
        frame(peer::PRE_VOTE, &VoteRequest { last: None, ..vote }),
        frame(
            peer::TRANSFER,
            &TransferRequest { shard: SHARD, from: BALLOT, to: NodeId(3), last: Some(at(11)) },
        ),
        frame(peer::SNAPSHOT_BEGIN, &SnapshotBegin { shard: SHARD, vote: BALLOT, cover }),
        frame(
            peer::SNAPSHOT_CHUNK,
            &SnapshotChunk { shard: SHARD, offset: 1 << 20, bytes: vec![8; 300] },
        ),
        frame(peer::SNAPSHOT_END, &SnapshotEnd { shard: SHARD, vote: BALLOT, len: 1 << 21 }),
    ]
}

fn answers() -> Vec<Vec<u8>> {
    let vote = VoteAnswer { vote: BALLOT, granted: true, last: Some(at(11)) };
    let not_flushed = TransferAnswer::NotFlushed { expected: Some(at(11)), actual: None };
    let changed = TransferAnswer::VoteChanged { expected: BALLOT, actual: BALLOT };
    vec![
        frame(peer::REPLY, &AppendAnswer::Partly(Some(at(11)))),
        frame(peer::REPLY, &AppendAnswer::HigherVote(BALLOT)),
        frame(peer::REPLY, &vote),
        frame(peer::REPLY, &not_flushed),
        frame(peer::REPLY, &changed),
        frame(peer::REPLY, &SnapshotAnswer::Done(BALLOT)),
    ]
}

fn births() -> Vec<Vec<u8>> {
    let record = record();
    let answer = BirthAnswer {
        member: record.members[0].clone(),
        plan: record.plan(),
        promised: Some(record.clone()),
    };
    vec![
        frame(birth::KIND_ANSWER, &answer),
        frame(birth::KIND_ANSWER, &BirthAnswer { promised: None, ..answer.clone() }),
        frame(birth::KIND_PROPOSE, &BirthPropose { record }),
        frame(birth::KIND_REPLY, &BirthReply::OtherDisk),
    ]
}

/// Requests of clients, and their replies, as nodes pass them on.
fn forwarded() -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let mut put = |kind: u8, inner: u8, body: &dyn Fn(&mut Vec<u8>)| {
        let mut out = Vec::new();
        let header = Header::new(kind, RequestId(78));
        frame::append(header, PEER_BODY_MAX, &mut out, |out| {
            out.push(inner);
            body(out);
        })
        .unwrap();
        frames.push(out);
    };
    for (_, request) in requests() {
        put(FORWARD, request.kind(), &|out| request.encode_body(out));
    }
    for (_, reply) in replies() {
        put(peer::REPLY, reply.kind(), &|out| reply.encode_body(out));
    }
    frames
}

fn all_frames() -> Vec<Vec<u8>> {
    [handshake(), requests_of_raft(), answers(), births(), forwarded()].concat()
}

/// A body that opens with the kind of what follows.
fn is_forwarded(body: &[u8]) -> bool {
    let Some((kind, body)) = body.split_first() else { return false };
    let request = decode_within_bound(body, |body| Request::decode(*kind, body));
    let reply = decode_within_bound(body, |body| Reply::decode(*kind, body));
    request.is_ok() || reply.is_ok()
}

fn is_birth_answer(body: &[u8]) -> bool {
    if let Ok(answer) = codec::decode::<BirthAnswer>(body) {
        // What a node asks before it believes one.
        let _judged = answer.promised.map(|record| record.is_well_formed());
    }
    check_as::<BirthAnswer>(body)
}

/// Decodes a body as what its kind says; as every answer if it is one, since only the request says
/// which.
fn decode(kind: u8, body: &[u8]) -> bool {
    match kind {
        peer::HELLO => check_as::<PeerHello>(body),
        peer::WELCOME => check_as::<PeerWelcome>(body),
        peer::PROOF => check_as::<PeerProof>(body),
        peer::REFUSAL | peer::ERROR => check_as::<PeerRefusal>(body),
        peer::APPEND => check_as::<AppendRequest>(body),
        peer::VOTE | peer::PRE_VOTE => check_as::<VoteRequest>(body),
        peer::TRANSFER => check_as::<TransferRequest>(body),
        peer::SNAPSHOT_BEGIN => check_as::<SnapshotBegin>(body),
        peer::SNAPSHOT_CHUNK => check_as::<SnapshotChunk>(body),
        peer::SNAPSHOT_END => check_as::<SnapshotEnd>(body),
        peer::REPLY => {
            let all = [
                check_as::<AppendAnswer>(body),
                check_as::<VoteAnswer>(body),
                check_as::<TransferAnswer>(body),
                check_as::<SnapshotAnswer>(body),
                is_forwarded(body),
            ];
            all.contains(&true)
        }
        birth::KIND_ANSWER => is_birth_answer(body),
        birth::KIND_PROPOSE => check_as::<BirthPropose>(body),
        birth::KIND_REPLY => check_as::<BirthReply>(body),
        FORWARD => is_forwarded(body),
        // What the log and the snapshots keep of all this.
        _ => check_as::<LogEntry>(body) | check_as::<SnapshotCover>(body) | check_as::<Plan>(body),
    }
}

#[test]
fn every_frame_of_a_peer_decodes_as_what_it_is() {
    let frames = all_frames();
    let mut tally = Tally::default();
    for bytes in &frames {
        tally.take(bytes, PEER_BODY_MAX, decode);
    }
    assert_eq!(tally.accepted, frames.len() as u64, "{tally:?}");
}

#[test]
fn mutated_frames_of_peers_are_refused_or_are_values() {
    let frames = all_frames();
    let mut random = Random::of_test(4);
    let mut tally = Tally::default();
    let mut try_one = |bytes: &[u8]| {
        let _shown = Shown { format: "peer", bytes };
        tally.take(bytes, PEER_BODY_MAX, decode);
    };
    for bytes in &corpus(CORPUS, "peer") {
        try_one(bytes);
    }
    for _ in 0..times(250_000) {
        try_one(&mutation(&mut random, &frames));
    }
    tally.require_depth();
}
