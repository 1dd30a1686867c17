//! Giving out a shard's state for a backup: frozen by the leader after a confirmed round, then part
//! by part as it is asked for.
//!
//! A frozen state shares its tables with the live one until one of them changes, so it costs memory
//! as long as it is kept. Bounds: `OPEN_MAX` at once, each dropped when nobody asked for `IDLE_MAX`;
//! one that is read to its end gives way to a further one before that, and if there is none such
//! the answer is `busy`. A backup ends with the process and does not move with the
//! leadership: whoever reads it begins the shard anew.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use leasehold_core::snapshot::Encoder;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::planted;
use leasehold_protocol::reply::{BackupReply, BackupShard, Reply};
use leasehold_protocol::request::{BackupRequest, Request};
use openraft::AsyncRuntime;

use super::{Origin, Shard};
use crate::env::{Clock, Env, MonoTime};
use crate::net::ReplyTo;

/// Backups of one shard that are under way at once.
const OPEN_MAX: usize = 4;
/// One that nobody reads for so long is dropped.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// A part is closed once it has this many bytes.
const PART_LEN: usize = 256 * 1024;

/// The backups of one shard that are under way.
#[derive(Default)]
pub(super) struct Backups {
    open: BTreeMap<u64, Open>,
    /// The ticket that was given out last.
    newest: u64,
}

impl Backups {
    /// Whether there is room for one more. Of those that are read to their end, which are kept for
    /// a repeated request alone, the one that was asked for least lately goes.
    fn make_room(&mut self) -> bool {
        if self.open.len() < OPEN_MAX {
            return true;
        }
        let done = self.open.iter().filter(|(_, open)| open.last.last);
        let oldest = done.min_by_key(|(_, open)| open.used).map(|(ticket, _)| *ticket);
        oldest.is_some_and(|ticket| self.open.remove(&ticket).is_some())
    }

    /// Not 0, never the same twice, of this node and this moment alone: a request that meets
    /// another backup must not be answered from it.
    fn ticket(&mut self, now: MonoTime, node: NodeId) -> u64 {
        self.newest = (now.0 << 8 | node.0 & 0xff).max(self.newest + (1 << 8));
        self.newest
    }
}

struct Open {
    encoder: Encoder,
    about: BackupShard,
    /// The part that was given out last, for a repeated request.
    last: BackupReply,
    used: MonoTime,
}

impl Open {
    /// The part that was asked for, if it is the next one or the last once more.
    fn part(&mut self, part: u32) -> Option<Reply> {
        if part == self.last.part + 1 && !self.last.last {
            self.advance(part);
        }
        (part == self.last.part).then(|| Reply::Backup(self.last.clone()))
    }

    fn advance(&mut self, part: u32) {
        let mut bytes = Vec::new();
        let mut last = false;
        while bytes.len() < PART_LEN && !last {
            match self.encoder.next() {
                Some(chunk) => bytes.extend_from_slice(&chunk),
                None => last = true,
            }
        }
        self.last = BackupReply { about: self.about, part, last, bytes, ticket: self.last.ticket };
    }
}

impl<E: Env> Shard<E> {
    pub(super) fn backup(self: &Rc<Self>, request: BackupRequest, to: ReplyTo, origin: Origin) {
        let Some(leadership) = self.leads() else {
            if let Some(leader) = self.elsewhere(origin) {
                let timeout_ms = request.timeout_ms;
                return self.forward(leader, Request::Backup(request), timeout_ms, to);
            }
            return to.error(ErrorCode::NOT_LEADER, self.leader());
        };
        if request.ticket != 0 {
            return self.continue_backup(request, &to);
        }
        let Some(room) = self.room() else { return self.busy(&to) };
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            // Planted (G7): whoever believes to lead gives out what it has.
            let confirmed = if planted!("backup-without-barrier") {
                Ok(())
            } else {
                shard.confirmed(leadership, request.timeout_ms).await
            };
            match confirmed {
                Ok(()) => shard.begin_backup(&to),
                Err(code) => to.error(code, shard.leader()),
            }
            drop(room);
        });
    }

    fn continue_backup(&self, request: BackupRequest, to: &ReplyTo) {
        let mut backups = self.backups.borrow_mut();
        let part = backups.open.get_mut(&request.ticket).and_then(|open| {
            open.used = self.clock.now();
            // Planted (backups): each part is of the state at its own moment.
            if planted!("parts-of-two-moments") {
                open.encoder = Encoder::redacted(&self.state.borrow());
                (0..request.part).for_each(|part| open.advance(part));
            }
            open.part(request.part)
        });
        match part {
            Some(reply) => to.send(&reply),
            None => to.error(ErrorCode::BACKUP_GONE, NodeId(0)),
        }
    }

    /// Freezes the state and answers its first part. The caller has just confirmed the leadership.
    fn begin_backup(self: &Rc<Self>, to: &ReplyTo) {
        if !self.backups.borrow_mut().make_room() {
            return self.busy(to);
        }
        let (encoder, about) = {
            let state = self.state.borrow();
            // Planted (backups): whoever reads the file can act for every session.
            let open = planted!("secrets-in-backups");
            let encoder = if open { Encoder::new(&state) } else { Encoder::redacted(&state) };
            (encoder, state.about())
        };
        let ticket = self.backups.borrow_mut().ticket(self.clock.now(), self.peers.node());
        let last = BackupReply { about, ticket, part: 0, last: false, bytes: Vec::new() };
        let mut open = Open { encoder, about, last, used: self.clock.now() };
        open.advance(0);
        to.send(&Reply::Backup(open.last.clone()));
        self.backups.borrow_mut().open.insert(ticket, open);
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move { shard.drop_when_idle(ticket).await });
    }

    async fn drop_when_idle(&self, ticket: u64) {
        loop {
            let idle = match self.backups.borrow().open.get(&ticket) {
                None => return,
                Some(open) => self.clock.now().since(open.used),
            };
            if idle >= IDLE_MAX {
                break;
            }
            E::Rt::sleep(IDLE_MAX.saturating_sub(idle)).await;
        }
        self.backups.borrow_mut().open.remove(&ticket);
    }
}
