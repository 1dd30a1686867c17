//! What really happened: counters of a run, and of all runs of an invocation together.
//!
//! A fault that was ordered is not yet one that happened. Kinds of faults are counted when they
//! took hold, effects when they were seen. An invocation of enough seeds in which one of them never
//! happened proves nothing about it, and is INVALID.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Debug;

use crate::faults::Fault;
use crate::judge::JUDGED;

/// Seeds from which on everything must have happened.
const SEEDS_FOR_ALL: usize = 40;

/// What a run is to show besides its faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Seen {
    /// A node that led was killed.
    LeaderKilled,
    /// A leader was paused for longer than an election takes.
    LeaderPausedPastElection,
    /// A leader was cut off from the majority.
    LeaderInMinority,
    /// Another node took the lead while the former leader still ran.
    LeaderReplaced,
    LeaseExpired,
    SnapshotInstalled,
    /// A node that had applied entries in the same life was too far behind for the log.
    SnapshotInstalledLive,
    /// A request was sent again.
    Retry,
    /// An answer left open whether its request was executed, or did not come in time.
    UnknownOutcome,
    Cancel,
    SessionLost,
    /// A node ended itself because its disk failed.
    EioExit,
    /// A node ended itself because its disk was full.
    EnospcExit,
    /// A node came up on a disk that had lost power.
    PowerCutRecovered,
    /// A node died while it was starting.
    DiedInStart,
    /// Leadership moved to another node on request.
    Transferred,
    /// Bytes of an abandoned connection reached a node later.
    LateBytes,
    /// A renewal's acknowledgement was compared with the newest leader's own deadline.
    RenewalCompared,
    /// What a leader applied was looked for at a majority of its voters.
    MajorityCompared,
    /// A read's value was compared with what the acquire gave.
    ValueCompared,
    /// Five nodes served while their old leader reached one of them only, and one reached nobody.
    BridgeServed,
    /// A client that waits and asks nothing again was told of a grant that came in a snapshot.
    ToldPastSnapshot,
    /// A client came to a node that waits for admission.
    CameBeforeAdmission,
    /// A watch went on from a cursor.
    WatchResumed,
    /// A watcher went to another node with its position.
    WatchMoved,
    /// A watcher was told a state instead of events that its node did not have.
    WatchGap,
    /// A state was told again from its first page: its view was gone. Rare, and so not in `ALL`.
    WatchStateAnew,
    /// A page of a state was followed by another.
    WatchPaged,
    /// The events of a revision came in more than one frame.
    WatchSplit,
    /// A watch ended because there was too much to tell.
    WatchContinued,
    /// A watch ended as asked.
    WatchCancelled,
    MemberAdded,
    MemberRemoved,
    MemberReplaced,
    /// A node's first vote in a shard was compared with the table and with its log.
    VoteCompared,
    /// An operation ended under another driver than the one it began with.
    OperationResumed,
    /// An operation was given up.
    OperationAborted,
    /// One was given up when a shard had changed its voters already.
    VoteUndone,
    /// One was given up and undone without the node that was to come.
    UndoneWithoutNew,
    /// A node went that led a shard when that was asked for.
    LeaderRemoved,
    /// A node whose disk was replaced went.
    WipedReplaced,
    /// Every shard served while the node that was to come could not be reached.
    ServedWithoutNew,
    /// A second change beside the first was refused.
    SecondRefused,
    /// A node that was never there was not added.
    NobodyRefused,
    /// An operator moved leaders, so that each node leads as many shards.
    LeadersSpread,
    /// A removed node whose disk was lost waits for nodes that are no members any more; nobody tells
    /// it that it was removed.
    KnowsNobody,
    /// A node that was removed refused what it was asked.
    RemovedRefuses,
    /// A backup was taken while clients worked, and is sound.
    BackupTaken,
    /// A cluster that was born from a backup granted keys.
    Restored,
    /// Its leader changed while it granted nothing yet.
    RestoredUnderAnother,
    OneNode,
    ThreeNodes,
    FiveNodes,
    SeveralShards,
}

impl Seen {
    const ALL: [Self; 50] = [
        Self::LeaderKilled,
        Self::LeaderPausedPastElection,
        Self::LeaderInMinority,
        Self::LeaderReplaced,
        Self::LeaseExpired,
        Self::SnapshotInstalled,
        Self::SnapshotInstalledLive,
        Self::Retry,
        Self::UnknownOutcome,
        Self::Cancel,
        Self::SessionLost,
        Self::EioExit,
        Self::EnospcExit,
        Self::PowerCutRecovered,
        Self::DiedInStart,
        Self::Transferred,
        Self::LateBytes,
        Self::RenewalCompared,
        Self::ValueCompared,
        Self::BridgeServed,
        Self::ToldPastSnapshot,
        Self::CameBeforeAdmission,
        Self::VoteCompared,
        Self::WatchResumed,
        Self::WatchMoved,
        Self::WatchGap,
        Self::WatchPaged,
        Self::WatchSplit,
        Self::WatchContinued,
        Self::WatchCancelled,
        Self::MajorityCompared,
        Self::MemberAdded,
        Self::MemberRemoved,
        Self::MemberReplaced,
        Self::OperationResumed,
        Self::OperationAborted,
        Self::VoteUndone,
        Self::UndoneWithoutNew,
        Self::LeaderRemoved,
        Self::BackupTaken,
        Self::Restored,
        Self::ServedWithoutNew,
        Self::SecondRefused,
        Self::NobodyRefused,
        Self::LeadersSpread,
        Self::RemovedRefuses,
        Self::OneNode,
        Self::ThreeNodes,
        Self::FiveNodes,
        Self::SeveralShards,
    ];
}

/// Counters of one run.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    counts: RefCell<BTreeMap<String, u64>>,
}

impl Coverage {
    pub(crate) fn count(&self, what: impl Debug) {
        self.add(what, 1);
    }

    pub(crate) fn add(&self, what: impl Debug, times: u64) {
        *self.counts.borrow_mut().entry(format!("{what:?}")).or_default() += times;
    }

    /// Faults that took hold.
    pub(crate) fn faults(&self) -> u64 {
        let counts = self.counts.borrow();
        Fault::ALL.iter().filter_map(|fault| counts.get(&format!("{fault:?}"))).sum()
    }

    /// As `Total::take` reads it.
    pub(crate) fn line(&self) -> String {
        let each: Vec<_> =
            self.counts.borrow().iter().map(|(what, count)| format!("{what}={count}")).collect();
        format!("{PREFIX}{}", each.join(" "))
    }
}

const PREFIX: &str = "covered ";

/// Counters of all runs of an invocation.
#[derive(Debug, Default)]
pub(crate) struct Total {
    seeds: usize,
    counts: BTreeMap<String, u64>,
}

impl Total {
    /// Adds what a run printed.
    pub(crate) fn take(&mut self, output: &str) {
        let Some(line) = output.lines().find_map(|line| line.strip_prefix(PREFIX)) else { return };
        self.seeds += 1;
        for pair in line.split_whitespace() {
            let (what, count) = pair.split_once('=').expect("a run's own format");
            let count: u64 = count.parse().expect("a run's own format");
            *self.counts.entry(what.to_owned()).or_default() += count;
        }
    }

    fn of(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or_default()
    }

    /// What never happened.
    pub(crate) fn missing(&self) -> Vec<String> {
        let all = names();
        all.into_iter().filter(|what| self.of(what) == 0).collect()
    }

    /// True if there were so many runs that everything must have happened.
    pub(crate) fn is_whole(&self) -> bool {
        self.seeds >= SEEDS_FOR_ALL
    }

    pub(crate) fn print(&self) {
        let hours = self.of("SimulatedMs") as f64 / 3_600_000.0;
        println!(
            "{} seeds, {hours:.2} simulated hours, {} operations, {} faults",
            self.seeds,
            self.of("Operations"),
            Fault::ALL.iter().map(|fault| self.of(&format!("{fault:?}"))).sum::<u64>(),
        );
        let each = |names: Vec<String>| {
            let each: Vec<_> =
                names.iter().map(|what| format!("{what} {}", self.of(what))).collect();
            each.join(", ")
        };
        println!("faults: {}", each(Fault::ALL.iter().map(|f| format!("{f:?}")).collect()));
        println!("judged: {}", each(JUDGED.map(str::to_owned).to_vec()));
        println!("seen: {}", each(Seen::ALL.iter().map(|s| format!("{s:?}")).collect()));
    }
}

fn names() -> Vec<String> {
    let faults = Fault::ALL.iter().map(|fault| format!("{fault:?}"));
    let seen = Seen::ALL.iter().map(|seen| format!("{seen:?}"));
    faults.chain(seen).chain(JUDGED.map(str::to_owned)).collect()
}
