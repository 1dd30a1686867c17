//! Builds the workspace's tests with faults in them, each when it is first wanted.
//!
//! Cargo runs the workspace's own crates, and only those, through the program that
//! `RUSTC_WORKSPACE_WRAPPER` names, and tells builds apart by its path. So there is one small script
//! for each thing that may be planted, and no dependency is built twice.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::programs::Program;

/// All faults are in the build, asleep.
pub(crate) const ALL: &str = "all";
/// No fault is in the build.
pub(crate) const NONE: &str = "none";

/// The programs of one build.
pub(crate) struct Build {
    root: PathBuf,
    target: PathBuf,
    planted: &'static str,
    wrapper: OsString,
    /// By package and target; with the directory of the package.
    programs: BTreeMap<(String, String), (PathBuf, PathBuf)>,
    /// What the workspace's own crates left in the target directory.
    files: Vec<PathBuf>,
    has_bins: bool,
}

/// What cargo says of one thing that it built.
#[derive(Deserialize)]
struct Message {
    reason: String,
    #[serde(default)]
    manifest_path: PathBuf,
    target: Option<Target>,
    profile: Option<Profile>,
    #[serde(default)]
    filenames: Vec<PathBuf>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

impl Build {
    /// Nothing is built yet.
    pub(crate) fn new(root: &Path, target: &Path, planted: &'static str) -> io::Result<Self> {
        Ok(Self {
            root: root.to_owned(),
            target: target.to_owned(),
            planted,
            wrapper: wrapper(target, planted)?,
            programs: BTreeMap::new(),
            files: Vec::new(),
            has_bins: false,
        })
    }

    /// A test program, built if it was not yet, and the directory in which cargo would run it.
    pub(crate) fn program(&mut self, program: &Program) -> io::Result<(PathBuf, PathBuf)> {
        let name = (program.package.to_owned(), program.target.to_owned());
        if !self.programs.contains_key(&name) {
            if program.needs_bins() && !self.has_bins {
                self.cargo(&["build", "--workspace", "--bins"])?;
                self.has_bins = true;
            }
            match program.target {
                "lib" => self.cargo(&["test", "--no-run", "--workspace", "--lib"])?,
                test => self.cargo(&["test", "--no-run", "--workspace", "--test", test])?,
            }
        }
        let built = self.programs.get(&name).cloned();
        built.ok_or_else(|| io::Error::other(format!("{program} is not among what was built")))
    }

    /// Where the programs are that the tests start.
    pub(crate) fn bin_dir(&self) -> PathBuf {
        self.target.join("debug")
    }

    fn cargo(&mut self, arguments: &[&str]) -> io::Result<()> {
        let output = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()))
            .args(arguments)
            .args(["--quiet", "--message-format=json-render-diagnostics"])
            .current_dir(&self.root)
            .env("RUSTC_WORKSPACE_WRAPPER", &self.wrapper)
            .env("CARGO_TARGET_DIR", &self.target)
            // What nobody looks at need not be built.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("CARGO_INCREMENTAL", "0")
            .stderr(Stdio::inherit())
            .output()?;
        if !output.status.success() {
            let text = format!("cargo {} with {} planted", arguments.join(" "), self.planted);
            return Err(io::Error::other(format!("{text} failed")));
        }
        for line in output.stdout.split(|byte| *byte == b'\n') {
            if let Ok(message) = serde_json::from_slice(line) {
                self.add(message);
            }
        }
        Ok(())
    }

    fn add(&mut self, message: Message) {
        let ours = message.manifest_path.starts_with(&self.root);
        let (true, Some(target), "compiler-artifact") = (ours, message.target, &*message.reason)
        else {
            return;
        };
        self.files.extend(message.filenames);
        let is_test = message.profile.is_some_and(|profile| profile.test);
        let (true, Some(executable)) = (is_test, message.executable) else { return };
        let dir = message.manifest_path.parent().unwrap_or(&self.root).to_owned();
        let package = std::fs::read_to_string(&message.manifest_path).unwrap_or_default();
        let package = package.lines().find_map(|line| line.strip_prefix("name = "));
        let package = package.unwrap_or_default().trim_matches('"').to_owned();
        let is_lib = target.kind.iter().any(|kind| kind.ends_with("lib"));
        let name = if is_lib { "lib".to_owned() } else { target.name };
        self.programs.insert((package, name), (executable, dir));
    }

    /// Frees the disk.
    pub(crate) fn remove(&self) {
        for file in &self.files {
            // What is gone already needs no removal.
            let _ = std::fs::remove_file(file);
        }
    }
}

/// The script that compiles with `planted`.
fn wrapper(target: &Path, planted: &str) -> io::Result<OsString> {
    let dir = target.join("wrappers");
    std::fs::create_dir_all(&dir)?;
    let path = dir.join(planted);
    let flags = match planted {
        NONE => String::new(),
        name => format!(" --cfg planted --cfg 'planted=\"{name}\"'"),
    };
    let script = format!("#!/bin/sh\nexec \"$@\"{flags}\n");
    // Cargo looks at its time: an unchanged one is left alone.
    if std::fs::read_to_string(&path).ok().as_ref() != Some(&script) {
        std::fs::write(&path, script)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(path.into())
}
