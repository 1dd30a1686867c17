//! Leasehold's C client. So far it only tells its version: the calls themselves come over the
//! Rust client, behind opaque handles, with a generated header.

use std::ffi::{CStr, c_char};

const VERSION: &CStr =
    match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(version) => version,
        Err(_) => panic!("a version has no NUL"),
    };

/// The library's version, for example `0.1.0`: a static string, never NULL, not to be freed.
// SAFETY: no other symbol of this library, and none of the Rust or C libraries, has this name.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_version() -> *const c_char {
    VERSION.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_the_packages() {
        // SAFETY: the function returns a static, NUL-terminated string.
        let version = unsafe { CStr::from_ptr(leasehold_version()) };
        assert_eq!(version.to_str(), Ok(env!("CARGO_PKG_VERSION")));
    }
}
