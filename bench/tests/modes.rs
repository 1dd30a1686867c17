//! Shared holds, semaphores and lock-delays on real processes, over the bare protocol: what the
//! state machine's own tests check in full reaches a client through any node.

#[path = "support/bare.rs"]
mod bare;

use bare::{Lease, TIMEOUT_MS, command, exclusive, outcome, permits, shared, until};
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process;
use leasehold_bench::wire::Wire;
use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{Mode, Number, ShardId, Token};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::reply::{Claimed, Reply};
use leasehold_protocol::request::{ClaimRequest, Request};

fn granted(outcome: &Outcome) -> Grant {
    match outcome {
        Outcome::Granted(grant) => *grant,
        other => panic!("not granted: {other:?}"),
    }
}

fn refused(outcome: &Outcome) -> (ErrorCode, Token) {
    match outcome {
        Outcome::Refused { code, token, .. } => (*code, *token),
        other => panic!("not refused: {other:?}"),
    }
}

fn claim(wire: &mut Wire, lease: &Lease, number: u64) -> Claimed {
    let (lease, secret, number) = (lease.id, lease.secret, Number(number));
    let (shard, timeout_ms) = (ShardId(0), TIMEOUT_MS);
    match bare::call(
        wire,
        &Request::Claim(ClaimRequest { shard, lease, secret, number, timeout_ms }),
    ) {
        Reply::Claim(reply) => reply.claim,
        other => panic!("no claim: {other:?}"),
    }
}

#[test]
fn readers_writers_and_permits_through_a_follower() {
    let _alone = process::alone();
    let cluster = Cluster::start(Spec::default()).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let follower = cluster.ids().find(|id| *id != leader).expect("another node");
    let wire = &mut bare::connect(cluster.addresses(follower).client);
    let [a, b, c] = [(); 3].map(|()| bare::open_lease(wire, 60_000));

    let first = granted(&outcome(wire, &a.acquire_all(1, &[shared("doc")], (0, 0))));
    let second = granted(&outcome(wire, &b.acquire_all(1, &[shared("doc")], (0, 0))));
    assert!(second.token > first.token && second.floor == first.floor);
    let waiting = outcome(wire, &c.acquire_all(1, &[exclusive("doc")], (60_000, 0)));
    assert!(matches!(waiting, Outcome::Queued { position: 0, .. }), "{waiting:?}");
    match claim(wire, &c, 1) {
        Claimed::Waits(waits) => assert_eq!((waits.position, waits.holders.len()), (0, 2)),
        other => panic!("{other:?}"),
    }
    let key = b"doc".to_vec();
    let (caller, token, mode) = (a.caller(4), first.token, Mode::EXCLUSIVE);
    let upgrade = command(Command::Convert { caller, key: key.clone(), token, mode });
    assert_eq!(refused(&outcome(wire, &upgrade)), (ErrorCode::UPGRADE_CONFLICT, second.token));
    outcome(wire, &a.release(3, "doc", first.token));
    outcome(wire, &b.release(3, "doc", second.token));
    let Claimed::Holds(held) = claim(wire, &c, 1) else { panic!("the writer's turn has come") };
    assert!(held.token > second.token && held.mode == Mode::EXCLUSIVE);

    let value = b"c:80".to_vec();
    let set = Command::SetValue { caller: c.caller(4), key: key.clone(), token: held.token, value };
    assert!(matches!(outcome(wire, &command(set)), Outcome::Changed { .. }));
    let (who, why, within_ms) = (b"ops".to_vec(), b"drain".to_vec(), 5_000);
    let ask = Command::AskYield { key, token: held.token, who, why, within_ms };
    assert!(matches!(outcome(wire, &command(ask)), Outcome::Changed { .. }));
    let holder = bare::key(wire, "doc").holders.remove(0);
    assert_eq!(holder.value, b"c:80");
    assert_eq!(holder.asked.map(|asked| asked.why).as_deref(), Some("drain"));

    granted(&outcome(wire, &a.acquire_all(7, &[permits("pool", 2, 3)], (0, 0))));
    let other = refused(&outcome(wire, &b.acquire_all(4, &[permits("pool", 1, 4)], (0, 0))));
    assert_eq!(other, (ErrorCode::LIMIT_MISMATCH, Token(3)));
    granted(&outcome(wire, &b.acquire_all(7, &[permits("pool", 1, 3)], (0, 0))));
    let Claimed::Holds(held) = claim(wire, &b, 7) else { panic!("it was granted") };
    assert_eq!(held.slots, [0b100]);
    let full = refused(&outcome(wire, &c.acquire_all(7, &[permits("pool", 1, 3)], (0, 0))));
    assert_eq!(full.0, ErrorCode::HELD);
    bare::assert_no_panic(&cluster);
}

/// The leader ends a delay; a new leader knows of it and lets it last once more.
#[test]
fn a_lock_delay_ends_also_under_another_leader() {
    const DELAY_MS: u32 = 2_000;
    let _alone = process::alone();
    let cluster = Cluster::start(Spec::default()).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let wire = &mut bare::connect(cluster.addresses(leader).client);
    let next = bare::open_lease(wire, 60_000);
    let mut number = 1;
    for round in 0..2 {
        let lost = bare::open_lease(wire, 1_000);
        let key = format!("guard/{round}");
        let grant =
            granted(&outcome(wire, &lost.acquire_all(1, &[exclusive(&key)], (0, DELAY_MS))));
        until("the delay began", || !bare::key(wire, &key).delays.is_empty());
        let delay = bare::key(wire, &key).delays.remove(0);
        assert_eq!((delay.token, delay.delay_ms), (grant.token, DELAY_MS));
        assert!(delay.remaining_ms.is_some_and(|left| left <= DELAY_MS), "{delay:?}");
        let early = outcome(wire, &next.acquire_all(number, &[exclusive(&key)], (0, 0)));
        assert_eq!(refused(&early), (ErrorCode::DELAYED, grant.token));
        if round == 1 {
            let to = cluster.ids().find(|id| *id != leader).expect("another node");
            assert!(matches!(bare::call(wire, &bare::transfer(to)), Reply::Transferred));
        }
        until("the delay ended", || {
            number += 3;
            let now = outcome(wire, &next.acquire_all(number, &[exclusive(&key)], (0, 0)));
            matches!(now, Outcome::Granted(after) if after.token > grant.token)
        });
        number += 3;
        assert!(bare::key(wire, &key).delays.is_empty());
    }
    bare::assert_no_panic(&cluster);
}
