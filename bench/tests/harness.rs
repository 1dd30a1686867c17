//! The harness tested on a node in this process: a right node passes all checkers with the
//! coverage that the real tests demand, and each planted fault is caught by the checker that is
//! there for it. Without this, a green run against real nodes would prove little.

#[path = "support/fake.rs"]
mod fake;

use std::time::Duration;

use fake::{FakeNode, Faults};
use leasehold_bench::check::{self, Needs, Report, Verdict};
use leasehold_bench::contention::{Contention, Plan};
use leasehold_bench::finals;
use leasehold_bench::history::{History, Record, Recorder};
use leasehold_bench::load::{self, Mode};
use leasehold_bench::process;

const LIMIT: Duration = Duration::from_mins(1);

/// Contention on a fake node until there were so many grants, then the final state.
fn contend(faults: Faults, grants: u64) -> History {
    let node = FakeNode::start(faults);
    let recorder = Recorder::new();
    let (clients, keys, ttl_ms) = (12, 3, 1_000);
    let plan = Plan { clients, keys, ttl_ms, hold_ms_max: 3, abandon_in: 100, ..Plan::default() };
    let mut load = Contention::start(&[node.addr()], &recorder, &plan);
    let library = Plan { clients: 6, first_client: 100, ..plan };
    load.add_library_clients(&[node.addr()], &recorder, &library);
    assert!(load.progress(grants, LIMIT), "the load stands still");
    load.freeze();
    std::thread::sleep(Duration::from_millis(100));
    let end = finals::read(&[node.addr()], 0, LIMIT).expect("a final state");
    recorder.push(Record::Final(end));
    // One more renewal of everybody, so that all leases outlive the final state.
    std::thread::sleep(Duration::from_millis(500));
    load.end();
    recorder.history()
}

fn needs() -> Needs {
    Needs {
        handovers: 100,
        tokens: 100,
        expiries: 1,
        queued_grants: 50,
        acked: 300,
        ordered: 300,
        nodes: 1,
        ..Needs::default()
    }
}

fn verdict_of(reports: &[Report], guarantee: &str) -> Verdict {
    let report = reports.iter().find(|report| report.guarantee.starts_with(guarantee));
    report.expect("the guarantee has a checker").verdict()
}

#[test]
fn a_right_node_passes() {
    let _alone = process::alone();
    let reports = check::all(&contend(Faults::default(), 400), &needs());
    println!("{}", check::text(&reports));
    assert_eq!(check::worst(&reports), Verdict::Ok, "{}", check::text(&reports));
}

#[test]
fn lost_answers_are_retried_and_still_pass() {
    let _alone = process::alone();
    let faults = Faults { cut_every: 50, ..Faults::default() };
    let reports = check::all(&contend(faults, 400), &Needs { retries: 5, ..needs() });
    println!("{}", check::text(&reports));
    assert_eq!(check::worst(&reports), Verdict::Ok, "{}", check::text(&reports));
}

#[test]
fn forgotten_grants_are_caught_as_broken_exclusion() {
    let _alone = process::alone();
    let faults = Faults { forget_every: 20, ..Faults::default() };
    let reports = check::all(&contend(faults, 400), &needs());
    assert_eq!(verdict_of(&reports, "G1"), Verdict::Violation, "{}", check::text(&reports));
}

#[test]
fn leases_that_end_early_are_caught() {
    let _alone = process::alone();
    // Renewals come every third of the TTL: a fifth of it is over before.
    let faults = Faults { early_percent: 20, ..Faults::default() };
    let reports = check::all(&contend(faults, 200), &needs());
    assert_eq!(verdict_of(&reports, "G3"), Verdict::Violation, "{}", check::text(&reports));
}

#[test]
fn blind_reads_are_caught() {
    let _alone = process::alone();
    let faults = Faults { blind_every: 3, ..Faults::default() };
    let reports = check::all(&contend(faults, 400), &needs());
    assert_eq!(verdict_of(&reports, "G7"), Verdict::Violation, "{}", check::text(&reports));
}

fn plan(mode: Mode) -> load::Plan {
    load::Plan {
        mode,
        connections: 4,
        keys: 5_000,
        ttl_ms: 60_000,
        value_len: 16,
        warm_up_ms: 100,
        run_ms: 1_000,
    }
}

#[test]
fn the_open_loop_counts_a_stall_against_every_operation_that_was_due() {
    let _alone = process::alone();
    // The pause comes in the recorded part: after 800 answers, 400 ms of the load.
    let node = FakeNode::start(Faults { pause: Some((800, 400)), ..Faults::default() });
    let plan = plan(Mode::Open { ops_per_s: 2_000.0 });
    let outcome = load::run(node.addr(), plan).expect("the load runs");
    // Acquires were due all through the stall: well over a tenth of them waited for its end.
    assert!(outcome.acquire.p90_us > 50_000.0, "{:?}", outcome.acquire);
    assert!(outcome.acquire.count > 500, "{:?}", outcome.acquire);
    assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
}

#[test]
fn the_closed_loop_keeps_all_cycles_under_way() {
    let _alone = process::alone();
    let node = FakeNode::start(Faults::default());
    let outcome = load::run(node.addr(), plan(Mode::Closed { in_flight: 16 })).expect("it runs");
    assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
    assert!(outcome.operations > 200, "{outcome:?}");
    assert!(outcome.acquire.count.abs_diff(outcome.release.count) <= 64, "{outcome:?}");
}
