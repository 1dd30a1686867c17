//! TCP halves, finishing, timed writes and the accept thread, on loopback.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::time::Duration;

use openraft_rt::AsyncRuntime;

use super::super::glommio::GlommioRt;
use super::super::inbox::{Inbox, inbox};
use super::super::timed::write_within;
use super::*;
use crate::env::{ByteReader, ByteWriter, Net};

/// A listener on loopback whose sockets come in at the inbox.
fn listening() -> (Acceptor, String, Inbox<OwnedFd>) {
    let listener = Listener::bind("127.0.0.1:0").expect("a free port");
    let addr = listener.local_addr().expect("bound").to_string();
    let (post, sockets) = inbox(16);
    let deliver = move |fd, _peer| drop(post.try_send(fd));
    (Acceptor::start(listener, "test", deliver).expect("a thread"), addr, sockets)
}

type Halves = (TcpReader, TcpWriter);

async fn joined(addr: &str, sockets: &mut Inbox<OwnedFd>) -> (Halves, Halves) {
    let ours = TcpNet.connect(addr).await.expect("listening");
    let theirs = sockets.recv().await.expect("accepted");
    (ours, adopt(theirs))
}

async fn read_to_end(reader: &mut TcpReader) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut buf = [0; 1000];
    loop {
        match reader.read(&mut buf).await.expect("no reset") {
            0 => return bytes,
            len => bytes.extend_from_slice(&buf[..len]),
        }
    }
}

#[test]
fn both_halves_work_at_once_and_dropping_them_ends_the_stream() {
    let (_acceptor, addr, mut sockets) = listening();
    GlommioRt::run(async {
        let ((mut reader_a, mut writer_a), (mut reader_b, mut writer_b)) =
            joined(&addr, &mut sockets).await;
        let sent: Vec<u8> = (0..2_000_000_u32).map(|n| (n % 251) as u8).collect();
        let expected = sent.clone();
        let back = GlommioRt::spawn(async move {
            // Sends back what it reads, while the other side is still sending.
            let mut buf = [0; 8192];
            loop {
                match reader_b.read(&mut buf).await.expect("open") {
                    0 => return,
                    len => writer_b.write_all(&buf[..len]).await.expect("open"),
                }
            }
        });
        let writing = GlommioRt::spawn(async move {
            writer_a.write_all(&sent).await.expect("open");
            writer_a
        });
        let mut received = vec![0; expected.len()];
        let mut len = 0;
        while len < received.len() {
            len += reader_a.read(&mut received[len..]).await.expect("open");
        }
        assert_eq!(received, expected);
        drop(writing.await.expect("ran"));
        drop(reader_a);
        back.await.expect("saw the end");
    });
}

#[test]
fn a_refused_connect_says_so_and_a_name_is_resolved() {
    let (acceptor, addr, mut sockets) = listening();
    let by_name = addr.replace("127.0.0.1", "localhost");
    GlommioRt::run(async {
        joined(&by_name, &mut sockets).await;
        acceptor.stop();
        let refused = TcpNet.connect(&addr).await.expect_err("nobody listens");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        assert!(TcpNet.connect("no.such.name.invalid:1").await.is_err());
        assert!(TcpNet.connect("no port").await.is_err());
    });
}

#[test]
fn a_second_listener_on_the_port_is_refused_and_a_restart_is_not() {
    let (acceptor, addr, mut sockets) = listening();
    let again = Listener::bind(&addr).expect_err("in use");
    assert!(matches!(again, ListenError::InUse { .. }), "{again}");
    assert!(again.to_string().contains(&addr));
    GlommioRt::run(async {
        // Closed by this side first, which leaves the port in TIME_WAIT.
        let (ours, theirs) = joined(&addr, &mut sockets).await;
        drop(theirs);
        drop(ours);
    });
    acceptor.stop();
    Listener::bind(&addr).expect("free at once");
    assert!(matches!(Listener::bind("nonsense"), Err(ListenError::Unresolved { .. })));
}

#[test]
fn a_peer_that_does_not_read_times_the_writer_out() {
    let (_acceptor, addr, mut sockets) = listening();
    GlommioRt::run(async {
        let ((_reader, mut writer), _theirs) = joined(&addr, &mut sockets).await;
        let flood = vec![0; 64 << 20];
        let limit = Duration::from_millis(50);
        let error = write_within::<GlommioRt, _>(&mut writer, &flood, limit).await;
        assert_eq!(error.expect_err("nobody reads").kind(), ErrorKind::TimedOut);
    });
}

#[test]
fn a_finished_connection_delivers_its_last_words() {
    let (_acceptor, addr, mut sockets) = listening();
    GlommioRt::run(async {
        let ((mut reader, mut writer), (reader_b, mut writer_b)) =
            joined(&addr, &mut sockets).await;
        writer.write_all(&[7; 10_000]).await.expect("open");
        // More than the peer's window takes before it reads: some of it is still to be sent.
        let last_words = vec![9; 500_000];
        writer_b.write_all(&last_words).await.expect("the kernel's buffers take it");
        // Dropping here instead would reset the stream, with 10,000 bytes unread.
        let finishing =
            GlommioRt::spawn(TcpNet::finish(reader_b, writer_b, Duration::from_secs(10)));
        // Time for such a reset to arrive before anything is read.
        GlommioRt::sleep(Duration::from_millis(20)).await;
        assert!(read_to_end(&mut reader).await == last_words);
        drop((reader, writer));
        finishing.await.expect("ended by the peer's end");
    });
}

#[test]
fn stopping_ends_an_accept_that_waits() {
    let (acceptor, addr, mut sockets) = listening();
    let counters = acceptor.counters();
    GlommioRt::run(async {
        let _pair = joined(&addr, &mut sockets).await;
    });
    acceptor.stop();
    assert_eq!(counters.accepted.load(std::sync::atomic::Ordering::Relaxed), 1);
    GlommioRt::run(async { assert!(sockets.recv().await.is_none()) });
}
