//! A listening socket and the thread that accepts from it.
//!
//! A thread and not a task: `accept4` gives close-on-exec in the same step, no accepted socket can
//! be lost in a cancelled future, and running out of descriptors costs a sleep here instead of a
//! spinning core. The thread lives until it is stopped; no error of a single accept ends it.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use super::super::clock::OsClock;
use crate::env::{Clock, MonoTime};

/// Connections that the kernel holds until they are accepted; more wait for their next try.
const BACKLOG_LEN: i32 = 1024;

const BACKOFF_MIN: Duration = Duration::from_millis(10);
const BACKOFF_MAX: Duration = Duration::from_millis(100);

/// Failing accepts are logged at most this often.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Why a socket could not listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The address names nothing.
    #[error("cannot listen on {addr}: the address cannot be resolved: {reason}")]
    Unresolved {
        /// As it was given.
        addr: String,
        /// What the resolver said.
        reason: io::Error,
    },
    /// Another socket has the port.
    #[error("cannot listen on {addr}: the port is in use, perhaps by another server")]
    InUse {
        /// As it was given.
        addr: String,
    },
    /// Anything else.
    #[error("cannot listen on {addr}: {reason}")]
    Failed {
        /// As it was given.
        addr: String,
        /// What the kernel said.
        reason: io::Error,
    },
}

/// A listening socket that no other socket shares its port with.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
}

impl Listener {
    /// Listens on `HOST:PORT`, on the first address of the name that can be had. Blocks while the
    /// name is looked up: for the start, not for a core.
    pub fn bind(addr: &str) -> Result<Self, ListenError> {
        let named = || addr.to_owned();
        let unresolved = |reason| ListenError::Unresolved { addr: named(), reason };
        let candidates = addr.to_socket_addrs().map_err(unresolved)?;
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for candidate in candidates {
            match bind_one(candidate) {
                Ok(socket) => return Ok(Self { socket }),
                Err(error) => last = error,
            }
        }
        match last.kind() {
            io::ErrorKind::AddrInUse => Err(ListenError::InUse { addr: named() }),
            _ => Err(ListenError::Failed { addr: named(), reason: last }),
        }
    }

    /// Where it listens; the port is the real one if 0 was asked for.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}

fn bind_one(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    // A restart must not wait for old connections to time out. Unlike SO_REUSEPORT this does not
    // let two living listeners share the port.
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG_LEN)?;
    Ok(socket.into())
}

/// What an accepting thread has counted so far.
#[derive(Debug, Default)]
pub struct AcceptCounters {
    /// Connections accepted.
    pub accepted: AtomicU64,
    /// Accepts that failed, for want of descriptors or otherwise.
    pub failed: AtomicU64,
}

/// A running accept thread. Stopped when dropped.
#[derive(Debug)]
pub struct Acceptor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    listener: TcpListener,
    stopping: AtomicBool,
    counters: Arc<AcceptCounters>,
}

impl Acceptor {
    /// Accepts on a new thread and gives each socket to `deliver`, which must not block; a socket
    /// that it drops is closed.
    pub fn start<F>(listener: Listener, name: &str, deliver: F) -> io::Result<Self>
    where
        F: FnMut(OwnedFd, SocketAddr) + Send + 'static,
    {
        let shared = Arc::new(Shared {
            listener: listener.socket,
            stopping: AtomicBool::new(false),
            counters: Arc::default(),
        });
        let body = {
            let shared = Arc::clone(&shared);
            move || accept_until_stopped(&shared, deliver)
        };
        let thread = thread::Builder::new().name(format!("accept-{name}")).spawn(body)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The counters, which outlive the thread.
    pub fn counters(&self) -> Arc<AcceptCounters> {
        Arc::clone(&self.shared.counters)
    }

    /// Stops accepting; the port is free when this returns.
    pub fn stop(self) {}
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // Shutting a listening socket down ends an accept that waits. Failing means that the
        // socket no longer listens, which ends it too.
        let _ = rustix::net::shutdown(&self.shared.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic of the thread has been reported by its own message.
            let _ = thread.join();
        }
    }
}

fn accept_until_stopped(shared: &Shared, mut deliver: impl FnMut(OwnedFd, SocketAddr)) {
    let mut trouble = Trouble::default();
    loop {
        let accepted = shared.listener.accept();
        if shared.stopping.load(Ordering::Acquire) {
            return;
        }
        match accepted {
            Ok((stream, peer)) => {
                trouble.over();
                shared.counters.accepted.fetch_add(1, Ordering::Relaxed);
                if let Some(fd) = prepared(stream) {
                    deliver(fd, peer);
                }
            }
            Err(error) => {
                shared.counters.failed.fetch_add(1, Ordering::Relaxed);
                thread::park_timeout(trouble.next(&error));
            }
        }
    }
}

/// Small messages leave at once. A connection that is already dead may refuse the option.
fn prepared(stream: TcpStream) -> Option<OwnedFd> {
    stream.set_nodelay(true).ok()?;
    Some(stream.into())
}

/// How long to wait after a failed accept, and whether to say so.
#[derive(Debug, Default)]
struct Trouble {
    backoff: Option<Duration>,
    logged_at: Option<MonoTime>,
    unlogged_count: u64,
}

impl Trouble {
    fn over(&mut self) {
        self.backoff = None;
    }

    fn next(&mut self, error: &io::Error) -> Duration {
        let wait = self.backoff.map_or(BACKOFF_MIN, |last| (last * 2).min(BACKOFF_MAX));
        self.backoff = Some(wait);
        self.unlogged_count += 1;
        let now = OsClock.now();
        if self.logged_at.is_none_or(|at| now.since(at) >= LOG_INTERVAL) {
            tracing::warn!(%error, count = self.unlogged_count, "cannot accept connections");
            self.logged_at = Some(now);
            self.unlogged_count = 0;
        }
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_grows_to_its_limit_and_starts_over() {
        let mut trouble = Trouble::default();
        let error = io::Error::from_raw_os_error(libc::EMFILE);
        let mut waits = || trouble.next(&error).as_millis();
        let seen: Vec<u128> = (0..6).map(|_| waits()).collect();
        assert_eq!(seen, [10, 20, 40, 80, 100, 100]);
        trouble.over();
        assert_eq!(trouble.next(&error), BACKOFF_MIN);
    }

    #[test]
    fn a_burst_of_errors_is_one_log_line() {
        let mut trouble = Trouble::default();
        let error = io::Error::from_raw_os_error(libc::EMFILE);
        trouble.next(&error);
        let first = trouble.logged_at;
        assert!(first.is_some());
        trouble.next(&error);
        assert_eq!(trouble.logged_at, first);
        assert_eq!(trouble.unlogged_count, 1);
    }
}
