//! The terminal: the command of `lock` has a process group of its own, and if it shall read from
//! the terminal, that group must be the foreground one.

use std::io::stdin;

use rustix::process::{Pid, getpgrp};
use rustix::termios::{isatty, tcgetpgrp, tcsetpgrp};

/// Gives the terminal to a group, and takes it back when dropped.
#[derive(Debug)]
pub(super) struct Foreground {
    ours: Option<Pid>,
}

impl Foreground {
    /// Does nothing unless standard input is a terminal in whose foreground this process is.
    pub(super) fn give_to(group: Pid) -> Self {
        let ours = getpgrp();
        let terminal = stdin();
        if !isatty(&terminal) || tcgetpgrp(&terminal) != Ok(ours) {
            return Self { ours: None };
        }
        ignore_background_output();
        let given = tcsetpgrp(&terminal, group).is_ok();
        Self { ours: given.then_some(ours) }
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        if let Some(ours) = self.ours {
            // Without the terminal nothing is left to give back.
            let _ = tcsetpgrp(stdin(), ours);
        }
    }
}

/// A process of the background that takes the terminal back is stopped by SIGTTOU unless it
/// ignores that. The command was started before, so it does not inherit this.
fn ignore_background_output() {
    // SAFETY: SIG_IGN installs no handler, so no code of ours ever runs in a signal's context; the
    // arguments are constants of the C library.
    unsafe {
        libc::signal(libc::SIGTTOU, libc::SIG_IGN);
    }
}
