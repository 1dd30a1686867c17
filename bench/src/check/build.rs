//! Hand-made histories for the checkers' tests: client `n` has lease `n` of shard 0.

use crate::history::{
    Applied, Cause, Change, FinalKey, FinalNode, FinalState, History, Lost, Op, OpKind, Outcome,
    QueuedAt, Record, Renewal, StoreWrite,
};

/// One second.
pub(super) const S: u64 = 1_000_000_000;

/// A key with its holders (lease, token) and its waiters (lease, number).
pub(super) type Key<'a> = (&'a str, &'a [(u64, u64)], &'a [(u64, u64)]);

/// A change of the log: a grant.
pub(super) fn granted(key: &str, lease: u64, token: u64) -> Change {
    Change::Granted { key: key.into(), lease, token }
}

/// A change of the log: a release.
pub(super) fn ended(key: &str, lease: u64, token: u64) -> Change {
    Change::Ended { key: key.into(), lease, token, cause: Cause::Released }
}

/// A change of the log: an acquire waits.
pub(super) fn queued(key: &str, lease: u64, number: u64) -> Change {
    Change::Queued { key: key.into(), lease, number }
}

/// A change of the log: its wait ended, perhaps with a token.
pub(super) fn wait_ended(key: &str, lease: u64, number: u64, token: Option<u64>) -> Change {
    Change::WaitEnded { key: key.into(), lease, number, token }
}

/// A history in the making. Revisions are given where a test is about them.
pub(super) struct Run {
    records: Vec<Record>,
}

impl Run {
    pub(super) fn new() -> Self {
        Self { records: Vec::new() }
    }

    pub(super) fn history(&self) -> History {
        History { records: self.records.clone() }
    }

    pub(super) fn op(&mut self, op: Op) -> &mut Op {
        self.records.push(Record::Op(op));
        self.last_op()
    }

    /// The operation that was added last.
    pub(super) fn last_op(&mut self) -> &mut Op {
        match self.records.last_mut() {
            Some(Record::Op(op)) => op,
            _ => unreachable!("the last record is an operation"),
        }
    }

    pub(super) fn call(
        &mut self,
        client: u32,
        key: &str,
        kind: OpKind,
        times: (u64, u64),
        outcome: Outcome,
    ) -> &mut Op {
        self.op(Op {
            client,
            shard: 0,
            lease: Some(u64::from(client)),
            number: None,
            key: key.into(),
            kind,
            invoke_ns: times.0,
            return_ns: Some(times.1),
            attempts: 1,
            queued: None,
            outcome,
        })
    }

    pub(super) fn grant(&mut self, client: u32, key: &str, token: u64, from: u64, to: u64) {
        let outcome = Outcome::Granted { token, own_lease: None, revision: None };
        self.call(client, key, OpKind::Acquire { wait_ms: u32::MAX }, (from, to), outcome);
    }

    /// A grant at a revision, perhaps after a wait that began at another.
    pub(super) fn grant_at(
        &mut self,
        (client, number): (u32, u64),
        key: &str,
        token: u64,
        revisions: (Option<u64>, u64),
        times: (u64, u64),
    ) {
        let outcome = Outcome::Granted { token, own_lease: None, revision: Some(revisions.1) };
        let op = self.call(client, key, OpKind::Acquire { wait_ms: u32::MAX }, times, outcome);
        op.number = Some(number);
        op.queued = revisions.0.map(|revision| QueuedAt { revision, at_ns: times.0 + 1 });
    }

    /// A wait that the history ends with.
    pub(super) fn waiting(
        &mut self,
        client: u32,
        number: u64,
        key: &str,
        revision: u64,
        from: u64,
    ) {
        let kind = OpKind::Acquire { wait_ms: u32::MAX };
        let op = self.call(client, key, kind, (from, from), Outcome::Unknown);
        op.return_ns = None;
        op.number = Some(number);
        op.queued = Some(QueuedAt { revision, at_ns: from + 1 });
    }

    pub(super) fn release(&mut self, client: u32, key: &str, token: u64, from: u64, to: u64) {
        let outcome = Outcome::Released { token, revision: None };
        self.call(client, key, OpKind::Release { token }, (from, to), outcome);
    }

    pub(super) fn release_at(
        &mut self,
        client: u32,
        key: &str,
        token: u64,
        revision: u64,
        times: (u64, u64),
    ) {
        let outcome = Outcome::Released { token, revision: Some(revision) };
        self.call(client, key, OpKind::Release { token }, times, outcome);
    }

    pub(super) fn refused(
        &mut self,
        client: u32,
        key: &str,
        kind: OpKind,
        code: &str,
        times: (u64, u64),
    ) -> &mut Op {
        let outcome = Outcome::Refused { code: code.into(), token: None, revision: None };
        self.call(client, key, kind, times, outcome)
    }

    pub(super) fn release_refused(&mut self, client: u32, key: &str, token: u64, a: u64, b: u64) {
        self.refused(client, key, OpKind::Release { token }, "not_owner", (a, b));
    }

    pub(super) fn renew(&mut self, client: u32, ttl_ns: u64, send_ns: u64, ack_ns: u64) {
        self.renewal(client, ttl_ns, send_ns, Some(ack_ns));
    }

    pub(super) fn renew_unanswered(&mut self, client: u32, ttl_ns: u64, send_ns: u64) {
        self.renewal(client, ttl_ns, send_ns, None);
    }

    fn renewal(&mut self, client: u32, ttl_ns: u64, send_ns: u64, ack_ns: Option<u64>) {
        self.records.push(Record::Renewal(Renewal {
            client,
            shard: 0,
            lease: u64::from(client),
            ttl_ms: (ttl_ns / 1_000_000) as u32,
            send_ns,
            ack_ns,
        }));
    }

    pub(super) fn claim(&mut self, client: u32, key: &str, token: u64, at_ns: u64, until_ns: u64) {
        self.records.push(Record::Claim(crate::history::Claim {
            client,
            key: key.into(),
            token,
            at_ns,
            until_ns,
        }));
    }

    pub(super) fn lost_lease(&mut self, client: u32, at_ns: u64) {
        self.records.push(Record::Lost(Lost {
            client,
            shard: 0,
            lease: Some(u64::from(client)),
            key: None,
            token: None,
            at_ns,
            cause: "lease_dead".into(),
        }));
    }

    pub(super) fn store(&mut self, key: &str, token: u64, accepted: bool, at_ns: u64) {
        let key = key.into();
        self.records.push(Record::Store(StoreWrite { client: 0, key, token, accepted, at_ns }));
    }

    /// What node 1 applied at a revision; the second of its time is the revision's.
    pub(super) fn applied(&mut self, revision: u64, changes: Vec<Change>) {
        self.applied_by(1, revision, changes);
    }

    pub(super) fn applied_by(&mut self, node: u64, revision: u64, changes: Vec<Change>) {
        let at_ns = Some(revision * S);
        self.records.push(Record::Applied(Applied { node, shard: 0, revision, at_ns, changes }));
    }

    /// A record of any kind.
    pub(super) fn record(&mut self, record: Record) {
        self.records.push(record);
    }

    /// The end: keys with their holders and waiters, and each node's revision and digest.
    pub(super) fn end(
        &mut self,
        at_ns: u64,
        revision: u64,
        keys: &[Key<'_>],
        nodes: &[(u64, u64)],
    ) {
        let keys = keys.iter().map(|(key, holders, waiters)| FinalKey {
            key: (*key).into(),
            holders: holders.to_vec(),
            waiters: waiters.to_vec(),
        });
        let nodes = (1..).zip(nodes).map(|(node, &(revision, digest))| FinalNode {
            node,
            revision,
            digest,
        });
        self.records.push(Record::Final(FinalState {
            invoke_ns: at_ns,
            return_ns: at_ns,
            shard: 0,
            revision,
            keys: keys.collect(),
            nodes: nodes.collect(),
            leaders: vec![1],
        }));
    }
}
