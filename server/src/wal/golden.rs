//! Compares what this code writes with committed bytes, so that no format changes unnoticed.

use std::fs;
use std::path::Path;

/// Panics if `bytes` are not those of the file in `src/wal/golden/`. With `UPDATE=1` in the
/// environment it writes them instead: only for a new format version, under a new name.
pub(super) fn check(name: &str, bytes: &[u8]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/wal/golden").join(name);
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, bytes).unwrap();
    }
    let golden = fs::read(&path).unwrap();
    assert!(golden == bytes, "the format of {name} changed: it needs a new version");
}
