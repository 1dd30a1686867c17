//! What a group's sink is told of a batch: each command's events with the state that this command
//! left, however many commands one entry of the log carries (G6).

mod raft_support;

use std::cell::RefCell;
use std::rc::Rc;

use leasehold_core::{Batch, State};
use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::{Mode, Number, Secret, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_server::raft::ApplySink;
use raft_support::{Cluster, opening, run};

const KEY: &[u8] = b"k";
const SECRET: Secret = Secret([1; 16]);

/// The value of each hold when its grant was told; the revision of each event, and of the state then.
#[derive(Default)]
struct Witness {
    values: RefCell<Vec<Vec<u8>>>,
    revisions: RefCell<Vec<(u64, u64)>>,
}

impl ApplySink for Witness {
    fn applied(&self, state: &State, events: &[Event]) {
        for event in events {
            self.revisions.borrow_mut().push((event.revision.0, state.revision().0));
            if let EventKind::Granted { key, lease, token, .. } = &event.kind {
                let value = state.held_value(key, *lease, *token);
                self.values.borrow_mut().push(value.map_or_else(Vec::new, |value| value.to_vec()));
            }
        }
    }

    fn answered(&self) {}

    fn installed(&self, _state: &State) {}
}

#[test]
fn a_grant_is_told_with_its_own_value_though_its_end_is_in_the_same_entry() {
    run(1, async {
        let cluster = Cluster::formed(3).await;
        let (leader, leadership) = cluster.leader().await;
        let group = cluster.group(leader);
        // Before the token base is there, no lease is opened.
        group.propose(leadership, opening(1)).await.expect("a majority is there");
        let opened = group.propose(leadership, opening(1)).await.expect("a majority is there");
        let Outcome::Opened { lease, .. } = opened[0] else { panic!("{opened:?}") };
        let witness = Rc::new(Witness::default());
        cluster.running(leader).seen.other.replace(Some(witness.clone()));

        let caller = |number| {
            let (floor, acks) = (Number(0), vec![]);
            Caller { lease, secret: SECRET, number: Number(number), floor, acks }
        };
        let acquire = |number, value: &[u8]| Command::Acquire {
            caller: caller(number),
            key: KEY.to_vec(),
            mode: Mode::EXCLUSIVE,
            own: None,
            value: value.to_vec(),
            wait_ms: 0,
        };
        let batch = |commands| Batch { wall_ms: 1, commands }.encode().into();
        let first = Token(cluster.running(leader).state.borrow().last_token().0 + 1);
        let commands = vec![
            acquire(1, b"first"),
            Command::SetValue {
                caller: caller(4),
                key: KEY.to_vec(),
                token: first,
                value: b"other".to_vec(),
            },
            Command::Release { caller: caller(3), key: KEY.to_vec(), token: first },
            acquire(7, b"second"),
        ];
        let outcomes = group.propose(leadership, batch(commands)).await.expect("committed");
        assert!(
            matches!(
                outcomes[..],
                [
                    Outcome::Granted(_),
                    Outcome::Changed { .. },
                    Outcome::Released { .. },
                    Outcome::Granted(_)
                ]
            ),
            "INVALID: {outcomes:?}"
        );
        assert_eq!(*witness.values.borrow(), [b"first".to_vec(), b"second".to_vec()]);
        let told = witness.revisions.borrow();
        assert!(told.iter().all(|(event, state)| event == state), "{told:?}");
    });
}
