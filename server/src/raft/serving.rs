//! What a group answers to its peers.
//!
//! Everything that comes in is checked before the engine sees it, because the engine trusts its
//! peers and panics where they contradict the protocol: the sender must be the very node, with the
//! very data directory, that the message speaks for; entries must be consecutive and not newer than
//! their leader; nothing may be near the end of a number's range.

use std::rc::Rc;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use leasehold_protocol::codec::{self, Body};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::peer::{
    AppendAnswer, AppendRequest, Ballot, LogEntry, Position, SnapshotAnswer, SnapshotBegin,
    SnapshotChunk, SnapshotEnd, TransferAnswer, TransferRequest, VoteAnswer, VoteRequest,
};
use openraft::async_runtime::WatchReceiver;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, TransferLeaderError, TransferLeaderRequest,
    VoteResponse,
};

use super::convert;
use super::group::Group;
use super::message::RaftMessage;
use super::peers::{PeerInfo, RaftService};
use super::snapshot::{Built, LoadError, Receiving, SnapshotFile};
use super::types::{Entry, LogId, RaftTypes};
use crate::env::Env;

/// Terms and indexes above this are nonsense: nobody counts that far.
const NUMBER_MAX: u64 = u64::MAX / 4;

type Answer<T> = Result<T, ErrorCode>;

impl<E: Env> RaftService for Group<E> {
    fn handle(
        self: Rc<Self>,
        from: &PeerInfo,
        message: RaftMessage,
    ) -> LocalBoxFuture<'static, Result<Vec<u8>, ErrorCode>> {
        if let Err(code) = self.admit(from, &message) {
            return std::future::ready(Err(code)).boxed_local();
        }
        match message {
            RaftMessage::Append(request) => encoded(self.append(request)),
            RaftMessage::Vote(request) => encoded(self.vote(request, false)),
            RaftMessage::PreVote(request) => encoded(self.vote(request, true)),
            RaftMessage::Transfer(request) => encoded(self.take_over(request)),
            RaftMessage::SnapshotBegin(request) => encoded(self.snapshot_begin(request)),
            RaftMessage::SnapshotChunk(request) => encoded(self.snapshot_chunk(request)),
            RaftMessage::SnapshotEnd(request) => encoded(self.snapshot_end(request)),
        }
    }
}

fn encoded<T: Body>(
    answer: impl Future<Output = Answer<T>> + 'static,
) -> LocalBoxFuture<'static, Result<Vec<u8>, ErrorCode>> {
    answer.map(|answer| answer.map(|answer| codec::encode(&answer))).boxed_local()
}

/// The engine stopped.
fn stopped<T>(_error: T) -> ErrorCode {
    ErrorCode::SHUTTING_DOWN
}

fn sane(position: Option<&Position>) -> bool {
    position.is_none_or(|at| at.term <= NUMBER_MAX && at.index <= NUMBER_MAX)
}

/// Not written by a later leader than `vote`'s.
fn within(position: Option<&Position>, vote: &Ballot) -> bool {
    position.is_none_or(|at| (at.term, at.leader) <= (vote.term, vote.node))
}

impl<E: Env> Group<E> {
    /// Whether the sender may say this.
    fn admit(&self, from: &PeerInfo, message: &RaftMessage) -> Answer<()> {
        let membership = self.log.membership();
        let known = membership.membership().get_node(&from.node().0);
        if known.is_some_and(|member| member.disk != from.disk()) {
            return Err(ErrorCode::FOREIGN_DISK);
        }
        let vote = match message {
            RaftMessage::Append(request) => &request.vote,
            RaftMessage::Vote(request) | RaftMessage::PreVote(request) => &request.vote,
            RaftMessage::Transfer(request) => &request.from,
            RaftMessage::SnapshotBegin(request) => &request.vote,
            RaftMessage::SnapshotEnd(request) => &request.vote,
            RaftMessage::SnapshotChunk(_) => return Ok(()),
        };
        if vote.node != from.node() || vote.term > NUMBER_MAX || !message_sane(message) {
            return Err(ErrorCode::MALFORMED);
        }
        Ok(())
    }

    async fn append(self: Rc<Self>, request: AppendRequest) -> Answer<AppendAnswer> {
        let previous = request.previous.as_ref().map(convert::log_id);
        let last = request.entries.last().map_or(request.previous, |last| Some(last.position));
        let entries: Option<Vec<Entry>> = request.entries.into_iter().map(convert::entry).collect();
        let rpc = AppendEntriesRequest::<RaftTypes<E>> {
            vote: convert::vote(&request.vote),
            prev_log_id: previous,
            entries: entries.ok_or(ErrorCode::MALFORMED)?,
            leader_commit: request.committed.as_ref().map(convert::log_id),
        };
        Ok(match self.raft.append_entries(rpc).await.map_err(stopped)? {
            AppendEntriesResponse::Success => AppendAnswer::Accepted,
            AppendEntriesResponse::PartialSuccess(upto) if upto.is_none() && last.is_none() => {
                AppendAnswer::Accepted
            }
            AppendEntriesResponse::PartialSuccess(upto) => {
                AppendAnswer::Partly(upto.as_ref().map(convert::position))
            }
            AppendEntriesResponse::Conflict => AppendAnswer::Conflict,
            AppendEntriesResponse::HigherVote(vote) => {
                AppendAnswer::HigherVote(convert::ballot(&vote))
            }
        })
    }

    async fn vote(self: Rc<Self>, request: VoteRequest, pre: bool) -> Answer<VoteAnswer> {
        let rpc = openraft::raft::VoteRequest::<RaftTypes<E>> {
            vote: convert::vote(&request.vote),
            last_log_id: request.last.as_ref().map(convert::log_id),
            leadership_transfer: request.transfer && !pre,
        };
        let answer = if pre { self.raft.pre_vote(rpc).await } else { self.raft.vote(rpc).await };
        let VoteResponse { vote, vote_granted, last_log_id } = answer.map_err(stopped)?;
        let last = last_log_id.as_ref().map(convert::position);
        Ok(VoteAnswer { vote: convert::ballot(&vote), granted: vote_granted, last })
    }

    async fn take_over(self: Rc<Self>, request: TransferRequest) -> Answer<TransferAnswer> {
        let last = request.last.as_ref().map(convert::log_id);
        let rpc = TransferLeaderRequest::new(convert::vote(&request.from), request.to.0, last);
        let position = |id: &Option<LogId>| id.as_ref().map(convert::position);
        Ok(match self.raft.handle_transfer_leader(rpc).await.map_err(stopped)? {
            Ok(()) => TransferAnswer::Taken,
            Err(TransferLeaderError::VoteChanged { expected, actual }) => {
                let (expected, actual) = (convert::ballot(&expected), convert::ballot(&actual));
                TransferAnswer::VoteChanged { expected, actual }
            }
            Err(TransferLeaderError::LogNotFlushed { expected, actual }) => {
                let (expected, actual) = (position(&expected), position(&actual));
                TransferAnswer::NotFlushed { expected, actual }
            }
        })
    }

    async fn snapshot_begin(self: Rc<Self>, request: SnapshotBegin) -> Answer<SnapshotAnswer> {
        let meta = convert::snapshot_meta(request.cover).ok_or(ErrorCode::MALFORMED)?;
        // One at a time: the draft of one that was under way is dropped with it.
        self.receiving.take();
        match Receiving::begin(&self.snapshots, meta).await {
            Ok(receiving) => self.receiving.replace(Some(receiving)),
            Err(error) => return Err(self.failing(&error).await),
        };
        Ok(SnapshotAnswer::Continue)
    }

    async fn snapshot_chunk(self: Rc<Self>, request: SnapshotChunk) -> Answer<SnapshotAnswer> {
        let Some(mut receiving) = self.receiving.take() else {
            return Ok(SnapshotAnswer::Restart);
        };
        if receiving.len() != request.offset {
            return Ok(SnapshotAnswer::Restart);
        }
        match receiving.chunk(&request.bytes).await {
            Ok(()) => {}
            Err(LoadError::Io(error)) => return Err(self.failing(&error).await),
            Err(LoadError::Bad(error)) => return Ok(self.bad_snapshot(&error)),
        }
        self.receiving.replace(Some(receiving));
        Ok(SnapshotAnswer::Continue)
    }

    async fn snapshot_end(self: Rc<Self>, request: SnapshotEnd) -> Answer<SnapshotAnswer> {
        let receiving = self.receiving.take().filter(|receiving| receiving.len() == request.len);
        let Some(receiving) = receiving else { return Ok(SnapshotAnswer::Restart) };
        let received = match receiving.finish() {
            Ok(received) => received,
            Err(error) => return Ok(self.bad_snapshot(&error)),
        };
        let vote = convert::vote(&request.vote);
        let meta = received.meta().clone();
        let state = self.raft.with_raft_state(|state| *state.vote_ref());
        let own_vote = state.await.map_err(stopped)?;
        let committed = self.committed();
        if own_vote > vote {
            return Ok(SnapshotAnswer::HigherVote(convert::ballot(&own_vote)));
        }
        let last = meta.last_log_id.ok_or(ErrorCode::MALFORMED)?;
        if last.leader_id > vote.leader_id {
            return Err(ErrorCode::MALFORMED);
        }
        if Some(last) <= committed {
            return Ok(SnapshotAnswer::Done(convert::ballot(&own_vote)));
        }
        if committed.is_some_and(|committed| last.index <= committed.index) {
            tracing::error!(
                shard = self.spec.shard.0,
                "the leader's snapshot up to {last} contradicts what is committed here"
            );
            return Err(ErrorCode::INTERNAL);
        }
        let snapshot = SnapshotFile::Received(Box::new(received));
        let installed = self.raft.install_full_snapshot(vote, Built { meta, snapshot }).await;
        Ok(SnapshotAnswer::Done(convert::ballot(&installed.map_err(stopped)?.vote)))
    }

    fn committed(&self) -> Option<LogId> {
        let metrics = self.raft.metrics();
        let committed = metrics.borrow_watched().local_committed;
        committed.max(self.log.committed())
    }

    fn bad_snapshot(&self, error: &super::snapshot::SnapshotError) -> SnapshotAnswer {
        tracing::error!(shard = self.spec.shard.0, "a snapshot from the leader: {error}");
        SnapshotAnswer::Restart
    }

    async fn failing(&self, error: &std::io::Error) -> ErrorCode {
        tracing::error!(shard = self.spec.shard.0, "writing a snapshot: {error}");
        self.disk_failed(error).await;
        ErrorCode::STORAGE_FAILED
    }
}

fn message_sane(message: &RaftMessage) -> bool {
    match message {
        RaftMessage::Append(request) => append_sane(request),
        RaftMessage::Vote(request) | RaftMessage::PreVote(request) => {
            sane(request.last.as_ref())
                && within(request.last.as_ref(), &request.vote)
                && !request.vote.committed
        }
        RaftMessage::Transfer(request) => {
            sane(request.last.as_ref())
                && within(request.last.as_ref(), &request.from)
                && request.from.committed
                && request.to != NodeId(0)
        }
        RaftMessage::SnapshotBegin(SnapshotBegin { cover, vote, .. }) => {
            sane(cover.last.as_ref()) && within(cover.last.as_ref(), vote) && vote.committed
        }
        RaftMessage::SnapshotEnd(request) => request.vote.committed,
        RaftMessage::SnapshotChunk(_) => true,
    }
}

fn append_sane(request: &AppendRequest) -> bool {
    let (previous, committed) = (request.previous.as_ref(), request.committed.as_ref());
    let bounds = request.vote.committed
        && sane(previous)
        && sane(committed)
        && within(previous, &request.vote)
        && within(committed, &request.vote);
    bounds && follows(previous, &request.entries, &request.vote)
}

/// Each entry follows the one before, and no leader writes after a later one.
fn follows(previous: Option<&Position>, entries: &[LogEntry], vote: &Ballot) -> bool {
    let mut before = previous.copied();
    entries.iter().all(|entry| {
        let at = entry.position;
        let index = before.map_or(0, |before| before.index + 1);
        let leader = before.map_or((0, NodeId(0)), |before| (before.term, before.leader));
        before = Some(at);
        at.index == index
            && (at.term, at.leader) >= leader
            && sane(Some(&at))
            && within(Some(&at), vote)
    })
}
