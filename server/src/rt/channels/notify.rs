//! A bell: wakes one waiter, or all of them.
//!
//! `notify_one` with nobody waiting is remembered once, so that "look, then wait" misses nothing.
//! A wait may also end without a ring of its own; who waits for a condition looks again.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use super::waiters::{Waiter, Waiters};

/// See the module.
#[derive(Debug, Default)]
pub struct Notify {
    pending: Cell<bool>,
    waiters: Waiters,
}

impl Notify {
    /// A silent bell.
    pub fn new() -> Self {
        Self::default()
    }

    /// Wakes the longest waiter, or the next one to come.
    pub fn notify_one(&self) {
        if !self.waiters.serve_first() {
            self.pending.set(true);
        }
    }

    /// Wakes everybody who waits now. Nothing is remembered.
    pub fn notify_all(&self) {
        self.waiters.serve_all();
    }

    /// Waits for the bell. A place in the queue is taken at the first poll.
    pub fn notified(&self) -> Notified<'_> {
        Notified { notify: self, waiter: None }
    }
}

/// See `Notify::notified`.
#[derive(Debug)]
pub struct Notified<'a> {
    notify: &'a Notify,
    waiter: Option<Rc<Waiter>>,
}

impl Future for Notified<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        match &self.waiter {
            Some(waiter) if waiter.served() => {
                self.waiter = None;
                Poll::Ready(())
            }
            Some(waiter) => {
                waiter.renew(cx);
                Poll::Pending
            }
            None if self.notify.pending.take() => Poll::Ready(()),
            None => {
                self.waiter = Some(self.notify.waiters.join(cx));
                Poll::Pending
            }
        }
    }
}

impl Drop for Notified<'_> {
    fn drop(&mut self) {
        let Some(waiter) = self.waiter.take() else { return };
        if waiter.served() {
            // The bell rang for a waiter that never looked: let the next one look.
            self.notify.notify_one();
        } else {
            self.notify.waiters.leave(&waiter);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn one_ring_is_remembered_once() {
        let bell = Notify::new();
        bell.notify_one();
        bell.notify_one();
        assert!(bell.notified().now_or_never().is_some());
        assert!(bell.notified().now_or_never().is_none());
    }

    #[test]
    fn a_ring_for_a_dropped_waiter_reaches_the_next() {
        let bell = Notify::new();
        let mut first = bell.notified();
        let mut second = bell.notified();
        assert!((&mut first).now_or_never().is_none());
        assert!((&mut second).now_or_never().is_none());
        bell.notify_one();
        assert!((&mut second).now_or_never().is_none());
        drop(first);
        assert!(second.now_or_never().is_some());
    }

    #[test]
    fn ringing_for_all_is_not_remembered() {
        let bell = Notify::new();
        let mut first = bell.notified();
        let mut second = bell.notified();
        assert!((&mut first).now_or_never().is_none());
        assert!((&mut second).now_or_never().is_none());
        bell.notify_all();
        assert!(first.now_or_never().is_some());
        assert!(second.now_or_never().is_some());
        assert!(bell.notified().now_or_never().is_none());
    }
}
