//! From a command to its outcome: pending, one entry of the log, answers.

use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::limits::{TTL_MS_MAX, TTL_MS_MIN};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{ErrorReply, Reply};
use leasehold_protocol::request::CommandRequest;
use leasehold_protocol::shard::{
    check_delay_ms, check_key, check_label, check_limit, check_mode, check_reason, check_shard,
    check_ttl_ms, check_value, check_wants,
};
use openraft::AsyncRuntime;

use super::batch::{Batch, PROPOSALS_MAX, Slot, Waiting};
use super::{Origin, Shard};
use crate::admin::{Counter, Distribution};
use crate::env::{Clock, Env, MonoTime};
use crate::net::{ReplyTo, error};
use crate::raft::{EntryData, Leadership, ProposeError};

/// How often overdue requests are looked for while there are any.
const SWEEP_EVERY: Duration = Duration::from_millis(50);
/// A shard that committed something this recently is overloaded, not cut off.
const COMMITS: Duration = Duration::from_secs(1);

impl<E: Env> Shard<E> {
    /// A client's command, here or at the leader.
    pub(super) fn command(self: &Rc<Self>, request: CommandRequest, to: ReplyTo, origin: Origin) {
        if let Err(code) = self.admit(&request) {
            return to.send(&error(code, self.why(code), NodeId(0), 0));
        }
        if let Some(refusal) = self.quarantined(&request.command)
            && self.leads().is_some()
        {
            return to.send(&refusal);
        }
        let wait = match (&request.command, origin) {
            (
                Command::Acquire { caller, wait_ms, .. }
                | Command::AcquireAll { caller, wait_ms, .. },
                Origin::Client,
            ) if *wait_ms > 0 => {
                let registered =
                    self.waits.borrow_mut().register(caller.lease, caller.number, to.clone());
                if registered.is_none() {
                    return self.busy(&to);
                }
                registered
            }
            _ => None,
        };
        let deadline = self.deadline(request.timeout_ms);
        let waiting = Some(Waiting::Request { to, wait });
        let slot = Slot { waiting, under: None, deadline };
        if self.leads().is_some() {
            self.push(request.command, slot);
        } else if let Some(leader) = self.elsewhere(origin) {
            self.forward_command(leader, request, slot);
        } else {
            self.refuse(slot, ErrorCode::NOT_LEADER);
        }
    }

    /// Proposes a command of the leader's own, under this very leadership or not at all; `done`
    /// hears its outcome or why there is none.
    pub(super) fn propose_internal(
        self: &Rc<Self>,
        leadership: Leadership,
        command: Command,
        done: impl FnOnce(Result<Outcome, ErrorCode>) + 'static,
    ) {
        let deadline = self.deadline(super::TIMEOUT_MS_MAX);
        let waiting = Some(Waiting::Internal(Box::new(done)));
        let slot = Slot { waiting, under: Some(leadership), deadline };
        self.push(command, slot);
    }

    /// What `apply` would refuse for its form alone does not get as far as the log.
    fn admit(&self, request: &CommandRequest) -> Result<(), ErrorCode> {
        let key = match &request.command {
            Command::Acquire { key, value, mode, own, .. } => {
                check_value(value)?;
                check_mode(*mode)?;
                own.map_or(Ok(()), |own| self.check_ttl(own.ttl_ms))?;
                key
            }
            Command::AcquireAll { wants, value, own, delay_ms, .. } => {
                check_value(value)?;
                check_delay_ms(*delay_ms)?;
                own.map_or(Ok(()), |own| self.check_ttl(own.ttl_ms))?;
                check_wants(wants, own.is_some())?;
                let mut keys = wants.iter().map(|want| &want.key);
                return keys.try_for_each(|key| check_shard(self.id, key, self.shards_total));
            }
            Command::SetValue { key, value, .. } => {
                check_value(value)?;
                key
            }
            Command::SetLimit { key, limit, who } => {
                check_limit(*limit)?;
                check_label(who)?;
                key
            }
            Command::Convert { key, mode, .. } => {
                check_mode(*mode)?;
                key
            }
            Command::Release { key, .. } | Command::ReleaseOwn { key, .. } => key,
            Command::ForceRelease { key, who, why, .. }
            | Command::AskYield { key, who, why, .. } => {
                check_label(who)?;
                check_reason(why)?;
                key
            }
            Command::Open { ttl_ms, label, .. } => {
                self.check_ttl(*ttl_ms)?;
                return check_label(label).map(|_| ());
            }
            Command::Cancel { .. } | Command::ReleaseAll { .. } | Command::Close { .. } => {
                return Ok(());
            }
            Command::Begin { .. }
            | Command::BeginRestored { .. }
            | Command::EndQuarantine
            | Command::Expire { .. }
            | Command::EndForced { .. }
            | Command::EndDelay { .. }
            | Command::TimeOut { .. }
            | Command::Member(_) => return Err(ErrorCode::INTERNAL_COMMAND),
        };
        check_key(key)?;
        check_shard(self.id, key, self.shards_total)
    }

    /// A lease must outlive a change of leader: while there is none, nobody can renew it.
    fn check_ttl(&self, ttl_ms: u32) -> Result<(), ErrorCode> {
        let ttl_ms = check_ttl_ms(u64::from(ttl_ms))?;
        if ttl_ms < self.failover_ms() { Err(ErrorCode::TTL_OUT_OF_RANGE) } else { Ok(()) }
    }

    fn failover_ms(&self) -> u32 {
        u32::try_from(self.group.timings().failover().as_millis()).unwrap_or(u32::MAX)
    }

    /// The sentence of a refusal.
    fn why(&self, code: ErrorCode) -> String {
        let failover_ms = self.failover_ms();
        if code != ErrorCode::TTL_OUT_OF_RANGE || failover_ms <= TTL_MS_MIN {
            return code.text().to_owned();
        }
        format!(
            "A TTL is {failover_ms} to {TTL_MS_MAX} milliseconds in this cluster: a change of \
             leader takes up to {failover_ms}, twice its election-max-ms."
        )
    }

    fn push(self: &Rc<Self>, command: Command, slot: Slot) {
        let pushed = self.pending.borrow_mut().push(command, slot);
        match pushed {
            Ok(()) => {
                self.work.notify_one();
                self.busy_again.notify_one();
            }
            Err(slot) => self.refuse(slot, ErrorCode::BUSY),
        }
    }

    /// Proposes what waits, as long as the shard lives. One task.
    pub async fn run_proposals(self: Rc<Self>) {
        loop {
            self.work.notified().await;
            self.propose_pending();
        }
    }

    fn propose_pending(self: &Rc<Self>) {
        while self.proposed.borrow().len() < PROPOSALS_MAX {
            if self.pending.borrow().is_empty() {
                return;
            }
            let Some(leadership) = self.leads() else {
                let slots = self.pending.borrow_mut().take_all();
                return self.refuse_all(slots, ErrorCode::NOT_LEADER);
            };
            let wall_ms = self.clock.wall_ms();
            let mut batch = self.pending.borrow_mut().take(leadership, wall_ms);
            self.refuse_all(std::mem::take(&mut batch.stale), ErrorCode::NOT_LEADER);
            if !batch.slots.is_empty() {
                self.propose(leadership, batch);
            }
        }
    }

    fn propose(self: &Rc<Self>, leadership: Leadership, batch: Batch) {
        let Batch { writer, slots, .. } = batch;
        self.metrics.count(Counter::BatchesProposed);
        self.metrics.record(Distribution::BatchCommands, slots.len() as u64);
        let began = self.clock.now();
        let proposal = self.next_proposal.get();
        self.next_proposal.set(proposal + 1);
        self.proposed.borrow_mut().insert(proposal, slots);
        let entry = EntryData::from(writer.finish());
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            let outcome = shard.group.propose(leadership, entry).await;
            let slots = shard.proposed.borrow_mut().remove(&proposal).unwrap_or_default();
            shard.work.notify_one();
            let took = shard.clock.now().since(began);
            shard.metrics.record(Distribution::Commit, took.as_nanos() as u64);
            shard.settle(slots, outcome);
        });
    }

    fn settle(&self, slots: Vec<Slot>, outcome: Result<Vec<Outcome>, ProposeError>) {
        match outcome {
            Ok(outcomes) => {
                self.committed.set(Some(self.clock.now()));
                assert_eq!(slots.len(), outcomes.len(), "one outcome per command");
                for (slot, outcome) in slots.into_iter().zip(outcomes) {
                    self.finish(slot, outcome, NodeId(0));
                }
            }
            Err(error) => self.refuse_all(
                slots,
                match error {
                    ProposeError::NotLeader { .. } => ErrorCode::NOT_LEADER,
                    ProposeError::NoQuorum => ErrorCode::NO_QUORUM,
                    ProposeError::TooLong => ErrorCode::BUSY,
                    _ => ErrorCode::OUTCOME_UNKNOWN,
                },
            ),
        }
    }

    /// Answers a slot with its command's outcome.
    pub(super) fn finish(&self, slot: Slot, outcome: Outcome, leader: NodeId) {
        match slot.waiting {
            None => {}
            Some(Waiting::Internal(done)) => done(Ok(outcome)),
            Some(Waiting::Request { to, wait }) => {
                let wanted =
                    wait.is_none_or(|wait| self.waits.borrow_mut().settle(wait, Some(&outcome)));
                if wanted {
                    to.outcome(outcome, leader);
                }
            }
        }
    }

    fn refuse_all(&self, slots: Vec<Slot>, code: ErrorCode) {
        for slot in slots {
            self.refuse(slot, code);
        }
    }

    /// Answers a slot with an error.
    pub(super) fn refuse(&self, slot: Slot, code: ErrorCode) {
        let leader = self.leader();
        self.refuse_with(slot, ErrorReply { leader, ..ErrorReply::new(code, code.text()) });
    }

    /// Answers a slot with an error as another node gave it.
    pub(super) fn refuse_with(&self, slot: Slot, reply: ErrorReply) {
        match slot.waiting {
            None => {}
            Some(Waiting::Internal(done)) => done(Err(reply.code)),
            Some(Waiting::Request { to, wait }) => {
                let wanted = wait.is_none_or(|wait| self.waits.borrow_mut().settle(wait, None));
                if wanted {
                    to.send(&Reply::Error(reply));
                }
            }
        }
    }

    pub(super) fn busy(&self, to: &ReplyTo) {
        const RETRY_AFTER_MS: u32 = 20;
        let text = ErrorCode::BUSY.text().to_owned();
        to.send(&error(ErrorCode::BUSY, text, self.leader(), RETRY_AFTER_MS));
    }

    /// Answers what is overdue, as long as the shard lives. One task.
    pub async fn run_deadlines(self: Rc<Self>) {
        loop {
            if self.pending.borrow().is_empty() && self.proposed.borrow().is_empty() {
                self.busy_again.notified().await;
            }
            E::Rt::sleep(SWEEP_EVERY).await;
            let now = self.clock.now();
            let overdue = self.pending.borrow_mut().take_overdue(now);
            let recent = |at: MonoTime| now.since(at) < COMMITS;
            let commits = self.committed.get().is_some_and(recent);
            self.refuse_all(overdue, if commits { ErrorCode::BUSY } else { ErrorCode::NO_QUORUM });
            let mut unknown = Vec::new();
            for slots in self.proposed.borrow_mut().values_mut() {
                let late = |slot: &&mut Slot| slot.deadline <= now && slot.waiting.is_some();
                for slot in slots.iter_mut().filter(late) {
                    unknown.push(Slot { waiting: slot.waiting.take(), ..*slot });
                }
            }
            self.refuse_all(unknown, ErrorCode::DEADLINE);
        }
    }
}
