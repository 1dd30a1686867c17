//! A future with a deadline, the same for both runtimes.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// The time was up before the future was ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("time is up")]
pub struct Elapsed;

/// A future bounded by a sleep. The future is looked at first: ready at the deadline is in time.
#[derive(Debug)]
pub struct Timeout<F, S> {
    future: Pin<Box<F>>,
    sleep: S,
}

impl<F, S> Timeout<F, S> {
    pub(super) fn new(future: F, sleep: S) -> Self {
        Self { future: Box::pin(future), sleep }
    }
}

impl<F: Future, S: Future<Output = ()> + Unpin> Future for Timeout<F, S> {
    type Output = Result<F::Output, Elapsed>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(output) = self.future.as_mut().poll(cx) {
            return Poll::Ready(Ok(output));
        }
        Pin::new(&mut self.sleep).poll(cx).map(|()| Err(Elapsed))
    }
}
