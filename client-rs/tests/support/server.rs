//! A server of one node on a real socket, with an `Authority` inside, that can be made to break.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc as std_mpsc;
use std::time::Duration;

use leasehold_protocol::frame::Decoder;
use leasehold_protocol::limits::CLIENT_BODY_MAX;
use leasehold_protocol::request::Request;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::task::LocalSet;

use super::authority::{Addressed, Authority};

type Job = Box<dyn FnOnce(&mut Authority) + Send>;

/// What the test may switch.
#[derive(Default)]
struct Switches {
    /// Reads and answers nothing.
    mute: AtomicBool,
    /// Refuses new connections.
    down: AtomicBool,
    stop: AtomicBool,
    connects: AtomicU64,
}

/// See the module. Stops when dropped.
pub(crate) struct TestServer {
    addr: SocketAddr,
    jobs: mpsc::UnboundedSender<Job>,
    switches: Arc<Switches>,
    cut: Arc<Notify>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl TestServer {
    pub(crate) fn start() -> Self {
        let (jobs, inbox) = mpsc::unbounded_channel();
        let switches = Arc::new(Switches::default());
        let cut = Arc::new(Notify::new());
        let (tell, told) = std_mpsc::channel();
        let (shared, cutter) = (Arc::clone(&switches), Arc::clone(&cut));
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let local = LocalSet::new();
            runtime.block_on(local.run_until(serve(tell, inbox, shared, cutter)));
        });
        let addr = told.recv().expect("the server started");
        Self { addr, jobs, switches, cut, thread: Some(thread) }
    }

    pub(crate) fn endpoint(&self) -> String {
        self.addr.to_string()
    }

    /// Runs something on the server's state.
    pub(crate) fn with<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Authority) -> T + Send + 'static,
    ) -> T {
        let (tell, told) = std_mpsc::channel();
        let job: Job = Box::new(move |authority| tell.send(job(authority)).unwrap());
        assert!(self.jobs.send(job).is_ok(), "the server runs");
        told.recv().expect("the server answers")
    }

    /// Breaks every connection.
    pub(crate) fn cut(&self) {
        self.cut.notify_waiters();
    }

    pub(crate) fn mute(&self, mute: bool) {
        self.switches.mute.store(mute, Ordering::SeqCst);
    }

    /// Breaks every connection and refuses new ones, or accepts again.
    pub(crate) fn down(&self, down: bool) {
        self.switches.down.store(down, Ordering::SeqCst);
        if down {
            self.cut();
        }
    }

    pub(crate) fn connects(&self) -> u64 {
        self.switches.connects.load(Ordering::SeqCst)
    }

    /// Tokens that hold a key.
    pub(crate) fn tokens(&self, key: &'static str) -> Vec<u64> {
        self.with(move |authority| {
            let info = authority.state.key_info(key.as_bytes());
            info.holders.iter().map(|holder| holder.token.0).collect()
        })
    }

    pub(crate) fn waiters(&self, key: &'static str) -> usize {
        self.with(move |authority| authority.state.key_info(key.as_bytes()).waiters.len())
    }

    pub(crate) fn leases(&self) -> usize {
        self.with(|authority| authority.state.leases_len())
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.switches.stop.store(true, Ordering::SeqCst);
        let _ = self.jobs.send(Box::new(|_| {}));
        let ended = self.thread.take().expect("dropped once").join();
        assert!(ended.is_ok() || std::thread::panicking(), "the test server failed");
    }
}

/// Where each connection's replies go.
type Outs = Rc<RefCell<BTreeMap<u64, mpsc::UnboundedSender<Vec<u8>>>>>;

fn now_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

async fn serve(
    tell: std_mpsc::Sender<SocketAddr>,
    mut inbox: mpsc::UnboundedReceiver<Job>,
    switches: Arc<Switches>,
    cut: Arc<Notify>,
) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let authority = Rc::new(RefCell::new(Authority::new(vec![addr.to_string()])));
    let outs: Outs = Rc::default();
    tell.send(addr).unwrap();
    let mut next_conn = 1;
    let mut ticks = tokio::time::interval(Duration::from_millis(5));
    while !switches.stop.load(Ordering::SeqCst) {
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, _) = accepted.unwrap();
                switches.connects.fetch_add(1, Ordering::SeqCst);
                if switches.down.load(Ordering::SeqCst) {
                    continue;
                }
                let conn = Conn {
                    id: next_conn,
                    authority: Rc::clone(&authority),
                    outs: Rc::clone(&outs),
                    switches: Arc::clone(&switches),
                };
                next_conn += 1;
                let cut = Arc::clone(&cut);
                tokio::task::spawn_local(async move {
                    let id = conn.id;
                    let (authority, outs) = (Rc::clone(&conn.authority), Rc::clone(&conn.outs));
                    tokio::select! {
                        () = conn.run(stream) => {}
                        () = cut.notified() => {}
                    }
                    outs.borrow_mut().remove(&id);
                    authority.borrow_mut().drop_conn(id);
                });
            }
            job = inbox.recv() => match job {
                Some(job) => job(&mut authority.borrow_mut()),
                None => return,
            },
            _ = ticks.tick() => {
                let out = authority.borrow_mut().tick(now_ns());
                deliver(&outs, out);
            }
        }
    }
}

fn deliver(outs: &Outs, replies: Vec<Addressed>) {
    for (conn, id, reply) in replies {
        if let Some(out) = outs.borrow().get(&conn) {
            let mut bytes = Vec::new();
            reply.encode_frame(id, &mut bytes).unwrap();
            let _ = out.send(bytes);
        }
    }
}

struct Conn {
    id: u64,
    authority: Rc<RefCell<Authority>>,
    outs: Outs,
    switches: Arc<Switches>,
}

impl Conn {
    async fn run(self, stream: TcpStream) {
        let (mut reader, mut writer) = stream.into_split();
        let (out, mut replies) = mpsc::unbounded_channel();
        self.outs.borrow_mut().insert(self.id, out);
        let write = async move {
            while let Some(bytes) = replies.recv().await {
                if writer.write_all(&bytes).await.is_err() {
                    return;
                }
            }
        };
        let read = async {
            let mut decoder = Decoder::new(CLIENT_BODY_MAX);
            let mut buffer = vec![0; 64 * 1024];
            loop {
                let len = reader.read(&mut buffer).await.unwrap_or(0);
                if len == 0 {
                    return;
                }
                decoder.feed(&buffer[..len]);
                while let Some(frame) = decoder.next().expect("a client sends whole frames") {
                    let request = Request::decode(frame.kind, frame.body).expect("sound requests");
                    if self.switches.mute.load(Ordering::SeqCst) {
                        continue;
                    }
                    let id = frame.id;
                    let mut authority = self.authority.borrow_mut();
                    let out = authority.request(self.id, id, &request, now_ns());
                    drop(authority);
                    deliver(&self.outs, out);
                }
            }
        };
        tokio::select! {
            () = read => {}
            () = write => {}
        }
    }
}
