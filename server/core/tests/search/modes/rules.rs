//! What must be true of each step, from what can be read before and after it and from its events.

use std::collections::BTreeMap;

use leasehold_core::State;
use leasehold_protocol::command::Command;
use leasehold_protocol::event::{EndReason, EventKind};
use leasehold_protocol::ids::{LeaseId, Mode, Number, Token};
use leasehold_protocol::outcome::Outcome;

use super::Profile;
use super::world::Told;

macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct View {
    revision: u64,
    digest: u64,
    pub(crate) last_token: u64,
    pub(crate) keys: BTreeMap<String, KeyView>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeyView {
    pub(crate) limit: u32,
    /// In the order of their tokens.
    pub(crate) holders: Vec<Holder>,
    pub(crate) queue: Vec<Waiter>,
    /// Mode and length by token.
    pub(crate) delays: BTreeMap<Token, (Mode, u32)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) lease: LeaseId,
    pub(crate) token: Token,
    pub(crate) mode: Mode,
    pub(crate) number: Number,
    pub(crate) entries: u32,
    pub(crate) forced: bool,
    pub(crate) slots: Vec<u8>,
    pub(crate) value: Vec<u8>,
    pub(crate) asked: Option<String>,
    pub(crate) delay_ms: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiter {
    pub(crate) lease: LeaseId,
    pub(crate) number: Number,
    pub(crate) mode: Mode,
}

impl View {
    pub(crate) fn of(state: &State, profile: &Profile) -> Self {
        let mut keys = BTreeMap::new();
        for key in profile.keys {
            let info = state.key_info(key.as_bytes());
            let mut holders: Vec<_> = info
                .holders
                .into_iter()
                .map(|one| Holder {
                    lease: one.lease,
                    token: one.token,
                    mode: one.mode,
                    number: one.number,
                    entries: one.entries,
                    forced: one.forced,
                    slots: one.slots,
                    value: one.value,
                    asked: one.asked.map(|asked| asked.why),
                    delay_ms: one.delay_ms,
                })
                .collect();
            holders.sort_by_key(|one| one.token);
            let queue = info.waiters.into_iter().map(|one| {
                let (lease, number, mode) = (one.lease, one.number, one.mode);
                Waiter { lease, number, mode }
            });
            let delays = info.delays.iter().map(|one| (one.token, (one.mode, one.delay_ms)));
            let (queue, delays) = (queue.collect(), delays.collect());
            let entry = KeyView { limit: info.limit, holders, queue, delays };
            if entry != KeyView::default() {
                keys.insert((*key).to_owned(), entry);
            }
        }
        let (revision, digest) = (state.revision().0, state.digest());
        Self { revision, digest, last_token: state.last_token().0, keys }
    }

    /// Whether a waiter stands first wherever it waits, and fits there.
    fn is_due(&self, head: &Waiter) -> bool {
        let same = |one: &Waiter| (one.lease, one.number) == (head.lease, head.number);
        let keys = self.keys.values().filter(|entry| entry.queue.iter().any(same));
        keys.into_iter().all(|entry| same(&entry.queue[0]) && entry.fits(entry.queue[0].mode))
    }
}

impl KeyView {
    fn modes(&self) -> impl Iterator<Item = Mode> {
        let holds = self.holders.iter().map(|one| one.mode);
        holds.chain(self.delays.values().map(|(mode, _)| *mode))
    }

    fn permits(&self) -> u32 {
        self.modes().filter_map(Mode::permit_count).sum()
    }

    fn fits(&self, mode: Mode) -> bool {
        match mode.permit_count() {
            Some(permits) => self.permits() + permits <= self.limit,
            None => self.modes().all(|one| one == Mode::SHARED && mode == Mode::SHARED),
        }
    }

    fn is_gone(&self) -> bool {
        self.holders.is_empty() && self.queue.is_empty() && self.delays.is_empty()
    }
}

pub(crate) fn step(
    (before, after): (&View, &View),
    command: &Command,
    told: &Told,
) -> Result<(), String> {
    let changed = before.digest != after.digest;
    let rise = after.revision - before.revision;
    ensure!(rise == u64::from(changed), "revision +{rise} for a change: {changed}");
    ensure!(changed || told.events.is_empty(), "events without a change");
    let same = told.events.iter().all(|event| event.revision.0 == after.revision);
    ensure!(same, "an event of another revision");
    if matches!(told.outcome, Outcome::Refused { .. }) {
        ensure!(before.keys == after.keys, "refused, and keys changed");
    }
    exclusion(after)?;
    replay(before, after, told)?;
    let due = after
        .keys
        .iter()
        .find(|(_, entry)| entry.queue.first().is_some_and(|head| after.is_due(head)));
    ensure!(due.is_none(), "G4: a head that could be granted waits: {due:?}");
    grants(before, after, command, told)
}

/// G1: what is there goes together; slots belong to one hold.
fn exclusion(view: &View) -> Result<(), String> {
    for (key, entry) in &view.keys {
        let modes: Vec<_> = entry.modes().collect();
        let locks = modes.iter().filter(|mode| mode.permit_count().is_none()).count();
        ensure!(locks == 0 || entry.limit == 0, "G1: {key} is a lock and a semaphore");
        let alone = modes.len() == 1 || !modes.contains(&Mode::EXCLUSIVE);
        ensure!(alone, "G1: {key} has a writer beside others");
        let mut taken = 0_u8;
        for holder in &entry.holders {
            let slots = holder.slots.first().copied().unwrap_or(0);
            let permits = holder.mode.permit_count().unwrap_or(0);
            ensure!(slots.count_ones() == permits, "{key}: {permits} permits and slots {slots:b}");
            ensure!(taken & slots == 0, "G1: a slot of {key} is taken twice");
            taken |= slots;
        }
    }
    Ok(())
}

/// G2, G4, G6: tokens rise; who applies the events to what was has what is; the queue is served
/// from its head, and nothing is granted that does not fit.
fn replay(before: &View, after: &View, told: &Told) -> Result<(), String> {
    let mut now = before.clone();
    let mut lost = Vec::new();
    for event in &told.events {
        apply(&mut now, &mut lost, &event.kind).map_err(|text| format!("{text}: {event:?}"))?;
    }
    ensure!(now.last_token == after.last_token, "G2: the counter is {}", after.last_token);
    let bare = |view: &View| -> Vec<_> {
        let keys = view.keys.iter().filter(|(_, entry)| !entry.is_gone());
        let told = |(key, entry): (&String, &KeyView)| {
            let holders = entry.holders.iter().map(|one| (one.token, one.lease, one.mode));
            let holders: BTreeMap<_, _> =
                holders.map(|(token, lease, mode)| (token, (lease, mode))).collect();
            let queue = entry.queue.iter().map(|one| (one.lease, one.number));
            let delays: Vec<_> = entry.delays.keys().copied().collect();
            (key.clone(), holders, queue.collect::<Vec<_>>(), delays)
        };
        keys.map(told).collect()
    };
    ensure!(
        bare(&now) == bare(after),
        "G6: events lead to {:?}, not {:?}",
        bare(&now),
        bare(after)
    );
    Ok(())
}

fn apply(view: &mut View, lost: &mut Vec<Token>, event: &EventKind) -> Result<(), &'static str> {
    let name = |key: &[u8]| String::from_utf8_lossy(key).into_owned();
    match event {
        EventKind::Granted { key, lease, mode, token, slots, limit } => {
            if token.0 != view.last_token + 1 {
                return Err("G2: not the next token");
            }
            view.last_token = token.0;
            let entry = view.keys.entry(name(key)).or_default();
            entry.limit = *limit;
            if !entry.fits(*mode) {
                return Err("G1: it does not fit");
            }
            entry.holders.push(Holder {
                lease: *lease,
                token: *token,
                mode: *mode,
                number: Number(0),
                entries: 1,
                forced: false,
                slots: slots.clone(),
                value: Vec::new(),
                asked: None,
                delay_ms: 0,
            });
        }
        EventKind::Ended { key, token, reason, .. } => {
            let entry = view.keys.get_mut(&name(key)).ok_or("nobody held")?;
            let at = entry.holders.iter().position(|one| one.token == *token);
            entry.holders.remove(at.ok_or("another held")?);
            if matches!(reason, EndReason::LeaseExpired | EndReason::Forced { .. }) {
                lost.push(*token);
            }
        }
        EventKind::Converted { key, token, mode, .. } => {
            let entry = view.keys.get_mut(&name(key)).ok_or("nobody held")?;
            let holder = entry.holders.iter_mut().find(|one| one.token == *token);
            holder.ok_or("another held")?.mode = *mode;
        }
        EventKind::DelayBegan { key, token, delay_ms } => {
            if !lost.contains(token) {
                return Err("a delay without a loss");
            }
            let entry = view.keys.get_mut(&name(key)).ok_or("nobody held")?;
            entry.delays.insert(*token, (Mode::EXCLUSIVE, *delay_ms));
        }
        EventKind::DelayEnded { key, token } => {
            let entry = view.keys.get_mut(&name(key)).ok_or("nothing was delayed")?;
            entry.delays.remove(token).ok_or("another delay")?;
        }
        EventKind::LimitChanged { key, limit, .. } => {
            view.keys.get_mut(&name(key)).ok_or("nobody uses it")?.limit = *limit;
        }
        EventKind::Vacant { key } => {
            let entry = view.keys.get(&name(key)).ok_or("it was vacant")?;
            if !entry.is_gone() {
                return Err("it is not vacant");
            }
        }
        EventKind::Queued { .. } | EventKind::WaitEnded { .. } => return apply_wait(view, event),
        _ => {}
    }
    Ok(())
}

fn apply_wait(view: &mut View, event: &EventKind) -> Result<(), &'static str> {
    let name = |key: &[u8]| String::from_utf8_lossy(key).into_owned();
    match event {
        EventKind::Queued { key, lease, number, .. } => {
            let (lease, number, mode) = (*lease, *number, Mode::EXCLUSIVE);
            view.keys.entry(name(key)).or_default().queue.push(Waiter { lease, number, mode });
        }
        EventKind::WaitEnded { key, lease, number, outcome } => {
            let entry = view.keys.get_mut(&name(key)).ok_or("nobody waited")?;
            let same = |one: &Waiter| (one.lease, one.number) == (*lease, *number);
            let at = entry.queue.iter().position(same).ok_or("it did not wait")?;
            if at > 0 && matches!(outcome, Outcome::Granted(_)) {
                return Err("G4: it was not the first");
            }
            entry.queue.remove(at);
        }
        _ => {}
    }
    Ok(())
}

/// What was asked for is there as a whole or not at all.
fn grants(before: &View, after: &View, command: &Command, told: &Told) -> Result<(), String> {
    for (key, entry) in &after.keys {
        let grew = entry.permits() > before.keys.get(key).map_or(0, KeyView::permits);
        ensure!(
            !grew || entry.permits() <= entry.limit,
            "G1: more permits of {key} than there are"
        );
        for waiter in &entry.queue {
            let part = after.keys.values().flat_map(|entry| &entry.holders);
            let mut part = part.filter(|one| one.lease == waiter.lease);
            let some = part.any(|one| one.number == waiter.number);
            ensure!(!some, "{waiter:?} of {key} holds a part of what it wants");
        }
    }
    match (command, told.outcome) {
        // What was told before may be over by now.
        _ if told.again => {}
        (Command::AcquireAll { wants, caller, .. }, Outcome::Granted(grant)) => {
            let fresh = grant.token.0 > before.last_token;
            for (token, want) in (grant.token.0..).zip(wants) {
                let name = String::from_utf8_lossy(&want.key).into_owned();
                let entry = after.keys.get(&name).ok_or("granted, and nobody holds")?;
                let mine = entry.holders.iter().find(|one| one.lease == caller.lease);
                ensure!(mine.is_some_and(|one| one.token.0 == token), "{name}: not token {token}");
                let waited = before.keys.get(&name).is_some_and(|entry| !entry.queue.is_empty());
                ensure!(!fresh || !waited, "G4: it passed by the queue of {name}");
            }
        }
        (Command::AcquireAll { wants, caller, .. }, Outcome::Queued { .. }) => {
            for want in wants {
                let name = String::from_utf8_lossy(&want.key).into_owned();
                let last = after.keys.get(&name).and_then(|entry| entry.queue.last());
                let mine = last.is_some_and(|last| last.number == caller.number);
                ensure!(mine, "{name}: it does not wait at the end");
            }
        }
        (Command::Convert { .. }, Outcome::Queued { .. }) => {
            return Err("a conversion waits".to_owned());
        }
        (Command::EndDelay { token, .. }, Outcome::Changed { .. }) => {
            let delays = |view: &View| -> usize {
                view.keys.values().filter(|entry| entry.delays.contains_key(token)).count()
            };
            ensure!((delays(before), delays(after)) == (1, 0), "another delay was ended");
        }
        _ => {}
    }
    Ok(())
}

/// Situations that a profile may demand.
pub(crate) fn seen(
    (before, after): (&View, &View),
    command: &Command,
    told: &Told,
) -> Vec<&'static str> {
    let mut all = Vec::new();
    let count = |wanted: fn(&EventKind) -> bool| {
        told.events.iter().filter(|event| wanted(&event.kind)).count()
    };
    let granted = count(|kind| matches!(kind, EventKind::Granted { .. }));
    let served =
        count(|kind| matches!(kind, EventKind::WaitEnded { outcome: Outcome::Granted(_), .. }));
    let ended =
        count(|kind| matches!(kind, EventKind::WaitEnded { outcome: Outcome::Refused { .. }, .. }));
    if told.again && matches!(command, Command::AcquireAll { .. }) {
        match told.outcome {
            Outcome::Granted(_) => all.push("a retry of a grant"),
            Outcome::Queued { .. } => all.push("a retry that waits"),
            _ => {}
        }
    }
    if served > 1 {
        all.push("several grants in a step");
    }
    let names: Vec<_> = told
        .events
        .iter()
        .filter_map(|event| match event.kind {
            EventKind::WaitEnded { lease, number, outcome: Outcome::Granted(_), .. } => {
                Some((lease, number))
            }
            _ => None,
        })
        .collect();
    if names.windows(2).any(|pair| pair[0] == pair[1]) {
        all.push("a hand-over of several keys");
    }
    let free = |entry: &KeyView| entry.modes().next().is_none() && !entry.queue.is_empty();
    if after.keys.values().any(free) {
        all.push("a free key that waits for another");
    }
    let queued = before.keys.values().any(|entry| !entry.queue.is_empty());
    if matches!(command, Command::Convert { .. }) && granted > served && queued {
        all.push("an upgrade past a queue");
    }
    if matches!(command, Command::EndDelay { .. }) && served > 0 {
        all.push("a delay ends and lets waiters in");
    }
    if matches!(command, Command::SetLimit { .. }) && ended > 0 {
        all.push("a wait above a lowered limit ends");
    }
    all
}
