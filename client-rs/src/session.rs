//! `Session`, and the request for a lock.

use std::sync::Arc;
use std::time::Duration;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{Mode, Secret};
use leasehold_protocol::reply::{Claimed, Holder, Waiting};
use tokio::sync::oneshot;

use crate::client::{ClientInner, gone, random_secret};
use crate::core::{AcquireRequest, Further, OpId, Options, SessionId, Wait};
use crate::error::{AcquireError, CallError, CloseError, Failure, SessionError};
use crate::guard::Guard;
use crate::io::shared::Reported;
use crate::places::Places;

/// What a client holds and waits under: one lease in each shard it uses, opened when first needed
/// and renewed by the library.
///
/// It is kept as long as it, a clone of it, a guard or a running acquire exists; then it is closed
/// as if `close` had been called, without waiting for the answer. When a lease was lost, its holds
/// are lost and its waits fail; the session itself goes on, with a new lease where it needs one.
#[derive(Clone, Debug)]
pub struct Session {
    inner: Arc<SessionInner>,
}

#[derive(Debug)]
pub(crate) struct SessionInner {
    pub(crate) client: Arc<ClientInner>,
    id: SessionId,
}

impl Drop for SessionInner {
    fn drop(&mut self) {
        self.client.shared.enter(|inner, now| inner.core.close_session(now, self.id));
    }
}

impl Session {
    pub(crate) fn open(
        client: &Arc<ClientInner>,
        ttl: Duration,
        label: String,
    ) -> Result<Self, SessionError> {
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let secret = random_secret().map_err(SessionError::Refused)?;
        let id = client
            .shared
            .enter(|inner, now| inner.core.open_session(now, ttl_ms, label, secret))
            .map_err(SessionError::Refused)?;
        Ok(Self { inner: Arc::new(SessionInner { client: Arc::clone(client), id }) })
    }

    /// Begins a request for the lock of a key: 1 to 512 bytes of UTF-8.
    pub fn lock(&self, key: impl Into<Vec<u8>>) -> LockRequest {
        LockRequest {
            session: Arc::clone(&self.inner),
            key: key.into(),
            value: Vec::new(),
            wait: Wait::Unlimited,
            own_ttl: None,
            options: Options::PLAIN,
            more: Vec::new(),
        }
    }

    /// Ends the session now, with everything it holds and waits for, whoever still has a guard of
    /// it: those see `LossCause::SessionClosed`. Holds with a lease of their own stay.
    ///
    /// From this call on nothing renews the session, whatever the answer is.
    pub async fn close(self) -> Result<(), CloseError> {
        let id = self.inner.id;
        let closed = self.inner.client.shared.enter(|inner, now| {
            let waiter = inner.await_close(id);
            inner.core.close_session(now, id);
            waiter
        });
        let (_, answer) = closed.map_err(CloseError::Unknown)?;
        answer.await.unwrap_or_else(|_| Err(gone())).map_err(CloseError::Unknown)
    }
}

/// A request for a lock, not sent yet.
#[derive(Clone, Debug)]
#[must_use = "a request does nothing until it is acquired"]
pub struct LockRequest {
    session: Arc<SessionInner>,
    key: Vec<u8>,
    value: Vec<u8>,
    wait: Wait,
    own_ttl: Option<Duration>,
    options: Options,
    /// Further keys, of the same shard.
    more: Vec<Further>,
}

impl LockRequest {
    /// Waits at most this long in the key's queue. Without it, `acquire` waits as long as the
    /// session's lease lives; but the cluster must have taken the request into the queue within
    /// the client's call time-out.
    pub const fn wait(mut self, wait: Duration) -> Self {
        self.wait = if wait.is_zero() { Wait::Try } else { Wait::For(wait) };
        self
    }

    /// Attaches a value, which whoever reads the key sees: at most 4096 bytes.
    pub fn value(mut self, value: impl Into<Vec<u8>>) -> Self {
        self.value = value.into();
        self
    }

    /// Gives the hold a lease of its own, which starts at the grant, outlives the session, and is
    /// renewed only by `Guard::renew`.
    pub const fn own_lease(mut self, ttl: Duration) -> Self {
        self.own_ttl = Some(ttl);
        self
    }

    /// Asks for a shared hold: any number of them go together, and none with an exclusive one. One
    /// queue serves both kinds in order, so that neither starves.
    pub const fn shared(mut self) -> Self {
        self.options.mode = Mode::SHARED;
        self
    }

    /// Asks for so many permits of a semaphore that has `limit` of them, 1 to 1024. Whoever finds
    /// the key unused decides how many it has; another number is refused with `limit_mismatch`,
    /// and `Client::set_limit` changes it. One session holds a key once: who wants further permits
    /// takes them under another session.
    pub const fn permits(mut self, permits: u32, limit: u32) -> Self {
        self.options.mode = Mode::permits(permits);
        self.options.limit = limit;
        self
    }

    /// If this session holds the key already, in the same mode or exclusively, enters that hold
    /// once more under its token, where it would be refused with `already_held` otherwise. Each
    /// entry has a guard of its own; the hold ends with the last of them.
    pub const fn reentrant(mut self) -> Self {
        self.options.reentrant = true;
        self
    }

    /// If the hold is lost, its place stays taken for this long, at most 60 s: for a resource that
    /// cannot check tokens and may still see late writes of the lost holder. Never after a release.
    pub fn lock_delay(mut self, delay: Duration) -> Self {
        self.options.delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        self
    }

    /// Another mode, and further keys that are granted in the same step.
    pub(crate) fn want(&mut self, mode: Mode, limit: u32, more: Vec<Further>) {
        (self.options.mode, self.options.limit, self.more) = (mode, limit, more);
    }

    /// Waits for the lock.
    ///
    /// Dropping the future cancels the request; if it was granted meanwhile, it is given back. The
    /// queue entry is gone within one round trip, or else with the session.
    pub async fn acquire(self) -> Result<Guard, AcquireError> {
        self.begin()?.granted().await
    }

    /// Takes the lock if it is free.
    pub async fn try_acquire(mut self) -> Result<Guard, AcquireError> {
        self.wait = Wait::Try;
        self.acquire().await
    }

    /// Sends the request; what it returns waits for the grant, and tells the place in the queue.
    pub fn begin(self) -> Result<Acquiring, AcquireError> {
        let own = match self.own_ttl {
            Some(ttl) => Some((own_ttl_ms(ttl), new_secret()?)),
            None => None,
        };
        let own_lease = own.is_some();
        let request = AcquireRequest {
            session: self.session.id,
            key: self.key.clone(),
            more: self.more,
            value: self.value,
            wait: self.wait,
            own,
            options: self.options,
        };
        let (op, answer) = self.session.client.shared.enter(|inner, now| {
            let op = inner.core.acquire(now, request);
            inner.await_acquire(op)
        })?;
        let interest = Interest::new(&self.session.client, op);
        Ok(Acquiring { session: self.session, key: self.key, own_lease, interest, answer })
    }
}

/// An acquire that was sent. Dropping it cancels the request; if it was granted meanwhile, it is
/// given back.
#[derive(Debug)]
#[must_use = "dropping it cancels the request"]
pub struct Acquiring {
    session: Arc<SessionInner>,
    key: Vec<u8>,
    own_lease: bool,
    interest: Interest,
    answer: oneshot::Receiver<Result<Reported, Failure>>,
}

impl Acquiring {
    /// Waits for the grant. Dropping the future cancels the request.
    pub async fn granted(self) -> Result<Guard, AcquireError> {
        let Self { session, key, own_lease, mut interest, answer } = self;
        let reported = answer.await.unwrap_or_else(|_| Err(gone()));
        interest.settled();
        match reported {
            Ok(reported) => Ok(Guard::new(session, interest.op, key, reported, own_lease)),
            Err(failure) if failure.code == ErrorCode::DELAYED => {
                Err(session.client.with_rest(&key, failure).await.into())
            }
            Err(failure) => Err(failure.into()),
        }
    }

    /// Tells the place in the queue while the grant is waited for; it keeps nothing alive.
    pub fn ticket(&self) -> Ticket {
        Ticket { client: Arc::clone(&self.interest.client), op: self.interest.op }
    }
}

/// A look at an acquire, without any claim on it.
#[derive(Clone, Debug)]
pub struct Ticket {
    client: Arc<ClientInner>,
    op: OpId,
}

/// Where an acquire waits, and for whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Waiters before it; of several keys, where these are the most.
    pub position: u32,
    /// All waiters of that key.
    pub waiters_total: u32,
    /// The present holders, at most 16 of them; of several keys, at least one for each that is held.
    pub holders: Vec<Holder>,
}

impl Place {
    /// Of several keys, the place that is furthest from its turn, and the holders of all.
    pub(crate) fn furthest(all: Vec<Waiting>) -> Option<Self> {
        let worst = all.iter().map(|one| (one.position, one.waiters_total)).max();
        let holders = all.into_iter().flat_map(|one| one.holders).collect();
        worst.map(|(position, waiters_total)| Self { position, waiters_total, holders })
    }
}

impl Ticket {
    /// The place in the queue as it changes, looked at this often, 100 ms at least: each look is a
    /// read.
    pub fn places(&self, every: Duration) -> Places {
        Places::new(self.clone(), every)
    }

    pub(crate) fn is_pending(&self) -> bool {
        self.client.shared.enter(|inner, _| inner.core.is_pending(self.op))
    }

    pub(crate) async fn claim(&self) -> Result<Claimed, Failure> {
        self.client.claim(self.op).await
    }

    /// The place in the queue, linearizably; `None` if it does not wait (any more).
    pub async fn place(&self) -> Result<Option<Place>, CallError> {
        match self.client.claim(self.op).await {
            Ok(Claimed::Waits(waiting)) => Ok(Place::furthest(vec![waiting])),
            Ok(Claimed::WaitsAll(all)) => Ok(Place::furthest(all)),
            Ok(_) => Ok(None),
            Err(failure) if failure.code == ErrorCode::NOT_QUEUED => Ok(None),
            Err(failure) => Err(failure.into()),
        }
    }
}

fn own_ttl_ms(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)
}

fn new_secret() -> Result<Secret, AcquireError> {
    Ok(random_secret()?)
}

/// While somebody waits for an acquire. Dropping it while `open` cancels the acquire.
#[derive(Debug)]
pub(crate) struct Interest {
    client: Arc<ClientInner>,
    op: OpId,
    open: bool,
}

impl Interest {
    pub(crate) fn new(client: &Arc<ClientInner>, op: OpId) -> Self {
        Self { client: Arc::clone(client), op, open: true }
    }

    /// The outcome is known.
    pub(crate) const fn settled(&mut self) {
        self.open = false;
    }
}

impl Drop for Interest {
    fn drop(&mut self) {
        if self.open {
            self.client.shared.enter(|inner, now| {
                inner.forget_acquire(self.op);
                inner.forget_hold(self.op);
                inner.core.abandon(now, self.op);
            });
        }
    }
}
