//! `Guard`: a hold, and what its holder may believe about it.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{Mode, Token};
use leasehold_protocol::reply::Claimed;
use tokio::sync::watch;

use crate::client::{Client, ClientInner, gone};
use crate::clock::BootTime;
use crate::core::{HoldCell, HoldState, LossCause, OpId, Wish};
use crate::error::{CallError, ChangeError, Failure, ReleaseError, RenewError};
use crate::handover::Handover;
use crate::io::shared::{Change, Reported};
use crate::session::SessionInner;
use crate::watch::{Watch, WatchFrom, WatchTarget};
use crate::yields::{Yields, YieldsOf};

/// A lock that was granted.
///
/// Pass `token()` to every resource that the lock protects: a paused process can act after its
/// lease ended, and only a resource that refuses lower tokens than it has seen is safe from that.
///
/// Dropping the guard gives the lock back without waiting for the answer. A guard that is
/// forgotten (`std::mem::forget`) keeps its session alive and renewed as long as the client's
/// runtime lives.
#[derive(Debug)]
pub struct Guard {
    client: Arc<ClientInner>,
    /// Kept alive by the guard, unless the hold has a lease of its own.
    session: Option<Arc<SessionInner>>,
    op: OpId,
    key: Vec<u8>,
    watch: HoldWatch,
    released: bool,
}

impl Guard {
    pub(crate) fn new(
        session: Arc<SessionInner>,
        op: OpId,
        key: Vec<u8>,
        reported: Reported,
        own_lease: bool,
    ) -> Self {
        let Reported { held, changes } = reported;
        let watch = HoldWatch { cell: held.cell, changes };
        let client = Arc::clone(&session.client);
        let session = (!own_lease).then_some(session);
        Self { client, session, op, key, watch, released: false }
    }

    /// One that another client was granted.
    pub(crate) fn taken(
        client: &Arc<ClientInner>,
        op: OpId,
        key: Vec<u8>,
        reported: Reported,
    ) -> Self {
        let watch = HoldWatch { cell: reported.held.cell, changes: reported.changes };
        Self { client: Arc::clone(client), session: None, op, key, watch, released: false }
    }

    /// The fencing token. Tokens of one key only ever rise (G2). It stays what it is until the hold
    /// is upgraded.
    pub fn token(&self) -> Token {
        self.watch.token()
    }

    /// What a resource may raise its own floor to when it sees this hold used: it refuses what comes
    /// with a token below the highest floor that it has seen. The token itself of an exclusive
    /// hold; of holds that go together a lower one, that refuses none of them.
    pub fn floor(&self) -> Token {
        self.watch.cell.floor()
    }

    /// Exclusive, shared, or so many permits.
    pub fn mode(&self) -> Mode {
        self.watch.cell.mode()
    }

    /// The slots of a semaphore that this hold's permits took, numbered from 0: what the semaphore
    /// guards is fenced slot by slot, by the highest token seen of each. Asks the cluster.
    pub async fn slots(&self) -> Result<Vec<u32>, CallError> {
        Ok(self.all_slots().await?.remove(0))
    }

    /// The slots of each of several keys that were granted at once.
    pub(crate) async fn all_slots(&self) -> Result<Vec<Vec<u32>>, CallError> {
        match self.client.claim(self.op).await? {
            Claimed::Holds(held) => Ok(vec![slots_of(&held.slots)]),
            Claimed::HoldsAll(all) if !all.is_empty() => {
                Ok(all.iter().map(|held| slots_of(&held.slots)).collect())
            }
            _ => Err(Failure::new(ErrorCode::NOT_OWNER, "the hold has ended").into()),
        }
    }

    /// Requests to give this hold up, made before and from now on. It costs a watch of the key; who
    /// does not ask for it is not told.
    pub fn yields(&self) -> Result<Yields, CallError> {
        self.yields_of(self.key.clone(), 0)
    }

    /// As `yields`, of one of several keys that were granted at once.
    pub(crate) fn yields_of(&self, key: Vec<u8>, part: u64) -> Result<Yields, CallError> {
        let lease = self.client.shared.enter(|inner, _| inner.core.lease_of(self.op));
        let watch = Watch::begin(&self.client, &WatchTarget::key(key.clone()), &WatchFrom::State)?;
        let client = Client { inner: Arc::clone(&self.client) };
        Ok(Yields::new(client, watch, self.watch(), YieldsOf { key, part, lease }))
    }

    /// Makes an exclusive hold shared: it goes on under its token, and waiting readers are let in.
    /// Sent by this call, whether or not it is awaited.
    pub fn downgrade(&self) -> impl Future<Output = Result<(), ChangeError>> + Send + 'static {
        self.change(Wish::Mode(Mode::SHARED))
    }

    /// Makes a shared hold exclusive, if nobody else holds the key; else it fails at once and the
    /// hold stays as it is. It passes by whoever waits, and comes with a new token. Sent by this
    /// call, whether or not it is awaited.
    pub fn upgrade(&self) -> impl Future<Output = Result<Token, ChangeError>> + Send + 'static {
        let changed = self.change(Wish::Mode(Mode::EXCLUSIVE));
        let watch = self.watch.clone();
        async move { changed.await.map(|()| watch.token()) }
    }

    /// Replaces the value: at most 4096 bytes. Sent by this call, whether or not it is awaited.
    pub fn set_value(
        &self,
        value: impl Into<Vec<u8>>,
    ) -> impl Future<Output = Result<(), ChangeError>> + Send + 'static {
        self.change(Wish::Value(value.into()))
    }

    fn change(&self, wish: Wish) -> impl Future<Output = Result<(), ChangeError>> + Send + use<> {
        let started = self.client.shared.enter(|inner, now| {
            let call = inner.core.change(now, self.op, wish);
            inner.await_confirmation(call)
        });
        async move {
            let (_, answer) = started?;
            Ok(answer.await.unwrap_or_else(|_| Err(gone()))?)
        }
    }

    /// The key.
    pub fn key(&self) -> &str {
        std::str::from_utf8(&self.key).expect("a granted key was checked")
    }

    /// How long the hold is valid without another renewal; zero once it is lost. Compared with the
    /// clock at this very call, so it is right even in the first call after this process slept.
    pub fn remaining(&self) -> Duration {
        self.watch.remaining()
    }

    /// Held, at risk, or lost, at this very call.
    pub fn state(&self) -> HoldState {
        self.watch.state()
    }

    /// Resolves when the hold is lost, once for each future made, and never if it is released.
    pub fn lost(&self) -> impl Future<Output = LossCause> + Send + 'static {
        let watch = self.watch.clone();
        async move { watch.lost().await }
    }

    /// A view of this hold that can be given away; it keeps nothing alive.
    pub fn watch(&self) -> HoldWatch {
        self.watch.clone()
    }

    /// True if its session's lease carries it; false if it has a lease of its own.
    pub const fn is_renewed(&self) -> bool {
        self.session.is_some()
    }

    /// Renews the hold's lease now and returns how long it is valid. A hold with a lease of its own
    /// needs this; others are renewed anyway. Sent by this call, whether or not it is awaited.
    pub fn renew(&self) -> impl Future<Output = Result<Duration, RenewError>> + Send + 'static {
        let started = self.client.shared.enter(|inner, now| {
            let call = inner.core.renew(now, self.op);
            inner.await_confirmation(call)
        });
        let watch = self.watch.clone();
        async move {
            let (_, answer) = started?;
            answer.await.unwrap_or_else(|_| Err(gone()))?;
            Ok(watch.remaining())
        }
    }

    /// Lets go of the hold for another process to go on with, under the same token: nothing is given
    /// back. Gives the guard back if its session's lease carries it (see `LockRequest::own_lease`),
    /// or if it was lost.
    pub fn hand_over(mut self) -> Result<Handover, Self> {
        let handed = self.client.shared.enter(|inner, now| {
            let passed = inner.core.hand_over(now, self.op)?;
            inner.forget_hold(self.op);
            Some(Handover::new(inner.core.cluster(), passed))
        });
        match handed {
            Some(handover) => {
                self.released = true;
                Ok(handover)
            }
            None => Err(self),
        }
    }

    /// Gives the lock back and waits until the cluster has confirmed it. The hold ends with this
    /// call, whatever the answer is.
    pub async fn release(mut self) -> Result<(), ReleaseError> {
        self.released = true;
        let (_, answer) = self.client.shared.enter(|inner, now| {
            inner.forget_hold(self.op);
            let released = inner.core.release(now, self.op, true).map(|()| self.op);
            inner.await_release(released)
        })?;
        Ok(answer.await.unwrap_or_else(|_| Err(gone()))?)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.released {
            return;
        }
        self.client.shared.enter(|inner, now| {
            inner.forget_hold(self.op);
            // It may have ended already; then there is nothing to give back.
            let _ = inner.core.release(now, self.op, false);
        });
    }
}

/// The numbers of the slots that these bytes stand for: bit `i` of them is slot `i`.
pub fn slots_of(bytes: &[u8]) -> Vec<u32> {
    let slots = 0..bytes.len() as u32 * 8;
    slots.filter(|slot| bytes[*slot as usize / 8] >> (slot % 8) & 1 == 1).collect()
}

/// A view of a hold, without any claim on it.
#[derive(Clone, Debug)]
pub struct HoldWatch {
    cell: Arc<HoldCell>,
    changes: watch::Receiver<Change>,
}

impl HoldWatch {
    /// See `Guard::token`.
    pub fn token(&self) -> Token {
        self.cell.token()
    }

    /// See `Guard::mode`.
    pub fn mode(&self) -> Mode {
        self.cell.mode()
    }

    /// See `Guard::remaining`.
    pub fn remaining(&self) -> Duration {
        self.cell.remaining(BootTime::now())
    }

    /// See `Guard::state`. After a release it is `Lost(SessionClosed)`.
    pub fn state(&self) -> HoldState {
        self.cell.state(BootTime::now())
    }

    /// Resolves when the hold is lost; never if it is released.
    pub async fn lost(mut self) -> LossCause {
        loop {
            if let HoldState::Lost(_) = self.state()
                && let Some(cause) = self.cell.lost()
            {
                return cause;
            }
            if self.changes.changed().await.is_err() {
                match self.cell.lost() {
                    Some(cause) => return cause,
                    None => std::future::pending::<()>().await,
                }
            }
        }
    }

    /// Waits for the next change of state: at risk, safe again, lost. `None` once it was released.
    pub async fn changed(&mut self) -> Option<HoldState> {
        match self.changes.changed().await {
            Ok(()) => Some(self.state()),
            Err(_) => self.cell.lost().map(HoldState::Lost),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::slots_of;

    #[test]
    fn slots_are_numbered_from_the_lowest_bit() {
        assert_eq!(slots_of(&[0b1000_0001, 0b10]), [0, 7, 9]);
        assert_eq!(slots_of(&[]), [0; 0]);
    }
}
