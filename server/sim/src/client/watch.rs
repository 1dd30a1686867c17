//! Clients that watch, at any node: slow ones, some that stop and go on later, some that move to
//! another node with their position, some that begin anew.

use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::request::Request;
use leasehold_protocol::watch::UnwatchRequest;
use leasehold_server::rt::sim::{SimRt, SimWorld};
use openraft_rt::{AsyncRuntime, MpscReceiver};

use super::Client;
use crate::coverage::Seen;
use crate::feed::{Feed, Step};
use crate::link::Link;

/// How often a watcher that is told nothing looks around.
const LOOK: Duration = Duration::from_millis(300);

/// After so many looks it goes to another node.
const SILENT_LOOKS_MAX: u32 = 20;

/// Within this after the clients stopped, without faults, it is told all that there was.
const TOLD_LIMIT: Duration = Duration::from_secs(30);

/// How a watcher left a node.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Left {
    /// It is through.
    Done,
    /// It goes on at once, elsewhere.
    Moves,
    /// It goes on later, anywhere.
    Stops,
}

/// What a watcher was told at the end, and until when it must have been.
struct End {
    revision: u64,
    due_ns: u64,
}

impl Client {
    /// Watches until it was told all that happened before the clients stopped.
    pub(super) async fn watch_on(self: Rc<Self>, feed: Rc<Feed>) {
        // A new process has the position, if it was kept, and nothing else.
        if self.rng.chance(300) {
            feed.begin_anew(&self.rng);
        }
        let (mut node, mut end) = (self.any_node(), None);
        loop {
            let left = match self.connect(node).await {
                Some(link) => self.attend(&feed, &link, &mut end).await,
                None => Left::Moves,
            };
            if left == Left::Done || self.is_through(&feed, &mut end) {
                return;
            }
            let pause_ms = if left == Left::Stops { 3_000 } else { 50 };
            SimRt::sleep(Duration::from_millis(1 + self.rng.below(pause_ms))).await;
            let before = std::mem::replace(&mut node, self.any_node());
            if left == Left::Moves && node != before {
                self.witness.saw(Seen::WatchMoved);
            }
        }
    }

    /// True if nothing is left to be told; but it may not last forever.
    fn is_through(&self, feed: &Feed, end: &mut Option<End>) -> bool {
        if !self.stop.get() {
            return false;
        }
        let now_ns = SimWorld::current().now_ns();
        let end = end.get_or_insert_with(|| End {
            revision: self.witness.latest(feed.shard),
            due_ns: now_ns + TOLD_LIMIT.as_nanos() as u64,
        });
        if feed.reached(end.revision) {
            return true;
        }
        if now_ns >= end.due_ns {
            let what = format!("{}: not told up to {}", feed.at(), end.revision);
            self.witness.broken("G6", &what);
        }
        now_ns >= end.due_ns
    }

    /// Watches through one connection.
    async fn attend(&self, feed: &Feed, link: &Link, end: &mut Option<End>) -> Left {
        'ask: loop {
            let (id, mut answers) = link.watch(feed.ask());
            let mut silent = 0;
            while silent < SILENT_LOOKS_MAX {
                if self.is_through(feed, end) {
                    return Left::Done;
                }
                match SimRt::timeout(LOOK, answers.recv()).await {
                    Ok(None) => return Left::Stops,
                    Ok(Some(reply)) => {
                        silent = 0;
                        match feed.take(reply) {
                            Step::On => {}
                            Step::Again => continue 'ask,
                            // In the end it does not stay with those who were wiped and hear of nothing.
                            Step::Doubt if !self.stop.get() && self.rng.chance(300) => {}
                            Step::Doubt | Step::Elsewhere => return Left::Moves,
                        }
                    }
                    Err(_) => silent += 1,
                }
                if self.stop.get() {
                    continue;
                }
                match self.rng.below(1_000) {
                    0..15 => link.rest(Duration::from_millis(self.rng.below(3_000))).await,
                    15..25 => return Left::Stops,
                    25..40 => return Left::Moves,
                    40..50 => {
                        // The end of it comes among its answers.
                        let ends = id.map(|id| Request::Unwatch(UnwatchRequest { id }));
                        drop(ends.map(|ends| link.request(&ends)));
                    }
                    50..55 => {
                        feed.begin_anew(&self.rng);
                        return Left::Moves;
                    }
                    _ => {}
                }
            }
            return Left::Moves;
        }
    }
}
