//! Answers to other cores, in order. A full lane must neither hold this core nor lose an answer,
//! nor let a later answer overtake: what does not fit waits here, and a task sends it on.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use openraft::AsyncRuntime;

use super::router::{Hop, Hops};
use crate::env::Env;

/// How long a task waits for room before it looks again.
const PAUSE: Duration = Duration::from_millis(1);
/// So many looks without any room mean that the other core is gone for longer than any request
/// waits.
const LOOKS_MAX: u32 = 60_000;
/// With so many answers waiting, watches are told no more.
const LATE_MAX: usize = 4096;

/// See the module.
pub(super) struct Lanes {
    hops: Rc<dyn Hops>,
    late: RefCell<BTreeMap<usize, VecDeque<Hop>>>,
}

impl Lanes {
    pub(super) fn new(hops: Rc<dyn Hops>) -> Rc<Self> {
        Rc::new(Self { hops, late: RefCell::default() })
    }

    /// Sends now, or gives the message back.
    pub(super) fn send(&self, core: usize, hop: Hop) -> Result<(), Hop> {
        self.hops.send(core, hop)
    }

    /// There is room for what may be dropped.
    pub(super) fn has_room(&self, core: usize) -> bool {
        self.late.borrow().get(&core).is_none_or(|late| late.len() < LATE_MAX)
    }

    /// Sends now or later, after all that was given to this function before.
    pub(super) fn send_in_order<E: Env>(self: &Rc<Self>, core: usize, hop: Hop) {
        let mut late = self.late.borrow_mut();
        if let Some(waiting) = late.get_mut(&core) {
            return waiting.push_back(hop);
        }
        if let Err(hop) = self.hops.send(core, hop) {
            late.insert(core, VecDeque::from([hop]));
            drop(E::Rt::spawn(Rc::clone(self).send_late::<E>(core)));
        }
    }

    async fn send_late<E: Env>(self: Rc<Self>, core: usize) {
        let mut looks = 0;
        while looks < LOOKS_MAX {
            let Some(hop) = self.next_late(core) else { return };
            match self.hops.send(core, hop) {
                Ok(()) => looks = 0,
                Err(hop) => {
                    if let Some(waiting) = self.late.borrow_mut().get_mut(&core) {
                        waiting.push_front(hop);
                    }
                    looks += 1;
                    E::Rt::sleep(PAUSE).await;
                }
            }
        }
        self.late.borrow_mut().remove(&core);
    }

    /// The next message; when there is none, messages go the straight way again.
    fn next_late(&self, core: usize) -> Option<Hop> {
        let mut late = self.late.borrow_mut();
        let next = late.get_mut(&core).and_then(VecDeque::pop_front);
        if next.is_none() {
            late.remove(&core);
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use leasehold_protocol::reply::Reply;

    use super::*;
    use crate::raft::suite::SimEnv;
    use crate::rt::sim::SimRt;

    /// A lane that has room only as often as it is given some.
    #[derive(Default)]
    struct Narrow {
        room: Cell<usize>,
        sent: RefCell<Vec<u64>>,
    }

    impl Hops for Narrow {
        fn send(&self, _core: usize, hop: Hop) -> Result<(), Hop> {
            let Hop::Reply { id, .. } = hop else { unreachable!("only answers are sent") };
            if self.room.get() == 0 {
                return Err(hop);
            }
            self.room.set(self.room.get() - 1);
            self.sent.borrow_mut().push(id);
            Ok(())
        }
    }

    #[test]
    fn an_answer_that_has_to_wait_is_not_overtaken_by_a_later_one() {
        let narrow = Rc::new(Narrow::default());
        let lanes = Lanes::new(Rc::clone(&narrow) as Rc<dyn Hops>);
        let answer = |id| Hop::Reply { id, reply: Box::new(Reply::Pong) };
        SimRt::new(1).block_on(async {
            narrow.room.set(1);
            for id in 1..=3 {
                lanes.send_in_order::<SimEnv>(0, answer(id));
            }
            assert_eq!(*narrow.sent.borrow(), [1], "INVALID: nobody had to wait");
            // There is room again, but not for this one: two others came before.
            narrow.room.set(usize::MAX);
            lanes.send_in_order::<SimEnv>(0, answer(4));
            SimRt::sleep(5 * PAUSE).await;
            // Nobody waits any more: it goes the straight way.
            lanes.send_in_order::<SimEnv>(0, answer(5));
            assert_eq!(*narrow.sent.borrow(), [1, 2, 3, 4, 5]);
            assert!(lanes.late.borrow().is_empty());
        });
    }
}
