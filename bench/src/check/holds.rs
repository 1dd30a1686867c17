//! The holds of a history: each grant with all that the history says about its end. Shared by
//! the checkers of G1, G3 and G5; judges nothing.

use std::collections::BTreeMap;

use crate::history::{History, Op, OpKind, Outcome};

/// A client's safety margin for a TTL (G3): the larger of 0.5 % and 20 ms.
pub const fn margin_ms(ttl_ms: u32) -> u32 {
    let share = ttl_ms / 200;
    if share > 20 { share } else { 20 }
}

/// One grant, and what is known about its end.
#[derive(Clone, Debug)]
pub(super) struct Hold {
    pub(super) client: u32,
    pub(super) token: u64,
    /// When its acquire was first sent.
    pub(super) invoke_ns: u64,
    /// When its client read the grant.
    pub(super) granted_ns: u64,
    /// The first call by which its client, or an operator, ended it.
    pub(super) given_up_ns: Option<u64>,
    /// Such a call was answered with success and ended the hold at once.
    pub(super) end_acked: bool,
    /// When its client learned that it is lost.
    pub(super) lost_ns: Option<u64>,
    /// End of the TTL that the last acknowledged renewal of its lease started, without margin.
    pub(super) lease_until_ns: Option<u64>,
    /// The same, less the client's margin.
    pub(super) sure_until_ns: Option<u64>,
    /// The end of validity that the client library stated last.
    pub(super) claimed_until_ns: Option<u64>,
}

/// Holds by shard and key, in token order.
pub(super) type Holds<'a> = BTreeMap<(u32, &'a str), Vec<Hold>>;

/// All holds of a history.
pub(super) fn collect(history: &History) -> Holds<'_> {
    let ends = Ends::collect(history);
    let mut holds = Holds::new();
    for op in history.ops() {
        if let Some(hold) = hold_of(op, &ends) {
            holds.entry((op.shard, op.key.as_str())).or_default().push(hold);
        }
    }
    for list in holds.values_mut() {
        list.sort_by_key(|hold| (hold.token, hold.granted_ns));
        // A request that was sent on two connections gives its client one hold.
        list.dedup_by_key(|hold| (hold.token, hold.client));
    }
    holds
}

fn hold_of(op: &Op, ends: &Ends<'_>) -> Option<Hold> {
    let OpKind::Acquire { .. } = op.kind else { return None };
    let Outcome::Granted { token, own_lease, .. } = op.outcome else { return None };
    let lease = own_lease.or(op.lease);
    let of_lease = |map: &BTreeMap<(u32, u64), u64>| map.get(&(op.shard, lease?)).copied();
    let ended = ends.calls.get(&(op.shard, op.key.as_str(), token)).copied();
    let refused = ends.refused.get(&(op.client, op.key.as_str(), token)).copied();
    let numbered = op.lease.zip(op.number);
    let cancelled =
        numbered.and_then(|(lease, n)| ends.cancels.get(&(op.shard, lease, n)).copied());
    let closed = lease.and_then(|lease| ends.closes.get(&(op.shard, lease)).copied());
    let lease_lost = of_lease(&ends.lost_leases);
    let calls = [ended, refused, cancelled, closed];
    let claimed_until_ns = ends.claims.get(&(op.client, op.key.as_str(), token)).copied();
    // A forced hold is sure until its client says otherwise, however its lease is renewed.
    let forced_ns = ends.forced.get(&(op.shard, op.key.as_str(), token)).copied();
    let given_up_by_force = forced_ns.filter(|_| claimed_until_ns.is_none());
    let of_lease = |map: &BTreeMap<(u32, u64), u64>| of_lease(map).filter(|_| forced_ns.is_none());
    let hold_lost = ends.lost_holds.get(&(op.shard, op.key.as_str(), token)).copied();
    Some(Hold {
        client: op.client,
        token,
        invoke_ns: op.invoke_ns,
        granted_ns: op.return_ns?,
        given_up_ns: calls.iter().flatten().map(|call| call.0).chain(given_up_by_force).min(),
        end_acked: calls.iter().flatten().any(|call| call.1),
        lost_ns: [hold_lost, lease_lost].into_iter().flatten().min(),
        lease_until_ns: of_lease(&ends.lease_until),
        sure_until_ns: of_lease(&ends.sure_until),
        claimed_until_ns,
    })
}

/// When a call was first sent, and whether one of its kind was answered with success.
type Call = (u64, bool);

/// All that ends or extends holds, by what it refers to.
#[derive(Default)]
struct Ends<'a> {
    calls: BTreeMap<(u32, &'a str, u64), Call>,
    /// Refused releases by client: they end nothing, but their client stopped being sure. Those of
    /// other clients are no excuse for anything.
    refused: BTreeMap<(u32, &'a str, u64), Call>,
    /// Holds that an operator forced, but not at once.
    forced: BTreeMap<(u32, &'a str, u64), u64>,
    cancels: BTreeMap<(u32, u64, u64), Call>,
    closes: BTreeMap<(u32, u64), Call>,
    lost_holds: BTreeMap<(u32, &'a str, u64), u64>,
    lost_leases: BTreeMap<(u32, u64), u64>,
    lease_until: BTreeMap<(u32, u64), u64>,
    sure_until: BTreeMap<(u32, u64), u64>,
    claims: BTreeMap<(u32, &'a str, u64), u64>,
}

impl<'a> Ends<'a> {
    fn collect(history: &'a History) -> Self {
        let mut ends = Self::default();
        history.ops().for_each(|op| ends.op(op));
        for lost in history.losses() {
            if let (Some(key), Some(token)) = (&lost.key, lost.token) {
                first(&mut ends.lost_holds, (lost.shard, key, token), lost.at_ns);
            } else if let Some(lease) = lost.lease {
                first(&mut ends.lost_leases, (lost.shard, lease), lost.at_ns);
            }
        }
        for renewal in history.renewals().filter(|renewal| renewal.ack_ns.is_some()) {
            let lease = (renewal.shard, renewal.lease);
            let sure_ms = renewal.ttl_ms.saturating_sub(margin_ms(renewal.ttl_ms));
            last(&mut ends.lease_until, lease, renewal.send_ns + to_ns(renewal.ttl_ms));
            last(&mut ends.sure_until, lease, renewal.send_ns + to_ns(sure_ms));
        }
        for claim in history.claims() {
            last(&mut ends.claims, (claim.client, &claim.key, claim.token), claim.until_ns);
        }
        ends
    }

    fn op(&mut self, op: &'a Op) {
        let ok = op.outcome.is_ok();
        match op.kind {
            OpKind::Release { token } if op.outcome.is_definite_failure() => {
                let of_client = (op.client, op.key.as_str(), token);
                call(&mut self.refused, of_client, op.invoke_ns, false);
            }
            OpKind::Release { token } => {
                call(&mut self.calls, (op.shard, op.key.as_str(), token), op.invoke_ns, ok);
            }
            OpKind::ForceRelease { token, now } if !op.had_no_effect() => {
                let hold = (op.shard, op.key.as_str(), token);
                if now {
                    call(&mut self.calls, hold, op.invoke_ns, ok);
                } else {
                    first(&mut self.forced, hold, op.invoke_ns);
                }
            }
            OpKind::Cancel { acquire, release_if_granted: true } => {
                if let Some(lease) = op.lease {
                    call(&mut self.cancels, (op.shard, lease, acquire), op.invoke_ns, ok);
                }
            }
            OpKind::Close => {
                if let Some(lease) = op.lease {
                    call(&mut self.closes, (op.shard, lease), op.invoke_ns, ok);
                }
            }
            _ => {}
        }
    }
}

/// Nanoseconds of some milliseconds.
pub(super) const fn to_ns(ms: u32) -> u64 {
    ms as u64 * 1_000_000
}

fn call<K: Ord>(map: &mut BTreeMap<K, Call>, key: K, invoke_ns: u64, ok: bool) {
    let entry = map.entry(key).or_insert((invoke_ns, ok));
    *entry = (entry.0.min(invoke_ns), entry.1 || ok);
}

fn first<K: Ord>(map: &mut BTreeMap<K, u64>, key: K, at_ns: u64) {
    let entry = map.entry(key).or_insert(at_ns);
    *entry = at_ns.min(*entry);
}

fn last<K: Ord>(map: &mut BTreeMap<K, u64>, key: K, at_ns: u64) {
    let entry = map.entry(key).or_insert(at_ns);
    *entry = at_ns.max(*entry);
}
