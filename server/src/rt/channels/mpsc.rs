//! The bounded channel: many senders, one receiver, first in first out, full means wait.
//!
//! It closes when the last strong sender or the receiver is gone. What was sent before the last
//! sender went is still received; what a dropped receiver left behind is dropped with it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};

use openraft_rt::{Mpsc, MpscReceiver, MpscSender, MpscWeakSender, SendError, TryRecvError};

use super::semaphore::Semaphore;

/// Names this channel to openraft.
#[derive(Debug)]
pub struct LocalMpsc;

impl Mpsc for LocalMpsc {
    type Sender<T> = Sender<T>;
    type Receiver<T> = Receiver<T>;
    type WeakSender<T> = WeakSender<T>;

    fn channel<T>(buffer: usize) -> (Sender<T>, Receiver<T>) {
        channel(buffer)
    }
}

/// A channel that holds at most `capacity` messages. Panics if `capacity` is 0.
pub fn channel<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    assert!(capacity > 0, "a channel holds at least one message");
    let shared = Rc::new(Shared {
        queue: RefCell::new(VecDeque::new()),
        slots: Semaphore::new(capacity),
        senders: Cell::new(1),
        receiver_gone: Cell::new(false),
        waker: RefCell::new(None),
    });
    (Sender { shared: Rc::clone(&shared) }, Receiver { shared })
}

struct Shared<T> {
    queue: RefCell<VecDeque<T>>,
    /// One permit for each message that may still be queued.
    slots: Semaphore,
    senders: Cell<usize>,
    receiver_gone: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl<T> Shared<T> {
    fn wake_receiver(&self) {
        let waker = self.waker.borrow_mut().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn push(&self, message: T) {
        self.queue.borrow_mut().push_back(message);
        self.wake_receiver();
    }

    fn pop(&self) -> Option<T> {
        let message = self.queue.borrow_mut().pop_front()?;
        self.slots.release();
        Some(message)
    }
}

/// Why `Sender::try_send` did not take a message; the message comes back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrySendError<T> {
    /// The channel holds all it can.
    #[error("channel full")]
    Full(T),
    /// The receiver is gone.
    #[error("channel closed")]
    Closed(T),
}

/// The sending half.
pub struct Sender<T> {
    shared: Rc<Shared<T>>,
}

impl<T> Sender<T> {
    /// Sends without waiting.
    pub fn try_send(&self, message: T) -> Result<(), TrySendError<T>> {
        if self.shared.receiver_gone.get() {
            return Err(TrySendError::Closed(message));
        }
        match self.shared.slots.try_acquire() {
            Some(permit) => {
                permit.forget();
                self.shared.push(message);
                Ok(())
            }
            None => Err(TrySendError::Full(message)),
        }
    }

    /// True if nobody will ever receive.
    pub fn is_closed(&self) -> bool {
        self.shared.receiver_gone.get()
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.shared.senders.set(self.shared.senders.get() + 1);
        Self { shared: Rc::clone(&self.shared) }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let left = self.shared.senders.get() - 1;
        self.shared.senders.set(left);
        if left == 0 {
            self.shared.wake_receiver();
        }
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").finish_non_exhaustive()
    }
}

impl<T> MpscSender<LocalMpsc, T> for Sender<T> {
    async fn send(&self, message: T) -> Result<(), SendError<T>> {
        match self.shared.slots.acquire().await {
            Ok(permit) => {
                permit.forget();
                self.shared.push(message);
                Ok(())
            }
            Err(_closed) => Err(SendError(message)),
        }
    }

    fn downgrade(&self) -> WeakSender<T> {
        WeakSender { shared: Rc::downgrade(&self.shared) }
    }
}

/// A sender that does not keep the channel open.
pub struct WeakSender<T> {
    shared: Weak<Shared<T>>,
}

impl<T> Clone for WeakSender<T> {
    fn clone(&self) -> Self {
        Self { shared: Weak::clone(&self.shared) }
    }
}

impl<T> fmt::Debug for WeakSender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeakSender").finish_non_exhaustive()
    }
}

impl<T> MpscWeakSender<LocalMpsc, T> for WeakSender<T> {
    fn upgrade(&self) -> Option<Sender<T>> {
        let shared = self.shared.upgrade()?;
        let senders = shared.senders.get();
        if senders == 0 {
            return None;
        }
        shared.senders.set(senders + 1);
        Some(Sender { shared })
    }
}

/// The receiving half.
pub struct Receiver<T> {
    shared: Rc<Shared<T>>,
}

impl<T> Receiver<T> {
    /// The next message; `None` once the channel is closed and empty.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<T>> {
        if let Some(message) = self.shared.pop() {
            return Poll::Ready(Some(message));
        }
        if self.shared.senders.get() == 0 {
            return Poll::Ready(None);
        }
        *self.shared.waker.borrow_mut() = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Messages queued now.
    pub fn len(&self) -> usize {
        self.shared.queue.borrow().len()
    }

    /// True if no message is queued now.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.shared.receiver_gone.set(true);
        self.shared.slots.close();
        let rest = std::mem::take(&mut *self.shared.queue.borrow_mut());
        drop(rest);
    }
}

impl<T> fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").finish_non_exhaustive()
    }
}

impl<T> MpscReceiver<T> for Receiver<T> {
    fn recv(&mut self) -> impl Future<Output = Option<T>> {
        poll_fn(|cx| self.poll_recv(cx))
    }

    fn try_recv(&mut self) -> Result<T, TryRecvError> {
        match self.shared.pop() {
            Some(message) => Ok(message),
            None if self.shared.senders.get() == 0 => Err(TryRecvError::Disconnected),
            None => Err(TryRecvError::Empty),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn waiting_senders_are_served_in_order() {
        let (sender, mut receiver) = channel(1);
        sender.try_send(0).expect("room");
        let mut one = Box::pin(sender.send(1));
        let mut two = Box::pin(sender.send(2));
        assert!((&mut one).now_or_never().is_none());
        assert!((&mut two).now_or_never().is_none());
        assert_eq!(sender.try_send(3), Err(TrySendError::Full(3)));

        assert_eq!(receiver.try_recv(), Ok(0));
        assert!((&mut two).now_or_never().is_none(), "the free slot is the first waiter's");
        assert!(one.now_or_never().is_some());
        assert_eq!(receiver.try_recv(), Ok(1));
        assert!(two.now_or_never().is_some());
        assert_eq!(receiver.try_recv(), Ok(2));
        assert_eq!(receiver.try_recv(), Err(TryRecvError::Empty));
    }

    #[test]
    fn a_dropped_receiver_drops_messages_and_refuses_waiters() {
        let (sender, receiver) = channel(1);
        let message = Rc::new(());
        sender.try_send(Rc::clone(&message)).expect("room");
        let mut waits = Box::pin(sender.send(Rc::clone(&message)));
        assert!((&mut waits).now_or_never().is_none());
        drop(receiver);
        let refused = waits.now_or_never().expect("woken").expect_err("closed");
        assert!(Rc::ptr_eq(&refused.0, &message));
        drop(refused);
        assert_eq!(Rc::strong_count(&message), 1);
        assert!(sender.is_closed());
        assert!(matches!(sender.try_send(message), Err(TrySendError::Closed(_))));
    }

    #[test]
    fn what_was_sent_before_the_last_sender_went_is_received() {
        let (sender, mut receiver) = channel(4);
        let weak = sender.downgrade();
        let second = weak.upgrade().expect("a sender lives");
        sender.try_send(1).expect("room");
        second.try_send(2).expect("room");
        drop(sender);
        assert!(receiver.recv().now_or_never().is_some());
        drop(second);
        assert!(weak.upgrade().is_none());
        assert_eq!(receiver.recv().now_or_never(), Some(Some(2)));
        assert_eq!(receiver.recv().now_or_never(), Some(None));
    }
}
