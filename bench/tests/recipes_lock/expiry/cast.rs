//! Who is gone, whom that makes room for, and who waits on.

use leasehold_protocol::command::Want;

use crate::bare::{exclusive, permits, shared};

/// Of the holders that ask for one.
const DELAY_MS: u32 = 500;

/// Who holds a key, or one of several, and who waits.
pub(super) struct Cast {
    pub(super) name: &'static str,
    /// The key whose last hold ends.
    pub(super) key: String,
    pub(super) holders: Vec<Want>,
    /// What the holders' loss is followed by.
    pub(super) delay_ms: u32,
    /// Those whom the end of the last hold makes room for.
    pub(super) woken: Vec<Vec<Want>>,
    /// Those who wait on behind them.
    pub(super) behind: Vec<Vec<Want>>,
}

pub(super) fn casts(round: usize) -> Vec<Cast> {
    let name = |key: &str| format!("gone/{round}/{key}");
    let pool = |key: &str, count| permits(key, count, 4);
    let mut casts = Vec::new();
    let key = name("writer");
    casts.push(Cast {
        name: "a writer before readers",
        holders: vec![exclusive(&key)],
        delay_ms: 0,
        woken: vec![vec![shared(&key)]; 6],
        behind: vec![vec![exclusive(&key)], vec![shared(&key)]],
        key,
    });
    let key = name("readers");
    casts.push(Cast {
        name: "the last of several readers before a writer",
        holders: vec![shared(&key); 3],
        delay_ms: 0,
        woken: vec![vec![exclusive(&key)]],
        behind: vec![vec![shared(&key)]],
        key,
    });
    let key = name("pool");
    casts.push(Cast {
        name: "permits before more of them",
        holders: vec![pool(&key, 3)],
        delay_ms: 0,
        woken: vec![vec![pool(&key, 2)], vec![pool(&key, 1)]],
        behind: vec![vec![pool(&key, 2)]],
        key,
    });
    let [a, b, c, d] = ["a", "b", "c", "d"].map(name);
    casts.push(Cast {
        name: "one of several keys before all of them",
        holders: vec![exclusive(&b)],
        delay_ms: 0,
        woken: vec![vec![exclusive(&a), exclusive(&b), exclusive(&c)]],
        behind: vec![vec![exclusive(&c), exclusive(&d)]],
        key: b,
    });
    let key = name("delayed");
    casts.push(Cast {
        name: "a lock-delay before readers",
        holders: vec![exclusive(&key)],
        delay_ms: DELAY_MS,
        woken: vec![vec![shared(&key)]; 3],
        behind: vec![vec![exclusive(&key)]],
        key,
    });
    casts
}
