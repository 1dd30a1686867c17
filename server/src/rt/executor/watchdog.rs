//! The watchdog: a thread that wakes a core whose pulse pauses, and ends the process if it stops.
//!
//! It counts only time in which it ran itself: after a suspended machine or a stopped process
//! everybody was away, and nobody is to blame.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::clock::OsClock;
use super::pulse::CoreGauges;
use crate::env::Clock;

/// Between two looks: more than the longest rest of a pulse, so that a core at rest is left alone.
const LOOK_INTERVAL: Duration = Duration::from_millis(150);

/// Looks per stall limit, at least.
const LOOKS_MIN: u32 = 3;

/// See the module. Stopped when dropped.
#[derive(Debug)]
pub(super) struct Watchdog {
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub(super) fn start(
        cores: Vec<Arc<CoreGauges>>,
        limit: Duration,
        exit_code: i32,
    ) -> io::Result<Self> {
        let stopping = Arc::new(AtomicBool::new(false));
        let body = {
            let stopping = Arc::clone(&stopping);
            move || {
                if let Some(core) = watch(&cores, limit, &stopping) {
                    die(core, limit, exit_code);
                }
            }
        };
        let thread = thread::Builder::new().name("watchdog".into()).spawn(body)?;
        Ok(Self { stopping, thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic of the thread has been reported by its own message.
            let _ = thread.join();
        }
    }
}

/// Returns the first core that stands still, or nothing when told to stop.
fn watch(cores: &[Arc<CoreGauges>], limit: Duration, stopping: &AtomicBool) -> Option<usize> {
    let clock = OsClock;
    let step = LOOK_INTERVAL.min(limit / LOOKS_MIN);
    let mut suspects: Vec<Suspect> = cores.iter().map(|_| Suspect::default()).collect();
    let mut last = clock.now();
    loop {
        thread::park_timeout(step);
        if stopping.load(Ordering::Acquire) {
            return None;
        }
        let now = clock.now();
        let passed = now.since(last).min(step * 2);
        last = now;
        for (core, (suspect, gauges)) in suspects.iter_mut().zip(cores).enumerate() {
            if gauges.is_retired() {
                continue;
            }
            let still = suspect.still_for(gauges.beats(), passed);
            if still >= limit {
                return Some(core);
            }
            if still > Duration::ZERO {
                gauges.kick();
            }
        }
    }
}

/// How long a core has not ticked.
#[derive(Debug, Default)]
struct Suspect {
    beats: u64,
    still: Duration,
}

impl Suspect {
    fn still_for(&mut self, beats: u64, passed: Duration) -> Duration {
        self.still = if beats == self.beats { self.still + passed } else { Duration::ZERO };
        self.beats = beats;
        self.still
    }
}

fn die(core: usize, limit: Duration, exit_code: i32) -> ! {
    let line = format!("core {core} made no progress for {limit:?}: the process ends\n");
    write_if_possible(line.as_bytes());
    // SAFETY: ends the process at once and touches no memory. Exit handlers and locks are left
    // alone, as the stuck core may hold any of them.
    unsafe { libc::_exit(exit_code) }
}

/// Standard error may be a full pipe, and that may be what the core is stuck in.
fn write_if_possible(bytes: &[u8]) {
    let stderr = io::stderr();
    let mut ready = [PollFd::new(&stderr, PollFlags::OUT)];
    if matches!(poll(&mut ready, Some(&Timespec::default())), Ok(1)) {
        // Nobody is left to tell if this fails.
        let _ = rustix::io::write(stderr.as_fd(), bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stillness_adds_up_until_the_next_beat() {
        let ms = Duration::from_millis;
        let mut suspect = Suspect::default();
        assert_eq!(suspect.still_for(1, ms(100)), Duration::ZERO);
        assert_eq!(suspect.still_for(1, ms(100)), ms(100));
        assert_eq!(suspect.still_for(1, ms(150)), ms(250));
        assert_eq!(suspect.still_for(2, ms(100)), Duration::ZERO);
        assert_eq!(suspect.still_for(2, ms(100)), ms(100));
    }
}
