//! Error codes: numeric, grouped in stable ranges, never reused; the same names on the wire, in
//! the clients, in the CLI's JSON and in the documents.
//!
//! Ranges: 1xx the connection, 2xx bad input, 3xx refused by the state, 4xx the cluster cannot
//! answer now, 5xx a fault.

use core::fmt;

use rkyv::{Archive, Deserialize, Serialize};

/// What a client may conclude from an error about the command that got it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// Definitely not applied; the same request may succeed later.
    Retryable,
    /// Definitely not applied; the same request will be refused again.
    NotApplied,
    /// Applied or not; a retry under the same number finds out.
    Unknown,
}

impl ErrorClass {
    /// The name in JSON and documents.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Retryable => "retryable",
            Self::NotApplied => "not_applied",
            Self::Unknown => "unknown",
        }
    }
}

/// A numeric error code. Codes that this build does not know keep their number.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ErrorCode(pub u16);

macro_rules! codes {
    ($($constant:ident = $number:literal, $name:literal, $class:ident, $text:literal;)*) => {
        impl ErrorCode {
            $(#[doc = $text] pub const $constant: Self = Self($number);)*

            /// Every known code, in ascending order.
            pub const ALL: &'static [Self] = &[$(Self::$constant),*];

            /// The stable name; `unknown_code` for a number that this build does not know.
            pub const fn name(self) -> &'static str {
                match self.0 { $($number => $name,)* _ => "unknown_code" }
            }

            /// What a client may conclude. Unknown codes are taken as `Unknown`.
            pub const fn class(self) -> ErrorClass {
                match self.0 { $($number => ErrorClass::$class,)* _ => ErrorClass::Unknown }
            }

            /// One sentence for a person.
            pub const fn text(self) -> &'static str {
                match self.0 { $($number => $text,)* _ => "an error code of a newer version" }
            }

            /// The code of a name, for tests and tools.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$constant),)* _ => None }
            }
        }
    };
}

codes! {
    MALFORMED = 100, "malformed", NotApplied, "The frame or its body is malformed.";
    FRAME_TOO_LARGE = 101, "frame_too_large", NotApplied, "The frame is longer than this connection allows.";
    BAD_CHECKSUM = 102, "bad_checksum", NotApplied, "The frame's checksum does not match.";
    UNSUPPORTED_VERSION = 103, "unsupported_version", NotApplied, "The two sides share no protocol version.";
    UNKNOWN_KIND = 104, "unknown_kind", NotApplied, "The frame's kind is not known here.";
    HANDSHAKE_EXPECTED = 105, "handshake_expected", NotApplied, "The first frame must be a hello.";
    WRONG_CLUSTER = 106, "wrong_cluster", NotApplied, "The other side belongs to another cluster.";
    AUTH_FAILED = 107, "auth_failed", NotApplied, "The cluster secret could not be proved.";
    FOREIGN_DISK = 108, "foreign_disk", NotApplied, "The member's data directory is not the one the cluster knows.";
    TOO_MANY_CONNECTIONS = 109, "too_many_connections", Retryable, "The node has no room for another connection.";
    TOO_MANY_IN_FLIGHT = 110, "too_many_in_flight", Retryable, "The connection has too many unanswered requests.";

    KEY_EMPTY = 200, "key_empty", NotApplied, "A key has 1 to 512 bytes; this one is empty.";
    KEY_TOO_LONG = 201, "key_too_long", NotApplied, "A key has 1 to 512 bytes; this one has more.";
    KEY_NOT_UTF8 = 202, "key_not_utf8", NotApplied, "A key is UTF-8; this one is not.";
    VALUE_TOO_LARGE = 203, "value_too_large", NotApplied, "A value has at most 4096 bytes.";
    TTL_OUT_OF_RANGE = 204, "ttl_out_of_range", NotApplied, "A TTL is 1,000 to 600,000 milliseconds.";
    LABEL_TOO_LONG = 205, "label_too_long", NotApplied, "A label has at most 128 bytes of UTF-8 and a reason at most 256.";
    UNSUPPORTED_MODE = 206, "unsupported_mode", NotApplied, "This mode of holding is not supported.";
    WRONG_SHARD = 207, "wrong_shard", NotApplied, "The key does not belong to the named shard, or there is no such shard.";
    TOO_MANY_ITEMS = 208, "too_many_items", NotApplied, "The request carries more items than allowed.";
    INTERNAL_COMMAND = 209, "internal_command", NotApplied, "Only the leader may propose this command.";
    NO_SUCH_NODE = 210, "no_such_node", NotApplied, "The cluster has no such node.";
    PERMITS_OUT_OF_RANGE = 211, "permits_out_of_range", NotApplied, "A semaphore has 1 to 1024 permits, and an acquire takes 1 to all of them.";
    DELAY_OUT_OF_RANGE = 212, "delay_out_of_range", NotApplied, "A lock-delay is 0 to 60,000 milliseconds.";
    BAD_COMBINATION = 213, "bad_combination", NotApplied, "These options do not go together.";
    DUPLICATE_KEY = 214, "duplicate_key", NotApplied, "The request names a key twice.";
    CURSOR_MALFORMED = 230, "cursor_malformed", NotApplied, "The cursor is not one that a watch gave out, or it has no position in the shard.";
    CURSOR_OF_OTHER_CLUSTER = 231, "cursor_of_other_cluster", NotApplied, "The cursor is a position in another cluster.";
    CURSOR_FROM_FUTURE = 232, "cursor_from_future", NotApplied, "The cursor is a position that the shard has not reached.";
    PAGE_OF_OTHER_QUERY = 233, "page_of_other_query", NotApplied, "The page goes on after a key that the query does not cover.";

    LEASE_DEAD = 300, "lease_dead", NotApplied, "The lease is not live: it ended, or it never was.";
    BAD_SECRET = 301, "bad_secret", NotApplied, "The lease's secret does not match.";
    NUMBER_BELOW_FLOOR = 302, "number_below_floor", NotApplied, "The number is at or below the acknowledged floor.";
    NUMBER_BEYOND_WINDOW = 303, "number_beyond_window", NotApplied, "The number is too far above the acknowledged floor.";
    NUMBER_CONFLICT = 304, "number_conflict", NotApplied, "The number was used for another request.";
    WINDOW_FULL = 305, "window_full", Retryable, "The lease has too many remembered results; acknowledge some.";
    HELD = 306, "held", NotApplied, "The key is held or waited for and the request does not wait.";
    ALREADY_HELD = 307, "already_held", NotApplied, "The lease already holds this key.";
    ALREADY_QUEUED = 308, "already_queued", NotApplied, "The lease already waits for this key.";
    NOT_OWNER = 309, "not_owner", NotApplied, "The lease does not hold the key under this token.";
    QUEUE_FULL = 310, "queue_full", Retryable, "The key has too many waiters.";
    LEASES_FULL = 311, "leases_full", Retryable, "The shard has too many live leases.";
    NOT_QUEUED = 312, "not_queued", NotApplied, "No wait of this lease has this number.";
    LEASE_LOST = 313, "lease_lost", NotApplied, "The lease ended while the request waited.";
    TOKENS_EXHAUSTED = 314, "tokens_exhausted", NotApplied, "The shard's token counter is at its end.";
    ALREADY_BEGUN = 315, "already_begun", NotApplied, "The shard was begun before.";
    CANCELLED = 316, "cancelled", NotApplied, "The request's cancel came first.";
    TIMED_OUT = 317, "timed_out", NotApplied, "The wait limit passed.";
    LEASE_FULL = 318, "lease_full", Retryable, "A lease holds or waits for at most 4096 keys; this one has as many.";
    UPGRADE_CONFLICT = 319, "upgrade_conflict", NotApplied, "Others hold the key too, so a shared hold cannot become exclusive.";
    HOLD_FORCED = 320, "hold_forced", NotApplied, "An operator forced this hold's end; it can only be released.";
    HOLD_REENTERED = 321, "hold_reentered", NotApplied, "The hold was re-entered; it keeps its mode until those entries are released.";
    LIMIT_MISMATCH = 322, "limit_mismatch", NotApplied, "The semaphore has another number of permits than the request states.";
    MODE_MISMATCH = 323, "mode_mismatch", NotApplied, "The key is in use as a lock and the request is for a semaphore, or the other way round.";
    PERMITS_ABOVE_LIMIT = 324, "permits_above_limit", NotApplied, "The semaphore was made smaller than what the request waits for.";
    NOT_IN_USE = 325, "not_in_use", NotApplied, "Nobody holds the key or waits for it.";
    DELAYED = 326, "delayed", NotApplied, "A hold of the key was lost, its lock-delay is not over, and the request does not wait.";
    NOT_DELAYED = 327, "not_delayed", NotApplied, "No lock-delay of this key was begun by this token's loss.";
    WATCHES_FULL = 330, "watches_full", Retryable, "The node or the connection has as many watches as it takes.";
    NODE_ID_USED = 340, "node_id_used", NotApplied, "This node id or data directory is or was a member's; neither is ever used again.";
    MEMBER_CHANGE_UNDER_WAY = 341, "member_change_under_way", NotApplied, "Another change of the membership is under way.";
    NOT_A_MEMBER = 342, "not_a_member", NotApplied, "The node is not a member of the cluster.";
    LAST_VOTER = 343, "last_voter", NotApplied, "The last voter cannot be removed.";
    TOO_MANY_MEMBERS = 344, "too_many_members", NotApplied, "A cluster has at most 5 members, and at most 1000 nodes in its whole life.";
    MEMBER_CHANGE_OVER = 345, "member_change_over", NotApplied, "This change of the membership is over, or further than the sender knew.";
    NODE_NOT_FRESH = 346, "node_not_fresh", NotApplied, "The node to be added has a data directory that was used, or another number of shards, cluster name or node id.";
    NO_MAJORITY_LEFT = 347, "no_majority_left", NotApplied, "Too few of the remaining voters answer; they would be no majority.";
    NODE_UNREACHABLE = 348, "node_unreachable", NotApplied, "The node to be added does not answer; nothing was changed.";

    NOT_LEADER = 400, "not_leader", Retryable, "The node does not lead the shard.";
    NO_QUORUM = 401, "no_quorum", Retryable, "No majority of the shard's nodes can be reached.";
    BUSY = 402, "busy", Retryable, "The node has more work queued than it accepts.";
    OUTCOME_UNKNOWN = 403, "outcome_unknown", Unknown, "The command may have been applied; retry it under its number.";
    RESYNC = 404, "resync", Unknown, "The node lost track of this wait; send the request again under its number.";
    SHUTTING_DOWN = 405, "shutting_down", Retryable, "The node is shutting down.";
    NOT_READY = 406, "not_ready", Retryable, "The shard has not begun, or the node waits for admission.";
    LEASE_EXPIRING = 407, "lease_expiring", Retryable, "The lease's end is proposed; the outcome is not known yet.";
    DEADLINE = 408, "deadline", Unknown, "The request's deadline passed before its outcome was known.";
    UNREACHABLE = 409, "unreachable", Retryable, "No node could be reached.";
    NODE_REMOVED = 420, "node_removed", Retryable, "The node is no longer a member of the cluster; another one answers.";
    QUARANTINED = 430, "quarantined", Retryable, "The cluster was restored from a backup, and no key is granted until the old cluster's leases are over.";
    BACKUP_GONE = 431, "backup_gone", NotApplied, "The node does not have this backup of the shard; begin it anew.";

    INTERNAL = 500, "internal", Unknown, "A fault of the server.";
    STORAGE_FAILED = 501, "storage_failed", Unknown, "The node's storage failed; the node is stopping.";
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

impl fmt::Debug for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
