//! Waits of every kind that run out or are given up again and again, behind one that is patient.

mod cast;

use std::collections::BTreeMap;

use leasehold_bench::clock::{now_ns, to_ms};
use leasehold_bench::cluster::{Cluster, PATIENCE};
use leasehold_bench::process;
use leasehold_bench::wire::Wire;
use leasehold_protocol::ids::{RequestId, Revision, Token};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::reply::KeyInfo;

use crate::answers::{
    FOR_EVER, LONG_TTL_MS, granted, keys_below, next, nothing_more, renew_all, take,
};
use crate::bare::{self, Lease, Patient as _, scaled, until};
use cast::{BETWEEN, Cast, casts};

const PREFIX: &str = "drift/";
/// Of everybody who falls silent in the end.
const TTL_MS: u32 = 5_000;
/// The server ends such a wait a second later, for a client's own cancel comes first.
const WAIT_MS: u32 = 200;
/// An end that must come after all others, if none of them is put off.
const WITNESS: &str = "drift/witness";

struct Stage {
    cast: Cast,
    holder: Lease,
    patient: Lease,
    hasty: [Lease; 3],
    heir: Lease,
    waiting: RequestId,
    held: Grant,
}

impl Stage {
    fn open(wire: &mut Wire, cast: Cast) -> Self {
        let mut open = || bare::open_lease(wire, TTL_MS);
        let (holder, patient, heir) = (open(), open(), open());
        let hasty = [(); 3].map(|()| open());
        let acquire = holder.acquire_all(1, &cast.holder, (0, 0));
        let held = granted(bare::outcome(wire, &acquire));
        let waiting = wire.send_patiently(&patient.acquire_all(1, &cast.patient, (FOR_EVER, 0)));
        match next(wire) {
            (id, Outcome::Queued { position: 0, .. }) if id == waiting => {}
            other => panic!("{}: not queued first: {other:?}", cast.name),
        }
        Self { cast, holder, patient, hasty, heir, waiting, held }
    }

    fn leases(&self) -> impl Iterator<Item = Lease> {
        [self.holder, self.patient, self.heir].into_iter().chain(self.hasty)
    }
}

/// How the waits of a round end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    RunOut,
    Cancel,
}

/// What became of the hasty ones of a stage in one round.
#[derive(Default)]
struct Round {
    /// The revisions at which they ended.
    ends: Vec<Revision>,
    /// When the heir was granted what they had kept busy, if it had to wait for it.
    inherited: Option<Revision>,
}

/// Who has asked.
#[derive(Clone, Copy)]
enum Asker {
    Hasty(usize, usize),
    Cancel,
    Heir(usize),
    HeirsRelease,
}

/// All hasty ones come and go once.
fn come_and_go(wire: &mut Wire, stages: &mut [Stage], number: u64, way: Way) -> Vec<Round> {
    let wait_ms = if way == Way::RunOut { WAIT_MS } else { FOR_EVER };
    let mut asked = BTreeMap::new();
    for (index, stage) in stages.iter_mut().enumerate() {
        for (of, (lease, wants)) in stage.hasty.iter_mut().zip(&stage.cast.hasty).enumerate() {
            lease.floor = number - 1;
            let id = wire.send_patiently(&lease.acquire_all(number, wants, (wait_ms, 0)));
            asked.insert(id, Asker::Hasty(index, of));
        }
        if let Some(wants) = &stage.cast.heir {
            stage.heir.floor = number - 1;
            let acquire = stage.heir.acquire_all(number, wants, (FOR_EVER, 0));
            asked.insert(wire.send_patiently(&acquire), Asker::Heir(index));
        }
    }
    let mut rounds: Vec<Round> = stages.iter().map(|_| Round::default()).collect();
    let mut queued = vec![false; stages.len()];
    while !asked.is_empty() {
        let (id, outcome) = next(wire);
        let Some(asker) = asked.get(&id).copied() else { panic!("not of this round: {outcome:?}") };
        match (asker, outcome) {
            (Asker::Hasty(stage, of), Outcome::Queued { position, .. }) => {
                let stage = &stages[stage];
                assert!(position >= 1, "{}: it passed", stage.cast.name);
                if way == Way::Cancel {
                    let cancel = stage.hasty[of].cancel(number + 1);
                    asked.insert(wire.send_patiently(&cancel), Asker::Cancel);
                }
                continue;
            }
            (Asker::Heir(stage), Outcome::Queued { .. }) => {
                queued[stage] = true;
                continue;
            }
            (Asker::Hasty(stage, _), Outcome::TimedOut { revision }) if way == Way::RunOut => {
                rounds[stage].ends.push(revision);
            }
            (Asker::Hasty(stage, _), Outcome::Cancelled { revision }) if way == Way::Cancel => {
                rounds[stage].ends.push(revision);
            }
            (Asker::Cancel, Outcome::Cancelled { .. })
            | (Asker::HeirsRelease, Outcome::Released { .. }) => {}
            (Asker::Heir(stage), Outcome::Granted(grant)) => {
                rounds[stage].inherited = queued[stage].then_some(grant.revision);
                let release = stages[stage].heir.release_all(number + 2, number);
                asked.insert(wire.send_patiently(&release), Asker::HeirsRelease);
            }
            (_, outcome) => panic!("neither queued nor over: {outcome:?}"),
        }
        asked.remove(&id);
    }
    rounds
}

/// The patient ones alone wait, each first in all its queues.
fn assert_patient(stages: &[Stage], keys: &[KeyInfo]) {
    for stage in stages {
        for want in &stage.cast.patient {
            let info = keys.iter().find(|info| info.key.as_bytes() == want.key);
            let info = info.expect("a key that is waited for is listed");
            let waiters: Vec<_> = info.waiters.iter().map(|waiter| waiter.lease).collect();
            assert_eq!(waiters, [stage.patient.id], "{}: {}", stage.cast.name, info.key);
        }
    }
    assert!(keys.iter().all(|info| info.key != BETWEEN), "nobody is left there: {keys:?}");
}

/// B30, B32: waits that end again and again behind a patient waiter neither shift what comes after
/// them nor make it forgotten, and when all fall silent the keys are free with their leases.
#[test]
fn waits_that_run_out_delay_nobody_and_a_patient_one_is_not_forgotten() {
    let rounds = scaled(12, 1_200);
    let _alone = process::alone();
    let cluster = Cluster::start(bare::calm()).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let mut wire = bare::connect(cluster.addresses(leader).client);
    let mut stages = casts().map(|cast| Stage::open(&mut wire, cast));
    let leases: Vec<Lease> = stages.iter().flat_map(Stage::leases).collect();
    let (mut ended, mut inherited) = (0, 0);
    for round in 0..rounds {
        let way = if round % 3 == 0 { Way::RunOut } else { Way::Cancel };
        for outcome in come_and_go(&mut wire, &mut stages, 1 + 3 * round, way) {
            ended += outcome.ends.len();
            if let Some(revision) = outcome.inherited {
                let last = outcome.ends.iter().max();
                assert_eq!(Some(&revision), last, "not by the last of {:?}", outcome.ends);
                inherited += 1;
            }
        }
        renew_all(&mut wire, &leases);
        assert_patient(&stages, &keys_below(&mut wire, PREFIX));
    }
    assert!(inherited > 0, "INVALID: nobody waited behind waiters for several keys alone");

    let second: Vec<Token> = stages.iter().map(|stage| patience_pays(&mut wire, stage)).collect();
    renew_all(&mut wire, &leases);
    let witness = bare::open_lease(&mut wire, 2 * TTL_MS);
    bare::grant(&mut wire, &witness, 1, WITNESS);
    fall_silent(&mut wire, &stages, 1 + 3 * rounds);
    drop(wire);
    let silent_ns = now_ns();
    let mut wire = bare::connect(cluster.addresses(leader).client);
    until("the queues are empty", || {
        keys_below(&mut wire, PREFIX).iter().all(|info| info.waiters_total == 0)
    });
    let third = granted_afresh(&mut wire, &stages);
    assert!(second.iter().zip(&third).all(|(second, third)| second < third));
    println!(
        "{ended} waits of {} kinds ended; a fresh client of each kind was granted at most {:.0} ms after the last word \
         of holders with a TTL of {TTL_MS} ms; {inherited} times the end of the last wait for several keys woke who \
         waited behind it",
        stages.len(),
        to_ms(now_ns() - silent_ns)
    );
}

/// The first holder's release is the patient waiter's grant, and nobody else's.
fn patience_pays(wire: &mut Wire, stage: &Stage) -> Token {
    let released = wire.send_patiently(&stage.holder.release_all(3, 1));
    let key = String::from_utf8_lossy(&stage.cast.patient[0].key).into_owned();
    let answers = take(wire, &[released, stage.waiting]);
    let info = nothing_more(wire, &key);
    assert!(matches!(answers[&released], Outcome::Released { .. }), "{answers:?}");
    let second = granted(answers[&stage.waiting]);
    assert!(second.token > stage.held.token);
    assert_eq!((info.holders[0].lease, info.waiters_total), (stage.patient.id, 0));
    second.token
}

/// The hasty ones ask once more, wait, and are not heard of again.
fn fall_silent(wire: &mut Wire, stages: &[Stage], number: u64) {
    for stage in stages {
        for (lease, wants) in stage.hasty.iter().zip(&stage.cast.hasty) {
            wire.send_patiently(&lease.acquire_all(number, wants, (WAIT_MS, 0)));
        }
    }
    let hasty: usize = stages.iter().map(|stage| stage.hasty.len()).sum();
    let mut waiting = 0;
    while waiting < hasty {
        match next(wire) {
            (_, Outcome::Queued { .. }) => waiting += 1,
            (_, Outcome::TimedOut { .. }) => {}
            other => panic!("INVALID: it does not wait: {other:?}"),
        }
    }
}

/// A client of each kind asks for what the silent ones hold, and gets it when their leases end:
/// earlier than what ends a TTL later, so nothing has put those ends off.
fn granted_afresh(wire: &mut Wire, stages: &[Stage]) -> Vec<Token> {
    let lease = bare::open_lease(wire, LONG_TTL_MS);
    let witnessed = wire.send_patiently(&lease.acquire(1, WITNESS, FOR_EVER));
    let mut asked = BTreeMap::new();
    for (index, stage) in stages.iter().enumerate() {
        let fresh = bare::open_lease(wire, LONG_TTL_MS);
        let acquire = fresh.acquire_all(1, &stage.cast.fresh, (FOR_EVER, 0));
        asked.insert(wire.send_patiently(&acquire), index);
    }
    let mut grants = BTreeMap::new();
    let mut witness = None;
    while grants.len() < stages.len() {
        match next(wire) {
            (_, Outcome::Queued { .. }) => {}
            (id, outcome) if id == witnessed => witness = Some(granted(outcome).revision),
            (id, outcome) => {
                grants.insert(asked[&id], granted(outcome));
            }
        }
    }
    for (index, grant) in &grants {
        let late = witness.is_some_and(|witness| witness < grant.revision);
        assert!(!late, "{}: granted more than a TTL late", stages[*index].cast.name);
    }
    grants.into_values().map(|grant| grant.token).collect()
}
