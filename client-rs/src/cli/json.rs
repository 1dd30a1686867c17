//! How keys, leases and nodes look in JSON: the same in every verb.

use leasehold::{Holder, KeyRead, NodeStatus, Role, SessionInfo, ShardId, ShardStatus, Waiter};
use serde_json::{Value, json};

/// A mode's name.
fn mode(mode: u32) -> String {
    if mode == 0 { "exclusive".to_owned() } else { format!("mode_{mode}") }
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
        "mode": mode(holder.mode.0),
        "label": holder.label,
        "since_ms": holder.since_ms,
        "remaining_ms": holder.remaining_ms,
        "own_lease": holder.own_lease,
        "forced": holder.forced,
    });
    put_bytes(&mut object, "value", &holder.value);
    object
}

fn waiter(waiter: &Waiter) -> Value {
    json!({
        "lease": waiter.lease.0,
        "mode": mode(waiter.mode.0),
        "position": waiter.position,
        "label": waiter.label,
    })
}

pub(super) fn key(read: &KeyRead) -> Value {
    json!({
        "key": read.info.key,
        "shard": read.shard.0,
        "revision": read.revision.0,
        "stale": read.stale,
        "holders": read.info.holders.iter().map(holder).collect::<Vec<_>>(),
        "waiters": read.info.waiters.iter().map(waiter).collect::<Vec<_>>(),
        "waiters_total": read.info.waiters_total,
    })
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
