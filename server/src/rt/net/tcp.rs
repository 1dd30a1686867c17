//! A TCP stream on the current core, in two halves that share one descriptor.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::{AsyncRead, AsyncWrite};
use glommio::net::TcpStream;
use openraft_rt::AsyncRuntime;

use super::super::blocking;
use super::super::glommio::GlommioRt;
use crate::env::{ByteReader, ByteWriter, Net};

/// Reads that find data at once before a reader lets the core look at its other sockets. glommio
/// polls sockets only when its run queue is empty, so a peer that sends faster than it is read
/// would keep everybody else waiting.
const READS_AT_ONCE_MAX: u32 = 32;

/// Long enough to leave the run queue, short enough not to matter.
const BREATH: Duration = Duration::from_micros(1);

/// Bytes thrown away at a time while a connection is finished.
const DISCARD_LEN: usize = 4096;

/// TCP to other nodes. Names are looked up anew at each connect, on a helper thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpNet;

impl Net for TcpNet {
    type Reader = TcpReader;
    type Writer = TcpWriter;

    async fn connect(&self, addr: &str) -> io::Result<(TcpReader, TcpWriter)> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for candidate in resolve(addr).await? {
            match connect_one(candidate).await {
                Ok(stream) => return Ok(halves(stream)),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn finish(reader: TcpReader, writer: TcpWriter, limit: Duration) {
        finish(reader, writer, limit).await;
    }
}

async fn resolve(addr: &str) -> io::Result<Vec<SocketAddr>> {
    if let Ok(literal) = addr.parse() {
        return Ok(vec![literal]);
    }
    let name = addr.to_owned();
    blocking::run(move || name.to_socket_addrs().map(Iterator::collect)).await?
}

async fn connect_one(addr: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(addr).await?;
    // A port that nobody listens on may be given to this very socket as its own, and then the
    // kernel connects it to itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Takes an accepted socket over to the current core.
pub fn adopt(fd: OwnedFd) -> (TcpReader, TcpWriter) {
    // SAFETY: the descriptor is open and owned by `fd`, which gives it up here; glommio's stream
    // is its only owner from now on and closes it.
    let stream = unsafe { TcpStream::from_raw_fd(fd.into_raw_fd()) };
    halves(stream)
}

fn halves(stream: TcpStream) -> (TcpReader, TcpWriter) {
    let stream = Rc::new(RefCell::new(stream));
    let reader = TcpReader { stream: Rc::clone(&stream), ready_count: 0 };
    (reader, TcpWriter { stream })
}

/// The reading half.
#[derive(Debug)]
pub struct TcpReader {
    stream: Rc<RefCell<TcpStream>>,
    ready_count: u32,
}

impl ByteReader for TcpReader {
    async fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        assert!(!buf.is_empty(), "there is room to read into");
        if self.ready_count >= READS_AT_ONCE_MAX {
            self.ready_count = 0;
            GlommioRt::sleep(BREATH).await;
        }
        let Self { stream, ready_count } = self;
        poll_fn(|cx| {
            let poll = Pin::new(&mut *stream.borrow_mut()).poll_read(cx, buf);
            *ready_count = if poll.is_ready() { *ready_count + 1 } else { 0 };
            poll
        })
        .await
    }
}

/// The writing half.
#[derive(Debug)]
pub struct TcpWriter {
    stream: Rc<RefCell<TcpStream>>,
}

impl ByteWriter for TcpWriter {
    async fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written =
                poll_fn(|cx| Pin::new(&mut *self.stream.borrow_mut()).poll_write(cx, bytes));
            match written.await? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                written => bytes = &bytes[written..],
            }
        }
        Ok(())
    }
}

/// Ends a connection so that its last bytes arrive: closing it while input is unread would make
/// the kernel reset it, and the peer might never see the error that explains why. Sends the end,
/// then throws input away until the peer closes too or `limit` is over.
pub(super) async fn finish(mut reader: TcpReader, writer: TcpWriter, limit: Duration) {
    if poll_fn(|cx| Pin::new(&mut *writer.stream.borrow_mut()).poll_close(cx)).await.is_err() {
        return;
    }
    let discard = async {
        let mut buf = [0; DISCARD_LEN];
        while let Ok(1..) = reader.read(&mut buf).await {}
    };
    // Time out or not, the connection ends here.
    let _ = GlommioRt::timeout(limit, discard).await;
}
