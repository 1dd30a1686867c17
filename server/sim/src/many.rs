//! Many seeds, each in a process of its own, and the verdict over all of them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Output, Stdio};

use crate::coverage::Total;

/// Of the seeds, the first run twice.
const TWICE: usize = 2;

/// Child processes at one time.
const CHILDREN_MAX: usize = 8;

/// Seeds that once found something, a file each: its first word is the seed.
const KEPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/seeds");

/// Which seeds to run, besides the kept ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seeds {
    pub(crate) from: u64,
    pub(crate) count: u64,
}

impl Default for Seeds {
    fn default() -> Self {
        Self { from: 0, count: 40 }
    }
}

/// One run in a process of its own.
struct Running {
    seed: u64,
    child: Child,
}

/// What became of all runs so far.
#[derive(Default)]
struct Verdict {
    total: Total,
    hashes: BTreeMap<u64, String>,
    failed: BTreeSet<u64>,
    /// Runs that prove nothing: too little to judge, or not repeatable.
    invalid: BTreeSet<u64>,
}

impl Seeds {
    pub(crate) fn run(self) -> ExitCode {
        let fresh: Vec<u64> = (self.from..self.from + self.count).collect();
        let mut all = kept();
        all.extend(fresh.iter().take(TWICE));
        all.extend(&fresh);
        let children = std::thread::available_parallelism().map_or(2, usize::from);
        let mut verdict = Verdict::default();
        let mut running = VecDeque::new();
        for seed in all {
            if running.len() == children.min(CHILDREN_MAX)
                && let Some(oldest) = running.pop_front()
            {
                verdict.take(oldest);
            }
            running.push_back(Running::start(seed));
        }
        for run in running {
            verdict.take(run);
        }
        verdict.end()
    }
}

/// The seeds of the files in `seeds/`, by name.
fn kept() -> Vec<u64> {
    let seed = |path: &Path| {
        let text = std::fs::read_to_string(path).expect("the file was listed");
        let word = text.split_whitespace().next().and_then(|word| word.parse().ok());
        word.unwrap_or_else(|| panic!("{}: the first word is the seed", path.display()))
    };
    let files = std::fs::read_dir(KEPT).expect("the folder of kept seeds is there");
    let paths: BTreeSet<_> = files.map(|file| file.expect("it can be listed").path()).collect();
    paths
        .iter()
        .filter(|path| path.extension().is_some_and(|end| end == "txt"))
        .map(|path| seed(path))
        .collect()
}

impl Running {
    fn start(seed: u64) -> Self {
        let this = std::env::current_exe().expect("a test has a file");
        let mut command = Command::new(this);
        command.args(["--seed", &seed.to_string()]).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self { seed, child: command.spawn().expect("the test's own file runs") }
    }
}

impl Verdict {
    /// Waits for a run to end.
    fn take(&mut self, run: Running) {
        let seed = run.seed;
        let output = run.child.wait_with_output().expect("a child ends");
        let text = String::from_utf8_lossy(&output.stdout);
        if self.compare(seed, &text) {
            self.total.take(&text);
        }
        text.lines().filter(|line| !line.starts_with("covered ")).for_each(|l| println!("{l}"));
        if !output.status.success() {
            print!("{}", String::from_utf8_lossy(&output.stderr));
            println!("seed {seed}: {}", ended(&output));
            let proves_nothing = output.status.code() == Some(2);
            if proves_nothing { &mut self.invalid } else { &mut self.failed }.insert(seed);
        }
    }

    /// Compares the run's hash with that of the same seed before; true if it is the first.
    fn compare(&mut self, seed: u64, text: &str) -> bool {
        let hash = text.split("hash ").nth(1).and_then(|rest| rest.split_whitespace().next());
        let hash = hash.unwrap_or("none").to_owned();
        match self.hashes.get(&seed) {
            Some(before) if *before != hash => {
                println!("seed {seed}: two runs differ");
                self.invalid.insert(seed);
                false
            }
            Some(_) => false,
            None => {
                self.hashes.insert(seed, hash);
                true
            }
        }
    }

    fn end(self) -> ExitCode {
        self.total.print();
        let missing = self.total.missing();
        println!("failed: {:?}, invalid: {:?}", self.failed, self.invalid);
        if !self.failed.is_empty() {
            return ExitCode::from(1);
        }
        if !missing.is_empty() && self.total.is_whole() {
            println!("INVALID: never happened: {}", missing.join(", "));
        } else if !missing.is_empty() {
            println!("in so few seeds not seen: {}", missing.join(", "));
        }
        let invalid = !self.invalid.is_empty() || (!missing.is_empty() && self.total.is_whole());
        if invalid { ExitCode::from(2) } else { ExitCode::SUCCESS }
    }
}

fn ended(output: &Output) -> String {
    match output.status.code() {
        Some(101) => "the product or the simulator panicked".to_owned(),
        _ => output.status.to_string(),
    }
}
