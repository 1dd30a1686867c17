//! The demo runs to its end, in under 30 s, and leaves nothing behind.

use std::process::{Command, Stdio};
use std::time::Duration;

use leasehold_bench::process::{self, Process};

#[test]
fn the_demo_comes_true() {
    let _alone = process::alone();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let output = dir.path().join("output");
    let files = dir.path().join("files");
    std::fs::create_dir(&files).expect("a directory");
    let file = std::fs::File::create(&output).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
    command.env("TMPDIR", &files).stdin(Stdio::null());
    command.stdout(file.try_clone().expect("a second handle")).stderr(file);
    let mut demo = Process::spawn(command).expect("it starts");
    let status = demo.wait(Duration::from_secs(30));
    let text = std::fs::read_to_string(&output).expect("its output");
    let status = status.unwrap_or_else(|error| panic!("{error}; it said:\n{text}"));
    assert!(status.success(), "{status}; it said:\n{text}");
    assert!(text.contains("everything is cleaned up"), "{text}");
    let left = std::fs::read_dir(&files).expect("a directory").count();
    assert_eq!(left, 0, "files are left in the temporary directory");
    println!("{text}");
}
