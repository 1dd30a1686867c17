//! The entities of a shard: leases, keys, holds, waiters.

use alloc::rc::Rc;

use leasehold_protocol::command::OwnLease;
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, Token};
use leasehold_protocol::planted;

use crate::blob::{Blob, Key};
use crate::cow::Map;
use crate::memory::Memory;

/// What an acquire of a lease has led to so far.
#[derive(Clone, Debug)]
pub(crate) enum Claim {
    /// A hold of the lease.
    Hold(Key),
    /// A place in the key's queue.
    Wait(Key),
}

impl Claim {
    pub(crate) fn key(&self) -> &Key {
        match self {
            Self::Hold(key) | Self::Wait(key) => key,
        }
    }
}

/// A live lease. An ended one leaves nothing behind: an id that is not in the table is dead.
#[derive(Clone, Debug)]
pub(crate) struct Lease {
    /// Hash of what never changes: id, TTL, secret, label, `own`.
    pub(crate) base: u64,
    pub(crate) ttl_ms: u32,
    pub(crate) secret: Secret,
    pub(crate) label: Blob,
    /// Made for one hold, with which it ends. It sends no numbered commands.
    pub(crate) own: bool,
    /// The hold-set version.
    pub(crate) version: u64,
    pub(crate) memory: Memory,
    /// Holds and waits, by their acquire's number. At most one per key.
    pub(crate) claims: Map<u64, Claim>,
    /// How many of `claims` are waits.
    pub(crate) waits: usize,
}

impl Lease {
    /// A lease that has done nothing yet; its `base` is for whoever knows its id.
    pub(crate) fn new(ttl_ms: u32, secret: Secret, label: Blob, own: bool) -> Self {
        Self {
            base: 0,
            ttl_ms,
            secret,
            label,
            own,
            version: 0,
            memory: Memory::default(),
            claims: Map::default(),
            waits: 0,
        }
    }
}

/// The table of leases. Each is behind a pointer, so that copying a shared leaf of the tree does not
/// copy the leases in it.
pub(crate) type Leases = Map<LeaseId, Rc<Lease>>;

impl Leases {
    /// A lease to change in place; copies it if a frozen view shares it.
    pub(crate) fn lease_mut(&mut self, id: LeaseId) -> Option<&mut Lease> {
        self.get_mut(&id).map(Rc::make_mut)
    }
}

/// A hold that an operator forced and that is not passed on yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Forced {
    pub(crate) who: Blob,
    pub(crate) why: Blob,
}

#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub(crate) token: Token,
    pub(crate) mode: Mode,
    /// The acquire's number.
    pub(crate) number: Number,
    pub(crate) value: Blob,
    /// The proposer's wall time of the grant; for display only.
    pub(crate) since_ms: u64,
    pub(crate) forced: Option<Rc<Forced>>,
}

#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    pub(crate) lease: LeaseId,
    /// The acquire's number.
    pub(crate) number: Number,
    pub(crate) mode: Mode,
    pub(crate) own: Option<OwnLease>,
    pub(crate) value: Blob,
    pub(crate) wait_ms: u32,
}

/// A key that is held or waited for. Other keys take no memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyState {
    pub(crate) holds: Map<LeaseId, Hold>,
    /// Waiters by place. Places only grow while anybody waits.
    pub(crate) queue: Map<u64, Waiter>,
    /// Each waiting lease's place.
    pub(crate) places: Map<LeaseId, u64>,
    /// What grants that join the present holds carry as their floor; 0 while the hold is
    /// exclusive, whose floor is its own token.
    pub(crate) floor: u64,
}

/// The table of keys, each behind a pointer like leases.
pub(crate) type Keys = Map<Key, Rc<KeyState>>;

impl Keys {
    /// A key's state to change in place; copies it if a frozen view shares it.
    pub(crate) fn entry_mut(&mut self, key: &Key) -> Option<&mut KeyState> {
        self.get_mut(key).map(Rc::make_mut)
    }
}

impl KeyState {
    pub(crate) fn is_vacant(&self) -> bool {
        self.holds.is_empty() && self.queue.is_empty()
    }

    /// The token that an outcome names as present: that of the first holder.
    pub(crate) fn present_token(&self) -> Token {
        self.holds.first().map_or(Token(0), |(_, hold)| hold.token)
    }

    pub(crate) fn hold_of_token(&self, token: Token) -> Option<(LeaseId, &Hold)> {
        self.holds.iter().find(|(_, hold)| hold.token == token).map(|(lease, hold)| (*lease, hold))
    }

    /// Whether a hold of this mode may join the present ones, whoever waits. The one place that
    /// knows how modes go together.
    pub(crate) fn admits(&self, mode: Mode) -> bool {
        match mode {
            // The present holds go together, so one of them speaks for all.
            Mode::SHARED => self.holds.first().is_none_or(|(_, hold)| hold.mode == Mode::SHARED),
            // Planted (G1): whoever asks may join.
            Mode::EXCLUSIVE => self.holds.is_empty() || planted!("two-holders"),
            _ => unreachable!("no other mode gets past validation"),
        }
    }

    /// The floor of one of its holds.
    pub(crate) fn floor_of(&self, hold: &Hold) -> Token {
        if hold.mode == Mode::EXCLUSIVE { hold.token } else { Token(self.floor) }
    }
}
