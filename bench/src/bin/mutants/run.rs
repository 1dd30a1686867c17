//! Runs one test program and finds out how it ended, and whether the fault was executed.

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use leasehold_bench::clock::{Deadline, now_ns};
use leasehold_bench::process::{BIN_DIR_VAR, POLL, Process};

use crate::build::Build;
use crate::programs::Program;

/// How a program ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Green,
    Red {
        /// The first test that failed, or what is known instead.
        test: String,
    },
    /// It says that it proved nothing.
    Invalid,
}

/// One run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) ending: Ending,
    pub(crate) reached: bool,
    pub(crate) seconds: f64,
}

/// Runs a program with a fault awake, or none. It is killed at its first failure, and at its limit.
pub(crate) fn run(
    build: &mut Build,
    program: &Program,
    fault: Option<&str>,
    logs: &Path,
) -> io::Result<Run> {
    let logs = logs.join(fault.unwrap_or("control"));
    std::fs::create_dir_all(&logs)?;
    let stem = program.to_string().replace(' ', "-");
    let (log, note) = (logs.join(format!("{stem}.log")), logs.join(format!("{stem}.note")));
    if note.exists() {
        std::fs::remove_file(&note)?;
    }
    let (executable, dir) = build.program(program)?;
    let output = File::create(&log)?;
    let mut command = Command::new(executable);
    command
        .args(program.arguments)
        .current_dir(&dir)
        .env("CARGO_MANIFEST_DIR", &dir)
        .env(BIN_DIR_VAR, build.bin_dir())
        .env("PLANTED_NOTE", &note)
        .env_remove("PLANTED_FAULT")
        .stdin(Stdio::null())
        .stderr(output.try_clone()?)
        .stdout(output);
    if let Some(fault) = fault {
        command.env("PLANTED_FAULT", fault);
    }
    let began = now_ns();
    let ending = watch(Process::spawn(command)?, program, &log)?;
    let seconds = (now_ns() - began) as f64 / 1e9;
    Ok(Run { ending, reached: note.exists(), seconds })
}

fn watch(mut process: Process, program: &Program, log: &Path) -> io::Result<Ending> {
    let deadline = Deadline::after(program.limit);
    loop {
        let status = process.try_wait()?;
        // Whatever it printed before it ended is in the file by now.
        let text = String::from_utf8_lossy(&std::fs::read(log)?).into_owned();
        if let Some(test) = failure(&text) {
            return Ok(Ending::Red { test });
        }
        match status {
            Some(status) if status.success() => return Ok(Ending::Green),
            Some(_) if text.lines().any(|line| line.starts_with("INVALID")) => {
                return Ok(Ending::Invalid);
            }
            Some(status) => return Ok(Ending::Red { test: death(&text, &status.to_string()) }),
            None if deadline.passed() => {
                let test = format!("no end within {} s", program.limit.as_secs());
                return Ok(Ending::Red { test });
            }
            None => std::thread::sleep(POLL * 5),
        }
    }
}

/// The first failure that a program has printed while it goes on.
fn failure(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let failed = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED"));
        let violation = line.split_once(": VIOLATION of ").map(|(seed, what)| {
            let guarantee = what.split(':').next().unwrap_or(what);
            format!("{seed}: {guarantee}")
        });
        let panic = line.strip_suffix("the product or the simulator panicked");
        let panic = panic.map(|seed| format!("{seed}{}", death(text, "panicked")));
        failed.map(str::to_owned).or(violation).or(panic)
    })
}

/// What is known of a program that ended without naming a test.
fn death(text: &str, status: &str) -> String {
    let panic = text.lines().find(|line| line.contains("panicked at"));
    let place = panic.and_then(|line| line.split_once("panicked at ")).map(|(_, place)| place);
    place.map_or_else(|| status.to_owned(), |place| format!("panic at {}", place.trim_matches(':')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_found_in_what_a_program_prints() {
        let text = "running 2 tests\ntest a::b ... ok\ntest a::c ... FAILED\ntest d ... FAILED\n";
        assert_eq!(failure(text), Some("a::c".to_owned()));
        let text = "seed 3: hash 12\nseed 3: VIOLATION of G1: Held and Held overlap\n";
        assert_eq!(failure(text), Some("seed 3: G1".to_owned()));
        assert_eq!(failure("test a ... ok\ntest FAILED ... ok\n"), None);
        let text =
            "thread 'x' panicked at y.rs:1:2:\nseed 4: the product or the simulator panicked\n";
        assert_eq!(failure(text), Some("seed 4: panic at y.rs:1:2".to_owned()));
        assert_eq!(death("thread 'x' panicked at y.rs:1:2:\n", "9"), "panic at y.rs:1:2");
        assert_eq!(death("", "signal: 6"), "signal: 6");
    }
}
