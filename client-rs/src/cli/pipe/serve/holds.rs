//! What `pipe` does with the holds that it has.

use leasehold::{ChangeError, ErrorCode, Failure, Guard, HoldState};
use serde_json::{Value, json};

use super::super::super::exit::failure_json;
use super::super::super::json;
use super::super::request::{HoldMode, OfHold, SetMode, SetValue, TakeOver};
use super::acquire::Granted;
use super::{BoxFuture, Done, Pipe};

impl Pipe {
    /// The hold that a request means.
    fn hold(&self, of: &OfHold) -> Result<&Guard, Failure> {
        let present = self.holds.get(&of.key).and_then(|entries| entries.last());
        let meant = present.filter(|guard| of.token.is_none_or(|token| token == guard.token().0));
        meant.ok_or_else(|| Failure {
            token: present.map_or_else(Default::default, Guard::token),
            ..Failure::of(ErrorCode::NOT_OWNER)
        })
    }

    pub(super) async fn release(&mut self, id: Value, of: &OfHold) {
        if let Err(failure) = self.hold(of) {
            return self.refuse(&id, &failure).await;
        }
        let guard = self.pop(&of.key);
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
        match self.hold(of) {
            Err(failure) => self.refuse(id, &failure).await,
            Ok(guard) => {
                let state = match guard.state() {
                    HoldState::Held => "held",
                    HoldState::AtRisk { .. } => "at_risk",
                    _ => "lost",
                };
                let remaining_ms = guard.remaining().as_millis() as u64;
                let token = guard.token().0;
                let mut reply = json!({
                    "ok": true, "token": token, "state": state, "remaining_ms": remaining_ms,
                });
                json::put_mode(&mut reply, guard.mode());
                self.reply(id, reply).await;
            }
        }
    }

    /// Lets go of a hold for another process to go on with.
    pub(super) async fn hand_over(&mut self, id: &Value, of: &OfHold) {
        if let Err(failure) = self.hold(of) {
            return self.refuse(id, &failure).await;
        }
        let guard = self.pop(&of.key);
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

    /// The newest entry of a hold that `hold` has found.
    fn pop(&mut self, key: &str) -> Guard {
        let entries = self.holds.get_mut(key).expect("just looked up");
        let guard = entries.pop().expect("just looked up");
        if entries.is_empty() {
            self.holds.remove(key);
        }
        guard
    }
}
