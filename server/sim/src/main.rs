//! The simulator: one, three or five nodes of the real Raft, WAL and state machine on virtual time,
//! with clients, and with faults of processes, machines, disks, networks and clocks, all drawn from
//! one seed.
//!
//! ```text
//! make sim                 40 seeds, each in a process
//! make sim N=1000          more of them
//! make sim SEED=7          one, in this process, with its timeline if it fails
//! ```
//!
//! One process runs one seed. Seeds that once found something run first (`seeds/`). The first seeds
//! run twice, and both runs must have the same hash. Exit code 1 is a violation, 2 an invocation
//! that proves nothing, because some kind of fault never happened or the simulator itself is wrong.

mod asker;
mod birth;
mod bounds;
mod bridge;
mod client;
mod cluster;
mod coverage;
mod faults;
mod feed;
mod history;
mod inject;
mod judge;
mod keeper;
mod ledger;
mod link;
mod logs;
mod many;
mod node;
mod operator;
mod params;
mod proof;
mod restore;
mod run;
mod session;
mod tables;
mod timeline;
mod wake;
mod witness;

use std::process::ExitCode;

use crate::many::Seeds;

enum Task {
    One(u64),
    Many(Seeds),
    Nothing,
}

/// Reads the arguments; those of the usual test harness may be among them.
fn task() -> Task {
    let mut arguments = std::env::args().skip(1);
    let mut seeds = Seeds::default();
    while let Some(argument) = arguments.next() {
        let mut number = || {
            let value = arguments.next().and_then(|value| value.parse().ok());
            value.unwrap_or_else(|| panic!("{argument} takes a number"))
        };
        match argument.as_str() {
            "--seed" => return Task::One(number()),
            "--seeds" => seeds.count = number(),
            "--from" => seeds.from = number(),
            "--list" => return Task::Nothing,
            // A filter for tests by name.
            filter if !filter.starts_with('-') && !"sim".contains(filter) => return Task::Nothing,
            _ => {}
        }
    }
    Task::Many(seeds)
}

fn main() -> ExitCode {
    match task() {
        Task::One(seed) => run::run_seed(seed),
        Task::Many(seeds) => {
            proof::prove();
            seeds.run()
        }
        Task::Nothing => ExitCode::SUCCESS,
    }
}
