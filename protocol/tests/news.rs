//! A hello that is said again because the cluster's nodes changed.

#![allow(clippy::unwrap_used, reason = "the helpers of a test are part of it")]

mod common;

use common::{CLUSTER, acquire, granted, server_hello};
use leasehold_protocol::conn::{ClientConn, ClientEvent, CloseReason, ServerConn, ServerEvent};
use leasehold_protocol::ids::{ClusterId, NodeId, RequestId};
use leasehold_protocol::limits::OUTPUT_LEN_HIGH;
use leasehold_protocol::reply::{NodeAddress, Reply, ServerHello};

/// A client that expects `cluster`, and its server, with the handshake made at time 0.
fn open_pair(cluster: ClusterId) -> (ClientConn, ServerConn) {
    let mut client = ClientConn::new(cluster, vec![], 0).unwrap();
    let mut server = ServerConn::new(CLUSTER, 0);
    server.feed(&client.take_output(Vec::new()), 0);
    assert!(matches!(server.poll_event(), Some(ServerEvent::Hello(_))));
    server.accept(server_hello());
    client.feed(&server.take_output(Vec::new()), 0);
    assert!(matches!(client.poll_event(), Some(ClientEvent::Hello(_))));
    (client, server)
}

fn changed() -> ServerHello {
    let node = NodeAddress { node: NodeId(9), client_addr: "new.example:7650".to_owned() };
    ServerHello { nodes: vec![node], ..server_hello() }
}

#[test]
fn a_hello_that_is_said_again_is_news_and_answers_nothing() {
    let (mut client, mut server) = open_pair(CLUSTER);
    let id = client.request(&acquire()).unwrap();
    server.feed(&client.take_output(Vec::new()), 0);
    assert!(matches!(server.poll_event(), Some(ServerEvent::Request { .. })));
    // The version is the connection's, whatever the node says.
    assert!(server.news(ServerHello { version: 0, ..changed() }));
    server.reply(id, &granted());
    client.feed(&server.take_output(Vec::new()), 0);
    assert_eq!(client.poll_event(), Some(ClientEvent::News(changed())));
    assert_eq!(client.poll_event(), Some(ClientEvent::Reply { id, reply: granted() }));
    assert_eq!(client.poll_event(), None);
}

#[test]
fn news_wait_for_the_handshake_and_for_a_client_that_reads() {
    let mut early = ServerConn::new(CLUSTER, 0);
    assert!(!early.news(changed()) && early.output_len() == 0);
    let (mut client, mut server) = open_pair(CLUSTER);
    while server.output_len() < OUTPUT_LEN_HIGH {
        assert!(server.news(changed()));
    }
    let full = server.output_len();
    assert!(!server.news(changed()) && server.output_len() == full);
    client.feed(&server.take_output(Vec::new()), 0);
    assert!(server.news(changed()));
}

#[test]
fn a_node_does_not_change_its_cluster_on_an_open_connection() {
    // Also where the client took any cluster at first: it belongs to that one now.
    for expected in [CLUSTER, ClusterId::UNKNOWN] {
        for hello in [
            ServerHello { cluster: ClusterId(*b"another cluster!"), ..changed() },
            ServerHello { shards: 0, ..changed() },
            ServerHello { key_hash: 2, ..changed() },
        ] {
            let (mut client, _) = open_pair(expected);
            let mut out = Vec::new();
            Reply::Hello(hello).encode_frame(RequestId(0), &mut out).unwrap();
            client.feed(&out, 0);
            let event = client.poll_event();
            assert!(
                matches!(event, Some(ClientEvent::Closed(CloseReason::Refused { .. }))),
                "{event:?}"
            );
        }
    }
}
