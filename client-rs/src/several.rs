//! Several keys: all at once inside one shard, or one after the other across shards.

use std::future::Future;
use std::time::Duration;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{Mode, Token};
use leasehold_protocol::shard::check_key;

use crate::clock::BootTime;
use crate::core::{Further, HoldState, LossCause};
use crate::error::{AcquireError, CallError, Failure, ReleaseError};
use crate::guard::{Guard, HoldWatch};
use crate::session::{Acquiring, LockRequest, Session, Ticket};
use crate::yields::Yields;

/// A request for several keys of one shard at once, not sent yet: all are granted in one step, or
/// none. Keys with the same `{tag}` share a shard.
///
/// It waits in the queue of each key, first in first out, and holds none of them meanwhile; so
/// requests that meet in several queues never wait for each other in a circle.
#[derive(Clone, Debug)]
#[must_use = "a request does nothing until it is acquired"]
pub struct LockAllRequest {
    session: Session,
    wants: Vec<Further>,
    wait: Option<Duration>,
    value: Vec<u8>,
    delay: Duration,
}

impl Session {
    /// Begins a request for exclusive holds of several keys of one shard, at most 64.
    pub fn lock_all<K: Into<Vec<u8>>>(&self, keys: impl IntoIterator<Item = K>) -> LockAllRequest {
        let (wait, value, delay) = (None, Vec::new(), Duration::ZERO);
        let request =
            LockAllRequest { session: self.clone(), wants: Vec::new(), wait, value, delay };
        keys.into_iter().fold(request, LockAllRequest::and_exclusive)
    }

    /// Begins a request for exclusive holds of keys of any shards, one after the other.
    pub fn lock_each<K: Into<Vec<u8>>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> LockEachRequest {
        let keys = keys.into_iter().map(Into::into).collect();
        let (wait, value, delay) = (None, Vec::new(), Duration::ZERO);
        LockEachRequest { session: self.clone(), keys, wait, value, delay }
    }
}

impl LockAllRequest {
    fn and(mut self, key: impl Into<Vec<u8>>, mode: Mode, limit: u32) -> Self {
        self.wants.push(Further { key: key.into(), mode, limit });
        self
    }

    /// And an exclusive hold of this key.
    pub fn and_exclusive(self, key: impl Into<Vec<u8>>) -> Self {
        self.and(key, Mode::EXCLUSIVE, 0)
    }

    /// And a shared hold of this key.
    pub fn and_shared(self, key: impl Into<Vec<u8>>) -> Self {
        self.and(key, Mode::SHARED, 0)
    }

    /// And so many permits of this semaphore, see `LockRequest::permits`.
    pub fn and_permits(self, key: impl Into<Vec<u8>>, permits: u32, limit: u32) -> Self {
        self.and(key, Mode::permits(permits), limit)
    }

    /// See `LockRequest::wait`.
    pub const fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Attaches a value to each hold, see `LockRequest::value`.
    pub fn value(mut self, value: impl Into<Vec<u8>>) -> Self {
        self.value = value.into();
        self
    }

    /// See `LockRequest::lock_delay`; for each key.
    pub const fn lock_delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Waits for all of them. Dropping the future cancels the request.
    pub async fn acquire(self) -> Result<MultiGuard, AcquireError> {
        self.begin()?.granted().await
    }

    /// Sends the request, see `LockRequest::begin`.
    pub fn begin(mut self) -> Result<AcquiringAll, AcquireError> {
        if self.wants.is_empty() {
            return Err(no_key().into());
        }
        let keys = self.wants.iter().map(|want| want.key.clone()).collect();
        let first = self.wants.remove(0);
        let mut request = self.session.lock(first.key).value(self.value).lock_delay(self.delay);
        request.want(first.mode, first.limit, self.wants);
        Ok(AcquiringAll { acquiring: waiting(request, self.wait).begin()?, keys })
    }

    /// Takes all of them if all are free.
    pub async fn try_acquire(self) -> Result<MultiGuard, AcquireError> {
        self.wait(Duration::ZERO).acquire().await
    }
}

fn waiting(request: LockRequest, wait: Option<Duration>) -> LockRequest {
    match wait {
        Some(wait) => request.wait(wait),
        None => request,
    }
}

fn no_key() -> Failure {
    Failure::new(ErrorCode::BAD_COMBINATION, "no key is given")
}

/// An acquire of several keys that was sent, see `Acquiring`.
#[derive(Debug)]
#[must_use = "dropping it cancels the request"]
pub struct AcquiringAll {
    acquiring: Acquiring,
    keys: Vec<Vec<u8>>,
}

impl AcquiringAll {
    /// Waits for the grant. Dropping the future cancels the request.
    pub async fn granted(self) -> Result<MultiGuard, AcquireError> {
        Ok(MultiGuard { guard: self.acquiring.granted().await?, keys: self.keys })
    }

    /// See `Acquiring::ticket`.
    pub fn ticket(&self) -> Ticket {
        self.acquiring.ticket()
    }
}

/// Several keys that were granted at once. To its holder they are one hold: when one of them is
/// lost, all are, and the others are given back. Dropping it gives all back without waiting for
/// the answer.
#[derive(Debug)]
pub struct MultiGuard {
    guard: Guard,
    keys: Vec<Vec<u8>>,
}

impl MultiGuard {
    /// The keys in the order of the request, each with its token.
    pub fn holds(&self) -> Vec<(&str, Token)> {
        let first = self.guard.token().0;
        let keys = (first..).zip(&self.keys);
        keys.map(|(token, key)| {
            (std::str::from_utf8(key).expect("a granted key was checked"), Token(token))
        })
        .collect()
    }

    /// The slots of each key in the order of the request, see `Guard::slots`; those of a lock are
    /// none.
    pub async fn slots(&self) -> Result<Vec<Vec<u32>>, CallError> {
        self.guard.all_slots().await
    }

    /// Requests to give up each of the keys, in the order of the request, see `Guard::yields`. All
    /// end when the hold does.
    pub fn yields(&self) -> Result<Vec<Yields>, CallError> {
        let keys = (0..).zip(&self.keys);
        keys.map(|(part, key)| self.guard.yields_of(key.clone(), part)).collect()
    }

    /// See `Guard::state`.
    pub fn state(&self) -> HoldState {
        self.guard.state()
    }

    /// See `Guard::remaining`.
    pub fn remaining(&self) -> Duration {
        self.guard.remaining()
    }

    /// See `Guard::lost`.
    pub fn lost(&self) -> impl Future<Output = LossCause> + Send + 'static {
        self.guard.lost()
    }

    /// See `Guard::watch`; its token is that of the first key.
    pub fn watch(&self) -> HoldWatch {
        self.guard.watch()
    }

    /// Gives all keys back in one step.
    pub async fn release(self) -> Result<(), ReleaseError> {
        self.guard.release().await
    }
}

/// A request for keys of any shards, one after the other, not sent yet.
///
/// It promises less than `LockAllRequest`: while it waits for one key it holds those before it, and
/// others see that. It takes the keys in the order of their bytes, so that requests like it never
/// wait for each other in a circle; who takes the same keys in another order can still make one.
#[derive(Clone, Debug)]
#[must_use = "a request does nothing until it is acquired"]
pub struct LockEachRequest {
    session: Session,
    keys: Vec<Vec<u8>>,
    wait: Option<Duration>,
    value: Vec<u8>,
    delay: Duration,
}

impl LockEachRequest {
    /// Waits at most this long for all keys together.
    pub const fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Attaches a value to each hold, see `LockRequest::value`.
    pub fn value(mut self, value: impl Into<Vec<u8>>) -> Self {
        self.value = value.into();
        self
    }

    /// See `LockRequest::lock_delay`; for each key.
    pub const fn lock_delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Waits for one key after the other. The guards are in the order of the keys' bytes. If one is
    /// not granted, all before it are given back, without waiting for the answers, and the error
    /// names the key. Dropping the future does the same.
    pub async fn acquire(mut self) -> Result<Vec<Guard>, AcquireError> {
        self.keys.sort_unstable();
        if self.keys.is_empty() {
            return Err(no_key().into());
        }
        let name = |key: &[u8]| String::from_utf8_lossy(key).into_owned();
        let twice = self.keys.iter().zip(&self.keys[1..]).find(|(one, next)| one == next);
        if let Some((key, _)) = twice {
            let text = format!("{}: {}", name(key), ErrorCode::DUPLICATE_KEY.text());
            return Err(Failure::new(ErrorCode::DUPLICATE_KEY, text).into());
        }
        // Before any is taken.
        for key in &self.keys {
            check_key(key)
                .map_err(|code| Failure::new(code, format!("{:?}: {}", name(key), code.text())))?;
        }
        let until = self.wait.map(|wait| BootTime::now().after(wait));
        let mut guards: Vec<Guard> = Vec::with_capacity(self.keys.len());
        for key in self.keys {
            let name = name(&key);
            let left = until.map(|until| until.since(BootTime::now()));
            let request = self.session.lock(key).value(self.value.clone()).lock_delay(self.delay);
            let granted = waiting(request, left).acquire().await;
            guards.push(granted.map_err(|error| {
                let failure = error.failure();
                let message = format!("{name}: {}", failure.message);
                AcquireError::from(Failure { message, ..failure.clone() })
            })?);
        }
        // Whatever was lost while others were waited for is not all of them.
        match guards.iter().find(|guard| matches!(guard.state(), HoldState::Lost(_))) {
            None => Ok(guards),
            Some(lost) => {
                let text = format!("{}: lost while another key was waited for", lost.key());
                Err(Failure::new(ErrorCode::LEASE_LOST, text).into())
            }
        }
    }
}
