//! A bounded mailbox from ordinary threads to one core: accepted sockets, signals, the admin
//! thread's questions. Between cores see `hop`.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use crossbeam_channel::{Receiver, Sender, TryRecvError, TrySendError};

/// Why a message was not taken; it comes back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError<T> {
    /// The mailbox holds all it can.
    #[error("mailbox full")]
    Full(T),
    /// The core is gone.
    #[error("mailbox closed")]
    Closed(T),
}

/// A mailbox for at most `capacity` messages. Panics if `capacity` is 0.
pub fn inbox<T: Send>(capacity: usize) -> (Post<T>, Inbox<T>) {
    assert!(capacity > 0, "a mailbox holds at least one message");
    let (sender, receiver) = crossbeam_channel::bounded(capacity);
    let waker = Arc::new(WakerSlot::default());
    let bell = Arc::new(Bell { waker: Arc::clone(&waker) });
    (Post { sender, bell }, Inbox { receiver, waker })
}

#[derive(Debug, Default)]
struct WakerSlot {
    waker: Mutex<Option<Waker>>,
}

impl WakerSlot {
    fn set(&self, waker: Waker) {
        let mut slot = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        let old = slot.replace(waker);
        drop(slot);
        drop(old);
    }

    fn wake(&self) {
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Rings once more when the last sender is gone, so that the receiver sees the end.
#[derive(Debug)]
struct Bell {
    waker: Arc<WakerSlot>,
}

impl Drop for Bell {
    fn drop(&mut self) {
        self.waker.wake();
    }
}

/// The sending side, for any thread.
#[derive(Debug)]
pub struct Post<T> {
    // Declared first, so dropped first: when the bell rings for the last time, the channel must
    // already be closed.
    sender: Sender<T>,
    bell: Arc<Bell>,
}

impl<T> Clone for Post<T> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone(), bell: Arc::clone(&self.bell) }
    }
}

impl<T> Post<T> {
    /// Puts a message in, without waiting.
    pub fn try_send(&self, message: T) -> Result<(), PostError<T>> {
        match self.sender.try_send(message) {
            Ok(()) => {
                self.bell.waker.wake();
                Ok(())
            }
            Err(TrySendError::Full(message)) => Err(PostError::Full(message)),
            Err(TrySendError::Disconnected(message)) => Err(PostError::Closed(message)),
        }
    }
}

/// The receiving side, for one task of one core.
#[derive(Debug)]
pub struct Inbox<T> {
    receiver: Receiver<T>,
    waker: Arc<WakerSlot>,
}

impl<T> Inbox<T> {
    /// The next message; `None` when no sender is left.
    pub async fn recv(&mut self) -> Option<T> {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<T>> {
        if let Poll::Ready(outcome) = self.take() {
            return Poll::Ready(outcome);
        }
        self.waker.set(cx.waker().clone());
        // A message may have come in before the waker was in its place.
        self.take()
    }

    fn take(&mut self) -> Poll<Option<T>> {
        match self.receiver.try_recv() {
            Ok(message) => Poll::Ready(Some(message)),
            Err(TryRecvError::Disconnected) => Poll::Ready(None),
            Err(TryRecvError::Empty) => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Wake;
    use std::thread::{self, Thread};

    use super::*;

    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    fn block_on<F: Future>(future: F) -> F::Output {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut future = pin!(future);
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return output;
            }
            thread::park();
        }
    }

    /// A wake-up that got lost would leave both threads waiting for ever.
    #[test]
    fn no_message_sleeps_in_the_mailbox() {
        const MESSAGES: u64 = 200_000;
        let (post, mut mailbox) = inbox(1);
        let (back, mut replies) = inbox(1);
        let echo = thread::spawn(move || {
            while let Some(message) = block_on(mailbox.recv()) {
                back.try_send(message).expect("the last reply was taken");
            }
        });
        for message in 0..MESSAGES {
            post.try_send(message).expect("the last message was taken");
            assert_eq!(block_on(replies.recv()), Some(message));
        }
        drop(post);
        echo.join().expect("it saw the end");
        assert_eq!(block_on(replies.recv()), None);
    }

    #[test]
    fn a_full_or_orphaned_mailbox_gives_the_message_back() {
        let (post, mailbox) = inbox(1);
        post.try_send(1).expect("room");
        assert_eq!(post.try_send(2), Err(PostError::Full(2)));
        drop(mailbox);
        assert_eq!(post.try_send(3), Err(PostError::Closed(3)));
    }
}
