//! Waiting for a condition on one core, without a channel: state lives in cells, whoever changes
//! it notifies, whoever waits looks again.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::task::{Poll, Waker};

/// Wakes every waiter; each checks its own condition.
#[derive(Default)]
pub(crate) struct Signal {
    // Bounded by the number of tasks that wait: a task that looks again does not queue twice.
    wakers: RefCell<Vec<Waker>>,
}

impl Signal {
    /// Lets every waiter look at its condition again.
    pub(crate) fn notify(&self) {
        // Taken out first: a waker may run code that waits on this very signal.
        let wakers = std::mem::take(&mut *self.wakers.borrow_mut());
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Resolves once `condition` holds.
    pub(crate) fn until(&self, mut condition: impl FnMut() -> bool) -> impl Future<Output = ()> {
        poll_fn(move |context| {
            if condition() {
                return Poll::Ready(());
            }
            let mut wakers = self.wakers.borrow_mut();
            if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                wakers.push(context.waker().clone());
            }
            Poll::Pending
        })
    }
}
