//! The naive model of the member table (`docs/decisions/006-membership.md`): who votes is a set,
//! who ever came is a list, and the change under way is one record beside them.
//!
//! Shares nothing with the crate but the wire's words.

use std::collections::BTreeSet;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{DiskId, NodeId};
use leasehold_protocol::member::{MemberCommand, MemberPhase, Standing};
use leasehold_protocol::peer::MemberEntry;

/// The most members at a time.
const MOST: usize = 5;
/// The most nodes in a cluster's whole life.
const MOST_EVER: usize = 1_000;

/// The table.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Table {
    /// How often it changed.
    pub(crate) version: u64,
    pub(crate) fence: u64,
    /// Everybody who was ever let in, in the order of their coming.
    ever: Vec<MemberEntry>,
    /// Who votes everywhere, were nothing under way.
    voters: BTreeSet<u64>,
    pub(crate) work: Option<Work>,
}

/// The change under way.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Work {
    pub(crate) number: u64,
    pub(crate) phase: MemberPhase,
    pub(crate) comes: Option<u64>,
    pub(crate) goes: Option<u64>,
}

/// What an applied command tells: a version and an operation.
type Told = Result<(u64, u64), ErrorCode>;

impl Table {
    pub(crate) fn apply(&mut self, command: &MemberCommand) -> Told {
        match command {
            MemberCommand::Found(founders) => self.found(founders),
            MemberCommand::Start { add, remove } => {
                self.start(add.as_ref(), remove.map(|node| node.0))
            }
            MemberCommand::Promote { operation } => {
                self.turn(*operation, MemberPhase::Vote, Some(MemberPhase::Undo))
            }
            MemberCommand::Abort { operation } => self.turn(*operation, MemberPhase::Undo, None),
            MemberCommand::Finish { operation, version } => self.finish(*operation, *version),
            MemberCommand::Fence { version } if *version < self.fence => {
                Err(ErrorCode::MEMBER_CHANGE_OVER)
            }
            MemberCommand::Fence { version } => {
                self.fence = *version;
                Ok((*version, 0))
            }
        }
    }

    fn found(&mut self, founders: &[MemberEntry]) -> Told {
        if self.version != 0 {
            return Err(ErrorCode::ALREADY_BEGUN);
        }
        let ids: BTreeSet<u64> = founders.iter().map(|one| one.node.0).collect();
        let in_order = founders.iter().map(|one| one.node.0).eq(ids.iter().copied());
        if ids.is_empty() || founders.len() > MOST || !in_order {
            return Err(ErrorCode::TOO_MANY_MEMBERS);
        }
        (self.ever, self.voters, self.version) = (founders.to_vec(), ids, 1);
        Ok((1, 0))
    }

    fn start(&mut self, add: Option<&MemberEntry>, goes: Option<u64>) -> Told {
        if self.version == 0 {
            return Err(ErrorCode::NOT_READY);
        }
        let comes = add.map(|entry| entry.node.0);
        if let Some(work) = &self.work {
            let same = (work.comes, work.goes) == (comes, goes)
                && work.phase != MemberPhase::Undo
                && add.is_none_or(|entry| {
                    self.ever.iter().any(|one| (one.node, one.disk) == (entry.node, entry.disk))
                });
            let told = (self.version, work.number);
            return if same { Ok(told) } else { Err(ErrorCode::MEMBER_CHANGE_UNDER_WAY) };
        }
        if let Some(entry) = add {
            self.may_come(entry)?;
        }
        let mut then = self.voters.clone();
        if goes.is_some_and(|node| !then.remove(&node)) {
            return Err(ErrorCode::NOT_A_MEMBER);
        }
        then.extend(comes);
        if then.is_empty() {
            return Err(ErrorCode::LAST_VOTER);
        }
        if then.len() > MOST {
            return Err(ErrorCode::TOO_MANY_MEMBERS);
        }
        if then == self.voters {
            return Err(ErrorCode::BAD_COMBINATION);
        }
        self.ever.extend(add.cloned());
        self.version += 1;
        let phase = if comes.is_some() { MemberPhase::Learn } else { MemberPhase::Vote };
        self.work = Some(Work { number: self.version, phase, comes, goes });
        Ok((self.version, self.version))
    }

    fn may_come(&self, entry: &MemberEntry) -> Result<(), ErrorCode> {
        let used = |one: &MemberEntry| one.node == entry.node || one.disk == entry.disk;
        let nobody = entry.node == NodeId(0) || entry.disk == DiskId([0; 16]);
        if nobody || self.ever.iter().any(used) {
            return Err(ErrorCode::NODE_ID_USED);
        }
        if self.ever.len() >= MOST_EVER {
            return Err(ErrorCode::TOO_MANY_MEMBERS);
        }
        if entry.peer_addr.is_empty() {
            return Err(ErrorCode::BAD_COMBINATION);
        }
        Ok(())
    }

    fn work_of(&self, number: u64) -> Result<&Work, ErrorCode> {
        let work = self.work.as_ref().filter(|work| work.number == number);
        work.ok_or(ErrorCode::MEMBER_CHANGE_OVER)
    }

    /// To a further phase; what is given up stays so.
    fn turn(&mut self, number: u64, to: MemberPhase, not_from: Option<MemberPhase>) -> Told {
        let mut work = self.work_of(number)?.clone();
        if Some(work.phase) == not_from {
            return Err(ErrorCode::MEMBER_CHANGE_OVER);
        }
        if work.phase != to {
            work.phase = to;
            self.work = Some(work);
            self.version += 1;
        }
        Ok((self.version, number))
    }

    fn finish(&mut self, number: u64, version: u64) -> Told {
        let work = self.work_of(number)?.clone();
        match work.phase {
            _ if version != self.version => return Err(ErrorCode::MEMBER_CHANGE_OVER),
            MemberPhase::Learn => return Err(ErrorCode::MEMBER_CHANGE_OVER),
            MemberPhase::Vote => {
                self.voters.extend(work.comes);
                self.voters.retain(|node| Some(*node) != work.goes);
            }
            MemberPhase::Undo => {}
        }
        self.work = None;
        self.version += 1;
        Ok((self.version, number))
    }

    fn standing(&self, node: u64) -> Standing {
        let comes = self.work.as_ref().and_then(|work| work.comes);
        match () {
            () if self.voters.contains(&node) => Standing::Voter,
            () if comes == Some(node) => Standing::Joining,
            () => Standing::Removed,
        }
    }

    /// Everybody who ever came as the table shows them, ascending: who went has no addresses.
    pub(crate) fn rows(&self) -> Vec<(MemberEntry, Standing)> {
        let row = |entry: &MemberEntry| {
            let (mut entry, standing) = (entry.clone(), self.standing(entry.node.0));
            if standing == Standing::Removed {
                (entry.peer_addr, entry.client_addr) = (String::new(), String::new());
            }
            (entry, standing)
        };
        let mut rows: Vec<_> = self.ever.iter().map(row).collect();
        rows.sort_by_key(|(entry, _)| entry.node);
        rows
    }

    /// Who votes once the change under way is over.
    pub(crate) fn voters_then(&self) -> Vec<u64> {
        let mut then = self.voters.clone();
        if let Some(work) = self.work.as_ref().filter(|work| work.phase != MemberPhase::Undo) {
            then.extend(work.comes);
            then.retain(|node| Some(*node) != work.goes);
        }
        then.into_iter().collect()
    }
}

/// Why the table that a state has is not this one.
pub(crate) fn differs(table: &Table, members: &leasehold_core::Members) -> Result<(), String> {
    let rows = members.nodes().map(|info| (info.entry.clone(), info.standing));
    let rows: Vec<_> = rows.collect();
    let some = |node: NodeId| (node != NodeId(0)).then_some(node.0);
    let work = members.operation().map(|work| {
        let (comes, goes) = (some(work.add), some(work.remove));
        Work { number: work.operation, phase: work.phase, comes, goes }
    });
    let then: Vec<_> = members.voters_after().iter().map(|entry| entry.node.0).collect();
    let same = (members.version(), members.fence()) == (table.version, table.fence)
        && rows == table.rows()
        && work == table.work
        && then == table.voters_then();
    if same { Ok(()) } else { Err(format!("{members:?} is not {table:?}")) }
}
