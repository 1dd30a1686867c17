//! A channel for one value.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use openraft_rt::Oneshot;

/// Names this channel to openraft.
#[derive(Debug)]
pub struct LocalOneshot;

impl Oneshot for LocalOneshot {
    type Sender<T> = OneshotSender<T>;
    type Receiver<T> = OneshotReceiver<T>;
    type ReceiverError = OneshotClosed;

    fn channel<T>() -> (OneshotSender<T>, OneshotReceiver<T>) {
        oneshot()
    }
}

/// The sender was dropped without sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the sender was dropped without sending")]
pub struct OneshotClosed;

/// A channel for one value.
pub fn oneshot<T>() -> (OneshotSender<T>, OneshotReceiver<T>) {
    let shared = Rc::new(Shared {
        value: RefCell::new(None),
        waker: RefCell::new(None),
        sender_gone: Cell::new(false),
        receiver_gone: Cell::new(false),
    });
    (OneshotSender { shared: Rc::clone(&shared) }, OneshotReceiver { shared })
}

struct Shared<T> {
    value: RefCell<Option<T>>,
    waker: RefCell<Option<Waker>>,
    sender_gone: Cell<bool>,
    receiver_gone: Cell<bool>,
}

/// The sending half.
pub struct OneshotSender<T> {
    shared: Rc<Shared<T>>,
}

impl<T> OneshotSender<T> {
    /// Sends; the value comes back if the receiver is gone.
    pub fn send(self, value: T) -> Result<(), T> {
        if self.shared.receiver_gone.get() {
            return Err(value);
        }
        // Dropping `self` wakes the receiver.
        *self.shared.value.borrow_mut() = Some(value);
        Ok(())
    }

    /// True if nobody will ever receive.
    pub fn is_closed(&self) -> bool {
        self.shared.receiver_gone.get()
    }
}

impl<T> openraft_rt::OneshotSender<T> for OneshotSender<T> {
    fn send(self, value: T) -> Result<(), T> {
        OneshotSender::send(self, value)
    }
}

impl<T> Drop for OneshotSender<T> {
    fn drop(&mut self) {
        self.shared.sender_gone.set(true);
        let waker = self.shared.waker.borrow_mut().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> fmt::Debug for OneshotSender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OneshotSender").finish_non_exhaustive()
    }
}

/// The receiving half: a future.
pub struct OneshotReceiver<T> {
    shared: Rc<Shared<T>>,
}

impl<T> OneshotReceiver<T> {
    /// The value, if it is there now.
    pub fn try_recv(&mut self) -> Option<T> {
        self.shared.value.borrow_mut().take()
    }
}

impl<T> Future for OneshotReceiver<T> {
    type Output = Result<T, OneshotClosed>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(value) = self.try_recv() {
            return Poll::Ready(Ok(value));
        }
        if self.shared.sender_gone.get() {
            return Poll::Ready(Err(OneshotClosed));
        }
        *self.shared.waker.borrow_mut() = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl<T> Drop for OneshotReceiver<T> {
    fn drop(&mut self) {
        self.shared.receiver_gone.set(true);
        let unread = self.shared.value.borrow_mut().take();
        drop(unread);
    }
}

impl<T> fmt::Debug for OneshotReceiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OneshotReceiver").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn an_unread_value_dies_with_the_receiver() {
        let (sender, receiver) = oneshot();
        let value = Rc::new(());
        sender.send(Rc::clone(&value)).expect("receiver lives");
        drop(receiver);
        assert_eq!(Rc::strong_count(&value), 1);
    }

    #[test]
    fn a_silent_end_is_an_error_and_a_value_outlives_its_sender() {
        let (sender, receiver) = oneshot::<u8>();
        drop(sender);
        assert_eq!(receiver.now_or_never(), Some(Err(OneshotClosed)));

        let (sender, mut receiver) = oneshot();
        assert_eq!(receiver.try_recv(), None);
        sender.send(7).expect("receiver lives");
        assert_eq!(receiver.now_or_never(), Some(Ok(7)));
    }
}
