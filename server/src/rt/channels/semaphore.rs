//! A fair counting semaphore: the base of the bounded channel and the mutex.
//!
//! A returned permit goes straight to the longest waiter. It is never up for grabs in between, so
//! a latecomer cannot overtake, and free permits and waiters never exist together.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use super::waiters::{Waiter, Waiters};

/// The semaphore was closed; no permit will ever be handed out again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("closed")]
pub struct Closed;

/// See the module.
#[derive(Debug)]
pub struct Semaphore {
    free: Cell<usize>,
    closed: Cell<bool>,
    waiters: Waiters,
}

impl Semaphore {
    /// A semaphore with `permits` permits.
    pub fn new(permits: usize) -> Self {
        Self { free: Cell::new(permits), closed: Cell::new(false), waiters: Waiters::default() }
    }

    /// Waits for a permit. Dropping the future gives up the place in the queue.
    pub fn acquire(&self) -> Acquire<'_> {
        Acquire { semaphore: self, waiter: None }
    }

    /// Takes a permit if one is free now.
    pub fn try_acquire(&self) -> Option<Permit<'_>> {
        self.take_free().then(|| Permit { semaphore: self })
    }

    /// Permits nobody holds.
    pub fn available(&self) -> usize {
        self.free.get()
    }

    /// Refuses all waiters and everybody to come.
    pub fn close(&self) {
        self.closed.set(true);
        self.waiters.serve_all();
    }

    /// Gives back a permit that was taken out with `Permit::forget`.
    pub fn release(&self) {
        if self.closed.get() || !self.waiters.serve_first() {
            self.free.set(self.free.get() + 1);
        }
    }

    fn take_free(&self) -> bool {
        if self.closed.get() || self.free.get() == 0 {
            return false;
        }
        assert!(self.waiters.is_empty(), "a free permit has no waiter");
        self.free.set(self.free.get() - 1);
        true
    }
}

/// A permit, given back when dropped.
#[derive(Debug)]
#[must_use = "a permit is given back when dropped"]
pub struct Permit<'a> {
    semaphore: &'a Semaphore,
}

impl Permit<'_> {
    /// Keeps the permit taken; `Semaphore::release` gives it back later.
    pub fn forget(self) {
        std::mem::forget(self);
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.semaphore.release();
    }
}

/// See `Semaphore::acquire`.
#[derive(Debug)]
pub struct Acquire<'a> {
    semaphore: &'a Semaphore,
    waiter: Option<Rc<Waiter>>,
}

impl<'a> Future for Acquire<'a> {
    type Output = Result<Permit<'a>, Closed>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let semaphore = self.semaphore;
        match &self.waiter {
            Some(waiter) if !waiter.served() => {
                waiter.renew(cx);
                return Poll::Pending;
            }
            Some(_) => self.waiter = None,
            None if semaphore.closed.get() || semaphore.take_free() => {}
            None => {
                self.waiter = Some(semaphore.waiters.join(cx));
                return Poll::Pending;
            }
        }
        if semaphore.closed.get() {
            return Poll::Ready(Err(Closed));
        }
        Poll::Ready(Ok(Permit { semaphore }))
    }
}

impl Drop for Acquire<'_> {
    fn drop(&mut self) {
        let Some(waiter) = self.waiter.take() else { return };
        if waiter.served() {
            // The permit arrived but nobody looked: it belongs to the next.
            self.semaphore.release();
        } else {
            self.semaphore.waiters.leave(&waiter);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_latecomer_cannot_overtake() {
        let semaphore = Semaphore::new(1);
        let held = semaphore.try_acquire().expect("free");
        let mut first = semaphore.acquire();
        let mut second = semaphore.acquire();
        assert!((&mut first).now_or_never().is_none());
        assert!((&mut second).now_or_never().is_none());

        drop(held);
        assert!(semaphore.try_acquire().is_none(), "the permit is already the first waiter's");
        assert!((&mut second).now_or_never().is_none());
        let permit = first.now_or_never().expect("handed over").expect("open");
        drop(permit);
        assert!(second.now_or_never().expect("handed over").is_ok());
        assert_eq!(semaphore.available(), 1);
    }

    #[test]
    fn a_dropped_waiter_passes_its_permit_on() {
        let semaphore = Semaphore::new(1);
        let held = semaphore.try_acquire().expect("free");
        let mut quits_waiting = semaphore.acquire();
        let mut quits_served = semaphore.acquire();
        let mut stays = semaphore.acquire();
        assert!((&mut quits_waiting).now_or_never().is_none());
        assert!((&mut quits_served).now_or_never().is_none());
        assert!((&mut stays).now_or_never().is_none());

        drop(quits_waiting);
        drop(held);
        assert!((&mut stays).now_or_never().is_none());
        drop(quits_served);
        assert!(stays.now_or_never().expect("handed over").is_ok());
        assert_eq!(semaphore.available(), 1);
    }

    #[test]
    fn closing_refuses_waiters_and_newcomers() {
        let semaphore = Semaphore::new(0);
        let mut waits = semaphore.acquire();
        assert!((&mut waits).now_or_never().is_none());
        semaphore.close();
        assert_eq!(waits.now_or_never().expect("woken").unwrap_err(), Closed);
        assert_eq!(semaphore.acquire().now_or_never().expect("at once").unwrap_err(), Closed);
        semaphore.release();
        assert!(semaphore.try_acquire().is_none());
    }
}
