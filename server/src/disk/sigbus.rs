//! What happens when a mapped segment cannot be backed by its file any more.
//!
//! The kernel reports it with SIGBUS in the middle of a store or a load. There is no way back from
//! it: one line is written and the process ends with the code of a failed WAL, as after any other
//! failure of the disk.

use std::io;
use std::sync::atomic::{AtomicI32, Ordering};

static EXIT_CODE: AtomicI32 = AtomicI32::new(1);
const MESSAGE: &[u8] = b"leaseholdd: a mapped file failed (SIGBUS): the disk is full or failing\n";

/// From now on SIGBUS ends the process with `exit_code`. Process-wide; call it once, early.
pub fn install(exit_code: i32) -> io::Result<()> {
    EXIT_CODE.store(exit_code, Ordering::Relaxed);
    // SAFETY: all zeroes is a valid sigaction: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as libc::sighandler_t;
    // SAFETY: `action` is initialised and the handler only makes calls that are allowed in one.
    let installed =
        unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
    if installed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

extern "C" fn handler(_signal: libc::c_int) {
    // SAFETY: `write` and `_exit` are async-signal-safe; the buffer is a constant.
    unsafe {
        libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len());
        libc::_exit(EXIT_CODE.load(Ordering::Relaxed));
    }
}
