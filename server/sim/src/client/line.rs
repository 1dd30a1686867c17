//! A client's way to the cluster: one connection at a time, and any node is as good as another.

use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::error::{ErrorClass, ErrorCode};
use leasehold_protocol::ids::{LeaseId, Number, ShardId};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{OutcomeReply, Reply};
use leasehold_protocol::request::Request;
use leasehold_server::rt::channels::Receiver;
use leasehold_server::rt::sim::{SimRt, SimWorld};
use openraft_rt::{AsyncRuntime, MpscReceiver};

use super::Client;
use crate::history::Call;
use crate::link::Link;

/// How long a client waits for one answer.
const PATIENCE: Duration = Duration::from_millis(700);

/// How often a client that trusts looks whether its node keeps silent, and how often in a row that
/// is in order.
const UNTOLD_LOOK: Duration = Duration::from_secs(1);
const UNTOLD_LOOKS_MAX: u32 = 15;

/// A wait that a client is in.
pub(crate) struct Wait {
    pub(crate) shard: ShardId,
    pub(crate) lease: LeaseId,
    pub(crate) number: Number,
    pub(crate) give_up_ns: u64,
    /// See `Line::ask_and_wait`.
    pub(crate) trusts: bool,
}

/// See the module.
pub(crate) struct Line<'a> {
    pub(crate) client: &'a Client,
    link: Option<Link>,
    node: u64,
}

impl<'a> Line<'a> {
    pub(crate) fn new(client: &'a Client) -> Self {
        Self { client, link: None, node: client.any_node() }
    }

    pub(crate) async fn pause(&self) {
        self.client.history.retries.set(self.client.history.retries.get() + 1);
        SimRt::sleep(Duration::from_millis(1 + self.client.rng.below(40))).await;
    }

    /// Asks until the answer is certain.
    pub(crate) async fn ask(&mut self, request: &Request, call: Option<&Call>) -> Reply {
        loop {
            if let Some(reply) = self.try_once(request, call).await {
                return reply;
            }
            self.pause().await;
        }
    }

    /// Sends once; `None` if the answer leaves anything open.
    pub(crate) async fn try_once(
        &mut self,
        request: &Request,
        call: Option<&Call>,
    ) -> Option<Reply> {
        let mut answers = self.send(request, call).await?;
        self.next(&mut answers, PATIENCE).await
    }

    /// The same for an acquire, through its wait; `None` when it is time to give up. One that trusts
    /// waits to be told and does not ask again while its connection lives.
    pub(crate) async fn ask_and_wait(
        &mut self,
        request: &Request,
        wait: &Wait,
        call: &Call,
    ) -> Option<Reply> {
        loop {
            if let Some(mut answers) = self.send(request, Some(call)).await {
                let mut reply = self.next(&mut answers, PATIENCE).await;
                while let Some(told) = reply {
                    let Reply::Outcome(OutcomeReply {
                        outcome: Outcome::Queued { revision, .. },
                        ..
                    }) = told
                    else {
                        return Some(told);
                    };
                    call.queued(revision.0);
                    if wait.trusts {
                        reply = self.be_told(&mut answers, wait).await;
                        continue;
                    }
                    if SimWorld::current().now_ns() >= wait.give_up_ns {
                        return None;
                    }
                    // A wait that stays silent is asked for again, here or elsewhere.
                    let patience = Duration::from_millis(200 + self.client.rng.below(2_000));
                    reply = self.next(&mut answers, patience).await;
                }
            }
            self.pause().await;
        }
    }

    /// The end of a wait, as long as the connection lives. A node that knows it and keeps silent
    /// for so long, though nothing is wrong, has lost a wake-up.
    async fn be_told(&mut self, answers: &mut Receiver<Reply>, wait: &Wait) -> Option<Reply> {
        let mut looks = 0;
        while looks <= UNTOLD_LOOKS_MAX {
            match SimRt::timeout(UNTOLD_LOOK, answers.recv()).await {
                Ok(Some(reply)) if is_certain(&reply) => return Some(reply),
                Ok(_) => {
                    self.turn();
                    return None;
                }
                Err(_) => {
                    let untold = self.client.witness.is_untold(self.node, wait);
                    looks = if untold { looks + 1 } else { 0 };
                }
            }
        }
        self.client.witness.lost_wake_up(self.node, wait);
        self.turn();
        None
    }

    async fn send(&mut self, request: &Request, call: Option<&Call>) -> Option<Receiver<Reply>> {
        if self.link.is_none() {
            self.link = self.client.connect(self.node).await;
        }
        if let (Some(call), Some(_)) = (call, &self.link) {
            call.sent();
        }
        let sent = self.link.as_ref().map(|link| link.request(request));
        if sent.is_none() {
            self.turn();
        }
        sent
    }

    /// The next answer. Without one the connection is given up; a retryable one may name another
    /// node.
    async fn next(&mut self, answers: &mut Receiver<Reply>, patience: Duration) -> Option<Reply> {
        let Ok(Some(reply)) = SimRt::timeout(patience, answers.recv()).await else {
            self.client.history.unknown.set(self.client.history.unknown.get() + 1);
            self.turn();
            return None;
        };
        if is_certain(&reply) {
            return Some(reply);
        }
        if let Reply::Error(error) = &reply {
            if error.code == ErrorCode::NODE_REMOVED {
                self.turn();
                return None;
            }
            let leader = error.leader.0;
            // Not always where it is told to: any node takes any request.
            if leader > 0 && leader != self.node && self.client.rng.chance(700) {
                self.link = None;
                self.node = leader;
            } else if leader == 0 && self.client.rng.chance(200) {
                // It may never know one: a wiped node is outside for good.
                self.turn();
            }
        }
        None
    }

    /// To any node, over a new connection.
    fn turn(&mut self) {
        self.link = None;
        self.node = self.client.any_node();
    }
}

/// Sends a copy of a request on a connection of its own, after a while of up to `delay_ms`, once.
/// Its answer is recorded if it is certain and final.
pub(super) async fn send_copy(client: Rc<Client>, request: Request, call: Call, delay_ms: u64) {
    SimRt::sleep(Duration::from_millis(client.rng.below(delay_ms + 1))).await;
    let mut line = Line::new(&client);
    if let Some(reply) = line.try_once(&request, Some(&call)).await
        && reply.is_final()
    {
        call.answered(&outcome(reply));
    }
}

/// What a definite answer says.
pub(super) fn outcome(reply: Reply) -> Result<Outcome, ErrorCode> {
    match reply {
        Reply::Outcome(reply) => Ok(reply.outcome),
        Reply::Error(error) => Err(error.code),
        other => panic!("no outcome: {other:?}"),
    }
}

/// A code that a reply carries, if it carries one.
fn code_of(reply: &Reply) -> Option<ErrorCode> {
    match reply {
        Reply::Outcome(OutcomeReply { outcome: Outcome::Refused { code, .. }, .. }) => Some(*code),
        Reply::Error(error) => Some(error.code),
        _ => None,
    }
}

fn is_certain(reply: &Reply) -> bool {
    code_of(reply).is_none_or(|code| code.class() == ErrorClass::NotApplied)
}
