//! A thread for the system calls that would stop a core: making, naming and removing files,
//! syncing directories, reading past the cache.
//!
//! One thread, jobs in order. A job's caller waits on the core; waking a glommio task from another
//! thread goes through its executor's queue of foreign wakes.

use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};

/// Jobs that may wait at one time; more fail with `ResourceBusy`.
const JOBS_MAX: usize = 256;

type Job = Box<dyn FnOnce() + Send>;

/// A handle to the thread, which ends when the last handle is dropped.
#[derive(Clone)]
pub(super) struct Helper {
    jobs: Sender<Job>,
}

/// Where a job's result is put and fetched.
struct Slot<T> {
    result: Option<io::Result<T>>,
    waker: Option<Waker>,
}

impl Helper {
    /// Starts the thread.
    pub(super) fn start() -> io::Result<Self> {
        let (jobs, queue): (Sender<Job>, Receiver<Job>) = bounded(JOBS_MAX);
        let work = move || queue.iter().for_each(|job| job());
        thread::Builder::new().name("disk".into()).spawn(work)?;
        Ok(Self { jobs })
    }

    /// Runs `work` on the thread. It is queued at once; dropping the future does not cancel it.
    pub(super) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Answer<T> {
        let slot = Arc::new(Mutex::new(Slot { result: None, waker: None }));
        let answered = slot.clone();
        let job = Box::new(move || {
            // A panic must not leave the caller waiting for ever.
            let result = catch_unwind(AssertUnwindSafe(work));
            answer(&answered, result.unwrap_or_else(|_| Err(io::Error::other("a job panicked"))));
        });
        if self.jobs.try_send(job).is_err() {
            let busy = io::Error::new(io::ErrorKind::ResourceBusy, "too many disk jobs at once");
            answer(&slot, Err(busy));
        }
        Answer { slot }
    }
}

/// A job's result to come.
#[must_use = "it says whether the job succeeded"]
pub(super) struct Answer<T> {
    slot: Arc<Mutex<Slot<T>>>,
}

impl<T> Future for Answer<T> {
    type Output = io::Result<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(result) = slot.result.take() {
            return Poll::Ready(result);
        }
        slot.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

fn answer<T>(slot: &Mutex<Slot<T>>, result: io::Result<T>) {
    let waker = {
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        slot.result = Some(result);
        slot.waker.take()
    };
    if let Some(waker) = waker {
        waker.wake();
    }
}
