//! Child processes: how they are found, started and surely ended.
//!
//! Invariants: every child is ended by its recorded process group only; it dies with the thread
//! that started it, so that nothing is left behind even if this process is killed.

use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{
    Pid, Signal, kill_process_group, set_parent_process_death_signal, test_kill_process_group,
};

use crate::clock::Deadline;

/// Names the directory of the binaries under test; without it the running executable's target
/// directory is used.
pub const BIN_DIR_VAR: &str = "LEASEHOLD_BIN_DIR";

/// How often a condition of another process is looked at.
pub const POLL: Duration = Duration::from_millis(10);

static ALONE: Mutex<()> = Mutex::new(());

/// Tests that load the machine hold this, so that they run one at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    // A failed test before this one has left nothing behind that the lock guards.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The path of a binary under test. A missing one is an error that says how to build it: a test
/// must never pass because there was nothing to test.
pub fn binary(name: &str) -> io::Result<PathBuf> {
    let dir = match std::env::var_os(BIN_DIR_VAR) {
        Some(dir) => PathBuf::from(dir),
        None => target_dir()?,
    };
    let path = dir.join(name);
    if path.is_file() {
        return Ok(path);
    }
    let text = format!(
        "{} is missing: build it first (`cargo build --workspace --bins`, or `make build`), \
         or name its directory in {BIN_DIR_VAR}",
        path.display()
    );
    Err(io::Error::new(io::ErrorKind::NotFound, text))
}

/// `target/PROFILE` of the running executable, which may be a test in its `deps`.
fn target_dir() -> io::Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let dir = exe.parent().unwrap_or(&exe);
    let in_deps = matches!(dir.file_name().and_then(OsStr::to_str), Some("deps" | "examples"));
    let dir = if in_deps { dir.parent().unwrap_or(dir) } else { dir };
    Ok(dir.to_owned())
}

/// A child in a process group of its own. Dropping it kills the group.
#[derive(Debug)]
pub struct Process {
    child: Child,
    group: Pid,
    status: Option<ExitStatus>,
}

impl Process {
    /// Starts a command. The child gets SIGKILL when the calling thread ends, so keep it in the
    /// thread that started it.
    pub fn spawn(mut command: Command) -> io::Result<Self> {
        command.process_group(0);
        // SAFETY: between fork and exec only async-signal-safe calls are allowed; this closure
        // makes one prctl system call and allocates nothing.
        #[expect(unsafe_code, reason = "pre_exec is the only way to set the death signal")]
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let child = command.spawn()?;
        let group = Pid::from_child(&child);
        Ok(Self { child, group, status: None })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The standard streams of the child.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Sends a signal to the whole group. An ended child is left alone: its id may be another's.
    pub fn signal(&mut self, signal: Signal) -> io::Result<()> {
        if self.try_wait()?.is_none() {
            kill_process_group(self.group, signal)?;
        }
        Ok(())
    }

    /// The exit status, if the child has ended.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() {
            self.status = self.child.try_wait()?;
        }
        Ok(self.status)
    }

    /// Waits for the child's end.
    pub fn wait(&mut self, limit: Duration) -> io::Result<ExitStatus> {
        let deadline = Deadline::after(limit);
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            if deadline.passed() {
                let text = format!("process {} did not end within {limit:?}", self.pid());
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            std::thread::sleep(POLL);
        }
    }

    /// kill -9 of the whole group, and waits for its end.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        // The group outlives its leader if a grandchild is left, but as long as the leader was
        // not waited for, the group's number cannot be anybody else's.
        if self.status.is_none() && test_kill_process_group(self.group).is_ok() {
            kill_process_group(self.group, Signal::KILL)?;
        }
        self.wait(Duration::from_secs(10))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("process {} could not be ended: {error}", self.child.id());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn a_dropped_process_is_gone() {
        let mut command = Command::new("sleep");
        command.arg("1000");
        let process = Process::spawn(command).expect("sleep exists");
        let group = process.group;
        drop(process);
        assert!(test_kill_process_group(group).is_err());
    }

    #[test]
    fn a_stopped_process_can_be_killed() {
        let mut command = Command::new("sleep");
        command.arg("1000");
        let mut process = Process::spawn(command).expect("sleep exists");
        process.signal(Signal::STOP).expect("stopped");
        assert_eq!(process.kill().expect("killed").signal(), Some(9));
    }

    #[test]
    fn a_missing_binary_is_an_error_that_says_what_to_do() {
        let error = binary("no-such-binary").expect_err("there is none");
        assert!(error.to_string().contains("build it first"), "{error}");
    }
}
