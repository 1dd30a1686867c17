//! What the recipes about locks share: answers of one connection, each of them looked at.

use std::collections::{BTreeMap, BTreeSet};

use leasehold_bench::clock::Deadline;
use leasehold_bench::cluster::PATIENCE;
use leasehold_bench::wire::Wire;
use leasehold_protocol::ids::RequestId;
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::reply::{KeyInfo, Reply};
use leasehold_protocol::request::{Freshness, Request};

use crate::bare::{self, LIMIT, Lease, Patient as _};

/// No limit.
pub(crate) const FOR_EVER: u32 = u32::MAX;
/// For leases that nobody renews and that must not end.
pub(crate) const LONG_TTL_MS: u32 = 600_000;

/// Requests on their way at a time.
pub(crate) const AT_ONCE: usize = 500;

/// The next answer on a connection, an outcome.
pub(crate) fn next(wire: &mut Wire) -> (RequestId, Outcome) {
    match wire.recv(Deadline::after(PATIENCE)).expect("connected").expect("an answer") {
        (id, Reply::Outcome(reply)) => (id, reply.outcome),
        (_, reply) => panic!("no outcome: {reply:?}"),
    }
}

/// Sends an acquire that has to wait and returns its id once it is queued, and its place.
pub(crate) fn enqueue(wire: &mut Wire, lease: &Lease, number: u64, key: &str) -> (RequestId, u32) {
    let id = wire.send_patiently(&lease.acquire(number, key, FOR_EVER));
    match next(wire) {
        (other, Outcome::Queued { position, .. }) if other == id => (id, position),
        other => panic!("not queued: {other:?}"),
    }
}

pub(crate) fn granted(outcome: Outcome) -> Grant {
    match outcome {
        Outcome::Granted(grant) => grant,
        outcome => panic!("no grant: {outcome:?}"),
    }
}

/// The answer to a request that is asked for alone: nothing else comes before it.
fn alone(wire: &mut Wire, request: &Request) -> Reply {
    let id = wire.send_patiently(request);
    let answer = wire.recv(Deadline::after(LIMIT)).expect("connected").expect("an answer");
    assert_eq!(answer.0, id, "a further frame: {:?}", answer.1);
    answer.1
}

/// Renews leases, all of which live.
pub(crate) fn renew_all(wire: &mut Wire, leases: &[Lease]) {
    match alone(wire, &bare::renewal(leases)) {
        Reply::Renewed(reply) => {
            assert!(reply.results.iter().all(|result| result.error.is_none()), "{reply:?}");
        }
        reply => panic!("not renewed: {reply:?}"),
    }
}

/// The keys with this prefix that are held or waited for, linearizably.
pub(crate) fn keys_below(wire: &mut Wire, prefix: &str) -> Vec<KeyInfo> {
    match alone(wire, &bare::list(prefix)) {
        Reply::Keys(reply) => {
            assert!(!reply.more, "more than a page");
            reply.keys
        }
        reply => panic!("no list: {reply:?}"),
    }
}

/// Takes one answer to each of these requests, in any order.
pub(crate) fn take(wire: &mut Wire, ids: &[RequestId]) -> BTreeMap<RequestId, Outcome> {
    let answers: BTreeMap<_, _> = ids.iter().map(|_| next(wire)).collect();
    let asked: BTreeSet<_> = ids.iter().copied().collect();
    assert!(answers.keys().copied().eq(asked), "of {ids:?} were answered {answers:?}");
    answers
}

/// No frame is under way: the answer to a read of this key comes next.
pub(crate) fn nothing_more(wire: &mut Wire, key: &str) -> KeyInfo {
    match alone(wire, &bare::get(key, Freshness::Linearizable)) {
        Reply::Keys(mut reply) => reply.keys.pop().expect("one key was asked for"),
        reply => panic!("not a key: {reply:?}"),
    }
}

pub(crate) fn open_many(wire: &mut Wire, count: usize) -> Vec<Lease> {
    let mut leases = Vec::new();
    // Some at a time, as much as a node takes without calling itself busy.
    while leases.len() < count {
        let mut secrets = BTreeMap::new();
        for _ in 0..(count - leases.len()).min(AT_ONCE) {
            let (secret, request) = bare::open(LONG_TTL_MS);
            secrets.insert(wire.send_patiently(&request), secret);
        }
        for _ in 0..secrets.len() {
            let answer = wire.recv(Deadline::after(PATIENCE)).expect("connected");
            let (id, reply) = answer.expect("an answer");
            leases.push(bare::opened(&reply, secrets[&id]));
        }
    }
    leases
}
