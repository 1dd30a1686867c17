//! A cluster of one shard without Raft, for tests of the client: the real state machine, lease
//! deadlines, and who waits on which connection. Time is an argument.

use std::collections::BTreeMap;

use leasehold_core::State;
use leasehold_core::lease::{NS_PER_MS, pad_ms};
use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::{
    ClusterId, HoldSetVersion, LeaseId, NodeId, Number, RequestId, ShardId, Token,
};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{
    ErrorReply, KeyInfo, KeysReply, LeaderHint, NodeAddress, NodeStatus, OutcomeReply, RenewReply,
    RenewResult, Reply, Role, ServerHello, SessionsReply, ShardStatus, StatusReply,
};
use leasehold_protocol::request::{Freshness, RenewItem, Request};
use leasehold_protocol::watch::{
    WatchEnd, WatchEndReason, WatchEvent, WatchEvents, WatchFrom, WatchRequest, WatchState,
};

/// A reply and where it goes: connection and request.
pub(crate) type Addressed = (u64, RequestId, Reply);

/// See the module.
pub(crate) struct Authority {
    pub(crate) state: State,
    pub(crate) cluster: ClusterId,
    /// Client addresses, told in the handshake; node ids count from 1.
    pub(crate) addrs: Vec<String>,
    deadlines: BTreeMap<LeaseId, u64>,
    wait_ends: BTreeMap<(LeaseId, Number), u64>,
    forced_ends: BTreeMap<Token, (u64, Vec<u8>)>,
    delay_ends: BTreeMap<Token, (u64, Vec<u8>)>,
    waiting: BTreeMap<(LeaseId, Number), (u64, RequestId)>,
    /// Watches of one key each.
    watches: BTreeMap<(u64, RequestId), Vec<u8>>,
    out: Vec<Addressed>,
    /// Hands out the last moment at which each renewal was acknowledged.
    pub(crate) renewals: u64,
    /// Lock-delays begun.
    pub(crate) delays: u64,
    /// Watches begin with a state from before the key was used, as on a node that lags.
    pub(crate) watches_lag: bool,
}

impl Authority {
    pub(crate) fn new(addrs: Vec<String>) -> Self {
        let mut authority = Self {
            state: State::new(ShardId(0)),
            cluster: ClusterId([7; 16]),
            addrs,
            deadlines: BTreeMap::new(),
            wait_ends: BTreeMap::new(),
            forced_ends: BTreeMap::new(),
            delay_ends: BTreeMap::new(),
            waiting: BTreeMap::new(),
            watches: BTreeMap::new(),
            out: Vec::new(),
            renewals: 0,
            delays: 0,
            watches_lag: false,
        };
        authority.apply(&Command::Begin { token_base: Token(1000) }, 0);
        authority
    }

    fn apply(&mut self, command: &Command, now: u64) -> Outcome {
        let mut events = Vec::new();
        let outcome = self.state.apply(now / NS_PER_MS, command, &mut events);
        self.tell_watches(&events);
        for event in events {
            self.note(event, now);
        }
        outcome
    }

    fn note(&mut self, event: Event, now: u64) {
        match event.kind {
            EventKind::LeaseOpened { lease, ttl_ms } => {
                self.deadlines.insert(lease, deadline(now, ttl_ms));
            }
            EventKind::LeaseEnded { lease, .. } => {
                self.deadlines.remove(&lease);
            }
            EventKind::Queued { lease, number, wait_ms, .. } if wait_ms != u32::MAX => {
                let end = now + u64::from(wait_ms) * NS_PER_MS;
                self.wait_ends.insert((lease, number), end);
            }
            EventKind::WaitEnded { lease, number, outcome, .. } => {
                self.wait_ends.remove(&(lease, number));
                if let Some((conn, id)) = self.waiting.remove(&(lease, number)) {
                    self.out.push((conn, id, done(outcome)));
                }
            }
            EventKind::ForcedPending { key, lease, token, .. } => {
                let end = self.deadlines.get(&lease).copied().unwrap_or(now);
                self.forced_ends.insert(token, (end, key));
            }
            EventKind::Ended { token, .. } => {
                self.forced_ends.remove(&token);
            }
            EventKind::DelayBegan { key, token, delay_ms } => {
                let end = now + u64::from(delay_ms) * NS_PER_MS;
                self.delay_ends.insert(token, (end, key));
                self.delays += 1;
            }
            EventKind::DelayEnded { token, .. } => {
                self.delay_ends.remove(&token);
            }
            _ => {}
        }
    }

    /// What became due.
    pub(crate) fn tick(&mut self, now: u64) -> Vec<Addressed> {
        let due: Vec<LeaseId> =
            self.deadlines.iter().filter(|(_, at)| **at <= now).map(|(lease, _)| *lease).collect();
        for lease in due {
            self.apply(&Command::Expire { lease }, now);
        }
        let over = self.wait_ends.iter().filter(|(_, at)| **at <= now).map(|(key, _)| *key);
        for (lease, number) in over.collect::<Vec<_>>() {
            self.wait_ends.remove(&(lease, number));
            self.apply(&Command::TimeOut { lease, number }, now);
        }
        let ended = self.forced_ends.iter().filter(|(_, (at, _))| *at <= now);
        for (token, key) in ended.map(|(t, (_, key))| (*t, key.clone())).collect::<Vec<_>>() {
            self.forced_ends.remove(&token);
            self.apply(&Command::EndForced { key, token }, now);
        }
        let ended = self.delay_ends.iter().filter(|(_, (at, _))| *at <= now);
        for (token, key) in ended.map(|(t, (_, key))| (*t, key.clone())).collect::<Vec<_>>() {
            self.apply(&Command::EndDelay { key, token }, now);
        }
        std::mem::take(&mut self.out)
    }

    /// Another node leads: every lease starts at its full TTL.
    pub(crate) fn take_over(&mut self, now: u64) {
        for (lease, ttl_ms) in self.state.leases() {
            self.deadlines.insert(lease, deadline(now, ttl_ms));
        }
    }

    /// Lets the owners of all waits know that they must ask again.
    pub(crate) fn resync(&mut self) -> Vec<Addressed> {
        let waiting = std::mem::take(&mut self.waiting).into_values();
        waiting.map(|(conn, id)| (conn, id, error(ErrorCode::RESYNC))).collect()
    }

    pub(crate) fn drop_conn(&mut self, conn: u64) {
        self.watches.retain(|(of, _), _| *of != conn);
        self.waiting.retain(|_, (of, _)| *of != conn);
    }

    pub(crate) fn hello(&self, node: u64) -> ServerHello {
        let nodes = self.addrs.iter().enumerate();
        ServerHello {
            version: 1,
            cluster: self.cluster,
            node: NodeId(node),
            shards: 1,
            key_hash: 1,
            features: 0,
            nodes: nodes
                .map(|(n, addr)| NodeAddress {
                    node: NodeId(n as u64 + 1),
                    client_addr: addr.clone(),
                })
                .collect(),
            leaders: vec![LeaderHint { shard: ShardId(0), leader: NodeId(1) }],
            server_version: "test".to_owned(),
        }
    }

    /// Executes a request; its reply, if it has one already, is among what is returned.
    pub(crate) fn request(
        &mut self,
        conn: u64,
        id: RequestId,
        request: &Request,
        now: u64,
    ) -> Vec<Addressed> {
        let reply = match request {
            Request::Hello(_) => Reply::Hello(self.hello(1)),
            Request::Command(body) => self.command(conn, id, &body.command, now),
            Request::Renew(body) => {
                let results = body.items.iter().map(|item| self.renew(*item, now)).collect();
                Reply::Renewed(RenewReply { results, leader: NodeId(0) })
            }
            Request::Get(body) => {
                let info = self.state.key_info_after(&body.key, body.holders_after);
                let info = self.with_remaining(info, now);
                self.keys(vec![info], false, body.freshness)
            }
            Request::List(body) => {
                let (keys, more) = self.state.list(&body.prefix, &body.after, body.limit as usize);
                let keys = keys.into_iter().map(|info| self.with_remaining(info, now)).collect();
                self.keys(keys, more, body.freshness)
            }
            Request::Sessions(body) => {
                let (sessions, more) = self.state.sessions(body.after, body.limit as usize);
                Reply::Sessions(SessionsReply { revision: self.state.revision(), sessions, more })
            }
            Request::Claim(body) => match self.state.claim(body.lease, body.number) {
                Some(claim) => Reply::Claim(claim),
                None => error(ErrorCode::LEASE_DEAD),
            },
            Request::Holds(body) => match self.state.holds(body.lease) {
                Some(holds) => Reply::Holds(holds),
                None => error(ErrorCode::LEASE_DEAD),
            },
            Request::Backup(_) => error(ErrorCode::BACKUP_GONE),
            Request::Status(_) => self.status(),
            Request::Transfer(_) => Reply::Transferred,
            Request::Members(_) | Request::MemberChange(_) | Request::GroupStep(_) => {
                error(ErrorCode::UNKNOWN_KIND)
            }
            Request::Ping => Reply::Pong,
            Request::Watch(body) => self.watch(conn, id, body),
            Request::Unwatch(body) => {
                self.watches.remove(&(conn, body.id));
                let (shard, reason) = (ShardId(0), WatchEndReason::Cancelled);
                self.out.push((conn, body.id, Reply::WatchEnd(WatchEnd { shard, reason })));
                Reply::Unwatched
            }
        };
        let mut out = std::mem::take(&mut self.out);
        out.push((conn, id, reply));
        out
    }

    fn command(&mut self, conn: u64, id: RequestId, command: &Command, now: u64) -> Reply {
        let outcome = self.apply(command, now);
        if let (
            Command::Acquire { caller, .. } | Command::AcquireAll { caller, .. },
            Outcome::Queued { .. },
        ) = (command, outcome)
        {
            self.waiting.insert((caller.lease, caller.number), (conn, id));
        }
        done(outcome)
    }

    /// Watches of a key from its state: all that the tests need.
    fn watch(&mut self, conn: u64, id: RequestId, body: &WatchRequest) -> Reply {
        let info = self.state.key_info(&body.key);
        if body.prefix || body.from != WatchFrom::State {
            return error(ErrorCode::UNKNOWN_KIND);
        }
        self.watches.insert((conn, id), body.key.clone());
        let used = !(info.holders.is_empty() && info.waiters.is_empty() || self.watches_lag);
        let keys = if used { vec![info] } else { Vec::new() };
        let (shard, revision) = (ShardId(0), self.state.revision());
        Reply::WatchState(WatchState { shard, revision, first: true, keys, more: false })
    }

    fn tell_watches(&mut self, events: &[Event]) {
        let (shard, revision) = (ShardId(0), self.state.revision());
        for ((conn, id), key) in &self.watches {
            let info = self.state.key_info(key);
            let watched = events.iter().filter_map(|event| {
                let (of, token) = match &event.kind {
                    EventKind::Granted { key, token, .. }
                    | EventKind::Ended { key, token, .. }
                    | EventKind::ValueChanged { key, token, .. }
                    | EventKind::YieldAsked { key, token, .. } => (key, *token),
                    _ => return None,
                };
                let holder = info.holders.iter().find(|holder| holder.token == token);
                (of == key).then(|| WatchEvent {
                    revision: event.revision,
                    kind: event.kind.clone(),
                    label: holder.map_or_else(String::new, |holder| holder.label.clone()),
                    value: holder.map_or_else(Vec::new, |holder| holder.value.clone()),
                })
            });
            let events: Vec<WatchEvent> = watched.collect();
            if !events.is_empty() {
                let told = WatchEvents { shard, revision, events, more: false };
                self.out.push((*conn, *id, Reply::WatchEvents(told)));
            }
        }
    }

    fn renew(&mut self, item: RenewItem, now: u64) -> RenewResult {
        let mut result = RenewResult {
            lease: item.lease,
            error: Some(ErrorCode::LEASE_DEAD),
            ttl_ms: 0,
            version: HoldSetVersion(0),
        };
        if let Some(lease) = self.state.lease(item.lease) {
            result.error = (!lease.secret_matches(&item.secret)).then_some(ErrorCode::BAD_SECRET);
            result.ttl_ms = lease.ttl_ms();
            result.version = lease.version();
        }
        if result.error.is_none() {
            self.renewals += 1;
            self.deadlines.insert(item.lease, deadline(now, result.ttl_ms));
        }
        result
    }

    fn with_remaining(&self, mut info: KeyInfo, now: u64) -> KeyInfo {
        for delay in &mut info.delays {
            let end = self.delay_ends.get(&delay.token).map_or(now, |(end, _)| *end);
            delay.remaining_ms = Some((end.saturating_sub(now) / NS_PER_MS) as u32);
        }
        for holder in &mut info.holders {
            let end = self.deadlines.get(&holder.lease).copied().unwrap_or(now);
            holder.remaining_ms = Some((end.saturating_sub(now) / NS_PER_MS) as u32);
        }
        info
    }

    fn keys(&self, keys: Vec<KeyInfo>, more: bool, freshness: Freshness) -> Reply {
        let stale = freshness == Freshness::Stale;
        let revision = self.state.revision();
        let age_ms = stale.then_some(40);
        Reply::Keys(KeysReply { shard: ShardId(0), revision, stale, age_ms, keys, more })
    }

    fn status(&self) -> Reply {
        let shard = |role| ShardStatus {
            shard: ShardId(0),
            role,
            term: 3,
            leader: NodeId(1),
            last_index: 9,
            applied_index: 9,
            applied_revision: self.state.revision(),
            digest: self.state.digest(),
            snapshot_index: 0,
        };
        let nodes = self.addrs.iter().enumerate().map(|(n, addr)| NodeStatus {
            node: NodeId(n as u64 + 1),
            client_addr: addr.clone(),
            reachable: true,
            version: "test".to_owned(),
            shards: vec![shard(if n == 0 { Role::Leader } else { Role::Follower })],
        });
        Reply::Status(StatusReply { cluster: self.cluster, shards: 1, nodes: nodes.collect() })
    }
}

fn deadline(now: u64, ttl_ms: u32) -> u64 {
    now + u64::from(ttl_ms + pad_ms(ttl_ms)) * NS_PER_MS
}

fn done(outcome: Outcome) -> Reply {
    Reply::Outcome(OutcomeReply { outcome, leader: NodeId(0) })
}

pub(crate) fn error(code: ErrorCode) -> Reply {
    let message = code.text().to_owned();
    Reply::Error(ErrorReply { code, message, leader: NodeId(0), retry_after_ms: 0 })
}
