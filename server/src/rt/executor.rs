//! The cores: one glommio executor each, on a thread of its own, watched from outside.
//!
//! Every executor has a pulse: a task that ticks, measures how late it ticks, and by ticking ends
//! a park that glommio 0.9 entered with work in its queue (see `pulse`). A watchdog thread ends
//! the process if a pulse stops: a server that cannot run its tasks must not look alive.

mod probe;
mod pulse;
mod watchdog;

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use glommio::{ExecutorJoinHandle, Placement};
use openraft_rt::AsyncRuntime;

use super::glommio::{GlommioRt, builder};
pub use probe::{ProbeError, probe};
pub use pulse::CoreGauges;
use watchdog::Watchdog;

/// Where the cores run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CorePlacement {
    /// Wherever the kernel puts them: best on small or shared machines.
    #[default]
    Unbound,
    /// Core *i* on CPU *i*, as numbered by the kernel.
    Fixed,
}

/// How to run the cores.
#[derive(Clone, Debug)]
pub struct ExecutorConfig {
    /// How they are placed.
    pub placement: CorePlacement,
    /// Entries of each `io_uring` submission queue. More make a turn with many sockets cheaper.
    pub ring_depth: usize,
    /// A core without a tick for this long is taken for dead.
    pub stall_limit: Duration,
    /// What the process exits with then.
    pub stall_exit_code: i32,
}

impl ExecutorConfig {
    /// The usual settings, with the exit code that the caller documents.
    pub fn new(stall_exit_code: i32) -> Self {
        Self {
            placement: CorePlacement::default(),
            ring_depth: 128,
            stall_limit: Duration::from_secs(10),
            stall_exit_code,
        }
    }
}

/// What a core's main future is told about its core.
#[derive(Clone, Debug)]
pub struct Core {
    /// Counted from 0.
    pub id: usize,
    /// How many there are.
    pub count: usize,
    /// This core's gauges.
    pub gauges: Arc<CoreGauges>,
}

/// Why the cores did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// This machine does not let us.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// A thread did not start.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
    /// An executor did not start.
    #[error("cannot start core {core}: {reason}")]
    Executor {
        /// Which core.
        core: usize,
        /// What glommio said.
        reason: String,
    },
}

/// The core's main future did not return: it panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("core {core} failed")]
pub struct CoreFailed {
    /// Which core.
    pub core: usize,
}

/// The running cores.
#[derive(Debug)]
pub struct Executors<R: Send + 'static> {
    cores: Vec<ExecutorJoinHandle<R>>,
    gauges: Vec<Arc<CoreGauges>>,
    watchdog: Watchdog,
}

/// Starts one core for each element of `inputs`, which `body` turns into the core's main future.
/// Returns when all of them run. After an error some may run on: the process should end.
pub fn start<I, R, B, F>(
    config: &ExecutorConfig,
    inputs: Vec<I>,
    body: B,
) -> Result<Executors<R>, StartError>
where
    I: Send + 'static,
    R: Send + 'static,
    B: FnOnce(Core, I) -> F + Clone + Send + 'static,
    F: Future<Output = R> + 'static,
{
    let count = inputs.len();
    assert!(count > 0, "a server has at least one core");
    probe(count)?;
    let (ready, started) = bounded(count);
    let mut cores = Vec::new();
    let mut gauges = Vec::new();
    for (id, input) in inputs.into_iter().enumerate() {
        let core = Core { id, count, gauges: Arc::default() };
        gauges.push(Arc::clone(&core.gauges));
        cores.push(start_one(config, core, input, body.clone(), ready.clone())?);
    }
    drop(ready);
    let cores = await_all(cores, &started)?;
    let watchdog = Watchdog::start(gauges.clone(), config.stall_limit, config.stall_exit_code)?;
    Ok(Executors { cores, gauges, watchdog })
}

fn start_one<I, R, B, F>(
    config: &ExecutorConfig,
    core: Core,
    input: I,
    body: B,
    ready: Sender<usize>,
) -> Result<ExecutorJoinHandle<R>, StartError>
where
    I: Send + 'static,
    R: Send + 'static,
    B: FnOnce(Core, I) -> F + Send + 'static,
    F: Future<Output = R> + 'static,
{
    let id = core.id;
    let placement = match config.placement {
        CorePlacement::Unbound => Placement::Unbound,
        CorePlacement::Fixed => Placement::Fixed(id),
    };
    let main = move || async move {
        let _retiring = pulse::Retiring::new(&core.gauges);
        drop(GlommioRt::spawn(pulse::run(Arc::clone(&core.gauges))));
        // The starter waits for this; if it has given up, nobody needs it.
        let _ = ready.send(id);
        drop(ready);
        body(core, input).await
    };
    let name = format!("core-{id}");
    let executor = builder(placement).name(&name).ring_depth(config.ring_depth);
    executor
        .spawn(main)
        .map_err(|error| StartError::Executor { core: id, reason: error.to_string() })
}

/// Waits until every core has said that it runs. One that never will has dropped its sender.
fn await_all<R: Send + 'static>(
    cores: Vec<ExecutorJoinHandle<R>>,
    started: &Receiver<usize>,
) -> Result<Vec<ExecutorJoinHandle<R>>, StartError> {
    let mut missing: Vec<bool> = cores.iter().map(|_| true).collect();
    for _ in 0..cores.len() {
        match started.recv() {
            Ok(id) => missing[id] = false,
            Err(_all_gone) => break,
        }
    }
    let Some(core) = missing.iter().position(|missing| *missing) else { return Ok(cores) };
    let failed = cores.into_iter().nth(core).expect("as many as cores");
    let reason = match failed.join() {
        Ok(_) => "it ended at once".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(StartError::Executor { core, reason })
}

impl<R: Send + 'static> Executors<R> {
    /// Each core's gauges, by core.
    pub fn gauges(&self) -> &[Arc<CoreGauges>] {
        &self.gauges
    }

    /// Waits until every core's main future has returned.
    pub fn join(self) -> Vec<Result<R, CoreFailed>> {
        let joined = |(core, handle): (usize, ExecutorJoinHandle<R>)| {
            handle.join().map_err(|_| CoreFailed { core })
        };
        let results = self.cores.into_iter().enumerate().map(joined).collect();
        drop(self.watchdog);
        results
    }
}

#[cfg(test)]
mod tests;
