//! The planted faults. Each is a branch on `planted!` in the product's source.
//!
//! A real fault that is found joins them, if it can be told in a line or two.

use crate::programs::Tier;

/// One fault.
pub(crate) struct Fault {
    pub(crate) name: &'static str,
    /// The guarantee that it breaks first.
    pub(crate) rule: &'static str,
    pub(crate) breaks: &'static str,
    /// Where it is looked for, in this order.
    pub(crate) tiers: &'static [Tier],
}

const STATE: &[Tier] =
    &[Tier::Core, Tier::Simulator, Tier::Cluster, Tier::Processes, Tier::LongSimulator];
const TIME: &[Tier] =
    &[Tier::Core, Tier::Server, Tier::Shard, Tier::Simulator, Tier::LongSimulator];
const ROUNDS: &[Tier] =
    &[Tier::Server, Tier::Raft, Tier::Shard, Tier::Simulator, Tier::Processes, Tier::LongSimulator];
const GROUP: &[Tier] =
    &[Tier::Raft, Tier::Shard, Tier::Simulator, Tier::Processes, Tier::LongSimulator];
const LEASES: &[Tier] =
    &[Tier::Server, Tier::Shard, Tier::Simulator, Tier::Cluster, Tier::LongSimulator];
const ANSWERS: &[Tier] = &[Tier::Shard, Tier::Simulator, Tier::Cluster, Tier::LongSimulator];
const WATCHES: &[Tier] = &[Tier::Server, Tier::Simulator, Tier::LongSimulator];
const LOG: &[Tier] =
    &[Tier::Wal, Tier::Server, Tier::Raft, Tier::Simulator, Tier::Processes, Tier::LongSimulator];
const CLIENT: &[Tier] = &[Tier::Client, Tier::Cluster, Tier::Processes];
const WIRE: &[Tier] = &[Tier::Protocol];
const SERVICE: &[Tier] = &[Tier::Shard, Tier::Simulator, Tier::Processes, Tier::LongSimulator];
const RESTORES: &[Tier] = &[Tier::Server, Tier::Simulator, Tier::Processes, Tier::LongSimulator];

const fn fault(
    name: &'static str,
    rule: &'static str,
    breaks: &'static str,
    tiers: &'static [Tier],
) -> Fault {
    Fault { name, rule, breaks, tiers }
}

/// All of them.
#[rustfmt::skip]
pub(crate) const FAULTS: &[Fault] = &[
    fault("ack-before-sync", "G5",
        "a write is acknowledged before it is on disk", LOG),
    fault("vote-not-persisted", "G5",
        "a vote is not written, so a node may vote twice in one term", LOG),
    fault("permit-too-many", "G1",
        "a semaphore gives away a permit more than its limit", STATE),
    fault("readers-starve-writers", "G4",
        "a reader passes by a waiting writer", STATE),
    fault("upgrade-waits", "G8",
        "an upgrade beside another reader waits instead of failing", STATE),
    fault("stale-end-of-delay", "G3",
        "the late end of a former lock-delay ends the present one", STATE),
    fault("several-past-a-queue", "G4",
        "an acquire of several keys is granted though it is not the first in one of the queues", STATE),
    fault("entry-released-for-all", "G1",
        "the first release ends a hold that was entered more than once", STATE),
    fault("token-reset-on-recreation", "G2",
        "a key that comes back counts its tokens from 1", STATE),
    fault("token-from-leader-memory", "G2",
        "tokens come from a counter in the process's memory", STATE),
    fault("expired-a-tick-early", "G3",
        "a lease is expired 25 ms before its end", LEASES),
    fault("deadline-without-pad", "G3",
        "a leader whose clock runs fast ends leases early", TIME),
    fault("old-deadlines-kept", "G3",
        "a leader that is elected again goes by the deadlines of its former time", LEASES),
    fault("take-over-gives-half-a-ttl", "G3",
        "a new leader gives leases half of their TTL", TIME),
    fault("dead-waiter-granted", "G4",
        "a waiter whose lease ended is granted", STATE),
    fault("waiters-from-the-back", "G4",
        "who came last is served first", STATE),
    fault("read-without-barrier", "G7",
        "a leader that was deposed answers reads", ANSWERS),
    fault("damage-taken-for-a-torn-tail", "G5",
        "valid records behind a damaged one are dropped without a word", LOG),
    fault("failed-sync-retried", "G5",
        "a sync that failed is tried again and then believed", LOG),
    fault("stale-token-releases", "G2",
        "a release with an old token ends the present holder's hold", STATE),
    fault("snapshot-forgets-waiters", "G4",
        "a snapshot has no queues", STATE),
    fault("retry-applied-twice", "G5",
        "the retry of an acquire is executed again", STATE),
    fault("deposed-leader-renews", "G1",
        "a leader that was deposed acknowledges renewals", ANSWERS),
    fault("confirmed-by-the-engine", "G1",
        "a round is confirmed by the Raft library's own stamp", GROUP),
    fault("credit-at-the-answer", "G1",
        "an answer confirms what came after its request had left", ROUNDS),
    fault("stamp-at-enqueue", "G1",
        "a frame is stamped when it is queued, not when it leaves", ROUNDS),
    fault("self-count-from-metrics", "G1",
        "a leader that voted for another still counts itself", ROUNDS),
    fault("read-from-a-lagging-apply", "G7",
        "a leader answers before it applied what others may have told", ROUNDS),
    fault("max-of-known-and-seen", "G1",
        "a client takes the highest hold-set version it saw for the one it knows", CLIENT),
    fault("dead-lease-from-a-lagging-apply", "G3",
        "a node that lags behind says that a live lease is dead", ANSWERS),
    fault("durable-seq-at-staging", "G8",
        "records claim to be durable before they are: a torn tail looks like damage", LOG),
    fault("early-cancel-forgotten", "G5",
        "an acquire that comes after its cancel is executed", STATE),
    fault("snapshot-wakes-nobody", "G4",
        "whose turn came within an installed snapshot is never told", ANSWERS),
    fault("revived-lease", "G1",
        "a command brings a dead lease back to life", STATE),
    fault("wiped-voter-votes", "G5",
        "a node with a new, empty data directory votes", GROUP),
    fault("two-holders", "G1",
        "a key that is held is granted to another", STATE),
    fault("expiry-hands-nothing-over", "G4",
        "the end of a lease passes its keys on to nobody", STATE),
    fault("force-hits-any-token", "G1",
        "a retried forced release hits the next holder", STATE),
    fault("force-keeps-the-version", "G1",
        "a forced release does not raise the hold-set version", STATE),
    fault("snapshot-forgets-forced", "G3",
        "a forced end that was pending is forgotten by a snapshot", STATE),
    fault("floor-forgets-waits", "G5",
        "the outcome of a wait is forgotten before its client heard it", STATE),
    fault("renewed-while-expiring", "G3",
        "a renewal is acknowledged while the lease's end is on its way", ANSWERS),
    fault("expiry-of-a-former-leadership", "G3",
        "an end that a former leadership decided is proposed under the next", LEASES),
    fault("stall-charged-to-clients", "G3",
        "the time in which a leader was stopped is held against its clients", ANSWERS),
    fault("checkpoint-forgets-votes", "G5",
        "the vote of a quiet shard goes with its segment of the log", LOG),
    fault("segment-deleted-too-early", "G5",
        "segments go before what replaces them is durable", LOG),
    fault("recovery-without-sync", "G5",
        "what recovery read is not synced before it is relied on", LOG),
    fault("validity-from-the-answer", "G1",
        "a client counts the TTL from the answer to its renewal", CLIENT),
    fault("loss-taken-back", "G1",
        "a hold that was seen as lost is held again", CLIENT),
    fault("doubtful-grant-reported", "G1",
        "a grant that may be old is reported without asking", CLIENT),
    fault("dropped-acquire-keeps-its-hold", "G3",
        "a hold that nobody waits for any more is kept", CLIENT),
    fault("floor-passes-the-unanswered", "G5",
        "a client lets the cluster forget what it has not heard", CLIENT),
    fault("cut-never-forced", "G8",
        "a follower slower than what is written holds the log until it is full", GROUP),
    fault("rounds-wait-for-heartbeats", "G8",
        "a renewal waits for the next heartbeat", ROUNDS),
    fault("window-without-bound", "G9",
        "a client's numbers may run ahead without limit", STATE),
    fault("cancelled-writer-blocks", "G4",
        "shared waiters stay behind an exclusive one that was cancelled", STATE),
    fault("downgrade-wakes-nobody", "G4",
        "shared waiters stay behind a hold that became shared", STATE),
    fault("vacancy-untold", "G6",
        "that a key became free is in no event", STATE),
    fault("watch-goes-on-one-off", "G6",
        "a watch that goes on from a position leaves out the revision after it", WATCHES),
    fault("answer-ends-within-a-revision", "G6",
        "what is left of a revision is lost where a watch is asked to ask again", WATCHES),
    fault("position-ahead-of-what-was-told", "G6",
        "a position covers past events that did not fit the answer", WATCHES),
    fault("prefix-is-not-its-own", "G6",
        "a watch of a prefix misses the key that is the prefix itself", WATCHES),
    fault("pages-of-two-moments", "G6",
        "the pages of a state are each of their own moment", WATCHES),
    fault("progress-ahead", "G6",
        "a position is told before the events that it covers", WATCHES),
    fault("prefix-too-wide", "G6",
        "a watch that catches up is told of keys beside its prefix", WATCHES),
    fault("gap-untold-after-a-snapshot", "G6",
        "what a snapshot passed over is missing, and the watch goes on", WATCHES),
    fault("cursor-of-any-cluster", "G6",
        "a watch goes on from a position in another cluster", WIRE),
    fault("no-quorum-untold", "G6",
        "watchers of a node that is cut off are not told that what they hear may be late", SERVICE),
    fault("delay-after-a-release", "G3",
        "a hold that was given back leaves its lock-delay behind", STATE),
    fault("delay-cut-by-a-take-over", "G3",
        "a new leader ends the lock-delays that it finds", ANSWERS),
    fault("delay-not-restarted", "G3",
        "a lock-delay that a former leader began never ends", ANSWERS),
    fault("asked-holder-untold", "G6",
        "that somebody asks the holder to give up is in no event", STATE),
    fault("limit-by-the-last-acquire", "G1",
        "an acquire with another limit changes that of the semaphore", STATE),
    fault("several-for-one", "G1",
        "several keys are granted though one of them is taken", STATE),
    fault("stale-age-of-now", "G7",
        "a stale read says that it is of now", SERVICE),
    fault("stale-age-from-the-answer", "G7",
        "the age of a stale read counts from the leader's answer", SERVICE),
    fault("page-of-any-query", "G7",
        "a page goes on after a key that its query does not cover", SERVICE),
    fault("removed-node-forgotten", "identity",
        "the id of a node that was removed may come again", STATE),
    fault("disk-comes-again", "identity",
        "a data directory comes again under another id", STATE),
    fault("second-operation-begun", "G8",
        "an operation begins while another is under way, and takes its place", STATE),
    fault("step-of-a-former-operation", "G8",
        "a step of a former operation moves the present one", STATE),
    fault("fence-lets-the-old-pass", "G8",
        "what a deposed driver still has under way is taken after a later step", STATE),
    fault("last-voter-removed", "G8",
        "the only voter is removed", STATE),
    fault("over-before-all-shards", "G8",
        "an operation's phase is over when it is in one of the shards", SERVICE),
    fault("half-a-change-is-done", "G8",
        "a change of a group's voters that stopped half-way is left so", SERVICE),
    fault("learner-votes-early", "G8",
        "a node votes before it has the log", SERVICE),
    fault("removed-without-a-majority", "G8",
        "a node is removed though most of those that stay do not answer", SERVICE),
    fault("foreign-node-taken", "identity",
        "a node that belongs to another cluster is added", SERVICE),
    fault("removed-node-serves", "identity",
        "a node that was removed is still heard", SERVICE),
    fault("piece-checksum-unread", "backups",
        "changed bytes of a backup are taken for a shard's state", WIRE),
    fault("backup-head-believed", "G2",
        "the counters that a backup states are not compared with its state", STATE),
    fault("secrets-in-backups", "backups",
        "the secrets of sessions are in a backup", SERVICE),
    fault("backup-without-barrier", "G7",
        "a leader that was deposed gives out a backup", SERVICE),
    fault("parts-of-two-moments", "backups",
        "the parts of a shard's backup are each of their own moment", SERVICE),
    fault("restore-waits-for-nobody", "G1",
        "a restored cluster grants before the old one's leases are over", STATE),
    fault("quarantine-halved", "G1",
        "a leader of a restored cluster waits half of the time", SERVICE),
    fault("restored-ids-come-again", "G1",
        "a restored cluster gives its leases the old one's ids", STATE),
    fault("tokens-after-the-backup", "G2",
        "what the old cluster granted after its backup is not counted", RESTORES),
    fault("old-cluster-welcome", "identity",
        "a client of another cluster is let in", WIRE),
    fault("frame-checksum-unread", "frames",
        "bytes that were hurt on the way are believed", WIRE),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    use super::*;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
    }

    fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).expect("a directory of the workspace") {
            let path = entry.expect("it can be read").path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }

    /// The names in `planted!` of the product's crates.
    fn planted() -> BTreeSet<String> {
        let mut files = Vec::new();
        for dir in ["protocol/src", "server/core/src", "server/src", "client-rs/src"] {
            sources(&root().join(dir), &mut files);
        }
        let mut names = BTreeSet::new();
        for file in files.iter().filter(|file| !file.ends_with("planted.rs")) {
            let text = std::fs::read_to_string(file).expect("a source file");
            let quoted = text.split("planted!(\"").skip(1);
            names.extend(quoted.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
        }
        names
    }

    #[test]
    fn the_table_is_what_is_planted() {
        let table: BTreeSet<String> = FAULTS.iter().map(|fault| fault.name.to_owned()).collect();
        assert_eq!(table.len(), FAULTS.len(), "a name comes once");
        assert_eq!(table, planted());
    }
}
