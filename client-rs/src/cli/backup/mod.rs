//! `backup create PLACE`, `backup verify PLACE`, `backup fetch s3://BUCKET/NAME FILE`.
//!
//! A backup is written whole under another name, read back and checked, and then given its own: so
//! there is never half a backup under the name that was asked for, and none takes another's place.

mod file;
#[cfg(feature = "s3")]
mod object;
mod place;

use std::ffi::OsString;
use std::fmt::Display;
use std::io;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use leasehold::{Client, ErrorCode, ShardId};
use leasehold_core::backup::{Contents, ShardContents, Unsound};
use leasehold_protocol::backup::{BackupHeader, BackupWriter};
use leasehold_protocol::shard::KEY_HASH;
use serde_json::{Value, json};

use self::file::FileDraft;
#[cfg(feature = "s3")]
use self::object::{Object, ObjectDraft};
use self::place::Place;
use super::exit::{CliError, FAILED};
use super::options::Options;
use super::say;

/// How often a backup is begun anew because a shard's leader changed meanwhile.
const TRIES_MAX: u32 = 5;

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand, Debug)]
enum Verb {
    /// Writes a backup of the running cluster, each shard as it is at one moment
    Create(PlaceArg),
    /// Checks every byte of a backup and says what is in it
    Verify(PlaceArg),
    /// Copies a backup from an object store to a file and checks it, to restore from it
    #[cfg(feature = "s3")]
    Fetch(FetchArgs),
}

#[derive(clap::Args, Debug)]
struct PlaceArg {
    /// The backup: a file, or an object of a store
    #[arg(value_name = "FILE | s3://BUCKET/NAME")]
    place: OsString,
}

#[cfg(feature = "s3")]
#[derive(clap::Args, Debug)]
struct FetchArgs {
    /// The backup in the store
    #[arg(value_name = "s3://BUCKET/NAME")]
    object: OsString,
    /// The file to be made
    #[arg(value_name = "FILE")]
    file: std::path::PathBuf,
}

/// A backup in the making, under another name than its own.
trait Draft {
    /// Begins it, or begins it anew.
    async fn begin(&mut self) -> Result<(), CliError>;
    /// Adds bytes.
    async fn put(&mut self, bytes: &[u8]) -> Result<(), CliError>;
    /// All bytes are there: makes them durable.
    async fn end(&mut self) -> Result<(), CliError>;
    /// Reads them back and checks them; an error names `place`.
    async fn check(&mut self, place: &Place) -> Result<Contents, CliError>;
    /// Gives it its name, unless something has that name.
    async fn publish(&mut self) -> Result<(), CliError>;
    /// Removes what is there under the other name.
    async fn discard(&mut self);
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    match args.verb {
        Verb::Create(PlaceArg { place }) => {
            let place = Place::parse(&place)?;
            let contents = create_at(&options.connect().await?, &place).await?;
            tell(options, "written", &place, &contents)
        }
        Verb::Verify(PlaceArg { place }) => {
            let place = Place::parse(&place)?;
            let contents = verify_at(&place).await?;
            tell(options, "sound", &place, &contents)
        }
        #[cfg(feature = "s3")]
        Verb::Fetch(FetchArgs { object, file }) => {
            let place = Place::parse(&object)?;
            let contents = fetch(&place, &file).await?;
            tell(options, "fetched", &place, &contents)
        }
    }
}

/// `backup_create` of `pipe`.
pub(super) async fn create_object(client: &Client, place: &str) -> Result<Value, CliError> {
    let place = Place::parse(place.as_ref())?;
    Ok(object(&create_at(client, &place).await?))
}

/// `backup_verify` of `pipe`.
pub(super) async fn verify_object(place: &str) -> Result<Value, CliError> {
    let place = Place::parse(place.as_ref())?;
    Ok(object(&verify_at(&place).await?))
}

async fn verify_at(place: &Place) -> Result<Contents, CliError> {
    match place {
        Place::File(path) => file::verify(path, place).await,
        #[cfg(feature = "s3")]
        Place::Object(name) => Object::open(name)?.verify().await,
    }
}

async fn create_at(client: &Client, place: &Place) -> Result<Contents, CliError> {
    match place {
        Place::File(path) => create(client, FileDraft::new(path)?, place).await,
        #[cfg(feature = "s3")]
        Place::Object(name) => {
            create(client, ObjectDraft::new(Object::open(name)?).await?, place).await
        }
    }
}

async fn create(
    client: &Client,
    mut draft: impl Draft,
    place: &Place,
) -> Result<Contents, CliError> {
    let written = write_at_last(client, &mut draft).await;
    finish(written, draft, place).await
}

async fn write_at_last(client: &Client, draft: &mut impl Draft) -> Result<(), CliError> {
    let mut tries = 1;
    loop {
        draft.begin().await?;
        match write(client, draft).await {
            Err(error) if is_gone(&error) && tries < TRIES_MAX => tries += 1,
            other => return other,
        }
    }
}

/// Publishes a draft if it was written whole and is sound; nothing of it is left otherwise.
async fn finish(
    written: Result<(), CliError>,
    mut draft: impl Draft,
    place: &Place,
) -> Result<Contents, CliError> {
    let published = match written {
        Ok(()) => publish(&mut draft, place).await,
        Err(error) => Err(error),
    };
    draft.discard().await;
    published
}

async fn publish(draft: &mut impl Draft, place: &Place) -> Result<Contents, CliError> {
    draft.end().await?;
    let contents = draft.check(place).await?;
    draft.publish().await?;
    Ok(contents)
}

#[cfg(feature = "s3")]
async fn fetch(place: &Place, path: &std::path::Path) -> Result<Contents, CliError> {
    let Place::Object(name) = place else {
        return Err(CliError::Usage(format!("{place} is not of the form s3://BUCKET/NAME")));
    };
    let object = Object::open(name)?;
    let mut draft = FileDraft::new(path)?;
    let written = match draft.begin().await {
        Ok(()) => object.copy_to(&mut draft).await,
        Err(error) => Err(error),
    };
    finish(written, draft, place).await
}

fn is_gone(error: &CliError) -> bool {
    matches!(error, CliError::Failed(failure) if failure.code == ErrorCode::BACKUP_GONE)
}

/// Names the backup that is not sound.
fn unsound(name: &impl Display) -> impl Fn(Unsound) -> CliError {
    move |error| CliError::Command { code: FAILED, text: format!("{name}: {error}") }
}

/// The time by which a restore judges its own clock.
#[expect(clippy::disallowed_methods, reason = "the command line has no Clock seam")]
fn wall_ms() -> io::Result<u64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(io::Error::other)?;
    Ok(now.as_millis() as u64)
}

async fn write(client: &Client, draft: &mut impl Draft) -> Result<(), CliError> {
    let status = client.status().await?;
    let wall_ms = wall_ms().map_err(CliError::Io)?;
    let (cluster, shards, key_hash) = (status.cluster, status.shards, KEY_HASH);
    let header = BackupHeader { cluster, wall_ms, shards, key_hash };
    let (mut writer, first) = BackupWriter::new(&header);
    draft.put(&first).await?;
    for shard in (0..shards).map(ShardId) {
        let mut reply = client.begin_backup(shard).await?;
        draft.put(&writer.shard(&reply.about)).await?;
        draft.put(&writer.piece(&reply.bytes)).await?;
        while !reply.last {
            reply = client.continue_backup(&reply).await?;
            draft.put(&writer.piece(&reply.bytes)).await?;
        }
        draft.put(&writer.shard_end()).await?;
    }
    draft.put(&writer.finish()).await
}

/// What is in a backup.
fn object(Contents { header, shards }: &Contents) -> Value {
    let shard = |shard: &ShardContents| {
        json!({
            "shard": shard.about.shard.0,
            "revision": shard.about.revision.0,
            "last_token": shard.about.last_token.0,
            "leases": shard.about.leases,
            "holds": shard.holds,
            "waiters": shard.waiters,
        })
    };
    json!({
        "ok": true,
        "cluster_id": header.cluster.to_string(),
        "wall_ms": header.wall_ms,
        "shards": shards.iter().map(shard).collect::<Vec<_>>(),
    })
}

fn tell(
    options: &Options,
    what: &str,
    place: &Place,
    contents: &Contents,
) -> Result<ExitCode, CliError> {
    let Contents { header, shards } = contents;
    if options.json {
        say(&object(contents).to_string())?;
        return Ok(ExitCode::SUCCESS);
    }
    let (cluster, count, wall_ms) = (header.cluster, header.shards, header.wall_ms);
    say(&format!(
        "{place}: {what}; cluster {cluster}, {count} shard(s), begun {wall_ms} ms after 1970"
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
