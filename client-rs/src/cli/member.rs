//! `member list | add | remove | replace | abort`, and `spread-leaders`.

use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use leasehold::{
    CallError, Client, MemberChange, MemberOperation, MemberPhase, MembersReply, NewMember, NodeId,
    ShardId, Spread, Standing,
};
use serde_json::{Value, json};

use super::exit::{CliError, code_of, failure_json};
use super::options::Options;
use super::say;

/// How often the operation is looked at.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(200);

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand, Debug)]
enum Verb {
    /// Shows the members, and how far a change is
    List,
    /// Adds a node that waits with `join = true`
    Add {
        #[command(flatten)]
        new: New,
        #[command(flatten)]
        follow: Follow,
    },
    /// Removes a member
    Remove {
        /// The node
        #[arg(value_parser = clap::value_parser!(u64).range(1..))]
        node: u64,
        #[command(flatten)]
        follow: Follow,
    },
    /// Puts a new node in a member's place, also of one whose disk is gone
    Replace {
        /// The member
        #[arg(value_parser = clap::value_parser!(u64).range(1..))]
        old: u64,
        #[command(flatten)]
        new: New,
        #[command(flatten)]
        follow: Follow,
    },
    /// Gives up the change under way: the members become again what they were before it
    Abort {
        #[command(flatten)]
        follow: Follow,
    },
}

#[derive(clap::Args, Debug)]
struct New {
    /// The new node's id, never used before
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    node: u64,
    /// Where its peers reach it
    #[arg(long, value_name = "HOST:PORT")]
    peer: String,
    /// Where its clients reach it; without it, what it advertises itself
    #[arg(long, value_name = "HOST:PORT", default_value = "")]
    client: String,
}

#[derive(clap::Args, Debug)]
struct Follow {
    /// Returns when the change is begun; it goes on by itself
    #[arg(long)]
    no_wait: bool,
}

impl From<New> for NewMember {
    fn from(new: New) -> Self {
        Self { node: NodeId(new.node), peer_addr: new.peer, client_addr: new.client }
    }
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let (change, follow) = match args.verb {
        Verb::List => return list(options, &client).await,
        Verb::Add { new, follow } => (MemberChange::Add(new.into()), follow),
        Verb::Remove { node, follow } => (MemberChange::Remove { node: NodeId(node) }, follow),
        Verb::Replace { old, new, follow } => {
            (MemberChange::Replace { old: NodeId(old), new: new.into() }, follow)
        }
        Verb::Abort { follow } => {
            let members = client.members().await?;
            let Some(present) = members.operation else {
                return Err(CliError::Usage("no change of the membership is under way".to_owned()));
            };
            (MemberChange::Abort { operation: present.operation }, follow)
        }
    };
    let operation = client.change_members(change).await?;
    // Without a number it is over already.
    if follow.no_wait && operation != 0 {
        return begun(options, operation);
    }
    follow_up(options, &client, operation).await
}

fn begun(options: &Options, operation: u64) -> Result<ExitCode, CliError> {
    if options.json {
        say(&json!({ "ok": true, "operation": operation, "done": false }).to_string())?;
    } else {
        say(&format!("operation {operation} is under way"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Tells how far the operation is, once per change, until it is over.
async fn follow_up(
    options: &Options,
    client: &Client,
    operation: u64,
) -> Result<ExitCode, CliError> {
    let mut last = String::new();
    loop {
        let members = match client.members().await {
            Ok(members) => members,
            Err(error @ CallError::Refused(_)) => return Err(error.into()),
            // It goes on without us, also while its leader moves.
            Err(_) => {
                tokio::time::sleep(LOOK_EVERY).await;
                continue;
            }
        };
        let present = members.operation.filter(|present| present.operation == operation);
        let Some(present) = present else { return over(options, &members, operation) };
        let line = progress(&present, &members);
        if line != last && !options.json {
            say(&line)?;
        }
        last = line;
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn over(options: &Options, members: &MembersReply, operation: u64) -> Result<ExitCode, CliError> {
    if options.json {
        let mut object = members_json(members);
        object["ok"] = true.into();
        object["operation"] = operation.into();
        object["done"] = true.into();
        say(&object.to_string())?;
    } else {
        let what = match operation {
            0 => "the change".to_owned(),
            operation => format!("operation {operation}"),
        };
        say(&format!("{what} is over; members: {}", voters(members)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn voters(members: &MembersReply) -> String {
    let votes = members.members.iter().filter(|info| info.standing == Standing::Voter);
    votes.map(|info| info.entry.node.to_string()).collect::<Vec<_>>().join(", ")
}

fn progress(operation: &MemberOperation, members: &MembersReply) -> String {
    let done = members.progress.iter().filter(|shard| shard.done).count();
    let of = members.progress.len();
    let phase = match operation.phase {
        MemberPhase::Learn => format!("node {} catches up", operation.add),
        MemberPhase::Vote => "the voters change".to_owned(),
        MemberPhase::Undo => "the members become what they were before".to_owned(),
    };
    let waits = members.progress.iter().find(|shard| !shard.done);
    let waits =
        waits.map_or(String::new(), |shard| format!("; shard {}: {}", shard.shard, shard.waits));
    let shards = if of == 0 { String::new() } else { format!(" ({done} of {of} shards)") };
    format!("operation {}: {phase}{shards}{waits}", operation.operation)
}

const fn standing(standing: Standing) -> &'static str {
    match standing {
        Standing::Voter => "voter",
        Standing::Joining => "joining",
        Standing::Removed => "removed",
    }
}

const fn phase(phase: MemberPhase) -> &'static str {
    match phase {
        MemberPhase::Learn => "learn",
        MemberPhase::Vote => "vote",
        MemberPhase::Undo => "undo",
    }
}

pub(super) fn members_json(members: &MembersReply) -> Value {
    let node = |info: &leasehold::MemberInfo| {
        json!({
            "node": info.entry.node.0,
            "standing": standing(info.standing),
            "disk": info.entry.disk.to_string(),
            "peer_addr": info.entry.peer_addr,
            "client_addr": info.entry.client_addr,
        })
    };
    json!({
        "version": members.version,
        "members": members.members.iter().map(node).collect::<Vec<_>>(),
    })
}

pub(super) fn operation_json(operation: &MemberOperation, members: &MembersReply) -> Value {
    let shard = |shard: &leasehold::ShardProgress| {
        json!({
            "shard": shard.shard.0,
            "done": shard.done,
            "behind": shard.behind,
            "waits": shard.waits,
        })
    };
    let node = |node: NodeId| (node.0 != 0).then_some(node.0);
    json!({
        "operation": operation.operation,
        "phase": phase(operation.phase),
        "add": node(operation.add),
        "remove": node(operation.remove),
        "shards": members.progress.iter().map(shard).collect::<Vec<_>>(),
    })
}

/// The member table and the operation under way.
pub(super) fn object(members: &MembersReply) -> Value {
    let mut object = members_json(members);
    object["operation"] = members.operation.map_or(Value::Null, |it| operation_json(&it, members));
    object
}

/// Leaders that were moved, and those that could not be.
pub(super) fn spread_json(spread: &Spread) -> Value {
    let moved = |(shard, node): &(ShardId, NodeId)| json!({ "shard": shard.0, "to": node.0 });
    let failed = |(shard, node, error): &(ShardId, NodeId, CallError)| {
        let mut object = failure_json(error.failure());
        (object["shard"], object["to"]) = (shard.0.into(), node.0.into());
        object
    };
    json!({
        "ok": spread.failed.is_empty(),
        "moved": spread.moved.iter().map(moved).collect::<Vec<_>>(),
        "failed": spread.failed.iter().map(failed).collect::<Vec<_>>(),
    })
}

async fn list(options: &Options, client: &Client) -> Result<ExitCode, CliError> {
    let members = client.members().await?;
    if options.json {
        say(&object(&members).to_string())?;
        return Ok(ExitCode::SUCCESS);
    }
    for info in &members.members {
        let entry = &info.entry;
        let (node, what) = (entry.node, standing(info.standing));
        if info.standing == Standing::Removed {
            say(&format!("node {node}: {what} (disk {})", entry.disk))?;
        } else {
            let (peer, client) = (&entry.peer_addr, &entry.client_addr);
            say(&format!(
                "node {node}: {what}, clients {client}, peers {peer} (disk {})",
                entry.disk
            ))?;
        }
    }
    if let Some(operation) = &members.operation {
        say(&progress(operation, &members))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn spread_leaders(options: &Options) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let spread = client.spread_leaders().await?;
    let code = spread.failed.first().map_or(0, |(.., error)| code_of(error.failure()));
    if options.json {
        say(&spread_json(&spread).to_string())?;
        return Ok(ExitCode::from(code));
    }
    for (shard, node) in &spread.moved {
        say(&format!("shard {shard} is led by node {node} now"))?;
    }
    for (shard, node, error) in &spread.failed {
        say(&format!("shard {shard} was not moved to node {node}: {}", error.failure().message))?;
    }
    say(&format!("{} leader(s) moved", spread.moved.len()))?;
    Ok(ExitCode::from(code))
}

#[cfg(test)]
mod tests {
    use leasehold::{ErrorCode, Failure};

    use super::*;

    #[test]
    fn leaders_that_did_not_move_are_told_with_those_that_did() {
        let away = CallError::from(Failure::of(ErrorCode::UNREACHABLE));
        let (moved, failed) = (vec![(ShardId(1), NodeId(3))], vec![(ShardId(2), NodeId(4), away)]);
        let told = spread_json(&Spread { moved, failed });
        assert_eq!((&told["ok"], &told["moved"]), (&json!(false), &json!([{"shard": 1, "to": 3}])));
        let failed = &told["failed"][0];
        assert_eq!((&failed["shard"], &failed["to"]), (&json!(2), &json!(4)));
        assert_eq!(failed["error"], "unreachable");
        assert_eq!(spread_json(&Spread::default())["ok"], true);
    }
}
