//! G6 over what watchers were told: in order, nothing twice, nothing left out, no position ahead
//! of what was told, and a state that is the sum of all changes before it.
//!
//! Without the nodes' log the reference is the union of what all watchers were told (`check`): nodes
//! apply the same log, so whoever is told a revision is told the same. A change that no watcher at
//! all was told is beyond it; give it one that watches everything from the beginning, and compare
//! that one's sums with a final read. With the log (`judge`) every change counts, and queues too.

use std::collections::{BTreeMap, BTreeSet};

pub use leasehold::WatchItem;
use leasehold::{EventKind, KeyInfo, Revision, ShardId, Token, WatchEvent};
use leasehold_protocol::ids::{LeaseId, Number};

use super::Report;

/// What one watcher asked for, and all that it was told, in order.
#[derive(Clone, Debug)]
pub struct Watched {
    /// For messages.
    pub name: String,
    /// The keys with `key` as a prefix, or that key alone.
    pub prefix: bool,
    /// See `prefix`.
    pub key: Vec<u8>,
    /// Where it began, if from a cursor.
    pub after: BTreeMap<ShardId, Revision>,
    /// What it was told.
    pub items: Vec<WatchItem>,
}

/// What the watchers were told, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Changes, all watchers together.
    pub changes: u64,
    /// Events in them.
    pub events: u64,
    /// States that were told, by their first pages.
    pub states: u64,
    /// Marks of progress.
    pub progress: u64,
    /// Times that a watcher was told that its node may be behind.
    pub no_quorum: u64,
}

type Place = (ShardId, Revision);
type Holders = BTreeMap<Vec<u8>, BTreeSet<Token>>;
type Waiters = BTreeMap<Vec<u8>, BTreeSet<(LeaseId, Number)>>;

/// All events of keys that the nodes applied, by their places.
pub type Log = BTreeMap<(ShardId, Revision), Vec<EventKind>>;

impl Watched {
    fn covers(&self, key: &[u8]) -> bool {
        if self.prefix { key.starts_with(&self.key) } else { key == self.key }
    }

    fn of_mine(&self, events: &[WatchEvent]) -> Vec<WatchEvent> {
        let mine = |event: &&WatchEvent| event.kind.key().is_some_and(|key| self.covers(key));
        events.iter().filter(mine).cloned().collect()
    }
}

/// Checks all watchers against each other.
pub fn check(watchers: &[Watched]) -> Result<Told, String> {
    let mut told = Told::default();
    for watcher in watchers {
        check_order(watcher, &mut told)?;
    }
    let union = union(watchers)?;
    for watcher in watchers {
        check_complete(watcher, &union)?;
    }
    Ok(told)
}

/// Checks all watchers against each other and against what the nodes applied.
pub fn judge(watchers: &[Watched], log: &Log) -> Report {
    let mut report = Report::new("G6 watches");
    let mut told = Told::default();
    let bare = |(place, kinds): (&Place, &Vec<EventKind>)| {
        let event = |kind: &EventKind| {
            let (label, value) = (String::new(), Vec::new());
            WatchEvent { revision: place.1, kind: kind.clone(), label, value }
        };
        (*place, kinds.iter().map(event).collect())
    };
    let truth: BTreeMap<Place, Vec<WatchEvent>> = log.iter().map(bare).collect();
    for watcher in watchers {
        let judged = check_order(watcher, &mut told)
            .and_then(|()| check_events(watcher, &truth))
            .and_then(|()| check_complete(watcher, &truth))
            .and_then(|()| check_queues(watcher, log));
        if let Err(what) = judged {
            report.violation(what);
        }
    }
    if let Err(what) = union(watchers) {
        report.violation(what);
    }
    report.cover("changes", told.changes, 0);
    report.cover("events", told.events, 0);
    report.cover("states", told.states, 0);
    report.cover("progress", told.progress, 0);
    report.cover("no_quorum", told.no_quorum, 0);
    report
}

/// Each change is, but for labels and values, what was applied.
fn check_events(watcher: &Watched, truth: &BTreeMap<Place, Vec<WatchEvent>>) -> Result<(), String> {
    for item in &watcher.items {
        let WatchItem::Change { shard, revision, events } = item else { continue };
        let applied = truth.get(&(*shard, *revision)).map(|all| watcher.of_mine(all));
        let applied: Vec<_> = applied.iter().flatten().map(|event| &event.kind).collect();
        if !events.iter().map(|event| &event.kind).eq(applied.iter().copied()) {
            let name = &watcher.name;
            return Err(format!(
                "{name}: revision {revision} of {shard} is {events:?}, applied was {applied:?}"
            ));
        }
    }
    Ok(())
}

/// A page shows all who waited at its revision.
fn check_queues(watcher: &Watched, log: &Log) -> Result<(), String> {
    for item in &watcher.items {
        let WatchItem::State { shard, revision, keys, .. } = item else { continue };
        let expected = waiters_at(log, (*shard, *revision));
        for info in keys {
            let said = info.waiters.iter().map(|waiter| (waiter.lease, waiter.number));
            let said: BTreeSet<_> = said.collect();
            let waited = expected.get(info.key.as_bytes()).cloned().unwrap_or_default();
            if said != waited {
                let name = &watcher.name;
                return Err(format!(
                    "{name}: the state at revision {revision} of {shard} has {info:?}, there \
                     waited {waited:?}"
                ));
            }
        }
    }
    Ok(())
}

/// Who waits for what after all changes up to a place.
fn waiters_at(log: &Log, place: Place) -> Waiters {
    let mut waiters = Waiters::new();
    for kind in log.range((place.0, Revision(0))..=place).flat_map(|(_, kinds)| kinds) {
        match kind {
            EventKind::Queued { key, lease, number, .. } => {
                waiters.entry(key.clone()).or_default().insert((*lease, *number));
            }
            EventKind::WaitEnded { key, lease, number, .. } => {
                waiters.entry(key.clone()).or_default().remove(&(*lease, *number));
            }
            _ => {}
        }
    }
    waiters
}

/// Per shard: revisions ascend, positions never run ahead, one change is one item.
fn check_order(watcher: &Watched, told: &mut Told) -> Result<(), String> {
    let mut at = watcher.after.clone();
    let name = &watcher.name;
    for item in &watcher.items {
        match item {
            WatchItem::Change { shard, revision, events } => {
                told.changes += 1;
                told.events += events.len() as u64;
                if at.get(shard).is_some_and(|at| revision <= at) {
                    return Err(format!("{name}: shard {shard} goes back to revision {revision}"));
                }
                at.insert(*shard, *revision);
                if events.is_empty() || events.iter().any(|event| event.revision != *revision) {
                    return Err(format!("{name}: revision {revision} of {shard} is mixed"));
                }
                if watcher.of_mine(events).len() != events.len() {
                    return Err(format!("{name}: revision {revision} has foreign events"));
                }
            }
            WatchItem::Progress { shard, revision } => {
                told.progress += 1;
                if at.get(shard).is_some_and(|at| revision < at) {
                    return Err(format!("{name}: progress of {shard} goes back to {revision}"));
                }
                at.insert(*shard, *revision);
            }
            WatchItem::State { shard, revision, first, .. } => {
                told.states += u64::from(*first);
                if at.get(shard).is_some_and(|at| revision < at) {
                    return Err(format!("{name}: the state of {shard} goes back to {revision}"));
                }
                at.insert(*shard, *revision);
            }
            WatchItem::NoQuorum => told.no_quorum += 1,
            _ => {}
        }
    }
    Ok(())
}

/// All changes; two watchers that were told one were told the same of the keys that both watch.
fn union(watchers: &[Watched]) -> Result<BTreeMap<Place, Vec<WatchEvent>>, String> {
    let mut union: BTreeMap<Place, ByKey> = BTreeMap::new();
    for (place, told) in watchers.iter().flat_map(changes) {
        let known = union.entry(place).or_default();
        for (key, events) in told {
            known.entry(key).or_insert(events);
        }
    }
    for watcher in watchers {
        for (place, told) in changes(watcher) {
            let mine = union[&place].iter().filter(|(key, _)| watcher.covers(key));
            if !mine.eq(&told) {
                let (name, (shard, revision)) = (&watcher.name, place);
                return Err(format!("{name}: revision {revision} of {shard} differs"));
            }
        }
    }
    // Events of different keys have no order among each other here; nobody asks for it.
    let flat = |(place, keys): (Place, ByKey)| (place, keys.into_values().flatten().collect());
    Ok(union.into_iter().map(flat).collect())
}

/// The events of a change by their keys: a change may be of keys that no single watcher watches.
type ByKey = BTreeMap<Vec<u8>, Vec<WatchEvent>>;

fn changes(watcher: &Watched) -> impl Iterator<Item = (Place, ByKey)> {
    watcher.items.iter().filter_map(|item| {
        let WatchItem::Change { shard, revision, events } = item else { return None };
        let mut keys = ByKey::new();
        for event in events {
            let key = event.kind.key().unwrap_or_default().to_vec();
            keys.entry(key).or_default().push(event.clone());
        }
        Some(((*shard, *revision), keys))
    })
}

/// Between two places of a watcher with no state in between, it was told all there was; a state
/// is the sum of what was before it.
fn check_complete(
    watcher: &Watched,
    union: &BTreeMap<Place, Vec<WatchEvent>>,
) -> Result<(), String> {
    let mut at = watcher.after.clone();
    // States whose last page was not told yet.
    let mut pages: BTreeMap<ShardId, (Revision, Vec<KeyInfo>)> = BTreeMap::new();
    for item in &watcher.items {
        match item {
            WatchItem::Change { shard, revision, .. } => {
                if let Some(from) = at.insert(*shard, *revision) {
                    nothing_between(watcher, union, *shard, (from, Revision(revision.0 - 1)))?;
                }
            }
            WatchItem::Progress { shard, revision } => {
                if let Some(from) = at.insert(*shard, *revision) {
                    nothing_between(watcher, union, *shard, (from, *revision))?;
                }
            }
            WatchItem::State { shard, revision, keys, first, last } => {
                if *first {
                    pages.insert(*shard, (*revision, Vec::new()));
                }
                let Some((_, known)) = pages.get_mut(shard).filter(|page| page.0 == *revision)
                else {
                    let name = &watcher.name;
                    return Err(format!("{name}: a page at {revision} of {shard} is of no state"));
                };
                known.extend(keys.iter().cloned());
                at.insert(*shard, *revision);
                if *last {
                    let keys = pages.remove(shard).map(|(_, keys)| keys).unwrap_or_default();
                    check_state(watcher, union, (*shard, *revision), &keys)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn nothing_between(
    watcher: &Watched,
    union: &BTreeMap<Place, Vec<WatchEvent>>,
    shard: ShardId,
    (from, upto): (Revision, Revision),
) -> Result<(), String> {
    if upto <= from {
        return Ok(());
    }
    let between = union.range((shard, Revision(from.0 + 1))..=(shard, upto));
    for ((shard, revision), events) in between {
        if !watcher.of_mine(events).is_empty() {
            let name = &watcher.name;
            return Err(format!("{name}: revision {revision} of {shard} was not told"));
        }
    }
    Ok(())
}

/// Who holds what after all changes up to a place, by the events alone.
pub fn holders_at(union: &BTreeMap<Place, Vec<WatchEvent>>, place: Place) -> Holders {
    let mut holders = Holders::new();
    let before = union.range((place.0, Revision(0))..=place);
    for event in before.flat_map(|(_, events)| events) {
        match &event.kind {
            EventKind::Granted { key, token, .. } => {
                holders.entry(key.clone()).or_default().insert(*token);
            }
            EventKind::Ended { key, token, .. } => {
                if let Some(tokens) = holders.get_mut(key) {
                    tokens.remove(token);
                }
            }
            _ => {}
        }
    }
    holders.retain(|_, tokens| !tokens.is_empty());
    holders
}

fn check_state(
    watcher: &Watched,
    union: &BTreeMap<Place, Vec<WatchEvent>>,
    place: Place,
    keys: &[KeyInfo],
) -> Result<(), String> {
    if keys.windows(2).any(|pair| pair[0].key >= pair[1].key) {
        return Err(format!("{}: the pages of {place:?} are out of order", watcher.name));
    }
    let tokens = |info: &KeyInfo| info.holders.iter().map(|holder| holder.token).collect();
    let mut said: Holders =
        keys.iter().map(|info| (info.key.clone().into_bytes(), tokens(info))).collect();
    said.retain(|_, tokens: &mut BTreeSet<Token>| !tokens.is_empty());
    let mut expected = holders_at(union, place);
    expected.retain(|key, _| watcher.covers(key));
    if said == expected {
        return Ok(());
    }
    let name = &watcher.name;
    Err(format!("{name}: the state at {place:?} is {said:?}, the changes give {expected:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARD: ShardId = ShardId(0);

    fn event(revision: u64, kind: EventKind) -> WatchEvent {
        let (label, value) = (String::new(), Vec::new());
        WatchEvent { revision: Revision(revision), kind, label, value }
    }

    fn granted(revision: u64, key: &str, token: u64) -> WatchEvent {
        let kind = EventKind::Granted {
            limit: 0,
            key: key.as_bytes().to_vec(),
            lease: LeaseId(1),
            mode: leasehold_protocol::ids::Mode::EXCLUSIVE,
            token: Token(token),
            slots: Vec::new(),
        };
        event(revision, kind)
    }

    fn ended(revision: u64, key: &str, token: u64) -> WatchEvent {
        let kind = EventKind::Ended {
            key: key.as_bytes().to_vec(),
            lease: LeaseId(1),
            token: Token(token),
            reason: leasehold::EndReason::Released,
        };
        event(revision, kind)
    }

    fn change(events: &[WatchEvent]) -> WatchItem {
        WatchItem::Change { shard: SHARD, revision: events[0].revision, events: events.to_vec() }
    }

    fn progress(revision: u64) -> WatchItem {
        WatchItem::Progress { shard: SHARD, revision: Revision(revision) }
    }

    fn state(revision: u64, held: &[(&str, u64)]) -> WatchItem {
        let holder = |token| leasehold::Holder {
            lease: LeaseId(1),
            token: Token(token),
            mode: leasehold_protocol::ids::Mode::EXCLUSIVE,
            floor: Token(token),
            label: String::new(),
            value: Vec::new(),
            since_ms: 0,
            remaining_ms: None,
            number: Number(1),
            own_lease: false,
            forced: false,
            slots: Vec::new(),
            entries: 1,
            delay_ms: 0,
            asked: None,
        };
        let info = |(key, token): &(&str, u64)| KeyInfo {
            last_end: None,
            key: (*key).to_owned(),
            holders: vec![holder(*token)],
            holders_total: 1,
            waiters: Vec::new(),
            waiters_total: 0,
            limit: 0,
            taken: 0,
            delays: Vec::new(),
            delays_total: 0,
        };
        let keys = held.iter().map(info).collect();
        let (first, last) = (true, true);
        WatchItem::State { shard: SHARD, revision: Revision(revision), keys, first, last }
    }

    fn watcher(name: &str, prefix: &str, items: Vec<WatchItem>) -> Watched {
        let key = prefix.as_bytes().to_vec();
        Watched { name: name.to_owned(), prefix: true, key, after: BTreeMap::new(), items }
    }

    /// Two keys; `b` is passed on in one step.
    fn all() -> Vec<WatchItem> {
        vec![
            progress(1),
            change(&[granted(2, "a", 11)]),
            change(&[granted(3, "b", 12)]),
            change(&[ended(5, "b", 12), granted(5, "b", 13)]),
            progress(6),
            change(&[ended(7, "a", 11)]),
        ]
    }

    fn of_b() -> Vec<WatchItem> {
        vec![
            progress(1),
            change(&[granted(3, "b", 12)]),
            change(&[ended(5, "b", 12), granted(5, "b", 13)]),
            progress(7),
        ]
    }

    fn verdict(items: Vec<WatchItem>) -> Result<Told, String> {
        check(&[watcher("all", "", all()), watcher("b", "b", items)])
    }

    #[track_caller]
    fn refused(items: Vec<WatchItem>, why: &str) {
        let said = verdict(items).expect_err(why);
        assert!(said.contains(why), "{said}");
    }

    #[test]
    fn what_was_told_right_passes_and_is_counted() {
        let told = verdict(of_b()).expect("right");
        assert_eq!((told.changes, told.events, told.progress), (6, 8, 4));
        let resync = vec![progress(1), state(6, &[("b", 13)]), progress(7)];
        assert_eq!(verdict(resync).map(|told| told.states), Ok(1));
        let late = vec![state(3, &[("b", 12)]), of_b()[2].clone()];
        assert!(verdict(late).is_ok());
    }

    #[test]
    fn a_change_that_is_missing_doubled_or_out_of_order_is_seen() {
        let mut missing = of_b();
        missing.remove(1);
        refused(missing, "was not told");
        let mut doubled = of_b();
        doubled.insert(2, doubled[1].clone());
        refused(doubled, "goes back");
        let mut swapped = of_b();
        swapped.swap(1, 2);
        refused(swapped, "goes back");
    }

    #[test]
    fn a_position_ahead_of_what_was_told_is_seen() {
        let ahead = vec![progress(1), progress(4), of_b()[2].clone()];
        refused(ahead, "was not told");
        let before = vec![progress(4), of_b()[1].clone()];
        refused(before, "goes back");
        let back = vec![progress(1), of_b()[1].clone(), progress(2)];
        refused(back, "progress");
    }

    #[test]
    fn a_split_mixed_foreign_or_altered_change_is_seen() {
        let split = vec![
            progress(1),
            of_b()[1].clone(),
            change(&[ended(5, "b", 12)]),
            change(&[granted(5, "b", 13)]),
        ];
        refused(split, "goes back");
        let half = vec![progress(1), of_b()[1].clone(), change(&[ended(5, "b", 12)])];
        refused(half, "differs");
        let mixed = vec![change(&[granted(3, "b", 12), ended(5, "b", 12)])];
        refused(mixed, "mixed");
        refused(vec![change(&[granted(2, "a", 11)])], "foreign");
        refused(vec![change(&[granted(3, "b", 99)])], "differs");
    }

    #[test]
    fn a_change_of_keys_that_nobody_watches_together_is_told_in_parts() {
        let part = |key: &str, token| watcher(key, key, vec![change(&[ended(5, key, token)])]);
        assert!(check(&[part("a", 11), part("b", 12)]).is_ok());
        let other = check(&[part("b", 12), part("b", 13)]);
        assert!(other.expect_err("not the same").contains("differs"));
    }

    #[test]
    fn a_state_that_is_not_the_sum_of_the_changes_is_seen() {
        refused(vec![state(4, &[("b", 13)])], "the changes give");
        refused(vec![state(6, &[])], "the changes give");
        let silent = vec![progress(1), state(4, &[("b", 12)]), progress(7)];
        refused(silent, "was not told");
    }

    /// As the nodes applied what `of_b` was told, and what another key had.
    fn log() -> Log {
        let told = [of_b(), vec![change(&[granted(2, "a", 11)]), change(&[ended(7, "a", 11)])]];
        let mut log = Log::new();
        for item in told.into_iter().flatten() {
            if let WatchItem::Change { shard, revision, events } = item {
                let kinds = events.into_iter().map(|event| event.kind).collect();
                log.insert((shard, revision), kinds);
            }
        }
        log
    }

    #[test]
    fn a_change_that_no_watcher_was_told_is_seen_in_the_log() {
        let judged = |items| judge(&[watcher("b", "b", items)], &log());
        assert_eq!(judged(of_b()).violations, Vec::<String>::new());
        let silent = judged(vec![progress(1), progress(7)]);
        assert!(silent.violations[0].contains("was not told"), "{silent}");
        let mut half = of_b();
        half[2] = change(&[ended(5, "b", 12)]);
        let half = judged(half);
        assert!(half.violations[0].contains("applied was"), "{half}");
    }

    #[test]
    fn a_page_of_another_state_or_with_another_queue_is_seen() {
        let page = |revision, first, last| {
            let WatchItem::State { shard, revision, keys, .. } = state(revision, &[("b", 13)])
            else {
                unreachable!("a state is one")
            };
            WatchItem::State { shard, revision, keys, first, last }
        };
        refused(vec![page(5, true, false), page(6, false, true)], "of no state");
        refused(vec![page(6, false, true)], "of no state");
        let mut log = log();
        let kind = EventKind::Queued {
            key: b"b".to_vec(),
            lease: LeaseId(2),
            number: Number(4),
            wait_ms: 5,
            mode: leasehold_protocol::ids::Mode::EXCLUSIVE,
        };
        log.insert((SHARD, Revision(6)), vec![kind]);
        let judged = judge(&[watcher("b", "b", vec![page(6, true, true)])], &log);
        assert!(judged.violations[0].contains("there waited"), "{judged}");
    }
}
