//! Walks that a new leader makes over what it inherited: they go on while the state changes.

use leasehold_core::State;
use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, ShardId, Token};
use leasehold_protocol::outcome::Outcome;

const SECRET: Secret = Secret([1; 16]);
const WAITERS: u64 = 300;

fn apply(state: &mut State, command: &Command) -> Outcome {
    state.apply(0, command, &mut Vec::new())
}

fn caller(lease: LeaseId, number: u64) -> Caller {
    let (number, floor) = (Number(number), Number(number - 1));
    Caller { lease, secret: SECRET, number, floor, acks: vec![] }
}

fn open(state: &mut State) -> LeaseId {
    let open = Command::Open { ttl_ms: 15_000, secret: SECRET, label: vec![] };
    match apply(state, &open) {
        Outcome::Opened { lease, .. } => lease,
        outcome => panic!("no lease: {outcome:?}"),
    }
}

fn acquire(lease: LeaseId, number: u64, key: &[u8], wait_ms: u32) -> Command {
    let (mode, own, value, key) = (Mode::EXCLUSIVE, None, vec![], key.to_vec());
    Command::Acquire { caller: caller(lease, number), key, mode, own, value, wait_ms }
}

/// One lease holds `waited` and a hundred keys that nobody waits for; others wait in order.
fn crowded() -> (State, LeaseId, Token, Vec<LeaseId>) {
    let mut state = State::new(ShardId(0));
    apply(&mut state, &Command::Begin { token_base: Token(1 << 50) });
    let holder = open(&mut state);
    let Outcome::Granted(grant) = apply(&mut state, &acquire(holder, 1, b"waited", 0)) else {
        panic!("the key is free")
    };
    for number in 0..100 {
        let key = format!("alone/{number}").into_bytes();
        let outcome = apply(&mut state, &acquire(holder, 4 + 3 * number, &key, 0));
        assert!(matches!(outcome, Outcome::Granted(_)), "{outcome:?}");
    }
    let waiters: Vec<LeaseId> = (0..WAITERS).map(|_| open(&mut state)).collect();
    for (place, lease) in waiters.iter().enumerate() {
        let outcome = apply(&mut state, &acquire(*lease, 1, b"waited", 1 + place as u32));
        assert!(matches!(outcome, Outcome::Queued { .. }), "{outcome:?}");
    }
    (state, holder, grant.token, waiters)
}

#[test]
fn a_walk_sees_the_waits_of_its_beginning_step_by_step() {
    let (mut state, holder, token, waiters) = crowded();
    let mut walk = state.walk_waits();
    let mut seen: Vec<_> = walk.by_ref().take(150).collect();
    // The state goes on meanwhile: the first waiter is granted, one leaves, one comes.
    let caller = caller(holder, 3);
    let release = Command::Release { caller, key: b"waited".to_vec(), token };
    assert!(matches!(apply(&mut state, &release), Outcome::Released { .. }));
    apply(&mut state, &Command::Close { lease: waiters[200], secret: SECRET });
    let late = open(&mut state);
    apply(&mut state, &acquire(late, 1, b"waited", 9));
    seen.extend(walk);

    let keys = seen.iter().filter(|step| step.is_none()).count();
    assert_eq!(keys, 101, "a key that nobody waits for is a step, too");
    let seen: Vec<_> = seen.into_iter().flatten().collect();
    let expected: Vec<_> =
        waiters.iter().zip(1..).map(|(lease, wait_ms)| (*lease, Number(1), wait_ms)).collect();
    assert_eq!(seen, expected);
    let now: Vec<_> = state.walk_waits().flatten().map(|(lease, ..)| lease).collect();
    assert_eq!(now.len() as u64, WAITERS - 1);
    assert!(!now.contains(&waiters[0]) && !now.contains(&waiters[200]) && now.contains(&late));
}

#[test]
fn a_walk_sees_what_was_forced() {
    let (mut state, holder, token, _) = crowded();
    let (who, why) = (b"me".to_vec(), b"test".to_vec());
    let force = Command::ForceRelease { key: b"waited".to_vec(), token, who, why, now: false };
    apply(&mut state, &force);
    let walk = state.walk_forced();
    assert!(state.is_forced(token));
    apply(&mut state, &Command::EndForced { key: b"waited".to_vec(), token });
    assert!(!state.is_forced(token));
    assert_eq!(walk.collect::<Vec<_>>(), [(b"waited".to_vec(), token, holder)]);
    assert_eq!(state.walk_forced().count(), 0);
}

#[test]
fn the_holders_of_a_key_come_in_pages() {
    let mut state = State::new(ShardId(0));
    apply(&mut state, &Command::Begin { token_base: Token(1 << 50) });
    let holders: Vec<LeaseId> = (0..300).map(|_| open(&mut state)).collect();
    for lease in &holders {
        let (caller, key) = (caller(*lease, 1), b"k".to_vec());
        let (mode, own, value, wait_ms) = (Mode::SHARED, None, vec![], 0);
        let shared = Command::Acquire { caller, key, mode, own, value, wait_ms };
        assert!(matches!(apply(&mut state, &shared), Outcome::Granted(_)));
    }
    let (mut seen, mut pages, mut after) = (Vec::new(), Vec::new(), LeaseId(0));
    for _ in 0..3 {
        let info = state.key_info_after(b"k", after);
        assert_eq!(info.holders_total, 300);
        pages.push(info.holders.len());
        after = info.holders.last().map_or(after, |last| last.lease);
        seen.extend(info.holders.iter().map(|holder| holder.lease));
    }
    assert_eq!((seen, pages), (holders, vec![256, 44, 0]));
    let (keys, more) = state.list(b"", b"", 10);
    assert_eq!((keys[0].holders.len(), keys[0].holders_total, more), (256, 300, false));
}
