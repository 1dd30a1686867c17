//! Changes of the membership of real processes, by the command line that an operator uses: 1 → 3 →
//! 5 → 3 nodes, the leader removed, all nodes replaced, each under load that the checkers judge; and
//! what must be refused, or must not cost the majority.

#[path = "support/bare.rs"]
mod bare;
#[path = "members/changes.rs"]
mod changes;
#[path = "members/faults.rs"]
mod faults;
#[path = "members/fresh.rs"]
mod fresh;
#[path = "members/pipe.rs"]
mod pipe;
#[path = "support/pipe.rs"]
mod pipes;
#[path = "members/refusals.rs"]
mod refusals;
#[path = "members/rig.rs"]
mod rig;
