//! What an acquire asks for beside its key, and how that is said on the wire.

use leasehold_protocol::command::{Caller, Command, OwnLease, Want};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{Mode, Token};
use leasehold_protocol::limits::{LOCK_DELAY_MS_MAX, PERMITS_MAX, WANTS_MAX};
use leasehold_protocol::shard::{check_delay_ms, check_wants};

use crate::error::Failure;

/// One further key of an acquire of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Further {
    pub(crate) key: Vec<u8>,
    pub(crate) mode: Mode,
    /// See `Options::limit`.
    pub(crate) limit: u32,
}

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) mode: Mode,
    /// For permits: how many the semaphore has; else 0.
    pub(crate) limit: u32,
    pub(crate) reentrant: bool,
    /// The lock-delay after a loss, in milliseconds. Has more bits than the wire, so that an absurd
    /// one is refused and not cut to size.
    pub(crate) delay_ms: u64,
}

impl Options {
    /// An exclusive hold and nothing else.
    pub(crate) const PLAIN: Self =
        Self { mode: Mode::EXCLUSIVE, limit: 0, reentrant: false, delay_ms: 0 };

    /// Refuses what the cluster would refuse, naming what was given.
    pub(crate) fn check(&self, key: &[u8], more: &[Further], own: bool) -> Result<(), Failure> {
        check_wants(&self.wants(key, more), own).map_err(|code| {
            match (code, self.mode.permit_count()) {
                (ErrorCode::BAD_COMBINATION, _) if !more.is_empty() => {
                    let text =
                        "holds of several keys cannot be re-entered or have a lease of their own";
                    Failure::new(code, text)
                }
                (ErrorCode::TOO_MANY_ITEMS, _) => {
                    let count = more.len() + 1;
                    let text = format!(
                        "{count} keys are too many for one acquire: {WANTS_MAX} are allowed"
                    );
                    Failure::new(code, text)
                }
                (ErrorCode::DUPLICATE_KEY, _) => twice(key, more),
                (ErrorCode::PERMITS_OUT_OF_RANGE, Some(count)) => {
                    let limit = self.limit;
                    let text =
                        format!("{count} of {limit} permits are out of range: {}", code.text());
                    Failure::new(code, text)
                }
                _ => Failure::of(code),
            }
        })?;
        if u32::try_from(self.delay_ms).map(check_delay_ms) != Ok(Ok(())) {
            let text = format!(
                "a lock-delay of {} ms is out of range: it is 0 to {LOCK_DELAY_MS_MAX} ms",
                self.delay_ms
            );
            return Err(Failure::new(ErrorCode::DELAY_OUT_OF_RANGE, text));
        }
        if self.reentrant && own {
            let text = "a hold with a lease of its own cannot be re-entered";
            return Err(Failure::new(ErrorCode::BAD_COMBINATION, text));
        }
        Ok(())
    }

    fn wants(&self, key: &[u8], more: &[Further]) -> Vec<Want> {
        let Self { mode, limit, reentrant, .. } = *self;
        let first = Want { key: key.to_vec(), mode, limit, reentrant };
        let further = more.iter().map(|further| Want {
            key: further.key.clone(),
            mode: further.mode,
            limit: further.limit,
            reentrant,
        });
        std::iter::once(first).chain(further).collect()
    }

    /// The command, the same in each retry.
    pub(super) fn command(
        &self,
        caller: Caller,
        (key, more): (&[u8], &[Further]),
        own: Option<OwnLease>,
        value: &[u8],
        wait_ms: u32,
    ) -> Command {
        let value = value.to_vec();
        if more.is_empty() && (self.limit, self.reentrant, self.delay_ms) == (0, false, 0) {
            let (key, mode) = (key.to_vec(), self.mode);
            return Command::Acquire { caller, key, mode, own, value, wait_ms };
        }
        let (wants, delay_ms) = (self.wants(key, more), self.delay_ms as u32);
        Command::AcquireAll { caller, wants, own, value, wait_ms, delay_ms }
    }

    /// A refusal of such an acquire, with both numbers where two differ.
    pub(super) fn refusal(&self, code: ErrorCode, token: Token) -> Failure {
        let wanted = self.mode.permit_count().unwrap_or(0);
        match code {
            ErrorCode::LIMIT_MISMATCH => {
                let stated = self.limit;
                let text =
                    format!("the semaphore has {token} permits and the request states {stated}");
                Failure::new(code, text)
            }
            ErrorCode::PERMITS_ABOVE_LIMIT => {
                let text = format!(
                    "the semaphore was made smaller, {token} permits, than the {wanted} waited for"
                );
                Failure::new(code, text)
            }
            code => Failure { token, ..Failure::of(code) },
        }
    }
}

/// Names the key that is there twice.
fn twice(key: &[u8], more: &[Further]) -> Failure {
    let mut keys: Vec<&[u8]> = more.iter().map(|further| further.key.as_slice()).collect();
    keys.push(key);
    keys.sort_unstable();
    let pair = keys.windows(2).find(|pair| pair[0] == pair[1]);
    let key = String::from_utf8_lossy(pair.map_or(key, |pair| pair[0]));
    Failure::new(ErrorCode::DUPLICATE_KEY, format!("the key {key:?} is named twice"))
}

/// A limit in range, or a failure that names what was given and the range.
pub(crate) fn check_limit(limit: u32) -> Result<(), Failure> {
    leasehold_protocol::shard::check_limit(limit).map_err(|code| {
        Failure::new(
            code,
            format!("{limit} permits are out of range: a semaphore has 1 to {PERMITS_MAX}"),
        )
    })
}
