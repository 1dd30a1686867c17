//! The member table on its own: every sequence of a small alphabet, with equal tables merged.
//!
//! After each step: rules written for it alone, the naive model's answer, the state's invariants,
//! and the same table out of a snapshot. Tables are merged when they are equal but for their
//! version and their fence's distance from it, which the code only raises and compares.

use std::collections::{BTreeMap, BTreeSet};

use leasehold_core::snapshot::{Decoder, Encoder};
use leasehold_core::{Members, State, invariants};
use leasehold_protocol::command::Command;
use leasehold_protocol::ids::{DiskId, NodeId, ShardId, Token};
use leasehold_protocol::member::{MemberCommand, MemberPhase, Standing};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::peer::MemberEntry;

use crate::naive::{self, Model};

/// Ids that the operator tries, and the data directories; 1 and 2 are the founders'.
const NODES: u64 = 4;
const DEPTH: usize = 14;

macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}

fn entry(node: u64, disk: u64) -> MemberEntry {
    let (peer_addr, client_addr) = (format!("peer{node}:1"), String::new());
    MemberEntry { node: NodeId(node), disk: DiskId([disk as u8; 16]), peer_addr, client_addr }
}

/// The state, the model beside it, and the commands that led here.
#[derive(Clone)]
struct Stand {
    state: State,
    model: Model,
    revision: u64,
    path: Vec<MemberCommand>,
}

impl Stand {
    fn new(founders: u64) -> Self {
        let (state, model) = (State::new(ShardId(0)), Model::default());
        let mut stand = Self { state, model, revision: 0, path: Vec::new() };
        let begin = Command::Begin { token_base: Token(9) };
        stand.state.apply(0, &begin, &mut Vec::new());
        naive::apply(&mut stand.model, &mut stand.revision, 0, &begin);
        let founders = (1..=founders).map(|node| entry(node, node)).collect();
        stand.step(&MemberCommand::Found(founders)).expect("a founded cluster");
        stand
    }

    /// Applies it to both and checks everything.
    fn step(&mut self, command: &MemberCommand) -> Result<Outcome, String> {
        let before = self.state.members().clone();
        self.path.push(command.clone());
        let full = Command::Member(command.clone());
        let mut events = Vec::new();
        let outcome = self.state.apply(0, &full, &mut events);
        let (expected, _) = naive::apply(&mut self.model, &mut self.revision, 0, &full);
        ensure!(events.is_empty(), "a change of members wakes watchers: {events:?}");
        ensure!(outcome == expected, "{outcome:?}, and the model says {expected:?}");
        ensure!(self.state.revision().0 == self.revision, "another revision than the model's");
        naive::members::differs(&self.model.members, self.state.members())?;
        invariants::check(&self.state)?;
        let mut decoder = Decoder::new();
        for chunk in Encoder::new(&self.state) {
            decoder.feed(&chunk).map_err(|error| format!("snapshot: {error}"))?;
        }
        let copy = decoder.finish().map_err(|error| format!("snapshot: {error}"))?;
        ensure!(copy.members() == self.state.members(), "a snapshot changed the table");
        rules(&before, command, &outcome, self.state.members())?;
        Ok(outcome)
    }
}

fn standing(members: &Members, node: NodeId) -> Option<Standing> {
    members.node(node).map(|info| info.standing)
}

/// What must be true of each step, whatever the model says.
fn rules(
    before: &Members,
    command: &MemberCommand,
    outcome: &Outcome,
    after: &Members,
) -> Result<(), String> {
    let rise = after.version().checked_sub(before.version());
    ensure!(matches!(rise, Some(0 | 1)), "the version rose by {rise:?}");
    ensure!(after.fence() >= before.fence(), "the fence fell");
    if matches!(outcome, Outcome::Refused { .. }) {
        ensure!(before == after, "a refusal changed the table");
    }
    let tables = |one: &Members| (one.nodes().cloned().collect::<Vec<_>>(), one.operation());
    ensure!((tables(before) == tables(after)) == (rise == Some(0)), "a change without a version");
    for old in before.nodes() {
        let now = after.node(old.entry.node).ok_or("a node is forgotten")?;
        ensure!(now.entry.disk == old.entry.disk, "an id came with another data directory");
        ensure!(
            now.standing == old.standing || old.standing != Standing::Removed,
            "a node is back"
        );
        let unvoted = (old.standing, now.standing) == (Standing::Voter, Standing::Joining);
        ensure!(!unvoted, "a voter became a learner");
    }
    let disks: BTreeSet<_> = after.nodes().map(|info| info.entry.disk).collect();
    ensure!(disks.len() == after.nodes().count(), "a data directory came twice");
    ensure!(after.nodes().any(|info| info.standing == Standing::Voter), "no voter is left");
    ensure!(!after.voters_after().is_empty(), "no voter is to be left");
    let joining = after.nodes().filter(|info| info.standing == Standing::Joining).count();
    let adds = after.operation().is_some_and(|work| work.add != NodeId(0));
    ensure!(joining == usize::from(adds), "{joining} nodes join for {:?}", after.operation());
    operation(before, command, after)
}

/// At most one, of which only the phase changes; begun by a start, ended by a finish.
fn operation(before: &Members, command: &MemberCommand, after: &Members) -> Result<(), String> {
    match (before.operation(), after.operation()) {
        (Some(was), Some(is)) => {
            let same = (was.operation, was.add, was.remove) == (is.operation, is.add, is.remove);
            ensure!(same, "{was:?} became {is:?}");
            let forth = was.phase == is.phase
                || was.phase == MemberPhase::Learn
                || (was.phase, is.phase) == (MemberPhase::Vote, MemberPhase::Undo);
            ensure!(forth, "from {:?} to {:?}", was.phase, is.phase);
            let asked = match command {
                MemberCommand::Promote { operation } => (*operation, MemberPhase::Vote),
                MemberCommand::Abort { operation } => (*operation, MemberPhase::Undo),
                _ => (is.operation, was.phase),
            };
            let moved = was.phase != is.phase;
            ensure!(!moved || asked == (is.operation, is.phase), "a step of another operation");
        }
        (None, Some(is)) => {
            ensure!(matches!(command, MemberCommand::Start { .. }), "begun by {command:?}");
            ensure!(is.operation == after.version(), "numbered {}", is.operation);
        }
        (Some(was), None) => {
            let (operation, version) = (was.operation, before.version());
            let ends = MemberCommand::Finish { operation, version };
            ensure!(*command == ends, "ended by {command:?}");
            ensure!(was.phase != MemberPhase::Learn, "ended while it learnt");
            let undone = was.phase == MemberPhase::Undo;
            let comes = if undone { Standing::Removed } else { Standing::Voter };
            let goes = if undone { Standing::Voter } else { Standing::Removed };
            let is = |node, wanted| node == NodeId(0) || standing(after, node) == Some(wanted);
            ensure!(is(was.add, comes) && is(was.remove, goes), "{was:?} left {after:?}");
        }
        (None, None) => {}
    }
    Ok(())
}

/// Everything that anybody may send to this table, late and wrong ones included.
fn alphabet(members: &Members) -> Vec<MemberCommand> {
    let adds = (1..=NODES).flat_map(|node| [(node, node), (node, 1 + node % NODES)]);
    let adds: Vec<_> = adds.map(|(node, disk)| Some(entry(node, disk))).chain([None]).collect();
    let mut all = vec![MemberCommand::Found(vec![entry(NODES, NODES)])];
    for add in adds {
        for remove in [0, 1, 2, NODES] {
            let remove = (remove > 0).then_some(NodeId(remove));
            all.push(MemberCommand::Start { add: add.clone(), remove });
        }
    }
    let numbers = members.operation().map_or(members.version(), |work| work.operation);
    for operation in [numbers, numbers - 1] {
        all.push(MemberCommand::Promote { operation });
        all.push(MemberCommand::Abort { operation });
        for version in [members.version(), members.version() - 1] {
            all.push(MemberCommand::Finish { operation, version });
        }
    }
    all.push(MemberCommand::Fence { version: members.version() });
    all.push(MemberCommand::Fence { version: members.version() - 1 });
    all
}

/// The table but for how high its version is.
fn shape(members: &Members) -> String {
    let nodes: Vec<_> = members.nodes().collect();
    let work = members.operation().map(|work| (work.phase, work.add, work.remove));
    format!("{nodes:?} {work:?} {}", (members.version() - members.fence()).min(2))
}

fn search(founders: u64, depth: usize) -> BTreeMap<String, u64> {
    let root = Stand::new(founders);
    let mut shapes = BTreeSet::from([shape(root.state.members())]);
    let (mut level, mut transitions, mut seen) = (vec![root], 0, BTreeMap::new());
    for _ in 0..depth {
        let mut next = Vec::new();
        for stand in &level {
            for command in alphabet(stand.state.members()) {
                let mut then = stand.clone();
                transitions += 1;
                let outcome = match then.step(&command) {
                    Ok(outcome) => outcome,
                    Err(text) => panic!("{text}, after {:#?}", then.path),
                };
                let what = match outcome {
                    Outcome::Refused { code, .. } => code.name(),
                    _ => "members",
                };
                *seen.entry(what.to_owned()).or_default() += 1;
                if shapes.insert(shape(then.state.members())) {
                    next.push(then);
                }
            }
        }
        level = next;
    }
    println!("{founders} founders: {} distinct tables, {transitions} transitions", shapes.len());
    println!("  left at depth {depth}: {}", level.len());
    seen
}

#[test]
fn the_member_table() {
    for founders in [1, 2, 3] {
        let seen = search(founders, DEPTH);
        println!("  {seen:?}");
        let required = [
            "already_begun",
            "bad_combination",
            "last_voter",
            "member_change_over",
            "member_change_under_way",
            "members",
            "node_id_used",
            "not_a_member",
        ];
        let missing: Vec<_> = required.iter().filter(|code| !seen.contains_key(**code)).collect();
        assert!(founders > 1 || missing.is_empty(), "never came up: {missing:?}");
    }
}
