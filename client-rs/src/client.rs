//! `Client`: the door to a cluster; reads and operator's requests.

use std::sync::Arc;
use std::time::Duration;

use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, NodeId, Secret, ShardId, Token};
use leasehold_protocol::limits::PAGE_LEN_MAX;
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{
    Claimed, KeyInfo, KeysReply, OutcomeReply, Reply, SessionInfo, SessionsReply, StatusReply,
};
use leasehold_protocol::request::{
    CommandRequest, Freshness, GetRequest, ListRequest, Request, SessionsRequest, StatusRequest,
    TransferRequest,
};
use leasehold_protocol::shard::{check_key, check_key_bound, check_label, check_reason, shard_of};

use crate::clock::BootTime;
use crate::config::Config;
use crate::core::{CallId, CallRequest, Core, OpId, Timing, check_limit};
use crate::election::Election;
use crate::error::{CallError, ConfigError, ConnectError, Failure, SessionError};
use crate::io::shared::Shared;
use crate::session::Session;
use crate::watch::{Watch, WatchFrom, WatchTarget};

/// A client of one cluster. Cheap to clone; all clones share their connections.
///
/// It runs on the tokio runtime in which it was made, of either flavour, with I/O and time
/// enabled. Work is done while that runtime runs: on a current-thread runtime that is blocked, no
/// renewal is sent, and the holds honestly come to be at risk and then lost.
///
/// ```no_run
/// # async fn example() -> Result<(), leasehold::Error> {
/// use std::time::Duration;
///
/// let client = leasehold::Client::connect("127.0.0.1:7101,127.0.0.1:7102").await?;
/// let session = client.session(Duration::from_secs(15))?;
/// let guard = session.lock("jobs/nightly").wait(Duration::from_secs(60)).acquire().await?;
/// println!("token {}", guard.token());
/// // ... work that passes the token to what it changes ...
/// guard.release().await?;
/// session.close().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Client {
    pub(crate) inner: Arc<ClientInner>,
}

#[derive(Debug)]
pub(crate) struct ClientInner {
    pub(crate) shared: Arc<Shared>,
    config: Config,
    shards: u32,
}

impl Drop for ClientInner {
    fn drop(&mut self) {
        self.shared.say_goodbye();
    }
}

/// One key, as it was at one revision of its shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRead {
    /// The key's shard.
    pub shard: ShardId,
    /// The shard's revision at which it was read.
    pub revision: leasehold_protocol::ids::Revision,
    /// True if it may lag behind acknowledged changes.
    pub stale: bool,
    /// Of a stale read, how old it was at most when its node answered: it has every change that
    /// was acknowledged longer before. `None` if the node did not know, as one that is cut off
    /// since nobody asked it. What came on its way to here is not in it.
    pub age: Option<Duration>,
    /// Its holders and waiters.
    pub info: KeyInfo,
}

/// Keys in byte order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The keys.
    pub keys: Vec<KeyRead>,
    /// There are more above the last one.
    pub more: bool,
}

/// What a forced release did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forced {
    /// The token of the hold that was meant.
    pub token: Token,
    /// False while the key waits for the hold's last possible validity to end.
    pub passed_on: bool,
}

impl Client {
    /// Connects with default settings; see `Config::new` for the list's form. Returns when a node
    /// has answered.
    pub async fn connect(endpoints: &str) -> Result<Self, ConnectError> {
        Self::with_config(Config::new(endpoints)?).await
    }

    /// Connects. Must be called within a tokio runtime.
    pub async fn with_config(config: Config) -> Result<Self, ConnectError> {
        config.validate()?;
        let timing = Timing {
            connect: config.connect_timeout,
            attempt: config.attempt_timeout,
            call: config.call_timeout,
        };
        let seed = u64::from_le_bytes(random()?);
        let shared = Shared::start(timing, config.endpoints.clone(), seed);
        let mut inner = ClientInner { shared, config, shards: 0 };
        let answer = inner.call(None, Request::Ping).await;
        answer.map_err(ConnectError::Failed)?;
        inner.shards = inner.shared.enter(|inner, _| inner.core.shards());
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Makes a session whose leases live for `ttl` after each renewal: 1 s to 600 s, in whole
    /// milliseconds. Nothing is sent before it is used.
    pub fn session(&self, ttl: Duration) -> Result<Session, SessionError> {
        self.labelled_session(ttl, self.inner.config.label.clone())
    }

    /// As `session`, with a label of its own.
    pub fn labelled_session(
        &self,
        ttl: Duration,
        label: impl Into<String>,
    ) -> Result<Session, SessionError> {
        Session::open(&self.inner, ttl, label.into())
    }

    /// The election of this name.
    pub fn election(&self, name: impl Into<Vec<u8>>) -> Election {
        Election::new(self.clone(), name.into())
    }

    /// The number of shards, fixed for the cluster's life.
    pub fn shards(&self) -> u32 {
        self.inner.shards
    }

    /// The cluster's nodes and their client addresses, as a node named them last: when a connection
    /// was made, or since then because they changed. Keep them where a later process may find them,
    /// if nodes come and go.
    pub fn nodes(&self) -> Vec<(NodeId, String)> {
        self.inner.shared.enter(|inner, _| inner.core.nodes())
    }

    /// The shard that owns a key.
    pub fn shard_of(&self, key: &[u8]) -> ShardId {
        shard_of(key, self.inner.shards)
    }

    /// Watches what happens to a key, to the keys with a prefix, or to all (G6).
    ///
    /// ```no_run
    /// # async fn example(client: leasehold::Client) -> Result<(), leasehold::Error> {
    /// use leasehold::{WatchFrom, WatchItem, WatchTarget};
    ///
    /// let mut watch = client.watch(&WatchTarget::prefix("jobs/"), &WatchFrom::Now)?;
    /// loop {
    ///     match watch.next().await? {
    ///         WatchItem::Change { revision, events, .. } => println!("{revision}: {events:?}"),
    ///         WatchItem::State { keys, .. } => println!("missed something; now: {keys:?}"),
    ///         other => println!("{other:?}"),
    ///     }
    /// }
    /// # }
    /// ```
    pub fn watch(&self, target: &WatchTarget, from: &WatchFrom) -> Result<Watch, CallError> {
        Ok(Watch::begin(&self.inner, target, from)?)
    }

    /// Asks any node for a sign of life; returns how long that took.
    pub async fn ping(&self) -> Result<Duration, CallError> {
        let sent = BootTime::now();
        self.inner.call(None, Request::Ping).await?;
        Ok(BootTime::now().since(sent))
    }

    /// Who holds a key and who waits for it, linearizably (G7).
    pub async fn get(&self, key: impl Into<Vec<u8>>) -> Result<KeyRead, CallError> {
        self.get_with(key, Freshness::Linearizable).await
    }

    /// As `get`, at the freshness that is asked for.
    pub async fn get_with(
        &self,
        key: impl Into<Vec<u8>>,
        freshness: Freshness,
    ) -> Result<KeyRead, CallError> {
        self.get_after(key, LeaseId(0), freshness).await
    }

    /// As `get_with`, with those holders whose lease is above `holders_after`: the next page of a
    /// key that has more than 256, which `KeyInfo::holders_total` tells. Each page is of its own
    /// revision.
    pub async fn get_after(
        &self,
        key: impl Into<Vec<u8>>,
        holders_after: LeaseId,
        freshness: Freshness,
    ) -> Result<KeyRead, CallError> {
        let key = key.into();
        check_key(&key).map_err(Failure::of)?;
        let shard = self.shard_of(&key);
        let request = GetRequest { key, holders_after, freshness, timeout_ms: 0 };
        let mut reply = self.keys(shard, Request::Get(request)).await?;
        let info = reply.keys.pop().ok_or_else(misfit)?;
        let KeysReply { shard, revision, stale, age_ms, .. } = reply;
        Ok(KeyRead { shard, revision, stale, age: age(age_ms), info })
    }

    /// One page of a shard's keys that are held or waited for, in byte order: those with `prefix`
    /// and above `after`, at most 256.
    pub async fn list_page(
        &self,
        shard: ShardId,
        prefix: &[u8],
        after: &[u8],
        limit: u32,
        freshness: Freshness,
    ) -> Result<KeysReply, CallError> {
        check_key_bound(prefix).and(check_key_bound(after)).map_err(Failure::of)?;
        if !after.is_empty() && !after.starts_with(prefix) {
            let (after, prefix) = (String::from_utf8_lossy(after), String::from_utf8_lossy(prefix));
            let text = format!("the page goes on after {after:?}, which is no key with {prefix:?}");
            return Err(Failure::new(ErrorCode::PAGE_OF_OTHER_QUERY, text).into());
        }
        let request = ListRequest {
            shard,
            prefix: prefix.to_vec(),
            after: after.to_vec(),
            limit: limit.clamp(1, PAGE_LEN_MAX),
            freshness,
            timeout_ms: 0,
        };
        self.keys(shard, Request::List(request)).await
    }

    /// Keys with `prefix` that are held or waited for, of all shards, in byte order, `limit` at
    /// most. Each page is consistent in itself.
    pub async fn list(&self, prefix: &str, limit: usize) -> Result<Vec<KeyRead>, CallError> {
        let fresh = Freshness::Linearizable;
        Ok(self.list_after(prefix.as_bytes(), &[], limit, fresh).await?.keys)
    }

    /// As `list`, of the keys above `after` (of all, if that is empty), at the freshness that is
    /// asked for.
    pub async fn list_after(
        &self,
        prefix: &[u8],
        after: &[u8],
        limit: usize,
        freshness: Freshness,
    ) -> Result<Listing, CallError> {
        let (mut found, mut any_more) = (Vec::new(), false);
        for shard in (0..self.inner.shards).map(ShardId) {
            let (mut after, mut of_shard) = (after.to_vec(), 0);
            while of_shard < limit {
                let want = (limit - of_shard).min(PAGE_LEN_MAX as usize) as u32;
                let page = self.list_page(shard, prefix, &after, want, freshness).await?;
                let KeysReply { revision, stale, age_ms, more, .. } = page;
                of_shard += page.keys.len();
                found.extend(page.keys.into_iter().map(|info| KeyRead {
                    shard,
                    revision,
                    stale,
                    age: age(age_ms),
                    info,
                }));
                match found.last() {
                    Some(last) if more => after = last.info.key.clone().into_bytes(),
                    _ => break,
                }
                any_more |= of_shard >= limit;
            }
        }
        found.sort_by(|a, b| a.info.key.cmp(&b.info.key));
        let more = any_more || found.len() > limit;
        found.truncate(limit);
        Ok(Listing { keys: found, more })
    }

    /// One page of a shard's live leases above `after`, in the order of their ids, at most 256.
    pub async fn sessions_page(
        &self,
        shard: ShardId,
        after: LeaseId,
        limit: u32,
    ) -> Result<SessionsReply, CallError> {
        let limit = limit.clamp(1, PAGE_LEN_MAX);
        let request = SessionsRequest { shard, after, limit, timeout_ms: 0 };
        match self.inner.call(Some(shard), Request::Sessions(request)).await? {
            Reply::Sessions(reply) => Ok(reply),
            _ => Err(misfit().into()),
        }
    }

    /// Live leases of all shards, `limit` at most.
    pub async fn sessions(&self, limit: usize) -> Result<Vec<(ShardId, SessionInfo)>, CallError> {
        self.sessions_after(ShardId(0), LeaseId(0), limit).await
    }

    /// As `sessions`, of the leases above `after` in `shard` and of all later shards: where a former
    /// listing ended.
    pub async fn sessions_after(
        &self,
        shard: ShardId,
        after: LeaseId,
        limit: usize,
    ) -> Result<Vec<(ShardId, SessionInfo)>, CallError> {
        let mut found = Vec::new();
        let mut after = after;
        for shard in (shard.0..self.inner.shards).map(ShardId) {
            while found.len() < limit {
                let want = (limit - found.len()).min(PAGE_LEN_MAX as usize) as u32;
                let page = self.sessions_page(shard, after, want).await?;
                let more = page.more;
                found.extend(page.sessions.into_iter().map(|session| (shard, session)));
                match found.last() {
                    Some((_, last)) if more => after = last.lease,
                    _ => break,
                }
            }
            after = LeaseId(0);
        }
        Ok(found)
    }

    /// The cluster as one node sees it: its nodes, their shards, roles and digests.
    pub async fn status(&self) -> Result<StatusReply, CallError> {
        match self.inner.call(None, Request::Status(StatusRequest { timeout_ms: 0 })).await? {
            Reply::Status(reply) => Ok(reply),
            _ => Err(misfit().into()),
        }
    }

    /// Ends somebody's hold. `token` must be the hold's present one, so that a repeated request
    /// cannot hit the next holder.
    ///
    /// The key is passed on when the holder gave it back or its last possible validity ended; with
    /// `now` at once, which waives exclusion (G1) for that hold: only resources that check tokens
    /// are safe then.
    ///
    /// If an attempt's reply was lost and the next one finds the token not held any more, that
    /// counts as done.
    pub async fn force_release(
        &self,
        key: impl Into<Vec<u8>>,
        token: Token,
        who: &str,
        why: &str,
        now: bool,
    ) -> Result<Forced, CallError> {
        let key = key.into();
        check_key(&key).map_err(Failure::of)?;
        check_label(who.as_bytes()).map_err(Failure::of)?;
        check_reason(why.as_bytes()).map_err(Failure::of)?;
        let shard = self.shard_of(&key);
        let (who, why) = (who.as_bytes().to_vec(), why.as_bytes().to_vec());
        let command = Command::ForceRelease { key, token, who, why, now };
        let request = Request::Command(CommandRequest { shard, timeout_ms: 0, command });
        match self.inner.call(Some(shard), request).await? {
            Reply::Outcome(OutcomeReply {
                outcome: Outcome::Forced { token, passed_on, .. },
                ..
            }) => Ok(Forced { token, passed_on }),
            Reply::Outcome(OutcomeReply {
                outcome: Outcome::Refused { code, token, .. }, ..
            }) => Err(Failure { token, ..Failure::of(code) }.into()),
            _ => Err(misfit().into()),
        }
    }

    /// Changes how many permits a semaphore has, 1 to 1024. Present holds keep theirs, whatever
    /// their number; who waits for more than there are now is refused. Refused with `not_in_use`
    /// if nobody holds the key or waits for it: then the next acquire decides.
    pub async fn set_limit(
        &self,
        key: impl Into<Vec<u8>>,
        limit: u32,
        who: &str,
    ) -> Result<(), CallError> {
        let key = key.into();
        check_key(&key).map_err(Failure::of)?;
        check_limit(limit)?;
        check_label(who.as_bytes()).map_err(Failure::of)?;
        let who = who.as_bytes().to_vec();
        self.operate(key.clone(), Command::SetLimit { key, limit, who }).await
    }

    /// Asks the holder of a key to give it up within some time; `token` names the hold that is
    /// meant. Nothing but the holder's goodwill follows: it hears of it as a `Yield` of its session.
    pub async fn ask_yield(
        &self,
        key: impl Into<Vec<u8>>,
        token: Token,
        who: &str,
        why: &str,
        within: Duration,
    ) -> Result<(), CallError> {
        let key = key.into();
        check_key(&key).map_err(Failure::of)?;
        check_label(who.as_bytes()).map_err(Failure::of)?;
        check_reason(why.as_bytes()).map_err(Failure::of)?;
        let (who, why) = (who.as_bytes().to_vec(), why.as_bytes().to_vec());
        let within_ms = u32::try_from(within.as_millis()).unwrap_or(u32::MAX);
        let command = Command::AskYield { key: key.clone(), token, who, why, within_ms };
        self.operate(key, command).await
    }

    /// An operator's command that may be repeated without harm.
    async fn operate(&self, key: Vec<u8>, command: Command) -> Result<(), CallError> {
        let shard = self.shard_of(&key);
        let request = Request::Command(CommandRequest { shard, timeout_ms: 0, command });
        match self.inner.call(Some(shard), request).await? {
            Reply::Outcome(OutcomeReply { outcome: Outcome::Changed { .. }, .. }) => Ok(()),
            Reply::Outcome(OutcomeReply {
                outcome: Outcome::Refused { code, token, .. }, ..
            }) => Err(Failure { token, ..Failure::of(code) }.into()),
            _ => Err(misfit().into()),
        }
    }

    /// Moves a shard's leadership to a node, or to one that the leader chooses.
    pub async fn transfer_leader(
        &self,
        shard: ShardId,
        to: Option<NodeId>,
    ) -> Result<(), CallError> {
        let to = to.unwrap_or(NodeId(0));
        let request = TransferRequest { shard, to, timeout_ms: 0 };
        match self.inner.call(Some(shard), Request::Transfer(request)).await? {
            Reply::Transferred => Ok(()),
            _ => Err(misfit().into()),
        }
    }

    async fn keys(&self, shard: ShardId, request: Request) -> Result<KeysReply, CallError> {
        match self.inner.call(Some(shard), request).await? {
            Reply::Keys(reply) => Ok(reply),
            _ => Err(misfit().into()),
        }
    }
}

impl ClientInner {
    /// A refusal because of a lock-delay, with what is left of it, if the cluster tells.
    pub(crate) async fn with_rest(&self, key: &[u8], mut failure: Failure) -> Failure {
        let request = GetRequest {
            key: key.to_vec(),
            holders_after: LeaseId(0),
            freshness: Freshness::Linearizable,
            timeout_ms: 0,
        };
        let shard = shard_of(key, self.shards);
        if let Ok(Reply::Keys(reply)) = self.call(Some(shard), Request::Get(request)).await {
            let delays = reply.keys.iter().flat_map(|info| &info.delays);
            // If it is over meanwhile, nothing is left.
            let rest = delays.filter_map(|delay| delay.remaining_ms).max().unwrap_or(0);
            failure.message = format!("{} {rest} ms of it are left.", failure.message);
            failure.rest_ms = Some(rest);
        }
        failure
    }

    pub(crate) async fn call(
        &self,
        shard: Option<ShardId>,
        request: Request,
    ) -> Result<Reply, Failure> {
        let timeout = self.config.call_timeout;
        self.answer(|core, now| core.call(now, CallRequest { shard, request, timeout })).await
    }

    /// What the cluster says of an acquire: its place in the queue, or its hold.
    pub(crate) async fn claim(&self, op: OpId) -> Result<Claimed, Failure> {
        match self.answer(|core, now| core.claim(now, op)).await? {
            Reply::Claim(reply) => Ok(reply.claim),
            _ => Err(misfit()),
        }
    }

    async fn answer(
        &self,
        start: impl FnOnce(&mut Core, BootTime) -> Result<CallId, Failure>,
    ) -> Result<Reply, Failure> {
        let (call, answer) = self.shared.enter(|inner, now| {
            let call = start(&mut inner.core, now);
            inner.await_call(call)
        })?;
        let interest = Interest { shared: &self.shared, call };
        let answer = answer.await.unwrap_or_else(|_| Err(gone()));
        drop(interest);
        answer
    }
}

/// While somebody waits for a call. Dropping it forgets the call.
struct Interest<'a> {
    shared: &'a Arc<Shared>,
    call: CallId,
}

impl Drop for Interest<'_> {
    fn drop(&mut self) {
        self.shared.enter(|inner, _| inner.forget_call(self.call));
    }
}

fn age(age_ms: Option<u32>) -> Option<Duration> {
    age_ms.map(|ms| Duration::from_millis(ms.into()))
}

/// The runtime that carried the client's tasks has ended.
pub(crate) fn gone() -> Failure {
    Failure::new(ErrorCode::DEADLINE, "the runtime of this client has ended")
}

pub(crate) fn misfit() -> Failure {
    Failure::new(ErrorCode::MALFORMED, "the reply does not fit its request")
}

fn random<const N: usize>() -> Result<[u8; N], ConfigError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| ConfigError::NoRandomness(error.to_string()))?;
    Ok(bytes)
}

/// A new secret.
pub(crate) fn random_secret() -> Result<Secret, Failure> {
    let random = random().map_err(|error| Failure::new(ErrorCode::INTERNAL, error.to_string()))?;
    Ok(Secret(random))
}
