//! Whoever keeps backups: takes one after another of the running cluster, as `leasehold backup create`
//! does, over the wire and from any node; checks each to its last byte and against what the nodes
//! applied.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use leasehold_core::backup::{Contents, Inspector};
use leasehold_protocol::backup::{BackupHeader, BackupWriter};
use leasehold_protocol::event::EventKind;
use leasehold_protocol::ids::{ShardId, Token};
use leasehold_protocol::reply::{BackupReply, BackupShard, Reply};
use leasehold_protocol::request::{BackupRequest, Request};
use leasehold_protocol::shard::KEY_HASH;
use leasehold_server::env::Clock;
use leasehold_server::rt::sim::{DomainId, SimClock, SimRng, SimRt};
use leasehold_server::rt::sim_net::SimHost;
use openraft_rt::{AsyncRuntime, MpscReceiver};

use crate::cluster::Cluster;
use crate::coverage::Seen;
use crate::link::Link;

/// A node answers within this.
const PATIENCE: Duration = Duration::from_secs(2);
const TIMEOUT_MS: u32 = 1_000;

/// How often a backup is begun anew before it is given up, as the command does.
const TRIES_MAX: u64 = 5;

/// See the module.
pub(crate) struct Keeper {
    cluster: Rc<Cluster>,
    domain: DomainId,
    host: SimHost,
    rng: SimRng,
    stop: Cell<bool>,
    last: RefCell<Option<Contents>>,
}

impl Keeper {
    pub(crate) fn new(cluster: &Rc<Cluster>) -> Rc<Self> {
        let world = &cluster.world;
        let domain = world.add_domain(Duration::from_secs(1), 0);
        Rc::new(Self {
            cluster: cluster.clone(),
            domain,
            host: cluster.net.host(domain),
            rng: world.rng().fork(),
            stop: Cell::new(false),
            last: RefCell::default(),
        })
    }

    /// Takes no further backups; returns the last one.
    pub(crate) fn stop(&self) -> Option<Contents> {
        self.stop.set(true);
        self.last.borrow().clone()
    }

    /// One task.
    pub(crate) async fn run(self: Rc<Self>) {
        while !self.stop.get() {
            SimRt::sleep(Duration::from_millis(200 + self.rng.below(2_500))).await;
            for _ in 0..TRIES_MAX {
                let me = self.clone();
                let taken =
                    self.cluster.world.spawn_in(self.domain, async move { me.take().await });
                if let Some(bytes) = taken.await.expect("nobody kills it") {
                    self.check(&bytes);
                    break;
                }
                SimRt::sleep(Duration::from_millis(self.rng.below(200))).await;
            }
        }
    }

    /// The bytes of a whole backup, if no leader changes meanwhile.
    async fn take(&self) -> Option<Vec<u8>> {
        let (cluster, shards) = (self.cluster.born.cluster, self.cluster.born.shards);
        let header =
            BackupHeader { cluster, wall_ms: SimClock.wall_ms(), shards, key_hash: KEY_HASH };
        let (mut writer, mut bytes) = BackupWriter::new(&header);
        for shard in self.cluster.shards() {
            let latest = self.cluster.ledger.shard(shard).latest();
            let mut part = self.part(shard, 0, 0).await?;
            self.compare(&part.about, latest);
            bytes.extend(writer.shard(&part.about));
            bytes.extend(writer.piece(&part.bytes));
            while !part.last {
                part = self.part(shard, part.ticket, part.part + 1).await?;
                bytes.extend(writer.piece(&part.bytes));
            }
            bytes.extend(writer.shard_end());
        }
        bytes.extend(writer.finish());
        Some(bytes)
    }

    async fn part(&self, shard: ShardId, ticket: u64, part: u32) -> Option<BackupReply> {
        let machines = self.cluster.machines();
        let node = machines[self.rng.below(machines.len() as u64) as usize].node;
        let link = Link::open_to(&self.host, self.cluster.born.cluster, node).await?;
        let request = BackupRequest { shard, ticket, part, timeout_ms: TIMEOUT_MS };
        let mut answers = link.request(&Request::Backup(request));
        match SimRt::timeout(PATIENCE, answers.recv()).await.ok()?? {
            Reply::Backup(reply) => Some(reply),
            Reply::Error(_) => None,
            other => panic!("a backup gave {other:?}"),
        }
    }

    /// What a shard's state says of itself, asked for when the newest revision was `latest`, is what
    /// the events up to it say.
    fn compare(&self, about: &BackupShard, latest: u64) {
        let wrong = |what: String| self.cluster.violations.add("backup", &what);
        if about.revision.0 < latest {
            wrong(format!("begun after revision {latest} was applied: {about:?}"));
        }
        let base = Token(self.cluster.born.token_base);
        let (mut token, mut leases, mut last_lease) = (base, 0, 0);
        for event in self.cluster.ledger.shard(about.shard).until(about.revision.0) {
            match event.kind {
                EventKind::Granted { token: granted, .. } => token = token.max(granted),
                EventKind::LeaseOpened { lease, .. } => {
                    leases += 1;
                    last_lease = last_lease.max(lease.0);
                }
                EventKind::LeaseEnded { .. } => leases -= 1,
                _ => {}
            }
        }
        let same = (token, leases, last_lease)
            == (about.last_token, about.leases as i64, about.last_lease.0);
        if !same {
            wrong(format!("{about:?}; by the events {token:?}, {leases}, {last_lease}"));
        }
    }

    fn check(&self, bytes: &[u8]) {
        let mut inspector = Inspector::new();
        let read = bytes.chunks(10_000).try_for_each(|bytes| inspector.feed(bytes));
        match read.and_then(|()| inspector.finish()) {
            Ok(contents) => {
                self.cluster.coverage.count(Seen::BackupTaken);
                self.cluster.timeline.note(format!("BACKUP of {} bytes", bytes.len()));
                self.last.replace(Some(contents));
            }
            Err(what) => self.cluster.violations.add("backup", &format!("unsound: {what}")),
        }
    }
}
