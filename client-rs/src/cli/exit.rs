//! Exit codes, and the one error type of all verbs.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done; of `lock`: the command's own 0 |
//! | 2 | the arguments or the input are wrong; nothing was done |
//! | 120 | the lock was not acquired: held by another, or the wait was over |
//! | 121 | the lock was lost; the command was ended |
//! | 122 | the cluster is not available: no node reached, no majority, overloaded |
//! | 123 | the cluster refused the request |
//! | 124 | the deadline passed and the outcome is not known |
//! | 125 | `leasehold` itself failed |
//! | 126, 127 | `lock`: the command cannot be run, is not found |
//! | 128+n | `lock`: the command was ended by signal n |
//! | other | `lock`: the command's own code |

use std::fmt;
use std::io;

use leasehold::{Error, ErrorClass, ErrorCode, Failure};
use serde_json::{Value, json};

/// Wrong arguments or input.
pub(super) const USAGE: u8 = 2;
/// Held by another, or the wait was over.
pub(super) const NOT_ACQUIRED: u8 = 120;
/// The lock was lost.
pub(super) const LOST: u8 = 121;
/// The cluster cannot answer.
pub(super) const UNAVAILABLE: u8 = 122;
/// The cluster refused.
pub(super) const REFUSED: u8 = 123;
/// The outcome is not known.
pub(super) const UNKNOWN: u8 = 124;
/// A fault of this program or of its surroundings.
pub(super) const FAILED: u8 = 125;
/// The command cannot be run.
pub(super) const CANNOT_RUN: u8 = 126;
/// The command is not found.
pub(super) const NOT_FOUND: u8 = 127;

/// The table as `--help` shows it.
pub(super) const HELP: &str = "Exit codes:
  0      done (lock: the command's own 0)
  2      the arguments or the input are wrong; nothing was done
  120    the lock was not acquired: held by another, or the wait was over
  121    the lock was lost; the command was ended
  122    the cluster is not available: no node reached, no majority, overloaded
  123    the cluster refused the request
  124    the deadline passed and the outcome is not known
  125    leasehold itself failed
  126    lock: the command cannot be run
  127    lock: the command is not found
  128+n  lock: the command was ended by signal n
  other  lock: the command's own code

Times need a unit: 500ms, 15s, 2m, 1h.";

/// Why a verb failed.
#[derive(Debug)]
pub(super) enum CliError {
    /// Wrong arguments.
    Usage(String),
    /// What the cluster or the library said.
    Failed(Failure),
    /// The surroundings.
    Io(io::Error),
    /// The command of `lock` did not start.
    Command { code: u8, text: String },
}

impl CliError {
    pub(super) fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => USAGE,
            Self::Failed(failure) => code_of(failure),
            Self::Io(_) => FAILED,
            Self::Command { code, .. } => *code,
        }
    }

    pub(super) fn to_json(&self) -> Value {
        match self {
            Self::Failed(failure) => failure_json(failure),
            Self::Usage(text) => plain_json("usage", "not_applied", text),
            Self::Io(error) => plain_json("io", "not_applied", &error.to_string()),
            Self::Command { text, .. } => plain_json("command", "not_applied", text),
        }
    }
}

fn plain_json(error: &str, class: &str, message: &str) -> Value {
    json!({ "ok": false, "error": error, "class": class, "message": message })
}

/// An error as every verb and `pipe` show it.
pub(super) fn failure_json(failure: &Failure) -> Value {
    let mut object = plain_json(failure.name(), failure.class().name(), &failure.message);
    if failure.token.0 != 0 {
        object["holder_token"] = failure.token.0.into();
    }
    if let Some(rest_ms) = failure.rest_ms {
        object["rest_ms"] = rest_ms.into();
    }
    object
}

/// The exit code of an error code.
pub(super) fn code_of(failure: &Failure) -> u8 {
    match failure.code {
        ErrorCode::HELD
        | ErrorCode::DELAYED
        | ErrorCode::TIMED_OUT
        | ErrorCode::CANCELLED
        | ErrorCode::ALREADY_HELD
        | ErrorCode::ALREADY_QUEUED
        | ErrorCode::QUEUE_FULL => NOT_ACQUIRED,
        ErrorCode::LEASE_LOST | ErrorCode::LEASE_DEAD => LOST,
        ErrorCode(200..=299) => USAGE,
        ErrorCode::INTERNAL => FAILED,
        code => match code.class() {
            ErrorClass::Retryable => UNAVAILABLE,
            ErrorClass::NotApplied => REFUSED,
            ErrorClass::Unknown => UNKNOWN,
        },
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(text) | Self::Command { text, .. } => f.write_str(text),
            Self::Failed(failure) => failure.fmt(f),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl From<Error> for CliError {
    fn from(error: Error) -> Self {
        match error.failure() {
            Some(failure) => Self::Failed(failure.clone()),
            None => Self::Usage(error.to_string()),
        }
    }
}

macro_rules! from_library {
    ($($error:ident)*) => {
        $(impl From<leasehold::$error> for CliError {
            fn from(error: leasehold::$error) -> Self {
                Error::from(error).into()
            }
        })*
    };
}

from_library!(AcquireError CallError ChangeError CloseError ConfigError ConnectError ReleaseError SessionError);

#[cfg(test)]
mod tests {
    use leasehold::{ConfigError, ConnectError};

    use super::*;

    #[test]
    fn every_code_of_the_wire_has_an_exit_code_that_the_help_lists() {
        for code in ErrorCode::ALL {
            let exit = code_of(&Failure::of(*code));
            assert!(
                HELP.lines().any(|line| line.trim_start().starts_with(&format!("{exit} "))),
                "{code} leads to {exit}"
            );
        }
    }

    #[test]
    fn what_is_not_acquired_differs_from_what_is_lost_and_from_what_is_away() {
        let exit = |code| code_of(&Failure::of(code));
        assert_eq!(exit(ErrorCode::HELD), NOT_ACQUIRED);
        assert_eq!(exit(ErrorCode::TIMED_OUT), NOT_ACQUIRED);
        assert_eq!(exit(ErrorCode::DELAYED), NOT_ACQUIRED);
        assert_eq!(exit(ErrorCode::LEASE_LOST), LOST);
        assert_eq!(exit(ErrorCode::UNREACHABLE), UNAVAILABLE);
        assert_eq!(exit(ErrorCode::NO_QUORUM), UNAVAILABLE);
        assert_eq!(exit(ErrorCode::NOT_OWNER), REFUSED);
        assert_eq!(exit(ErrorCode::DEADLINE), UNKNOWN);
        assert_eq!(exit(ErrorCode::KEY_EMPTY), USAGE);
    }

    #[test]
    fn settings_are_usage_errors() {
        let error = CliError::from(ConnectError::Config(ConfigError::NoEndpoint));
        assert_eq!(error.exit_code(), USAGE);
        assert_eq!(error.to_json()["error"], "usage");
    }
}
