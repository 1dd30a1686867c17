//! Watches: one *feed* per shard, each an exchange that never ends by itself, joined into one queue
//! of what the user is to hear (G6).
//!
//! A feed knows its position: everything up to it is in the queue or was taken. Whatever breaks
//! (the connection, the node, its patience with us), the feed asks again from there, at another
//! node if need be. Invariants:
//! - Only answers to a feed's present attempt count; an earlier one is ended at its node.
//! - Items of a shard ascend in revision; one revision is one item.
//! - The queue is bounded: when the user does not take from it, the feeds end at their nodes and
//!   begin again when there is room. What the nodes do not remember by then is announced as a gap.

use std::collections::{BTreeMap, VecDeque};
use std::mem::size_of;
use std::time::Duration;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::EventKind;
use leasehold_protocol::ids::{RequestId, Revision, ShardId};
use leasehold_protocol::reply::{Holder, KeyInfo, Reply, Waiter};
use leasehold_protocol::request::Request;
use leasehold_protocol::shard::{check_key, check_key_bound};
use leasehold_protocol::watch::{
    Cursor, UnwatchRequest, WatchEnd, WatchEndReason, WatchEvent, WatchEvents, WatchFrom,
    WatchNotice, WatchRequest, WatchState,
};

use super::exchange::{Exchange, Owner, State};
use super::route::{InFlight, Lane};
use super::{ConnId, Core, Event, ExchangeId, Timer, WatchId};
use crate::clock::BootTime;
use crate::error::Failure;

/// Watches of one client.
pub(crate) const WATCHES_MAX: usize = 1024;
/// About how many bytes of items wait for the user before the feeds are ended.
const QUEUE_BYTES_MAX: usize = 4 * 1024 * 1024;
/// How long a watch may be without an answer from any node before its user hears `NoQuorum`.
const SILENT_MAX: Duration = Duration::from_secs(5);
/// How long a feed waits before it leaves a node that is not up to date for another.
const MOVE_PAUSE: Duration = Duration::from_millis(200);

/// What to watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) prefix: bool,
    pub(crate) key: Vec<u8>,
}

/// Where to begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    Now,
    State,
    Cursor(Cursor),
}

/// What the user of a watch hears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    Change { shard: ShardId, revision: Revision, events: Vec<WatchEvent> },
    State { shard: ShardId, revision: Revision, keys: Vec<KeyInfo>, first: bool, last: bool },
    Progress { shard: ShardId, revision: Revision },
    NoQuorum,
    Quorum,
}

impl Item {
    /// About what it costs to keep it.
    fn bytes(&self) -> usize {
        let carried = match self {
            Self::Change { events, .. } => events.iter().map(event_bytes).sum(),
            Self::State { keys, .. } => keys.iter().map(info_bytes).sum(),
            _ => 0,
        };
        size_of::<Self>() + carried
    }
}

fn event_bytes(event: &WatchEvent) -> usize {
    let changed = match &event.kind {
        EventKind::ValueChanged { value, .. } => value.len(),
        _ => 0,
    };
    let key = event.kind.key().map_or(0, <[u8]>::len);
    size_of::<WatchEvent>() + 64 + key + changed + event.value.len() + event.label.len()
}

fn info_bytes(info: &KeyInfo) -> usize {
    let holders = info.holders.iter().map(|holder| size_of::<Holder>() + holder.value.len());
    let waiters = info.waiters.len() * (size_of::<Waiter>() + 32);
    size_of::<KeyInfo>() + 64 + holders.sum::<usize>() + waiters
}

/// One shard of a watch.
#[derive(Debug)]
struct Feed {
    exchange: Option<ExchangeId>,
    /// What the next attempt asks for.
    from: WatchFrom,
    /// Events of a revision that goes on in the next frame, and of those before it.
    partial: Vec<WatchEvent>,
    /// Since when no attempt has had an answer; `None` from the present one's first answer on.
    silent_since: Option<BootTime>,
    /// The node, or the lack of one, said that what comes may be late.
    uncertain: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Watch {
    target: Target,
    feeds: BTreeMap<ShardId, Feed>,
    queue: VecDeque<Item>,
    queue_bytes: usize,
    /// The queue was full: the feeds rest.
    paused: bool,
    /// The user was told `NoQuorum` last.
    told_no_quorum: bool,
    failed: Option<Failure>,
}

impl Core {
    /// Begins a watch; `Event::Watched` tells when there is something to take.
    pub(crate) fn watch(
        &mut self,
        now: BootTime,
        target: Target,
        begin: &Begin,
    ) -> Result<WatchId, Failure> {
        self.tick(now);
        if self.watches.len() >= WATCHES_MAX {
            let text = format!("this client has {WATCHES_MAX} watches already");
            return Err(Failure::new(ErrorCode::WATCHES_FULL, text));
        }
        let shards = if target.prefix {
            check_key_bound(&target.key).map_err(Failure::of)?;
            (0..self.shards()).map(ShardId).collect()
        } else {
            check_key(&target.key).map_err(Failure::of)?;
            vec![self.shard_of(&target.key)?]
        };
        if shards.is_empty() {
            return Err(Failure::of(ErrorCode::UNREACHABLE));
        }
        let mut feeds = BTreeMap::new();
        for shard in shards {
            let from = self.first_from(shard, begin)?;
            let (exchange, partial) = (None, Vec::new());
            let silent_since = Some(self.now);
            feeds.insert(shard, Feed { exchange, from, partial, silent_since, uncertain: false });
        }
        let id = WatchId(self.fresh());
        let (queue, queue_bytes, failed) = (VecDeque::new(), 0, None);
        let (paused, told_no_quorum) = (false, false);
        self.watches.insert(
            id,
            Watch { target, feeds, queue, queue_bytes, paused, told_no_quorum, failed },
        );
        self.start_feeds(id);
        self.timers.set(Timer::Watch(id), self.now.after(SILENT_MAX));
        Ok(id)
    }

    /// The shards of a watch.
    pub(crate) fn watched_shards(&self, id: WatchId) -> Vec<ShardId> {
        self.watches.get(&id).map(|watch| watch.feeds.keys().copied().collect()).unwrap_or_default()
    }

    fn first_from(&self, shard: ShardId, begin: &Begin) -> Result<WatchFrom, Failure> {
        Ok(match begin {
            Begin::Now => WatchFrom::Now,
            Begin::State => WatchFrom::State,
            Begin::Cursor(cursor) => {
                let at = cursor.position(self.router.cluster, shard).map_err(Failure::of)?;
                self.position_after(shard, at)
            }
        })
    }

    fn position_after(&self, shard: ShardId, at: Revision) -> WatchFrom {
        WatchFrom::Cursor { cursor: Cursor::of(self.router.cluster, shard, at).encode() }
    }

    /// Ends a watch, at its nodes too.
    pub(crate) fn unwatch(&mut self, now: BootTime, id: WatchId) {
        self.tick(now);
        self.stop_feeds(id);
        self.watches.remove(&id);
        self.timers.cancel(Timer::Watch(id));
    }

    /// The next item; `None` until `Event::Watched`.
    pub(crate) fn take_item(
        &mut self,
        now: BootTime,
        id: WatchId,
    ) -> Option<Result<Item, Failure>> {
        self.tick(now);
        let watch = self.watches.get_mut(&id)?;
        let Some(item) = watch.queue.pop_front() else {
            return watch.failed.clone().map(Err);
        };
        watch.queue_bytes -= item.bytes();
        if watch.paused && watch.failed.is_none() && watch.queue_bytes < QUEUE_BYTES_MAX / 2 {
            watch.paused = false;
            self.start_feeds(id);
        }
        Some(Ok(item))
    }

    fn start_feeds(&mut self, id: WatchId) {
        let Some(watch) = self.watches.get(&id) else { return };
        let idle = watch.feeds.iter().filter(|(_, feed)| feed.exchange.is_none());
        let idle: Vec<ShardId> = idle.map(|(shard, _)| *shard).collect();
        for shard in idle {
            self.start_feed(id, shard);
        }
    }

    fn start_feed(&mut self, id: WatchId, shard: ShardId) {
        let owner = Owner::Watch(id, shard);
        // Any node serves it, and none is in a hurry for it.
        let exchange = Exchange::new(owner, None, Lane::Watch, BootTime::NEVER);
        let exchange = self.enter_exchange(exchange);
        let now = self.now;
        if let Some(feed) = self.feed_of(id, shard) {
            feed.exchange = Some(exchange);
            feed.silent_since.get_or_insert(now);
            feed.partial.clear();
        }
        self.begin_exchange(exchange);
    }

    fn feed_of(&mut self, id: WatchId, shard: ShardId) -> Option<&mut Feed> {
        self.watches.get_mut(&id)?.feeds.get_mut(&shard)
    }

    /// The connection of a feed's attempt broke.
    pub(super) fn feed_detached(&mut self, id: WatchId, shard: ShardId) {
        let now = self.now;
        if let Some(feed) = self.feed_of(id, shard) {
            feed.silent_since.get_or_insert(now);
            feed.partial.clear();
        }
    }

    fn stop_feeds(&mut self, id: WatchId) {
        let Some(watch) = self.watches.get_mut(&id) else { return };
        let feeds = watch.feeds.values_mut();
        // Nobody is asked from here on, so no silence counts.
        let stopped = feeds.map(|feed| (feed.silent_since.take(), feed.exchange.take()).1);
        let running: Vec<ExchangeId> = stopped.flatten().collect();
        for exchange in running {
            self.stop_feed(exchange);
        }
    }

    /// Forgets an attempt and ends it at its node.
    fn stop_feed(&mut self, exchange: ExchangeId) {
        let state = self.exchanges.get(&exchange).map(|exchange| exchange.state);
        self.kill(Some(exchange));
        if let Some(State::Sent(conn) | State::Queued(conn)) = state {
            self.unwatch_at(conn, exchange);
        }
    }

    /// Ends all attempts of an exchange on one connection.
    fn unwatch_at(&mut self, conn: ConnId, exchange: ExchangeId) {
        let Some(link) = self.router.conn(conn) else { return };
        if !link.is_ready() {
            return;
        }
        let ours = |what: &InFlight| matches!(what, InFlight::Exchange { exchange: other, .. } if *other == exchange);
        let ids = link.in_flight.iter().filter(|(_, what)| ours(what));
        let ids: Vec<RequestId> = ids.map(|(id, _)| *id).collect();
        for id in ids {
            let request = Request::Unwatch(UnwatchRequest { id });
            // If it takes no more, the node hears of it when the connection ends.
            let _ = self.put_out(conn, &request, InFlight::Probe);
        }
    }

    pub(super) fn build_watch(&self, id: WatchId, shard: ShardId) -> Option<Request> {
        let watch = self.watches.get(&id)?;
        let from = watch.feeds.get(&shard)?.from.clone();
        let Target { prefix, key } = watch.target.clone();
        Some(Request::Watch(WatchRequest { shard, prefix, key, from }))
    }

    /// An answer that is no error.
    pub(super) fn watch_told(
        &mut self,
        conn: ConnId,
        exchange: ExchangeId,
        sent_at: BootTime,
        reply: Reply,
    ) {
        let Some(found) = self.exchanges.get_mut(&exchange) else { return };
        let Owner::Watch(id, shard) = *found.owner() else { return };
        if !found.is_present(conn, sent_at) {
            // An attempt that was given up has come to life.
            if !matches!(reply, Reply::WatchEnd(_)) {
                self.end_earlier(conn, exchange, sent_at);
            }
            return;
        }
        found.settle_in(conn);
        self.timers.cancel(Timer::Exchange(exchange));
        if let Some(feed) = self.feed_of(id, shard) {
            feed.silent_since = None;
        }
        match reply {
            Reply::WatchEvents(events) => self.take_events(id, shard, events),
            Reply::WatchState(state) => self.take_state(id, shard, state),
            Reply::WatchNotice(notice) => self.take_notice(id, shard, conn, notice),
            Reply::WatchEnd(end) => self.take_end(id, shard, conn, end),
            _ => {
                let text = "the reply does not fit a watch";
                self.watch_failed(id, Failure::new(ErrorCode::MALFORMED, text));
            }
        }
        self.pause_if_full(id);
    }

    fn end_earlier(&mut self, conn: ConnId, exchange: ExchangeId, sent_at: BootTime) {
        let Some(link) = self.router.conn(conn) else { return };
        let earlier = InFlight::Exchange { exchange, sent_at };
        let found = link.in_flight.iter().find(|(_, what)| **what == earlier);
        let Some(id) = found.map(|(id, _)| *id) else { return };
        let request = Request::Unwatch(UnwatchRequest { id });
        let _ = self.put_out(conn, &request, InFlight::Probe);
    }

    fn take_events(&mut self, id: WatchId, shard: ShardId, told: WatchEvents) {
        let from = self.position_after(shard, told.revision);
        let Some(feed) = self.feed_of(id, shard) else { return };
        feed.partial.extend(told.events);
        if told.more {
            return;
        }
        let events = std::mem::take(&mut feed.partial);
        feed.from = from;
        let last = events.last().map(|event| event.revision);
        for change in by_revision(events) {
            let revision = change[0].revision;
            self.push_item(id, Item::Change { shard, revision, events: change });
        }
        if last != Some(told.revision) {
            self.push_item(id, Item::Progress { shard, revision: told.revision });
        }
    }

    fn take_state(&mut self, id: WatchId, shard: ShardId, state: WatchState) {
        let WatchState { revision, first, keys, more, .. } = state;
        let cursor = Cursor::of(self.router.cluster, shard, revision).encode();
        let Some(feed) = self.feed_of(id, shard) else { return };
        feed.from = match keys.last() {
            Some(last) if more => WatchFrom::Page { cursor, after: last.key.clone().into_bytes() },
            _ => WatchFrom::Cursor { cursor },
        };
        self.push_item(id, Item::State { shard, revision, keys, first, last: !more });
    }

    fn take_notice(&mut self, id: WatchId, shard: ShardId, conn: ConnId, notice: WatchNotice) {
        let Some(feed) = self.feed_of(id, shard) else { return };
        feed.uncertain = !notice.quorum;
        if !notice.quorum
            && let Some(exchange) = feed.exchange.take()
        {
            self.stop_feed(exchange);
            self.rest_feed(id, shard, conn);
        }
        self.tell_quorum(id);
    }

    /// Begins again a little later, at another node if there is one.
    fn rest_feed(&mut self, id: WatchId, shard: ShardId, conn: ConnId) {
        let avoid = self.router.target_of(conn);
        let owner = Owner::Watch(id, shard);
        let exchange = Exchange::new(owner, None, Lane::Watch, BootTime::NEVER).avoiding(avoid);
        let exchange = self.enter_exchange(exchange);
        let now = self.now;
        if let Some(feed) = self.feed_of(id, shard) {
            feed.exchange = Some(exchange);
            feed.silent_since.get_or_insert(now);
            feed.partial.clear();
        }
        self.set_state(exchange, State::Resting, self.now.after(MOVE_PAUSE));
    }

    fn take_end(&mut self, id: WatchId, shard: ShardId, conn: ConnId, end: WatchEnd) {
        let Some(exchange) = self.feed_of(id, shard).and_then(|feed| feed.exchange.take()) else {
            return;
        };
        self.kill(Some(exchange));
        match end.reason {
            WatchEndReason::Continue => self.start_feed(id, shard),
            // Everything that was told has been read by now.
            WatchEndReason::TooSlow | WatchEndReason::Cancelled => {
                self.rest_feed(id, shard, conn);
            }
        }
    }

    /// The exchange of a feed ended: only with an error that another attempt would meet again.
    pub(super) fn watch_answered(
        &mut self,
        id: WatchId,
        shard: ShardId,
        result: Result<Reply, Failure>,
    ) {
        if let Some(feed) = self.feed_of(id, shard) {
            feed.exchange = None;
        }
        if let Err(failure) = result {
            self.watch_failed(id, failure);
        }
    }

    fn watch_failed(&mut self, id: WatchId, failure: Failure) {
        self.stop_feeds(id);
        if let Some(watch) = self.watches.get_mut(&id) {
            watch.failed = Some(failure);
            self.events.push_back(Event::Watched { watch: id });
        }
    }

    fn push_item(&mut self, id: WatchId, item: Item) {
        let Some(watch) = self.watches.get_mut(&id) else { return };
        // A position replaces one that nobody has seen yet.
        if let (Item::Progress { shard, .. }, Some(Item::Progress { shard: other, .. })) =
            (&item, watch.queue.back())
            && shard == other
        {
            watch.queue.pop_back();
            watch.queue_bytes -= item.bytes();
        }
        watch.queue_bytes += item.bytes();
        watch.queue.push_back(item);
        self.events.push_back(Event::Watched { watch: id });
    }

    fn pause_if_full(&mut self, id: WatchId) {
        let Some(watch) = self.watches.get_mut(&id) else { return };
        if !watch.paused && watch.queue_bytes > QUEUE_BYTES_MAX {
            watch.paused = true;
            self.stop_feeds(id);
        }
    }

    fn tell_quorum(&mut self, id: WatchId) {
        let Some(watch) = self.watches.get_mut(&id) else { return };
        let uncertain = watch.feeds.values().any(|feed| feed.uncertain);
        if std::mem::replace(&mut watch.told_no_quorum, uncertain) != uncertain {
            self.push_item(id, if uncertain { Item::NoQuorum } else { Item::Quorum });
        }
    }

    /// A watch that no node has answered for a while is as uncertain as one whose node is.
    pub(super) fn watch_due(&mut self, id: WatchId) {
        let mut next = self.now.after(SILENT_MAX);
        let Some(watch) = self.watches.get_mut(&id) else { return };
        for feed in watch.feeds.values_mut() {
            let Some(end) = feed.silent_since.map(|since| since.after(SILENT_MAX)) else {
                continue;
            };
            if end <= self.now {
                feed.uncertain = true;
            } else {
                next = next.min(end);
            }
        }
        self.tell_quorum(id);
        self.timers.set(Timer::Watch(id), next);
    }
}

/// Splits events, which ascend, at their revisions.
fn by_revision(events: Vec<WatchEvent>) -> Vec<Vec<WatchEvent>> {
    let mut changes: Vec<Vec<WatchEvent>> = Vec::new();
    for event in events {
        match changes.last_mut() {
            Some(change) if change[0].revision == event.revision => change.push(event),
            _ => changes.push(vec![event]),
        }
    }
    changes
}
