//! The engine's network over `Peers`: one client per follower and purpose.
//!
//! Replication is pipelined: several requests are under way, answers are matched by id and handed
//! to the engine in order. Heartbeats, votes and transfers are single calls on a connection of
//! their own, so they never wait behind bulk; giving up on one leaves the connection usable.
//! Every append carries a stamp of `Rounds`, and only its own accepting answer credits it. Answers
//! are checked like requests: the engine believes, and keeps, what it is told.

use std::collections::VecDeque;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::{self, LocalBoxStream, Stream, StreamExt};
use leasehold_protocol::codec::{self, Body};
use leasehold_protocol::ids::{DiskId, NodeId, ShardId};
use leasehold_protocol::peer::{
    self, AppendAnswer, AppendRequest, SnapshotAnswer, SnapshotBegin, SnapshotChunk, SnapshotEnd,
    TransferAnswer, VoteAnswer,
};
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{Backoff, RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, StreamAppendError,
    StreamAppendResult, TransferLeaderError, TransferLeaderRequest, TransferLeaderResponse,
    VoteRequest, VoteResponse,
};
use openraft::{AsyncRuntime, async_runtime::Select2};

use super::checks::{AnswerSane, ballot_sane, sane};
use super::compact::Cuts;
use super::convert;
use super::peers::{Answer, Class, PeerError, Peers};
use super::rounds::{Rounds, Stamp};
use super::snapshot::{Built, SnapshotFile};
use super::types::{LogId, Member, RaftTypes, Vote};
use crate::env::Env;
use crate::rt::channels::oneshot;

/// Requests of one stream without an answer, at most.
const PIPELINE_MAX: usize = 32;
/// Bytes of entries of one stream without an answer, about; one request may always go.
const PIPELINE_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Longest wait for the answer to a heartbeat. Bounds how many are under way to a node that is slow.
const HEARTBEAT_ANSWER_MAX: Duration = Duration::from_secs(1);
/// Longest wait for the answer to one step of a snapshot; the last one includes its installation.
const SNAPSHOT_STEP_TIMEOUT: Duration = Duration::from_secs(10);
const SNAPSHOT_INSTALL_TIMEOUT: Duration = Duration::from_mins(1);
/// Waits of the engine between attempts to reach a follower.
const BACK_OFF: [Duration; 4] = [
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(500),
];

type C<E> = RaftTypes<E>;
type Rpc<T, E> = Result<T, RPCError<C<E>>>;

/// Makes the clients of one group.
pub(crate) struct Network<E: Env> {
    pub(crate) shard: ShardId,
    pub(crate) peers: Rc<Peers<E>>,
    pub(crate) rounds: Rc<Rounds>,
    pub(crate) cuts: Rc<Cuts>,
}

impl<E: Env> Network<E> {
    fn client(&self, target: u64, member: &Member, class: Class) -> Client<E> {
        Client {
            shard: self.shard,
            target,
            disk: member.disk,
            class,
            peers: self.peers.clone(),
            rounds: self.rounds.clone(),
            cuts: self.cuts.clone(),
        }
    }
}

impl<E: Env> RaftNetworkFactory<C<E>> for Network<E> {
    type Network = Client<E>;

    async fn new_client(&mut self, target: u64, node: &Member) -> Client<E> {
        self.client(target, node, Class::Bulk)
    }

    async fn new_heartbeat_client(&mut self, target: u64, node: &Member) -> Client<E> {
        self.client(target, node, Class::Heartbeat)
    }

    async fn new_snapshot_client(&mut self, target: u64, node: &Member) -> Client<E> {
        self.client(target, node, Class::Snapshot)
    }
}

/// Talks to one follower.
pub(crate) struct Client<E: Env> {
    shard: ShardId,
    target: u64,
    disk: DiskId,
    class: Class,
    peers: Rc<Peers<E>>,
    rounds: Rc<Rounds>,
    cuts: Rc<Cuts>,
}

impl<E: Env> Clone for Client<E> {
    fn clone(&self) -> Self {
        let (peers, rounds, cuts) = (self.peers.clone(), self.rounds.clone(), self.cuts.clone());
        Self { peers, rounds, cuts, ..*self }
    }
}

/// An append that was queued.
struct Sent {
    vote: Vote,
    previous: Option<LogId>,
    last: Option<LogId>,
    bytes: usize,
    stamp: Rc<Stamp>,
    answer: Answer,
}

fn rpc_error<E: Env>(error: &PeerError) -> RPCError<C<E>> {
    match error {
        // Waiting does not help with an answer that never comes, connecting anew may. It does help
        // with a connection that is full: what it carries must get away first.
        PeerError::Closed | PeerError::TimedOut | PeerError::Superseded => {
            RPCError::Network(NetworkError::new(error))
        }
        _ => RPCError::Unreachable(Unreachable::new(error)),
    }
}

impl<E: Env> Client<E> {
    async fn send<T: Body>(
        &self,
        class: Class,
        kind: u8,
        stamp: Option<Rc<Stamp>>,
        body: &T,
    ) -> Result<Answer, PeerError> {
        let node = NodeId(self.target);
        let write = |out: &mut Vec<u8>| codec::encode_into(body, out);
        self.peers.send(node, Some(self.disk), class, kind, stamp, write).await
    }

    async fn call<T: Body, A: Body + AnswerSane>(
        &self,
        class: Class,
        kind: u8,
        body: &T,
        timeout: Duration,
    ) -> Result<A, PeerError> {
        let ask = async { self.send(class, kind, None, body).await?.await };
        let answer = E::Rt::timeout(timeout, ask).await.unwrap_or(Err(PeerError::TimedOut))?;
        let answer = codec::decode(&answer).ok().filter(A::sane);
        answer.ok_or(PeerError::Malformed)
    }

    async fn append(&self, class: Class, rpc: AppendEntriesRequest<C<E>>) -> Rpc<Sent, E> {
        let last = rpc.entries.last().map(|entry| entry.log_id).or(rpc.prev_log_id);
        let request = AppendRequest {
            shard: self.shard,
            vote: convert::ballot(&rpc.vote),
            previous: rpc.prev_log_id.as_ref().map(convert::position),
            committed: rpc.leader_commit.as_ref().map(convert::position),
            entries: rpc.entries.iter().map(convert::log_entry).collect(),
        };
        let bytes = request.entries.iter().map(bytes_of).sum();
        let stamp = self.rounds.stamp(self.target, &rpc.vote, rpc.leader_commit.as_ref());
        let answer = self.send(class, peer::APPEND, Some(stamp.clone()), &request).await;
        let answer = answer.map_err(|error| rpc_error(&error))?;
        Ok(Sent { vote: rpc.vote, previous: rpc.prev_log_id, last, bytes, stamp, answer })
    }

    /// The answer to a heartbeat, which is waited for also when the engine does not any more: it
    /// gives up after its heartbeat interval, and where a round trip takes longer than that, no
    /// round of an idle shard would ever be confirmed.
    async fn heartbeat(self, rpc: AppendEntriesRequest<C<E>>) -> Rpc<StreamAppendResult<C<E>>, E> {
        let (tell, told) = oneshot();
        drop(E::Rt::spawn(async move {
            let ask = async { self.append(Class::Heartbeat, rpc).await?.result::<E>().await };
            let answer = E::Rt::timeout(HEARTBEAT_ANSWER_MAX, ask).await;
            let _ = tell.send(answer.unwrap_or_else(|_| Err(rpc_error(&PeerError::TimedOut))));
        }));
        told.await.unwrap_or_else(|_| Err(rpc_error(&PeerError::Closed)))
    }

    fn vote_request(&self, rpc: &VoteRequest<C<E>>) -> peer::VoteRequest {
        peer::VoteRequest {
            shard: self.shard,
            vote: convert::ballot(&rpc.vote),
            last: rpc.last_log_id.as_ref().map(convert::position),
            transfer: rpc.leadership_transfer,
        }
    }

    async fn ask_vote(
        &self,
        kind: u8,
        rpc: VoteRequest<C<E>>,
        option: RPCOption,
    ) -> Rpc<VoteResponse<C<E>>, E> {
        let request = self.vote_request(&rpc);
        let answer: VoteAnswer = self
            .call(Class::Heartbeat, kind, &request, option.hard_ttl())
            .await
            .map_err(|error| rpc_error(&error))?;
        let last = answer.last.as_ref().map(convert::log_id);
        Ok(VoteResponse::new(convert::vote(&answer.vote), last, answer.granted))
    }

    async fn send_snapshot(&self, vote: Vote, snapshot: Built<E>) -> Result<Vote, SendError> {
        let shard = self.shard;
        let ballot = convert::ballot(&vote);
        let begin = SnapshotBegin { shard, vote: ballot, cover: convert::cover(&snapshot.meta) };
        if let Some(vote) = self.step(peer::SNAPSHOT_BEGIN, &begin, SNAPSHOT_STEP_TIMEOUT).await? {
            return Ok(vote);
        }
        let SnapshotFile::Published { source, name } = &snapshot.snapshot else {
            return Err(SendError::Restart);
        };
        let mut offset = 0;
        loop {
            let bytes = source.read(name, offset).await?;
            if bytes.is_empty() {
                break;
            }
            let len = bytes.len() as u64;
            let chunk = SnapshotChunk { shard, offset, bytes };
            let answer = self.step(peer::SNAPSHOT_CHUNK, &chunk, SNAPSHOT_STEP_TIMEOUT).await?;
            if let Some(vote) = answer {
                return Ok(vote);
            }
            offset += len;
        }
        let end = SnapshotEnd { shard, vote: ballot, len: offset };
        let answer = self.step(peer::SNAPSHOT_END, &end, SNAPSHOT_INSTALL_TIMEOUT).await?;
        answer.ok_or(SendError::Peer(PeerError::Malformed))
    }

    /// One step of a transfer; a vote ends it.
    async fn step<T: Body>(
        &self,
        kind: u8,
        body: &T,
        timeout: Duration,
    ) -> Result<Option<Vote>, SendError> {
        match self.call(Class::Snapshot, kind, body, timeout).await? {
            SnapshotAnswer::Continue => Ok(None),
            SnapshotAnswer::Done(ballot) | SnapshotAnswer::HigherVote(ballot) => {
                Ok(Some(convert::vote(&ballot)))
            }
            SnapshotAnswer::Restart => Err(SendError::Restart),
        }
    }
}

fn bytes_of(entry: &peer::LogEntry) -> usize {
    match &entry.body {
        peer::EntryBody::Batch(bytes) => 64 + bytes.len(),
        _ => 64,
    }
}

/// Why a snapshot did not arrive.
#[derive(Debug, thiserror::Error)]
enum SendError {
    #[error("{0}")]
    Peer(#[from] PeerError),
    #[error("reading it: {0}")]
    Read(#[from] std::io::Error),
    #[error("the receiver asks to begin again")]
    Restart,
}

impl Sent {
    /// The engine's view of the answer; an accepting one is credited first.
    async fn result<E: Env>(mut self) -> Rpc<StreamAppendResult<C<E>>, E> {
        let answer = (&mut self.answer).await.map_err(|error| rpc_error(&error))?;
        let answer = codec::decode(&answer).map_err(|_| rpc_error(&PeerError::Malformed))?;
        let result = self.checked(answer).ok_or_else(|| rpc_error(&PeerError::Malformed))?;
        if result.is_ok() {
            self.stamp.accepted();
        }
        Ok(result)
    }

    /// `None` if it is no possible answer to this request.
    fn checked<E: Env>(&self, answer: AppendAnswer) -> Option<StreamAppendResult<C<E>>> {
        match answer {
            AppendAnswer::Accepted => Some(Ok(self.last)),
            AppendAnswer::Partly(position) => {
                let upto = position.as_ref().map(convert::log_id);
                let possible =
                    sane(position.as_ref()) && self.previous <= upto && upto <= self.last;
                possible.then_some(Ok(upto))
            }
            AppendAnswer::HigherVote(ballot) => {
                let vote = convert::vote(&ballot);
                let possible = ballot_sane(&ballot) && vote > self.vote;
                possible.then_some(Err(StreamAppendError::HigherVote(vote)))
            }
            // Nothing comes before the first entry, so nothing can conflict with it.
            AppendAnswer::Conflict => Some(Err(StreamAppendError::Conflict(self.previous?))),
        }
    }
}

/// The log is cut after entries that this follower has not acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the follower is too slow for the log: it gets a snapshot")]
struct Overtaken;

type Responses<'s, E> = LocalBoxStream<'s, Rpc<StreamAppendResult<C<E>>, E>>;

/// A pipelined stream: what is under way, oldest first.
struct Pipeline<E: Env, S> {
    client: Client<E>,
    input: S,
    input_ended: bool,
    under_way: VecDeque<UnderWay<E>>,
    /// How often a cut had been forced when this stream began.
    cuts: u64,
}

/// A request without an answer.
struct UnderWay<E: Env> {
    result: LocalBoxFuture<'static, Rpc<StreamAppendResult<C<E>>, E>>,
    /// Of its entries.
    bytes: usize,
    /// Its first entry, if it has one.
    first: Option<u64>,
}

impl<E: Env, S> Pipeline<E, S>
where
    S: Stream<Item = AppendEntriesRequest<C<E>>> + Unpin + 'static,
{
    fn has_room(&self) -> bool {
        let bytes: usize = self.under_way.iter().map(|request| request.bytes).sum();
        !self.input_ended
            && (self.under_way.is_empty()
                || self.under_way.len() < PIPELINE_MAX && bytes < PIPELINE_BYTES_MAX)
    }

    async fn send(&mut self, rpc: AppendEntriesRequest<C<E>>) -> Rpc<(), E> {
        let first = rpc.entries.first().map(|entry| entry.log_id.index);
        let sent = self.client.append(Class::Bulk, rpc).await?;
        let bytes = sent.bytes;
        let result = sent.result::<E>().boxed_local();
        self.under_way.push_back(UnderWay { result, bytes, first });
        Ok(())
    }

    /// The log is cut after what the follower has acknowledged. An error makes the engine look
    /// again at what it can send.
    fn overtaken(&self) -> bool {
        let first = self.under_way.iter().find_map(|request| request.first);
        first.is_some_and(|first| self.client.cuts.overtook(self.cuts, first))
    }

    /// The next answer in order; sends what comes in meanwhile.
    async fn next(mut self) -> Option<(Rpc<StreamAppendResult<C<E>>, E>, Option<Self>)> {
        loop {
            if self.input_ended && self.under_way.is_empty() {
                return None;
            }
            let sent = match self.step().await {
                Step::Answered(answered) => {
                    let goes_on = matches!(answered, Ok(Ok(_)));
                    return Some((answered, goes_on.then_some(self)));
                }
                Step::Cut if self.overtaken() => {
                    let target = self.client.target;
                    tracing::warn!(shard = self.client.shard.0, peer = target, "{Overtaken}");
                    Err(RPCError::Unreachable(Unreachable::new(&Overtaken)))
                }
                Step::Cut => Ok(()),
                Step::Input(Some(rpc)) => self.send(rpc).await,
                Step::Input(None) => {
                    self.input_ended = true;
                    Ok(())
                }
            };
            if let Err(error) = sent {
                return Some((Err(error), None));
            }
        }
    }

    /// Waits for the oldest answer or, where there is room, for the next request.
    async fn step(&mut self) -> Step<E> {
        let (has_room, overtaken) = (self.has_room(), self.overtaken());
        let cuts = self.client.cuts.clone();
        let Some(oldest) = self.under_way.front_mut() else {
            return Step::Input(self.input.next().await);
        };
        if overtaken {
            return Step::Cut;
        }
        let version = cuts.version();
        let input =
            async { if has_room { self.input.next().await } else { std::future::pending().await } };
        let moved = E::Rt::select2(&mut oldest.result, input);
        match E::Rt::select2(moved, cuts.since(version)).await {
            Select2::First(Select2::First(answered)) => {
                self.under_way.pop_front();
                Step::Answered(answered)
            }
            Select2::First(Select2::Second(rpc)) => Step::Input(rpc),
            Select2::Second(()) => Step::Cut,
        }
    }
}

enum Step<E: Env> {
    Answered(Rpc<StreamAppendResult<C<E>>, E>),
    Input(Option<AppendEntriesRequest<C<E>>>),
    /// A cut of the log was forced.
    Cut,
}

impl<E: Env> RaftNetworkV2<C<E>> for Client<E> {
    type SnapshotData = SnapshotFile<E>;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<C<E>>,
        option: RPCOption,
    ) -> Rpc<AppendEntriesResponse<C<E>>, E> {
        let ask = async { self.append(self.class, rpc).await?.result::<E>().await };
        let answer = E::Rt::timeout(option.hard_ttl(), ask).await;
        answer.unwrap_or_else(|_| Err(rpc_error(&PeerError::TimedOut))).map(Into::into)
    }

    fn stream_append<S>(
        &mut self,
        mut input: S,
        _option: RPCOption,
    ) -> LocalBoxFuture<'_, Rpc<Responses<'_, E>, E>>
    where
        S: Stream<Item = AppendEntriesRequest<C<E>>> + Unpin + 'static,
    {
        async move {
            let cuts = self.cuts.version();
            // The input waits out the engine's back-off: nothing connects before it yields.
            let Some(first) = input.next().await else {
                return Ok(stream::empty().boxed_local());
            };
            let client = self.clone();
            if self.class == Class::Heartbeat {
                return Ok(stream::once(client.heartbeat(first)).boxed_local());
            }
            let under_way = VecDeque::new();
            let mut pipeline = Pipeline { client, input, input_ended: false, under_way, cuts };
            pipeline.send(first).await?;
            let next = |pipeline: Option<Pipeline<E, S>>| async move { pipeline?.next().await };
            Ok(stream::unfold(Some(pipeline), next).boxed_local())
        }
        .boxed_local()
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<C<E>>,
        option: RPCOption,
    ) -> Rpc<VoteResponse<C<E>>, E> {
        self.ask_vote(peer::VOTE, rpc, option).await
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<C<E>>,
        option: RPCOption,
    ) -> Rpc<VoteResponse<C<E>>, E> {
        self.ask_vote(peer::PRE_VOTE, rpc, option).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Built<E>,
        cancel: impl Future<Output = ReplicationClosed> + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<C<E>>, StreamingError<C<E>>> {
        let sent = match E::Rt::select2(cancel, self.send_snapshot(vote, snapshot)).await {
            Select2::First(closed) => return Err(StreamingError::Closed(closed)),
            Select2::Second(sent) => sent,
        };
        match sent {
            Ok(vote) => Ok(SnapshotResponse::new(vote)),
            Err(SendError::Peer(error)) => Err(rpc_error(&error).into()),
            Err(error) => Err(StreamingError::Network(NetworkError::new(&error))),
        }
    }

    async fn transfer_leader(
        &mut self,
        req: TransferLeaderRequest<C<E>>,
        option: RPCOption,
    ) -> Rpc<TransferLeaderResponse<C<E>>, E> {
        let request = peer::TransferRequest {
            shard: self.shard,
            from: convert::ballot(req.from_leader()),
            to: NodeId(*req.to_node_id()),
            last: req.last_log_id().map(convert::position),
        };
        let answer: TransferAnswer = self
            .call(Class::Heartbeat, peer::TRANSFER, &request, option.hard_ttl())
            .await
            .map_err(|error| rpc_error(&error))?;
        Ok(match answer {
            TransferAnswer::Taken => Ok(()),
            TransferAnswer::VoteChanged { expected, actual } => {
                let (expected, actual) = (convert::vote(&expected), convert::vote(&actual));
                Err(TransferLeaderError::VoteChanged { expected, actual })
            }
            TransferAnswer::NotFlushed { expected, actual } => {
                let id = |position: Option<_>| position.as_ref().map(convert::log_id);
                let (expected, actual) = (id(expected), id(actual));
                Err(TransferLeaderError::LogNotFlushed { expected, actual })
            }
        })
    }

    fn backoff(&self) -> Option<Backoff> {
        let last = BACK_OFF[BACK_OFF.len() - 1];
        Some(Backoff::new(BACK_OFF.into_iter().chain(std::iter::repeat(last))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raft::suite::SimEnv;

    /// The engine counts an unreachable follower as twenty errors: it waits before it tries again.
    #[test]
    fn a_full_connection_is_not_tried_again_at_once() {
        assert!(matches!(rpc_error::<SimEnv>(&PeerError::Busy), RPCError::Unreachable(_)));
        assert!(matches!(rpc_error::<SimEnv>(&PeerError::Closed), RPCError::Network(_)));
    }
}
