//! Ending what is over: leases, waits beyond their limit, forced holds (G3, DESIGN §5).
//!
//! Expiry is a command of the log, conditional on this very leadership, proposed only after a
//! confirmed round that began after deadline + pad. From then on the lease is not renewed until a
//! definite refusal; an unknown outcome needs no retry, since either the entry is applied or this
//! leadership, and with it the mark, is over.

use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::command::Command;
use leasehold_protocol::error::{ErrorClass, ErrorCode};
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::{LeaseId, Number, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::planted;
use openraft::AsyncRuntime;

use super::quarantine::Beginning;
use super::{Shard, TIMEOUT_MS_DEFAULT};
use crate::env::{Clock, Env, MonoTime};
use crate::lease::{CoreWheel, Due, Timer, TimerKind};
use crate::raft::Leadership;

/// A loop that comes this much late counts as a stall of the leader.
const STALL_MIN: Duration = Duration::from_millis(250);
/// How long after a wait's own limit the server ends it: the client's cancel comes first.
const WAIT_GRACE: Duration = Duration::from_secs(1);
/// When a refused proposal is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// Leases expired after one confirmed round.
const CHUNK_LEN: usize = 128;
/// Leases, waits, keys handled in one go at a take-over: some hundred microseconds.
const WALK_LEN: usize = 512;
/// Others get the core for so long in between.
const WALK_PAUSE: Duration = Duration::from_millis(1);

impl<E: Env> Shard<E> {
    /// Follows this node's leadership, as long as the shard lives. One task.
    pub async fn run_leadership(self: Rc<Self>, beginning: impl Into<Beginning>) {
        let beginning = beginning.into();
        loop {
            let leadership = self.group.leadership();
            if leadership != self.leading.get() {
                self.leases.borrow_mut().end();
                self.timers.borrow_mut().clear();
                self.leading.set(leadership);
                if let Some(leadership) = leadership {
                    self.take_over(leadership, beginning);
                }
            }
            self.group.leadership_changed().await;
        }
    }

    fn take_over(self: &Rc<Self>, leadership: Leadership, beginning: Beginning) {
        self.leases.borrow_mut().begin(self.clock.now());
        tracing::info!(shard = self.id.0, term = leadership.term, "leads");
        if !self.state.borrow().begun() {
            self.begin(leadership, beginning);
        }
        self.set_quarantine();
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move { shard.walk(leadership).await });
    }

    /// Sets the token base, again until it is applied: before that no client is served.
    fn begin(self: &Rc<Self>, leadership: Leadership, beginning: Beginning) {
        let shard = Rc::clone(self);
        let proposed = move |outcome: Result<_, ErrorCode>| {
            if outcome.is_ok() {
                return;
            }
            let _detached = E::Rt::spawn(async move {
                E::Rt::sleep(RETRY_AFTER).await;
                if shard.leads() == Some(leadership) && !shard.state.borrow().begun() {
                    shard.begin(leadership, beginning);
                }
            });
        };
        self.propose_internal(leadership, beginning.command(), proposed);
    }

    /// Puts wheel entries for what this leadership inherited, without holding the core: no lease
    /// ends before its TTL, so there is time. Leases first: only they bound how long a key is held.
    async fn walk(self: Rc<Self>, leadership: Leadership) {
        let now = self.clock.now();
        let mut after = LeaseId(0);
        while self.leads() == Some(leadership) {
            let chunk: Vec<_> = self.state.borrow().leases_after(after).take(WALK_LEN).collect();
            let Some((last, _)) = chunk.last() else { break };
            after = *last;
            for (lease, ttl_ms) in chunk {
                self.set_lease(lease, ttl_ms);
            }
            E::Rt::sleep(WALK_PAUSE).await;
        }
        // What began or ended since was told by events.
        let forced = self.state.borrow().walk_forced();
        self.in_steps(leadership, forced, |(key, token, lease)| {
            self.set_forced(key, token, lease);
        })
        .await;
        // How much of a delay is over nobody knows any more: each lasts once more.
        let delays = self.state.borrow().walk_delays();
        self.in_steps(leadership, delays, |(key, token, delay_ms)| {
            // Planted (G3): a take-over cuts a delay short.
            let delay_ms = if planted!("delay-cut-by-a-take-over") { 0 } else { delay_ms };
            // Planted (G3): who comes next never ends a delay that the former leader began.
            if !planted!("delay-not-restarted") {
                self.set_delay(key, token, delay_ms);
            }
        })
        .await;
        let waits = self.state.borrow().walk_waits();
        self.in_steps(leadership, waits, |wait| match wait {
            Some((lease, number, wait_ms)) if wait_ms != u32::MAX => {
                self.set_wait(lease, number, wait_ms, now);
            }
            _ => {}
        })
        .await;
    }

    /// Handles what `steps` yields, a little at a time, as long as this leadership lasts.
    async fn in_steps<T>(
        &self,
        leadership: Leadership,
        mut steps: impl Iterator<Item = T>,
        handle: impl Fn(T),
    ) {
        while self.leads() == Some(leadership) {
            let mut handled = 0;
            for step in steps.by_ref().take(WALK_LEN) {
                handle(step);
                handled += 1;
            }
            if handled < WALK_LEN {
                return;
            }
            E::Rt::sleep(WALK_PAUSE).await;
        }
    }

    pub(super) fn set_timer(&self, at: MonoTime, kind: TimerKind) {
        self.timers.borrow_mut().set(at, kind);
    }

    fn set_wait(&self, lease: LeaseId, number: Number, wait_ms: u32, now: MonoTime) {
        let wait = Duration::from_millis(u64::from(wait_ms)) + WAIT_GRACE;
        self.set_timer(now.after(wait), TimerKind::Wait(lease, number));
    }

    fn set_lease(&self, lease: LeaseId, ttl_ms: u32) {
        let at = self.leases.borrow().ends_at(lease, ttl_ms);
        self.set_timer(at, TimerKind::Lease(lease));
    }

    fn set_forced(&self, key: Vec<u8>, token: Token, lease: LeaseId) {
        let Some(ttl_ms) = self.state.borrow().lease(lease).map(|lease| lease.ttl_ms()) else {
            return;
        };
        let at = self.leases.borrow().ends_at(lease, ttl_ms);
        self.set_timer(at, TimerKind::Forced(key, token));
    }

    fn set_delay(&self, key: Vec<u8>, token: Token, delay_ms: u32) {
        let at = self.clock.now().after(Duration::from_millis(u64::from(delay_ms)));
        self.set_timer(at, TimerKind::Delay(key, token));
    }

    /// What is left of a lock-delay, in milliseconds.
    pub(super) fn delay_left_ms(&self, key: &str, token: Token) -> Option<u32> {
        let kind = TimerKind::Delay(key.as_bytes().to_vec(), token);
        let at = self.timers.borrow().when(&kind)?;
        u32::try_from(at.since(self.clock.now()).as_millis()).ok()
    }

    /// Keeps table and wheel in step with what was applied.
    pub(super) fn follow_leases(&self, events: &[Event]) {
        let leading = self.leading.get().is_some();
        for event in events {
            match &event.kind {
                EventKind::LeaseEnded { lease, .. } => {
                    self.leases.borrow_mut().remove(*lease);
                    self.timers.borrow_mut().cancel(&TimerKind::Lease(*lease));
                }
                EventKind::WaitEnded { lease, number, .. } if leading => {
                    self.timers.borrow_mut().cancel(&TimerKind::Wait(*lease, *number));
                }
                EventKind::LeaseOpened { lease, ttl_ms } if leading => {
                    self.leases.borrow_mut().extend(*lease, self.clock.now());
                    self.set_lease(*lease, *ttl_ms);
                }
                EventKind::Queued { lease, number, wait_ms, .. }
                    if leading && *wait_ms != u32::MAX =>
                {
                    self.set_wait(*lease, *number, *wait_ms, self.clock.now());
                }
                EventKind::ForcedPending { key, lease, token, .. } if leading => {
                    self.set_forced(key.clone(), *token, *lease);
                }
                EventKind::DelayBegan { key, token, delay_ms } if leading => {
                    self.set_delay(key.clone(), *token, *delay_ms);
                }
                EventKind::QuarantineBegan { .. } if leading => self.set_quarantine(),
                EventKind::QuarantineEnded if leading => self.quarantine_ended(),
                _ => {}
            }
        }
    }

    /// Handles wheel entries that came up.
    pub fn due(self: &Rc<Self>, timers: Vec<Timer>) {
        let Some(leadership) = self.leads() else { return };
        let mut over = Vec::new();
        for timer in timers {
            self.timers.borrow_mut().fired(&timer.kind);
            match timer.kind {
                TimerKind::Lease(lease) => over.extend(self.over(lease)),
                TimerKind::Wait(lease, number) if !self.still_waits(lease, number) => {}
                TimerKind::Forced(_, token) if !self.still_forced(token) => {}
                TimerKind::Wait(lease, number) => {
                    let command = Command::TimeOut { lease, number };
                    self.propose_timer(leadership, command, TimerKind::Wait(lease, number));
                }
                TimerKind::Delay(_, token) if !self.still_delayed(token) => {}
                TimerKind::Delay(key, token) => {
                    let command = Command::EndDelay { key: key.clone(), token };
                    self.propose_timer(leadership, command, TimerKind::Delay(key, token));
                }
                TimerKind::Quarantine if !self.still_quarantined() => {}
                TimerKind::Quarantine => {
                    let kind = TimerKind::Quarantine;
                    self.propose_timer(leadership, Command::EndQuarantine, kind);
                }
                TimerKind::Forced(key, token) => {
                    let command = Command::EndForced { key: key.clone(), token };
                    self.propose_timer(leadership, command, TimerKind::Forced(key, token));
                }
            }
        }
        if !over.is_empty() {
            let shard = Rc::clone(self);
            let _detached = E::Rt::spawn(async move { shard.expire(leadership, over).await });
        }
    }

    fn still_waits(&self, lease: LeaseId, number: Number) -> bool {
        let result = self.state.borrow().wait_result(lease, number);
        matches!(result, Some(Outcome::Queued { .. }))
    }

    fn still_forced(&self, token: Token) -> bool {
        self.state.borrow().is_forced(token)
    }

    fn still_delayed(&self, token: Token) -> bool {
        self.state.borrow().is_delayed(token)
    }

    /// The lease and its TTL if it may be expired now; else its entry is put back, or dropped.
    fn over(&self, lease: LeaseId) -> Option<(LeaseId, u32)> {
        let ttl_ms = self.state.borrow().lease(lease)?.ttl_ms();
        let due = self.leases.borrow().due(lease, ttl_ms, self.clock.now());
        match due {
            Due::Now => Some((lease, ttl_ms)),
            Due::Proposed => None,
            Due::Later(at) => {
                self.set_timer(at, TimerKind::Lease(lease));
                None
            }
        }
    }

    async fn expire(self: Rc<Self>, leadership: Leadership, over: Vec<(LeaseId, u32)>) {
        for chunk in over.chunks(CHUNK_LEN) {
            let began = self.clock.now();
            let confirmed = self.confirmed(leadership, TIMEOUT_MS_DEFAULT).await;
            let took = self.clock.now().since(began);
            if took >= STALL_MIN {
                // While no round could be confirmed, no client could renew: that time is not
                // held against them.
                self.stalled(took);
            }
            // Renewals that the same round served go first.
            E::Rt::sleep(Duration::from_millis(1)).await;
            for (lease, _) in chunk {
                if confirmed.is_err() {
                    self.retry_lease(*lease);
                } else if self.leads() == Some(leadership) && self.over(*lease).is_some() {
                    self.propose_expiry(leadership, *lease);
                }
            }
        }
    }

    fn propose_expiry(self: &Rc<Self>, leadership: Leadership, lease: LeaseId) {
        // Planted (G1, G3): a renewal is acknowledged while the lease's end is on its way.
        if !planted!("renewed-while-expiring") {
            self.leases.borrow_mut().mark_expiring(lease);
        }
        let shard = Rc::clone(self);
        self.propose_internal(leadership, Command::Expire { lease }, move |outcome| {
            if definitely_refused(outcome.err()) && shard.leads() == Some(leadership) {
                shard.leases.borrow_mut().clear_expiring(lease);
                shard.retry_lease(lease);
            }
        });
    }

    fn retry_lease(&self, lease: LeaseId) {
        let at = self.clock.now().after(RETRY_AFTER);
        self.set_timer(at, TimerKind::Lease(lease));
    }

    fn propose_timer(self: &Rc<Self>, leadership: Leadership, command: Command, kind: TimerKind) {
        let shard = Rc::clone(self);
        self.propose_internal(leadership, command, move |outcome| {
            if definitely_refused(outcome.err()) && shard.leads() == Some(leadership) {
                let at = shard.clock.now().after(RETRY_AFTER);
                shard.set_timer(at, kind);
            }
        });
    }

    /// This leader could not serve for a while: its clients get that time back.
    pub fn stalled(&self, stall: Duration) {
        self.leases.borrow_mut().add_stall(stall);
    }
}

fn definitely_refused(error: Option<ErrorCode>) -> bool {
    error.is_some_and(|code| code.class() != ErrorClass::Unknown)
}

/// Turns a core's wheel, as long as the core lives. One task.
pub async fn run_wheel<E: Env>(wheel: CoreWheel, shards: Vec<Rc<Shard<E>>>, clock: E::Clock) {
    const TICK: Duration = Duration::from_millis(25);
    const IDLE_TICK: Duration = Duration::from_millis(100);
    let mut due = Vec::new();
    let mut was_late = false;
    loop {
        let tick = if wheel.is_empty() { IDLE_TICK } else { TICK };
        let planned = clock.now().after(tick);
        E::Rt::sleep(tick).await;
        let now = clock.now();
        let late = now.since(planned);
        // Planted (G3): the time in which the leader was stopped is held against its clients.
        if planted!("stall-charged-to-clients") {
            was_late = true;
        } else if late >= STALL_MIN {
            for shard in &shards {
                shard.stalled(late);
            }
        }
        // Input that queued up meanwhile is served before anybody is expired; but a core that is
        // late each time must expire, too.
        was_late = late >= STALL_MIN && !was_late;
        if was_late {
            continue;
        }
        wheel.advance(now, &mut due);
        for shard in &shards {
            let (mine, rest): (Vec<_>, Vec<_>) =
                due.drain(..).partition(|timer| timer.shard == shard.id());
            due = rest;
            shard.due(mine);
        }
        due.clear();
    }
}
