//! One Raft group on this node: what the shard above it uses.
//!
//! Owns the engine and the task that starts extra rounds. Decides nothing about locks or leases.
//! A leadership counts here only once its first entry is applied: before that the state may lack
//! what earlier leaders committed.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;
use leasehold_core::State;
use leasehold_protocol::ids::{NodeId, ShardId};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::peer;
use leasehold_protocol::reply::Role;
use openraft::async_runtime::{Select2, WatchReceiver};
use openraft::errors::{ClientWriteError, Fatal, ForwardReason, InitializeError, RaftError};
use openraft::impls::OneshotResponder;
use openraft::{AsyncRuntime, Raft, ServerState};

use super::compact::{Compactor, Cuts};
use super::machine::{ApplySink, Machine, Progress};
use super::network::Network;
use super::peers::{Class, Peers, RaftService};
use super::rounds::{Ended, Rounds};
use super::signal::Signal;
use super::snapshot::{Loaded, Owner, Receiving, Snapshots};
use super::spec::{GroupSpec, SpecError, Timings};
use super::storage::{Log, LogDamaged};
use super::types::{EntryData, EntryPrint, Leadership, LogId, Member, RaftTypes, Vote};
use crate::env::Env;
use crate::wal::{Recovered, WalFailed, WalShard};

/// Longest batch that is proposed, in bytes. A WAL takes it if its segments have 1 MiB or more.
pub const BATCH_LEN_MAX: usize = 128 * 1024;

/// Why a group was not opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// Contradictory settings.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// What the WAL kept is not understood.
    #[error(transparent)]
    Log(#[from] LogDamaged),
    /// The snapshots do not reach to the beginning of the log.
    #[error(
        "shard {shard}: the log begins after index {log_begins}, and the newest sound snapshot \
         covers {covered}: a snapshot is damaged or missing; wipe this node's data directory and \
         admit it anew"
    )]
    SnapshotMissing {
        /// The shard.
        shard: ShardId,
        /// What is missing from the log.
        log_begins: u64,
        /// What the snapshots cover; 0 if there is none.
        covered: u64,
    },
    /// The disk.
    #[error("the snapshots: {0}")]
    Disk(#[from] io::Error),
    /// The WAL.
    #[error(transparent)]
    Wal(#[from] WalFailed),
    /// The engine.
    #[error("the engine: {0}")]
    Engine(String),
}

/// Why a batch was not, or may not have been, applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProposeError {
    /// Not appended: the leadership is over or about to be handed over.
    #[error("this node does not lead any more")]
    NotLeader {
        /// Who leads, as far as is known.
        hint: Option<NodeId>,
    },
    /// Not appended: no quorum answered for too long.
    #[error("no quorum answers")]
    NoQuorum,
    /// Not appended: longer than `BATCH_LEN_MAX`.
    #[error("the batch is too long")]
    TooLong,
    /// Appended, and then replaced by another leader's entries, or the engine stopped: the batch
    /// may have been applied, here or elsewhere.
    #[error("whether it was applied is not known")]
    Unknown,
}

/// Why a leadership was not confirmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfirmError {
    /// It is over.
    #[error("this node does not lead any more")]
    NotLeader,
}

/// Why a group was not initialised.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InitError {
    /// This node is not among the members.
    #[error("this node is not among the members")]
    NotMember,
    /// The engine stopped.
    #[error("the engine: {0}")]
    Engine(String),
}

/// Why leadership was not moved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// This node does not lead.
    #[error("this node does not lead")]
    NotLeader {
        /// Who leads, as far as is known.
        hint: Option<NodeId>,
    },
    /// The target is no other voter, or there is none.
    #[error("there is no such other voter")]
    NoSuchVoter,
    /// The target does not answer.
    #[error("node {0} does not answer")]
    Unreachable(NodeId),
    /// Nobody took it in time. Leadership may still move.
    #[error("nobody took the leadership in time")]
    TimedOut,
    /// The engine stopped.
    #[error("the engine stopped")]
    Stopped,
}

/// Why a group stopped by itself. Its node must exit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GroupFailed {
    /// The disk, under a snapshot or under the log.
    #[error("the storage failed: {0}")]
    Storage(String),
    /// A committed entry is not understood: a restart of this version meets it again.
    #[error("{0}")]
    NotUnderstood(String),
    /// Anything else.
    #[error("the engine stopped: {0}")]
    Engine(String),
}

/// What a group looks like from here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupStatus {
    /// This node's part.
    pub role: Role,
    /// The Raft term.
    pub term: u64,
    /// Who leads, as far as is known.
    pub leader: Option<NodeId>,
    /// Last entry of the log; 0 if there is none.
    pub last_index: u64,
    /// Last entry applied; 0 if there is none.
    pub applied_index: u64,
    /// Last entry that the newest snapshot covers; 0 if there is none.
    pub snapshot_index: u64,
    /// Last entry that was cut from the log; 0 if there is none.
    pub purged_index: u64,
}

pub(super) type Engine<E> = Raft<RaftTypes<E>, Machine<E>>;

/// One shard's group. See the module.
pub struct Group<E: Env> {
    pub(super) spec: GroupSpec,
    pub(super) raft: Engine<E>,
    pub(super) log: Log<E>,
    pub(super) rounds: Rc<Rounds>,
    pub(super) peers: Rc<Peers<E>>,
    pub(super) snapshots: Rc<Snapshots<E>>,
    /// The snapshot that is on its way here, and the vote of the leader that sends it.
    pub(super) receiving: RefCell<Option<(Vote, Receiving<E>)>>,
    progress: Rc<Progress>,
    compactor: Rc<Compactor<E>>,
    /// Why the group stopped by itself, if the engine does not know.
    broken: RefCell<Option<GroupFailed>>,
    stopped: Rc<Signal>,
}

impl<E: Env> Group<E> {
    /// Opens the group on what `recovered` and the snapshots on `disk` hold, and starts it.
    ///
    /// `state` is replaced by the newest sound snapshot's, and everything known to be committed is
    /// applied to it, before this returns. It must not be borrowed across an await.
    pub async fn open(
        spec: GroupSpec,
        wal: WalShard<E>,
        recovered: Recovered,
        disk: E::Disk,
        peers: Rc<Peers<E>>,
        state: Rc<RefCell<State>>,
        sink: Rc<dyn ApplySink>,
    ) -> Result<Rc<Self>, GroupError> {
        let config = Arc::new(spec.config()?);
        let log = {
            let book = peers.clone();
            let learn = Box::new(move |membership: &_| book.learn(membership));
            let rounds = |vote: Option<&_>| Rounds::new(spec.node, vote);
            Log::open(wal.clone(), recovered, rounds, learn)?
        };
        let owner = Owner { cluster: spec.cluster, shard: spec.shard };
        let (snapshots, loaded) = Snapshots::open(disk, wal, owner).await?;
        connect(&spec, &log, loaded.as_ref())?;
        let rounds = log.rounds().clone();
        let progress = Progress::new(spec.snapshot_bytes);
        let cuts = Rc::new(Cuts::default());
        let network = Network {
            shard: spec.shard,
            peers: peers.clone(),
            rounds: rounds.clone(),
            cuts: cuts.clone(),
        };
        let machine =
            Machine::new(state, sink, snapshots.clone(), log.clone(), progress.clone(), loaded);
        let raft = Raft::new(spec.node.0, config, network, log.clone(), machine)
            .await
            .map_err(|error| GroupError::Engine(error.to_string()))?;
        let compactor =
            Compactor::new(raft.clone(), snapshots.clone(), log.clone(), cuts, spec.log_keep);
        let (stopped, receiving, broken) = (Rc::default(), RefCell::default(), RefCell::default());
        let group = Rc::new(Self {
            spec,
            raft,
            log,
            rounds,
            peers,
            snapshots,
            receiving,
            progress,
            compactor,
            broken,
            stopped,
        });
        let service: Rc<dyn RaftService> = group.clone();
        group.peers.register(group.spec.shard, Rc::downgrade(&service));
        group.start_rounds();
        group.start_snapshots();
        Ok(group)
    }

    /// The pace.
    pub fn timings(&self) -> Timings {
        self.spec.timings
    }

    /// Forms the group; false if that was done before. On one node only, or with the very same
    /// members on each.
    pub async fn initialize(&self, members: BTreeMap<u64, Member>) -> Result<bool, InitError> {
        match self.raft.initialize(members).await {
            Ok(()) => Ok(true),
            Err(RaftError::APIError(InitializeError::NotAllowed(_))) => Ok(false),
            Err(RaftError::APIError(InitializeError::NotInMembers(_))) => Err(InitError::NotMember),
            Err(RaftError::Fatal(error)) => Err(InitError::Engine(error.to_string())),
        }
    }

    /// This node's leadership, if it leads and applied that leadership's first entry.
    pub fn leadership(&self) -> Option<Leadership> {
        self.rounds.leadership().filter(|_| self.raft.is_leader())
    }

    /// Resolves at the next change of `leadership` or `leader_hint` after this call, and sometimes
    /// without one.
    pub fn leadership_changed(&self) -> impl Future<Output = ()> + 'static {
        let rounds = self.rounds.clone();
        let version = rounds.changed().version();
        let mut metrics = self.raft.server_metrics();
        metrics.borrow_and_update();
        async move {
            let changed = rounds.changed().since(version);
            let engine = async {
                if metrics.changed().await.is_err() {
                    // The engine stopped: this group's leadership will not change any more.
                    std::future::pending::<()>().await;
                }
            };
            E::Rt::select2(changed, engine).await;
        }
    }

    /// Who leads, as far as is known; may be this node before `leadership` says so.
    pub fn leader_hint(&self) -> Option<NodeId> {
        self.raft.metrics().borrow_watched().current_leader.map(NodeId)
    }

    /// Appends a batch under this very leadership and waits for its outcomes, one a command.
    ///
    /// Batches enter the log in the order in which these futures are first polled. Several may be
    /// under way; the caller bounds how many, and how long it waits.
    pub async fn propose(
        &self,
        leadership: Leadership,
        batch: EntryData,
    ) -> Result<Vec<Outcome>, ProposeError> {
        if batch.bytes().len() > BATCH_LEN_MAX {
            return Err(ProposeError::TooLong);
        }
        if self.leadership() != Some(leadership) {
            return Err(ProposeError::NotLeader { hint: self.leader_hint() });
        }
        let (responder, outcome) = OneshotResponder::new_pair();
        let write = self.raft.write(batch).with_leader(leadership.leader_id()).responder(responder);
        write.await.map_err(|_| ProposeError::Unknown)?;
        match outcome.await {
            Ok(Ok(written)) => Ok(written.data.0),
            Ok(Err(ClientWriteError::ForwardToLeader(forward))) => Err(match forward.reason {
                ForwardReason::LeaseExpired => ProposeError::NoQuorum,
                _ => ProposeError::NotLeader { hint: forward.leader_id.map(NodeId) },
            }),
            Ok(Err(_)) | Err(_) => Err(ProposeError::Unknown),
        }
    }

    /// Waits for a confirmed round that began after this call (DESIGN §5): at a moment after the
    /// call, no other leader had been elected; and whatever any node told a client before the call
    /// is applied here. One round serves all who wait; the caller bounds how long it waits, and
    /// acts on the answer before it awaits anything else.
    pub async fn confirm(&self, leadership: Leadership) -> Result<(), ConfirmError> {
        if self.leadership() != Some(leadership) {
            return Err(ConfirmError::NotLeader);
        }
        #[cfg(planted)]
        if leasehold_protocol::planted!("confirmed-by-the-engine") {
            return self.confirmed_by_the_engine(leadership).await;
        }
        self.rounds.confirm(leadership).await.map_err(|Ended| ConfirmError::NotLeader)
    }

    /// Planted (G1, G7): the engine's own read index, whose stamp a late answer to an earlier request
    /// moves.
    #[cfg(planted)]
    async fn confirmed_by_the_engine(&self, leadership: Leadership) -> Result<(), ConfirmError> {
        use openraft::ReadPolicy;
        use openraft::errors::LinearizableReadError::QuorumNotEnough;
        while self.leadership() == Some(leadership) {
            match self.raft.ensure_linearizable(ReadPolicy::ReadIndex).await {
                Ok(_) => return Ok(()),
                // It waits for a lease's length; our callers, for as long as they please.
                Err(RaftError::APIError(QuorumNotEnough(_))) => {}
                Err(_) => break,
            }
        }
        Err(ConfirmError::NotLeader)
    }

    /// The effective membership's nodes; voters and learners.
    pub fn members(&self) -> BTreeMap<NodeId, Member> {
        let stored = self.log.membership();
        let nodes = stored.membership().nodes();
        nodes.map(|(node, member)| (NodeId(*node), member.clone())).collect()
    }

    /// The entries that this node keeps, in order, for checks that compare nodes. Reads them all.
    pub fn log_prints(&self) -> Vec<EntryPrint> {
        self.log.prints()
    }

    /// What the group looks like from here.
    pub fn status(&self) -> GroupStatus {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let index = |id: Option<LogId>| id.map_or(0, |id| id.index);
        let member = self.log.membership().membership().get_node(&self.spec.node.0).is_some();
        let role = match metrics.state {
            ServerState::Leader => Role::Leader,
            ServerState::Follower => Role::Follower,
            ServerState::Candidate => Role::Candidate,
            ServerState::Learner if member => Role::Learner,
            ServerState::Learner | ServerState::Shutdown => Role::Outside,
        };
        GroupStatus {
            role,
            term: metrics.current_term,
            leader: metrics.current_leader.map(NodeId),
            last_index: metrics.last_log_index.unwrap_or(0),
            applied_index: index(metrics.last_applied),
            snapshot_index: index(metrics.snapshot),
            purged_index: index(metrics.purged),
        }
    }

    /// Moves leadership to `to`, or to the voter that is furthest among those that answer, and
    /// waits until somebody else leads. Writes are refused meanwhile.
    pub async fn transfer(&self, to: Option<NodeId>) -> Result<NodeId, TransferError> {
        if !self.raft.is_leader() {
            return Err(TransferError::NotLeader { hint: self.leader_hint() });
        }
        let patience = 2 * self.spec.timings.election_max;
        let to = self.first_that_answers(self.transfer_targets(to)?, patience).await?;
        let moved = self.raft.trigger().transfer_leader(to.0).await;
        moved.map_err(|_| TransferError::Stopped)?;
        let other = async {
            loop {
                let changed = self.leadership_changed();
                if let Some(leader) = self.leader_hint().filter(|leader| *leader != self.spec.node)
                {
                    return leader;
                }
                changed.await;
            }
        };
        let waited = E::Rt::timeout(2 * patience + Duration::from_millis(200), other).await;
        waited.map_err(|_| TransferError::TimedOut)
    }

    /// The first of `targets` that answers. All are asked at once: one that is down costs its
    /// patience, not the others' too. Without this it would cost a whole election, because the
    /// present leader stops before the target begins.
    async fn first_that_answers(
        &self,
        targets: Vec<NodeId>,
        patience: Duration,
    ) -> Result<NodeId, TransferError> {
        let ask = |target: NodeId| async move {
            let asked = self.peers.call(target, Class::Heartbeat, peer::PING, &[], patience).await;
            asked.is_ok().then_some(target)
        };
        let mut asked: FuturesOrdered<_> = targets.iter().map(|target| ask(*target)).collect();
        while let Some(answered) = asked.next().await {
            if let Some(target) = answered {
                return Ok(target);
            }
        }
        let furthest = targets.first().ok_or(TransferError::NoSuchVoter)?;
        Err(TransferError::Unreachable(*furthest))
    }

    /// `to` alone, or all other voters, the furthest first; never none.
    fn transfer_targets(&self, to: Option<NodeId>) -> Result<Vec<NodeId>, TransferError> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let membership = metrics.membership_config.membership();
        let voters = membership.voter_ids().filter(|voter| *voter != self.spec.node.0);
        let matched = |voter: &u64| {
            let replication = metrics.replication.as_ref();
            replication.and_then(|matched| matched.get(voter).copied().flatten())
        };
        let wanted = |voter: &u64| to.is_none_or(|to| to.0 == *voter);
        let mut targets: Vec<u64> = voters.filter(wanted).collect();
        targets.sort_by_key(|voter| Reverse(matched(voter)));
        if targets.is_empty() {
            return Err(TransferError::NoSuchVoter);
        }
        Ok(targets.into_iter().map(NodeId).collect())
    }

    /// Takes a snapshot now and cuts the log, so that neither the WAL nor memory keeps more than
    /// is needed. What stays connects to the snapshot before this one.
    pub async fn trigger_snapshot(&self) {
        // A stopped engine says so through `failed`.
        let _stopped = self.compactor.run().await;
    }

    /// Resolves, with the reason, when the group stopped: the node must exit. After `shutdown` it
    /// resolves too.
    pub async fn failed(&self) -> GroupFailed {
        // Of the engine's channels the one that changes with elections only: all close at its end.
        let mut end = self.raft.server_metrics();
        while end.changed().await.is_ok() {}
        if let Some(failed) = self.broken.borrow().clone() {
            return failed;
        }
        if let Some(reason) = self.progress.not_understood() {
            return GroupFailed::NotUnderstood(reason);
        }
        match &self.raft.metrics().borrow_watched().running_state {
            Err(Fatal::StorageError(error)) => GroupFailed::Storage(error.to_string()),
            Err(fatal) => GroupFailed::Engine(fatal.to_string()),
            Ok(()) => GroupFailed::Engine("it is gone".to_owned()),
        }
    }

    /// The disk failed under a snapshot: the group stops at once and for good.
    pub(super) async fn disk_failed(&self, error: &io::Error) {
        self.rounds.fail();
        let failed = GroupFailed::Storage(format!("a snapshot: {error}"));
        self.broken.borrow_mut().get_or_insert(failed);
        self.shutdown().await;
    }

    /// Stops the group. Its proposals end as `Unknown`.
    pub async fn shutdown(&self) {
        self.peers.unregister(self.spec.shard);
        self.stopped.raise();
        if let Err(error) = self.raft.shutdown().await {
            tracing::warn!(shard = self.spec.shard.0, "the engine did not stop well: {error}");
        }
    }

    /// The task that starts an extra round when somebody waits for one: one at a time.
    fn start_rounds(&self) {
        let (raft, rounds, stopped) =
            (self.raft.clone(), self.rounds.clone(), self.stopped.clone());
        let heartbeat = self.spec.timings.heartbeat;
        let work = async move {
            loop {
                let number = rounds.wanted().await;
                if raft.trigger().heartbeat().await.is_err() {
                    return;
                }
                // Where it does not come back, the engine's own heartbeats go on.
                E::Rt::select2(rounds.settled(number), E::Rt::sleep(heartbeat)).await;
            }
        };
        drop(E::Rt::spawn(until_stopped::<E>(stopped, work)));
    }

    /// The tasks that take a snapshot when many bytes were applied, and that cut the log after each.
    fn start_snapshots(&self) {
        let (compactor, progress) = (self.compactor.clone(), self.progress.clone());
        let work = async move {
            loop {
                let version = progress.snapshot_due.version();
                progress.snapshot_due.since(version).await;
                if compactor.run().await.is_err() {
                    return;
                }
            }
        };
        drop(E::Rt::spawn(until_stopped::<E>(self.stopped.clone(), work)));
        let compactor = self.compactor.clone();
        let cutting = async move {
            // A stopped engine says so through `failed`.
            let _stopped = compactor.follow().await;
        };
        drop(E::Rt::spawn(until_stopped::<E>(self.stopped.clone(), cutting)));
    }
}

async fn until_stopped<E: Env>(stopped: Rc<Signal>, work: impl Future<Output = ()>) {
    match E::Rt::select2(stopped.since(0), work).await {
        Select2::First(()) | Select2::Second(()) => {}
    }
}

/// Fits the log to the newest sound snapshot, or says that they do not meet.
fn connect<E: Env>(
    spec: &GroupSpec,
    log: &Log<E>,
    loaded: Option<&Loaded>,
) -> Result<(), GroupError> {
    let covered = loaded.and_then(|loaded| loaded.meta.last_log_id);
    if let Some(covered) = covered {
        log.reconcile(covered)?;
    }
    if log.purged() > covered {
        let index = |id: Option<LogId>| id.map_or(0, |id| id.index);
        let (log_begins, covered) = (index(log.purged()), index(covered));
        return Err(GroupError::SnapshotMissing { shard: spec.shard, log_begins, covered });
    }
    Ok(())
}
