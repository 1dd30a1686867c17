//! `observe NAME [--once]`: who leads an election, a line for each change.

use std::process::ExitCode;

use leasehold::{Leader, Observed};
use serde_json::{Value, json};

use super::exit::CliError;
use super::options::Options;
use super::{json, say};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// The election
    name: String,
    /// Shows who leads now and ends
    #[arg(long)]
    once: bool,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let election = client.election(args.name.clone());
    if args.once {
        let leader = election.leader().await?;
        show(options.json, &args.name, &leader.map_or(Observed::Vacant, Observed::Leader))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut observation = election.observe()?;
    loop {
        show(options.json, &args.name, &observation.next().await?)?;
    }
}

fn show(json: bool, name: &str, observed: &Observed) -> Result<(), CliError> {
    if json {
        return say(&object(name, observed).to_string());
    }
    match observed {
        Observed::Leader(Leader { token, value, label, .. }) => {
            say(&format!("{}  ({label}, token {token})", String::from_utf8_lossy(value)))
        }
        Observed::Vacant => say("vacant"),
        _ => say("no quorum"),
    }
}

/// A line of `observe`, and an event of `pipe`.
pub(super) fn object(name: &str, observed: &Observed) -> Value {
    let mut object = match observed {
        Observed::Leader(leader) => json::leader(leader),
        _ => json!({}),
    };
    object["event"] = match observed {
        Observed::Leader(_) => "leader",
        Observed::Vacant => "vacant",
        _ => "no_quorum",
    }
    .into();
    object["name"] = name.into();
    object
}
