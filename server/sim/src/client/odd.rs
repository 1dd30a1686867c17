//! What clients do now and then: nonsense that must be refused, an operator's forced release, and
//! sessions that are opened and forgotten.

use leasehold_bench::history::OpKind;
use leasehold_protocol::command::{Caller, Command, OwnLease};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, ShardId, Token};
use leasehold_protocol::limits::{KEY_LEN_MAX, VALUE_LEN_MAX};
use leasehold_protocol::outcome::Outcome;

use super::{About, Work, code_of, is_over};
use crate::session::Session;

/// Sessions that are opened at once.
const MANY: u64 = 20;

impl Work<'_> {
    /// Sends what must be refused, whatever the state is.
    pub(super) async fn bad_input(&mut self) {
        let key = self.me.any_key();
        let shard = self.me.shard_of(&key);
        let session = self.session(shard).await;
        let (body, code) = self.bad_command(&session, &key);
        let (kind, key) = match &body {
            Command::Open { ttl_ms, .. } => (OpKind::Open { ttl_ms: *ttl_ms }, vec![]),
            Command::Release { token, key, .. } => {
                (OpKind::Release { token: token.0 }, key.clone())
            }
            Command::Acquire { key, wait_ms, .. } => {
                (OpKind::Acquire { wait_ms: *wait_ms }, key.clone())
            }
            _ => (OpKind::Close, vec![]),
        };
        // Not under the lease's name: these numbers are used again.
        let about = About { client: self.me.id, shard, key: &key, ..About::default() };
        let call = self.me.history.call(about, kind);
        let answer = self.settle(shard, body, &call).await;
        if is_over(&answer) {
            session.die();
            return;
        }
        let me = self.me.id;
        assert_eq!(code_of(&answer), Some(code), "client {me} got {answer:?}");
    }

    fn bad_command(&self, session: &Session, key: &[u8]) -> (Command, ErrorCode) {
        let rng = &self.me.rng;
        let secret = session.secret;
        let acquire = |caller: Caller, key: Vec<u8>, mode, own, value_len| Command::Acquire {
            caller,
            key,
            mode,
            own,
            value: vec![0; value_len],
            wait_ms: 0,
        };
        let (caller, key) = (session.caller(0), key.to_vec());
        match rng.below(10) {
            0 => {
                let own = OwnLease { ttl_ms: 999, secret };
                let body = acquire(caller, key, Mode::EXCLUSIVE, Some(own), 0);
                (body, ErrorCode::TTL_OUT_OF_RANGE)
            }
            1 => {
                let body = acquire(caller, key, Mode::EXCLUSIVE, None, VALUE_LEN_MAX + 1);
                (body, ErrorCode::VALUE_TOO_LARGE)
            }
            2 => {
                let body = acquire(caller, vec![], Mode::EXCLUSIVE, None, 0);
                (body, ErrorCode::KEY_EMPTY)
            }
            3 => {
                let body = acquire(caller, key, Mode(u32::MAX), None, 0);
                (body, ErrorCode::UNSUPPORTED_MODE)
            }
            4 => {
                let caller = Caller { secret: Secret([0xff; 16]), ..caller };
                (acquire(caller, key, Mode::EXCLUSIVE, None, 0), ErrorCode::BAD_SECRET)
            }
            5 => {
                let caller = Caller { number: Number(caller.number.0 + 1_000_000), ..caller };
                (acquire(caller, key, Mode::EXCLUSIVE, None, 0), ErrorCode::NUMBER_BEYOND_WINDOW)
            }
            6 => {
                let long = self.long_key(session.shard);
                (acquire(caller, long, Mode::EXCLUSIVE, None, 0), ErrorCode::KEY_TOO_LONG)
            }
            7 => {
                let open = Command::Open { ttl_ms: 600_001, secret, label: vec![] };
                (open, ErrorCode::TTL_OUT_OF_RANGE)
            }
            8 => {
                let close = Command::Close { lease: session.lease, secret: Secret([0xff; 16]) };
                (close, ErrorCode::BAD_SECRET)
            }
            _ => {
                let expire = Command::Expire { lease: session.lease };
                (expire, ErrorCode::INTERNAL_COMMAND)
            }
        }
    }

    /// A key that is too long, of this very shard.
    fn long_key(&self, shard: ShardId) -> Vec<u8> {
        let keys = (0..=u8::MAX).map(|byte| vec![byte.max(1) & 0x7f; KEY_LEN_MAX + 1]);
        let mut keys = keys.filter(|key| self.me.shard_of(key) == shard);
        keys.next().expect("among so many keys each shard has one")
    }

    /// An operator ends somebody's hold.
    pub(super) async fn force(&mut self) {
        let key = self.me.any_key();
        let Some(token) = self.read_key(&key).await else { return };
        let now = self.me.rng.chance(300);
        self.force_release(&key, token, now).await;
    }

    async fn force_release(&mut self, key: &[u8], token: Token, now: bool) {
        let shard = self.me.shard_of(key);
        let about = About { client: self.me.id, shard, key, ..About::default() };
        let kind = OpKind::ForceRelease { token: token.0, now };
        let call = self.me.history.call(about, kind);
        let (who, why) = (b"operator".to_vec(), b"a test".to_vec());
        let force = Command::ForceRelease { key: key.to_vec(), token, who, why, now };
        let answer = self.settle(shard, force, &call).await;
        let gone = code_of(&answer) == Some(ErrorCode::NOT_OWNER);
        let forced = matches!(answer, Ok(Outcome::Forced { .. }));
        assert!(gone || forced, "client {}: a forced release gave {answer:?}", self.me.id);
    }

    /// Opens sessions that nobody renews.
    pub(super) async fn open_many(&mut self) {
        let shard = self.me.shard_of(&self.me.any_key());
        for _ in 0..self.me.rng.below(MANY) {
            let session = self.me.open(shard).await;
            assert_ne!(session.lease, LeaseId(0), "a lease has a name");
        }
    }
}
