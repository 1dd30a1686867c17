//! Watches of this shard: their way into the hub, the tasks that drive it, and whether this node
//! may say that it is up to date.
//!
//! Every node tells watchers what it has applied; only the leader knows what there is. So while
//! anybody watches, this node asks the leader now and then, linearizably, for the shard's
//! revision, and compares. If it has not been up to date for `BEHIND_MAX` by that, its watchers
//! are told `no_quorum`.

use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{NodeId, Revision};
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::{Freshness, ListRequest, Request};
use openraft::AsyncRuntime;

use super::{Origin, Shard};
use crate::env::{Clock, Env, MonoTime};
use crate::net::ReplyTo;
use crate::watch::{Start, Target, WatchName};

/// How often the leader is asked while anybody watches.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// How long one question may take.
const ASK_TIMEOUT_MS: u32 = 1_000;
/// For how long this node may not know to be up to date before its watchers are told.
const BEHIND_MAX: Duration = Duration::from_secs(3);

impl<E: Env> Shard<E> {
    /// Takes a watch; what it is told goes to `to`.
    pub fn watch(self: &Rc<Self>, name: WatchName, target: Target, start: Start, to: &ReplyTo) {
        if self.is_stopping() {
            return to.error(ErrorCode::SHUTTING_DOWN, self.leader());
        }
        let ahead = match start {
            Start::After(revision) if revision > self.hub.borrow().head() => Some(revision),
            _ => None,
        };
        let opened = self.hub.borrow_mut().open(name, target, start, to.clone());
        if let Err(code) = opened {
            return to.error(code, NodeId(0));
        }
        self.to_tell.notify_one();
        self.watched.notify_one();
        if let Some(revision) = ahead {
            let shard = Rc::clone(self);
            let _detached = E::Rt::spawn(async move { shard.check_ahead(name, revision).await });
        }
    }

    /// A position that is not applied here: this node lags, or nobody ever told it.
    async fn check_ahead(&self, name: WatchName, position: Revision) {
        while self.hub.borrow().has(name) && self.hub.borrow().head() < position {
            match self.present_revision().await {
                Ok(present) if present < position => {
                    return self.hub.borrow_mut().refuse(name, ErrorCode::CURSOR_FROM_FUTURE);
                }
                Ok(_) => return,
                Err(_) => E::Rt::sleep(ASK_EVERY).await,
            }
        }
    }

    /// Ends a watch.
    pub fn unwatch(&self, name: WatchName) {
        self.hub.borrow_mut().close(name);
    }

    /// Watches of this shard on this node.
    pub fn watches_len(&self) -> usize {
        self.hub.borrow().len()
    }

    /// Past events kept for watches, and their bytes.
    pub fn history_len(&self) -> (usize, usize) {
        self.hub.borrow().history_len()
    }

    /// Tells watchers, as long as the shard lives. One task.
    pub async fn run_watches(self: Rc<Self>) {
        loop {
            self.to_tell.notified().await;
            while self.hub.borrow_mut().turn(&self.state.borrow(), self.clock.now()) {
                // Others get their turn.
                E::Rt::sleep(Duration::from_nanos(1)).await;
            }
        }
    }

    /// Finds out whether this node is up to date, as long as the shard lives. One task.
    pub async fn run_freshness(self: Rc<Self>) {
        loop {
            self.watched.notified().await;
            self.follow_freshness().await;
        }
    }

    /// Until nobody watches, nor reads a state.
    async fn follow_freshness(&self) {
        let (mut tick, mut fresh_at) = (0, self.clock.now());
        // A revision that was the present one, and when it was asked for.
        let mut awaited: Option<(Revision, MonoTime)> = None;
        while !self.hub.borrow().is_quiet() {
            let asked = self.clock.now();
            if let Ok(present) = self.present_revision().await
                && awaited.is_none()
            {
                awaited = Some((present, asked));
            }
            let mut known = false;
            if let Some((present, asked)) = awaited
                && self.hub.borrow().head() >= present
            {
                // Where it is now counts only if it got there soon.
                known = self.clock.now().since(asked) <= BEHIND_MAX;
                (fresh_at, awaited) = (fresh_at.max(asked), None);
            }
            if known {
                self.hub.borrow_mut().set_quorum(true);
            } else if self.clock.now().since(fresh_at) > BEHIND_MAX {
                self.hub.borrow_mut().set_quorum(false);
            }
            tick += 1;
            self.hub.borrow_mut().tick(tick, self.clock.now());
            self.to_tell.notify_one();
            E::Rt::sleep(ASK_EVERY).await;
        }
    }

    /// The shard's revision, linearizably.
    async fn present_revision(&self) -> Result<Revision, ErrorCode> {
        if let Some(leadership) = self.leads() {
            self.confirmed(leadership, ASK_TIMEOUT_MS).await?;
            return Ok(self.state.borrow().revision());
        }
        let leader = self.elsewhere(Origin::Client).ok_or(ErrorCode::NO_QUORUM)?;
        // No key begins with this byte: an empty page, but at the present revision.
        let request = Request::List(ListRequest {
            shard: self.id,
            prefix: vec![0xff],
            after: Vec::new(),
            limit: 1,
            freshness: Freshness::Linearizable,
            timeout_ms: ASK_TIMEOUT_MS,
        });
        match self.ask(leader, &request, Self::timeout(ASK_TIMEOUT_MS)).await? {
            Reply::Keys(page) => Ok(page.revision),
            Reply::Error(error) => Err(error.code),
            _ => Err(ErrorCode::INTERNAL),
        }
    }
}
