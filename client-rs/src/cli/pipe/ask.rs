//! The requests of `pipe` that have nothing to do with the holds of its session.

use std::time::Duration;

use leasehold::{Client, Token};
use serde_json::{Value, json};

use super::super::exit::CliError;
use super::super::force_release::present_token;
use super::super::options::label;
use super::super::{json, why};
use super::request::Ask;

pub(super) async fn answer(client: &Client, ask: Ask) -> Result<Value, CliError> {
    Ok(match ask {
        Ask::Get(of) => json::key(&client.get(of.key).await?),
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
    })
}
