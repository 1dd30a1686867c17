//! Bytes from somebody who means harm: seeded mutations of valid frames, and frames made by hand.
//! Nothing may panic, no allocation may go beyond what the received bytes justify, and every
//! connection either goes on as documented or is over.
//!
//! The peers' frames and the handshake between nodes have `hostile_peers.rs`; logs and snapshots have
//! tests of their own in their crates. `hostile_support` holds what all of them share.

#![allow(clippy::unwrap_used, reason = "the helpers of a test are part of it")]

mod common;
mod hostile_support;

use common::{CLUSTER, acquire, client_hello, replies, requests, server_hello};
use hostile_support::frames::{Tally, check_as, decode_within_bound, mutation, seal, sequence};
use hostile_support::{Random, Shown, Taken, corpus, taken_by, times};
use leasehold_protocol::codec::DecodeError;
use leasehold_protocol::command::Command;
use leasehold_protocol::conn::{Answer, ClientConn, ClientEvent, ServerConn, ServerEvent};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::Event;
use leasehold_protocol::frame::{BODY_AT, Decoder};
use leasehold_protocol::ids::{ClusterId, RequestId};
use leasehold_protocol::kind;
use leasehold_protocol::limits::{
    CLIENT_BODY_MAX, IN_FLIGHT_MAX, IN_FLIGHT_RESERVE, OUTPUT_LEN_HIGH, PEER_BODY_MAX,
    REPLY_BODY_MAX,
};
use leasehold_protocol::reply::{ErrorReply, Reply};
use leasehold_protocol::request::Request;

/// Inputs that once found something.
const CORPUS: &str = include_str!("hostile_support/corpus.txt");

fn all_frames() -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    for (_, request) in requests() {
        let mut out = Vec::new();
        request.encode_frame(RequestId(42), &mut out).unwrap();
        frames.push(out);
    }
    for (_, reply) in replies() {
        let mut out = Vec::new();
        reply.encode_frame(RequestId(42), &mut out).unwrap();
        frames.push(out);
    }
    frames
}

/// Decodes a body as everything it could be taken for; true if it was what its kind says.
fn decode_all(kind: u8, body: &[u8]) -> bool {
    let request = decode_within_bound(body, |body| Request::decode(kind, body));
    let reply = decode_within_bound(body, |body| Reply::decode(kind, body));
    // What the log and the snapshots keep has the same decoder.
    check_as::<Vec<Command>>(body);
    check_as::<Vec<Event>>(body);

    // What was accepted is a value like any other: it encodes to something that decodes to it.
    if let Ok(request) = &request {
        let mut out = Vec::new();
        request.encode_frame(RequestId(1), &mut out).unwrap();
        assert_eq!(&Request::decode(kind, &out[BODY_AT..]).unwrap(), request);
    }
    if let Ok(reply) = &reply {
        let mut out = Vec::new();
        reply.encode_frame(RequestId(1), &mut out).unwrap();
        assert_eq!(&Reply::decode(kind, &out[BODY_AT..]).unwrap(), reply);
    }
    request.is_ok() || reply.is_ok()
}

#[test]
fn mutated_frames_are_refused_or_are_values() {
    let frames = all_frames();
    let mut random = Random::of_test(1);
    let mut tally = Tally::default();
    let mut try_one = |bytes: &[u8]| {
        let _shown = Shown { format: "frame", bytes };
        tally.take(bytes, CLIENT_BODY_MAX, decode_all);
    };
    for bytes in &corpus(CORPUS, "frame") {
        try_one(bytes);
    }
    for _ in 0..times(300_000) {
        try_one(&mutation(&mut random, &frames));
    }
    tally.require_depth();
}

/// A server's connection after the handshake.
fn open_server() -> ServerConn {
    let mut server = ServerConn::new(CLUSTER, 0);
    let mut hello = Vec::new();
    Request::Hello(client_hello()).encode_frame(RequestId(1), &mut hello).unwrap();
    server.feed(&hello, 0);
    server.poll_event().unwrap();
    server.accept(server_hello());
    server.take_output(Vec::new());
    server
}

fn is_sound_output(output: &[u8]) -> bool {
    let mut decoder = Decoder::new(REPLY_BODY_MAX);
    decoder.feed(output);
    while let Some(frame) = decoder.next().unwrap() {
        Reply::decode(frame.kind, frame.body).unwrap();
    }
    decoder.buffered_len() == 0
}

/// One frame, or a few in a row.
fn one_or_more(random: &mut Random, frames: &[Vec<u8>]) -> Vec<u8> {
    if random.one_in(3) {
        let from = random.below(frames.len() - 3);
        return sequence(random, &frames[from..from + 3], frames);
    }
    mutation(random, frames)
}

#[test]
fn a_server_outlives_mutated_frames() {
    let frames = all_frames();
    let mut random = Random::of_test(2);
    let (mut ended, mut went_on) = (0, 0);
    for _ in 0..times(10_000) {
        let fresh = random.one_in(4);
        let mut server = if fresh { ServerConn::new(CLUSTER, 0) } else { open_server() };
        for _ in 0..8 {
            let bytes = one_or_more(&mut random, &frames);
            let _shown = Shown { format: "server", bytes: &bytes };
            server.feed(&bytes, 0);
            while let Some(event) = server.poll_event() {
                match event {
                    ServerEvent::Hello(_) => server.accept(server_hello()),
                    ServerEvent::Request { id, .. } if random.one_in(2) => {
                        server.reply(id, &Reply::Pong);
                    }
                    ServerEvent::Request { .. } => {}
                    ServerEvent::Closed(reason) => {
                        assert!(server.is_over() && !reason.to_string().is_empty());
                    }
                }
            }
            assert!(server.in_flight_len() <= IN_FLIGHT_MAX + IN_FLIGHT_RESERVE);
            assert!(server.output_len() <= OUTPUT_LEN_HIGH);
            assert!(is_sound_output(&server.take_output(Vec::new())));
        }
        if server.is_over() { ended += 1 } else { went_on += 1 }
    }
    println!("{ended} connections ended, {went_on} went on");
    assert!(ended > 100 && went_on > 100, "{ended} ended, {went_on} went on");
}

#[test]
fn a_client_outlives_mutated_frames() {
    let frames = all_frames();
    let mut random = Random::of_test(3);
    let (mut ended, mut went_on) = (0, 0);
    for _ in 0..times(10_000) {
        let mut client = ClientConn::new(ClusterId::UNKNOWN, vec![], 0).unwrap();
        if !random.one_in(4) {
            let mut hello = Vec::new();
            Reply::Hello(server_hello()).encode_frame(RequestId(1), &mut hello).unwrap();
            client.feed(&hello, 0);
            client.poll_event().unwrap();
            for _ in 0..50 {
                client.request(&acquire()).unwrap();
            }
        }
        // Most frames here are requests, which end a client's connection.
        for _ in 0..4 {
            let bytes = one_or_more(&mut random, &frames);
            let _shown = Shown { format: "client", bytes: &bytes };
            client.feed(&bytes, 0);
            while let Some(event) = client.poll_event() {
                if let ClientEvent::Closed(reason) = event {
                    assert!(client.is_over() && !reason.to_string().is_empty());
                }
            }
        }
        if client.is_over() { ended += 1 } else { went_on += 1 }
    }
    println!("{ended} connections ended, {went_on} went on");
    assert!(ended > 100 && went_on > 100, "{ended} ended, {went_on} went on");
}

/// A thousand connections that only announce: no memory but a few bytes each.
#[test]
fn announced_lengths_cost_nothing() {
    for length in [u32::MAX, 1 << 31, 0x7fff_ffff, 65_553, 65_552, 16, 15, 0] {
        for body_max in [CLIENT_BODY_MAX, PEER_BODY_MAX] {
            let mut decoder = Decoder::new(body_max);
            let (result, Taken { peak, .. }) = taken_by(|| {
                decoder.feed(&length.to_le_bytes());
                decoder.next().map(|frame| frame.is_some())
            });
            assert_ne!(result, Ok(true));
            assert!(peak <= 16, "{length}: {peak}");
        }
    }
    let mut connections = Vec::new();
    let ((), Taken { peak, .. }) = taken_by(|| {
        for _ in 0..1_000 {
            let mut server = ServerConn::new(CLUSTER, 0);
            server.feed(&4_000_u32.to_le_bytes(), 0);
            assert_eq!(server.poll_event(), None);
            connections.push(server);
        }
    });
    assert!(peak <= 1_000 * 1_024, "{peak}");
}

/// Where the fields of an archived acquire lie, counted from the end of its frame (see
/// `docs/PROTOCOL.md`): offset and count of a list, four bytes each.
const VALUE_FROM_END: usize = 12;
const KEY_FROM_END: usize = 45;
const ACKS_FROM_END: usize = 53;

fn acquire_frame() -> Vec<u8> {
    let mut out = Vec::new();
    acquire().encode_frame(RequestId(5), &mut out).unwrap();
    out
}

fn put_u32(frame: &mut [u8], from_end: usize, number: u32) {
    let at = frame.len() - from_end;
    frame[at..at + 4].copy_from_slice(&number.to_le_bytes());
}

fn decoded(frame: &mut [u8]) -> Result<Request, ErrorCode> {
    seal(frame);
    let body = &frame[BODY_AT..];
    let request = decode_within_bound(body, |body| Request::decode(kind::COMMAND, body));
    request.map_err(DecodeError::code)
}

#[test]
fn counts_and_offsets_that_lie_are_malformed() {
    for list in [VALUE_FROM_END, KEY_FROM_END, ACKS_FROM_END] {
        for count in [0x7fff_ffff, 0x8000_0000, u32::MAX, 0x2000_0000, 145] {
            let mut frame = acquire_frame();
            put_u32(&mut frame, list - 4, count);
            assert_eq!(decoded(&mut frame), Err(ErrorCode::MALFORMED), "list {list} of {count}");
        }
    }
    for list in [VALUE_FROM_END, KEY_FROM_END] {
        for offset in [0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ff00] {
            let mut frame = acquire_frame();
            put_u32(&mut frame, list, offset);
            assert_eq!(decoded(&mut frame), Err(ErrorCode::MALFORMED), "list {list} at {offset}");
        }
    }
}

/// Lists that overlap could make a short frame decode to much memory.
#[test]
fn lists_that_share_bytes_are_malformed() {
    let mut frame = acquire_frame();
    let value_at = frame.len() - VALUE_FROM_END;
    // The key lies first in the body; let the value begin where it does.
    let offset = (BODY_AT as i32 - value_at as i32) as u32;
    put_u32(&mut frame, VALUE_FROM_END, offset);
    assert_eq!(decoded(&mut frame), Err(ErrorCode::MALFORMED));
    // The same offsets with a value that ends before the key begins would be fine.
    assert!(decoded(&mut acquire_frame()).is_ok());
}

/// Lists over their bound are refused with a code of their own and the connection goes on.
#[test]
fn too_many_items_are_not_a_malformed_frame() {
    let Request::Command(mut request) = acquire() else { unreachable!() };
    let Command::Acquire { caller, .. } = &mut request.command else { unreachable!() };
    caller.acks = vec![leasehold_protocol::ids::Number(1); 65];
    let mut server = open_server();
    let mut out = Vec::new();
    Request::Command(request).encode_frame(RequestId(9), &mut out).unwrap();
    server.feed(&out, 0);
    assert_eq!(server.poll_event(), None);
    let output = server.take_output(Vec::new());
    let mut decoder = Decoder::new(REPLY_BODY_MAX);
    decoder.feed(&output);
    let frame = decoder.next().unwrap().unwrap();
    let Reply::Error(error) = Reply::decode(frame.kind, frame.body).unwrap() else {
        panic!("an error");
    };
    assert_eq!((frame.id, error.code), (RequestId(9), ErrorCode::TOO_MANY_ITEMS));
    assert!(error.message.contains("acks: 65 is above the limit of 64"), "{}", error.message);
    assert!(!server.is_over());
}

#[test]
fn a_flood_of_bad_requests_fills_no_memory() {
    let mut bad = acquire_frame();
    put_u32(&mut bad, KEY_FROM_END, 0);
    seal(&mut bad);
    let flood = bad.repeat(400);
    let mut server = open_server();
    let ((), Taken { peak, .. }) = taken_by(|| {
        for _ in 0..100 {
            server.feed(&flood, 0);
            while server.poll_event().is_some() {}
            if !server.wants_frames() {
                // A driver does not read on until the client has taken its replies.
                server.take_output(Vec::new());
            }
        }
    });
    assert!(!server.is_over());
    assert!(peak <= 4 * OUTPUT_LEN_HIGH, "{peak}");
}

#[test]
fn messages_are_cut_at_a_characters_border() {
    let error = ErrorReply::new(ErrorCode::INTERNAL, "é".repeat(1_000_000));
    assert!(error.message.len() <= 1_024 && error.message.chars().all(|letter| letter == 'é'));
    let mut server = open_server();
    let mut out = Vec::new();
    acquire().encode_frame(RequestId(3), &mut out).unwrap();
    server.feed(&out, 0);
    server.poll_event().unwrap();
    let huge = ErrorReply { message: "x".repeat(5_000_000), ..error };
    let answer = server.reply(RequestId(3), &Reply::Error(huge));
    assert_eq!(answer, Answer::Replaced(ErrorCode::FRAME_TOO_LARGE));
}
