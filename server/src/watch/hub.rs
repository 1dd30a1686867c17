//! The watches of a shard, and what waits to be told to each.
//!
//! `applied` only appends to the history and to the lists of the watches that match; `turn` sends,
//! a bounded slice at a time, so that neither many watches nor much to catch up holds the core.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use leasehold_core::State;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::{NodeId, Revision, ShardId};
use leasehold_protocol::limits::WATCHES_MAX;
use leasehold_protocol::planted;
use leasehold_protocol::reply::{KeyInfo, Reply};
use leasehold_protocol::watch::{WatchEnd, WatchEndReason, WatchEvents, WatchNotice, WatchState};

use super::history::History;
use super::index::{Index, Target};
use super::labels::{Labels, lease_of};
use super::sizes::Sizes;
use super::told::Told;
use super::views::Views;
use crate::env::MonoTime;
use crate::net::ReplyTo;

/// Watches that are sent to in one turn.
const SENDS_PER_TURN: usize = 64;
/// Ticks after which an idle watch is told the position again.
const PROGRESS_TICKS: u64 = 8;

/// Names a watch within its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WatchName {
    /// The core of its connection.
    pub core: usize,
    /// That core's name for it.
    pub id: u64,
}

/// Where a watch begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// At what is applied.
    Now,
    /// With the state.
    State,
    /// After a revision, which may not be applied yet.
    After(Revision),
    /// With the page after this key, of the state at this revision.
    Page(Revision, Vec<u8>),
}

struct Watch {
    to: ReplyTo,
    target: Target,
    /// Not begun yet: it is not in the index, and what happens is in the history for it.
    start: Option<Start>,
    /// The position that was told, or from which it watches.
    sent: Revision,
    pending: Vec<Rc<Told>>,
    pending_bytes: usize,
    /// More came than may wait.
    behind: bool,
    /// It is in the queue of those that are sent to.
    queued: bool,
    /// The notice that it got last.
    told: Option<bool>,
}

/// See the module.
pub struct Hub {
    shard: ShardId,
    sizes: Sizes,
    history: History,
    labels: Labels,
    index: Index,
    views: Views,
    watches: BTreeMap<WatchName, Watch>,
    queue: VecDeque<WatchName>,
    /// Whether this node is up to date, once that was found out.
    quorum: Option<bool>,
}

impl Hub {
    /// Of a state that has just been opened.
    pub fn new(state: &State, sizes: Sizes) -> Self {
        Self {
            shard: state.shard(),
            sizes,
            history: History::new(sizes.history, state.revision()),
            labels: Labels::of(state),
            index: Index::default(),
            views: Views::default(),
            watches: BTreeMap::new(),
            queue: VecDeque::new(),
            quorum: None,
        }
    }

    /// Watches now.
    pub fn len(&self) -> usize {
        self.watches.len()
    }

    /// Nobody watches.
    pub fn is_empty(&self) -> bool {
        self.watches.is_empty()
    }

    /// Nobody watches, and nobody is between two pages of a state.
    pub fn is_quiet(&self) -> bool {
        self.watches.is_empty() && self.views.is_empty()
    }

    /// Past events at hand, and their bytes.
    pub fn history_len(&self) -> (usize, usize) {
        (self.history.len(), self.history.bytes())
    }

    /// Takes the events of one step of the log. True if somebody is to be told.
    pub fn applied(&mut self, state: &State, events: &[Event]) -> bool {
        self.labels.opened(state, events);
        let before = self.queue.len();
        for event in events {
            let Some(key) = event.kind.key() else { continue };
            let label = lease_of(&event.kind).and_then(|lease| self.labels.get(lease));
            let value = match event.kind {
                EventKind::Granted { lease, token, .. } => state.held_value(key, lease, token),
                _ => None,
            };
            let (revision, kind) = (event.revision, event.kind.clone());
            let told = Rc::new(Told { revision, kind, label, value });
            if !self.index.is_empty() {
                self.tell(key, &told);
            }
            self.history.push(told);
        }
        self.labels.ended(events);
        self.history.advance(state.revision());
        self.queue.len() > before
    }

    fn tell(&mut self, key: &[u8], event: &Rc<Told>) {
        for name in self.index.matching(key) {
            let watch = self.watches.get_mut(&name).expect("the index knows live watches");
            if event.revision <= watch.sent || watch.behind {
                continue;
            }
            watch.pending_bytes += event.cost();
            if watch.pending_bytes > self.sizes.pending {
                watch.behind = true;
                watch.pending = Vec::new();
            } else {
                watch.pending.push(Rc::clone(event));
            }
            if !std::mem::replace(&mut watch.queued, true) {
                self.queue.push_back(name);
            }
        }
    }

    /// A snapshot replaced the state: what happened meanwhile is in no event. Watches whose
    /// position it passed end, and begin again with a state.
    pub fn installed(&mut self, state: &State) {
        self.labels = Labels::of(state);
        self.views.clear();
        self.history.reset(state.revision());
        for (name, watch) in &mut self.watches {
            // Planted (G6): what a snapshot passed over is in no event, and nobody is told.
            let told = !planted!("gap-untold-after-a-snapshot");
            if watch.start.is_none() && watch.sent < state.revision() && told {
                watch.behind = true;
                watch.pending = Vec::new();
                if !std::mem::replace(&mut watch.queued, true) {
                    self.queue.push_back(*name);
                }
            }
        }
    }

    /// Takes a watch; what it is told first is said in a later turn.
    pub fn open(
        &mut self,
        name: WatchName,
        target: Target,
        start: Start,
        to: ReplyTo,
    ) -> Result<(), ErrorCode> {
        if self.watches.len() >= WATCHES_MAX {
            return Err(ErrorCode::WATCHES_FULL);
        }
        let watch = Watch {
            to,
            target,
            start: Some(start),
            sent: Revision(0),
            pending: Vec::new(),
            pending_bytes: 0,
            behind: false,
            queued: true,
            told: None,
        };
        let replaced = self.watches.insert(name, watch);
        assert!(replaced.is_none(), "a watch's name is its own");
        self.queue.push_back(name);
        Ok(())
    }

    /// It has not ended.
    pub fn has(&self, name: WatchName) -> bool {
        self.watches.contains_key(&name)
    }

    /// What is applied here.
    pub fn head(&self) -> Revision {
        self.history.head()
    }

    /// Ends a watch, if it is still there, because its client does not want it any more.
    pub fn close(&mut self, name: WatchName) {
        self.end(name, WatchEndReason::Cancelled);
    }

    /// Ends a watch, if it is still there, with an error.
    pub fn refuse(&mut self, name: WatchName, code: ErrorCode) {
        if let Some(watch) = self.take(name) {
            watch.to.error(code, NodeId(0));
        }
    }

    fn end(&mut self, name: WatchName, reason: WatchEndReason) {
        if let Some(watch) = self.take(name) {
            watch.to.send(&Reply::WatchEnd(WatchEnd { shard: self.shard, reason }));
        }
    }

    fn take(&mut self, name: WatchName) -> Option<Watch> {
        let watch = self.watches.remove(&name)?;
        if watch.start.is_none() {
            self.index.remove(&watch.target, name);
        }
        if self.watches.is_empty() {
            self.quorum = None;
            self.queue.clear();
        }
        Some(watch)
    }

    /// This node knows that it is up to date, or that it cannot know: everybody is told.
    pub fn set_quorum(&mut self, quorum: bool) {
        if self.quorum == Some(quorum) || self.watches.is_empty() {
            return;
        }
        self.quorum = Some(quorum);
        self.queue_all(|_, watch| watch.told != Some(quorum));
    }

    /// Time passes: idle watches are told the position, a few at each tick; old views go.
    pub fn tick(&mut self, tick: u64, now: MonoTime) {
        self.views.sweep(now);
        let head = self.history.head();
        let turn = tick % PROGRESS_TICKS;
        self.queue_all(|name, watch| name.id % PROGRESS_TICKS == turn && watch.sent < head);
    }

    fn queue_all(&mut self, wanted: impl Fn(&WatchName, &Watch) -> bool) {
        for (name, watch) in &mut self.watches {
            if !watch.queued && wanted(name, watch) {
                watch.queued = true;
                self.queue.push_back(*name);
            }
        }
    }

    /// Tells what waits, as much as fits one turn; true if more does.
    pub fn turn(&mut self, state: &State, now: MonoTime) -> bool {
        for _ in 0..SENDS_PER_TURN {
            let Some(name) = self.queue.pop_front() else { return false };
            // It may have ended meanwhile.
            let Some(watch) = self.watches.get_mut(&name) else { continue };
            watch.queued = false;
            if let Some(start) = watch.start.take() {
                self.begin(name, start, state, now);
                // It may have walked much of the history: others first.
                return !self.queue.is_empty();
            }
            self.send_pending(name);
        }
        !self.queue.is_empty()
    }

    fn send_pending(&mut self, name: WatchName) {
        let (head, quorum) = (self.history.head(), self.quorum);
        let (shard, sizes) = (self.shard, self.sizes);
        let watch = self.watches.get_mut(&name).expect("the caller looked it up");
        if watch.behind {
            return self.end(name, WatchEndReason::Continue);
        }
        let pending = std::mem::take(&mut watch.pending);
        watch.pending_bytes = 0;
        let mut taken = true;
        if head > watch.sent {
            taken = send_events(shard, sizes, &watch.to, (&pending, head));
            watch.sent = head;
        }
        if taken && quorum.is_some() && watch.told != quorum {
            watch.told = quorum;
            let notice = WatchNotice { shard, quorum: quorum == Some(true) };
            taken = watch.to.offer(&Reply::WatchNotice(notice));
        }
        if !taken {
            self.end(name, WatchEndReason::TooSlow);
        }
    }

    /// A watch's first answer.
    fn begin(&mut self, name: WatchName, start: Start, state: &State, now: MonoTime) {
        match start {
            Start::Now => self.begin_after(name, self.history.head(), state, now),
            Start::After(revision) => self.begin_after(name, revision, state, now),
            Start::State => self.begin_state(name, Revision(0), state, now),
            Start::Page(revision, after) => match self.views.at(revision, now) {
                // Planted (G6): each page is of the state at its own moment.
                Some(_) if planted!("pages-of-two-moments") => {
                    self.send_page(name, state, &after, now);
                }
                Some(view) => self.send_page(name, &view, &after, now),
                // The state from here would take back what another node told.
                None if revision > self.history.head() => self.refuse_unbegun(name),
                None => self.begin_state(name, revision, state, now),
            },
        }
    }

    fn begin_after(&mut self, name: WatchName, revision: Revision, state: &State, now: MonoTime) {
        let watch = self.watches.get_mut(&name).expect("the caller looked it up");
        let head = self.history.head();
        if revision > head {
            // This node is behind the one that told the position: it goes on from there.
            watch.sent = revision;
            self.index.insert(&watch.target, name);
            return self.queue_again(name);
        }
        if revision < self.history.floor() {
            return self.begin_state(name, revision, state, now);
        }
        let (mut found, mut bytes, mut position) = (Vec::new(), 0, head);
        for event in self.history.after(revision) {
            if !event.kind.key().is_some_and(|key| watch.target.matches(key)) {
                continue;
            }
            if bytes > self.sizes.replay
                && let Some(last) = found.last().map(|last: &Rc<Told>| last.revision)
                && (last < event.revision || planted!("answer-ends-within-a-revision"))
            {
                position = if planted!("position-ahead-of-what-was-told") { head } else { last };
                break;
            }
            bytes += event.cost();
            found.push(Rc::clone(event));
        }
        if !send_events(self.shard, self.sizes, &watch.to, (&found, position)) {
            return self.drop_unbegun(name, WatchEndReason::TooSlow);
        }
        if position < head {
            return self.drop_unbegun(name, WatchEndReason::Continue);
        }
        watch.sent = head;
        self.index.insert(&watch.target, name);
        self.queue_again(name);
    }

    /// It is live: a notice may be due.
    fn queue_again(&mut self, name: WatchName) {
        let watch = self.watches.get_mut(&name).expect("it has just begun");
        if self.quorum.is_some() && !std::mem::replace(&mut watch.queued, true) {
            self.queue.push_back(name);
        }
    }

    /// Ends a watch that is not in the index.
    fn drop_unbegun(&mut self, name: WatchName, reason: WatchEndReason) {
        let watch = self.watches.get_mut(&name).expect("the caller looked it up");
        watch.start = Some(Start::Now);
        self.end(name, reason);
    }

    /// Another node may serve it, and so may this one later.
    fn refuse_unbegun(&mut self, name: WatchName) {
        let watch = self.watches.get_mut(&name).expect("the caller looked it up");
        watch.start = Some(Start::Now);
        self.refuse(name, ErrorCode::NOT_READY);
    }

    /// With a state that is not older than `told`.
    fn begin_state(&mut self, name: WatchName, told: Revision, state: &State, now: MonoTime) {
        let watch = self.watches.get_mut(&name).expect("the caller looked it up");
        let (keys, more) = page(state, &watch.target, &[], self.sizes);
        let (keys, more, revision) = if more {
            let view = self.views.begin(state, self.history.floor().max(told), now);
            let (keys, more) = page(&view, &watch.target, &[], self.sizes);
            (keys, more, view.revision())
        } else {
            (keys, more, state.revision())
        };
        let page = WatchState { shard: self.shard, revision, first: true, keys, more };
        self.sent_page(name, page, state, now);
    }

    fn send_page(&mut self, name: WatchName, view: &State, after: &[u8], now: MonoTime) {
        let watch = self.watches.get_mut(&name).expect("the caller looked it up");
        let (keys, more) = page(view, &watch.target, after, self.sizes);
        let revision = view.revision();
        let page = WatchState { shard: self.shard, revision, first: false, keys, more };
        self.sent_page(name, page, view, now);
    }

    /// After the last page the events above it follow; before, the client asks for the next one.
    fn sent_page(&mut self, name: WatchName, page: WatchState, state: &State, now: MonoTime) {
        let watch = self.watches.get_mut(&name).expect("the caller looked it up");
        let (more, revision) = (page.more, page.revision);
        if !watch.to.offer(&Reply::WatchState(page)) {
            return self.drop_unbegun(name, WatchEndReason::TooSlow);
        }
        // A page of a view that the history left behind: asked again, a new state follows.
        if more || revision < self.history.floor() {
            return self.drop_unbegun(name, WatchEndReason::Continue);
        }
        self.begin_after(name, revision, state, now);
    }
}

/// A page of what is watched, after a key.
fn page(state: &State, target: &Target, after: &[u8], sizes: Sizes) -> (Vec<KeyInfo>, bool) {
    match target {
        Target::Prefix(prefix) => state.list(prefix, after, sizes.page),
        Target::Key(key) => {
            let info = state.key_info(key);
            let used =
                !info.holders.is_empty() || info.waiters_total > 0 || !info.delays.is_empty();
            (if used { vec![info] } else { Vec::new() }, false)
        }
    }
}

/// Sends events in frames that end with a revision where they can; the last one brings the
/// position `end`. False if the connection does not take them.
fn send_events(
    shard: ShardId,
    sizes: Sizes,
    to: &ReplyTo,
    (events, end): (&[Rc<Told>], Revision),
) -> bool {
    let mut rest = events;
    // Planted (G6): the position comes before the events that it covers.
    if planted!("progress-ahead") && !events.is_empty() {
        let mark = WatchEvents { shard, revision: end, events: Vec::new(), more: false };
        to.offer(&Reply::WatchEvents(mark));
    }
    loop {
        let mut bytes = 0;
        let fits = |event: &&Rc<Told>| {
            let fits = bytes < sizes.frame;
            bytes += event.cost();
            fits
        };
        let count = rest.iter().take_while(fits).count();
        let count = whole_revisions(rest, count);
        let (now, later) = rest.split_at(count);
        let (revision, more) = match (now.last(), later.first()) {
            (Some(last), Some(next)) if last.revision == next.revision => {
                (Revision(last.revision.0 - 1), true)
            }
            (Some(last), Some(_)) => (last.revision, false),
            _ => (end, false),
        };
        let events = now.iter().map(|event| event.to_wire()).collect();
        let frame = WatchEvents { shard, revision, events, more };
        if !to.offer(&Reply::WatchEvents(frame)) {
            return false;
        }
        rest = later;
        if rest.is_empty() {
            return true;
        }
    }
}

/// Of the first `count` events, those before a revision that goes on after them, unless it is all
/// of them.
fn whole_revisions(events: &[Rc<Told>], count: usize) -> usize {
    let Some(next) = events.get(count) else { return count };
    match events[..count].partition_point(|event| event.revision < next.revision) {
        0 => count,
        whole => whole,
    }
}

#[cfg(test)]
mod tests;
