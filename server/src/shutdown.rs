//! The wish to stop, and the signals that express it.
//!
//! Owns signal handling of the whole process: SIGTERM and SIGINT ask for an orderly stop, a second
//! one ends the process at once; USR1, USR2, HUP, PIPE and WINCH do nothing. No handler runs on
//! any thread: the stop signals are blocked everywhere and taken by one thread of their own, so no
//! system call of an executor is ever interrupted.

use std::io;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};

use crate::error::Exit;

const STOP: [libc::c_int; 2] = [libc::SIGTERM, libc::SIGINT];
const IGNORED: [libc::c_int; 5] =
    [libc::SIGUSR1, libc::SIGUSR2, libc::SIGHUP, libc::SIGPIPE, libc::SIGWINCH];

/// A shared, one-way switch: stop, in order. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Shutdown {
    requested: Arc<AtomicBool>,
    /// Nothing is ever sent: waiters wake when the sender is dropped.
    waiters: Receiver<()>,
    sender: Arc<std::sync::Mutex<Option<Sender<()>>>>,
}

impl Default for Shutdown {
    fn default() -> Self {
        Self::new()
    }
}

impl Shutdown {
    /// A switch that is not thrown, and bound to no signal.
    pub fn new() -> Self {
        let (sender, waiters) = crossbeam_channel::bounded(0);
        Self {
            requested: Arc::new(AtomicBool::new(false)),
            waiters,
            sender: Arc::new(std::sync::Mutex::new(Some(sender))),
        }
    }

    /// Takes over the process's signals. To be called once, by the main thread, before any other
    /// thread exists: threads inherit what is blocked.
    pub fn on_signals() -> io::Result<Self> {
        let shutdown = Self::new();
        let stop = block_stop_signals()?;
        let switch = shutdown.clone();
        let wait = move || {
            wait_for(&stop);
            switch.request();
            wait_for(&stop);
            // Not `exit`: that would run other threads' clean-up under their feet.
            // SAFETY: `_exit` has no precondition.
            unsafe { libc::_exit(i32::from(Exit::ForcedStop.code())) };
        };
        std::thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
        Ok(shutdown)
    }

    /// Throws the switch; again has no effect.
    pub fn request(&self) {
        self.requested.store(true, Ordering::SeqCst);
        // A poisoned lock holds nothing but an Option: the switch works all the same.
        let mut sender = self.sender.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *sender = None;
    }

    /// True once the switch is thrown; cheap enough to poll on a core.
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }

    /// Blocks this thread until the switch is thrown. Never on a core.
    pub fn wait(&self) {
        // Only a closed channel ends it: nobody sends.
        let _ = self.waiters.recv();
    }

    /// Like `wait`, but no longer than `timeout`; true if the switch is thrown.
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        let _ = self.waiters.recv_timeout(timeout);
        self.is_requested()
    }

    /// A channel that closes when the switch is thrown, for `crossbeam_channel::select!`.
    pub fn channel(&self) -> &Receiver<()> {
        &self.waiters
    }
}

fn block_stop_signals() -> io::Result<libc::sigset_t> {
    for signal in IGNORED {
        // SAFETY: SIG_IGN is no function of ours, so no handler can run at a bad moment.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set that it is given.
    let mut set: libc::sigset_t = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    };
    for signal in STOP {
        // SAFETY: the set is initialised, and the numbers are signals.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    // SAFETY: the set is initialised; a null old set is allowed.
    let errno =
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    if errno == 0 { Ok(set) } else { Err(io::Error::from_raw_os_error(errno)) }
}

fn wait_for(set: &libc::sigset_t) {
    let mut signal = 0;
    // SAFETY: both pointers are valid for the call. Its only error is an invalid signal in the
    // set, which is constant.
    let errno = unsafe { libc::sigwait(set, &raw mut signal) };
    assert_eq!(errno, 0, "sigwait fails for an invalid set only");
    assert!(STOP.contains(&signal), "sigwait returns a signal of its set");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_clone_sees_the_request_and_every_waiter_wakes() {
        let shutdown = Shutdown::new();
        let waiters: Vec<_> = (0..3)
            .map(|_| {
                let clone = shutdown.clone();
                std::thread::spawn(move || {
                    clone.wait();
                    clone.is_requested()
                })
            })
            .collect();
        assert!(!shutdown.is_requested());
        assert!(!shutdown.wait_timeout(Duration::ZERO));
        shutdown.clone().request();
        shutdown.request();
        assert!(waiters.into_iter().all(|waiter| waiter.join().unwrap()));
        assert!(shutdown.wait_timeout(Duration::MAX));
    }
}
