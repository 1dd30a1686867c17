//! Bounded waits on streams, the same for both runtimes.

use std::io;
use std::time::Duration;

use openraft_rt::AsyncRuntime;

use crate::env::{ByteWriter, Net};

/// Writes all of `bytes` or fails with `TimedOut` after `limit`. After an error the stream may
/// have carried any part of them and is of no further use.
pub async fn write_within<R, W>(writer: &mut W, bytes: &[u8], limit: Duration) -> io::Result<()>
where
    R: AsyncRuntime,
    W: ByteWriter,
{
    match R::timeout(limit, writer.write_all(bytes)).await {
        Ok(written) => written,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the peer does not read")),
    }
}

/// Connects or fails with `TimedOut` after `limit`.
pub async fn connect_within<R, N>(
    net: &N,
    addr: &str,
    limit: Duration,
) -> io::Result<(N::Reader, N::Writer)>
where
    R: AsyncRuntime,
    N: Net,
{
    match R::timeout(limit, net.connect(addr)).await {
        Ok(connected) => connected,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the peer does not answer")),
    }
}
