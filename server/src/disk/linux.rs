//! Files on Linux: mapped segments synced through `io_uring`, the rest on a helper thread.
//!
//! Segments are zero-filled with 4 KiB writes and never read in larger pieces through the page
//! cache. Both are deliberate: since Linux 6.16 ext4 caches what was written or read in bulk in
//! large folios, and a store of 256 bytes through the map then dirties, and each commit writes, up
//! to 2 MiB (`docs/WAL.md`). For the same reason reads go past the cache (`O_DIRECT`), which also
//! shows what is really on the device. Where a file system refuses that (tmpfs on old kernels),
//! they fall back to small cached reads, and say so once.
//!
//! A file system that allocates new blocks on overwriting (btrfs, ZFS and the like) is refused: a
//! full disk would kill the process at a store into memory instead of failing a call.

use std::cell::Cell;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{FromRawFd as _, IntoRawFd as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use glommio::io::BufferedFile;
use memmap2::{Advice, MmapMut, MmapOptions};
use rustix::fs::{Advice as FileAdvice, fadvise, statfs};

use super::helper::Helper;
use crate::env::{Disk, Draft, Segment};

/// Unit of zero-filling, of cached reads, and alignment of direct ones.
const PAGE_LEN: usize = 4096;
/// Bytes of one direct read.
const READ_LEN: usize = 256 * 1024;
/// Ends the name of a file that is not published.
const DRAFT_SUFFIX: &str = ".tmp";

/// File systems that do not overwrite in place, by the number that statfs reports.
const REFUSED: [(i64, &str); 5] = [
    (0x9123_683e, "btrfs"),
    (0x2fc1_2fc1, "zfs"),
    (0xca45_1a4e, "bcachefs"),
    (0xf2f5_2010, "f2fs"),
    (0x3434, "nilfs2"),
];

/// One directory. Clones are handles to the same one.
#[derive(Clone)]
pub struct LinuxDisk {
    inner: Rc<Inner>,
}

struct Inner {
    dir: Arc<Path>,
    helper: Helper,
    direct: Arc<AtomicBool>,
    drafts: Cell<u64>,
}

impl LinuxDisk {
    /// Uses an existing directory and starts its helper thread. Drafts that a crash left are
    /// deleted. The caller holds the data directory's lock: nobody else changes these files.
    pub fn open(dir: &Path) -> io::Result<Self> {
        refuse_copy_on_write(dir)?;
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().ends_with(DRAFT_SUFFIX) {
                fs::remove_file(entry.path())?;
            }
        }
        let inner = Inner {
            dir: dir.into(),
            helper: Helper::start()?,
            direct: Arc::new(AtomicBool::new(true)),
            drafts: Cell::new(0),
        };
        Ok(Self { inner: Rc::new(inner) })
    }

    /// False once a read had to go through the page cache.
    pub fn reads_directly(&self) -> bool {
        self.inner.direct.load(Ordering::Relaxed)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.inner.dir.join(name)
    }

    fn draft_path(&self, name: &str) -> PathBuf {
        let number = self.inner.drafts.get();
        self.inner.drafts.set(number + 1);
        self.path(&format!("{name}.{number}{DRAFT_SUFFIX}"))
    }

    /// Runs `work` with the directory on the helper thread.
    async fn in_dir<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let dir = self.inner.dir.clone();
        self.inner.helper.run(move || work(&dir)).await
    }
}

fn refuse_copy_on_write(dir: &Path) -> io::Result<()> {
    // The field's type differs between architectures; the numbers fit into 32 bits.
    let number = i64::from(statfs(dir)?.f_type as u32);
    match REFUSED.iter().find(|(refused, _)| *refused == number) {
        None => Ok(()),
        Some((_, name)) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!(
                "{} is on {name}, which does not overwrite in place; use ext4 or XFS",
                dir.display()
            ),
        )),
    }
}

impl Disk for LinuxDisk {
    type Segment = LinuxSegment;
    type Draft = LinuxDraft;

    async fn list(&self) -> io::Result<Vec<String>> {
        self.in_dir(|dir| {
            let mut names = Vec::new();
            for entry in fs::read_dir(dir)? {
                let name = entry?.file_name().to_string_lossy().into_owned();
                if !name.ends_with(DRAFT_SUFFIX) {
                    names.push(name);
                }
            }
            names.sort_unstable();
            Ok(names)
        })
        .await
    }

    async fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let (path, direct) = (self.path(name), self.inner.direct.clone());
        self.inner.helper.run(move || read(&path, 0, usize::MAX, &direct)).await
    }

    async fn read_at(&self, name: &str, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let (path, direct) = (self.path(name), self.inner.direct.clone());
        self.inner.helper.run(move || read(&path, offset, len, &direct)).await
    }

    async fn create_segment(&self, name: &str, len: u64) -> io::Result<()> {
        let (draft, path) = (self.draft_path(name), self.path(name));
        self.in_dir(move |dir| {
            let made = fill_with_zeroes(&draft, len).and_then(|()| publish(dir, &draft, &path));
            // A full disk needs the room back; if this fails too, the next start deletes it.
            made.inspect_err(|_| drop(fs::remove_file(&draft)))
        })
        .await
    }

    async fn open_segment(&self, name: &str) -> io::Result<LinuxSegment> {
        let path = self.path(name);
        let (map, file) = self.inner.helper.run(move || map_segment(&path)).await?;
        // SAFETY: the descriptor was just released by its only owner, so this one may close it.
        let file = unsafe { BufferedFile::from_raw_fd(file.into_raw_fd()) };
        Ok(LinuxSegment { map, file })
    }

    async fn draft(&self, name: &str) -> io::Result<LinuxDraft> {
        let (draft, path) = (self.draft_path(name), self.path(name));
        let created = draft.clone();
        let file = self.inner.helper.run(move || File::create_new(&created)).await?;
        Ok(LinuxDraft { disk: self.clone(), draft, path, file: Some(file) })
    }

    async fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let (from, to) = (self.path(from), self.path(to));
        self.in_dir(move |dir| publish(dir, &from, &to)).await
    }

    async fn remove(&self, name: &str) -> io::Result<()> {
        let path = self.path(name);
        self.in_dir(move |dir| fs::remove_file(path).and_then(|()| sync_dir(dir))).await
    }

    async fn sync_file(&self, name: &str) -> io::Result<()> {
        let path = self.path(name);
        let sync = move || OpenOptions::new().write(true).open(path)?.sync_all();
        self.inner.helper.run(sync).await
    }

    async fn sync_dir(&self) -> io::Result<()> {
        self.in_dir(sync_dir).await
    }

    fn written_bytes(&self) -> Option<u64> {
        let counters = fs::read_to_string("/proc/self/io").ok()?;
        let line = counters.lines().find_map(|line| line.strip_prefix("write_bytes:"))?;
        line.trim().parse().ok()
    }
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn publish(dir: &Path, from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    sync_dir(dir)
}

fn fill_with_zeroes(path: &Path, len: u64) -> io::Result<()> {
    let file = File::create_new(path)?;
    let zeroes = [0; PAGE_LEN];
    let mut offset = 0;
    while offset < len {
        let piece = (len - offset).min(PAGE_LEN as u64);
        file.write_all_at(&zeroes[..piece as usize], offset)?;
        offset += piece;
    }
    file.sync_all()
}

fn map_segment(path: &Path) -> io::Result<(MmapMut, File)> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    touch_pages(&file)?;
    // SAFETY: nobody truncates or writes a segment while it is mapped: the data directory is
    // locked, and the WAL deletes segments but never shortens one.
    let map = unsafe { MmapOptions::new().map_mut(&file)? };
    // Keeps faults from reading ahead in larger units.
    map.advise(Advice::Random)?;
    Ok((map, file))
}

/// Brings every page into the cache, one by one, so that a store never waits for the device.
fn touch_pages(file: &File) -> io::Result<()> {
    fadvise(file, 0, None, FileAdvice::Random)?;
    let mut page = [0; PAGE_LEN];
    let mut offset = 0;
    while file.read_at(&mut page, offset)? > 0 {
        offset += PAGE_LEN as u64;
    }
    Ok(())
}

/// Up to `len` bytes from `offset`, past the page cache where that is possible.
fn read(path: &Path, offset: u64, len: usize, direct: &AtomicBool) -> io::Result<Vec<u8>> {
    let refused = |error: &io::Error| error.kind() == io::ErrorKind::InvalidInput;
    match read_directly(path, offset, len) {
        Err(error) if refused(&error) => {
            if direct.swap(false, Ordering::Relaxed) {
                tracing::warn!(path = %path.display(), "the file system refuses direct reads");
            }
            read_cached(path, offset, len)
        }
        answer => answer,
    }
}

fn read_directly(path: &Path, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let mut memory = vec![0; READ_LEN + PAGE_LEN];
    let aligned = memory.as_ptr().align_offset(PAGE_LEN);
    let buffer = &mut memory[aligned..aligned + READ_LEN];
    let skipped = (offset % PAGE_LEN as u64) as usize;
    let mut bytes =
        read_pieces(&file, buffer, offset - skipped as u64, len.saturating_add(skipped))?;
    bytes.drain(..skipped.min(bytes.len()));
    Ok(bytes)
}

fn read_cached(path: &Path, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    fadvise(&file, 0, None, FileAdvice::Random)?;
    read_pieces(&file, &mut [0; PAGE_LEN], offset, len)
}

/// Up to `len` bytes from `offset`, one buffer after the other.
fn read_pieces(file: &File, buffer: &mut [u8], offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let got = file.read_at(buffer, offset + bytes.len() as u64)?;
        bytes.extend_from_slice(&buffer[..got]);
        // A piece that ends between two pages has met the end of the file; asking once more at
        // such an offset is what a direct read refuses.
        if got == 0 || got % PAGE_LEN != 0 {
            break;
        }
    }
    bytes.truncate(len);
    Ok(bytes)
}

/// A mapped file.
pub struct LinuxSegment {
    map: MmapMut,
    file: BufferedFile,
}

impl Segment for LinuxSegment {
    fn len(&self) -> u64 {
        self.map.len() as u64
    }

    fn store(&mut self, offset: u64, bytes: &[u8]) {
        let offset = usize::try_from(offset).expect("inside the map");
        self.map[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    async fn sync(&self) -> io::Result<()> {
        self.file.fdatasync().await.map_err(io::Error::from)
    }
}

/// A file that has no name yet.
pub struct LinuxDraft {
    disk: LinuxDisk,
    draft: PathBuf,
    path: PathBuf,
    /// Gone while a job has it, and for good if that job's future was dropped.
    file: Option<File>,
}

impl LinuxDraft {
    fn take_file(&mut self) -> io::Result<File> {
        self.file.take().ok_or_else(|| io::Error::other("an earlier write did not end"))
    }
}

impl Draft for LinuxDraft {
    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.take_file()?;
        let bytes = bytes.to_vec();
        let written = self.disk.inner.helper.run(move || {
            file.write_all(&bytes)?;
            Ok(file)
        });
        self.file = Some(written.await?);
        Ok(())
    }

    async fn publish(mut self) -> io::Result<()> {
        let file = self.take_file()?;
        let (draft, path) = (self.draft.clone(), self.path.clone());
        self.disk
            .in_dir(move |dir| {
                file.sync_all()?;
                publish(dir, &draft, &path)
            })
            .await
    }
}

impl Drop for LinuxDraft {
    fn drop(&mut self) {
        // After `publish` there is nothing left under this name, which is as good. Not waited for.
        let draft = self.draft.clone();
        drop(self.disk.inner.helper.run(move || fs::remove_file(draft)));
    }
}
