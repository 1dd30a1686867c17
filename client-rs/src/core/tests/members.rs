//! Changes of the membership whose reply is lost: what the repetition is told is judged by the
//! member table, so that a change that was applied is never called one that was not.

use leasehold_protocol::error::{ErrorClass, ErrorCode};
use leasehold_protocol::ids::{DiskId, NodeId, Revision};
use leasehold_protocol::member::{
    MemberChange, MemberChangeReply, MemberChangeRequest, MemberInfo, MemberOperation, MemberPhase,
    MembersReply, NewMember, Standing,
};
use leasehold_protocol::peer::MemberEntry;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;

use super::super::{CallRequest, Event};
use super::rig::*;
use crate::error::Failure;

use Standing::{Joining, Removed, Voter};

fn at(node: u64) -> String {
    format!("n{node}:2")
}

fn new(node: u64) -> NewMember {
    NewMember { node: NodeId(node), peer_addr: at(node), client_addr: String::new() }
}

fn add(node: u64) -> MemberChange {
    MemberChange::Add(new(node))
}

fn remove(node: u64) -> MemberChange {
    MemberChange::Remove { node: NodeId(node) }
}

fn replace(old: u64, node: u64) -> MemberChange {
    MemberChange::Replace { old: NodeId(old), new: new(node) }
}

fn abort(operation: u64) -> MemberChange {
    MemberChange::Abort { operation }
}

fn node(node: u64, standing: Standing) -> MemberInfo {
    let peer_addr = if standing == Removed { String::new() } else { at(node) };
    let (node, disk, client_addr) = (NodeId(node), DiskId([node as u8; 16]), String::new());
    MemberInfo { entry: MemberEntry { node, disk, peer_addr, client_addr }, standing }
}

/// A table with node 1 and these, and the operation under way: its number, phase, and the nodes that
/// come and go.
fn table(
    others: &[(u64, Standing)],
    operation: Option<(u64, MemberPhase, u64, u64)>,
) -> MembersReply {
    let others = others.iter().map(|(id, standing)| node(*id, *standing));
    MembersReply {
        revision: Revision(1),
        version: 9,
        members: std::iter::once(node(1, Voter)).chain(others).collect(),
        operation: operation.map(|(operation, phase, add, remove)| MemberOperation {
            operation,
            phase,
            add: NodeId(add),
            remove: NodeId(remove),
        }),
        progress: Vec::new(),
    }
}

/// A change that was sent.
fn begun(change: MemberChange) -> (Rig, Sent) {
    let mut rig = Rig::new();
    let request = Request::MemberChange(MemberChangeRequest { change, timeout_ms: 0 });
    let call = CallRequest { shard: Some(SHARD), request, timeout: ms(10_000) };
    rig.core.call(rig.now, call).expect("room");
    rig.turn();
    let sent = rig.sent.pop_front().expect("sent");
    (rig, sent)
}

/// The same, with the reply lost and the repetition refused.
fn in_doubt(change: MemberChange, code: ErrorCode) -> Rig {
    let (mut rig, first) = begun(change);
    rig.break_conn(first.conn);
    rig.advance(ms(50));
    let second = rig.sent.pop_front().expect("sent again");
    assert!(matches!(second.request, Request::MemberChange(_)), "{second:?}");
    rig.error(&second, code, 0);
    rig
}

/// What the caller is told: the operation, or the code.
fn told(rig: &mut Rig) -> Option<Result<u64, Failure>> {
    match rig.events.pop_front()? {
        Event::Answered { result: Ok(Reply::MemberChanged(reply)), .. } => {
            Some(Ok(reply.operation))
        }
        Event::Answered { result: Err(failure), .. } => Some(Err(failure)),
        other => panic!("{other:?}"),
    }
}

/// A change, what its repetition is refused with, the table, and what the caller is told.
type Case = (MemberChange, ErrorCode, MembersReply, Result<u64, ErrorCode>);

fn is_looked_up<const N: usize>(cases: [Case; N]) {
    for (change, refusal, table, expected) in cases {
        let what = format!("{change:?} {refusal} {table:?}");
        let mut rig = in_doubt(change, refusal);
        assert!(told(&mut rig).is_none(), "{what}: told before the table is read");
        let read = rig.sent.pop_front().expect("the table is read");
        assert!(matches!(read.request, Request::Members(_)), "{what}: {read:?}");
        rig.answer(&read, &Reply::Members(table));
        let told = told(&mut rig).expect("told");
        assert_eq!(told.map_err(|failure| failure.code), expected, "{what}");
        rig.core.assert_empty();
    }
}

/// It is over, or under way behind another refusal.
#[test]
fn a_change_whose_reply_was_lost_is_recognised_in_the_table() {
    use ErrorCode as Code;
    use MemberPhase::{Learn, Undo};
    let applied = Ok;
    is_looked_up([
        (remove(2), Code::NOT_A_MEMBER, table(&[(2, Removed)], None), applied(0)),
        (remove(2), Code::NO_MAJORITY_LEFT, table(&[(2, Removed)], None), applied(0)),
        (
            remove(2),
            Code::MEMBER_CHANGE_UNDER_WAY,
            table(&[(2, Removed), (4, Joining)], Some((7, Learn, 4, 0))),
            applied(0),
        ),
        (add(4), Code::NODE_ID_USED, table(&[(4, Voter)], None), applied(0)),
        (
            add(4),
            Code::MEMBER_CHANGE_UNDER_WAY,
            table(&[(4, Joining)], Some((6, Undo, 4, 0))),
            applied(6),
        ),
        (replace(2, 4), Code::NODE_ID_USED, table(&[(2, Removed), (4, Voter)], None), applied(0)),
        (
            replace(2, 4),
            Code::MEMBER_CHANGE_UNDER_WAY,
            table(&[(2, Voter), (4, Joining)], Some((6, Undo, 4, 2))),
            applied(6),
        ),
        (
            abort(6),
            Code::MEMBER_CHANGE_OVER,
            table(&[(4, Joining)], Some((6, Undo, 4, 0))),
            applied(6),
        ),
    ]);
}

#[test]
fn what_the_table_does_not_show_is_refused_or_unknown() {
    use ErrorCode as Code;
    use MemberPhase::{Learn, Vote};
    is_looked_up([
        // It was not, and will not be.
        (remove(9), Code::NOT_A_MEMBER, table(&[(2, Voter)], None), Err(Code::NOT_A_MEMBER)),
        (
            remove(2),
            Code::MEMBER_CHANGE_UNDER_WAY,
            table(&[(2, Voter), (4, Joining)], Some((6, Learn, 4, 2))),
            Err(Code::MEMBER_CHANGE_UNDER_WAY),
        ),
        (
            replace(2, 4),
            Code::NODE_ID_USED,
            table(&[(2, Voter), (4, Voter)], None),
            Err(Code::NODE_ID_USED),
        ),
        (
            abort(6),
            Code::MEMBER_CHANGE_OVER,
            table(&[(4, Joining)], Some((6, Vote, 4, 0))),
            Err(Code::MEMBER_CHANGE_OVER),
        ),
        // It may have come and gone, or been gone before; an operation that is over leaves no name.
        (add(4), Code::NODE_ID_USED, table(&[(4, Removed)], None), Err(Code::OUTCOME_UNKNOWN)),
        (
            replace(2, 4),
            Code::NODE_ID_USED,
            table(&[(2, Voter), (4, Removed)], None),
            Err(Code::OUTCOME_UNKNOWN),
        ),
        (
            abort(6),
            Code::MEMBER_CHANGE_OVER,
            table(&[(4, Removed)], None),
            Err(Code::OUTCOME_UNKNOWN),
        ),
    ]);
}

/// Another node came under the id: by its address it is not the one that was asked for.
#[test]
fn an_id_with_another_address_came_by_another_change() {
    let mut rig = in_doubt(add(4), ErrorCode::NODE_ID_USED);
    let read = rig.sent.pop_front().expect("the table is read");
    let mut other = table(&[(4, Voter)], None);
    other.members[1].entry.peer_addr = at(5);
    rig.answer(&read, &Reply::Members(other));
    let failure = told(&mut rig).expect("told").expect_err("refused");
    assert_eq!(failure.code, ErrorCode::NODE_ID_USED);
}

#[test]
fn a_change_that_cannot_be_looked_up_in_time_has_an_unknown_outcome() {
    let mut rig = in_doubt(remove(2), ErrorCode::NOT_A_MEMBER);
    rig.nodes.values_mut().for_each(|node| *node = Node::Down);
    let conns: Vec<_> = rig.conns.keys().copied().collect();
    for conn in conns {
        rig.break_conn(conn);
    }
    rig.advance(ms(10_000));
    let failure = told(&mut rig).expect("told").expect_err("not known");
    assert_eq!(failure.code, ErrorCode::OUTCOME_UNKNOWN);
    assert_eq!(failure.class(), ErrorClass::Unknown);
    assert!(failure.message.contains("not_a_member"), "{failure}");
    rig.core.assert_empty();
}

/// Where no attempt can have been applied, a refusal is what it says; and another refusal than those
/// that a change brings upon its repetition is passed on.
#[test]
fn a_refusal_without_doubt_is_passed_on() {
    let (mut rig, first) = begun(remove(9));
    rig.error(&first, ErrorCode::NOT_A_MEMBER, 0);
    let failure = told(&mut rig).expect("told").expect_err("refused");
    assert_eq!(failure.code, ErrorCode::NOT_A_MEMBER);

    let (mut rig, first) = begun(remove(9));
    rig.error(&first, ErrorCode::NOT_LEADER, 0);
    rig.advance(ms(50));
    let second = rig.sent.pop_front().expect("sent again");
    rig.error(&second, ErrorCode::NOT_A_MEMBER, 0);
    let failure = told(&mut rig).expect("told").expect_err("refused");
    assert_eq!(failure.code, ErrorCode::NOT_A_MEMBER);

    let mut rig = in_doubt(add(4), ErrorCode::NODE_UNREACHABLE);
    let failure = told(&mut rig).expect("told").expect_err("refused");
    assert_eq!(failure.code, ErrorCode::NODE_UNREACHABLE);
}

/// The repetition of a change that is under way joins it: nothing is in doubt.
#[test]
fn a_repetition_that_joins_the_change_is_the_answer() {
    let (mut rig, first) = begun(remove(2));
    rig.break_conn(first.conn);
    rig.advance(ms(50));
    let second = rig.sent.pop_front().expect("sent again");
    rig.answer(&second, &Reply::MemberChanged(MemberChangeReply { operation: 6 }));
    assert_eq!(told(&mut rig), Some(Ok(6)));
}
