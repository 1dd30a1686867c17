//! Bodies to bytes and back: rkyv archives for every type, and the table from kinds to types.
//!
//! Bytes from outside are validated before anything is read through them, and nothing here
//! panics on them. Only the *counts* that a request may carry are checked here; keys, values and
//! the like get codes of their own from `shard` and from `apply`.

use alloc::vec::Vec;

use rkyv::api::high::{HighDeserializer, HighSerializer, HighValidator, to_bytes_in};
use rkyv::bytecheck::CheckBytes;
use rkyv::rancor::Failure;
use rkyv::ser::allocator::ArenaHandle;
use rkyv::{Archive, Deserialize, Serialize};

use crate::command::Command;
use crate::error::ErrorCode;
use crate::frame::{self, EncodeError, Header};
use crate::ids::RequestId;
use crate::kind;
use crate::limits::{
    ACKS_MAX, AUTH_LEN_MAX, CLIENT_BODY_MAX, PAGE_LEN_MAX, RENEW_BATCH_MAX, REPLY_BODY_MAX,
};
use crate::reply::Reply;
use crate::request::Request;

/// Why a body was not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The bytes are not an archive of the kind's type.
    #[error("the body of a {} frame is malformed", kind::name(*.kind))]
    Malformed {
        /// The frame's kind.
        kind: u8,
    },
    /// The kind is not known on this side of a connection.
    #[error("a frame of kind {kind} ({}) is not known here", kind::name(*.kind))]
    UnknownKind {
        /// The frame's kind.
        kind: u8,
    },
    /// A list is longer than allowed.
    #[error("{what}: {count} is above the limit of {count_max}")]
    TooManyItems {
        /// What is too long.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// How many are allowed.
        count_max: usize,
    },
}

impl DecodeError {
    /// The wire code of this error.
    pub const fn code(self) -> ErrorCode {
        match self {
            Self::Malformed { .. } => ErrorCode::MALFORMED,
            Self::UnknownKind { .. } => ErrorCode::UNKNOWN_KIND,
            Self::TooManyItems { .. } => ErrorCode::TOO_MANY_ITEMS,
        }
    }
}

/// The bytes are not an archive of the type that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the bytes are not an archive of the expected type")]
pub struct NotAnArchive;

/// A type that travels as a body, or is kept as bytes: every type with rkyv's three derives.
pub trait Body:
    Sized
    + Archive<
        Archived: for<'a> CheckBytes<HighValidator<'a, Failure>>
                      + Deserialize<Self, HighDeserializer<Failure>>,
    > + for<'a, 'v> Serialize<HighSerializer<&'v mut Vec<u8>, ArenaHandle<'a>, Failure>>
{
}

impl<T> Body for T where
    T: Archive<
            Archived: for<'a> CheckBytes<HighValidator<'a, Failure>>
                          + Deserialize<T, HighDeserializer<Failure>>,
        > + for<'a, 'v> Serialize<HighSerializer<&'v mut Vec<u8>, ArenaHandle<'a>, Failure>>
{
}

/// Appends the archive of `body` to `out`. Its bytes do not depend on what `out` held before.
pub fn encode_into<T: Body>(body: &T, out: &mut Vec<u8>) {
    to_bytes_in::<_, Failure>(body, out).expect("a vector takes every flat type");
}

/// The archive of `body`.
pub fn encode<T: Body>(body: &T) -> Vec<u8> {
    let mut out = Vec::new();
    encode_into(body, &mut out);
    out
}

/// Validates `bytes` as an archive of `T` and copies it out.
pub fn decode<T: Body>(bytes: &[u8]) -> Result<T, NotAnArchive> {
    rkyv::from_bytes::<T, Failure>(bytes).map_err(|Failure| NotAnArchive)
}

/// Appends a frame with `body` to `out`; on error `out` is as before.
pub fn encode_frame<T: Body>(
    header: Header,
    body: &T,
    body_max: usize,
    out: &mut Vec<u8>,
) -> Result<(), EncodeError> {
    frame::append(header, body_max, out, |out| encode_into(body, out))
}

fn body_of<T: Body>(kind: u8, bytes: &[u8]) -> Result<T, DecodeError> {
    decode(bytes).map_err(|NotAnArchive| DecodeError::Malformed { kind })
}

fn empty_of<T>(kind: u8, bytes: &[u8], value: T) -> Result<T, DecodeError> {
    if bytes.is_empty() { Ok(value) } else { Err(DecodeError::Malformed { kind }) }
}

impl Request {
    /// The kind of this request's frame.
    pub const fn kind(&self) -> u8 {
        match self {
            Self::Hello(_) => kind::HELLO,
            Self::Command(_) => kind::COMMAND,
            Self::Renew(_) => kind::RENEW,
            Self::Get(_) => kind::GET,
            Self::List(_) => kind::LIST,
            Self::Sessions(_) => kind::SESSIONS,
            Self::Holds(_) => kind::HOLDS,
            Self::Status(_) => kind::STATUS,
            Self::Transfer(_) => kind::TRANSFER,
            Self::Ping => kind::PING,
            Self::Claim(_) => kind::CLAIM,
            Self::Watch(_) => kind::WATCH,
            Self::Unwatch(_) => kind::UNWATCH,
            Self::Members(_) => kind::MEMBERS,
            Self::MemberChange(_) => kind::MEMBER_CHANGE,
            Self::GroupStep(_) => kind::GROUP_STEP,
            Self::Backup(_) => kind::BACKUP,
        }
    }

    /// Appends this request's frame to `out`; on error `out` is as before.
    pub fn encode_frame(&self, id: RequestId, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let header = Header::new(self.kind(), id);
        frame::append(header, CLIENT_BODY_MAX, out, |out| self.encode_body(out))
    }

    /// Appends this request's body alone to `out`, for a frame that wraps it.
    pub fn encode_body(&self, out: &mut Vec<u8>) {
        match self {
            Self::Hello(body) => encode_into(body, out),
            Self::Command(body) => encode_into(body, out),
            Self::Renew(body) => encode_into(body, out),
            Self::Get(body) => encode_into(body, out),
            Self::List(body) => encode_into(body, out),
            Self::Sessions(body) => encode_into(body, out),
            Self::Holds(body) => encode_into(body, out),
            Self::Status(body) => encode_into(body, out),
            Self::Transfer(body) => encode_into(body, out),
            Self::Claim(body) => encode_into(body, out),
            Self::Watch(body) => encode_into(body, out),
            Self::Unwatch(body) => encode_into(body, out),
            Self::Members(body) => encode_into(body, out),
            Self::MemberChange(body) => encode_into(body, out),
            Self::GroupStep(body) => encode_into(body, out),
            Self::Backup(body) => encode_into(body, out),
            Self::Ping => {}
        }
    }

    /// Reads the body of a request's frame and checks its counts.
    pub fn decode(kind: u8, body: &[u8]) -> Result<Self, DecodeError> {
        let request = match kind {
            kind::HELLO => Self::Hello(body_of(kind, body)?),
            kind::COMMAND => Self::Command(body_of(kind, body)?),
            kind::RENEW => Self::Renew(body_of(kind, body)?),
            kind::GET => Self::Get(body_of(kind, body)?),
            kind::LIST => Self::List(body_of(kind, body)?),
            kind::SESSIONS => Self::Sessions(body_of(kind, body)?),
            kind::HOLDS => Self::Holds(body_of(kind, body)?),
            kind::STATUS => Self::Status(body_of(kind, body)?),
            kind::TRANSFER => Self::Transfer(body_of(kind, body)?),
            kind::CLAIM => Self::Claim(body_of(kind, body)?),
            kind::WATCH => Self::Watch(body_of(kind, body)?),
            kind::UNWATCH => Self::Unwatch(body_of(kind, body)?),
            kind::MEMBERS => Self::Members(body_of(kind, body)?),
            kind::MEMBER_CHANGE => Self::MemberChange(body_of(kind, body)?),
            kind::GROUP_STEP => Self::GroupStep(body_of(kind, body)?),
            kind::BACKUP => Self::Backup(body_of(kind, body)?),
            kind::PING => empty_of(kind, body, Self::Ping)?,
            _ => return Err(DecodeError::UnknownKind { kind }),
        };
        request.check_counts()?;
        Ok(request)
    }

    fn check_counts(&self) -> Result<(), DecodeError> {
        let page_max = PAGE_LEN_MAX as usize;
        match self {
            Self::Hello(hello) => at_most("auth", hello.auth.len(), AUTH_LEN_MAX),
            Self::Renew(renew) => at_most("items", renew.items.len(), RENEW_BATCH_MAX),
            Self::List(list) => at_most("limit", list.limit as usize, page_max),
            Self::Sessions(sessions) => at_most("limit", sessions.limit as usize, page_max),
            Self::Command(request) => match &request.command {
                Command::Acquire { caller, .. }
                | Command::Cancel { caller, .. }
                | Command::Release { caller, .. }
                | Command::Convert { caller, .. }
                | Command::SetValue { caller, .. }
                | Command::AcquireAll { caller, .. } => {
                    at_most("acks", caller.acks.len(), ACKS_MAX)
                }
                _ => Ok(()),
            },
            Self::Get(_)
            | Self::Holds(_)
            | Self::Claim(_)
            | Self::Watch(_)
            | Self::Unwatch(_)
            | Self::Backup(_)
            | Self::Status(_)
            | Self::Transfer(_)
            | Self::Members(_)
            | Self::MemberChange(_)
            | Self::GroupStep(_)
            | Self::Ping => Ok(()),
        }
    }
}

fn at_most(what: &'static str, count: usize, count_max: usize) -> Result<(), DecodeError> {
    if count <= count_max {
        Ok(())
    } else {
        Err(DecodeError::TooManyItems { what, count, count_max })
    }
}

impl Reply {
    /// The kind of this reply's frame.
    pub const fn kind(&self) -> u8 {
        match self {
            Self::Hello(_) => kind::SERVER_HELLO,
            Self::Outcome(_) => kind::OUTCOME,
            Self::Renewed(_) => kind::RENEWED,
            Self::Keys(_) => kind::KEYS,
            Self::Sessions(_) => kind::SESSIONS_REPLY,
            Self::Holds(_) => kind::HOLDS_REPLY,
            Self::Status(_) => kind::STATUS_REPLY,
            Self::Transferred => kind::TRANSFERRED,
            Self::Pong => kind::PONG,
            Self::Claim(_) => kind::CLAIM_REPLY,
            Self::WatchEvents(_) => kind::WATCH_EVENTS,
            Self::WatchState(_) => kind::WATCH_STATE,
            Self::WatchNotice(_) => kind::WATCH_NOTICE,
            Self::WatchEnd(_) => kind::WATCH_END,
            Self::Unwatched => kind::UNWATCHED,
            Self::Members(_) => kind::MEMBERS_REPLY,
            Self::MemberChanged(_) => kind::MEMBER_CHANGED,
            Self::GroupStepped(_) => kind::GROUP_STEPPED,
            Self::Backup(_) => kind::BACKUP_PART,
            Self::Error(_) => kind::ERROR,
        }
    }

    /// Appends this reply's frame to `out`; on error `out` is as before.
    pub fn encode_frame(&self, id: RequestId, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let header = Header::new(self.kind(), id);
        frame::append(header, REPLY_BODY_MAX, out, |out| self.encode_body(out))
    }

    /// Appends this reply's body alone to `out`, for a frame that wraps it.
    pub fn encode_body(&self, out: &mut Vec<u8>) {
        match self {
            Self::Hello(body) => encode_into(body, out),
            Self::Outcome(body) => encode_into(body, out),
            Self::Renewed(body) => encode_into(body, out),
            Self::Keys(body) => encode_into(body, out),
            Self::Sessions(body) => encode_into(body, out),
            Self::Holds(body) => encode_into(body, out),
            Self::Status(body) => encode_into(body, out),
            Self::Claim(body) => encode_into(body, out),
            Self::Members(body) => encode_into(body, out),
            Self::MemberChanged(body) => encode_into(body, out),
            Self::GroupStepped(body) => encode_into(body, out),
            Self::Backup(body) => encode_into(body, out),
            Self::Error(body) => encode_into(body, out),
            Self::WatchEvents(body) => encode_into(body, out),
            Self::WatchState(body) => encode_into(body, out),
            Self::WatchNotice(body) => encode_into(body, out),
            Self::WatchEnd(body) => encode_into(body, out),
            Self::Transferred | Self::Pong | Self::Unwatched => {}
        }
    }

    /// Reads the body of a reply's frame.
    pub fn decode(kind: u8, body: &[u8]) -> Result<Self, DecodeError> {
        Ok(match kind {
            kind::SERVER_HELLO => Self::Hello(body_of(kind, body)?),
            kind::OUTCOME => Self::Outcome(body_of(kind, body)?),
            kind::RENEWED => Self::Renewed(body_of(kind, body)?),
            kind::KEYS => Self::Keys(body_of(kind, body)?),
            kind::SESSIONS_REPLY => Self::Sessions(body_of(kind, body)?),
            kind::HOLDS_REPLY => Self::Holds(body_of(kind, body)?),
            kind::STATUS_REPLY => Self::Status(body_of(kind, body)?),
            kind::TRANSFERRED => empty_of(kind, body, Self::Transferred)?,
            kind::CLAIM_REPLY => Self::Claim(body_of(kind, body)?),
            kind::MEMBERS_REPLY => Self::Members(body_of(kind, body)?),
            kind::MEMBER_CHANGED => Self::MemberChanged(body_of(kind, body)?),
            kind::GROUP_STEPPED => Self::GroupStepped(body_of(kind, body)?),
            kind::BACKUP_PART => Self::Backup(body_of(kind, body)?),
            kind::PONG => empty_of(kind, body, Self::Pong)?,
            kind::WATCH_EVENTS => Self::WatchEvents(body_of(kind, body)?),
            kind::WATCH_STATE => Self::WatchState(body_of(kind, body)?),
            kind::WATCH_NOTICE => Self::WatchNotice(body_of(kind, body)?),
            kind::WATCH_END => Self::WatchEnd(body_of(kind, body)?),
            kind::UNWATCHED => empty_of(kind, body, Self::Unwatched)?,
            kind::ERROR => Self::Error(body_of(kind, body)?),
            _ => return Err(DecodeError::UnknownKind { kind }),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;
    use crate::command::Caller;
    use crate::ids::{ClusterId, HoldSetVersion, LeaseId, Number, Secret, ShardId};
    use crate::request::{
        ClientHello, CommandRequest, Freshness, ListRequest, RenewItem, RenewRequest,
        SessionsRequest,
    };

    fn with_acks(count: usize) -> [Request; 3] {
        let caller = Caller {
            lease: LeaseId(1),
            secret: Secret::default(),
            number: Number(1),
            floor: Number(0),
            acks: vec![Number(1); count],
        };
        let (key, token) = (vec![b'k'], crate::ids::Token(1));
        [
            Command::Acquire {
                caller: caller.clone(),
                key: key.clone(),
                mode: crate::ids::Mode::EXCLUSIVE,
                own: None,
                value: vec![],
                wait_ms: 0,
            },
            Command::Cancel { caller: caller.clone(), release_if_granted: true },
            Command::Release { caller, key, token },
        ]
        .map(|command| {
            Request::Command(CommandRequest { shard: ShardId(0), timeout_ms: 1, command })
        })
    }

    fn with_items(count: usize) -> Request {
        let item =
            RenewItem { lease: LeaseId(1), secret: Secret::default(), version: HoldSetVersion(1) };
        Request::Renew(RenewRequest { shard: ShardId(0), timeout_ms: 1, items: vec![item; count] })
    }

    fn with_auth(count: usize) -> Request {
        Request::Hello(ClientHello {
            magic: frame::MAGIC,
            version_min: 1,
            version_max: 1,
            cluster: ClusterId::UNKNOWN,
            features: 0,
            auth: vec![1; count],
        })
    }

    fn with_limit(limit: u32) -> [Request; 2] {
        let (shard, timeout_ms) = (ShardId(0), 1);
        [
            Request::List(ListRequest {
                shard,
                prefix: vec![],
                after: vec![],
                limit,
                freshness: Freshness::Stale,
                timeout_ms,
            }),
            Request::Sessions(SessionsRequest { shard, after: LeaseId(0), limit, timeout_ms }),
        ]
    }

    fn decoded(request: &Request) -> Result<Request, ErrorCode> {
        let mut out = Vec::new();
        request.encode_frame(RequestId(1), &mut out).unwrap();
        Request::decode(request.kind(), &out[frame::BODY_AT..]).map_err(DecodeError::code)
    }

    #[test]
    fn every_count_is_taken_at_its_bound_and_refused_above() {
        let at_bound = [with_items(RENEW_BATCH_MAX), with_auth(AUTH_LEN_MAX)];
        let all = at_bound.into_iter().chain(with_acks(ACKS_MAX)).chain(with_limit(PAGE_LEN_MAX));
        for request in all {
            assert_eq!(decoded(&request), Ok(request));
        }
        let above = [with_items(RENEW_BATCH_MAX + 1), with_auth(AUTH_LEN_MAX + 1)];
        let all = above.into_iter().chain(with_acks(ACKS_MAX + 1)).chain(with_limit(257));
        for request in all {
            assert_eq!(decoded(&request), Err(ErrorCode::TOO_MANY_ITEMS), "{request:?}");
        }
    }
}
