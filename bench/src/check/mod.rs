//! The checkers: one guarantee a file, judged from a history alone.
//!
//! Must never do I/O, read a clock or depend on the order of the records, so that the simulator
//! can use them on virtual time. A statement that a checker makes is never a false alarm: what a
//! history leaves open (an unknown outcome, a revision that the client's interface does not show)
//! is taken in the system's favour. What that costs is made visible: each checker counts what it
//! really judged, and too low a count makes the run `Invalid`, not `Ok`.
//!
//! Where a history has the nodes' own logs (`history::Applied`), they are judged too, and settle
//! what the clients could not learn.

pub mod bounded;
pub mod coverage;
pub mod durable;
pub mod expiry;
pub mod fence;
pub mod fifo;
pub mod heals;
mod holds;
pub mod linear;
mod log;
pub mod modes;
pub mod mutex;
pub mod watch;

use std::fmt;

use crate::history::History;

pub use holds::margin_ms;

/// Violations that a report keeps in words; the rest are counted.
const VIOLATIONS_SHOWN: usize = 20;

/// What a run proves about one guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It held, and the run was rich enough to say so.
    Ok,
    /// The run did not contain what it must contain to prove anything.
    Invalid,
    /// It did not hold.
    Violation,
}

/// How often something must have been seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// What.
    pub name: &'static str,
    /// How often it was.
    pub seen: u64,
    /// How often it must have been.
    pub needed: u64,
}

/// One checker's result.
#[derive(Clone, Debug)]
pub struct Report {
    /// The guarantee, by number and name.
    pub guarantee: &'static str,
    /// The first violations, in words.
    pub violations: Vec<String>,
    /// All violations.
    pub violations_total: u64,
    /// What was judged.
    pub coverage: Vec<Counter>,
    /// Figures for people.
    pub figures: Vec<(&'static str, String)>,
}

impl Report {
    fn new(guarantee: &'static str) -> Self {
        Self {
            guarantee,
            violations: Vec::new(),
            violations_total: 0,
            coverage: Vec::new(),
            figures: Vec::new(),
        }
    }

    fn violation(&mut self, text: String) {
        self.violations_total += 1;
        if self.violations.len() < VIOLATIONS_SHOWN {
            self.violations.push(text);
        }
    }

    fn cover(&mut self, name: &'static str, seen: u64, needed: u64) {
        self.coverage.push(Counter { name, seen, needed });
    }

    fn figure(&mut self, name: &'static str, value: String) {
        self.figures.push((name, value));
    }

    /// A violation outweighs missing coverage.
    pub fn verdict(&self) -> Verdict {
        if self.violations_total > 0 {
            Verdict::Violation
        } else if self.coverage.iter().any(|counter| counter.seen < counter.needed) {
            Verdict::Invalid
        } else {
            Verdict::Ok
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<14} {:?}:", self.guarantee, self.verdict())?;
        for counter in &self.coverage {
            write!(f, " {}={}", counter.name, counter.seen)?;
            if counter.seen < counter.needed {
                write!(f, " (needs {})", counter.needed)?;
            }
        }
        for (name, value) in &self.figures {
            write!(f, " {name}={value}")?;
        }
        for text in &self.violations {
            write!(f, "\n    {text}")?;
        }
        let hidden = self.violations_total.saturating_sub(self.violations.len() as u64);
        if hidden > 0 { write!(f, "\n    and {hidden} more") } else { Ok(()) }
    }
}

/// How much a run must contain before its verdict counts. The default demands nothing.
#[derive(Clone, Debug, Default)]
pub struct Needs {
    /// Pairs of successive holds of a key whose sure intervals were compared (G1).
    pub handovers: u64,
    /// Grants whose tokens were compared (G2).
    pub tokens: u64,
    /// Writes that a store refused for their token (G2).
    pub stale_refused: u64,
    /// Holds that passed on by silence (G3).
    pub expiries: u64,
    /// Grants of waiters whose place in the queue is known (G4).
    pub queued_grants: u64,
    /// Acknowledged changes compared with the final state (G5).
    pub acked: u64,
    /// Operations whose revisions were compared (G7).
    pub ordered: u64,
    /// Linearizable reads that were compared (G7).
    pub reads: u64,
    /// Nodes whose digests agree at the end (G5).
    pub nodes: u64,
    /// Grants of the nodes' own logs that were judged (G1, G2, G4, G5, G7).
    pub logged: u64,
    /// Calls that each shard served after the last fault was lifted (G8).
    pub served: u64,
    /// The longest time from then to the first success, in milliseconds (G8); 0 for any.
    pub heal_ms_max: u64,
    /// Peaks that were compared with their limits (G9).
    pub peaks: u64,
    /// How much the rates of two clocks of the run may differ, in parts per million (G3).
    pub rate_ppm: u64,
    /// Requests that were sent more than once (G5).
    pub retries: u64,
    /// Faults that must have happened.
    pub faults: Vec<(crate::history::FaultKind, u64)>,
}

/// Every checker's report on one history.
pub fn all(history: &History, needs: &Needs) -> Vec<Report> {
    vec![
        mutex::check(history, needs),
        fence::check(history, needs),
        expiry::check(history, needs),
        fifo::check(history, needs),
        durable::check(history, needs),
        linear::check(history, needs),
        heals::check(history, needs),
        bounded::check(history, needs),
        coverage::check(history, needs),
    ]
}

/// The reports for people, a line each.
pub fn text(reports: &[Report]) -> String {
    let lines: Vec<String> = reports.iter().map(|report| format!("{report}\n")).collect();
    lines.concat()
}

/// The worst verdict of some reports.
pub fn worst(reports: &[Report]) -> Verdict {
    reports.iter().map(Report::verdict).max().unwrap_or(Verdict::Invalid)
}

#[cfg(test)]
pub(crate) mod build;
#[cfg(test)]
mod search;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_without_what_it_needs_is_invalid() {
        let reports = all(&History::default(), &Needs { handovers: 1, ..Needs::default() });
        assert_eq!(worst(&reports), Verdict::Invalid);
        assert!(reports[0].to_string().contains("needs 1"), "{}", reports[0]);
    }

    #[test]
    fn no_report_at_all_proves_nothing() {
        assert_eq!(worst(&[]), Verdict::Invalid);
    }

    #[test]
    fn violations_outweigh_missing_coverage_and_are_bounded() {
        let mut report = Report::new("G0 test");
        report.cover("things", 0, 1);
        for n in 0..50 {
            report.violation(format!("number {n}"));
        }
        assert_eq!(report.verdict(), Verdict::Violation);
        assert_eq!(report.violations.len(), VIOLATIONS_SHOWN);
        assert!(report.to_string().ends_with("and 30 more"), "{report}");
    }
}
