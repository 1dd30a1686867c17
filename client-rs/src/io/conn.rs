//! One connection: a task that reads and writes a socket at the same time.

use std::io;
use std::sync::Arc;
use std::time::Duration;

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

/// What the driver knows of a connection.
#[derive(Debug)]
pub(crate) struct Link {
    wake: Arc<Notify>,
    closed: Arc<Notify>,
}

impl Link {
    pub(super) fn new() -> Self {
        Self { wake: Arc::new(Notify::new()), closed: Arc::new(Notify::new()) }
    }

    /// There is something to write.
    pub(super) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Ends the task.
    pub(super) fn close(self) {
        self.closed.notify_one();
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
    let mut buffer = vec![0; READ_LEN];
    loop {
        let len = reader.read(&mut buffer).await?;
        if len == 0 {
            return Ok(());
        }
        shared.enter(|inner, now| inner.core.feed(now, conn, &buffer[..len]));
    }
}

async fn write(shared: &Arc<Shared>, conn: ConnId, mut writer: OwnedWriteHalf) -> io::Result<()> {
    let Some(wake) = shared.lock().links.get(&conn).map(|link| Arc::clone(&link.wake)) else {
        return Ok(());
    };
    let mut bytes = Vec::new();
    loop {
        bytes = shared.lock().core.take_output(conn, bytes);
        if bytes.is_empty() {
            wake.notified().await;
            continue;
        }
        writer.write_all(&bytes).await?;
    }
}
