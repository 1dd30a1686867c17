//! The same load by real clients of the `leasehold` crate: one task each, on one thread.
//!
//! What the library says about a hold is recorded as claims, so that the checkers hold it
//! against the library: a claim counts from before it was asked for, so it is never overstated.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use leasehold::{AcquireError, Client, Config, Guard, HoldState, ReleaseError};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::{Plan, Shared, key_name};
use crate::clock::now_ns;
use crate::history::{Claim, Lost, Op, OpKind, Outcome, Record, Recorder};

/// How often a holder looks at its guard, and a waiting task at the flags.
const LOOK: Duration = Duration::from_millis(100);

/// Starts `plan.clients` tasks.
pub(super) fn start(
    endpoints: &[SocketAddr],
    recorder: &Recorder,
    plan: &Plan,
    shared: &Arc<Shared>,
    stop: &Arc<AtomicBool>,
) -> JoinHandle<()> {
    let list: Vec<String> = endpoints.iter().map(ToString::to_string).collect();
    let endpoints = list.join(",");
    let tasks: Vec<Task> = (0..plan.clients)
        .map(|index| Task {
            number: plan.first_client + index,
            endpoints: endpoints.clone(),
            recorder: recorder.clone(),
            stop: Arc::clone(stop),
            shared: Arc::clone(shared),
            plan: plan.clone(),
            rng: SmallRng::seed_from_u64(plan.seed.wrapping_add(u64::from(index) << 40)),
        })
        .collect();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async move {
            let running: Vec<_> = tasks.into_iter().map(|task| tokio::spawn(task.run())).collect();
            for task in running {
                task.await.expect("a client of the load does not panic");
            }
        });
    })
}

struct Task {
    number: u32,
    endpoints: String,
    recorder: Recorder,
    stop: Arc<AtomicBool>,
    shared: Arc<Shared>,
    plan: Plan,
    rng: SmallRng,
}

impl Task {
    async fn run(mut self) {
        let Some(client) = self.connect().await else { return };
        let ttl = Duration::from_millis(u64::from(self.plan.ttl_ms));
        let session = client.session(ttl).expect("the plan's TTL is in range");
        while !self.frozen() && !self.stopped() {
            let key = self.key();
            let wait_ms = if self.rng.random_ratio(1, 10) { 0 } else { u32::MAX };
            let Some(guard) = self.acquire(&session, &key, wait_ms).await else { continue };
            self.hold(&guard).await;
            if self.frozen() {
                return self.keep(guard).await;
            }
            self.release(guard).await;
        }
        let key = self.key();
        if let Some(guard) = self.acquire(&session, &key, u32::MAX).await {
            self.keep(guard).await;
        }
    }

    async fn connect(&self) -> Option<Client> {
        let config = Config::new(&self.endpoints).expect("the endpoints are addresses");
        let config = config.label(format!("library-{}", self.number));
        match Client::with_config(config).await {
            Ok(client) => Some(client),
            Err(error) => {
                eprintln!("client {} cannot connect: {error}", self.number);
                self.shared.stuck.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// `None` if there was no grant, or the run ended first.
    async fn acquire(
        &self,
        session: &leasehold::Session,
        key: &str,
        wait_ms: u32,
    ) -> Option<Guard> {
        let invoke_ns = now_ns();
        let request = session.lock(key);
        let acquired = async {
            if wait_ms == 0 { request.try_acquire().await } else { request.acquire().await }
        };
        let kind = OpKind::Acquire { wait_ms };
        let result = tokio::select! {
            result = acquired => result,
            () = self.until_stopped() => {
                self.record(key, kind, invoke_ns, Outcome::Unknown);
                return None;
            }
        };
        match result {
            Ok(guard) => {
                let token = guard.token().0;
                let granted = Outcome::Granted { token, own_lease: None, revision: None };
                self.record(key, kind, invoke_ns, granted);
                self.claim(&guard);
                self.shared.grants.fetch_add(1, Ordering::Relaxed);
                Some(guard)
            }
            Err(error) => {
                let outcome = match &error {
                    AcquireError::Unknown(_) => Outcome::Unknown,
                    other => refused(other.failure().code.name()),
                };
                if let AcquireError::Lost(_) = error {
                    self.shared.lost.fetch_add(1, Ordering::Relaxed);
                }
                self.record(key, kind, invoke_ns, outcome);
                tokio::time::sleep(Duration::from_millis(5)).await;
                None
            }
        }
    }

    /// Holds for a while and says so.
    async fn hold(&mut self, guard: &Guard) {
        let hold_ms = self.rng.random_range(0..=self.plan.hold_ms_max);
        tokio::time::sleep(Duration::from_millis(hold_ms)).await;
        self.claim(guard);
    }

    async fn release(&self, guard: Guard) {
        let (key, token) = (guard.key().to_owned(), guard.token().0);
        let invoke_ns = now_ns();
        let outcome = match guard.release().await {
            Ok(()) => Outcome::Released { token, revision: None },
            Err(ReleaseError::Unknown(_)) => Outcome::Unknown,
            Err(error) => refused(error.failure().code.name()),
        };
        self.record(&key, OpKind::Release { token }, invoke_ns, outcome);
    }

    async fn keep(&self, guard: Guard) {
        while !self.stopped() {
            self.claim(&guard);
            tokio::time::sleep(LOOK).await;
        }
        // Dropping a guard gives the lock back; its answer is nobody's.
        let kind = OpKind::Release { token: guard.token().0 };
        self.record(guard.key(), kind, now_ns(), Outcome::Unknown);
        drop(guard);
    }

    /// Records what the library says about the hold at this moment.
    fn claim(&self, guard: &Guard) {
        let at_ns = now_ns();
        let until_ns = at_ns + guard.remaining().as_nanos() as u64;
        let (client, key, token) = (self.number, guard.key().to_owned(), guard.token().0);
        if let HoldState::Lost(cause) = guard.state() {
            self.shared.lost.fetch_add(1, Ordering::Relaxed);
            self.recorder.push(Record::Lost(Lost {
                client,
                shard: 0,
                lease: None,
                key: Some(key),
                token: Some(token),
                at_ns: now_ns(),
                cause: cause.name().to_owned(),
            }));
        } else {
            self.recorder.push(Record::Claim(Claim { client, key, token, at_ns, until_ns }));
        }
    }

    fn record(&self, key: &str, kind: OpKind, invoke_ns: u64, outcome: Outcome) {
        let answered = outcome != Outcome::Unknown;
        self.recorder.push(Record::Op(Op {
            client: self.number,
            shard: 0,
            lease: None,
            number: None,
            key: key.to_owned(),
            kind,
            invoke_ns,
            return_ns: answered.then(now_ns),
            attempts: 1,
            queued: None,
            outcome,
        }));
    }

    fn key(&mut self) -> String {
        key_name(self.rng.random_range(0..self.plan.keys))
    }

    fn frozen(&self) -> bool {
        self.shared.freeze.load(Ordering::Relaxed)
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    async fn until_stopped(&self) {
        while !self.stopped() {
            tokio::time::sleep(LOOK).await;
        }
    }
}

fn refused(code: &str) -> Outcome {
    Outcome::Refused { code: code.to_owned(), token: None, revision: None }
}
