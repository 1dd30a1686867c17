//! A stand-in with the WAL's interface, in memory; replaced by the WAL itself.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::rc::Rc;

use leasehold_protocol::ids::ShardId;

use crate::env::Env;

/// What the log held.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    /// The newest vote.
    pub vote: Option<Rc<[u8]>>,
    /// The purge point.
    pub purged: Option<(u64, Rc<[u8]>)>,
    /// The newest saved commit position.
    pub committed: Option<Rc<[u8]>>,
    /// The newest snapshot mark.
    pub snapshot: Option<Rc<[u8]>>,
    /// The entries.
    pub entries: Vec<(u64, Rc<[u8]>)>,
}

/// The log failed for good.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the log failed")]
pub struct WalFailed;

/// One shard's part.
pub struct WalShard<E> {
    kept: Rc<RefCell<Recovered>>,
    env: PhantomData<E>,
}

impl<E> Clone for WalShard<E> {
    fn clone(&self) -> Self {
        Self { kept: self.kept.clone(), env: PhantomData }
    }
}

/// All shards' logs.
#[derive(Clone, Default)]
pub struct Wal {
    shards: Rc<RefCell<BTreeMap<ShardId, Rc<RefCell<Recovered>>>>>,
}

impl Wal {
    /// One shard's part.
    pub fn shard<E: Env>(&self, shard: ShardId) -> WalShard<E> {
        let kept = self.shards.borrow_mut().entry(shard).or_default().clone();
        WalShard { kept, env: PhantomData }
    }

    /// What was kept.
    pub fn recovered(&self, shard: ShardId) -> Recovered {
        self.shards.borrow_mut().entry(shard).or_default().borrow().clone()
    }
}

impl<E: Env> WalShard<E> {
    /// Stages entries.
    pub fn append(
        &self,
        entries: impl IntoIterator<Item = (u64, Rc<[u8]>)>,
        done: impl FnOnce(Result<(), WalFailed>) + 'static,
    ) -> Result<(), WalFailed> {
        self.kept.borrow_mut().entries.extend(entries);
        drop(<E::Rt as openraft::AsyncRuntime>::spawn(async move { done(Ok(())) }));
        Ok(())
    }

    /// Saves a vote.
    pub async fn save_vote(&self, bytes: Rc<[u8]>) -> Result<(), WalFailed> {
        self.kept.borrow_mut().vote = Some(bytes);
        Ok(())
    }

    /// Cuts the end.
    pub fn truncate_from(&self, index: u64) {
        self.kept.borrow_mut().entries.retain(|(at, _)| *at < index);
    }

    /// Cuts the beginning.
    pub fn purge(&self, index: u64, log_id: Rc<[u8]>) {
        let mut kept = self.kept.borrow_mut();
        kept.entries.retain(|(at, _)| *at > index);
        kept.purged = Some((index, log_id));
    }

    /// Notes a commit position.
    pub fn committed(&self, bytes: Rc<[u8]>) {
        self.kept.borrow_mut().committed = Some(bytes);
    }

    /// Notes a snapshot.
    pub fn snapshot_mark(&self, bytes: Rc<[u8]>) {
        self.kept.borrow_mut().snapshot = Some(bytes);
    }
}
