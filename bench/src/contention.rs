//! Many recorded clients that want few keys: the load under which faults are made.
//!
//! Three phases: they run (acquire, hold a little, read, release, sometimes try, time out, or
//! change their session), they freeze (whoever holds keeps, all others wait) so that the final
//! state can be compared with what they know, and they end without a goodbye.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::actor::{Actor, Failed, Held};
use crate::history::{FaultKind, Recorder};

mod library;

/// Time-out of a single call; only a cluster that does not heal lets it pass.
const CALL_LIMIT: Duration = Duration::from_mins(2);
/// Far beyond any run.
const FOR_EVER: Duration = Duration::from_hours(24);

/// What load to make.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Number of clients.
    pub clients: u32,
    /// Number of keys.
    pub keys: u32,
    /// TTL of the sessions, in milliseconds.
    pub ttl_ms: u32,
    /// Longest hold, in milliseconds.
    pub hold_ms_max: u64,
    /// Every so-manieth hold is left behind by a client that falls silent; 0 for none.
    pub abandon_in: u64,
    /// Seeds the clients' choices.
    pub seed: u64,
    /// The first client's number in the history.
    pub first_client: u32,
    /// Clients go to every node that they are told of, not only to those that they were given.
    pub learns: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            clients: 32,
            keys: 8,
            ttl_ms: 5_000,
            hold_ms_max: 20,
            abandon_in: 0,
            seed: 1,
            first_client: 0,
            learns: false,
        }
    }
}

/// The name of one of the keys.
pub fn key_name(index: u32) -> String {
    format!("contended/{index}")
}

#[derive(Debug, Default)]
struct Shared {
    freeze: AtomicBool,
    grants: AtomicU64,
    /// Holds of clients that may fall silent.
    holds: AtomicU64,
    lost: AtomicU64,
    stuck: AtomicU64,
}

/// Running clients.
#[derive(Debug)]
pub struct Contention {
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Contention {
    /// Starts the clients.
    pub fn start(endpoints: &[SocketAddr], recorder: &Recorder, plan: &Plan) -> Self {
        let shared = Arc::new(Shared::default());
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..plan.clients).map(|index| {
            let client = Client {
                number: plan.first_client + index,
                endpoints: endpoints.to_vec(),
                recorder: recorder.clone(),
                stop: Arc::clone(&stop),
                shared: Arc::clone(&shared),
                plan: plan.clone(),
                rng: SmallRng::seed_from_u64(plan.seed.wrapping_add(u64::from(index) << 32)),
            };
            std::thread::spawn(move || client.run())
        });
        Self { threads: threads.collect(), shared, stop }
    }

    /// Adds clients of the `leasehold` crate, which make the same load.
    pub fn add_library_clients(
        &mut self,
        endpoints: &[SocketAddr],
        recorder: &Recorder,
        plan: &Plan,
    ) {
        let thread = library::start(endpoints, recorder, plan, &self.shared, &self.stop);
        self.threads.push(thread);
    }

    /// Grants so far.
    pub fn grants(&self) -> u64 {
        self.shared.grants.load(Ordering::Relaxed)
    }

    /// Sessions that the cluster said are dead.
    pub fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// Calls that had no answer within their time-out.
    pub fn stuck(&self) -> u64 {
        self.shared.stuck.load(Ordering::Relaxed)
    }

    /// Waits for some more grants; false if they do not come in time.
    pub fn progress(&self, grants: u64, limit: Duration) -> bool {
        let until = self.grants() + grants;
        let deadline = crate::clock::Deadline::after(limit);
        while self.grants() < until {
            if deadline.passed() {
                return false;
            }
            std::thread::sleep(crate::process::POLL);
        }
        true
    }

    /// Holders keep what they hold, everybody else waits.
    pub fn freeze(&self) {
        self.shared.freeze.store(true, Ordering::Relaxed);
    }

    /// Ends all clients where they are.
    pub fn end(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().expect("a client of the load does not panic");
        }
    }
}

impl Drop for Contention {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

struct Client {
    number: u32,
    endpoints: Vec<SocketAddr>,
    recorder: Recorder,
    stop: Arc<AtomicBool>,
    shared: Arc<Shared>,
    plan: Plan,
    rng: SmallRng,
}

impl Client {
    fn run(mut self) {
        let Some(mut actor) = self.session() else { return };
        while !self.frozen() && !self.stopped() {
            if actor.is_dead() {
                self.shared.lost.fetch_add(1, Ordering::Relaxed);
            }
            // A session in twenty cycles ends: by a close, which must free what it has.
            if actor.is_dead() || self.rng.random_ratio(1, 20) {
                let _ = actor.close(CALL_LIMIT);
                let Some(next) = self.successor(&actor) else { return };
                actor = next;
            }
            if self.cycle(&mut actor).is_some() {
                // Frozen while it held.
                return self.keep(&mut actor);
            }
        }
        let key = self.key();
        if actor.acquire(&key, u32::MAX, FOR_EVER).is_ok() {
            self.shared.grants.fetch_add(1, Ordering::Relaxed);
            self.keep(&mut actor);
        }
    }

    fn session(&self) -> Option<Actor> {
        let endpoints = self.endpoints.clone();
        let stop = Arc::clone(&self.stop);
        let actor = Actor::new(self.number, endpoints, self.recorder.clone(), stop);
        let mut actor = if self.plan.learns { actor.learning() } else { actor };
        if actor.open(self.plan.ttl_ms, CALL_LIMIT).is_ok() {
            return Some(actor);
        }
        self.note_stuck();
        None
    }

    /// The next session, which knows the nodes that the former one knew: those of the beginning may
    /// all be gone.
    fn successor(&mut self, former: &Actor) -> Option<Actor> {
        self.endpoints = former.endpoints().to_vec();
        self.session()
    }

    /// One acquire with all that follows. Returns the hold if the freeze came meanwhile.
    fn cycle(&mut self, actor: &mut Actor) -> Option<Held> {
        let key = self.key();
        let wait_ms = match self.rng.random_range(0..10) {
            0 => 0,
            1 => 50,
            _ => u32::MAX,
        };
        match actor.acquire(&key, wait_ms, CALL_LIMIT) {
            Ok(held) => {
                self.shared.grants.fetch_add(1, Ordering::Relaxed);
                actor.idle(Duration::from_millis(self.rng.random_range(0..=self.plan.hold_ms_max)));
                if self.rng.random_ratio(1, 8) {
                    let _ = actor.get(&key, CALL_LIMIT);
                }
                if self.frozen() {
                    return Some(held);
                }
                let holds = self.shared.holds.fetch_add(1, Ordering::Relaxed) + 1;
                if self.plan.abandon_in > 0 && holds.is_multiple_of(self.plan.abandon_in) {
                    self.fall_silent(actor);
                    return None;
                }
                if actor.release(&held, CALL_LIMIT) == Err(Failed::Stopped) {
                    self.note_stuck();
                }
            }
            Err(Failed::Stopped) => self.note_stuck(),
            // A try that found the key taken: not at once again.
            Err(Failed::Refused(_) | Failed::Ended) => actor.idle(Duration::from_millis(5)),
        }
        None
    }

    /// Goes on as a new client with a session of its own, while the hold is left to expire.
    fn fall_silent(&mut self, actor: &mut Actor) {
        self.recorder.fault(FaultKind::ClientKilled, 0);
        actor.abandon();
        if let Some(next) = self.successor(actor) {
            *actor = next;
        }
    }

    /// Keeps what it holds until the end.
    fn keep(&self, actor: &mut Actor) {
        while !self.stopped() {
            actor.idle(FOR_EVER);
        }
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

    /// A call without an answer although nobody asked to stop.
    fn note_stuck(&self) {
        if !self.stopped() {
            self.shared.stuck.fetch_add(1, Ordering::Relaxed);
        }
    }
}
