//! Clients that read late: what they sent and were told, what they may send again, and what the
//! state must still know (G5).
//!
//! They use the numbers of a slot as clients do (an acquire, its cancel, its release), raise floors
//! and acknowledge by themselves, send a cancel before its acquire, and everything again.

use std::collections::{BTreeMap, BTreeSet};

use leasehold_core::Remembered;
use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, Number, Token};
use leasehold_protocol::outcome::Outcome;

use super::Profile;
use super::moves::acquire;
use super::rules::View;
use super::world::World;
use crate::shape::kind;
use crate::world::{SECRET, SLOT, first_of_slot};

/// Slots of one client that may be remembered at a time, and of which it still repeats anything.
const SLOTS_MAX: u64 = 2;

/// What a client sent under a number, and what it was told first.
#[derive(Clone)]
pub(crate) struct Sent {
    command: Command,
    /// `None` while it waits.
    first: Option<Outcome>,
    /// It waited, or was executed below the floor: only an acknowledgement lets the state forget.
    outlives_floor: bool,
    /// Something was sent that may count as one.
    maybe_read: bool,
}

#[derive(Clone)]
pub(crate) struct Client {
    /// The first number of the next slot.
    pub(crate) next: u64,
    pub(crate) floor: u64,
    /// Of a client that reads late.
    sent: BTreeMap<u64, Sent>,
}

impl Default for Client {
    fn default() -> Self {
        Self { next: 1, floor: 0, sent: BTreeMap::new() }
    }
}

impl Client {
    /// A command that the state knew before (`known`) or not had this outcome.
    pub(crate) fn learn(&mut self, command: &Command, outcome: Outcome, known: bool) {
        let Some(Caller { number: Number(number), floor, acks, .. }) = caller_of(command) else {
            return;
        };
        self.floor = self.floor.max(floor.0);
        for ack in acks {
            self.mark_read(ack.0, true);
        }
        if *number == 0 {
            return;
        }
        let slot = first_of_slot(*number);
        self.next = self.next.max(slot + SLOT);
        if *number != slot {
            self.mark_read(slot, false);
        }
        if is_refused(outcome, ErrorCode::NUMBER_BELOW_FLOOR) {
            return;
        }
        let waits = matches!(outcome, Outcome::Queued { .. });
        let sent = Sent {
            command: command.clone(),
            first: (!waits).then_some(outcome),
            outlives_floor: waits || *number <= self.floor,
            maybe_read: false,
        };
        if known {
            self.sent.entry(*number).or_insert(sent);
        } else {
            self.sent.insert(*number, sent);
        }
    }

    /// A wait is over.
    pub(crate) fn ended(&mut self, number: Number, outcome: Outcome) {
        if let Some(sent) = self.sent.get_mut(&number.0) {
            sent.first = Some(outcome);
        }
    }

    /// An acknowledgement of a wait that goes on counts for nothing.
    fn mark_read(&mut self, number: u64, only_final: bool) {
        if let Some(sent) = self.sent.get_mut(&number) {
            sent.maybe_read |= sent.first.is_some() || !only_final;
        }
    }

    fn must_be_remembered(&self, number: u64, sent: &Sent) -> bool {
        number > self.floor || (sent.outlives_floor && (sent.first.is_none() || !sent.maybe_read))
    }

    /// The cancel of this acquire was executed before it.
    fn is_forestalled(&self, number: u64) -> bool {
        let is_cancel = |sent: &Sent| matches!(sent.command, Command::Cancel { .. });
        let first = self.sent.get(&number).map(|sent| sent.first);
        let refused = |first: Option<Outcome>| {
            first.is_some_and(|outcome| is_refused(outcome, ErrorCode::CANCELLED))
        };
        self.sent.get(&(number + 1)).is_some_and(is_cancel) && first.is_none_or(refused)
    }

    /// What is wrong with the outcome of a command of this client, whose keys it `changed` or not.
    pub(crate) fn judge(
        &self,
        command: &Command,
        outcome: Outcome,
        changed: bool,
    ) -> Result<(), String> {
        let Some(Caller { number: Number(number), floor, .. }) = caller_of(command) else {
            return Ok(());
        };
        let refused = matches!(outcome, Outcome::Refused { .. });
        if matches!(command, Command::AcquireAll { .. }) && self.is_forestalled(*number) && !refused
        {
            return Err(format!("G5: an acquire after its cancel is told {outcome:?}"));
        }
        let Some(sent) = self.sent.get(number) else { return Ok(()) };
        if floor.0 > self.floor || !self.must_be_remembered(*number, sent) {
            return Ok(());
        }
        let same = match sent.first {
            Some(first) => first == outcome,
            None => matches!(outcome, Outcome::Queued { .. }),
        };
        if changed || !same {
            let first = sent.first;
            return Err(format!("G5: a retry is told {outcome:?}, first was {first:?}"));
        }
        Ok(())
    }

    /// Everything that must be remembered is, with the outcome that was told first.
    pub(crate) fn is_known(&self, world: &World, lease: LeaseId) -> Result<(), String> {
        for (number, sent) in &self.sent {
            let told = world.state.wait_result(lease, Number(*number));
            let right = match (sent.first, told) {
                (_, None) => !self.must_be_remembered(*number, sent),
                (Some(first), Some(told)) => first == told,
                (None, Some(told)) => matches!(told, Outcome::Queued { .. }),
            };
            if !right {
                let first = sent.first;
                return Err(format!("G5: {lease} {number}: first {first:?}, now {told:?}"));
            }
        }
        Ok(())
    }
}

/// Every command of such a client that the present state gives sense to.
pub(crate) fn moves(world: &World, profile: &Profile, lease: LeaseId, list: &mut Vec<Command>) {
    let client = &world.sessions[&lease];
    let caller = |number| world.caller(lease, Some(number));
    let cancel =
        |number, release_if_granted| Command::Cancel { caller: caller(number), release_if_granted };
    if slots(world, lease).len() < SLOTS_MAX as usize {
        list.extend(profile.asks.iter().map(|ask| acquire(caller(client.next), ask)));
        list.extend([false, true].map(|release| cancel(client.next + 1, release)));
    }
    let known = client.next.saturating_sub(SLOTS_MAX * SLOT).max(1);
    for slot in (known..client.next).filter(|number| number % SLOT == 1) {
        match (client.sent.contains_key(&slot), client.sent.contains_key(&(slot + 1))) {
            (true, false) => list.extend([false, true].map(|release| cancel(slot + 1, release))),
            (false, true) => list.push(acquire(caller(slot), &profile.asks[0])),
            _ => {}
        }
        let again = client.sent.range(slot..slot + SLOT);
        list.extend(again.map(|(number, sent)| with_caller(&sent.command, caller(*number))));
    }
    releases(world, lease, list);
    acks(world, lease, list);
}

fn releases(world: &World, lease: LeaseId, list: &mut Vec<Command>) {
    let holds = world.state.holds(lease).map_or_else(Vec::new, |reply| reply.holds);
    for hold in holds {
        let number = hold.number.0 + 2;
        if !world.sessions[&lease].sent.contains_key(&number) {
            let caller = || world.caller(lease, Some(number));
            let (key, token, acquire) = (hold.key, hold.token, hold.number);
            list.push(Command::Release { caller: caller(), key, token });
            list.push(Command::ReleaseAll { caller: caller(), acquire });
        }
    }
}

/// Under the number 0, which is refused: the floor at the last acquire, at its slot's end, and there
/// with everything acknowledged.
fn acks(world: &World, lease: LeaseId, list: &mut Vec<Command>) {
    let client = &world.sessions[&lease];
    let nothing = |floor, acks| Command::Release {
        caller: Caller { lease, secret: SECRET, number: Number(0), floor: Number(floor), acks },
        key: b"k".to_vec(),
        token: Token(0),
    };
    let end = client.next - 1;
    let floors = [end.saturating_sub(2), end].into_iter().filter(|floor| *floor > client.floor);
    list.extend(floors.map(|floor| nothing(floor, vec![])));
    let kept = remembered(world, lease).into_iter().filter(|one| one.keep || one.late);
    let kept: Vec<_> = kept.map(|one| one.number).collect();
    if !kept.is_empty() {
        list.push(nothing(end, kept));
    }
}

fn remembered(world: &World, lease: LeaseId) -> Vec<Remembered> {
    world.state.lease(lease).expect("it is live").memory().collect()
}

/// The slots of which anything is left: numbers above the floor, remembered ones, holds, waits.
fn slots(world: &World, lease: LeaseId) -> BTreeSet<u64> {
    let client = &world.sessions[&lease];
    let sent = client.sent.keys().copied().filter(|number| *number > client.floor);
    let known = remembered(world, lease).into_iter().map(|one| one.number.0);
    let mut numbers: BTreeSet<u64> = sent.chain(known).map(first_of_slot).collect();
    if let Some(reply) = world.state.holds(lease) {
        numbers.extend(reply.holds.iter().map(|hold| hold.number.0));
        numbers.extend(reply.waits.iter().map(|number| number.0));
    }
    numbers
}

/// What a client remembers and is remembered of, but for names: of each slot how far the floor has
/// passed it, which holds and waits are its acquire's, and each number. See `search/shape.rs`.
pub(crate) fn read(
    world: &World,
    view: &View,
    lease: LeaseId,
    mut group: impl FnMut(LeaseId, Number) -> u8,
    bytes: &mut Vec<u8>,
) {
    let client = &world.sessions[&lease];
    let memory = remembered(world, lease);
    for slot in slots(world, lease) {
        let passed = (client.floor + 1).saturating_sub(slot).min(SLOT);
        bytes.extend([0x80 | passed as u8, group(lease, Number(slot))]);
        for number in slot..slot + SLOT {
            let known = memory.iter().find(|one| one.number.0 == number);
            let sent = client.sent.get(&number);
            let sent = sent.filter(|_| known.is_some() || number > client.floor);
            let Some(one) = known else {
                bytes.push(u8::from(sent.is_some()));
                continue;
            };
            bytes.push((kind(one.kind) << 2) | u8::from(one.keep) << 1 | u8::from(one.late));
            bytes.push(outcome(view, one.outcome));
            body(view, sent.map(|sent| &sent.command), bytes);
        }
    }
    bytes.push(254);
}

/// A token: which key's hold has it, and that hold's place there, or that it is over.
fn present(view: &View, token: Token) -> u8 {
    for (at, entry) in view.keys.values().enumerate() {
        if let Some(place) = entry.holders.iter().position(|one| one.token == token) {
            return 1 + (at * 8 + place) as u8;
        }
    }
    0
}

fn outcome(view: &View, outcome: Option<Outcome>) -> u8 {
    match outcome {
        None => 0,
        Some(Outcome::Granted(grant)) => 100 + present(view, grant.token),
        Some(Outcome::Cancelled { .. }) => 1,
        Some(Outcome::TimedOut { .. }) => 2,
        Some(Outcome::Released { .. }) => 3,
        Some(Outcome::Changed { .. }) => 4,
        Some(Outcome::Refused { code, .. }) => 5 + (code.0 % 90) as u8,
        Some(other) => unreachable!("no client here is told {other:?}"),
    }
}

/// What would be sent again.
fn body(view: &View, command: Option<&Command>, bytes: &mut Vec<u8>) {
    match command {
        None => bytes.push(0),
        Some(Command::AcquireAll { wants, wait_ms, .. }) => {
            bytes.extend([1, u8::from(*wait_ms > 0)]);
            for want in wants {
                bytes.extend([want.key[0], want.mode.0 as u8, (want.mode.0 >> 8) as u8]);
            }
        }
        Some(Command::Cancel { release_if_granted, .. }) => {
            bytes.extend([2, u8::from(*release_if_granted)]);
        }
        Some(Command::Release { key, token, .. }) => {
            bytes.extend([3, key[0], present(view, *token)]);
        }
        Some(Command::ReleaseAll { .. }) => bytes.push(4),
        Some(other) => unreachable!("no client here sends {other:?}"),
    }
}

fn is_refused(outcome: Outcome, wanted: ErrorCode) -> bool {
    matches!(outcome, Outcome::Refused { code, .. } if code == wanted)
}

/// Who sent a numbered command.
pub(crate) fn caller_of(command: &Command) -> Option<&Caller> {
    match command {
        Command::AcquireAll { caller, .. }
        | Command::Cancel { caller, .. }
        | Command::Release { caller, .. }
        | Command::ReleaseAll { caller, .. }
        | Command::Convert { caller, .. }
        | Command::SetValue { caller, .. } => Some(caller),
        _ => None,
    }
}

/// The same command, sent again.
fn with_caller(command: &Command, again: Caller) -> Command {
    let mut command = command.clone();
    if let Command::AcquireAll { caller, .. }
    | Command::Cancel { caller, .. }
    | Command::Release { caller, .. }
    | Command::ReleaseAll { caller, .. } = &mut command
    {
        *caller = again;
    }
    command
}
