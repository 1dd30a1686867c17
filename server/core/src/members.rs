//! The member table of the cluster (shard 0), and what each shard has seen of it.
//!
//! Owns the ids and data directories that were ever used, who votes, and the one operation under
//! way. Every change raises the table's version. A shard's *fence* is the highest version for which
//! its group was, or may have been, changed: whoever acts for an older one is refused, so that what
//! a deposed driver still has under way cannot undo what a later one did.
//!
//! Invariants: an id or data directory that was in the table never comes again; there is a voter; at
//! most one operation is under way, and none of its phases comes again; given up, it is only ever undone.

use alloc::collections::BTreeMap;
use alloc::rc::Rc;
use alloc::string::String;
use alloc::vec::Vec;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{DiskId, NodeId, Revision, Token};
use leasehold_protocol::limits::{MEMBERS_EVER_MAX, MEMBERS_MAX};
use leasehold_protocol::member::{
    MemberCommand, MemberInfo, MemberOperation, MemberPhase, Standing,
};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::peer::{ADDR_LEN_MAX, MemberEntry};
use leasehold_protocol::planted;

use crate::hash::Mix;
use crate::state::{State, Step};

/// Marks the table's hash.
const MEMBERS: u64 = 0x61;

/// The table. Empty in every shard but shard 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members {
    pub(crate) version: u64,
    pub(crate) fence: u64,
    pub(crate) nodes: BTreeMap<NodeId, MemberInfo>,
    pub(crate) operation: Option<MemberOperation>,
}

impl Members {
    /// How often the table changed; 0 before `Found`.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The highest version for which this shard's group may have been changed.
    pub fn fence(&self) -> u64 {
        self.fence
    }

    /// The operation under way.
    pub fn operation(&self) -> Option<MemberOperation> {
        self.operation
    }

    /// Every node that is or was a member, ascending.
    pub fn nodes(&self) -> impl Iterator<Item = &MemberInfo> {
        self.nodes.values()
    }

    /// One node.
    pub fn node(&self, node: NodeId) -> Option<&MemberInfo> {
        self.nodes.get(&node)
    }

    /// Who votes in every shard once the operation under way is done, or undone if it was given up.
    /// The same in all of them.
    pub fn voters_after(&self) -> Vec<MemberEntry> {
        let operation = self.operation.filter(|it| it.phase != MemberPhase::Undo);
        let (add, remove) = operation.map_or((NodeId(0), NodeId(0)), |it| (it.add, it.remove));
        let votes = |info: &&MemberInfo| {
            let node = info.entry.node;
            node == add || (info.standing == Standing::Voter && node != remove)
        };
        self.nodes.values().filter(votes).map(|info| info.entry.clone()).collect()
    }

    fn voters_len(&self) -> usize {
        self.nodes.values().filter(|info| info.standing == Standing::Voter).count()
    }

    fn knows_disk(&self, disk: DiskId) -> bool {
        self.nodes.values().any(|info| info.entry.disk == disk)
    }

    fn put(&mut self, entry: MemberEntry, standing: Standing) {
        self.nodes.insert(entry.node, MemberInfo { entry, standing });
    }

    /// Uses up an id and its data directory. Where it was is of no interest any more.
    fn retire(&mut self, node: NodeId) {
        // Planted (identity): nothing is kept of who was removed, so its id may come again.
        if planted!("removed-node-forgotten") {
            self.nodes.remove(&node);
        }
        if let Some(info) = self.nodes.get_mut(&node) {
            info.standing = Standing::Removed;
            info.entry.peer_addr = String::new();
            info.entry.client_addr = String::new();
        }
    }

    /// Its part of the state's digest; 0 while there is nothing.
    pub(crate) fn print(&self) -> u64 {
        if *self == Self::default() {
            return 0;
        }
        let mut mix = Mix::new(MEMBERS).word(self.version).word(self.fence);
        for info in self.nodes.values() {
            let disk = u128::from_le_bytes(info.entry.disk.0);
            mix = mix
                .word(info.entry.node.0)
                .word(disk as u64)
                .word((disk >> 64) as u64)
                .bytes(info.entry.peer_addr.as_bytes())
                .bytes(info.entry.client_addr.as_bytes())
                .word(info.standing as u64);
        }
        if let Some(operation) = &self.operation {
            mix = mix
                .word(operation.operation)
                .word(operation.phase as u64)
                .word(operation.add.0)
                .word(operation.remove.0);
        }
        mix.done()
    }

    /// What is wrong with a table that came from outside.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        if self.version == 0 {
            let empty = self.nodes.is_empty() && self.operation.is_none();
            return if empty { Ok(()) } else { Err("a member table without a version") };
        }
        if self.voters_len() == 0 || self.voters_len() > MEMBERS_MAX {
            return Err("a member table without voters, or with too many");
        }
        if self.nodes.len() > MEMBERS_EVER_MAX {
            return Err("a member table with too many nodes");
        }
        let Some(operation) = self.operation else {
            let joining = self.nodes.values().any(|info| info.standing == Standing::Joining);
            return if joining { Err("a node that joins without an operation") } else { Ok(()) };
        };
        let standing = |node| self.nodes.get(&node).map(|info| info.standing);
        let comes =
            operation.add == NodeId(0) || standing(operation.add) == Some(Standing::Joining);
        let goes =
            operation.remove == NodeId(0) || standing(operation.remove) == Some(Standing::Voter);
        let some = operation.add != operation.remove;
        let dated = (1..=self.version).contains(&operation.operation);
        if comes && goes && some && dated { Ok(()) } else { Err("an impossible operation") }
    }
}

impl State {
    /// The member table, and this shard's fence.
    pub fn members(&self) -> &Members {
        &self.members
    }

    pub(crate) fn member(&mut self, step: &mut Step<'_>, command: &MemberCommand) -> Outcome {
        let mut members = (*self.members).clone();
        let operation = match members.apply(command) {
            Ok(operation) => operation,
            Err(code) => return self.refusal(code, Token(0)),
        };
        let fences = matches!(command, MemberCommand::Fence { .. });
        let version = if fences { members.fence } else { members.version };
        let mut revision = Revision(self.revision);
        if members != *self.members {
            revision = self.raise(step);
            self.members = Rc::new(members);
        }
        Outcome::Members { version, operation, revision }
    }
}

impl Members {
    /// Returns the operation that is, or was, meant; 0 if none.
    fn apply(&mut self, command: &MemberCommand) -> Result<u64, ErrorCode> {
        match command {
            MemberCommand::Found(members) => self.found(members),
            MemberCommand::Start { add, remove } => self.start(add.as_ref(), *remove),
            MemberCommand::Promote { operation } => {
                match self.under_way(*operation)?.phase {
                    MemberPhase::Learn => self.enter(MemberPhase::Vote),
                    MemberPhase::Vote => {}
                    MemberPhase::Undo => return Err(ErrorCode::MEMBER_CHANGE_OVER),
                }
                Ok(*operation)
            }
            MemberCommand::Abort { operation } => {
                match self.under_way(*operation)?.phase {
                    MemberPhase::Learn | MemberPhase::Vote => self.enter(MemberPhase::Undo),
                    MemberPhase::Undo => {}
                }
                Ok(*operation)
            }
            MemberCommand::Finish { operation, version } => self.finish(*operation, *version),
            MemberCommand::Fence { version } => {
                // Planted (G8): a deposed driver's step is taken after a later one's.
                if *version < self.fence && !planted!("fence-lets-the-old-pass") {
                    return Err(ErrorCode::MEMBER_CHANGE_OVER);
                }
                self.fence = *version;
                Ok(0)
            }
        }
    }

    fn found(&mut self, members: &[MemberEntry]) -> Result<u64, ErrorCode> {
        if self.version > 0 {
            return Err(ErrorCode::ALREADY_BEGUN);
        }
        let ascend = members.windows(2).all(|pair| pair[0].node < pair[1].node);
        if members.is_empty() || members.len() > MEMBERS_MAX || !ascend {
            return Err(ErrorCode::TOO_MANY_MEMBERS);
        }
        for entry in members {
            self.put(entry.clone(), Standing::Voter);
        }
        self.version = 1;
        Ok(0)
    }

    fn start(
        &mut self,
        add: Option<&MemberEntry>,
        remove: Option<NodeId>,
    ) -> Result<u64, ErrorCode> {
        if self.version == 0 {
            return Err(ErrorCode::NOT_READY);
        }
        let goes = remove.unwrap_or(NodeId(0));
        let comes = add.map_or(NodeId(0), |entry| entry.node);
        // Planted (G8): an operation begins while another is under way, and takes its place.
        if let Some(operation) = self.operation
            && !planted!("second-operation-begun")
        {
            let known = self.nodes.get(&comes).map(|info| &info.entry);
            let same = operation.add == comes
                && operation.remove == goes
                && operation.phase != MemberPhase::Undo
                && known.map(|entry| entry.disk) == add.map(|entry| entry.disk);
            let code = ErrorCode::MEMBER_CHANGE_UNDER_WAY;
            return if same { Ok(operation.operation) } else { Err(code) };
        }
        if let Some(entry) = add {
            self.check_new(entry)?;
        }
        if let Some(node) = remove
            && self.nodes.get(&node).map(|info| info.standing) != Some(Standing::Voter)
        {
            return Err(ErrorCode::NOT_A_MEMBER);
        }
        let voters = self.voters_len() + usize::from(add.is_some()) - usize::from(remove.is_some());
        // Planted (G8): nobody is left to vote.
        if voters == 0 && !planted!("last-voter-removed") {
            return Err(ErrorCode::LAST_VOTER);
        }
        if voters > MEMBERS_MAX {
            return Err(ErrorCode::TOO_MANY_MEMBERS);
        }
        let phase = match add {
            Some(entry) => {
                self.put(entry.clone(), Standing::Joining);
                MemberPhase::Learn
            }
            None if remove.is_some() => MemberPhase::Vote,
            None => return Err(ErrorCode::BAD_COMBINATION),
        };
        self.version += 1;
        let operation = self.version;
        self.operation = Some(MemberOperation { operation, phase, add: comes, remove: goes });
        Ok(operation)
    }

    fn check_new(&self, entry: &MemberEntry) -> Result<(), ErrorCode> {
        // Planted (identity): a data directory comes again under another id.
        let disk_used = self.knows_disk(entry.disk) && !planted!("disk-comes-again");
        let used = self.nodes.contains_key(&entry.node) || disk_used;
        if used || entry.node == NodeId(0) || entry.disk == DiskId::UNKNOWN {
            return Err(ErrorCode::NODE_ID_USED);
        }
        if self.nodes.len() >= MEMBERS_EVER_MAX {
            return Err(ErrorCode::TOO_MANY_MEMBERS);
        }
        let fits = |addr: &String| addr.len() <= ADDR_LEN_MAX;
        if !fits(&entry.peer_addr) || !fits(&entry.client_addr) || entry.peer_addr.is_empty() {
            return Err(ErrorCode::BAD_COMBINATION);
        }
        Ok(())
    }

    /// The operation under way, if it is this one.
    fn under_way(&self, operation: u64) -> Result<MemberOperation, ErrorCode> {
        // Planted (G8): a late step of a former operation moves the present one.
        let any = planted!("step-of-a-former-operation");
        let present = self.operation.filter(|present| any || present.operation == operation);
        present.ok_or(ErrorCode::MEMBER_CHANGE_OVER)
    }

    fn enter(&mut self, phase: MemberPhase) {
        self.version += 1;
        if let Some(operation) = &mut self.operation {
            operation.phase = phase;
        }
    }

    fn finish(&mut self, number: u64, version: u64) -> Result<u64, ErrorCode> {
        let operation = self.under_way(number)?;
        // What was done in all shards for an older version is not what is wanted now.
        if version != self.version {
            return Err(ErrorCode::MEMBER_CHANGE_OVER);
        }
        match operation.phase {
            MemberPhase::Learn => return Err(ErrorCode::MEMBER_CHANGE_OVER),
            MemberPhase::Vote => {
                if let Some(info) = self.nodes.get_mut(&operation.add) {
                    info.standing = Standing::Voter;
                }
                self.retire(operation.remove);
            }
            MemberPhase::Undo => self.retire(operation.add),
        }
        self.operation = None;
        self.version += 1;
        Ok(number)
    }
}

#[cfg(test)]
mod tests;
