//! What `pipe` does from an acquire to its grant.

use std::time::Duration;

use leasehold::{CallError, Guard, HoldState, MultiGuard, Places, Yields};
use serde_json::{Value, json};

use super::super::super::beside;
use super::super::super::exit::failure_json;
use super::super::super::json;
use super::super::news::{deaf, tell_changes, tell_yields};
use super::super::request::{Acquire, AcquireAll, AcquireEach, HoldMode, WantHow};
use super::{Done, Kind, Pipe};

/// How often the place of an acquire is looked at whose requester wants to know.
const PLACES_EVERY: Duration = Duration::from_millis(500);

/// A grant that its requester does not know of yet.
pub(super) struct Granted {
    guard: Guard,
    /// The slots of its permits, if it has any and the cluster told.
    slots: Option<Vec<u32>>,
    /// Requests to yield are to be told.
    yields: bool,
}

impl Granted {
    pub(super) async fn new(guard: Guard, yields: bool) -> Self {
        let slots = match guard.mode().permit_count() {
            // If it was lost meanwhile, that is told too.
            Some(_) => guard.slots().await.ok(),
            None => None,
        };
        Self { guard, slots, yields }
    }
}

/// The same of several keys; the slots are those of each.
pub(super) struct GrantedAll {
    guard: MultiGuard,
    slots: Vec<Vec<u32>>,
    yields: bool,
}

impl Pipe {
    pub(super) async fn acquire(&mut self, id: Value, acquire: Acquire) {
        let mut request = self.session.lock(acquire.key);
        if let Some(wait_ms) = acquire.wait_ms {
            request = request.wait(Duration::from_millis(wait_ms));
        }
        if let Some(value) = acquire.value {
            request = request.value(value);
        }
        if let Some(ttl_ms) = acquire.ttl_ms {
            request = request.own_lease(Duration::from_millis(ttl_ms));
        }
        if acquire.mode == Some(HoldMode::Shared) {
            request = request.shared();
        }
        if let (Some(permits), Some(limit)) = (acquire.permits, acquire.limit) {
            request = request.permits(permits, limit);
        }
        if acquire.reentrant {
            request = request.reentrant();
        }
        if let Some(delay_ms) = acquire.lock_delay_ms {
            request = request.lock_delay(Duration::from_millis(delay_ms));
        }
        let acquiring = match request.begin() {
            Ok(acquiring) => acquiring,
            Err(error) => return self.refuse(&id, error.failure()).await,
        };
        let ticket = acquiring.ticket();
        let told = self.tell_places(&id, acquire.places.then(|| ticket.places(PLACES_EVERY)));
        self.spawn(id, Some(ticket), async move {
            match beside(acquiring.granted(), told).await {
                Ok(guard) => Done::Granted(Granted::new(guard, acquire.yields).await),
                Err(error) => Done::Reply(failure_json(error.failure())),
            }
        });
    }

    pub(super) async fn acquire_all(&mut self, id: Value, acquire: AcquireAll) {
        let slotted = acquire.keys.iter().any(|want| matches!(want.how, WantHow::Permits { .. }));
        let none = self.session.lock_all::<String>([]);
        let mut request = acquire.keys.into_iter().fold(none, |all, want| match want.how {
            WantHow::Exclusive => all.and_exclusive(want.key),
            WantHow::Shared => all.and_shared(want.key),
            WantHow::Permits { permits, limit } => all.and_permits(want.key, permits, limit),
        });
        if let Some(wait_ms) = acquire.wait_ms {
            request = request.wait(Duration::from_millis(wait_ms));
        }
        if let Some(value) = acquire.value {
            request = request.value(value);
        }
        if let Some(delay_ms) = acquire.lock_delay_ms {
            request = request.lock_delay(Duration::from_millis(delay_ms));
        }
        let acquiring = match request.begin() {
            Ok(acquiring) => acquiring,
            Err(error) => return self.refuse(&id, error.failure()).await,
        };
        let ticket = acquiring.ticket();
        let told = self.tell_places(&id, acquire.places.then(|| ticket.places(PLACES_EVERY)));
        self.spawn(id, Some(ticket), async move {
            match beside(acquiring.granted(), told).await {
                Ok(guard) => {
                    let slots = if slotted { guard.slots().await.ok() } else { None };
                    let (slots, yields) = (slots.unwrap_or_default(), acquire.yields);
                    Done::GrantedAll(GrantedAll { guard, slots, yields })
                }
                Err(error) => Done::Reply(failure_json(error.failure())),
            }
        });
    }

    pub(super) fn acquire_each(&mut self, id: Value, acquire: AcquireEach) {
        let mut request = self.session.lock_each(acquire.keys);
        if let Some(wait_ms) = acquire.wait_ms {
            request = request.wait(Duration::from_millis(wait_ms));
        }
        if let Some(value) = acquire.value {
            request = request.value(value);
        }
        if let Some(delay_ms) = acquire.lock_delay_ms {
            request = request.lock_delay(Duration::from_millis(delay_ms));
        }
        self.spawn_as(id, Kind::AcquireEach, async move {
            match request.acquire().await {
                Ok(guards) => Done::GrantedEach(guards, acquire.yields),
                Err(error) => Done::Reply(failure_json(error.failure())),
            }
        });
    }

    /// Tells the places of a waiting acquire, if that is wanted.
    fn tell_places(&self, id: &Value, places: Option<Places>) -> impl Future<Output = ()> + use<> {
        let (id, out) = (id.clone(), self.out.clone());
        async move {
            let Some(mut places) = places else { return };
            while let Ok(Some(place)) = places.next().await {
                let mut line = json::place(&place);
                (line["event"], line["acquire"]) = ("place".into(), id.clone());
                if out.send(line).await.is_err() {
                    return;
                }
            }
        }
    }

    pub(super) async fn granted(&mut self, id: &Value, granted: Granted) {
        let Granted { guard, slots, yields } = granted;
        let (key, token) = (guard.key().to_owned(), guard.token().0);
        let mut reply = json!({
            "ok": true,
            "key": key,
            "token": token,
            "floor": guard.floor().0,
            "remaining_ms": guard.remaining().as_millis() as u64,
        });
        json::put_mode(&mut reply, guard.mode());
        if let Some(slots) = slots {
            reply["slots"] = slots.into();
        }
        let asked = yields.then(|| guard.yields());
        self.keep(guard);
        self.reply(id, reply).await;
        if let Some(asked) = asked {
            self.hear_yields(vec![(key, token)], asked.map(|one| vec![one])).await;
        }
    }

    fn keep(&mut self, guard: Guard) {
        let key = guard.key().to_owned();
        let entries = self.holds.entry(key.clone()).or_default();
        // Those that were lost have been told of.
        entries.retain(|entry| !matches!(entry.state(), HoldState::Lost(_)));
        // The first entry of a hold is the last to be given back: it tells for all.
        if entries.iter().all(|entry| entry.token() != guard.token()) {
            tokio::spawn(tell_changes(key, guard.watch(), self.out.clone()));
        }
        entries.push(guard);
    }

    pub(super) async fn granted_each(&mut self, id: &Value, guards: Vec<Guard>, yields: bool) {
        let asked: Option<Result<Vec<_>, _>> =
            yields.then(|| guards.iter().map(Guard::yields).collect());
        let holds = guards.iter().map(|guard| (guard.key().to_owned(), guard.token().0));
        let holds: Vec<_> = holds.collect();
        let each = guards.iter().map(|guard| {
            let remaining_ms = guard.remaining().as_millis() as u64;
            json!({ "key": guard.key(), "token": guard.token().0, "remaining_ms": remaining_ms })
        });
        let reply = json!({ "ok": true, "holds": each.collect::<Vec<_>>() });
        for guard in guards {
            self.keep(guard);
        }
        self.reply(id, reply).await;
        if let Some(asked) = asked {
            self.hear_yields(holds, asked).await;
        }
    }

    pub(super) async fn granted_all(&mut self, id: &Value, granted: GrantedAll) {
        let GrantedAll { guard, slots, yields } = granted;
        let holds = guard.holds().into_iter().map(|(key, token)| (key.to_owned(), token.0));
        let holds: Vec<(String, u64)> = holds.collect();
        let (first, token) = holds.first().cloned().unwrap_or_default();
        let each = holds.iter().map(|(key, token)| json!({ "key": key, "token": token }));
        let mut reply = json!({
            "ok": true,
            "token": token,
            "holds": each.collect::<Vec<_>>(),
            "remaining_ms": guard.remaining().as_millis() as u64,
        });
        for (part, slots) in slots.into_iter().enumerate().filter(|(_, slots)| !slots.is_empty()) {
            reply["holds"][part]["slots"] = slots.into();
        }
        // All are lost together; the first stands for all.
        tokio::spawn(tell_changes(first, guard.watch(), self.out.clone()));
        let asked = yields.then(|| guard.yields());
        // Those that were lost have been told of.
        self.groups.retain(|_, group| !matches!(group.state(), HoldState::Lost(_)));
        self.groups.insert(token, guard);
        self.reply(id, reply).await;
        if let Some(asked) = asked {
            self.hear_yields(holds, asked).await;
        }
    }

    /// Tells of requests to yield each of these keys, after the reply to their acquire.
    async fn hear_yields(&self, holds: Vec<(String, u64)>, asked: Result<Vec<Yields>, CallError>) {
        match asked {
            Ok(all) => {
                for ((key, _), asked) in holds.into_iter().zip(all) {
                    tokio::spawn(tell_yields(key, asked, self.out.clone()));
                }
            }
            Err(error) => {
                for (key, token) in holds {
                    self.say(deaf(&key, token, error.failure())).await;
                }
            }
        }
    }
}
