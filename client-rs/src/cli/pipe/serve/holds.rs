//! What `pipe` does with the holds that it has.

use std::time::Duration;

use leasehold::{ChangeError, ErrorCode, Failure, Guard, HoldState, MultiGuard, Token};
use serde_json::{Value, json};

use super::super::super::exit::failure_json;
use super::super::super::json;
use super::super::request::{HoldMode, OfHold, SetMode, SetValue, TakeOver};
use super::acquire::Granted;
use super::{BoxFuture, Done, Pipe};

impl Pipe {
    /// The hold that a request means: the newest of the key, or of this token.
    fn hold(&self, of: &OfHold) -> Result<&Guard, Failure> {
        self.place_of(of).map(|at| &self.holds[&of.key][at])
    }

    fn place_of(&self, of: &OfHold) -> Result<usize, Failure> {
        let entries = self.holds.get(&of.key).map_or(&[][..], Vec::as_slice);
        let meant = |guard: &Guard| of.token.is_none_or(|token| token == guard.token().0);
        entries.iter().rposition(meant).ok_or_else(|| match entries.last() {
            None if self.group_of(&of.key).is_some() => {
                let text = "it is held together with other keys (acquire_all), and so it is given \
                            back (release_all)";
                Failure::new(ErrorCode::BAD_COMBINATION, text)
            }
            last => Failure {
                token: last.map_or_else(Default::default, Guard::token),
                ..Failure::of(ErrorCode::NOT_OWNER)
            },
        })
    }

    /// The hold of several keys that this one is of.
    fn group_of(&self, key: &str) -> Option<(&MultiGuard, Token)> {
        let token = |group: &MultiGuard| {
            group.holds().iter().find(|(of, _)| *of == key).map(|(_, token)| *token)
        };
        self.groups.values().find_map(|group| token(group).map(|token| (group, token)))
    }

    pub(super) async fn release(&mut self, id: Value, of: &OfHold) {
        let guard = match self.pop(of) {
            Ok(guard) => guard,
            Err(failure) => return self.refuse(&id, &failure).await,
        };
        self.spawn(id, None, async move {
            let token = guard.token().0;
            match guard.release().await {
                Ok(()) => Done::Reply(json!({ "ok": true, "token": token })),
                Err(error) => Done::Reply(failure_json(error.failure())),
            }
        });
    }

    pub(super) async fn renew(&mut self, id: Value, of: &OfHold) {
        let renewal = match self.hold(of) {
            Ok(guard) => guard.renew(),
            Err(failure) => return self.refuse(&id, &failure).await,
        };
        self.spawn(id, None, async move {
            match renewal.await {
                Ok(left) => {
                    Done::Reply(json!({ "ok": true, "remaining_ms": left.as_millis() as u64 }))
                }
                Err(error) => Done::Reply(failure_json(error.failure())),
            }
        });
    }

    pub(super) async fn mode(&mut self, id: Value, to: SetMode) {
        let of = OfHold { key: to.key, token: to.token };
        let guard = match self.hold(&of) {
            Ok(guard) => guard,
            Err(failure) => return self.refuse(&id, &failure).await,
        };
        let watch = guard.watch();
        let changed: BoxFuture<Result<(), ChangeError>> = match to.mode {
            HoldMode::Shared => Box::pin(guard.downgrade()),
            HoldMode::Exclusive => {
                let upgraded = guard.upgrade();
                Box::pin(async move { upgraded.await.map(drop) })
            }
        };
        self.spawn(id, None, async move {
            match changed.await {
                Ok(()) => {
                    let mut reply = json!({ "ok": true, "token": watch.token().0 });
                    json::put_mode(&mut reply, watch.mode());
                    Done::Reply(reply)
                }
                Err(error) => Done::Reply(failure_json(error.failure())),
            }
        });
    }

    pub(super) async fn set_value(&mut self, id: Value, to: SetValue) {
        let of = OfHold { key: to.key, token: to.token };
        let changed = match self.hold(&of) {
            Ok(guard) => guard.set_value(to.value),
            Err(failure) => return self.refuse(&id, &failure).await,
        };
        self.spawn(id, None, async move {
            match changed.await {
                Ok(()) => Done::Reply(json!({ "ok": true })),
                Err(error) => Done::Reply(failure_json(error.failure())),
            }
        });
    }

    pub(super) async fn remaining(&self, id: &Value, of: &OfHold) {
        let reply = match (self.hold(of), self.group_of(&of.key)) {
            (Ok(guard), _) => {
                let mut reply = remaining(guard.token(), guard.state(), guard.remaining());
                json::put_mode(&mut reply, guard.mode());
                reply
            }
            (_, Some((group, token))) if of.token.is_none_or(|of| of == token.0) => {
                remaining(token, group.state(), group.remaining())
            }
            (Err(failure), _) => return self.refuse(id, &failure).await,
        };
        self.reply(id, reply).await;
    }

    /// Lets go of a hold for another process to go on with.
    pub(super) async fn hand_over(&mut self, id: &Value, of: &OfHold) {
        let guard = match self.pop(of) {
            Ok(guard) => guard,
            Err(failure) => return self.refuse(id, &failure).await,
        };
        match guard.hand_over() {
            Ok(handover) => {
                let reply = json!({
                    "ok": true, "token": handover.token().0, "handover": handover.to_text(),
                });
                self.reply(id, reply).await;
            }
            Err(guard) => {
                self.holds.entry(of.key.clone()).or_default().push(guard);
                let text = "it has no lease of its own (ttl_ms), or it was lost";
                self.refuse(id, &Failure::new(ErrorCode::BAD_COMBINATION, text)).await;
            }
        }
    }

    /// Goes on with a hold that another process handed over.
    pub(super) async fn take_over(&mut self, id: Value, of: &TakeOver) {
        let handover = match of.handover.parse() {
            Ok(handover) => handover,
            Err(failure) => return self.refuse(&id, &failure).await,
        };
        let client = self.client.clone();
        self.spawn(id, None, async move {
            match client.take_over(&handover).await {
                Ok(guard) => Done::Granted(Granted::new(guard, false).await),
                Err(error) => Done::Reply(failure_json(error.failure())),
            }
        });
    }

    /// The hold that a request means, which is kept here no more.
    fn pop(&mut self, of: &OfHold) -> Result<Guard, Failure> {
        let at = self.place_of(of)?;
        let entries = self.holds.get_mut(&of.key).expect("just looked up");
        let guard = entries.remove(at);
        if entries.is_empty() {
            self.holds.remove(&of.key);
        }
        Ok(guard)
    }
}

fn remaining(token: Token, state: HoldState, remaining: Duration) -> Value {
    let state = match state {
        HoldState::Held => "held",
        HoldState::AtRisk { .. } => "at_risk",
        _ => "lost",
    };
    let remaining_ms = remaining.as_millis() as u64;
    json!({ "ok": true, "token": token.0, "state": state, "remaining_ms": remaining_ms })
}
