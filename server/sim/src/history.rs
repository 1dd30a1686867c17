//! What the clients saw, in the records that every harness of the project writes, and what the
//! simulator itself found broken.
//!
//! A call is recorded when it is made, with an unknown outcome: a client that is killed leaves it
//! so. All times are true time.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use leasehold_bench::check::modes::Sure;
use leasehold_bench::history::{
    Applied, Claim, Fault, FaultKind, History as Records, Lost, Op, OpKind, Outcome, QueuedAt,
    Record, Renewal,
};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, Mode, Number, ShardId, Token};
use leasehold_protocol::outcome::Outcome as Answer;
use leasehold_server::rt::sim::SimWorld;

use crate::client::MODE_KEYS;

/// One hold, as its client knows it.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) client: u32,
    pub(crate) key: Vec<u8>,
    pub(crate) token: Token,
    pub(crate) mode: Mode,
    /// When the client was told of the grant.
    pub(crate) told_ns: u64,
    /// When it knew that the grant is current.
    pub(crate) known_ns: Cell<u64>,
    /// By the client's own clock and margin, sure until then.
    pub(crate) sure_until_ns: Cell<u64>,
    /// Nothing extends it any more: it is forced, lost, or being given back.
    pub(crate) over: Cell<bool>,
    /// Since when.
    over_ns: Cell<u64>,
}

impl Held {
    pub(crate) fn new(
        client: u32,
        (key, token, mode): (Vec<u8>, Token, Mode),
        sure_until_ns: u64,
    ) -> Rc<Self> {
        let now_ns = SimWorld::current().now_ns();
        Rc::new(Self {
            client,
            key,
            token,
            mode,
            told_ns: now_ns,
            known_ns: Cell::new(now_ns),
            sure_until_ns: Cell::new(sure_until_ns),
            over: Cell::new(false),
            over_ns: Cell::new(u64::MAX),
        })
    }

    /// Nothing extends it any more, and nobody relies on it.
    pub(crate) fn end(&self) {
        if !self.over.replace(true) {
            self.over_ns.set(SimWorld::current().now_ns());
        }
    }

    fn is_of_a_mode(&self) -> bool {
        self.key.starts_with(MODE_KEYS)
    }

    /// The grant is current, as far as anybody can know.
    pub(crate) fn known(&self) {
        self.known_ns.set(SimWorld::current().now_ns());
    }

    pub(crate) fn extend(&self, until_ns: u64) {
        if !self.over.get() {
            self.sure_until_ns.set(until_ns.max(self.sure_until_ns.get()));
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct History {
    records: RefCell<Vec<Record>>,
    holds: RefCell<Vec<Rc<Held>>>,
    /// Requests that were sent again.
    pub(crate) retries: Cell<u64>,
    /// Requests whose connection broke, or that took too long, before their answer.
    pub(crate) unknown: Cell<u64>,
    /// Leases that ended before their clients wanted.
    pub(crate) lost: Cell<u64>,
    granted: RefCell<BTreeMap<u32, u64>>,
    /// Successful calls by shard.
    served: RefCell<BTreeMap<u32, u64>>,
    operations: Cell<u64>,
}

/// What a call is about.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct About<'a> {
    pub(crate) client: u64,
    pub(crate) shard: ShardId,
    pub(crate) lease: LeaseId,
    pub(crate) number: Option<Number>,
    pub(crate) key: &'a [u8],
}

impl History {
    /// A client is about to send a request for the first time.
    pub(crate) fn call(self: &Rc<Self>, about: About<'_>, kind: OpKind) -> Call {
        let op = Op {
            client: about.client as u32,
            shard: about.shard.0,
            lease: Some(about.lease.0).filter(|lease| *lease != 0),
            number: about.number.map(|number| number.0),
            key: String::from_utf8_lossy(about.key).into_owned(),
            kind,
            invoke_ns: SimWorld::current().now_ns(),
            return_ns: None,
            attempts: 0,
            queued: None,
            outcome: Outcome::Unknown,
        };
        Call { index: self.push(Record::Op(op)), history: self.clone(), copied: Rc::default() }
    }

    /// A renewal was acknowledged, or an opening.
    pub(crate) fn renewed(&self, client: u64, lease: (ShardId, LeaseId), ttl_ms: u32, sent: u64) {
        let (shard, lease) = (lease.0.0, lease.1.0);
        let ack_ns = Some(SimWorld::current().now_ns());
        let client = client as u32;
        self.push(Record::Renewal(Renewal { client, shard, lease, ttl_ms, send_ns: sent, ack_ns }));
    }

    /// A client was told that its lease is dead.
    pub(crate) fn lost(&self, client: u64, shard: ShardId, lease: LeaseId) {
        self.lost.set(self.lost.get() + 1);
        self.push(Record::Lost(Lost {
            client: client as u32,
            shard: shard.0,
            lease: Some(lease.0),
            key: None,
            token: None,
            at_ns: SimWorld::current().now_ns(),
            cause: "lease_dead".to_owned(),
        }));
    }

    pub(crate) fn holds(&self, held: &Rc<Held>) {
        self.holds.borrow_mut().push(held.clone());
    }

    pub(crate) fn fault(&self, kind: FaultKind, node: u64) {
        let at_ns = SimWorld::current().now_ns();
        self.push(Record::Fault(Fault { at_ns, kind, node }));
    }

    /// A record that the harness itself adds.
    pub(crate) fn push(&self, record: Record) -> usize {
        let mut records = self.records.borrow_mut();
        records.push(record);
        records.len() - 1
    }

    /// Grants of a shard that clients know of.
    pub(crate) fn granted(&self, shard: ShardId) -> u64 {
        self.granted.borrow().get(&shard.0).copied().unwrap_or(0)
    }

    /// Successful calls of a shard.
    pub(crate) fn served(&self, shard: ShardId) -> u64 {
        self.served.borrow().get(&shard.0).copied().unwrap_or(0)
    }

    /// Successful calls.
    pub(crate) fn operations(&self) -> u64 {
        self.operations.get()
    }

    /// The times in which clients were sure of holds in modes.
    pub(crate) fn sure(&self) -> Vec<Sure> {
        let holds = self.holds.borrow();
        let sure = holds.iter().filter(|held| held.is_of_a_mode()).map(|held| Sure {
            key: String::from_utf8_lossy(&held.key).into_owned(),
            mode: held.mode,
            token: held.token.0,
            from_ns: held.known_ns.get(),
            until_ns: held.sure_until_ns.get().min(held.over_ns.get()),
        });
        sure.collect()
    }

    /// Everything, for the checkers.
    pub(crate) fn records(&self, log: Vec<Applied>) -> Records {
        let mut records = self.records.borrow().clone();
        let claim = |held: &Rc<Held>| {
            Record::Claim(Claim {
                client: held.client,
                key: String::from_utf8_lossy(&held.key).into_owned(),
                token: held.token.0,
                at_ns: held.known_ns.get(),
                until_ns: held.sure_until_ns.get(),
            })
        };
        let holds = self.holds.borrow();
        records.extend(holds.iter().filter(|held| !held.is_of_a_mode()).map(claim));
        records.extend(log.into_iter().map(Record::Applied));
        Records { records }
    }
}

/// One recorded call.
#[derive(Clone)]
pub(crate) struct Call {
    history: Rc<History>,
    index: usize,
    /// Copies of the request may come before it: no answer is the first one.
    copied: Rc<Cell<bool>>,
}

impl Call {
    fn edit<R>(&self, edit: impl FnOnce(&mut Op) -> R) -> R {
        match &mut self.history.records.borrow_mut()[self.index] {
            Record::Op(op) => edit(op),
            other => unreachable!("a call is an operation, not {other:?}"),
        }
    }

    /// Its request is sent, for the first time or again.
    pub(crate) fn sent(&self) {
        self.edit(|op| op.attempts += 1);
    }

    /// A copy of its request is sent under another record.
    pub(crate) fn copied(&self) {
        self.copied.set(true);
    }

    /// Its answer is that to the only request that was ever sent.
    pub(crate) fn is_first_answer(&self) -> bool {
        !self.copied.get() && self.edit(|op| op.attempts) == 1
    }

    /// Its request was sent first at this time.
    pub(crate) fn invoked_ns(&self) -> u64 {
        self.edit(|op| op.invoke_ns)
    }

    /// The answer `queued`; only that to the first attempt tells where the wait began.
    pub(crate) fn queued(&self, revision: u64) {
        let at_ns = SimWorld::current().now_ns();
        if self.is_first_answer() {
            self.edit(|op| _ = op.queued.get_or_insert(QueuedAt { revision, at_ns }));
        }
    }

    /// The new lease of an opening.
    pub(crate) fn opened(&self, lease: LeaseId) {
        self.edit(|op| op.lease = Some(lease.0));
    }

    /// Its definite answer.
    pub(crate) fn answered(&self, answer: &Result<Answer, ErrorCode>) {
        let now_ns = SimWorld::current().now_ns();
        let (ok, shard, granted) = self.edit(|op| {
            op.outcome = match answer {
                Ok(answer) => told(answer, op.lease),
                Err(code) => refused(*code),
            };
            op.return_ns = Some(now_ns);
            let granted = matches!(op.outcome, Outcome::Granted { .. });
            (op.outcome.is_ok(), op.shard, granted)
        });
        if ok {
            self.count(shard, granted);
        }
    }

    /// The answer to a linearizable read.
    pub(crate) fn read(&self, token: Option<Token>, revision: u64) {
        let now_ns = SimWorld::current().now_ns();
        let shard = self.edit(|op| {
            let token = token.map(|token| token.0);
            op.outcome = Outcome::Read { token, revision, stale: false };
            op.return_ns = Some(now_ns);
            op.shard
        });
        self.count(shard, false);
    }

    /// One more success of a shard, perhaps a grant.
    fn count(&self, shard: u32, granted: bool) {
        self.history.operations.set(self.history.operations.get() + 1);
        *self.history.served.borrow_mut().entry(shard).or_default() += 1;
        if granted {
            *self.history.granted.borrow_mut().entry(shard).or_default() += 1;
        }
    }
}

fn refused(code: ErrorCode) -> Outcome {
    Outcome::Refused { code: code.name().to_owned(), token: None, revision: None }
}

/// A wire outcome in the history's words; `lease` is the caller's.
fn told(answer: &Answer, lease: Option<u64>) -> Outcome {
    match answer {
        Answer::Opened { revision, .. } => Outcome::Opened { revision: Some(revision.0) },
        Answer::Granted(grant) => Outcome::Granted {
            token: grant.token.0,
            own_lease: Some(grant.lease.0).filter(|own| lease != Some(*own)),
            revision: Some(grant.revision.0),
        },
        Answer::Cancelled { revision } | Answer::TimedOut { revision } => {
            Outcome::Ended { revision: Some(revision.0) }
        }
        Answer::Released { token, revision } => {
            Outcome::Released { token: token.0, revision: Some(revision.0) }
        }
        Answer::Closed { revision }
        | Answer::Forced { revision, .. }
        | Answer::Changed { revision, .. } => Outcome::Done { revision: Some(revision.0) },
        Answer::Refused { code, token, revision } => Outcome::Refused {
            code: code.name().to_owned(),
            token: Some(token.0).filter(|token| *token != 0),
            revision: Some(revision.0),
        },
        Answer::Queued { .. } | Answer::Begun { .. } | Answer::Members { .. } => Outcome::Unknown,
    }
}

/// Broken guarantees, with what shows it.
#[derive(Debug, Default)]
pub(crate) struct Violations {
    list: RefCell<Vec<String>>,
}

impl Violations {
    pub(crate) fn add(&self, guarantee: &str, what: &str) {
        self.list.borrow_mut().push(format!("{guarantee}: {what}"));
    }

    pub(crate) fn list(&self) -> Vec<String> {
        self.list.borrow().clone()
    }
}
