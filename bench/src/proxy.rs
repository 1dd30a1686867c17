//! A relay between a client and a server, both real, that can make the network between them bad:
//! slow, silent, one-way, or broken in the middle of a frame.
//!
//! It knows bytes, not frames. Each connection has two ways, each with a rule of its own that may
//! change at any time. Invariants: what is forwarded is forwarded in order and unchanged; what a
//! way holds back is bounded, beyond that nothing more is read; one thread serves all connections
//! of a proxy and ends with it.

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::clock::now_ns;

/// Bytes read at a time.
const READ_LEN: usize = 16 * 1024;
/// Bytes that one way of a connection keeps back.
const HELD_LEN_MAX: usize = 8 * 1024 * 1024;
/// Times of connects that are kept.
const CONNECTS_MAX: usize = 1_000_000;

/// What becomes of the bytes of one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// They pass.
    #[default]
    Open,
    /// They pass this much later.
    Delay(Duration),
    /// They are kept, and pass when the rule changes: a cut cable, as TCP sees it.
    Hold,
    /// They vanish, and so does everything after them on the same connection.
    Drop,
    /// After a random number of bytes up to this one, both sides of the connection are reset.
    CutWithin(u64),
}

/// The rules of a proxy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// New connections are reset at once.
    pub refuse: bool,
    /// From the client to the server.
    pub to_server: Way,
    /// From the server to the client.
    pub to_client: Way,
}

impl Rules {
    /// Nothing passes either way; connections stay open, and new ones are accepted.
    pub const SILENT: Self = Self { refuse: false, to_server: Way::Hold, to_client: Way::Hold };
    /// New connections are reset at once.
    pub const REFUSE: Self = Self { refuse: true, to_server: Way::Open, to_client: Way::Open };
}

#[derive(Clone, Copy, Debug, Default)]
struct Orders {
    rules: Rules,
    /// Raised when all connections are to be reset.
    resets: u64,
    stop: bool,
}

#[derive(Debug, Default)]
struct Counts {
    connects: Mutex<Vec<u64>>,
    cuts: AtomicU64,
    open: AtomicU64,
}

/// A running proxy. Dropping it resets its connections.
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    orders: watch::Sender<Orders>,
    counts: Arc<Counts>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Listens on a port of its own and relays to `server`, which need not be there yet.
    pub fn start(server: SocketAddr) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let (orders, heard) = watch::channel(Orders::default());
        let counts = Arc::new(Counts::default());
        let shared = Arc::clone(&counts);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::spawn(move || {
            runtime.block_on(async move {
                let listener = TcpListener::from_std(listener).expect("it is not blocking");
                accept(listener, server, heard, shared).await;
            });
        });
        Ok(Self { addr, orders, counts, thread: Some(thread) })
    }

    /// Where clients connect.
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Sets the rules, also for connections that are open.
    pub fn set(&self, rules: Rules) {
        self.orders.send_modify(|orders| orders.rules = rules);
    }

    /// The present rules.
    pub fn rules(&self) -> Rules {
        self.orders.borrow().rules
    }

    /// Resets every open connection; what was held back is gone.
    pub fn reset_all(&self) {
        self.orders.send_modify(|orders| orders.resets += 1);
    }

    /// When connections came, in nanoseconds of the harness's clock.
    pub fn connects_ns(&self) -> Vec<u64> {
        self.counts.connects.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Connections that were cut by the rule `CutWithin`.
    pub fn cuts(&self) -> u64 {
        self.counts.cuts.load(Ordering::Relaxed)
    }

    /// Connections open now.
    pub fn open(&self) -> u64 {
        self.counts.open.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.orders.send_modify(|orders| orders.stop = true);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "a proxy failed");
        }
    }
}

async fn accept(
    listener: TcpListener,
    server: SocketAddr,
    heard: watch::Receiver<Orders>,
    counts: Arc<Counts>,
) {
    let mut stopped = heard.clone();
    let serve = async {
        loop {
            // A failed accept is that connection's fault, or passes.
            let Ok((client, _)) = listener.accept().await else { continue };
            counts.note_connect();
            if heard.borrow().rules.refuse {
                reset(&client);
                continue;
            }
            let (heard, counts) = (heard.clone(), Arc::clone(&counts));
            tokio::spawn(async move { counts.serve(client, server, heard).await });
        }
    };
    tokio::select! {
        () = serve => {}
        _ = stopped.wait_for(|orders| orders.stop) => {}
    }
}

impl Counts {
    fn note_connect(&self) {
        let mut connects = self.connects.lock().unwrap_or_else(PoisonError::into_inner);
        if connects.len() < CONNECTS_MAX {
            connects.push(now_ns());
        }
    }

    async fn serve(&self, mut client: TcpStream, to: SocketAddr, heard: watch::Receiver<Orders>) {
        let Ok(mut server) = TcpStream::connect(to).await else { return reset(&client) };
        self.open.fetch_add(1, Ordering::Relaxed);
        let resets = heard.borrow().resets;
        let mut reset_all = heard.clone();
        let ended = {
            let _ = (client.set_nodelay(true), server.set_nodelay(true));
            let (client_in, client_out) = client.split();
            let (server_in, server_out) = server.split();
            let up = Pump::new(heard.clone(), |rules| rules.to_server);
            let down = Pump::new(heard, |rules| rules.to_client);
            tokio::select! {
                ended = async { tokio::try_join!(
                    up.run(client_in, server_out),
                    down.run(server_in, client_out),
                ) } => ended.map(|_| ()),
                _ = reset_all.wait_for(|orders| orders.stop || orders.resets != resets) => {
                    Err(End::Broken)
                }
            }
        };
        self.open.fetch_sub(1, Ordering::Relaxed);
        if let Err(end) = ended {
            self.cuts.fetch_add(u64::from(end == End::Cut), Ordering::Relaxed);
            reset(&client);
            reset(&server);
        }
    }
}

/// The socket sends a reset instead of a goodbye when it is closed.
fn reset(stream: &TcpStream) {
    // It may be gone already.
    let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
}

/// Why a connection did not end well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Cut,
    Broken,
}

/// One way of one connection.
struct Pump {
    heard: watch::Receiver<Orders>,
    way: fn(&Rules) -> Way,
    held: VecDeque<(Instant, Vec<u8>)>,
    held_len: usize,
    /// Bytes that may still pass before the cut, once that rule was met.
    cut_in: Option<u64>,
    dropping: bool,
}

impl Pump {
    fn new(heard: watch::Receiver<Orders>, way: fn(&Rules) -> Way) -> Self {
        let held = VecDeque::new();
        Self { heard, way, held, held_len: 0, cut_in: None, dropping: false }
    }

    fn rule(&self) -> Way {
        (self.way)(&self.heard.borrow().rules)
    }

    async fn run(mut self, mut from: ReadHalf<'_>, mut to: WriteHalf<'_>) -> Result<(), End> {
        let mut buffer = vec![0; READ_LEN];
        let mut ended = false;
        loop {
            let room = !ended && self.held_len < HELD_LEN_MAX;
            let due = self.due();
            if ended && self.held.is_empty() {
                // Half of the connection is over; the other half goes on.
                return to.shutdown().await.or(Ok(()));
            }
            tokio::select! {
                biased;
                changed = self.heard.changed() => {
                    changed.map_err(|_| End::Broken)?;
                }
                () = until(due) => {
                    if let Some((_, bytes)) = self.held.pop_front() {
                        self.held_len -= bytes.len();
                        self.forward(&mut to, bytes).await?;
                    }
                }
                // What was read before a connection broke still arrives.
                len = from.read(&mut buffer), if room => match len {
                    Ok(0) | Err(_) => ended = true,
                    Ok(len) => self.take(buffer[..len].to_vec()),
                },
            }
        }
    }

    /// When the oldest bytes pass; `None` while none do.
    fn due(&self) -> Option<Instant> {
        let (read_at, _) = self.held.front()?;
        match self.rule() {
            Way::Hold => None,
            Way::Delay(delay) => Some(*read_at + delay),
            Way::Open | Way::Drop | Way::CutWithin(_) => Some(*read_at),
        }
    }

    fn take(&mut self, bytes: Vec<u8>) {
        self.dropping |= self.rule() == Way::Drop;
        if !self.dropping {
            self.held_len += bytes.len();
            self.held.push_back((Instant::now(), bytes));
        }
    }

    async fn forward(&mut self, to: &mut WriteHalf<'_>, mut bytes: Vec<u8>) -> Result<(), End> {
        if let Way::CutWithin(most) = self.rule() {
            let mut rng = SmallRng::from_seed(crate::random::bytes());
            let left = self.cut_in.get_or_insert_with(|| rng.random_range(0..=most));
            if (bytes.len() as u64) > *left {
                bytes.truncate(*left as usize);
                let _ = to.write_all(&bytes).await;
                // The part must be on its way before the reset overtakes it.
                tokio::time::sleep(Duration::from_millis(1)).await;
                return Err(End::Cut);
            }
            *left -= bytes.len() as u64;
        }
        to.write_all(&bytes).await.map_err(|_| End::Broken)
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener as Listener, TcpStream as Stream};

    use super::*;

    const SOON: Duration = Duration::from_millis(50);
    const LIMIT: Duration = Duration::from_secs(10);

    struct Pair {
        proxy: Proxy,
        listener: Listener,
    }

    impl Pair {
        fn new() -> Self {
            let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback works");
            let addr = listener.local_addr().expect("loopback works");
            Self { proxy: Proxy::start(addr).expect("a proxy"), listener }
        }

        fn connect(&self) -> (Stream, Stream) {
            let client = Stream::connect(self.proxy.addr()).expect("it listens");
            let (server, _) = self.listener.accept().expect("relayed");
            for stream in [&client, &server] {
                stream.set_read_timeout(Some(LIMIT)).expect("a socket");
            }
            (client, server)
        }
    }

    fn read(stream: &mut Stream, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        stream.read_exact(&mut bytes).expect("they come");
        bytes
    }

    fn is_silent(stream: &mut Stream) -> bool {
        stream.set_read_timeout(Some(SOON)).expect("a socket");
        let silent = stream.read(&mut [0]).is_err();
        stream.set_read_timeout(Some(LIMIT)).expect("a socket");
        silent
    }

    #[test]
    fn bytes_pass_both_ways_and_ends_too() {
        let pair = Pair::new();
        let (mut client, mut server) = pair.connect();
        client.write_all(b"there").expect("open");
        assert_eq!(read(&mut server, 5), b"there");
        server.write_all(b"back").expect("open");
        assert_eq!(read(&mut client, 4), b"back");
        drop(client);
        assert_eq!(server.read(&mut [0]).expect("an orderly end"), 0);
        assert_eq!(pair.proxy.connects_ns().len(), 1);
    }

    #[test]
    fn held_bytes_come_later_even_from_a_client_that_has_left() {
        let pair = Pair::new();
        let (mut client, mut server) = pair.connect();
        pair.proxy.set(Rules { to_server: Way::Hold, ..Rules::default() });
        client.write_all(b"late").expect("open");
        assert!(is_silent(&mut server));
        server.write_all(b"x").expect("open");
        assert_eq!(read(&mut client, 1), b"x", "the other way is open");
        drop(client);
        assert!(is_silent(&mut server));
        pair.proxy.set(Rules::default());
        assert_eq!(read(&mut server, 4), b"late");
    }

    #[test]
    fn dropped_bytes_never_come() {
        let pair = Pair::new();
        let (mut client, mut server) = pair.connect();
        pair.proxy.set(Rules { to_client: Way::Drop, ..Rules::default() });
        server.write_all(b"gone").expect("open");
        assert!(is_silent(&mut client));
        pair.proxy.set(Rules::default());
        server.write_all(b"gone too").expect("open");
        assert!(is_silent(&mut client));
    }

    #[test]
    fn a_cut_is_a_reset_within_the_bound() {
        let pair = Pair::new();
        pair.proxy.set(Rules { to_server: Way::CutWithin(100), ..Rules::default() });
        let (mut client, mut server) = pair.connect();
        client.write_all(&[7; 101]).expect("open");
        let mut seen = Vec::new();
        let ended = server.read_to_end(&mut seen);
        assert_eq!(ended.expect_err("a reset").kind(), io::ErrorKind::ConnectionReset);
        assert!(seen.len() <= 100, "{}", seen.len());
        assert_eq!(pair.proxy.cuts(), 1);
        assert!(client.read(&mut [0]).is_err(), "the client hears of it too");
    }

    #[test]
    fn a_refusal_and_a_reset_end_connections() {
        let pair = Pair::new();
        let (mut client, _server) = pair.connect();
        pair.proxy.set(Rules::REFUSE);
        pair.proxy.reset_all();
        assert!(client.read(&mut [0]).is_err());
        let refused = Stream::connect(pair.proxy.addr()).and_then(|mut stream| {
            stream.set_read_timeout(Some(LIMIT))?;
            stream.read(&mut [0])
        });
        assert!(refused.is_err(), "{refused:?}");
    }
}
