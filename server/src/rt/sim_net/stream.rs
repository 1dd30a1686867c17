//! One simulated stream: two directions, two ends, and how either end learns of the other's end.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::rc::Rc;

use openraft_rt::AsyncRuntime;

use super::super::channels::Notify;
use super::super::sim::{DomainId, SimRt, Sleep};
use super::{BUFFER_BYTES_MAX, SimNet};
use crate::env::{ByteReader, ByteWriter};

/// Side 0 connected, side 1 accepted.
pub(super) struct Stream {
    net: SimNet,
    domains: [DomainId; 2],
    /// What side i sent, until the other side has read it.
    sent: [RefCell<Sent>; 2],
    /// When side i hears that the stream is broken.
    reset_ns: [Cell<Option<u64>>; 2],
    /// Nothing that side i sends arrives before.
    held_ns: [Cell<u64>; 2],
    /// Side i died without a word.
    silent: [Cell<bool>; 2],
    changed: [Notify; 2],
}

#[derive(Default)]
struct Sent {
    /// In order: what arrives early waits behind what is late, as in every stream.
    chunks: VecDeque<Chunk>,
    /// Bytes that take up room: not yet read, or read but not yet acknowledged.
    held_len: usize,
    unacknowledged_len: usize,
    /// When the orderly end arrives.
    end_ns: Option<u64>,
    /// Some of it was lost: nothing that follows arrives, for a stream has no holes.
    broken: bool,
}

struct Chunk {
    arrival_ns: u64,
    bytes: Vec<u8>,
    read_len: usize,
}

/// What a side can do now.
enum Step {
    Done(usize),
    Failed,
    WaitUntil(Option<u64>),
}

impl Stream {
    pub(super) fn open(net: &SimNet, from: DomainId, to: DomainId) -> (End, End) {
        let stream = Rc::new(Self {
            net: net.clone(),
            domains: [from, to],
            sent: Default::default(),
            reset_ns: Default::default(),
            held_ns: Default::default(),
            silent: Default::default(),
            changed: Default::default(),
        });
        net.inner.state.borrow_mut().streams.push(Rc::downgrade(&stream));
        (End { stream: Rc::clone(&stream), side: 0 }, End { stream, side: 1 })
    }

    pub(super) fn joins(&self, one: DomainId, other: DomainId) -> bool {
        self.domains == [one, other] || self.domains == [other, one]
    }

    pub(super) fn look_again(&self) {
        self.changed.iter().for_each(Notify::notify_all);
    }

    pub(super) fn reset_both(&self) {
        let now_ns = self.net.world().now_ns();
        for side in 0..2 {
            // What waits at a cut has not arrived, and nobody sends it again.
            if !self.hears(side) {
                self.sent[1 - side].borrow_mut().lose();
            }
            self.reset(side, now_ns);
        }
        self.look_again();
    }

    /// The end of both sides' hope; nothing on the way arrives.
    pub(super) fn lose(&self) {
        self.sent.iter().for_each(|sent| sent.borrow_mut().lose());
        self.reset_both();
    }

    /// The side that connected is reset; what it sent is held back for `hold_ns`. True if there is
    /// anything.
    pub(super) fn hold(&self, hold_ns: u64) -> bool {
        let now_ns = self.net.world().now_ns();
        self.held_ns[0].set(now_ns + hold_ns);
        self.resend(0);
        self.reset(0, now_ns);
        self.reset(1, self.arrival_ns(0).max(self.sent[0].borrow().last_ns()) + 1);
        !self.sent[0].borrow().chunks.is_empty()
    }

    /// Bytes that stood in the clogged link arrive after a usual delay.
    pub(super) fn link_unclogged(&self, from: DomainId, to: DomainId) {
        for side in 0..2 {
            if (self.domains[side], self.domains[1 - side]) == (from, to) {
                let arrival_ns = self.arrival_ns(side);
                for chunk in &mut self.sent[side].borrow_mut().chunks {
                    chunk.arrival_ns = chunk.arrival_ns.min(arrival_ns);
                }
            }
        }
    }

    /// Bytes that waited at the cut start their way now; so do acknowledgements.
    pub(super) fn link_healed(&self, from: DomainId, to: DomainId) {
        for side in 0..2 {
            if (self.domains[side], self.domains[1 - side]) == (from, to) {
                self.resend(side);
                let mut theirs = self.sent[1 - side].borrow_mut();
                theirs.held_len -= std::mem::take(&mut theirs.unacknowledged_len);
            }
        }
    }

    /// The restarted machine of `domain` knows nothing of a stream whose end there is gone.
    pub(super) fn host_back(&self, domain: DomainId) {
        for side in 0..2 {
            if self.domains[side] != domain {
                continue;
            }
            if self.silent[side].get() {
                self.reset(1 - side, self.arrival_ns(side));
            } else {
                self.resend(side);
                self.resend(1 - side);
            }
        }
    }

    fn resend(&self, side: usize) {
        let arrival_ns = self.arrival_ns(side);
        let mut sent = self.sent[side].borrow_mut();
        for chunk in &mut sent.chunks {
            chunk.arrival_ns = chunk.arrival_ns.max(arrival_ns);
        }
        sent.end_ns = sent.end_ns.map(|end_ns| end_ns.max(arrival_ns));
        drop(sent);
        if let Some(reset_ns) = self.reset_ns[1 - side].get() {
            self.reset_ns[1 - side].set(Some(reset_ns.max(arrival_ns)));
        }
    }

    fn arrival_ns(&self, side: usize) -> u64 {
        let arrival_ns = self.net.arrival_ns(self.domains[side], self.domains[1 - side]);
        arrival_ns.max(self.held_ns[side].get())
    }

    fn arrival_of_ns(&self, side: usize, len: usize) -> u64 {
        let (from, to) = (self.domains[side], self.domains[1 - side]);
        self.net.arrival_of_ns(from, to, len).max(self.held_ns[side].get())
    }

    fn reset(&self, side: usize, at_ns: u64) {
        let earlier = self.reset_ns[side].get().map_or(at_ns, |known| known.min(at_ns));
        self.reset_ns[side].set(Some(earlier));
        self.changed[side].notify_all();
    }

    /// True if whatever the other side sends reaches `side`.
    fn hears(&self, side: usize) -> bool {
        !self.net.is_cut(self.domains[1 - side], self.domains[side])
    }

    fn is_reset(&self, side: usize) -> bool {
        let now_ns = self.net.world().now_ns();
        self.hears(side) && self.reset_ns[side].get().is_some_and(|at_ns| at_ns <= now_ns)
    }

    /// Takes what has arrived at `side`. What arrived before a reset can still be read after it.
    fn try_read(&self, side: usize, buf: &mut [u8]) -> Step {
        if !self.hears(side) {
            return Step::WaitUntil(None);
        }
        let is_reset = self.is_reset(side);
        let reset_ns = self.reset_ns[side].get().filter(|_| is_reset);
        let now_ns = reset_ns.unwrap_or_else(|| self.net.world().now_ns());
        let mut sent = self.sent[1 - side].borrow_mut();
        let read_len = sent.take_arrived(now_ns, buf);
        if read_len == 0 && is_reset {
            return Step::Failed;
        }
        if read_len == 0 {
            return match sent.next_ns() {
                Some(at_ns) if at_ns <= now_ns => Step::Done(0),
                next => Step::WaitUntil(earliest(next, self.reset_ns[side].get())),
            };
        }
        if self.hears(1 - side) {
            sent.held_len -= read_len;
        } else {
            sent.unacknowledged_len += read_len;
        }
        drop(sent);
        self.changed[1 - side].notify_all();
        Step::Done(read_len)
    }

    /// Sends as much of `bytes` as there is room for.
    fn try_write(&self, side: usize, bytes: &[u8]) -> Step {
        if self.is_reset(side) {
            return Step::Failed;
        }
        let room = BUFFER_BYTES_MAX - self.sent[side].borrow().held_len;
        let len = bytes.len().min(room);
        if len == 0 {
            return Step::WaitUntil(self.reset_ns[side].get());
        }
        let cut = self.net.split(len).unwrap_or(len);
        for part in [&bytes[..cut], &bytes[cut..len]] {
            if !part.is_empty() {
                let arrival_ns = self.arrival_of_ns(side, part.len());
                self.sent[side].borrow_mut().push(arrival_ns, part);
            }
        }
        self.changed[1 - side].notify_all();
        Step::Done(len)
    }

    async fn wait(&self, side: usize, until_ns: Option<u64>) {
        let changed = self.changed[side].notified();
        match until_ns {
            Some(until_ns) => {
                SimRt::select2(changed, Sleep::until_true(until_ns)).await;
            }
            None => changed.await,
        }
    }

    /// The program at `side` let go of the stream.
    fn close(&self, side: usize) {
        let world = self.net.world();
        let domain = self.domains[side];
        if self.net.inner.state.borrow().off.contains(&domain) {
            self.silent[side].set(true);
            return;
        }
        let arrival_ns = self.arrival_ns(side);
        if world.is_alive(domain) && !self.sent[side].borrow().broken {
            self.sent[side].borrow_mut().end_ns = Some(arrival_ns);
        } else {
            self.reset(1 - side, arrival_ns);
        }
        self.look_again();
    }

    /// Bytes sent to an end that is closed come back as a reset.
    fn bounce(&self, side: usize) {
        let back_ns = self.arrival_ns(side).max(self.arrival_ns(1 - side));
        // After what that end had sent.
        self.reset(side, back_ns.max(self.sent[1 - side].borrow().last_ns()));
    }
}

impl Sent {
    fn push(&mut self, arrival_ns: u64, bytes: &[u8]) {
        if self.broken {
            return;
        }
        self.held_len += bytes.len();
        self.chunks.push_back(Chunk { arrival_ns, bytes: bytes.to_vec(), read_len: 0 });
    }

    fn lose(&mut self) {
        (self.broken, self.end_ns) = (true, None);
        let lost = self.chunks.drain(..).map(|chunk| chunk.bytes.len() - chunk.read_len);
        self.held_len -= lost.sum::<usize>();
    }

    fn take_arrived(&mut self, now_ns: u64, buf: &mut [u8]) -> usize {
        let mut taken_len = 0;
        while let Some(chunk) = self.chunks.front_mut().filter(|c| c.arrival_ns <= now_ns) {
            let rest = &chunk.bytes[chunk.read_len..];
            let len = rest.len().min(buf.len() - taken_len);
            buf[taken_len..taken_len + len].copy_from_slice(&rest[..len]);
            taken_len += len;
            chunk.read_len += len;
            if chunk.read_len < chunk.bytes.len() {
                break;
            }
            self.chunks.pop_front();
        }
        taken_len
    }

    /// When everything has arrived.
    fn last_ns(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.arrival_ns).max().unwrap_or(0)
    }

    /// When the next chunk, or else the end, arrives.
    fn next_ns(&self) -> Option<u64> {
        self.chunks.front().map(|chunk| chunk.arrival_ns).or(self.end_ns)
    }
}

fn earliest(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

/// One program's hold on a stream; the last drop closes it.
pub(super) struct End {
    stream: Rc<Stream>,
    side: usize,
}

impl End {
    pub(super) fn split(self) -> (SimReader, SimWriter) {
        let end = Rc::new(self);
        (SimReader { end: Rc::clone(&end) }, SimWriter { end })
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.stream.close(self.side);
    }
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stream { domains, .. } = &*self.stream;
        f.debug_struct("End").field("domains", domains).field("side", &self.side).finish()
    }
}

/// The reading half of a simulated stream.
#[derive(Debug)]
pub struct SimReader {
    end: Rc<End>,
}

impl ByteReader for SimReader {
    async fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        assert!(!buf.is_empty(), "there is room to read into");
        let End { stream, side } = &*self.end;
        loop {
            match stream.try_read(*side, buf) {
                Step::Done(len) => return Ok(len),
                Step::Failed => return Err(io::ErrorKind::ConnectionReset.into()),
                Step::WaitUntil(until_ns) => stream.wait(*side, until_ns).await,
            }
        }
    }
}

/// The writing half of a simulated stream.
#[derive(Debug)]
pub struct SimWriter {
    end: Rc<End>,
}

impl ByteWriter for SimWriter {
    async fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let End { stream, side } = &*self.end;
        while !bytes.is_empty() {
            match stream.try_write(*side, bytes) {
                Step::Done(len) => bytes = &bytes[len..],
                Step::Failed => return Err(io::ErrorKind::ConnectionReset.into()),
                Step::WaitUntil(until_ns) => stream.wait(*side, until_ns).await,
            }
        }
        if stream.sent[1 - side].borrow().end_ns.is_some() {
            stream.bounce(*side);
        }
        Ok(())
    }
}
