//! Asks a calm cluster, for steps of the harness itself: any of some nodes, each time over a new
//! connection, until the answer is certain.

use std::time::Duration;

use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorClass;
use leasehold_protocol::ids::{ClusterId, ShardId};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{OutcomeReply, Reply};
use leasehold_protocol::request::{CommandRequest, Request};
use leasehold_server::rt::sim::{SimRng, SimRt};
use leasehold_server::rt::sim_net::SimHost;
use openraft_rt::{AsyncRuntime, MpscReceiver};

use crate::link::Link;

const PATIENCE: Duration = Duration::from_millis(700);
pub(crate) const TIMEOUT_MS: u32 = 500;

/// See the module.
pub(crate) struct Asker {
    pub(crate) host: SimHost,
    pub(crate) cluster: ClusterId,
    pub(crate) rng: SimRng,
}

impl Asker {
    /// The outcome of a command; `None` if it was refused for good.
    pub(crate) async fn command(
        &self,
        nodes: &[u64],
        shard: ShardId,
        command: Command,
    ) -> Option<Outcome> {
        match self.ask(nodes, &request(shard, command)).await {
            Reply::Outcome(OutcomeReply { outcome, .. }) => Some(outcome),
            _ => None,
        }
    }

    pub(crate) async fn ask(&self, nodes: &[u64], request: &Request) -> Reply {
        loop {
            let node = nodes[self.rng.below(nodes.len() as u64) as usize];
            if let Some(link) = Link::open_to(&self.host, self.cluster, node).await {
                let answer = SimRt::timeout(PATIENCE, link.request(request).recv()).await;
                if let Some(reply) = answer.ok().flatten().filter(is_certain) {
                    return reply;
                }
            }
            SimRt::sleep(Duration::from_millis(1 + self.rng.below(20))).await;
        }
    }
}

pub(crate) fn request(shard: ShardId, command: Command) -> Request {
    Request::Command(CommandRequest { shard, timeout_ms: TIMEOUT_MS, command })
}

/// Whoever asks again would be told the same.
pub(crate) fn is_certain(reply: &Reply) -> bool {
    let code = match reply {
        Reply::Outcome(OutcomeReply { outcome: Outcome::Refused { code, .. }, .. }) => *code,
        Reply::Error(error) => error.code,
        _ => return true,
    };
    code.class() == ErrorClass::NotApplied
}
