//! How keys, leases and nodes look in JSON: the same in every verb.

use leasehold::{
    Cursor, Delay, EndReason, EventKind, Holder, KeyInfo, KeyRead, LastEnd, Leader, Mode,
    NodeStatus, Outcome, Place, Role, SessionInfo, ShardId, ShardStatus, Waiter, WatchEvent,
    WatchItem, slots_of,
};
use serde_json::{Value, json};

/// A mode's name.
pub(super) fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::EXCLUSIVE => "exclusive",
        Mode::SHARED => "shared",
        mode if mode.permit_count().is_some() => "permits",
        _ => "unknown",
    }
}

/// Sets `mode`, and `permits` if it is that of a semaphore.
pub(super) fn put_mode(object: &mut Value, of: Mode) {
    object["mode"] = mode(of).into();
    if let Some(count) = of.permit_count() {
        object["permits"] = count.into();
    }
}

/// Sets `name` to the value as text, or `name_hex` to its bytes if it is not UTF-8.
pub(super) fn put_bytes(object: &mut Value, name: &str, bytes: &[u8]) {
    match std::str::from_utf8(bytes) {
        Ok(text) => object[name] = text.into(),
        Err(_) => object[format!("{name}_hex")] = hex(bytes).into(),
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn holder(holder: &Holder) -> Value {
    let mut object = json!({
        "lease": holder.lease.0,
        "token": holder.token.0,
        "floor": holder.floor.0,
        "label": holder.label,
        "since_ms": holder.since_ms,
        "remaining_ms": holder.remaining_ms,
        "own_lease": holder.own_lease,
        "forced": holder.forced,
        "entries": holder.entries,
        "lock_delay_ms": holder.delay_ms,
    });
    put_mode(&mut object, holder.mode);
    if holder.mode.permit_count().is_some() {
        object["slots"] = slots_of(&holder.slots).into();
    }
    if let Some(asked) = &holder.asked {
        object["asked"] =
            json!({ "who": asked.who, "why": asked.why, "within_ms": asked.within_ms });
    }
    put_bytes(&mut object, "value", &holder.value);
    object
}

fn waiter(waiter: &Waiter) -> Value {
    let mut object = json!({
        "lease": waiter.lease.0,
        "position": waiter.position,
        "label": waiter.label,
    });
    put_mode(&mut object, waiter.mode);
    object
}

/// A reason's name, and what to say of a hold that ended so.
pub(super) const fn reason(reason: &EndReason) -> (&'static str, &'static str) {
    match reason {
        EndReason::Released => ("released", "was released"),
        EndReason::LeaseExpired => ("lease_expired", "was lost: its lease expired"),
        EndReason::SessionClosed => ("session_closed", "ended with its session"),
        EndReason::Forced { .. } => ("forced", "was forced"),
        EndReason::Cancelled => ("cancelled", "was cancelled"),
        EndReason::TimedOut => ("timed_out", "timed out"),
        EndReason::Upgraded => ("upgraded", "became exclusive"),
    }
}

fn last_end(end: &LastEnd) -> Value {
    let mut object = json!({
        "lease": end.lease.0,
        "label": end.label,
        "token": end.token.0,
        "reason": reason(&end.reason).0,
        "revision": end.revision.0,
        "at_ms": end.at_ms,
    });
    put_mode(&mut object, end.mode);
    if let EndReason::Forced { who, why } = &end.reason {
        put_bytes(&mut object, "who", who);
        put_bytes(&mut object, "why", why);
    }
    object
}

fn delay(delay: &Delay) -> Value {
    let mut object = json!({
        "token": delay.token.0,
        "delay_ms": delay.delay_ms,
        "remaining_ms": delay.remaining_ms,
    });
    put_mode(&mut object, delay.mode);
    object
}

pub(super) fn key(read: &KeyRead) -> Value {
    let mut object = json!({
        "key": read.info.key,
        "shard": read.shard.0,
        "revision": read.revision.0,
        "stale": read.stale,
        "holders": read.info.holders.iter().map(holder).collect::<Vec<_>>(),
        "holders_total": read.info.holders_total,
        "waiters": read.info.waiters.iter().map(waiter).collect::<Vec<_>>(),
        "waiters_total": read.info.waiters_total,
        "delays": read.info.delays.iter().map(delay).collect::<Vec<_>>(),
        "delays_total": read.info.delays_total,
    });
    if let Some(end) = &read.info.last_end {
        object["last_end"] = last_end(end);
    }
    if read.info.limit > 0 {
        object["limit"] = read.info.limit.into();
        object["taken"] = read.info.taken.into();
    }
    if read.stale {
        object["age_ms"] = read.age.map(|age| age.as_millis() as u64).into();
    }
    object
}

pub(super) fn place(place: &Place) -> Value {
    json!({
        "position": place.position,
        "waiters_total": place.waiters_total,
        "holders": place.holders.iter().map(holder).collect::<Vec<_>>(),
    })
}

pub(super) fn leader(leader: &Leader) -> Value {
    let mut object = json!({
        "token": leader.token.0,
        "label": leader.label,
        "lease": leader.lease.0,
        "since_ms": leader.since_ms,
    });
    put_bytes(&mut object, "value", &leader.value);
    object
}

pub(super) fn session(shard: ShardId, session: &SessionInfo) -> Value {
    json!({
        "shard": shard.0,
        "lease": session.lease.0,
        "label": session.label,
        "ttl_ms": session.ttl_ms,
        "remaining_ms": session.remaining_ms,
        "holds": session.holds,
        "waits": session.waits,
        "own_lease": session.own_lease,
    })
}

pub(super) const fn role(role: Role) -> &'static str {
    match role {
        Role::Leader => "leader",
        Role::Follower => "follower",
        Role::Candidate => "candidate",
        Role::Learner => "learner",
        Role::Outside => "outside",
    }
}

/// A digest has 64 bits, more than a JSON number carries safely: it is text.
fn shard(shard: &ShardStatus) -> Value {
    json!({
        "shard": shard.shard.0,
        "role": role(shard.role),
        "term": shard.term,
        "leader": shard.leader.0,
        "last_index": shard.last_index,
        "applied_index": shard.applied_index,
        "applied_revision": shard.applied_revision.0,
        "snapshot_index": shard.snapshot_index,
        "digest": format!("{:016x}", shard.digest),
    })
}

pub(super) fn node(node: &NodeStatus) -> Value {
    json!({
        "id": node.node.0,
        "client_addr": node.client_addr,
        "reachable": node.reachable,
        "version": node.version,
        "shards": node.shards.iter().map(shard).collect::<Vec<_>>(),
    })
}

/// An item of a watch; `cursor` is the position after it.
pub(super) fn watch_item(item: &WatchItem, cursor: Option<&Cursor>) -> Value {
    let mut object = match item {
        WatchItem::Change { shard, revision, events } => json!({
            "event": "change",
            "shard": shard.0,
            "revision": revision.0,
            "events": events.iter().map(watch_event).collect::<Vec<_>>(),
        }),
        WatchItem::State { shard, revision, keys, first, last } => {
            let read = |info: &KeyInfo| KeyRead {
                shard: *shard,
                revision: *revision,
                stale: false,
                age: None,
                info: info.clone(),
            };
            json!({
                "event": "state",
                "shard": shard.0,
                "revision": revision.0,
                "first": first,
                "last": last,
                "keys": keys.iter().map(|info| key(&read(info))).collect::<Vec<_>>(),
            })
        }
        WatchItem::Progress { shard, revision } => {
            json!({ "event": "progress", "shard": shard.0, "revision": revision.0 })
        }
        WatchItem::NoQuorum => json!({ "event": "no_quorum" }),
        WatchItem::Quorum => json!({ "event": "quorum" }),
        _ => json!({ "event": "unknown" }),
    };
    if let Some(cursor) = cursor {
        object["cursor"] = cursor.to_string().into();
    }
    object
}

fn watch_event(event: &WatchEvent) -> Value {
    let mut object = json!({ "kind": event_name(&event.kind), "label": event.label });
    if let Some(key) = event.kind.key() {
        put_bytes(&mut object, "key", key);
    }
    match &event.kind {
        EventKind::Granted { lease, mode: held, token, .. } => {
            object["lease"] = lease.0.into();
            object["token"] = token.0.into();
            put_mode(&mut object, *held);
            put_bytes(&mut object, "value", &event.value);
        }
        EventKind::Queued { lease, number, .. } => {
            object["lease"] = lease.0.into();
            object["number"] = number.0.into();
        }
        EventKind::WaitEnded { lease, number, outcome, .. } => {
            object["lease"] = lease.0.into();
            object["number"] = number.0.into();
            object["outcome"] = outcome_name(outcome).into();
        }
        EventKind::Ended { lease, token, reason, .. } => {
            object["lease"] = lease.0.into();
            object["token"] = token.0.into();
            object["reason"] = reason_name(reason).into();
            if let EndReason::Forced { who, why } = reason {
                put_bytes(&mut object, "who", who);
                put_bytes(&mut object, "why", why);
            }
        }
        EventKind::ForcedPending { lease, token, who, why, .. } => {
            object["lease"] = lease.0.into();
            object["token"] = token.0.into();
            put_bytes(&mut object, "who", who);
            put_bytes(&mut object, "why", why);
        }
        EventKind::Converted { lease, token, mode: held, .. } => {
            object["lease"] = lease.0.into();
            object["token"] = token.0.into();
            put_mode(&mut object, *held);
        }
        EventKind::LimitChanged { limit, who, .. } => {
            object["limit"] = (*limit).into();
            put_bytes(&mut object, "who", who);
        }
        EventKind::DelayBegan { token, delay_ms, .. } => {
            object["token"] = token.0.into();
            object["delay_ms"] = (*delay_ms).into();
        }
        EventKind::DelayEnded { token, .. } => object["token"] = token.0.into(),
        EventKind::ValueChanged { lease, token, value, .. } => {
            object["lease"] = lease.0.into();
            object["token"] = token.0.into();
            put_bytes(&mut object, "value", value);
        }
        EventKind::YieldAsked { lease, token, who, why, within_ms, .. } => {
            object["lease"] = lease.0.into();
            object["token"] = token.0.into();
            object["within_ms"] = (*within_ms).into();
            put_bytes(&mut object, "who", who);
            put_bytes(&mut object, "why", why);
        }
        EventKind::QuarantineBegan { for_ms } => object["for_ms"] = (*for_ms).into(),
        EventKind::Vacant { .. }
        | EventKind::LeaseOpened { .. }
        | EventKind::LeaseEnded { .. }
        | EventKind::QuarantineEnded => {}
    }
    object
}

fn outcome_name(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Granted(_) => "granted",
        Outcome::Cancelled { .. } => "cancelled",
        Outcome::TimedOut { .. } => "timed_out",
        Outcome::Refused { code, .. } => code.name(),
        _ => "other",
    }
}

pub(super) const fn reason_name(reason: &EndReason) -> &'static str {
    match reason {
        EndReason::Released => "released",
        EndReason::LeaseExpired => "lease_expired",
        EndReason::SessionClosed => "session_closed",
        EndReason::Forced { .. } => "forced",
        EndReason::Cancelled => "cancelled",
        EndReason::TimedOut => "timed_out",
        EndReason::Upgraded => "upgraded",
    }
}

pub(super) const fn event_name(kind: &EventKind) -> &'static str {
    match kind {
        EventKind::LeaseOpened { .. } => "lease_opened",
        EventKind::LeaseEnded { .. } => "lease_ended",
        EventKind::Granted { .. } => "granted",
        EventKind::Queued { .. } => "queued",
        EventKind::WaitEnded { .. } => "wait_ended",
        EventKind::Ended { .. } => "ended",
        EventKind::ForcedPending { .. } => "forced_pending",
        EventKind::Vacant { .. } => "vacant",
        EventKind::Converted { .. } => "converted",
        EventKind::LimitChanged { .. } => "limit_changed",
        EventKind::DelayBegan { .. } => "delay_began",
        EventKind::DelayEnded { .. } => "delay_ended",
        EventKind::ValueChanged { .. } => "value_changed",
        EventKind::YieldAsked { .. } => "yield_asked",
        EventKind::QuarantineBegan { .. } => "quarantine_began",
        EventKind::QuarantineEnded => "quarantine_ended",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_is_not_text_is_shown_in_hex() {
        let mut object = json!({});
        put_bytes(&mut object, "value", b"plain");
        put_bytes(&mut object, "other", &[0xff, 0x01]);
        assert_eq!(object, json!({ "value": "plain", "other_hex": "ff01" }));
    }
}
