//! A value that many watch: each receiver sees the newest value, not every value.
//!
//! A borrowed value must not be held across an await or a send; the cell inside panics then
//! instead of hanging.

use std::cell::{Cell, Ref, RefCell};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use openraft_rt::Watch;
use openraft_rt::watch::{RecvError, SendError};

use super::waiters::{Waiter, Waiters};

/// Names this channel to openraft.
#[derive(Debug)]
pub struct LocalWatch;

impl Watch for LocalWatch {
    type Sender<T> = WatchSender<T>;
    type Receiver<T> = WatchReceiver<T>;
    type Ref<'a, T: 'a> = Ref<'a, T>;

    fn channel<T>(init: T) -> (WatchSender<T>, WatchReceiver<T>) {
        watch(init)
    }
}

/// A watched value that starts as `init`, which the first receiver counts as seen.
pub fn watch<T>(init: T) -> (WatchSender<T>, WatchReceiver<T>) {
    let shared = Rc::new(Shared {
        value: RefCell::new(init),
        version: Cell::new(0),
        senders: Cell::new(1),
        receivers: Cell::new(1),
        waiters: Waiters::default(),
    });
    (WatchSender { shared: Rc::clone(&shared) }, WatchReceiver { shared, seen: 0 })
}

struct Shared<T> {
    value: RefCell<T>,
    version: Cell<u64>,
    senders: Cell<usize>,
    receivers: Cell<usize>,
    waiters: Waiters,
}

impl<T> Shared<T> {
    fn announce(&self) {
        self.version.set(self.version.get() + 1);
        self.waiters.serve_all();
    }
}

/// The writing half.
pub struct WatchSender<T> {
    shared: Rc<Shared<T>>,
}

impl<T> openraft_rt::WatchSender<LocalWatch, T> for WatchSender<T> {
    fn send(&self, value: T) -> Result<(), SendError<T>> {
        if self.shared.receivers.get() == 0 {
            return Err(SendError(value));
        }
        let old = self.shared.value.replace(value);
        self.shared.announce();
        drop(old);
        Ok(())
    }

    fn send_if_modified<F>(&self, modify: F) -> bool
    where
        F: FnOnce(&mut T) -> bool,
    {
        let modified = modify(&mut self.shared.value.borrow_mut());
        if modified {
            self.shared.announce();
        }
        modified
    }

    fn borrow_watched(&self) -> Ref<'_, T> {
        self.shared.value.borrow()
    }

    fn subscribe(&self) -> WatchReceiver<T> {
        self.shared.receivers.set(self.shared.receivers.get() + 1);
        WatchReceiver { shared: Rc::clone(&self.shared), seen: self.shared.version.get() }
    }
}

impl<T> Clone for WatchSender<T> {
    fn clone(&self) -> Self {
        self.shared.senders.set(self.shared.senders.get() + 1);
        Self { shared: Rc::clone(&self.shared) }
    }
}

impl<T> Drop for WatchSender<T> {
    fn drop(&mut self) {
        let left = self.shared.senders.get() - 1;
        self.shared.senders.set(left);
        if left == 0 {
            self.shared.waiters.serve_all();
        }
    }
}

impl<T> fmt::Debug for WatchSender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchSender").finish_non_exhaustive()
    }
}

/// The reading half.
pub struct WatchReceiver<T> {
    shared: Rc<Shared<T>>,
    seen: u64,
}

impl<T> openraft_rt::WatchReceiver<LocalWatch, T> for WatchReceiver<T> {
    async fn changed(&mut self) -> Result<(), RecvError> {
        Changed { receiver: self, waiter: None }.await
    }

    fn borrow_watched(&self) -> Ref<'_, T> {
        self.shared.value.borrow()
    }

    fn borrow_and_update(&mut self) -> Ref<'_, T> {
        self.seen = self.shared.version.get();
        self.shared.value.borrow()
    }
}

impl<T> Clone for WatchReceiver<T> {
    fn clone(&self) -> Self {
        self.shared.receivers.set(self.shared.receivers.get() + 1);
        Self { shared: Rc::clone(&self.shared), seen: self.seen }
    }
}

impl<T> Drop for WatchReceiver<T> {
    fn drop(&mut self) {
        self.shared.receivers.set(self.shared.receivers.get() - 1);
    }
}

impl<T> fmt::Debug for WatchReceiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchReceiver").finish_non_exhaustive()
    }
}

struct Changed<'a, T> {
    receiver: &'a mut WatchReceiver<T>,
    waiter: Option<Rc<Waiter>>,
}

impl<T> Future for Changed<'_, T> {
    type Output = Result<(), RecvError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let version = this.receiver.shared.version.get();
        if version != this.receiver.seen {
            this.receiver.seen = version;
            return Poll::Ready(Ok(()));
        }
        if this.receiver.shared.senders.get() == 0 {
            return Poll::Ready(Err(RecvError(())));
        }
        match &this.waiter {
            Some(waiter) if !waiter.served() => waiter.renew(cx),
            _ => this.waiter = Some(this.receiver.shared.waiters.join(cx)),
        }
        Poll::Pending
    }
}

impl<T> Drop for Changed<'_, T> {
    fn drop(&mut self) {
        if let Some(waiter) = self.waiter.take() {
            self.receiver.shared.waiters.leave(&waiter);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use openraft_rt::{WatchReceiver as _, WatchSender as _};

    use super::*;

    #[test]
    fn the_end_is_seen_after_the_last_value() {
        let (sender, mut receiver) = watch(0);
        sender.send(1).expect("receiver lives");
        drop(sender);
        assert_eq!(receiver.changed().now_or_never(), Some(Ok(())));
        assert_eq!(*receiver.borrow_watched(), 1);
        assert_eq!(receiver.changed().now_or_never(), Some(Err(RecvError(()))));
    }

    #[test]
    fn a_dropped_wait_leaves_no_trace() {
        let (sender, mut receiver) = watch(0);
        let mut other = receiver.clone();
        assert!(receiver.changed().now_or_never().is_none());
        assert!(sender.shared.waiters.is_empty());
        sender.send(1).expect("receivers live");
        assert!(other.changed().now_or_never().is_some());
        assert!(receiver.changed().now_or_never().is_some());
    }
}
