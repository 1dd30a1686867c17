//! The requests of `pipe`, read strictly: an unknown field is an error that names it.

mod acquire;
mod member;

use std::num::{NonZeroU32, NonZeroU64};

use leasehold::MemberChange;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

pub(super) use self::acquire::{Acquire, AcquireAll, AcquireEach, HoldMode, WantHow};
use self::member::member_change;

/// `release_all`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct ReleaseAll {
    pub(super) token: u64,
}

/// `campaign`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Campaign {
    name: String,
    value: String,
    wait_ms: Option<u64>,
    lock_delay_ms: Option<u64>,
    #[serde(default)]
    places: bool,
    #[serde(default)]
    yields: bool,
}

/// `proclaim`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Proclaim {
    name: String,
    token: Option<u64>,
    value: String,
}

/// `resign`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Resign {
    name: String,
    token: Option<u64>,
}

/// `leader`, `observe`, `unobserve`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct Leader {
    pub(super) name: String,
}

/// An election is a key: a campaign acquires it.
impl From<Campaign> for Acquire {
    fn from(campaign: Campaign) -> Self {
        Self {
            key: campaign.name,
            wait_ms: campaign.wait_ms,
            value: Some(campaign.value),
            ttl_ms: None,
            mode: None,
            permits: None,
            limit: None,
            reentrant: false,
            places: campaign.places,
            yields: campaign.yields,
            lock_delay_ms: campaign.lock_delay_ms,
        }
    }
}

/// `mode`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct SetMode {
    pub(super) key: String,
    pub(super) token: Option<u64>,
    pub(super) mode: HoldMode,
}

/// `set_value`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct SetValue {
    pub(super) key: String,
    pub(super) token: Option<u64>,
    pub(super) value: String,
}

/// `release`, `renew`, `remaining`, `hand_over`: something about a hold of this session.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct OfHold {
    pub(super) key: String,
    pub(super) token: Option<u64>,
}

/// `take_over`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct TakeOver {
    pub(super) handover: String,
}

/// `get`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct Get {
    pub(super) key: String,
    #[serde(default)]
    pub(super) holders_after: u64,
    #[serde(default)]
    pub(super) stale: bool,
}

/// `why`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct Why {
    pub(super) key: String,
}

/// `watch`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct Watch {
    pub(super) key: Option<String>,
    pub(super) prefix: Option<String>,
    pub(super) from: Option<String>,
}

/// `ls`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct Ls {
    #[serde(default)]
    pub(super) prefix: String,
    #[serde(default)]
    pub(super) after: String,
    pub(super) limit: Option<NonZeroU32>,
    #[serde(default)]
    pub(super) stale: bool,
}

/// `sessions`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct Sessions {
    #[serde(default)]
    pub(super) shard: u32,
    #[serde(default)]
    pub(super) after: u64,
    pub(super) limit: Option<NonZeroU32>,
}

/// What needs no more than its name.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// `force_release`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct ForceRelease {
    pub(super) key: String,
    pub(super) token: Option<u64>,
    pub(super) why: String,
    #[serde(default)]
    pub(super) now: bool,
}

/// `transfer_leader`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct TransferLeader {
    #[serde(default)]
    pub(super) shard: u32,
    pub(super) to: Option<NonZeroU64>,
}

/// `set_limit`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct SetLimit {
    pub(super) key: String,
    pub(super) limit: u32,
}

/// `yield`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct Yield {
    pub(super) key: String,
    pub(super) token: Option<u64>,
    pub(super) why: String,
    pub(super) within_ms: u64,
}

/// `backup_create`, `backup_verify`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct Backup {
    pub(super) place: String,
}

/// `cancel`, `place`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct OfAcquire {
    pub(super) target: Value,
}

/// What has nothing to do with the holds of this session.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Get(Get),
    Why(Why),
    Leader(Leader),
    SetLimit(SetLimit),
    Yield(Yield),
    Ls(Ls),
    Sessions(Sessions),
    Status,
    ForceRelease(ForceRelease),
    TransferLeader(TransferLeader),
    SpreadLeaders,
    Members,
    BackupCreate(Backup),
    BackupVerify(Backup),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Op {
    Acquire(Acquire),
    AcquireAll(AcquireAll),
    AcquireEach(AcquireEach),
    ReleaseAll(ReleaseAll),
    Release(OfHold),
    Renew(OfHold),
    Remaining(OfHold),
    HandOver(OfHold),
    TakeOver(TakeOver),
    Mode(SetMode),
    SetValue(SetValue),
    Watch(Watch),
    Ask(Ask),
    Observe(Leader),
    Unobserve(Leader),
    Place(OfAcquire),
    Cancel(OfAcquire),
    ChangeMembers(MemberChange),
}

/// A line that was not understood: the id, if it had one, and why.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Misread {
    pub(super) id: Value,
    pub(super) why: String,
}

/// Reads a line.
pub(super) fn parse(line: &[u8]) -> Result<(Value, Op), Misread> {
    let misread = |id: &Value, why: String| Misread { id: id.clone(), why };
    let object: Map<String, Value> =
        serde_json::from_slice(line).map_err(|error| misread(&Value::Null, error.to_string()))?;
    let mut object = object;
    let id = object.remove("id").unwrap_or(Value::Null);
    if !(id.is_number() || id.is_string()) {
        return Err(misread(&Value::Null, "\"id\" must be a number or a string".to_owned()));
    }
    let Some(Value::String(op)) = object.remove("op") else {
        return Err(misread(&id, "\"op\" must be a string".to_owned()));
    };
    parse_op(&op, object).map(|op| (id.clone(), op)).map_err(|why| misread(&id, why))
}

fn parse_op(op: &str, fields: Map<String, Value>) -> Result<Op, String> {
    Ok(match op {
        "acquire" => Op::Acquire(read::<Acquire>(fields)?.check()?),
        "acquire_all" => Op::AcquireAll(read(fields)?),
        "acquire_each" => Op::AcquireEach(read(fields)?),
        "release_all" => Op::ReleaseAll(read(fields)?),
        "release" => Op::Release(read(fields)?),
        "renew" => Op::Renew(read(fields)?),
        "remaining" => Op::Remaining(read(fields)?),
        "hand_over" => Op::HandOver(read(fields)?),
        "take_over" => Op::TakeOver(read(fields)?),
        "mode" => Op::Mode(read(fields)?),
        "campaign" => Op::Acquire(read::<Campaign>(fields)?.into()),
        "proclaim" => {
            let Proclaim { name: key, token, value } = read(fields)?;
            Op::SetValue(SetValue { key, token, value })
        }
        "resign" => {
            let Resign { name: key, token } = read(fields)?;
            Op::Release(OfHold { key, token })
        }
        "leader" => Op::Ask(Ask::Leader(read(fields)?)),
        "observe" => Op::Observe(read(fields)?),
        "unobserve" => Op::Unobserve(read(fields)?),
        "set_value" => Op::SetValue(read(fields)?),
        "watch" => {
            let watch: Watch = read(fields)?;
            if watch.key.is_some() && watch.prefix.is_some() {
                return Err("\"key\" and \"prefix\" exclude each other".to_owned());
            }
            Op::Watch(watch)
        }
        "get" => Op::Ask(Ask::Get(read(fields)?)),
        "why" => Op::Ask(Ask::Why(read(fields)?)),
        "set_limit" => Op::Ask(Ask::SetLimit(read(fields)?)),
        "yield" => Op::Ask(Ask::Yield(read(fields)?)),
        "ls" => Op::Ask(Ask::Ls(read(fields)?)),
        "sessions" => Op::Ask(Ask::Sessions(read(fields)?)),
        "status" => read(fields).map(|Nothing {}| Op::Ask(Ask::Status))?,
        "force_release" => Op::Ask(Ask::ForceRelease(read(fields)?)),
        "transfer_leader" => Op::Ask(Ask::TransferLeader(read(fields)?)),
        "spread_leaders" => read(fields).map(|Nothing {}| Op::Ask(Ask::SpreadLeaders))?,
        "members" => read(fields).map(|Nothing {}| Op::Ask(Ask::Members))?,
        "member_add" | "member_remove" | "member_replace" | "member_abort" => {
            Op::ChangeMembers(member_change(op, fields)?)
        }
        "backup_create" => Op::Ask(Ask::BackupCreate(read(fields)?)),
        "backup_verify" => Op::Ask(Ask::BackupVerify(read(fields)?)),
        "place" => Op::Place(read(fields)?),
        "cancel" => Op::Cancel(read(fields)?),
        other => return Err(format!("unknown op {other:?}")),
    })
}

fn read<T: DeserializeOwned>(fields: Map<String, Value>) -> Result<T, String> {
    serde_path_to_error::deserialize(Value::Object(fields)).map_err(|error| {
        match error.path().to_string().as_str() {
            "." => error.inner().to_string(),
            path => format!("{path:?}: {}", error.inner()),
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::acquire::Want;
    use super::*;

    #[test]
    fn requests_are_read() {
        let line = br#"{"id":1,"op":"acquire","key":"k","wait_ms":0,"value":"v","ttl_ms":10000}"#;
        let acquire = Acquire {
            key: "k".to_owned(),
            wait_ms: Some(0),
            value: Some("v".to_owned()),
            ttl_ms: Some(10_000),
            mode: None,
            permits: None,
            limit: None,
            reentrant: false,
            places: false,
            yields: false,
            lock_delay_ms: None,
        };
        assert_eq!(parse(line), Ok((json!(1), Op::Acquire(acquire))));
        let line = br#"{"id":1,"op":"acquire_all","keys":["k",{"key":"l","mode":"shared"},{"key":"m","permits":1,"limit":2}]}"#;
        let want = |key: &str, how| Want { key: key.to_owned(), how };
        let keys = vec![
            want("k", WantHow::Exclusive),
            want("l", WantHow::Shared),
            want("m", WantHow::Permits { permits: 1, limit: 2 }),
        ];
        let (wait_ms, value, lock_delay_ms, yields, places) = (None, None, None, false, false);
        let all = AcquireAll { keys, wait_ms, value, yields, places, lock_delay_ms };
        assert_eq!(parse(line), Ok((json!(1), Op::AcquireAll(all))));
        let line = br#"{"op":"cancel","target":1,"id":"x"}"#;
        assert_eq!(parse(line), Ok((json!("x"), Op::Cancel(OfAcquire { target: json!(1) }))));
    }

    #[test]
    fn what_is_wrong_is_named_under_the_requests_id() {
        let why = |line: &str| parse(line.as_bytes()).expect_err(line);
        assert!(why("{").why.contains("EOF"));
        assert_eq!(why("[]").id, Value::Null);
        assert!(why(r#"{"op":"get","key":"k"}"#).why.contains("\"id\""));
        assert!(why(r#"{"id":[1],"op":"get","key":"k"}"#).why.contains("\"id\""));
        let unknown = why(r#"{"id":4,"op":"steal","key":"k"}"#);
        assert_eq!(unknown.id, json!(4));
        assert!(unknown.why.contains("steal"));
        assert!(why(r#"{"id":4,"op":"acquire","key":"k","waitms":1}"#).why.contains("waitms"));
        let all =
            |want: &str| why(&format!(r#"{{"id":4,"op":"acquire_all","keys":["k",{want}]}}"#)).why;
        assert!(all(r#"{"key":"l","permits":1}"#).contains("limit"));
        assert!(all(r#"{"key":"l","mods":1}"#).contains("mods"));
        assert!(all("7").contains("keys"));
        for (options, named) in [
            (r#""permits":1"#, "limit"),
            (r#""limit":1"#, "permits"),
            (r#""permits":1,"limit":2,"mode":"shared""#, "mode"),
            (r#""mode":"write""#, "write"),
        ] {
            let line = format!(r#"{{"id":4,"op":"acquire","key":"k",{options}}}"#);
            assert!(why(&line).why.contains(named), "{line}");
        }
        assert!(why(r#"{"id":4,"op":"acquire"}"#).why.contains("key"));
        assert!(why(r#"{"id":4,"op":"acquire","key":"k","wait_ms":-1}"#).why.contains("-1"));
    }
}
