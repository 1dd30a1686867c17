//! News about a change of the membership, until it is over.

use leasehold::{CallError, Client};
use serde_json::Value;
use tokio::sync::mpsc;

use super::super::exit::failure_json;
use super::super::member::{LOOK_EVERY, members_json, operation_json};

/// Tells each change of its progress, and its end.
pub(super) async fn tell_members(client: Client, operation: u64, out: mpsc::Sender<Value>) {
    let mut told = Value::Null;
    loop {
        let (line, last) = match look(&client, operation).await {
            Ok(seen) => seen,
            Err(error @ CallError::Refused(_)) => {
                let mut line = failure_json(error.failure());
                line["event"] = "member_unfollowed".into();
                line["operation"] = operation.into();
                (line, true)
            }
            // It goes on without us, also while its leader moves.
            Err(_) => (told.clone(), false),
        };
        if line != told && out.send(line.clone()).await.is_err() || last {
            return;
        }
        told = line;
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// What there is to tell now, and whether it is the last.
async fn look(client: &Client, operation: u64) -> Result<(Value, bool), CallError> {
    let members = client.members().await?;
    let present = members.operation.filter(|present| present.operation == operation);
    let mut line = match &present {
        Some(present) => operation_json(present, &members),
        None => members_json(&members),
    };
    line["event"] = if present.is_some() { "member_progress" } else { "member_done" }.into();
    line["operation"] = operation.into();
    Ok((line, present.is_none()))
}
