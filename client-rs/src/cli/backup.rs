//! `backup create FILE`, `backup verify FILE`.
//!
//! A backup is written whole under another name, read back and checked, and then given its own: so
//! there is never half a backup under the name that was asked for, and none takes another's place.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use leasehold::{Client, ErrorCode, ShardId};
use leasehold_core::backup::{Contents, Inspector, Unsound};
use leasehold_protocol::backup::{BackupHeader, BackupWriter};
use leasehold_protocol::shard::KEY_HASH;
use serde_json::json;

use super::exit::{CliError, FAILED};
use super::options::Options;
use super::say;

/// How often a backup is begun anew because a shard's leader changed meanwhile.
const TRIES_MAX: u32 = 5;
/// Bytes of a backup that are read at once.
const READ_LEN: usize = 256 * 1024;

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand, Debug)]
enum Verb {
    /// Writes a backup of the running cluster, each shard as it is at one moment
    Create(Place),
    /// Checks every byte of a backup and says what is in it
    Verify(Place),
}

#[derive(clap::Args, Debug)]
struct Place {
    /// The backup
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    match args.verb {
        Verb::Create(Place { file }) => create(options, &file).await,
        Verb::Verify(Place { file }) => {
            let contents = verify(&file)?;
            tell(options, "sound", &file, &contents)
        }
    }
}

async fn create(options: &Options, path: &Path) -> Result<ExitCode, CliError> {
    if path.exists() {
        return Err(CliError::Usage(format!("{} exists already", path.display())));
    }
    let client = options.connect().await?;
    let draft = Draft::new(path);
    let mut tries = 1;
    loop {
        let mut file = draft.create().map_err(at(path))?;
        match write(&client, &mut file).await {
            Ok(()) => break file.sync_all().map_err(at(path))?,
            Err(error) if is_gone(&error) && tries < TRIES_MAX => tries += 1,
            Err(error) => return Err(error),
        }
    }
    let contents = verify(&draft.path)?;
    draft.publish(path).map_err(at(path))?;
    tell(options, "written", path, &contents)
}

fn is_gone(error: &CliError) -> bool {
    matches!(error, CliError::Failed(failure) if failure.code == ErrorCode::BACKUP_GONE)
}

/// A file in the making, removed at the end whatever became of it.
struct Draft {
    path: PathBuf,
}

impl Draft {
    fn new(path: &Path) -> Self {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}.new", std::process::id()));
        Self { path: name.into() }
    }

    /// For the eyes of its owner alone: it tells who locks what.
    fn create(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600).open(&self.path)
    }

    /// Never takes the place of another file.
    fn publish(&self, path: &Path) -> io::Result<()> {
        std::fs::hard_link(&self.path, path)?;
        let dir = path.parent().filter(|dir| *dir != Path::new("")).unwrap_or(Path::new("."));
        File::open(dir)?.sync_all()
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // It may never have been made.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The time by which a restore judges its own clock.
#[expect(clippy::disallowed_methods, reason = "the command line has no Clock seam")]
fn wall_ms() -> io::Result<u64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(io::Error::other)?;
    Ok(now.as_millis() as u64)
}

async fn write(client: &Client, file: &mut File) -> Result<(), CliError> {
    let status = client.status().await?;
    let wall_ms = wall_ms().map_err(CliError::Io)?;
    let (cluster, shards, key_hash) = (status.cluster, status.shards, KEY_HASH);
    let header = BackupHeader { cluster, wall_ms, shards, key_hash };
    let (mut writer, first) = BackupWriter::new(&header);
    let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(CliError::Io);
    put(&first)?;
    for shard in (0..shards).map(ShardId) {
        let mut reply = client.begin_backup(shard).await?;
        put(&writer.shard(&reply.about))?;
        put(&writer.piece(&reply.bytes))?;
        while !reply.last {
            reply = client.continue_backup(&reply).await?;
            put(&writer.piece(&reply.bytes))?;
        }
        put(&writer.shard_end())?;
    }
    put(&writer.finish())
}

fn verify(path: &Path) -> Result<Contents, CliError> {
    let unsound = |error: Unsound| {
        let text = format!("{}: {error}", path.display());
        CliError::Command { code: FAILED, text }
    };
    let mut file = File::open(path).map_err(at(path))?;
    let mut inspector = Inspector::new();
    let mut buffer = vec![0; READ_LEN];
    loop {
        match file.read(&mut buffer).map_err(at(path))? {
            0 => break,
            len => inspector.feed(&buffer[..len]).map_err(unsound)?,
        }
    }
    inspector.finish().map_err(unsound)
}

/// Names the file that an error is about.
fn at(path: &Path) -> impl Fn(io::Error) -> CliError {
    move |error| {
        let text = format!("{}: {error}", path.display());
        CliError::Io(io::Error::new(error.kind(), text))
    }
}

fn tell(
    options: &Options,
    what: &str,
    path: &Path,
    contents: &Contents,
) -> Result<ExitCode, CliError> {
    let Contents { header, shards } = contents;
    if options.json {
        let shard = |shard: &leasehold_core::backup::ShardContents| {
            json!({
                "shard": shard.about.shard.0,
                "revision": shard.about.revision.0,
                "last_token": shard.about.last_token.0,
                "leases": shard.about.leases,
                "holds": shard.holds,
                "waiters": shard.waiters,
            })
        };
        let object = json!({
            "ok": true,
            "cluster_id": header.cluster.to_string(),
            "wall_ms": header.wall_ms,
            "shards": shards.iter().map(shard).collect::<Vec<_>>(),
        });
        say(&object.to_string())?;
        return Ok(ExitCode::SUCCESS);
    }
    let (cluster, count, wall_ms) = (header.cluster, header.shards, header.wall_ms);
    say(&format!(
        "{}: {what}; cluster {cluster}, {count} shard(s), begun {wall_ms} ms after 1970",
        path.display()
    ))?;
    for shard in shards {
        let (about, holds, waiters) = (&shard.about, shard.holds, shard.waiters);
        say(&format!(
            "  shard {}: revision {}, last token {}, {} lease(s), {holds} hold(s), {waiters} waiter(s)",
            about.shard, about.revision, about.last_token, about.leases
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
