//! The data directory as a whole.
//!
//! ```text
//! DIR            locked (flock) by the process that uses it
//! DIR/pid        that process, for the message of a second one; not trusted
//! DIR/owner      node, disk id, core count, cluster name: written once
//! DIR/boot       raised by every start
//! DIR/birth      the record of the cluster's birth that this node promised itself to
//! DIR/restore    what the cluster's birth takes over from an older cluster, if anything
//! DIR/removed    the node was removed from its cluster: the directory is of no use any more
//! DIR/core-N/    the log and snapshots of core N
//! ```
//!
//! The lock is the kernel's and ends with the process however it ends, so no file left behind can
//! block a start. It is taken on the directory itself: removing a file does not free it.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use leasehold_protocol::ids::{DiskId, NodeId};
use rkyv::rancor;
use rustix::fs::FlockOperation;

use super::birth::{BirthStore, Promise};
use super::file::{self, FileError, FileKind};
use super::former::FormerPromise;
use super::restore::RestorePlan;
use crate::config::Config;
use crate::error::Exit;

const OWNER: &str = "owner";
const BOOT: &str = "boot";
const BIRTH: &str = "birth";
const RESTORE: &str = "restore";
const PID: &str = "pid";
const REMOVED: &str = "removed";

/// Whose directory it is; never rewritten.
#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The cluster's name.
    pub cluster: String,
    /// The node.
    pub node: NodeId,
    /// The directory's random identity.
    pub disk: DiskId,
    /// Number of cores.
    pub cores: u32,
}

/// Why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataDirError {
    /// Another process has it.
    #[error("data directory {} is in use by {}", path.display(), holder(*.pid))]
    InUse {
        /// The directory.
        path: PathBuf,
        /// The process, if it left its number.
        pid: Option<u32>,
    },
    /// It belongs to something else.
    #[error(
        "data directory {} belongs to {what} {stored}, but {what} {configured} is configured",
        path.display()
    )]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// As the directory has it.
        stored: String,
        /// As it is configured.
        configured: String,
    },
    /// The node was removed from its cluster.
    #[error(
        "data directory {} belongs to node {node}, which was removed from its cluster; wipe it and \
         add the node under a new id",
        path.display()
    )]
    Removed {
        /// The directory.
        path: PathBuf,
        /// The node.
        node: NodeId,
    },
    /// Something is in a directory that must be fresh.
    #[error(
        "data directory {} is not empty ({what} is in it); a cluster is restored into a new one",
        path.display()
    )]
    NotEmpty {
        /// The directory.
        path: PathBuf,
        /// The first thing that is in it.
        what: String,
    },
    /// A directory that was never used, where a used one is needed.
    #[error("{} is no data directory of a node that was ever part of a cluster", path.display())]
    NeverUsed {
        /// The directory.
        path: PathBuf,
    },
    /// A file cannot be read or written, or is damaged.
    #[error(transparent)]
    File(#[from] FileError),
}

fn holder(pid: Option<u32>) -> String {
    pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
}

impl DataDirError {
    /// The code to exit with.
    pub fn exit(&self) -> Exit {
        match self {
            Self::InUse { .. } => Exit::DataDirInUse,
            Self::Foreign { .. } | Self::NotEmpty { .. } => Exit::DataDirForeign,
            Self::Removed { .. } => Exit::NodeRemoved,
            Self::NeverUsed { .. } | Self::File(_) => Exit::DataDirUnusable,
        }
    }
}

/// An opened data directory. Dropping it ends the lock.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    owner: Owner,
    boot: u64,
    nonce: [u8; 16],
    promise: Option<Promise>,
    restore: Option<RestorePlan>,
    _lock: File,
}

/// A directory that another node's process left, looked at and not used.
#[derive(Debug)]
pub struct Remains {
    /// The directory.
    pub path: PathBuf,
    /// Whose it was.
    pub owner: Owner,
    /// Its promise.
    pub promise: Promise,
    _lock: File,
}

impl Remains {
    /// Locks the directory and reads whose it was; changes nothing in it but the pid file.
    pub fn open(path: &Path) -> Result<Self, DataDirError> {
        let none = || DataDirError::NeverUsed { path: path.to_owned() };
        if !path.join(OWNER).exists() {
            return Err(none());
        }
        let lock = lock(path)?;
        let owner = load_owner(path)?.ok_or_else(none)?;
        let promise = load_promise(path)?.ok_or_else(none)?;
        Ok(Self { path: path.to_owned(), owner, promise, _lock: lock })
    }

    /// The directory of one core.
    pub fn core_dir(&self, core: u32) -> PathBuf {
        self.path.join(format!("core-{core}"))
    }
}

impl DataDir {
    /// Makes or opens the configured directory: locks it, checks whose it is, raises its boot
    /// number durably. Returns at once if another process has it.
    pub fn open(config: &Config) -> Result<Self, DataDirError> {
        let path = config.process.data_dir.clone();
        make(&path)?;
        let lock = lock(&path)?;
        let owner = match load_owner(&path)? {
            Some(owner) => owner,
            None => claim(&path, config)?,
        };
        check_owner(&path, &owner, config)?;
        if path.join(REMOVED).exists() {
            return Err(DataDirError::Removed { path, node: owner.node });
        }
        let promise = load_promise(&path)?;
        let restore = load_restore(&path)?;
        let boot = raise_boot(&path, promise.is_some())?;
        Ok(Self { path, owner, boot, nonce: random(), promise, restore, _lock: lock })
    }

    /// Makes the configured directory, which must not exist or be empty, for a cluster that takes
    /// over from an older one.
    pub fn create_restored(config: &Config, plan: &RestorePlan) -> Result<Self, DataDirError> {
        let path = &config.process.data_dir;
        Self::check_empty(path)?;
        let mut dir = Self::open(config)?;
        let body = rkyv::to_bytes::<rancor::Error>(plan).expect("a plan is plain data");
        file::replace(path, RESTORE, &file::encode(FileKind::Restore, &body))?;
        dir.restore = Some(*plan);
        Ok(dir)
    }

    /// Errors unless there is nothing in the directory, or no directory.
    pub fn check_empty(path: &Path) -> Result<(), DataDirError> {
        let mut entries = match fs::read_dir(path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(FileError::io(path)(error).into()),
        };
        entries.try_for_each(|entry| {
            let entry = entry.map_err(FileError::io(path))?;
            let what = entry.file_name().to_string_lossy().into_owned();
            // A fresh file system's own.
            if what == "lost+found" {
                return Ok(());
            }
            Err(DataDirError::NotEmpty { path: path.to_owned(), what })
        })
    }

    /// What the birth of this directory's cluster takes over, or took over.
    pub fn restore(&self) -> Option<&RestorePlan> {
        self.restore.as_ref()
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whose it is.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// How many times it was opened, this time included.
    pub fn boot(&self) -> u64 {
        self.boot
    }

    /// Random, of this opening alone. With the boot number it tells two processes on copies of one
    /// directory apart.
    pub fn nonce(&self) -> [u8; 16] {
        self.nonce
    }

    /// The promise made at the cluster's birth, if there was one.
    pub fn promise(&self) -> Option<&Promise> {
        self.promise.as_ref()
    }

    /// The node was removed from its cluster: the directory will not be opened again.
    pub fn mark_removed(&self) -> Result<(), FileError> {
        file::replace(&self.path, REMOVED, &file::encode(FileKind::Removed, &[]))
    }

    /// The directory of one core, made durably if it does not exist.
    pub fn core_dir(&self, core: u32) -> Result<PathBuf, DataDirError> {
        assert!(core < self.owner.cores, "core {core} of {}", self.owner.cores);
        let dir = self.path.join(format!("core-{core}"));
        make(&dir)?;
        Ok(dir)
    }
}

impl BirthStore for DataDir {
    fn save(&mut self, promise: &Promise) -> Result<(), FileError> {
        let body = rkyv::to_bytes::<rancor::Error>(promise).expect("a promise is plain data");
        file::replace(&self.path, BIRTH, &file::encode(FileKind::Birth, &body))?;
        self.promise = Some(promise.clone());
        Ok(())
    }
}

fn make(dir: &Path) -> Result<(), FileError> {
    if dir.is_dir() {
        return Ok(());
    }
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700).create(dir).map_err(FileError::io(dir))?;
    match dir.parent() {
        Some(parent) if parent != Path::new("") => file::sync_dir(parent),
        _ => file::sync_dir(Path::new(".")),
    }
}

fn lock(path: &Path) -> Result<File, DataDirError> {
    let dir = File::open(path).map_err(FileError::io(path))?;
    let pid_path = path.join(PID);
    match rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {
            let pid = format!("{}\n", std::process::id());
            fs::write(&pid_path, pid).map_err(FileError::io(&pid_path))?;
            Ok(dir)
        }
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let text = fs::read_to_string(&pid_path).unwrap_or_default();
            let pid = text.trim().parse().ok();
            Err(DataDirError::InUse { path: path.to_owned(), pid })
        }
        Err(errno) => Err(FileError::io(path)(io::Error::from(errno)).into()),
    }
}

fn load_owner(dir: &Path) -> Result<Option<Owner>, DataDirError> {
    let path = dir.join(OWNER);
    if let Some(bytes) = file::read(&path)? {
        let body = file::decode(&path, FileKind::Owner, &bytes)?;
        return Ok(Some(unpack(&path, rkyv::from_bytes::<Owner, rancor::Error>(body))?));
    }
    // A directory that lost its owner file is not a fresh one: it may hold acknowledged data.
    for rest in [BOOT, BIRTH, RESTORE, "core-0"] {
        if dir.join(rest).exists() {
            let what = "missing, although the directory was used before";
            return Err(FileError::Damaged { path, what }.into());
        }
    }
    Ok(None)
}

fn claim(dir: &Path, config: &Config) -> Result<Owner, FileError> {
    let owner = Owner {
        cluster: config.cluster.name.clone(),
        node: config.process.node_id,
        disk: DiskId(random()),
        cores: config.process.cores,
    };
    let body = rkyv::to_bytes::<rancor::Error>(&owner).expect("an owner is plain data");
    file::replace(dir, OWNER, &file::encode(FileKind::Owner, &body))?;
    Ok(owner)
}

fn check_owner(path: &Path, owner: &Owner, config: &Config) -> Result<(), DataDirError> {
    let foreign = |what, stored: &dyn ToString, configured: &dyn ToString| {
        let (stored, configured) = (stored.to_string(), configured.to_string());
        if stored == configured {
            return Ok(());
        }
        Err(DataDirError::Foreign { path: path.to_owned(), what, stored, configured })
    };
    foreign("cluster", &owner.cluster, &config.cluster.name)?;
    foreign("node-id", &owner.node, &config.process.node_id)?;
    foreign("a core count of", &owner.cores, &config.process.cores)
}

fn load_promise(dir: &Path) -> Result<Option<Promise>, FileError> {
    let path = dir.join(BIRTH);
    let Some(bytes) = file::read(&path)? else { return Ok(None) };
    let promise = if file::claims(FileKind::BirthFormer, &bytes) {
        let body = file::decode(&path, FileKind::BirthFormer, &bytes)?;
        unpack(&path, rkyv::from_bytes::<FormerPromise, rancor::Error>(body))?.into()
    } else {
        let body = file::decode(&path, FileKind::Birth, &bytes)?;
        unpack(&path, rkyv::from_bytes::<Promise, rancor::Error>(body))?
    };
    if promise.record.is_well_formed() {
        Ok(Some(promise))
    } else {
        Err(FileError::Damaged { path, what: "no well-formed birth record" })
    }
}

fn load_restore(dir: &Path) -> Result<Option<RestorePlan>, FileError> {
    let path = dir.join(RESTORE);
    let Some(bytes) = file::read(&path)? else { return Ok(None) };
    let body = file::decode(&path, FileKind::Restore, &bytes)?;
    Ok(Some(unpack(&path, rkyv::from_bytes::<RestorePlan, rancor::Error>(body))?))
}

fn raise_boot(dir: &Path, promised: bool) -> Result<u64, FileError> {
    let path = dir.join(BOOT);
    let last = match file::read(&path)? {
        Some(bytes) => {
            let body = file::decode(&path, FileKind::Boot, &bytes)?;
            let what = "a boot number has eight bytes";
            let bytes = body.try_into().map_err(|_| FileError::Damaged { path, what })?;
            u64::from_le_bytes(bytes)
        }
        // The first start may end between the two files, but no promise is made before both.
        None if promised => {
            let what = "missing, although the directory was used before";
            return Err(FileError::Damaged { path, what });
        }
        None => 0,
    };
    let boot = last + 1;
    file::replace(dir, BOOT, &file::encode(FileKind::Boot, &boot.to_le_bytes()))?;
    Ok(boot)
}

fn unpack<T>(path: &Path, value: Result<T, rancor::Error>) -> Result<T, FileError> {
    let what = "its body is malformed";
    value.map_err(|_| FileError::Damaged { path: path.to_owned(), what })
}

fn random() -> [u8; 16] {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the kernel has random bytes");
    bytes
}

#[cfg(test)]
mod tests {
    use leasehold_protocol::birth::{BirthMember, BirthRecord};
    use leasehold_protocol::ids::ClusterId;

    use super::*;
    use crate::config::Settings;

    fn config(dir: &Path, change: (&str, &str)) -> Config {
        let mut settings = Settings::new();
        let dir = dir.to_str().unwrap();
        let own = [("node-id", "1"), ("data-dir", dir), ("cores", "2"), ("cluster", "red")];
        own.into_iter().chain([change]).for_each(|(key, value)| settings.add_flag(key, value));
        Config::resolve(&settings).unwrap()
    }

    fn open(dir: &Path) -> Result<DataDir, DataDirError> {
        DataDir::open(&config(dir, ("cluster", "red")))
    }

    fn promise(disk: DiskId) -> Promise {
        let address = || "a:1".to_owned();
        let member =
            BirthMember { node: NodeId(1), disk, peer_addr: address(), client_addr: address() };
        let record = BirthRecord {
            cluster: ClusterId([7; 16]),
            name: "red".to_owned(),
            members: vec![member],
            shards: 1,
            key_hash: 1,
            token_base: 9,
            restored: None,
        };
        Promise { record, founded: true, joined: false }
    }

    #[test]
    fn a_second_opening_is_refused_with_the_pid_and_the_first_goes_on() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("made/on/the/way");
        let first = open(&dir).unwrap();
        let error = open(&dir).unwrap_err();
        assert_eq!(error.exit(), Exit::DataDirInUse);
        let text = error.to_string();
        assert!(text.contains(&format!("process {}", std::process::id())), "{text}");
        assert!(text.contains("made/on/the/way"), "{text}");
        fs::remove_file(dir.join(PID)).unwrap();
        assert!(open(&dir).unwrap_err().to_string().contains("another process"));
        drop(first);
        open(&dir).unwrap();
    }

    #[test]
    fn files_left_behind_block_no_start_and_each_start_is_told_apart() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join(PID), "1\n").unwrap();
        fs::write(root.path().join("owner.new"), "half").unwrap();
        fs::create_dir(root.path().join("lost+found")).unwrap();
        let (disk, nonce) = {
            let dir = open(root.path()).unwrap();
            assert_eq!(dir.boot(), 1);
            (dir.owner().disk, dir.nonce())
        };
        for boot in 2..5 {
            let dir = open(root.path()).unwrap();
            assert_eq!((dir.boot(), dir.owner().disk), (boot, disk));
            assert_ne!(dir.nonce(), nonce);
        }
    }

    #[test]
    fn a_foreign_directory_is_refused_with_both_values() {
        let root = tempfile::tempdir().unwrap();
        drop(open(root.path()).unwrap());
        for (key, value, text) in [
            ("cluster", "blue", "belongs to cluster red, but cluster blue is configured"),
            ("node-id", "3", "belongs to node-id 1, but node-id 3 is configured"),
            ("cores", "4", "a core count of 2, but a core count of 4 is configured"),
        ] {
            let error = DataDir::open(&config(root.path(), (key, value))).unwrap_err();
            assert_eq!(error.exit(), Exit::DataDirForeign);
            assert!(error.to_string().contains(text), "{error}");
        }
        assert_eq!(open(root.path()).unwrap().boot(), 2, "a refusal raises nothing");
    }

    #[test]
    fn a_promise_is_kept() {
        let root = tempfile::tempdir().unwrap();
        let kept = {
            let mut dir = open(root.path()).unwrap();
            assert!(dir.promise().is_none());
            let promise = promise(dir.owner().disk);
            dir.save(&promise).unwrap();
            promise
        };
        assert_eq!(open(root.path()).unwrap().promise(), Some(&kept));
    }

    #[test]
    fn a_used_directory_without_its_files_is_not_a_fresh_one() {
        for missing in [OWNER, BOOT] {
            let root = tempfile::tempdir().unwrap();
            {
                let mut dir = open(root.path()).unwrap();
                let promise = promise(dir.owner().disk);
                dir.save(&promise).unwrap();
            }
            fs::remove_file(root.path().join(missing)).unwrap();
            let error = open(root.path()).unwrap_err();
            assert_eq!(error.exit(), Exit::DataDirUnusable);
            assert!(error.to_string().contains("missing"), "{error}");
        }
    }

    #[test]
    fn a_start_that_ended_between_two_files_is_resumed() {
        let root = tempfile::tempdir().unwrap();
        let disk = open(root.path()).unwrap().owner().disk;
        fs::remove_file(root.path().join(BOOT)).unwrap();
        let dir = open(root.path()).unwrap();
        assert_eq!((dir.boot(), dir.owner().disk), (1, disk));
    }

    #[test]
    fn damage_is_named_and_never_repaired() {
        for name in [OWNER, BOOT, BIRTH] {
            let root = tempfile::tempdir().unwrap();
            {
                let mut dir = open(root.path()).unwrap();
                let promise = promise(dir.owner().disk);
                dir.save(&promise).unwrap();
            }
            let path = root.path().join(name);
            let mut bytes = fs::read(&path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(&path, &bytes).unwrap();
            let text = open(root.path()).unwrap_err().to_string();
            assert!(text.contains(path.to_str().unwrap()) && text.contains("checksum"), "{text}");
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
    }

    fn plan() -> RestorePlan {
        let restored = leasehold_protocol::birth::Restored {
            from: ClusterId([1; 16]),
            lease_base: 2,
            revision_base: 3,
            quarantine_ms: 4,
        };
        RestorePlan { old_wall_ms: 5, token_floor: 6, restored }
    }

    #[test]
    fn a_restore_is_kept_in_a_fresh_directory_and_refused_in_any_other() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("lost+found")).unwrap();
        let config = config(root.path(), ("cluster", "red"));
        assert_eq!(DataDir::create_restored(&config, &plan()).unwrap().restore(), Some(&plan()));
        assert_eq!(DataDir::open(&config).unwrap().restore(), Some(&plan()));
        let error = DataDir::create_restored(&config, &plan()).unwrap_err();
        assert_eq!(error.exit(), Exit::DataDirForeign);
        assert!(error.to_string().contains("is not empty"), "{error}");
        fs::remove_file(root.path().join(OWNER)).unwrap();
        assert_eq!(DataDir::open(&config).unwrap_err().exit(), Exit::DataDirUnusable);
    }

    #[test]
    fn a_promise_of_the_former_format_is_read() {
        use super::super::former::{FormerPromise, FormerRecord};
        let root = tempfile::tempdir().unwrap();
        let disk = open(root.path()).unwrap().owner().disk;
        let promise = promise(disk);
        let record = promise.record.clone();
        let former = FormerPromise {
            record: FormerRecord {
                cluster: record.cluster,
                name: record.name,
                members: record.members,
                shards: record.shards,
                key_hash: record.key_hash,
                token_base: record.token_base,
            },
            founded: promise.founded,
        };
        let body = rkyv::to_bytes::<rancor::Error>(&former).unwrap();
        let bytes = file::encode(FileKind::BirthFormer, &body);
        file::replace(root.path(), BIRTH, &bytes).unwrap();
        assert_eq!(open(root.path()).unwrap().promise(), Some(&promise));
    }

    #[test]
    fn remains_are_those_of_a_founded_node() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Remains::open(root.path()).unwrap_err().exit(), Exit::DataDirUnusable);
        {
            let mut dir = open(root.path()).unwrap();
            let error = Remains::open(root.path()).unwrap_err();
            assert_eq!(error.exit(), Exit::DataDirInUse);
            let promise = promise(dir.owner().disk);
            dir.save(&promise).unwrap();
        }
        let remains = Remains::open(root.path()).unwrap();
        assert_eq!((remains.owner.cores, remains.promise.record.token_base), (2, 9));
        assert_eq!(open(root.path()).unwrap_err().exit(), Exit::DataDirInUse);
    }

    #[test]
    fn cores_have_directories_of_their_own() {
        let root = tempfile::tempdir().unwrap();
        let dir = open(root.path()).unwrap();
        assert_eq!(dir.core_dir(1).unwrap(), root.path().join("core-1"));
        assert!(dir.core_dir(1).unwrap().is_dir());
    }
}
