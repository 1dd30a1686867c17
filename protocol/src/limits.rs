//! Every bound of the wire and of the replicated state, in one place (G9).

/// Longest key, in bytes of UTF-8. The shortest is 1.
pub const KEY_LEN_MAX: usize = 512;
/// Longest value attached to a hold, in bytes.
pub const VALUE_LEN_MAX: usize = 4096;
/// Longest session label, and longest `who` of a forced release, in bytes.
pub const LABEL_LEN_MAX: usize = 128;
/// Longest reason of a forced release, in bytes.
pub const REASON_LEN_MAX: usize = 256;

/// Shortest lease, in milliseconds.
pub const TTL_MS_MIN: u32 = 1_000;
/// Longest lease, in milliseconds.
pub const TTL_MS_MAX: u32 = 600_000;

/// Most shards of a cluster.
pub const SHARDS_MAX: u32 = 64;

/// How far above its acknowledged floor a lease's command numbers may run. Each acquire takes
/// three numbers (itself, its cancel, its release).
pub const WINDOW: u64 = 3 * 4096;
/// Queued acquires, and unread results, that one lease may have whose numbers the floor passed.
pub const OPEN_WAITS_MAX: usize = 4096;
/// Keys that one lease may hold or wait for, so that all of them fit one `HoldsReply`.
pub const LEASE_CLAIMS_MAX: usize = 4096;
/// Ends of last holds that a shard remembers: those of the latest half of as many keys at least.
pub const LAST_ENDS_MAX: usize = 4096;
/// Keys that one acquire may ask for.
pub const WANTS_MAX: usize = 64;
/// Most permits of a semaphore.
pub const PERMITS_MAX: u32 = 1024;
/// Most holders that the answer to a `Claim` shows.
pub const CLAIM_HOLDERS_MAX: usize = 16;
/// Longest lock-delay, in milliseconds.
pub const LOCK_DELAY_MS_MAX: u32 = 60_000;
/// Live leases of one shard.
pub const LEASES_MAX: usize = 1_000_000;
/// Most nodes that vote, or are to vote when the operation under way is done.
pub const MEMBERS_MAX: usize = 5;
/// Most nodes that a cluster has in its whole life.
pub const MEMBERS_EVER_MAX: usize = 1000;
/// Waiters of one key.
pub const QUEUE_LEN_MAX: usize = 100_000;
/// Results that one command may acknowledge.
pub const ACKS_MAX: usize = 64;

/// Length of a frame's header after its length field.
pub const HEADER_LEN: usize = 16;
/// Longest body on a client connection, in bytes.
pub const CLIENT_BODY_MAX: usize = 64 * 1024;
/// Longest body of a reply to a client, in bytes: longer than a request's, since one lease's holds
/// are answered in one piece.
pub const REPLY_BODY_MAX: usize = 4 * 1024 * 1024;
/// Longest body of a client's first frame, in bytes: little is granted before the handshake.
pub const HELLO_BODY_MAX: usize = 4 * 1024;
/// Longest proof of authority in a hello, in bytes.
pub const AUTH_LEN_MAX: usize = 1024;
/// Longest body on a peer connection, in bytes.
pub const PEER_BODY_MAX: usize = 4 * 1024 * 1024;
/// Leases renewed by one request.
pub const RENEW_BATCH_MAX: usize = 1024;
/// Entries of one page of a listing.
pub const PAGE_LEN_MAX: u32 = 256;
/// Requests of one connection that may await their final reply; waiting acquires count.
pub const IN_FLIGHT_MAX: usize = 16 * 1024;
/// Further requests beyond `IN_FLIGHT_MAX` that renew or end something (renew, cancel, release,
/// close), so that waiting acquires cannot keep a lease from being renewed or given up.
pub const IN_FLIGHT_RESERVE: usize = 1024;

/// Longest cursor of a watch, in bytes: one with a position in every shard.
pub const CURSOR_LEN_MAX: usize = 19 + 64 * 12 + 4;
/// Watches of one shard that one node serves.
pub const WATCHES_MAX: usize = 64 * 1024;
/// Watches of one connection.
pub const CONNECTION_WATCHES_MAX: usize = 4096;
/// Events of the past that a node keeps of all its shards together, in bytes; each shard has its
/// share, at least `HISTORY_SHARE_MIN`.
pub const HISTORY_BYTES: usize = 64 * 1024 * 1024;
/// The least that a shard keeps of its past events, in bytes.
pub const HISTORY_SHARE_MIN: usize = 2 * 1024 * 1024;
/// With this many unsent bytes of replies on a connection its watches end as `TooSlow`.
pub const WATCH_OUTPUT_MAX: usize = 4 * 1024 * 1024;

/// A connection that has not made its hello for this long is closed, in milliseconds.
pub const HANDSHAKE_MS_MAX: u64 = 5_000;
/// A connection on which no whole frame came for this long is closed by either side, in
/// milliseconds. Waiting requests do not keep it open; pings do.
pub const IDLE_MS_MAX: u64 = 60_000;
/// A client that has sent nothing for this long sends a ping, in milliseconds; at most twice this
/// passes between two of its frames.
pub const PING_AFTER_MS: u64 = 20_000;
/// With this many unsent bytes of replies a connection's further requests wait unread, until the
/// client takes replies.
pub const OUTPUT_LEN_HIGH: usize = 1024 * 1024;
/// With this many unsent bytes of replies a connection's reads are answered `busy`. The other
/// replies are small, and `IN_FLIGHT_MAX` bounds them.
pub const OUTPUT_LEN_MAX: usize = 16 * 1024 * 1024;
/// Longest message of an error reply, in bytes; a longer one is cut.
pub const MESSAGE_LEN_MAX: usize = 1024;
