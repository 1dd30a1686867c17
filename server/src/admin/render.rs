//! The metrics as Prometheus reads them (text format 0.0.4).

use std::collections::VecDeque;
use std::fmt::Write;

use super::health::SHARD_FAMILIES;
use super::histogram::Counts;
use super::metrics::{Counter, Distribution, Gauge, Metrics, Spec};

/// Samples kept for recent quantiles: with one every 15 s, the last minute.
const SAMPLES_MAX: usize = 5;
const QUANTILES: [f64; 4] = [0.5, 0.99, 0.999, 1.0];
/// Upper bounds of a histogram's buckets, in the units shown.
const BOUNDS_SECONDS: [f64; 17] = [
    0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
    2.0, 5.0, 10.0,
];
const BOUNDS_COUNT: [f64; 11] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];

/// Earlier states of the distributions, so that quantiles tell of the last minute and not of the
/// whole life of the process.
#[derive(Debug, Default)]
pub(super) struct Recent {
    samples: VecDeque<Vec<Counts>>,
}

impl Recent {
    /// Keeps the present state; called every 15 s.
    pub(super) fn sample(&mut self, metrics: &Metrics) {
        self.samples.truncate(SAMPLES_MAX - 1);
        let all = (0..Distribution::TABLE.len()).map(|index| metrics.merged(index));
        self.samples.push_front(all.collect());
    }

    fn oldest(&self, distribution: usize) -> Option<&Counts> {
        self.samples.back().map(|sample| &sample[distribution])
    }
}

/// The whole page.
pub(super) fn page(metrics: &Metrics, recent: &Recent) -> String {
    let mut page = String::with_capacity(16 * 1024);
    let version = env!("CARGO_PKG_VERSION");
    header(&mut page, "leasehold_build_info", "Always 1; its label tells the version.", "gauge");
    let _ = writeln!(page, "leasehold_build_info{{version=\"{version}\"}} 1");
    families(&mut page, Counter::TABLE, "counter", metrics.cores().len(), |core, index| {
        metrics.cores()[core].counter(index) as f64
    });
    families(&mut page, Gauge::TABLE, "gauge", metrics.cores().len(), |core, index| {
        metrics.cores()[core].gauge(index) as f64
    });
    for family in SHARD_FAMILIES {
        let name = family.name;
        header(&mut page, name, family.help, "gauge");
        for (shard, value) in metrics.health().values(family).enumerate() {
            let _ = writeln!(page, "{name}{{shard=\"{shard}\"}} {value}");
        }
    }
    distributions(&mut page, metrics, recent);
    page
}

fn distributions(page: &mut String, metrics: &Metrics, recent: &Recent) {
    let table = Distribution::TABLE;
    let counts: Vec<Counts> = (0..table.len()).map(|index| metrics.merged(index)).collect();
    let mut next = 0;
    for family in table.chunk_by(|one, other| one.name == other.name) {
        let indexes = next..next + family.len();
        next = indexes.end;
        let Spec { name, help, .. } = family[0];
        header(page, name, help, "histogram");
        for index in indexes.clone() {
            histogram(page, &table[index], &counts[index]);
        }
        let name = format!("{name}_recent");
        header(page, &name, &format!("Quantiles of the last minute. {help}"), "gauge");
        for index in indexes {
            quantiles(page, &table[index], &counts[index], recent.oldest(index));
        }
    }
}

/// Every metric as a row of a table in Markdown.
pub(crate) fn catalogue() -> String {
    let mut rows = String::new();
    let mut last = "";
    let table = |kind, table: &'static [Spec]| table.iter().map(move |spec| (kind, spec));
    for (kind, Spec { name, label, help, .. }) in
        table("counter", Counter::TABLE).chain(table("gauge", Gauge::TABLE))
    {
        if *name != last {
            let label =
                label.split_once('=').map_or(String::new(), |(name, _)| format!(", {name}"));
            let _ = writeln!(rows, "| `{name}` | {kind} | core{label} | {help} |");
            last = name;
        }
    }
    for family in SHARD_FAMILIES {
        let _ = writeln!(rows, "| `{}` | gauge | shard | {} |", family.name, family.help);
    }
    for family in Distribution::TABLE.chunk_by(|one, other| one.name == other.name) {
        let Spec { name, label, help, .. } = family[0];
        let label = label.split_once('=').map_or(String::new(), |(name, _)| format!("{name}, "));
        let _ = writeln!(rows, "| `{name}` | histogram | {label}le | {help} |");
        let recent = "The same, last minute.";
        let _ = writeln!(rows, "| `{name}_recent` | gauge | {label}quantile | {recent} |");
    }
    rows
}

fn families(
    page: &mut String,
    table: &[Spec],
    kind: &str,
    cores: usize,
    value: impl Fn(usize, usize) -> f64,
) {
    let mut family = "";
    for (index, spec) in table.iter().enumerate() {
        if spec.name != family {
            family = spec.name;
            header(page, family, spec.help, kind);
        }
        let comma = if spec.label.is_empty() { "" } else { "," };
        for core in 0..cores {
            let value = value(core, index) * spec.scale;
            let _ = writeln!(page, "{family}{{core=\"{core}\"{comma}{}}} {value}", spec.label);
        }
    }
}

/// A label and what separates it from the next one.
fn labels(spec: &Spec) -> String {
    if spec.label.is_empty() { String::new() } else { format!("{},", spec.label) }
}

fn histogram(page: &mut String, spec: &Spec, counts: &Counts) {
    let (name, labels) = (spec.name, labels(spec));
    let bounds: &[f64] = if spec.scale < 1.0 { &BOUNDS_SECONDS } else { &BOUNDS_COUNT };
    for bound in bounds {
        let count = counts.at_most((bound / spec.scale).round() as u64);
        let _ = writeln!(page, "{name}_bucket{{{labels}le=\"{bound}\"}} {count}");
    }
    let total = counts.total();
    let _ = writeln!(page, "{name}_bucket{{{labels}le=\"+Inf\"}} {total}");
    let own = if spec.label.is_empty() { String::new() } else { format!("{{{}}}", spec.label) };
    let _ = writeln!(page, "{name}_sum{own} {}", counts.sum as f64 * spec.scale);
    let _ = writeln!(page, "{name}_count{own} {total}");
}

fn quantiles(page: &mut String, spec: &Spec, counts: &Counts, oldest: Option<&Counts>) {
    let recent = oldest.map_or_else(|| counts.since(&Counts::empty()), |then| counts.since(then));
    let (name, labels) = (spec.name, labels(spec));
    for quantile in QUANTILES {
        // Nothing recorded has no quantile, which is not the same as zero.
        let value = match recent.len() {
            0 => f64::NAN,
            _ => recent.value_at_quantile(quantile) as f64 * spec.scale,
        };
        let _ = writeln!(page, "{name}_recent{{{labels}quantile=\"{quantile}\"}} {value}");
    }
}

fn header(page: &mut String, name: &str, help: &str, kind: &str) {
    let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::admin::ShardReport;
    use leasehold_protocol::ids::NodeId;

    fn value(page: &str, series: &str) -> f64 {
        let line = page.lines().find(|line| line.strip_prefix(series).is_some_and(is_value));
        line.unwrap_or_else(|| panic!("no {series} in\n{page}"))
            .rsplit(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap()
    }

    fn is_value(rest: &str) -> bool {
        rest.starts_with(' ')
    }

    #[test]
    fn every_kind_of_metric_is_shown_in_its_unit() {
        let metrics = Metrics::new(2, 1);
        metrics.handle(1).add(Counter::RequestAcquire, 5);
        metrics.handle(0).set(Gauge::WalWriteAmplification, 1500);
        metrics.handle(0).shift(Gauge::ConnectionsClient, 3);
        metrics.handle(0).shift(Gauge::ConnectionsClient, -1);
        metrics.handle(0).record(Distribution::WalSync, 90_000);
        metrics.handle(1).record(Distribution::WalSync, 3_000_000);
        metrics.handle(1).record(Distribution::TookRenew, 400_000);
        let leader = Some(NodeId(7));
        metrics.health().report(0, &ShardReport { leader, ..ShardReport::default() });
        let page = page(&metrics, &Recent::default());
        for (series, expected) in [
            ("leasehold_requests_total{core=\"1\",kind=\"acquire\"}", 5.0),
            ("leasehold_requests_total{core=\"0\",kind=\"acquire\"}", 0.0),
            ("leasehold_wal_write_amplification{core=\"0\"}", 1.5),
            ("leasehold_connections{core=\"0\",port=\"client\"}", 2.0),
            ("leasehold_shard_leader{shard=\"0\"}", 7.0),
            ("leasehold_wal_sync_seconds_bucket{le=\"0.00005\"}", 0.0),
            ("leasehold_wal_sync_seconds_bucket{le=\"0.0001\"}", 1.0),
            ("leasehold_wal_sync_seconds_bucket{le=\"0.005\"}", 2.0),
            ("leasehold_wal_sync_seconds_bucket{le=\"+Inf\"}", 2.0),
            ("leasehold_wal_sync_seconds_count", 2.0),
            ("leasehold_request_seconds_bucket{kind=\"renew\",le=\"0.0005\"}", 1.0),
            ("leasehold_request_seconds_bucket{kind=\"get\",le=\"+Inf\"}", 0.0),
            ("leasehold_request_seconds_count{kind=\"renew\"}", 1.0),
            ("leasehold_request_seconds_sum{kind=\"renew\"}", 0.000_4),
        ] {
            assert!((value(&page, series) - expected).abs() < 1e-9, "{series}");
        }
        assert!((value(&page, "leasehold_wal_sync_seconds_sum") - 0.003_09).abs() < 1e-9);
        let longest = "leasehold_request_seconds_recent{kind=\"renew\",quantile=\"1\"}";
        assert!((0.000_4..0.000_42).contains(&value(&page, longest)));
        let median = value(&page, "leasehold_wal_sync_seconds_recent{quantile=\"0.5\"}");
        assert!((0.000_09..0.000_093).contains(&median), "{median}");
        assert!(value(&page, "leasehold_commit_seconds_recent{quantile=\"0.5\"}").is_nan());
    }

    #[test]
    fn quantiles_forget_what_is_older_than_the_samples() {
        let metrics = Metrics::new(1, 1);
        let mut recent = Recent::default();
        metrics.handle(0).record(Distribution::WalSync, 1_000_000_000);
        for _ in 0..SAMPLES_MAX {
            recent.sample(&metrics);
        }
        metrics.handle(0).record(Distribution::WalSync, 1000);
        let page = page(&metrics, &recent);
        let most = value(&page, "leasehold_wal_sync_seconds_recent{quantile=\"1\"}");
        assert!(most < 0.000_002, "{most}");
    }

    #[test]
    fn names_and_helps_follow_the_rules_and_each_series_is_there_once() {
        let page = page(&Metrics::new(2, 2), &Recent::default());
        let mut series = BTreeSet::new();
        let mut helped = BTreeSet::new();
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').unwrap();
                assert!(name.starts_with("leasehold_") && help.ends_with('.'), "{line}");
                assert!(helped.insert(name.to_owned()), "two families {name}");
            } else if !line.starts_with('#') {
                let (name, _) = line.rsplit_once(' ').unwrap();
                assert!(series.insert(name.to_owned()), "{name} twice");
            }
        }
        for spec in Counter::TABLE {
            assert!(spec.name.ends_with("_total"), "{}", spec.name);
        }
    }
}
