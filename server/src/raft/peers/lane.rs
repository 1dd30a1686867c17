//! One peer and one class: the connection that is there, or is being made, or must wait.
//!
//! A connection is made by a task of its own, so that a caller that gives up early does not take
//! the attempt with it. After a failure the next attempt waits, longer each time, and callers get
//! the last reason at once. A connection on which an answer is due and nothing at all is heard is
//! closed by a timer, so that those who wait on it learn that soon, though nobody sends any more.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::NodeId;
use leasehold_protocol::peer::{self, PeerRefusal};
use leasehold_protocol::{codec, frame};
use openraft::AsyncRuntime;
use rand::Rng;

use super::handshake::{self, Dial, Wire};
use super::identity::{Class, Copied};
use super::link::{self, Connection, Inbox, Outbox};
use super::{HandshakeError, Known, PeerError, Peers};
use crate::env::{Clock, Env, MonoTime, Net};
use crate::raft::signal::Signal;

/// Longest time of a connect with its handshake.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Wait after the first failure; doubles up to the longest.
const BACK_OFF_FIRST: Duration = Duration::from_millis(20);
const BACK_OFF_LONGEST: Duration = Duration::from_secs(1);
/// A connection on which something was asked and nothing at all was heard for so long, not even the
/// answer to a ping at half that time, is given up.
const SILENCE_MAX: Duration = Duration::from_secs(1);
/// How often that is looked at while an answer is due.
const WATCH_EVERY: Duration = Duration::from_millis(250);

#[derive(Default)]
pub(super) struct Lane {
    state: RefCell<State>,
    changed: Signal,
    failures: Cell<u32>,
    connects: Cell<u64>,
}

#[derive(Default)]
enum State {
    #[default]
    Idle,
    Connecting,
    Live(Rc<Connection>),
    Waiting {
        until: MonoTime,
        reason: String,
    },
}

impl Lane {
    pub(super) fn connects(&self) -> u64 {
        self.connects.get()
    }

    pub(super) fn is_live(&self) -> bool {
        matches!(&*self.state.borrow(), State::Live(link) if !link.outbox.is_closed())
    }

    pub(super) fn close(&self) {
        if let State::Live(connection) = &*self.state.borrow() {
            connection.fail_all();
        }
        if !matches!(*self.state.borrow(), State::Connecting) {
            self.state.replace(State::Idle);
        }
        self.failures.set(0);
    }

    /// The peer was heard on another connection: no reason to wait any more.
    pub(super) fn heard(&self) {
        if matches!(*self.state.borrow(), State::Waiting { .. }) {
            self.state.replace(State::Idle);
            self.failures.set(0);
        }
    }

    fn live(&self) -> Option<Rc<Connection>> {
        let state = self.state.borrow();
        let State::Live(connection) = &*state else { return None };
        let connection = connection.clone();
        drop(state);
        if connection.outbox.is_closed() {
            self.state.replace(State::Idle);
            return None;
        }
        Some(connection)
    }

    /// Whether to connect now; an error says why not.
    fn may_connect(&self, now: MonoTime) -> Result<bool, PeerError> {
        match &*self.state.borrow() {
            State::Idle => Ok(true),
            State::Connecting | State::Live(_) => Ok(false),
            State::Waiting { until, .. } if *until <= now => Ok(true),
            State::Waiting { reason, .. } => Err(PeerError::Unreachable(reason.clone())),
        }
    }

    fn failed(&self, now: MonoTime, jitter: f64, reason: String) {
        let doublings = self.failures.get().min(16);
        self.failures.set(self.failures.get() + 1);
        let wait = BACK_OFF_FIRST.saturating_mul(1 << doublings).min(BACK_OFF_LONGEST);
        let until = now.after(wait.mul_f64(0.5 + jitter / 2.0));
        self.state.replace(State::Waiting { until, reason });
        self.changed.raise();
    }

    fn connected(&self, connection: Rc<Connection>) {
        self.failures.set(0);
        self.state.replace(State::Live(connection));
        self.changed.raise();
    }
}

impl<E: Env> Peers<E> {
    pub(super) fn lane(&self, node: NodeId, class: Class) -> Rc<Lane> {
        self.lanes.borrow_mut().entry((node, class)).or_default().clone()
    }

    /// The live connection, made first if need be.
    pub(super) async fn connection(
        self: &Rc<Self>,
        node: NodeId,
        class: Class,
    ) -> Result<Rc<Connection>, PeerError> {
        let lane = self.lane(node, class);
        loop {
            if let Some(connection) = lane.live() {
                return Ok(connection);
            }
            if lane.may_connect(self.clock.now())? {
                let addr = self.book.borrow().get(&node).and_then(Known::address);
                let addr = addr.ok_or(PeerError::UnknownNode)?;
                lane.state.replace(State::Connecting);
                lane.connects.set(lane.connects.get() + 1);
                drop(E::Rt::spawn(self.clone().connect(lane.clone(), node, class, addr)));
            }
            let version = lane.changed.version();
            lane.changed.since(version).await;
        }
    }

    /// The task that makes a connection and then reads from it.
    async fn connect(self: Rc<Self>, lane: Rc<Lane>, node: NodeId, class: Class, addr: String) {
        let made = E::Rt::timeout(CONNECT_TIMEOUT, self.dial(node, class, &addr)).await;
        let reason = match made {
            Ok(Ok((connection, inbox))) => {
                self.meet(&connection.info.identity);
                if lane.failures.get() > 0 {
                    tracing::info!(peer = node.0, lane = class.name(), "reached again");
                }
                lane.connected(connection.clone());
                let answers = read_answers(&connection, inbox);
                E::Rt::select2(answers, self.watch(&connection)).await;
                connection.fail_all();
                return;
            }
            Ok(Err(error)) => {
                self.say(node, &error);
                format!("{addr}: {error}")
            }
            Err(_) => format!("{addr}: not connected within {CONNECT_TIMEOUT:?}"),
        };
        // Said once until it is reached again, however often it is tried.
        if lane.failures.get() == 0 {
            tracing::warn!(peer = node.0, lane = class.name(), "not reached: {reason}");
        }
        let jitter = E::Rt::thread_rng().next_u32();
        lane.failed(self.clock.now(), f64::from(jitter) / f64::from(u32::MAX), reason);
    }

    /// A new connection to `addr`, where nobody but `node` is to be.
    pub(super) async fn dial(
        &self,
        node: NodeId,
        class: Class,
        addr: &str,
    ) -> Result<(Rc<Connection>, Inbox<E>), HandshakeError> {
        let connected = self.net.connect(addr).await;
        let (mut reader, mut writer) =
            connected.map_err(|error| HandshakeError::Broken(error.to_string()))?;
        let me = self.identity.borrow().clone();
        let challenge = Self::challenge();
        let mut wire = Wire::new(&mut reader, &mut writer);
        let dial = Dial { me: &me, to: node, class, shard: self.shard, challenge };
        let info = handshake::dial(&mut wire, dial, &|other| self.judge(other)).await?;
        let decoder = std::mem::replace(&mut wire.decoder, frame::Decoder::new(0));
        if me.cluster != self.identity.borrow().cluster {
            return Err(HandshakeError::Broken("this node joined a cluster meanwhile".to_owned()));
        }
        let outbox = Rc::new(Outbox::default());
        outbox.heard_at(self.clock.now());
        self.connected.borrow_mut().add(&info.identity, outbox.clone());
        let connection = Connection::new(info, outbox.clone());
        let dropped = connection.clone();
        let dropped = move |id| dropped.answered(id, Err(PeerError::Superseded));
        drop(E::Rt::spawn(link::write_loop::<E>(outbox, writer, dropped)));
        Ok((connection, Inbox::new(reader, self.clock.clone(), decoder)))
    }

    /// Asks a silent peer that owes an answer for a sign of life; ready when none came.
    async fn watch(&self, connection: &Connection) {
        loop {
            connection.answer_due().await;
            let before = self.clock.now();
            E::Rt::sleep(WATCH_EVERY).await;
            let now = self.clock.now();
            if now.since(before) > 2 * WATCH_EVERY {
                // This node stood still: what came meanwhile is read before anybody is blamed.
                continue;
            }
            match connection.silent_since().map(|at| now.since(at)) {
                Some(silence) if silence > SILENCE_MAX => return,
                Some(silence) if silence > SILENCE_MAX / 2 => connection.outbox.ping(),
                _ => {}
            }
        }
    }

    /// Asks the connections of a process that another one claims to be for a sign of life, and
    /// closes them if none comes.
    pub(super) fn probe(&self, copied: Copied) {
        let clock = self.clock.clone();
        let asked = clock.now();
        copied.0.iter().for_each(|link| link.ping());
        drop(E::Rt::spawn(async move {
            E::Rt::sleep(SILENCE_MAX).await;
            let silent = |link: &&Rc<Outbox>| link.heard() <= asked;
            copied.0.iter().filter(silent).for_each(|link| link.close());
        }));
    }
}

/// Hands answers to those who wait, until the connection ends.
pub(super) async fn read_answers<E: Env>(connection: &Connection, mut inbox: Inbox<E>) {
    loop {
        while let Some(frame) = match inbox.decoder.next() {
            Ok(frame) => frame,
            Err(error) => {
                let peer = connection.info.node().0;
                tracing::warn!(peer, "peer connection closed: {error}");
                return;
            }
        } {
            match frame.kind {
                peer::REPLY => connection.answered(frame.id.0, Ok(frame.body.to_vec())),
                peer::ERROR => connection.answered(frame.id.0, Err(refused(frame.body))),
                peer::PING => connection.outbox.pong(frame.id.0),
                _ => return,
            }
        }
        if !inbox.read(&connection.outbox).await {
            return;
        }
    }
}

fn refused(body: &[u8]) -> PeerError {
    match codec::decode::<PeerRefusal>(body) {
        Ok(PeerRefusal { code, message }) => PeerError::Refused { code, message },
        Err(_) => PeerError::Malformed,
    }
}
