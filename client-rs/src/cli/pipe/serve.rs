//! The loop of `pipe`: reads requests, runs each beside the others, writes replies and news.

mod acquire;
mod holds;

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold::{Client, ErrorCode, Failure, Guard, MultiGuard, Session, Ticket, WatchTarget};
use serde_json::{Value, json};
use tokio::io::{BufReader, Stdin};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use self::acquire::{Granted, GrantedAll};
use super::super::exit::{CliError, failure_json};
use super::super::json;
use super::super::watch::place;
use super::ask::answer;
use super::lines::{LINE_LEN_MAX, Line, LineReader, write};
use super::members::tell_members;
use super::news::tell_leaders;
use super::request::{Misread, Op, Watch, parse};

/// Requests without a reply.
const OPEN_MAX: usize = 4096;
/// Elections that are observed at a time.
const OBSERVED_MAX: usize = 64;
/// Lines that wait to be written; with these, nothing more is read.
const LINES_MAX: usize = 1024;

/// What a request's task ends with.
enum Done {
    Reply(Value),
    Granted(Granted),
    GrantedAll(GrantedAll),
    /// And whether requests to yield are to be told.
    GrantedEach(Vec<Guard>, bool),
    /// The number of a change of the membership that was begun.
    Changing(u64),
}

type BoxFuture<T> = std::pin::Pin<Box<dyn Future<Output = T> + Send>>;

/// What an open request is, as far as others may refer to it.
enum Kind {
    /// It ends by itself.
    Plain,
    /// It waits in a queue.
    Acquire(Ticket),
    /// It waits in one queue after the other.
    AcquireEach,
    /// It tells until it is cancelled.
    Watch,
}

/// Requests that are open, by their id's text.
type Open = BTreeMap<String, (Value, AbortHandle, Kind)>;

struct Pipe {
    client: Client,
    session: Session,
    /// By key: the entries of its hold, the newest last. Those of one that was lost stay until the
    /// key is granted again.
    holds: BTreeMap<String, Vec<Guard>>,
    /// Of several keys, by the token of the first.
    groups: BTreeMap<u64, MultiGuard>,
    /// Elections that are observed.
    observed: BTreeMap<String, AbortHandle>,
    /// Changes of the membership that are told of.
    followed: BTreeMap<u64, AbortHandle>,
    tasks: JoinSet<(String, Done)>,
    open: Open,
    out: mpsc::Sender<Value>,
}

pub(super) async fn run(client: Client, session: Session, ttl: Duration) -> Result<(), CliError> {
    let (out, lines) = mpsc::channel(LINES_MAX);
    let writer = tokio::spawn(write(lines));
    let ready = json!({ "event": "ready", "protocol": 1, "ttl_ms": ttl.as_millis() as u64 });
    let mut pipe = Pipe {
        client,
        session,
        holds: BTreeMap::new(),
        groups: BTreeMap::new(),
        observed: BTreeMap::new(),
        followed: BTreeMap::new(),
        tasks: JoinSet::new(),
        open: BTreeMap::new(),
        out,
    };
    pipe.say(ready).await;
    let mut input = BufReader::new(tokio::io::stdin());
    let served = pipe.serve(&mut input).await;
    let closed = pipe.close().await;
    let written = writer.await.unwrap_or_else(|error| Err(CliError::Io(error.into())));
    served.and(closed).and(written)
}

impl Pipe {
    async fn say(&self, line: Value) {
        // The writer ends only when the caller has stopped listening.
        let _ = self.out.send(line).await;
    }

    async fn serve(&mut self, input: &mut BufReader<Stdin>) -> Result<(), CliError> {
        let mut reader = LineReader::default();
        loop {
            tokio::select! {
                line = reader.next(input) => match line.map_err(CliError::Io)? {
                    Line::Text(line) if line.trim_ascii().is_empty() => {}
                    Line::Text(line) => self.take(parse(&line)).await,
                    Line::TooLong => {
                        let why = format!("a line has at most {LINE_LEN_MAX} bytes");
                        self.take(Err(Misread { id: Value::Null, why })).await;
                    }
                    Line::End => return Ok(()),
                },
                Some(done) = self.tasks.join_next() => {
                    if let Ok((id, done)) = done {
                        self.finish(&id, done).await;
                    }
                }
                () = self.out.closed() => return Ok(()),
            }
        }
    }

    async fn take(&mut self, line: Result<(Value, Op), Misread>) {
        let (id, op) = match line {
            Ok(read) => read,
            Err(Misread { id, why }) => {
                return self.refuse(&id, &Failure::new(ErrorCode::MALFORMED, why)).await;
            }
        };
        let name = id.to_string();
        if self.open.contains_key(&name) {
            let text = "a request with this id is still open";
            return self.refuse(&id, &Failure::new(ErrorCode::MALFORMED, text)).await;
        }
        if self.open.len() >= OPEN_MAX && !matches!(op, Op::Cancel(_)) {
            let text = format!("{OPEN_MAX} requests are open already");
            return self.refuse(&id, &Failure::new(ErrorCode::BUSY, text)).await;
        }
        match op {
            Op::Acquire(acquire) => self.acquire(id, acquire).await,
            Op::AcquireAll(acquire) => self.acquire_all(id, acquire).await,
            Op::AcquireEach(acquire) => self.acquire_each(id, acquire),
            Op::ReleaseAll(of) => self.release_all(id, of.token).await,
            Op::Release(hold) => self.release(id, &hold).await,
            Op::Renew(hold) => self.renew(id, &hold).await,
            Op::Remaining(hold) => self.remaining(&id, &hold).await,
            Op::Mode(mode) => self.mode(id, mode).await,
            Op::SetValue(value) => self.set_value(id, value).await,
            Op::HandOver(hold) => self.hand_over(&id, &hold).await,
            Op::TakeOver(of) => self.take_over(id, &of).await,
            Op::Watch(request) => self.watch(id, request),
            Op::Cancel(cancel) => self.cancel(&id, &cancel.target).await,
            Op::Observe(of) => self.observe(&id, of.name).await,
            Op::Unobserve(of) => {
                if let Some(observer) = self.observed.remove(&of.name) {
                    observer.abort();
                }
                self.reply(&id, json!({ "ok": true })).await;
            }
            Op::Place(place) => self.place(id, &place.target).await,
            Op::ChangeMembers(change) => {
                let client = self.client.clone();
                self.spawn(id, None, async move {
                    match client.change_members(change).await {
                        Ok(operation) => Done::Changing(operation),
                        Err(error) => Done::Reply(failure_json(error.failure())),
                    }
                });
            }
            Op::Ask(ask) => {
                let client = self.client.clone();
                self.spawn(id, None, async move {
                    let answer = answer(&client, ask).await;
                    Done::Reply(answer.unwrap_or_else(|error| error.to_json()))
                });
            }
        }
    }

    /// Open until it is cancelled or cut off; what it tells is news.
    fn watch(&mut self, id: Value, request: Watch) {
        let target = match (request.key, request.prefix) {
            (Some(key), _) => WatchTarget::key(key),
            (None, prefix) => WatchTarget::prefix(prefix.unwrap_or_default()),
        };
        let from = place(request.from.as_deref().unwrap_or("now"));
        let (client, out, name) = (self.client.clone(), self.out.clone(), id.clone());
        self.spawn_as(id, Kind::Watch, async move {
            let begun = from.and_then(|from| client.watch(&target, &from));
            let mut watch = match begun {
                Ok(watch) => watch,
                Err(error) => return Done::Reply(failure_json(error.failure())),
            };
            loop {
                let item = match watch.next().await {
                    Ok(item) => item,
                    Err(error) => return Done::Reply(failure_json(error.failure())),
                };
                let mut line = json::watch_item(&item, watch.cursor().as_ref());
                line["watch"] = name.clone();
                // Nobody listens any more: the loop ends by that, too.
                if out.send(line).await.is_err() {
                    return Done::Reply(json!({}));
                }
            }
        });
    }

    fn spawn(
        &mut self,
        id: Value,
        ticket: Option<Ticket>,
        work: impl Future<Output = Done> + Send + 'static,
    ) {
        self.spawn_as(id, ticket.map_or(Kind::Plain, Kind::Acquire), work);
    }

    fn spawn_as(
        &mut self,
        id: Value,
        kind: Kind,
        work: impl Future<Output = Done> + Send + 'static,
    ) {
        let name = id.to_string();
        let tag = name.clone();
        let handle = self.tasks.spawn(async move { (tag, work.await) });
        self.open.insert(name, (id, handle, kind));
    }

    async fn release_all(&mut self, id: Value, token: u64) {
        let Some(guard) = self.groups.remove(&token) else {
            return self.refuse(&id, &Failure::of(ErrorCode::NOT_OWNER)).await;
        };
        self.spawn(id, None, async move {
            match guard.release().await {
                Ok(()) => Done::Reply(json!({ "ok": true, "token": token })),
                Err(error) => Done::Reply(failure_json(error.failure())),
            }
        });
    }

    /// Tells who leads an election until that is not wanted any more.
    async fn observe(&mut self, id: &Value, name: String) {
        self.observed.retain(|_, observer| !observer.is_finished());
        if self.observed.contains_key(&name) || self.observed.len() >= OBSERVED_MAX {
            let text = format!("it is observed already, or {OBSERVED_MAX} others are");
            return self.refuse(id, &Failure::new(ErrorCode::BUSY, text)).await;
        }
        match self.client.election(name.clone()).observe() {
            Err(error) => self.refuse(id, error.failure()).await,
            Ok(observation) => {
                self.reply(id, json!({ "ok": true })).await;
                let observer =
                    tokio::spawn(tell_leaders(name.clone(), observation, self.out.clone()));
                self.observed.insert(name, observer.abort_handle());
            }
        }
    }

    /// Tells where an acquire waits.
    async fn place(&mut self, id: Value, target: &Value) {
        let Some((_, _, Kind::Acquire(ticket))) = self.open.get(&target.to_string()) else {
            return self.refuse(&id, &Failure::of(ErrorCode::NOT_QUEUED)).await;
        };
        let ticket = ticket.clone();
        self.spawn(id, None, async move {
            match ticket.place().await {
                Ok(Some(place)) => Done::Reply(json::place(&place)),
                Ok(None) => Done::Reply(failure_json(&Failure::of(ErrorCode::NOT_QUEUED))),
                Err(error) => Done::Reply(failure_json(error.failure())),
            }
        });
    }

    /// Ends the wait of an acquire: its future is dropped, and the library cancels it.
    async fn cancel(&mut self, id: &Value, target: &Value) {
        let name = target.to_string();
        match self.open.get(&name) {
            Some((_, handle, Kind::Acquire(_) | Kind::AcquireEach | Kind::Watch))
                if !handle.is_finished() =>
            {
                handle.abort();
                let (target, ..) = self.open.remove(&name).expect("just looked up");
                self.refuse(&target, &Failure::of(ErrorCode::CANCELLED)).await;
                self.reply(id, json!({ "ok": true })).await;
            }
            _ => self.refuse(id, &Failure::of(ErrorCode::NOT_QUEUED)).await,
        }
    }

    /// A request's task has ended.
    async fn finish(&mut self, name: &str, done: Done) {
        // Cancelled just before it ended: its guard, if any, is dropped and so given back.
        let Some((id, ..)) = self.open.remove(name) else { return };
        match done {
            Done::Reply(reply) => self.reply(&id, reply).await,
            Done::Changing(operation) => {
                self.reply(&id, json!({ "ok": true, "operation": operation })).await;
                self.follow(operation);
            }
            Done::Granted(granted) => self.granted(&id, granted).await,
            Done::GrantedAll(granted) => self.granted_all(&id, granted).await,
            Done::GrantedEach(guards, yields) => self.granted_each(&id, guards, yields).await,
        }
    }

    /// Tells how far a change of the membership is, once however often it was asked for.
    fn follow(&mut self, operation: u64) {
        self.followed.retain(|_, follower| !follower.is_finished());
        let (client, out) = (self.client.clone(), self.out.clone());
        self.followed
            .entry(operation)
            .or_insert_with(|| tokio::spawn(tell_members(client, operation, out)).abort_handle());
    }

    async fn reply(&self, id: &Value, mut reply: Value) {
        if reply.get("ok").is_none() {
            reply["ok"] = true.into();
        }
        reply["id"] = id.clone();
        self.say(reply).await;
    }

    async fn refuse(&self, id: &Value, failure: &Failure) {
        self.reply(id, failure_json(failure)).await;
    }

    /// Gives everything back.
    async fn close(mut self) -> Result<(), CliError> {
        self.observed.values().chain(self.followed.values()).for_each(AbortHandle::abort);
        self.tasks.shutdown().await;
        let own: Vec<Guard> = std::mem::take(&mut self.holds)
            .into_values()
            .flatten()
            .filter(|guard| !guard.is_renewed())
            .collect();
        for guard in own {
            // Lost or released: it is not held either way.
            let _ = guard.release().await;
        }
        Ok(self.session.close().await?)
    }
}
