//! The two sides of a connection against each other and against a side that breaks the rules.

#![allow(clippy::unwrap_used, reason = "the helpers of a test are part of it")]

mod common;

use common::{CLUSTER, acquire, client_hello, granted, queued, server_hello};
use leasehold_protocol::codec::encode_frame;
use leasehold_protocol::conn::{
    Answer, ClientConn, ClientEvent, CloseReason, RequestError, ServerConn, ServerEvent,
};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::frame::{self, Decoder, Foreign, FrameError, Header, VERSION_MAX};
use leasehold_protocol::ids::{ClusterId, RequestId, ShardId};
use leasehold_protocol::kind;
use leasehold_protocol::limits::{
    CLIENT_BODY_MAX, HANDSHAKE_MS_MAX, HEADER_LEN, HELLO_BODY_MAX, IDLE_MS_MAX, IN_FLIGHT_MAX,
    IN_FLIGHT_RESERVE, OUTPUT_LEN_HIGH, OUTPUT_LEN_MAX, PING_AFTER_MS, REPLY_BODY_MAX,
};
use leasehold_protocol::reply::{ErrorReply, HeldKey, HoldsReply, Reply, ServerHello};
use leasehold_protocol::request::{
    ClientHello, HoldsRequest, RenewItem, RenewRequest, Request, SessionsRequest, StatusRequest,
};

const MS: u64 = 1_000_000;
const OTHER_CLUSTER: ClusterId = ClusterId(*b"another cluster!");

fn to_server(client: &mut ClientConn, server: &mut ServerConn, now_ns: u64) {
    server.feed(&client.take_output(Vec::new()), now_ns);
}

fn to_client(server: &mut ServerConn, client: &mut ClientConn, now_ns: u64) {
    client.feed(&server.take_output(Vec::new()), now_ns);
}

/// Both sides with the handshake made at time 0.
fn open_pair() -> (ClientConn, ServerConn) {
    let mut client = ClientConn::new(CLUSTER, vec![], 0).unwrap();
    let mut server = ServerConn::new(CLUSTER, 0);
    to_server(&mut client, &mut server, 0);
    assert!(matches!(server.poll_event(), Some(ServerEvent::Hello(_))));
    server.accept(server_hello());
    to_client(&mut server, &mut client, 0);
    assert_eq!(client.poll_event(), Some(ClientEvent::Hello(server_hello())));
    (client, server)
}

/// A server with the handshake made, for a test that writes the client's frames itself.
fn open_server() -> ServerConn {
    let (_, server) = open_pair();
    server
}

fn release() -> Request {
    common::requests().into_iter().find(|(name, _)| *name == "release").unwrap().1
}

fn frame_of(request: &Request, id: u64) -> Vec<u8> {
    let mut out = Vec::new();
    request.encode_frame(RequestId(id), &mut out).unwrap();
    out
}

/// Everything that a side has put out, decoded as replies.
fn replies_of(output: &[u8]) -> Vec<(RequestId, Reply)> {
    let mut decoder = Decoder::new(REPLY_BODY_MAX);
    decoder.feed(output);
    let mut replies = Vec::new();
    while let Some(frame) = decoder.next().unwrap() {
        replies.push((frame.id, Reply::decode(frame.kind, frame.body).unwrap()));
    }
    assert_eq!(decoder.buffered_len(), 0, "output ends at a frame's border");
    replies
}

/// The ids and codes of what a server answered, all of which must be errors.
fn errors_of(server: &mut ServerConn) -> Vec<(u64, ErrorCode)> {
    let code = |(id, reply): (RequestId, Reply)| match reply {
        Reply::Error(error) => (id.0, error.code),
        other => panic!("{other:?} is no error"),
    };
    replies_of(&server.take_output(Vec::new())).into_iter().map(code).collect()
}

fn closed_code(event: Option<ServerEvent>) -> ErrorCode {
    match event {
        Some(ServerEvent::Closed(CloseReason::Refused { code, .. })) => code,
        other => panic!("{other:?} is no refusal"),
    }
}

fn assert_goes_on(server: &mut ServerConn) {
    server.feed(&frame_of(&Request::Ping, u64::MAX), 0);
    assert_eq!(server.poll_event(), None);
    assert_eq!(replies_of(&server.take_output(Vec::new())), [(RequestId(u64::MAX), Reply::Pong)]);
}

#[test]
fn a_request_gets_its_reply_under_its_id() {
    let (mut client, mut server) = open_pair();
    let first = client.request(&acquire()).unwrap();
    let second = client.request(&Request::Status(StatusRequest { timeout_ms: 9 })).unwrap();
    assert!(first < second);
    to_server(&mut client, &mut server, 0);
    assert_eq!(server.poll_event(), Some(ServerEvent::Request { id: first, request: acquire() }));
    assert!(matches!(server.poll_event(), Some(ServerEvent::Request { id, .. }) if id == second));
    assert_eq!(server.poll_event(), None);
    assert_eq!(server.in_flight_len(), 2);

    let busy = Reply::Error(ErrorReply::new(ErrorCode::BUSY, "later"));
    assert_eq!(server.reply(second, &busy), Answer::Sent, "replies may come in any order");
    assert_eq!(server.reply(first, &granted()), Answer::Sent);
    assert_eq!(server.reply(first, &granted()), Answer::Dropped, "an id is answered once");
    to_client(&mut server, &mut client, 0);
    assert_eq!(client.poll_event(), Some(ClientEvent::Reply { id: second, reply: busy }));
    assert_eq!(client.poll_event(), Some(ClientEvent::Reply { id: first, reply: granted() }));
    assert_eq!(client.poll_event(), None);
    assert_eq!((client.in_flight_len(), server.in_flight_len()), (0, 0));
}

#[test]
fn a_waiting_acquire_keeps_its_id_until_its_final_reply() {
    let (mut client, mut server) = open_pair();
    let id = client.request(&acquire()).unwrap();
    to_server(&mut client, &mut server, 0);
    server.poll_event().unwrap();
    for _ in 0..2 {
        assert_eq!(server.reply(id, &queued()), Answer::Sent);
        assert!(server.is_in_flight(id));
        to_client(&mut server, &mut client, 0);
        assert_eq!(client.poll_event(), Some(ClientEvent::Reply { id, reply: queued() }));
        assert_eq!(client.in_flight_len(), 1);
    }
    assert_eq!(server.reply(id, &granted()), Answer::Sent);
    to_client(&mut server, &mut client, 0);
    assert_eq!(client.poll_event(), Some(ClientEvent::Reply { id, reply: granted() }));
    assert_eq!((client.in_flight_len(), server.in_flight_len()), (0, 0));

    let mut late = Vec::new();
    queued().encode_frame(id, &mut late).unwrap();
    client.feed(&late, 0);
    assert_eq!(client.poll_event(), Some(ClientEvent::Unmatched { id, reply: queued() }));
}

#[test]
fn versions_that_do_not_meet_are_answered_and_closed() {
    for (version_min, version_max) in [(VERSION_MAX + 1, VERSION_MAX + 3), (0, 0), (9, 1)] {
        let mut server = ServerConn::new(CLUSTER, 0);
        let hello = ClientHello { version_min, version_max, ..client_hello() };
        server.feed(&frame_of(&Request::Hello(hello), 5), 0);
        assert_eq!(closed_code(server.poll_event()), ErrorCode::UNSUPPORTED_VERSION);
        assert_eq!(errors_of(&mut server), [(5, ErrorCode::UNSUPPORTED_VERSION)]);
    }
}

#[test]
fn a_newer_client_that_also_speaks_our_version_is_welcome() {
    let mut server = ServerConn::new(CLUSTER, 0);
    let hello = ClientHello { version_min: 0, version_max: 200, ..client_hello() };
    let mut out = Vec::new();
    let header = Header { version: 200, ..Header::new(kind::HELLO, RequestId(1)) };
    encode_frame(header, &hello, HELLO_BODY_MAX, &mut out).unwrap();
    server.feed(&out, 0);
    assert_eq!(server.poll_event(), Some(ServerEvent::Hello(hello)));
    server.accept(ServerHello { version: 0, ..server_hello() });
    let replies = replies_of(&server.take_output(Vec::new()));
    assert_eq!(replies, [(RequestId(1), Reply::Hello(server_hello()))]);
}

#[test]
fn another_cluster_is_answered_and_closed() {
    let mut client = ClientConn::new(OTHER_CLUSTER, vec![], 0).unwrap();
    let mut server = ServerConn::new(CLUSTER, 0);
    to_server(&mut client, &mut server, 0);
    assert_eq!(closed_code(server.poll_event()), ErrorCode::WRONG_CLUSTER);
    assert_eq!(server.poll_event(), None, "closed is said once");
    to_client(&mut server, &mut client, 0);
    let Some(ClientEvent::Closed(CloseReason::RefusedByPeer(error))) = client.poll_event() else {
        panic!("the client is told");
    };
    assert_eq!(error.code, ErrorCode::WRONG_CLUSTER);
    assert!(error.message.contains(&CLUSTER.to_string()), "{}", error.message);
    assert!(error.message.contains(&OTHER_CLUSTER.to_string()), "{}", error.message);
    assert_eq!(client.request(&Request::Ping), Err(RequestError::NotOpen));

    let mut homeless = ServerConn::new(ClusterId::UNKNOWN, 0);
    homeless.feed(&frame_of(&Request::Hello(client_hello()), 1), 0);
    assert_eq!(closed_code(homeless.poll_event()), ErrorCode::NOT_READY);
}

#[test]
fn a_client_that_expects_no_cluster_takes_any_and_one_that_does_takes_that_one() {
    for (expected, open) in [(ClusterId::UNKNOWN, true), (CLUSTER, true), (OTHER_CLUSTER, false)] {
        let mut client = ClientConn::new(expected, vec![], 0).unwrap();
        let mut out = Vec::new();
        Reply::Hello(server_hello()).encode_frame(RequestId(1), &mut out).unwrap();
        client.feed(&out, 0);
        assert_eq!(matches!(client.poll_event(), Some(ClientEvent::Hello(_))), open);
        assert_eq!(client.is_open(), open);
    }
}

#[test]
fn a_client_refuses_a_hello_that_it_could_not_live_with() {
    let hellos = [
        ServerHello { version: VERSION_MAX + 1, ..server_hello() },
        ServerHello { version: 0, ..server_hello() },
        ServerHello { shards: 0, ..server_hello() },
        ServerHello { shards: 65, ..server_hello() },
        ServerHello { key_hash: 2, ..server_hello() },
    ];
    for hello in hellos {
        let mut client = ClientConn::new(CLUSTER, vec![], 0).unwrap();
        let mut out = Vec::new();
        Reply::Hello(hello).encode_frame(RequestId(1), &mut out).unwrap();
        client.feed(&out, 0);
        let event = client.poll_event();
        assert!(
            matches!(event, Some(ClientEvent::Closed(CloseReason::Refused { .. }))),
            "{event:?}"
        );
    }
}

#[test]
fn a_hello_or_an_answer_to_something_else_is_no_answer_to_the_hello() {
    for (id, reply) in [(2, Reply::Hello(server_hello())), (1, granted()), (1, Reply::Pong)] {
        let mut client = ClientConn::new(CLUSTER, vec![], 0).unwrap();
        let mut out = Vec::new();
        reply.encode_frame(RequestId(id), &mut out).unwrap();
        client.feed(&out, 0);
        let Some(ClientEvent::Closed(CloseReason::Refused { code, .. })) = client.poll_event()
        else {
            panic!("closed");
        };
        assert_eq!(code, ErrorCode::HANDSHAKE_EXPECTED);
    }
}

#[test]
fn nothing_comes_before_the_hello() {
    let mut server = ServerConn::new(CLUSTER, 0);
    server.feed(&frame_of(&acquire(), 3), 0);
    assert_eq!(closed_code(server.poll_event()), ErrorCode::HANDSHAKE_EXPECTED);
    assert_eq!(errors_of(&mut server), [(3, ErrorCode::HANDSHAKE_EXPECTED)]);

    let mut server = ServerConn::new(CLUSTER, 0);
    let mut out = Vec::new();
    frame::append(Header::new(kind::PEER_MIN, RequestId(4)), 64, &mut out, |_| ()).unwrap();
    server.feed(&out, 0);
    let Some(ServerEvent::Closed(reason)) = server.poll_event() else { panic!("closed") };
    assert!(reason.to_string().contains("client port"), "{reason}");
    assert_eq!(errors_of(&mut server), [(4, ErrorCode::HANDSHAKE_EXPECTED)]);
}

#[test]
fn a_hello_with_a_wrong_magic_or_body_is_refused() {
    let mut server = ServerConn::new(CLUSTER, 0);
    server.feed(&frame_of(&Request::Hello(ClientHello { magic: 1, ..client_hello() }), 1), 0);
    assert_eq!(closed_code(server.poll_event()), ErrorCode::MALFORMED);

    let mut server = ServerConn::new(CLUSTER, 0);
    let mut out = Vec::new();
    frame::append(Header::new(kind::HELLO, RequestId(2)), 64, &mut out, |out| out.push(0)).unwrap();
    server.feed(&out, 0);
    assert_eq!(closed_code(server.poll_event()), ErrorCode::MALFORMED);
    assert_eq!(errors_of(&mut server), [(2, ErrorCode::MALFORMED)]);
}

#[test]
fn before_the_handshake_frames_are_short() {
    let mut server = ServerConn::new(CLUSTER, 0);
    let announced = u32::try_from(CLIENT_BODY_MAX).unwrap().to_le_bytes();
    server.feed(&announced, 0);
    assert!(matches!(
        server.poll_event(),
        Some(ServerEvent::Closed(CloseReason::Frame(FrameError::TooLarge { .. })))
    ));
    assert_eq!(errors_of(&mut server), [(0, ErrorCode::FRAME_TOO_LARGE)]);
}

#[test]
fn requests_sent_with_the_hello_wait_for_its_answer() {
    let mut server = ServerConn::new(CLUSTER, 0);
    let mut bytes = frame_of(&Request::Hello(client_hello()), 1);
    bytes.extend(frame_of(&acquire(), 2));
    server.feed(&bytes, 0);
    assert!(matches!(server.poll_event(), Some(ServerEvent::Hello(_))));
    assert_eq!(server.poll_event(), None);
    assert!(!server.wants_frames());
    server.accept(server_hello());
    assert!(matches!(server.poll_event(), Some(ServerEvent::Request { id: RequestId(2), .. })));
}

#[test]
fn a_refused_hello_is_answered_under_its_id() {
    let mut server = ServerConn::new(CLUSTER, 0);
    server.feed(&frame_of(&Request::Hello(client_hello()), 6), 0);
    server.poll_event().unwrap();
    server.refuse(ErrorReply::new(ErrorCode::AUTH_FAILED, "no"));
    assert_eq!(closed_code(server.poll_event()), ErrorCode::AUTH_FAILED);
    assert_eq!(errors_of(&mut server), [(6, ErrorCode::AUTH_FAILED)]);
}

#[test]
fn a_bad_body_costs_its_own_request_only() {
    let mut server = open_server();
    let mut out = Vec::new();
    let mut put = |kind, id, flags, version| {
        let header = Header { version, kind, flags, id: RequestId(id) };
        frame::append(header, 64, &mut out, |out| out.extend([0xff; 40])).unwrap();
    };
    put(kind::COMMAND, 1, 0, VERSION_MAX);
    put(kind::PING, 2, 0, VERSION_MAX);
    put(99, 3, 0, VERSION_MAX);
    put(kind::OUTCOME, 4, 0, VERSION_MAX);
    put(kind::PEER_MAX, 5, 0, VERSION_MAX);
    put(kind::GET, 7, 0, VERSION_MAX + 1);
    out.extend(frame_of(&acquire(), 0));
    out.extend(frame_of(&Request::Hello(client_hello()), 8));
    let page = SessionsRequest {
        shard: ShardId(0),
        after: leasehold_protocol::ids::LeaseId(0),
        limit: 257,
        timeout_ms: 1,
    };
    out.extend(frame_of(&Request::Sessions(page), 9));
    server.feed(&out, 0);
    assert_eq!(server.poll_event(), None);
    let expected = [
        (1, ErrorCode::MALFORMED),
        (2, ErrorCode::MALFORMED),
        (3, ErrorCode::UNKNOWN_KIND),
        (4, ErrorCode::UNKNOWN_KIND),
        (5, ErrorCode::UNKNOWN_KIND),
        (7, ErrorCode::UNSUPPORTED_VERSION),
        (0, ErrorCode::MALFORMED),
        (8, ErrorCode::MALFORMED),
        (9, ErrorCode::TOO_MANY_ITEMS),
    ];
    assert_eq!(errors_of(&mut server), expected);
    assert_eq!(server.in_flight_len(), 0);
    assert_goes_on(&mut server);
}

#[test]
fn a_flag_that_is_not_defined_is_never_ignored() {
    let mut server = open_server();
    let mut out = Vec::new();
    let header = Header { flags: 1 << 15, ..Header::new(kind::STATUS, RequestId(6)) };
    encode_frame(header, &StatusRequest { timeout_ms: 1 }, 64, &mut out).unwrap();
    server.feed(&out, 0);
    assert_eq!(server.poll_event(), None);
    assert_eq!(errors_of(&mut server), [(6, ErrorCode::MALFORMED)]);

    for header in [
        Header { flags: 1, ..Header::new(kind::PONG, RequestId(9)) },
        Header { version: VERSION_MAX + 1, ..Header::new(kind::PONG, RequestId(9)) },
    ] {
        let (mut client, _) = open_pair();
        let mut out = Vec::new();
        frame::append(header, 0, &mut out, |_| ()).unwrap();
        client.feed(&out, 0);
        let event = client.poll_event();
        assert!(
            matches!(event, Some(ClientEvent::Closed(CloseReason::Refused { .. }))),
            "{event:?}"
        );
    }
}

#[test]
fn after_the_handshake_frames_are_long() {
    let mut server = open_server();
    let item = RenewItem {
        lease: leasehold_protocol::ids::LeaseId(1),
        secret: leasehold_protocol::ids::Secret::default(),
        version: leasehold_protocol::ids::HoldSetVersion(1),
    };
    let renew = RenewRequest { shard: ShardId(0), timeout_ms: 1, items: vec![item; 1_024] };
    server.feed(&frame_of(&Request::Renew(renew), 2), 0);
    assert!(matches!(server.poll_event(), Some(ServerEvent::Request { id: RequestId(2), .. })));
    server.feed(&u32::try_from(HEADER_LEN + CLIENT_BODY_MAX).unwrap().to_le_bytes(), 0);
    assert_eq!(server.poll_event(), None);

    let mut server = open_server();
    server.feed(&u32::try_from(HEADER_LEN + CLIENT_BODY_MAX + 1).unwrap().to_le_bytes(), 0);
    assert!(matches!(server.poll_event(), Some(ServerEvent::Closed(_))));
}

#[test]
fn a_bad_checksum_is_answered_and_costs_the_connection() {
    let mut server = open_server();
    let mut bytes = frame_of(&acquire(), 9);
    *bytes.last_mut().unwrap() ^= 1;
    bytes.extend(frame_of(&Request::Ping, 10));
    server.feed(&bytes, 0);
    assert!(matches!(
        server.poll_event(),
        Some(ServerEvent::Closed(CloseReason::Frame(FrameError::BadChecksum { .. })))
    ));
    assert_eq!(errors_of(&mut server), [(0, ErrorCode::BAD_CHECKSUM)], "the id cannot be trusted");
    server.feed(&frame_of(&Request::Ping, 11), 0);
    assert_eq!(server.poll_event(), None);
    assert_eq!(server.output_len(), 0);
}

#[test]
fn other_protocols_are_named_and_not_answered() {
    let streams: [(&[u8], Foreign); 5] = [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", Foreign::Http),
        (&[0x16, 0x03, 0x01, 0x00, 0xf4, 0x01], Foreign::Tls),
        (b"SSH-2.0-OpenSSH_9.6\r\n", Foreign::Ssh),
        (&[0; 16 * 1024], Foreign::Zeros),
        (b"hello?\n", Foreign::Text),
    ];
    for (bytes, foreign) in streams {
        let mut server = ServerConn::new(CLUSTER, 0);
        server.feed(bytes, 0);
        let reason = CloseReason::Frame(FrameError::Foreign(foreign));
        assert_eq!(server.poll_event(), Some(ServerEvent::Closed(reason)));
        assert_eq!(server.output_len(), 0);
    }
}

#[test]
fn an_id_in_flight_twice_cannot_be_answered_and_costs_the_connection() {
    let mut server = open_server();
    server.feed(&frame_of(&acquire(), 4), 0);
    server.poll_event().unwrap();
    server.reply(RequestId(4), &queued());
    server.take_output(Vec::new());
    server.feed(&frame_of(&acquire(), 4), 0);
    assert_eq!(closed_code(server.poll_event()), ErrorCode::MALFORMED);
    assert_eq!(errors_of(&mut server), [(0, ErrorCode::MALFORMED)]);
    assert_eq!((server.in_flight_len(), server.is_in_flight(RequestId(4))), (0, false));
    assert_eq!(server.reply(RequestId(4), &granted()), Answer::Dropped);
    assert_eq!(server.output_len(), 0);
}

#[test]
fn one_request_too_many_is_answered_and_nothing_else_is_hurt() {
    let (mut client, mut server) = open_pair();
    let mut ids = Vec::new();
    for _ in 0..IN_FLIGHT_MAX {
        ids.push(client.request(&acquire()).unwrap());
    }
    assert_eq!(client.request(&acquire()), Err(RequestError::TooManyInFlight));
    for _ in 0..IN_FLIGHT_RESERVE {
        client.request(&release()).unwrap();
    }
    assert_eq!(client.request(&release()), Err(RequestError::TooManyInFlight));
    to_server(&mut client, &mut server, 0);
    while server.poll_event().is_some() {}
    assert_eq!(server.in_flight_len(), IN_FLIGHT_MAX + IN_FLIGHT_RESERVE);

    server.feed(&frame_of(&release(), 1 << 41), 0);
    assert_eq!(server.poll_event(), None);
    assert_eq!(errors_of(&mut server), [(1 << 41, ErrorCode::TOO_MANY_IN_FLIGHT)]);
    server.feed(&frame_of(&acquire(), 1 << 40), 0);
    assert_eq!(server.poll_event(), None);
    let replies = replies_of(&server.take_output(Vec::new()));
    let [(RequestId(id), Reply::Error(error))] = &replies[..] else { panic!("{replies:?}") };
    assert_eq!((*id, error.code), (1 << 40, ErrorCode::TOO_MANY_IN_FLIGHT));
    assert!(error.retry_after_ms > 0);
    assert_goes_on(&mut server);

    for id in &ids[..=IN_FLIGHT_RESERVE] {
        assert_eq!(server.reply(*id, &granted()), Answer::Sent);
    }
    server.feed(&frame_of(&acquire(), 1 << 40), 0);
    assert!(matches!(server.poll_event(), Some(ServerEvent::Request { .. })));
}

#[test]
fn a_client_that_takes_no_replies_is_not_read_any_further() {
    let mut server = open_server();
    let pings: Vec<u8> = (1..=100_000).flat_map(|id| frame_of(&Request::Ping, id)).collect();
    server.feed(&pings, 0);
    assert_eq!(server.poll_event(), None);
    assert!(!server.wants_frames());
    assert!((OUTPUT_LEN_HIGH..OUTPUT_LEN_HIGH + 100).contains(&server.output_len()));
    let mut answered = 0;
    while server.output_len() > 0 {
        answered += replies_of(&server.take_output(Vec::new())).len();
        assert_eq!(server.poll_event(), None);
    }
    assert_eq!(answered, 100_000, "nothing is lost");
}

fn long_holds(key_len: usize, count: usize) -> Reply {
    let held = HeldKey {
        key: vec![b'k'; key_len],
        token: leasehold_protocol::ids::Token(1),
        mode: leasehold_protocol::ids::Mode::EXCLUSIVE,
        number: leasehold_protocol::ids::Number(1),
        forced: false,
        slots: vec![],
        entries: 1,
        asked: false,
        floor: leasehold_protocol::ids::Token(1),
    };
    Reply::Holds(HoldsReply {
        revision: leasehold_protocol::ids::Revision(1),
        version: leasehold_protocol::ids::HoldSetVersion(1),
        holds: vec![held; count],
        waits: vec![],
    })
}

#[test]
fn reads_are_answered_busy_when_too_many_replies_lie_unsent() {
    let mut server = open_server();
    let holds = HoldsRequest {
        shard: ShardId(0),
        lease: leasehold_protocol::ids::LeaseId(1),
        secret: leasehold_protocol::ids::Secret::default(),
        timeout_ms: 1,
    };
    for id in 1..=30 {
        server.feed(&frame_of(&Request::Holds(holds.clone()), id), 0);
    }
    server.feed(&frame_of(&acquire(), 31), 0);
    while server.poll_event().is_some() {}
    let reply = long_holds(512, 2_000);
    let answers: Vec<_> = (1..=30).map(|id| server.reply(RequestId(id), &reply)).collect();
    assert_eq!(answers[0], Answer::Sent);
    assert_eq!(answers[29], Answer::Replaced(ErrorCode::BUSY));
    assert!(server.output_len() < OUTPUT_LEN_MAX + 2 * 1024 * 1024);
    assert_eq!(server.reply(RequestId(31), &granted()), Answer::Sent, "an outcome is never held");
    assert_eq!(replies_of(&server.take_output(Vec::new())).len(), 31);
}

#[test]
fn an_answer_that_fits_no_frame_is_replaced_by_an_error() {
    let mut server = open_server();
    let request = Request::Status(StatusRequest { timeout_ms: 1 });
    server.feed(&frame_of(&request, 1), 0);
    server.poll_event().unwrap();
    let answer = server.reply(RequestId(1), &long_holds(512, 9_000));
    assert_eq!(answer, Answer::Replaced(ErrorCode::FRAME_TOO_LARGE));
    assert_eq!(errors_of(&mut server), [(1, ErrorCode::FRAME_TOO_LARGE)]);
    assert_eq!(server.in_flight_len(), 0);
}

#[test]
fn the_handshake_has_a_deadline_on_both_sides() {
    let deadline_ns = 5 + HANDSHAKE_MS_MAX * MS;
    let mut server = ServerConn::new(CLUSTER, 5);
    let mut client = ClientConn::new(CLUSTER, vec![], 5).unwrap();
    assert_eq!(server.next_deadline(), Some(deadline_ns));
    assert_eq!(client.next_deadline(), Some(deadline_ns));
    server.feed(&client.take_output(Vec::new())[..9], deadline_ns - 1);
    server.tick(deadline_ns - 1);
    client.tick(deadline_ns - 1);
    assert_eq!((server.poll_event(), client.poll_event()), (None, None));
    server.tick(deadline_ns);
    client.tick(deadline_ns);
    let reason = CloseReason::HandshakeTimeout;
    assert_eq!(server.poll_event(), Some(ServerEvent::Closed(reason.clone())));
    assert_eq!(client.poll_event(), Some(ClientEvent::Closed(reason)));
    assert_eq!(errors_of(&mut server), [(0, ErrorCode::HANDSHAKE_EXPECTED)]);
    assert_eq!((server.next_deadline(), client.next_deadline()), (None, None));
}

#[test]
fn only_whole_frames_keep_a_connection_open() {
    let mut server = open_server();
    let ping = frame_of(&Request::Ping, 1);
    server.feed(&ping, 10 * MS);
    assert_eq!(server.poll_event(), None);
    let deadline_ns = 10 * MS + IDLE_MS_MAX * MS;
    assert_eq!(server.next_deadline(), Some(deadline_ns));
    server.feed(&ping[..7], deadline_ns - 1);
    assert_eq!(server.poll_event(), None);
    server.tick(deadline_ns - 1);
    assert_eq!(server.poll_event(), None);
    server.tick(deadline_ns);
    assert_eq!(server.poll_event(), Some(ServerEvent::Closed(CloseReason::IdleTimeout)));
}

#[test]
fn a_quiet_client_pings_and_both_sides_stay() {
    let (mut client, mut server) = open_pair();
    let id = client.request(&acquire()).unwrap();
    to_server(&mut client, &mut server, 0);
    server.poll_event().unwrap();
    let mut pings = 0;
    let mut now_ns = 0;
    while now_ns < 10 * IDLE_MS_MAX * MS {
        now_ns = client.next_deadline().unwrap();
        client.tick(now_ns);
        server.tick(now_ns);
        pings += u32::from(client.output_len() > 0);
        to_server(&mut client, &mut server, now_ns);
        assert_eq!(server.poll_event(), None);
        to_client(&mut server, &mut client, now_ns);
        assert_eq!(client.poll_event(), None, "the client's own pings are no events");
    }
    assert!(u64::from(pings) >= 10 * IDLE_MS_MAX / PING_AFTER_MS - 2, "{pings}");
    assert_eq!(client.in_flight_len(), 1);
    server.reply(id, &granted());
    to_client(&mut server, &mut client, now_ns);
    assert_eq!(client.poll_event(), Some(ClientEvent::Reply { id, reply: granted() }));
}

#[test]
fn a_busy_client_sends_no_pings_and_a_silent_server_is_given_up() {
    let (mut client, _) = open_pair();
    let mut now_ns = 0;
    while !client.is_over() {
        client.request(&acquire()).unwrap();
        let frames = client.counters().frames_out;
        now_ns = client.next_deadline().unwrap();
        client.tick(now_ns);
        assert_eq!(client.counters().frames_out, frames);
    }
    assert_eq!(now_ns, IDLE_MS_MAX * MS);
    assert_eq!(client.poll_event(), Some(ClientEvent::Closed(CloseReason::IdleTimeout)));
}

#[test]
fn an_error_without_a_request_ends_the_clients_connection_with_its_reason() {
    let (mut client, mut server) = open_pair();
    client.request(&acquire()).unwrap();
    server.refuse(ErrorReply::new(ErrorCode::SHUTTING_DOWN, "maintenance"));
    to_client(&mut server, &mut client, 0);
    let Some(ClientEvent::Closed(reason)) = client.poll_event() else { panic!("closed") };
    assert!(reason.to_string().contains("shutting_down (405): maintenance"), "{reason}");
    assert_eq!(client.poll_event(), None);
}

#[test]
fn a_reply_that_cannot_be_read_ends_the_clients_connection() {
    for kind in [kind::OUTCOME, kind::PONG, 99, kind::COMMAND] {
        let (mut client, _) = open_pair();
        let id = client.request(&acquire()).unwrap();
        let mut out = Vec::new();
        frame::append(Header::new(kind, id), 64, &mut out, |out| out.push(0xee)).unwrap();
        client.feed(&out, 0);
        assert!(matches!(
            client.poll_event(),
            Some(ClientEvent::Closed(CloseReason::Refused { .. }))
        ));
    }
}

#[test]
fn counters_count_frames_and_bytes_of_both_directions() {
    let (mut client, mut server) = open_pair();
    client.request(&acquire()).unwrap();
    to_server(&mut client, &mut server, 0);
    while server.poll_event().is_some() {}
    let (sent, received) = (client.counters(), server.counters());
    assert_eq!((sent.frames_out, received.frames_in), (2, 2));
    assert_eq!(sent.bytes_out, received.bytes_in);
    assert_eq!((sent.frames_in, received.frames_out), (1, 1));
    assert_eq!(sent.bytes_in, received.bytes_out);
}
