//! The naive model: the rules of DESIGN §4 in the plainest data structures, sharing no code with
//! the crate. Slow on purpose; where it and the state machine differ, one of them is wrong.

use std::collections::{BTreeMap, BTreeSet};

use leasehold_protocol::command::{Caller, Command, OwnLease};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{EndReason, EventKind};
use leasehold_protocol::ids::{HoldSetVersion, LeaseId, Mode, Number, Revision, Secret, Token};
use leasehold_protocol::outcome::{Grant, Outcome};

#[path = "members.rs"]
pub(crate) mod members;

/// DESIGN's window: three numbers for each of 4096 acquires.
const WINDOW: u64 = 3 * 4096;

#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Model {
    pub(crate) begun: bool,
    pub(crate) token: u64,
    pub(crate) minted: u64,
    /// Until it is 0 nothing is granted.
    quarantine_ms: u32,
    pub(crate) leases: Vec<Lease>,
    pub(crate) keys: BTreeMap<Vec<u8>, Entry>,
    /// How the last hold of each key ended: lease, token, reason, revision.
    pub(crate) ends: BTreeMap<Vec<u8>, (LeaseId, Token, EndReason, Revision)>,
    pub(crate) members: members::Table,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Lease {
    pub(crate) id: LeaseId,
    ttl_ms: u32,
    secret: Secret,
    pub(crate) own: bool,
    pub(crate) version: u64,
    pub(crate) floor: u64,
    pub(crate) memory: BTreeMap<u64, Memory>,
}

/// What is remembered of one number.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Memory {
    /// The command without its floor and acknowledgements; `None` if its cancel came first.
    command: Option<Command>,
    /// `None` while it waits.
    pub(crate) result: Option<Outcome>,
    /// Only an acknowledgement makes the floor's passing forget it.
    must_be_acked: bool,
}

#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Entry {
    /// In the order of their leases.
    pub(crate) holders: Vec<Holder>,
    pub(crate) queue: Vec<Waiting>,
    /// What grants that join the present holders carry.
    floor: u64,
    /// Permits of a semaphore; 0 for a lock.
    pub(crate) limit: u32,
    /// Lost holds that still keep their place.
    pub(crate) ghosts: Vec<Ghost>,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Ghost {
    pub(crate) token: Token,
    mode: Mode,
    slots: BTreeSet<u32>,
    pub(crate) delay_ms: u32,
}

/// Slots as they travel.
pub(crate) fn packed(slots: &BTreeSet<u32>) -> Vec<u8> {
    let mut bytes = vec![0; slots.last().map_or(0, |last| *last as usize / 8 + 1)];
    for slot in slots {
        bytes[*slot as usize / 8] |= 1 << (slot % 8);
    }
    bytes
}

impl Entry {
    fn is_vacant(&self) -> bool {
        self.holders.is_empty() && self.ghosts.is_empty() && self.queue.is_empty()
    }

    fn fits(&self, mode: Mode) -> bool {
        self.fits_beside(mode, &self.ghosts)
    }

    /// Readers go with readers; a writer goes with nobody; permits are counted.
    fn fits_beside(&self, mode: Mode, ghosts: &[Ghost]) -> bool {
        if let Some(permits) = mode.permit_count() {
            let taken = self.taken_beside(ghosts).len();
            return taken + permits as usize <= self.limit as usize;
        }
        let holds = self.holders.iter().map(|holder| holder.mode);
        let mut all = holds.chain(ghosts.iter().map(|ghost| ghost.mode));
        all.all(|present| present == Mode::SHARED && mode == Mode::SHARED)
    }

    fn taken_beside(&self, ghosts: &[Ghost]) -> BTreeSet<u32> {
        let holds = self.holders.iter().flat_map(|holder| &holder.slots);
        holds.chain(ghosts.iter().flat_map(|ghost| &ghost.slots)).copied().collect()
    }

    /// The first slots that nobody has.
    fn choose(&self, mode: Mode) -> BTreeSet<u32> {
        let taken = self.taken_beside(&self.ghosts);
        let permits = mode.permit_count().unwrap_or(0) as usize;
        (0..self.limit).filter(|slot| !taken.contains(slot)).take(permits).collect()
    }

    fn holder_of(&self, lease: LeaseId) -> Option<&Holder> {
        self.holders.iter().find(|holder| holder.lease == lease)
    }

    fn holder_under(&self, token: Token) -> Option<&Holder> {
        self.holders.iter().find(|holder| holder.token == token)
    }

    fn take(&mut self, lease: LeaseId) -> Option<Holder> {
        let index = self.holders.iter().position(|holder| holder.lease == lease)?;
        Some(self.holders.remove(index))
    }

    fn put(&mut self, holder: Holder) {
        self.holders.push(holder);
        self.holders.sort_by_key(|holder| holder.lease);
    }
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Holder {
    pub(crate) lease: LeaseId,
    pub(crate) token: Token,
    pub(crate) number: Number,
    /// Which of its acquire's keys this is.
    part: usize,
    pub(crate) mode: Mode,
    pub(crate) value: Vec<u8>,
    since_ms: u64,
    pub(crate) forced: Option<(Vec<u8>, Vec<u8>)>,
    pub(crate) slots: BTreeSet<u32>,
    delay_ms: u32,
    /// Further acquires that entered it.
    pub(crate) again: Vec<u64>,
    pub(crate) asked: Option<(Vec<u8>, Vec<u8>, u32)>,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Waiting {
    pub(crate) lease: LeaseId,
    pub(crate) number: Number,
    /// All keys that its acquire wants, and which of them this is.
    pub(crate) all: Vec<Vec<u8>>,
    part: usize,
    pub(crate) mode: Mode,
    own: Option<OwnLease>,
    value: Vec<u8>,
    delay_ms: u32,
}

/// One command being applied: its revision if it changes anything, its events.
pub(crate) struct Run {
    revision: Revision,
    wall_ms: u64,
    pub(crate) events: Vec<EventKind>,
}

type Applied = Result<Outcome, (ErrorCode, Token)>;

fn refuse<T>(code: ErrorCode) -> Result<T, (ErrorCode, Token)> {
    Err((code, Token(0)))
}

/// Applies a command. The revision rises if and only if the model changed: the command is tried
/// with a raised one first.
pub(crate) fn apply(
    model: &mut Model,
    revision: &mut u64,
    wall_ms: u64,
    command: &Command,
) -> (Outcome, Vec<EventKind>) {
    let before = model.clone();
    let tried = attempt(model, *revision + 1, wall_ms, command);
    if *model != before {
        *revision += 1;
        return tried;
    }
    attempt(model, *revision, wall_ms, command)
}

fn attempt(
    model: &mut Model,
    revision: u64,
    wall_ms: u64,
    command: &Command,
) -> (Outcome, Vec<EventKind>) {
    let mut run = Run { revision: Revision(revision), wall_ms, events: Vec::new() };
    let outcome = model
        .dispatch(&mut run, command)
        .unwrap_or_else(|(code, token)| Outcome::Refused { code, token, revision: run.revision });
    model.keys.retain(|_, entry| !entry.is_vacant());
    (outcome, run.events)
}

/// The command as it is compared with a retry.
fn stripped(command: &Command) -> Command {
    let mut command = command.clone();
    if let Command::Acquire { caller, .. }
    | Command::Cancel { caller, .. }
    | Command::Release { caller, .. }
    | Command::Convert { caller, .. }
    | Command::AcquireAll { caller, .. }
    | Command::ReleaseAll { caller, .. }
    | Command::SetValue { caller, .. } = &mut command
    {
        caller.floor = Number(0);
        caller.acks.clear();
    }
    command
}

fn is_acquire(command: &Command) -> bool {
    matches!(command, Command::Acquire { .. } | Command::AcquireAll { .. })
}

impl Memory {
    /// An acquire that was executed, not one whose cancel came first.
    fn is_acquire(&self) -> bool {
        self.command.as_ref().is_some_and(is_acquire)
    }
}

impl Model {
    /// The outcome of a beginning, or of what comes too early.
    fn begin(&mut self, run: &mut Run, command: &Command) -> Option<Applied> {
        let (token_base, lease_base, quarantine_ms) = match command {
            Command::Begin { token_base } => (token_base, 0, 0),
            Command::BeginRestored { token_base, lease_base, quarantine_ms, .. } => {
                (token_base, *lease_base, *quarantine_ms)
            }
            _ if !self.begun => return Some(refuse(ErrorCode::NOT_READY)),
            _ if self.quarantine_ms > 0 && is_acquire(command) => {
                return Some(refuse(ErrorCode::QUARANTINED));
            }
            _ => return None,
        };
        if self.begun {
            return Some(refuse(ErrorCode::ALREADY_BEGUN));
        }
        (self.begun, self.token, self.minted) = (true, token_base.0, lease_base);
        self.quarantine_ms = quarantine_ms;
        if quarantine_ms > 0 {
            run.events.push(EventKind::QuarantineBegan { for_ms: quarantine_ms });
        }
        Some(Ok(Outcome::Begun { revision: run.revision }))
    }

    fn end_quarantine(&mut self, run: &mut Run) -> Applied {
        if self.quarantine_ms == 0 {
            return refuse(ErrorCode::ALREADY_BEGUN);
        }
        self.quarantine_ms = 0;
        run.events.push(EventKind::QuarantineEnded);
        Ok(Outcome::Changed { token: Token(0), revision: run.revision })
    }

    fn dispatch(&mut self, run: &mut Run, command: &Command) -> Applied {
        let revision = run.revision;
        if let Some(begun) = self.begin(run, command) {
            return begun;
        }
        match command {
            Command::Begin { .. } | Command::BeginRestored { .. } => unreachable!(),
            Command::EndQuarantine => self.end_quarantine(run),
            Command::Open { ttl_ms, secret, .. } => {
                let lease = self.mint(run, *ttl_ms, *secret, false);
                Ok(Outcome::Opened { lease, revision })
            }
            Command::Acquire { caller, .. }
            | Command::Cancel { caller, .. }
            | Command::Release { caller, .. }
            | Command::Convert { caller, .. }
            | Command::AcquireAll { caller, .. }
            | Command::ReleaseAll { caller, .. }
            | Command::SetValue { caller, .. } => self.numbered(run, caller, command),
            Command::ReleaseOwn { lease, secret, key, token } => {
                self.may_use(*lease, secret)?;
                let own = self.lease(*lease).own;
                if !own || !self.holds(*lease, key, *token) {
                    return Err((ErrorCode::NOT_OWNER, self.present(key)));
                }
                self.end_hold(run, key, *token, &EndReason::Released);
                self.serve(run, vec![key.clone()]);
                Ok(Outcome::Released { token: *token, revision })
            }
            Command::Close { lease, secret } => {
                self.may_use(*lease, secret)?;
                Ok(self.end_lease(run, *lease, &EndReason::SessionClosed))
            }
            Command::Expire { lease } => {
                if !self.is_live(*lease) {
                    return refuse(ErrorCode::LEASE_DEAD);
                }
                Ok(self.end_lease(run, *lease, &EndReason::LeaseExpired))
            }
            Command::ForceRelease { key, token, who, why, now } => {
                self.force(run, key, *token, (who, why), *now)
            }
            Command::EndForced { key, token } => {
                let holder = self.holder_under(key, *token);
                let Some((who, why)) = holder.and_then(|holder| holder.forced.clone()) else {
                    return Err((ErrorCode::NOT_OWNER, self.present(key)));
                };
                self.lose_hold(run, key, *token, &EndReason::Forced { who, why });
                self.serve(run, vec![key.clone()]);
                Ok(Outcome::Forced { token: *token, passed_on: true, revision })
            }
            further => self.dispatch_further(run, further),
        }
    }

    fn dispatch_further(&mut self, run: &mut Run, command: &Command) -> Applied {
        match command {
            Command::TimeOut { lease, number } => self.time_out(run, *lease, *number),
            Command::SetLimit { key, limit, who } => self.set_limit(run, key, *limit, who),
            Command::EndDelay { key, token } => self.end_delay(run, key, *token),
            Command::Member(command) => {
                let (version, operation) =
                    self.members.apply(command).map_err(|code| (code, Token(0)))?;
                Ok(Outcome::Members { version, operation, revision: run.revision })
            }
            Command::AskYield { key, token, who, why, within_ms } => {
                let asked = (who.clone(), why.clone(), *within_ms);
                self.ask_yield(run, key, *token, asked)
            }
            _ => unreachable!("handled before"),
        }
    }

    fn time_out(&mut self, run: &mut Run, lease: LeaseId, number: Number) -> Applied {
        if !self.is_live(lease) {
            return refuse(ErrorCode::LEASE_DEAD);
        }
        let waits = self.lease(lease).memory.get(&number.0);
        if waits.is_none_or(|memory| memory.result.is_some()) {
            return refuse(ErrorCode::NOT_QUEUED);
        }
        let outcome = Outcome::TimedOut { revision: run.revision };
        self.end_wait(run, lease, number, outcome);
        Ok(outcome)
    }

    fn is_live(&self, id: LeaseId) -> bool {
        self.leases.iter().any(|lease| lease.id == id)
    }

    pub(crate) fn lease(&self, id: LeaseId) -> &Lease {
        self.leases.iter().find(|lease| lease.id == id).expect("live")
    }

    fn lease_mut(&mut self, id: LeaseId) -> &mut Lease {
        self.leases.iter_mut().find(|lease| lease.id == id).expect("live")
    }

    fn may_use(&self, id: LeaseId, secret: &Secret) -> Result<(), (ErrorCode, Token)> {
        match self.leases.iter().find(|lease| lease.id == id) {
            None => refuse(ErrorCode::LEASE_DEAD),
            Some(lease) if lease.secret != *secret => refuse(ErrorCode::BAD_SECRET),
            Some(_) => Ok(()),
        }
    }

    fn holder_under(&self, key: &[u8], token: Token) -> Option<&Holder> {
        self.keys.get(key)?.holder_under(token)
    }

    fn holds(&self, lease: LeaseId, key: &[u8], token: Token) -> bool {
        self.holder_under(key, token).is_some_and(|holder| holder.lease == lease)
    }

    fn present(&self, key: &[u8]) -> Token {
        let first = self.keys.get(key).and_then(|entry| entry.holders.first());
        first.map_or(Token(0), |holder| holder.token)
    }

    fn mint(&mut self, run: &mut Run, ttl_ms: u32, secret: Secret, own: bool) -> LeaseId {
        self.minted += 1;
        let id = LeaseId(self.minted);
        let (version, floor, memory) = (u64::from(own), 0, BTreeMap::new());
        self.leases.push(Lease { id, ttl_ms, secret, own, version, floor, memory });
        run.events.push(EventKind::LeaseOpened { lease: id, ttl_ms });
        id
    }

    fn numbered(&mut self, run: &mut Run, caller: &Caller, command: &Command) -> Applied {
        self.may_use(caller.lease, &caller.secret)?;
        if self.lease(caller.lease).own {
            return refuse(ErrorCode::LEASE_DEAD);
        }
        self.acknowledge(caller);
        let number = caller.number.0;
        let lease = self.lease(caller.lease);
        if let Some(memory) = lease.memory.get(&number) {
            let same = match &memory.command {
                None => is_acquire(command),
                Some(first) => *first == stripped(command),
            };
            if !same {
                return refuse(ErrorCode::NUMBER_CONFLICT);
            }
            return Ok(memory.result.unwrap_or_else(|| Outcome::Queued {
                position: self.position(caller.lease, caller.number),
                revision: run.revision,
            }));
        }
        if number <= lease.floor && !self.is_reserved(lease, number, command) {
            return refuse(ErrorCode::NUMBER_BELOW_FLOOR);
        }
        let reserved = if is_acquire(command) { 2 } else { 0 };
        if number.saturating_add(reserved) > lease.floor.saturating_add(WINDOW) {
            return refuse(ErrorCode::NUMBER_BEYOND_WINDOW);
        }
        let below_floor = number <= lease.floor;
        let applied = self.execute(run, caller, command);
        let result = match applied {
            Ok(Outcome::Queued { .. }) => None,
            Ok(outcome) => Some(outcome),
            Err((code, token)) => Some(Outcome::Refused { code, token, revision: run.revision }),
        };
        let must_be_acked = below_floor || result.is_none();
        let memory = Memory { command: Some(stripped(command)), result, must_be_acked };
        self.lease_mut(caller.lease).memory.insert(number, memory);
        self.forget_what_was_read(caller.lease);
        applied
    }

    /// The numbers after an acquire's belong to its cancel and its release, as long as there is
    /// something to cancel or to release.
    fn is_reserved(&self, lease: &Lease, number: u64, command: &Command) -> bool {
        match command {
            Command::Cancel { .. } => {
                number >= 1 && lease.memory.get(&(number - 1)).is_some_and(Memory::is_acquire)
            }
            Command::Release { .. } | Command::ReleaseAll { .. } => {
                self.keys.values().any(|entry| {
                    let held = entry.holder_of(lease.id);
                    held.is_some_and(|holder| {
                        holder.number.0 + 2 == number
                            || holder.again.contains(&(number.wrapping_sub(2)))
                    })
                })
            }
            _ => false,
        }
    }

    fn acknowledge(&mut self, caller: &Caller) {
        let lease = self.lease_mut(caller.lease);
        lease.floor = lease.floor.max(caller.floor.0);
        for ack in &caller.acks {
            let floor = lease.floor;
            if let Some(memory) = lease.memory.get_mut(&ack.0)
                && ack.0 <= floor
                && memory.result.is_some()
            {
                memory.must_be_acked = false;
            }
        }
        self.forget_what_was_read(caller.lease);
    }

    fn forget_what_was_read(&mut self, lease: LeaseId) {
        let lease = self.lease_mut(lease);
        loop {
            let read = lease.memory.iter().find(|(number, memory)| {
                **number <= lease.floor && memory.result.is_some() && !memory.must_be_acked
            });
            let Some((&number, _)) = read else { return };
            let gone = lease.memory.remove(&number).expect("found");
            // Whoever read the cancel's outcome knows the acquire's.
            if matches!(gone.command, Some(Command::Cancel { .. }))
                && let Some(acquire) = lease.memory.get_mut(&(number - 1))
                && acquire.is_acquire()
            {
                acquire.must_be_acked = false;
            }
        }
    }

    fn position(&self, lease: LeaseId, number: Number) -> u32 {
        let same = |waiting: &Waiting| waiting.lease == lease && waiting.number == number;
        let places = self.keys.values().filter_map(|entry| entry.queue.iter().position(same));
        places.max().expect("it waits") as u32
    }

    fn execute(&mut self, run: &mut Run, caller: &Caller, command: &Command) -> Applied {
        match command {
            Command::Acquire { key, mode, own, value, wait_ms, .. } => {
                let (lease, number) = (caller.lease, caller.number);
                let (mode, value, delay_ms) = (*mode, value.clone(), 0);
                let (all, part) = (vec![key.clone()], 0);
                let asks = Waiting { lease, number, all, part, mode, own: *own, value, delay_ms };
                self.acquire(run, key, asks, (0, false), *wait_ms)
            }
            Command::AcquireAll { wants, .. } if wants.len() > 1 => {
                self.acquire_several(run, caller, command)
            }
            Command::AcquireAll { wants, own, value, wait_ms, delay_ms, .. } => {
                let (lease, number) = (caller.lease, caller.number);
                let want = &wants[0];
                let (mode, value, delay_ms) = (want.mode, value.clone(), *delay_ms);
                let (all, part) = (vec![want.key.clone()], 0);
                let asks = Waiting { lease, number, all, part, mode, own: *own, value, delay_ms };
                self.acquire(run, &want.key, asks, (want.limit, want.reentrant), *wait_ms)
            }
            Command::Cancel { release_if_granted, .. } => {
                self.cancel(run, caller, *release_if_granted)
            }
            Command::Release { key, token, .. } => {
                if !self.holds(caller.lease, key, *token) {
                    return Err((ErrorCode::NOT_OWNER, self.present(key)));
                }
                let acquire = caller.number.0.wrapping_sub(2);
                let (acquired_by, outcome) = self.give_back(run, key, *token, acquire);
                // Whoever names the token has read the grant.
                if let Some(read) = self.lease_mut(caller.lease).memory.get_mut(&acquired_by)
                    && read.is_acquire()
                {
                    read.must_be_acked = false;
                }
                Ok(outcome)
            }
            Command::ReleaseAll { acquire, .. } => {
                let keys = self.entered_by(caller.lease, *acquire);
                if keys.is_empty() {
                    return refuse(ErrorCode::NOT_OWNER);
                }
                let outcome = self.give_all_back(run, caller.lease, keys, acquire.0);
                if let Some(read) = self.lease_mut(caller.lease).memory.get_mut(&acquire.0)
                    && read.is_acquire()
                {
                    read.must_be_acked = false;
                }
                Ok(outcome)
            }
            Command::SetValue { key, token, value, .. } => {
                self.set_value(run, caller.lease, key, *token, value)
            }
            Command::Convert { key, token, mode, .. } => {
                self.convert(run, caller.lease, key, *token, *mode)
            }
            _ => unreachable!("only these are numbered"),
        }
    }

    fn acquire(
        &mut self,
        run: &mut Run,
        key: &[u8],
        asks: Waiting,
        (limit, reentrant): (u32, bool),
        wait_ms: u32,
    ) -> Applied {
        let entry = self.keys.entry(key.to_vec()).or_default();
        if let Some(holder) = entry.holder_of(asks.lease) {
            let covers = holder.mode == asks.mode
                || (holder.mode == Mode::EXCLUSIVE && asks.mode == Mode::SHARED);
            if !reentrant || !covers || asks.own.is_some() {
                return Err((ErrorCode::ALREADY_HELD, holder.token));
            }
            if holder.forced.is_some() {
                return Err((ErrorCode::HOLD_FORCED, holder.token));
            }
            return Ok(Outcome::Granted(self.enter(run, key, &asks)));
        }
        if entry.queue.iter().any(|waiting| waiting.lease == asks.lease) {
            return refuse(ErrorCode::ALREADY_QUEUED);
        }
        if entry.is_vacant() {
            entry.limit = limit;
        }
        if (entry.limit == 0) != (limit == 0) {
            return refuse(ErrorCode::MODE_MISMATCH);
        }
        if entry.limit != limit {
            return Err((ErrorCode::LIMIT_MISMATCH, Token(entry.limit.into())));
        }
        // Nobody overtakes who waits already.
        if entry.queue.is_empty() && entry.fits(asks.mode) {
            return Ok(Outcome::Granted(self.grant(run, key, asks)));
        }
        if wait_ms == 0 {
            if entry.queue.is_empty() && entry.fits_beside(asks.mode, &[]) {
                return Err((ErrorCode::DELAYED, entry.ghosts[0].token));
            }
            return Err((ErrorCode::HELD, self.present(key)));
        }
        let position = entry.queue.len() as u32;
        let (lease, number) = (asks.lease, asks.number);
        let mode = asks.mode;
        run.events.push(EventKind::Queued { key: key.to_vec(), lease, number, wait_ms, mode });
        entry.queue.push(asks);
        Ok(Outcome::Queued { position, revision: run.revision })
    }

    /// Several keys at once: all of them, or a place in each queue, or nothing.
    fn acquire_several(&mut self, run: &mut Run, caller: &Caller, command: &Command) -> Applied {
        let Command::AcquireAll { wants, value, wait_ms, delay_ms, .. } = command else {
            unreachable!("the caller knows what it is");
        };
        let lease = caller.lease;
        for want in wants {
            let Some(entry) = self.keys.get(&want.key).filter(|entry| !entry.is_vacant()) else {
                continue;
            };
            if let Some(holder) = entry.holder_of(lease) {
                return Err((ErrorCode::ALREADY_HELD, holder.token));
            }
            if entry.queue.iter().any(|waiting| waiting.lease == lease) {
                return refuse(ErrorCode::ALREADY_QUEUED);
            }
            if (entry.limit == 0) != (want.limit == 0) {
                return refuse(ErrorCode::MODE_MISMATCH);
            }
            if entry.limit != want.limit {
                return Err((ErrorCode::LIMIT_MISMATCH, Token(entry.limit.into())));
            }
        }
        let mut blocked = Vec::new();
        for want in wants {
            let entry = self.keys.entry(want.key.clone()).or_default();
            if entry.is_vacant() {
                entry.limit = want.limit;
            }
            if !entry.queue.is_empty() || !entry.fits(want.mode) {
                let held = !entry.queue.is_empty() || !entry.fits_beside(want.mode, &[]);
                blocked.push((held, want.key.clone()));
            }
        }
        let all: Vec<_> = wants.iter().map(|want| want.key.clone()).collect();
        let asks = wants.iter().enumerate().map(|(part, want)| Waiting {
            lease,
            number: caller.number,
            all: all.clone(),
            part,
            mode: want.mode,
            own: None,
            value: value.clone(),
            delay_ms: *delay_ms,
        });
        let asks: Vec<_> = asks.collect();
        if blocked.is_empty() {
            return Ok(Outcome::Granted(self.grant_several(run, asks)));
        }
        if *wait_ms == 0 {
            return match blocked.iter().find(|(held, _)| *held) {
                Some((_, key)) => Err((ErrorCode::HELD, self.present(key))),
                None => Err((ErrorCode::DELAYED, self.keys[&blocked[0].1].ghosts[0].token)),
            };
        }
        let mut position = 0;
        for asks in asks {
            let key = asks.all[asks.part].clone();
            let number = caller.number;
            let mode = asks.mode;
            run.events.push(EventKind::Queued {
                key: key.clone(),
                lease,
                number,
                wait_ms: *wait_ms,
                mode,
            });
            let queue = &mut self.keys.get_mut(&key).expect("made above").queue;
            position = position.max(queue.len() as u32);
            queue.push(asks);
        }
        Ok(Outcome::Queued { position, revision: run.revision })
    }

    /// One version step and one reply for all of them.
    fn grant_several(&mut self, run: &mut Run, asks: Vec<Waiting>) -> Grant {
        let session = asks[0].lease;
        let version = self.lease(session).version;
        let mut first = None;
        for asks in asks {
            self.lease_mut(session).version = version;
            let key = asks.all[asks.part].clone();
            let grant = self.grant(run, &key, asks);
            first = first.or(Some(grant));
        }
        first.expect("some key")
    }

    /// The keys that an acquire holds, or a hold of which it entered, in the order it named them.
    fn entered_by(&self, lease: LeaseId, acquire: Number) -> Vec<Vec<u8>> {
        let mut keys = Vec::new();
        for (key, entry) in &self.keys {
            let Some(holder) = entry.holder_of(lease) else { continue };
            if holder.number == acquire {
                keys.push((holder.part, key.clone()));
            } else if holder.again.contains(&acquire.0) {
                keys.push((0, key.clone()));
            }
        }
        keys.sort();
        keys.into_iter().map(|(_, key)| key).collect()
    }

    fn give_all_back(
        &mut self,
        run: &mut Run,
        lease: LeaseId,
        keys: Vec<Vec<u8>>,
        acquire: u64,
    ) -> Outcome {
        let mut first = None;
        for key in &keys {
            let token = self.keys[key].holder_of(lease).expect("held").token;
            let (_, outcome) = self.leave(run, key, token, acquire);
            first = first.or(Some(outcome));
        }
        self.serve(run, keys);
        first.expect("some key")
    }

    fn cancel(&mut self, run: &mut Run, caller: &Caller, release: bool) -> Applied {
        let revision = run.revision;
        let acquire = Number(caller.number.0 - 1);
        let lease = self.lease_mut(caller.lease);
        let Some(memory) = lease.memory.get(&acquire.0) else {
            if acquire.0 <= lease.floor {
                return refuse(ErrorCode::NOT_QUEUED);
            }
            let code = ErrorCode::CANCELLED;
            let result = Some(Outcome::Refused { code, token: Token(0), revision });
            let memory = Memory { command: None, result, must_be_acked: false };
            lease.memory.insert(acquire.0, memory);
            return Ok(Outcome::Cancelled { revision });
        };
        if !memory.is_acquire() {
            return refuse(ErrorCode::NOT_QUEUED);
        }
        match memory.result {
            None => {
                let outcome = Outcome::Cancelled { revision };
                self.end_wait(run, caller.lease, acquire, outcome);
                Ok(outcome)
            }
            Some(Outcome::Granted(grant)) => {
                // A hold that was upgraded is another grant's.
                let mut keys = self.entered_by(grant.lease, acquire);
                keys.retain(|key| {
                    let holder = self.keys[key].holder_of(grant.lease).expect("held");
                    let part = if holder.number == acquire { holder.part as u64 } else { 0 };
                    holder.token.0 == grant.token.0 + part
                });
                if keys.is_empty() {
                    return refuse(ErrorCode::NOT_QUEUED);
                }
                if !release {
                    return Ok(Outcome::Granted(grant));
                }
                Ok(self.give_all_back(run, grant.lease, keys, acquire.0))
            }
            Some(outcome) => Ok(outcome),
        }
    }

    /// One more entry of the hold that the lease has.
    fn enter(&mut self, run: &mut Run, key: &[u8], asks: &Waiting) -> Grant {
        let version = HoldSetVersion(self.lease(asks.lease).version);
        let entry = self.keys.get_mut(key).expect("held");
        let floor = entry.floor;
        let holders = entry.holders.iter_mut();
        let holder = holders.into_iter().find(|one| one.lease == asks.lease).expect("held");
        holder.again.push(asks.number.0);
        Grant {
            lease: asks.lease,
            token: holder.token,
            revision: run.revision,
            version_before: version,
            version_after: version,
            floor: if holder.mode == Mode::EXCLUSIVE { holder.token } else { Token(floor) },
        }
    }

    fn give_back(
        &mut self,
        run: &mut Run,
        key: &[u8],
        token: Token,
        acquire: u64,
    ) -> (u64, Outcome) {
        let left = self.leave(run, key, token, acquire);
        if matches!(left.1, Outcome::Released { .. }) {
            self.serve(run, vec![key.to_vec()]);
        }
        left
    }

    /// Gives one entry up: that of this acquire, or the last that came. The hold ends with its
    /// last entry.
    fn leave(&mut self, run: &mut Run, key: &[u8], token: Token, acquire: u64) -> (u64, Outcome) {
        let revision = run.revision;
        let entry = self.keys.get_mut(key).expect("held");
        let holder = entry.holders.iter_mut().find(|one| one.token == token).expect("held");
        let mut entries = vec![holder.number.0];
        entries.extend(&holder.again);
        let index = entries.iter().position(|number| *number == acquire);
        let left = entries.remove(index.unwrap_or(entries.len() - 1));
        if entries.is_empty() {
            self.end_hold(run, key, token, &EndReason::Released);
            return (left, Outcome::Released { token, revision });
        }
        if holder.number.0 == left {
            holder.part = 0;
        }
        holder.number = Number(entries.remove(0));
        holder.again = entries;
        (left, Outcome::Changed { token, revision })
    }

    fn set_limit(&mut self, run: &mut Run, key: &[u8], limit: u32, who: &[u8]) -> Applied {
        let Some(entry) = self.keys.get_mut(key) else {
            return refuse(ErrorCode::NOT_IN_USE);
        };
        if entry.limit == 0 {
            return refuse(ErrorCode::MODE_MISMATCH);
        }
        let changed = Ok(Outcome::Changed { token: Token(0), revision: run.revision });
        if entry.limit == limit {
            return changed;
        }
        entry.limit = limit;
        let who = who.to_vec();
        run.events.push(EventKind::LimitChanged { key: key.to_vec(), limit, who });
        let hopeless = |one: &Waiting| one.mode.permit_count().unwrap_or(0) > limit;
        let gone: Vec<Waiting> = entry.queue.iter().filter(|one| hopeless(one)).cloned().collect();
        let mut freed = vec![key.to_vec()];
        for one in gone {
            let (code, token) = (ErrorCode::PERMITS_ABOVE_LIMIT, Token(limit.into()));
            let outcome = Outcome::Refused { code, token, revision: run.revision };
            self.leave_queues(&one);
            self.tell(run, &one.all, one.lease, one.number, outcome);
            freed.extend(one.all);
        }
        self.serve(run, freed);
        changed
    }

    fn end_delay(&mut self, run: &mut Run, key: &[u8], token: Token) -> Applied {
        let ghosts = self.keys.get_mut(key).map(|entry| &mut entry.ghosts);
        let index = ghosts.as_ref().and_then(|all| all.iter().position(|one| one.token == token));
        let Some((ghosts, index)) = ghosts.zip(index) else {
            return refuse(ErrorCode::NOT_DELAYED);
        };
        ghosts.remove(index);
        run.events.push(EventKind::DelayEnded { key: key.to_vec(), token });
        self.serve(run, vec![key.to_vec()]);
        Ok(Outcome::Changed { token, revision: run.revision })
    }

    /// What a lost hold leaves behind, if it asked for that.
    fn haunt(&mut self, run: &mut Run, key: &[u8], lost: Holder) {
        let Holder { token, mode, slots, delay_ms, .. } = lost;
        if delay_ms > 0 {
            let entry = self.keys.get_mut(key).expect("it was held");
            entry.ghosts.push(Ghost { token, mode, slots, delay_ms });
            entry.ghosts.sort_by_key(|ghost| ghost.token);
            run.events.push(EventKind::DelayBegan { key: key.to_vec(), token, delay_ms });
        }
    }

    fn set_value(
        &mut self,
        run: &mut Run,
        lease: LeaseId,
        key: &[u8],
        token: Token,
        value: &[u8],
    ) -> Applied {
        if !self.holds(lease, key, token) {
            return Err((ErrorCode::NOT_OWNER, self.present(key)));
        }
        let entry = self.keys.get_mut(key).expect("held");
        let holder = entry.holders.iter_mut().find(|holder| holder.token == token).expect("held");
        holder.value = value.to_vec();
        let (key, value) = (key.to_vec(), value.to_vec());
        run.events.push(EventKind::ValueChanged { key, lease, token, value });
        Ok(Outcome::Changed { token, revision: run.revision })
    }

    fn ask_yield(
        &mut self,
        run: &mut Run,
        key: &[u8],
        token: Token,
        asked: (Vec<u8>, Vec<u8>, u32),
    ) -> Applied {
        if self.holder_under(key, token).is_none() {
            return Err((ErrorCode::NOT_OWNER, self.present(key)));
        }
        let entry = self.keys.get_mut(key).expect("held");
        let holder = entry.holders.iter_mut().find(|holder| holder.token == token).expect("held");
        // The same again is not told again.
        if holder.asked.as_ref() != Some(&asked) {
            holder.asked = Some(asked.clone());
            let (key, lease, (who, why, within_ms)) = (key.to_vec(), holder.lease, asked);
            run.events.push(EventKind::YieldAsked { key, lease, token, who, why, within_ms });
        }
        Ok(Outcome::Changed { token, revision: run.revision })
    }

    fn convert(
        &mut self,
        run: &mut Run,
        lease: LeaseId,
        key: &[u8],
        token: Token,
        mode: Mode,
    ) -> Applied {
        if !self.holds(lease, key, token) {
            return Err((ErrorCode::NOT_OWNER, self.present(key)));
        }
        let changed = Ok(Outcome::Changed { token, revision: run.revision });
        let entry = self.keys.get_mut(key).expect("held");
        let holder = entry.holders.iter_mut().find(|holder| holder.token == token).expect("held");
        if holder.mode.permit_count().is_some() {
            return refuse(ErrorCode::MODE_MISMATCH);
        }
        if holder.mode == mode {
            return changed;
        }
        if !holder.again.is_empty() {
            return refuse(ErrorCode::HOLD_REENTERED);
        }
        if mode == Mode::SHARED {
            holder.mode = mode;
            entry.floor = token.0;
            run.events.push(EventKind::Converted { key: key.to_vec(), lease, token, mode });
            self.serve(run, vec![key.to_vec()]);
            return changed;
        }
        if holder.forced.is_some() {
            return refuse(ErrorCode::HOLD_FORCED);
        }
        if let Some(ghost) = entry.ghosts.first() {
            return Err((ErrorCode::DELAYED, ghost.token));
        }
        if let Some(other) = entry.holders.iter().find(|other| other.lease != lease) {
            return Err((ErrorCode::UPGRADE_CONFLICT, other.token));
        }
        let Holder { number, part, value, delay_ms, .. } = entry.take(lease).expect("held");
        let reason = EndReason::Upgraded;
        run.events.push(EventKind::Ended { key: key.to_vec(), lease, token, reason });
        let all = vec![key.to_vec()];
        let asks = Waiting { lease, number, all, part, mode, own: None, value, delay_ms };
        Ok(Outcome::Granted(self.grant(run, key, asks)))
    }

    fn grant(&mut self, run: &mut Run, key: &[u8], asks: Waiting) -> Grant {
        let before = self.token;
        self.token += 1;
        let token = Token(self.token);
        let session = self.lease_mut(asks.lease);
        let version_before = HoldSetVersion(session.version);
        session.version += 1;
        let version_after = HoldSetVersion(session.version);
        let lease = match asks.own {
            None => asks.lease,
            Some(own) => self.mint(run, own.ttl_ms, own.secret, true),
        };
        let entry = self.keys.get_mut(key).expect("the key has an entry");
        assert!(entry.fits(asks.mode));
        if entry.holders.is_empty() && entry.ghosts.is_empty() {
            entry.floor = if asks.mode == Mode::EXCLUSIVE { 0 } else { before };
        }
        let floor = if asks.mode == Mode::EXCLUSIVE { token } else { Token(entry.floor) };
        let (mode, slots) = (asks.mode, entry.choose(asks.mode));
        let (key, slots_sent, limit) = (key.to_vec(), packed(&slots), entry.limit);
        let event = EventKind::Granted { key, lease, mode, token, slots: slots_sent, limit };
        entry.put(Holder {
            lease,
            token,
            number: asks.number,
            part: asks.part,
            mode,
            value: asks.value,
            since_ms: run.wall_ms,
            forced: None,
            slots,
            delay_ms: asks.delay_ms,
            again: Vec::new(),
            asked: None,
        });
        run.events.push(event);
        Grant { lease, token, revision: run.revision, version_before, version_after, floor }
    }

    /// Grants to the head of each queue as long as it fits; says so if nobody is left of a key.
    fn serve(&mut self, run: &mut Run, mut keys: Vec<Vec<u8>>) {
        let mut next = 0;
        while next < keys.len() {
            let key = keys[next].clone();
            next += 1;
            while let Some(head) = self.servable(&key) {
                let (lease, number, all) = (head.lease, head.number, head.all.clone());
                let asks: Vec<_> = all.iter().map(|key| self.keys[key].queue[0].clone()).collect();
                self.leave_queues(&head);
                let grant = if all.len() == 1 {
                    self.grant(run, &key, head)
                } else {
                    keys.extend(all.clone());
                    self.grant_several(run, asks)
                };
                self.tell(run, &all, lease, number, Outcome::Granted(grant));
            }
            if self.keys.get(&key).is_some_and(Entry::is_vacant) {
                self.keys.remove(&key);
                run.events.push(EventKind::Vacant { key });
            }
        }
    }

    /// The head of a queue, if it is that of all the queues it stands in and fits everywhere.
    fn servable(&self, key: &[u8]) -> Option<Waiting> {
        let head = self.keys.get(key)?.queue.first()?;
        let ready = head.all.iter().all(|key| {
            let entry = &self.keys[key];
            let first = &entry.queue[0];
            (first.lease, first.number) == (head.lease, head.number) && entry.fits(first.mode)
        });
        ready.then(|| head.clone())
    }

    fn leave_queues(&mut self, gone: &Waiting) {
        for key in &gone.all {
            let queue = &mut self.keys.get_mut(key).expect("it waits there").queue;
            queue.retain(|one| (one.lease, one.number) != (gone.lease, gone.number));
        }
    }

    fn tell(
        &mut self,
        run: &mut Run,
        keys: &[Vec<u8>],
        id: LeaseId,
        number: Number,
        outcome: Outcome,
    ) {
        let memory = self.lease_mut(id).memory.get_mut(&number.0).expect("it waited");
        memory.result = Some(outcome);
        for key in keys {
            let key = key.clone();
            run.events.push(EventKind::WaitEnded { key, lease: id, number, outcome });
        }
    }

    fn end_wait(&mut self, run: &mut Run, lease: LeaseId, number: Number, outcome: Outcome) {
        let waits = |waiting: &&Waiting| waiting.lease == lease && waiting.number == number;
        let found = self.keys.values().find_map(|entry| entry.queue.iter().find(waits));
        let gone = found.expect("it waits").clone();
        self.leave_queues(&gone);
        self.tell(run, &gone.all, lease, number, outcome);
        self.serve(run, gone.all);
    }

    /// The end of a hold that its client agreed to, or that nobody waits for.
    fn end_hold(&mut self, run: &mut Run, key: &[u8], token: Token, reason: &EndReason) {
        self.finish_hold(run, key, token, (reason, false));
    }

    /// The end of a hold whose client may not know.
    fn lose_hold(&mut self, run: &mut Run, key: &[u8], token: Token, reason: &EndReason) {
        self.finish_hold(run, key, token, (reason, true));
    }

    fn finish_hold(
        &mut self,
        run: &mut Run,
        key: &[u8],
        token: Token,
        (reason, lost): (&EndReason, bool),
    ) {
        let lease = self.holder_under(key, token).expect("held").lease;
        let ended = self.keys.get_mut(key).expect("held").take(lease).expect("held");
        let reason = reason.clone();
        run.events.push(EventKind::Ended {
            key: key.to_vec(),
            lease,
            token,
            reason: reason.clone(),
        });
        self.ends.insert(key.to_vec(), (lease, token, reason.clone(), run.revision));
        if lost {
            self.haunt(run, key, ended);
        }
        if self.lease(lease).own {
            self.leases.retain(|one| one.id != lease);
            run.events.push(EventKind::LeaseEnded { lease, reason });
        }
    }

    fn end_lease(&mut self, run: &mut Run, id: LeaseId, reason: &EndReason) -> Outcome {
        let dead = self.lease(id).clone();
        self.leases.retain(|lease| lease.id != id);
        // What it holds and waits for, in the order of the acquires' numbers and keys.
        let mut claims = Vec::new();
        for (key, entry) in &self.keys {
            let held = entry.holder_of(id);
            claims.extend(held.map(|holder| (holder.number, holder.part, key.clone())));
            let waits = entry.queue.iter().filter(|waiting| waiting.lease == id);
            claims.extend(waits.map(|waiting| (waiting.number, waiting.part, key.clone())));
        }
        claims.sort();
        for (number, _, key) in &claims {
            let entry = self.keys.get_mut(key).expect("it was there");
            if let Some(held) = entry.take(id) {
                let (key, reason) = (key.clone(), reason.clone());
                let (token, lost) = (held.token, reason == EndReason::LeaseExpired);
                self.ends.insert(key.clone(), (id, token, reason.clone(), run.revision));
                run.events.push(EventKind::Ended { key: key.clone(), lease: id, token, reason });
                if lost {
                    self.haunt(run, &key, held);
                }
            } else {
                entry.queue.retain(|waiting| waiting.lease != id);
                let (code, token) = (ErrorCode::LEASE_LOST, Token(0));
                let outcome = Outcome::Refused { code, token, revision: run.revision };
                let (key, number) = (key.clone(), *number);
                run.events.push(EventKind::WaitEnded { key, lease: id, number, outcome });
            }
        }
        self.serve(run, claims.into_iter().map(|(_, _, key)| key).collect());
        let lease = dead.id;
        run.events.push(EventKind::LeaseEnded { lease, reason: reason.clone() });
        Outcome::Closed { revision: run.revision }
    }

    fn force(
        &mut self,
        run: &mut Run,
        key: &[u8],
        token: Token,
        (who, why): (&[u8], &[u8]),
        now: bool,
    ) -> Applied {
        let Some(holder) = self.holder_under(key, token) else {
            return Err((ErrorCode::NOT_OWNER, self.present(key)));
        };
        let lease = holder.lease;
        let (who, why) = (who.to_vec(), why.to_vec());
        let forced = Ok(Outcome::Forced { token, passed_on: now, revision: run.revision });
        if now {
            self.lease_mut(lease).version += 1;
            self.end_hold(run, key, token, &EndReason::Forced { who, why });
            self.serve(run, vec![key.to_vec()]);
        } else if holder.forced.is_none() {
            self.lease_mut(lease).version += 1;
            let entry = self.keys.get_mut(key).expect("held");
            let holder = entry.holders.iter_mut().find(|holder| holder.token == token);
            let holder = holder.expect("held");
            holder.forced = Some((who.clone(), why.clone()));
            let key = key.to_vec();
            run.events.push(EventKind::ForcedPending { key, lease, token, who, why });
        }
        forced
    }
}
