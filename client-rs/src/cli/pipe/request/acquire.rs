//! Requests for holds.

use serde::Deserialize;
use serde_json::Value;

/// `acquire`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct Acquire {
    pub(in super::super) key: String,
    pub(in super::super) wait_ms: Option<u64>,
    pub(in super::super) value: Option<String>,
    pub(in super::super) ttl_ms: Option<u64>,
    pub(in super::super) mode: Option<HoldMode>,
    pub(in super::super) permits: Option<u32>,
    pub(in super::super) limit: Option<u32>,
    #[serde(default)]
    pub(in super::super) reentrant: bool,
    #[serde(default)]
    pub(in super::super) yields: bool,
    #[serde(default)]
    pub(in super::super) places: bool,
    pub(in super::super) lock_delay_ms: Option<u64>,
}

/// How a lock is held.
#[derive(Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(in super::super) enum HoldMode {
    Exclusive,
    Shared,
}

impl Acquire {
    /// Options that contradict each other.
    pub(super) fn check(self) -> Result<Self, String> {
        check_how(self.permits, self.limit, self.mode).map(|()| self)
    }
}

/// One of several keys: its name alone, or an object that says how it is held.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(try_from = "Value")]
pub(in super::super) struct Want {
    pub(in super::super) key: String,
    pub(in super::super) how: WantHow,
}

/// How one of several keys is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum WantHow {
    Exclusive,
    Shared,
    Permits { permits: u32, limit: u32 },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a key, or an object with one")]
struct WantFields {
    key: String,
    mode: Option<HoldMode>,
    permits: Option<u32>,
    limit: Option<u32>,
}

impl TryFrom<Value> for Want {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        if let Value::String(key) = value {
            return Ok(Self { key, how: WantHow::Exclusive });
        }
        let one: WantFields = serde_json::from_value(value).map_err(|error| error.to_string())?;
        check_how(one.permits, one.limit, one.mode)?;
        let how = match (one.permits, one.limit, one.mode) {
            (Some(permits), Some(limit), _) => WantHow::Permits { permits, limit },
            (_, _, Some(HoldMode::Shared)) => WantHow::Shared,
            _ => WantHow::Exclusive,
        };
        Ok(Self { key: one.key, how })
    }
}

/// `acquire_all`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct AcquireAll {
    pub(in super::super) keys: Vec<Want>,
    pub(in super::super) wait_ms: Option<u64>,
    pub(in super::super) value: Option<String>,
    #[serde(default)]
    pub(in super::super) yields: bool,
    #[serde(default)]
    pub(in super::super) places: bool,
    pub(in super::super) lock_delay_ms: Option<u64>,
}

/// `acquire_each`.
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct AcquireEach {
    pub(in super::super) keys: Vec<String>,
    pub(in super::super) wait_ms: Option<u64>,
    pub(in super::super) value: Option<String>,
    #[serde(default)]
    pub(in super::super) yields: bool,
    pub(in super::super) lock_delay_ms: Option<u64>,
}

fn check_how(
    permits: Option<u32>,
    limit: Option<u32>,
    mode: Option<HoldMode>,
) -> Result<(), String> {
    match (permits, limit, mode) {
        (Some(_), None, _) => Err("\"permits\" needs \"limit\"".to_owned()),
        (None, Some(_), _) => Err("\"limit\" needs \"permits\"".to_owned()),
        (Some(_), _, Some(_)) => Err("\"permits\" and \"mode\" exclude each other".to_owned()),
        _ => Ok(()),
    }
}
