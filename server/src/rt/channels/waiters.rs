//! A first-come-first-served list of waiting tasks, the base of every channel here.
//!
//! A waiter is served exactly once. What serving means (a permit handed over, a change to look
//! at) is the channel's business; a waiter that is dropped unserved leaves no trace.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Context, Waker};

/// One waiting task.
#[derive(Debug)]
pub(super) struct Waiter {
    served: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Waiter {
    /// True once the list has served it.
    pub(super) fn served(&self) -> bool {
        self.served.get()
    }

    /// Remembers whom to wake, if that changed since the last poll.
    pub(super) fn renew(&self, cx: &Context<'_>) {
        let mut waker = self.waker.borrow_mut();
        match &mut *waker {
            Some(known) => known.clone_from(cx.waker()),
            empty @ None => *empty = Some(cx.waker().clone()),
        }
    }

    fn serve(&self) {
        assert!(!self.served.replace(true), "a waiter is served once");
        let waker = self.waker.borrow_mut().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The list. Its front has waited longest.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    queue: RefCell<VecDeque<Rc<Waiter>>>,
}

impl Waiters {
    /// Adds a waiter at the end.
    pub(super) fn join(&self, cx: &Context<'_>) -> Rc<Waiter> {
        let waiter = Rc::new(Waiter {
            served: Cell::new(false),
            waker: RefCell::new(Some(cx.waker().clone())),
        });
        self.queue.borrow_mut().push_back(Rc::clone(&waiter));
        waiter
    }

    /// Serves the one that has waited longest; false if nobody waits.
    pub(super) fn serve_first(&self) -> bool {
        let first = self.queue.borrow_mut().pop_front();
        match first {
            Some(waiter) => {
                waiter.serve();
                true
            }
            None => false,
        }
    }

    /// Serves everybody who waits now; who joins meanwhile is not among them.
    pub(super) fn serve_all(&self) {
        let all = std::mem::take(&mut *self.queue.borrow_mut());
        for waiter in all {
            waiter.serve();
        }
    }

    /// Takes out a waiter that no longer waits. Nothing happens if it was served.
    pub(super) fn leave(&self, waiter: &Rc<Waiter>) {
        if waiter.served() {
            return;
        }
        let mut queue = self.queue.borrow_mut();
        let place = queue.iter().position(|other| Rc::ptr_eq(other, waiter));
        queue.remove(place.expect("an unserved waiter is in the list"));
    }

    /// True if nobody waits.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.borrow().is_empty()
    }
}
