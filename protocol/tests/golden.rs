//! The bytes of every message, pinned: `tests/golden/NAME.bin` is the frame of the example NAME
//! in `common`, under the request id 42. `UPDATE=1 cargo test -p leasehold-protocol --test golden`
//! rewrites the files; a difference means that the wire changed and needs a new version.

#![allow(clippy::unwrap_used, reason = "the helpers of a test are part of it")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::Once;

use common::{replies, requests};
use leasehold_protocol::command::Command;
use leasehold_protocol::frame::{Decoder, Frame};
use leasehold_protocol::ids::RequestId;
use leasehold_protocol::kind;
use leasehold_protocol::limits::REPLY_BODY_MAX;
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;

const ID: RequestId = RequestId(42);

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn request_frame(request: &Request, out: &mut Vec<u8>) {
    request.encode_frame(ID, out).unwrap();
}

fn reply_frame(reply: &Reply, out: &mut Vec<u8>) {
    reply.encode_frame(ID, out).unwrap();
}

/// Every example's frame by its file's name.
fn frames() -> BTreeMap<String, Vec<u8>> {
    let mut frames = BTreeMap::new();
    let mut put = |name: &str, frame| {
        assert!(frames.insert(format!("{name}.bin"), frame).is_none(), "{name} comes twice");
    };
    for (name, request) in requests() {
        let mut out = Vec::new();
        request_frame(&request, &mut out);
        put(name, out);
    }
    for (name, reply) in replies() {
        let mut out = Vec::new();
        reply_frame(&reply, &mut out);
        put(name, out);
    }
    frames
}

/// Rewrites the files once, before any test reads one, if `UPDATE` is set.
fn update() {
    static UPDATED: Once = Once::new();
    UPDATED.call_once(|| {
        if std::env::var_os("UPDATE").is_some() {
            let _ = fs::remove_dir_all(folder());
            fs::create_dir_all(folder()).unwrap();
            for (name, bytes) in frames() {
                fs::write(folder().join(name), bytes).unwrap();
            }
        }
    });
}

fn golden(name: &str) -> Vec<u8> {
    update();
    fs::read(folder().join(format!("{name}.bin"))).unwrap()
}

fn with_frame<T>(bytes: &[u8], read: impl FnOnce(Frame<'_>) -> T) -> T {
    let mut decoder = Decoder::new(REPLY_BODY_MAX);
    decoder.feed(bytes);
    let result = read(decoder.next().unwrap().expect("a whole frame"));
    assert_eq!(decoder.next(), Ok(None));
    assert_eq!(decoder.buffered_len(), 0);
    result
}

#[test]
fn the_encoder_writes_the_golden_bytes() {
    update();
    let frames = frames();
    let files: BTreeSet<String> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(files, frames.keys().cloned().collect(), "a file for every example, and no other");
    for (name, bytes) in &frames {
        assert_eq!(&fs::read(folder().join(name)).unwrap(), bytes, "{name}");
    }
}

#[test]
fn golden_bytes_decode_to_their_example_and_encode_to_themselves() {
    for (name, request) in requests() {
        let bytes = golden(name);
        let decoded = with_frame(&bytes, |frame| {
            assert_eq!((frame.kind, frame.id, frame.flags), (request.kind(), ID, 0), "{name}");
            Request::decode(frame.kind, frame.body).unwrap()
        });
        assert_eq!(decoded, request, "{name}");
        let mut again = Vec::new();
        request_frame(&decoded, &mut again);
        assert_eq!(again, bytes, "{name}");
    }
    for (name, reply) in replies() {
        let bytes = golden(name);
        let decoded = with_frame(&bytes, |frame| {
            assert_eq!((frame.kind, frame.id, frame.flags), (reply.kind(), ID, 0), "{name}");
            Reply::decode(frame.kind, frame.body).unwrap()
        });
        assert_eq!(decoded, reply, "{name}");
        let mut again = Vec::new();
        reply_frame(&decoded, &mut again);
        assert_eq!(again, bytes, "{name}");
    }
}

/// A frame's bytes do not depend on what stands before it in the output.
#[test]
fn frames_encode_the_same_at_any_place_of_the_output() {
    for (name, reply) in replies() {
        let mut out = vec![0xaa; 13];
        reply_frame(&reply, &mut out);
        assert_eq!(&out[13..], golden(name), "{name}");
    }
}

fn command_index(command: &Command) -> usize {
    match command {
        Command::Open { .. } => 0,
        Command::Acquire { .. } => 1,
        Command::Cancel { .. } => 2,
        Command::Release { .. } => 3,
        Command::ReleaseOwn { .. } => 4,
        Command::Close { .. } => 5,
        Command::ForceRelease { .. } => 6,
        Command::Begin { .. } => 7,
        Command::Expire { .. } => 8,
        Command::EndForced { .. } => 9,
        Command::TimeOut { .. } => 10,
        Command::Convert { .. } => 11,
        Command::AcquireAll { .. } => 12,
        Command::SetLimit { .. } => 13,
        Command::EndDelay { .. } => 14,
        Command::SetValue { .. } => 15,
        Command::AskYield { .. } => 16,
        Command::ReleaseAll { .. } => 17,
        Command::Member(_) => 18,
        Command::BeginRestored { .. } => 19,
        Command::EndQuarantine => 20,
    }
}

const fn outcome_index(outcome: &Outcome) -> usize {
    match outcome {
        Outcome::Opened { .. } => 0,
        Outcome::Granted(_) => 1,
        Outcome::Queued { .. } => 2,
        Outcome::Cancelled { .. } => 3,
        Outcome::TimedOut { .. } => 4,
        Outcome::Released { .. } => 5,
        Outcome::Closed { .. } => 6,
        Outcome::Forced { .. } => 7,
        Outcome::Begun { .. } => 8,
        Outcome::Refused { .. } => 9,
        Outcome::Changed { .. } => 10,
        Outcome::Members { .. } => 11,
    }
}

/// A new kind, command or outcome without an example fails here (or fails to compile).
#[test]
fn every_kind_command_and_outcome_has_an_example() {
    let kinds: BTreeSet<u8> = requests()
        .iter()
        .map(|(_, request)| request.kind())
        .chain(replies().iter().map(|(_, reply)| reply.kind()))
        .collect();
    let known: BTreeSet<u8> = (0..=u8::MAX)
        .filter(|&kind| !kind::is_peer(kind) && kind::name(kind) != "unknown")
        .collect();
    assert_eq!(kinds, known);

    let commands: BTreeSet<usize> = requests()
        .iter()
        .filter_map(|(_, request)| match request {
            Request::Command(request) => Some(command_index(&request.command)),
            _ => None,
        })
        .collect();
    assert_eq!(commands, (0..=20).collect());
    let outcomes: BTreeSet<usize> = replies()
        .iter()
        .filter_map(|(_, reply)| match reply {
            Reply::Outcome(reply) => Some(outcome_index(&reply.outcome)),
            _ => None,
        })
        .collect();
    assert_eq!(outcomes, (0..=11).collect());
}
