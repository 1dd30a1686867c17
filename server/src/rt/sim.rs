//! The simulator's runtime: one thread, virtual time, every choice drawn from one seed.
//!
//! A run is a function of its seed. Ready tasks run in a seeded random order; time stands still
//! while anything can run and then jumps to the next timer. Nothing here reads an OS clock, starts
//! a thread or iterates over anything unordered, and a waker called from another thread panics.
//!
//! Tasks belong to **domains**, one for each simulated machine. A domain has its own clock, can be
//! stunned (as by SIGSTOP) and can be killed, which drops all its tasks wherever they wait.

mod domain;
mod rng;
mod task;
mod timers;
mod world;

use std::fmt;
use std::future::{Future, ready};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use openraft_rt::AsyncRuntime;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::channels::{LocalMpsc, LocalOneshot, LocalWatch, Mutex, OneshotReceiver};
use super::instant::RtInstant;
use super::timeout::{Elapsed, Timeout};
pub use domain::DomainId;
pub use rng::SimRng;
pub use timers::{SimClock, Sleep};
pub use world::{SimWorld, WorldConfig};

/// A point on the clock of the domain whose task asks.
pub type SimInstant = RtInstant<SimClock>;

/// See the module.
#[derive(Debug)]
pub struct SimRt {
    world: SimWorld,
}

impl SimRt {
    /// A world whose every choice follows from `seed`.
    pub fn with_config(seed: u64, config: WorldConfig) -> Self {
        Self { world: SimWorld::new(seed, config) }
    }

    /// The world, to look at and to interfere with.
    pub fn world(&self) -> &SimWorld {
        &self.world
    }
}

impl Drop for SimRt {
    fn drop(&mut self) {
        self.world.end();
    }
}

impl AsyncRuntime for SimRt {
    type JoinError = JoinError;
    type JoinHandle<T: 'static> = JoinHandle<T>;
    type Sleep = Sleep;
    type Instant = SimInstant;
    type TimeoutError = Elapsed;
    type Timeout<R, T: Future<Output = R>> = Timeout<T, Sleep>;
    type ThreadLocalRng = SmallRng;
    type Mpsc = LocalMpsc;
    type Watch = LocalWatch;
    type Oneshot = LocalOneshot;
    type Mutex<T: 'static> = Mutex<T>;

    fn spawn<T>(future: T) -> JoinHandle<T::Output>
    where
        T: Future + 'static,
        T::Output: 'static,
    {
        let world = SimWorld::current();
        world.spawn_in(world.current_domain(), future)
    }

    fn sleep(duration: Duration) -> Sleep {
        Sleep::lasting(duration)
    }

    fn sleep_until(deadline: SimInstant) -> Sleep {
        Sleep::until(deadline)
    }

    fn timeout<R, F: Future<Output = R>>(duration: Duration, future: F) -> Timeout<F, Sleep> {
        Timeout::new(future, Self::sleep(duration))
    }

    fn timeout_at<R, F: Future<Output = R>>(deadline: SimInstant, future: F) -> Timeout<F, Sleep> {
        Timeout::new(future, Self::sleep_until(deadline))
    }

    fn is_panic(_error: &JoinError) -> bool {
        // A panic ends the whole run.
        false
    }

    fn thread_rng() -> SmallRng {
        SmallRng::seed_from_u64(SimWorld::current().random())
    }

    fn new(_threads: usize) -> Self {
        Self::with_config(0, WorldConfig::default())
    }

    fn block_on<F, T>(&mut self, future: F) -> T
    where
        F: Future<Output = T>,
    {
        self.world.run(future)
    }

    fn spawn_blocking<F, T>(work: F) -> impl Future<Output = Result<T, io::Error>> + Send
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        ready(Ok(work()))
    }
}

/// The task's domain was killed before the task finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the task was killed")]
pub struct JoinError;

/// A spawned task. Dropping the handle lets the task run on.
pub struct JoinHandle<T> {
    output: OneshotReceiver<T>,
}

impl<T> JoinHandle<T> {
    fn new(output: OneshotReceiver<T>) -> Self {
        Self { output }
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.output).poll(cx).map(|output| output.map_err(|_| JoinError))
    }
}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinHandle").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
