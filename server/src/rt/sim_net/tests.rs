//! Order, bounds, cuts, breaks and crashes of simulated streams.

use std::io::ErrorKind;
use std::rc::Rc;
use std::time::Duration;

use openraft_rt::AsyncRuntime;

use super::super::sim::{DomainId, SimRt, SimWorld, WorldConfig};
use super::*;
use crate::env::{ByteReader, ByteWriter};

const MS: Duration = Duration::from_millis(1);
const ADDR: &str = "b:1";

struct Pair {
    rt: SimRt,
    net: SimNet,
    a: DomainId,
    b: DomainId,
}

fn pair(seed: u64) -> Pair {
    let rt = SimRt::with_config(seed, WorldConfig::default());
    let net = SimNet::new(rt.world(), SimNetConfig { split_permille: 500, ..Default::default() });
    let a = rt.world().add_domain(Duration::ZERO, 0);
    let b = rt.world().add_domain(Duration::ZERO, 0);
    Pair { rt, net, a, b }
}

type Halves = (SimReader, SimWriter);

/// A stream from a to b: a's halves, b's halves.
async fn joined(net: &SimNet, a: DomainId, b: DomainId) -> (Halves, Halves) {
    let mut listener = net.host(b).listen(ADDR).expect("free");
    let ours = net.host(a).connect(ADDR).await.expect("listening");
    (ours, listener.accept().await)
}

async fn read_exactly(reader: &mut SimReader, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut filled = 0;
    while filled < len {
        let read = reader.read(&mut bytes[filled..]).await.expect("the stream lives");
        assert!(read > 0, "the stream goes on");
        filled += read;
    }
    bytes
}

async fn is_stuck<F: Future>(future: F) -> bool {
    SimRt::timeout(Duration::from_secs(5), future).await.is_err()
}

#[test]
fn bytes_arrive_complete_in_order_and_late() {
    for seed in 0..20 {
        let Pair { mut rt, net, a, b } = pair(seed);
        rt.block_on(async {
            let ((_, mut writer), (mut reader, writer_b)) = joined(&net, a, b).await;
            let sent: Vec<u8> = (0..100_000_u32).map(|n| (n % 251) as u8).collect();
            let expected = sent.clone();
            let start_ns = SimWorld::current().now_ns();
            drop(SimRt::spawn(async move {
                for part in sent.chunks(777) {
                    writer.write_all(part).await.expect("the stream lives");
                }
            }));
            assert_eq!(read_exactly(&mut reader, expected.len()).await, expected);
            assert!(SimWorld::current().now_ns() >= start_ns + 50_000, "delay_min");
            drop(writer_b);
        });
    }
}

#[test]
fn a_writer_waits_for_room() {
    let Pair { mut rt, net, a, b } = pair(1);
    rt.block_on(async {
        let ((_r, mut writer), (mut reader, _w)) = joined(&net, a, b).await;
        writer.write_all(&vec![7; BUFFER_BYTES_MAX]).await.expect("fits exactly");
        assert!(is_stuck(writer.write_all(&[8])).await);
        read_exactly(&mut reader, 1).await;
        writer.write_all(&[8]).await.expect("room again");
    });
}

#[test]
fn dropping_both_halves_ends_the_stream_after_its_last_byte() {
    let Pair { mut rt, net, a, b } = pair(1);
    rt.block_on(async {
        let ((reader_a, mut writer), (mut reader, mut writer_b)) = joined(&net, a, b).await;
        writer.write_all(b"last").await.expect("open");
        drop(reader_a);
        assert!(is_stuck(async { while reader.read(&mut [0; 8]).await.unwrap() > 0 {} }).await);
        drop(writer);
        assert_eq!(reader.read(&mut [0; 8]).await.expect("orderly end"), 0);
        // The first write after the end is accepted, as a kernel does, and answered by a reset.
        writer_b.write_all(b"x").await.expect("accepted");
        SimRt::sleep(10 * MS).await;
        let refused = writer_b.write_all(b"y").await.expect_err("reset");
        assert_eq!(refused.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn a_cut_holds_one_direction_back_until_it_heals() {
    let Pair { mut rt, net, a, b } = pair(1);
    rt.block_on(async {
        let ((mut reader_a, mut writer_a), (mut reader_b, mut writer_b)) = joined(&net, a, b).await;
        net.cut(a, b);
        writer_a.write_all(b"held").await.expect("buffered");
        writer_b.write_all(b"passes").await.expect("open");
        assert_eq!(read_exactly(&mut reader_a, 6).await, b"passes");
        assert!(is_stuck(reader_b.read(&mut [0; 8])).await);
        net.heal(a, b);
        let healed_ns = SimWorld::current().now_ns();
        assert_eq!(read_exactly(&mut reader_b, 4).await, b"held");
        assert!(SimWorld::current().now_ns() >= healed_ns + 50_000, "it still had to travel");
    });
}

#[test]
fn without_acknowledgements_room_runs_out() {
    let Pair { mut rt, net, a, b } = pair(1);
    rt.block_on(async {
        let ((_r, mut writer), (mut reader, _w)) = joined(&net, a, b).await;
        net.cut(b, a);
        writer.write_all(&vec![7; BUFFER_BYTES_MAX]).await.expect("fits exactly");
        read_exactly(&mut reader, BUFFER_BYTES_MAX).await;
        assert!(is_stuck(writer.write_all(&[8])).await);
        net.heal_all();
        writer.write_all(&[8]).await.expect("acknowledged");
    });
}

#[test]
fn a_connect_through_a_cut_waits_and_one_to_nobody_is_refused() {
    let Pair { mut rt, net, a, b } = pair(1);
    rt.block_on(async {
        let refused = net.host(a).connect("nobody:1").await.expect_err("refused");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);

        let listener = net.host(b).listen(ADDR).expect("free");
        assert_eq!(net.host(a).listen(ADDR).unwrap_err().kind(), ErrorKind::AddrInUse);
        for (from, to) in [(a, b), (b, a)] {
            net.cut(from, to);
            assert!(is_stuck(net.host(a).connect(ADDR)).await);
            net.heal(from, to);
            net.host(a).connect(ADDR).await.expect("healed");
        }
        drop(listener);
        let refused = net.host(a).connect(ADDR).await.expect_err("nobody listens");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        net.host(b).listen(ADDR).expect("free again");
    });
}

#[test]
fn a_full_backlog_refuses() {
    let Pair { mut rt, net, a, b } = pair(1);
    rt.block_on(async {
        let _listener = net.host(b).listen(ADDR).expect("free");
        let mut open = Vec::new();
        for _ in 0..BACKLOG_MAX {
            open.push(net.host(a).connect(ADDR).await.expect("room"));
        }
        let refused = net.host(a).connect(ADDR).await.expect_err("full");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    });
}

/// Leaves an accepted stream in b's hands, in a task of b.
async fn held_by_b(rt: &SimWorld, net: &SimNet, a: DomainId, b: DomainId) -> Halves {
    let (ours, theirs) = joined(net, a, b).await;
    drop(rt.spawn_in(b, async move {
        let _theirs = theirs;
        std::future::pending::<()>().await;
    }));
    SimRt::sleep(MS).await;
    ours
}

#[test]
fn a_killed_process_resets_its_streams_and_a_dark_machine_stays_silent() {
    let Pair { mut rt, net, a, b } = pair(1);
    let world = rt.world().clone();
    rt.block_on(async {
        let (mut reader, _writer) = held_by_b(&world, &net, a, b).await;
        world.kill(b);
        let error = reader.read(&mut [0; 8]).await.expect_err("reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        world.revive(b);

        let (mut reader, _writer) = held_by_b(&world, &net, a, b).await;
        net.power_off(b);
        world.kill(b);
        assert!(is_stuck(reader.read(&mut [0; 8])).await);
        assert!(is_stuck(net.host(a).connect(ADDR)).await);
        world.revive(b);
        net.power_on(b);
        let error = reader.read(&mut [0; 8]).await.expect_err("reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn a_reset_does_not_pass_a_cut() {
    let Pair { mut rt, net, a, b } = pair(1);
    let world = rt.world().clone();
    rt.block_on(async {
        let (mut reader, _writer) = held_by_b(&world, &net, a, b).await;
        net.partition(&[a], &[b]);
        world.kill(b);
        assert!(is_stuck(reader.read(&mut [0; 8])).await);
        assert!(is_stuck(reader.read(&mut [0; 8])).await, "nor is it seen by a later look");
        net.heal_all();
        let error = reader.read(&mut [0; 8]).await.expect_err("reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn a_break_fails_waiting_readers_of_both_ends() {
    let Pair { mut rt, net, a, b } = pair(1);
    rt.block_on(async {
        let ((mut reader_a, _wa), (mut reader_b, _wb)) = joined(&net, a, b).await;
        let net = Rc::new(net);
        let breaker = Rc::clone(&net);
        drop(SimRt::spawn(async move {
            SimRt::sleep(MS).await;
            breaker.break_streams(b, a);
        }));
        assert!(reader_a.read(&mut [0; 8]).await.is_err());
        assert!(reader_b.read(&mut [0; 8]).await.is_err());
    });
}

#[test]
fn one_seed_gives_one_network() {
    let run = |seed| {
        let Pair { mut rt, net, a, b } = pair(seed);
        rt.block_on(async {
            let ((_r, mut writer), (mut reader, _w)) = joined(&net, a, b).await;
            for _ in 0..50 {
                writer.write_all(b"some bytes").await.expect("open");
                read_exactly(&mut reader, 10).await;
            }
        });
        rt.world().hash()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn a_held_stream_delivers_late_what_its_lost_end_had_sent() {
    let Pair { mut rt, net, a, b } = pair(1);
    rt.block_on(async {
        let ((mut reader_a, mut writer_a), (mut reader_b, mut writer_b)) = joined(&net, a, b).await;
        writer_a.write_all(b"late").await.expect("open");
        let start_ns = SimWorld::current().now_ns();
        assert_eq!(net.hold_streams(a, b, Duration::from_secs(3)), 1, "its bytes are on the way");
        let error = reader_a.read(&mut [0; 8]).await.expect_err("its own end is reset at once");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        drop((reader_a, writer_a));
        writer_b.write_all(b"to nobody").await.expect("b does not know yet");
        assert_eq!(read_exactly(&mut reader_b, 4).await, b"late");
        let late_ns = SimWorld::current().now_ns() - start_ns;
        assert!((300_000..3_000_000_000).contains(&late_ns), "{late_ns}");
        assert!(matches!(reader_b.read(&mut [0; 8]).await, Ok(0) | Err(_)), "and then the end");
    });
}

/// What is written behind lost bytes does not arrive in their place, nor does an orderly end.
#[test]
fn a_stream_that_broke_behind_a_cut_has_no_hole_when_it_heals() {
    let Pair { mut rt, net, a, b } = pair(5);
    rt.block_on(async {
        let (ours, (mut reader, _w)) = joined(&net, a, b).await;
        let (_r, mut writer) = ours;
        writer.write_all(b"before").await.expect("the stream lives");
        assert_eq!(read_exactly(&mut reader, 6).await, b"before");
        net.partition(&[a], &[b]);
        writer.write_all(b"lost").await.expect("it does not know of the cut");
        net.break_streams(a, b);
        writer.write_all(b"late").await.expect("nor of the break");
        drop(writer);
        SimRt::sleep(10 * MS).await;
        net.heal_all();
        let mut rest = [0; 16];
        let read = reader.read(&mut rest).await;
        assert_eq!(read.expect_err("it is broken").kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn a_lost_stream_delivers_nothing_more() {
    let Pair { mut rt, net, a, b } = pair(1);
    rt.block_on(async {
        let ((_reader_a, mut writer_a), (mut reader_b, _writer_b)) = joined(&net, a, b).await;
        net.cut(a, b);
        writer_a.write_all(b"lost").await.expect("buffered");
        net.lose_streams(b, a);
        net.heal(a, b);
        let error = reader_b.read(&mut [0; 8]).await.expect_err("reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn a_clogged_link_passes_few_bytes_a_second_until_it_is_free() {
    let Pair { mut rt, net, a, b } = pair(1);
    rt.block_on(async {
        let ((mut reader_a, mut writer_a), (mut reader_b, mut writer_b)) = joined(&net, a, b).await;
        let start_ns = SimWorld::current().now_ns();
        net.clog(a, b, 1_000);
        for _ in 0..4 {
            writer_a.write_all(&[7; 500]).await.expect("buffered");
        }
        writer_b.write_all(b"the other way").await.expect("open");
        read_exactly(&mut reader_a, 13).await;
        assert!(SimWorld::current().now_ns() < start_ns + 1_000_000, "is not clogged");
        read_exactly(&mut reader_b, 1_000).await;
        let half_ns = SimWorld::current().now_ns() - start_ns;
        assert!((1_000_000_000..1_001_000_000).contains(&half_ns), "{half_ns}");
        net.unclog_all();
        read_exactly(&mut reader_b, 1_000).await;
        let rest_ns = SimWorld::current().now_ns() - start_ns - half_ns;
        assert!(rest_ns < 1_000_000, "{rest_ns}");
    });
}

#[test]
fn a_refusing_machine_lets_nobody_in_and_keeps_its_streams() {
    let Pair { mut rt, net, a, b } = pair(1);
    rt.block_on(async {
        let ((_reader, mut writer), (mut reader, _writer)) = joined(&net, a, b).await;
        let _listener = net.host(b).listen(ADDR).expect("free");
        net.refuse(b, true);
        let refused = net.host(a).connect(ADDR).await.expect_err("refused");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        writer.write_all(b"open").await.expect("open");
        assert_eq!(read_exactly(&mut reader, 4).await, b"open");
        net.refuse(b, false);
        net.host(a).connect(ADDR).await.expect("let in");
    });
}
