//! Planted faults: each breaks one rule on purpose, to show that the tests notice (`make mutants`,
//! docs/MUTANTS.md).
//!
//! A fault is a branch on `planted!("its-name")`: the constant `false` in every normal build, true
//! in one built with `--cfg planted="its-name"`. A build with `--cfg planted="all"` carries all of
//! them, asleep, and the variable `PLANTED_FAULT` wakes one. The table of `mutants` lists the names.

/// True where this fault is planted and awake, and nowhere else.
#[macro_export]
macro_rules! planted {
    ($name:tt) => {
        cfg!(any(planted = $name, planted = "all")) && $crate::planted::awake($name)
    };
}

/// No fault is in this build.
#[cfg(not(planted))]
pub const fn awake(_name: &str) -> bool {
    false
}

/// Whether this fault is awake. If so, a note is left, once a process, in the file that the variable
/// `PLANTED_NOTE` names: a fault that no test notices and one that no test reaches are different
/// holes.
#[cfg(planted)]
pub fn awake(name: &str) -> bool {
    extern crate std;
    use std::io::Write as _;
    use std::string::String;
    use std::sync::{Once, OnceLock};

    static WOKEN: OnceLock<Option<String>> = OnceLock::new();
    static NOTED: Once = Once::new();
    let woken = WOKEN.get_or_init(|| std::env::var("PLANTED_FAULT").ok());
    if cfg!(planted = "all") && woken.as_deref() != Some(name) {
        return false;
    }
    NOTED.call_once(|| {
        let Some(path) = std::env::var_os("PLANTED_NOTE") else { return };
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        let noted = file.and_then(|mut file| std::writeln!(file, "{name}"));
        noted.expect("the runner's note can be written");
    });
    true
}
