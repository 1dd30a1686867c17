//! The hub over a real state machine: what each watch is told, and what nobody is told.

use std::cell::{Cell, RefCell};

use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::watch::WatchEvent;

use super::*;
use crate::net::ReplySink;

const SECRET: Secret = Secret([3; 16]);
const HISTORY: usize = 1024 * 1024;
const NOW: MonoTime = MonoTime(1);

/// Takes what it is told, by request id, unless it is stuck.
#[derive(Default)]
struct Client {
    told: RefCell<Vec<(u64, Reply)>>,
    stuck: Cell<bool>,
}

impl ReplySink for Client {
    fn reply(&self, id: u64, reply: &Reply) {
        self.told.borrow_mut().push((id, reply.clone()));
    }

    fn offer(&self, id: u64, reply: &Reply) -> bool {
        if !self.stuck.get() {
            self.reply(id, reply);
        }
        !self.stuck.get()
    }
}

struct Rig {
    state: State,
    hub: Hub,
    client: Rc<Client>,
    lease: LeaseId,
    number: u64,
}

impl Rig {
    fn new(history: usize) -> Self {
        Self::with(Sizes { history, ..Sizes::of(1) })
    }

    fn with(sizes: Sizes) -> Self {
        let state = State::new(ShardId(0));
        let hub = Hub::new(&state, sizes);
        let mut rig = Self { state, hub, client: Rc::default(), lease: LeaseId(0), number: 1 };
        rig.apply(&[Command::Begin { token_base: Token(100) }]);
        rig.session();
        rig
    }

    /// Opens the session that acquires from now on.
    fn session(&mut self) {
        let label = b"worker".to_vec();
        let opened = self.apply(&[Command::Open { ttl_ms: 5_000, secret: SECRET, label }]);
        let Outcome::Opened { lease, .. } = opened[0] else { panic!("{opened:?}") };
        (self.lease, self.number) = (lease, 1);
    }

    /// One step of the log.
    fn apply(&mut self, commands: &[Command]) -> Vec<Outcome> {
        let mut events = Vec::new();
        let outcomes =
            commands.iter().map(|command| self.state.apply(0, command, &mut events)).collect();
        self.hub.applied(&self.state, &events);
        outcomes
    }

    fn acquire(&mut self, key: &str) -> Command {
        let (floor, acks) = (Number(self.number.saturating_sub(1)), vec![]);
        let number = Number(self.number);
        let caller = Caller { lease: self.lease, secret: SECRET, number, floor, acks };
        self.number += 3;
        Command::Acquire {
            caller,
            key: key.as_bytes().to_vec(),
            mode: Mode::EXCLUSIVE,
            own: None,
            value: b"here".to_vec(),
            wait_ms: 0,
        }
    }

    /// Takes and forces the hold of a key, in two steps; four events.
    fn churn(&mut self, key: &str) {
        let acquire = self.acquire(key);
        let outcomes = self.apply(&[acquire]);
        let Outcome::Granted(grant) = outcomes[0] else { panic!("{outcomes:?}") };
        let (key, who, why) = (key.as_bytes().to_vec(), vec![], vec![]);
        self.apply(&[Command::ForceRelease { key, token: grant.token, who, why, now: true }]);
    }

    fn open(&mut self, id: u64, target: &Target, start: Start) {
        let to = ReplyTo::new(Rc::clone(&self.client) as Rc<dyn ReplySink>, id);
        self.hub.open(WatchName { core: 0, id }, target.clone(), start, to).expect("room");
    }

    /// Tells all there is to tell; what came, by watch, in short.
    fn told(&mut self) -> Vec<String> {
        while self.hub.turn(&self.state, NOW) {}
        self.client
            .told
            .take()
            .iter()
            .map(|(id, reply)| format!("{id}: {}", short(reply)))
            .collect()
    }
}

fn short(reply: &Reply) -> String {
    match reply {
        Reply::WatchEvents(told) => {
            let revisions: Vec<_> = told.events.iter().map(|e| e.revision.0.to_string()).collect();
            let more = if told.more { "+" } else { "" };
            format!("[{}] {}{more}", revisions.join(" "), told.revision)
        }
        Reply::WatchState(told) => {
            let keys: Vec<_> = told.keys.iter().map(|info| info.key.clone()).collect();
            format!("state {} {} {}", told.revision, keys.join(","), told.more)
        }
        Reply::WatchNotice(told) => format!("quorum {}", told.quorum),
        Reply::WatchEnd(told) => format!("{:?}", told.reason),
        Reply::Error(error) => error.code.name().to_owned(),
        other => format!("{other:?}"),
    }
}

fn key(key: &str) -> Target {
    Target::Key(key.as_bytes().to_vec())
}

fn prefix(prefix: &str) -> Target {
    Target::Prefix(prefix.as_bytes().to_vec())
}

#[test]
fn each_watch_is_told_its_own_events_once() {
    let mut rig = Rig::new(HISTORY);
    rig.open(1, &key("a"), Start::Now);
    rig.open(2, &prefix("a"), Start::Now);
    rig.open(3, &key("x"), Start::Now);
    assert_eq!(rig.told(), ["1: [] 2", "2: [] 2", "3: [] 2"]);
    rig.churn("a");
    assert_eq!(rig.told(), ["1: [3 4 4] 4", "2: [3 4 4] 4"]);
    rig.churn("ab");
    assert_eq!(rig.told(), ["2: [5 6 6] 6"]);
    assert!(rig.told().is_empty());
    rig.hub.close(WatchName { core: 0, id: 2 });
    rig.hub.close(WatchName { core: 0, id: 2 });
    rig.churn("ab");
    assert_eq!(rig.told(), ["2: Cancelled"]);
}

#[test]
fn an_event_has_the_label_and_the_value_even_if_its_session_ends_in_the_same_step() {
    let mut rig = Rig::new(HISTORY);
    rig.open(1, &key("a"), Start::Now);
    rig.told();
    let acquire = rig.acquire("a");
    rig.apply(&[acquire]);
    rig.apply(&[Command::Expire { lease: LeaseId(1) }]);
    while rig.hub.turn(&rig.state, NOW) {}
    let told = rig.client.told.take();
    let events: Vec<WatchEvent> = told
        .into_iter()
        .flat_map(|(_, reply)| match reply {
            Reply::WatchEvents(told) => told.events,
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(matches!(events[0].kind, EventKind::Granted { .. }), "{events:?}");
    assert_eq!((events[0].label.as_str(), events[0].value.as_slice()), ("worker", &b"here"[..]));
    assert!(matches!(events[1].kind, EventKind::Ended { .. }), "{events:?}");
    assert_eq!(events[1].label, "worker");
    assert_eq!(rig.hub.labels.get(LeaseId(1)).as_deref(), None, "the dead lease is forgotten");
}

#[test]
fn a_position_is_gone_on_from_exactly() {
    let mut rig = Rig::new(HISTORY);
    for _ in 0..3 {
        rig.churn("a");
        rig.churn("b");
    }
    rig.open(1, &key("a"), Start::After(Revision(4)));
    rig.open(2, &key("a"), Start::After(Revision(7)));
    rig.open(3, &key("a"), Start::After(Revision(14)));
    let told = ["1: [7 8 8 11 12 12] 14", "2: [8 8 11 12 12] 14", "3: [] 14"];
    assert_eq!(rig.told(), told);
    rig.churn("a");
    assert_eq!(rig.told(), ["1: [15 16 16] 16", "2: [15 16 16] 16", "3: [15 16 16] 16"]);
}

#[test]
fn a_position_ahead_of_this_node_waits_for_it() {
    let mut rig = Rig::new(HISTORY);
    rig.open(1, &key("a"), Start::After(Revision(5)));
    assert!(rig.told().is_empty());
    rig.churn("a");
    rig.churn("a");
    assert_eq!(rig.told(), ["1: [6 6] 6"], "3 to 5 were told elsewhere");
    rig.open(2, &key("a"), Start::After(Revision(99)));
    rig.told();
    rig.hub.refuse(WatchName { core: 0, id: 2 }, ErrorCode::CURSOR_FROM_FUTURE);
    rig.churn("a");
    assert_eq!(rig.told(), ["2: cursor_from_future", "1: [7 8 8] 8"]);
}

#[test]
fn what_the_history_lost_is_told_as_a_state() {
    let mut rig = Rig::new(2_000);
    let acquire = rig.acquire("held");
    rig.apply(&[acquire]);
    for _ in 0..20 {
        rig.churn("a");
    }
    let floor = rig.hub.history.floor();
    assert!(floor > Revision(3) && floor < rig.state.revision());
    rig.open(1, &prefix(""), Start::After(Revision(3)));
    rig.open(2, &key("a"), Start::State);
    rig.open(3, &key("held"), Start::After(Revision(3)));
    rig.open(4, &key("a"), Start::After(floor));
    let told = rig.told();
    let head = rig.state.revision();
    assert_eq!(told[..2], [format!("1: state {head} held false"), format!("1: [] {head}")]);
    assert_eq!(told[2..4], [format!("2: state {head}  false"), format!("2: [] {head}")]);
    assert_eq!(told[4], format!("3: state {head} held false"));
    assert!(told[6].starts_with("4: ["), "{told:?}");
}

#[test]
fn a_snapshot_ends_the_watches_that_it_passed_and_no_others() {
    let mut rig = Rig::new(HISTORY);
    rig.churn("a");
    rig.open(1, &key("a"), Start::Now);
    rig.open(2, &key("a"), Start::After(Revision(8)));
    rig.told();
    let mut later = Rig::new(HISTORY);
    (0..3).for_each(|_| later.churn("a"));
    rig.state = later.state;
    rig.hub.installed(&rig.state);
    assert_eq!(rig.told(), ["1: Continue"], "the other one's position is not passed");
    rig.open(3, &key("a"), Start::After(Revision(4)));
    assert_eq!(rig.told(), ["3: state 8  false", "3: [] 8"]);
    rig.number = later.number;
    rig.churn("a");
    assert_eq!(rig.told(), ["2: [9 10 10] 10", "3: [9 10 10] 10"]);
}

#[test]
fn pages_of_one_state_are_at_one_revision() {
    let mut rig = Rig::new(HISTORY);
    for at in 0..300 {
        let acquire = rig.acquire(&format!("k/{at:03}"));
        rig.apply(&[acquire]);
    }
    rig.open(1, &prefix("k/"), Start::State);
    let told = rig.told();
    let head = rig.state.revision();
    assert!(told[0].starts_with(&format!("1: state {head} k/000,")) && told[0].ends_with("true"));
    assert_eq!(told[1..], ["1: Continue"]);
    // Meanwhile the world goes on.
    rig.churn("k/x");
    let last = told[0].rsplit(&[',', ' ']).nth(1).expect("a key").as_bytes().to_vec();
    rig.open(2, &prefix("k/"), Start::Page(head, last.clone()));
    let told = rig.told();
    assert!(told[0].starts_with(&format!("2: state {head} k/")), "{told:?}");
    assert!(told[0].ends_with("k/299 false"), "{told:?}");
    assert_eq!(told[1], format!("2: [{0} {1} {1}] {1}", head.0 + 1, head.0 + 2));
    // A view that is not there: a state begins, and newcomers share it for a moment.
    rig.open(3, &prefix("k/"), Start::Page(Revision(1), last));
    assert!(rig.told()[0].starts_with(&format!("3: state {head} k/000")));
    rig.hub.tick(1, MonoTime(1 << 40));
    rig.open(4, &prefix("k/"), Start::Page(head, b"k/000".to_vec()));
    let told = rig.told();
    let expected = format!("4: state {} k/000,", head.0 + 2);
    assert!(told[0].starts_with(&expected), "nobody read it for a while: {told:?}");
}

#[test]
fn a_state_that_another_node_began_is_not_followed_by_an_older_one() {
    let mut rig = Rig::new(HISTORY);
    for at in 0..300 {
        let acquire = rig.acquire(&format!("k/{at:03}"));
        rig.apply(&[acquire]);
    }
    // A view that newcomers are given for a second.
    rig.open(1, &prefix("k/"), Start::State);
    rig.told();
    let at = Revision(rig.state.revision().0 + 2);
    rig.open(2, &prefix("k/"), Start::Page(at, b"k/000".to_vec()));
    assert_eq!(rig.told(), ["2: not_ready"], "this node is behind");
    rig.churn("k/x");
    rig.open(3, &prefix("k/"), Start::Page(at, b"k/000".to_vec()));
    let told = rig.told();
    assert!(told[0].starts_with(&format!("3: state {at} k/000,")), "{told:?}");
}

#[test]
fn a_client_that_does_not_read_is_cut_off_and_a_crowd_of_events_is_told_from_the_history() {
    let mut rig = Rig::new(64 * 1024 * 1024);
    rig.open(1, &prefix(""), Start::Now);
    rig.told();
    rig.client.stuck.set(true);
    rig.churn("a");
    assert_eq!(rig.told(), ["1: TooSlow"]);
    rig.client.stuck.set(false);
    rig.open(2, &prefix(""), Start::Now);
    let at = rig.told().pop().expect("a position");
    let head: u64 = at.rsplit(' ').next().and_then(|at| at.parse().ok()).expect("a number");
    // More than may wait for one watch between two turns.
    (0..10_000).for_each(|_| rig.churn("a"));
    assert_eq!(rig.told(), ["2: Continue"]);
    let (mut position, mut answers) = (head, 0);
    while position < rig.state.revision().0 {
        rig.open(10 + answers, &prefix(""), Start::After(Revision(position)));
        for told in rig.told() {
            let Some((_, told)) = told.split_once(": [") else { continue };
            let (events, upto) = told.split_once("] ").expect("a frame");
            for revision in events.split_whitespace() {
                let revision: u64 = revision.parse().expect("a number");
                assert!(revision == position || revision == position + 1, "after {position}");
                position = revision;
            }
            assert!(!upto.ends_with('+'));
            position = upto.parse().expect("a number");
        }
        answers += 1;
    }
    assert!(answers > 3, "in pieces of a bounded size: {answers}");
}

#[test]
fn a_revision_with_more_events_than_a_frame_takes_is_told_in_one_go() {
    let mut rig = Rig::new(HISTORY);
    rig.open(1, &prefix(""), Start::Now);
    for at in 0..1_000 {
        let acquire = rig.acquire(&format!("k/{at}"));
        rig.apply(&[acquire]);
    }
    rig.told();
    rig.apply(&[Command::Close { lease: LeaseId(1), secret: SECRET }]);
    let head = rig.state.revision().0;
    let told = rig.told();
    assert!(told.len() > 2, "{} frames", told.len());
    let (last, others) = told.split_last().expect("frames");
    assert!(last.ends_with(&format!("] {head}")), "{last}");
    let before = format!("] {}+", head - 1);
    assert!(others.iter().all(|told| told.ends_with(&before)), "{told:?}");
}

#[test]
fn an_answer_ends_between_revisions_only() {
    let mut rig = Rig::with(Sizes { replay: 1_000, ..Sizes::of(1) });
    for at in 0..20 {
        let acquire = rig.acquire(&format!("k/{at}"));
        rig.apply(&[acquire]);
    }
    let before = rig.state.revision();
    rig.apply(&[Command::Close { lease: LeaseId(1), secret: SECRET }]);
    rig.open(1, &prefix(""), Start::After(before));
    let told = rig.told();
    let revision = (before.0 + 1).to_string();
    let ends = told[0].matches(&format!("{revision} ")).count();
    assert!(ends >= 39 && told[0].ends_with(&format!("] {revision}")), "{told:?}");
    rig.session();
    rig.churn("a");
    assert_eq!(rig.told().len(), 1, "it goes on by itself");
}

#[test]
fn doubt_is_told_to_everybody_once_and_positions_to_the_idle() {
    let mut rig = Rig::new(HISTORY);
    rig.hub.set_quorum(true);
    (1..=3).for_each(|id| rig.open(id, &key("a"), Start::Now));
    rig.told();
    rig.hub.set_quorum(true);
    rig.hub.set_quorum(true);
    assert_eq!(rig.told(), ["1: quorum true", "2: quorum true", "3: quorum true"]);
    rig.hub.set_quorum(false);
    rig.open(9, &key("a"), Start::Now);
    let told = rig.told();
    assert_eq!(told[..3], ["1: quorum false", "2: quorum false", "3: quorum false"]);
    assert_eq!(told[3..], ["9: [] 2", "9: quorum false"]);
    rig.churn("b");
    assert!(rig.told().is_empty(), "nobody watches it");
    (0..PROGRESS_TICKS).for_each(|tick| rig.hub.tick(tick, NOW));
    assert_eq!(rig.told(), ["1: [] 4", "9: [] 4", "2: [] 4", "3: [] 4"]);
    for id in [1, 2, 3, 9] {
        rig.hub.close(WatchName { core: 0, id });
    }
    assert!(rig.hub.is_empty() && rig.hub.index.is_empty() && rig.hub.queue.is_empty());
}

#[test]
fn watches_are_bounded() {
    let mut rig = Rig::new(HISTORY);
    for id in 0..WATCHES_MAX as u64 {
        rig.open(id, &key("a"), Start::Now);
    }
    let to = ReplyTo::new(Rc::clone(&rig.client) as Rc<dyn ReplySink>, 0);
    let name = WatchName { core: 1, id: 0 };
    assert_eq!(rig.hub.open(name, key("a"), Start::Now, to), Err(ErrorCode::WATCHES_FULL));
}
