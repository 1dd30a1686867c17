//! Simulated clients: each has a session and takes keys in turn, and asks until it knows.
//!
//! A client sends a command again under its number until it has an answer that is certain, to the
//! node it was pointed to or to any. It holds what it was granted for a while, gives it back, and
//! writes down what it was told and when.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_server::env::{Clock, Net};
use leasehold_server::rt::sim::{DomainId, SimClock, SimRng, SimRt, SimWorld};
use leasehold_server::rt::sim_net::{SimNet, SimReader, SimWriter};
use openraft_rt::AsyncRuntime;

use crate::history::{Acked, Held, History};
use crate::node::client_addr;
use crate::params::{NODES, Params};
use crate::wire::{Answer, read_frame, request, write_frame};

const TTL_MS: u32 = 600_000;

/// How long a client waits for one answer.
const PATIENCE: Duration = Duration::from_millis(300);

/// Between two looks at a wait.
const LOOK_INTERVAL_MS: u64 = 20;

pub(crate) struct Client {
    pub(crate) id: u64,
    pub(crate) net: SimNet,
    pub(crate) domain: DomainId,
    pub(crate) rng: SimRng,
    pub(crate) params: Params,
    pub(crate) history: Rc<History>,
    /// Set when no further key is to be taken.
    pub(crate) stop: Rc<Cell<bool>>,
}

struct Session {
    lease: LeaseId,
    secret: Secret,
    /// The next acquire's.
    number: u64,
}

impl Session {
    fn caller(&self, number: u64) -> Caller {
        let floor = Number(self.number - 1);
        Caller {
            lease: self.lease,
            secret: self.secret,
            number: Number(number),
            floor,
            acks: vec![],
        }
    }
}

/// How an acquire ended.
enum Ending {
    Granted(Grant),
    /// The wait was given up.
    Without,
}

impl Client {
    pub(crate) async fn run(self) {
        let mut line = Line::new(&self);
        let mut session = self.open(&mut line).await;
        while !self.stop.get() {
            self.take_once(&mut line, &mut session).await;
            session.number += 3;
            SimRt::sleep(Duration::from_millis(self.rng.below(20))).await;
        }
        let close = Command::Close { lease: session.lease, secret: session.secret };
        match line.ask(&close).await.outcome {
            Outcome::Closed { revision } => {
                self.note(Acked::Closed { lease: session.lease, revision })
            }
            // A retry of a close finds the lease dead.
            Outcome::Refused { code: ErrorCode::LEASE_DEAD, .. } => {}
            other => panic!("client {}: close gave {other:?}", self.id),
        }
    }

    fn note(&self, acked: Acked) {
        self.history.acked.borrow_mut().push(acked);
    }

    async fn open(&self, line: &mut Line<'_>) -> Session {
        let secret = Secret([self.id as u8; 16]);
        let label = format!("client {}", self.id).into_bytes();
        match line.ask(&Command::Open { ttl_ms: TTL_MS, secret, label }).await.outcome {
            Outcome::Opened { lease, revision } => {
                self.note(Acked::Opened { lease, revision });
                Session { lease, secret, number: 1 }
            }
            other => panic!("client {}: open gave {other:?}", self.id),
        }
    }

    /// Takes one key and gives it back.
    async fn take_once(&self, line: &mut Line<'_>, session: &mut Session) {
        let key = format!("key/{}", self.rng.below(self.params.keys)).into_bytes();
        let asked_ns = SimWorld::current().now_ns();
        let ending = self.acquire(line, session, &key).await;
        let Ending::Granted(grant) = ending else { return };
        let known_ns = SimWorld::current().now_ns();
        let hold_ms = self.params.hold_max.as_millis() as u64;
        SimRt::sleep(Duration::from_millis(self.rng.below(hold_ms + 1))).await;
        let release = Command::Release {
            caller: session.caller(session.number + 2),
            key: key.clone(),
            token: grant.token,
        };
        let released_ns = SimWorld::current().now_ns();
        let lease = session.lease;
        self.history.holds.borrow_mut().push(Held {
            key: key.clone(),
            lease,
            token: grant.token,
            grant: grant.revision,
            asked_ns,
            known_ns,
            released_ns,
        });
        match line.ask(&release).await.outcome {
            Outcome::Released { token, revision } => {
                self.note(Acked::Released { key, lease, token, revision });
            }
            other => panic!("client {}: release gave {other:?}", self.id),
        }
    }

    async fn acquire(&self, line: &mut Line<'_>, session: &Session, key: &[u8]) -> Ending {
        let acquire = Command::Acquire {
            caller: session.caller(session.number),
            key: key.to_vec(),
            mode: Mode::EXCLUSIVE,
            own: None,
            value: self.id.to_le_bytes().to_vec(),
            wait_ms: if self.rng.chance(200) { 0 } else { u32::MAX },
        };
        // Now and then a client gives up before it waits at all.
        let mut looks_left = if self.rng.chance(100) { self.rng.below(10) } else { u64::MAX };
        loop {
            match line.ask(&acquire).await.outcome {
                Outcome::Granted(grant) => return Ending::Granted(grant),
                Outcome::Queued { .. } if looks_left == 0 => {
                    return self.cancel(line, session).await;
                }
                Outcome::Queued { .. } => looks_left -= 1,
                Outcome::Refused { code: ErrorCode::HELD, .. } => return Ending::Without,
                other => panic!("client {}: acquire gave {other:?}", self.id),
            }
            SimRt::sleep(Duration::from_millis(1 + self.rng.below(LOOK_INTERVAL_MS))).await;
        }
    }

    async fn cancel(&self, line: &mut Line<'_>, session: &Session) -> Ending {
        let number = session.number + 1;
        let cancel = Command::Cancel { caller: session.caller(number), release_if_granted: false };
        match line.ask(&cancel).await.outcome {
            Outcome::Cancelled { revision } => {
                let number = Number(session.number);
                self.note(Acked::Cancelled { lease: session.lease, number, revision });
                Ending::Without
            }
            Outcome::Granted(grant) => Ending::Granted(grant),
            other => panic!("client {}: cancel gave {other:?}", self.id),
        }
    }
}

/// A client's way to the cluster: one connection at a time.
struct Line<'a> {
    client: &'a Client,
    open: Option<(SimReader, SimWriter)>,
    node: u64,
    number: u64,
}

struct Told {
    outcome: Outcome,
}

impl<'a> Line<'a> {
    fn new(client: &'a Client) -> Self {
        let node = 1 + client.rng.below(NODES);
        Self { client, open: None, node, number: 0 }
    }

    /// Asks until the answer is certain. The body stays the same, so that each repetition is a
    /// retry.
    async fn ask(&mut self, command: &Command) -> Told {
        let body = request(SimClock.wall_ms(), command);
        loop {
            let answer = SimRt::timeout(PATIENCE, self.try_once(&body)).await;
            match answer.unwrap_or(None) {
                Some(Answer::Done(outcome)) => return Told { outcome },
                Some(Answer::Elsewhere(Some(node))) if node != self.node => self.turn_to(node),
                Some(Answer::Elsewhere(_) | Answer::NotNow | Answer::Unknown) => {}
                None => {
                    let node = 1 + self.client.rng.below(NODES);
                    self.turn_to(node);
                }
            }
            *self.client.history.retries.borrow_mut() += 1;
            SimRt::sleep(Duration::from_millis(1 + self.client.rng.below(30))).await;
        }
    }

    fn turn_to(&mut self, node: u64) {
        self.open = None;
        self.node = node;
    }

    /// One request; `None` if the connection broke, which leaves the outcome open.
    async fn try_once(&mut self, body: &[u8]) -> Option<Answer> {
        let (mut reader, mut writer) = match self.open.take() {
            Some(open) => open,
            None => {
                let host = self.client.net.host(self.client.domain);
                host.connect(&client_addr(self.node)).await.ok()?
            }
        };
        self.number += 1;
        write_frame(&mut writer, self.number, body).await.ok()?;
        let (number, answer) = read_frame(&mut reader).await.ok()??;
        assert_eq!(number, self.number, "answers come in order");
        self.open = Some((reader, writer));
        Some(Answer::decode(&answer))
    }
}
