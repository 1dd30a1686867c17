//! What `lock` says on standard error; standard output belongs to the command.

use std::io::Write;

use serde_json::Value;

/// With `json`, `object`; else `text`.
pub(super) fn note(json: bool, object: &Value, text: &str) {
    let mut out = std::io::stderr().lock();
    // Nobody to tell is no reason to fail.
    let _ = if json { writeln!(out, "{object}") } else { writeln!(out, "leasehold: {text}") };
}
