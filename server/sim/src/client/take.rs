//! Taking a key and giving it back: by acquire and release, with a copy of a request on another
//! connection, with a cancel before, after or instead, and with leases of the hold's own.

use std::rc::Rc;
use std::time::Duration;

use leasehold_bench::history::OpKind;
use leasehold_protocol::command::{Command, OwnLease};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{Mode, Number, Secret};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_server::rt::sim::{SimRt, SimWorld};
use openraft_rt::AsyncRuntime;

use super::line::{outcome, send_copy};
use super::{Answer, Shared, Wait, Work, code_of, command, is_over, value_of};
use crate::history::{Call, Held};
use crate::session::Session;

/// A copy of a request comes so much later at most.
const COPY_DELAY_MS: u64 = 300;

/// A cancel overtakes its acquire by so much at most, or is overtaken.
const RACE_MS: u64 = 8;

/// One acquire.
struct Asked {
    key: Vec<u8>,
    own: Option<OwnLease>,
    /// The client gives up after so long; 0 decides at once.
    patience_ms: u64,
    command: Command,
    call: Call,
}

impl Asked {
    /// The cluster ends the wait.
    fn is_bounded(&self) -> bool {
        matches!(self.command, Command::Acquire { wait_ms, .. } if wait_ms < u32::MAX)
    }
}

impl Work<'_> {
    /// Takes one key and gives it back.
    pub(super) async fn take_once(&mut self) {
        let key = self.me.any_key();
        let session = self.session(self.me.shard_of(&key)).await;
        let asked = self.asked(&session, key);
        let answer = if self.me.rng.chance(40) {
            self.cancel_first(&session, &asked).await
        } else {
            self.acquire(&session, &asked).await
        };
        match answer {
            Some(Ok(Outcome::Granted(grant))) => self.granted(&session, &asked, &grant).await,
            Some(answer) if is_over(&answer) => session.die(),
            _ => {}
        }
        session.number.set(session.number.get() + 3);
    }

    fn asked(&self, session: &Session, key: Vec<u8>) -> Asked {
        let rng = &self.me.rng;
        let patience_ms = if rng.chance(200) { 0 } else { 50 + rng.below(6_000) };
        let own = rng.chance(50).then(|| OwnLease {
            ttl_ms: self.me.params.draw_ttl_ms(rng),
            secret: Secret([0x80 | self.me.id as u8; 16]),
        });
        let endless = patience_ms > 0 && rng.chance(300);
        let wait_ms = if endless { u32::MAX } else { patience_ms as u32 };
        let number = Number(session.number.get());
        let command = Command::Acquire {
            caller: session.caller(0),
            key: key.clone(),
            mode: Mode::EXCLUSIVE,
            own,
            value: value_of(&self.me.label(), &key, number),
            wait_ms,
        };
        let mut about = self.about(session, &key);
        about.number = Some(number);
        let call = self.me.history.call(about, OpKind::Acquire { wait_ms });
        Asked { key, own, patience_ms, command, call }
    }

    /// `None` if nobody will ever know more.
    async fn acquire(&mut self, session: &Session, asked: &Asked) -> Option<Answer> {
        let request = command(session.shard, asked.command.clone());
        if self.me.rng.chance(80) {
            asked.call.copied();
            let mut about = self.about(session, &asked.key);
            about.number = Some(Number(session.number.get()));
            let kind = OpKind::Acquire { wait_ms: u32::MAX };
            let copy = self.me.history.call(about, kind);
            let copy = send_copy(self.me.clone(), request.clone(), copy, COPY_DELAY_MS);
            drop(SimRt::spawn(copy));
        }
        let give_up_ns = SimWorld::current().now_ns() + asked.patience_ms * 1_000_000;
        let wait = Wait {
            shard: session.shard,
            lease: session.lease,
            number: Number(session.number.get()),
            give_up_ns,
            // Only a wait that the cluster ends: nobody could tell an endless one from a deadlock.
            trusts: asked.is_bounded() && self.me.rng.chance(200),
        };
        let reply = self.line.ask_and_wait(&request, &wait, &asked.call).await;
        let Some(reply) = reply else { return self.cancel(session, asked).await };
        let answer = outcome(reply);
        asked.call.answered(&answer);
        let ended = matches!(answer, Ok(Outcome::Granted(_) | Outcome::TimedOut { .. }));
        let refused = matches!(code_of(&answer), Some(ErrorCode::HELD | ErrorCode::ALREADY_HELD));
        let due = ended || refused || is_over(&answer);
        assert!(due, "client {}: acquire gave {answer:?}", self.me.id);
        Some(answer)
    }

    /// The acquire and its cancel race on two connections.
    async fn cancel_first(&mut self, session: &Session, asked: &Asked) -> Option<Answer> {
        let request = command(session.shard, asked.command.clone());
        let acquire = send_unheard(self.me.clone(), request, asked.call.clone());
        drop(SimRt::spawn(acquire));
        SimRt::sleep(Duration::from_millis(self.me.rng.below(RACE_MS))).await;
        self.cancel(session, asked).await
    }

    /// Ends the wait, or finds out how it ended.
    async fn cancel(&mut self, session: &Session, asked: &Asked) -> Option<Answer> {
        let release_if_granted = self.me.rng.chance(400);
        let acquire = session.number.get();
        let mut about = self.about(session, &asked.key);
        about.number = Some(Number(acquire + 1));
        let kind = OpKind::Cancel { acquire, release_if_granted };
        let call = self.me.history.call(about, kind);
        let cancel = Command::Cancel { caller: session.caller(1), release_if_granted };
        let answer = self.settle(session.shard, cancel, &call).await;
        match &answer {
            Ok(Outcome::Granted(_) | Outcome::Cancelled { .. } | Outcome::TimedOut { .. }) => {
                asked.call.answered(&answer);
                Some(answer)
            }
            // Granted, and given back in the same step.
            Ok(Outcome::Released { .. }) => None,
            _ if is_over(&answer) => Some(answer),
            // The wait had ended by itself, or what it ended with is over.
            _ => match code_of(&answer) {
                Some(
                    ErrorCode::CANCELLED
                    | ErrorCode::HELD
                    | ErrorCode::ALREADY_HELD
                    | ErrorCode::NOT_QUEUED
                    | ErrorCode::TIMED_OUT,
                ) => None,
                _ => panic!("client {}: cancel gave {answer:?}", self.me.id),
            },
        }
    }

    async fn granted(&mut self, session: &Session, asked: &Asked, grant: &Grant) {
        // After a wait or a retry only a renewal tells whether the lease still lives.
        let known = session.granted(grant) && asked.call.is_first_answer();
        if let Some(own) = asked.own {
            return self.hold_own(session, asked, own, grant).await;
        }
        let held = session.hold(asked.key.clone(), grant.token, known);
        if known || session.confirmed().await {
            held.known();
            self.hold(session, &held).await;
        }
    }

    /// Holds for a while, then gives back, or keeps it until the session ends.
    async fn hold(&mut self, session: &Session, held: &Rc<Held>) {
        let rng = &self.me.rng;
        // Now and then for so long that only renewals keep the hold.
        let hold_ms = if rng.chance(8) { 6_000 } else { self.me.params.hold_ms_max };
        let keep = rng.chance(8) && !self.me.calm.get();
        SimRt::sleep(Duration::from_millis(rng.below(hold_ms + 1))).await;
        if !keep {
            self.release(session, held).await;
        }
    }

    async fn release(&mut self, session: &Session, held: &Rc<Held>) {
        session.give_back(held);
        let mut about = self.about(session, &held.key);
        about.number = Some(Number(session.number.get() + 2));
        let kind = OpKind::Release { token: held.token.0 };
        let call = self.me.history.call(about, kind);
        let caller = session.caller(2);
        let release = Command::Release { caller, key: held.key.clone(), token: held.token };
        if self.me.rng.chance(60) {
            let copy = self.me.history.call(about, kind);
            let request = command(session.shard, release.clone());
            drop(SimRt::spawn(send_copy(self.me.clone(), request, copy, COPY_DELAY_MS)));
        }
        let answer = self.settle(session.shard, release, &call).await;
        if is_over(&answer) {
            session.die();
        } else if !is_given_back(&answer) {
            panic!("client {}: release gave {answer:?}", self.me.id);
        }
    }

    /// A hold with a lease of its own: renewed at the grant, then as long as somebody likes; given
    /// back by this client, by another, or by nobody.
    async fn hold_own(&mut self, session: &Session, asked: &Asked, own: OwnLease, grant: &Grant) {
        let sent_ns = asked.call.invoked_ns();
        let hold = (own.secret, own.ttl_ms);
        let lease = Session::of_hold(&self.me, session.shard, grant, hold, sent_ns);
        let held = lease.hold(asked.key.clone(), grant.token, true);
        lease.renew(&mut self.line).await;
        if lease.is_dead() {
            return;
        }
        held.known();
        let renewed = self.me.rng.chance(500);
        if renewed {
            drop(SimRt::spawn(lease.clone().run()));
        }
        let shared = Shared {
            shard: lease.shard,
            lease: lease.lease,
            secret: lease.secret,
            key: asked.key.clone(),
            token: grant.token,
        };
        if self.me.rng.chance(300) {
            self.me.board.shared.borrow_mut().push(shared.clone());
        }
        let hold_ms = self.me.rng.below(self.me.params.hold_ms_max + 1);
        SimRt::sleep(Duration::from_millis(hold_ms)).await;
        // One that is not renewed may be left to expire.
        if renewed || self.me.rng.chance(700) {
            lease.close();
            held.end();
            self.release_own(&shared).await;
        }
    }

    /// Gives back a hold by its token, whoever took it.
    pub(super) async fn use_shared(&mut self) {
        let shared = self.me.board.shared.borrow_mut().pop();
        if let Some(shared) = shared {
            self.release_own(&shared).await;
        }
    }

    async fn release_own(&mut self, shared: &Shared) {
        let Shared { shard, lease, secret, key, token } = shared.clone();
        let about =
            super::About { client: self.me.id, shard, lease, number: None, key: &shared.key };
        let call = self.me.history.call(about, OpKind::Release { token: token.0 });
        let release = Command::ReleaseOwn { lease, secret, key, token };
        let answer = self.settle(shard, release, &call).await;
        let due = is_over(&answer) || is_given_back(&answer);
        assert!(due, "client {}: release of an own lease gave {answer:?}", self.me.id);
    }
}

/// Or an operator was faster.
fn is_given_back(answer: &Answer) -> bool {
    matches!(answer, Ok(Outcome::Released { .. })) || code_of(answer) == Some(ErrorCode::NOT_OWNER)
}

/// Sends an acquire once and listens to no answer.
async fn send_unheard(
    client: Rc<super::Client>,
    request: leasehold_protocol::request::Request,
    call: Call,
) {
    SimRt::sleep(Duration::from_millis(client.rng.below(RACE_MS))).await;
    let mut line = super::Line::new(&client);
    drop(line.try_once(&request, Some(&call)).await);
}
