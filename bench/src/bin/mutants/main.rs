//! `mutants`: tests the tests. Wakes one planted fault after the other (`planted!` in the product's
//! source, listed in `faults`), runs the tests tier by tier until one goes red, and writes down
//! which it was, in `docs/MUTANTS.md`.
//!
//! - A catch counts only if the program that caught it is green without the fault, and if the fault
//!   was executed. Otherwise, or if anything does not build, the verdict is INVALID (exit code 2).
//! - A fault that no tier catches is a hole in the tests: exit code 1.
//! - Everything is built in `target/mutants`: once, with all faults in it, asleep; or, with
//!   `--each`, once a fault, with that one alone. Only the workspace's own crates are built anew.

mod build;
mod faults;
mod programs;
mod report;
mod run;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use crate::build::Build;
use crate::faults::{FAULTS, Fault};
use crate::programs::{Program, Tier};
use crate::report::{Catch, Finding, Findings};
use crate::run::{Ending, Run};

#[derive(Parser)]
#[command(about = "Plants faults, one at a time, and shows which test notices each")]
struct Cli {
    /// Only these faults, separated by commas; what is known of the others stays.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Builds each fault alone, instead of all of them asleep in one build.
    #[arg(long)]
    each: bool,
    /// Lists the faults.
    #[arg(long)]
    list: bool,
    /// Does not run the programs that caught something without their fault; the verdict is INVALID.
    #[arg(long)]
    no_control: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if cli.list {
        for fault in FAULTS {
            println!("{:32} {:8} {}", fault.name, fault.rule, fault.breaks);
        }
        return ExitCode::SUCCESS;
    }
    match mutants(&cli) {
        Ok(verdict) => verdict,
        Err(error) => {
            eprintln!("INVALID: {error}");
            ExitCode::from(2)
        }
    }
}

fn mutants(cli: &Cli) -> io::Result<ExitCode> {
    let chosen = choose(&cli.only)?;
    let root = workspace();
    let target = root.join("target/mutants");
    let mut findings =
        if cli.only.is_empty() { Findings::default() } else { Findings::load(&target)? };
    let mut hunt = Hunt { root, target, cli, builds: BTreeMap::new(), control: BTreeMap::new() };
    for fault in chosen {
        let finding = hunt.hunt(fault)?;
        println!("{}", finding.line(fault));
        findings.put(fault, finding);
        findings.save(&hunt.target)?;
        if cli.each {
            hunt.builds.remove(fault.name).iter().for_each(Build::remove);
        }
    }
    findings.write_report(&hunt.root)?;
    let summary = findings.summary();
    println!("{}", summary.text());
    let red = hunt.control.iter().filter(|(_, ending)| **ending != Ending::Green);
    for (program, ending) in red {
        println!("INVALID: {program} is red without a fault: {ending:?}");
    }
    let valid = hunt.control.values().all(|ending| *ending == Ending::Green);
    Ok(ExitCode::from(match (valid && !cli.no_control, summary.all_caught()) {
        (false, _) => 2,
        (true, false) => 1,
        (true, true) => 0,
    }))
}

fn choose(only: &[String]) -> io::Result<Vec<&'static Fault>> {
    if let Some(name) = only.iter().find(|name| FAULTS.iter().all(|fault| fault.name != **name)) {
        return Err(io::Error::other(format!("there is no fault {name}; see --list")));
    }
    let chosen = |fault: &&Fault| only.is_empty() || only.iter().any(|name| name == fault.name);
    Ok(FAULTS.iter().filter(chosen).collect())
}

fn workspace() -> PathBuf {
    let bench = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    bench.parent().expect("the crate lies in the workspace").to_owned()
}

/// A search for the tests that notice.
struct Hunt<'a> {
    root: PathBuf,
    target: PathBuf,
    cli: &'a Cli,
    /// By what is planted in it.
    builds: BTreeMap<&'static str, Build>,
    /// How the programs that caught something end without a fault.
    control: BTreeMap<&'static Program, Ending>,
}

impl Hunt<'_> {
    /// What the build of a fault has planted.
    fn planted(&self, fault: &Fault) -> &'static str {
        if self.cli.each { fault.name } else { build::ALL }
    }

    fn build(&mut self, planted: &'static str) -> io::Result<&mut Build> {
        match self.builds.entry(planted) {
            Entry::Occupied(build) => Ok(build.into_mut()),
            Entry::Vacant(free) => Ok(free.insert(Build::new(&self.root, &self.target, planted)?)),
        }
    }

    /// Runs the fault's tiers until one notices.
    fn hunt(&mut self, fault: &'static Fault) -> io::Result<Finding> {
        let mut finding = Finding::default();
        let planted = self.planted(fault);
        for tier in fault.tiers {
            for program in tier.programs() {
                let run = self.run(planted, program, Some(fault))?;
                finding.reached |= run.reached;
                finding.seconds += run.seconds;
                let Ending::Red { test } = run.ending else { continue };
                self.control(program)?;
                if !finding.reached {
                    // Whatever failed, it was not the fault.
                    println!("{program} fails at {test}, but {} was not executed", fault.name);
                    self.control.insert(program, Ending::Red { test });
                    continue;
                }
                let program = program.to_string();
                let in_make_test = *tier != Tier::LongSimulator;
                finding.catch = Some(Catch { program, test, in_make_test });
                return Ok(finding);
            }
        }
        Ok(finding)
    }

    fn run(
        &mut self,
        planted: &'static str,
        program: &'static Program,
        fault: Option<&Fault>,
    ) -> io::Result<Run> {
        let logs = self.target.join("logs");
        run::run(self.build(planted)?, program, fault.map(|fault| fault.name), &logs)
    }

    /// Runs a program without a fault, once.
    fn control(&mut self, program: &'static Program) -> io::Result<()> {
        if self.cli.no_control || self.control.contains_key(program) {
            return Ok(());
        }
        let planted = if self.cli.each { build::NONE } else { build::ALL };
        let run = self.run(planted, program, None)?;
        self.control.insert(program, run.ending);
        Ok(())
    }
}
