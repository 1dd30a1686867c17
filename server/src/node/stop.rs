//! How a node stops: in order, its cores waiting for each other, or at once.
//!
//! All peer connections come in through core 0: if it left first, the hand-over of another core's
//! shards would hear neither the votes nor the new leader.

use std::fmt::Display;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use openraft::AsyncRuntime;

use super::Production;
use crate::env::Env;
use crate::error::Exit;

const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Ends the process at once. The line goes to standard error directly: the log's own queue might
/// not be written any more.
pub(super) fn die(exit: Exit, why: impl Display) -> ! {
    eprintln!("leaseholdd: {why}");
    std::process::exit(i32::from(exit.code()))
}

/// Counts the cores that have arrived.
#[derive(Debug)]
pub(super) struct Barrier {
    missing: AtomicUsize,
}

impl Barrier {
    /// For so many cores.
    pub(super) fn new(cores: usize) -> Self {
        Self { missing: AtomicUsize::new(cores) }
    }

    /// Arrives, and waits for the others. Each of them arrives within its own time limit.
    pub(super) async fn arrive(&self) {
        self.missing.fetch_sub(1, Ordering::AcqRel);
        while self.missing.load(Ordering::Acquire) > 0 {
            <Production as Env>::Rt::sleep(LOOK_EVERY).await;
        }
    }
}
