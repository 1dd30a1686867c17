//! Holds of every kind on keys of their own (`MODE_KEYS`): readers and writers with conversions and
//! re-entry, permits with a limit that changes, several keys at once, values, requests to yield,
//! forced ends, and lock-delays on all of them.
//!
//! What the clients do here is no part of the history of operations; it is judged from the nodes'
//! events and from the times in which the clients are sure.

use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::command::{Command, Want};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{Mode, Number, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_server::rt::sim::{SimRt, SimWorld};
use openraft_rt::AsyncRuntime;

use super::line::outcome;
use super::{Answer, Work, code_of, command, is_over};
use crate::history::Held;
use crate::session::Session;

/// What these keys begin with, and no others.
pub(crate) const MODE_KEYS: &[u8] = b"m/";

const DOC: &str = "m/doc";
const POOL: &str = "m/pool";
const ALL: [&str; 3] = ["m/{all}/a", "m/{all}/b", "m/{all}/c"];

/// The limit that the pool's first acquire states.
const LIMIT: u32 = 3;

/// Actions while something is held, at most.
const ACTIONS: u64 = 4;

/// What is held of one acquire.
struct Taken {
    acquire: Number,
    holds: Vec<Rc<Held>>,
}

impl Work<'_> {
    /// Takes something in one of the modes, does what one may do with it, and gives it back.
    pub(super) async fn modes_once(&mut self) {
        let wants = self.wants();
        let session = self.session(self.me.shard_of(&wants[0].key)).await;
        let Some(taken) = self.take(&session, &wants).await else { return };
        for _ in 0..self.me.rng.below(ACTIONS) {
            let pause = self.me.rng.below(self.me.params.hold_ms_max + 1);
            SimRt::sleep(Duration::from_millis(pause)).await;
            if session.is_dead() {
                return;
            }
            self.act(&session, &taken).await;
        }
        let keep = self.me.rng.chance(120) && !self.me.calm.get();
        if !keep && !session.is_dead() {
            self.give_back(&session, &taken).await;
        } else if keep && self.me.rng.chance(400) {
            // Falls silent, so that the lease expires and what it holds is lost.
            session.close();
            self.sessions.remove(&session.shard);
        }
    }

    fn wants(&self) -> Vec<Want> {
        let rng = &self.me.rng;
        let want = |key: &str, mode, limit, reentrant| Want {
            key: key.as_bytes().to_vec(),
            mode,
            limit,
            reentrant,
        };
        let lock = |per_mille| if rng.chance(per_mille) { Mode::SHARED } else { Mode::EXCLUSIVE };
        match rng.below(10) {
            0..3 => vec![want(DOC, lock(600), 0, rng.chance(300))],
            3..6 => {
                let limit = self.me.board.pool_limit.get().max(1);
                let permits = 1 + rng.below(u64::from(limit.min(2))) as u32;
                vec![want(POOL, Mode::permits(permits), limit, false)]
            }
            6..7 => vec![want(ALL[rng.below(3) as usize], lock(300), 0, false)],
            _ => {
                let skip = rng.below(4) as usize;
                let keys = ALL.iter().enumerate().filter(|(index, _)| *index != skip);
                let mut all: Vec<_> = keys.map(|(_, key)| want(key, lock(300), 0, false)).collect();
                if rng.chance(500) {
                    all.reverse();
                }
                all
            }
        }
    }

    /// Sends a command under the session's next number until its outcome is certain.
    async fn next(
        &mut self,
        session: &Session,
        body: impl FnOnce(leasehold_protocol::command::Caller) -> Command,
    ) -> Answer {
        let request = command(session.shard, body(session.caller(0)));
        let answer = outcome(self.line.ask(&request, None).await);
        session.number.set(session.number.get() + 3);
        if is_over(&answer) {
            session.die();
        }
        answer
    }

    fn due(&self, what: &str, answer: &Answer, codes: &[ErrorCode]) {
        let told = code_of(answer);
        let due = is_over(answer) || told.is_none_or(|code| codes.contains(&code));
        assert!(due, "client {}: {what} gave {answer:?}", self.me.id);
    }

    async fn take(&mut self, session: &Rc<Session>, wants: &[Want]) -> Option<Taken> {
        let rng = &self.me.rng;
        let patience_ms = if rng.chance(200) { 0 } else { 50 + rng.below(4_000) };
        let delay_ms = if rng.chance(400) { 200 + rng.below(2_000) as u32 } else { 0 };
        let acquire = Number(session.number.get());
        let acquire_all = Command::AcquireAll {
            caller: session.caller(0),
            wants: wants.to_vec(),
            own: None,
            value: vec![],
            wait_ms: if patience_ms > 0 && rng.chance(300) { u32::MAX } else { patience_ms as u32 },
            delay_ms,
        };
        let request = command(session.shard, acquire_all);
        let give_up_ns = SimWorld::current().now_ns() + patience_ms * 1_000_000;
        let mut answer = outcome(self.line.ask(&request, None).await);
        while matches!(answer, Ok(Outcome::Queued { .. })) {
            if SimWorld::current().now_ns() >= give_up_ns {
                answer = self.cancel_mode(session).await;
                break;
            }
            // Told or not, it asks again: a retry is answered what became of it.
            SimRt::sleep(Duration::from_millis(20 + self.me.rng.below(300))).await;
            answer = outcome(self.line.ask(&request, None).await);
        }
        session.number.set(session.number.get() + 3);
        self.taken(session, wants, (acquire, &answer)).await
    }

    async fn cancel_mode(&mut self, session: &Session) -> Answer {
        let release_if_granted = self.me.rng.chance(500);
        let cancel = Command::Cancel { caller: session.caller(1), release_if_granted };
        outcome(self.line.ask(&command(session.shard, cancel), None).await)
    }

    async fn taken(
        &mut self,
        session: &Rc<Session>,
        wants: &[Want],
        (acquire, answer): (Number, &Answer),
    ) -> Option<Taken> {
        if let Ok(Outcome::Refused { code: ErrorCode::LIMIT_MISMATCH, token, .. }) = answer {
            self.me.board.pool_limit.set(token.0 as u32);
        }
        if matches!(answer, Ok(Outcome::Refused { code: ErrorCode::PERMITS_ABOVE_LIMIT, .. })) {
            self.me.board.pool_limit.set(1);
        }
        let refusals = [
            ErrorCode::HELD,
            ErrorCode::ALREADY_HELD,
            ErrorCode::HOLD_FORCED,
            ErrorCode::DELAYED,
            ErrorCode::LIMIT_MISMATCH,
            ErrorCode::PERMITS_ABOVE_LIMIT,
            ErrorCode::NOT_QUEUED,
        ];
        self.due("an acquire in a mode", answer, &refusals);
        if is_over(answer) {
            session.die();
        }
        let Ok(Outcome::Granted(grant)) = answer else { return None };
        session.granted(grant);
        let holds = (grant.token.0..)
            .zip(wants)
            .map(|(token, want)| session.hold_in(want.mode, want.key.clone(), Token(token), false));
        let holds: Vec<_> = holds.collect();
        if !session.confirmed().await {
            return None;
        }
        for held in &holds {
            held.known();
        }
        Some(Taken { acquire, holds })
    }

    /// One of the things that may be done while something is held.
    async fn act(&mut self, session: &Rc<Session>, taken: &Taken) {
        let rng = &self.me.rng;
        let held = taken.holds[rng.below(taken.holds.len() as u64) as usize].clone();
        let (key, token) = (held.key.clone(), held.token);
        match rng.below(10) {
            0..5 if held.mode.permit_count().is_none() && !held.over.get() => {
                self.convert(session, &held).await;
            }
            0..5 => {
                let limit = 2 + rng.below(3) as u32;
                let set = Command::SetLimit { key: POOL.into(), limit, who: self.me.label() };
                let shard = self.me.shard_of(POOL.as_bytes());
                let answer = outcome(self.line.ask(&command(shard, set), None).await);
                self.due("a change of the limit", &answer, &[ErrorCode::NOT_IN_USE]);
                if code_of(&answer).is_none() {
                    self.me.board.pool_limit.set(limit);
                }
            }
            5..7 => {
                let value = vec![rng.below(3) as u8; 3];
                let set = |caller| Command::SetValue { caller, key, token, value };
                let answer = self.next(session, set).await;
                self.due("a change of a value", &answer, &[ErrorCode::NOT_OWNER]);
            }
            7..9 => {
                let (who, why, within_ms) = (self.me.label(), b"please".to_vec(), 5);
                let ask = Command::AskYield { key, token, who, why, within_ms };
                let answer = outcome(self.line.ask(&command(session.shard, ask), None).await);
                self.due("a request to yield", &answer, &[ErrorCode::NOT_OWNER]);
            }
            _ => {
                let (who, why) = (b"operator".to_vec(), b"simulated".to_vec());
                let force = Command::ForceRelease { key, token, who, why, now: false };
                let answer = outcome(self.line.ask(&command(session.shard, force), None).await);
                self.due("a forced release", &answer, &[ErrorCode::NOT_OWNER]);
            }
        }
    }

    /// To the other mode. Before a downgrade the client gives up what it will not have any more.
    async fn convert(&mut self, session: &Rc<Session>, held: &Rc<Held>) {
        let mode = if held.mode == Mode::SHARED { Mode::EXCLUSIVE } else { Mode::SHARED };
        let (key, token) = (held.key.clone(), held.token);
        session.give_back(held);
        let convert = |caller| Command::Convert { caller, key, token, mode };
        let answer = self.next(session, convert).await;
        let refusals = [
            ErrorCode::NOT_OWNER,
            ErrorCode::UPGRADE_CONFLICT,
            ErrorCode::DELAYED,
            ErrorCode::HOLD_FORCED,
            ErrorCode::HOLD_REENTERED,
        ];
        self.due("a conversion", &answer, &refusals);
        let (mode, token) = match answer {
            Ok(Outcome::Granted(grant)) => {
                session.granted(&grant);
                (mode, grant.token)
            }
            Ok(Outcome::Changed { token, .. }) => (mode, token),
            _ => return,
        };
        let held = session.hold_in(mode, held.key.clone(), token, false);
        if session.confirmed().await {
            held.known();
        }
    }

    /// All at once, or one key after the other. Conversions have changed tokens: each is released
    /// under the one it has.
    async fn give_back(&mut self, session: &Rc<Session>, taken: &Taken) {
        let keys: Vec<_> = taken.holds.iter().map(|held| held.key.clone()).collect();
        let holds = session.holds_of(&keys);
        for held in &holds {
            session.give_back(held);
        }
        if self.me.rng.chance(500) {
            let acquire = taken.acquire;
            let all = |caller| Command::ReleaseAll { caller, acquire };
            let answer = self.next(session, all).await;
            self.due("a release of all", &answer, &[ErrorCode::NOT_OWNER]);
        }
        for held in holds {
            let (key, token) = (held.key.clone(), held.token);
            let release = |caller| Command::Release { caller, key, token };
            let answer = self.next(session, release).await;
            self.due("a release in a mode", &answer, &[ErrorCode::NOT_OWNER]);
            if session.is_dead() {
                return;
            }
        }
    }
}

/// The limit that clients state until they hear of another.
pub(crate) fn first_limit() -> std::cell::Cell<u32> {
    std::cell::Cell::new(LIMIT)
}
