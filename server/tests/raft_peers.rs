//! Connections between simulated nodes: who is let in, who is refused and why, and what a dead or
//! hostile peer costs.

mod raft_support;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId};
use leasehold_protocol::limits::PEER_BODY_MAX;
use leasehold_protocol::peer;
use leasehold_server::env::{ByteReader, ByteWriter, Net};
use leasehold_server::raft::peers::{Class, Identity, PeerError, PeerInfo, PeerService, Peers};
use leasehold_server::rt::sim::{DomainId, SimClock, SimRt, SimWorld};
use leasehold_server::rt::sim_net::{SimNet, SimNetConfig};
use openraft::AsyncRuntime;
use raft_support::{CLUSTER, Cluster, SECRET, SHARD, SimEnv, addr, disk_id, run, sleep_ms};

/// Answers every request with its own body, and notes who asked. Some bodies are special: see `SLOW`.
#[derive(Default)]
struct Echo {
    asked: RefCell<Vec<(NodeId, u8)>>,
}

impl PeerService for Echo {
    fn handle(
        &self,
        from: &PeerInfo,
        kind: u8,
        body: &[u8],
    ) -> LocalBoxFuture<'static, Result<Vec<u8>, ErrorCode>> {
        self.asked.borrow_mut().push((from.node(), kind));
        let body = body.to_vec();
        async move {
            match body.as_slice() {
                NEVER => std::future::pending().await,
                LARGE => Ok(vec![0; PEER_BODY_MAX + 1]),
                SLOW => {
                    sleep_ms(200).await;
                    Ok(body)
                }
                _ => {
                    sleep_ms(1).await;
                    Ok(body)
                }
            }
        }
        .boxed_local()
    }
}

struct Node {
    domain: DomainId,
    peers: Rc<Peers<SimEnv>>,
    echo: Rc<Echo>,
}

const ASK: u8 = peer::SERVICE_MIN;
/// Answered late.
const SLOW: &[u8] = b"slow";
/// Never answered.
const NEVER: &[u8] = b"never";
/// Answered with more than a frame may carry.
const LARGE: &[u8] = b"large";
const PATIENCE: Duration = Duration::from_secs(3);

fn identity(node: u64) -> Identity {
    Identity {
        cluster: CLUSTER,
        node: NodeId(node),
        disk: disk_id(node),
        boot: 1,
        nonce: [node as u8; 16],
        secret: SECRET.into(),
        peer_addr: addr(node),
        client_addr: format!("client{node}:1"),
    }
}

fn net() -> SimNet {
    SimNet::new(&SimWorld::current(), SimNetConfig::default())
}

/// A machine that listens at `listen` and knows where nodes 1 to 3 are.
fn start(net: &SimNet, identity: Identity, listen: &str) -> Node {
    let world = SimWorld::current();
    let domain = world.add_domain(Duration::from_secs(1), 0);
    start_in(net, domain, identity, listen)
}

fn start_in(net: &SimNet, domain: DomainId, identity: Identity, listen: &str) -> Node {
    let host = net.host(domain);
    let peers = Peers::<SimEnv>::new(identity, host.clone(), SimClock, SHARD);
    (1..=3).for_each(|node| peers.set_address(NodeId(node), addr(node)));
    let echo = Rc::new(Echo::default());
    peers.set_service(echo.clone());
    let mut listener = host.listen(listen).expect("the address is free");
    let serving = peers.clone();
    let accept = async move {
        loop {
            let (reader, writer) = listener.accept().await;
            let serving = serving.clone();
            drop(SimRt::spawn(async move { serving.serve(reader, writer).await }));
        }
    };
    drop(SimWorld::current().spawn_in(domain, accept));
    Node { domain, peers, echo }
}

async fn ask_as(node: &Node, to: u64, class: Class, body: &[u8]) -> Result<Vec<u8>, PeerError> {
    let (peers, body) = (node.peers.clone(), body.to_vec());
    let call = async move { peers.call(NodeId(to), class, ASK, &body, PATIENCE).await };
    SimWorld::current().spawn_in(node.domain, call).await.expect("nobody kills the node")
}

async fn ask(node: &Node, to: u64) -> Result<Vec<u8>, PeerError> {
    ask_as(node, to, Class::Forward, b"hello").await
}

fn refused_with(answer: &Result<Vec<u8>, PeerError>, text: &str) {
    match answer {
        Err(PeerError::Unreachable(reason)) if reason.contains(text) => {}
        other => panic!("{other:?} does not say {text:?}"),
    }
}

#[test]
fn peers_with_the_secret_talk_on_every_class() {
    run(1, async {
        let net = net();
        let one = start(&net, identity(1), &addr(1));
        let two = start(&net, identity(2), &addr(2));
        for class in [Class::Bulk, Class::Heartbeat, Class::Snapshot, Class::Forward] {
            assert_eq!(ask_as(&one, 2, class, b"x").await, Ok(b"x".to_vec()));
            assert_eq!(one.peers.connects(NodeId(2), class), 1);
        }
        assert_eq!(two.echo.asked.borrow().len(), 4);
        let large = vec![7; 1_000_000];
        assert_eq!(ask_as(&one, 2, Class::Bulk, &large).await, Ok(large));
        assert_eq!(one.peers.client_address(NodeId(2)).as_deref(), Some("client2:1"));
        assert_eq!(two.peers.client_address(NodeId(1)).as_deref(), Some("client1:1"));
        // Many at once: each gets its own answer.
        let asks = (0..500_u32).map(|n| {
            let one = &one;
            async move { ask_as(one, 2, Class::Forward, &n.to_le_bytes()).await }
        });
        let answers = futures_util::future::join_all(asks).await;
        for (n, answer) in answers.into_iter().enumerate() {
            assert_eq!(answer, Ok((n as u32).to_le_bytes().to_vec()));
        }
    });
}

#[test]
fn a_question_at_an_address_leaves_nothing_behind() {
    run(1, async {
        let net = net();
        let one = start(&net, identity(1), &addr(1));
        let four = start(&net, identity(4), "elsewhere:1");
        let ask_at = async |node: u64, addr: &'static str| {
            let peers = one.peers.clone();
            let asked =
                async move { peers.ask_at(NodeId(node), addr, ASK, b"hello", PATIENCE).await };
            SimWorld::current().spawn_in(one.domain, asked).await.expect("nobody kills the node")
        };
        assert_eq!(ask_at(4, "elsewhere:1").await, Ok(b"hello".to_vec()));
        assert_eq!(ask(&one, 4).await, Err(PeerError::UnknownNode));
        let other = ask_at(5, "elsewhere:1").await;
        let code = ErrorCode::NO_SUCH_NODE;
        assert!(
            matches!(&other, Err(PeerError::Refused { code: said, .. }) if *said == code),
            "{other:?}"
        );
        let nobody = ask_at(4, "nowhere:1").await;
        assert!(matches!(nobody, Err(PeerError::Unreachable(_))), "{nobody:?}");
        raft_support::until("no connection is left", || four.peers.accepted_len() == 0).await;
        // What a node says itself, when it comes, is another matter; it counts as it was said last.
        assert_eq!(ask(&four, 1).await, Ok(b"hello".to_vec()));
        refused_with(&ask(&one, 4).await, "broke off");
        let moved = Identity { peer_addr: "elsewhere:1".to_owned(), ..identity(4) };
        let moved = start(&net, moved, "elsewhere:2");
        assert_eq!(ask(&moved, 1).await, Ok(b"hello".to_vec()));
        assert_eq!(ask(&one, 4).await, Ok(b"hello".to_vec()));
    });
}

#[test]
fn another_secret_is_refused_by_both_sides() {
    run(2, async {
        let net = net();
        let one =
            start(&net, Identity { secret: b"guess".as_slice().into(), ..identity(1) }, &addr(1));
        let two = start(&net, identity(2), &addr(2));
        refused_with(&ask(&one, 2).await, "auth_failed");
        refused_with(&ask(&two, 1).await, "auth_failed");
        assert!(one.echo.asked.borrow().is_empty() && two.echo.asked.borrow().is_empty());
    });
}

#[test]
fn another_cluster_and_another_node_are_refused() {
    run(3, async {
        let net = net();
        let one = start(&net, Identity { cluster: ClusterId([9; 16]), ..identity(1) }, &addr(1));
        let two = start(&net, identity(2), &addr(2));
        // Node 3's address leads to node 4.
        let _four = start(&net, identity(4), &addr(3));
        refused_with(&ask(&one, 2).await, "wrong_cluster");
        refused_with(&ask(&two, 1).await, "wrong_cluster");
        refused_with(&ask(&two, 3).await, "node 3 was expected at this address, node 4 is here");
        assert_eq!(ask(&two, 7).await, Err(PeerError::UnknownNode));
    });
}

#[test]
fn before_its_birth_a_node_is_heard_only_about_births() {
    run(4, async {
        let net = net();
        let unborn = Identity { cluster: ClusterId::UNKNOWN, ..identity(1) };
        let one = start(&net, unborn, &addr(1));
        let two = start(&net, identity(2), &addr(2));
        let not_ready = |answer| match answer {
            Err(PeerError::Refused { code, .. }) => assert_eq!(code, ErrorCode::NOT_READY),
            other => panic!("{other:?}"),
        };
        not_ready(ask(&one, 2).await);
        not_ready(ask(&two, 1).await);
        let (peers, class) = (one.peers.clone(), Class::Forward);
        let birth =
            async move { peers.call(NodeId(2), class, peer::BIRTH_MIN, b"b", PATIENCE).await };
        let birth = SimWorld::current().spawn_in(one.domain, birth).await.unwrap();
        assert_eq!(birth, Ok(b"b".to_vec()));
        // Once it belongs to the cluster, its connections are made anew and everything passes.
        one.peers.set_cluster(CLUSTER);
        sleep_ms(50).await;
        assert_eq!(ask(&one, 2).await, Ok(b"hello".to_vec()));
        assert_eq!(ask(&two, 1).await, Ok(b"hello".to_vec()));
    });
}

#[test]
fn another_directory_under_a_known_node_id_is_refused_and_told() {
    run(5, async {
        let net = net();
        let wiped = start(&net, Identity { disk: DiskId([77; 16]), ..identity(1) }, &addr(1));
        let two = start(&net, identity(2), &addr(2));
        two.peers.set_disk(NodeId(1), disk_id(1));
        refused_with(&ask(&wiped, 2).await, "the other side refuses this node");
        refused_with(&ask(&two, 1).await, "takes no part until it is admitted");
        assert!(wiped.echo.asked.borrow().is_empty() && two.echo.asked.borrow().is_empty());
    });
}

#[test]
fn a_copied_directory_is_refused_while_the_original_lives() {
    run(6, async {
        let net = net();
        let original = start(&net, identity(1), &addr(1));
        let two = start(&net, identity(2), &addr(2));
        assert!(ask(&original, 2).await.is_ok());
        let copy = start(&net, Identity { boot: 2, nonce: [99; 16], ..identity(1) }, "elsewhere:1");
        for _ in 0..5 {
            refused_with(&ask(&copy, 2).await, "another live process uses the data directory");
            sleep_ms(1_500).await;
        }
        assert!(ask(&original, 2).await.is_ok(), "the original is not disturbed");
        // The original's machine vanishes without a word: soon the other one is taken for a restart.
        net.power_off(original.domain);
        let mut answer = ask(&copy, 2).await;
        for _ in 0..20 {
            if answer.is_ok() {
                break;
            }
            sleep_ms(500).await;
            answer = ask(&copy, 2).await;
        }
        assert_eq!(answer, Ok(b"hello".to_vec()));
        assert_eq!(two.echo.asked.borrow().len(), 3);
    });
}

#[test]
fn a_restarted_process_is_let_in_at_once() {
    run(7, async {
        let net = net();
        let world = SimWorld::current();
        let one = start(&net, identity(1), &addr(1));
        let two = start(&net, identity(2), &addr(2));
        assert!(ask(&one, 2).await.is_ok());
        assert!(ask(&two, 1).await.is_ok());
        world.kill(one.domain);
        sleep_ms(10).await;
        world.revive(one.domain);
        let again = Identity { boot: 2, nonce: [2; 16], ..identity(1) };
        let one = start_in(&net, one.domain, again, &addr(1));
        assert_eq!(ask(&one, 2).await, Ok(b"hello".to_vec()));
        assert_eq!(ask(&two, 1).await, Ok(b"hello".to_vec()));
    });
}

#[test]
fn a_dead_peer_costs_few_connects() {
    run(8, async {
        let cluster = Cluster::formed(3).await;
        let (leader, _) = cluster.leader().await;
        let dead = leader % 3 + 1;
        cluster.kill(dead);
        let peers = cluster.running(leader).peers;
        let connects = || {
            let of = |class| peers.connects(NodeId(dead), class);
            [of(Class::Bulk), of(Class::Heartbeat), of(Class::Snapshot)]
        };
        let before = connects();
        for secret in 0..100 {
            cluster.open_lease(secret).await;
            sleep_ms(100).await;
        }
        let more: Vec<u64> = connects().iter().zip(before).map(|(now, then)| now - then).collect();
        // At most one a second and class in the long run, and a few at first.
        assert!(more.iter().all(|connects| *connects <= 30), "{more:?} connects in ten seconds");
        assert!(more[0] >= 2, "{more:?}: it is still tried");
        cluster.start(dead).await.unwrap();
        cluster.agree().await;
    });
}

#[test]
fn a_blackholed_connection_is_given_up_and_made_anew() {
    run(9, async {
        let net = net();
        let one = start(&net, identity(1), &addr(1));
        let two = start(&net, identity(2), &addr(2));
        assert!(ask(&one, 2).await.is_ok());
        net.partition(&[one.domain], &[two.domain]);
        assert!(ask(&one, 2).await.is_err());
        assert!(ask(&one, 2).await.is_err());
        net.heal_all();
        let mut answer = ask(&one, 2).await;
        for _ in 0..10 {
            if answer.is_ok() {
                break;
            }
            sleep_ms(300).await;
            answer = ask(&one, 2).await;
        }
        assert_eq!(answer, Ok(b"hello".to_vec()));
        assert!(one.peers.connects(NodeId(2), Class::Forward) >= 2);
    });
}

/// Whatever a stranger sends, nothing is served, nothing panics, and others are unharmed.
#[test]
fn strangers_get_nothing() {
    run(10, async {
        let net = net();
        let world = SimWorld::current();
        let one = start(&net, identity(1), &addr(1));
        let two = start(&net, identity(2), &addr(2));
        let stranger = world.add_domain(Duration::from_secs(5), 0);
        let host = net.host(stranger);
        let mut hello = Vec::new();
        hello.extend_from_slice(&4_000_000_000_u32.to_le_bytes());
        let mut openings: Vec<Vec<u8>> = vec![
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            vec![0; 70_000],
            vec![0xff; 64],
            b"SSH-2.0-x\r\n".to_vec(),
            hello,
            Vec::new(),
        ];
        for length in 0..200 {
            let mut bytes: Vec<u8> = (0..length).map(|_| world.rng().next() as u8).collect();
            bytes.splice(..0, (length as u32 + 16).to_le_bytes());
            openings.push(bytes);
        }
        for opening in openings {
            let (mut reader, mut writer) = host.connect(&addr(2)).await.unwrap();
            let _closed = writer.write_all(&opening).await;
            let mut answer = [0; 1024];
            let read = SimRt::timeout(Duration::from_secs(20), reader.read(&mut answer)).await;
            match read.expect("the connection does not hang") {
                Ok(0) | Err(_) => {}
                Ok(len) => assert_eq!(answer[5], peer::REFUSAL, "{:?}", &answer[..len]),
            }
        }
        assert!(ask(&one, 2).await.is_ok());
        assert_eq!(two.echo.asked.borrow().len(), 1);
    });
}

#[test]
fn what_does_not_fit_a_frame_costs_nobody_else_the_connection() {
    run(11, async {
        let net = net();
        let one = start(&net, identity(1), &addr(1));
        let _two = start(&net, identity(2), &addr(2));
        let other = ask_as(&one, 2, Class::Forward, SLOW);
        let large = ask_as(&one, 2, Class::Forward, LARGE);
        let (other, large) = futures_util::future::join(other, large).await;
        assert_eq!(other, Ok(SLOW.to_vec()));
        match large {
            Err(PeerError::Refused { code: ErrorCode::FRAME_TOO_LARGE, .. }) => {}
            other => panic!("{other:?}"),
        }
        // Neither does a request that is too large.
        let asked = ask_as(&one, 2, Class::Forward, &vec![0; PEER_BODY_MAX + 1]).await;
        assert!(asked.expect_err("it does not fit").not_sent());
        assert_eq!(ask(&one, 2).await, Ok(b"hello".to_vec()));
        assert_eq!(one.peers.connects(NodeId(2), Class::Forward), 1);
    });
}

#[test]
fn strangers_who_only_connect_keep_no_peer_out() {
    run(12, async {
        let net = net();
        let one = start(&net, identity(1), &addr(1));
        let _two = start(&net, identity(2), &addr(2));
        let stranger = SimWorld::current().add_domain(Duration::from_secs(5), 0);
        let host = net.host(stranger);
        let mut idle = Vec::new();
        for _ in 0..300 {
            idle.push(host.connect(&addr(2)).await.expect("anybody may connect"));
        }
        sleep_ms(10).await;
        assert_eq!(ask(&one, 2).await, Ok(b"hello".to_vec()));
        drop(idle);
    });
}

/// Nobody sends on the connection any more, so only a timer can find that it is dead.
#[test]
fn who_waits_on_a_silent_connection_learns_it_soon() {
    run(13, async {
        let net = net();
        let one = start(&net, identity(1), &addr(1));
        let two = start(&net, identity(2), &addr(2));
        let call = |body: &'static [u8]| {
            let peers = one.peers.clone();
            let patience = Duration::from_mins(1);
            let call =
                async move { peers.call(NodeId(2), Class::Forward, ASK, body, patience).await };
            SimWorld::current().spawn_in(one.domain, call)
        };
        let before = call(NEVER);
        // A peer that takes its time is no silent peer.
        sleep_ms(5_000).await;
        assert!(ask(&one, 2).await.is_ok());
        sleep_ms(5_000).await;
        net.partition(&[one.domain], &[two.domain]);
        let after = call(b"x");
        for asked in [before, after] {
            let answer = SimRt::timeout(Duration::from_secs(2), asked).await;
            assert_eq!(answer.expect("not after a minute").unwrap(), Err(PeerError::Closed));
        }
        assert_eq!(one.peers.connects(NodeId(2), Class::Forward), 1);
    });
}
