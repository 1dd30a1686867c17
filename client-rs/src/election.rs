//! Elections: a key whose holder is the leader and whose value is what the leader proclaims.
//!
//! Nothing of it is a recipe of the client's: candidates wait in the key's queue, the end of a
//! leader elects the next in the same step, and a candidate whose end is committed is never
//! elected.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::time::Duration;

use leasehold_protocol::ids::{LeaseId, Token};
use leasehold_protocol::reply::{Holder, KeyInfo};

use crate::client::Client;
use crate::core::{HoldState, LossCause};
use crate::error::{AcquireError, CallError, ChangeError, ReleaseError};
use crate::guard::{Guard, HoldWatch};
use crate::observe::Observation;
use crate::session::{LockRequest, Session};
use crate::watch::{WatchFrom, WatchTarget};
use crate::yields::Yields;

/// An election, named by a key.
///
/// ```no_run
/// # async fn example(client: leasehold::Client) -> Result<(), leasehold::Error> {
/// use std::time::Duration;
///
/// let session = client.session(Duration::from_secs(15))?;
/// let election = client.election("elections/scheduler");
/// let leadership = election.campaign(&session, "10.0.0.7:8080").await?;
/// println!("leads under token {}", leadership.token());
/// tokio::select! {
///     cause = leadership.lost() => println!("stop: {}", cause.name()),
///     () = lead(leadership.token()) => leadership.resign().await?,
/// }
/// # Ok(())
/// # }
/// # async fn lead(_: leasehold::Token) {}
/// ```
#[derive(Clone, Debug)]
pub struct Election {
    client: Client,
    name: Vec<u8>,
}

/// Who leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// The token of this leadership: it rises from leader to leader.
    pub token: Token,
    /// What it proclaimed last, or campaigned with.
    pub value: Vec<u8>,
    /// The label of its session.
    pub label: String,
    /// The lease under which it leads.
    pub lease: LeaseId,
    /// The wall time of its election at the cluster, in Unix milliseconds, where it was read; for
    /// display only.
    pub since_ms: Option<u64>,
}

impl Leader {
    pub(crate) fn of(info: &KeyInfo) -> Option<Self> {
        info.holders.first().map(Self::from_holder)
    }

    fn from_holder(holder: &Holder) -> Self {
        Self {
            token: holder.token,
            value: holder.value.clone(),
            label: holder.label.clone(),
            lease: holder.lease,
            since_ms: Some(holder.since_ms),
        }
    }
}

impl Election {
    pub(crate) const fn new(client: Client, name: Vec<u8>) -> Self {
        Self { client, name }
    }

    /// Stands as a candidate, with a value of at most 4096 bytes that all see while it leads: its
    /// address, say. Await it; dropping that withdraws the candidate.
    pub fn campaign(&self, session: &Session, value: impl Into<Vec<u8>>) -> Campaign {
        Campaign { request: session.lock(self.name.clone()).value(value) }
    }

    /// Who leads from now on: the present leader first, then every change, that nobody leads, and
    /// that it is unknown.
    ///
    /// ```no_run
    /// # async fn example(client: leasehold::Client) -> Result<(), leasehold::Error> {
    /// use leasehold::Observed;
    ///
    /// let mut observation = client.election("elections/scheduler").observe()?;
    /// loop {
    ///     match observation.next().await? {
    ///         Observed::Leader(leader) => println!("{} leads", leader.label),
    ///         Observed::Vacant => println!("nobody leads"),
    ///         _ => println!("unknown"),
    ///     }
    /// }
    /// # }
    /// ```
    pub fn observe(&self) -> Result<Observation, CallError> {
        let target = WatchTarget::key(self.name.clone());
        Ok(Observation::new(self.client.watch(&target, &WatchFrom::State)?))
    }

    /// Who leads now, linearizably; `None` if nobody does. That it is unknown is an error.
    pub async fn leader(&self) -> Result<Option<Leader>, CallError> {
        Ok(Leader::of(&self.client.get(self.name.clone()).await?.info))
    }
}

/// A candidate that does not stand yet.
#[derive(Clone, Debug)]
#[must_use = "a campaign does nothing until it is awaited"]
pub struct Campaign {
    request: LockRequest,
}

impl Campaign {
    /// Withdraws after this long.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.request = self.request.wait(wait);
        self
    }

    /// If this leader is lost, nobody is elected for this long: see `LockRequest::lock_delay`.
    pub fn lock_delay(mut self, delay: Duration) -> Self {
        self.request = self.request.lock_delay(delay);
        self
    }
}

impl IntoFuture for Campaign {
    type Output = Result<Leadership, AcquireError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async { Ok(Leadership { guard: self.request.acquire().await? }) })
    }
}

/// The leadership of an election. It is a hold like any other: pass `token()` to what the leader
/// changes, and stop when it is lost. Dropping it resigns without waiting for the answer.
#[derive(Debug)]
pub struct Leadership {
    guard: Guard,
}

impl Leadership {
    /// The token of this leadership.
    pub fn token(&self) -> Token {
        self.guard.token()
    }

    /// The election's name.
    pub fn name(&self) -> &str {
        self.guard.key()
    }

    /// Held, at risk, or lost, at this very call.
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

    /// See `Guard::watch`.
    pub fn watch(&self) -> HoldWatch {
        self.guard.watch()
    }

    /// See `Guard::yields`.
    pub fn yields(&self) -> Result<Yields, CallError> {
        self.guard.yields()
    }

    /// Replaces the value that all see: at most 4096 bytes. Sent by this call, whether or not it is
    /// awaited; several are seen in the order of their calls.
    pub fn proclaim(
        &self,
        value: impl Into<Vec<u8>>,
    ) -> impl Future<Output = Result<(), ChangeError>> + Send + 'static {
        self.guard.set_value(value)
    }

    /// Gives the leadership up; the next candidate is elected in the same step.
    pub async fn resign(self) -> Result<(), ReleaseError> {
        self.guard.release().await
    }
}
