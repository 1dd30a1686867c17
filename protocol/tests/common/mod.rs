//! One example of every message, shared by the tests of this folder: each request and reply kind,
//! each command and each outcome, with every optional part both present and absent.

#![allow(dead_code, reason = "each test binary uses its part")]

use leasehold_protocol::command::{Caller, Command, OwnLease, Want};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{EndReason, EventKind};
use leasehold_protocol::frame::{MAGIC, VERSION_MAX, VERSION_MIN};
use leasehold_protocol::ids::{
    ClusterId, DiskId, HoldSetVersion, LeaseId, Mode, NodeId, Number, RequestId, Revision, Secret,
    ShardId, Token,
};
use leasehold_protocol::member::{
    GroupGoal, GroupStepRequest, MemberChange, MemberChangeReply, MemberChangeRequest,
    MemberCommand, MemberInfo, MemberOperation, MemberPhase, MembersReply, MembersRequest,
    NewMember, ShardProgress, Standing,
};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::peer::MemberEntry;
use leasehold_protocol::reply::{
    BackupReply, BackupShard, ClaimReply, Claimed, Delay, ErrorReply, HeldKey, Holder, HoldsReply,
    KeyInfo, KeysReply, LastEnd, LeaderHint, NodeAddress, NodeStatus, OutcomeReply, RenewReply,
    RenewResult, Reply, Role, ServerHello, SessionInfo, SessionsReply, ShardStatus, StatusReply,
    Waiter, Waiting, YieldRequest,
};
use leasehold_protocol::request::{
    BackupRequest, ClaimRequest, ClientHello, CommandRequest, Freshness, GetRequest, HoldsRequest,
    ListRequest, RenewItem, RenewRequest, Request, SessionsRequest, StatusRequest, TransferRequest,
};
use leasehold_protocol::watch::{
    Cursor, UnwatchRequest, WatchEnd, WatchEndReason, WatchEvent, WatchEvents, WatchFrom,
    WatchNotice, WatchRequest, WatchState,
};

/// The cluster of all examples.
pub(crate) const CLUSTER: ClusterId = ClusterId(*b"example-cluster!");
const SECRET: Secret = Secret([0x5e; 16]);
const TOKEN: Token = Token(0x0102_0304_0506_0708);
const REVISION: Revision = Revision(0x1112_1314);

pub(crate) fn caller() -> Caller {
    Caller {
        lease: LeaseId(7),
        secret: SECRET,
        number: Number(40),
        floor: Number(36),
        acks: vec![Number(31), Number(34)],
    }
}

pub(crate) fn acquire() -> Request {
    command(Command::Acquire {
        caller: Caller { acks: vec![], ..caller() },
        key: b"jobs/nightly".to_vec(),
        mode: Mode::EXCLUSIVE,
        own: None,
        value: b"worker-3".to_vec(),
        wait_ms: 10_000,
    })
}

fn command(command: Command) -> Request {
    Request::Command(CommandRequest { shard: ShardId(3), timeout_ms: 5_000, command })
}

pub(crate) fn client_hello() -> ClientHello {
    ClientHello {
        magic: MAGIC,
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        cluster: CLUSTER,
        features: 0,
        auth: b"proof".to_vec(),
    }
}

fn commands() -> Vec<(&'static str, Request)> {
    let mut all = plain_commands();
    all.extend(further_commands());
    all.extend(commands_with_options());
    all.extend(restored_commands());
    all
}

fn plain_commands() -> Vec<(&'static str, Request)> {
    let key = b"jobs/nightly".to_vec();
    vec![
        (
            "open",
            command(Command::Open { ttl_ms: 15_000, secret: SECRET, label: b"host-1/42".to_vec() }),
        ),
        ("acquire", acquire()),
        (
            "acquire-own",
            command(Command::Acquire {
                caller: caller(),
                key: key.clone(),
                mode: Mode::EXCLUSIVE,
                own: Some(OwnLease { ttl_ms: 30_000, secret: SECRET }),
                value: vec![],
                wait_ms: u32::MAX,
            }),
        ),
        ("cancel", command(Command::Cancel { caller: caller(), release_if_granted: true })),
        ("release", command(Command::Release { caller: caller(), key: key.clone(), token: TOKEN })),
        (
            "release-own",
            command(Command::ReleaseOwn {
                lease: LeaseId(8),
                secret: SECRET,
                key: key.clone(),
                token: TOKEN,
            }),
        ),
        ("close", command(Command::Close { lease: LeaseId(7), secret: SECRET })),
        (
            "force-release",
            command(Command::ForceRelease {
                key: key.clone(),
                token: TOKEN,
                who: b"operator".to_vec(),
                why: b"host-1 is gone".to_vec(),
                now: false,
            }),
        ),
    ]
}

fn restored_commands() -> Vec<(&'static str, Request)> {
    vec![
        (
            "begin-restored",
            command(Command::BeginRestored {
                token_base: TOKEN,
                lease_base: 1 << 32,
                revision_base: 2 << 32,
                quarantine_ms: 600_600,
            }),
        ),
        ("end-quarantine", command(Command::EndQuarantine)),
    ]
}

fn further_commands() -> Vec<(&'static str, Request)> {
    let key = b"jobs/nightly".to_vec();
    vec![
        ("begin", command(Command::Begin { token_base: TOKEN })),
        ("expire", command(Command::Expire { lease: LeaseId(7) })),
        ("end-forced", command(Command::EndForced { key: key.clone(), token: TOKEN })),
        (
            "convert",
            command(Command::Convert {
                caller: caller(),
                key: key.clone(),
                token: TOKEN,
                mode: Mode::SHARED,
            }),
        ),
        (
            "set-limit",
            command(Command::SetLimit { key: key.clone(), limit: 7, who: b"operator".to_vec() }),
        ),
        ("end-delay", command(Command::EndDelay { key: key.clone(), token: TOKEN })),
        (
            "set-value",
            command(Command::SetValue {
                caller: caller(),
                key: key.clone(),
                token: TOKEN,
                value: b"10.0.0.9:80".to_vec(),
            }),
        ),
        (
            "ask-yield",
            command(Command::AskYield {
                key: key.clone(),
                token: TOKEN,
                who: b"operator".to_vec(),
                why: b"host-1 is drained".to_vec(),
                within_ms: 60_000,
            }),
        ),
        (
            "member",
            command(Command::Member(MemberCommand::Start {
                add: Some(member_entry()),
                remove: Some(NodeId(2)),
            })),
        ),
        ("time-out", command(Command::TimeOut { lease: LeaseId(7), number: Number(40) })),
    ]
}

fn commands_with_options() -> Vec<(&'static str, Request)> {
    let key = b"jobs/nightly".to_vec();
    vec![
        (
            "acquire-all",
            command(Command::AcquireAll {
                caller: caller(),
                wants: vec![Want { key, mode: Mode::permits(2), limit: 5, reentrant: true }],
                own: None,
                value: b"worker-3".to_vec(),
                wait_ms: 10_000,
                delay_ms: 15_000,
            }),
        ),
        (
            "acquire-several",
            command(Command::AcquireAll {
                caller: caller(),
                wants: ["jobs/{eu}/1", "jobs/{eu}/2"]
                    .map(|key| Want {
                        key: key.as_bytes().to_vec(),
                        mode: Mode::EXCLUSIVE,
                        limit: 0,
                        reentrant: false,
                    })
                    .to_vec(),
                own: None,
                value: Vec::new(),
                wait_ms: 10_000,
                delay_ms: 0,
            }),
        ),
        ("release-all", command(Command::ReleaseAll { caller: caller(), acquire: Number(38) })),
    ]
}

fn cursor() -> Vec<u8> {
    Cursor::of(CLUSTER, ShardId(3), REVISION).encode()
}

fn watches() -> Vec<(&'static str, Request)> {
    let watch = |prefix, key: &str, from| {
        let key = key.as_bytes().to_vec();
        Request::Watch(WatchRequest { shard: ShardId(3), prefix, key, from })
    };
    vec![
        ("watch", watch(false, "jobs/nightly", WatchFrom::Now)),
        ("watch-state", watch(true, "", WatchFrom::State)),
        ("watch-cursor", watch(true, "jobs/", WatchFrom::Cursor { cursor: cursor() })),
        (
            "watch-page",
            watch(
                true,
                "jobs/",
                WatchFrom::Page { cursor: cursor(), after: b"jobs/nightly".to_vec() },
            ),
        ),
        ("unwatch", Request::Unwatch(UnwatchRequest { id: RequestId(41) })),
    ]
}

/// One event of each kind that has a key.
fn watch_events() -> Vec<WatchEvent> {
    let (key, lease, token) = (b"jobs/nightly".to_vec(), LeaseId(7), TOKEN);
    let (who, why) = (b"operator".to_vec(), b"host-1 is gone".to_vec());
    let (mode, number) = (Mode::permits(2), Number(40));
    let outcome = Outcome::TimedOut { revision: REVISION };
    let reason = EndReason::Forced { who: who.clone(), why: why.clone() };
    let kinds = vec![
        EventKind::Granted {
            key: key.clone(),
            lease,
            mode,
            token,
            slots: vec![0b101, 1],
            limit: 12,
        },
        EventKind::Queued { key: key.clone(), lease, number, wait_ms: 10_000, mode },
        EventKind::WaitEnded { key: key.clone(), lease, number, outcome },
        EventKind::Ended { key: key.clone(), lease, token, reason },
        EventKind::Ended { key: key.clone(), lease, token, reason: EndReason::LeaseExpired },
        EventKind::ForcedPending {
            key: key.clone(),
            lease,
            token,
            who: who.clone(),
            why: why.clone(),
        },
        EventKind::Vacant { key: key.clone() },
        EventKind::Converted { key: key.clone(), lease, token, mode: Mode::SHARED },
        EventKind::LimitChanged { key: key.clone(), limit: 7, who: who.clone() },
        EventKind::DelayBegan { key: key.clone(), token, delay_ms: 15_000 },
        EventKind::DelayEnded { key: key.clone(), token },
        EventKind::ValueChanged { key: key.clone(), lease, token, value: b"10.0.0.9:80".to_vec() },
        EventKind::YieldAsked { key, lease, token, who, why, within_ms: 60_000 },
    ];
    let told = |kind| WatchEvent {
        revision: REVISION,
        kind,
        label: "host-1/42".into(),
        value: b"worker-3".to_vec(),
    };
    kinds.into_iter().map(told).collect()
}

fn watch_replies() -> Vec<(&'static str, Reply)> {
    let (shard, revision) = (ShardId(3), REVISION);
    let events = |events, more| Reply::WatchEvents(WatchEvents { shard, revision, events, more });
    let end = |reason| Reply::WatchEnd(WatchEnd { shard, reason });
    let keys = keys_reply().keys;
    vec![
        ("watch-events", events(watch_events(), true)),
        ("watch-progress", events(vec![], false)),
        (
            "watch-state-reply",
            Reply::WatchState(WatchState { shard, revision, first: true, keys, more: false }),
        ),
        ("watch-notice", Reply::WatchNotice(WatchNotice { shard, quorum: true })),
        ("watch-continue", end(WatchEndReason::Continue)),
        ("watch-cancelled", end(WatchEndReason::Cancelled)),
        ("watch-too-slow", end(WatchEndReason::TooSlow)),
        ("unwatched", Reply::Unwatched),
    ]
}

pub(crate) fn member_entry() -> MemberEntry {
    MemberEntry {
        node: NodeId(4),
        disk: DiskId(*b"a-data-directory"),
        peer_addr: "10.0.0.4:7401".to_owned(),
        client_addr: "10.0.0.4:7400".to_owned(),
    }
}

fn get_request() -> GetRequest {
    GetRequest {
        key: b"jobs/nightly".to_vec(),
        holders_after: LeaseId(7),
        freshness: Freshness::Linearizable,
        timeout_ms: 5_000,
    }
}

/// Every request, by the name of its golden file.
pub(crate) fn requests() -> Vec<(&'static str, Request)> {
    let (shard, timeout_ms) = (ShardId(3), 5_000);
    let item = RenewItem { lease: LeaseId(7), secret: SECRET, version: HoldSetVersion(2) };
    let mut all = vec![
        ("hello", Request::Hello(client_hello())),
        ("renew", Request::Renew(RenewRequest { shard, timeout_ms, items: vec![item, item] })),
        ("get", Request::Get(get_request())),
        (
            "list",
            Request::List(ListRequest {
                shard,
                prefix: b"jobs/".to_vec(),
                after: b"jobs/a".to_vec(),
                limit: 100,
                freshness: Freshness::Stale,
                timeout_ms,
            }),
        ),
        (
            "sessions",
            Request::Sessions(SessionsRequest { shard, after: LeaseId(6), limit: 256, timeout_ms }),
        ),
        (
            "holds",
            Request::Holds(HoldsRequest { shard, lease: LeaseId(7), secret: SECRET, timeout_ms }),
        ),
        (
            "claim",
            Request::Claim(ClaimRequest {
                shard,
                lease: LeaseId(7),
                secret: SECRET,
                number: Number(40),
                timeout_ms,
            }),
        ),
        ("backup", Request::Backup(BackupRequest { shard, ticket: 99, part: 2, timeout_ms })),
        ("status", Request::Status(StatusRequest { timeout_ms })),
        ("transfer", Request::Transfer(TransferRequest { shard, to: NodeId(2), timeout_ms })),
        ("members", Request::Members(MembersRequest { timeout_ms })),
        (
            "member-change",
            Request::MemberChange(MemberChangeRequest {
                change: MemberChange::Replace {
                    old: NodeId(2),
                    new: NewMember {
                        node: NodeId(4),
                        peer_addr: "10.0.0.4:7401".to_owned(),
                        client_addr: String::new(),
                    },
                },
                timeout_ms,
            }),
        ),
        (
            "group-step",
            Request::GroupStep(GroupStepRequest {
                shard,
                version: 5,
                goal: GroupGoal::Voters(vec![member_entry()]),
                timeout_ms,
            }),
        ),
        ("ping", Request::Ping),
    ];
    all.extend(watches());
    all.extend(commands());
    all
}

pub(crate) fn server_hello() -> ServerHello {
    ServerHello {
        version: VERSION_MAX,
        cluster: CLUSTER,
        node: NodeId(1),
        shards: 4,
        key_hash: leasehold_protocol::shard::KEY_HASH,
        features: 0,
        nodes: vec![
            NodeAddress { node: NodeId(1), client_addr: "10.0.0.1:7400".into() },
            NodeAddress { node: NodeId(2), client_addr: "n2:7400".into() },
        ],
        leaders: vec![LeaderHint { shard: ShardId(3), leader: NodeId(2) }],
        server_version: "0.1.0".into(),
    }
}

pub(crate) fn outcome(outcome: Outcome) -> Reply {
    Reply::Outcome(OutcomeReply { outcome, leader: NodeId(2) })
}

pub(crate) fn granted() -> Reply {
    outcome(Outcome::Granted(Grant {
        lease: LeaseId(7),
        token: TOKEN,
        revision: REVISION,
        version_before: HoldSetVersion(2),
        version_after: HoldSetVersion(3),
        floor: TOKEN,
    }))
}

pub(crate) fn queued() -> Reply {
    outcome(Outcome::Queued { position: 5, revision: REVISION })
}

fn outcomes() -> Vec<(&'static str, Reply)> {
    let (token, revision) = (TOKEN, REVISION);
    let code = ErrorCode::NOT_OWNER;
    vec![
        ("opened", outcome(Outcome::Opened { lease: LeaseId(7), revision })),
        ("granted", granted()),
        ("queued", queued()),
        ("cancelled", outcome(Outcome::Cancelled { revision })),
        ("timed-out", outcome(Outcome::TimedOut { revision })),
        ("released", outcome(Outcome::Released { token, revision })),
        ("closed", outcome(Outcome::Closed { revision })),
        ("forced", outcome(Outcome::Forced { token, passed_on: true, revision })),
        ("begun", outcome(Outcome::Begun { revision })),
        ("members-outcome", outcome(Outcome::Members { version: 5, operation: 4, revision })),
        ("changed", outcome(Outcome::Changed { token, revision })),
        ("refused", outcome(Outcome::Refused { code, token, revision })),
    ]
}

fn keys_reply() -> KeysReply {
    let holder = Holder {
        lease: LeaseId(7),
        token: TOKEN,
        mode: Mode::SHARED,
        floor: Token(9),
        label: "host-1/42".into(),
        value: b"worker-3".to_vec(),
        since_ms: 1_764_000_000_000,
        remaining_ms: Some(9_500),
        number: Number(40),
        own_lease: false,
        forced: true,
        slots: vec![0b101, 1],
        entries: 2,
        delay_ms: 15_000,
        asked: Some(YieldRequest {
            who: "operator".into(),
            why: "host-1 is drained".into(),
            within_ms: 60_000,
        }),
    };
    let delay =
        Delay { token: TOKEN, mode: Mode::EXCLUSIVE, delay_ms: 15_000, remaining_ms: Some(9_500) };
    let waiter = Waiter {
        lease: LeaseId(9),
        number: Number(1),
        mode: Mode::EXCLUSIVE,
        position: 0,
        label: "host-2/17".into(),
    };
    let vacant = KeyInfo {
        key: "jobs/é".into(),
        holders: vec![],
        holders_total: 0,
        waiters: vec![],
        waiters_total: 0,
        limit: 0,
        taken: 0,
        delays: vec![],
        delays_total: 0,
        last_end: Some(LastEnd {
            lease: LeaseId(9),
            label: "host-2/17".into(),
            token: TOKEN,
            mode: Mode::EXCLUSIVE,
            reason: EndReason::Forced { who: b"operator".to_vec(), why: b"host-2 hangs".to_vec() },
            revision: REVISION,
            at_ms: 1_764_000_000_000,
        }),
    };
    let held = KeyInfo {
        key: "jobs/nightly".into(),
        holders: vec![holder.clone(), Holder { remaining_ms: None, asked: None, ..holder }],
        holders_total: 300,
        waiters: vec![waiter],
        waiters_total: 12,
        limit: 5,
        taken: 4,
        delays: vec![delay.clone(), Delay { remaining_ms: None, ..delay }],
        delays_total: 2,
        last_end: None,
    };
    KeysReply {
        shard: ShardId(3),
        revision: REVISION,
        stale: true,
        age_ms: Some(730),
        keys: vec![held, vacant],
        more: true,
    }
}

fn sessions_reply() -> SessionsReply {
    let session = SessionInfo {
        lease: LeaseId(7),
        label: "host-1/42".into(),
        ttl_ms: 15_000,
        remaining_ms: Some(9_500),
        holds: 2,
        waits: 1,
        own_lease: false,
    };
    SessionsReply { revision: REVISION, sessions: vec![session], more: false }
}

fn holds_reply() -> HoldsReply {
    let held = HeldKey {
        key: b"jobs/nightly".to_vec(),
        token: TOKEN,
        mode: Mode::EXCLUSIVE,
        number: Number(40),
        forced: false,
        slots: vec![0b101, 1],
        entries: 1,
        asked: true,
        floor: TOKEN,
    };
    HoldsReply {
        revision: REVISION,
        version: HoldSetVersion(3),
        holds: vec![held],
        waits: vec![Number(43), Number(46)],
    }
}

fn backup_reply() -> BackupReply {
    let about = BackupShard {
        shard: ShardId(3),
        revision: REVISION,
        last_token: TOKEN,
        last_lease: LeaseId(8),
        leases: 2,
        keys: 1,
    };
    BackupReply { about, ticket: 99, part: 2, last: true, bytes: b"a piece".to_vec() }
}

fn claim_reply(claim: Claimed) -> Reply {
    Reply::Claim(ClaimReply { revision: REVISION, claim })
}

fn status_reply() -> StatusReply {
    let shard = |role| ShardStatus {
        shard: ShardId(3),
        role,
        term: 5,
        leader: NodeId(2),
        last_index: 100,
        applied_index: 99,
        applied_revision: REVISION,
        digest: 0xfeed_f00d_dead_beef,
        snapshot_index: 64,
    };
    let node = |node, reachable, shards| NodeStatus {
        node,
        client_addr: "10.0.0.1:7400".into(),
        reachable,
        version: "0.1.0".into(),
        shards,
    };
    StatusReply {
        cluster: CLUSTER,
        shards: 4,
        nodes: vec![
            node(NodeId(1), true, vec![shard(Role::Leader), shard(Role::Follower)]),
            node(
                NodeId(2),
                true,
                vec![shard(Role::Candidate), shard(Role::Learner), shard(Role::Outside)],
            ),
            node(NodeId(3), false, vec![]),
        ],
    }
}

fn members_reply() -> MembersReply {
    let used = MemberEntry {
        node: NodeId(2),
        peer_addr: String::new(),
        client_addr: String::new(),
        ..member_entry()
    };
    MembersReply {
        revision: REVISION,
        version: 5,
        members: vec![
            MemberInfo { entry: used, standing: Standing::Removed },
            MemberInfo { entry: member_entry(), standing: Standing::Joining },
        ],
        operation: Some(MemberOperation {
            operation: 5,
            phase: MemberPhase::Learn,
            add: NodeId(4),
            remove: NodeId(0),
        }),
        progress: vec![ShardProgress {
            shard: ShardId(3),
            done: false,
            behind: 1200,
            waits: "1200 entries behind".to_owned(),
        }],
    }
}

pub(crate) fn error_reply() -> ErrorReply {
    ErrorReply {
        leader: NodeId(2),
        retry_after_ms: 50,
        ..ErrorReply::new(ErrorCode::TTL_OUT_OF_RANGE, "ttl_ms 5 is not in 1000..=600000")
    }
}

/// Every reply, by the name of its golden file.
pub(crate) fn replies() -> Vec<(&'static str, Reply)> {
    let renewed = |error| RenewResult {
        lease: LeaseId(7),
        error,
        ttl_ms: 15_000,
        version: HoldSetVersion(3),
    };
    let waiting = || Waiting {
        key: b"jobs/nightly".to_vec(),
        position: 3,
        waiters_total: 12,
        holders: keys_reply().keys.remove(0).holders,
    };
    let waits = Claimed::Waits(waiting());
    let mut all = vec![
        ("server-hello", Reply::Hello(server_hello())),
        (
            "renewed",
            Reply::Renewed(RenewReply {
                results: vec![renewed(None), renewed(Some(ErrorCode::LEASE_DEAD))],
                leader: NodeId(0),
            }),
        ),
        ("keys", Reply::Keys(keys_reply())),
        ("sessions-reply", Reply::Sessions(sessions_reply())),
        ("holds-reply", Reply::Holds(holds_reply())),
        ("claim-waits", claim_reply(waits)),
        ("claim-holds", claim_reply(Claimed::Holds(holds_reply().holds.remove(0)))),
        ("claim-over", claim_reply(Claimed::Over)),
        ("claim-waits-all", claim_reply(Claimed::WaitsAll(vec![waiting(), waiting()]))),
        ("claim-holds-all", claim_reply(Claimed::HoldsAll(holds_reply().holds))),
        ("backup-part", Reply::Backup(backup_reply())),
        ("status-reply", Reply::Status(status_reply())),
        ("members-reply", Reply::Members(members_reply())),
        ("member-changed", Reply::MemberChanged(MemberChangeReply { operation: 5 })),
        ("group-stepped", Reply::GroupStepped(members_reply().progress.remove(0))),
        ("transferred", Reply::Transferred),
        ("pong", Reply::Pong),
        ("error", Reply::Error(error_reply())),
    ];
    all.extend(outcomes());
    all.extend(watch_replies());
    all
}
