//! The last events of a shard, bounded in bytes: what a watch that begins at a position is told
//! first. Whole revisions go, oldest first.

use std::collections::VecDeque;
use std::rc::Rc;

use leasehold_protocol::ids::Revision;
use leasehold_protocol::planted;

use super::told::Told;

/// See the module.
#[derive(Debug)]
pub(super) struct History {
    /// Apart from each other, so that the list itself stays small: it is copied when it grows.
    events: VecDeque<Rc<Told>>,
    bytes: usize,
    bytes_max: usize,
    /// Every event above it is in `events`.
    floor: Revision,
    /// What was applied.
    head: Revision,
}

impl History {
    /// Of a state that was at `revision` before any event.
    pub(super) fn new(bytes_max: usize, revision: Revision) -> Self {
        Self { events: VecDeque::new(), bytes: 0, bytes_max, floor: revision, head: revision }
    }

    pub(super) fn floor(&self) -> Revision {
        self.floor
    }

    pub(super) fn head(&self) -> Revision {
        self.head
    }

    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds an event above all that are there.
    pub(super) fn push(&mut self, event: Rc<Told>) {
        debug_assert!(event.revision > self.head, "events of one step come before its end");
        self.bytes += event.cost();
        self.events.push_back(event);
    }

    /// All events up to `revision` were added; those that are too many go.
    pub(super) fn advance(&mut self, revision: Revision) {
        self.head = revision;
        while self.bytes > self.bytes_max
            && let Some(oldest) = self.events.front().map(|event| event.revision)
        {
            self.drop_revision(oldest);
        }
    }

    fn drop_revision(&mut self, revision: Revision) {
        while let Some(event) = self.events.pop_front_if(|event| event.revision == revision) {
            self.bytes -= event.cost();
        }
        self.floor = revision;
    }

    /// Events were skipped: the state is at `revision` now.
    pub(super) fn reset(&mut self, revision: Revision) {
        *self = Self::new(self.bytes_max, revision);
    }

    /// The events above a revision, which is not below the floor.
    pub(super) fn after(&self, revision: Revision) -> impl Iterator<Item = &Rc<Told>> {
        assert!(revision >= self.floor, "the caller looked");
        let told = if planted!("watch-goes-on-one-off") { revision.0 + 1 } else { revision.0 };
        let from = self.events.partition_point(|event| event.revision.0 <= told);
        self.events.range(from..)
    }
}

#[cfg(test)]
mod tests {
    use leasehold_protocol::event::EventKind;

    use super::*;

    fn event(revision: u64) -> Rc<Told> {
        let kind = EventKind::Vacant { key: vec![b'k'; 10] };
        Rc::new(Told { revision: Revision(revision), kind, label: None, value: None })
    }

    fn revisions(history: &History, after: u64) -> Vec<u64> {
        history.after(Revision(after)).map(|event| event.revision.0).collect()
    }

    #[test]
    fn whole_revisions_go_and_the_floor_says_so() {
        let each = event(1).cost();
        let mut history = History::new(4 * each, Revision(10));
        assert!(revisions(&history, 10).is_empty());
        for (revision, count) in [(11, 2), (13, 1), (14, 1)] {
            (0..count).for_each(|_| history.push(event(revision)));
            history.advance(Revision(revision));
        }
        assert_eq!(revisions(&history, 10), [11, 11, 13, 14]);
        assert_eq!(revisions(&history, 12), [13, 14]);
        assert_eq!((history.floor(), history.head()), (Revision(10), Revision(14)));
        history.push(event(15));
        history.advance(Revision(16));
        assert_eq!(history.floor(), Revision(11), "both events of 11 went");
        assert_eq!(revisions(&history, 11), [13, 14, 15]);
        (0..5).for_each(|_| history.push(event(17)));
        history.advance(Revision(17));
        assert_eq!((history.len(), history.bytes()), (0, 0), "more at once than all of it");
        assert_eq!(history.floor(), Revision(17));
        history.reset(Revision(40));
        assert_eq!((history.floor(), history.head()), (Revision(40), Revision(40)));
    }
}
