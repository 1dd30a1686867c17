//! Waiters: how long they may wait, who wakes them, what a crowd costs.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_bench::clock::{Deadline, now_ns, to_ms};
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process;
use leasehold_bench::wire::Wire;
use leasehold_protocol::ids::Token;
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;

use crate::answers::{
    AT_ONCE, FOR_EVER, LONG_TTL_MS, enqueue, granted, next, nothing_more, open_many, renew_all,
    take,
};
use crate::bare::{self, Lease, Patient as _, scaled};

/// One of the waits on one of the keys of silent holders.
#[derive(Debug, Default)]
struct Waited {
    /// The revision at which it was queued, unless it was granted at once.
    queued: Option<u64>,
    token: Option<Token>,
}

/// Keys that are held at a time.
const KEYS: usize = 10;

/// B33: who waits behind a holder that is gone is woken by the expiry, whatever node it asked.
#[test]
fn an_expiry_wakes_the_next_waiter_on_every_node() {
    const WAITERS: usize = 9;
    let rounds = scaled(2, 30);
    let _alone = process::alone();
    let cluster = Cluster::start(Spec::default()).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let mut wires: Vec<Wire> =
        cluster.ids().map(|id| bare::connect(cluster.addresses(id).client)).collect();
    let mut wire = bare::connect(cluster.addresses(leader).client);
    let leases: Vec<Lease> =
        (0..WAITERS).map(|_| bare::open_lease(&mut wire, LONG_TTL_MS)).collect();
    let (mut late_ms, mut woken) = (Vec::new(), [0; 3]);
    for round in 0..rounds {
        let keys = round * KEYS..(round + 1) * KEYS;
        let waits = silent_holders(&mut wire, &mut wires, &leases, keys, &mut late_ms);
        for (key, mut of_key) in waits {
            // Whoever was not queued came when the key was free.
            of_key.sort_by_key(|(_, waited)| waited.queued.unwrap_or(u64::MAX));
            let tokens: Vec<_> = of_key.iter().map(|(_, waited)| waited.token).collect();
            assert!(tokens.is_sorted(), "not in the order of the queue: {tokens:?}");
            woken[key % 3] += u32::from(of_key[0].1.queued.is_some());
        }
    }
    late_ms.sort_by(f64::total_cmp);
    let (median, longest) = (late_ms[late_ms.len() / 2], late_ms[late_ms.len() - 1]);
    println!(
        "{} expiries with {WAITERS} waiters each, {woken:?} wakings by node: the next was granted {median:.0} ms after \
         the TTL, {longest:.0} ms at most",
        rounds * KEYS
    );
    assert!(!woken.contains(&0), "INVALID: nobody waited at a node when a holder's time was over");
}

/// Takes each key with a lease that nobody renews, lets all wait for it, and gives the key on from
/// one to the next.
fn silent_holders(
    wire: &mut Wire,
    wires: &mut [Wire],
    leases: &[Lease],
    keys: std::ops::Range<usize>,
    late_ms: &mut Vec<f64>,
) -> BTreeMap<usize, Vec<(usize, Waited)>> {
    const TTL_MS: u32 = 1_500;
    let mut held_ns = BTreeMap::new();
    let mut asked = BTreeMap::new();
    let mut waits = BTreeMap::<usize, Vec<(usize, Waited)>>::new();
    for key in keys {
        let (name, number) = (format!("silent/{key}"), 1 + 3 * key as u64);
        let holder = bare::open_lease(wire, TTL_MS);
        held_ns.insert(key, now_ns());
        bare::grant(wire, &holder, 1, &name);
        for (index, lease) in leases.iter().enumerate() {
            // Of every other round's keys all waiters ask one node, else each asks another.
            let via = (key + key / KEYS % 2 * index) % wires.len();
            let acquire = lease.acquire(number, &name, FOR_EVER);
            let id = wires[via].send_patiently(&acquire);
            asked.insert((via, id), (key, index, acquire));
            waits.entry(key).or_default().push((index, Waited::default()));
        }
    }
    let (mut left, deadline) = (leases.len() * waits.len(), Deadline::after(PATIENCE));
    while left > 0 {
        assert!(!deadline.passed(), "{left} of {waits:?} are not over");
        for (via, wire) in wires.iter_mut().enumerate() {
            let answer = wire.recv(Deadline::after(Duration::from_millis(2))).expect("connected");
            let Some((id, reply)) = answer else { continue };
            let (key, index, request) = asked.get(&(via, id)).cloned().expect("asked for");
            let outcome = match reply {
                Reply::Outcome(reply) => reply.outcome,
                // A change of leader, on a very busy machine: as any client, once more.
                reply => {
                    println!("asked again after {reply:?}");
                    asked.insert((via, wire.send_patiently(&request)), (key, index, request));
                    continue;
                }
            };
            let of_key = waits.get_mut(&key).expect("asked for");
            let first = of_key.iter().all(|(_, waited)| waited.token.is_none());
            let waited = &mut of_key[index].1;
            match outcome {
                Outcome::Queued { revision, .. } => waited.queued = Some(revision.0),
                Outcome::Released { .. } => left -= 1,
                outcome => {
                    let token = granted(outcome).token;
                    waited.token = Some(token);
                    if first {
                        let since_ms = to_ms(now_ns() - held_ns[&key]);
                        late_ms.push(since_ms - f64::from(TTL_MS));
                    }
                    let (name, number) = (format!("silent/{key}"), 3 + 3 * key as u64);
                    let release = leases[index].release(number, &name, token);
                    let id = wire.send_patiently(&release);
                    asked.insert((via, id), (key, index, release));
                }
            }
        }
    }
    waits
}

/// User and system time of a node so far.
fn cpu(cluster: &Cluster, id: u64) -> Duration {
    let pid = cluster.pid(id).expect("it runs");
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields: Vec<&str> = stat.rsplit(") ").next().expect("Linux").split(' ').collect();
    let ticks: u64 = fields[11..=12].iter().map(|field| field.parse::<u64>().expect("ticks")).sum();
    Duration::from_millis(ticks * 10)
}

/// B36: a release answers its caller and the next waiter, and nobody else, however many wait.
#[test]
fn a_release_costs_one_grant_however_many_wait() {
    let crowds: &[usize] = scaled(&[1, 100, 1_000], &[1, 100, 1_000, 10_000]);
    let _alone = process::alone();
    let cluster = Cluster::start(bare::calm()).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    for crowd in crowds {
        let mut wire = bare::connect(cluster.addresses(leader).client);
        hand_over(&cluster, leader, &mut wire, *crowd);
    }
}

fn hand_over(cluster: &Cluster, leader: u64, wire: &mut Wire, crowd: usize) {
    let key = format!("crowd/{crowd}");
    let leases = open_many(wire, crowd + 1);
    let mut held = bare::grant(wire, &leases[0], 1, &key);
    let mut ids = Vec::new();
    for some in leases[1..].chunks(AT_ONCE) {
        let from = ids.len();
        let send = |lease: &Lease| wire.send_patiently(&lease.acquire(1, &key, FOR_EVER));
        ids.extend(some.iter().map(send));
        for (index, id) in ids.iter().enumerate().skip(from) {
            match next(wire) {
                (other, Outcome::Queued { position, .. }) => {
                    assert_eq!((other, position as usize), (*id, index));
                }
                other => panic!("not queued: {other:?}"),
            }
        }
    }
    let window = Duration::from_secs(scaled(1, 10));
    let cpu_from = cpu(cluster, leader);
    std::thread::sleep(window);
    let idle =
        cpu(cluster, leader).saturating_sub(cpu_from).as_secs_f64() / window.as_secs_f64() * 100.0;

    let mut took_ms = Vec::new();
    for (index, id) in ids.iter().enumerate().take(100) {
        let from_ns = now_ns();
        let release = wire.send_patiently(&leases[index].release(3, &key, held.token));
        let answers = take(wire, &[release, *id]);
        took_ms.push((now_ns() - from_ns) as f64 / 1e6);
        assert!(matches!(answers[&release], Outcome::Released { .. }), "{answers:?}");
        let grant = granted(answers[id]);
        assert!(grant.token > held.token);
        held = grant;
        assert_eq!(nothing_more(wire, &key).waiters_total as usize, crowd - index - 1);
    }
    took_ms.sort_by(f64::total_cmp);
    println!(
        "{crowd} waiters: hand-over {:.1} ms in the median, {:.1} ms at most of {}; the leader used {idle:.1} % of a core while all waited",
        took_ms[took_ms.len() / 2],
        took_ms[took_ms.len() - 1],
        took_ms.len()
    );
}

fn force(key: &str, token: Token) -> Request {
    use leasehold_protocol::command::Command;
    let (key, who, why) = (key.as_bytes().to_vec(), b"operator".to_vec(), b"test".to_vec());
    bare::command(Command::ForceRelease { key, token, who, why, now: true })
}

/// B39, B46: a session that asks again right after its hold was forced away is a newcomer, with a
/// larger token and at the end of the queue; a renewal and a repeated acquire change no token.
#[test]
fn a_token_stays_with_its_hold_and_a_regained_lock_has_a_larger_one() {
    const KEY: &str = "forced";
    let rounds = scaled(50, 500);
    let _alone = process::alone();
    let cluster = Cluster::start(bare::calm()).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let mut wire = bare::connect(cluster.addresses(leader).client);
    let [mut lead, mut rival] = [(); 2].map(|()| bare::open_lease(&mut wire, LONG_TTL_MS));
    let mut held = bare::grant(&mut wire, &lead, 1, KEY);
    for _ in 0..100 {
        renew_all(&mut wire, &[lead]);
    }
    match bare::outcome(&mut wire, &lead.acquire(4, KEY, 0)) {
        Outcome::Refused {
            code: leasehold_protocol::error::ErrorCode::ALREADY_HELD,
            token,
            ..
        } => {
            assert_eq!(token, held.token, "an acquire of the holder");
        }
        outcome => panic!("held twice: {outcome:?}"),
    }
    assert_eq!(bare::key(&mut wire, KEY).holders[0].token, held.token, "after 100 renewals");

    for round in 0..rounds {
        let number = 7 + 6 * round;
        (lead.floor, rival.floor) = (number - 1, number - 1);
        // Alone: the forced release and the new acquire in one go.
        let forced = wire.send_patiently(&force(KEY, held.token));
        let again = wire.send_patiently(&lead.acquire(number, KEY, FOR_EVER));
        let answers = BTreeMap::from([next(&mut wire), next(&mut wire)]);
        assert!(matches!(answers[&forced], Outcome::Forced { passed_on: true, .. }), "{answers:?}");
        let regained = granted(answers[&again]);
        assert!(regained.token > held.token, "the old token again");

        // With a rival in the queue: behind it.
        let (waiting, place) = enqueue(&mut wire, &rival, number, KEY);
        assert_eq!(place, 0);
        wire.send_patiently(&force(KEY, regained.token));
        let again = wire.send_patiently(&lead.acquire(number + 3, KEY, FOR_EVER));
        let answers = [next(&mut wire), next(&mut wire), next(&mut wire)];
        let of = |id| answers.iter().find(|answer| answer.0 == id).expect("answered").1;
        let rivals = granted(of(waiting));
        assert!(matches!(of(again), Outcome::Queued { position: 0, .. }), "{answers:?}");
        assert!(rivals.token > regained.token);
        let info = bare::key(&mut wire, KEY);
        assert_eq!((info.holders[0].lease, info.waiters[0].lease), (rival.id, lead.id));
        wire.send_patiently(&rival.release(number + 2, KEY, rivals.token));
        let answers = BTreeMap::from([next(&mut wire), next(&mut wire)]);
        held = granted(answers[&again]);
        assert!(held.token > rivals.token);
    }
    println!("{rounds} times forced and asked again, alone and behind a rival");
}
