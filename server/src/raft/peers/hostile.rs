//! Hostile bytes in the handshake between nodes, on both sides: frames mutated, doubled, left out and
//! in a wrong order. Nothing may panic, memory stays bounded, and whoever did not prove the secret
//! under this very conversation is not let in.

use std::collections::VecDeque;
use std::io;

use futures_util::FutureExt;
use leasehold_protocol::codec::{self, Body};
use leasehold_protocol::frame::Decoder;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, ShardId};
use leasehold_protocol::peer::{self, PeerHello, PeerIdentity, PeerProof, PeerWelcome};

use super::HandshakeError;
use super::handshake::{self, Dial, Wire};
use super::identity::{Class, Identity, PeerInfo};
use crate::env::{ByteReader, ByteWriter};
use crate::hostile_support::frames::{mutation, sequence};
use crate::hostile_support::{Random, Shown, Taken, corpus, taken_by, times};

/// Inputs that once found something.
const CORPUS: &str = include_str!("../../../../protocol/tests/hostile_support/corpus.txt");

/// What the other side sent, then its end.
struct Sent(VecDeque<u8>);

impl ByteReader for Sent {
    async fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = buf.len().min(self.0.len());
        for (to, from) in buf[..len].iter_mut().zip(self.0.drain(..len)) {
            *to = from;
        }
        Ok(len)
    }
}

/// Keeps what this side sends, a frame a write.
#[derive(Default)]
struct Kept(Vec<Vec<u8>>);

impl ByteWriter for Kept {
    async fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.push(bytes.to_vec());
        Ok(())
    }
}

fn identity(node: u64, secret: &[u8]) -> Identity {
    Identity {
        cluster: ClusterId([1; 16]),
        node: NodeId(node),
        disk: DiskId([node as u8; 16]),
        boot: 1,
        nonce: [node as u8; 16],
        secret: secret.into(),
        peer_addr: format!("node{node}:1"),
        client_addr: format!("client{node}:1"),
    }
}

type Answer = (Result<PeerInfo, HandshakeError>, Vec<Vec<u8>>);

fn accept(sent: &[u8]) -> Answer {
    let (mut reader, mut writer) = (Sent(sent.iter().copied().collect()), Kept::default());
    let me = identity(2, b"the secret");
    let mut wire = Wire::new(&mut reader, &mut writer);
    let judge = |_: &PeerIdentity| Ok(());
    let result = handshake::accept(&mut wire, &me, [7; 32], &judge).now_or_never();
    (result.expect("nothing here waits"), writer.0)
}

fn dial(secret: &[u8], sent: &[u8]) -> Answer {
    let (mut reader, mut writer) = (Sent(sent.iter().copied().collect()), Kept::default());
    let me = identity(1, secret);
    let mut wire = Wire::new(&mut reader, &mut writer);
    let (to, class, shard) = (NodeId(2), Class::Bulk, ShardId(0));
    let dial = Dial { me: &me, to, class, shard, challenge: [8; 32] };
    let judge = |_: &PeerIdentity| Ok(());
    let result = handshake::dial(&mut wire, dial, &judge).now_or_never();
    (result.expect("nothing here waits"), writer.0)
}

/// Both sides' frames of a good handshake: HELLO and PROOF, WELCOME and READY.
fn good(secret: &[u8]) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let (_, hello) = dial(secret, &[]);
    let (_, welcome) = accept(&hello[0]);
    let (_, connecting) = dial(secret, &welcome[0]);
    let (_, accepting) = accept(&connecting.concat());
    (connecting, accepting)
}

/// True if `bytes` open with frames that mean what those of `good` mean. An archive may have bytes in
/// front that nothing points to, and nobody reads what a `READY` carries.
fn says_the_same(bytes: &[u8], good: &[u8]) -> bool {
    let (mut sent, mut expected) = (Decoder::new(4096), Decoder::new(4096));
    sent.feed(bytes);
    expected.feed(good);
    while let Ok(Some(expected)) = expected.next() {
        let Ok(Some(sent)) = sent.next() else { return false };
        let same = match expected.kind {
            peer::HELLO => is_same::<PeerHello>(sent.body, expected.body),
            peer::WELCOME => is_same::<PeerWelcome>(sent.body, expected.body),
            peer::PROOF => is_same::<PeerProof>(sent.body, expected.body),
            _ => true,
        };
        if !same || sent.kind != expected.kind {
            return false;
        }
    }
    true
}

fn is_same<T: Body + PartialEq>(sent: &[u8], expected: &[u8]) -> bool {
    codec::decode::<T>(sent).is_ok_and(|sent| codec::decode(expected) == Ok(sent))
}

/// Runs one side on mutated frames; only the good ones may let anybody in.
fn try_all(
    format: &'static str,
    (number, count): (u64, u64),
    script: &[Vec<u8>],
    others: &[Vec<u8>],
    side: impl Fn(&[u8]) -> Answer,
) {
    let mut random = Random::of_test(number);
    let good = script.concat();
    let mut outcomes = [0_u64; 3];
    let mut try_one = |bytes: &[u8]| {
        let _shown = Shown { format, bytes };
        let ((result, _), Taken { peak, largest }) = taken_by(|| side(bytes));
        let bound = 8 * bytes.len() + 16 * 1024;
        assert!(peak <= bound && largest <= bound, "{} bytes took {peak}", bytes.len());
        let outcome = match result {
            Ok(_) => {
                assert!(says_the_same(bytes, &good), "let in without the good frames");
                0
            }
            Err(HandshakeError::Refused { .. }) => 1,
            Err(_) => 2,
        };
        outcomes[outcome] += 1;
    };
    for bytes in &corpus(CORPUS, format) {
        try_one(bytes);
    }
    try_one(&good);
    for _ in 0..count {
        if random.one_in(2) {
            try_one(&sequence(&mut random, script, others));
        } else {
            let at = random.below(script.len());
            let mut frames = script.to_vec();
            frames[at] = mutation(&mut random, &script[at..=at]);
            try_one(&frames.concat());
        }
    }
    println!("{format}: {outcomes:?} let in, refused, broken off");
    assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?}");
}

#[test]
fn nobody_is_let_in_by_mutated_frames() {
    let (connecting, accepting) = good(b"the secret");
    let (stranger, _) = good(b"another secret");
    assert_eq!((connecting.len(), accepting.len()), (2, 2), "both sides let each other in");
    let others = [connecting.clone(), accepting.clone(), stranger].concat();
    try_all("accept", (12, times(20_000)), &connecting, &others, accept);
    let dial = |bytes: &[u8]| dial(b"the secret", bytes);
    try_all("dial", (13, times(20_000)), &accepting, &others, dial);
}
