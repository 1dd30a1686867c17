//! The requests of `pipe` that have nothing to do with the holds of its session.

use std::num::NonZeroU32;
use std::time::Duration;

use leasehold::{Client, ErrorCode, Failure, Freshness, LeaseId, NodeId, ShardId, Token};
use serde_json::{Value, json};

use super::super::backup;
use super::super::exit::CliError;
use super::super::force_release::present_token;
use super::super::options::label;
use super::super::{json, member, status, why};
use super::request::{Ask, ForceRelease, Ls, TransferLeader};

/// Keys or sessions of one reply.
const PAGE_MAX: u32 = 1000;

pub(super) async fn answer(client: &Client, ask: Ask) -> Result<Value, CliError> {
    Ok(match ask {
        Ask::Get(of) => {
            let (after, freshness) = (LeaseId(of.holders_after), freshness(of.stale));
            json::key(&client.get_after(of.key, after, freshness).await?)
        }
        Ask::Why(of) => why::object(&client.get(of.key).await?),
        Ask::Leader(of) => {
            let leader = client.election(of.name).leader().await?;
            json!({ "ok": true, "leader": leader.as_ref().map(json::leader) })
        }
        Ask::SetLimit(set) => {
            client.set_limit(set.key, set.limit, &label()).await?;
            json!({ "ok": true })
        }
        Ask::Yield(ask) => {
            let token = match ask.token {
                Some(token) => Token(token),
                None => present_token(&client.get(ask.key.clone()).await?, "\"token\"")?,
            };
            let within = Duration::from_millis(ask.within_ms);
            client.ask_yield(ask.key, token, &label(), &ask.why, within).await?;
            json!({ "ok": true, "token": token.0 })
        }
        Ask::Ls(ls) => list(client, &ls).await?,
        Ask::Sessions(of) => {
            let limit = page(of.limit)?;
            let mut found =
                client.sessions_after(ShardId(of.shard), LeaseId(of.after), limit + 1).await?;
            let more = found.len() > limit;
            found.truncate(limit);
            let found = found.iter().map(|(shard, session)| json::session(*shard, session));
            json!({ "ok": true, "sessions": found.collect::<Value>(), "more": more })
        }
        Ask::Status => status::object(&client.status().await?),
        Ask::ForceRelease(force) => force_release(client, force).await?,
        Ask::TransferLeader(order) => transfer_leader(client, &order).await?,
        Ask::SpreadLeaders => member::spread_json(&client.spread_leaders().await?),
        Ask::Members => member::object(&client.members().await?),
        Ask::BackupCreate(backup) => backup::create_object(client, &backup.place).await?,
        Ask::BackupVerify(backup) => backup::verify_object(&backup.place).await?,
    })
}

/// How many are wanted; as many as there may be, unless fewer are asked for.
fn page(limit: Option<NonZeroU32>) -> Result<usize, CliError> {
    let limit = limit.map_or(PAGE_MAX, NonZeroU32::get);
    if limit > PAGE_MAX {
        let text = format!("\"limit\" is {limit}: it is from 1 to {PAGE_MAX}");
        return Err(CliError::Failed(Failure::new(ErrorCode::MALFORMED, text)));
    }
    Ok(limit as usize)
}

const fn freshness(stale: bool) -> Freshness {
    if stale { Freshness::Stale } else { Freshness::Linearizable }
}

async fn list(client: &Client, ls: &Ls) -> Result<Value, CliError> {
    let (prefix, after) = (ls.prefix.as_bytes(), ls.after.as_bytes());
    let found = client.list_after(prefix, after, page(ls.limit)?, freshness(ls.stale)).await?;
    let keys = found.keys.iter().map(json::key).collect::<Value>();
    Ok(json!({ "ok": true, "keys": keys, "more": found.more }))
}

async fn force_release(client: &Client, force: ForceRelease) -> Result<Value, CliError> {
    let token = match force.token {
        Some(token) => Token(token),
        None => present_token(&client.get(force.key.clone()).await?, "\"token\"")?,
    };
    let forced = client.force_release(force.key, token, &label(), &force.why, force.now).await?;
    Ok(json!({ "ok": true, "token": forced.token.0, "passed_on": forced.passed_on }))
}

async fn transfer_leader(client: &Client, order: &TransferLeader) -> Result<Value, CliError> {
    if order.shard >= client.shards() {
        let last = client.shards() - 1;
        let text = format!("shard {}: the cluster has shards 0 to {last}", order.shard);
        return Err(CliError::Failed(Failure::new(ErrorCode::WRONG_SHARD, text)));
    }
    let to = order.to.map(|node| NodeId(node.get()));
    client.transfer_leader(ShardId(order.shard), to).await?;
    Ok(json!({ "ok": true, "shard": order.shard, "to": order.to }))
}
