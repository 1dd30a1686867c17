//! What one watcher was told of one shard, as the checker of G6 takes it, and where it goes on.
//!
//! Survives the client's process: whatever was told was told. A *life* is what was told without a
//! gap, through any number of connections, nodes and cursors.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use leasehold_bench::check::watch::{WatchItem, Watched};
use leasehold_protocol::error::{ErrorClass, ErrorCode};
use leasehold_protocol::ids::{Revision, ShardId};
use leasehold_protocol::reply::Reply;
use leasehold_protocol::shard::shard_of;
use leasehold_protocol::watch::{
    Cursor, WatchEndReason, WatchEvent, WatchEvents, WatchFrom, WatchRequest, WatchState,
};
use leasehold_server::rt::sim::SimRng;

use crate::coverage::Seen;
use crate::node::CLUSTER;
use crate::params::Params;
use crate::witness::Witness;

/// What a watcher does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Waits for more.
    On,
    /// Asks again.
    Again,
    /// May go to another node: this one does not know that it is up to date.
    Doubt,
    /// This node does not take it now.
    Elsewhere,
}

/// See the module.
pub(crate) struct Feed {
    name: String,
    prefix: bool,
    key: Vec<u8>,
    pub(crate) shard: ShardId,
    from: RefCell<WatchFrom>,
    /// Events of a revision that goes on in the next frame.
    partial: RefCell<Vec<WatchEvent>>,
    lives: RefCell<Vec<Watched>>,
    position: Cell<Option<Revision>>,
    /// Nothing came yet since it asked.
    fresh: Cell<bool>,
    witness: Rc<Witness>,
}

impl Feed {
    /// Of a client: over one key, some of them, or all.
    pub(crate) fn draw(
        rng: &SimRng,
        params: &Params,
        witness: &Rc<Witness>,
        client: u64,
    ) -> Rc<Self> {
        let any_key = format!("key/{}", rng.below(params.keys));
        let (prefix, key) = match rng.below(10) {
            0..3 => (true, String::new()),
            3..5 => (true, "key/".to_owned()),
            5 => (true, "m/".to_owned()),
            6 => (true, any_key),
            7..9 => (false, any_key),
            _ => (false, ["m/doc", "m/pool", "m/{all}/b"][rng.below(3) as usize].to_owned()),
        };
        let shard = if prefix {
            ShardId(rng.below(u64::from(params.shards)) as u32)
        } else {
            shard_of(key.as_bytes(), params.shards)
        };
        let feed = Self {
            name: format!("client {client}'s watch of {key:?}{}", if prefix { "…" } else { "" }),
            prefix,
            key: key.into_bytes(),
            shard,
            from: RefCell::new(WatchFrom::Now),
            partial: RefCell::default(),
            lives: RefCell::default(),
            position: Cell::new(None),
            fresh: Cell::new(true),
            witness: witness.clone(),
        };
        feed.begin_anew(rng);
        Rc::new(feed)
    }

    /// Another life: from now on, with the state, or from a position of a former life.
    pub(crate) fn begin_anew(&self, rng: &SimRng) {
        let mut after = BTreeMap::new();
        let from = match rng.below(3) {
            0 => WatchFrom::Now,
            1 => WatchFrom::State,
            _ => match self.former_position(rng) {
                Some(position) => {
                    after.insert(self.shard, position);
                    self.after(position)
                }
                None => WatchFrom::State,
            },
        };
        self.position.set(after.get(&self.shard).copied());
        self.from.replace(from);
        self.lives.borrow_mut().push(Watched {
            name: self.name.clone(),
            prefix: self.prefix,
            key: self.key.clone(),
            after,
            items: vec![],
        });
    }

    /// A position that some life once had.
    fn former_position(&self, rng: &SimRng) -> Option<Revision> {
        let lives = self.lives.borrow();
        let told = lives.iter().flat_map(|life| &life.items).filter_map(|item| match item {
            WatchItem::Progress { revision, .. } => Some(*revision),
            _ => None,
        });
        let told: Vec<_> = told.collect();
        (!told.is_empty()).then(|| told[rng.below(told.len() as u64) as usize])
    }

    fn after(&self, position: Revision) -> WatchFrom {
        WatchFrom::Cursor { cursor: self.cursor(position) }
    }

    fn cursor(&self, position: Revision) -> Vec<u8> {
        Cursor::of(CLUSTER, self.shard, position).encode()
    }

    /// For messages: what it watches and how far it is.
    pub(crate) fn at(&self) -> String {
        let (shard, position) = (self.shard, self.position.get());
        format!("{} in shard {shard}, at {position:?}", self.name)
    }

    /// It was told everything up to this revision.
    pub(crate) fn reached(&self, revision: u64) -> bool {
        self.position.get().is_some_and(|position| position.0 >= revision)
    }

    /// What was told, one record a life.
    pub(crate) fn lives(&self) -> Vec<Watched> {
        self.lives.borrow().clone()
    }

    /// What to ask next.
    pub(crate) fn ask(&self) -> WatchRequest {
        self.partial.borrow_mut().clear();
        self.fresh.set(true);
        WatchRequest {
            shard: self.shard,
            prefix: self.prefix,
            key: self.key.clone(),
            from: self.from.borrow().clone(),
        }
    }

    /// Takes an answer.
    pub(crate) fn take(&self, reply: Reply) -> Step {
        let first = self.fresh.replace(false);
        match reply {
            Reply::WatchEvents(told) => self.take_events(told, first),
            Reply::WatchState(told) => self.take_state(told, first),
            Reply::WatchNotice(notice) => {
                self.item(if notice.quorum { WatchItem::Quorum } else { WatchItem::NoQuorum });
                if notice.quorum { Step::On } else { Step::Doubt }
            }
            Reply::WatchEnd(end) => {
                match end.reason {
                    WatchEndReason::Continue => self.witness.saw(Seen::WatchContinued),
                    WatchEndReason::Cancelled => self.witness.saw(Seen::WatchCancelled),
                    WatchEndReason::TooSlow => {}
                }
                Step::Again
            }
            Reply::Error(error) => {
                self.refused(error.code);
                Step::Elsewhere
            }
            other => panic!("{}: told {other:?}", self.at()),
        }
    }

    /// Whatever a position says, it was told by somebody who had applied it.
    fn refused(&self, code: ErrorCode) {
        if code.class() == ErrorClass::NotApplied {
            let asked = self.from.borrow();
            self.witness.broken("G6", &format!("{}: {asked:?} was refused: {code:?}", self.at()));
        }
    }

    fn take_events(&self, told: WatchEvents, first: bool) -> Step {
        if first && matches!(*self.from.borrow(), WatchFrom::Cursor { .. }) {
            self.witness.saw(Seen::WatchResumed);
        }
        if told.more {
            self.witness.saw(Seen::WatchSplit);
        }
        let mut events = self.partial.take();
        events.extend(told.events);
        // Those of the revision that the next frame goes on with, or those of nobody knows what.
        let whole = events.partition_point(|event| event.revision <= told.revision);
        let rest = events.split_off(whole);
        if !told.more && !rest.is_empty() {
            let what = format!("{}: events above {:?}: {rest:?}", self.at(), told.revision);
            self.witness.broken("G6", &what);
        }
        self.partial.replace(rest);
        for events in events.chunk_by(|a, b| a.revision == b.revision) {
            let (shard, revision) = (told.shard, events[0].revision);
            self.item(WatchItem::Change { shard, revision, events: events.to_vec() });
        }
        self.item(WatchItem::Progress { shard: told.shard, revision: told.revision });
        self.position.set(Some(told.revision));
        self.from.replace(self.after(told.revision));
        Step::On
    }

    fn take_state(&self, told: WatchState, first: bool) -> Step {
        let from = self.from.borrow().clone();
        if first && told.first {
            match from {
                WatchFrom::Cursor { .. } => self.witness.saw(Seen::WatchGap),
                WatchFrom::Page { .. } => self.witness.saw(Seen::WatchStateAnew),
                WatchFrom::Now | WatchFrom::State => {}
            }
        }
        let (revision, shard, last) = (told.revision, told.shard, !told.more);
        let next = if last {
            self.after(revision)
        } else {
            let after = told.keys.last().expect("a page before others has keys").key.clone();
            self.witness.saw(Seen::WatchPaged);
            WatchFrom::Page { cursor: self.cursor(revision), after: after.into_bytes() }
        };
        self.position.set(last.then_some(revision));
        self.from.replace(next);
        self.item(WatchItem::State { shard, revision, keys: told.keys, first: told.first, last });
        Step::On
    }

    fn item(&self, item: WatchItem) {
        let mut lives = self.lives.borrow_mut();
        lives.last_mut().expect("it lives").items.push(item);
    }
}
