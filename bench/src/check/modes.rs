//! G1 to G4 for what is more than an exclusive lock: readers and writers, semaphores, several keys
//! at once, conversions, lock-delays.
//!
//! Judged from the nodes' own events (`Step`), one shard at a time and in full, and from what the
//! clients were sure of (`Sure`):
//! - what is held or delayed at a time goes together: readers with readers, a writer with nobody,
//!   permits up to the limit in force, each slot once;
//! - each grant has the next token of its shard, an upgrade too, and the end of its former hold is
//!   in the same step;
//! - a queue is served from its head; nobody is granted past it but an upgrade, which has its place
//!   already; no head that fits wherever it waits is left waiting;
//! - an acquire of several keys gets all of them in one step, with tokens that follow each other,
//!   or waits for all of them;
//! - a delay is begun by the loss that it names and lasts as long as it was asked for;
//! - all nodes applied the same;
//! - clients whose holds do not go together are never sure at the same time.

use std::collections::BTreeMap;

use leasehold_protocol::event::{EndReason, EventKind};
use leasehold_protocol::ids::{LeaseId, Mode, Number, Token};
use leasehold_protocol::outcome::Outcome;

use super::Report;

/// All events of one revision, as one node applied them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The shard.
    pub shard: u32,
    /// The revision.
    pub revision: u64,
    /// When it was applied.
    pub at_ns: u64,
    /// What happened.
    pub events: Vec<EventKind>,
}

/// The time in which a client was sure of a hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sure {
    /// The key.
    pub key: String,
    /// How it was held.
    pub mode: Mode,
    /// The hold's token.
    pub token: u64,
    /// From when.
    pub from_ns: u64,
    /// Until when.
    pub until_ns: u64,
}

/// How often each thing that the checker judges must have been seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModeNeeds {
    /// Grants of any mode.
    pub grants: u64,
    /// Pairs of sure times of one key that were compared.
    pub pairs: u64,
    /// Clocks did what no clock may do: nothing is concluded from times.
    pub clocks_lie: bool,
}

#[derive(Clone, Debug)]
struct Holder {
    token: u64,
    lease: LeaseId,
    mode: Mode,
    slots: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Waiter {
    lease: LeaseId,
    number: Number,
    mode: Mode,
}

impl Waiter {
    fn is(&self, name: (LeaseId, Number)) -> bool {
        (self.lease, self.number) == name
    }
}

#[derive(Clone, Debug, Default)]
struct Key {
    limit: u32,
    holders: Vec<Holder>,
    queue: Vec<Waiter>,
    /// The lost hold, since when, and for how many milliseconds, by token.
    delays: BTreeMap<u64, (Holder, u64, u32)>,
}

impl Key {
    fn fits(&self, mode: Mode) -> bool {
        let present = || {
            let delays = self.delays.values().map(|(lost, ..)| lost.mode);
            self.holders.iter().map(|one| one.mode).chain(delays)
        };
        match mode.permit_count() {
            Some(permits) => {
                let taken: u32 = present().map(|one| one.permit_count().unwrap_or(u32::MAX)).sum();
                taken.saturating_add(permits) <= self.limit
            }
            None => present().all(|one| one == Mode::SHARED && mode == Mode::SHARED),
        }
    }

    fn has_slot_of(&self, slots: &[u8]) -> bool {
        let delays = self.delays.values().map(|(lost, ..)| lost);
        let mut all = self.holders.iter().chain(delays);
        all.any(|one| one.slots.iter().zip(slots).any(|(a, b)| a & b != 0))
    }
}

/// The keys of an acquire with the outcomes of their waits.
type Parts<'a> = Vec<(&'a [u8], Outcome)>;

/// What was seen, by name.
type Seen = BTreeMap<&'static str, u64>;

/// Judges all shards' steps, as any nodes told them, and the clients' sure times.
pub fn check(steps: &[Step], sure: &[Sure], needs: &ModeNeeds) -> Report {
    let mut report = Report::new("modes G1-G4");
    let mut logs: BTreeMap<u32, BTreeMap<u64, &Step>> = BTreeMap::new();
    for step in steps {
        let first = *logs.entry(step.shard).or_default().entry(step.revision).or_insert(step);
        if first.events != step.events {
            let (shard, revision) = (step.shard, step.revision);
            report.violation(format!("shard {shard}, revision {revision}: nodes differ"));
        }
    }
    let mut seen = Seen::new();
    for (shard, log) in &logs {
        let mut replay = Replay { clocks_lie: needs.clocks_lie, ..Replay::default() };
        for step in log.values() {
            replay.step(step, &mut seen, &mut |text| {
                report.violation(format!("shard {shard}, revision {}: {text}", step.revision));
            });
        }
    }
    let pairs = sure_together(sure, &mut report);
    report.cover("grants", seen_of(&seen, "grants"), needs.grants);
    report.cover("pairs", pairs, needs.pairs);
    for name in SEEN {
        report.cover(name, seen_of(&seen, name), 0);
    }
    report
}

/// What a report counts beside grants and pairs.
pub const SEEN: [&str; 15] = [
    "shared",
    "permits",
    "several",
    "waited_for_several",
    "downgrades",
    "upgrades",
    "limits",
    "delays_begun",
    "delays_ended",
    "delays_prolonged",
    "values",
    "requests",
    "expired",
    "forced",
    "closed",
];

fn seen_of(seen: &Seen, name: &str) -> u64 {
    seen.get(name).copied().unwrap_or(0)
}

#[derive(Default)]
struct Replay {
    keys: BTreeMap<Vec<u8>, Key>,
    last_token: u64,
    clocks_lie: bool,
}

impl Replay {
    fn step(&mut self, step: &Step, seen: &mut Seen, wrong: &mut impl FnMut(String)) {
        for event in &step.events {
            if let Err(text) = self.event(step, event, seen) {
                wrong(format!("{text}: {event:?}"));
            }
        }
        self.several(step, seen, wrong);
        for (key, entry) in &self.keys {
            let head = entry.queue.first();
            if let Some(head) = head.filter(|head| self.is_due(head)) {
                let key = String::from_utf8_lossy(key);
                wrong(format!("G4: the head of {key} fits and waits: {head:?}"));
            }
        }
    }

    fn is_due(&self, head: &Waiter) -> bool {
        let name = (head.lease, head.number);
        let mut queues = self.keys.values().filter(|one| one.queue.iter().any(|w| w.is(name)));
        queues.all(|one| one.queue[0].is(name) && one.fits(one.queue[0].mode))
    }

    fn event(
        &mut self,
        step: &Step,
        event: &EventKind,
        seen: &mut Seen,
    ) -> Result<(), &'static str> {
        let mut count = |name| *seen.entry(name).or_default() += 1;
        match event {
            EventKind::Granted { key, lease, mode, token, slots, limit } => {
                count("grants");
                if *mode == Mode::SHARED {
                    count("shared");
                } else if mode.permit_count().is_some() {
                    count("permits");
                }
                let (lease, mode, token) = (*lease, *mode, token.0);
                self.granted(step, key, Holder { token, lease, mode, slots: slots.clone() }, *limit)
            }
            EventKind::Ended { key, token, reason, .. } => {
                count(match reason {
                    EndReason::LeaseExpired => "expired",
                    EndReason::Forced { .. } => "forced",
                    EndReason::SessionClosed => "closed",
                    EndReason::Upgraded => "upgrades",
                    _ => "released",
                });
                let entry = self.keys.entry(key.clone()).or_default();
                let at = entry.holders.iter().position(|one| one.token == token.0);
                let held = entry.holders.remove(at.ok_or("nobody held it")?);
                let begins = |one: &EventKind| match one {
                    EventKind::DelayBegan { key: k, token: t, .. } => (k, t) == (key, token),
                    _ => false,
                };
                let lost = matches!(reason, EndReason::LeaseExpired | EndReason::Forced { .. });
                if step.events.iter().any(begins) {
                    if !lost {
                        return Err("a delay without a loss");
                    }
                    entry.delays.insert(token.0, (held, step.at_ns, 0));
                }
                Ok(())
            }
            EventKind::DelayBegan { key, token, delay_ms } => {
                count("delays_begun");
                let entry = self.keys.entry(key.clone()).or_default();
                let delay = entry.delays.get_mut(&token.0).ok_or("a delay that no loss began")?;
                delay.2 = *delay_ms;
                Ok(())
            }
            EventKind::DelayEnded { key, token } => {
                count("delays_ended");
                if self.delay_ended(step, key, *token)? {
                    *seen.entry("delays_prolonged").or_default() += 1;
                }
                Ok(())
            }
            EventKind::Converted { key, token, mode, .. } => {
                count("downgrades");
                let entry = self.keys.entry(key.clone()).or_default();
                let holder = entry.holders.iter_mut().find(|one| one.token == token.0);
                let holder = holder.ok_or("nobody held it")?;
                if *mode != Mode::SHARED {
                    return Err("G2: more than its token stood for");
                }
                holder.mode = *mode;
                Ok(())
            }
            other => self.other_event(other, seen),
        }
    }

    /// Queues, limits, and what changes nothing of who holds.
    fn other_event(&mut self, event: &EventKind, seen: &mut Seen) -> Result<(), &'static str> {
        let mut count = |name| *seen.entry(name).or_default() += 1;
        match event {
            EventKind::LimitChanged { key, limit, .. } => {
                count("limits");
                self.keys.entry(key.clone()).or_default().limit = *limit;
                Ok(())
            }
            EventKind::Queued { key, lease, number, mode, .. } => {
                let waiter = Waiter { lease: *lease, number: *number, mode: *mode };
                self.keys.entry(key.clone()).or_default().queue.push(waiter);
                Ok(())
            }
            EventKind::WaitEnded { key, lease, number, outcome } => {
                let queue = &mut self.keys.entry(key.clone()).or_default().queue;
                let at = queue.iter().position(|one| one.is((*lease, *number)));
                let at = at.ok_or("it did not wait")?;
                queue.remove(at);
                let granted = matches!(outcome, Outcome::Granted(_));
                if granted && at > 0 { Err("G4: granted past the head") } else { Ok(()) }
            }
            EventKind::Vacant { key } => {
                let gone = self.keys.remove(key).unwrap_or_default();
                let empty = gone.holders.is_empty() && gone.queue.is_empty();
                if empty && gone.delays.is_empty() { Ok(()) } else { Err("it is in use") }
            }
            EventKind::ValueChanged { .. } => {
                count("values");
                Ok(())
            }
            EventKind::YieldAsked { .. } => {
                count("requests");
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn granted(
        &mut self,
        step: &Step,
        key: &[u8],
        holder: Holder,
        limit: u32,
    ) -> Result<(), &'static str> {
        if holder.token <= self.last_token {
            return Err("G2: not above every token before");
        }
        self.last_token = holder.token;
        let entry = self.keys.entry(key.to_vec()).or_default();
        let unused = entry.holders.is_empty() && entry.delays.is_empty() && entry.queue.is_empty();
        if unused {
            entry.limit = limit;
        } else if entry.holders.len() + entry.delays.len() > 0 && entry.limit != limit {
            return Err("another limit than that in force");
        }
        entry.limit = limit;
        let upgraded = step.events.iter().any(|one| {
            matches!(one, EventKind::Ended { key: k, lease, reason: EndReason::Upgraded, .. }
                if k == key && *lease == holder.lease)
        });
        let served = |head: &Waiter| {
            step.events.iter().any(|one| {
                matches!(one, EventKind::WaitEnded { key: k, lease, number, outcome: Outcome::Granted(_) }
                    if k == key && head.is((*lease, *number)))
            })
        };
        let past = entry.queue.first().is_some_and(|head| !served(head)) && !upgraded;
        let fits = entry.fits(holder.mode);
        let permits = holder.mode.permit_count().unwrap_or(0);
        let slots: u32 = holder.slots.iter().map(|byte| byte.count_ones()).sum();
        let twice = entry.has_slot_of(&holder.slots);
        entry.holders.push(holder);
        match () {
            () if past => Err("G4: granted past the queue"),
            () if !fits => Err("G1: it does not go with what is there"),
            () if slots != permits => Err("not as many slots as permits"),
            () if twice => Err("G1: a slot is taken twice"),
            () => Ok(()),
        }
    }

    /// Whether it lasted clearly longer than it was asked for, as after a change of leader.
    fn delay_ended(&mut self, step: &Step, key: &[u8], token: Token) -> Result<bool, &'static str> {
        let entry = self.keys.entry(key.to_vec()).or_default();
        let (_, since_ns, delay_ms) = entry.delays.remove(&token.0).ok_or("no such delay")?;
        // The clocks of two nodes may differ by 1,000 ppm in their rates, and nodes apply a step one
        // after the other: the first that told of it counts, give or take a little.
        let least_ns = u64::from(delay_ms) * 997_000;
        if step.at_ns + SLACK_NS < since_ns + least_ns && !self.clocks_lie {
            return Err("G3: the delay was ended early");
        }
        Ok(step.at_ns > since_ns + 2 * least_ns)
    }

    /// All or none: what was asked for together is granted together.
    fn several(&mut self, step: &Step, seen: &mut Seen, wrong: &mut impl FnMut(String)) {
        let mut ended: BTreeMap<(LeaseId, Number), Parts<'_>> = BTreeMap::new();
        for event in &step.events {
            if let EventKind::WaitEnded { key, lease, number, outcome } = event {
                ended.entry((*lease, *number)).or_default().push((key, *outcome));
            }
        }
        for (name, parts) in &ended {
            let waits = self.keys.values().any(|one| one.queue.iter().any(|w| w.is(*name)));
            if waits {
                wrong(format!("{name:?}: the wait ended for some of its keys"));
            }
            let Some((_, Outcome::Granted(grant))) = parts.first() else { continue };
            if parts.len() == 1 {
                continue;
            }
            *seen.entry("several").or_default() += 1;
            for (token, (key, _)) in (grant.token.0..).zip(parts) {
                let there = step.events.iter().any(|one| {
                    matches!(one, EventKind::Granted { key: k, token: t, lease, .. }
                        if k == key && t.0 == token && *lease == grant.lease)
                });
                if !there {
                    wrong(format!("{name:?}: granted without token {token} of each key"));
                }
            }
        }
        let mut queued: BTreeMap<(LeaseId, Number), u64> = BTreeMap::new();
        for event in &step.events {
            if let EventKind::Queued { lease, number, .. } = event {
                *queued.entry((*lease, *number)).or_default() += 1;
            }
        }
        let waiting = queued.values().filter(|count| **count > 1).count() as u64;
        *seen.entry("waited_for_several").or_default() += waiting;
    }
}

/// How much later than another the node may have applied a step whose record counts.
const SLACK_NS: u64 = 5_000_000;

/// Compares every two sure times of a key that overlap. Returns how many pairs were looked at.
fn sure_together(sure: &[Sure], report: &mut Report) -> u64 {
    let mut keys: BTreeMap<&str, Vec<&Sure>> = BTreeMap::new();
    for one in sure.iter().filter(|one| one.from_ns < one.until_ns) {
        keys.entry(&one.key).or_default().push(one);
    }
    let mut pairs = 0_u64;
    for (key, list) in &mut keys {
        list.sort_by_key(|one| (one.from_ns, one.token));
        let mut open: Vec<&Sure> = Vec::new();
        for one in list.iter() {
            pairs += 1;
            open.retain(|other| other.until_ns > one.from_ns);
            for other in open.iter().filter(|other| other.token != one.token) {
                let locks =
                    one.mode.permit_count().is_none() || other.mode.permit_count().is_none();
                let readers = one.mode == Mode::SHARED && other.mode == Mode::SHARED;
                if locks && !readers {
                    report.violation(format!(
                        "G1: key {key:?}: tokens {} and {} were sure at once",
                        other.token, one.token
                    ));
                }
            }
            open.push(one);
        }
    }
    pairs.saturating_sub(keys.len() as u64)
}

#[cfg(test)]
mod tests {
    use leasehold_protocol::ids::{HoldSetVersion, Revision};
    use leasehold_protocol::outcome::Grant;

    use super::super::Verdict;
    use super::*;

    const X: Mode = Mode::EXCLUSIVE;
    const R: Mode = Mode::SHARED;
    const P: Mode = Mode::permits(1);

    fn granted(key: &str, lease: u64, token: u64, mode: Mode, slots: &[u8]) -> EventKind {
        let limit = if mode.permit_count().is_some() { 2 } else { 0 };
        let (key, lease, slots) = (key.as_bytes().to_vec(), LeaseId(lease), slots.to_vec());
        EventKind::Granted { key, lease, mode, token: Token(token), slots, limit }
    }

    fn ended(key: &str, lease: u64, token: u64, reason: EndReason) -> EventKind {
        let key = key.as_bytes().to_vec();
        EventKind::Ended { key, lease: LeaseId(lease), token: Token(token), reason }
    }

    fn queued(key: &str, lease: u64, mode: Mode) -> EventKind {
        let (lease, number) = (LeaseId(lease), Number(1));
        EventKind::Queued { key: key.as_bytes().to_vec(), lease, number, wait_ms: 9, mode }
    }

    fn served(key: &str, lease: u64, token: u64) -> EventKind {
        let outcome = Outcome::Granted(Grant {
            lease: LeaseId(lease),
            token: Token(token),
            revision: Revision(1),
            version_before: HoldSetVersion(0),
            version_after: HoldSetVersion(1),
            floor: Token(token),
        });
        let (lease, number) = (LeaseId(lease), Number(1));
        EventKind::WaitEnded { key: key.as_bytes().to_vec(), lease, number, outcome }
    }

    fn began(key: &str, token: u64, delay_ms: u32) -> EventKind {
        EventKind::DelayBegan { key: key.as_bytes().to_vec(), token: Token(token), delay_ms }
    }

    fn over(key: &str, token: u64) -> EventKind {
        EventKind::DelayEnded { key: key.as_bytes().to_vec(), token: Token(token) }
    }

    /// A step a second.
    fn verdict(log: Vec<Vec<EventKind>>) -> Verdict {
        let steps = (1..).zip(log).map(|(revision, events)| Step {
            shard: 0,
            revision,
            at_ns: revision * 1_000_000_000,
            events,
        });
        check(&steps.collect::<Vec<_>>(), &[], &ModeNeeds::default()).verdict()
    }

    fn fine(log: Vec<Vec<EventKind>>) {
        let shown = format!("{log:?}");
        assert_eq!(verdict(log), Verdict::Ok, "{shown}");
    }

    fn wrong(log: Vec<Vec<EventKind>>) {
        let shown = format!("{log:?}");
        assert_eq!(verdict(log), Verdict::Violation, "{shown}");
    }

    #[test]
    fn readers_go_together_and_a_writer_with_nobody() {
        fine(vec![vec![granted("k", 1, 5, R, &[])], vec![granted("k", 2, 6, R, &[])]]);
        wrong(vec![vec![granted("k", 1, 5, R, &[])], vec![granted("k", 2, 6, X, &[])]]);
        wrong(vec![vec![granted("k", 1, 5, X, &[])], vec![granted("k", 2, 6, R, &[])]]);
    }

    #[test]
    fn permits_up_to_the_limit_and_each_slot_once() {
        let first = vec![granted("p", 1, 5, P, &[1])];
        let second = vec![granted("p", 2, 6, P, &[2])];
        fine(vec![first.clone(), second.clone()]);
        wrong(vec![first.clone(), second, vec![granted("p", 3, 7, P, &[4])]]);
        wrong(vec![first.clone(), vec![granted("p", 2, 6, P, &[1])]]);
        wrong(vec![first, vec![granted("p", 2, 6, P, &[6])]]);
    }

    #[test]
    fn tokens_rise_with_upgrades_and_an_upgrade_ends_what_it_replaces() {
        let up = |token| {
            let end = ended("k", 1, 5, EndReason::Upgraded);
            vec![vec![granted("k", 1, 5, R, &[])], vec![end, granted("k", 1, token, X, &[])]]
        };
        fine(up(6));
        wrong(up(5));
        wrong(vec![vec![granted("k", 1, 5, R, &[])], vec![granted("k", 1, 6, X, &[])]]);
    }

    #[test]
    fn an_upgrade_passes_by_a_queue_and_nobody_else_does() {
        let queue = vec![vec![granted("k", 1, 5, R, &[])], vec![queued("k", 2, X)]];
        let with = |last: Vec<EventKind>| [queue.clone(), vec![last]].concat();
        fine(with(vec![ended("k", 1, 5, EndReason::Upgraded), granted("k", 1, 6, X, &[])]));
        wrong(with(vec![granted("k", 3, 6, R, &[])]));
        wrong(with(vec![ended("k", 1, 5, EndReason::Released), granted("k", 3, 6, X, &[])]));
        let end = ended("k", 1, 5, EndReason::Released);
        fine(with(vec![end.clone(), granted("k", 2, 6, X, &[]), served("k", 2, 6)]));
        // Nobody is served although the head fits.
        wrong(with(vec![end]));
    }

    #[test]
    fn a_downgrade_lets_readers_in_and_must_do_so() {
        let down = EventKind::Converted {
            key: b"k".to_vec(),
            lease: LeaseId(1),
            token: Token(5),
            mode: R,
        };
        let start = vec![vec![granted("k", 1, 5, X, &[])], vec![queued("k", 2, R)]];
        let serve = vec![down.clone(), granted("k", 2, 6, R, &[]), served("k", 2, 6)];
        fine([start.clone(), vec![serve]].concat());
        wrong([start, vec![vec![down]]].concat());
    }

    #[test]
    fn several_keys_come_together_or_not_at_all() {
        let start =
            vec![vec![granted("a", 1, 5, X, &[])], vec![queued("a", 2, X), queued("b", 2, X)]];
        let with = |last: Vec<EventKind>| [start.clone(), vec![last]].concat();
        fine(start.clone());
        let end = ended("a", 1, 5, EndReason::Released);
        let (a, b) = (granted("a", 2, 6, X, &[]), granted("b", 2, 7, X, &[]));
        let told = [served("a", 2, 6), served("b", 2, 6)];
        fine(with([vec![end.clone(), a.clone(), b], told.to_vec()].concat()));
        wrong(with(vec![end.clone(), a.clone(), served("a", 2, 6)]));
        let gap = granted("b", 2, 8, X, &[]);
        wrong(with([vec![end.clone(), a, gap], told.to_vec()].concat()));
        wrong(with(vec![end]));
        // A newcomer takes the key that is free but waited for.
        wrong(with(vec![granted("b", 3, 6, X, &[])]));
    }

    #[test]
    fn several_keys_are_not_granted_past_one_of_their_queues() {
        wrong(vec![
            vec![granted("a", 1, 5, X, &[])],
            vec![granted("b", 9, 6, R, &[])],
            vec![queued("b", 3, X)],
            vec![queued("a", 2, X), queued("b", 2, R)],
            vec![
                ended("a", 1, 5, EndReason::Released),
                granted("a", 2, 7, X, &[]),
                granted("b", 2, 8, R, &[]),
                served("a", 2, 7),
                served("b", 2, 7),
            ],
        ]);
    }

    #[test]
    fn a_delay_keeps_its_place_for_its_time() {
        let lost = || vec![ended("k", 1, 5, EndReason::LeaseExpired), began("k", 5, 2_000)];
        let start = || vec![vec![granted("k", 1, 5, X, &[])], lost(), vec![]];
        let with = |last: Vec<Vec<EventKind>>| [start(), last].concat();
        fine(with(vec![vec![over("k", 5)], vec![granted("k", 2, 6, X, &[])]]));
        wrong(with(vec![vec![granted("k", 2, 6, X, &[])]]));
        wrong(with(vec![vec![over("k", 4)]]));
        wrong(vec![vec![granted("k", 1, 5, X, &[])], lost(), vec![over("k", 5)]]);
        let release = ended("k", 1, 5, EndReason::Released);
        wrong(vec![vec![granted("k", 1, 5, X, &[])], vec![release, began("k", 5, 2_000)]]);
    }

    #[test]
    fn nodes_that_differ_are_caught() {
        let step = |token| Step {
            shard: 0,
            revision: 1,
            at_ns: 0,
            events: vec![granted("k", 1, token, X, &[])],
        };
        let report = check(&[step(5), step(6)], &[], &ModeNeeds::default());
        assert_eq!(report.violations_total, 1);
    }

    #[test]
    fn sure_times_that_do_not_go_together_are_caught() {
        let sure = |mode, token, from_ns, until_ns| Sure {
            key: "k".to_owned(),
            mode,
            token,
            from_ns,
            until_ns,
        };
        let verdict = |list: &[Sure]| {
            check(&[], list, &ModeNeeds { pairs: 1, ..ModeNeeds::default() }).verdict()
        };
        assert_eq!(verdict(&[sure(R, 5, 0, 9), sure(R, 6, 3, 12)]), Verdict::Ok);
        assert_eq!(verdict(&[sure(R, 5, 0, 9), sure(X, 6, 3, 12)]), Verdict::Violation);
        assert_eq!(verdict(&[sure(R, 5, 0, 9), sure(X, 6, 9, 12)]), Verdict::Ok);
        assert_eq!(verdict(&[sure(P, 5, 0, 9), sure(P, 6, 3, 12)]), Verdict::Ok);
        assert_eq!(verdict(&[sure(X, 5, 0, 9)]), Verdict::Invalid);
    }
}
