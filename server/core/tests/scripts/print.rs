//! How scripts show outcomes, events and reads.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use leasehold_core::State;
use leasehold_protocol::event::{EndReason, Event, EventKind};
use leasehold_protocol::ids::{LeaseId, Mode, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{
    ClaimReply, Claimed, HeldKey, HoldsReply, KeyInfo, SessionInfo, Waiting,
};

type Names = BTreeMap<String, LeaseId>;

fn lease(names: &Names, id: LeaseId) -> String {
    let name = names.iter().find(|(_, named)| **named == id);
    name.map_or_else(|| format!("#{id}"), |(name, _)| name.clone())
}

/// Long texts are shortened: what matters is their length.
fn text(bytes: &[u8]) -> String {
    match bytes.len() {
        0 => "-".to_owned(),
        1..=40 => String::from_utf8_lossy(bytes).into_owned(),
        len => format!("{}...({len})", String::from_utf8_lossy(&bytes[..4])),
    }
}

/// Only what is not exclusive is shown.
fn mode(mode: Mode) -> String {
    match mode {
        Mode::EXCLUSIVE => String::new(),
        Mode::SHARED => " shared".to_owned(),
        other => match other.permit_count() {
            Some(permits) => format!(" permits={permits}"),
            None => format!(" mode={}", other.0),
        },
    }
}

/// Slots by their numbers, neighbours as a range.
fn slots(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return String::new();
    }
    let taken = |slot: &usize| bytes[slot / 8] >> (slot % 8) & 1 == 1;
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for slot in (0..bytes.len() * 8).filter(taken) {
        match ranges.last_mut() {
            Some((_, end)) if *end + 1 == slot => *end = slot,
            _ => ranges.push((slot, slot)),
        }
    }
    let shown = ranges.iter().map(|(first, last)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    });
    format!(" slots={}", shown.collect::<Vec<_>>().join(","))
}

/// Only what is not the token itself is shown.
fn floor(token: Token, floor: Token) -> String {
    if token == floor { String::new() } else { format!(" floor={floor}") }
}

pub(crate) fn name(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Opened { .. } => "opened".to_owned(),
        Outcome::Granted(_) => "granted".to_owned(),
        Outcome::Queued { .. } => "queued".to_owned(),
        Outcome::Cancelled { .. } => "cancelled".to_owned(),
        Outcome::TimedOut { .. } => "timed_out".to_owned(),
        Outcome::Released { .. } => "released".to_owned(),
        Outcome::Closed { .. } => "closed".to_owned(),
        Outcome::Forced { .. } => "forced".to_owned(),
        Outcome::Changed { .. } => "changed".to_owned(),
        Outcome::Begun { .. } => "begun".to_owned(),
        Outcome::Members { .. } => "members".to_owned(),
        Outcome::Refused { code, .. } => format!("refused {}", code.name()),
    }
}

fn describe(names: &Names, outcome: &Outcome) -> String {
    let rest = match *outcome {
        Outcome::Opened { lease: id, revision } => {
            format!("{} rev={revision}", lease(names, id))
        }
        Outcome::Granted(grant) => format!(
            "{} token={}{} rev={} version={}->{}",
            lease(names, grant.lease),
            grant.token,
            floor(grant.token, grant.floor),
            grant.revision,
            grant.version_before,
            grant.version_after
        ),
        Outcome::Queued { position, revision } => format!("position={position} rev={revision}"),
        Outcome::Forced { token, passed_on, revision } => {
            format!("token={token} passed_on={passed_on} rev={revision}")
        }
        Outcome::Refused { token, revision, .. } if token.0 == 0 => format!("rev={revision}"),
        Outcome::Released { token, revision }
        | Outcome::Changed { token, revision }
        | Outcome::Refused { token, revision, .. } => {
            format!("token={token} rev={revision}")
        }
        Outcome::Members { version, operation, revision } => {
            format!("version={version} operation={operation} rev={revision}")
        }
        Outcome::Cancelled { revision }
        | Outcome::TimedOut { revision }
        | Outcome::Closed { revision }
        | Outcome::Begun { revision } => format!("rev={revision}"),
    };
    format!("{} {rest}", name(outcome))
}

pub(crate) fn outcome(names: &Names, outcome: &Outcome, out: &mut String) {
    writeln!(out, "{}", describe(names, outcome)).expect("a string takes everything");
}

fn reason(reason: &EndReason) -> String {
    match reason {
        EndReason::Released => "released".to_owned(),
        EndReason::LeaseExpired => "lease_expired".to_owned(),
        EndReason::SessionClosed => "session_closed".to_owned(),
        EndReason::Forced { who, why } => format!("forced by {}: {}", text(who), text(why)),
        EndReason::Cancelled => "cancelled".to_owned(),
        EndReason::TimedOut => "timed_out".to_owned(),
        EndReason::Upgraded => "upgraded".to_owned(),
    }
}

pub(crate) fn event(names: &Names, event: &Event, out: &mut String) {
    let line = match &event.kind {
        EventKind::LeaseOpened { lease: id, ttl_ms } => {
            format!("lease_opened {} ttl={ttl_ms}", lease(names, *id))
        }
        EventKind::LeaseEnded { lease: id, reason: why } => {
            format!("lease_ended {} {}", lease(names, *id), reason(why))
        }
        EventKind::Granted { key, lease: id, token, mode: how, slots: taken, limit: _ } => {
            let (mode, slots) = (mode(*how), slots(taken));
            format!("granted {} {} token={token}{mode}{slots}", text(key), lease(names, *id))
        }
        EventKind::LimitChanged { key, limit, who } => {
            format!("limit_changed {} limit={limit} by {}", text(key), text(who))
        }
        EventKind::DelayBegan { key, token, delay_ms } => {
            format!("delay_began {} token={token} delay={delay_ms}", text(key))
        }
        EventKind::ValueChanged { key, lease: id, token, value } => {
            let id = lease(names, *id);
            format!("value_changed {} {id} token={token} value={}", text(key), text(value))
        }
        EventKind::YieldAsked { key, lease: id, token, who, why, within_ms } => format!(
            "yield_asked {} {} token={token} by {}: {} within={within_ms}",
            text(key),
            lease(names, *id),
            text(who),
            text(why)
        ),
        EventKind::QuarantineBegan { for_ms } => format!("quarantine_began for={for_ms}"),
        EventKind::QuarantineEnded => "quarantine_ended".to_owned(),
        EventKind::DelayEnded { key, token } => {
            format!("delay_ended {} token={token}", text(key))
        }
        EventKind::Converted { key, lease: id, token, mode: how } => {
            format!("converted {} {} token={token}{}", text(key), lease(names, *id), mode(*how))
        }
        EventKind::Queued { key, lease: id, number, wait_ms, mode: _ } => {
            format!("queued {} {} number={number} wait={wait_ms}", text(key), lease(names, *id))
        }
        EventKind::WaitEnded { key, lease: id, number, outcome } => {
            let told = describe(names, outcome);
            format!("wait_ended {} {} number={number}: {told}", text(key), lease(names, *id))
        }
        EventKind::Ended { key, lease: id, token, reason: why } => {
            format!("ended {} {} token={token} {}", text(key), lease(names, *id), reason(why))
        }
        EventKind::ForcedPending { key, lease: id, token, who, why } => format!(
            "forced_pending {} {} token={token} by {}: {}",
            text(key),
            lease(names, *id),
            text(who),
            text(why)
        ),
        EventKind::Vacant { key } => format!("vacant {}", text(key)),
    };
    writeln!(out, "    {line}").expect("a string takes everything");
}

pub(crate) fn key(names: &Names, info: &KeyInfo, out: &mut String) {
    let mut line = format!("key {}:", text(info.key.as_bytes()));
    for holder in &info.holders {
        let id = lease(names, holder.lease);
        let (token, floor, mode) =
            (holder.token, floor(holder.token, holder.floor), mode(holder.mode));
        write!(line, " held by {id} token={token}{floor} number={}{mode}", holder.number)
            .expect("a string takes everything");
        for (name, value) in [("label", holder.label.as_bytes()), ("value", &holder.value)] {
            if !value.is_empty() {
                write!(line, " {name}={}", text(value)).expect("a string takes everything");
            }
        }
        line.push_str(&slots(&holder.slots));
        if holder.entries != 1 {
            write!(line, " entries={}", holder.entries).expect("a string takes everything");
        }
        if holder.delay_ms != 0 {
            write!(line, " delay={}", holder.delay_ms).expect("a string takes everything");
        }
        if let Some(asked) = &holder.asked {
            let (who, why) = (&asked.who, &asked.why);
            write!(line, " asked by {who}: {why} within={}", asked.within_ms)
                .expect("a string takes everything");
        }
        line.push_str(if holder.own_lease { " own_lease" } else { "" });
        line.push_str(if holder.forced { " forced" } else { "" });
    }
    if info.limit > 0 {
        write!(line, " limit={}", info.limit).expect("a string takes everything");
    }
    for delay in &info.delays {
        let (token, mode) = (delay.token, mode(delay.mode));
        write!(line, " delayed by token={token} delay={}{mode}", delay.delay_ms)
            .expect("a string takes everything");
    }
    for waiter in &info.waiters {
        let id = lease(names, waiter.lease);
        write!(line, " {}:{id}{}", waiter.position, mode(waiter.mode))
            .expect("a string takes everything");
    }
    let shown = info.waiters.len();
    if shown < info.waiters_total as usize {
        write!(line, " of {}", info.waiters_total).expect("a string takes everything");
    }
    line.push_str(if info.holders.is_empty() { " vacant" } else { "" });
    writeln!(out, "{line}").expect("a string takes everything");
}

pub(crate) fn sessions(names: &Names, sessions: &[SessionInfo], out: &mut String) {
    for one in sessions {
        let id = lease(names, one.lease);
        let own = if one.own_lease { " own_lease" } else { "" };
        let label = text(one.label.as_bytes());
        writeln!(
            out,
            "{id} ttl={} label={label} holds={} waits={}{own}",
            one.ttl_ms, one.holds, one.waits
        )
        .expect("a string takes everything");
    }
}

pub(crate) fn holds(reply: Option<HoldsReply>, out: &mut String) {
    let Some(reply) = reply else { return out.push_str("dead\n") };
    let mut line = format!("version={}", reply.version);
    for one in &reply.holds {
        line.push_str(&hold(one));
    }
    for number in &reply.waits {
        write!(line, " waits number={number}").expect("a string takes everything");
    }
    writeln!(out, "{line}").expect("a string takes everything");
}

pub(crate) fn claim(names: &Names, reply: Option<ClaimReply>, out: &mut String) {
    let line = match reply.map(|reply| reply.claim) {
        None => "dead".to_owned(),
        Some(Claimed::Over) => "over".to_owned(),
        Some(Claimed::Holds(one)) => format!("holds{}", hold(&one)),
        Some(Claimed::Waits(one)) => format!("waits {}", waiting(names, &one)),
        Some(Claimed::WaitsAll(all)) => {
            let all: Vec<_> = all.iter().map(|one| waiting(names, one)).collect();
            format!("waits {}", all.join("; "))
        }
        Some(Claimed::HoldsAll(all)) => {
            let all = all.iter().map(|one| hold(one) + &floor(one.token, one.floor));
            format!("holds{}", all.collect::<String>())
        }
    };
    writeln!(out, "{line}").expect("a string takes everything");
}

fn waiting(names: &Names, one: &Waiting) -> String {
    let holders = one.holders.iter().map(|holder| lease(names, holder.lease));
    let holders: Vec<_> = holders.collect();
    let (position, total, key) = (one.position, one.waiters_total, text(&one.key));
    format!("{key} position={position} of {total} for {}", holders.join(","))
}

pub(crate) fn why(names: &Names, info: &KeyInfo, out: &mut String) {
    let line = info.last_end.as_ref().map_or("nothing".to_owned(), |end| {
        let (id, label, mode) = (lease(names, end.lease), &end.label, mode(end.mode));
        let why = reason(&end.reason);
        format!("token={}{mode} of {id} label={label} {why} rev={}", end.token, end.revision)
    });
    writeln!(out, "{line}").expect("a string takes everything");
}

fn hold(hold: &HeldKey) -> String {
    let mut line = String::new();
    let forced = if hold.forced { " forced" } else { "" };
    let (key, mode) = (text(&hold.key), mode(hold.mode));
    let slots = slots(&hold.slots);
    let number = hold.number;
    write!(line, " {key} token={} number={number}{mode}{slots}{forced}", hold.token)
        .expect("a string takes everything");
    if hold.asked {
        line.push_str(" asked");
    }
    if hold.entries != 1 {
        write!(line, " entries={}", hold.entries).expect("a string takes everything");
    }
    line
}

pub(crate) fn state(state: &State, out: &mut String) {
    writeln!(
        out,
        "rev={} last_token={} leases={} keys={}",
        state.revision(),
        state.last_token(),
        state.leases_len(),
        state.keys_len()
    )
    .expect("a string takes everything");
}
