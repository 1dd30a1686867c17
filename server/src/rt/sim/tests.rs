//! Repeatability, crashes, stuns and clocks of the simulated world.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use openraft_rt::{AsyncRuntime, Instant, MpscReceiver, MpscSender};

use super::super::channels::channel;
use super::{JoinError, SimInstant, SimRt, SimWorld, WorldConfig};
use crate::env::Clock;

const MS: Duration = Duration::from_millis(1);

fn rough() -> WorldConfig {
    WorldConfig { poll_cost_max: Duration::from_micros(20), timer_slack_max: MS }
}

/// Some tasks that talk, sleep and draw numbers; returns the run's hash and the order of arrival.
fn busy_run(seed: u64) -> (u64, Vec<u64>) {
    let mut rt = SimRt::with_config(seed, rough());
    let arrived = rt.block_on(async {
        let (sender, mut receiver) = channel(2);
        for number in 0..20_u64 {
            let sender = sender.clone();
            drop(SimRt::spawn(async move {
                let pause = SimWorld::current().rng().below(3);
                SimRt::sleep(Duration::from_millis(pause)).await;
                sender.send(number).await.expect("the receiver lives");
            }));
        }
        drop(sender);
        let mut arrived = Vec::new();
        while let Some(number) = receiver.recv().await {
            arrived.push(number);
        }
        arrived
    });
    (rt.world().hash(), arrived)
}

#[test]
fn one_seed_is_one_run() {
    for seed in 0..50 {
        assert_eq!(busy_run(seed), busy_run(seed));
    }
    let (hash, order) = busy_run(1);
    let (other_hash, other_order) = busy_run(2);
    assert_ne!(hash, other_hash);
    assert_ne!(order, other_order, "the seed chooses among ready tasks");
}

#[test]
fn time_jumps_to_the_next_timer() {
    let mut rt = SimRt::new(1);
    rt.block_on(async {
        let start = SimInstant::now();
        SimRt::sleep(Duration::from_hours(1)).await;
        assert_eq!(start.elapsed(), Duration::from_hours(1));
    });
    assert!(rt.world().polls() < 5);
}

#[test]
#[should_panic(expected = "nothing can run and no timer is set")]
fn a_run_that_cannot_go_on_says_so() {
    SimRt::new(1).block_on(std::future::pending::<()>());
}

/// Sets its flag when dropped, and remembers whether its domain lived then.
struct Witness(Rc<Cell<Option<bool>>>);

impl Drop for Witness {
    fn drop(&mut self) {
        let world = SimWorld::current();
        self.0.set(Some(world.is_alive(world.current_domain())));
    }
}

#[test]
fn killing_a_domain_drops_its_tasks_where_they_wait() {
    let mut rt = SimRt::new(1);
    let world = rt.world().clone();
    let domain = world.add_domain(Duration::ZERO, 0);
    let seen = Rc::new(Cell::new(None));
    let witness = Witness(Rc::clone(&seen));
    rt.block_on(async {
        let task = world.spawn_in(domain, async move {
            let child = SimRt::spawn(async move {
                let _witness = witness;
                std::future::pending::<()>().await;
            });
            drop(child);
            SimRt::sleep(Duration::from_secs(10)).await;
            panic!("a dead task does not run");
        });
        SimRt::sleep(MS).await;
        assert_eq!(seen.get(), None);
        world.kill(domain);
        assert_eq!(seen.get(), Some(false), "dropped at once, in a dead domain");
        assert_eq!(task.await, Err(JoinError));
        assert_eq!(world.spawn_in(domain, async {}).await, Err(JoinError));

        world.revive(domain);
        assert_eq!(world.spawn_in(domain, async { 7 }).await, Ok(7));
        SimRt::sleep(Duration::from_secs(20)).await;
    });
}

#[test]
fn a_task_may_kill_its_own_domain() {
    let mut rt = SimRt::new(1);
    let world = rt.world().clone();
    let domain = world.add_domain(Duration::ZERO, 0);
    rt.block_on(async {
        let inner = world.clone();
        let task = world.spawn_in(domain, async move {
            inner.kill(domain);
            SimRt::sleep(MS).await;
            panic!("a dead task does not run");
        });
        assert_eq!(task.await, Err(JoinError));
        SimRt::sleep(Duration::from_secs(1)).await;
    });
}

#[test]
fn a_fuse_kills_between_any_two_polls() {
    for polls in 0..5_u64 {
        let mut rt = SimRt::new(1);
        let world = rt.world().clone();
        let domain = world.add_domain(Duration::ZERO, 0);
        let steps = Rc::new(Cell::new(0));
        let counted = Rc::clone(&steps);
        rt.block_on(async {
            world.kill_after_polls(domain, polls);
            drop(world.spawn_in(domain, async move {
                loop {
                    counted.set(counted.get() + 1);
                    SimRt::sleep(MS).await;
                }
            }));
            world.killed(domain).await;
        });
        assert_eq!(steps.get(), polls);
    }
}

#[test]
fn a_stunned_domain_wakes_late_with_its_clock_gone_on() {
    let mut rt = SimRt::new(1);
    let world = rt.world().clone();
    let domain = world.add_domain(Duration::ZERO, 0);
    rt.block_on(async {
        let task = world.spawn_in(domain, async {
            let start = SimInstant::now();
            SimRt::sleep(Duration::from_millis(10)).await;
            start.elapsed()
        });
        SimRt::sleep(MS).await;
        world.stun(domain, Duration::from_millis(500));
        world.stun(domain, Duration::from_millis(100));
        assert_eq!(task.await, Ok(Duration::from_millis(501)));
    });
}

#[test]
fn a_skewed_clock_sleeps_by_its_own_time() {
    let mut rt = SimRt::new(1);
    let world = rt.world().clone();
    let fast = world.add_domain(Duration::from_secs(1_000), 500);
    rt.block_on(async {
        let local = world.spawn_in(fast, async {
            let start = SimInstant::now();
            assert_eq!(start.as_nanos(), 1_000_000_000_000);
            SimRt::sleep(Duration::from_secs(100)).await;
            start.elapsed()
        });
        assert_eq!(local.await, Ok(Duration::from_secs(100)));
        let true_ms = world.now_ns() / 1_000_000;
        assert_eq!(true_ms, 99_950);
    });
}

#[test]
fn a_stepped_wall_clock_leaves_monotonic_time_alone() {
    let mut rt = SimRt::new(1);
    let world = rt.world().clone();
    let domain = world.add_domain(Duration::ZERO, 0);
    rt.block_on(async {
        let readings = Rc::new(RefCell::new(Vec::new()));
        for _ in 0..2 {
            let readings = Rc::clone(&readings);
            let read = async move {
                let clock = super::SimClock;
                readings.borrow_mut().push((clock.now(), clock.wall_ms()));
            };
            world.spawn_in(domain, read).await.expect("alive");
            world.step_wall(domain, -3_600_000);
        }
        let readings = readings.borrow();
        assert_eq!(readings[0].0, readings[1].0);
        assert_eq!(readings[0].1, readings[1].1 + 3_600_000);
    });
}

#[test]
fn a_frozen_domain_s_clock_and_sleeps_go_on_from_where_they_stood() {
    for rate_ppm in [0, -500, 500] {
        let mut rt = SimRt::new(1);
        let world = rt.world().clone();
        let domain = world.add_domain(Duration::ZERO, rate_ppm);
        rt.block_on(async {
            let task = world.spawn_in(domain, async {
                let start = SimInstant::now();
                SimRt::sleep(Duration::from_secs(1)).await;
                start.elapsed()
            });
            SimRt::sleep(MS).await;
            world.freeze(domain, Duration::from_secs(2));
            world.freeze(domain, MS);
            assert_eq!(task.await, Ok(Duration::from_secs(1)));
            let true_ms = world.now_ns() / 1_000_000;
            assert!((2_999..=3_001).contains(&true_ms), "{true_ms}");
        });
    }
}

#[test]
fn a_kill_ends_the_freeze_of_its_domain() {
    let mut rt = SimRt::new(1);
    let world = rt.world().clone();
    let domain = world.add_domain(Duration::ZERO, 0);
    rt.block_on(async {
        world.freeze(domain, Duration::from_mins(1));
        SimRt::sleep(Duration::from_secs(1)).await;
        world.kill(domain);
        world.revive(domain);
        let task = world.spawn_in(domain, SimRt::sleep(MS));
        assert_eq!(SimRt::timeout(Duration::from_secs(1), task).await, Ok(Ok(())));
    });
}

#[test]
fn a_slowed_clock_ends_no_sleep_early() {
    let mut rt = SimRt::new(1);
    let world = rt.world().clone();
    let domain = world.add_domain(Duration::ZERO, 500);
    rt.block_on(async {
        let task = world.spawn_in(domain, async {
            let start = SimInstant::now();
            SimRt::sleep(Duration::from_secs(100)).await;
            start.elapsed()
        });
        SimRt::sleep(MS).await;
        world.set_rate(domain, -500);
        assert!(task.await.expect("alive") >= Duration::from_secs(100));
    });
}

#[test]
fn a_clock_that_jumped_shows_it() {
    let mut rt = SimRt::new(1);
    let world = rt.world().clone();
    let domain = world.add_domain(Duration::ZERO, 0);
    rt.block_on(async {
        let ahead = world.clone();
        let task = world.spawn_in(domain, async move {
            let start = SimInstant::now();
            ahead.jump(domain, Duration::from_secs(9));
            SimRt::sleep(MS).await;
            start.elapsed()
        });
        assert_eq!(task.await, Ok(Duration::from_secs(9) + MS));
    });
}
