//! What a search has met: a search in which a situation never came up proves nothing about it.

use std::collections::BTreeSet;

use leasehold_protocol::command::Command;
use leasehold_protocol::event::EventKind;
use leasehold_protocol::ids::Number;
use leasehold_protocol::outcome::Outcome;

use crate::world::{Body, Move, Told, World};

/// Subject and what came of it.
pub(crate) type Situation = (&'static str, &'static str);

/// Notes what a step showed.
pub(crate) fn cover(former: &World, step: Move, told: &Told, seen: &mut BTreeSet<Situation>) {
    seen.insert((command(&told.command), outcome(&told.outcome)));
    if let Move::Send { who, number, body } = step {
        let session = &former.sessions[who];
        let below = number <= session.floor;
        let known = former.state.wait_result(session.id, Number(number)).is_some();
        let what = match (body, told.outcome) {
            (_, Outcome::Queued { .. }) if known => Some("a retry that waits"),
            (_, Outcome::Granted(_)) if known => Some("a retry of a grant"),
            (Body::Cancel { .. }, Outcome::Cancelled { .. }) if below && !known => {
                Some("a cancel below the floor")
            }
            (Body::Release { .. }, Outcome::Released { .. }) if below && !known => {
                Some("a release below the floor")
            }
            _ => None,
        };
        seen.extend(what.map(|what| ("seen", what)));
    }
    for event in &told.events {
        if let EventKind::WaitEnded { lease, outcome: Outcome::Granted(grant), .. } = event.kind {
            let ended = matches!(told.command, Command::Close { .. } | Command::Expire { .. });
            if ended {
                seen.insert(("seen", "a hand-over at a lease's end"));
            }
            if grant.lease != lease {
                seen.insert(("seen", "a hand-over to an own lease"));
            }
        }
    }
}

fn command(command: &Command) -> &'static str {
    match command {
        Command::Begin { .. } => "begin",
        Command::Open { .. } => "open",
        Command::Acquire { .. } => "acquire",
        Command::Cancel { .. } => "cancel",
        Command::Release { .. } => "release",
        Command::ReleaseOwn { .. } => "release_own",
        Command::Close { .. } => "close",
        Command::Expire { .. } => "expire",
        Command::ForceRelease { now: true, .. } => "force_now",
        Command::ForceRelease { .. } => "force",
        Command::EndForced { .. } => "end_forced",
        Command::TimeOut { .. } => "time_out",
        Command::Convert { .. } => "convert",
        Command::AcquireAll { .. } => "acquire_all",
        Command::ReleaseAll { .. } => "release_all",
        Command::SetLimit { .. } => "set_limit",
        Command::EndDelay { .. } => "end_delay",
        Command::Member(_) => "member",
        Command::SetValue { .. } => "set_value",
        Command::AskYield { .. } => "ask_yield",
        Command::BeginRestored { .. } => "begin_restored",
        Command::EndQuarantine => "end_quarantine",
    }
}

fn outcome(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Opened { .. } => "opened",
        Outcome::Granted(_) => "granted",
        Outcome::Queued { .. } => "queued",
        Outcome::Cancelled { .. } => "cancelled",
        Outcome::TimedOut { .. } => "timed_out",
        Outcome::Released { .. } => "released",
        Outcome::Closed { .. } => "closed",
        Outcome::Forced { .. } => "forced",
        Outcome::Begun { .. } => "begun",
        Outcome::Changed { .. } => "changed",
        Outcome::Members { .. } => "members",
        Outcome::Refused { code, .. } => code.name(),
    }
}
