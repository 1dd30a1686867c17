//! Acquires that wait, on the node to which their client is attached.
//!
//! An acquire is registered here before it is sent to the leader, so the end of its wait, seen in
//! this node's own `apply`, cannot be missed: either it is applied after the registration, or the
//! command's outcome itself tells it. The newest registration of a (lease, number) wins.

use std::collections::BTreeMap;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::{LeaseId, NodeId, Number};
use leasehold_protocol::outcome::Outcome;

use crate::net::ReplyTo;

/// Most registered waits of a shard on one node; above it the answer is `busy`.
pub(super) const WAITS_MAX: usize = 500_000;

/// Names one registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wait {
    lease: LeaseId,
    number: Number,
    /// Tells a registration from a later one of the same acquire, sent again by its client.
    generation: u64,
}

/// The registered waits.
#[derive(Default)]
pub(super) struct Waits {
    by_number: BTreeMap<(LeaseId, Number), (u64, ReplyTo)>,
    generation: u64,
}

impl Waits {
    /// Registers; `None` if there is no room. A registration of the same acquire that this one
    /// replaces is answered with `resync`: if its client is still there, it sends again, and then
    /// the newest connection is the living one.
    pub(super) fn register(&mut self, lease: LeaseId, number: Number, to: ReplyTo) -> Option<Wait> {
        let replaces = self.by_number.contains_key(&(lease, number));
        if self.by_number.len() >= WAITS_MAX && !replaces {
            return None;
        }
        self.generation += 1;
        let generation = self.generation;
        let replaced = self.by_number.insert((lease, number), (generation, to));
        if let Some((_, replaced)) = replaced {
            replaced.error(ErrorCode::RESYNC, NodeId(0));
        }
        Some(Wait { lease, number, generation })
    }

    /// The outcome of the acquire command itself arrived (`None`: an error did). Says whether its
    /// client still waits for it, and forgets the wait unless it goes on in the queue.
    pub(super) fn settle(&mut self, wait: Wait, outcome: Option<&Outcome>) -> bool {
        let name = (wait.lease, wait.number);
        match self.by_number.get(&name) {
            None => false,
            // Replaced, and told so.
            Some((generation, _)) if *generation != wait.generation => false,
            Some(_) => {
                if !matches!(outcome, Some(Outcome::Queued { .. })) {
                    self.by_number.remove(&name);
                }
                true
            }
        }
    }

    /// Tells the clients whose waits end with `events`.
    pub(super) fn applied(&mut self, events: &[Event]) {
        for event in events {
            if let EventKind::WaitEnded { lease, number, outcome, .. } = &event.kind
                && let Some((_, to)) = self.by_number.remove(&(*lease, *number))
            {
                to.outcome(*outcome, NodeId(0));
            }
        }
    }

    /// Events may have been skipped: every client must ask again under its number.
    pub(super) fn resync(&mut self) {
        for (_, to) in std::mem::take(&mut self.by_number).into_values() {
            to.error(ErrorCode::RESYNC, NodeId(0));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use leasehold_protocol::ids::Revision;
    use leasehold_protocol::reply::{OutcomeReply, Reply};

    use super::*;
    use crate::net::ReplySink;

    const LEASE: LeaseId = LeaseId(7);
    const NUMBER: Number = Number(4);

    /// A connection that keeps what it is told, by request id.
    #[derive(Default)]
    struct Connection(RefCell<Vec<(u64, Reply)>>);

    impl ReplySink for Connection {
        fn reply(&self, id: u64, reply: &Reply) {
            self.0.borrow_mut().push((id, reply.clone()));
        }
    }

    impl Connection {
        fn open() -> Rc<Self> {
            Rc::default()
        }

        fn request(self: &Rc<Self>, id: u64) -> ReplyTo {
            ReplyTo::new(Rc::clone(self) as Rc<dyn ReplySink>, id)
        }

        fn take(&self) -> Vec<(u64, Reply)> {
            self.0.take()
        }
    }

    fn queued() -> Outcome {
        Outcome::Queued { position: 0, revision: Revision(5) }
    }

    fn ended() -> (Vec<Event>, Outcome) {
        let outcome = Outcome::TimedOut { revision: Revision(6) };
        let key = b"k".to_vec();
        let kind = EventKind::WaitEnded { key, lease: LEASE, number: NUMBER, outcome };
        (vec![Event { revision: Revision(6), kind }], outcome)
    }

    fn is_resync(reply: &Reply) -> bool {
        matches!(reply, Reply::Error(error) if error.code == ErrorCode::RESYNC)
    }

    #[test]
    fn the_newest_registration_alone_is_told_the_end() {
        let (old, new) = (Connection::open(), Connection::open());
        let mut waits = Waits::default();
        let first = waits.register(LEASE, NUMBER, old.request(11)).expect("room");
        assert!(waits.settle(first, Some(&queued())));
        assert!(old.take().is_empty(), "it waits");

        let second = waits.register(LEASE, NUMBER, new.request(22)).expect("room");
        let told = old.take();
        assert!(matches!(&told[..], [(11, reply)] if is_resync(reply)), "{told:?}");
        assert!(waits.settle(second, Some(&queued())));

        let (events, outcome) = ended();
        waits.applied(&events);
        let reply = Reply::Outcome(OutcomeReply { outcome, leader: NodeId(0) });
        assert_eq!(new.take(), [(22, reply)]);
        assert!(old.take().is_empty(), "it was told to ask again, and no more");

        waits.applied(&events);
        waits.resync();
        assert!(old.take().is_empty() && new.take().is_empty(), "a wait ends once");
    }

    /// The replaced request's own command is still under way: whatever comes of it, the newer
    /// registration stays.
    #[test]
    fn an_answer_to_a_replaced_request_leaves_the_newer_one_alone() {
        let (old, new) = (Connection::open(), Connection::open());
        let (events, outcome) = ended();
        for late in [None, Some(&queued()), Some(&outcome)] {
            let mut waits = Waits::default();
            let first = waits.register(LEASE, NUMBER, old.request(11)).expect("room");
            let second = waits.register(LEASE, NUMBER, new.request(22)).expect("room");
            assert!(!waits.settle(first, late), "nobody waits for it any more");
            assert!(waits.settle(second, Some(&queued())));
            waits.applied(&events);
            assert_eq!(new.take().len(), 1, "{late:?}");
            assert_eq!(old.take().len(), 1, "{late:?}: resync alone");
        }
    }

    /// The same connection may send again, under another request id.
    #[test]
    fn a_second_request_of_one_connection_replaces_the_first() {
        let connection = Connection::open();
        let mut waits = Waits::default();
        waits.register(LEASE, NUMBER, connection.request(1)).expect("room");
        let wait = waits.register(LEASE, NUMBER, connection.request(2)).expect("room");
        assert!(waits.settle(wait, None), "its command failed: the caller answers");
        waits.applied(&ended().0);
        let told = connection.take();
        assert!(matches!(&told[..], [(1, reply)] if is_resync(reply)), "{told:?}");
    }
}
