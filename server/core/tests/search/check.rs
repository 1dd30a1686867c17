//! What must be true of each single step, written from DESIGN's rules and from what can be read of
//! the state before and after; shares nothing with the state machine or the naive model.

use std::collections::BTreeMap;

use leasehold_core::{State, invariants};
use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::{LeaseId, Number};
use leasehold_protocol::outcome::Outcome;

use crate::world::{Body, KEYS, Move, Told, World, caller_of};

macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}

/// What can be read of a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct View {
    pub(crate) revision: u64,
    pub(crate) digest: u64,
    pub(crate) last_token: u64,
    pub(crate) keys: BTreeMap<Vec<u8>, KeyView>,
    pub(crate) leases: BTreeMap<LeaseId, LeaseView>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeyView {
    pub(crate) holder: Option<Holder>,
    pub(crate) queue: Vec<(LeaseId, Number)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) lease: LeaseId,
    pub(crate) token: u64,
    pub(crate) forced: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeaseView {
    version: u64,
    own: bool,
}

impl View {
    pub(crate) fn of(state: &State) -> Result<Self, String> {
        let mut keys = BTreeMap::new();
        let mut claims = 0;
        for key in KEYS {
            let info = state.key_info(key.as_bytes());
            ensure!(info.holders.len() <= 1, "G1: {key} has {} holders", info.holders.len());
            let holder = info.holders.first().map(|one| Holder {
                lease: one.lease,
                token: one.token.0,
                forced: one.forced,
            });
            let queue: Vec<_> = info.waiters.iter().map(|one| (one.lease, one.number)).collect();
            ensure!(holder.is_some() || queue.is_empty(), "G4: {key} is free and has waiters");
            if holder.is_some() {
                claims += 1 + queue.len();
                keys.insert(key.as_bytes().to_vec(), KeyView { holder, queue });
            }
        }
        ensure!(state.keys_len() == keys.len(), "{} keys in the table", state.keys_len());
        let mut leases = BTreeMap::new();
        for (id, _) in state.leases() {
            let view = state.lease(id).ok_or("a listed lease is not live")?;
            ensure!(claims >= view.holds() + view.waits(), "lease {id} claims what no key knows");
            claims -= view.holds() + view.waits();
            leases.insert(id, LeaseView { version: view.version().0, own: view.own_lease() });
        }
        ensure!(claims == 0, "{claims} holds and waiters belong to no live lease");
        let (revision, digest) = (state.revision().0, state.digest());
        let last_token = state.last_token().0;
        Ok(Self { revision, digest, last_token, keys, leases })
    }
}

/// Checks a step from `before`, whose clients knew `former`, to the world as it is now.
pub(crate) fn step(
    (former, before): (&World, &View),
    (world, after): (&World, &View),
    (step, told): (Move, &Told),
) -> Result<(), String> {
    invariants::check(&world.state)?;
    revision(before, after, &told.events)?;
    tokens(before, after, &told.events)?;
    events_tell_the_change(before, after, &told.events)?;
    queues(before, after, told)?;
    versions(before, after, told)?;
    outcome(before, after, told)?;
    retry(former, before, after, (step, told))?;
    memory(world)
}

/// One revision for a command that changes anything, none for any other.
fn revision(before: &View, after: &View, events: &[Event]) -> Result<(), String> {
    let changed = before.digest != after.digest;
    let rise = after.revision.checked_sub(before.revision);
    ensure!(rise == Some(u64::from(changed)), "revision {rise:?} for a change: {changed}");
    if !changed {
        ensure!(before == after, "a change that the digest does not show");
        ensure!(events.is_empty(), "events without a change: {events:?}");
    }
    let wrong = events.iter().find(|event| event.revision.0 != after.revision);
    ensure!(wrong.is_none(), "an event of another revision: {wrong:?}");
    Ok(())
}

/// G2: each grant has a higher token than every grant before, and keeps it while it is held.
fn tokens(before: &View, after: &View, events: &[Event]) -> Result<(), String> {
    let mut last = before.last_token;
    for event in events {
        if let EventKind::Granted { token, .. } = event.kind {
            ensure!(token.0 > last, "G2: token {token} after {last}");
            last = token.0;
        }
    }
    ensure!(last == after.last_token, "G2: the counter is {}, not {last}", after.last_token);
    for (key, entry) in &after.keys {
        let Some(now) = &entry.holder else { continue };
        let then = before.keys.get(key).and_then(|entry| entry.holder.as_ref());
        let kept = then.is_some_and(|then| then.lease == now.lease && then.token == now.token);
        ensure!(kept || now.token > before.last_token, "G2: an old token {}", now.token);
    }
    Ok(())
}

/// G6: who applies the events to what was, has what is.
fn events_tell_the_change(before: &View, after: &View, events: &[Event]) -> Result<(), String> {
    let mut keys = before.keys.clone();
    let mut leases: Vec<LeaseId> = before.leases.keys().copied().collect();
    for event in events {
        apply_event(&mut keys, &mut leases, &event.kind)
            .map_err(|text| format!("{text}: {event:?} of {events:?}"))?;
    }
    keys.retain(|_, entry| entry.holder.is_some() || !entry.queue.is_empty());
    ensure!(keys == after.keys, "events lead to {keys:?}, not {:?}", after.keys);
    ensure!(leases.iter().eq(after.leases.keys()), "events lead to the leases {leases:?}");
    let vacated = before.keys.keys().filter(|key| !after.keys.contains_key(*key)).count();
    let vacant = events.iter().filter(|event| matches!(event.kind, EventKind::Vacant { .. }));
    ensure!(vacant.count() == vacated, "{vacated} keys became vacant: {events:?}");
    Ok(())
}

fn apply_event(
    keys: &mut BTreeMap<Vec<u8>, KeyView>,
    leases: &mut Vec<LeaseId>,
    event: &EventKind,
) -> Result<(), &'static str> {
    match event {
        EventKind::LeaseOpened { lease, .. } => {
            if leases.last().is_some_and(|last| last >= lease) {
                return Err("a lease id that does not rise");
            }
            leases.push(*lease);
        }
        EventKind::LeaseEnded { lease, .. } => {
            let at = leases.iter().position(|live| live == lease).ok_or("it was not live")?;
            leases.remove(at);
        }
        EventKind::Queued { key, lease, number, .. } => {
            let entry = keys.get_mut(key).ok_or("queued on a free key")?;
            entry.queue.push((*lease, *number));
        }
        EventKind::WaitEnded { key, lease, number, outcome } => {
            let entry = keys.get_mut(key).ok_or("nobody waited")?;
            let waiting = entry.queue.iter().position(|one| *one == (*lease, *number));
            let at = waiting.ok_or("it did not wait")?;
            entry.queue.remove(at);
            let Outcome::Granted(grant) = outcome else { return Ok(()) };
            let holder = entry.holder.as_ref().ok_or("granted and nobody holds")?;
            if at != 0 || (holder.lease, holder.token) != (grant.lease, grant.token.0) {
                return Err("granted to another");
            }
        }
        EventKind::Granted { key, lease, token, .. } => {
            if !leases.contains(lease) {
                return Err("G4: granted to a lease that is not live");
            }
            let entry = keys.entry(key.clone()).or_default();
            if entry.holder.is_some() {
                return Err("G1: granted while held");
            }
            entry.holder = Some(Holder { lease: *lease, token: token.0, forced: false });
        }
        EventKind::Ended { key, lease, token, .. } => {
            let entry = keys.get_mut(key).ok_or("nobody held")?;
            let holder = entry.holder.take().ok_or("nobody held")?;
            if (holder.lease, holder.token) != (*lease, token.0) {
                return Err("another held");
            }
        }
        EventKind::ForcedPending { key, lease, token, .. } => {
            let holder = keys.get_mut(key).and_then(|entry| entry.holder.as_mut());
            let holder = holder.ok_or("nobody held")?;
            if holder.forced || (holder.lease, holder.token) != (*lease, token.0) {
                return Err("another held, or it was forced already");
            }
            holder.forced = true;
        }
        EventKind::Vacant { key } => {
            let entry = keys.remove(key).ok_or("it was vacant")?;
            if entry != KeyView::default() {
                return Err("it is not vacant");
            }
        }
        other => unreachable!("no profile has {other:?}"),
    }
    Ok(())
}

/// G4: queues only lose members and gain at the end; who is granted stood first among those that
/// stayed; nobody whose end this very command is gets anything.
fn queues(before: &View, after: &View, told: &Told) -> Result<(), String> {
    let ended = ended_by(&told.command);
    let granted = granted_waits(&told.events);
    for (key, entry) in &before.keys {
        let now = after.keys.get(key).cloned().unwrap_or_default();
        let stayed: Vec<_> = entry.queue.iter().filter(|one| now.queue.contains(one)).collect();
        let came: Vec<_> = now.queue.iter().filter(|one| !entry.queue.contains(one)).collect();
        let order: Vec<_> = stayed.into_iter().chain(came).collect();
        ensure!(
            order.iter().copied().eq(now.queue.iter()),
            "G4: the queue of {key:?} changed order"
        );
        let entitled = entry.queue.iter().filter(|(lease, number)| {
            !ended
                .is_some_and(|(ends, only)| ends == *lease && only.is_none_or(|one| one == *number))
        });
        let got: Vec<_> = entry.queue.iter().filter(|one| granted.contains(one)).collect();
        ensure!(entitled.take(got.len()).eq(got.iter().copied()), "G4: {got:?} were granted");
    }
    let waited = |one: &&(LeaseId, Number)| before.keys.values().any(|key| key.queue.contains(one));
    let stranger = granted.iter().find(|one| !waited(one));
    ensure!(stranger.is_none(), "G4: {stranger:?} did not wait and was granted");
    Ok(())
}

fn granted_waits(events: &[Event]) -> Vec<(LeaseId, Number)> {
    let granted = events.iter().filter_map(|event| match event.kind {
        EventKind::WaitEnded { lease, number, outcome: Outcome::Granted(_), .. } => {
            Some((lease, number))
        }
        _ => None,
    });
    granted.collect()
}

/// The waits that a command ends: all of a lease or one number's.
fn ended_by(command: &Command) -> Option<(LeaseId, Option<Number>)> {
    match command {
        Command::Cancel { caller, .. } => {
            Some((caller.lease, Some(Number(caller.number.0.checked_sub(1)?))))
        }
        Command::TimeOut { lease, number } => Some((*lease, Some(*number))),
        Command::Close { lease, .. } | Command::Expire { lease } => Some((*lease, None)),
        _ => None,
    }
}

/// The hold-set version (DESIGN §4): raised by each grant to a lease, by each grant to an own
/// lease for the session that asked, and by a force-release of a hold; by nothing else. A grant
/// tells the version before and after itself.
fn versions(before: &View, after: &View, told: &Told) -> Result<(), String> {
    let mut expected: BTreeMap<LeaseId, u64> =
        before.leases.iter().map(|(id, lease)| (*id, lease.version)).collect();
    let mut grants = Vec::new();
    if let (Command::Acquire { caller, .. }, Outcome::Granted(grant)) =
        (&told.command, told.outcome)
        && grant.revision.0 > before.revision
    {
        grants.push((caller.lease, grant));
    }
    for event in &told.events {
        match event.kind {
            EventKind::WaitEnded { lease, outcome: Outcome::Granted(grant), .. } => {
                grants.push((lease, grant));
            }
            EventKind::ForcedPending { lease, .. } => *expected.entry(lease).or_default() += 1,
            _ => {}
        }
    }
    if let (Command::ForceRelease { now: true, key, .. }, Outcome::Forced { .. }) =
        (&told.command, told.outcome)
        && let Some(holder) = before.keys.get(key).and_then(|entry| entry.holder.as_ref())
    {
        *expected.entry(holder.lease).or_default() += 1;
    }
    for (session, grant) in grants {
        let version = expected.entry(session).or_default();
        let stated = (grant.version_before.0, grant.version_after.0);
        ensure!(stated == (*version, *version + 1), "a grant to {session} states {stated:?}");
        *version += 1;
        if grant.lease != session {
            expected.insert(grant.lease, 1);
        }
    }
    for (id, lease) in &after.leases {
        let version = expected.get(id).copied().unwrap_or(0);
        ensure!(lease.version == version, "lease {id}: version {}, not {version}", lease.version);
    }
    Ok(())
}

/// What the caller is told of a first execution is what happened.
fn outcome(before: &View, after: &View, told: &Told) -> Result<(), String> {
    let holds = |view: &View, lease: LeaseId, token: u64| {
        let holders = view.keys.values().filter_map(|entry| entry.holder.as_ref());
        holders.into_iter().any(|holder| holder.lease == lease && holder.token == token)
    };
    let revision = match told.outcome {
        Outcome::Granted(grant) => {
            let fresh = grant.revision.0 > before.revision;
            let held = holds(after, grant.lease, grant.token.0);
            ensure!(!fresh || held, "granted, and another holds");
            grant.revision
        }
        Outcome::Released { token, revision } => {
            let fresh = revision.0 > before.revision;
            let was = before
                .keys
                .values()
                .any(|entry| entry.holder.as_ref().is_some_and(|holder| holder.token == token.0));
            let is = after
                .keys
                .values()
                .any(|entry| entry.holder.as_ref().is_some_and(|holder| holder.token == token.0));
            ensure!(!is && (was || !fresh), "released: held before: {was}, after: {is}");
            revision
        }
        Outcome::Closed { revision } => {
            let (Command::Close { lease, .. } | Command::Expire { lease }) = told.command else {
                return Err("closed, and it was no such command".to_owned());
            };
            ensure!(!after.leases.contains_key(&lease), "closed, and it is live");
            revision
        }
        Outcome::Refused { revision, .. } => {
            ensure!(before.keys == after.keys, "refused, and holds or queues changed");
            ensure!(before.leases == after.leases, "refused, and leases changed");
            revision
        }
        Outcome::Opened { revision, .. }
        | Outcome::Queued { revision, .. }
        | Outcome::Cancelled { revision }
        | Outcome::TimedOut { revision }
        | Outcome::Changed { revision, .. }
        | Outcome::Members { revision, .. }
        | Outcome::Forced { revision, .. }
        | Outcome::Begun { revision } => revision,
    };
    ensure!(revision.0 <= after.revision, "an outcome of revision {revision}, from the future");
    Ok(())
}

/// G5: a retry of what must be remembered has the first reply and no effect; another body under
/// that number is refused.
fn retry(
    former: &World,
    before: &View,
    after: &View,
    (step, told): (Move, &Told),
) -> Result<(), String> {
    let Move::Send { who, number, body } = step else { return Ok(()) };
    let session = &former.sessions[who];
    if matches!(body, Body::Acquire { .. }) && former.is_forestalled(who, number) {
        let harmless = matches!(told.outcome, Outcome::Refused { .. });
        ensure!(harmless, "G5: an acquire after its cancel is told {:?}", told.outcome);
    }
    let Some(sent) = session.sent.get(&number) else { return Ok(()) };
    // What the command itself lets the state forget is not looked at here.
    let floor_rises = caller_of(&told.command).is_some_and(|one| one.floor.0 > session.floor);
    if !session.live || floor_rises || !session.must_be_remembered(number, sent) {
        return Ok(());
    }
    ensure!(before.keys == after.keys && before.leases == after.leases, "G5: a second execution");
    ensure!(before.last_token == after.last_token, "G5: a second grant");
    if body == sent.body {
        let same = match (sent.first, told.outcome) {
            (Some(first), outcome) => first == outcome,
            (None, Outcome::Queued { position, .. }) => {
                let waiting = (session.id, Number(number));
                let at = |entry: &KeyView| entry.queue.iter().position(|one| *one == waiting);
                before.keys.values().find_map(at) == Some(position as usize)
            }
            (None, _) => false,
        };
        ensure!(same, "G5: a retry is told {:?}, first was {:?}", told.outcome, sent.first);
    } else if former.is_forestalled(who, number) {
        ensure!(is_refused(told.outcome, ErrorCode::CANCELLED), "G5: an acquire after its cancel");
    } else {
        let conflict = is_refused(told.outcome, ErrorCode::NUMBER_CONFLICT);
        ensure!(conflict, "G5: another body is told {:?}", told.outcome);
    }
    Ok(())
}

fn is_refused(outcome: Outcome, wanted: ErrorCode) -> bool {
    matches!(outcome, Outcome::Refused { code, .. } if code == wanted)
}

/// G5: everything that must be remembered is, with the outcome that was told first.
fn memory(world: &World) -> Result<(), String> {
    for session in world.sessions.iter().filter(|session| session.live) {
        let id = session.id;
        for (number, sent) in &session.sent {
            let told = world.state.wait_result(id, Number(*number));
            let right = match (sent.first, told) {
                (_, None) => !session.must_be_remembered(*number, sent),
                (Some(first), Some(told)) => first == told,
                (None, Some(told)) => matches!(told, Outcome::Queued { .. }),
            };
            ensure!(right, "G5: {id} {number}: first {:?}, now {told:?}", sent.first);
        }
    }
    Ok(())
}
