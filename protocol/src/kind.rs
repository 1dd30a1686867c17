//! A frame's kind: one byte that names the type of its body. Numbers are never reused.

/// The client's first frame: a `ClientHello`.
pub const HELLO: u8 = 1;
/// A `CommandRequest`.
pub const COMMAND: u8 = 2;
/// A `RenewRequest`.
pub const RENEW: u8 = 3;
/// A `GetRequest`.
pub const GET: u8 = 4;
/// A `ListRequest`.
pub const LIST: u8 = 5;
/// A `SessionsRequest`.
pub const SESSIONS: u8 = 6;
/// A `HoldsRequest`.
pub const HOLDS: u8 = 7;
/// A `StatusRequest`.
pub const STATUS: u8 = 8;
/// A `TransferRequest`.
pub const TRANSFER: u8 = 9;
/// Empty.
pub const PING: u8 = 10;
/// A `ClaimRequest`.
pub const CLAIM: u8 = 11;
/// A `WatchRequest`.
pub const WATCH: u8 = 12;
/// An `UnwatchRequest`.
pub const UNWATCH: u8 = 13;

/// A `MembersRequest`.
pub const MEMBERS: u8 = 20;
/// A `MemberChangeRequest`.
pub const MEMBER_CHANGE: u8 = 21;
/// A `GroupStepRequest`; from a node to another only.
pub const GROUP_STEP: u8 = 22;
/// A `BackupRequest`.
pub const BACKUP: u8 = 25;

/// A `ServerHello`.
pub const SERVER_HELLO: u8 = 129;
/// An `OutcomeReply`.
pub const OUTCOME: u8 = 130;
/// A `RenewReply`.
pub const RENEWED: u8 = 131;
/// A `KeysReply`.
pub const KEYS: u8 = 132;
/// A `SessionsReply`.
pub const SESSIONS_REPLY: u8 = 134;
/// A `HoldsReply`.
pub const HOLDS_REPLY: u8 = 135;
/// A `StatusReply`.
pub const STATUS_REPLY: u8 = 136;
/// Empty: leadership moved.
pub const TRANSFERRED: u8 = 137;
/// Empty.
pub const PONG: u8 = 138;
/// A `ClaimReply`.
pub const CLAIM_REPLY: u8 = 139;
/// A `WatchEvents`.
pub const WATCH_EVENTS: u8 = 140;
/// A `WatchState`.
pub const WATCH_STATE: u8 = 141;
/// A `WatchNotice`.
pub const WATCH_NOTICE: u8 = 142;
/// A `WatchEnd`.
pub const WATCH_END: u8 = 143;
/// Empty: a watch was ended as asked.
pub const UNWATCHED: u8 = 144;

/// A `MembersReply`.
pub const MEMBERS_REPLY: u8 = 150;
/// A `MemberChangeReply`.
pub const MEMBER_CHANGED: u8 = 151;
/// A `ShardProgress`.
pub const GROUP_STEPPED: u8 = 152;
/// A `BackupReply`.
pub const BACKUP_PART: u8 = 155;

/// Lowest kind that peers use between each other.
pub const PEER_MIN: u8 = 192;
/// Highest kind that peers use between each other.
pub const PEER_MAX: u8 = 223;

/// An `ErrorReply`.
pub const ERROR: u8 = 255;

/// True for the kinds of frames between nodes, which a client port refuses.
pub const fn is_peer(kind: u8) -> bool {
    PEER_MIN <= kind && kind <= PEER_MAX
}

/// A short name, for messages and metrics.
pub const fn name(kind: u8) -> &'static str {
    match kind {
        HELLO => "hello",
        COMMAND => "command",
        RENEW => "renew",
        GET => "get",
        LIST => "list",
        SESSIONS => "sessions",
        HOLDS => "holds",
        STATUS => "status",
        TRANSFER => "transfer",
        PING => "ping",
        CLAIM => "claim",
        WATCH => "watch",
        UNWATCH => "unwatch",
        MEMBERS => "members",
        MEMBER_CHANGE => "member_change",
        GROUP_STEP => "group_step",
        BACKUP => "backup",
        SERVER_HELLO => "server_hello",
        OUTCOME => "outcome",
        RENEWED => "renewed",
        KEYS => "keys",
        SESSIONS_REPLY => "sessions_reply",
        HOLDS_REPLY => "holds_reply",
        STATUS_REPLY => "status_reply",
        TRANSFERRED => "transferred",
        PONG => "pong",
        CLAIM_REPLY => "claim_reply",
        WATCH_EVENTS => "watch_events",
        WATCH_STATE => "watch_state",
        WATCH_NOTICE => "watch_notice",
        WATCH_END => "watch_end",
        UNWATCHED => "unwatched",
        MEMBERS_REPLY => "members_reply",
        MEMBER_CHANGED => "member_changed",
        GROUP_STEPPED => "group_stepped",
        BACKUP_PART => "backup_part",
        ERROR => "error",
        PEER_MIN..=PEER_MAX => "peer",
        _ => "unknown",
    }
}
