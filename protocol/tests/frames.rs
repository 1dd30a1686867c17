//! The frame decoder: any split of a stream gives the same frames, memory follows what came and
//! not what was announced, and an error is final.

#![allow(clippy::unwrap_used, reason = "the helpers of a test are part of it")]

mod common;

use common::{acquire, replies, requests};
use leasehold_protocol::frame::{self, BODY_AT, Decoder, EncodeError, Foreign, FrameError, Header};
use leasehold_protocol::ids::RequestId;
use leasehold_protocol::limits::{CLIENT_BODY_MAX, HEADER_LEN, PEER_BODY_MAX};

/// What a frame says, copied out of the decoder.
type Copied = (u8, u8, u16, RequestId, Vec<u8>);

/// A stream of all examples, a large frame among them, and the frames in it.
fn stream() -> (Vec<u8>, Vec<Copied>) {
    let mut out = Vec::new();
    for (at, (_, request)) in requests().iter().enumerate() {
        request.encode_frame(RequestId(at as u64), &mut out).unwrap();
    }
    let large = Header { version: 9, flags: 0xa55a, ..Header::new(200, RequestId(u64::MAX)) };
    frame::append(large, 5_000, &mut out, |out| out.extend([7; 5_000])).unwrap();
    for (_, reply) in replies() {
        reply.encode_frame(RequestId(1 << 40), &mut out).unwrap();
    }
    let frames = decode_in_pieces(&[&out]);
    assert_eq!(frames.len(), requests().len() + 1 + replies().len());
    (out, frames)
}

fn decode_in_pieces(pieces: &[&[u8]]) -> Vec<Copied> {
    let mut decoder = Decoder::new(CLIENT_BODY_MAX);
    let mut frames = Vec::new();
    for piece in pieces {
        decoder.feed(piece);
        while let Some(frame) = decoder.next().unwrap() {
            let body = frame.body.to_vec();
            frames.push((frame.version, frame.kind, frame.flags, frame.id, body));
        }
    }
    assert_eq!(decoder.buffered_len(), 0);
    frames
}

#[test]
fn any_split_of_a_stream_gives_the_same_frames() {
    let (bytes, frames) = stream();
    for at in 0..=bytes.len() {
        let (head, tail) = bytes.split_at(at);
        assert_eq!(decode_in_pieces(&[head, tail]), frames, "split at {at}");
    }
    for len in [1, 2, 3, 7, 19, 20, 21, 1_000] {
        let pieces: Vec<&[u8]> = bytes.chunks(len).collect();
        assert_eq!(decode_in_pieces(&pieces), frames, "pieces of {len}");
    }
    let mut state = 1_u64;
    for _ in 0..300 {
        let (mut rest, mut pieces) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (piece, after) = rest.split_at(((state >> 33) as usize % 400).min(rest.len()));
            pieces.push(piece);
            rest = after;
        }
        assert_eq!(decode_in_pieces(&pieces), frames);
    }
}

#[test]
fn a_length_out_of_range_is_refused_from_the_prefix_alone() {
    let length_max = HEADER_LEN + CLIENT_BODY_MAX;
    let above = u32::try_from(length_max + 1).unwrap();
    for length in [above, 1 << 31, u32::MAX] {
        let mut decoder = Decoder::new(CLIENT_BODY_MAX);
        let bytes = length.to_le_bytes();
        decoder.feed(&bytes[..3]);
        assert_eq!(decoder.next(), Ok(None));
        decoder.feed(&bytes[3..]);
        assert_eq!(decoder.next(), Err(FrameError::TooLarge { length, length_max }));
    }
    for length in [1, 15] {
        let mut decoder = Decoder::new(CLIENT_BODY_MAX);
        decoder.feed(&u32::to_le_bytes(length));
        assert_eq!(decoder.next(), Err(FrameError::TooShort { length }));
    }
}

#[test]
fn memory_follows_what_came_and_not_what_was_announced() {
    let mut out = Vec::new();
    let header = Header::new(200, RequestId(1));
    frame::append(header, PEER_BODY_MAX, &mut out, |out| out.resize(BODY_AT + PEER_BODY_MAX, 1))
        .unwrap();
    let mut decoder = Decoder::new(PEER_BODY_MAX);
    decoder.feed(&out[..10]);
    assert_eq!(decoder.next(), Ok(None));
    assert!(decoder.buffer_capacity() <= 64, "{}", decoder.buffer_capacity());
    let read_len = 10_000;
    let mut received = 10;
    for piece in out[10..].chunks(read_len) {
        decoder.feed(piece);
        received += piece.len();
        assert!(decoder.buffer_capacity() <= 2 * received + read_len);
        assert!(decoder.buffer_capacity() <= BODY_AT + PEER_BODY_MAX + read_len);
        assert_eq!(decoder.next().unwrap().is_some(), received == out.len());
    }
    assert_eq!(decoder.next(), Ok(None));
    assert_eq!(decoder.buffer_capacity(), 0, "an idle connection gives a large buffer back");
}

/// The buffer of a connection that is never quite empty stays small however much passes through.
#[test]
fn a_long_stream_needs_one_frame_and_one_read() {
    let mut frame = Vec::new();
    acquire().encode_frame(RequestId(1), &mut frame).unwrap();
    let bytes = frame.repeat(2_000);
    let mut decoder = Decoder::new(CLIENT_BODY_MAX);
    let (mut frames, read_len) = (0, 1_000);
    for piece in bytes.chunks(read_len) {
        decoder.feed(piece);
        while decoder.next().unwrap().is_some() {
            frames += 1;
        }
        assert!(decoder.buffer_capacity() <= 2 * (frame.len() + read_len));
    }
    assert_eq!(frames, 2_000);
}

#[test]
fn every_bit_is_under_the_checksum_or_the_length() {
    let mut frame = Vec::new();
    acquire().encode_frame(RequestId(1), &mut frame).unwrap();
    for bit in 0..frame.len() * 8 {
        let mut bytes = frame.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let mut decoder = Decoder::new(CLIENT_BODY_MAX);
        decoder.feed(&bytes);
        let result = decoder.next();
        let whole = matches!(result, Ok(Some(_)));
        assert!(!whole, "bit {bit}");
        if bit >= 32 {
            assert!(matches!(result, Err(FrameError::BadChecksum { .. })), "bit {bit}");
        }
    }
}

#[test]
fn an_error_is_final() {
    let mut frame = Vec::new();
    acquire().encode_frame(RequestId(1), &mut frame).unwrap();
    let mut bad = frame.clone();
    bad[BODY_AT] ^= 1;
    let mut decoder = Decoder::new(CLIENT_BODY_MAX);
    decoder.feed(&[&frame[..], &bad, &frame].concat());
    assert!(matches!(decoder.next(), Ok(Some(_))), "what came before it is good");
    let error = decoder.next().unwrap_err();
    decoder.feed(&frame);
    assert_eq!(decoder.next(), Err(error));
    assert_eq!((decoder.buffered_len(), decoder.buffer_capacity()), (0, 0));
}

#[test]
fn other_protocols_are_recognised_at_the_start_of_a_stream_only() {
    let first = |bytes: &[u8]| {
        let mut decoder = Decoder::new(PEER_BODY_MAX);
        decoder.feed(bytes);
        decoder.next().map(|frame| frame.is_some())
    };
    let foreign = |foreign| Err(FrameError::Foreign(foreign));
    for verb in ["GET / HTTP/1.1", "POST /", "PUT /a", "DELETE /", "PRI * HTTP/2.0", "CONNECT a:1"]
    {
        assert_eq!(first(verb.as_bytes()), foreign(Foreign::Http), "{verb}");
    }
    assert_eq!(first(&[0x16, 3, 1, 0, 200, 1]), foreign(Foreign::Tls));
    assert_eq!(first(&[0x16, 3, 3, 2, 0, 1]), foreign(Foreign::Tls));
    assert_eq!(first(b"SSH-2.0-x"), foreign(Foreign::Ssh));
    assert_eq!(first(&[0; 100]), foreign(Foreign::Zeros));
    assert_eq!(first(b"ruok"), foreign(Foreign::Text));

    let mut decoder = Decoder::new(CLIENT_BODY_MAX);
    let mut bytes = Vec::new();
    acquire().encode_frame(RequestId(1), &mut bytes).unwrap();
    bytes.extend(b"GET / HTTP/1.1");
    decoder.feed(&bytes);
    assert!(decoder.next().unwrap().is_some());
    assert!(matches!(decoder.next(), Err(FrameError::TooLarge { .. })));
}

#[test]
fn a_body_over_the_limit_is_not_framed_and_leaves_the_output_alone() {
    let mut out = vec![1, 2, 3];
    let header = Header::new(200, RequestId(1));
    frame::append(header, 10, &mut out, |out| out.extend([0; 10])).unwrap();
    let before = out.clone();
    let result = frame::append(header, 10, &mut out, |out| out.extend([0; 11]));
    assert_eq!(result, Err(EncodeError::TooLarge { length: 11, length_max: 10 }));
    assert_eq!(out, before);
}
