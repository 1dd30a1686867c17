//! Confirmed rounds on simulated nodes (DESIGN §5): they serve while there is a quorum, and never
//! once another leader is elected, whatever answers arrive late.

mod raft_support;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt;
use leasehold_server::raft::types::Leadership;
use leasehold_server::raft::{ConfirmError, ProposeError};
use leasehold_server::rt::sim::{DomainId, SimRt, SimWorld};
use openraft::AsyncRuntime;
use raft_support::{Cluster, opening, run, sleep_ms, until};

fn ms(nanos: u64) -> u64 {
    nanos / 1_000_000
}

#[test]
fn a_round_starts_at_once_and_serves_all_who_wait() {
    run(1, async {
        let cluster = Cluster::formed(3).await;
        let (leader, leadership) = cluster.leader().await;
        let group = cluster.group(leader);
        for _ in 0..50 {
            sleep_ms(7).await;
            let before = cluster.world.now_ns();
            let all = (0..100).map(|_| group.confirm(leadership));
            let all = futures_util::future::join_all(all).await;
            assert!(all.iter().all(|confirmed| *confirmed == Ok(())));
            let took = ms(cluster.world.now_ns() - before);
            assert!(took < 5, "{took} ms: it waited for the next heartbeat");
        }
    });
}

#[test]
fn replication_confirms_too() {
    run(2, async {
        let cluster = Cluster::formed(3).await;
        let (leader, leadership) = cluster.leader().await;
        let group = cluster.group(leader);
        for secret in 0..30 {
            let proposed = group.propose(leadership, opening(secret));
            let (proposed, confirmed) =
                futures_util::future::join(proposed, group.confirm(leadership)).await;
            assert!(proposed.is_ok() && confirmed.is_ok());
        }
    });
}

/// All links of `node`, in one direction or both.
fn cut(cluster: &Cluster, node: u64, outward: bool, inward: bool) {
    for (other, machine) in cluster.machines.iter().filter(|(other, _)| **other != node) {
        let (us, them) = (cluster.machine(node).domain, machine.domain);
        assert_ne!(*other, node);
        if outward {
            cluster.net.cut(us, them);
        }
        if inward {
            cluster.net.cut(them, us);
        }
    }
}

/// The deposed leader's renewal does not pass within `patience`, nor when everything is heard again.
async fn never_confirmed(
    cluster: &Cluster,
    mut renewal: impl Future<Output = Result<(), ConfirmError>> + Unpin,
    patience: Duration,
    seed: u64,
) {
    let confirmed = SimRt::timeout(patience, &mut renewal).await;
    assert!(
        !matches!(confirmed, Ok(Ok(()))),
        "seed {seed}: an answer from before the election confirmed a renewal after it"
    );
    cluster.net.heal_all();
    let confirmed = match confirmed {
        Ok(confirmed) => confirmed,
        Err(_) => renewal.await,
    };
    assert_eq!(confirmed, Err(ConfirmError::NotLeader), "seed {seed}");
    cluster.agree().await;
}

/// Requests are accepted, their answers are held back, another leader is elected, and then the old
/// answers arrive at the old leader, which hears nothing else.
#[test]
fn answers_from_before_the_election_confirm_nothing() {
    for seed in 0..20 {
        run(100 + seed, async {
            let cluster = Cluster::formed(3).await;
            let (old, leadership) = cluster.leader().await;
            let group = cluster.group(old);
            // Writes and heartbeats are on their way all the time.
            for secret in 0..20 {
                let group = group.clone();
                let write = async move {
                    sleep_ms(u64::from(secret)).await;
                    let _lost = group.propose(leadership, opening(secret)).await;
                };
                drop(cluster.world.spawn_in(cluster.machine(old).domain, write));
            }
            sleep_ms(10).await;
            SimRt::sleep(Duration::from_micros(50 * seed)).await;
            // Answers stand still from here on; what the leader says still goes out for a moment.
            cut(&cluster, old, false, true);
            SimRt::sleep(Duration::from_micros(700)).await;
            cut(&cluster, old, true, true);
            let (new, after) = cluster.leader_but(old).await;
            assert!(after > leadership && new != old);
            cluster.open_lease(99).await;

            // A renewal comes to the old leader; then the old answers do.
            let mut renewal = Box::pin(group.confirm(leadership));
            assert_eq!((&mut renewal).now_or_never(), None, "seed {seed}");
            for other in (1..=3).filter(|other| *other != old) {
                let (us, them) = (cluster.machine(old).domain, cluster.machine(other).domain);
                cluster.net.heal(them, us);
            }
            never_confirmed(&cluster, renewal, Duration::from_millis(900), seed).await;
        });
    }
}

/// The same where nothing is sent behind the last entry, which is what moves the engine's own stamp.
/// The first old answer commits that entry, and the engine tells the other follower so in a request
/// without entries, made after the election. It ends at the same entry, so the engine takes that
/// follower's old answer for an answer to it too, and has a quorum for a moment at which another
/// node led.
#[test]
fn an_early_answer_does_not_count_for_a_later_empty_request() {
    for seed in 0..20 {
        run(200 + seed, async {
            let cluster = Cluster::formed(3).await;
            let (old, leadership) = cluster.leader().await;
            let group = cluster.group(old);
            cluster.open_lease(1).await;
            cluster.agree().await;

            // Both followers accept one more entry, and their answers stand still.
            let before = group.status().last_index;
            cut(&cluster, old, false, true);
            let writing = group.clone();
            let write = async move { writing.propose(leadership, opening(2)).await };
            let write = cluster.world.spawn_in(cluster.machine(old).domain, write);
            until("all have the entry", || {
                (1..=3).all(|node| cluster.group(node).status().last_index > before)
            })
            .await;
            cut(&cluster, old, true, true);
            let (new, after) = cluster.leader_but(old).await;
            assert!(after > leadership && new != old);

            // A renewal comes to the old leader; then the old answers do, one by one.
            let mut renewal = Box::pin(group.confirm(leadership));
            assert_eq!((&mut renewal).now_or_never(), None, "seed {seed}");
            let other = 6 - old - new;
            let (first, second) = if seed % 2 == 0 { (new, other) } else { (other, new) };
            let heal = |from: u64| {
                cluster.net.heal(cluster.machine(from).domain, cluster.machine(old).domain);
            };
            for answered in [first, second] {
                heal(answered);
                let confirmed = SimRt::timeout(Duration::from_millis(2), &mut renewal).await;
                assert_eq!(confirmed.ok(), None, "seed {seed}, after the answer of {answered}");
            }
            let written = write.now_or_never();
            assert!(matches!(written, Some(Ok(Ok(_)))), "seed {seed}: the old answers were lost");
            // It has not even heard that it is deposed: whatever came were old answers.
            assert_eq!(group.leadership(), Some(leadership), "seed {seed}");
            never_confirmed(&cluster, renewal, Duration::from_millis(900), seed).await;
        });
    }
}

#[test]
fn a_leader_without_a_quorum_confirms_nothing_and_says_so_when_deposed() {
    run(3, async {
        let cluster = Cluster::formed(3).await;
        let (old, leadership) = cluster.leader().await;
        let group = cluster.group(old);
        cut(&cluster, old, true, true);
        let confirmed = SimRt::timeout(Duration::from_secs(2), group.confirm(leadership)).await;
        assert!(confirmed.is_err(), "{confirmed:?}");
        let proposed = group.propose(leadership, opening(1)).await;
        assert_eq!(proposed, Err(ProposeError::NoQuorum));
        cluster.leader_but(old).await;
        cluster.net.heal_all();
        let confirmed = group.confirm(leadership).await;
        assert_eq!(confirmed, Err(ConfirmError::NotLeader));
    });
}

/// When each leadership was first seen, and every confirmation that was given.
#[derive(Default)]
struct Witness {
    leaders: RefCell<Vec<(Leadership, u64)>>,
    confirmed: RefCell<Vec<(Leadership, u64)>>,
}

impl Witness {
    fn check(&self, seed: u64) {
        let leaders = self.leaders.borrow();
        for (confirmed, asked_ns) in self.confirmed.borrow().iter() {
            for (leader, since_ns) in leaders.iter().filter(|(leader, _)| leader > confirmed) {
                assert!(
                    since_ns > asked_ns,
                    "seed {seed}: {confirmed} was confirmed for a renewal that came at {asked_ns} \
                     ns, but {leader} led since {since_ns} ns"
                );
            }
        }
    }
}

/// Asks a node for confirmations all the time, and notes when it leads.
async fn ask(cluster: Rc<Cluster>, witness: Rc<Witness>, node: u64) {
    loop {
        sleep_ms(4).await;
        let Some(running) = cluster.machine(node).running.borrow().clone() else { continue };
        let Some(leadership) = running.group.leadership() else { continue };
        let now_ns = cluster.world.now_ns();
        let known = witness.leaders.borrow().iter().any(|(leader, _)| *leader == leadership);
        if !known {
            witness.leaders.borrow_mut().push((leadership, now_ns));
        }
        let witness = witness.clone();
        let world = cluster.world.clone();
        let confirm = async move {
            let asked_ns = world.now_ns();
            let patience = Duration::from_millis(400);
            let confirmed = SimRt::timeout(patience, running.group.confirm(leadership)).await;
            if matches!(confirmed, Ok(Ok(()))) {
                witness.confirmed.borrow_mut().push((leadership, asked_ns));
            }
        };
        let domain = cluster.machine(node).domain;
        drop(cluster.world.spawn_in(domain, confirm));
        // Writes, so that there are answers that the engine keeps waiting for.
        let group = cluster.group(node);
        let write = async move {
            let _lost = group.propose(leadership, opening(7)).await;
        };
        drop(cluster.world.spawn_in(domain, write));
    }
}

/// Holds back what comes to a node, then cuts it off until another leads, then lets the old answers
/// in.
async fn late_answers(cluster: &Cluster, world: &SimWorld, node: u64) {
    let node = cluster.leader_now().map_or(node, |(leader, _)| leader);
    cut(cluster, node, false, true);
    SimRt::sleep(Duration::from_micros(world.rng().below(2_000))).await;
    cut(cluster, node, true, true);
    sleep_ms(200 + world.rng().below(400)).await;
    for (_, machine) in cluster.machines.iter().filter(|(other, _)| **other != node) {
        cluster.net.heal(machine.domain, cluster.machine(node).domain);
    }
    sleep_ms(world.rng().below(300)).await;
}

/// Cuts and heals links, stuns and kills nodes, at random.
async fn trouble(cluster: &Cluster, world: &SimWorld, rounds: u64) {
    let domains: Vec<DomainId> = cluster.machines.values().map(|machine| machine.domain).collect();
    let nodes = domains.len() as u64;
    for _ in 0..rounds {
        sleep_ms(world.rng().below(400)).await;
        let node = world.rng().below(nodes) + 1;
        match world.rng().below(6) {
            0 => cut(cluster, node, true, true),
            1 => late_answers(cluster, world, node).await,
            2 => world.stun(cluster.machine(node).domain, Duration::from_millis(300)),
            3 => {
                cluster.kill(node);
                sleep_ms(world.rng().below(300)).await;
                cluster.start(node).await.expect("a killed node starts again");
            }
            4 => {
                let other = world.rng().below(nodes) + 1;
                let (a, b) = (cluster.machine(node).domain, cluster.machine(other).domain);
                if a != b {
                    cluster.net.break_streams(a, b);
                    cluster.net.set_delay(a, b, Duration::ZERO, Duration::from_millis(30));
                }
            }
            _ => {
                cluster.net.heal_all();
                cluster.net.reset_delays();
            }
        }
    }
    cluster.net.heal_all();
    cluster.net.reset_delays();
}

#[test]
fn no_confirmation_outlives_its_leadership_under_faults() {
    let mut confirmations = 0;
    let mut leaderships = 0;
    for seed in 0..3 {
        run(1_000 + seed, async {
            let cluster = Rc::new(Cluster::formed(3).await);
            let witness = Rc::new(Witness::default());
            for node in 1..=3 {
                drop(SimRt::spawn(ask(cluster.clone(), witness.clone(), node)));
            }
            trouble(&cluster, &cluster.world, 25).await;
            cluster.leader().await;
            cluster.open_lease(1).await;
            cluster.agree().await;
            witness.check(seed);
            confirmations += witness.confirmed.borrow().len();
            leaderships += witness.leaders.borrow().len();
        });
    }
    assert!(leaderships > 8, "{leaderships} leaderships: the faults did not bite");
    assert!(confirmations > 1_000, "{confirmations} confirmations");
}
