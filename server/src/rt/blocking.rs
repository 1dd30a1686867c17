//! Blocking calls off the core: name look-ups and the like, one helper thread each.
//!
//! Not for the write path. glommio's own pool is not used: a panic in it leaves the caller waiting
//! for ever.

use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;

/// Helper threads at most at one time in this process; more calls fail with `WouldBlock`. A call
/// whose caller gave up still counts until it returns.
pub const BLOCKING_THREADS_MAX: usize = 64;

static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Runs `work` on a helper thread, which starts at once. A panic in it is an error here.
pub fn run<F, T>(work: F) -> Blocking<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    let shared = Arc::new(Mutex::new(Slot { result: None, waker: None }));
    if let Err(error) = start(Arc::clone(&shared), work) {
        lock(&shared).result = Some(Err(error));
    }
    Blocking { shared }
}

/// See `run`. Dropping it abandons the result, not the call.
#[derive(Debug)]
pub struct Blocking<T> {
    shared: Arc<Mutex<Slot<T>>>,
}

#[derive(Debug)]
struct Slot<T> {
    result: Option<io::Result<T>>,
    waker: Option<Waker>,
}

/// The slot holds plain data that is valid at every step, so a poisoned lock is as good.
fn lock<T>(shared: &Mutex<Slot<T>>) -> MutexGuard<'_, Slot<T>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts one running thread while it lives.
struct Ticket;

impl Ticket {
    fn take() -> io::Result<Self> {
        let ticket = Self;
        if RUNNING.fetch_add(1, Ordering::Relaxed) < BLOCKING_THREADS_MAX {
            return Ok(ticket);
        }
        Err(io::Error::new(io::ErrorKind::WouldBlock, "too many blocking calls at once"))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::Relaxed);
    }
}

fn start<F, T>(shared: Arc<Mutex<Slot<T>>>, work: F) -> io::Result<()>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    let ticket = Ticket::take()?;
    let body = move || {
        let result = catch_unwind(AssertUnwindSafe(work));
        drop(ticket);
        let result = result.map_err(|_| io::Error::other("a blocking call panicked"));
        let waker = {
            let mut slot = lock(&shared);
            slot.result = Some(result);
            slot.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    };
    thread::Builder::new().name("blocking".into()).spawn(body).map(drop)
}

impl<T> Future for Blocking<T> {
    type Output = io::Result<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut slot = lock(&self.shared);
        if let Some(result) = slot.result.take() {
            return Poll::Ready(result);
        }
        slot.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}
