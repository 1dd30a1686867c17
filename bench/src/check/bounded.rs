//! G9 bounded: nothing was ever fuller than its stated limit.

use crate::history::History;

use super::{Needs, Report};

/// Judges a history.
pub fn check(history: &History, needs: &Needs) -> Report {
    let mut report = Report::new("G9 bounded");
    let mut peaks = 0;
    for peak in history.peaks() {
        peaks += u64::from(peak.seen > 0);
        if peak.seen > peak.limit {
            report.violation(format!(
                "node {}: {} reached {}, more than its limit of {}",
                peak.node, peak.name, peak.seen, peak.limit
            ));
        }
    }
    report.cover("peaks", peaks, needs.peaks);
    report
}

#[cfg(test)]
mod tests {
    use super::super::build::Run;
    use super::super::{Needs, Verdict};
    use super::check;
    use crate::history::{Peak, Record};

    fn verdict(seen: u64) -> Verdict {
        let mut run = Run::new();
        run.record(Record::Peak(Peak { node: 1, name: "waits".into(), seen, limit: 5 }));
        check(&run.history(), &Needs { peaks: 1, ..Needs::default() }).verdict()
    }

    #[test]
    fn a_peak_above_its_limit_is_caught_and_an_unused_thing_proves_nothing() {
        assert_eq!(verdict(5), Verdict::Ok);
        assert_eq!(verdict(6), Verdict::Violation);
        assert_eq!(verdict(0), Verdict::Invalid);
    }
}
