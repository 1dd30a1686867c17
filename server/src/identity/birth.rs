//! How fresh data directories become one cluster: a pure machine (DESIGN §7).
//!
//! 1. Every fresh node asks all others who they are and what they have promised.
//! 2. When *all* of them are fresh and are configured alike, the lowest node mints a record
//!    (cluster id, every disk id, token base), promises itself to it durably, and proposes it.
//! 3. A fresh node that is named in a record with its own disk id promises itself to it, durably,
//!    whether it was proposed to it or found at another node; then it may run its shards.
//! 4. When *all* have promised, the lowest node notes that, durably; only then may it initialise
//!    shards. So even two machines that both believe to be the lowest node cannot found two
//!    clusters: every other node promises itself once, ever.
//!
//! Invariants: a promise is never replaced by another record; only the lowest node mints, and only
//! while it has promised nothing; a node whose disk id is not the recorded one never promises, so
//! a wiped node stays out until it is admitted. Each step may be the last before a crash: a
//! restarted node goes on from its stored promise.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use leasehold_protocol::birth::{
    BirthAnswer, BirthMember, BirthPropose, BirthRecord, BirthReply, JoinAnswer, KIND_PROPOSE,
    KIND_QUERY, Plan,
};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, NodeId};
use rkyv::rancor;

use super::file::FileError;
use super::restore::RestorePlan;
use super::told::Told;
use crate::error::Exit;

/// What a node has durably bound itself to.
#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Promise {
    /// The record.
    pub record: BirthRecord,
    /// The node may run its shards. False only at the lowest node, until all have promised.
    pub founded: bool,
    /// The node did not found the cluster but was admitted later: it initialises nothing.
    pub joined: bool,
}

/// Where a promise is kept.
pub trait BirthStore {
    /// Replaces the stored promise, durably on return. After an error the node must stop.
    fn save(&mut self, promise: &Promise) -> Result<(), FileError>;
}

/// What the lowest node needs to mint a record.
#[derive(Clone, Copy, Debug)]
pub struct Mint {
    /// A random cluster id.
    pub cluster: ClusterId,
    /// The wall clock, in Unix milliseconds.
    pub wall_ms: u64,
    /// The build's date, in Unix milliseconds.
    pub earliest_ms: u64,
    /// See the configuration key; 0 for none.
    pub token_floor: u64,
    /// What `leaseholdd restore` or `recover` left for this birth.
    pub restore: Option<RestorePlan>,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Ask these nodes and bring their answers (`answered`).
    Ask(Vec<NodeId>),
    /// Propose the record to these nodes and bring their replies (`replied`).
    Propose(BirthPropose, Vec<NodeId>),
    /// The cluster is founded as far as this node is concerned: it may run its shards.
    Done,
}

/// Why a node cannot take part in its cluster.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BirthError {
    /// The cluster was born otherwise than it is configured now.
    #[error("the cluster was born with {what} {stored}, but {what} {configured} is configured")]
    OtherPlan {
        /// What differs.
        what: &'static str,
        /// As it was born.
        stored: String,
        /// As it is configured.
        configured: String,
    },
    /// The stored promise does not name this data directory.
    #[error("the birth record does not name node {0} with this data directory")]
    NotMember(NodeId),
    /// Another node has a record that only this directory can have minted.
    #[error("node {0} has a birth record with this data directory, which has lost it")]
    RecordLost(NodeId),
    /// A directory that holds what a birth takes over, at a node that does not make the birth.
    #[error(
        "the data directory was restored for the lowest node of its cluster, which node {0} is not"
    )]
    NotLowest(NodeId),
    /// The clock is behind the build's date.
    #[error(
        "the wall clock ({wall_ms} ms since 1970) is behind this build's date ({earliest_ms} ms); \
         tokens would start too low: set the clock, or give token-floor"
    )]
    Clock {
        /// The clock, in Unix milliseconds.
        wall_ms: u64,
        /// The build's date, in Unix milliseconds.
        earliest_ms: u64,
    },
    /// A member of the cluster refuses this node for good.
    #[error("node {by} refuses this node: {}", code.text())]
    NotAdmitted {
        /// Who.
        by: NodeId,
        /// Why.
        code: ErrorCode,
    },
    /// The clock is behind the old cluster's.
    #[error(
        "the wall clock ({wall_ms} ms since 1970) is behind that of the cluster that is restored \
         ({old_ms} ms); tokens could start too low: set the clock"
    )]
    ClockBehindOld {
        /// The clock, in Unix milliseconds.
        wall_ms: u64,
        /// The old cluster's, in Unix milliseconds.
        old_ms: u64,
    },
    /// The promise could not be kept.
    #[error(transparent)]
    Store(#[from] FileError),
}

impl BirthError {
    /// The code to exit with.
    pub fn exit(&self) -> Exit {
        match self {
            Self::OtherPlan { .. }
            | Self::NotMember(_)
            | Self::NotLowest(_)
            | Self::NotAdmitted { .. } => Exit::DataDirForeign,
            Self::RecordLost(_) => Exit::DataDirUnusable,
            Self::Clock { .. } | Self::ClockBehindOld { .. } => Exit::Clock,
            Self::Store(_) => Exit::StorageFailed,
        }
    }
}

/// The machine. Its verbs are pure; where one returns a promise, the caller saves it and then
/// calls `saved`, before anything else happens.
#[derive(Debug)]
pub struct Birth {
    me: BirthMember,
    plan: Plan,
    promise: Option<Promise>,
    /// Nodes that have promised themselves to this node's own record, in this process's life.
    promised: BTreeSet<NodeId>,
    admission: bool,
    told: VecDeque<Told>,
    told_last: BTreeMap<NodeId, Told>,
}

impl Birth {
    /// Begins, or goes on from a stored promise. Refuses a configuration that the cluster was not
    /// born with.
    pub fn new(me: BirthMember, plan: Plan, stored: Option<Promise>) -> Result<Self, BirthError> {
        assert!(plan.nodes.contains(&me.node), "a checked configuration lists its own node");
        assert!(plan.nodes.is_sorted(), "plans are compared as sorted lists");
        if let Some(Promise { record, founded, .. }) = &stored {
            let mut planned = record.plan();
            // Members come and go later; until then the list is what all must agree on.
            if *founded {
                planned.nodes.clone_from(&plan.nodes);
            }
            if let Some((what, stored, configured)) = difference(&planned, &plan) {
                return Err(BirthError::OtherPlan { what, stored, configured });
            }
            if record.member(me.node).is_none_or(|member| member.disk != me.disk) {
                return Err(BirthError::NotMember(me.node));
            }
        }
        Ok(Self {
            me,
            plan,
            promise: stored,
            promised: BTreeSet::new(),
            admission: false,
            told: VecDeque::new(),
            told_last: BTreeMap::new(),
        })
    }

    /// What to do next.
    pub fn step(&self) -> Step {
        match &self.promise {
            None => Step::Ask(self.others().collect()),
            Some(Promise { founded: true, .. }) => Step::Done,
            Some(Promise { record, .. }) => {
                Step::Propose(BirthPropose { record: record.clone() }, self.unpromised())
            }
        }
    }

    /// The record, once the node may run its shards.
    pub fn record(&self) -> Option<&BirthRecord> {
        self.promise.as_ref().filter(|promise| promise.founded).map(|promise| &promise.record)
    }

    /// A cluster exists that has no place for this directory.
    pub fn waits_for_admission(&self) -> bool {
        self.admission
    }

    /// True if this node initialises the shards of its cluster.
    pub fn initialises(&self) -> bool {
        match &self.promise {
            Some(promise) => {
                let first = promise.record.members.first();
                !promise.joined && first.map(|member| member.node) == Some(self.me.node)
            }
            None => self.plan.nodes.first() == Some(&self.me.node),
        }
    }

    /// This node, as it stands in records.
    pub fn me(&self) -> &BirthMember {
        &self.me
    }

    /// Takes the answer of a member of the cluster that this node wants to join: what to save, if
    /// it was admitted.
    pub fn joined(
        &mut self,
        by: NodeId,
        answer: &JoinAnswer,
    ) -> Result<Option<Promise>, BirthError> {
        if self.promise.is_some() {
            return Ok(None);
        }
        self.admission = true;
        let record = match answer {
            JoinAnswer::Unknown => return Ok(None),
            JoinAnswer::Refused(code) => {
                return Err(BirthError::NotAdmitted { by, code: *code });
            }
            JoinAnswer::Admitted(record) => record,
        };
        let mine = record.member(self.me.node).is_some_and(|member| member.disk == self.me.disk);
        if !record.is_well_formed() || !mine {
            return Ok(None);
        }
        let mut planned = record.plan();
        planned.nodes.clone_from(&self.plan.nodes);
        if let Some((what, theirs, ours)) = difference(&planned, &self.plan) {
            self.tell(by, Told::Differs { peer: by, what, theirs, ours });
            return Ok(None);
        }
        Ok(Some(Promise { record: record.clone(), founded: true, joined: true }))
    }

    /// Something to log.
    pub fn poll_told(&mut self) -> Option<Told> {
        self.told.pop_front()
    }

    /// The answer to a query.
    pub fn answer(&self) -> BirthAnswer {
        BirthAnswer {
            member: self.me.clone(),
            plan: self.plan.clone(),
            promised: self.promise.as_ref().map(|promise| promise.record.clone()),
        }
    }

    /// Takes the answers of one round. Nodes that did not answer are absent.
    pub fn answered(
        &mut self,
        answers: &BTreeMap<NodeId, BirthAnswer>,
        mint: impl FnOnce() -> Mint,
    ) -> Result<Option<Promise>, BirthError> {
        if self.promise.is_some() {
            return Ok(None);
        }
        self.admission = false;
        let mut founders = vec![self.me.clone()];
        for (node, answer) in answers {
            if let Some(adopted) = self.judge(*node, answer, &mut founders)? {
                return Ok(Some(Promise { record: adopted, founded: true, joined: false }));
            }
        }
        let others = self.others();
        let missing: Vec<_> = others.filter(|node| !answers.contains_key(node)).collect();
        let complete = founders.len() == self.plan.nodes.len();
        self.tell_waiting(missing);
        if !complete || !self.initialises() || self.same_disk(&founders) {
            return Ok(None);
        }
        founders.sort_by_key(|member| member.node);
        let record = self.mint(founders, &mint())?;
        // A node alone has nobody to wait for.
        let founded = record.members.len() == 1;
        Ok(Some(Promise { record, founded, joined: false }))
    }

    /// Takes a proposal: a promise to save before `Promised` is replied, or the reply.
    pub fn proposed(&self, record: &BirthRecord) -> Result<Promise, BirthReply> {
        if let Some(promise) = &self.promise {
            let same = promise.record == *record;
            return Err(if same { BirthReply::Promised } else { BirthReply::OtherRecord });
        }
        if !record.is_well_formed() {
            return Err(BirthReply::Malformed);
        }
        if record.plan() != self.plan {
            return Err(BirthReply::OtherPlan);
        }
        // Only the lowest node mints: what it has not minted is not its own.
        if self.initialises() || record.member(self.me.node).is_none_or(|m| m.disk != self.me.disk)
        {
            return Err(BirthReply::OtherDisk);
        }
        Ok(Promise { record: record.clone(), founded: true, joined: false })
    }

    /// Takes the reply to a proposal. The last promise makes the founding, to be saved.
    pub fn replied(&mut self, peer: NodeId, reply: BirthReply) -> Option<Promise> {
        let record = match &self.promise {
            Some(Promise { founded: false, record, .. }) => record.clone(),
            _ => return None,
        };
        if reply == BirthReply::Promised {
            self.promised.insert(peer);
        } else {
            self.tell(peer, Told::Refused { peer, reply });
        }
        let missing = self.unpromised();
        let founded = missing.is_empty();
        self.tell_waiting(missing);
        founded.then_some(Promise { record, founded, joined: false })
    }

    /// A promise was saved.
    pub fn saved(&mut self, promise: Promise) {
        if let Some(old) = &self.promise {
            assert!(old.record == promise.record, "a promise is never replaced");
            assert!(promise.founded >= old.founded, "a founding is never taken back");
        }
        self.admission = false;
        self.promise = Some(promise);
    }

    /// Serves a peer's message of this kind: the body of the reply. A promise is saved first.
    pub fn serve(
        &mut self,
        kind: u8,
        body: &[u8],
        store: &mut impl BirthStore,
    ) -> Result<Result<Vec<u8>, ErrorCode>, BirthError> {
        if kind == KIND_QUERY {
            return Ok(Ok(pack(&self.answer())));
        }
        if kind != KIND_PROPOSE {
            return Ok(Err(ErrorCode::UNKNOWN_KIND));
        }
        let Ok(proposal) = rkyv::from_bytes::<BirthPropose, rancor::Error>(body) else {
            return Ok(Err(ErrorCode::MALFORMED));
        };
        let reply = match self.proposed(&proposal.record) {
            Ok(promise) => {
                store.save(&promise)?;
                self.saved(promise);
                BirthReply::Promised
            }
            Err(reply) => reply,
        };
        Ok(Ok(pack(&reply)))
    }

    /// One node's answer: a record to adopt, or a founder, or something to tell.
    fn judge(
        &mut self,
        peer: NodeId,
        answer: &BirthAnswer,
        founders: &mut Vec<BirthMember>,
    ) -> Result<Option<BirthRecord>, BirthError> {
        let found = answer.member.node;
        if found != peer {
            self.tell(peer, Told::WrongNode { asked: peer, found });
            return Ok(None);
        }
        let promised = answer.promised.as_ref().filter(|record| record.is_well_formed());
        let theirs = promised.map_or_else(|| answer.plan.clone(), BirthRecord::plan);
        if let Some((what, theirs, ours)) = difference(&theirs, &self.plan) {
            self.tell(peer, Told::Differs { peer, what, theirs, ours });
            return Ok(None);
        }
        let Some(record) = promised else {
            founders.push(answer.member.clone());
            return Ok(None);
        };
        let known = record.member(self.me.node).map(|member| member.disk);
        if known == Some(self.me.disk) {
            let lost = self.initialises();
            return if lost { Err(BirthError::RecordLost(peer)) } else { Ok(Some(record.clone())) };
        }
        self.admission = true;
        let (cluster, own) = (record.cluster, self.me.disk);
        self.tell(peer, Told::WaitsForAdmission { by: peer, cluster, known, own });
        Ok(None)
    }

    fn mint(&self, members: Vec<BirthMember>, mint: &Mint) -> Result<BirthRecord, BirthError> {
        let Mint { cluster, wall_ms, earliest_ms, token_floor, restore } = *mint;
        if let Some(old_ms) = restore.map(|plan| plan.old_wall_ms).filter(|old| wall_ms < *old) {
            return Err(BirthError::ClockBehindOld { wall_ms, old_ms });
        }
        if wall_ms < earliest_ms && token_floor == 0 {
            return Err(BirthError::Clock { wall_ms, earliest_ms });
        }
        let Plan { name, shards, key_hash, .. } = self.plan.clone();
        // Years ahead of any clock, and still within a signed 64-bit column.
        let from_clock = wall_ms.min(1 << 52) << 10;
        let old_floor = restore.map_or(0, |plan| plan.token_floor);
        let token_base = from_clock.max(token_floor).max(old_floor);
        let restored = restore.map(|plan| plan.restored);
        let record = BirthRecord { cluster, name, members, shards, key_hash, token_base, restored };
        assert!(record.is_well_formed(), "minted from a checked configuration");
        Ok(record)
    }

    fn others(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.plan.nodes.iter().copied().filter(|node| *node != self.me.node)
    }

    fn unpromised(&self) -> Vec<NodeId> {
        self.others().filter(|node| !self.promised.contains(node)).collect()
    }

    fn same_disk(&mut self, founders: &[BirthMember]) -> bool {
        for (index, member) in founders.iter().enumerate() {
            let twin = founders[..index].iter().find(|other| other.disk == member.disk);
            if let Some(twin) = twin {
                let (peer, other) = (member.node, twin.node);
                self.tell(peer, Told::SameDisk { peer, other });
                return true;
            }
        }
        false
    }

    fn tell_waiting(&mut self, missing: Vec<NodeId>) {
        // Kept under this node's own number, which no peer has.
        let me = self.me.node;
        if missing.is_empty() {
            self.told_last.remove(&me);
        } else {
            self.tell(me, Told::WaitsFor(missing));
        }
    }

    fn tell(&mut self, about: NodeId, told: Told) {
        if self.told_last.get(&about) != Some(&told) {
            self.told_last.insert(about, told.clone());
            self.told.push_back(told);
        }
    }
}

/// The first difference between two plans: what, in the first, in the second.
fn difference(a: &Plan, b: &Plan) -> Option<(&'static str, String, String)> {
    let nodes = |plan: &Plan| {
        let nodes: Vec<_> = plan.nodes.iter().map(ToString::to_string).collect();
        nodes.join(",")
    };
    [
        ("the cluster name", a.name.clone(), b.name.clone()),
        ("the nodes", nodes(a), nodes(b)),
        ("a shard count of", a.shards.to_string(), b.shards.to_string()),
        ("key hash", a.key_hash.to_string(), b.key_hash.to_string()),
    ]
    .into_iter()
    .find(|(_, a, b)| a != b)
}

pub(super) fn pack<T>(value: &T) -> Vec<u8>
where
    T: for<'a> rkyv::Serialize<
            rkyv::api::high::HighSerializer<
                rkyv::util::AlignedVec,
                rkyv::ser::allocator::ArenaHandle<'a>,
                rancor::Error,
            >,
        >,
{
    rkyv::to_bytes::<rancor::Error>(value).expect("birth messages are plain data").to_vec()
}

#[cfg(test)]
mod tests;
