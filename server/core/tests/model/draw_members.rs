//! Drawing changes of the member table: mostly what a driver or an operator would send, else a
//! late, a repeated or an impossible one.

use leasehold_protocol::command::Command;
use leasehold_protocol::ids::{DiskId, NodeId};
use leasehold_protocol::member::{MemberCommand, MemberPhase, Standing};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::peer::MemberEntry;

use crate::naive::members::Table;

fn entry(node: u64, disk: u64, named: bool) -> MemberEntry {
    let peer_addr = if named { format!("peer{node}:1") } else { String::new() };
    let client_addr = format!("client{node}:1");
    MemberEntry { node: NodeId(node), disk: DiskId([disk as u8; 16]), peer_addr, client_addr }
}

/// Four numbers that choose the parts.
pub(crate) fn command([who, which, how, ack]: [u8; 4], table: &Table) -> MemberCommand {
    let work = table.work.as_ref();
    let number = work.map_or(table.version, |work| work.number);
    let operation = number.saturating_sub(u64::from(ack % 8 == 7));
    match how % 16 {
        _ if table.version == 0 && how < 224 => founders(which),
        0..=4 => start(who, which, ack, table),
        5 => match work {
            Some(work) => again(work.comes, work.goes, which, table),
            None => start(who, which, ack, table),
        },
        6 | 7 => MemberCommand::Promote { operation },
        8 => MemberCommand::Abort { operation },
        9..=12 => MemberCommand::Finish {
            operation,
            version: table.version - u64::from(ack % 4 == 3).min(table.version),
        },
        13 | 14 => MemberCommand::Fence {
            version: table.version - u64::from(ack % 4 == 3).min(table.version),
        },
        _ => founders(which),
    }
}

/// One to five of them; now and then none, six, or in disorder.
fn founders(which: u8) -> MemberCommand {
    let count = [0, 1, 1, 2, 3, 3, 4, 5, 6][usize::from(which % 9)];
    let mut all: Vec<_> = (1..=count).map(|node| entry(node, node, true)).collect();
    if which % 16 == 15 {
        all.reverse();
    }
    MemberCommand::Found(all)
}

/// Mostly a node that never was, or one that is there.
fn start(who: u8, which: u8, ack: u8, table: &Table) -> MemberCommand {
    let rows = table.rows();
    let last = rows.last().map_or(0, |(entry, _)| entry.node.0);
    let old = u64::from(which) % (last + 1);
    let comes = match ack % 16 {
        0 => entry(old, last + 1, true),
        1 => entry(last + 1, old, true),
        2 => entry(last + 1, last + 1, false),
        _ => entry(last + 1, last + 1, true),
    };
    let voters: Vec<_> = rows.iter().filter(|row| row.1 == Standing::Voter).collect();
    let present = voters.get(usize::from(which) % voters.len().max(1));
    let goes = match present {
        Some((entry, _)) if ack % 8 != 5 => entry.node,
        _ => NodeId(1 + old),
    };
    match who % 8 {
        0..=2 => MemberCommand::Start { add: Some(comes), remove: None },
        3..=5 => MemberCommand::Start { add: None, remove: Some(goes) },
        6 => MemberCommand::Start { add: Some(comes), remove: Some(goes) },
        _ if ack.is_multiple_of(4) => MemberCommand::Start { add: None, remove: None },
        _ => MemberCommand::Start { add: Some(comes), remove: Some(goes) },
    }
}

/// The change under way once more, or one like it for another data directory.
fn again(comes: Option<u64>, goes: Option<u64>, which: u8, table: &Table) -> MemberCommand {
    let rows = table.rows();
    let known = rows.iter().find(|row| Some(row.0.node.0) == comes);
    let add = known.map(|(known, _)| {
        let mut known = known.clone();
        if which % 4 == 3 {
            known.disk = DiskId([0xEE; 16]);
        }
        known
    });
    MemberCommand::Start { add, remove: goes.map(NodeId) }
}

/// Names what a step showed.
pub(crate) fn cover(
    command: &Command,
    outcome: &Outcome,
    (before, after): (&Table, &Table),
    count: &mut impl FnMut(&str),
) {
    let (Command::Member(command), Outcome::Members { .. }) = (command, outcome) else { return };
    let what = match (command, &before.work) {
        (MemberCommand::Start { .. }, Some(_)) => "seen: a change of members that was joined",
        (MemberCommand::Abort { .. }, Some(work)) if work.phase == MemberPhase::Vote => {
            "seen: a change of members that was given up in the vote"
        }
        (MemberCommand::Fence { .. }, _) if before != after => "seen: a fence that rose",
        (MemberCommand::Finish { .. }, Some(work)) => match (work.phase, work.comes, work.goes) {
            (MemberPhase::Undo, ..) => "seen: a change of members that was undone",
            (_, Some(_), Some(_)) => "seen: a node that took another's place",
            (_, Some(_), None) => "seen: a node that came",
            _ => "seen: a node that went",
        },
        _ => return,
    };
    count(what);
}
