//! The simulator: three nodes of the real Raft, WAL and state machine on virtual time, with
//! clients, crashes, power cuts, stuns and partitions, all drawn from one seed.
//!
//! ```text
//! cargo test -p leasehold-server --test sim                        a few seeds, each in a process
//! cargo test -p leasehold-server --test sim -- --seeds 100         more of them
//! cargo test -p leasehold-server --test sim -- --seed 7            one, in this process
//! ```
//!
//! One process runs one seed. The first seeds run twice, and both runs must have the same hash.
//! Exit code 1 is a violation, 2 a run that proves nothing, because its faults did not happen or
//! the simulator itself is wrong.

mod check;
mod client;
mod cluster;
mod faults;
mod history;
mod ledger;
mod link;
mod node;
mod params;
mod proof;
mod run;
mod session;

use std::process::{Child, Command, ExitCode, Stdio};

/// Seeds of a plain run.
const SEEDS_DEFAULT: u64 = 4;

/// Of these, the first run twice.
const SEEDS_TWICE: u64 = 2;

/// Child processes at one time.
const CHILDREN: usize = 2;

enum Task {
    One(u64),
    Many(u64),
    Nothing,
}

/// Reads the arguments; those of the usual test harness may be among them.
fn task() -> Task {
    let mut arguments = std::env::args().skip(1);
    let mut task = Task::Many(SEEDS_DEFAULT);
    while let Some(argument) = arguments.next() {
        let mut number = || {
            let value = arguments.next().and_then(|value| value.parse().ok());
            value.unwrap_or_else(|| panic!("{argument} takes a number"))
        };
        match argument.as_str() {
            "--seed" => return Task::One(number()),
            "--seeds" => task = Task::Many(number()),
            "--list" => return Task::Nothing,
            // A filter for tests by name.
            filter if !filter.starts_with('-') && !"sim".contains(filter) => task = Task::Nothing,
            _ => {}
        }
    }
    task
}

fn main() -> ExitCode {
    match task() {
        Task::One(seed) => run::run_seed(seed),
        Task::Many(seeds) => {
            proof::prove();
            run_many(seeds)
        }
        Task::Nothing => ExitCode::SUCCESS,
    }
}

/// One run in a process of its own.
struct Running {
    seed: u64,
    child: Child,
}

impl Running {
    fn start(seed: u64) -> Self {
        let this = std::env::current_exe().expect("a test has a file");
        let mut command = Command::new(this);
        command.args(["--seed", &seed.to_string()]).stdout(Stdio::piped());
        Self { seed, child: command.spawn().expect("the test's own file runs") }
    }

    /// Waits; true if all is well. A hash that differs from the one before is not.
    fn finish(self, hashes: &mut Vec<(u64, String)>) -> bool {
        let output = self.child.wait_with_output().expect("a child ends");
        let text = String::from_utf8_lossy(&output.stdout);
        print!("{text}");
        let hash = text.split("hash ").nth(1).and_then(|rest| rest.split_whitespace().next());
        let hash = hash.unwrap_or("none").to_owned();
        let before = hashes.iter().find(|(seed, _)| *seed == self.seed);
        let repeats = before.is_none_or(|(_, before)| *before == hash);
        if !repeats {
            println!("seed {}: two runs differ", self.seed);
        }
        hashes.push((self.seed, hash));
        output.status.success() && repeats
    }
}

fn run_many(seeds: u64) -> ExitCode {
    let mut hashes = Vec::new();
    let mut running = std::collections::VecDeque::new();
    let mut failed = Vec::new();
    let all: Vec<u64> = (0..seeds.min(SEEDS_TWICE)).chain(0..seeds).collect();
    let mut finish = |run: Running| {
        let seed = run.seed;
        if !run.finish(&mut hashes) {
            failed.push(seed);
        }
    };
    for seed in &all {
        if running.len() == CHILDREN {
            running.pop_front().map(&mut finish);
        }
        running.push_back(Running::start(*seed));
    }
    running.into_iter().for_each(finish);
    println!("{} runs of {seeds} seeds, failed: {failed:?}", all.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
