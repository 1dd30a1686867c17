//! What one message costs: `cargo bench -p leasehold-protocol`. Prints the best of several rounds,
//! in nanoseconds per message; a figure to compare on one machine, not a gate.

#![allow(clippy::unwrap_used, reason = "the input is valid")]

use std::hint::black_box;
use std::time::Instant;

use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::conn::{ClientConn, ServerConn, ServerEvent};
use leasehold_protocol::frame::Decoder;
use leasehold_protocol::ids::{
    ClusterId, HoldSetVersion, LeaseId, Mode, NodeId, Number, RequestId, Revision, Secret, ShardId,
    Token,
};
use leasehold_protocol::limits::CLIENT_BODY_MAX;
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::reply::{OutcomeReply, Reply, ServerHello};
use leasehold_protocol::request::{CommandRequest, Request};

const MESSAGES: u32 = 100_000;
const ROUNDS: u32 = 7;

fn measure(name: &str, mut round: impl FnMut()) {
    let best_ns = (0..ROUNDS)
        .map(|_| {
            #[expect(clippy::disallowed_methods, reason = "a bench reads the clock")]
            let start = Instant::now();
            round();
            start.elapsed().as_nanos()
        })
        .min()
        .expect("at least one round");
    println!("{name:<34} {:>6} ns", best_ns / u128::from(MESSAGES));
}

fn acquire() -> Request {
    Request::Command(CommandRequest {
        shard: ShardId(0),
        timeout_ms: 5_000,
        command: Command::Acquire {
            caller: Caller {
                lease: LeaseId(7),
                secret: Secret([1; 16]),
                number: Number(40),
                floor: Number(36),
                acks: vec![],
            },
            key: b"jobs/nightly/eu-west-1".to_vec(),
            mode: Mode::EXCLUSIVE,
            own: None,
            value: vec![],
            wait_ms: 10_000,
        },
    })
}

fn granted() -> Reply {
    Reply::Outcome(OutcomeReply {
        outcome: Outcome::Granted(Grant {
            lease: LeaseId(7),
            token: Token(9),
            revision: Revision(3),
            version_before: HoldSetVersion(1),
            version_after: HoldSetVersion(2),
            floor: Token(9),
        }),
        leader: NodeId(0),
    })
}

fn messages(name: &str, encode: impl Fn(&mut Vec<u8>), decode: impl Fn(u8, &[u8])) {
    let mut out = Vec::new();
    encode(&mut out);
    println!("{name}: {} bytes", out.len());
    measure("  encode", || {
        for turn in 0..MESSAGES {
            if turn % 64 == 0 {
                out.clear();
            }
            encode(black_box(&mut out));
        }
    });
    out.clear();
    encode(&mut out);
    measure("  cut, check and decode", || {
        let mut decoder = Decoder::new(CLIENT_BODY_MAX);
        for turn in 0..MESSAGES {
            decoder.feed(black_box(&out));
            if turn % 64 == 63 {
                while let Some(frame) = decoder.next().unwrap() {
                    decode(frame.kind, frame.body);
                }
            }
        }
    });
}

/// Both sides, bytes included: request, grant, and all the bookkeeping.
fn round_trip() {
    let mut client = ClientConn::new(ClusterId::UNKNOWN, vec![], 0).unwrap();
    let mut server = ServerConn::new(ClusterId::UNKNOWN, 0);
    server.feed(&client.take_output(vec![]), 0);
    server.poll_event().unwrap();
    server.accept(ServerHello {
        version: 1,
        cluster: ClusterId::UNKNOWN,
        node: NodeId(1),
        shards: 1,
        key_hash: 1,
        features: 0,
        nodes: vec![],
        leaders: vec![],
        server_version: String::new(),
    });
    client.feed(&server.take_output(vec![]), 0);
    client.poll_event().unwrap();
    let (request, reply) = (acquire(), granted());
    let (mut requests, mut replies) = (vec![], vec![]);
    measure("round trip, both sides", || {
        for _ in 0..MESSAGES / 64 {
            for _ in 0..64 {
                client.request(black_box(&request)).unwrap();
            }
            requests = client.take_output(std::mem::take(&mut requests));
            server.feed(&requests, 0);
            while let Some(ServerEvent::Request { id, .. }) = server.poll_event() {
                server.reply(id, black_box(&reply));
            }
            replies = server.take_output(std::mem::take(&mut replies));
            client.feed(&replies, 0);
            while client.poll_event().is_some() {}
        }
    });
}

fn main() {
    // `cargo test --all-targets` runs this too, unoptimised, where its figures would mislead.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let request = acquire();
    messages(
        "acquire",
        |out| request.encode_frame(RequestId(1), out).unwrap(),
        |kind, body| {
            black_box(Request::decode(kind, body).unwrap());
        },
    );
    let reply = granted();
    messages(
        "granted",
        |out| reply.encode_frame(RequestId(1), out).unwrap(),
        |kind, body| {
            black_box(Reply::decode(kind, body).unwrap());
        },
    );
    round_trip();
}
