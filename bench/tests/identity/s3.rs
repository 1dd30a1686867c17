//! Backup in an S3-compatible store: a real server of the protocol over a directory, a real
//! cluster. What is published is whole, sound and takes no other's place; nothing else is left.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use leasehold::{Client, Guard, Session};
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process;
use s3s::access::S3Access;
use s3s::auth::SimpleAuth;
use s3s::dto::{CompleteMultipartUploadInput, UploadPartInput};
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{S3Request, S3Result, s3_error};
use s3s_fs::FileSystem;
use serde_json::json;
use tokio::net::TcpListener;

use super::backup::{
    FAILED, USAGE, alone, ask, damage, expect, output, replacement, restoring, session,
};

const BUCKET: &str = "bucket";
const NAME: &str = "of/name";
const OBJECT: &str = "s3://bucket/of/name";
const USER: &str = "user";
const SECRET: &str = "secret";
/// With values of 4 KiB, more than the 8 MiB of a part.
const HOLDS: usize = 2_300;
/// Acquires that are under way at once.
const BATCH: usize = 100;

const NOTHING: [PathBuf; 0] = [];

/// What is wrong with the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    /// It overwrites although it is told not to.
    IgnoresConditions,
    /// Another client publishes under the same name at the last moment.
    Overtaken,
    /// It refuses the second part.
    RefusesPart,
    /// It alters what it has accepted.
    AltersParts,
}

/// Plays the faults.
struct Faulty {
    fault: Arc<Mutex<Fault>>,
    root: PathBuf,
    /// How often the fault showed itself.
    played: Arc<Mutex<u32>>,
}

impl Faulty {
    fn complete(&self, input: &mut CompleteMultipartUploadInput) {
        let mut played = self.played.lock().expect("not poisoned");
        match *self.fault.lock().expect("not poisoned") {
            Fault::IgnoresConditions if input.if_none_match.take().is_some() => *played += 1,
            Fault::Overtaken if input.key == NAME => {
                *played += 1;
                std::fs::create_dir_all(self.root.join(BUCKET).join("of")).expect("a directory");
                std::fs::write(self.root.join(BUCKET).join(NAME), "another's").expect("written");
            }
            Fault::AltersParts => {
                *played += 1;
                for path in parts(&self.root) {
                    damage(&path);
                }
            }
            _ => {}
        }
    }

    fn part(&self, input: &UploadPartInput) -> S3Result<()> {
        let refuses = *self.fault.lock().expect("not poisoned") == Fault::RefusesPart;
        if refuses && input.part_number == 2 {
            *self.played.lock().expect("not poisoned") += 1;
            return Err(s3_error!(AccessDenied, "no second part"));
        }
        Ok(())
    }
}

type Answer<'a> = Pin<Box<dyn Future<Output = S3Result<()>> + Send + 'a>>;

// As the trait's own macro would write it.
impl S3Access for Faulty {
    fn complete_multipart_upload<'a, 'b, 'c>(
        &'a self,
        request: &'b mut S3Request<CompleteMultipartUploadInput>,
    ) -> Answer<'c>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async {
            self.complete(&mut request.input);
            Ok(())
        })
    }

    fn upload_part<'a, 'b, 'c>(&'a self, request: &'b mut S3Request<UploadPartInput>) -> Answer<'c>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async { self.part(&request.input) })
    }
}

/// A running store over a directory.
struct Store {
    root: tempfile::TempDir,
    endpoint: String,
    fault: Arc<Mutex<Fault>>,
    played: Arc<Mutex<u32>>,
}

impl Store {
    async fn start() -> Self {
        let root = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(root.path().join(BUCKET)).expect("a bucket");
        let fault = Arc::new(Mutex::new(Fault::None));
        let played = Arc::default();
        let access = Faulty {
            fault: Arc::clone(&fault),
            root: root.path().to_owned(),
            played: Arc::clone(&played),
        };
        let files = FileSystem::new(root.path()).expect("a store");
        let mut builder = S3ServiceBuilder::new(files);
        builder.set_auth(SimpleAuth::from_single(USER, SECRET));
        builder.set_access(access);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("its address"));
        tokio::spawn(serve(listener, builder.build()));
        Self { root, endpoint, fault, played }
    }

    /// Runs a command of `backup` with this store in its environment.
    fn run(&self, cluster: &Cluster, args: &[&str]) -> Output {
        output(self.command(cluster, args))
    }

    fn command(&self, cluster: &Cluster, args: &[&str]) -> Command {
        self.leasehold(cluster, &[&["backup"], args].concat())
    }

    /// `leasehold` with this store in its environment.
    fn leasehold(&self, cluster: &Cluster, args: &[&str]) -> Command {
        let mut command = Command::new(process::binary("leasehold").expect("the command"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("AWS_") {
                command.env_remove(name);
            }
        }
        command
            .env("AWS_ENDPOINT_URL", &self.endpoint)
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_REGION", "us-east-1")
            .env("AWS_ACCESS_KEY_ID", USER)
            .env("AWS_SECRET_ACCESS_KEY", SECRET)
            .arg("--endpoints")
            .arg(cluster.endpoint_list())
            .args(args);
        command
    }

    fn path(&self) -> PathBuf {
        self.root.path().join(BUCKET).join(NAME)
    }

    /// The objects of the bucket.
    fn objects(&self) -> Vec<PathBuf> {
        let dir = self.root.path().join(BUCKET).join("of");
        let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
        entries.map(|entry| entry.expect("an entry").path()).collect()
    }

    /// Plays a fault while a backup is made, which must show itself and leave nothing behind.
    fn refuses(&self, cluster: &Cluster, fault: Fault, words: &[&str]) {
        *self.fault.lock().expect("not poisoned") = fault;
        *self.played.lock().expect("not poisoned") = 0;
        expect(&self.run(cluster, &["create", OBJECT]), FAILED, words);
        *self.fault.lock().expect("not poisoned") = Fault::None;
        assert_ne!(*self.played.lock().expect("not poisoned"), 0, "{fault:?} did not happen");
        assert_eq!(parts(self.root.path()), NOTHING, "{fault:?} leaves parts");
    }
}

async fn serve(listener: TcpListener, service: S3Service) {
    loop {
        let (socket, _) = listener.accept().await.expect("a connection");
        let service = service.clone();
        tokio::spawn(async move {
            // A client that hangs up is no concern of the store.
            let _ = Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(socket), service)
                .await;
        });
    }
}

/// The store keeps the parts of uploads that are under way in its root.
fn parts(root: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root).expect("the root").map(|entry| entry.expect("an entry"));
    entries
        .filter(|entry| entry.file_name().to_string_lossy().contains("upload_id"))
        .map(|entry| entry.path())
        .collect()
}

/// Holds with large values, so that a backup has more than one part.
async fn fill(cluster: &Cluster) -> (Session, Vec<Guard>) {
    let client = Client::connect(&cluster.endpoint_list()).await.expect("connected");
    let session = session(&client);
    let mut held = Vec::new();
    for batch in 0..HOLDS / BATCH {
        let wants: Vec<_> = (0..BATCH)
            .map(|index| {
                let lock = session.lock(format!("big/{batch}/{index}")).value(vec![7; 4_096]);
                lock.wait(PATIENCE).begin().expect("it waits")
            })
            .collect();
        for want in wants {
            held.push(want.granted().await.expect("granted"));
        }
    }
    (session, held)
}

#[test]
fn a_backup_in_an_object_store_is_whole_and_takes_no_others_place() {
    alone(in_a_store());
}

async fn in_a_store() {
    let cluster = Cluster::start(Spec { shards: 2, ..Spec::default() }).expect("a cluster");
    let _held = fill(&cluster).await;
    let store = Store::start().await;

    // What must not be published is not, and what is there already stays.
    store.refuses(&cluster, Fault::RefusesPart, &["no second part"]);
    store.refuses(&cluster, Fault::AltersParts, &["is damaged"]);
    store.refuses(&cluster, Fault::IgnoresConditions, &["would overwrite"]);
    assert_eq!(store.objects(), NOTHING);
    store.refuses(&cluster, Fault::Overtaken, &["already exists"]);
    assert_eq!(store.objects(), [store.path()]);
    assert_eq!(std::fs::read(store.path()).expect("another's"), b"another's");
    expect(&store.run(&cluster, &["create", OBJECT]), USAGE, &["exists already"]);
    std::fs::remove_file(store.path()).expect("removed");

    let text = expect(&store.run(&cluster, &["create", OBJECT]), 0, &[OBJECT, "written"]);
    assert!(text.contains("shard 1"), "{text}");
    assert!(std::fs::metadata(store.path()).expect("the object").len() > 8 << 20, "one part only");
    assert_eq!(store.objects(), [store.path()], "a draft is left");
    assert_eq!(parts(store.root.path()), NOTHING, "parts are left");
    expect(&store.run(&cluster, &["verify", OBJECT]), 0, &["sound", "hold(s)"]);

    let (pipe, place) = (store.leasehold(&cluster, &["pipe"]), format!("{OBJECT}-by-pipe"));
    let requests = [(1, "backup_create"), (2, "backup_verify"), (3, "backup_create")];
    let answers =
        ask(pipe, &requests.map(|(id, op)| json!({ "id": id, "op": op, "place": place })));
    assert_eq!((&answers[0]["ok"], &answers[1]["ok"]), (&json!(true), &json!(true)), "{answers:?}");
    assert_eq!(answers[2]["error"], "usage", "{answers:?}");

    // A file of it is the same, and a cluster is restored from it.
    let file = cluster.path().join("fetched");
    let name = file.to_str().expect("a path");
    expect(&store.run(&cluster, &["fetch", OBJECT, name]), 0, &["fetched"]);
    let same = std::fs::read(&file).expect("fetched") == std::fs::read(store.path()).expect("it");
    assert!(same, "a fetched backup differs");
    expect(&store.run(&cluster, &["fetch", OBJECT, name]), USAGE, &["exists already"]);
    let new = replacement(1);
    expect(&restoring(&new, 1, "restore", &["--from", name]), 0, &["become 1"]);

    damage(&store.path());
    std::fs::remove_file(&file).expect("removed");
    expect(&store.run(&cluster, &["verify", OBJECT]), FAILED, &[OBJECT, "is damaged"]);
    expect(&store.run(&cluster, &["fetch", OBJECT, name]), FAILED, &[OBJECT, "is damaged"]);
    assert!(!file.exists(), "a damaged backup became a file");
    refusals(&store, &cluster);
}

/// Where nothing can be asked of the store the reason is told.
fn refusals(store: &Store, cluster: &Cluster) {
    for (object, code, word) in [
        ("s3://bucket/none", FAILED, "not found"),
        ("s3://nowhere/name", FAILED, "s3://nowhere/name"),
        ("s3://bucket", USAGE, "s3://BUCKET/NAME"),
        ("s3://bucket/a//b", USAGE, "s3://bucket/a//b"),
    ] {
        expect(&store.run(cluster, &["verify", object]), code, &[word]);
    }
    let changed = |name: &str, value: &str| {
        let mut command = store.command(cluster, &["verify", OBJECT]);
        command.env(name, value);
        expect(&output(command), FAILED, &[OBJECT])
    };
    changed("AWS_SECRET_ACCESS_KEY", "another");
    changed("AWS_ENDPOINT_URL", "http://127.0.0.1:1");
    // Not refused for want of TLS, but because the store speaks none.
    let text = changed("AWS_ENDPOINT_URL", &store.endpoint.replace("http:", "https:"));
    assert!(!text.contains("panicked"), "{text}");
}
