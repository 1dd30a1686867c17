//! A client's connection: the protocol's own client machine over a simulated stream.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::conn::{ClientConn, ClientEvent};
use leasehold_protocol::ids::{ClusterId, RequestId};
use leasehold_protocol::reply::{Reply, ServerHello};
use leasehold_protocol::request::Request;
use leasehold_protocol::watch::WatchRequest;
use leasehold_server::env::{ByteReader, ByteWriter, Clock, Net};
use leasehold_server::rt::channels::{Notify, Receiver, Sender, channel};
use leasehold_server::rt::sim::{SimClock, SimRt};
use leasehold_server::rt::sim_net::{SimHost, SimReader, SimWriter};
use openraft_rt::AsyncRuntime;

use crate::node::{CLUSTER, client_addr};

/// Answers to one request: `Queued`, then the end of the wait.
const ANSWERS_MAX: usize = 4;

/// What a watch is told between two looks of its client, who takes all of it at once.
const TOLD_MAX: usize = 64 * 1024;

/// Connect and handshake take at most this long.
const CONNECT_LIMIT: Duration = Duration::from_millis(400);

/// One open connection; it ends when the last handle is dropped or the stream breaks.
pub(crate) struct Link {
    shared: Rc<Shared>,
}

struct Shared {
    conn: RefCell<ClientConn>,
    waiting: RefCell<BTreeMap<RequestId, Sender<Reply>>>,
    open: Cell<bool>,
    over: Cell<bool>,
    /// Nothing is read.
    rests: Cell<bool>,
    /// The cluster's nodes, as the other side has them.
    nodes: RefCell<Vec<u64>>,
    changed: Notify,
    output: Notify,
}

impl Link {
    /// Connects to a node; `None` if that fails or takes too long.
    pub(crate) async fn open(host: &SimHost, node: u64) -> Option<Self> {
        Self::open_to(host, CLUSTER, node).await
    }

    /// The same for any cluster.
    pub(crate) async fn open_to(host: &SimHost, cluster: ClusterId, node: u64) -> Option<Self> {
        SimRt::timeout(CONNECT_LIMIT, Self::connect(host, cluster, node)).await.ok().flatten()
    }

    async fn connect(host: &SimHost, cluster: ClusterId, node: u64) -> Option<Self> {
        let (reader, writer) = host.connect(&client_addr(node)).await.ok()?;
        let conn = ClientConn::new(cluster, Vec::new(), SimClock.now().0).expect("a hello fits");
        let shared = Rc::new(Shared {
            conn: RefCell::new(conn),
            waiting: RefCell::default(),
            open: Cell::new(false),
            over: Cell::new(false),
            rests: Cell::new(false),
            nodes: RefCell::default(),
            changed: Notify::new(),
            output: Notify::new(),
        });
        drop(SimRt::spawn(shared.clone().read(reader)));
        drop(SimRt::spawn(shared.clone().write(writer)));
        let link = Self { shared };
        link.shared.output.notify_one();
        while !link.shared.open.get() {
            if link.shared.over.get() {
                return None;
            }
            link.shared.changed.notified().await;
        }
        Some(link)
    }

    /// The cluster's nodes, as this one named them.
    pub(crate) fn nodes(&self) -> Vec<u64> {
        self.shared.nodes.borrow().clone()
    }

    /// Sends a request; its answers arrive in the channel, which ends with the connection.
    pub(crate) fn request(&self, request: &Request) -> Receiver<Reply> {
        self.send(request, ANSWERS_MAX).1
    }

    /// The same for a watch, which may be told much. The id is for the end of it.
    pub(crate) fn watch(&self, request: WatchRequest) -> (Option<RequestId>, Receiver<Reply>) {
        self.send(&Request::Watch(request), TOLD_MAX)
    }

    fn send(&self, request: &Request, answers: usize) -> (Option<RequestId>, Receiver<Reply>) {
        let (sender, receiver) = channel(answers);
        let sent = self.shared.conn.borrow_mut().request(request).ok();
        if let Some(id) = sent {
            self.shared.waiting.borrow_mut().insert(id, sender);
            self.shared.output.notify_one();
        }
        (sent, receiver)
    }

    /// Reads nothing for a while: what the node sends stands in the stream.
    pub(crate) async fn rest(&self, pause: Duration) {
        self.shared.rests.set(true);
        SimRt::sleep(pause).await;
        self.shared.rests.set(false);
        self.shared.changed.notify_all();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.end();
    }
}

impl Shared {
    fn end(&self) {
        self.over.set(true);
        let waiting = self.waiting.take();
        drop(waiting);
        self.changed.notify_all();
        self.output.notify_one();
    }

    async fn read(self: Rc<Self>, mut reader: SimReader) {
        let mut buf = vec![0; 4096];
        while !self.over.get() {
            if self.rests.get() {
                self.changed.notified().await;
                continue;
            }
            let read = SimRt::select2(self.changed.notified(), reader.read(&mut buf)).await;
            match read {
                openraft_rt::Select2::First(()) => {}
                openraft_rt::Select2::Second(Ok(len)) if len > 0 => {
                    self.conn.borrow_mut().feed(&buf[..len], SimClock.now().0);
                    self.turn();
                }
                openraft_rt::Select2::Second(_) => break,
            }
        }
        self.end();
    }

    fn turn(&self) {
        loop {
            let event = self.conn.borrow_mut().poll_event();
            match event {
                None => break,
                Some(ClientEvent::Hello(hello)) => {
                    self.learn(&hello);
                    self.open.set(true);
                    self.changed.notify_all();
                }
                Some(ClientEvent::News(hello)) => self.learn(&hello),
                Some(ClientEvent::Reply { id, reply }) => self.deliver(id, reply),
                Some(ClientEvent::Unmatched { .. }) => {}
                Some(ClientEvent::Closed(_)) => self.end(),
            }
        }
        self.output.notify_one();
    }

    fn learn(&self, hello: &ServerHello) {
        self.nodes.replace(hello.nodes.iter().map(|node| node.node.0).collect());
    }

    fn deliver(&self, id: RequestId, reply: Reply) {
        let last = reply.is_final();
        let mut waiting = self.waiting.borrow_mut();
        let sender = if last { waiting.remove(&id) } else { waiting.get(&id).cloned() };
        drop(waiting);
        if let Some(sender) = sender {
            // Whoever asked may have gone.
            let _ = sender.try_send(reply);
        }
    }

    async fn write(self: Rc<Self>, mut writer: SimWriter) {
        while !self.over.get() {
            let output = self.conn.borrow_mut().take_output(Vec::new());
            if output.is_empty() {
                self.output.notified().await;
            } else if writer.write_all(&output).await.is_err() {
                break;
            }
        }
        self.end();
    }
}
