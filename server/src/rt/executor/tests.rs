//! Starting, joining, mailboxes between real cores, the stall gauge and the bound on wrong parks.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, ThreadId};

use glommio::Placement;

use super::super::hop::{HopError, lanes};
use super::super::inbox::inbox;
use super::*;

const CONFIG_EXIT_CODE: i32 = 70;

fn config() -> ExecutorConfig {
    ExecutorConfig::new(CONFIG_EXIT_CODE)
}

#[test]
fn cores_start_run_and_end_with_their_results() {
    let executors = start(&config(), vec![10, 20, 30], |core, input| async move {
        assert_eq!(core.count, 3);
        core.id + input
    })
    .expect("io_uring is available");
    let results: Vec<usize> = executors.join().into_iter().map(|r| r.expect("returned")).collect();
    assert_eq!(results, [10, 21, 32]);
}

#[test]
fn messages_hop_between_cores_and_replies_come_back() {
    let executors = start(&config(), lanes::<u64>(3, 4), |core, ports| async move {
        let (outbox, mut mailbox) = ports.connect().await;
        let others = (0..core.count).filter(|other| *other != core.id);
        if core.id > 0 {
            // Answers core 0 until it is gone.
            while let Some((from, number)) = mailbox.recv().await {
                outbox.try_send(from, number * 10 + core.id as u64).expect("room: one in flight");
                if number == 99 {
                    break;
                }
            }
            return 0;
        }
        let mut sum = 0;
        for number in (0..50).chain([99]) {
            for other in others.clone() {
                outbox.try_send(other, number).expect("room: one in flight");
                let (from, reply) = mailbox.recv().await.expect("the other core lives");
                assert_eq!((from, reply), (other, number * 10 + other as u64));
                sum += reply;
            }
        }
        sum
    })
    .expect("io_uring is available");
    let results = executors.join();
    let numbers: u64 = (0..50).chain([99]).sum();
    assert_eq!(results[0], Ok(numbers * 20 + 51 * 3));
}

#[test]
fn a_full_lane_refuses_and_gives_the_message_back() {
    const CAPACITY: usize = 4;
    let (go, wait) = bounded::<()>(0);
    let executors = start(
        &config(),
        lanes::<usize>(2, CAPACITY).into_iter().zip([Some(go), None]).collect(),
        move |core, (ports, go)| async move {
            let (outbox, mut mailbox) = ports.connect().await;
            if core.id == 1 {
                // Core 0 fills the lane while this core's thread stands still.
                wait.recv().expect("core 0 says when");
                let mut received = 0;
                while received < CAPACITY {
                    assert_eq!(mailbox.recv().await, Some((0, received)));
                    received += 1;
                }
                return;
            }
            let mut sent = 0;
            while outbox.try_send(1, sent).is_ok() {
                sent += 1;
            }
            assert!(sent >= CAPACITY);
            assert_eq!(outbox.try_send(1, 777), Err(HopError::Full(777)));
            go.expect("core 0 has it").send(()).expect("core 1 waits");
            // Stays until core 1 has read what was sent.
            assert_eq!(mailbox.recv().await, None);
        },
    )
    .expect("io_uring is available");
    assert!(executors.join().iter().all(Result::is_ok));
}

#[test]
fn a_thread_wakes_a_sleeping_core() {
    let (post, mailbox) = inbox::<u32>(2);
    let (reply, replies) = bounded(1);
    let executors =
        start(&config(), vec![(mailbox, reply)], |_, (mut mailbox, reply)| async move {
            while let Some(number) = mailbox.recv().await {
                reply.send(number * 2).expect("the test waits");
            }
        })
        .expect("io_uring is available");
    for number in 0..200 {
        post.try_send(number).expect("room");
        assert_eq!(replies.recv(), Ok(number * 2));
    }
    drop(post);
    assert_eq!(executors.join(), [Ok(())]);
}

#[test]
fn a_blocked_core_shows_in_its_gauge() {
    let blocked = Duration::from_millis(300);
    let executors = start(&config(), vec![()], move |core, ()| async move {
        while core.gauges.beats() == 0 {
            GlommioRt::sleep(Duration::from_millis(1)).await;
        }
        core.gauges.take_longest_gap();
        let beats = core.gauges.beats();
        thread::sleep(blocked);
        while core.gauges.beats() == beats {
            GlommioRt::sleep(Duration::from_millis(1)).await;
        }
        core.gauges.take_longest_gap()
    })
    .expect("io_uring is available");
    let gap = executors.join().remove(0).expect("returned");
    assert!(gap + pulse::REST_IDLE >= blocked, "{gap:?}");
}

/// Gives way to every other task once.
async fn give_way() {
    let mut asked = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut asked, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// A waker that is deaf to its own core: what wakes it there is lost, as in a run queue that
/// glommio forgot.
struct Deaf {
    core: ThreadId,
    task: Waker,
    unheard: AtomicU64,
}

impl Wake for Deaf {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if thread::current().id() == self.core {
            self.unheard.fetch_add(1, Ordering::Relaxed);
        } else {
            self.task.wake_by_ref();
        }
    }
}

/// A core that sleeps without a timer while its pulse is due, which is what a wrong park comes to,
/// again and again: each beat is the watchdog's doing. Without the kick nothing ever wakes this
/// core, and the watchdog ends the test with its exit code.
#[test]
fn a_core_whose_pulse_hears_no_timer_is_kicked_for_each_beat() {
    const BEATS: u64 = 4;
    let executor = builder(Placement::Unbound).make().expect("io_uring is available");
    let gauges = Arc::new(CoreGauges::default());
    let limit = Duration::from_secs(10);
    let watched = vec![Arc::clone(&gauges)];
    let watchdog = Watchdog::start(watched, limit, CONFIG_EXIT_CODE).expect("a thread");
    let unheard = executor.run(async {
        let _retiring = pulse::Retiring::new(&gauges);
        let task = poll_fn(|cx| Poll::Ready(cx.waker().clone())).await;
        let core = thread::current().id();
        let deaf = Arc::new(Deaf { core, task, unheard: AtomicU64::new(0) });
        let waker = Waker::from(Arc::clone(&deaf));
        let mut pulse = pin!(pulse::run(Arc::clone(&gauges)));
        poll_fn(|_| {
            let never = pulse.as_mut().poll(&mut Context::from_waker(&waker));
            assert!(never.is_pending(), "the pulse ticks for ever");
            if gauges.beats() < BEATS { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        deaf.unheard.load(Ordering::Relaxed)
    });
    drop(watchdog);
    assert!(unheard >= BEATS, "only {unheard} timers rang in vain");
    assert!(gauges.kicks() >= BEATS, "{} kicks for {BEATS} beats", gauges.kicks());
}

/// Runs a task that can always run, until it has had its turns or the watchdog had to kick.
fn run_with_preempt_timer(timer: Duration) -> (u64, u64) {
    const TURNS_MAX: u64 = 100_000;
    let executor = builder(Placement::Unbound).preempt_timer(timer).make();
    let gauges = Arc::new(CoreGauges::default());
    let watched = vec![Arc::clone(&gauges)];
    let limit = Duration::from_secs(10);
    let watchdog = Watchdog::start(watched, limit, CONFIG_EXIT_CODE).expect("a thread");
    let turns = executor.expect("io_uring is available").run(async {
        let _retiring = pulse::Retiring::new(&gauges);
        drop(GlommioRt::spawn(pulse::run(Arc::clone(&gauges))));
        let mut turns = 0;
        while gauges.kicks() == 0 && turns < TURNS_MAX {
            give_way().await;
            turns += 1;
        }
        turns
    });
    drop(watchdog);
    (turns, gauges.kicks())
}

/// glommio's fault, made likelier step by step: the shorter the preemption timer, the more often
/// it has expired when the run queue is first looked at, so that the core parks with work to do.
/// Without the watchdog's kick this run sleeps for ever, pulse or not: sooner or later the pulse
/// itself waits in the forgotten queue. The watchdog would then end the test with its exit code.
///
/// Not far below 100 us: there a busy machine lets the timer expire before *every* look at the
/// queue, so that no kick helps. The server's own timer is 100 ms.
#[test]
fn a_core_that_parks_with_work_to_do_is_woken() {
    for micros in [400, 200, 100] {
        let (turns, kicks) = run_with_preempt_timer(Duration::from_micros(micros));
        println!("preempt timer {micros} us: {turns} turns, {kicks} kicks");
        if kicks > 0 {
            return;
        }
    }
    println!("the fault did not show on this machine");
}
