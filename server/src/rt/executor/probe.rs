//! Whether this machine lets us use `io_uring`, found out before glommio tries: its own answer is
//! a panic that blames the kernel's age, or an exit without an error.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::super::glommio::IO_MEMORY_BYTES;

/// glommio refuses to start below this.
const MEMLOCK_MIN_BYTES: u64 = 512 << 10;

/// Rings of one executor that register its I/O memory.
const RINGS_PER_CORE: u64 = 3;

/// `IORING_FEAT_RSRC_TAGS`, new in Linux 5.13: what is older lacks operations that we use.
const FEATURE_OF_5_13: u32 = 1 << 10;

/// `struct io_uring_params` is 120 bytes; the features are its sixth word.
const PARAMS_WORDS: usize = 30;
const FEATURES_WORD: usize = 5;

/// Why `io_uring` cannot be used, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// A policy forbids it.
    #[error(
        "io_uring is forbidden here: allow the system calls io_uring_setup, io_uring_enter and \
         io_uring_register in the container's seccomp profile, and set \
         `sysctl kernel.io_uring_disabled=0`"
    )]
    Forbidden,
    /// The kernel has none, or an old one.
    #[error("this kernel's io_uring is missing or too old: Linux 5.15 or later is needed")]
    TooOld,
    /// Too little memory may be locked.
    #[error(
        "only {limit_bytes} bytes of memory may be locked and {needed_bytes} are needed: raise \
         the limit with `ulimit -l {}`, or LimitMEMLOCK={needed_bytes} in a systemd unit",
        needed_bytes.div_ceil(1024)
    )]
    LockedMemory {
        /// The limit, `RLIMIT_MEMLOCK`.
        limit_bytes: u64,
        /// What this many cores need; other servers of the same user need theirs as well.
        needed_bytes: u64,
    },
    /// The kernel is out of memory for rings.
    #[error("the kernel has no memory for io_uring's rings: raise `ulimit -l` or free memory")]
    OutOfMemory,
    /// Anything else.
    #[error("io_uring cannot be used: {0}")]
    Other(io::Error),
}

/// Tries `io_uring` out, for `cores` executors.
pub fn probe(cores: usize) -> Result<(), ProbeError> {
    check_locked_memory(cores)?;
    let features = setup_once().map_err(classify)?;
    if features & FEATURE_OF_5_13 == 0 {
        return Err(ProbeError::TooOld);
    }
    Ok(())
}

fn check_locked_memory(cores: usize) -> Result<(), ProbeError> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let registered_bytes = cores as u64 * RINGS_PER_CORE * IO_MEMORY_BYTES as u64;
    let needed_bytes = registered_bytes.max(MEMLOCK_MIN_BYTES);
    match limit {
        Some(limit_bytes) if limit_bytes < needed_bytes => {
            Err(ProbeError::LockedMemory { limit_bytes, needed_bytes })
        }
        _ => Ok(()),
    }
}

/// `IORING_UNREGISTER_BUFFERS`: of a new ring, which has none, it fails with `ENXIO`.
const UNREGISTER_BUFFERS: u32 = 1;

/// Sets the smallest ring up, makes one call of each kind on it, closes it, and returns the
/// kernel's feature bits. A policy may allow the first call and deny the others.
fn setup_once() -> io::Result<u32> {
    let mut params = [0_u32; PARAMS_WORDS];
    // SAFETY: the kernel reads and writes 120 bytes of parameters, which `params` has, aligned for
    // their 32-bit words, and keeps no pointer to them.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1_u32, params.as_mut_ptr()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call just returned this descriptor, and nothing else owns it.
    let ring = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
    enter_once(&ring)?;
    register_once(&ring)?;
    Ok(params[FEATURES_WORD])
}

/// Submits nothing and waits for nothing.
fn enter_once(ring: &OwnedFd) -> io::Result<()> {
    let none = std::ptr::null::<libc::sigset_t>();
    let (fd, zero) = (ring.as_raw_fd(), 0_u32);
    // SAFETY: there is nothing to submit, and no signal set is given, so no memory is looked at.
    match unsafe { libc::syscall(libc::SYS_io_uring_enter, fd, zero, zero, zero, none, 0_usize) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes back buffers that were never registered.
fn register_once(ring: &OwnedFd) -> io::Result<()> {
    let none = std::ptr::null::<libc::c_void>();
    let fd = ring.as_raw_fd();
    // SAFETY: this operation takes no argument and looks at no memory.
    let done =
        unsafe { libc::syscall(libc::SYS_io_uring_register, fd, UNREGISTER_BUFFERS, none, 0_u32) };
    let error = io::Error::last_os_error();
    if done == 0 || error.raw_os_error() == Some(libc::ENXIO) { Ok(()) } else { Err(error) }
}

fn classify(error: io::Error) -> ProbeError {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => ProbeError::Forbidden,
        Some(libc::ENOSYS | libc::EINVAL) => ProbeError::TooOld,
        Some(libc::ENOMEM) => ProbeError::OutOfMemory,
        _ => ProbeError::Other(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_passes() {
        probe(1).expect("the tests run where io_uring does");
        assert_ne!(setup_once().expect("available"), 0, "the features' word is the right one");
    }

    #[test]
    fn every_refusal_names_its_remedy() {
        let message = |errno| classify(io::Error::from_raw_os_error(errno)).to_string();
        assert!(message(libc::EPERM).contains("kernel.io_uring_disabled=0"));
        assert!(message(libc::EPERM).contains("seccomp"));
        assert!(message(libc::ENOSYS).contains("Linux 5.15"));
        assert!(message(libc::ENOMEM).contains("ulimit -l"));
        assert!(message(libc::EMFILE).contains("Too many open files"));
    }

    #[test]
    fn many_cores_need_more_locked_memory() {
        let error = check_locked_memory(1 << 40).expect_err("no machine allows that");
        let ProbeError::LockedMemory { limit_bytes, needed_bytes } = error else {
            // Without a limit nothing is refused.
            panic!("{error}");
        };
        assert!(limit_bytes < needed_bytes);
        assert_eq!(needed_bytes, (1 << 40) * 3 * 65_536);
    }
}
