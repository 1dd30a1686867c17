//! The WAL and its files on the real file system, driven by glommio. Needs `io_uring`.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod wal_support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;

use leasehold_server::disk::linux::LinuxDisk;
use leasehold_server::disk::sigbus;
use leasehold_server::env::{Disk, Draft, Env, Segment};
use leasehold_server::rt::clock::OsClock;
use leasehold_server::rt::glommio::GlommioRt;
use leasehold_server::rt::sim_net::SimHost;
use leasehold_server::wal::{Wal, WalConfig};
use openraft::AsyncRuntime;
use wal_support::{A, IDENTITY, payload};

/// The real parts, without a network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct LinuxEnv;

impl Env for LinuxEnv {
    type Rt = GlommioRt;
    type Clock = OsClock;
    type Disk = LinuxDisk;
    type Net = SimHost;
}

fn dir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn config() -> WalConfig {
    WalConfig { segment_len: 1 << 20, ..WalConfig::default() }
}

async fn open(
    dir: &Path,
) -> (Wal<LinuxEnv>, BTreeMap<wal_support::ShardId, wal_support::Recovered>) {
    let mut salt = 0;
    let salts = move || {
        salt += 1;
        salt
    };
    let disk = LinuxDisk::open(dir).unwrap();
    Wal::open(config(), IDENTITY, disk, salts).await.unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_segment_is_really_written_and_published() {
    let dir = dir();
    GlommioRt::run(async {
        let disk = LinuxDisk::open(dir.path()).unwrap();
        disk.create_segment("blank", 300 * 1024).await.unwrap();
        assert_eq!(disk.list().await.unwrap(), ["blank"]);
        assert!(disk.read("blank").await.unwrap().iter().all(|byte| *byte == 0));
    });
    let metadata = fs::metadata(dir.path().join("blank")).unwrap();
    assert_eq!(metadata.len(), 300 * 1024);
    assert!(metadata.blocks() * 512 >= 300 * 1024, "a sparse file has no blocks to write to");
    assert_eq!(names(dir.path()), ["blank"], "no draft is left");
}

#[test]
fn what_is_stored_and_synced_is_in_the_file() {
    let dir = dir();
    GlommioRt::run(async {
        let disk = LinuxDisk::open(dir.path()).unwrap();
        disk.create_segment("blank", 64 * 1024).await.unwrap();
        let mut segment = disk.open_segment("blank").await.unwrap();
        assert_eq!(segment.len(), 64 * 1024);
        for round in 0..20_u8 {
            segment.store(4090 + u64::from(round) * 11, &[round + 1; 11]);
            segment.sync().await.unwrap();
        }
        let bytes = disk.read("blank").await.unwrap();
        assert_eq!(bytes, fs::read(dir.path().join("blank")).unwrap());
        assert_eq!(&bytes[4089..4102], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2]);
    });
}

#[test]
fn reads_go_past_the_cache_and_return_exactly_what_was_asked_for() {
    let dir = dir();
    let content: Vec<u8> = (0..700_001_u32).map(|at| (at / 7) as u8).collect();
    fs::write(dir.path().join("file"), &content).unwrap();
    GlommioRt::run(async {
        let disk = LinuxDisk::open(dir.path()).unwrap();
        assert!(disk.read("file").await.unwrap() == content);
        for (offset, len) in
            [(0, 0), (0, 1), (5, 4096), (4095, 2), (300_000, 300_000), (699_999, 9)]
        {
            let end = content.len().min(offset + len);
            let found = disk.read_at("file", offset as u64, len).await.unwrap();
            assert!(found == content[offset..end], "{len} bytes at {offset}");
        }
        assert!(disk.read_at("file", 700_001, 10).await.unwrap().is_empty());
        assert!(disk.read_at("file", 1 << 40, 10).await.unwrap().is_empty());
        assert!(disk.read("absent").await.is_err());
        assert!(disk.reads_directly(), "this directory's file system is known to allow it");
    });
}

/// procfs refuses `O_DIRECT`, as some file systems do.
#[test]
fn reads_fall_back_to_the_cache_where_they_must() {
    GlommioRt::run(async {
        let disk = LinuxDisk::open(Path::new("/proc/self")).unwrap();
        assert!(disk.reads_directly());
        let comm = disk.read("comm").await.unwrap();
        assert_eq!(comm, fs::read("/proc/self/comm").unwrap());
        assert!(!disk.reads_directly());
    });
}

#[test]
fn drafts_are_invisible_until_published_and_gone_when_dropped() {
    let dir = dir();
    fs::write(dir.path().join("left by a crash.7.tmp"), "x").unwrap();
    GlommioRt::run(async {
        let disk = LinuxDisk::open(dir.path()).unwrap();
        assert_eq!(names(dir.path()), [""; 0]);
        for content in ["first", "second"] {
            let mut draft = disk.draft("snapshot").await.unwrap();
            draft.write(content.as_bytes()).await.unwrap();
            draft.write(b" one").await.unwrap();
            let before = disk.read("snapshot").await.map_err(drop);
            let expected = if content == "first" { Err(()) } else { Ok(b"first one".to_vec()) };
            assert_eq!(before, expected);
            draft.publish().await.unwrap();
        }
        assert_eq!(disk.read("snapshot").await.unwrap(), b"second one");
        let mut dropped = disk.draft("snapshot").await.unwrap();
        dropped.write(b"never seen").await.unwrap();
        drop(dropped);
        // The next job runs behind the deletion.
        assert_eq!(disk.list().await.unwrap(), ["snapshot"]);
        assert_eq!(names(dir.path()), ["snapshot"]);
        disk.rename("snapshot", "renamed").await.unwrap();
        assert_eq!(disk.list().await.unwrap(), ["renamed"]);
        disk.sync_file("renamed").await.unwrap();
        disk.remove("renamed").await.unwrap();
        assert_eq!(disk.list().await.unwrap(), [""; 0]);
    });
}

#[test]
fn a_log_comes_back_and_grows_through_segments() {
    let dir = dir();
    let entries = |from: u64, to: u64| (from..=to).map(|index| (index, payload(index, 20_000)));
    for (from, to) in [(1, 70), (71, 75), (76, 150)] {
        GlommioRt::run(async {
            let (log, found) = open(dir.path()).await;
            let held = found.get(&A).map_or(0, |shard| shard.entries.len() as u64);
            assert_eq!(held, from - 1);
            let expected: Vec<_> = entries(1, held).collect();
            assert!(held == 0 || found[&A].entries == expected);
            let shard = log.shard(A);
            let done = Rc::new(std::cell::Cell::new(false));
            let told = done.clone();
            shard.append(entries(from, to), move |result| told.set(result.is_ok())).unwrap();
            shard.save_vote(&from.to_le_bytes()).await.unwrap();
            assert!(done.get(), "the vote was staged behind the entries");
            if from != 71 {
                log.close().await.unwrap();
            }
        });
    }
    GlommioRt::run(async {
        let (log, found) = open(dir.path()).await;
        assert_eq!(found[&A].vote.as_deref(), Some(&76_u64.to_le_bytes()[..]));
        let metrics = log.metrics();
        assert!(metrics.segments >= 3);
        // Everything is purged: only the newest segment and the spare stay.
        log.shard(A).purge(150, b"log id").unwrap();
        log.shard(A).flush().await.unwrap();
        while log.metrics().segments > 1 {
            GlommioRt::sleep(std::time::Duration::from_millis(1)).await;
        }
    });
    assert!(names(dir.path()).len() <= 2, "{:?}", names(dir.path()));
}

/// A commit of one small record writes about a page, not a large folio.
#[test]
fn commits_write_pages() {
    if let Some(dir) = role() {
        return count_commits(&dir);
    }
    let dir = dir();
    // A process of its own: the counter is the whole process's.
    let (code, output) = run_role("commits_write_pages", dir.path());
    assert_eq!(code, Some(0), "{output}");
}

fn count_commits(dir: &Path) {
    GlommioRt::run(async {
        let (log, _) = open(dir).await;
        for index in 1..=100 {
            log.shard(A).append([(index, payload(index, 200))], |_| {}).unwrap();
            log.shard(A).flush().await.unwrap();
        }
        let metrics = log.metrics();
        assert!(metrics.syncs >= 100);
        assert_eq!(metrics.sync_micros.len(), metrics.syncs);
        let amplification = metrics.write_amplification.expect("/proc/self/io is readable");
        println!("write amplification {amplification:.2}");
        assert!(amplification < 8.0, "write amplification {amplification}");
    });
}

#[test]
fn a_map_that_loses_its_file_ends_the_process_with_its_code() {
    if let Some(dir) = role() {
        sigbus::install(74).unwrap();
        GlommioRt::run(async {
            let disk = LinuxDisk::open(&dir).unwrap();
            disk.create_segment("blank", 64 * 1024).await.unwrap();
            let mut segment = disk.open_segment("blank").await.unwrap();
            fs::OpenOptions::new().write(true).open(dir.join("blank")).unwrap().set_len(0).unwrap();
            segment.store(0, b"x");
        });
        return;
    }
    let dir = dir();
    let (code, output) =
        run_role("a_map_that_loses_its_file_ends_the_process_with_its_code", dir.path());
    assert_eq!(code, Some(74), "{output}");
    assert!(output.contains("SIGBUS"), "{output}");
}

/// On a file system of 1 MiB, mounted in a namespace of a child process. Skipped, and said so,
/// where that is not allowed.
#[test]
fn a_full_file_system_is_an_error_and_what_was_made_before_still_works() {
    let name = "a_full_file_system_is_an_error_and_what_was_made_before_still_works";
    if let Some(dir) = role() {
        return fill_up(&dir);
    }
    let dir = dir();
    let (code, output) = run_role(name, dir.path());
    println!("{output}");
    assert_eq!(code, Some(0), "{output}");
}

fn fill_up(dir: &Path) {
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "none"])
        .arg(dir)
        .status()
        .is_ok_and(|status| status.success());
    if !mounted {
        println!("skipped: mounting is not allowed here");
        return;
    }
    GlommioRt::run(async {
        let disk = LinuxDisk::open(dir).unwrap();
        disk.create_segment("fits", 700 * 1024).await.unwrap();
        let error = disk.create_segment("does not fit", 700 * 1024).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        assert_eq!(disk.list().await.unwrap(), ["fits"]);
        let mut segment = disk.open_segment("fits").await.unwrap();
        segment.store(690 * 1024, &[7; 10 * 1024]);
        segment.sync().await.unwrap();
        disk.create_segment("fits too", 200 * 1024).await.unwrap();
    });
}

const ROLE: &str = "WAL_TEST_DIR";

/// The directory, if this process was started by `run_role`.
fn role() -> Option<PathBuf> {
    std::env::var_os(ROLE).map(PathBuf::from)
}

/// Runs one test of this file again in a child process, in a mount namespace of its own if that is
/// possible.
fn run_role(test: &str, dir: &Path) -> (Option<i32>, String) {
    let this = std::env::current_exe().unwrap();
    let args = ["--exact", test, "--nocapture"];
    let can_unshare =
        Command::new("unshare").args(["-m", "true"]).status().is_ok_and(|status| status.success());
    let mut command = if can_unshare {
        let mut command = Command::new("unshare");
        command.arg("-m").arg(&this);
        command
    } else {
        Command::new(&this)
    };
    let output = command.args(args).env(ROLE, dir).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}
