//! `Watch`: what happens to a key, to the keys with a prefix, or to all of them (G6).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use leasehold_protocol::ids::{ClusterId, Revision, ShardId};
use leasehold_protocol::reply::KeyInfo;
use leasehold_protocol::watch::{Cursor as Positions, WatchEvent};
use tokio::sync::Notify;

use crate::client::ClientInner;
use crate::core::WatchId;
use crate::core::watch::{Begin, Item, Target};
use crate::error::{CallError, Failure};

/// What to watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchTarget(Target);

impl WatchTarget {
    /// One key.
    pub fn key(key: impl Into<Vec<u8>>) -> Self {
        Self(Target { prefix: false, key: key.into() })
    }

    /// All keys that begin so, in all shards.
    pub fn prefix(prefix: impl Into<Vec<u8>>) -> Self {
        Self(Target { prefix: true, key: prefix.into() })
    }

    /// All keys.
    pub fn everything() -> Self {
        Self::prefix("")
    }
}

/// A position in a cluster's changes, from which a watch can go on: later, elsewhere, in another
/// process. Its bytes and its text are opaque and safe to store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor(Positions);

impl Cursor {
    /// Reads what `to_bytes` gave.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CallError> {
        Ok(Self(Positions::decode(bytes).map_err(Failure::of)?))
    }

    /// Reads what `to_string` gave.
    pub fn parse(text: &str) -> Result<Self, CallError> {
        Ok(Self(Positions::parse(text).map_err(Failure::of)?))
    }

    /// The bytes, at most 791.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.encode()
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Where to begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchFrom {
    /// With what happens from now on: with everything that is acknowledged after the first item.
    Now,
    /// With the present state (`WatchItem::State`), then what happens after it.
    State,
    /// After a position. If what happened since is not remembered any more, with the state.
    Cursor(Cursor),
}

/// What a watch tells.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WatchItem {
    /// One change: all its watched events, which carry the reason, the token and the label.
    Change {
        /// The shard.
        shard: ShardId,
        /// The shard's revision: it rises from item to item of a shard.
        revision: Revision,
        /// At least one.
        events: Vec<WatchEvent>,
    },
    /// One page of a shard's state, because it was asked for, or because of a **gap**: what
    /// happened since the last item of this shard is not remembered any more. The pages of one
    /// state come in the order of their keys; a watched key that is in none of them is vacant.
    State {
        /// The shard.
        shard: ShardId,
        /// The revision of the state; changes after it follow.
        revision: Revision,
        /// Watched keys that are held or waited for.
        keys: Vec<KeyInfo>,
        /// The first page: whatever was known of this shard is void.
        first: bool,
        /// The last page.
        last: bool,
    },
    /// Nothing else happened up to this revision.
    Progress {
        /// The shard.
        shard: ShardId,
        /// The revision.
        revision: Revision,
    },
    /// What comes from here on may be late, and may not come at all for now: no node that serves
    /// this watch can tell whether it is up to date.
    NoQuorum,
    /// Up to date again, without a gap.
    Quorum,
}

/// A running watch. Dropping it ends it, at the nodes too.
///
/// It survives the loss of connections and nodes: it goes on elsewhere from where it was, without
/// loss and without telling anything twice, as long as a node remembers what happened since;
/// otherwise it says so with a `WatchItem::State`. If items are not taken, few are kept here, and
/// the same holds.
#[derive(Debug)]
pub struct Watch {
    client: Arc<ClientInner>,
    id: WatchId,
    ready: Arc<Notify>,
    cluster: ClusterId,
    /// The shards of the watch, and what was taken of each.
    taken: BTreeMap<ShardId, Option<Revision>>,
}

impl Watch {
    pub(crate) fn begin(
        client: &Arc<ClientInner>,
        target: &WatchTarget,
        from: &WatchFrom,
    ) -> Result<Self, Failure> {
        let begin = match from {
            WatchFrom::Now => Begin::Now,
            WatchFrom::State => Begin::State,
            WatchFrom::Cursor(cursor) => Begin::Cursor(cursor.0.clone()),
        };
        let (id, ready, cluster, shards) = client.shared.enter(|inner, now| {
            let id = inner.core.watch(now, target.0.clone(), &begin)?;
            let (cluster, shards) = (inner.core.cluster(), inner.core.watched_shards(id));
            Ok::<_, Failure>((id, inner.await_watch(id), cluster, shards))
        })?;
        let position = |shard: &ShardId| match &begin {
            Begin::Cursor(cursor) => cursor.positions.get(shard).copied(),
            _ => None,
        };
        let taken = shards.into_iter().map(|shard| (shard, position(&shard))).collect();
        Ok(Self { client: Arc::clone(client), id, ready, cluster, taken })
    }

    /// The next item. An error is the end of the watch and says why it was cut off; it comes again
    /// when asked again. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<WatchItem, CallError> {
        loop {
            let taken = self.client.shared.enter(|inner, now| inner.core.take_item(now, self.id));
            match taken {
                Some(item) => return Ok(self.took(item?)),
                None => self.ready.notified().await,
            }
        }
    }

    /// The next item, if it has arrived; an error is left for `next`.
    pub(crate) fn next_at_hand(&mut self) -> Option<WatchItem> {
        let taken = self.client.shared.enter(|inner, now| inner.core.take_item(now, self.id));
        Some(self.took(taken?.ok()?))
    }

    fn took(&mut self, item: Item) -> WatchItem {
        match item {
            Item::Change { shard, revision, events } => {
                self.taken.insert(shard, Some(revision));
                WatchItem::Change { shard, revision, events }
            }
            Item::State { shard, revision, keys, first, last } => {
                // Within a state there is no position to go on from.
                self.taken.insert(shard, last.then_some(revision));
                WatchItem::State { shard, revision, keys, first, last }
            }
            Item::Progress { shard, revision } => {
                self.taken.insert(shard, Some(revision));
                WatchItem::Progress { shard, revision }
            }
            Item::NoQuorum => WatchItem::NoQuorum,
            Item::Quorum => WatchItem::Quorum,
        }
    }

    /// The position after all items that were taken; `None` before each shard has told its own,
    /// and between the pages of a state.
    pub fn cursor(&self) -> Option<Cursor> {
        let positions: Option<BTreeMap<_, _>> =
            self.taken.iter().map(|(shard, at)| Some((*shard, (*at)?))).collect();
        Some(Cursor(Positions { cluster: self.cluster, positions: positions? }))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.client.shared.enter(|inner, now| {
            inner.forget_watch(self.id);
            inner.core.unwatch(now, self.id);
        });
    }
}
