//! Watches of this shard: their way into the hub, and the task that drives it. Whether this node
//! may say that it is up to date is `freshness`'s.

use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{NodeId, Revision};
use openraft::AsyncRuntime;

use super::Shard;
use super::freshness::ASK_EVERY;
use crate::env::{Clock, Env};
use crate::net::ReplyTo;
use crate::watch::{Start, Target, WatchName};

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
}
