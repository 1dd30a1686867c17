//! The commands of a shard's state machine, as clients send them and as the Raft log keeps them:
//! a command is not translated between the socket and `apply`.
//!
//! Text travels as bytes so that a key that is not UTF-8 gets its own error code instead of
//! making the whole frame malformed.
#![expect(missing_docs, reason = "rkyv gives an enum a resolver whose fields take no docs")]

use alloc::vec::Vec;

use rkyv::{Archive, Deserialize, Serialize};

use crate::ids::{LeaseId, Mode, Number, Secret, Token};
use crate::member::MemberCommand;

/// Who sends a command and how its retry is recognised (DESIGN §4, G5).
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The lease in whose name the command acts.
    pub lease: LeaseId,
    /// The lease's secret.
    pub secret: Secret,
    /// This command's number; a retry keeps it. An acquire `n` also reserves `n + 1` for its
    /// cancel and `n + 2` for its release.
    pub number: Number,
    /// All outcomes at or below this number have reached the client, except of acquires that were
    /// answered `Queued`. Reserved numbers that were not used count as reached.
    pub floor: Number,
    /// Results at or below the floor that have reached the client: of acquires that were answered
    /// `Queued` (unless their hold was released, or the floor passed their cancel: that says the
    /// same), and of cancels and releases sent under a number at or below the floor. At most
    /// `ACKS_MAX`.
    pub acks: Vec<Number>,
}

/// The lease that an acquire asks to be made for its hold alone.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnLease {
    /// Time to live, in milliseconds, `TTL_MS_MIN..=TTL_MS_MAX`.
    pub ttl_ms: u32,
    /// The secret that every later command under that lease carries.
    pub secret: Secret,
}

/// One key of an acquire with options.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Want {
    /// The key.
    pub key: Vec<u8>,
    /// The mode.
    pub mode: Mode,
    /// For permits: how many the semaphore has, `1..=PERMITS_MAX`. Whoever finds the key unused
    /// decides; another number is refused with `limit_mismatch`. 0 for other modes.
    pub limit: u32,
    /// If the caller's lease holds the key already, in the same mode or exclusively, enter that
    /// hold once more under its token instead of being refused. Each entry needs its release.
    pub reentrant: bool,
}

/// One command. `Begin`, `BeginRestored`, `Expire`, `EndForced`, `TimeOut`, `EndDelay` and
/// `EndQuarantine` are proposed by the leader only and refused from clients.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Mints a lease. Not numbered: a duplicate makes a lease that expires unused.
    Open {
        /// Time to live, in milliseconds.
        ttl_ms: u32,
        /// Chosen by the client.
        secret: Secret,
        /// Shown in listings; at most `LABEL_LEN_MAX` bytes of UTF-8.
        label: Vec<u8>,
    },
    /// Asks for a hold.
    Acquire {
        /// Who asks.
        caller: Caller,
        /// The key.
        key: Vec<u8>,
        /// The mode.
        mode: Mode,
        /// A lease of the hold's own, started at the grant.
        own: Option<OwnLease>,
        /// Attached to the hold; at most `VALUE_LEN_MAX` bytes.
        value: Vec<u8>,
        /// Longest wait in the queue, in milliseconds: 0 decides at once, `u32::MAX` has no limit.
        /// The server's limit is a backstop; the client cancels first.
        wait_ms: u32,
    },
    /// Ends the wait of an acquire of the same lease; `caller.number` is that acquire's number + 1.
    /// Of several keys it gives up all.
    Cancel {
        /// Who asks.
        caller: Caller,
        /// If the acquire was granted, release that hold in the same step.
        release_if_granted: bool,
    },
    /// Gives a hold of the caller's lease back. Usually `caller.number` is the acquire's + 2.
    Release {
        /// Who asks.
        caller: Caller,
        /// The key.
        key: Vec<u8>,
        /// The hold's token.
        token: Token,
    },
    /// Gives back a hold that has a lease of its own; idempotent by token.
    ReleaseOwn {
        /// The hold's own lease.
        lease: LeaseId,
        /// That lease's secret.
        secret: Secret,
        /// The key.
        key: Vec<u8>,
        /// The hold's token.
        token: Token,
    },
    /// Ends a lease with all it holds and waits for. Idempotent: closing a dead lease is refused
    /// with `lease_dead`, which a client that asked to close takes as done.
    Close {
        /// The lease.
        lease: LeaseId,
        /// Its secret.
        secret: Secret,
    },
    /// An operator ends a hold.
    ForceRelease {
        /// The key.
        key: Vec<u8>,
        /// The token of the hold that is meant; refused if it is not held, so that a retry cannot
        /// hit the next holder.
        token: Token,
        /// Who forces, for events and listings.
        who: Vec<u8>,
        /// Why, for events and listings.
        why: Vec<u8>,
        /// Pass the key on at once and waive G1 for this hold, instead of waiting until its last
        /// possible validity ended.
        now: bool,
    },
    /// First command of a shard: sets the token counter's start. Refused when already applied.
    Begin {
        /// The first token is above this.
        token_base: Token,
    },
    /// The leader ends a lease whose deadline passed.
    Expire {
        /// The lease.
        lease: LeaseId,
    },
    /// The leader ends a forced hold whose last possible validity ended.
    EndForced {
        /// The key.
        key: Vec<u8>,
        /// The hold's token.
        token: Token,
    },
    /// The leader ends a wait whose `wait_ms` passed.
    TimeOut {
        /// The waiting lease.
        lease: LeaseId,
        /// The acquire's number.
        number: Number,
    },
    /// Changes the mode of a hold of the caller's lease. Exclusive to shared keeps the hold and its
    /// token and lets shared waiters in. Shared to exclusive is a new grant with a new token; it
    /// never waits: beside other holders it is refused with `upgrade_conflict`, and it passes by
    /// whoever waits.
    Convert {
        /// Who asks.
        caller: Caller,
        /// The key.
        key: Vec<u8>,
        /// The hold's token.
        token: Token,
        /// The mode that is wanted.
        mode: Mode,
    },
    /// Asks for one hold, with everything that `Acquire` has no room for, or for holds of several
    /// keys of one shard at once: all of them or none. It waits in the queue of each key and is
    /// granted when it is the first of all and each key admits it; until then it holds none of
    /// them. Each hold has a token of its own: the first key has `Grant::token`, each further one
    /// the next number, in the order of `wants`.
    AcquireAll {
        /// Who asks.
        caller: Caller,
        /// What is wanted: 1 to `WANTS_MAX` keys, each once; of several, none may be `reentrant`.
        wants: Vec<Want>,
        /// See `Acquire`. For one key only.
        own: Option<OwnLease>,
        /// See `Acquire`.
        value: Vec<u8>,
        /// See `Acquire`.
        wait_ms: u32,
        /// If the hold is lost, that is if its lease expires, or an operator forces its end and its
        /// client does not acknowledge that, its place stays taken for this long: 0 is not at all,
        /// at most `LOCK_DELAY_MS_MAX` milliseconds.
        delay_ms: u32,
    },
    /// Changes the number of a semaphore's permits. Present holds keep theirs, whatever their
    /// number; who waits for more than the new limit is refused.
    SetLimit {
        /// The key.
        key: Vec<u8>,
        /// How many permits, `1..=PERMITS_MAX`.
        limit: u32,
        /// Who changes it, for events.
        who: Vec<u8>,
    },
    /// The leader ends a lock-delay whose time passed.
    EndDelay {
        /// The key.
        key: Vec<u8>,
        /// The token of the lost hold that began this very delay.
        token: Token,
    },
    /// Changes the value of a hold of the caller's lease: what an election's leader proclaims.
    SetValue {
        /// Who asks.
        caller: Caller,
        /// The key.
        key: Vec<u8>,
        /// The hold's token.
        token: Token,
        /// The value from now on; at most `VALUE_LEN_MAX` bytes.
        value: Vec<u8>,
    },
    /// Asks the holder to give up. Changes nothing but what the holder is told; the same request
    /// again is told once.
    AskYield {
        /// The key.
        key: Vec<u8>,
        /// The token of the hold that is meant; refused if it is not held.
        token: Token,
        /// Who asks.
        who: Vec<u8>,
        /// Why.
        why: Vec<u8>,
        /// How soon, in milliseconds; nothing follows when it passes.
        within_ms: u32,
    },
    /// Gives back whatever an acquire of the caller's lease still holds, all keys in one step.
    /// Usually `caller.number` is `acquire` + 2.
    ReleaseAll {
        /// Who asks.
        caller: Caller,
        /// The acquire's number.
        acquire: Number,
    },
    /// Changes the member table, in shard 0, or fences a shard (`Fence`). From leaders only.
    Member(MemberCommand),
    /// Instead of `Begin`, in a cluster that was restored from a backup or recovered by force: the
    /// counters go on above those of the old cluster, and no key is granted until `EndQuarantine`.
    BeginRestored {
        /// The first token is above this.
        token_base: Token,
        /// The first lease's id is above this.
        lease_base: u64,
        /// The first revision is above this.
        revision_base: u64,
        /// How long no key is granted, in milliseconds; 0 is not at all.
        quarantine_ms: u32,
    },
    /// The leader ends the waiting time of a restored cluster.
    EndQuarantine,
}
