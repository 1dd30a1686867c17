//! `status`.

use std::process::ExitCode;

use leasehold::StatusReply;
use serde_json::{Value, json};

use super::exit::CliError;
use super::options::Options;
use super::{json, say};

pub(super) async fn run(options: &Options) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let status = client.status().await?;
    if options.json {
        say(&object(&status).to_string())?;
        return Ok(ExitCode::SUCCESS);
    }
    say(&format!("cluster {}, {} shard(s)", status.cluster, status.shards))?;
    for node in &status.nodes {
        let reach = if node.reachable { "" } else { ", not reachable" };
        say(&format!("node {} at {} ({}){reach}", node.node, node.client_addr, node.version))?;
        for shard in &node.shards {
            say(&format!(
                "  shard {}: {}, term {}, revision {}, digest {:016x}",
                shard.shard,
                json::role(shard.role),
                shard.term,
                shard.applied_revision,
                shard.digest
            ))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The cluster in JSON.
pub(super) fn object(status: &StatusReply) -> Value {
    json!({
        "cluster_id": status.cluster.to_string(),
        "shards": status.shards,
        "nodes": status.nodes.iter().map(json::node).collect::<Vec<_>>(),
    })
}
