//! A path as a script (see `tests/scripts.rs`): what failed can be kept there.

use leasehold_protocol::command::Command;
use leasehold_protocol::ids::LeaseId;

use crate::world::{Move, OWN_TTL_MS, TOKEN_BASE, WAIT_MS, World, caller_of};

/// The moves after `sessions` openings, one line each, with the mark that ends a block.
pub(crate) fn of(mut world: World, path: &[Move]) -> String {
    let mut lines = vec![format!("begin {TOKEN_BASE}")];
    for index in 0..world.sessions.len() {
        lines.push(format!("open {}", name(index)));
    }
    for (index, step) in path.iter().enumerate() {
        lines.push(line(&world, *step));
        // The last one may panic.
        if index + 1 < path.len() {
            world.step(*step);
        }
    }
    lines.join("\n") + "\n----\n"
}

fn name(index: usize) -> char {
    char::from(b'a' + index as u8)
}

fn lease(world: &World, id: LeaseId) -> String {
    let index = world.sessions.iter().position(|session| session.id == id);
    index.map_or_else(|| format!("#{id}"), |index| name(index).to_string())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn line(world: &World, step: Move) -> String {
    let command = world.command(step);
    let (caller, options) = caller_of(&command).map_or_else(Default::default, |caller| {
        let floor = caller.floor.0;
        let floor = if floor > 0 { format!(" floor={floor}") } else { String::new() };
        let acks: Vec<_> = caller.acks.iter().map(ToString::to_string).collect();
        let acks =
            if acks.is_empty() { String::new() } else { format!(" acks={}", acks.join(",")) };
        (format!("{} {}", lease(world, caller.lease), caller.number), floor + &acks)
    });
    match &command {
        Command::Begin { token_base } => format!("begin {token_base}"),
        Command::Open { .. } => format!("open {}", name(world.sessions.len())),
        Command::Acquire { key, own, wait_ms, .. } => {
            let wait = if *wait_ms > 0 { format!(" wait={WAIT_MS}") } else { String::new() };
            let own = own.map_or(String::new(), |_| format!(" own={OWN_TTL_MS}"));
            format!("acquire {caller} {}{wait}{own}{options}", text(key))
        }
        Command::Cancel { release_if_granted, .. } => {
            let release = if *release_if_granted { " release" } else { "" };
            format!("cancel {caller}{release}{options}")
        }
        Command::Release { key, token, .. } => {
            format!("release {caller} {} {token}{options}", text(key))
        }
        Command::ReleaseOwn { lease: own, key, token, .. } => {
            format!("release-own {} {} {token}", lease(world, *own), text(key))
        }
        Command::Close { lease: ended, .. } => format!("close {}", lease(world, *ended)),
        Command::Expire { lease: ended } => format!("expire {}", lease(world, *ended)),
        Command::ForceRelease { key, token, who, why, now } => {
            let now = if *now { " now" } else { "" };
            format!("force {} {token} who={} why={}{now}", text(key), text(who), text(why))
        }
        Command::EndForced { key, token } => format!("end-forced {} {token}", text(key)),
        Command::TimeOut { lease: waits, number } => {
            format!("time-out {} {number}", lease(world, *waits))
        }
        other => unreachable!("no profile sends {other:?}"),
    }
}
