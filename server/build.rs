//! Tells the build its date: a cluster is not born under a clock that is behind it, because tokens
//! start at the clock (G2).

use std::env;
use std::time::{SystemTime, UNIX_EPOCH};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=SOURCE_DATE_EPOCH");
    let epoch_s = env::var("SOURCE_DATE_EPOCH").ok().and_then(|text| text.parse::<u64>().ok());
    println!("cargo:rustc-env=LEASEHOLD_BUILD_UNIX_S={}", epoch_s.unwrap_or_else(now_s));
}

#[expect(clippy::disallowed_methods, reason = "a build has no Clock seam")]
fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
