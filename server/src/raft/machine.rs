//! The state machine as the engine sees it: committed entries become outcomes and events.
//!
//! Applies each command once, in the log's order, answers the proposal, then tells the sink. It
//! decides nothing itself. An entry it does not understand stops the group: another build wrote it,
//! and a guess would let the replicas' states drift apart.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use futures_util::{Stream, StreamExt};
use leasehold_core::{Batch, State};
use leasehold_protocol::command::Command;
use leasehold_protocol::event::Event;
use leasehold_protocol::outcome::Outcome;
use openraft::EntryPayload;
use openraft::storage::{EntryResponder, RaftStateMachine};
use openraft::type_config::TypeConfigExt;

use super::rounds::Rounds;
use super::signal::Signal;
use super::snapshot::{Builder, Built, Loaded, SnapshotFile, Snapshots};
use super::storage::Log;
use super::types::{Applied, Entry, EntryData, LogId, RaftTypes, SnapshotMeta, StoredMembership};
use crate::env::Env;

/// Commands applied in one go before others get their turn.
const COMMANDS_PER_TURN: usize = 1024;

/// Learns what happened to the state, in the step in which it happened. Must not borrow the state
/// mutably and should return soon.
pub trait ApplySink: 'static {
    /// So many commands are applied in one go; said before `applied`.
    fn counted(&self, _commands: usize) {}
    /// One command was applied, and the state is what it left; `events` are its own. Not told of
    /// several at once: an event is told with what was so then (a hold's value, a session's label),
    /// which the next command may change.
    fn applied(&self, state: &State, events: &[Event]);
    /// The outcomes of all commands of an entry were handed to whoever proposed them, if it was here.
    fn answered(&self);
    /// A snapshot replaced the state: whatever happened in between is in it and in no event.
    fn installed(&self, state: &State);
}

/// What the group and its state machine share.
pub(crate) struct Progress {
    /// Bytes of batches applied since the last snapshot was begun.
    since_snapshot: Cell<u64>,
    /// Raised when they reach the limit.
    pub(crate) snapshot_due: Signal,
    snapshot_bytes: u64,
    /// Why an entry was not applied, once there was one.
    not_understood: RefCell<Option<String>>,
}

impl Progress {
    pub(crate) fn new(snapshot_bytes: u64) -> Rc<Self> {
        let since_snapshot = Cell::new(0);
        let (snapshot_due, not_understood) = (Signal::default(), RefCell::default());
        Rc::new(Self { since_snapshot, snapshot_due, snapshot_bytes, not_understood })
    }

    /// Why an entry was not applied, if that stopped the group.
    pub(crate) fn not_understood(&self) -> Option<String> {
        self.not_understood.borrow().clone()
    }

    fn applied(&self, bytes: usize) {
        let before = self.since_snapshot.get();
        let after = before + bytes as u64;
        self.since_snapshot.set(after);
        if before < self.snapshot_bytes && self.snapshot_bytes <= after {
            self.snapshot_due.raise();
        }
    }
}

/// See the module.
pub(crate) struct Machine<E: Env> {
    state: Rc<RefCell<State>>,
    sink: Rc<dyn ApplySink>,
    snapshots: Rc<Snapshots<E>>,
    log: Log<E>,
    rounds: Rc<Rounds>,
    progress: Rc<Progress>,
    applied: Option<LogId>,
    membership: StoredMembership,
    events: Vec<Event>,
}

impl<E: Env> Machine<E> {
    /// Begins with `loaded`, or with the state as it is.
    pub(crate) fn new(
        state: Rc<RefCell<State>>,
        sink: Rc<dyn ApplySink>,
        snapshots: Rc<Snapshots<E>>,
        log: Log<E>,
        progress: Rc<Progress>,
        loaded: Option<Loaded>,
    ) -> Self {
        let rounds = log.rounds().clone();
        let (applied, membership) = (None, StoredMembership::default());
        let events = Vec::new();
        let mut this =
            Self { state, sink, snapshots, log, rounds, progress, applied, membership, events };
        if let Some(Loaded { meta, state }) = loaded {
            this.replace(&meta, state);
        }
        this
    }

    fn replace(&mut self, meta: &SnapshotMeta, state: State) {
        self.state.replace(state);
        self.applied = meta.last_log_id;
        meta.last_log_id.iter().for_each(|last| self.rounds.applied(last));
        self.membership = meta.last_membership.clone();
        self.log.snapshot_membership(self.applied, &self.membership);
        self.progress.since_snapshot.set(0);
        self.sink.installed(&self.state.borrow());
    }

    fn apply_entry(&mut self, entry: Entry) -> io::Result<Applied> {
        let outcomes = match entry.payload {
            EntryPayload::Blank => Applied::default(),
            EntryPayload::Normal(data) => self.apply_batch(entry.log_id, &data)?,
            EntryPayload::Membership(membership) => {
                self.membership = StoredMembership::new(Some(entry.log_id), membership);
                Applied::default()
            }
        };
        self.applied = Some(entry.log_id);
        Ok(outcomes)
    }

    fn apply_batch(&mut self, at: LogId, data: &EntryData) -> io::Result<Applied> {
        let batch = Batch::decode(data.bytes()).map_err(|error| {
            let text = format!(
                "the entry at {at} is not understood: {error}; if a newer version wrote it, run \
                 that version on this node"
            );
            self.progress.not_understood.replace(Some(text.clone()));
            io::Error::new(io::ErrorKind::InvalidData, text)
        })?;
        self.sink.counted(batch.commands.len());
        let commands = batch.commands.iter();
        let outcomes = commands.map(|command| self.apply_command(batch.wall_ms, command)).collect();
        self.progress.applied(data.bytes().len());
        Ok(Applied(outcomes))
    }

    fn apply_command(&mut self, wall_ms: u64, command: &Command) -> Outcome {
        self.events.clear();
        let outcome = self.state.borrow_mut().apply(wall_ms, command, &mut self.events);
        self.sink.applied(&self.state.borrow(), &self.events);
        outcome
    }
}

impl<E: Env> RaftStateMachine<RaftTypes<E>> for Machine<E> {
    type SnapshotData = SnapshotFile<E>;
    type SnapshotBuilder = Builder<E>;

    async fn applied_state(&mut self) -> io::Result<(Option<LogId>, StoredMembership)> {
        Ok((self.applied, self.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> io::Result<()>
    where
        S: Stream<Item = io::Result<EntryResponder<RaftTypes<E>>>> + Unpin,
    {
        let mut turn = 0;
        while let Some(next) = entries.next().await {
            let (entry, responder) = next?;
            let at = entry.log_id;
            let applied = self.apply_entry(entry)?;
            turn += applied.0.len();
            if let Some(responder) = responder {
                responder.send(applied);
            }
            self.sink.answered();
            self.rounds.applied(&at);
            if turn >= COMMANDS_PER_TURN {
                turn = 0;
                RaftTypes::<E>::yield_now().await;
            }
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Builder<E> {
        self.progress.since_snapshot.set(0);
        let meta =
            SnapshotMeta { last_log_id: self.applied, last_membership: self.membership.clone() };
        Builder::new(self.snapshots.clone(), meta, &self.state.borrow())
    }

    async fn install_snapshot(
        &mut self,
        meta: &SnapshotMeta,
        snapshot: SnapshotFile<E>,
    ) -> io::Result<()> {
        let state = self.snapshots.adopt(meta, snapshot).await?;
        self.replace(meta, state);
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<Built<E>>> {
        Ok(self.snapshots.current())
    }
}
