//! A backup as an object of an S3-compatible store.
//!
//! It is uploaded in parts as another object, read back and checked, and then copied by the store
//! itself to its own name, on the condition that nothing has that name. A store that does not keep
//! to the condition is found out beforehand, and nothing is published there.

use std::fmt::Display;
use std::io::{self, Write};
use std::time::Duration;

use futures_util::TryStreamExt;
use leasehold_core::backup::{Contents, Inspector};
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, S3CopyIfNotExists};
use object_store::path::Path;
use object_store::{ClientConfigKey, Error, MultipartUpload, ObjectStoreExt, RetryConfig};

use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use super::super::exit::{CliError, FAILED};
use super::place::{ObjectName, Place};
use super::{Draft, unsound};

/// Bytes of a part, which is what is kept in memory. Stores take 10 000 parts of at least 5 MiB.
const PART_LEN: usize = 8 * 1024 * 1024;
/// Pieces of an answer that wait to be inspected.
const PIECES_AHEAD: usize = 4;
/// What stores copy in one piece.
const COPY_MAX: u64 = 5 * 1024 * 1024 * 1024;
/// How often a request is repeated that the store did not answer or could not serve.
const RETRIES_MAX: usize = 5;
/// No request is repeated later than this after its first attempt.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);
/// One request; the copy of a large backup takes the store some time.
const REQUEST_TIMEOUT: &str = "600s";

/// An object of a store.
pub(super) struct Object {
    store: AmazonS3,
    path: Path,
    name: ObjectName,
}

impl Object {
    /// Reads where the store is and who asks from the environment (`AWS_…`); asks it nothing yet.
    pub(super) fn open(name: &ObjectName) -> Result<Self, CliError> {
        // Refused if there is one already, which then serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let retry = RetryConfig {
            max_retries: RETRIES_MAX,
            retry_timeout: RETRY_TIMEOUT,
            ..RetryConfig::default()
        };
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(&name.bucket)
            .with_retry(retry)
            .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::Timeout), REQUEST_TIMEOUT)
            .with_disable_bulk_delete(true);
        if builder.get_config_value(&AmazonS3ConfigKey::CopyIfNotExists).is_none() {
            builder = builder.with_copy_if_not_exists(S3CopyIfNotExists::Multipart);
        }
        let usage = |error: &dyn Display| CliError::Usage(format!("{name}: {error}"));
        let path = Path::parse(&name.name).map_err(|error| usage(&error))?;
        let store = builder.build().map_err(|error| usage(&error))?;
        Ok(Self { store, path, name: name.clone() })
    }

    /// Checks every byte of it.
    pub(super) async fn verify(&self) -> Result<Contents, CliError> {
        self.inspect(&self.path).await
    }

    /// The inspector stays on a thread of its own, since `pipe` moves its tasks between threads.
    async fn inspect(&self, path: &Path) -> Result<Contents, CliError> {
        let answer = self.store.get(path).await.map_err(self.at())?;
        let (tell, mut told) = mpsc::channel::<Vec<u8>>(PIECES_AHEAD);
        let name = self.name.clone();
        let inspected = spawn_blocking(move || {
            let mut inspector = Inspector::new();
            while let Some(bytes) = told.blocking_recv() {
                inspector.feed(&bytes).map_err(unsound(&name))?;
            }
            inspector.finish().map_err(unsound(&name))
        });
        let mut stream = answer.into_stream();
        while let Some(bytes) = stream.try_next().await.map_err(self.at())? {
            // It takes no more when it has found a fault.
            if tell.send(bytes.into()).await.is_err() {
                break;
            }
        }
        drop(tell);
        inspected.await.map_err(|error| self.failed(&error))?
    }

    /// Writes all of it to a draft, unchecked.
    pub(super) async fn copy_to(&self, draft: &mut impl Draft) -> Result<(), CliError> {
        let answer = self.store.get(&self.path).await.map_err(self.at())?;
        let mut stream = answer.into_stream();
        while let Some(bytes) = stream.try_next().await.map_err(self.at())? {
            draft.put(&bytes).await?;
        }
        Ok(())
    }

    /// Whether the store refuses to put a copy where something is: here that draft itself.
    async fn check_condition(&self, draft: &Path) -> Result<(), CliError> {
        match self.store.copy_if_not_exists(draft, draft).await {
            Err(Error::AlreadyExists { .. }) => Ok(()),
            Err(error) => Err(self.failed(&error)),
            Ok(()) => Err(self.failed(
                &"the store would overwrite what has this name (it ignores If-None-Match)",
            )),
        }
    }

    /// Names the object that an error is about.
    fn at(&self) -> impl Fn(Error) -> CliError {
        |error| self.failed(&error)
    }

    fn failed(&self, error: &dyn Display) -> CliError {
        CliError::Command { code: FAILED, text: format!("{}: {error}", self.name) }
    }
}

/// An object in the making. Its draft is removed at the end whatever became of it.
pub(super) struct ObjectDraft {
    object: Object,
    draft: Path,
    upload: Option<Box<dyn MultipartUpload>>,
    part: Vec<u8>,
    len: u64,
    complete: bool,
}

impl ObjectDraft {
    pub(super) async fn new(object: Object) -> Result<Self, CliError> {
        match object.store.head(&object.path).await {
            Err(Error::NotFound { .. }) => {}
            Ok(_) => return Err(CliError::Usage(format!("{} exists already", object.name))),
            Err(error) => return Err(object.failed(&error)),
        }
        let random = getrandom::u64().map_err(|error| object.failed(&error))?;
        let draft = Path::parse(format!("{}.{random:016x}.new", object.name.name));
        let draft = draft.map_err(|error| CliError::Usage(format!("{}: {error}", object.name)))?;
        Ok(Self { object, draft, upload: None, part: Vec::new(), len: 0, complete: false })
    }

    async fn send_part(&mut self) -> Result<(), CliError> {
        let part = std::mem::take(&mut self.part);
        self.len += part.len() as u64;
        let upload = self.upload.as_mut().expect("a draft is begun before it is written");
        upload.put_part(part.into()).await.map_err(self.object.at())
    }
}

impl Draft for ObjectDraft {
    async fn begin(&mut self) -> Result<(), CliError> {
        self.discard().await;
        (self.part, self.len, self.complete) = (Vec::new(), 0, false);
        let upload = self.object.store.put_multipart(&self.draft).await;
        self.upload = Some(upload.map_err(self.object.at())?);
        Ok(())
    }

    async fn put(&mut self, mut bytes: &[u8]) -> Result<(), CliError> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(PART_LEN - self.part.len()));
            self.part.extend_from_slice(now);
            if self.part.len() == PART_LEN {
                self.send_part().await?;
            }
            bytes = later;
        }
        Ok(())
    }

    async fn end(&mut self) -> Result<(), CliError> {
        if !self.part.is_empty() {
            self.send_part().await?;
        }
        let upload = self.upload.as_mut().expect("a draft is begun before it is written");
        upload.complete().await.map_err(self.object.at())?;
        self.complete = true;
        Ok(())
    }

    async fn check(&mut self, _: &Place) -> Result<Contents, CliError> {
        self.object.inspect(&self.draft).await
    }

    async fn publish(&mut self) -> Result<(), CliError> {
        if self.len > COPY_MAX {
            let text = format!("{} bytes are more than a store copies at once", self.len);
            return Err(self.object.failed(&text));
        }
        self.object.check_condition(&self.draft).await?;
        let (from, to) = (&self.draft, &self.object.path);
        self.object.store.copy_if_not_exists(from, to).await.map_err(self.object.at())
    }

    /// What cannot be removed is named on standard error; the verb's own outcome stays.
    async fn discard(&mut self) {
        let Some(mut upload) = self.upload.take() else { return };
        let aborted = if self.complete { Ok(()) } else { upload.abort().await };
        let deleted = match self.object.store.delete(&self.draft).await {
            Err(Error::NotFound { .. }) => Ok(()),
            other => other,
        };
        if let Err(error) = aborted.and(deleted) {
            let _ = writeln!(io::stderr(), "leasehold: {} may be left: {error}", self.draft);
        }
    }
}
