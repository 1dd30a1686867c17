use alloc::format;
use alloc::vec;

use leasehold_protocol::command::Command;
use leasehold_protocol::ids::ShardId;

use super::*;
use crate::invariants;
use crate::snapshot::{Decoder, Encoder};

fn entry(node: u64) -> MemberEntry {
    MemberEntry {
        node: NodeId(node),
        disk: DiskId([node as u8; 16]),
        peer_addr: format!("peer{node}:1"),
        client_addr: format!("client{node}:1"),
    }
}

/// A state whose every step is checked, and whose snapshot leads back to it.
struct Rig(State);

impl Rig {
    fn founded(nodes: u64) -> Self {
        let mut state = State::new(ShardId(0));
        state.apply(0, &Command::Begin { token_base: Token(9) }, &mut Vec::new());
        let mut rig = Self(state);
        let members = (1..=nodes).map(entry).collect();
        assert_eq!(rig.apply(MemberCommand::Found(members)), Ok((1, 0)));
        rig
    }

    /// The version and the operation, or the refusal.
    fn apply(&mut self, command: MemberCommand) -> Result<(u64, u64), ErrorCode> {
        let (revision, digest) = (self.0.revision(), self.0.digest());
        let mut events = Vec::new();
        let outcome = self.0.apply(0, &Command::Member(command), &mut events);
        assert!(events.is_empty(), "the member table wakes no watcher");
        invariants::check(&self.0).expect("a sound state");
        assert_eq!(self.0.revision() == revision, self.0.digest() == digest);
        let mut decoder = Decoder::new();
        Encoder::new(&self.0).for_each(|chunk| decoder.feed(&chunk).expect("sound bytes"));
        let again = decoder.finish().expect("a sound snapshot");
        assert_eq!(again.members(), self.0.members());
        assert_eq!(again.digest(), self.0.digest());
        match outcome {
            Outcome::Members { version, operation, .. } => Ok((version, operation)),
            Outcome::Refused { code, .. } => {
                assert_eq!(self.0.revision(), revision, "a refusal changes nothing");
                Err(code)
            }
            other => panic!("{other:?}"),
        }
    }

    fn start(&mut self, add: u64, remove: u64) -> Result<(u64, u64), ErrorCode> {
        let some = |node: u64| (node > 0).then_some(node);
        let (add, remove) = (some(add).map(entry), some(remove).map(NodeId));
        self.apply(MemberCommand::Start { add, remove })
    }

    fn promote(&mut self, operation: u64) -> Result<(u64, u64), ErrorCode> {
        self.apply(MemberCommand::Promote { operation })
    }

    fn abort(&mut self, operation: u64) -> Result<(u64, u64), ErrorCode> {
        self.apply(MemberCommand::Abort { operation })
    }

    /// As one who has done it for the present version.
    fn finish(&mut self, operation: u64) -> Result<(u64, u64), ErrorCode> {
        let version = self.0.members().version();
        self.apply(MemberCommand::Finish { operation, version })
    }

    fn standing(&self, node: u64) -> Option<Standing> {
        self.0.members().node(NodeId(node)).map(|info| info.standing)
    }

    fn voters_after(&self) -> Vec<u64> {
        self.0.members().voters_after().iter().map(|entry| entry.node.0).collect()
    }
}

#[test]
fn a_node_is_added_learner_first_and_the_steps_may_be_repeated() {
    let mut rig = Rig::founded(1);
    assert_eq!(rig.start(2, 0), Ok((2, 2)));
    assert_eq!(rig.standing(2), Some(Standing::Joining));
    assert_eq!(rig.voters_after(), [1, 2]);
    assert_eq!(rig.start(2, 0), Ok((2, 2)), "the same again is the same operation");
    assert_eq!(rig.finish(2), Err(ErrorCode::MEMBER_CHANGE_OVER), "it was not promoted");
    assert_eq!(rig.promote(2), Ok((3, 2)));
    assert_eq!(rig.promote(2), Ok((3, 2)));
    assert_eq!(rig.finish(2), Ok((4, 2)));
    assert_eq!(rig.abort(2), Err(ErrorCode::MEMBER_CHANGE_OVER));
    assert_eq!(rig.finish(2), Err(ErrorCode::MEMBER_CHANGE_OVER));
    assert_eq!(rig.standing(2), Some(Standing::Voter));
}

#[test]
fn one_operation_at_a_time() {
    let mut rig = Rig::founded(3);
    assert_eq!(rig.start(4, 0), Ok((2, 2)));
    let under_way = Err(ErrorCode::MEMBER_CHANGE_UNDER_WAY);
    assert_eq!(rig.start(5, 0), under_way);
    assert_eq!(rig.start(0, 1), under_way);
    assert_eq!(rig.start(4, 1), under_way);
    let other = MemberEntry { disk: DiskId([99; 16]), ..entry(4) };
    let command = MemberCommand::Start { add: Some(other), remove: None };
    assert_eq!(rig.apply(command), under_way, "another data directory is another node");
    assert_eq!(rig.abort(2), Ok((3, 2)));
    assert_eq!(rig.start(4, 0), under_way, "it is being undone");
    assert_eq!(rig.promote(2), Err(ErrorCode::MEMBER_CHANGE_OVER));
    assert_eq!(rig.finish(2), Ok((4, 2)));
    assert_eq!(rig.standing(4), Some(Standing::Removed));
    assert_eq!(rig.start(5, 0), Ok((5, 5)));
}

#[test]
fn an_operation_is_given_up_while_the_voters_change() {
    let mut rig = Rig::founded(3);
    assert_eq!(rig.start(4, 3), Ok((2, 2)));
    assert_eq!(rig.promote(2), Ok((3, 2)));
    assert_eq!(rig.voters_after(), [1, 2, 4]);
    assert_eq!(rig.abort(2), Ok((4, 2)));
    assert_eq!(rig.abort(2), Ok((4, 2)));
    assert_eq!(rig.voters_after(), [1, 2, 3]);
    let over = Err(ErrorCode::MEMBER_CHANGE_OVER);
    assert_eq!(rig.promote(2), over);
    let late = MemberCommand::Finish { operation: 2, version: 3 };
    assert_eq!(rig.apply(late), over, "it was carried out for the version before");
    assert_eq!(rig.start(4, 3), Err(ErrorCode::MEMBER_CHANGE_UNDER_WAY));
    assert_eq!(rig.finish(2), Ok((5, 2)));
    assert_eq!(rig.standing(3), Some(Standing::Voter));
    assert_eq!(rig.standing(4), Some(Standing::Removed));
    assert_eq!(rig.start(0, 3), Ok((6, 6)), "one that only goes begins with the vote");
    assert_eq!(rig.abort(6), Ok((7, 6)));
    assert_eq!(rig.finish(6), Ok((8, 6)));
    assert_eq!(rig.standing(3), Some(Standing::Voter));
}

#[test]
fn ids_and_data_directories_are_never_used_again() {
    let mut rig = Rig::founded(3);
    let used = Err(ErrorCode::NODE_ID_USED);
    assert_eq!(rig.start(3, 0), used);
    assert_eq!(rig.start(0, 3), Ok((2, 2)));
    assert_eq!(rig.finish(2), Ok((3, 2)));
    assert_eq!(rig.standing(3), Some(Standing::Removed));
    assert_eq!(rig.start(3, 0), used);
    assert_eq!(rig.start(0, 3), Err(ErrorCode::NOT_A_MEMBER));
    let same_disk = MemberEntry { node: NodeId(4), ..entry(3) };
    assert_eq!(rig.apply(MemberCommand::Start { add: Some(same_disk), remove: None }), used);
    assert!(rig.0.members().node(NodeId(3)).is_some_and(|info| info.entry.peer_addr.is_empty()));
}

#[test]
fn the_last_voter_stays_and_five_are_the_most() {
    let mut rig = Rig::founded(1);
    assert_eq!(rig.start(0, 1), Err(ErrorCode::LAST_VOTER));
    assert_eq!(rig.start(0, 0), Err(ErrorCode::BAD_COMBINATION));
    assert_eq!(rig.start(2, 1), Ok((2, 2)), "replaced it may be");
    assert_eq!(rig.voters_after(), [2]);
    let mut rig = Rig::founded(5);
    assert_eq!(rig.start(6, 0), Err(ErrorCode::TOO_MANY_MEMBERS));
    assert_eq!(rig.start(6, 5), Ok((2, 2)));
    assert_eq!(rig.voters_after(), [1, 2, 3, 4, 6]);
}

#[test]
fn a_fence_only_rises() {
    let mut rig = Rig::founded(1);
    assert_eq!(rig.apply(MemberCommand::Fence { version: 4 }), Ok((4, 0)));
    let revision = rig.0.revision();
    assert_eq!(rig.apply(MemberCommand::Fence { version: 4 }), Ok((4, 0)));
    assert_eq!(rig.0.revision(), revision, "the same again changes nothing");
    let older = rig.apply(MemberCommand::Fence { version: 3 });
    assert_eq!(older, Err(ErrorCode::MEMBER_CHANGE_OVER));
}

#[test]
fn a_table_is_founded_once_and_well_formed() {
    let mut state = Rig(State::new(ShardId(0)));
    let begin = Command::Begin { token_base: Token(9) };
    assert_eq!(
        state.apply(MemberCommand::Found(vec![entry(1)])),
        Err(ErrorCode::NOT_READY),
        "not before the shard has begun"
    );
    state.0.apply(0, &begin, &mut Vec::new());
    assert_eq!(state.start(2, 0), Err(ErrorCode::NOT_READY));
    let unordered = vec![entry(2), entry(1)];
    assert_eq!(state.apply(MemberCommand::Found(unordered)), Err(ErrorCode::TOO_MANY_MEMBERS));
    assert_eq!(state.apply(MemberCommand::Found(vec![])), Err(ErrorCode::TOO_MANY_MEMBERS));
    assert_eq!(state.apply(MemberCommand::Found(vec![entry(1)])), Ok((1, 0)));
    assert_eq!(state.apply(MemberCommand::Found(vec![entry(1)])), Err(ErrorCode::ALREADY_BEGUN));
}
