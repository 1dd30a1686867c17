//! Handing a hold to another process: `Handover`, what the one says and the other needs.
//!
//! The text of a handover has the lease's secret: whoever reads it can renew the hold and give it
//! back. It is never shown by `Debug`.

use std::fmt;
use std::str::FromStr;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, LeaseId, Mode, Number, Secret, Token};

use crate::client::{Client, gone};
use crate::core::Passed;
use crate::error::{AcquireError, Failure};
use crate::guard::Guard;
use crate::session::Interest;

/// What a text begins with. The number is that of its form.
const FORM: &str = "leasehold-handover-1";

/// A hold with a lease of its own that one process let go of, for another to go on with.
///
/// Pass its text to one process, and keep it secret: whoever has it can renew the hold and give it
/// back. If nobody takes it over, the hold ends with its lease, at most a TTL after the last
/// renewal.
///
/// ```no_run
/// # async fn example(session: leasehold::Session, other: leasehold::Client)
/// # -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// let guard = session.lock("jobs/nightly").own_lease(Duration::from_secs(60)).acquire().await?;
/// let text = guard.hand_over().expect("it has a lease of its own").to_text();
/// // ... in the other process, with the same token:
/// let guard = other.take_over(&text.parse()?).await?;
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handover {
    cluster: ClusterId,
    passed: Passed,
}

impl Handover {
    pub(crate) const fn new(cluster: ClusterId, passed: Passed) -> Self {
        Self { cluster, passed }
    }

    /// The key.
    pub fn key(&self) -> &str {
        std::str::from_utf8(&self.passed.key).unwrap_or_default()
    }

    /// The hold's fencing token, which stays what it is.
    pub const fn token(&self) -> Token {
        self.passed.token
    }

    /// One line of ASCII without spaces, secret; `parse` reads it.
    pub fn to_text(&self) -> String {
        let Passed { key, mode, token, floor, number, lease, secret, ttl_ms } = &self.passed;
        let numbers = [lease.0, number.0, token.0, floor.0, u64::from(mode.0), u64::from(*ttl_ms)];
        let numbers = numbers.map(|number| number.to_string()).join(".");
        let bytes = [&self.cluster.0[..], &secret.0[..], key].map(hex).join(".");
        seal(&format!("{FORM}.{numbers}.{bytes}"))
    }
}

/// With a checksum at the end: a text that was cut or changed is not believed.
fn seal(text: &str) -> String {
    format!("{text}.{:08x}", crc32c::crc32c(text.as_bytes()))
}

impl FromStr for Handover {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let text = text.trim();
        let sealed = text.rsplit_once('.').filter(|(said, _)| seal(said) == text);
        let (said, _) = sealed.ok_or_else(|| misread("its checksum is not that of the rest"))?;
        let parts: Vec<&str> = said.split('.').collect();
        let [FORM, lease, number, token, floor, mode, ttl_ms, cluster, secret, key] = parts[..]
        else {
            return Err(misread("it does not have the form that this version writes"));
        };
        let passed = Passed {
            key: bytes("key", key)?,
            mode: Mode(int("mode", mode)?),
            token: Token(int("token", token)?),
            floor: Token(int("floor", floor)?),
            number: Number(int("number", number)?),
            lease: LeaseId(int("lease", lease)?),
            secret: Secret(sixteen("secret", secret)?),
            ttl_ms: int("TTL", ttl_ms)?,
        };
        Ok(Self { cluster: ClusterId(sixteen("cluster", cluster)?), passed })
    }
}

impl Client {
    /// Goes on with a hold that another process handed over; returns when a renewal has shown that
    /// it lives. Fails with `Lost` if it had ended before, with `Refused` (`wrong_cluster`) if it is
    /// another cluster's. What fails here has not been given back.
    pub async fn take_over(&self, handover: &Handover) -> Result<Guard, AcquireError> {
        let Handover { cluster, passed } = handover.clone();
        let key = passed.key.clone();
        let (op, answer) = self.inner.shared.enter(|inner, now| {
            let here = inner.core.cluster();
            if here != cluster {
                let text = format!("the hold is one of cluster {cluster}, this one is {here}");
                return Err(Failure::new(ErrorCode::WRONG_CLUSTER, text));
            }
            let op = inner.core.take_over(now, passed);
            inner.await_acquire(op)
        })?;
        let mut interest = Interest::new(&self.inner, op);
        let reported = answer.await.unwrap_or_else(|_| Err(gone()));
        interest.settled();
        Ok(Guard::taken(&self.inner, op, key, reported?))
    }
}

fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // A text takes everything.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn misread(why: &str) -> Failure {
    Failure::new(ErrorCode::MALFORMED, format!("this is no handed-over hold: {why}"))
}

fn int<T: FromStr>(what: &str, text: &str) -> Result<T, Failure> {
    text.parse().map_err(|_| misread(&format!("its {what} is no number in range")))
}

fn bytes(what: &str, text: &str) -> Result<Vec<u8>, Failure> {
    let pair = |at: usize| text.get(at..at + 2).and_then(|two| u8::from_str_radix(two, 16).ok());
    let bytes: Option<Vec<u8>> = (0..text.len()).step_by(2).map(pair).collect();
    bytes.ok_or_else(|| misread(&format!("its {what} is not in hexadecimal")))
}

fn sixteen(what: &str, text: &str) -> Result<[u8; 16], Failure> {
    let bytes = bytes(what, text)?;
    bytes.try_into().map_err(|_| misread(&format!("its {what} does not have 16 bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handover() -> Handover {
        let passed = Passed {
            key: "jobs/é".as_bytes().to_vec(),
            mode: Mode::permits(3),
            token: Token(u64::MAX),
            floor: Token(7),
            number: Number(4),
            lease: LeaseId(9),
            secret: Secret([0xab; 16]),
            ttl_ms: 60_000,
        };
        Handover::new(ClusterId([0x1f; 16]), passed)
    }

    #[test]
    fn a_text_says_everything_and_debug_keeps_the_secret() {
        let text = handover().to_text();
        assert!(text.is_ascii() && !text.contains(char::is_whitespace), "{text}");
        assert_eq!(format!("{text}\n").parse(), Ok(handover()));
        assert!(!format!("{:?}", handover()).contains("171"), "the secret's bytes are not shown");
    }

    #[test]
    fn a_text_that_was_cut_or_changed_is_refused_with_what_is_wrong() {
        let text = handover().to_text();
        for changed in [
            String::new(),
            text.replace(".60000.", ".60001."),
            text.rsplit_once('.').expect("parts").0.to_owned(),
            text[..text.len() - 1].to_owned(),
        ] {
            let failure = changed.parse::<Handover>().expect_err("refused");
            assert_eq!(failure.code, ErrorCode::MALFORMED);
            assert!(failure.message.contains("checksum"), "{changed}: {}", failure.message);
        }
        let text = text.rsplit_once('.').expect("a checksum").0;
        for (bad, why) in [
            (text.replace("handover-1", "handover-2"), "form"),
            (text.rsplit_once('.').expect("parts").0.to_owned(), "form"),
            (text.replace(".60000.", ".-1."), "TTL"),
            (text.replace(".9.", ".x."), "lease"),
            (text.replacen("abab", "ab", 1), "secret does not have 16 bytes"),
            (text.replacen("abab", "zzab", 1), "secret is not in hexadecimal"),
            (text[..text.len() - 1].to_owned(), "key is not in hexadecimal"),
        ] {
            let failure = seal(&bad).parse::<Handover>().expect_err("refused");
            assert_eq!(failure.code, ErrorCode::MALFORMED);
            assert!(failure.message.contains(why), "{bad}: {}", failure.message);
        }
    }
}
