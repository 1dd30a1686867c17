//! Reads the final state of a shard once it has come to rest: all keys linearizably, and every
//! node's own revision and digest.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use leasehold_protocol::ids::ShardId;
use leasehold_protocol::limits::PAGE_LEN_MAX;
use leasehold_protocol::reply::{KeyInfo, Reply, Role};
use leasehold_protocol::request::{Freshness, ListRequest, Request, StatusRequest};

use crate::clock::{Deadline, now_ns};
use crate::history::{FinalKey, FinalNode, FinalState};
use crate::process::POLL;
use crate::wire::Wire;

/// Time-out of one question.
const LIMIT: Duration = Duration::from_secs(3);

/// Waits until all nodes have applied the same revision and it does not move while the keys are
/// read. If they do not agree in time, the last look is returned as it is: the checker of G5
/// says what differs.
pub fn read(endpoints: &[SocketAddr], shard: u32, limit: Duration) -> io::Result<FinalState> {
    let deadline = Deadline::after(limit);
    loop {
        let state = look(endpoints, shard);
        match state {
            Ok(state) if at_rest(&state) || deadline.passed() => return Ok(state),
            Err(error) if deadline.passed() => return Err(error),
            Ok(_) | Err(_) => std::thread::sleep(POLL),
        }
    }
}

fn at_rest(state: &FinalState) -> bool {
    let same =
        |node: &FinalNode| node.revision == state.revision && node.digest == state.nodes[0].digest;
    state.nodes.iter().all(same) && state.leaders.len() == 1
}

fn look(endpoints: &[SocketAddr], shard: u32) -> io::Result<FinalState> {
    let invoke_ns = now_ns();
    let (revision, keys) = keys(endpoints, shard)?;
    let nodes: io::Result<Vec<(FinalNode, Role)>> =
        endpoints.iter().map(|addr| node(*addr, shard)).collect();
    let nodes = nodes?;
    let leaders = nodes.iter().filter(|(_, role)| *role == Role::Leader);
    let leaders = leaders.map(|(node, _)| node.node).collect();
    let nodes = nodes.into_iter().map(|(node, _)| node).collect();
    Ok(FinalState { invoke_ns, return_ns: now_ns(), shard, revision, keys, nodes, leaders })
}

/// The keys of the first node that answers; pages of different revisions are an error.
fn keys(endpoints: &[SocketAddr], shard: u32) -> io::Result<(u64, Vec<FinalKey>)> {
    let mut last = io::Error::other("no endpoint");
    for addr in endpoints {
        match list(*addr, shard) {
            Ok(found) => return Ok(found),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn list(addr: SocketAddr, shard: u32) -> io::Result<(u64, Vec<FinalKey>)> {
    let mut wire = Wire::connect(addr, LIMIT)?;
    let mut keys: Vec<FinalKey> = Vec::new();
    let mut revision = None;
    loop {
        let request = Request::List(ListRequest {
            shard: ShardId(shard),
            prefix: Vec::new(),
            after: keys.last().map(|key| key.key.clone().into_bytes()).unwrap_or_default(),
            limit: PAGE_LEN_MAX,
            freshness: Freshness::Linearizable,
            timeout_ms: 2_000,
        });
        let Reply::Keys(page) = wire.call(&request, LIMIT)? else {
            return Err(io::Error::other("a listing was refused"));
        };
        if *revision.get_or_insert(page.revision.0) != page.revision.0 {
            return Err(io::Error::other("the state changed while it was listed"));
        }
        for key in &page.keys {
            if key.waiters.len() != key.waiters_total as usize {
                return Err(io::Error::other(format!("the queue of {} is cut", key.key)));
            }
        }
        keys.extend(page.keys.into_iter().map(final_key));
        if !page.more {
            return Ok((page.revision.0, keys));
        }
    }
}

fn final_key(info: KeyInfo) -> FinalKey {
    FinalKey {
        key: info.key,
        holders: info.holders.iter().map(|h| (h.lease.0, h.token.0)).collect(),
        waiters: info.waiters.iter().map(|w| (w.lease.0, w.number.0)).collect(),
    }
}

/// A node's account of itself.
fn node(addr: SocketAddr, shard: u32) -> io::Result<(FinalNode, Role)> {
    let mut wire = Wire::connect(addr, LIMIT)?;
    let id = wire.hello().node;
    let request = Request::Status(StatusRequest { timeout_ms: 2_000 });
    let Reply::Status(status) = wire.call(&request, LIMIT)? else {
        return Err(io::Error::other("a status was refused"));
    };
    let missing = || io::Error::other(format!("node {id} says nothing about itself"));
    let own = status.nodes.iter().find(|node| node.node == id).ok_or_else(missing)?;
    let part = own.shards.iter().find(|part| part.shard.0 == shard).ok_or_else(missing)?;
    let own = FinalNode { node: id.0, revision: part.applied_revision.0, digest: part.digest };
    Ok((own, part.role))
}
