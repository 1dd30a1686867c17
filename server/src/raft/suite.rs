//! The engine's own storage suite over our log, state machine and snapshots, on a simulated disk.

use std::cell::RefCell;
use std::rc::Rc;

use leasehold_core::State;
use leasehold_protocol::event::Event;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, ShardId};
use openraft::testing::log::{StoreBuilder, Suite};
use openraft::{AsyncRuntime, StorageError};

use super::machine::{ApplySink, Machine, Progress};
use super::rounds::Rounds;
use super::snapshot::{Owner, Snapshots};
use super::storage::Log;
use super::types::RaftTypes;
use crate::disk::sim::{SimDisk, SimDiskConfig};
use crate::env::Env;
use crate::rt::sim::{SimClock, SimRt, WorldConfig};
use crate::rt::sim_net::SimHost;
use crate::wal::{Recovered, Wal, WalConfig, WalIdentity};

/// Everything simulated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SimEnv;

impl Env for SimEnv {
    type Rt = SimRt;
    type Clock = SimClock;
    type Disk = SimDisk;
    type Net = SimHost;
}

struct Deaf;

impl ApplySink for Deaf {
    fn applied(&self, _state: &State, _events: &[Event]) {}
    fn answered(&self) {}
    fn installed(&self, _state: &State) {}
}

struct Builder;

impl StoreBuilder<RaftTypes<SimEnv>, Log<SimEnv>, Machine<SimEnv>> for Builder {
    async fn build(
        &self,
    ) -> Result<((), Log<SimEnv>, Machine<SimEnv>), StorageError<RaftTypes<SimEnv>>> {
        let disk = SimDisk::new(1, SimDiskConfig::default());
        let cluster = ClusterId([1; 16]);
        let identity = WalIdentity {
            cluster,
            node: NodeId(1),
            disk: DiskId([1; 16]),
            core: 0,
            cores: 1,
            boot: 1,
        };
        let config = WalConfig { segment_len: 64 * 1024, ..WalConfig::default() };
        let opened = Wal::<SimEnv>::open(config, identity, disk.clone(), || 7).await;
        let (wal, _) = opened.expect("an empty disk opens");
        let shard = ShardId(0);
        let rounds = |vote: Option<&_>| Rounds::new(NodeId(1), vote);
        let log = Log::open(wal.shard(shard), Recovered::default(), rounds, Box::new(|_| {}));
        let log = log.expect("nothing is damaged");
        let owner = Owner { cluster, shard };
        let (snapshots, _) = Snapshots::open(disk, wal.shard(shard), owner).await.expect("no file");
        let state = Rc::new(RefCell::new(State::new(shard)));
        let progress = Progress::new(u64::MAX);
        let machine = Machine::new(state, Rc::new(Deaf), snapshots, log.clone(), progress, None);
        Ok(((), log, machine))
    }
}

#[test]
fn the_engines_storage_suite_passes() {
    SimRt::with_config(11, WorldConfig::default()).block_on(async {
        Suite::test_all(Builder).await.expect("every case passes");
    });
}
