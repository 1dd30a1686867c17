//! What a group answers to its peers.
//!
//! Everything that comes in is checked before the engine sees it, because the engine trusts its
//! peers and panics where they contradict the protocol: the sender must be the very node, with the
//! very data directory, that the message speaks for; what the message says must be possible
//! (`checks`); a snapshot is gone on with by the very leader that began it.

use std::rc::Rc;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use leasehold_protocol::codec::{self, Body};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::peer::{
    AppendAnswer, AppendRequest, SnapshotAnswer, SnapshotBegin, SnapshotChunk, SnapshotEnd,
    TransferAnswer, TransferRequest, VoteAnswer, VoteRequest,
};
use leasehold_protocol::planted;
use openraft::async_runtime::WatchReceiver;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, TransferLeaderError, TransferLeaderRequest,
    VoteResponse,
};

use super::checks::{ballot_sane, message_sane};
use super::convert;
use super::group::Group;
use super::message::RaftMessage;
use super::peers::{PeerInfo, RaftService};
use super::snapshot::{Built, LoadError, Receiving, SnapshotFile};
use super::types::{Entry, LogId, RaftTypes, Vote};
use crate::env::Env;

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
        let sender = from.node();
        match message {
            RaftMessage::Append(request) => encoded(self.append(request)),
            RaftMessage::Vote(request) => encoded(self.vote(request, false)),
            RaftMessage::PreVote(request) => encoded(self.vote(request, true)),
            RaftMessage::Transfer(request) => encoded(self.take_over(request)),
            RaftMessage::SnapshotBegin(request) => encoded(self.snapshot_begin(request)),
            RaftMessage::SnapshotChunk(request) => encoded(self.snapshot_chunk(sender, request)),
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

impl<E: Env> Group<E> {
    /// Whether the sender may say this.
    fn admit(&self, from: &PeerInfo, message: &RaftMessage) -> Answer<()> {
        let membership = self.log.membership();
        let known = membership.membership().get_node(&from.node().0);
        let foreign = known.is_some_and(|member| member.disk != from.disk());
        if foreign && !planted!("wiped-voter-votes") {
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
        if vote.node != from.node() || !ballot_sane(vote) || !message_sane(message) {
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
        let vote = convert::vote(&request.vote);
        let known = self.own_vote().await?;
        let other = self.receiving.borrow().as_ref().map(|(sender, _)| *sender);
        let highest = other.filter(|other| *other > known).unwrap_or(known);
        if highest > vote {
            return Ok(SnapshotAnswer::HigherVote(convert::ballot(&highest)));
        }
        // One at a time: the draft of one that was under way is dropped with it.
        self.receiving.take();
        match Receiving::begin(&self.snapshots, meta).await {
            Ok(receiving) => self.keep_receiving(vote, receiving, |other| *other <= vote),
            Err(error) => return Err(self.failing(&error).await),
        }
        Ok(SnapshotAnswer::Continue)
    }

    async fn snapshot_chunk(
        self: Rc<Self>,
        sender: NodeId,
        request: SnapshotChunk,
    ) -> Answer<SnapshotAnswer> {
        // A deposed leader's late bytes do not end the present one's transfer.
        let Some((vote, mut receiving)) =
            self.receiving.borrow_mut().take_if(|(vote, _)| vote.leader_id.node_id == sender.0)
        else {
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
        self.keep_receiving(vote, receiving, |other| *other < vote);
        Ok(SnapshotAnswer::Continue)
    }

    /// Keeps what is being received, unless another one is there that `yields` not: one may have
    /// begun meanwhile. A step of one gives way to a new beginning by the same leader, too.
    fn keep_receiving(&self, vote: Vote, receiving: Receiving<E>, yields: impl Fn(&Vote) -> bool) {
        let mut kept = self.receiving.borrow_mut();
        if kept.as_ref().is_none_or(|(other, _)| yields(other)) {
            kept.replace((vote, receiving));
        }
    }

    async fn own_vote(&self) -> Answer<Vote> {
        self.raft.with_raft_state(|state| *state.vote_ref()).await.map_err(stopped)
    }

    async fn snapshot_end(self: Rc<Self>, request: SnapshotEnd) -> Answer<SnapshotAnswer> {
        let vote = convert::vote(&request.vote);
        let receiving = self.receiving.borrow_mut().take_if(|(sender, _)| *sender == vote);
        let receiving = receiving.filter(|(_, receiving)| receiving.len() == request.len);
        let Some((_, receiving)) = receiving else { return Ok(SnapshotAnswer::Restart) };
        let received = match receiving.finish() {
            Ok(received) => received,
            Err(error) => return Ok(self.bad_snapshot(&error)),
        };
        let meta = received.meta().clone();
        let own_vote = self.own_vote().await?;
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
