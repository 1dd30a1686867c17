//! Shared by the tests of the library and of the command line.
#![allow(dead_code, reason = "no test uses all of it")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

pub(crate) mod authority;
pub(crate) mod server;

use std::time::Duration;

/// Polls until `done`; fails after a time that only a fault exceeds.
pub(crate) async fn eventually(what: &str, mut done: impl AsyncFnMut() -> bool) {
    let patience = Duration::from_secs(20);
    let looking = async {
        while !done().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(tokio::time::timeout(patience, looking).await.is_ok(), "never came: {what}");
}
