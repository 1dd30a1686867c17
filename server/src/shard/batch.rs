//! Commands on their way into the log: one Raft entry carries all that came while the former
//! proposals were under way, capped in number and bytes. No timer: a lone command goes at once.
//!
//! Invariant: each command that was accepted gets exactly one answer, from its outcome, from a
//! failed proposal, or from its deadline.

use std::collections::VecDeque;

use leasehold_core::BatchWriter;
use leasehold_protocol::command::{Command, Want};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::member::MemberCommand;
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::peer::MemberEntry;
use leasehold_protocol::planted;

use crate::env::MonoTime;
use crate::net::ReplyTo;
use crate::raft::{BATCH_LEN_MAX, Leadership};
use crate::shard::waits::Wait;

/// Most commands of one entry.
const BATCH_COMMANDS_MAX: usize = 1024;
/// Proposals under way at once.
pub(super) const PROPOSALS_MAX: usize = 4;
/// Commands, and about their bytes, that wait for a proposal; above it the answer is `busy`.
const PENDING_MAX: usize = 64 * 1024;
const PENDING_BYTES_MAX: usize = 64 * 1024 * 1024;
/// On top of these, for commands that free something: releases, cancels, ends.
const RESERVE: usize = PENDING_MAX / 4;
const RESERVE_BYTES: usize = PENDING_BYTES_MAX / 4;

/// The longest command that input checks let through fits an entry with room to spare.
const _: () = assert!(4 * leasehold_protocol::limits::VALUE_LEN_MAX < BATCH_LEN_MAX);

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

/// One entry and the claims to its outcomes, in their order.
pub(super) struct Batch {
    /// The entry.
    pub(super) writer: BatchWriter,
    /// Who waits; one per command.
    pub(super) slots: Vec<Slot>,
    /// Claims of commands that may not be proposed under this leadership.
    pub(super) stale: Vec<Slot>,
}

/// Commands that wait for a proposal.
#[derive(Default)]
pub(super) struct Pending {
    queue: VecDeque<(Command, Slot)>,
    bytes: usize,
}

impl Pending {
    /// Adds a command, or gives its slot back if there is no room.
    pub(super) fn push(&mut self, command: Command, slot: Slot) -> Result<(), Slot> {
        let size = size_of_command(&command);
        let (len_max, bytes_max) = match command {
            Command::Open { .. } | Command::Acquire { .. } => (PENDING_MAX, PENDING_BYTES_MAX),
            _ => (PENDING_MAX + RESERVE, PENDING_BYTES_MAX + RESERVE_BYTES),
        };
        if self.queue.len() >= len_max || self.bytes + size > bytes_max {
            return Err(slot);
        }
        self.bytes += size;
        self.queue.push_back((command, slot));
        Ok(())
    }

    /// Nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The next entry under `leadership`; empty if nothing waits.
    pub(super) fn take(&mut self, leadership: Leadership, wall_ms: u64) -> Batch {
        let (slots, stale) = (Vec::new(), Vec::new());
        let mut batch = Batch { writer: BatchWriter::new(wall_ms), slots, stale };
        while let Some((command, _)) = self.queue.front() {
            let size = size_of_command(command);
            let full = batch.slots.len() == BATCH_COMMANDS_MAX
                || batch.writer.byte_len() + size > BATCH_LEN_MAX;
            if full && !batch.slots.is_empty() {
                break;
            }
            let (command, slot) = self.queue.pop_front().expect("front was there");
            self.bytes -= size;
            // Planted (G3): what a former leadership decided is proposed under the next one.
            let any = planted!("expiry-of-a-former-leadership");
            if slot.under.is_none_or(|under| under == leadership || any) {
                batch.writer.push(&command);
                batch.slots.push(slot);
            } else {
                batch.stale.push(slot);
            }
        }
        batch
    }

    /// The claims of everything that waits; nothing of it will be proposed.
    pub(super) fn take_all(&mut self) -> Vec<Slot> {
        self.bytes = 0;
        self.queue.drain(..).map(|(_, slot)| slot).collect()
    }

    /// All claims whose deadline passed; their commands will not be proposed.
    pub(super) fn take_overdue(&mut self, now: MonoTime) -> Vec<Slot> {
        if self.queue.iter().all(|(_, slot)| slot.deadline > now) {
            return Vec::new();
        }
        let (overdue, rest): (Vec<_>, Vec<_>) =
            self.queue.drain(..).partition(|(_, slot)| slot.deadline <= now);
        self.bytes = rest.iter().map(|(command, _)| size_of_command(command)).sum();
        self.queue = rest.into();
        overdue.into_iter().map(|(_, slot)| slot).collect()
    }
}

/// At least as many bytes as the command takes in an entry.
fn size_of_command(command: &Command) -> usize {
    const FIXED: usize = 128;
    let caller = |acks: usize| 8 * acks;
    FIXED
        + match command {
            Command::Acquire { caller: who, key, value, .. }
            | Command::SetValue { caller: who, key, value, .. } => {
                caller(who.acks.len()) + key.len() + value.len()
            }
            Command::Release { caller: who, key, .. }
            | Command::Convert { caller: who, key, .. } => caller(who.acks.len()) + key.len(),
            Command::Cancel { caller: who, .. } | Command::ReleaseAll { caller: who, .. } => {
                caller(who.acks.len())
            }
            Command::AcquireAll { caller: who, wants, value, .. } => {
                let keys: usize = wants.iter().map(|want| size_of::<Want>() + want.key.len()).sum();
                caller(who.acks.len()) + keys + value.len()
            }
            Command::SetLimit { key, who, .. } => key.len() + who.len(),
            Command::ReleaseOwn { key, .. }
            | Command::EndForced { key, .. }
            | Command::EndDelay { key, .. } => key.len(),
            Command::ForceRelease { key, who, why, .. }
            | Command::AskYield { key, who, why, .. } => key.len() + who.len() + why.len(),
            Command::Open { label, .. } => label.len(),
            Command::Member(command) => size_of_member(command),
            Command::Close { .. }
            | Command::Begin { .. }
            | Command::BeginRestored { .. }
            | Command::EndQuarantine
            | Command::Expire { .. }
            | Command::TimeOut { .. } => 0,
        }
}

fn size_of_member(command: &MemberCommand) -> usize {
    let size = |entry: &MemberEntry| {
        size_of::<MemberEntry>() + entry.peer_addr.len() + entry.client_addr.len()
    };
    match command {
        MemberCommand::Found(members) => members.iter().map(size).sum(),
        MemberCommand::Start { add, .. } => add.iter().map(size).sum(),
        MemberCommand::Promote { .. }
        | MemberCommand::Abort { .. }
        | MemberCommand::Finish { .. }
        | MemberCommand::Fence { .. } => 0,
    }
}

#[cfg(test)]
mod tests {
    use leasehold_core::Batch as EntryBatch;
    use leasehold_protocol::command::Caller;
    use leasehold_protocol::ids::{LeaseId, Mode, NodeId, Number, Secret};
    use leasehold_protocol::limits::{ACKS_MAX, KEY_LEN_MAX, VALUE_LEN_MAX};

    use super::*;

    const LEADS: Leadership = Leadership { term: 3, node: NodeId(1) };

    fn slot(under: Option<Leadership>) -> Slot {
        Slot { waiting: None, under, deadline: MonoTime(0) }
    }

    fn acquire(value_len: usize) -> Command {
        let caller = Caller {
            lease: LeaseId(1),
            secret: Secret::default(),
            number: Number(1),
            floor: Number(0),
            acks: vec![Number(0); ACKS_MAX],
        };
        let (key, value) = (vec![b'k'; KEY_LEN_MAX], vec![0; value_len]);
        Command::Acquire { caller, key, mode: Mode::EXCLUSIVE, own: None, value, wait_ms: 0 }
    }

    #[test]
    fn an_entry_never_exceeds_what_the_log_takes() {
        let mut pending = Pending::default();
        for _ in 0..200 {
            assert!(pending.push(acquire(VALUE_LEN_MAX), slot(None)).is_ok());
        }
        let mut commands = 0;
        while !pending.is_empty() {
            let batch = pending.take(LEADS, 0);
            assert!(!batch.slots.is_empty() && batch.writer.len() == batch.slots.len());
            let bytes = batch.writer.finish();
            assert!(bytes.len() <= BATCH_LEN_MAX, "{}", bytes.len());
            commands += EntryBatch::decode(&bytes).unwrap().commands.len();
        }
        assert_eq!((commands, pending.bytes), (200, 0));
    }

    #[test]
    fn a_command_of_a_former_leadership_is_not_proposed() {
        let former = Leadership { term: 2, ..LEADS };
        let mut pending = Pending::default();
        for under in [Some(former), Some(LEADS), None] {
            assert!(pending.push(Command::Expire { lease: LeaseId(9) }, slot(under)).is_ok());
        }
        let batch = pending.take(LEADS, 0);
        assert_eq!((batch.slots.len(), batch.stale.len()), (2, 1));
        assert_eq!(batch.stale[0].under, Some(former));
    }

    #[test]
    fn what_waits_is_bounded_in_number_and_bytes_with_a_reserve_for_releases() {
        let mut pending = Pending::default();
        while pending.push(acquire(VALUE_LEN_MAX), slot(None)).is_ok() {}
        assert!(pending.bytes <= PENDING_BYTES_MAX);
        let close = || Command::Close { lease: LeaseId(1), secret: Secret::default() };
        assert!(pending.push(close(), slot(None)).is_ok(), "the reserve is open to it");
        let mut pending = Pending::default();
        while pending.push(close(), slot(None)).is_ok() {}
        assert_eq!(pending.queue.len(), PENDING_MAX + RESERVE);
    }
}
