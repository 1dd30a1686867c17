//! Requests for changes of the members.

use std::num::NonZeroU64;

use leasehold::{MemberChange, NewMember, NodeId};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::read;

/// `member_add`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct MemberAdd {
    node: NonZeroU64,
    peer: String,
    #[serde(default)]
    client: String,
}

/// `member_remove`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct MemberRemove {
    node: NonZeroU64,
}

/// `member_replace`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct MemberReplace {
    old: NonZeroU64,
    node: NonZeroU64,
    peer: String,
    #[serde(default)]
    client: String,
}

/// `member_abort`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct MemberAbort {
    operation: u64,
}

/// A new node, from its fields.
fn new_member(node: NonZeroU64, peer_addr: String, client_addr: String) -> NewMember {
    NewMember { node: NodeId(node.get()), peer_addr, client_addr }
}

pub(super) fn member_change(op: &str, fields: Map<String, Value>) -> Result<MemberChange, String> {
    Ok(match op {
        "member_add" => {
            let MemberAdd { node, peer, client } = read(fields)?;
            MemberChange::Add(new_member(node, peer, client))
        }
        "member_remove" => {
            let MemberRemove { node } = read(fields)?;
            MemberChange::Remove { node: NodeId(node.get()) }
        }
        "member_replace" => {
            let MemberReplace { old, node, peer, client } = read(fields)?;
            let new = new_member(node, peer, client);
            MemberChange::Replace { old: NodeId(old.get()), new }
        }
        _ => {
            let MemberAbort { operation } = read(fields)?;
            MemberChange::Abort { operation }
        }
    })
}
