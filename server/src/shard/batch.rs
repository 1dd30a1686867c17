//! Commands on their way into the log: one Raft entry carries all that came while the former
//! proposals were under way, capped in number and bytes. No timer: a lone command goes at once.
//!
//! Invariant: each command that was accepted gets exactly one answer, from its outcome, from a
//! failed proposal, or from its deadline.

use std::collections::VecDeque;

use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::outcome::Outcome;

use crate::env::MonoTime;
use crate::net::ReplyTo;
use crate::raft::Leadership;
use crate::shard::waits::Wait;

/// Most commands of one entry.
pub(super) const BATCH_COMMANDS_MAX: usize = 1024;
/// Most bytes of one entry, about; a single command is always smaller.
pub(super) const BATCH_BYTES_MAX: usize = 256 * 1024;
/// Proposals under way at once.
pub(super) const PROPOSALS_MAX: usize = 4;
/// Commands that wait for a proposal; above it the answer is `busy`.
pub(super) const PENDING_MAX: usize = 64 * 1024;

/// Answers for whom.
pub(super) enum Waiting {
    /// A request.
    Request {
        /// Where its answer goes.
        to: ReplyTo,
        /// Its registration, if the command is an acquire that may wait.
        wait: Option<Wait>,
    },
    /// The leader itself.
    Internal(Box<dyn FnOnce(Result<Outcome, ErrorCode>)>),
}

/// One command's claim to an answer.
pub(super) struct Slot {
    /// Who waits; `None` once answered.
    pub(super) waiting: Option<Waiting>,
    /// The only leadership under which the command may be proposed: an expiry that was decided
    /// under a former one must not end a lease that got its full TTL since. `None`: any.
    pub(super) under: Option<Leadership>,
    /// When it is answered with an error at the latest.
    pub(super) deadline: MonoTime,
}

/// Commands and their slots, in one order.
#[derive(Default)]
pub(super) struct Batch {
    /// What is proposed.
    pub(super) commands: Vec<Command>,
    /// Who waits, same length.
    pub(super) slots: Vec<Slot>,
}

impl Batch {
    /// Takes out what may not be proposed under `leadership`.
    pub(super) fn take_stale(&mut self, leadership: Leadership) -> Vec<Slot> {
        let fits = |slot: &Slot| slot.under.is_none_or(|under| under == leadership);
        if self.slots.iter().all(fits) {
            return Vec::new();
        }
        let (fit, stale): (Vec<_>, Vec<_>) = std::mem::take(&mut self.commands)
            .into_iter()
            .zip(std::mem::take(&mut self.slots))
            .partition(|(_, slot)| fits(slot));
        (self.commands, self.slots) = fit.into_iter().unzip();
        stale.into_iter().map(|(_, slot)| slot).collect()
    }
}

/// Commands that wait for a proposal.
#[derive(Default)]
pub(super) struct Pending {
    queue: VecDeque<(Command, Slot)>,
}

impl Pending {
    /// Adds a command, or gives its slot back if there is no room.
    pub(super) fn push(&mut self, command: Command, slot: Slot) -> Result<(), Slot> {
        if self.queue.len() >= PENDING_MAX {
            return Err(slot);
        }
        self.queue.push_back((command, slot));
        Ok(())
    }

    /// The next entry's commands; empty if nothing waits.
    pub(super) fn take(&mut self) -> Batch {
        let mut batch = Batch::default();
        let mut bytes = 0;
        while let Some((command, _)) = self.queue.front() {
            let size = size_of_command(command);
            let full = batch.commands.len() == BATCH_COMMANDS_MAX || bytes + size > BATCH_BYTES_MAX;
            if full && !batch.commands.is_empty() {
                break;
            }
            bytes += size;
            let (command, slot) = self.queue.pop_front().expect("front was there");
            batch.commands.push(command);
            batch.slots.push(slot);
        }
        batch
    }

    /// All slots whose deadline passed; their commands will not be proposed.
    pub(super) fn take_overdue(&mut self, now: MonoTime) -> Vec<Slot> {
        if self.queue.iter().all(|(_, slot)| slot.deadline > now) {
            return Vec::new();
        }
        let (overdue, rest): (Vec<_>, Vec<_>) =
            self.queue.drain(..).partition(|(_, slot)| slot.deadline <= now);
        self.queue = rest.into();
        overdue.into_iter().map(|(_, slot)| slot).collect()
    }
}

/// About as many bytes as the command takes in the log.
fn size_of_command(command: &Command) -> usize {
    const FIXED: usize = 160;
    FIXED
        + match command {
            Command::Acquire { key, value, .. } => key.len() + value.len(),
            Command::Release { key, .. }
            | Command::ReleaseOwn { key, .. }
            | Command::EndForced { key, .. } => key.len(),
            Command::ForceRelease { key, who, why, .. } => key.len() + who.len() + why.len(),
            Command::Open { label, .. } => label.len(),
            _ => 0,
        }
}
