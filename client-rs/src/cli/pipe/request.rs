//! The requests of `pipe`, read strictly: an unknown field is an error that names it.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// `acquire`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct Acquire {
    pub(super) key: String,
    pub(super) wait_ms: Option<u64>,
    pub(super) value: Option<String>,
    pub(super) ttl_ms: Option<u64>,
    pub(super) mode: Option<HoldMode>,
    pub(super) permits: Option<u32>,
    pub(super) limit: Option<u32>,
    #[serde(default)]
    pub(super) reentrant: bool,
    #[serde(default)]
    pub(super) yields: bool,
    pub(super) lock_delay_ms: Option<u64>,
}

/// How a lock is held.
#[derive(Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(super) enum HoldMode {
    Exclusive,
    Shared,
}

impl Acquire {
    /// Options that contradict each other.
    fn check(self) -> Result<Self, String> {
        match (self.permits, self.limit, self.mode) {
            (Some(_), None, _) => Err("\"permits\" needs \"limit\"".to_owned()),
            (None, Some(_), _) => Err("\"limit\" needs \"permits\"".to_owned()),
            (Some(_), _, Some(_)) => Err("\"permits\" and \"mode\" exclude each other".to_owned()),
            _ => Ok(self),
        }
    }
}

/// `acquire_all`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct AcquireAll {
    pub(super) keys: Vec<String>,
    pub(super) wait_ms: Option<u64>,
    pub(super) value: Option<String>,
    pub(super) lock_delay_ms: Option<u64>,
}

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

/// `release`, `renew`, `remaining`: something about a hold of this session.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct OfHold {
    pub(super) key: String,
    pub(super) token: Option<u64>,
}

/// `get`, `why`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct Get {
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
    Why(Get),
    Leader(Leader),
    SetLimit(SetLimit),
    Yield(Yield),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Op {
    Acquire(Acquire),
    AcquireAll(AcquireAll),
    ReleaseAll(ReleaseAll),
    Release(OfHold),
    Renew(OfHold),
    Remaining(OfHold),
    Mode(SetMode),
    SetValue(SetValue),
    Watch(Watch),
    Ask(Ask),
    Observe(Leader),
    Unobserve(Leader),
    Place(OfAcquire),
    Cancel(OfAcquire),
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
        "release_all" => Op::ReleaseAll(read(fields)?),
        "release" => Op::Release(read(fields)?),
        "renew" => Op::Renew(read(fields)?),
        "remaining" => Op::Remaining(read(fields)?),
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
        "place" => Op::Place(read(fields)?),
        "cancel" => Op::Cancel(read(fields)?),
        other => return Err(format!("unknown op {other:?}")),
    })
}

fn read<T: DeserializeOwned>(fields: Map<String, Value>) -> Result<T, String> {
    serde_json::from_value(Value::Object(fields)).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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
            yields: false,
            lock_delay_ms: None,
        };
        assert_eq!(parse(line), Ok((json!(1), Op::Acquire(acquire))));
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
