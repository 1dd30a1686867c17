//! What it costs that somebody gives something back: every frame is counted, of shared holds, permits,
//! conversions and several keys.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use leasehold_bench::cluster::{Cluster, PATIENCE};
use leasehold_bench::process;
use leasehold_bench::wire::Wire;
use leasehold_protocol::command::Want;
use leasehold_protocol::ids::{Mode, RequestId, Token};
use leasehold_protocol::outcome::{Grant, Outcome};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::answers::{AT_ONCE, FOR_EVER, granted, next, nothing_more, open_many, take};
use crate::bare::{self, Lease, Patient as _, exclusive, permits, scaled, shared};

/// Asks for all of this in order, and each has to wait; `before` others wait already.
fn line_up(
    wire: &mut Wire,
    leases: &[Lease],
    wants: impl Fn(usize) -> Vec<Want>,
    before: usize,
) -> Vec<RequestId> {
    let mut ids = Vec::new();
    for some in leases.chunks(AT_ONCE) {
        let from = ids.len();
        for lease in some {
            let acquire = lease.acquire_all(1, &wants(ids.len()), (FOR_EVER, 0));
            ids.push(wire.send_patiently(&acquire));
        }
        for (index, id) in ids.iter().enumerate().skip(from) {
            match next(wire) {
                (other, Outcome::Queued { position, .. }) => {
                    assert_eq!((other, position as usize), (*id, before + index));
                }
                other => panic!("not queued: {other:?}"),
            }
        }
    }
    ids
}

fn is_released(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Released { .. })
}

/// The grants of these waiters, made in one step, in the order of the queue.
fn granted_together(answers: &BTreeMap<RequestId, Outcome>, ids: &[RequestId]) -> Vec<Grant> {
    let grants: Vec<Grant> = ids.iter().map(|id| granted(answers[id])).collect();
    let steps: BTreeSet<_> = grants.iter().map(|grant| grant.revision).collect();
    assert!(steps.len() <= 1, "in several steps: {steps:?}");
    assert!(grants.is_sorted_by(|one, next| one.token < next.token), "{grants:?}");
    grants
}

/// B36: what is given back is answered to its caller, and to those whom it makes room for; nobody
/// else hears a word, whatever they wait for.
#[test]
fn what_is_given_back_costs_one_answer_and_the_grants_it_makes() {
    let crowds: &[usize] = scaled(&[1, 100], &[1, 100, 1_000, 10_000]);
    let _alone = process::alone();
    let cluster = Cluster::start(bare::calm()).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    for crowd in crowds {
        let mut wire = bare::connect(cluster.addresses(leader).client);
        for way in [Way::Release, Way::Downgrade] {
            readers(&mut wire, *crowd, way);
        }
    }
    let mut wire = bare::connect(cluster.addresses(leader).client);
    conversions(&mut wire);
    semaphore(&mut wire, scaled(50, 1_000));
    several_keys(&mut wire, scaled(20, 1_000));
}

/// How a writer lets readers in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Release,
    Downgrade,
}

/// A writer before many readers, and a writer behind them.
fn readers(wire: &mut Wire, crowd: usize, way: Way) {
    let key = &format!("frames/{crowd}/{way:?}");
    let leases = open_many(wire, crowd + 2);
    let [first, readers @ .., last] = &leases[..] else { unreachable!("there are two at least") };
    let held = bare::grant(wire, first, 1, key);
    let reading = line_up(wire, readers, |_| vec![shared(key)], 0);
    let writing = line_up(wire, &[*last], |_| vec![exclusive(key)], crowd)[0];

    let gives = match way {
        Way::Release => first.release(3, key, held.token),
        Way::Downgrade => first.convert(4, key, held.token, Mode::SHARED),
    };
    let gives = wire.send_patiently(&gives);
    let answers = take(wire, &[&[gives], &reading[..]].concat());
    let grants = granted_together(&answers, &reading);
    match (way, answers[&gives]) {
        (Way::Release, Outcome::Released { .. }) => {}
        (Way::Downgrade, Outcome::Changed { token, .. }) => assert_eq!(token, held.token),
        (_, outcome) => panic!("{way:?}: {outcome:?}"),
    }
    let info = nothing_more(wire, key);
    assert_eq!(info.waiters_total, 1);

    let mut leaving: Vec<(Lease, Token)> =
        readers.iter().copied().zip(grants.iter().map(|grant| grant.token)).collect();
    if way == Way::Downgrade {
        leaving.push((*first, held.token));
    }
    let (last_reader, others) = leaving.split_last().expect("somebody reads");
    for some in others.chunks(AT_ONCE) {
        let release =
            |(lease, token): &(Lease, Token)| wire.send_patiently(&lease.release(3, key, *token));
        let released: Vec<RequestId> = some.iter().map(release).collect();
        assert!(take(wire, &released).values().all(is_released));
    }
    let info = nothing_more(wire, key);
    assert_eq!((info.holders.len(), info.waiters_total), (1, 1), "{info:?}");
    let released = wire.send_patiently(&last_reader.0.release(3, key, last_reader.1));
    let answers = take(wire, &[released, writing]);
    assert!(is_released(&answers[&released]));
    granted(answers[&writing]);
    assert_eq!(nothing_more(wire, key).holders.len(), 1);
    println!(
        "{crowd} readers behind a writer's {way:?}: {} answers; {} for all readers but the last, {} for that one and the \
         next writer",
        1 + reading.len(),
        others.len(),
        answers.len()
    );
}

/// A conversion that lets nobody in is answered to its caller alone.
fn conversions(wire: &mut Wire) {
    let key = "frames/converted";
    let leases = open_many(wire, 2);
    let held = bare::grant(wire, &leases[0], 1, key);
    let writing = line_up(wire, &leases[1..], |_| vec![exclusive(key)], 0)[0];
    let down = wire.send_patiently(&leases[0].convert(4, key, held.token, Mode::SHARED));
    let answers = take(wire, &[down]);
    assert!(matches!(answers[&down], Outcome::Changed { .. }), "{answers:?}");
    assert_eq!(nothing_more(wire, key).waiters_total, 1);
    let up = wire.send_patiently(&leases[0].convert(7, key, held.token, Mode::EXCLUSIVE));
    let again = granted(take(wire, &[up])[&up]);
    assert!(again.token > held.token);
    assert_eq!(nothing_more(wire, key).waiters_total, 1);
    let released = wire.send_patiently(&leases[0].release(10, key, again.token));
    let next = granted(take(wire, &[released, writing])[&writing]);
    assert!(next.token > again.token);
}

/// Waiters for more and for fewer permits: each release wakes those at the front who fit.
fn semaphore(wire: &mut Wire, crowd: usize) {
    const LIMIT: u32 = 10;
    let key = "frames/pool";
    let mut rng = SmallRng::seed_from_u64(36);
    let leases = open_many(wire, crowd + 2);
    let counts: Vec<u32> =
        [6, 4].into_iter().chain((0..crowd).map(|_| rng.random_range(1..=5))).collect();
    let wants = |index: usize| vec![permits(key, counts[index], LIMIT)];
    let mut holders = Vec::new();
    for (index, lease) in leases.iter().enumerate().take(2) {
        granted(bare::outcome(wire, &lease.acquire_all(1, &wants(index), (0, 0))));
        holders.push(index);
    }
    let ids = line_up(wire, &leases[2..], |index| wants(index + 2), 0);
    let mut queue: VecDeque<usize> = (2..leases.len()).collect();
    let (mut free, mut woken, mut passed) = (0, BTreeMap::<usize, usize>::new(), 0);
    while !queue.is_empty() {
        let leaves = holders.swap_remove(rng.random_range(0..holders.len()));
        free += counts[leaves];
        let mut fit = Vec::new();
        while let Some(head) = queue.pop_front_if(|head| counts[*head] <= free) {
            free -= counts[head];
            fit.push(head);
        }
        // Some behind the head would fit, and must wait for it.
        passed += usize::from(queue.iter().any(|waiter| counts[*waiter] <= free));
        let released = wire.send_patiently(&leases[leaves].release_all(3, 1));
        let fitting: Vec<RequestId> = fit.iter().map(|waiter| ids[waiter - 2]).collect();
        let answers = take(wire, &[&[released], &fitting[..]].concat());
        assert!(is_released(&answers[&released]));
        granted_together(&answers, &fitting);
        assert_eq!(nothing_more(wire, key).waiters_total as usize, queue.len());
        *woken.entry(fit.len()).or_default() += 1;
        holders.extend(fit);
    }
    println!(
        "releases of permits by how many they woke: {woken:?}; {passed} left somebody waiting who would have fitted"
    );
    let kinds =
        woken.contains_key(&0) && woken.contains_key(&1) && woken.keys().any(|woken| *woken > 1);
    assert!(kinds && passed > 0, "INVALID: not each kind of release came up");
}

/// Waiters for the same two keys, in either order: the release of the last key that kept the next
/// one out is its grant, that of the other key is nobody's.
fn several_keys(wire: &mut Wire, crowd: usize) {
    let keys = ["frames/a", "frames/b"];
    let both = |index: usize| {
        let mut wants = keys.map(exclusive).to_vec();
        wants.rotate_left(index % 2);
        wants
    };
    let leases = open_many(wire, crowd + 2);
    let held: Vec<Grant> =
        (0..2).map(|index| bare::grant(wire, &leases[index], 1, keys[index])).collect();
    let ids = line_up(wire, &leases[2..], both, 0);
    let half = wire.send_patiently(&leases[0].release(3, keys[0], held[0].token));
    assert!(is_released(&take(wire, &[half])[&half]));
    assert_eq!(nothing_more(wire, keys[0]).waiters_total as usize, crowd);
    let mut last = wire.send_patiently(&leases[1].release(3, keys[1], held[1].token));
    for (index, id) in ids.iter().enumerate() {
        let answers = take(wire, &[last, *id]);
        assert!(is_released(&answers[&last]));
        let grant = granted(answers[id]);
        let left = crowd - index - 1;
        for key in keys {
            assert_eq!(nothing_more(wire, key).waiters_total as usize, left);
        }
        let lease = &leases[index + 2];
        if index % 4 < 2 {
            last = wire.send_patiently(&lease.release_all(3, 1));
            continue;
        }
        let [one, other] = [index % 2, 1 - index % 2];
        let half = wire.send_patiently(&lease.release(3, keys[one], grant.token));
        assert!(is_released(&take(wire, &[half])[&half]));
        assert_eq!(nothing_more(wire, keys[one]).waiters_total as usize, left);
        last = wire.send_patiently(&lease.release(4, keys[other], Token(grant.token.0 + 1)));
    }
    assert!(is_released(&take(wire, &[last])[&last]));
    println!(
        "{crowd} waiters for two keys: two answers for each hand-over, one for each half of a release"
    );
}
