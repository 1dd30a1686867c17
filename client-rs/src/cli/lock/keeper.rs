//! The keeper: the process with the client in it. See the parent module.

use std::process::ExitCode;
use std::time::Duration;

use leasehold::{HoldState, HoldWatch, YieldAsked, Yields};
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines, Stdin};
use tokio::sync::mpsc;

use super::super::exit::{CliError, code_of};
use super::hold::acquire;
use super::{Order, Reply, Word};

/// How often the end of validity is looked at, as a part of the TTL.
const LOOKS_PER_TTL: u32 = 20;
/// How long killed processes may take to vanish before the lock is given back all the same.
const VANISH: Duration = Duration::from_secs(2);
/// Longest line of the supervisor.
const LINE_LEN_MAX: u64 = 64 * 1024;

type Input = Lines<BufReader<tokio::io::Take<Stdin>>>;

/// Holds the lock for the supervisor on the other side of standard input and output.
pub(in super::super) async fn keep() -> Result<ExitCode, CliError> {
    let mut input = BufReader::new(tokio::io::stdin().take(LINE_LEN_MAX)).lines();
    let Some(order) = input.next_line().await.map_err(CliError::Io)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let order: Order =
        serde_json::from_str(&order).map_err(|error| CliError::Usage(error.to_string()))?;
    let (session, hold) = tokio::select! {
        acquired = acquire(&order) => match acquired {
            Ok(acquired) => acquired,
            Err(error) => {
                say(&failed(&error)).await?;
                return Ok(ExitCode::SUCCESS);
            }
        },
        // The supervisor says nothing before the grant: it has gone.
        _ = input.next_line() => return Ok(ExitCode::SUCCESS),
    };
    let mut seen = Seen::new(hold.watches());
    let slots = match hold.slots(&order).await {
        Ok(slots) => slots,
        Err(error) => {
            hold.release().await;
            say(&failed(&error.into())).await?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    let (tokens, until_ns) = (hold.tokens(&order), seen.until_ns());
    say(&Word::Held { tokens, until_ns, slots }).await?;
    let asked = hear_yields(if order.yields { hold.yields() } else { Vec::new() });
    let group = watch(&mut seen, asked, &mut input, Duration::from_millis(order.ttl_ms)).await;
    if let Some(group) = group {
        end(group).await;
    }
    hold.release().await;
    let _ = session.close().await;
    // If the supervisor has gone, nobody hears it.
    let _ = say(&Word::Released).await;
    Ok(ExitCode::SUCCESS)
}

/// What is known of the holds.
struct Seen {
    holds: Vec<HoldWatch>,
    changes: mpsc::Receiver<HoldState>,
}

impl Seen {
    fn new(holds: Vec<HoldWatch>) -> Self {
        let (tell, changes) = mpsc::channel(1);
        for mut hold in holds.iter().cloned() {
            let tell = tell.clone();
            tokio::spawn(async move {
                while let Some(change) = hold.changed().await {
                    if tell.send(change).await.is_err() {
                        return;
                    }
                }
            });
        }
        Self { holds, changes }
    }

    /// The end of the first one's validity on the system's clock, which the supervisor shares.
    fn until_ns(&self) -> u64 {
        let remaining = self.holds.iter().map(HoldWatch::remaining).min().unwrap_or_default();
        super::supervisor::now_ns() + remaining.as_nanos() as u64
    }
}

/// Tells the supervisor each new end of validity until it wants the lock given back. Returns the
/// command's group if the supervisor has gone and left it behind.
async fn watch(
    seen: &mut Seen,
    mut asked: mpsc::Receiver<YieldAsked>,
    input: &mut Input,
    ttl: Duration,
) -> Option<Pid> {
    let mut group = None;
    let mut told = seen.until_ns();
    let mut lost = false;
    loop {
        tokio::select! {
            line = input.next_line() => match parse(line) {
                Some(Reply::Group { group: raw }) => group = Pid::from_raw(raw),
                Some(Reply::Release) => return None,
                None => return group,
            },
            change = seen.changes.recv(), if !lost => {
                lost = matches!(change, Some(HoldState::Lost(_)) | None);
                tell_change(change).await;
                if let (true, Some(group)) = (lost, group) {
                    // The supervisor does so too, unless it is stopped.
                    let _ = kill_process_group(group, Signal::KILL);
                }
            }
            Some(asked) = asked.recv(), if !lost => {
                let YieldAsked { who, why, within } = asked;
                let within_ms = within.as_millis() as u64;
                let _ = say(&Word::Yield { who, why, within_ms }).await;
            }
            () = tokio::time::sleep(ttl / LOOKS_PER_TTL), if !lost => {}
        }
        let until_ns = seen.until_ns();
        // The end is computed from what is left; a little noise is no news.
        if !lost && until_ns > told + 1_000_000 {
            told = until_ns;
            let _ = say(&Word::Until { until_ns }).await;
        }
    }
}

/// What is asked of any of the keys.
fn hear_yields(all: Vec<Yields>) -> mpsc::Receiver<YieldAsked> {
    let (tell, asked) = mpsc::channel(1);
    for mut yields in all {
        let tell = tell.clone();
        tokio::spawn(async move {
            while let Ok(Some(asked)) = yields.next().await {
                if tell.send(asked).await.is_err() {
                    return;
                }
            }
        });
    }
    asked
}

/// The next request to yield; none comes after the last.
pub(in super::super) async fn next_yield(yields: &mut Option<Yields>) -> YieldAsked {
    if let Some(stream) = yields {
        if let Ok(Some(asked)) = stream.next().await {
            return asked;
        }
        *yields = None;
    }
    std::future::pending().await
}

fn parse(line: std::io::Result<Option<String>>) -> Option<Reply> {
    serde_json::from_str(&line.ok()??).ok()
}

async fn tell_change(change: Option<HoldState>) {
    let word = match change {
        Some(HoldState::AtRisk { cause, remaining }) => Word::AtRisk {
            cause: cause.name().to_owned(),
            remaining_ms: remaining.as_millis() as u64,
        },
        Some(HoldState::Lost(cause)) => Word::Lost { cause: cause.name().to_owned() },
        _ => return,
    };
    // A supervisor that does not listen is found out by its closed pipe.
    let _ = say(&word).await;
}

/// Kills a group and waits until it is gone.
async fn end(group: Pid) {
    let _ = kill_process_group(group, Signal::KILL);
    let step = Duration::from_millis(10);
    let mut waited = Duration::ZERO;
    while test_kill_process_group(group).is_ok() && waited < VANISH {
        tokio::time::sleep(step).await;
        waited += step;
    }
}

fn failed(error: &CliError) -> Word {
    let json = error.to_json();
    let text = |name: &str| json[name].as_str().unwrap_or_default().to_owned();
    let exit = match error {
        CliError::Failed(failure) => code_of(failure),
        other => other.exit_code(),
    };
    Word::Failed { error: text("error"), class: text("class"), message: text("message"), exit }
}

pub(super) async fn say(word: &Word) -> Result<(), CliError> {
    let mut line = serde_json::to_string(word).expect("words have no maps with odd keys");
    line.push('\n');
    let mut out = tokio::io::stdout();
    out.write_all(line.as_bytes()).await.map_err(CliError::Io)?;
    out.flush().await.map_err(CliError::Io)
}

#[cfg(test)]
mod tests {
    use leasehold::{ErrorCode, Failure};

    use super::*;

    #[test]
    fn a_failure_carries_its_exit_code_over_the_pipe() {
        let word = failed(&CliError::Failed(Failure::of(ErrorCode::HELD)));
        let line = serde_json::to_string(&word).expect("plain");
        assert_eq!(serde_json::from_str::<Word>(&line).expect("the same"), word);
        assert!(matches!(word, Word::Failed { exit: 120, error, .. } if error == "held"));
    }
}
