//! Errors: one enum per operation, each carrying the code whose name is the same on the wire, here,
//! in the CLI and in the documents; and `Error`, into which all of them convert.

use std::fmt;

use leasehold_protocol::error::{ErrorClass, ErrorCode};
use leasehold_protocol::ids::Token;

/// What went wrong, by code and for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The code; its class tells what may be concluded.
    pub code: ErrorCode,
    /// For a person: names the thing and, where there is one, the allowed range.
    pub message: String,
    /// The present holder's token where the cluster told it, else 0.
    pub token: Token,
    /// Of `delayed`: how much is left of the key's lock-delays, in milliseconds, where the cluster
    /// told it.
    pub rest_ms: Option<u32>,
}

impl Failure {
    /// A failure with the code's own sentence.
    pub fn of(code: ErrorCode) -> Self {
        Self::new(code, code.text())
    }

    /// A failure with a sentence of its own.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), token: Token(0), rest_ms: None }
    }

    /// The stable name of the code.
    pub const fn name(&self) -> &'static str {
        self.code.name()
    }

    /// What may be concluded about the request.
    pub const fn class(&self) -> ErrorClass {
        self.code.class()
    }
}

impl std::error::Error for Failure {}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name(), self.message)
    }
}

/// Settings that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The list of endpoints is empty.
    #[error("no endpoint is given; expected HOST:PORT, several separated by commas")]
    NoEndpoint,
    /// There are more endpoints than a client keeps.
    #[error("{count} endpoints are given; at most {count_max} are allowed")]
    TooManyEndpoints {
        /// How many there are.
        count: usize,
        /// How many are allowed.
        count_max: usize,
    },
    /// One endpoint is not `HOST:PORT`.
    #[error("endpoint {endpoint:?}: {reason}")]
    BadEndpoint {
        /// The item as it was given.
        endpoint: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A time-out is out of range.
    #[error("{name} is {given_ms} ms; it must be 10 ms to 600,000 ms")]
    BadTimeout {
        /// Which setting.
        name: &'static str,
        /// What was given, in milliseconds.
        given_ms: u128,
    },
    /// The label is too long.
    #[error("the label has {len} bytes; at most 128 are allowed")]
    LabelTooLong {
        /// Its length, in bytes.
        len: usize,
    },
    /// The system gave no random bytes for secrets.
    #[error("the system gives no random bytes: {0}")]
    NoRandomness(String),
}

macro_rules! failures {
    ($name:ident { $($variant:ident),* $(,)? }) => {
        impl $name {
            /// The code and the message.
            pub const fn failure(&self) -> &Failure {
                match self { $(Self::$variant(failure) => failure),* }
            }
        }
    };
}

/// `Client::connect` failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The settings cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No endpoint answered in time, or each refused.
    #[error("no endpoint could be used: {0}")]
    Failed(Failure),
}

/// A session could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The TTL or the label is out of range, or the client has too many sessions.
    #[error("{0}")]
    Refused(Failure),
}
failures!(SessionError { Refused });

/// An acquire ended without a hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// Somebody else holds the key or waits for it, and this acquire does not wait.
    #[error("{0}")]
    Held(Failure),
    /// A hold of the key was lost, its lock-delay is not over, and this acquire does not wait.
    #[error("{0}")]
    Delayed(Failure),
    /// The wait was over before the key was free.
    #[error("{0}")]
    TimedOut(Failure),
    /// The session's lease ended meanwhile; nothing is held.
    #[error("{0}")]
    Lost(Failure),
    /// The cluster or this library refused the request; it had no effect.
    #[error("{0}")]
    Refused(Failure),
    /// The cluster could not answer; the request had no effect.
    #[error("{0}")]
    Unavailable(Failure),
    /// The deadline passed while the outcome was open. If the key was granted, this library gives
    /// it back.
    #[error("{0}")]
    Unknown(Failure),
}
failures!(AcquireError { Held, Delayed, TimedOut, Lost, Refused, Unavailable, Unknown });

impl From<Failure> for AcquireError {
    fn from(failure: Failure) -> Self {
        match failure.code {
            ErrorCode::HELD => Self::Held(failure),
            ErrorCode::DELAYED => Self::Delayed(failure),
            ErrorCode::TIMED_OUT => Self::TimedOut(failure),
            ErrorCode::LEASE_LOST | ErrorCode::LEASE_DEAD => Self::Lost(failure),
            code => match code.class() {
                ErrorClass::NotApplied => Self::Refused(failure),
                ErrorClass::Retryable => Self::Unavailable(failure),
                ErrorClass::Unknown => Self::Unknown(failure),
            },
        }
    }
}

/// A release did not find its hold, or its outcome is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReleaseError {
    /// The hold had ended before: it was lost.
    #[error("{0}")]
    Lost(Failure),
    /// The deadline passed first; the library goes on releasing as long as the lease lives.
    #[error("{0}")]
    Unknown(Failure),
}
failures!(ReleaseError { Lost, Unknown });

impl From<Failure> for ReleaseError {
    fn from(failure: Failure) -> Self {
        match failure.code.class() {
            ErrorClass::NotApplied => Self::Lost(failure),
            ErrorClass::Retryable | ErrorClass::Unknown => Self::Unknown(failure),
        }
    }
}

/// A renewal that was asked for was not acknowledged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RenewError {
    /// The hold was lost.
    #[error("{0}")]
    Lost(Failure),
    /// No acknowledgement came in time; the hold's validity is as it was.
    #[error("{0}")]
    Unavailable(Failure),
}
failures!(RenewError { Lost, Unavailable });

impl From<Failure> for RenewError {
    fn from(failure: Failure) -> Self {
        match failure.code.class() {
            ErrorClass::NotApplied => Self::Lost(failure),
            ErrorClass::Retryable | ErrorClass::Unknown => Self::Unavailable(failure),
        }
    }
}

/// A hold was not changed, or its outcome is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// Others hold the key too, so the hold did not become exclusive; it is what it was.
    #[error("{0}")]
    Conflict(Failure),
    /// The hold was lost, or given back.
    #[error("{0}")]
    Lost(Failure),
    /// The cluster or this library refused; the hold is what it was.
    #[error("{0}")]
    Refused(Failure),
    /// There was no room for the request; the hold is what it was.
    #[error("{0}")]
    Unavailable(Failure),
    /// The deadline passed first; the library goes on asking as long as the lease lives, and the
    /// guard shows what came of it.
    #[error("{0}")]
    Unknown(Failure),
}
failures!(ChangeError { Conflict, Lost, Refused, Unavailable, Unknown });

impl From<Failure> for ChangeError {
    fn from(failure: Failure) -> Self {
        match failure.code {
            ErrorCode::UPGRADE_CONFLICT => Self::Conflict(failure),
            ErrorCode::LEASE_LOST | ErrorCode::LEASE_DEAD | ErrorCode::NOT_OWNER => {
                Self::Lost(failure)
            }
            code => match code.class() {
                ErrorClass::NotApplied => Self::Refused(failure),
                ErrorClass::Retryable => Self::Unavailable(failure),
                ErrorClass::Unknown => Self::Unknown(failure),
            },
        }
    }
}

/// A session's end was not confirmed in time. Nothing renews it any more: what it holds is free
/// after its TTL at the latest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// The deadline passed first.
    #[error("{0}")]
    Unknown(Failure),
}
failures!(CloseError { Unknown });

/// A read or an operator's request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// It was refused; it had no effect.
    #[error("{0}")]
    Refused(Failure),
    /// The cluster could not answer; it had no effect.
    #[error("{0}")]
    Unavailable(Failure),
    /// The deadline passed while the outcome was open.
    #[error("{0}")]
    Unknown(Failure),
}
failures!(CallError { Refused, Unavailable, Unknown });

impl From<Failure> for CallError {
    fn from(failure: Failure) -> Self {
        match failure.code.class() {
            ErrorClass::NotApplied => Self::Refused(failure),
            ErrorClass::Retryable => Self::Unavailable(failure),
            ErrorClass::Unknown => Self::Unknown(failure),
        }
    }
}

/// Any error of this library.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// See `ConfigError`.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// See `ConnectError`.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// See `SessionError`.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// See `AcquireError`.
    #[error(transparent)]
    Acquire(#[from] AcquireError),
    /// See `ReleaseError`.
    #[error(transparent)]
    Release(#[from] ReleaseError),
    /// See `RenewError`.
    #[error(transparent)]
    Renew(#[from] RenewError),
    /// See `ChangeError`.
    #[error(transparent)]
    Change(#[from] ChangeError),
    /// See `CloseError`.
    #[error(transparent)]
    Close(#[from] CloseError),
    /// See `CallError`.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl Error {
    /// The code and the message; `None` for settings, which never reached a cluster.
    pub const fn failure(&self) -> Option<&Failure> {
        Some(match self {
            Self::Config(_) | Self::Connect(ConnectError::Config(_)) => return None,
            Self::Connect(ConnectError::Failed(failure)) => failure,
            Self::Session(error) => error.failure(),
            Self::Acquire(error) => error.failure(),
            Self::Release(error) => error.failure(),
            Self::Renew(error) => error.failure(),
            Self::Change(error) => error.failure(),
            Self::Close(error) => error.failure(),
            Self::Call(error) => error.failure(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acquire_error_follows_the_code() {
        let error = |code| AcquireError::from(Failure::of(code));
        assert!(matches!(error(ErrorCode::HELD), AcquireError::Held(_)));
        assert!(matches!(error(ErrorCode::LEASE_DEAD), AcquireError::Lost(_)));
        assert!(matches!(error(ErrorCode::KEY_EMPTY), AcquireError::Refused(_)));
        assert!(matches!(error(ErrorCode::NO_QUORUM), AcquireError::Unavailable(_)));
        assert!(matches!(error(ErrorCode::DEADLINE), AcquireError::Unknown(_)));
        assert_eq!(error(ErrorCode::HELD).failure().name(), "held");
    }
}
