//! One connection: what waits to be written, what waits for an answer, and the two tasks that move
//! bytes.
//!
//! Frames that are ready together go out in one write. A frame that carries a stamp is stamped
//! right before the write that hands it to the kernel, or dropped if its leadership is over.
//! Everything is bounded: frames and bytes that wait, requests without an answer, the time of one
//! write.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use leasehold_protocol::frame::{self, Header};
use leasehold_protocol::ids::RequestId;
use leasehold_protocol::limits::PEER_BODY_MAX;
use leasehold_protocol::peer;
use openraft::AsyncRuntime;
use openraft::async_runtime::Select2;

use super::PeerError;
use super::identity::PeerInfo;
use crate::env::{ByteReader, ByteWriter, Clock, Env, MonoTime, Net};
use crate::raft::rounds::Stamp;
use crate::raft::signal::Signal;

/// Most bytes that wait to be written.
const QUEUED_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Most requests of one connection without an answer.
const PENDING_MAX: usize = 4096;
/// Frames are gathered into one write up to this length.
const WRITE_LEN: usize = 256 * 1024;
/// Bytes of one read.
const READ_LEN: usize = 64 * 1024;
/// Longest time of one write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// The frames that wait to be written to one connection, and whether it is still open.
#[derive(Default)]
pub(super) struct Outbox {
    queue: RefCell<VecDeque<Outgoing>>,
    queued_bytes: Cell<usize>,
    closed: Cell<bool>,
    heard: Cell<MonoTime>,
    /// Raised for the writing task alone.
    pushed: Signal,
    shut: Signal,
}

struct Outgoing {
    id: u64,
    bytes: Vec<u8>,
    stamp: Option<Rc<Stamp>>,
}

/// The connection takes no more frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shut {
    Full,
    Closed,
    /// The frame is longer than a peer takes; others still pass.
    TooLarge,
}

impl Outbox {
    pub(super) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Both tasks of the connection end soon; what was not written never will be.
    pub(super) fn close(&self) {
        self.closed.set(true);
        self.queue.take();
        self.queued_bytes.set(0);
        self.pushed.raise();
        self.shut.raise();
    }

    pub(super) fn heard_at(&self, now: MonoTime) {
        self.heard.set(now);
    }

    /// When the other side was last heard.
    pub(super) fn heard(&self) -> MonoTime {
        self.heard.get()
    }

    pub(super) fn push(
        &self,
        kind: u8,
        id: u64,
        stamp: Option<Rc<Stamp>>,
        write_body: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), Shut> {
        if self.closed.get() {
            return Err(Shut::Closed);
        }
        if self.queued_bytes.get() >= QUEUED_BYTES_MAX {
            return Err(Shut::Full);
        }
        let mut bytes = Vec::new();
        let header = Header::new(kind, RequestId(id));
        frame::append(header, PEER_BODY_MAX, &mut bytes, write_body).map_err(|_| Shut::TooLarge)?;
        self.queued_bytes.set(self.queued_bytes.get() + bytes.len());
        self.queue.borrow_mut().push_back(Outgoing { id, bytes, stamp });
        self.pushed.raise();
        Ok(())
    }

    /// Asks the other side for a sign of life.
    pub(super) fn ping(&self) {
        let _full_or_closed = self.push(peer::PING, 0, None, |_| {});
    }

    /// Answers a `ping`.
    pub(super) fn pong(&self, id: u64) {
        let _full_or_closed = self.push(peer::REPLY, id, None, |_| {});
    }

    /// Gathers one write, stamping each frame; `dropped` gets the ids of those that must not go.
    fn gather(&self, bytes: &mut Vec<u8>, mut dropped: impl FnMut(u64)) {
        bytes.clear();
        while bytes.len() < WRITE_LEN {
            let Some(next) = self.queue.borrow_mut().pop_front() else { break };
            self.queued_bytes.set(self.queued_bytes.get() - next.bytes.len());
            match next.stamp {
                Some(stamp) if !stamp.hand_over() => dropped(next.id),
                _ => bytes.extend_from_slice(&next.bytes),
            }
        }
    }

    pub(super) async fn closed(&self) {
        loop {
            let version = self.shut.version();
            if self.closed.get() {
                return;
            }
            self.shut.since(version).await;
        }
    }
}

/// The writing task of a connection; ends when the connection is closed.
pub(super) async fn write_loop<E: Env>(
    outbox: Rc<Outbox>,
    mut writer: impl ByteWriter,
    dropped: impl Fn(u64),
) {
    let mut bytes = Vec::new();
    loop {
        let version = outbox.pushed.version();
        outbox.gather(&mut bytes, &dropped);
        if bytes.is_empty() {
            if outbox.is_closed() {
                return;
            }
            outbox.pushed.since(version).await;
            continue;
        }
        let written = E::Rt::timeout(WRITE_TIMEOUT, writer.write_all(&bytes)).await;
        if !matches!(written, Ok(Ok(()))) {
            outbox.close();
            return;
        }
        if bytes.capacity() > 2 * WRITE_LEN {
            bytes = Vec::new();
        }
    }
}

/// The reading half of a connection.
pub(super) struct Inbox<E: Env> {
    reader: <E::Net as Net>::Reader,
    clock: E::Clock,
    bytes: Vec<u8>,
    pub(super) decoder: frame::Decoder,
}

impl<E: Env> Inbox<E> {
    /// `decoder` may hold bytes that came with the handshake.
    pub(super) fn new(
        reader: <E::Net as Net>::Reader,
        clock: E::Clock,
        mut decoder: frame::Decoder,
    ) -> Self {
        decoder.set_body_max(PEER_BODY_MAX);
        Self { reader, clock, bytes: vec![0; READ_LEN], decoder }
    }

    /// Reads once; false at the stream's end and when the connection is closed. Dropping the
    /// future loses nothing.
    pub(super) async fn read(&mut self, outbox: &Outbox) -> bool {
        let read = E::Rt::select2(outbox.closed(), self.reader.read(&mut self.bytes)).await;
        match read {
            Select2::Second(Ok(read)) if read > 0 => {
                outbox.heard.set(self.clock.now());
                self.decoder.feed(&self.bytes[..read]);
                true
            }
            _ => false,
        }
    }
}

/// A connection that this node made, and its requests without an answer.
pub(super) struct Connection {
    pub(super) info: PeerInfo,
    pub(super) outbox: Rc<Outbox>,
    pending: RefCell<BTreeMap<u64, Slot>>,
    last_id: Cell<u64>,
    /// When the first request was queued after the other side was last heard.
    asked: Cell<MonoTime>,
    /// Raised by each request.
    requested: Signal,
}

#[derive(Default)]
struct Slot {
    answer: Option<Result<Vec<u8>, PeerError>>,
    waker: Option<Waker>,
}

impl Connection {
    pub(super) fn new(info: PeerInfo, outbox: Rc<Outbox>) -> Rc<Self> {
        let (pending, last_id, asked) = (RefCell::default(), Cell::new(0), Cell::default());
        Rc::new(Self { info, outbox, pending, last_id, asked, requested: Signal::default() })
    }

    /// Queues a request; its answer comes through the returned future.
    pub(super) fn request(
        self: &Rc<Self>,
        kind: u8,
        now: MonoTime,
        stamp: Option<Rc<Stamp>>,
        write_body: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Answer, PeerError> {
        if self.pending.borrow().len() >= PENDING_MAX {
            return Err(PeerError::Busy);
        }
        let id = self.last_id.get() + 1;
        self.last_id.set(id);
        self.outbox.push(kind, id, stamp, write_body).map_err(|shut| match shut {
            Shut::Full => PeerError::Busy,
            Shut::Closed => PeerError::Closed,
            Shut::TooLarge => PeerError::TooLarge,
        })?;
        if self.asked.get() <= self.outbox.heard() {
            self.asked.set(now);
        }
        self.pending.borrow_mut().insert(id, Slot::default());
        self.requested.raise();
        Ok(Answer { connection: self.clone(), id })
    }

    /// An answer came. Answers that nobody waits for any more are dropped.
    pub(super) fn answered(&self, id: u64, answer: Result<Vec<u8>, PeerError>) {
        let mut pending = self.pending.borrow_mut();
        let Some(slot) = pending.get_mut(&id).filter(|slot| slot.answer.is_none()) else { return };
        slot.answer = Some(answer);
        let waker = slot.waker.take();
        drop(pending);
        waker.into_iter().for_each(Waker::wake);
    }

    /// Nobody will answer any more.
    pub(super) fn fail_all(&self) {
        self.outbox.close();
        let ids: Vec<u64> = self.pending.borrow().keys().copied().collect();
        for id in ids {
            self.answered(id, Err(PeerError::Closed));
        }
    }

    /// Since when nothing at all was heard although an answer is due; `None` if none is.
    pub(super) fn silent_since(&self) -> Option<MonoTime> {
        let (asked, heard) = (self.asked.get(), self.outbox.heard());
        let due = asked > heard || !self.pending.borrow().is_empty();
        due.then(|| asked.max(heard))
    }

    /// Ready once an answer is due.
    pub(super) async fn answer_due(&self) {
        loop {
            let version = self.requested.version();
            if self.silent_since().is_some() {
                return;
            }
            self.requested.since(version).await;
        }
    }
}

/// The answer to one request. Dropping it forgets the request; the connection stays usable.
pub(crate) struct Answer {
    connection: Rc<Connection>,
    id: u64,
}

impl Future for Answer {
    type Output = Result<Vec<u8>, PeerError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut pending = self.connection.pending.borrow_mut();
        let slot = pending.get_mut(&self.id).expect("the slot lives as long as its future");
        if let Some(answer) = slot.answer.take() {
            return Poll::Ready(answer);
        }
        slot.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.connection.pending.borrow_mut().remove(&self.id);
    }
}
