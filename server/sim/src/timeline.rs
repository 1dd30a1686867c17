//! What a person reads when a seed fails: faults, deaths, elections and the events of the keys in
//! question, in simulated time.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Write as _;

use leasehold_server::rt::sim::SimWorld;

use crate::ledger::Ledger;

/// Lines that are kept; a run is far from it.
const LINES_MAX: usize = 100_000;

/// Lines that are printed; all of them are in the file.
const PRINTED_MAX: usize = 160;

/// What is printed around a violation whose time is known.
const AROUND_NS: u64 = 3_000_000_000;

/// See the module.
#[derive(Debug)]
pub(crate) struct Timeline {
    lines: RefCell<Vec<(u64, String)>>,
    /// Print each line at once.
    live: bool,
}

impl Timeline {
    /// Prints each line at once if `LEASEHOLD_SIM_LIVE` is set: for a run that does not end.
    pub(crate) fn new() -> Self {
        let live = std::env::var_os("LEASEHOLD_SIM_LIVE").is_some();
        Self { lines: RefCell::default(), live }
    }

    /// Something happened now.
    pub(crate) fn note(&self, text: String) {
        if self.live {
            println!("{}", timed(SimWorld::current().now_ns(), &text));
        }
        let mut lines = self.lines.borrow_mut();
        if lines.len() < LINES_MAX {
            lines.push((SimWorld::current().now_ns(), text));
        }
    }

    /// Writes all of it into a file beside the build, and prints what belongs to the violations.
    pub(crate) fn show(&self, seed: u64, ledger: &Ledger, violations: &[String]) {
        let mut lines = self.lines.borrow().clone();
        for shard in ledger.shards() {
            let log = ledger.shard(shard);
            for event in log.events() {
                let at_ns = log.applied_ns(event.revision.0).expect("it was applied");
                let text = readable(&format!("{:?}", event.kind));
                lines.push((at_ns, format!("shard {shard} rev {}: {text}", event.revision.0)));
            }
        }
        lines.sort_by_key(|(at_ns, _)| *at_ns);
        write_file(seed, &lines);
        let violations: Vec<_> = violations.iter().map(|text| readable(text)).collect();
        print_around(&lines, &keys_in(&violations), times_in(&violations));
    }
}

fn write_file(seed: u64, lines: &[(u64, String)]) {
    let mut text = String::new();
    for (at_ns, line) in lines {
        let _ = writeln!(text, "{}", timed(*at_ns, line));
    }
    let path = format!("{}/sim-seed-{seed}.txt", env!("CARGO_TARGET_TMPDIR"));
    match std::fs::write(&path, text) {
        Ok(()) => println!("seed {seed}: the whole timeline is in {path}"),
        Err(error) => println!("seed {seed}: {path}: {error}"),
    }
}

fn timed(at_ns: u64, line: &str) -> String {
    format!("{:>12.3} ms  {line}", at_ns as f64 / 1e6)
}

/// Prints what is not about other keys, near the given times if there are any.
fn print_around(lines: &[(u64, String)], keys: &BTreeSet<String>, times: Option<(u64, u64)>) {
    let near = |at_ns: u64| {
        times.is_none_or(|(from_ns, to_ns)| {
            (from_ns.saturating_sub(AROUND_NS)..=to_ns + AROUND_NS).contains(&at_ns)
        })
    };
    let about = |line: &str| {
        let named = keys_in(&[line.to_owned()]);
        keys.is_empty() || named.is_empty() || !named.is_disjoint(keys)
    };
    let chosen: Vec<_> = lines.iter().filter(|(at_ns, line)| near(*at_ns) && about(line)).collect();
    let skipped = chosen.len().saturating_sub(PRINTED_MAX);
    if skipped > 0 {
        println!("  ({skipped} earlier lines only in the file)");
    }
    for (at_ns, line) in &chosen[skipped..] {
        println!("  {}", timed(*at_ns, line));
    }
}

/// The keys that texts name.
fn keys_in(texts: &[String]) -> BTreeSet<String> {
    let mut keys = BTreeSet::new();
    for text in texts {
        for rest in text.split("key/").skip(1) {
            keys.insert(rest.chars().take_while(char::is_ascii_digit).collect());
        }
    }
    keys
}

/// The first and the last of the times in texts like `known_ns: 123`.
fn times_in(texts: &[String]) -> Option<(u64, u64)> {
    let times = texts.iter().flat_map(|text| text.split("_ns: ").skip(1)).filter_map(|rest| {
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u64>().ok().filter(|at_ns| *at_ns > 0)
    });
    let times: Vec<u64> = times.collect();
    Some((*times.iter().min()?, *times.iter().max()?))
}

/// The text with lists of printable bytes as strings.
fn readable(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, list)) = rest.split_once('[') {
        out.push_str(before);
        let Some((inside, after)) = list.split_once(']') else {
            out.push('[');
            out.push_str(list);
            return out;
        };
        let bytes: Option<Vec<u8>> = inside.split(", ").map(|byte| byte.parse().ok()).collect();
        let word = bytes.and_then(|bytes| String::from_utf8(bytes).ok());
        match word.filter(|word| word.chars().all(|c| c.is_ascii_graphic())) {
            Some(word) => out.push_str(&word),
            None => {
                let _ = write!(out, "[{inside}]");
            }
        }
        rest = after;
    }
    out.push_str(rest);
    out
}
