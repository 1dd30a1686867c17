//! A child process that is denied a system call, as a container's profile does it.
//!
//! The filter is in force from the child's first instruction on, for it and for all that it
//! starts, and cannot be taken back. It must never be installed in this process.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// The call's number is the first word of what a filter looks at.
const NUMBER_OFFSET: u32 = 0;

/// The command's process gets `errno` from every system call `number` and does not make it.
pub fn deny(command: &mut Command, number: i64, errno: i32) {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let compare = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let end = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let refuse = libc::SECCOMP_RET_ERRNO | errno as u32;
    let filter = [
        step(load, 0, 0, NUMBER_OFFSET),
        step(compare, 0, 1, number as u32),
        step(end, 0, 0, refuse),
        step(end, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; this closure makes
    // two prctl system calls and allocates nothing.
    #[expect(unsafe_code, reason = "a child's own filter can be set in the child only")]
    unsafe {
        command.pre_exec(move || install(&filter));
    }
}

fn install(filter: &[libc::sock_filter; 4]) -> io::Result<()> {
    let program = libc::sock_fprog { len: 4, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the kernel copies the program, whose length is that of the array it points to,
    // before the call returns, and writes to none of it.
    #[expect(unsafe_code, reason = "no safe wrapper sets a filter")]
    let refused = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) != 0
    };
    if refused { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_fails_in_the_child_and_goes_on_here() {
        let mut command = Command::new("mkdir");
        let dir = tempfile::tempdir().expect("a directory");
        command.arg(dir.path().join("made"));
        for call in [libc::SYS_mkdir, libc::SYS_mkdirat] {
            deny(&mut command, call, libc::EROFS);
        }
        let output = command.output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("Read-only"), "{text}");
        std::fs::create_dir(dir.path().join("made")).expect("allowed here");
    }
}
