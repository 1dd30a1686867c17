//! What a crowded connection carries: requests of all kinds drawn at random, such as make sense now, and
//! such as must be refused.

use leasehold_protocol::command::{Command, Want};
use leasehold_protocol::ids::{Mode, Number, Token};
use leasehold_protocol::request::Request;
use rand::RngExt as _;
use rand::rngs::SmallRng;

use crate::answers::FOR_EVER;
use crate::bare::{self, Lease, exclusive, permits, shared};
use crate::pipeline::Oracle;

const LOCKS: usize = 3;
const POOL: &str = "piped/pool";
/// Its permits, when it is used for the first time.
const LIMIT: u32 = 3;

/// A hold, and the acquire that led to it.
struct Held {
    lease: Lease,
    number: Number,
    key: String,
    token: Token,
    mode: Mode,
}

pub(crate) struct Draw {
    pub(crate) rng: SmallRng,
    pub(crate) leases: Vec<Lease>,
    /// The next free number, of all leases.
    pub(crate) next: u64,
}

impl Draw {
    /// The next request, and what to call it.
    pub(crate) fn request(&mut self, oracle: &Oracle) -> (&'static str, Request) {
        let lease = self.anybody();
        let number = self.next;
        self.next += 3;
        match self.rng.random_range(0..20) {
            0..=5 => self.acquire(&lease, number),
            6..=8 => self.acquire_several(&lease, number),
            9..=12 => match self.hold(oracle) {
                Some(held) => {
                    let caller = self.its_holder_mostly(&held);
                    ("release", caller.release(number, &held.key, held.token))
                }
                None => ("release", lease.release(number, "piped/0", Token(1))),
            },
            13 => match self.hold(oracle) {
                Some(held) => {
                    let caller = self.its_holder_mostly(&held);
                    ("release all", caller.release_all(number, held.number.0))
                }
                None => self.acquire(&lease, number),
            },
            14..=16 => match self.hold(oracle) {
                Some(held) => self.convert(&held, number),
                None => self.acquire(&lease, number),
            },
            17 => self.set_limit(),
            // Of a wait, or too late.
            18 => match self.hold(oracle) {
                Some(held) => ("cancel", held.lease.cancel(held.number.0 + 1)),
                None => self.acquire(&lease, number),
            },
            _ => match oracle.wait_of(lease.id) {
                Some(number) => ("cancel", lease.cancel(number.0 + 1)),
                None => self.acquire(&lease, number),
            },
        }
    }

    fn anybody(&mut self) -> Lease {
        self.leases[self.rng.random_range(0..self.leases.len())]
    }

    /// The holder, or one that takes its hold for its own.
    fn its_holder_mostly(&mut self, held: &Held) -> Lease {
        if self.rng.random_ratio(5, 6) { held.lease } else { self.anybody() }
    }

    fn hold(&mut self, oracle: &Oracle) -> Option<Held> {
        let held = |lease: &Lease| {
            let lease = *lease;
            let holds = oracle.state.holds(lease.id).map(|reply| reply.holds).unwrap_or_default();
            holds.into_iter().map(move |held| Held {
                lease,
                number: held.number,
                key: String::from_utf8(held.key).expect("it was text"),
                token: held.token,
                mode: held.mode,
            })
        };
        let mut all: Vec<Held> = self.leases.iter().flat_map(held).collect();
        if all.is_empty() {
            None
        } else {
            Some(all.swap_remove(self.rng.random_range(0..all.len())))
        }
    }

    /// Waits without limit, or not at all.
    fn wait_ms(&mut self) -> u32 {
        if self.rng.random_ratio(3, 5) { FOR_EVER } else { 0 }
    }

    fn acquire(&mut self, lease: &Lease, number: u64) -> (&'static str, Request) {
        let wait_ms = self.wait_ms();
        let mut want = self.want();
        let name = match want.mode {
            Mode::EXCLUSIVE => "exclusive",
            Mode::SHARED => "shared",
            _ => "permits",
        };
        // Both commands for one lock are the same to a client.
        if want.mode == Mode::EXCLUSIVE && self.rng.random() {
            return (name, lease.acquire(number, &String::from_utf8_lossy(&want.key), wait_ms));
        }
        want.reentrant = self.rng.random_ratio(1, 8);
        (name, lease.acquire_all(number, &[want], (wait_ms, 0)))
    }

    fn acquire_several(&mut self, lease: &Lease, number: u64) -> (&'static str, Request) {
        let count = self.rng.random_range(2..=3);
        let mut wants: Vec<Want> = Vec::new();
        while wants.len() < count {
            let want = self.want();
            if wants.iter().all(|other| other.key != want.key) {
                wants.push(want);
            }
        }
        ("several", lease.acquire_all(number, &wants, (self.wait_ms(), 0)))
    }

    fn want(&mut self) -> Want {
        let lock = format!("piped/{}", self.rng.random_range(0..LOCKS));
        match self.rng.random_range(0..10) {
            0..=2 => exclusive(&lock),
            3..=5 => shared(&lock),
            _ => {
                // Some are mistaken about the pool's size.
                let limit = LIMIT + u32::from(self.rng.random_ratio(1, 10));
                permits(POOL, self.rng.random_range(1..=LIMIT), limit)
            }
        }
    }

    /// The other mode mostly, also where there is none.
    fn convert(&mut self, held: &Held, number: u64) -> (&'static str, Request) {
        let other = if held.mode == Mode::SHARED { Mode::EXCLUSIVE } else { Mode::SHARED };
        let same = held.mode.permit_count().is_none() && self.rng.random_ratio(1, 8);
        let mode = if same { held.mode } else { other };
        let name = if mode == Mode::SHARED { "downgrade" } else { "upgrade" };
        let caller = self.its_holder_mostly(held);
        (name, caller.convert(number, &held.key, held.token, mode))
    }

    fn set_limit(&mut self) -> (&'static str, Request) {
        let key = POOL.as_bytes().to_vec();
        let limit = self.rng.random_range(LIMIT - 1..=LIMIT + 1);
        ("limit", bare::command(Command::SetLimit { key, limit, who: b"operator".to_vec() }))
    }
}
