//! The world: tasks, time, and the choice of what happens next.
//!
//! Invariants: a task is polled only while its domain is alive and not stunned; a killed domain's
//! tasks are dropped at once, in order of their birth; true time never goes back; no cell is
//! borrowed while foreign code (a poll, a drop, a waker) runs.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::super::channels::{Notify, oneshot};
use super::JoinHandle;
use super::domain::{Domain, DomainId, SkewedClock};
use super::rng::{SimRng, mix};
use super::task::{BoxedTask, ReadyList, Task, TaskId, TaskWaker};
use super::timers::{TimerKey, Timers};

/// Polls at one point of true time after which a run is taken to be stuck in a loop.
const POLLS_AT_ONE_TIME_MAX: u64 = 10_000_000;

thread_local! {
    static CURRENT: RefCell<Option<SimWorld>> = const { RefCell::new(None) };
}

/// How much a world differs from a perfect one.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorldConfig {
    /// Each poll takes a random time up to this.
    pub poll_cost_max: Duration,
    /// Each timer fires late by a random time up to this.
    pub timer_slack_max: Duration,
}

/// A handle to a world. See the module.
#[derive(Clone)]
pub struct SimWorld {
    inner: Rc<Inner>,
}

struct Inner {
    config: WorldConfig,
    rng: SimRng,
    now_ns: Cell<u64>,
    hash: Cell<u64>,
    polls: Cell<u64>,
    polls_at_this_time: Cell<u64>,
    next_id: Cell<u64>,
    current_domain: Cell<DomainId>,
    ready: ReadyList,
    timers: Timers,
    tasks: RefCell<BTreeMap<TaskId, Task>>,
    domains: RefCell<Vec<Domain>>,
}

impl fmt::Debug for SimWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimWorld").field("now_ns", &self.now_ns()).finish_non_exhaustive()
    }
}

impl SimWorld {
    pub(super) fn new(seed: u64, config: WorldConfig) -> Self {
        let root = Domain::new(SkewedClock::new(0, 0, 0));
        let inner = Inner {
            config,
            rng: SimRng::new(seed),
            now_ns: Cell::new(0),
            hash: Cell::new(seed),
            polls: Cell::new(0),
            polls_at_this_time: Cell::new(0),
            next_id: Cell::new(1),
            current_domain: Cell::new(DomainId::ROOT),
            ready: ReadyList::default(),
            timers: Timers::default(),
            tasks: RefCell::new(BTreeMap::new()),
            domains: RefCell::new(vec![root]),
        };
        Self { inner: Rc::new(inner) }
    }

    /// The world that runs on this thread. Panics outside of one.
    pub fn current() -> Self {
        CURRENT.with_borrow(Clone::clone).expect("inside SimRt::block_on")
    }

    /// True time since the world began.
    pub fn now_ns(&self) -> u64 {
        self.inner.now_ns.get()
    }

    /// Polls made so far.
    pub fn polls(&self) -> u64 {
        self.inner.polls.get()
    }

    /// A digest of everything that happened so far: every poll, when, and all `record`ed values.
    pub fn hash(&self) -> u64 {
        self.inner.hash.get()
    }

    /// Adds a value to the run's digest.
    pub fn record(&self, value: u64) {
        self.inner.hash.set(mix(self.inner.hash.get().rotate_left(5) ^ value));
    }

    /// The world's own random numbers. Drawing from them is part of the run.
    pub fn rng(&self) -> &SimRng {
        &self.inner.rng
    }

    pub(super) fn random(&self) -> u64 {
        self.inner.rng.next()
    }

    /// A new machine whose clock shows `local` now and runs `rate_ppm` fast (or slow, if negative).
    pub fn add_domain(&self, local: Duration, rate_ppm: i32) -> DomainId {
        let local_ns = u64::try_from(local.as_nanos()).expect("less than 584 years");
        let clock = SkewedClock::new(self.now_ns(), local_ns, rate_ppm);
        let mut domains = self.inner.domains.borrow_mut();
        domains.push(Domain::new(clock));
        DomainId(u32::try_from(domains.len() - 1).expect("few domains"))
    }

    /// The domain of the running task.
    pub fn current_domain(&self) -> DomainId {
        self.inner.current_domain.get()
    }

    /// False from `kill` until `revive`.
    pub fn is_alive(&self, domain: DomainId) -> bool {
        self.with_domain(domain, |d| d.alive)
    }

    /// Drops all tasks of a domain, wherever they wait, as a crash of its process does. Their
    /// destructors run, but in a dead domain: whatever stands for the outside of the process must
    /// look at `is_alive` and let nothing out.
    pub fn kill(&self, domain: DomainId) {
        assert_ne!(domain, DomainId::ROOT, "the world itself lives on");
        let now_ns = self.now_ns();
        let killed = self.with_domain(domain, |d| {
            d.alive = false;
            d.stunned_until_ns = 0;
            d.thaw(now_ns);
            d.fuse = None;
            d.held_back.clear();
            Rc::clone(&d.killed)
        });
        self.record(u64::from(domain.0) | 1 << 63);
        self.drop_tasks_of(domain);
        killed.notify_all();
    }

    /// Kills a domain after `polls` more polls of its tasks: a crash between any two steps.
    pub fn kill_after_polls(&self, domain: DomainId, polls: u64) {
        assert_ne!(domain, DomainId::ROOT, "the world itself lives on");
        self.with_domain(domain, |d| d.fuse = Some(polls));
    }

    /// Waits until the domain is dead.
    pub async fn killed(&self, domain: DomainId) {
        let bell: Rc<Notify> = self.with_domain(domain, |d| Rc::clone(&d.killed));
        while self.is_alive(domain) {
            bell.notified().await;
        }
    }

    /// Lets a killed domain have tasks again. Its clock ran on.
    pub fn revive(&self, domain: DomainId) {
        self.with_domain(domain, |d| d.alive = true);
    }

    /// Runs none of the domain's tasks for `duration`, as SIGSTOP does. Its clock runs on.
    pub fn stun(&self, domain: DomainId, duration: Duration) {
        assert_ne!(domain, DomainId::ROOT, "the world itself runs on");
        let until_ns = self.now_ns() + duration.as_nanos() as u64;
        self.with_domain(domain, |d| d.stunned_until_ns = d.stunned_until_ns.max(until_ns));
        let world = self.clone();
        let end = async move {
            super::Sleep::lasting(duration).await;
            world.end_stun(domain);
        };
        drop(self.spawn_in(DomainId::ROOT, end));
    }

    /// The same, and the machine's clock stands still meanwhile, as that of a virtual machine does
    /// whose host pauses it. Sleeps end so much later.
    pub fn freeze(&self, domain: DomainId, duration: Duration) {
        self.stun(domain, duration);
        let now_ns = self.now_ns();
        let until_ns = now_ns + duration.as_nanos() as u64;
        self.with_domain(domain, |d| d.freeze(now_ns, until_ns));
    }

    /// From now on the domain's clock runs `rate_ppm` fast. Sleeps under way end no earlier than
    /// before, and never before their time on the clock.
    pub fn set_rate(&self, domain: DomainId, rate_ppm: i32) {
        let now_ns = self.now_ns();
        self.with_domain(domain, |d| d.set_rate(now_ns, rate_ppm));
    }

    /// The domain's clock jumps ahead, which no real one may do. Sleeps under way keep their end.
    pub fn jump(&self, domain: DomainId, by: Duration) {
        let now_ns = self.now_ns();
        self.with_domain(domain, |d| d.jump(now_ns, by.as_nanos() as u64));
    }

    /// Steps the domain's wall clock, which nothing may depend on.
    pub fn step_wall(&self, domain: DomainId, by_ms: i64) {
        self.with_domain(domain, |d| d.wall_offset_ms += by_ms);
    }

    /// Starts a task in a domain. In a dead domain it is dropped unstarted.
    pub fn spawn_in<F>(&self, domain: DomainId, future: F) -> JoinHandle<F::Output>
    where
        F: Future + 'static,
        F::Output: 'static,
    {
        let (sender, receiver) = oneshot();
        let handle = JoinHandle::new(receiver);
        if !self.is_alive(domain) {
            return handle;
        }
        let body = async move {
            // Nobody may be waiting for the output.
            let _ = sender.send(future.await);
        };
        let id = TaskId(self.new_id());
        let waker = TaskWaker::new(id, self.inner.ready.clone());
        let first_wake = waker.waker();
        let task = Task { domain, waker, future: Some(Box::pin(body)) };
        self.inner.tasks.borrow_mut().insert(id, task);
        first_wake.wake();
        handle
    }

    pub(super) fn timers(&self) -> &Timers {
        &self.inner.timers
    }

    /// When a sleep ends that begins now: on the running domain's clock, and in true time.
    pub(super) fn new_timer_after(&self, duration: Duration) -> (u64, TimerKey) {
        let now_ns = self.now_ns();
        let (local_ns, due_ns) = self.with_domain(self.current_domain(), |d| {
            let local_ns = d.local_after(now_ns, duration);
            (local_ns, d.true_at(local_ns))
        });
        let slack_ns = self.up_to(self.inner.config.timer_slack_max);
        (local_ns, (due_ns.saturating_add(slack_ns), self.new_id()))
    }

    /// Another timer for a sleep that would end before `local_ns` on its domain's clock.
    pub(super) fn timer_again(&self, domain: DomainId, local_ns: u64) -> Option<TimerKey> {
        let now_ns = self.now_ns();
        let early = |d: &mut Domain| {
            (d.local(now_ns) < local_ns).then(|| d.true_at(local_ns).max(now_ns + 1))
        };
        let due_ns = self.with_domain(domain, early);
        due_ns.map(|due_ns| (due_ns, self.new_id()))
    }

    pub(super) fn new_timer_at(&self, true_ns: u64) -> TimerKey {
        (true_ns, self.new_id())
    }

    pub(super) fn local_ns(&self) -> u64 {
        let now_ns = self.now_ns();
        self.with_domain(self.current_domain(), |d| d.local(now_ns))
    }

    pub(super) fn wall_offset_ms(&self) -> i64 {
        self.with_domain(self.current_domain(), |d| d.wall_offset_ms)
    }

    /// Runs the world until `future` is ready.
    pub(super) fn run<F: Future>(&self, future: F) -> F::Output {
        let _entered = Entered::new(self);
        let mut future = pin!(future);
        let main = TaskWaker::new(TaskId::MAIN, self.inner.ready.clone());
        let waker = main.waker();
        waker.wake_by_ref();
        loop {
            let Some(id) = self.choose_ready() else {
                self.jump_to_next_timer();
                continue;
            };
            if id != TaskId::MAIN {
                self.turn(id);
                continue;
            }
            main.taken();
            self.count_poll(id);
            if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return output;
            }
            self.pass_poll_cost();
        }
    }

    /// Drops every task. The world is of no use afterwards.
    pub(super) fn end(&self) {
        let _entered = Entered::new(self);
        for domain in self.inner.domains.borrow_mut().iter_mut() {
            domain.alive = false;
        }
        let domains = self.inner.domains.borrow().len();
        for index in 0..domains {
            self.drop_tasks_of(DomainId(index as u32));
        }
    }

    fn with_domain<T>(&self, domain: DomainId, look: impl FnOnce(&mut Domain) -> T) -> T {
        look(&mut self.inner.domains.borrow_mut()[domain.0 as usize])
    }

    fn new_id(&self) -> u64 {
        let id = self.inner.next_id.get();
        self.inner.next_id.set(id + 1);
        id
    }

    fn up_to(&self, max: Duration) -> u64 {
        match max.as_nanos() as u64 {
            0 => 0,
            max_ns => self.inner.rng.below(max_ns + 1),
        }
    }

    fn choose_ready(&self) -> Option<TaskId> {
        let count = self.inner.ready.len();
        if count == 0 {
            return None;
        }
        let index = if count == 1 { 0 } else { self.inner.rng.below(count as u64) as usize };
        Some(self.inner.ready.take(index))
    }

    fn jump_to_next_timer(&self) {
        let due_ns = self.inner.timers.first_due_ns();
        let due_ns = due_ns.expect("the run is stuck: nothing can run and no timer is set");
        self.pass_time_to(due_ns);
    }

    fn pass_time_to(&self, true_ns: u64) {
        if true_ns > self.now_ns() {
            self.inner.now_ns.set(true_ns);
            self.inner.polls_at_this_time.set(0);
        }
        self.inner.timers.fire(self.now_ns());
    }

    fn pass_poll_cost(&self) {
        let cost_ns = self.up_to(self.inner.config.poll_cost_max);
        if cost_ns > 0 {
            self.pass_time_to(self.now_ns() + cost_ns);
        }
    }

    fn count_poll(&self, id: TaskId) {
        self.inner.polls.set(self.inner.polls.get() + 1);
        let here = self.inner.polls_at_this_time.get() + 1;
        self.inner.polls_at_this_time.set(here);
        assert!(here < POLLS_AT_ONE_TIME_MAX, "the run is stuck: time stands still");
        self.record(id.0 ^ self.now_ns().rotate_left(32));
    }

    /// Gives a ready task its turn, if its domain lets it.
    fn turn(&self, id: TaskId) {
        let Some(domain) = self.inner.tasks.borrow().get(&id).map(|task| task.domain) else {
            // It finished or was killed after it was woken.
            return;
        };
        let now_ns = self.now_ns();
        let (held_back, burnt) = self.with_domain(domain, |d| {
            if d.stunned_until_ns > now_ns {
                d.held_back.push(id);
                return (true, false);
            }
            (false, d.burn())
        });
        if burnt {
            self.kill(domain);
        } else if !held_back {
            self.poll(id, domain);
        }
    }

    fn poll(&self, id: TaskId, domain: DomainId) {
        let (mut future, waker) = {
            let mut tasks = self.inner.tasks.borrow_mut();
            let task = tasks.get_mut(&id).expect("looked up by the caller");
            task.waker.taken();
            (task.future.take().expect("not being polled"), task.waker.waker())
        };
        self.count_poll(id);
        let outer = self.inner.current_domain.replace(domain);
        let outcome = future.as_mut().poll(&mut Context::from_waker(&waker));
        self.put_back(id, future, outcome.is_ready());
        self.inner.current_domain.set(outer);
        self.pass_poll_cost();
    }

    fn put_back(&self, id: TaskId, future: BoxedTask, finished: bool) {
        let mut tasks = self.inner.tasks.borrow_mut();
        if finished {
            tasks.remove(&id);
        } else if let Some(task) = tasks.get_mut(&id) {
            task.future = Some(future);
            return;
        }
        // Finished, or its domain was killed during its own turn.
        drop(tasks);
        drop(future);
    }

    fn end_stun(&self, domain: DomainId) {
        let now_ns = self.now_ns();
        let released = self.with_domain(domain, |d| {
            if d.stunned_until_ns > now_ns {
                return Vec::new();
            }
            std::mem::take(&mut d.held_back)
        });
        for id in released {
            self.inner.ready.push(id);
        }
    }

    fn drop_tasks_of(&self, domain: DomainId) {
        let outer = self.inner.current_domain.replace(domain);
        loop {
            let first = {
                let mut tasks = self.inner.tasks.borrow_mut();
                let id = tasks.iter().find(|(_, task)| task.domain == domain).map(|(id, _)| *id);
                id.and_then(|id| tasks.remove(&id))
            };
            match first {
                Some(task) => drop(task),
                None => break,
            }
        }
        self.inner.current_domain.set(outer);
    }
}

/// Makes a world the current one of this thread while it lives.
struct Entered {
    outer: Option<SimWorld>,
}

impl Entered {
    fn new(world: &SimWorld) -> Self {
        Self { outer: CURRENT.replace(Some(world.clone())) }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.outer.take());
    }
}
