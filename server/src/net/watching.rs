//! The watches of a connection, and their way to the shards.
//!
//! A watch's answers go through a sink of its own, which is shut when the watch ends: whatever is
//! still on its way is dropped, so that it cannot meet a later request of the same id. When the
//! connection ends, so do its watches, at their shards too.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{NodeId, ShardId};
use leasehold_protocol::limits::{CONNECTION_WATCHES_MAX, WATCH_OUTPUT_MAX};
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;
use leasehold_protocol::shard::{check_key, check_key_bound, shard_of};
use leasehold_protocol::watch::{
    Cursor, UnwatchRequest, WatchEnd, WatchEndReason, WatchFrom, WatchRequest,
};

use super::connection::Connection;
use super::reply::{ReplySink, ReplyTo};
use super::router::{Hop, Router};
use crate::env::Env;
use crate::shard::Origin;
use crate::watch::{Start, Target, WatchName};

/// A connection's watches by their requests' ids.
#[derive(Default)]
pub(super) struct Watching(RefCell<BTreeMap<u64, Watched>>);

struct Watched {
    sink: Rc<WatchSink>,
    shard: ShardId,
    /// `None` until the router took it.
    name: Option<WatchName>,
}

/// Takes what a watch is told.
struct WatchSink {
    connection: Rc<Connection>,
    open: Cell<bool>,
}

impl ReplySink for WatchSink {
    fn reply(&self, id: u64, reply: &Reply) {
        if !self.open.get() {
            return;
        }
        if reply.is_final() {
            self.open.set(false);
            self.connection.watching.0.borrow_mut().remove(&id);
        }
        self.connection.reply(id, reply);
    }

    fn offer(&self, id: u64, reply: &Reply) -> bool {
        let fits = self.connection.conn.borrow().output_len() < WATCH_OUTPUT_MAX;
        if fits {
            self.reply(id, reply);
        }
        fits
    }
}

impl Connection {
    pub(super) fn watch(self: &Rc<Self>, id: u64, request: WatchRequest) {
        let sink = Rc::new(WatchSink { connection: Rc::clone(self), open: Cell::new(true) });
        let to = ReplyTo::new(Rc::clone(&sink) as Rc<dyn ReplySink>, id);
        let shard = request.shard;
        let mut watches = self.watching.0.borrow_mut();
        if watches.len() >= CONNECTION_WATCHES_MAX {
            drop(watches);
            return to.error(ErrorCode::WATCHES_FULL, NodeId(0));
        }
        watches.insert(id, Watched { sink, shard, name: None });
        drop(watches);
        let name = self.front.watch(request, to);
        // If it was refused, the answer has taken it out.
        if let Some(watched) = self.watching.0.borrow_mut().get_mut(&id) {
            watched.name = name;
        }
    }

    pub(super) fn unwatch(self: &Rc<Self>, id: u64, request: UnwatchRequest) {
        let watched = self.watching.0.borrow_mut().remove(&request.id.0);
        if let Some(watched) = watched {
            let end = WatchEnd { shard: watched.shard, reason: WatchEndReason::Cancelled };
            self.forget(&watched);
            self.reply(request.id.0, &Reply::WatchEnd(end));
        }
        self.reply(id, &Reply::Unwatched);
    }

    /// Ends all watches: the connection is over.
    pub(super) fn unwatch_all(&self) {
        let watches = self.watching.0.take();
        watches.values().for_each(|watched| self.forget(watched));
    }

    fn forget(&self, watched: &Watched) {
        watched.sink.open.set(false);
        if let Some(name) = watched.name {
            self.front.unwatch(watched.shard, name);
        }
    }
}

impl<E: Env> Router<E> {
    /// Takes a watch of a connection of this core.
    pub fn watch(&self, request: WatchRequest, to: ReplyTo) -> Option<WatchName> {
        if request.shard.0 >= self.shards_total() {
            to.error(ErrorCode::WRONG_SHARD, NodeId(0));
            return None;
        }
        let name = WatchName { core: self.core(), id: self.next_hop.get() };
        if self.shards.contains_key(&request.shard) {
            self.next_hop.set(name.id + 1);
            self.open_watch(name, request, to);
        } else {
            let core = request.shard.0 as usize % self.cores();
            self.hop(core, Request::Watch(request), to, Origin::Client);
        }
        Some(name)
    }

    /// Ends a watch of a connection of this core.
    pub fn unwatch(&self, shard: ShardId, name: WatchName) {
        match self.shards.get(&shard) {
            Some(shard) => shard.unwatch(name),
            None => self.unwatch_elsewhere(shard, name),
        }
    }

    fn unwatch_elsewhere(&self, shard: ShardId, name: WatchName) {
        let core = shard.0 as usize % self.cores();
        self.hopped.borrow_mut().remove(&name.id);
        self.lanes.send_in_order::<E>(core, Hop::Unwatch { shard, name });
    }

    /// Opens a watch of a shard that lives here, whatever core its connection is on.
    pub(super) fn open_watch(&self, name: WatchName, request: WatchRequest, to: ReplyTo) {
        let Some(shard) = self.shards.get(&request.shard) else {
            return to.error(ErrorCode::WRONG_SHARD, NodeId(0));
        };
        match self.understand(request) {
            Ok((target, start)) => shard.watch(name, target, start, to),
            Err(code) => to.error(code, NodeId(0)),
        }
    }

    fn understand(&self, request: WatchRequest) -> Result<(Target, Start), ErrorCode> {
        let target = if request.prefix {
            check_key_bound(&request.key)?;
            Target::Prefix(request.key)
        } else {
            check_key(&request.key)?;
            if shard_of(&request.key, self.shards_total()) != request.shard {
                return Err(ErrorCode::WRONG_SHARD);
            }
            Target::Key(request.key)
        };
        let position =
            |bytes: &[u8]| Cursor::decode(bytes)?.position(self.cluster(), request.shard);
        let start = match request.from {
            WatchFrom::Now => Start::Now,
            WatchFrom::State => Start::State,
            WatchFrom::Cursor { cursor } => Start::After(position(&cursor)?),
            WatchFrom::Page { cursor, after } => {
                if !target.matches(&after) {
                    return Err(ErrorCode::PAGE_OF_OTHER_QUERY);
                }
                Start::Page(position(&cursor)?, after)
            }
        };
        Ok((target, start))
    }

    /// Hands another core's answer to the connection that waits for it.
    pub(super) fn pass_on(&self, id: u64, reply: &Reply) {
        let to = self.hopped.borrow().get(&id).cloned();
        let Some(to) = to else { return };
        let shard = match reply {
            Reply::WatchEvents(told) => told.shard,
            Reply::WatchState(told) => told.shard,
            Reply::WatchNotice(told) => told.shard,
            reply => {
                if reply.is_final() {
                    self.hopped.borrow_mut().remove(&id);
                }
                return to.send(reply);
            }
        };
        if !to.offer(reply) {
            let end = WatchEnd { shard, reason: WatchEndReason::TooSlow };
            to.send(&Reply::WatchEnd(end));
            self.unwatch_elsewhere(shard, WatchName { core: self.core(), id });
        }
    }
}
