//! The simulated network: byte streams between domains, with delay, cuts and crashes.
//!
//! A link is one direction between two domains. What is sent into a **cut** link is not lost but
//! late, as TCP makes of it: it arrives after the link heals. A **break** resets the streams; what
//! was under way is gone, or, where it is **held**, reaches the side that accepted much later, when
//! the other side has long turned to another stream. A **clogged** link passes few bytes a second.
//! Killing a domain resets its streams as a dying process's kernel does; after `power_off` its
//! peers hear nothing until it is back.
//!
//! Every delay and every split is drawn from the world's seed. Nothing here is unbounded: a
//! direction of a stream holds `BUFFER_BYTES_MAX`, a listener `BACKLOG_MAX` streams.

mod stream;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::rc::{Rc, Weak};
use std::time::Duration;

use openraft_rt::MpscReceiver;

use super::channels::{Notify, Receiver, Sender, channel};
use super::sim::{DomainId, SimWorld, Sleep};
use crate::env::Net;
use stream::{End, Stream};
pub use stream::{SimReader, SimWriter};

/// Bytes on their way in one direction of a stream, at most; a writer waits for room.
pub const BUFFER_BYTES_MAX: usize = 256 << 10;

/// Streams that wait to be accepted at one listener, at most; more are refused.
pub const BACKLOG_MAX: usize = 128;

/// What every link does unless told otherwise.
#[derive(Clone, Copy, Debug)]
pub struct SimNetConfig {
    /// The least time from send to arrival.
    pub delay_min: Duration,
    /// The most.
    pub delay_max: Duration,
    /// In so many of 1000 cases a write arrives in two parts.
    pub split_permille: u64,
}

impl Default for SimNetConfig {
    fn default() -> Self {
        Self {
            delay_min: Duration::from_micros(50),
            delay_max: Duration::from_micros(300),
            split_permille: 50,
        }
    }
}

/// The whole network.
#[derive(Clone)]
pub struct SimNet {
    inner: Rc<Inner>,
}

struct Inner {
    config: SimNetConfig,
    world: SimWorld,
    state: RefCell<State>,
    /// Rings at each change of a link or a host.
    changed: Notify,
}

#[derive(Default)]
struct State {
    cuts: BTreeSet<(DomainId, DomainId)>,
    delays: BTreeMap<(DomainId, DomainId), (Duration, Duration)>,
    clogs: BTreeMap<(DomainId, DomainId), Clog>,
    refusing: BTreeSet<DomainId>,
    off: BTreeSet<DomainId>,
    listeners: BTreeMap<String, Listening>,
    streams: Vec<Weak<Stream>>,
}

/// A link that passes few bytes a second.
struct Clog {
    bytes_per_second: u64,
    /// When it has passed everything that was sent so far.
    free_ns: u64,
}

/// An address stays its machine's when nobody listens there.
struct Listening {
    domain: DomainId,
    incoming: Option<Sender<End>>,
}

impl fmt::Debug for SimNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimNet").finish_non_exhaustive()
    }
}

impl SimNet {
    /// A network without hosts.
    pub fn new(world: &SimWorld, config: SimNetConfig) -> Self {
        assert!(config.delay_min <= config.delay_max, "a delay's range is in order");
        let state = RefCell::new(State::default());
        let world = world.clone();
        Self { inner: Rc::new(Inner { config, world, state, changed: Notify::new() }) }
    }

    /// The network as `domain` sees it.
    pub fn host(&self, domain: DomainId) -> SimHost {
        SimHost { net: self.clone(), domain }
    }

    /// From now on nothing passes from `from` to `to`.
    pub fn cut(&self, from: DomainId, to: DomainId) {
        self.inner.state.borrow_mut().cuts.insert((from, to));
        self.tell();
    }

    /// Cuts both directions of every link between the two groups.
    pub fn partition(&self, one: &[DomainId], other: &[DomainId]) {
        for &a in one {
            for &b in other {
                self.cut(a, b);
                self.cut(b, a);
            }
        }
    }

    /// Lets everything pass from `from` to `to` again; what waited arrives after a usual delay.
    pub fn heal(&self, from: DomainId, to: DomainId) {
        if self.inner.state.borrow_mut().cuts.remove(&(from, to)) {
            for stream in self.streams() {
                stream.link_healed(from, to);
            }
            self.tell();
        }
    }

    /// Heals every cut link.
    pub fn heal_all(&self) {
        let cuts: Vec<_> = self.inner.state.borrow().cuts.iter().copied().collect();
        for (from, to) in cuts {
            self.heal(from, to);
        }
    }

    /// True if nothing passes from `from` to `to`.
    pub fn is_cut(&self, from: DomainId, to: DomainId) -> bool {
        let state = self.inner.state.borrow();
        state.cuts.contains(&(from, to)) || state.off.contains(&from) || state.off.contains(&to)
    }

    /// The delay of one link from now on.
    pub fn set_delay(&self, from: DomainId, to: DomainId, min: Duration, max: Duration) {
        assert!(min <= max, "a delay's range is in order");
        self.inner.state.borrow_mut().delays.insert((from, to), (min, max));
    }

    /// The link delays as configured again.
    pub fn reset_delay(&self, from: DomainId, to: DomainId) {
        self.inner.state.borrow_mut().delays.remove(&(from, to));
    }

    /// All links delay as configured again.
    pub fn reset_delays(&self) {
        self.inner.state.borrow_mut().delays.clear();
    }

    /// From now on the link passes only so many bytes a second.
    pub fn clog(&self, from: DomainId, to: DomainId, bytes_per_second: u64) {
        assert!(bytes_per_second > 0, "a link that passes nothing is cut");
        let clog = Clog { bytes_per_second, free_ns: 0 };
        self.inner.state.borrow_mut().clogs.insert((from, to), clog);
    }

    /// The link passes everything again, and what waits in it at once.
    pub fn unclog(&self, from: DomainId, to: DomainId) {
        if self.inner.state.borrow_mut().clogs.remove(&(from, to)).is_some() {
            for stream in self.streams() {
                stream.link_unclogged(from, to);
            }
            self.tell();
        }
    }

    /// Unclogs every link.
    pub fn unclog_all(&self) {
        let clogs: Vec<_> = self.inner.state.borrow().clogs.keys().copied().collect();
        for (from, to) in clogs {
            self.unclog(from, to);
        }
    }

    /// From now on every connect to `domain` is refused, or none.
    pub fn refuse(&self, domain: DomainId, refuse: bool) {
        let mut state = self.inner.state.borrow_mut();
        if refuse {
            state.refusing.insert(domain);
        } else {
            state.refusing.remove(&domain);
        }
    }

    /// Resets every stream between the two domains.
    pub fn break_streams(&self, one: DomainId, other: DomainId) {
        self.of_pair(one, other).iter().for_each(|stream| stream.reset_both());
    }

    /// The same, and what was sent and has not arrived never will.
    pub fn lose_streams(&self, one: DomainId, other: DomainId) {
        self.of_pair(one, other).iter().for_each(|stream| stream.lose());
    }

    /// Resets every stream between the two domains at the side that connected. What that side sent
    /// before reaches the other one up to `max` later, and then the reset. Returns how many streams
    /// had bytes on the way.
    pub fn hold_streams(&self, one: DomainId, other: DomainId, max: Duration) -> usize {
        let max_ns = max.as_nanos() as u64;
        let streams = self.of_pair(one, other);
        let hold = |stream: &&Rc<Stream>| stream.hold(self.world().rng().below(max_ns + 1));
        streams.iter().filter(hold).count()
    }

    fn of_pair(&self, one: DomainId, other: DomainId) -> Vec<Rc<Stream>> {
        let mut streams = self.streams();
        streams.retain(|stream| stream.joins(one, other));
        streams
    }

    /// The machine goes silent: kill its domain next, and its peers learn nothing of it.
    pub fn power_off(&self, domain: DomainId) {
        self.inner.state.borrow_mut().off.insert(domain);
        self.tell();
    }

    /// The machine is back, and answers to streams of its former life with a reset.
    pub fn power_on(&self, domain: DomainId) {
        if self.inner.state.borrow_mut().off.remove(&domain) {
            for stream in self.streams() {
                stream.host_back(domain);
            }
            self.tell();
        }
    }

    fn streams(&self) -> Vec<Rc<Stream>> {
        let mut state = self.inner.state.borrow_mut();
        state.streams.retain(|stream| stream.strong_count() > 0);
        state.streams.iter().filter_map(Weak::upgrade).collect()
    }

    fn tell(&self) {
        for stream in self.streams() {
            stream.look_again();
        }
        self.inner.changed.notify_all();
    }

    fn world(&self) -> &SimWorld {
        &self.inner.world
    }

    /// When something sent now arrives, if nothing holds it up.
    fn arrival_ns(&self, from: DomainId, to: DomainId) -> u64 {
        let config = &self.inner.config;
        let state = self.inner.state.borrow();
        let (min, max) =
            state.delays.get(&(from, to)).copied().unwrap_or((config.delay_min, config.delay_max));
        let spread_ns = max.saturating_sub(min).as_nanos() as u64;
        let delay_ns = min.as_nanos() as u64 + self.world().rng().below(spread_ns + 1);
        self.world().now_ns() + delay_ns
    }

    /// The same for so many bytes, which take their turn in a clogged link.
    fn arrival_of_ns(&self, from: DomainId, to: DomainId, len: usize) -> u64 {
        let (arrival_ns, now_ns) = (self.arrival_ns(from, to), self.world().now_ns());
        let mut state = self.inner.state.borrow_mut();
        let Some(clog) = state.clogs.get_mut(&(from, to)) else { return arrival_ns };
        let passing_ns = len as u64 * 1_000_000_000 / clog.bytes_per_second;
        clog.free_ns = clog.free_ns.max(now_ns) + passing_ns;
        arrival_ns + (clog.free_ns - now_ns)
    }

    /// Where to split a write of `len` bytes, if at all.
    fn split(&self, len: usize) -> Option<usize> {
        let rng = self.world().rng();
        let splits = len > 1 && rng.chance(self.inner.config.split_permille);
        splits.then(|| 1 + rng.below(len as u64 - 1) as usize)
    }

    /// Waits as long as the links between the two are cut, then for one message to pass.
    async fn pass(&self, from: DomainId, to: DomainId) {
        loop {
            while self.is_cut(from, to) {
                self.inner.changed.notified().await;
            }
            Sleep::until_true(self.arrival_ns(from, to)).await;
            if !self.is_cut(from, to) {
                return;
            }
        }
    }
}

/// One machine's network card. See `SimNet::host`.
#[derive(Clone, Debug)]
pub struct SimHost {
    net: SimNet,
    domain: DomainId,
}

impl SimHost {
    /// Accepts streams to `addr`, which no living listener may have.
    pub fn listen(&self, addr: &str) -> io::Result<SimListener> {
        let (incoming, accepted) = channel(BACKLOG_MAX);
        let mut state = self.net.inner.state.borrow_mut();
        if state.listeners.get(addr).is_some_and(|listening| listening.incoming.is_some()) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let listening = Listening { domain: self.domain, incoming: Some(incoming) };
        state.listeners.insert(addr.to_owned(), listening);
        Ok(SimListener { net: self.net.clone(), addr: addr.to_owned(), accepted })
    }

    /// The machine that listens, or once listened, at `addr`.
    fn resolve(&self, addr: &str) -> Option<DomainId> {
        self.net.inner.state.borrow().listeners.get(addr).map(|listening| listening.domain)
    }

    fn offer(&self, addr: &str, end: End) -> io::Result<()> {
        let state = self.net.inner.state.borrow();
        let listening = state.listeners.get(addr);
        let listening = listening.filter(|listening| !state.refusing.contains(&listening.domain));
        let incoming = listening.and_then(|listening| listening.incoming.clone());
        drop(state);
        let accepted = incoming.is_some_and(|incoming| incoming.try_send(end).is_ok());
        if accepted { Ok(()) } else { Err(io::ErrorKind::ConnectionRefused.into()) }
    }
}

impl Net for SimHost {
    type Reader = SimReader;
    type Writer = SimWriter;

    async fn connect(&self, addr: &str) -> io::Result<(SimReader, SimWriter)> {
        let Some(peer) = self.resolve(addr) else {
            self.net.pass(self.domain, self.domain).await;
            return Err(io::ErrorKind::ConnectionRefused.into());
        };
        self.net.pass(self.domain, peer).await;
        let (ours, theirs) = Stream::open(&self.net, self.domain, peer);
        let answer = self.offer(addr, theirs);
        self.net.pass(peer, self.domain).await;
        answer.map(|()| ours.split())
    }
}

/// See `SimHost::listen`. Dropping it frees the address.
#[derive(Debug)]
pub struct SimListener {
    net: SimNet,
    addr: String,
    accepted: Receiver<End>,
}

impl SimListener {
    /// The next stream.
    pub async fn accept(&mut self) -> (SimReader, SimWriter) {
        let end = self.accepted.recv().await;
        end.expect("the network holds the sender").split()
    }
}

impl Drop for SimListener {
    fn drop(&mut self) {
        let mut state = self.net.inner.state.borrow_mut();
        let listening = state.listeners.get_mut(&self.addr).expect("an address is remembered");
        let gone = listening.incoming.take();
        drop(state);
        drop(gone);
    }
}

#[cfg(test)]
mod tests;
