//! One client connection: bytes in, requests to the router, replies out.
//!
//! One task reads, one writes. Replies of one turn of the core leave in one write, because the
//! writing task runs after the tasks that produced them. A connection never makes others wait: it
//! stops reading when its client does not take its replies, and ends when a write takes too long.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::conn::{CloseReason, ServerConn, ServerEvent};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, NodeId, RequestId, ShardId};
use leasehold_protocol::reply::{ErrorReply, Reply, ServerHello};
use leasehold_protocol::request::Request;
use leasehold_protocol::watch::WatchRequest;
use openraft::AsyncRuntime;

use super::news::News;
use super::reply::{ReplySink, ReplyTo};
use super::watching::Watching;
use crate::admin::Distribution;
use crate::env::{ByteReader, ByteWriter, Clock, Env, MonoTime, Net};
use crate::rt::channels::Notify;
use crate::watch::WatchName;

/// Bytes read at once.
const READ_LEN: usize = 64 * 1024;
/// A write that takes longer ends the connection.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often connections are looked at for time-outs.
const SWEEP_EVERY: Duration = Duration::from_millis(500);
/// How long a connection that this node ended waits for its client to take the last words.
const FINISH_LIMIT: Duration = Duration::from_secs(1);

/// What connections need of their node.
pub trait Front {
    /// The cluster, `ClusterId::UNKNOWN` before the node's admission.
    fn cluster(&self) -> ClusterId;
    /// The answer to a hello, or why there is none.
    fn hello(&self) -> Result<ServerHello, ErrorCode>;
    /// Takes a request.
    fn request(&self, request: Request, to: ReplyTo);
    /// Takes a watch; its name is for `unwatch`. `None`: it was refused.
    fn watch(&self, _request: WatchRequest, to: ReplyTo) -> Option<WatchName> {
        to.error(ErrorCode::NOT_READY, NodeId(0));
        None
    }
    /// Ends a watch that was taken, if it did not end by itself.
    fn unwatch(&self, _shard: ShardId, _name: WatchName) {}
    /// Hears of every answer.
    fn answered(&self, reply: &Reply);
    /// What to measure about a request, if anything.
    fn asked(&self, _request: &Request) -> Option<Asked> {
        None
    }
    /// The first answer to what `asked` named goes out.
    fn took(&self, _asked: Asked) {}
}

/// A request without an answer, as it is measured.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Where its duration belongs.
    pub kind: Distribution,
    /// When it was read.
    pub at: MonoTime,
}

/// A connection as its core's other tasks see it.
pub(super) struct Connection {
    pub(super) front: Rc<dyn Front>,
    pub(super) conn: RefCell<ServerConn>,
    /// Its watches.
    pub(super) watching: Watching,
    news: Rc<News>,
    /// The last change of the nodes that its client was told of.
    told: Cell<u64>,
    /// Measured requests without an answer; as bounded as the connection's requests.
    asked: RefCell<BTreeMap<u64, Asked>>,
    /// Output, or the end, waits for the writing task.
    output: Notify,
    /// Room was made, or the end came, for the reading task.
    room: Notify,
    over: Cell<bool>,
    /// Reading stopped because the client does not take its replies.
    paused: Cell<bool>,
}

impl ReplySink for Connection {
    fn reply(&self, id: u64, reply: &Reply) {
        self.front.answered(reply);
        let asked = self.asked.borrow_mut().remove(&id);
        if let Some(asked) = asked {
            self.front.took(asked);
        }
        self.conn.borrow_mut().reply(RequestId(id), reply);
        self.output.notify_one();
    }
}

impl Connection {
    fn end(&self) {
        self.over.set(true);
        self.output.notify_one();
        self.room.notify_one();
    }

    /// Acts on all events; logs why the connection ended, if it did.
    fn turn(self: &Rc<Self>) {
        loop {
            let event = self.conn.borrow_mut().poll_event();
            match event {
                None => break,
                Some(ServerEvent::Hello(_)) => self.greet(),
                Some(ServerEvent::Request { id, request }) => {
                    if let Some(asked) = self.front.asked(&request) {
                        self.asked.borrow_mut().insert(id.0, asked);
                    }
                    match request {
                        Request::Watch(request) => self.watch(id.0, request),
                        Request::Unwatch(request) => self.unwatch(id.0, request),
                        request => {
                            let sink: Rc<dyn ReplySink> = Rc::clone(self) as _;
                            self.front.request(request, ReplyTo::new(sink, id.0));
                        }
                    }
                }
                Some(ServerEvent::Closed(reason)) => {
                    if matches!(reason, CloseReason::Frame(_)) {
                        tracing::debug!(%reason, "connection ended");
                    }
                    self.end();
                }
            }
        }
        if self.conn.borrow().output_len() > 0 {
            self.output.notify_one();
        }
    }

    fn greet(&self) {
        let mut conn = self.conn.borrow_mut();
        match self.front.hello() {
            Ok(hello) => {
                self.told.set(self.news.see(&hello.nodes));
                conn.accept(hello);
            }
            Err(code) => conn.refuse(ErrorReply::new(code, code.text())),
        }
    }

    /// Tells its client which nodes there are now, unless it knows.
    fn tell(&self, hello: &ServerHello) {
        let change = self.news.see(&hello.nodes);
        if self.told.get() != change && self.conn.borrow_mut().news(hello.clone()) {
            self.told.set(change);
        }
    }
}

/// All connections of one core.
pub struct Connections {
    live: RefCell<BTreeMap<u64, Rc<Connection>>>,
    next: Cell<u64>,
    max: usize,
    accepted: Cell<u64>,
    news: Rc<News>,
}

impl Connections {
    /// None yet, and never more than `max`.
    pub fn new(max: usize) -> Rc<Self> {
        Rc::new(Self {
            live: RefCell::default(),
            next: Cell::new(0),
            max,
            accepted: Cell::new(0),
            news: Rc::default(),
        })
    }

    /// Connections open now.
    pub fn len(&self) -> usize {
        self.live.borrow().len()
    }

    /// None is open.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Connections ever accepted.
    pub fn accepted(&self) -> u64 {
        self.accepted.get()
    }

    /// Ends all connections with `code`.
    pub fn refuse_all(&self, code: ErrorCode) {
        let live: Vec<_> = self.live.borrow().values().cloned().collect();
        for connection in live {
            connection.conn.borrow_mut().refuse(ErrorReply::new(code, code.text()));
            connection.end();
        }
    }

    /// Ends connections whose time is over, and tells the others of new nodes, as long as the core
    /// lives. One task.
    pub async fn run_deadlines<E: Env>(self: Rc<Self>, clock: E::Clock) {
        loop {
            let planned = clock.now().after(SWEEP_EVERY);
            E::Rt::sleep(SWEEP_EVERY).await;
            let now = clock.now();
            if now.since(planned) > SWEEP_EVERY {
                // This process was paused: what its clients sent meanwhile is read first.
                continue;
            }
            let now_ns = now.0;
            let live: Vec<_> = self.live.borrow().values().cloned().collect();
            let hello = live.last().and_then(|connection| connection.front.hello().ok());
            for connection in live {
                connection.conn.borrow_mut().tick(now_ns);
                if let Some(hello) = &hello {
                    connection.tell(hello);
                }
                connection.turn();
            }
        }
    }

    /// Serves one accepted stream until it ends.
    pub async fn serve<E: Env>(
        self: Rc<Self>,
        front: Rc<dyn Front>,
        reader: <E::Net as Net>::Reader,
        writer: <E::Net as Net>::Writer,
        clock: E::Clock,
    ) {
        let id = self.next.get();
        self.next.set(id + 1);
        self.accepted.set(self.accepted.get() + 1);
        let conn = ServerConn::new(front.cluster(), clock.now().0);
        let connection = Rc::new(Connection {
            front,
            conn: RefCell::new(conn),
            watching: Watching::default(),
            news: Rc::clone(&self.news),
            told: Cell::new(0),
            asked: RefCell::default(),
            output: Notify::new(),
            room: Notify::new(),
            over: Cell::new(false),
            paused: Cell::new(false),
        });
        if self.live.borrow().len() >= self.max {
            let code = ErrorCode::TOO_MANY_CONNECTIONS;
            connection.conn.borrow_mut().refuse(ErrorReply::new(code, code.text()));
            connection.turn();
        } else {
            self.live.borrow_mut().insert(id, Rc::clone(&connection));
        }
        let reading = read::<E>(Rc::clone(&connection), reader, clock);
        let writing = write::<E>(Rc::clone(&connection), writer);
        // The writer ends last: it carries out what is left when reading is over.
        let reading = E::Rt::spawn(reading);
        let writer = writing.await;
        connection.end();
        connection.unwatch_all();
        let reader = reading.await.ok().flatten();
        self.live.borrow_mut().remove(&id);
        if let (Some(reader), Some(writer)) = (reader, writer) {
            E::Net::finish(reader, writer, FINISH_LIMIT).await;
        }
    }
}

/// Reads until the end; gives the reader back unless the stream ended by itself.
async fn read<E: Env>(
    connection: Rc<Connection>,
    mut reader: <E::Net as Net>::Reader,
    clock: E::Clock,
) -> Option<<E::Net as Net>::Reader> {
    let mut buf = vec![0; READ_LEN];
    while !connection.over.get() {
        if !connection.conn.borrow().wants_frames() {
            connection.paused.set(true);
            connection.room.notified().await;
            connection.paused.set(false);
            connection.turn();
            continue;
        }
        let ended = connection.room.notified();
        let read = match E::Rt::select2(reader.read(&mut buf), ended).await {
            openraft_rt::Select2::First(read) => read,
            openraft_rt::Select2::Second(()) => continue,
        };
        match read {
            Ok(len) if len > 0 => {
                connection.conn.borrow_mut().feed(&buf[..len], clock.now().0);
                connection.turn();
            }
            _ => {
                connection.end();
                return None;
            }
        }
    }
    Some(reader)
}

/// Writes until the end; gives the writer back if everything was written.
async fn write<E: Env>(
    connection: Rc<Connection>,
    mut writer: <E::Net as Net>::Writer,
) -> Option<<E::Net as Net>::Writer> {
    let mut spare = Vec::new();
    loop {
        let output = connection.conn.borrow_mut().take_output(spare);
        if output.is_empty() {
            if connection.over.get() {
                return Some(writer);
            }
            spare = output;
            connection.output.notified().await;
            continue;
        }
        let written = E::Rt::timeout(WRITE_TIMEOUT, writer.write_all(&output)).await;
        if !matches!(written, Ok(Ok(()))) {
            connection.end();
            return None;
        }
        spare = output;
        if connection.paused.get() && connection.conn.borrow().wants_frames() {
            connection.room.notify_one();
        }
    }
}
