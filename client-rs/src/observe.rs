//! `Observation`: who leads an election, as a stream.

use leasehold_protocol::event::EventKind;
use leasehold_protocol::ids::Token;
use leasehold_protocol::watch::WatchEvent;

use crate::election::Leader;
use crate::error::CallError;
use crate::watch::{Watch, WatchItem};

/// What is observed of an election.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Observed {
    /// This candidate leads, or the leader proclaimed another value.
    Leader(Leader),
    /// Nobody leads.
    Vacant,
    /// It is not known who leads: no node that can be reached knows itself to be up to date. Who
    /// leads is told again when it is known.
    NoQuorum,
}

/// The leaders of an election, from the present one on. A candidate whose end has arrived here is
/// not told any more: of changes that came together, the last is.
///
/// Dropping it ends it. After the loss of connections and nodes it goes on; what it missed
/// meanwhile and cannot be told any more is left out, but never the present leader.
#[derive(Debug)]
pub struct Observation {
    watch: Watch,
    view: View,
}

impl Observation {
    pub(crate) const fn new(watch: Watch) -> Self {
        Self { watch, view: View::new() }
    }

    /// The next change; at first the present leader. An error is the end and says why. Dropping
    /// the future loses nothing.
    pub async fn next(&mut self) -> Result<Observed, CallError> {
        loop {
            let item = self.watch.next().await?;
            self.view.take(item);
            // The end of a leader may be here already.
            while let Some(item) = self.watch.next_at_hand() {
                self.view.take(item);
            }
            if let Some(news) = self.view.news() {
                return Ok(news);
            }
        }
    }
}

/// What is known.
#[derive(Debug)]
struct View {
    /// A state was told.
    known: bool,
    leader: Option<Leader>,
    /// What was told last.
    told: Option<Observed>,
    quorum: bool,
}

impl View {
    const fn new() -> Self {
        Self { known: false, leader: None, told: None, quorum: true }
    }

    fn take(&mut self, item: WatchItem) {
        match item {
            WatchItem::State { keys, .. } => {
                self.known = true;
                self.leader = keys.first().and_then(Leader::of);
            }
            WatchItem::Change { events, .. } => {
                for event in events {
                    follow(&mut self.leader, event);
                }
            }
            WatchItem::NoQuorum => self.quorum = false,
            WatchItem::Quorum => self.quorum = true,
            WatchItem::Progress { .. } => {}
        }
    }

    /// What is to be told, unless it was.
    fn news(&mut self) -> Option<Observed> {
        let news = match &self.leader {
            _ if !self.quorum => Observed::NoQuorum,
            _ if !self.known => return None,
            None => Observed::Vacant,
            Some(leader) => Observed::Leader(leader.clone()),
        };
        let changed = self.told.as_ref() != Some(&news);
        changed.then(|| self.told.insert(news).clone())
    }
}

/// What an event makes of the leader.
fn follow(leader: &mut Option<Leader>, event: WatchEvent) {
    let present = |leader: &Option<Leader>, token: Token| {
        leader.as_ref().is_some_and(|leader| leader.token == token)
    };
    match event.kind {
        EventKind::Granted { lease, token, .. } => {
            let (label, value) = (event.label, event.value);
            *leader = Some(Leader { token, value, label, lease, since_ms: None });
        }
        EventKind::ValueChanged { token, value, .. } if present(leader, token) => {
            if let Some(leader) = leader {
                leader.value = value;
            }
        }
        EventKind::Ended { token, .. } if present(leader, token) => *leader = None,
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use leasehold_protocol::event::EndReason;
    use leasehold_protocol::ids::{LeaseId, Mode, Revision, ShardId};
    use leasehold_protocol::reply::KeyInfo;

    use super::*;

    impl View {
        /// What is told of one item that came alone.
        fn tell(&mut self, item: WatchItem) -> Option<Observed> {
            self.take(item);
            self.news()
        }
    }

    fn change(kinds: Vec<EventKind>) -> WatchItem {
        let revision = Revision(9);
        let event = |kind| {
            let (label, value) = ("who".to_owned(), b"what".to_vec());
            WatchEvent { revision, kind, label, value }
        };
        let events = kinds.into_iter().map(event).collect();
        WatchItem::Change { shard: ShardId(0), revision, events }
    }

    fn state(keys: Vec<KeyInfo>) -> WatchItem {
        let (shard, revision) = (ShardId(0), Revision(3));
        WatchItem::State { shard, revision, keys, first: true, last: true }
    }

    fn granted(token: u64) -> EventKind {
        let (key, lease, mode) = (b"e".to_vec(), LeaseId(token), Mode::EXCLUSIVE);
        EventKind::Granted { key, lease, mode, token: Token(token), slots: Vec::new(), limit: 0 }
    }

    fn ended(token: u64) -> EventKind {
        let (key, lease, reason) = (b"e".to_vec(), LeaseId(token), EndReason::LeaseExpired);
        EventKind::Ended { key, lease, token: Token(token), reason }
    }

    fn token(observed: Option<Observed>) -> Option<u64> {
        match observed? {
            Observed::Leader(leader) => Some(leader.token.0),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_hand_over_is_one_change_and_a_leader_that_ended_at_once_is_never_told() {
        let mut view = View::new();
        assert_eq!(view.tell(state(Vec::new())), Some(Observed::Vacant));
        assert_eq!(token(view.tell(change(vec![granted(1)]))), Some(1));
        assert_eq!(token(view.tell(change(vec![ended(1), granted(2)]))), Some(2));
        assert_eq!(
            token(view.tell(change(vec![ended(2), granted(3), ended(3), granted(4)]))),
            Some(4)
        );
        assert_eq!(view.tell(change(vec![ended(2)])), None, "not the present one");
        assert_eq!(view.tell(change(vec![ended(4)])), Some(Observed::Vacant));
    }

    #[test]
    fn a_leader_whose_end_came_with_its_election_is_never_told() {
        let mut view = View::new();
        view.tell(state(Vec::new()));
        // Two revisions, which came in one frame.
        view.take(change(vec![granted(1)]));
        assert_eq!(view.tell(change(vec![ended(1)])), None, "nobody led before, nor does now");
        view.take(change(vec![granted(2)]));
        view.take(change(vec![ended(2)]));
        assert_eq!(token(view.tell(change(vec![granted(3)]))), Some(3));
    }

    #[test]
    fn another_value_is_a_change_and_the_same_state_is_none() {
        let mut view = View::new();
        view.tell(state(Vec::new()));
        view.tell(change(vec![granted(1)]));
        let (key, lease, token, value) = (b"e".to_vec(), LeaseId(1), Token(1), b"new".to_vec());
        let proclaimed = EventKind::ValueChanged { key, lease, token, value };
        let Some(Observed::Leader(leader)) = view.tell(change(vec![proclaimed.clone()])) else {
            panic!("told");
        };
        assert_eq!((leader.value.as_slice(), leader.label.as_str()), (b"new".as_slice(), "who"));
        assert_eq!(view.tell(change(vec![proclaimed])), None);
        assert_eq!(view.tell(state(Vec::new())), Some(Observed::Vacant), "after a gap");
    }

    #[test]
    fn what_is_not_known_is_told_once_and_so_is_what_is_known_again() {
        let mut view = View::new();
        assert_eq!(view.tell(WatchItem::NoQuorum), Some(Observed::NoQuorum));
        assert_eq!(view.tell(WatchItem::NoQuorum), None);
        assert_eq!(view.tell(state(Vec::new())), None);
        assert_eq!(view.tell(change(vec![granted(1)])), None, "it may be late");
        assert_eq!(token(view.tell(WatchItem::Quorum)), Some(1));
        assert_eq!(view.tell(WatchItem::NoQuorum), Some(Observed::NoQuorum));
        assert_eq!(token(view.tell(WatchItem::Quorum)), Some(1), "told again");
    }
}
