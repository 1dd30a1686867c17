//! Watches of one shard on one node: who watches what, what happened lately, what is told to whom.
//!
//! Fed by `apply` alone, so every node serves watches from its own state, and two nodes tell the
//! same events under the same revisions. Never reads a clock, never waits, never looks at Raft:
//! `shard::watch` drives it.
//!
//! Invariants (G6):
//! - What a watch is told ascends in revision, each event once; a revision's events are never told
//!   apart from each other.
//! - A watch is told every matching event after its position, or its end, or a state instead.
//! - A position that is told (`WatchEvents::revision`) covers only what was told before it.
//! - An event costs as much as the watches that match it, whatever the number of others.
//! - Everything is bounded: watches, history, frozen views, what waits to be sent.

mod history;
mod hub;
mod index;
mod labels;
mod sizes;
mod told;
mod views;

pub use hub::{Hub, Start, WatchName};
pub use index::Target;
pub use sizes::Sizes;
