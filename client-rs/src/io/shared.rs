//! The core behind a lock, and who waits for what.
//!
//! Every entry locks, hands the present time and its input to the core, then carries out all that
//! the core wants: connections are woken to write, results go to the callers that wait. No socket
//! is touched and no caller runs while the lock is held.
//!
//! Background work is one timer task per client and one task per connection, on the runtime in
//! which the client was made. They end when the client and everything made from it are gone and
//! what was still to be said has been handed to the sockets.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_protocol::reply::Reply;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};

use super::conn::{self, Link};
use crate::clock::BootTime;
use crate::core::{
    CallId, ConnId, Core, Event, Held, HoldChange, LossCause, OpId, Output, SessionId, Timing,
    WatchId,
};
use crate::error::Failure;

/// Longest sleep of the timer task: a machine that was suspended notices its losses within this
/// time after it wakes. (Guards compare with the clock themselves, at each call.)
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// After the last handle is gone: how long the tasks go on to say goodbye.
const GOODBYE: Duration = Duration::from_secs(1);

/// Whoever waits for a result of this kind.
pub(crate) type Waiter<T> = oneshot::Sender<Result<T, Failure>>;

/// What happened last to a hold, for whoever watches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    None,
    AtRisk,
    Safe,
    Lost(LossCause),
}

/// A hold that was reported to its caller.
#[derive(Debug)]
pub(crate) struct Reported {
    pub(crate) held: Held,
    pub(crate) changes: watch::Receiver<Change>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) core: Core,
    pub(crate) links: BTreeMap<ConnId, Link>,
    acquires: BTreeMap<OpId, Waiter<Reported>>,
    watches: BTreeMap<OpId, watch::Sender<Change>>,
    releases: BTreeMap<OpId, Waiter<()>>,
    /// Of renewals and changes.
    confirmations: BTreeMap<CallId, Waiter<()>>,
    calls: BTreeMap<CallId, Waiter<Reply>>,
    closes: BTreeMap<SessionId, Waiter<()>>,
    watchers: BTreeMap<WatchId, Arc<Notify>>,
    /// When the tasks end.
    ends_at: Option<BootTime>,
    /// When the timer task will wake.
    wakes_at: BootTime,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Shared {
    inner: Mutex<Inner>,
    timer: Notify,
    runtime: Handle,
}

impl Shared {
    /// Starts the timer task on the present runtime.
    pub(crate) fn start(timing: Timing, endpoints: Vec<String>, seed: u64) -> Arc<Self> {
        let inner = Inner {
            core: Core::new(timing, endpoints, seed),
            links: BTreeMap::new(),
            acquires: BTreeMap::new(),
            watches: BTreeMap::new(),
            releases: BTreeMap::new(),
            confirmations: BTreeMap::new(),
            calls: BTreeMap::new(),
            closes: BTreeMap::new(),
            watchers: BTreeMap::new(),
            ends_at: None,
            wakes_at: BootTime(0),
        };
        let runtime = Handle::current();
        let shared = Arc::new(Self { inner: Mutex::new(inner), timer: Notify::new(), runtime });
        shared.runtime.spawn(run_timer(Arc::clone(&shared)));
        shared
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic under the lock is a fault of this library; the core's own checks come next.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one entry of the core and carries out what follows from it.
    pub(crate) fn enter<T>(self: &Arc<Self>, entry: impl FnOnce(&mut Inner, BootTime) -> T) -> T {
        let mut inner = self.lock();
        let now = BootTime::now();
        let result = entry(&mut inner, now);
        self.pump(&mut inner);
        result
    }

    fn pump(self: &Arc<Self>, inner: &mut Inner) {
        while let Some(output) = inner.core.poll_output() {
            match output {
                Output::Connect { conn, addr } => {
                    inner.links.insert(conn, Link::new());
                    self.runtime.spawn(conn::run(Arc::clone(self), conn, addr));
                }
                Output::Write { conn } => {
                    if let Some(link) = inner.links.get(&conn) {
                        link.wake();
                    }
                }
                Output::Close { conn } => {
                    if let Some(link) = inner.links.remove(&conn) {
                        link.close();
                    }
                }
            }
        }
        while let Some(event) = inner.core.poll_event() {
            inner.tell(event);
        }
        let next = inner.core.next_deadline().unwrap_or(BootTime::NEVER);
        if next < inner.wakes_at {
            inner.wakes_at = next;
            self.timer.notify_one();
        }
    }

    /// All handles are gone.
    pub(crate) fn say_goodbye(self: &Arc<Self>) {
        let mut inner = self.lock();
        inner.ends_at = Some(BootTime::now().after(GOODBYE));
        self.timer.notify_one();
    }
}

/// What an entry that may be refused at once returns.
type Entered<Id, T> = Result<(Id, oneshot::Receiver<Result<T, Failure>>), Failure>;

/// Registers who waits for the result of what was just started.
fn wait_for<Id: Ord + Copy, T>(
    table: &mut BTreeMap<Id, Waiter<T>>,
    started: Result<Id, Failure>,
) -> Entered<Id, T> {
    let id = started?;
    let (sender, receiver) = oneshot::channel();
    table.insert(id, sender);
    Ok((id, receiver))
}

impl Inner {
    pub(crate) fn await_acquire(&mut self, op: Result<OpId, Failure>) -> Entered<OpId, Reported> {
        wait_for(&mut self.acquires, op)
    }

    pub(crate) fn await_release(&mut self, op: Result<OpId, Failure>) -> Entered<OpId, ()> {
        wait_for(&mut self.releases, op)
    }

    /// The end of a renewal or of a change.
    pub(crate) fn await_confirmation(
        &mut self,
        call: Result<CallId, Failure>,
    ) -> Entered<CallId, ()> {
        wait_for(&mut self.confirmations, call)
    }

    pub(crate) fn await_call(&mut self, call: Result<CallId, Failure>) -> Entered<CallId, Reply> {
        wait_for(&mut self.calls, call)
    }

    pub(crate) fn await_close(&mut self, session: SessionId) -> Entered<SessionId, ()> {
        wait_for(&mut self.closes, Ok(session))
    }

    /// Who waits for a watch's items.
    pub(crate) fn await_watch(&mut self, watch: WatchId) -> Arc<Notify> {
        Arc::clone(self.watchers.entry(watch).or_default())
    }

    /// Nobody waits for a watch's items any more.
    pub(crate) fn forget_watch(&mut self, watch: WatchId) {
        self.watchers.remove(&watch);
    }

    /// The caller of an acquire has gone.
    pub(crate) fn forget_acquire(&mut self, op: OpId) {
        self.acquires.remove(&op);
    }

    /// The caller of a call has gone.
    pub(crate) fn forget_call(&mut self, call: CallId) {
        self.calls.remove(&call);
        self.core.forget_call(call);
    }

    /// Nobody watches this hold any more.
    pub(crate) fn forget_hold(&mut self, op: OpId) {
        self.watches.remove(&op);
    }

    fn tell(&mut self, event: Event) {
        match event {
            Event::Acquired { op, result } => self.tell_acquired(op, result),
            Event::Hold { op, change } => {
                let change = match change {
                    HoldChange::AtRisk => Change::AtRisk,
                    HoldChange::Safe => Change::Safe,
                    HoldChange::Lost(cause) => Change::Lost(cause),
                };
                if let Some(watch) = self.watches.get(&op) {
                    watch.send_replace(change);
                }
            }
            Event::Released { op, result } => tell(&mut self.releases, op, result),
            Event::Renewed { call, result } | Event::Changed { call, result } => {
                tell(&mut self.confirmations, call, result);
            }
            Event::Answered { call, result } => tell(&mut self.calls, call, result),
            Event::Watched { watch } => {
                if let Some(watcher) = self.watchers.get(&watch) {
                    watcher.notify_one();
                }
            }
            Event::Closed { session, result } => tell(&mut self.closes, session, result),
        }
    }

    fn tell_acquired(&mut self, op: OpId, result: Result<Held, Failure>) {
        let Some(waiter) = self.acquires.remove(&op) else { return };
        let reported = result.map(|held| {
            let (sender, changes) = watch::channel(Change::None);
            self.watches.insert(op, sender);
            Reported { held, changes }
        });
        // If the caller has gone meanwhile, its own guard against that gives the hold back.
        let _ = waiter.send(reported);
    }
}

fn tell<Id: Ord + Copy, T>(
    table: &mut BTreeMap<Id, Waiter<T>>,
    id: Id,
    result: Result<T, Failure>,
) {
    if let Some(waiter) = table.remove(&id) {
        let _ = waiter.send(result);
    }
}

/// Calls the core when something is due.
async fn run_timer(shared: Arc<Shared>) {
    loop {
        let sleep = {
            let mut inner = shared.lock();
            let now = BootTime::now();
            inner.core.tick(now);
            shared.pump(&mut inner);
            if inner.ends_at.is_some_and(|at| at <= now || inner.core.is_idle()) {
                let links = std::mem::take(&mut inner.links);
                return links.into_values().for_each(Link::close);
            }
            let next = inner.core.next_deadline().unwrap_or(BootTime::NEVER);
            inner.wakes_at = next;
            let next = next.min(inner.ends_at.unwrap_or(BootTime::NEVER));
            // With nothing due there is nothing that a suspended machine could miss.
            (next != BootTime::NEVER).then(|| next.since(now).min(SLEEP_MAX))
        };
        let slept = async {
            match sleep {
                Some(sleep) => tokio::time::sleep(sleep).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = slept => {}
            () = shared.timer.notified() => {}
        }
    }
}
