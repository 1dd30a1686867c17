//! The entities of a shard: leases, keys, holds, waiters.

use alloc::rc::Rc;
use alloc::vec::Vec;
use core::ops::Bound;

use leasehold_protocol::command::OwnLease;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::EndReason;
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, Token};
use leasehold_protocol::planted;

use crate::blob::{Blob, Key};
use crate::cow::Map;
use crate::memory::Memory;
use crate::slots::{self, Taken};

/// What an acquire of a lease has led to so far.
#[derive(Clone, Debug)]
pub(crate) enum Claim {
    /// A hold of the lease.
    Hold(Key),
    /// A place in the key's queue.
    Wait(Key),
    /// A further entry of a hold of the lease.
    Again(Key),
}

impl Claim {
    pub(crate) fn key(&self) -> &Key {
        match self {
            Self::Hold(key) | Self::Wait(key) | Self::Again(key) => key,
        }
    }
}

/// What a claim is named by: its acquire's number, and which of that acquire's keys it is for.
pub(crate) type ClaimId = (u64, u32);

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
    /// Holds, waits and entries. At most one per key but for entries.
    pub(crate) claims: Map<ClaimId, Claim>,
    /// How many of `claims` are waits.
    pub(crate) waits: usize,
    /// How many of `claims` are further entries.
    pub(crate) again: usize,
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
            again: 0,
        }
    }

    /// What is left of an acquire, in the order of its keys.
    pub(crate) fn claims_of(&self, number: Number) -> impl Iterator<Item = (u32, &Claim)> {
        let all = self.claims.iter_from(Bound::Included(&(number.0, 0)));
        let own = all.take_while(move |((other, _), _)| *other == number.0);
        own.map(|((_, part), claim)| (*part, claim))
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

/// A request to a holder to give up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) who: Blob,
    pub(crate) why: Blob,
    pub(crate) within_ms: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub(crate) token: Token,
    pub(crate) mode: Mode,
    /// The acquire's number.
    pub(crate) number: Number,
    /// Which of the acquire's keys it is.
    pub(crate) part: u32,
    pub(crate) value: Blob,
    /// The proposer's wall time of the grant; for display only.
    pub(crate) since_ms: u64,
    pub(crate) forced: Option<Rc<Forced>>,
    /// The slots that its permits took.
    pub(crate) slots: Blob,
    /// The lock-delay that follows its loss.
    pub(crate) delay_ms: u32,
    /// The numbers of further acquires that entered it, in the order of their coming.
    pub(crate) again: Vec<u64>,
    /// The last request to give it up.
    pub(crate) asked: Option<Rc<Asked>>,
}

/// A lost hold's place that stays taken until its lock-delay is ended.
#[derive(Clone, Debug)]
pub(crate) struct Ghost {
    pub(crate) mode: Mode,
    pub(crate) slots: Blob,
    pub(crate) delay_ms: u32,
}

/// How a hold ended: told to whoever asks why.
#[derive(Clone, Debug)]
pub(crate) struct End {
    pub(crate) lease: LeaseId,
    pub(crate) label: Blob,
    pub(crate) token: Token,
    pub(crate) mode: Mode,
    pub(crate) reason: EndReason,
    pub(crate) revision: u64,
    /// The proposer's wall time; for display only.
    pub(crate) at_ms: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    pub(crate) lease: LeaseId,
    /// The acquire's number.
    pub(crate) number: Number,
    /// Which of the acquire's keys it waits for here...
    pub(crate) part: u32,
    /// ...and how many those are.
    pub(crate) parts: u32,
    pub(crate) mode: Mode,
    pub(crate) own: Option<OwnLease>,
    pub(crate) value: Blob,
    pub(crate) wait_ms: u32,
    /// The lock-delay that its hold will have.
    pub(crate) delay_ms: u32,
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
    /// How many permits the semaphore has; 0 for a lock. A key that is forgotten forgets it.
    pub(crate) limit: u32,
    /// Lost holds whose lock-delay is not over, by token.
    pub(crate) ghosts: Map<u64, Ghost>,
    /// The slots of holds and ghosts. Follows from them.
    pub(crate) taken: Taken,
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
        !self.is_taken() && self.queue.is_empty()
    }

    /// The token that an outcome names as present: that of the first holder.
    pub(crate) fn present_token(&self) -> Token {
        self.holds.first().map_or(Token(0), |(_, hold)| hold.token)
    }

    pub(crate) fn hold_of_token(&self, token: Token) -> Option<(LeaseId, &Hold)> {
        self.holds.iter().find(|(_, hold)| hold.token == token).map(|(lease, hold)| (*lease, hold))
    }

    /// Whether any place is taken, by a hold or by what a lost one left.
    pub(crate) fn is_taken(&self) -> bool {
        !self.holds.is_empty() || !self.ghosts.is_empty()
    }

    /// Whether a hold of this mode may join the present ones, whoever waits. The one place that
    /// knows how modes go together. Ghosts keep out what their holds kept out.
    pub(crate) fn admits(&self, mode: Mode) -> bool {
        if let Some(permits) = mode.permit_count() {
            return self.taken.count().saturating_add(permits) <= self.room();
        }
        match mode {
            Mode::SHARED => self.present_mode().is_none_or(|present| present == Mode::SHARED),
            // Planted (G1): whoever asks may join.
            Mode::EXCLUSIVE => !self.is_taken() || planted!("two-holders"),
            _ => unreachable!("no other mode gets past validation"),
        }
    }

    /// How many permits may be taken.
    pub(crate) fn room(&self) -> u32 {
        // Planted (G1): a semaphore has a permit more than its limit.
        self.limit + u32::from(planted!("permit-too-many") && self.limit > 0)
    }

    /// What is there goes together, so one of them speaks for all.
    fn present_mode(&self) -> Option<Mode> {
        let hold = self.holds.first().map(|(_, hold)| hold.mode);
        hold.or_else(|| self.ghosts.first().map(|(_, ghost)| ghost.mode))
    }

    /// The token of the loss that alone keeps out a hold of this mode, if it is so.
    pub(crate) fn delayed_by(&self, mode: Mode) -> Option<Token> {
        let (token, _) = self.ghosts.first()?;
        let held = match mode.permit_count() {
            Some(permits) => {
                let held = self.holds.iter().map(|(_, hold)| slots::count(hold.slots.as_slice()));
                held.sum::<u32>().saturating_add(permits) > self.limit
            }
            None if mode == Mode::SHARED => {
                self.holds.first().is_some_and(|(_, hold)| hold.mode != Mode::SHARED)
            }
            None => !self.holds.is_empty(),
        };
        (!held && self.queue.is_empty()).then_some(Token(*token))
    }

    /// Whether an acquire may state this number of permits, 0 for a lock; else why not.
    pub(crate) fn check_limit(&self, stated: u32) -> Result<(), (ErrorCode, Token)> {
        match (self.limit, stated) {
            (limit, _) if limit == stated => Ok(()),
            (0, _) | (_, 0) => Err((ErrorCode::MODE_MISMATCH, Token(0))),
            // Planted (G1): who comes last says how many permits there are.
            _ if planted!("limit-by-the-last-acquire") => Ok(()),
            (limit, _) => Err((ErrorCode::LIMIT_MISMATCH, Token(limit.into()))),
        }
    }

    /// Whether an acquire of this mode may be granted at once.
    pub(crate) fn is_free_for(&self, mode: Mode) -> bool {
        // Planted (G4): readers pass by a waiting writer.
        let passes = mode == Mode::SHARED && planted!("readers-starve-writers");
        (self.queue.is_empty() || passes) && self.admits(mode)
    }

    /// The floor of one of its holds.
    pub(crate) fn floor_of(&self, hold: &Hold) -> Token {
        if hold.mode == Mode::EXCLUSIVE { hold.token } else { Token(self.floor) }
    }
}
