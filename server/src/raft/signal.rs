//! A change counter that tasks of one core wait on.
//!
//! Wakes in the order of registration and never loses a change: a waiter names the version it
//! knows.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::task::{Poll, Waker};

/// Raised whenever something changed; see `since`.
#[derive(Default)]
pub(crate) struct Signal {
    version: Cell<u64>,
    wakers: RefCell<Vec<Waker>>,
}

impl Signal {
    /// The present version.
    pub(crate) fn version(&self) -> u64 {
        self.version.get()
    }

    /// Marks a change and wakes everybody who waits.
    pub(crate) fn raise(&self) {
        self.version.set(self.version.get() + 1);
        for waker in self.wakers.take() {
            waker.wake();
        }
    }

    /// Waits until the version differs from `version`.
    pub(crate) fn since(&self, version: u64) -> impl Future<Output = ()> + '_ {
        poll_fn(move |cx| {
            if self.version.get() != version {
                return Poll::Ready(());
            }
            let mut wakers = self.wakers.borrow_mut();
            if !wakers.iter().any(|known| known.will_wake(cx.waker())) {
                wakers.push(cx.waker().clone());
            }
            Poll::Pending
        })
    }
}
