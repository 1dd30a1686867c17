//! One connection: a task that reads and writes a socket at the same time.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use leasehold_protocol::frame::Decoder;
use leasehold_protocol::ids::RequestId;
use leasehold_protocol::limits::REPLY_BODY_MAX;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Notify;

use super::shared::Shared;
use crate::core::ConnId;

/// Bytes read at a time.
const READ_LEN: usize = 32 * 1024;
/// How long one of several addresses of a name may take.
const ADDRESS_TIMEOUT: Duration = Duration::from_millis(400);

/// The outgoing side of a connection, filled under the client's lock. Its length is bounded by
/// the requests that may be in flight.
#[derive(Debug)]
pub(crate) struct Link {
    out: Vec<u8>,
    wake: Arc<Notify>,
    closed: Arc<Notify>,
}

impl Link {
    pub(super) fn new() -> Self {
        Self { out: Vec::new(), wake: Arc::new(Notify::new()), closed: Arc::new(Notify::new()) }
    }

    /// Appends a request's frame and wakes the writer.
    pub(super) fn send(&mut self, id: RequestId, request: &Request) {
        let first = self.out.is_empty();
        request.encode_frame(id, &mut self.out).expect("a checked request fits a frame");
        if first {
            self.wake.notify_one();
        }
    }

    /// Ends the task.
    pub(super) fn close(self) {
        self.closed.notify_waiters();
        self.closed.notify_one();
        self.wake.notify_one();
    }
}

/// Connects and serves a connection until it ends.
pub(super) async fn run(shared: Arc<Shared>, conn: ConnId, addr: String) {
    let Some(closed) = shared.lock().links.get(&conn).map(|link| Arc::clone(&link.closed)) else {
        return;
    };
    let ended = tokio::select! {
        ended = serve(&shared, conn, &addr) => ended,
        () = closed.notified() => return,
    };
    let why = match ended {
        Ok(()) => "the node closed the connection".to_owned(),
        Err(error) => error.to_string(),
    };
    shared.enter(|inner, now| {
        inner.links.remove(&conn);
        inner.core.conn_down(now, conn, &why);
    });
}

async fn serve(shared: &Arc<Shared>, conn: ConnId, addr: &str) -> io::Result<()> {
    let stream = connect(addr).await?;
    stream.set_nodelay(true)?;
    let (reader, writer) = stream.into_split();
    shared.enter(|inner, now| inner.core.conn_up(now, conn));
    tokio::select! {
        ended = read(shared, conn, reader) => ended,
        ended = write(shared, conn, writer) => ended,
    }
}

/// Resolves the name anew and tries each of its addresses, so that one dead address of a name
/// does not use up the time of all.
async fn connect(addr: &str) -> io::Result<TcpStream> {
    let addresses: Vec<_> = tokio::net::lookup_host(addr).await?.collect();
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let many = addresses.len() > 1;
    for address in addresses {
        let attempt = TcpStream::connect(address);
        let result = if many {
            tokio::time::timeout(ADDRESS_TIMEOUT, attempt).await.unwrap_or_else(|_| {
                Err(io::Error::new(io::ErrorKind::TimedOut, "no answer to connect"))
            })
        } else {
            // The core bounds the whole of it.
            attempt.await
        };
        match result {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn read(shared: &Arc<Shared>, conn: ConnId, mut reader: OwnedReadHalf) -> io::Result<()> {
    let mut decoder = Decoder::new(REPLY_BODY_MAX);
    let mut buffer = vec![0; READ_LEN];
    let mut replies = Vec::new();
    loop {
        let len = reader.read(&mut buffer).await?;
        if len == 0 {
            return Ok(());
        }
        decoder.feed(&buffer[..len]);
        let ended = decode_all(&mut decoder, &mut replies);
        shared.enter(|inner, now| {
            for (id, reply) in replies.drain(..) {
                inner.core.reply(now, conn, id, reply);
            }
        });
        ended?;
    }
}

fn decode_all(decoder: &mut Decoder, replies: &mut Vec<(RequestId, Reply)>) -> io::Result<()> {
    while let Some(frame) = decoder.next().map_err(malformed)? {
        let reply = Reply::decode(frame.kind, frame.body).map_err(malformed)?;
        replies.push((frame.id, reply));
    }
    Ok(())
}

fn malformed(error: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

async fn write(shared: &Arc<Shared>, conn: ConnId, mut writer: OwnedWriteHalf) -> io::Result<()> {
    let Some(wake) = shared.lock().links.get(&conn).map(|link| Arc::clone(&link.wake)) else {
        return Ok(());
    };
    let mut bytes = Vec::new();
    loop {
        match shared.lock().links.get_mut(&conn) {
            Some(link) => std::mem::swap(&mut link.out, &mut bytes),
            None => return Ok(()),
        }
        if bytes.is_empty() {
            wake.notified().await;
            continue;
        }
        writer.write_all(&bytes).await?;
        bytes.clear();
    }
}
