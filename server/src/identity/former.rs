//! The birth record as it was before clusters could be restored: read, never written.

use leasehold_protocol::birth::{BirthMember, BirthRecord};
use leasehold_protocol::ids::ClusterId;

use super::birth::Promise;

/// See `Promise`.
#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub(super) struct FormerPromise {
    pub(super) record: FormerRecord,
    pub(super) founded: bool,
}

/// See `BirthRecord`.
#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub(super) struct FormerRecord {
    pub(super) cluster: ClusterId,
    pub(super) name: String,
    pub(super) members: Vec<BirthMember>,
    pub(super) shards: u32,
    pub(super) key_hash: u8,
    pub(super) token_base: u64,
}

impl From<FormerPromise> for Promise {
    fn from(former: FormerPromise) -> Self {
        let FormerRecord { cluster, name, members, shards, key_hash, token_base } = former.record;
        let record =
            BirthRecord { cluster, name, members, shards, key_hash, token_base, restored: None };
        Self { record, founded: former.founded, joined: false }
    }
}
