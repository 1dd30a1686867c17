//! Reading a shard's state for a backup.

use leasehold_protocol::ids::ShardId;
use leasehold_protocol::reply::{BackupReply, Reply};
use leasehold_protocol::request::{BackupRequest, Request};

use crate::client::{Client, misfit};
use crate::error::CallError;

impl Client {
    /// The first part of a shard's state as it is now, linearizably, without the secrets of its
    /// leases. What the later parts add to it is of the same moment.
    pub async fn begin_backup(&self, shard: ShardId) -> Result<BackupReply, CallError> {
        self.backup_part(BackupRequest { shard, ticket: 0, part: 0, timeout_ms: 0 }).await
    }

    /// The part after `last`. `backup_gone` if the shard's leader does not have the backup any more,
    /// because it is another one or because nobody asked for 30 s: then the shard is begun anew.
    pub async fn continue_backup(&self, last: &BackupReply) -> Result<BackupReply, CallError> {
        let (shard, ticket, part) = (last.about.shard, last.ticket, last.part + 1);
        self.backup_part(BackupRequest { shard, ticket, part, timeout_ms: 0 }).await
    }

    async fn backup_part(&self, request: BackupRequest) -> Result<BackupReply, CallError> {
        let asked = self.inner.call(Some(request.shard), Request::Backup(request));
        match asked.await? {
            Reply::Backup(reply) if reply.part == request.part => Ok(reply),
            _ => Err(misfit().into()),
        }
    }
}
