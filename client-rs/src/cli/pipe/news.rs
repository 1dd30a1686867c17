//! News: lines without an id, each kind from a task of its own that ends with what it tells of, or
//! when nobody listens any more.

use leasehold::{Failure, HoldState, HoldWatch, Observation, YieldAsked, Yields};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::super::exit::failure_json;
use super::super::observe;

/// Tells of an election's changes.
pub(super) async fn tell_leaders(
    name: String,
    mut observation: Observation,
    out: mpsc::Sender<Value>,
) {
    loop {
        let (line, last) = match observation.next().await {
            Ok(observed) => (observe::object(&name, &observed), false),
            Err(error) => {
                let mut line = failure_json(error.failure());
                (line["event"], line["name"]) = ("unobserved".into(), name.as_str().into());
                (line, true)
            }
        };
        if out.send(line).await.is_err() || last {
            return;
        }
    }
}

/// Tells of requests to give a hold up until it is over.
pub(super) async fn tell_yields(key: String, mut yields: Yields, out: mpsc::Sender<Value>) {
    loop {
        let token = yields.token().0;
        let (line, last) = match yields.next().await {
            Ok(None) => return,
            Ok(Some(YieldAsked { who, why, within })) => {
                let within_ms = within.as_millis() as u64;
                let line = json!({
                    "event": "yield", "key": key, "token": token, "who": who, "why": why,
                    "within_ms": within_ms,
                });
                (line, false)
            }
            Err(error) => (deaf(&key, token, error.failure()), true),
        };
        if out.send(line).await.is_err() || last {
            return;
        }
    }
}

/// Requests to yield are not heard of any more.
pub(super) fn deaf(key: &str, token: u64, failure: &Failure) -> Value {
    let mut line = failure_json(failure);
    (line["event"], line["key"], line["token"]) = ("yields_ended".into(), key.into(), token.into());
    line
}

/// Tells of a hold's changes until it is lost or given back.
pub(super) async fn tell_changes(key: String, mut watch: HoldWatch, out: mpsc::Sender<Value>) {
    while let Some(state) = watch.changed().await {
        let token = watch.token().0;
        let (event, last) = match state {
            HoldState::AtRisk { cause, remaining } => (
                json!({
                    "event": "at_risk", "key": key, "token": token, "cause": cause.name(),
                    "remaining_ms": remaining.as_millis() as u64,
                }),
                false,
            ),
            HoldState::Lost(cause) => (
                json!({ "event": "lost", "key": key, "token": token, "cause": cause.name() }),
                true,
            ),
            _ => (
                json!({
                    "event": "held", "key": key, "token": token,
                    "remaining_ms": watch.remaining().as_millis() as u64,
                }),
                false,
            ),
        };
        if out.send(event).await.is_err() || last {
            return;
        }
    }
}
