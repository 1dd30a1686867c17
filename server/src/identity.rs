//! Who this node is: its data directory and its cluster's birth (DESIGN §7).
//!
//! Owns the directory's lock, the files that say whose it is, and the rules by which fresh
//! directories become one cluster. It never opens a socket: the birth is a pure machine driven
//! over a transport of its caller. Invariants: one process per directory; a directory never
//! changes its node, disk id, core count or birth record; every file is replaced whole and synced
//! before anything relies on it.

mod birth;
mod data_dir;
mod driver;
mod file;
mod former;
mod restore;
mod told;

pub use self::birth::{Birth, BirthError, BirthStore, Mint, Promise, Step};
pub use self::data_dir::{DataDir, DataDirError, Owner, Remains};
pub use self::driver::{BirthTransport, found, join};
pub use self::file::FileError;
pub use self::restore::{PlanError, RestorePlan};
pub use self::told::Told;

/// The date of this build, in Unix milliseconds: no cluster is born under an earlier clock.
pub fn build_unix_ms() -> u64 {
    let seconds: u64 = env!("LEASEHOLD_BUILD_UNIX_S").parse().expect("build.rs writes a number");
    seconds * 1000
}
