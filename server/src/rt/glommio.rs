//! openraft's runtime on glommio: one executor is one core.
//!
//! A spawned task is only scheduled, never run on the spawner's stack, which glommio's own
//! `spawn_local` does: code that spawns may hold a borrow that the task wants.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use glommio::timer::Timer;
use glommio::{LocalExecutor, LocalExecutorBuilder, Placement, PoolPlacement};
use openraft_rt::AsyncRuntime;

use super::blocking;
use super::channels::{LocalMpsc, LocalOneshot, LocalWatch, Mutex};
use super::clock::{OsInstant, time_left};
use super::timeout::{Elapsed, Timeout};

/// Memory registered with each ring. Nothing here does direct I/O through glommio, so this is the
/// least it accepts; the default of 10 MiB per ring exceeds the usual MEMLOCK limit.
pub(super) const IO_MEMORY_BYTES: usize = 64 << 10;

/// A longer sleep is cut to this: glommio adds it to the present time, which must not overflow.
const SLEEP_MAX: Duration = Duration::from_hours(24 * 365);

/// See the module.
#[derive(Debug)]
pub struct GlommioRt {
    executor: LocalExecutor,
}

/// An executor as every core uses it.
pub(super) fn builder(placement: Placement) -> LocalExecutorBuilder {
    // glommio's pool follows the executor's placement by default, onto the very CPU that must not
    // block; nothing here uses the pool.
    LocalExecutorBuilder::new(placement)
        .io_memory(IO_MEMORY_BYTES)
        .blocking_thread_pool_placement(PoolPlacement::Unbound(1))
}

impl AsyncRuntime for GlommioRt {
    type JoinError = JoinError;
    type JoinHandle<T: 'static> = JoinHandle<T>;
    type Sleep = Sleep;
    type Instant = OsInstant;
    type TimeoutError = Elapsed;
    type Timeout<R, T: Future<Output = R>> = Timeout<T, Sleep>;
    type ThreadLocalRng = rand::rngs::ThreadRng;
    type Mpsc = LocalMpsc;
    type Watch = LocalWatch;
    type Oneshot = LocalOneshot;
    type Mutex<T: 'static> = Mutex<T>;

    fn spawn<T>(future: T) -> JoinHandle<T::Output>
    where
        T: Future + 'static,
        T::Output: 'static,
    {
        let queue = glommio::executor().current_task_queue();
        let task = glommio::spawn_local_into(future, queue).expect("the current queue exists");
        JoinHandle { inner: task.detach() }
    }

    fn sleep(duration: Duration) -> Sleep {
        Sleep { timer: Timer::new(duration.min(SLEEP_MAX)) }
    }

    fn sleep_until(deadline: OsInstant) -> Sleep {
        Self::sleep(time_left(deadline))
    }

    fn timeout<R, F: Future<Output = R>>(duration: Duration, future: F) -> Timeout<F, Sleep> {
        Timeout::new(future, Self::sleep(duration))
    }

    fn timeout_at<R, F: Future<Output = R>>(deadline: OsInstant, future: F) -> Timeout<F, Sleep> {
        Timeout::new(future, Self::sleep_until(deadline))
    }

    fn is_panic(_error: &JoinError) -> bool {
        // Release builds abort on a panic, so a task that did not finish was cancelled.
        false
    }

    fn thread_rng() -> Self::ThreadLocalRng {
        rand::rng()
    }

    fn new(_threads: usize) -> Self {
        let executor = builder(Placement::Unbound).make().expect("io_uring is available");
        Self { executor }
    }

    fn block_on<F, T>(&mut self, future: F) -> T
    where
        F: Future<Output = T>,
    {
        self.executor.run(future)
    }

    fn spawn_blocking<F, T>(work: F) -> impl Future<Output = Result<T, io::Error>> + Send
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        blocking::run(work)
    }
}

/// The task was cancelled before it finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the task was cancelled")]
pub struct JoinError;

/// A spawned task. Dropping the handle lets the task run on.
pub struct JoinHandle<T> {
    inner: glommio::task::JoinHandle<T>,
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.inner).poll(cx).map(|output| output.ok_or(JoinError))
    }
}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinHandle").finish_non_exhaustive()
    }
}

/// A timer on the current core.
#[derive(Debug)]
pub struct Sleep {
    timer: Timer,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.timer).poll(cx).map(drop)
    }
}
