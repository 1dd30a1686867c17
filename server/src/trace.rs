//! The log: one line per event on standard error, quiet while all is well.
//!
//! Owns how lines look and how they leave. A core never waits for whoever reads the log: lines go
//! through a bounded queue to a thread of their own, and when the queue is full they are dropped
//! and counted. `Throttle` and `Changes` keep a lasting trouble from filling disks: log when
//! something changes, not while it lasts.

use std::cell::Cell;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::config::LogFormat;
use crate::env::MonoTime;

/// Lines that may wait for the writing thread; further ones are dropped and counted.
const QUEUE_LEN_MAX: usize = 4096;
/// How long the end of the process waits for the last lines.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Starts the log of this process. Lines are complete when the returned guard is dropped.
pub fn start(level: &str, format: LogFormat) -> io::Result<LogGuard> {
    let (lines, guard) = Lines::start(io::stderr())?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter(level))
        .with_writer(lines)
        .with_ansi(false)
        .with_target(false);
    let installed = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    installed.map_err(io::Error::other)?;
    Ok(guard)
}

/// The engine warns about every message to a dead peer, and the runtime about every slow task:
/// Leasehold reports such states itself, once.
fn filter(level: &str) -> EnvFilter {
    let mut directives = level.to_owned();
    for (target, quiet) in [("openraft", "error"), ("glommio", "warn")] {
        if !level.contains(target) && level != "off" {
            directives.extend([",", target, "=", quiet]);
        }
    }
    EnvFilter::new(directives)
}

enum Message {
    Line(Vec<u8>),
    Flush(Sender<()>),
}

/// Hands finished lines to the writing thread.
#[derive(Clone)]
struct Lines {
    queue: Sender<Message>,
    dropped: Arc<AtomicU64>,
}

impl Lines {
    fn start(mut output: impl Write + Send + 'static) -> io::Result<(Self, LogGuard)> {
        let (queue, messages) = crossbeam_channel::bounded(QUEUE_LEN_MAX);
        let dropped = Arc::new(AtomicU64::new(0));
        let lines = Self { queue: queue.clone(), dropped: dropped.clone() };
        std::thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || write_lines(&messages, &dropped, &mut output))?;
        Ok((lines, LogGuard { queue }))
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

impl Write for &Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.queue.try_send(Message::Line(line.to_vec())).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_lines(messages: &Receiver<Message>, dropped: &AtomicU64, output: &mut impl Write) {
    for message in messages {
        let (result, done) = match message {
            Message::Line(line) => (output.write_all(&line), None),
            Message::Flush(done) => (output.flush(), Some(done)),
        };
        let lost = dropped.swap(0, Ordering::Relaxed);
        let report = if lost == 0 { Ok(()) } else { writeln!(output, "{lost} log lines dropped") };
        // A log that cannot be written has nowhere to say so.
        let _ = result.and(report);
        // Only now whoever asked for a flush learns that all is written.
        drop(done);
    }
}

/// Waits, when dropped, until the lines logged so far are written.
#[must_use = "dropping it at once ends the wait for the last lines"]
pub struct LogGuard {
    queue: Sender<Message>,
}

impl Drop for LogGuard {
    fn drop(&mut self) {
        let (done, written) = crossbeam_channel::bounded(0);
        if self.queue.send_timeout(Message::Flush(done), FLUSH_TIMEOUT).is_ok() {
            // Closed by the writing thread once everything before is written.
            let _ = written.recv_timeout(FLUSH_TIMEOUT);
        }
    }
}

/// Lets something pass at most once per interval, and counts what it held back.
#[derive(Debug)]
pub struct Throttle {
    interval: Duration,
    next: Cell<MonoTime>,
    held_back: Cell<u64>,
}

impl Throttle {
    /// Lets the first pass.
    pub const fn new(interval: Duration) -> Self {
        Self { interval, next: Cell::new(MonoTime(0)), held_back: Cell::new(0) }
    }

    /// `Some(n)`: pass; `n` were held back since the last that passed.
    pub fn pass(&self, now: MonoTime) -> Option<u64> {
        if now < self.next.get() {
            self.held_back.set(self.held_back.get() + 1);
            return None;
        }
        self.next.set(now.after(self.interval));
        Some(self.held_back.replace(0))
    }
}

/// Remembers a state, and tells whether the next one is another.
#[derive(Debug, Default)]
pub struct Changes<T> {
    last: Option<T>,
}

impl<T: PartialEq> Changes<T> {
    /// No state yet: the first is a change.
    pub const fn new() -> Self {
        Self { last: None }
    }

    /// True if `state` differs from the last one given.
    pub fn is_new(&mut self, state: T) -> bool {
        let new = self.last.as_ref() != Some(&state);
        self.last = Some(state);
        new
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(level: &str, events: impl FnOnce()) -> String {
        let sink = Sink::default();
        let (lines, guard) = Lines::start(sink.clone()).unwrap();
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(filter(level))
            .with_writer(lines)
            .with_ansi(false)
            .finish();
        tracing::subscriber::with_default(subscriber, events);
        drop(guard);
        let bytes = sink.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn the_guard_waits_for_the_last_line_and_the_filter_holds_the_engine_back() {
        let text = logged("info", || {
            tracing::info!(shard = 3, "kept");
            tracing::debug!("too fine");
            tracing::warn!(target: "openraft::replication", "held back");
            tracing::error!(target: "openraft::core", "a fault");
        });
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[0].contains("kept shard=3") && lines[1].contains("a fault"), "{text}");
        let text = logged("info,openraft=warn", || {
            tracing::warn!(target: "openraft::replication", "asked for");
        });
        assert!(text.contains("asked for"), "{text}");
    }

    #[test]
    fn a_reader_that_stops_costs_lines_and_no_waiting() {
        let sink = Sink::default();
        let guard = {
            let _stopped = sink.0.lock().unwrap();
            let (lines, guard) = Lines::start(sink.clone()).unwrap();
            for _ in 0..QUEUE_LEN_MAX + 10 {
                (&lines).write_all(b"line\n").unwrap();
            }
            guard
        };
        drop(guard);
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        let written = text.lines().filter(|line| *line == "line").count() as u64;
        let dropped: u64 = text
            .lines()
            .filter_map(|line| line.strip_suffix(" log lines dropped"))
            .map(|count| count.parse::<u64>().unwrap())
            .sum();
        assert_eq!(written + dropped, QUEUE_LEN_MAX as u64 + 10);
        assert!(dropped >= 9, "one line may be in the writer's hand: {dropped}");
    }

    #[test]
    fn a_throttle_passes_once_per_interval_and_counts_the_rest() {
        let throttle = Throttle::new(Duration::from_nanos(10));
        assert_eq!(throttle.pass(MonoTime(5)), Some(0));
        assert_eq!(throttle.pass(MonoTime(6)), None);
        assert_eq!(throttle.pass(MonoTime(14)), None);
        assert_eq!(throttle.pass(MonoTime(15)), Some(2));
        assert_eq!(throttle.pass(MonoTime(25)), Some(0));
    }

    #[test]
    fn changes_are_new_once() {
        let mut changes = Changes::new();
        let seen: Vec<_> = [1, 1, 2, 2, 1].into_iter().map(|state| changes.is_new(state)).collect();
        assert_eq!(seen, [true, false, true, false, true]);
    }
}
