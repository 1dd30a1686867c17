//! Random commands against the naive model (`model/naive.rs`), with shrinking.
//!
//! After every command: same outcome, same events, same revision, same holders, queues and
//! versions; invariants hold (the recomputed digest among them). Every few commands the state goes
//! through a snapshot and the run continues on the copy; a snapshot begun at one point and taken
//! while commands went on must be the state of that point.
//!
//! The commands are drawn so that retries, conflicts, early cancels, floors, own leases and forced
//! ends really happen; the run fails if one of the listed situations never came up. The same
//! cases each time; `MODEL_CASES` draws more, `MODEL_SEED` draws others.

use std::cell::RefCell;
use std::collections::BTreeMap;

use leasehold_core::snapshot::{Decoder, Encoder};
use leasehold_core::{State, invariants};
use leasehold_protocol::event::Event;
use leasehold_protocol::ids::{LeaseId, Number, Revision, ShardId};
use leasehold_protocol::outcome::Outcome;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

#[path = "model/draw.rs"]
mod draw;
#[path = "model/draw_members.rs"]
mod draw_members;
#[path = "model/naive.rs"]
mod naive;

use draw::{Driver, Op};
use naive::Model;

const CASES: u32 = 3_000;
const OPS_MAX: usize = 170;
const SNAPSHOT_EVERY: usize = 16;

type Coverage = BTreeMap<String, u64>;

/// What the run must have seen, beside one outcome of each kind.
const REQUIRED: &[&str] = &[
    "acquire: granted",
    "acquire: queued",
    "acquire: cancelled",
    "acquire: timed_out",
    "acquire: refused held",
    "acquire: refused already_held",
    "acquire: refused already_queued",
    "acquire: refused cancelled",
    "acquire: refused number_conflict",
    "acquire: refused number_below_floor",
    "acquire: refused number_beyond_window",
    "acquire: refused lease_dead",
    "acquire: refused bad_secret",
    "cancel: cancelled",
    "cancel: granted",
    "cancel: released",
    "cancel: refused not_queued",
    "cancel: refused held",
    "cancel: timed_out",
    "cancel: refused number_below_floor",
    "cancel: refused number_conflict",
    "release: released",
    "release: refused not_owner",
    "release: refused number_below_floor",
    "release: refused number_conflict",
    "release_own: released",
    "release_own: refused not_owner",
    "release_own: refused lease_dead",
    "release_own: refused bad_secret",
    "close: closed",
    "close: refused lease_dead",
    "expire: closed",
    "force_release: forced",
    "force_release: refused not_owner",
    "end_forced: forced",
    "end_forced: refused not_owner",
    "time_out: timed_out",
    "time_out: refused not_queued",
    "convert: changed",
    "convert: granted",
    "convert: refused not_owner",
    "convert: refused upgrade_conflict",
    "convert: refused hold_forced",
    "convert: refused number_conflict",
    "acquire_all: granted",
    "acquire_all: queued",
    "acquire_all: refused held",
    "acquire_all: refused already_held",
    "acquire_all: refused delayed",
    "acquire_all: refused hold_forced",
    "acquire_all: refused limit_mismatch",
    "acquire_all: refused mode_mismatch",
    "acquire_all: refused number_conflict",
    "acquire: refused delayed",
    "acquire: refused mode_mismatch",
    "release: changed",
    "cancel: changed",
    "convert: refused mode_mismatch",
    "convert: refused hold_reentered",
    "convert: refused delayed",
    "set_limit: changed",
    "set_limit: refused mode_mismatch",
    "set_limit: refused not_in_use",
    "set_value: changed",
    "set_value: refused not_owner",
    "set_value: refused number_conflict",
    "ask_yield: changed",
    "ask_yield: refused not_owner",
    "acquire_several: granted",
    "acquire_several: queued",
    "acquire_several: refused held",
    "acquire_several: refused delayed",
    "acquire_several: refused already_held",
    "acquire_several: refused already_queued",
    "acquire_several: refused mode_mismatch",
    "acquire_several: refused limit_mismatch",
    "acquire_several: refused number_conflict",
    "release_all: released",
    "release_all: changed",
    "release_all: refused not_owner",
    "release_all: refused number_conflict",
    "seen: a free key that waits for another",
    "seen: a hand-over of several keys",
    "seen: two hand-overs of several keys in a step",
    "seen: the end of a wait for several keys lets others in",
    "seen: a lowered limit refuses who waits for several keys",
    "seen: asked twice, told once",
    "end_delay: changed",
    "end_delay: refused not_delayed",
    "seen: a changed limit lets waiters in",
    "seen: a lowered limit refuses who waits",
    "seen: the end of a delay lets waiters in",
    "seen: more permits than a lowered limit",
    "seen: a grant of several slots",
    "seen: a semaphore with holds and a delay",
    "seen: a cancel that gives an entry back",
    "seen: a release that gives an entry back",
    "seen: an entry that inherits the hold",
    "seen: the end of a hold with several entries",
    "begin_restored: begun",
    "end_quarantine: changed",
    "end_quarantine: refused already_begun",
    "acquire: refused quarantined",
    "acquire_all: refused quarantined",
    "seen: several readers let in at once",
    "seen: three readers",
    "seen: a downgrade that lets readers in",
    "seen: an upgrade past a queue",
    "seen: a reader behind a waiting writer",
    "seen: the end of a waiting writer lets readers in",
    "begin: begun",
    "begin: refused already_begun",
    "open: opened",
    "open: refused not_ready",
    "member: members",
    "member: refused already_begun",
    "member: refused not_ready",
    "member: refused member_change_under_way",
    "member: refused member_change_over",
    "member: refused node_id_used",
    "member: refused not_a_member",
    "member: refused last_voter",
    "member: refused too_many_members",
    "member: refused bad_combination",
    "seen: a change of members that was joined",
    "seen: a node that came",
    "seen: a node that went",
    "seen: a node that took another's place",
    "seen: a change of members that was undone",
    "seen: a change of members that was given up in the vote",
    "seen: a fence that rose",
    "seen: a retry that changed nothing",
    "seen: a cancel before its acquire",
    "seen: a late cancel executed",
    "seen: a late release executed",
    "seen: a hand-over to an own lease",
    "seen: a hand-over on expiry",
    "seen: a floor that passed a wait",
    "seen: a forced hold released by its client",
    "seen: an own lease expired",
];

fn count(coverage: &RefCell<Coverage>, name: &str) {
    *coverage.borrow_mut().entry(name.to_owned()).or_default() += 1;
}

fn snapshot(encoder: Encoder) -> State {
    let mut decoder = Decoder::new();
    for chunk in encoder {
        decoder.feed(&chunk).expect("an own snapshot");
    }
    decoder.finish().expect("an own snapshot")
}

/// What can be read of the state equals the model.
fn compare(state: &State, model: &Model, keys: &[&[u8]]) -> Result<(), TestCaseError> {
    prop_assert_eq!(state.last_token().0, model.token);
    prop_assert_eq!(state.leases_len(), model.leases.len());
    prop_assert_eq!(state.keys_len(), model.keys.len());
    naive::members::differs(&model.members, state.members()).map_err(TestCaseError::fail)?;
    for lease in &model.leases {
        let view = state.lease(lease.id).expect("the model says it is live");
        prop_assert_eq!(view.version().0, lease.version);
        prop_assert_eq!(view.own_lease(), lease.own);
        for (number, memory) in &lease.memory {
            let result = state.wait_result(lease.id, Number(*number));
            if memory.result.is_some() {
                prop_assert_eq!(result, memory.result);
            } else {
                let queued = matches!(result, Some(Outcome::Queued { .. }));
                prop_assert!(queued, "{:?} of a waiting acquire", result);
            }
        }
    }
    for key in keys {
        let info = state.key_info(key);
        let holders = info.holders.into_iter().map(|one| {
            let what = (one.entries as usize, one.slots, one.value);
            (one.lease, one.token, one.number, one.mode, one.forced, what, one.asked.is_some())
        });
        let holders: Vec<_> = holders.collect();
        let waiters: Vec<_> =
            info.waiters.iter().map(|one| (one.lease, one.number, one.mode)).collect();
        let entry = model.keys.get(*key).cloned().unwrap_or_default();
        let expected = entry.holders.iter().map(|one| {
            let what = (1 + one.again.len(), naive::packed(&one.slots), one.value.clone());
            let forced = one.forced.is_some();
            (one.lease, one.token, one.number, one.mode, forced, what, one.asked.is_some())
        });
        let expected: Vec<_> = expected.collect();
        prop_assert_eq!(holders, expected);
        let expected: Vec<_> =
            entry.queue.iter().map(|one| (one.lease, one.number, one.mode)).collect();
        prop_assert_eq!(waiters, expected);
        let delays: Vec<_> = info.delays.iter().map(|one| (one.token, one.delay_ms)).collect();
        let expected: Vec<_> = entry.ghosts.iter().map(|one| (one.token, one.delay_ms)).collect();
        prop_assert_eq!(delays, expected);
        prop_assert_eq!(info.limit, entry.limit);
        let end = info.last_end.map(|end| (end.lease, end.token, end.reason, end.revision));
        prop_assert_eq!(end.as_ref(), model.ends.get(*key));
    }
    Ok(())
}

fn run_case(ops: &[Op], coverage: &RefCell<Coverage>) -> Result<(), TestCaseError> {
    let mut state = State::new(ShardId(0));
    let mut model = Model::default();
    let mut revision = 0;
    let mut driver = Driver::default();
    let mut frozen: Option<(u64, Encoder)> = None;
    for (step, op) in ops.iter().enumerate() {
        let command = driver.command(step, *op, &model);
        let wall_ms = 1_000 + step as u64;
        let before = (model.clone(), state.digest(), revision);

        let mut events = Vec::new();
        let outcome = state.apply(wall_ms, &command, &mut events);
        let (expected, kinds) = naive::apply(&mut model, &mut revision, wall_ms, &command);

        prop_assert_eq!(outcome, expected, "step {} {:?}", step, command);
        let kinds: Vec<_> =
            kinds.into_iter().map(|kind| Event { revision: Revision(revision), kind }).collect();
        prop_assert_eq!(&events, &kinds, "step {} {:?}", step, command);
        prop_assert_eq!(state.revision().0, revision, "step {} {:?}", step, command);
        prop_assert_eq!(state.digest() == before.1, revision == before.2, "step {}", step);
        compare(&state, &model, &draw::keys())?;
        invariants::check(&state).map_err(|text| TestCaseError::fail(format!("{step}: {text}")))?;

        driver.note(&command, &outcome, &events);
        draw::cover(&command, &outcome, &events, (&before.0, &model), |name| {
            count(coverage, name);
        });
        if step % SNAPSHOT_EVERY == 3 {
            frozen = Some((state.digest(), Encoder::new(&state)));
        }
        if step % SNAPSHOT_EVERY == SNAPSHOT_EVERY - 1 {
            if let Some((digest, encoder)) = frozen.take() {
                prop_assert_eq!(snapshot(encoder).digest(), digest, "a frozen view changed");
            }
            state = snapshot(Encoder::new(&state));
        }
    }
    Ok(())
}

#[test]
fn the_state_machine_agrees_with_the_naive_model() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let cases = number("MODEL_CASES").map_or(CASES, |cases| cases as u32);
    let mut seed = [0; 32];
    seed[..8].copy_from_slice(&number("MODEL_SEED").unwrap_or(1).to_le_bytes());
    let config =
        Config { cases, max_shrink_iters: 20_000, failure_persistence: None, ..Config::default() };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let coverage = RefCell::new(Coverage::new());
    let ops = prop::collection::vec(any::<Op>(), 1..OPS_MAX);
    if let Err(error) = runner.run(&ops, |ops| run_case(&ops, &coverage)) {
        panic!("{error}");
    }
    let coverage = coverage.into_inner();
    for (name, count) in &coverage {
        println!("{count:>8} {name}");
    }
    let missing: Vec<_> = REQUIRED.iter().filter(|name| !coverage.contains_key(**name)).collect();
    assert!(missing.is_empty(), "never happened: {missing:#?}");
}

/// The model itself once, by hand: a checker that accepts anything would show here.
#[test]
fn the_model_refuses_what_the_design_refuses() {
    let mut model = Model::default();
    let mut revision = 0;
    let open = leasehold_protocol::command::Command::Expire { lease: LeaseId(1) };
    let (outcome, events) = naive::apply(&mut model, &mut revision, 0, &open);
    assert!(matches!(outcome, Outcome::Refused { code, .. } if code.name() == "not_ready"));
    assert!(events.is_empty());
    assert_eq!(revision, 0);
}
