//! Reading the state: for listings, renewals, and a new leader's take-over.
//!
//! Nothing here changes anything. `remaining_ms` is always left `None`: deadlines are the leader's.

use alloc::rc::Rc;
use alloc::string::String;
use alloc::vec::Vec;
use core::iter;
use core::ops::Bound;

use leasehold_protocol::ids::{HoldSetVersion, LeaseId, Number, Revision, Secret, Token};
use leasehold_protocol::limits::{CLAIM_HOLDERS_MAX, PAGE_LEN_MAX, REASON_LEN_MAX};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{
    ClaimReply, Claimed, Delay, HeldKey, Holder, HoldsReply, KeyInfo, SessionInfo, Waiting,
    YieldRequest,
};

use crate::blob::{Key, KeyRef};
use crate::lifecycle::same_secret;
use crate::memory::{Answer, Kind, Record};
use crate::state::State;
use crate::table::{Claim, Hold, KeyState, Lease};

/// About how many bytes of keys, values and labels a page of `State::list` carries; it always
/// has at least one key.
pub const PAGE_BYTES_MAX: usize = 48 * 1024;

/// A live lease.
#[derive(Clone, Copy, Debug)]
pub struct LeaseView<'a> {
    state: &'a State,
    id: LeaseId,
    lease: &'a Lease,
}

/// What a session's retry memory says of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// The number.
    pub number: Number,
    /// What it was used for.
    pub kind: Kind,
    /// It was executed below the floor, in a number that its acquire reserved.
    pub late: bool,
    /// It outlives the floor until it is acknowledged.
    pub keep: bool,
    /// Its outcome; `None` while it waits.
    pub outcome: Option<Outcome>,
}

impl<'a> LeaseView<'a> {
    /// Time to live, in milliseconds.
    pub fn ttl_ms(&self) -> u32 {
        self.lease.ttl_ms
    }

    /// The version of its hold set.
    pub fn version(&self) -> HoldSetVersion {
        HoldSetVersion(self.lease.version)
    }

    /// Its label; an own lease has that of the session that acquired.
    pub fn label(&self) -> &'a str {
        text(self.lease.label.as_slice())
    }

    /// The bytes of its label, shared with the state; `None` if it is empty.
    pub fn shared_label(&self) -> Option<Rc<[u8]>> {
        self.lease.label.share()
    }

    /// It was made for one hold, with which it ends.
    pub fn own_lease(&self) -> bool {
        self.lease.own
    }

    /// Compares in constant time.
    pub fn secret_matches(&self, secret: &Secret) -> bool {
        same_secret(&self.lease.secret, secret)
    }

    /// The number up to which its client has read all outcomes but those of waits.
    pub fn floor(&self) -> Number {
        Number(self.lease.memory.floor)
    }

    /// Its retry memory, in the order of numbers; what was executed below the floor comes last.
    pub fn memory(&self) -> impl Iterator<Item = Remembered> + use<'a> {
        let memory = &self.lease.memory;
        let told = |late| {
            move |(number, record): (&u64, &Record)| Remembered {
                number: Number(*number),
                kind: record.kind,
                late,
                keep: record.keep,
                outcome: match record.answer {
                    Answer::Waiting => None,
                    Answer::Done(outcome) => Some(outcome),
                },
            }
        };
        memory.records.iter().map(told(false)).chain(memory.late.iter().map(told(true)))
    }

    /// Its holds that an operator forced and that are not passed on yet, by token. They must not
    /// be extended any more.
    pub fn forced(&self) -> impl Iterator<Item = (&'a str, Token)> + use<'a> {
        let id = self.id;
        let all = self.state.forced_pending();
        all.filter(move |(_, _, lease)| *lease == id).map(|(key, token, _)| (key, token))
    }

    /// Number of keys it holds.
    pub fn holds(&self) -> usize {
        self.lease.claims.len() - self.lease.waits - self.lease.again
    }

    /// Number of keys it waits for.
    pub fn waits(&self) -> usize {
        self.lease.waits
    }
}

impl State {
    /// A live lease; `None` is a dead one.
    pub fn lease(&self, id: LeaseId) -> Option<LeaseView<'_>> {
        self.leases.get(&id).map(|lease| LeaseView { state: self, id, lease })
    }

    /// All live leases with their TTLs in milliseconds, in id order.
    pub fn leases(&self) -> impl Iterator<Item = (LeaseId, u32)> {
        self.leases_after(LeaseId(0))
    }

    /// The live leases above `after` with their TTLs in milliseconds, in id order: a walk over
    /// all of them may stop and go on later.
    pub fn leases_after(&self, after: LeaseId) -> impl Iterator<Item = (LeaseId, u32)> {
        self.leases.iter_from(Bound::Excluded(&after)).map(|(id, lease)| (*id, lease.ttl_ms))
    }

    /// Number of live leases.
    pub fn leases_len(&self) -> usize {
        self.leases.len()
    }

    /// Number of keys that are held or waited for.
    pub fn keys_len(&self) -> usize {
        self.keys.len()
    }

    /// The queued acquires of this moment with their wait limits in milliseconds, in a fixed order,
    /// that of the queue within a key; for a walk that goes on while the state changes. Made in
    /// O(1). Each item is one step of about the same work: `None` begins another key.
    pub fn walk_waits(&self) -> impl Iterator<Item = Option<(LeaseId, Number, u32)>> + use<> {
        self.keys.clone().into_iter().flat_map(|(_, key)| {
            let waiters = key.queue.clone().into_iter();
            // An acquire of several keys is one wait.
            let waiters = waiters.filter(|(_, waiter)| waiter.part == 0);
            let waiters = waiters.map(|(_, waiter)| (waiter.lease, waiter.number, waiter.wait_ms));
            iter::once(None).chain(waiters.map(Some))
        })
    }

    /// All holds of this moment that an operator forced and that are not passed on yet: key, token,
    /// and the lease that holds; for a walk as in `walk_waits`.
    pub fn walk_forced(&self) -> impl Iterator<Item = (Vec<u8>, Token, LeaseId)> + use<> {
        let forced = self.forced.clone().into_iter();
        forced.map(|(token, (key, lease))| (text(&key).as_bytes().to_vec(), Token(token), lease))
    }

    /// All holds that an operator forced and that are not passed on yet: key, token, and the
    /// lease that holds.
    pub fn forced_pending(&self) -> impl Iterator<Item = (&str, Token, LeaseId)> {
        self.forced.iter().map(|(token, (key, lease))| (text(key), Token(*token), *lease))
    }

    /// All lock-delays of this moment that are not over: key, the lost hold's token, and how long
    /// it lasts in milliseconds; for a walk as in `walk_waits`.
    pub fn walk_delays(&self) -> impl Iterator<Item = (Vec<u8>, Token, u32)> + use<> {
        let delays = self.delays.clone().into_iter();
        delays.map(|(token, (key, delay_ms))| (key.to_vec(), Token(token), delay_ms))
    }

    /// Whether a lock-delay of this loss is not over.
    pub fn is_delayed(&self, token: Token) -> bool {
        self.delays.get(&token.0).is_some()
    }

    /// The hold of this token was forced and is not passed on yet.
    pub fn is_forced(&self, token: Token) -> bool {
        self.forced.get(&token.0).is_some()
    }

    /// One key with its first holders, also if nobody holds it or waits.
    pub fn key_info(&self, key: &[u8]) -> KeyInfo {
        self.key_info_after(key, LeaseId(0))
    }

    /// One key with those of its holders whose lease is above `after`, also if nobody holds it or
    /// waits.
    pub fn key_info_after(&self, key: &[u8], after: LeaseId) -> KeyInfo {
        match self.keys.get(&KeyRef::new(key)) {
            Some(entry) => self.describe(key, entry, after),
            None => KeyInfo {
                key: String::from_utf8_lossy(key).into_owned(),
                holders: Vec::new(),
                holders_total: 0,
                waiters: Vec::new(),
                waiters_total: 0,
                limit: 0,
                taken: 0,
                delays: Vec::new(),
                delays_total: 0,
                last_end: self.last_end(key),
            },
        }
    }

    /// The value of a hold, shared with the state; `None` if it is empty or there is no such hold.
    pub fn held_value(&self, key: &[u8], lease: LeaseId, token: Token) -> Option<Rc<[u8]>> {
        let hold = self.keys.get(&KeyRef::new(key))?.holds.get(&lease)?;
        if hold.token == token { hold.value.share() } else { None }
    }

    /// A page of the keys that are held or waited for, in byte order: those that start with
    /// `prefix` and are above `after`, at most `limit` and at most about `PAGE_BYTES_MAX`. The
    /// flag says whether more follow.
    pub fn list(&self, prefix: &[u8], after: &[u8], limit: usize) -> (Vec<KeyInfo>, bool) {
        let from = if after >= prefix { Bound::Excluded(after) } else { Bound::Included(prefix) };
        let mut page = Vec::new();
        let mut bytes = 0;
        for (name, ()) in self.names.iter_from(from) {
            if !name.starts_with(prefix) {
                break;
            }
            if page.len() >= limit {
                return (page, true);
            }
            let info = self.key_info(name);
            bytes += size_of(&info);
            if bytes > PAGE_BYTES_MAX && !page.is_empty() {
                return (page, true);
            }
            page.push(info);
        }
        (page, false)
    }

    fn describe(&self, key: &[u8], entry: &KeyState, after: LeaseId) -> KeyInfo {
        let holds = entry.holds.iter_from(Bound::Excluded(&after));
        let holders = holds.map(|(lease, hold)| self.holder(entry, *lease, hold));
        let delays = entry.ghosts.iter().map(|(token, ghost)| Delay {
            token: Token(*token),
            mode: ghost.mode,
            delay_ms: ghost.delay_ms,
            remaining_ms: None,
        });
        let first_waiters = entry.queue.iter().take(PAGE_LEN_MAX as usize).enumerate();
        let waiters =
            first_waiters.map(|(position, (_, waiter))| leasehold_protocol::reply::Waiter {
                lease: waiter.lease,
                number: waiter.number,
                mode: waiter.mode,
                position: position as u32,
                label: self.label_of(waiter.lease),
            });
        KeyInfo {
            key: String::from_utf8_lossy(key).into_owned(),
            holders: holders.take(PAGE_LEN_MAX as usize).collect(),
            holders_total: entry.holds.len() as u32,
            waiters: waiters.collect(),
            waiters_total: entry.queue.len() as u32,
            limit: entry.limit,
            taken: entry.taken.count(),
            delays: delays.take(PAGE_LEN_MAX as usize).collect(),
            delays_total: entry.ghosts.len() as u32,
            last_end: self.last_end(key),
        }
    }

    fn holder(&self, entry: &KeyState, lease: LeaseId, hold: &Hold) -> Holder {
        let view = self.leases.get(&lease);
        Holder {
            lease,
            token: hold.token,
            mode: hold.mode,
            floor: entry.floor_of(hold),
            label: view.map(|lease| lease.label.text()).unwrap_or_default(),
            value: hold.value.as_slice().to_vec(),
            since_ms: hold.since_ms,
            remaining_ms: None,
            number: hold.number,
            own_lease: view.is_some_and(|lease| lease.own),
            forced: hold.forced.is_some(),
            slots: hold.slots.as_slice().to_vec(),
            entries: 1 + hold.again.len() as u32,
            delay_ms: hold.delay_ms,
            asked: hold.asked.as_ref().map(|asked| YieldRequest {
                who: asked.who.text(),
                why: asked.why.text(),
                within_ms: asked.within_ms,
            }),
        }
    }

    fn label_of(&self, lease: LeaseId) -> String {
        self.leases.get(&lease).map(|lease| lease.label.text()).unwrap_or_default()
    }

    /// A page of the live leases above `after`, at most `limit`, in id order. The flag says
    /// whether more follow.
    pub fn sessions(&self, after: LeaseId, limit: usize) -> (Vec<SessionInfo>, bool) {
        let mut leases = self.leases.iter_from(Bound::Excluded(&after));
        let page = leases.by_ref().take(limit).map(|(id, lease)| SessionInfo {
            lease: *id,
            label: lease.label.text(),
            ttl_ms: lease.ttl_ms,
            remaining_ms: None,
            holds: (lease.claims.len() - lease.waits - lease.again) as u32,
            waits: lease.waits as u32,
            own_lease: lease.own,
        });
        let page = page.collect();
        (page, leases.next().is_some())
    }

    /// What a live lease holds and waits for, in the order of its acquires' numbers.
    pub fn holds(&self, lease: LeaseId) -> Option<HoldsReply> {
        let found = self.leases.get(&lease)?;
        let mut reply = HoldsReply {
            revision: Revision(self.revision),
            version: HoldSetVersion(found.version),
            holds: Vec::new(),
            waits: Vec::new(),
        };
        for ((number, part), claim) in found.claims.iter() {
            let number = Number(*number);
            match claim {
                Claim::Wait(_) if *part == 0 => reply.waits.push(number),
                Claim::Wait(_) | Claim::Again(_) => {}
                Claim::Hold(key) => reply.holds.push(self.held(key, lease, number)),
            }
        }
        Some(reply)
    }

    /// What has become of a live lease's acquire. `None` is a dead lease.
    pub fn claim(&self, lease: LeaseId, number: Number) -> Option<ClaimReply> {
        let claims: Vec<&Claim> =
            self.leases.get(&lease)?.claims_of(number).map(|(_, claim)| claim).collect();
        let held = |claim: &&Claim| self.held(claim.key(), lease, number);
        let waits = |claim: &&Claim| self.waiting(claim.key(), lease, claims.len());
        let claim = match claims[..] {
            [] => Claimed::Over,
            [claim @ Claim::Wait(_)] => Claimed::Waits(waits(&claim)),
            [claim] => Claimed::Holds(held(&claim)),
            [Claim::Wait(_), ..] => Claimed::WaitsAll(claims.iter().map(waits).collect()),
            _ => Claimed::HoldsAll(claims.iter().map(held).collect()),
        };
        Some(ClaimReply { revision: Revision(self.revision), claim })
    }

    /// What one of so many keys' queue looks like to a waiter.
    fn waiting(&self, key: &Key, lease: LeaseId, keys: usize) -> Waiting {
        let entry = self.keys.get(key).expect("a claimed key is in the table");
        let place = entry.places.get(&lease).expect("a waiting lease has a place");
        let holders = entry.holds.iter().take((CLAIM_HOLDERS_MAX / keys).max(1));
        Waiting {
            key: key.to_vec(),
            position: entry.queue.rank(place) as u32,
            waiters_total: entry.queue.len() as u32,
            holders: holders.map(|(id, hold)| self.holder(entry, *id, hold)).collect(),
        }
    }

    /// A hold as its lease sees it, under the number of one of its acquires.
    fn held(&self, key: &Key, lease: LeaseId, number: Number) -> HeldKey {
        let entry = self.keys.get(key).expect("a claimed key is in the table");
        let hold = entry.holds.get(&lease).expect("a lease knows its holds");
        HeldKey {
            key: key.to_vec(),
            token: hold.token,
            mode: hold.mode,
            number,
            forced: hold.forced.is_some(),
            slots: hold.slots.as_slice().to_vec(),
            entries: 1 + hold.again.len() as u32,
            asked: hold.asked.is_some(),
            floor: entry.floor_of(hold),
        }
    }

    /// What a retry of that number would be answered now: `Queued` with its present position, or
    /// its outcome. `None` if the lease is dead or the number is not remembered.
    pub fn wait_result(&self, lease: LeaseId, number: Number) -> Option<Outcome> {
        let record = self.leases.get(&lease)?.memory.get(number)?;
        Some(self.present(lease, number, record))
    }
}

/// Keys and labels are checked to be UTF-8 before they are kept.
fn text(bytes: &[u8]) -> &str {
    core::str::from_utf8(bytes).unwrap_or("\u{fffd}")
}

fn size_of(info: &KeyInfo) -> usize {
    const FIXED: usize = 64;
    let holders =
        info.holders.iter().map(|one| FIXED + one.label.len() + one.value.len() + one.slots.len());
    let waiters = info.waiters.iter().map(|one| FIXED + one.label.len());
    let end = info.last_end.as_ref().map_or(0, |end| FIXED + end.label.len() + REASON_LEN_MAX);
    end + FIXED * (1 + info.delays.len())
        + info.key.len()
        + holders.sum::<usize>()
        + waiters.sum::<usize>()
}
