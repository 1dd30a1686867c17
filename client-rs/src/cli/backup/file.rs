//! A backup as a file: written under another name, synced, read back, and then given its own name,
//! which no other file may have. What may take long is done beside the runtime, whose sessions must
//! be renewed meanwhile.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use leasehold_core::backup::{Contents, Inspector};

use super::super::exit::CliError;
use super::place::Place;
use super::{Draft, unsound};

/// Bytes of a backup that are read at once.
const READ_LEN: usize = 256 * 1024;

/// A file in the making. Its draft is removed at the end whatever became of it.
pub(super) struct FileDraft {
    path: PathBuf,
    draft: PathBuf,
    file: Option<File>,
}

impl FileDraft {
    pub(super) fn new(path: &Path) -> Result<Self, CliError> {
        if path.exists() {
            return Err(CliError::Usage(format!("{} exists already", path.display())));
        }
        let mut draft = path.as_os_str().to_owned();
        draft.push(format!(".{}.new", std::process::id()));
        Ok(Self { path: path.to_owned(), draft: draft.into(), file: None })
    }

    /// For the eyes of its owner alone: it tells who locks what.
    fn create(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600).open(&self.draft)
    }

    fn file(&mut self) -> &mut File {
        self.file.as_mut().expect("a draft is begun before it is written")
    }

    fn link(&self) -> io::Result<()> {
        std::fs::hard_link(&self.draft, &self.path)?;
        let dir = self.path.parent().filter(|dir| *dir != Path::new(""));
        File::open(dir.unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Draft for FileDraft {
    async fn begin(&mut self) -> Result<(), CliError> {
        self.file = Some(self.create().map_err(at(&self.path))?);
        Ok(())
    }

    async fn put(&mut self, bytes: &[u8]) -> Result<(), CliError> {
        let written = self.file().write_all(bytes);
        written.map_err(at(&self.path))
    }

    async fn end(&mut self) -> Result<(), CliError> {
        let file = self.file.take().expect("a draft is begun before it ends");
        let synced = beside(move || file.sync_all()).await;
        synced.map_err(at(&self.path))
    }

    async fn check(&mut self, place: &Place) -> Result<Contents, CliError> {
        verify(&self.draft, place).await
    }

    async fn publish(&mut self) -> Result<(), CliError> {
        self.link().map_err(at(&self.path))
    }

    async fn discard(&mut self) {
        // It may never have been made.
        let _ = std::fs::remove_file(&self.draft);
    }
}

/// Checks every byte of a file, which is a copy of `place` or the place itself.
pub(super) async fn verify(path: &Path, place: &Place) -> Result<Contents, CliError> {
    let (path, place) = (path.to_owned(), place.clone());
    beside(move || read(&path, &place)).await
}

/// Does what blocks in a thread of its own.
async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("it does not panic and is not aborted")
}

fn read(path: &Path, place: &Place) -> Result<Contents, CliError> {
    let mut file = File::open(path).map_err(at(path))?;
    let mut inspector = Inspector::new();
    let mut buffer = vec![0; READ_LEN];
    loop {
        match file.read(&mut buffer).map_err(at(path))? {
            0 => break,
            len => inspector.feed(&buffer[..len]).map_err(unsound(place))?,
        }
    }
    inspector.finish().map_err(unsound(place))
}

/// Names the file that an error is about.
fn at(path: &Path) -> impl Fn(io::Error) -> CliError {
    move |error| {
        let text = format!("{}: {error}", path.display());
        CliError::Io(io::Error::new(error.kind(), text))
    }
}
