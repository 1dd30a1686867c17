//! Bytes from somebody who means harm: seeded mutations of valid frames, and frames made by hand.
//! Nothing may panic, no allocation may go beyond what the received bytes justify, and every
//! connection either goes on as documented or is over.
//!
//! `HOSTILE_COUNT` sets the number of mutations (default 200,000), `HOSTILE_SEED` their seed.

#![allow(clippy::unwrap_used, reason = "the helpers of a test are part of it")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{CLUSTER, acquire, client_hello, replies, requests, server_hello};
use leasehold_protocol::codec::{self, DecodeError};
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

/// Counts the bytes that the current thread has allocated.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let live = LIVE.get() + bytes;
    LIVE.set(live);
    PEAK.set(PEAK.get().max(live));
}

// SAFETY: every call is passed to the system's allocator unchanged; the counters are plain cells
// of the thread, whose access neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that were live at a time while `action` ran, beyond those live before.
fn peak_of<T>(action: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = action();
    (result, usize::try_from(PEAK.get() - before).unwrap())
}

/// What the decoding of a body may allocate: a decoded list's element is less than eight times as
/// large as its archive.
const fn decode_bound(body_len: usize) -> usize {
    8 * body_len + 256
}

/// A small generator (splitmix64): the same seed gives the same mutations everywhere.
struct Random(u64);

impl Random {
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    const fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn one_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }
}

fn environment(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(value) => value.parse().unwrap_or_else(|_| panic!("{name} is a number, not {value:?}")),
        Err(_) => default,
    }
}

/// Makes length and checksum fit, so that a mutation reaches the body's validation.
fn seal(frame: &mut [u8]) {
    if frame.len() < BODY_AT {
        return;
    }
    let length = u32::try_from(frame.len() - 4).unwrap();
    frame[..4].copy_from_slice(&length.to_le_bytes());
    let checksum = crc32c::crc32c_append(crc32c::crc32c(&frame[4..16]), &frame[BODY_AT..]);
    frame[16..20].copy_from_slice(&checksum.to_le_bytes());
}

const NUMBERS: [u32; 12] = [
    0,
    1,
    7,
    8,
    255,
    65_536,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_fff0,
    0xffff_fffe,
    u32::MAX,
    0x2000_0001,
];

fn mutate_once(random: &mut Random, frame: &mut Vec<u8>, other: &[u8]) {
    if frame.is_empty() {
        frame.push(random.next() as u8);
        return;
    }
    let at = random.below(frame.len());
    match random.below(9) {
        0 => frame[at] ^= 1 << random.below(8),
        1 => frame[at] = random.next() as u8,
        2 | 3 => {
            let number = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
            let len = number.len().min(frame.len() - at);
            frame[at..at + len].copy_from_slice(&number[..len]);
        }
        4 => {
            // A small step of a pointer or a count.
            let step = random.below(33) as u8;
            frame[at] = frame[at].wrapping_add(step).wrapping_sub(16);
        }
        5 => frame.truncate(at),
        6 => frame.insert(at, random.next() as u8),
        7 => {
            let tail = &other[random.below(other.len())..];
            frame.truncate(at);
            frame.extend_from_slice(tail);
        }
        _ => {
            let from = random.below(frame.len());
            let len = random.below(frame.len() - from.max(at) + 1);
            frame.copy_within(from..from + len, at);
        }
    }
}

/// A mutation of one of `frames`; most have a length and a checksum that fit.
fn mutation(random: &mut Random, frames: &[Vec<u8>]) -> Vec<u8> {
    let mut frame = frames[random.below(frames.len())].clone();
    for _ in 0..=random.below(4) {
        let other = &frames[random.below(frames.len())];
        mutate_once(random, &mut frame, other);
    }
    if !random.one_in(10) {
        seal(&mut frame);
    }
    frame
}

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

/// Decodes a body as everything it could be taken for, with the peak of each try; true if the
/// body was what its kind says.
fn decode_all(kind: u8, body: &[u8]) -> bool {
    let bound = decode_bound(body.len());
    let (request, peak) = peak_of(|| Request::decode(kind, body));
    assert!(peak <= bound, "request of {} bytes allocated {peak}", body.len());
    let (reply, peak) = peak_of(|| Reply::decode(kind, body));
    assert!(peak <= bound, "reply of {} bytes allocated {peak}", body.len());
    // What the log and the snapshots keep has the same decoder.
    let (_, peak) = peak_of(|| codec::decode::<Vec<Command>>(body).is_ok());
    assert!(peak <= bound, "commands of {} bytes allocated {peak}", body.len());
    let (_, peak) = peak_of(|| codec::decode::<Vec<Event>>(body).is_ok());
    assert!(peak <= bound, "events of {} bytes allocated {peak}", body.len());

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
    let count = environment("HOSTILE_COUNT", 200_000);
    let mut random = Random(environment("HOSTILE_SEED", 1));
    let (mut unframed, mut refused, mut accepted) = (0_u64, 0_u64, 0_u64);
    for _ in 0..count {
        let bytes = mutation(&mut random, &frames);
        let mut decoder = Decoder::new(CLIENT_BODY_MAX);
        let ((), peak) = peak_of(|| decoder.feed(&bytes));
        assert!(peak <= 2 * bytes.len(), "{peak} for {} bytes", bytes.len());
        match decoder.next() {
            Ok(Some(frame)) if decode_all(frame.kind, frame.body) => accepted += 1,
            Ok(Some(_)) => refused += 1,
            Ok(None) | Err(_) => unframed += 1,
        }
    }
    println!("{count} mutations: {unframed} unframed, {refused} refused, {accepted} accepted");
    if count >= 10_000 {
        // The mutations reach every layer, or this test proves nothing.
        let few = count / 100;
        assert!(unframed > few && refused > few && accepted > few);
    }
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

#[test]
fn a_server_outlives_mutated_frames() {
    let frames = all_frames();
    let mut random = Random(environment("HOSTILE_SEED", 2));
    let (mut ended, mut went_on) = (0, 0);
    for _ in 0..environment("HOSTILE_COUNT", 200_000) / 40 {
        let fresh = random.one_in(4);
        let mut server = if fresh { ServerConn::new(CLUSTER, 0) } else { open_server() };
        for _ in 0..8 {
            server.feed(&mutation(&mut random, &frames), 0);
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
}

#[test]
fn a_client_outlives_mutated_frames() {
    let frames = all_frames();
    let mut random = Random(environment("HOSTILE_SEED", 3));
    for _ in 0..environment("HOSTILE_COUNT", 200_000) / 40 {
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
        for _ in 0..8 {
            client.feed(&mutation(&mut random, &frames), 0);
            while let Some(event) = client.poll_event() {
                if let ClientEvent::Closed(reason) = event {
                    assert!(client.is_over() && !reason.to_string().is_empty());
                }
            }
        }
    }
}

/// A thousand connections that only announce: no memory but a few bytes each.
#[test]
fn announced_lengths_cost_nothing() {
    for length in [u32::MAX, 1 << 31, 0x7fff_ffff, 65_553, 65_552, 16, 15, 0] {
        for body_max in [CLIENT_BODY_MAX, PEER_BODY_MAX] {
            let mut decoder = Decoder::new(body_max);
            let (result, peak) = peak_of(|| {
                decoder.feed(&length.to_le_bytes());
                decoder.next().map(|frame| frame.is_some())
            });
            assert_ne!(result, Ok(true));
            assert!(peak <= 16, "{length}: {peak}");
        }
    }
    let mut connections = Vec::new();
    let ((), peak) = peak_of(|| {
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
    let (request, peak) = peak_of(|| Request::decode(kind::COMMAND, body));
    assert!(peak <= decode_bound(body.len()), "{peak}");
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
    let ((), peak) = peak_of(|| {
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
