//! Five queues at once: who holds, who waits patiently, and who comes and goes.

use leasehold_protocol::command::Want;

use crate::bare::{exclusive, permits, shared};

/// A key on which the second of these waiters waits for the first ones alone.
pub(super) const BETWEEN: &str = "drift/c";

/// Who wants what of one key, or of several together.
pub(super) struct Cast {
    pub(super) name: &'static str,
    pub(super) holder: Vec<Want>,
    pub(super) patient: Vec<Want>,
    /// They come and go behind the patient one.
    pub(super) hasty: [Vec<Want>; 3],
    /// Waits for what the hasty ones alone keep busy.
    pub(super) heir: Option<Vec<Want>>,
    /// Comes when all others are gone.
    pub(super) fresh: Vec<Want>,
}

pub(super) fn casts() -> [Cast; 5] {
    let [lock, read, write] = ["drift/lock", "drift/read", "drift/write"];
    let pool = |count| vec![permits("drift/pool", count, 4)];
    let [a, b, c] = ["drift/a", "drift/b", BETWEEN];
    let one = |want: fn(&str) -> Want, key| vec![want(key)];
    [
        Cast {
            name: "exclusive",
            holder: one(exclusive, lock),
            patient: one(exclusive, lock),
            hasty: [(); 3].map(|()| one(exclusive, lock)),
            heir: None,
            fresh: one(exclusive, lock),
        },
        Cast {
            name: "a writer among readers",
            holder: one(shared, read),
            patient: one(exclusive, read),
            hasty: [one(shared, read), one(exclusive, read), one(shared, read)],
            heir: None,
            fresh: one(shared, read),
        },
        Cast {
            name: "a reader among writers",
            holder: one(exclusive, write),
            patient: one(shared, write),
            hasty: [one(exclusive, write), one(shared, write), one(exclusive, write)],
            heir: None,
            fresh: one(exclusive, write),
        },
        Cast {
            name: "permits",
            holder: pool(3),
            patient: pool(4),
            // One permit is free all the time, and not for them.
            hasty: [pool(1), pool(4), pool(1)],
            heir: None,
            fresh: pool(3),
        },
        Cast {
            name: "several keys",
            holder: vec![exclusive(b)],
            patient: vec![exclusive(a), exclusive(b)],
            hasty: [
                vec![exclusive(b), exclusive(c)],
                vec![exclusive(a), shared(c)],
                vec![exclusive(b), shared(c)],
            ],
            heir: Some(vec![exclusive(c)]),
            fresh: vec![exclusive(c), exclusive(b), exclusive(a)],
        },
    ]
}
