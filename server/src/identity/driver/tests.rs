//! The driver over a transport in memory: every point at which a node can crash.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use leasehold_protocol::birth::{BirthMember, BirthPropose, Plan};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, DiskId};

use super::*;
use crate::identity::FileError;

/// Where a store crashes: at its n-th save, before or after the promise is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CrashAt {
    save: u32,
    after: bool,
}

#[derive(Default)]
struct Memory {
    stored: Option<Promise>,
    saves: u32,
    crash: Option<CrashAt>,
}

impl BirthStore for Memory {
    fn save(&mut self, promise: &Promise) -> Result<(), FileError> {
        self.saves += 1;
        let crash = self.crash.filter(|crash| crash.save == self.saves);
        if crash.is_none_or(|crash| crash.after) {
            self.stored = Some(promise.clone());
        }
        match crash {
            None => Ok(()),
            Some(_) => Err(FileError::io("crash".as_ref())(std::io::ErrorKind::Other.into())),
        }
    }
}

struct Node {
    birth: RefCell<Birth>,
    store: RefCell<Memory>,
    up: Cell<bool>,
}

impl Node {
    fn start(number: u64, memory: Memory) -> Rc<Self> {
        let me = BirthMember {
            node: NodeId(number),
            disk: DiskId([number as u8; 16]),
            peer_addr: String::new(),
            client_addr: String::new(),
        };
        let nodes = (1..=3).map(NodeId).collect();
        let plan = Plan { name: "red".to_owned(), nodes, shards: 1, key_hash: 1 };
        let birth = Birth::new(me, plan, memory.stored.clone()).unwrap();
        Rc::new(Self { birth: birth.into(), store: memory.into(), up: Cell::new(true) })
    }
}

#[derive(Clone)]
struct Wire(Rc<RefCell<BTreeMap<NodeId, Rc<Node>>>>);

impl BirthTransport for Wire {
    async fn ask(&self, node: NodeId, kind: u8, body: Vec<u8>) -> Option<Vec<u8>> {
        yield_once().await;
        let node = self.0.borrow().get(&node).filter(|node| node.up.get())?.clone();
        let mut birth = node.birth.borrow_mut();
        let served = birth.serve(kind, &body, &mut *node.store.borrow_mut());
        if served.is_err() {
            node.up.set(false);
        }
        served.ok().map(|reply| reply.expect("the driver sends what peers understand"))
    }

    async fn pause(&self, _: Duration) {
        yield_once().await;
    }
}

async fn yield_once() {
    let mut first = true;
    poll_fn(|_| if std::mem::take(&mut first) { Poll::Pending } else { Poll::Ready(()) }).await;
}

fn mint() -> Mint {
    Mint { cluster: ClusterId([9; 16]), wall_ms: 2, earliest_ms: 1, token_floor: 0, restore: None }
}

async fn run(node: Rc<Node>, wire: Wire) -> Option<BirthRecord> {
    let founding = pin!(found(&node.birth, &node.store, &wire, mint));
    let mut founding = founding;
    // A node that crashed while it served a peer stops here, too.
    poll_fn(|cx| {
        if !node.up.get() {
            return Poll::Ready(None);
        }
        founding.as_mut().poll(cx).map(|result| {
            node.up.set(result.is_ok());
            result.ok()
        })
    })
    .await
}

/// Runs three nodes; one of them crashes as told and is started again. Saves seen at it.
fn births(crasher: u64, crash: Option<CrashAt>) -> u32 {
    let wire = Wire(Rc::default());
    let nodes = (1..=3).map(|number| {
        let crash = crash.filter(|_| number == crasher);
        (NodeId(number), Node::start(number, Memory { crash, ..Memory::default() }))
    });
    *wire.0.borrow_mut() = nodes.collect();
    let start = |number: u64| {
        let node = wire.0.borrow()[&NodeId(number)].clone();
        Box::pin(run(node, wire.clone()))
    };
    let mut runs: Vec<_> = (1..=3).map(|number| Some(start(number))).collect();
    let mut records = BTreeMap::new();
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..100 {
        for number in 1..=3 {
            let slot = &mut runs[number as usize - 1];
            let Some(Poll::Ready(result)) = slot.as_mut().map(|run| run.as_mut().poll(&mut cx))
            else {
                continue;
            };
            *slot = None;
            if let Some(record) = result {
                records.insert(number, record);
                continue;
            }
            let dead = wire.0.borrow()[&NodeId(number)].clone();
            let stored = dead.store.borrow().stored.clone();
            let node = Node::start(number, Memory { stored, ..Memory::default() });
            wire.0.borrow_mut().insert(NodeId(number), node);
            runs[number as usize - 1] = Some(start(number));
        }
    }
    assert_eq!(records.len(), 3, "{crasher} {crash:?}: {:?} were founded", records.keys());
    assert!(records.values().all(|record| *record == records[&1]));
    let nodes = wire.0.borrow();
    assert!(nodes.values().all(|node| node.store.borrow().stored.as_ref().unwrap().founded));
    nodes[&NodeId(crasher)].store.borrow().saves
}

#[test]
fn three_nodes_are_born_whoever_crashes_wherever() {
    let mut points = 0;
    for crasher in 1..=3 {
        let saves = births(crasher, None);
        assert_eq!(saves, if crasher == 1 { 2 } else { 1 });
        for save in 1..=saves {
            for after in [false, true] {
                births(crasher, Some(CrashAt { save, after }));
                points += 1;
            }
        }
    }
    assert_eq!(points, 8);
}

#[test]
fn a_malformed_message_is_an_error_code_and_an_unknown_kind_too() {
    let node = Node::start(2, Memory::default());
    let mut birth = node.birth.borrow_mut();
    let mut store = node.store.borrow_mut();
    let mut serve = |kind, body: &[u8]| birth.serve(kind, body, &mut *store).unwrap();
    assert_eq!(serve(KIND_PROPOSE, b"nonsense"), Err(ErrorCode::MALFORMED));
    assert_eq!(serve(KIND_PROPOSE, b""), Err(ErrorCode::MALFORMED));
    assert_eq!(serve(99, b""), Err(ErrorCode::UNKNOWN_KIND));
    assert!(serve(KIND_QUERY, b"").is_ok());
}

#[test]
fn a_promise_that_could_not_be_kept_is_not_given() {
    let first = Node::start(1, Memory::default());
    let others = [2, 3].map(|number| (NodeId(number), Node::start(number, Memory::default())));
    let answers = others.iter().map(|(node, other)| (*node, other.birth.borrow().answer()));
    let minted = first.birth.borrow_mut().answered(&answers.collect(), mint).unwrap().unwrap();
    let proposal = pack(&BirthPropose { record: minted.record });
    let crash = Some(CrashAt { save: 1, after: false });
    let second = Node::start(2, Memory { crash, ..Memory::default() });
    let mut birth = second.birth.borrow_mut();
    assert!(birth.serve(KIND_PROPOSE, &proposal, &mut *second.store.borrow_mut()).is_err());
    assert_eq!(birth.answer().promised, None);
}
