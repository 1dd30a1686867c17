//! What was found, kept in `target/mutants/findings.json` and told in `docs/MUTANTS.md`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::faults::{FAULTS, Fault};

const BEGIN: &str = "<!-- mutants: written by `make mutants` -->";
const END: &str = "<!-- mutants: end -->";

/// Who noticed a fault.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Catch {
    pub(crate) program: String,
    pub(crate) test: String,
    /// `make test` runs it too, at this size.
    pub(crate) in_make_test: bool,
}

/// What is known of one fault.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Finding {
    pub(crate) catch: Option<Catch>,
    /// It was executed.
    pub(crate) reached: bool,
    /// How long the tests ran until one went red, those that did not included.
    pub(crate) seconds: f64,
}

impl Finding {
    pub(crate) fn line(&self, fault: &Fault) -> String {
        let seconds = self.seconds;
        match &self.catch {
            Some(Catch { program, test, .. }) => {
                format!("{}: caught after {seconds:.1} s by {program}: {test}", fault.name)
            }
            None => format!("{}: NOT CAUGHT in {seconds:.0} s, {}", fault.name, self.reach()),
        }
    }

    fn reach(&self) -> &'static str {
        if self.reached { "though executed" } else { "never executed" }
    }
}

/// What is known of all faults.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Findings(BTreeMap<String, Finding>);

impl Findings {
    /// What earlier runs found.
    pub(crate) fn load(target: &Path) -> io::Result<Self> {
        match std::fs::read(target.join("findings.json")) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn save(&self, target: &Path) -> io::Result<()> {
        std::fs::write(target.join("findings.json"), serde_json::to_vec_pretty(self)?)
    }

    pub(crate) fn put(&mut self, fault: &Fault, finding: Finding) {
        self.0.insert(fault.name.to_owned(), finding);
    }

    pub(crate) fn summary(&self) -> Summary {
        let found: Vec<&Finding> = FAULTS.iter().filter_map(|f| self.0.get(f.name)).collect();
        let catches = found.iter().filter(|finding| finding.catch.is_some());
        let mut seconds: Vec<f64> = catches.clone().map(|finding| finding.seconds).collect();
        seconds.sort_by(f64::total_cmp);
        let usual = |catch: &Catch| catch.in_make_test;
        Summary {
            planted: FAULTS.len(),
            tried: found.len(),
            caught: seconds.len(),
            in_make_test: catches.filter(|f| f.catch.as_ref().is_some_and(usual)).count(),
            median_seconds: seconds.get(seconds.len() / 2).copied().unwrap_or_default(),
        }
    }

    /// Replaces what stands between the markers.
    pub(crate) fn write_report(&self, root: &Path) -> io::Result<()> {
        let path = root.join("docs/MUTANTS.md");
        let text = std::fs::read_to_string(&path)?;
        let missing = || io::Error::other("docs/MUTANTS.md has no markers");
        let (before, rest) = text.split_once(BEGIN).ok_or_else(missing)?;
        let (_, after) = rest.split_once(END).ok_or_else(missing)?;
        std::fs::write(&path, format!("{before}{BEGIN}\n{}{END}{after}", self.table()))
    }

    fn table(&self) -> String {
        let mut table = format!("\n{}\n\n", self.summary().text());
        table.push_str("| fault | breaks | caught by | after |\n|---|---|---|---|\n");
        for fault in FAULTS {
            let (caught, after) = match self.0.get(fault.name) {
                None => ("not tried".to_owned(), String::new()),
                Some(finding) => match &finding.catch {
                    Some(catch) => {
                        let by = format!("{}: `{}`", catch.program, catch.test);
                        (by, format!("{:.1} s", finding.seconds))
                    }
                    None => (format!("**nobody**, {}", finding.reach()), String::new()),
                },
            };
            let Fault { name, rule, breaks, .. } = fault;
            let _ = writeln!(table, "| `{name}` | {rule}: {breaks} | {caught} | {after} |");
        }
        table.push('\n');
        table
    }
}

/// The figures.
pub(crate) struct Summary {
    planted: usize,
    tried: usize,
    caught: usize,
    in_make_test: usize,
    median_seconds: f64,
}

impl Summary {
    /// Every fault that was tried was caught, nine in ten of them by what `make test` runs.
    pub(crate) fn all_caught(&self) -> bool {
        self.caught == self.tried && self.in_make_test * 10 >= self.tried * 9
    }

    pub(crate) fn text(&self) -> String {
        let Self { planted, tried, caught, in_make_test, median_seconds } = self;
        format!(
            "{planted} faults planted, {tried} tried: {caught} caught, {in_make_test} of them by \
             what `make test` runs; median {median_seconds:.1} s until a test went red."
        )
    }
}
