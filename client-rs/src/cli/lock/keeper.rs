//! The keeper: the process with the client in it. See the parent module.

use std::process::ExitCode;
use std::time::Duration;

use leasehold::{AcquireError, Client, Config, Guard, HoldState, Session};
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines, Stdin};

use super::super::exit::{CliError, code_of};
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
    let (session, guard) = tokio::select! {
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
    let until_ns = until(&guard);
    say(&Word::Held { token: guard.token().0, until_ns }).await?;
    let group = watch(&guard, &mut input, Duration::from_millis(order.ttl_ms)).await;
    if let Some(group) = group {
        end(group).await;
    }
    let _ = guard.release().await;
    let _ = session.close().await;
    // If the supervisor has gone, nobody hears it.
    let _ = say(&Word::Released).await;
    Ok(ExitCode::SUCCESS)
}

async fn acquire(order: &Order) -> Result<(Session, Guard), CliError> {
    let config = Config::new(&order.endpoints)?
        .call_timeout(Duration::from_millis(order.timeout_ms))
        .label(order.label.clone());
    let client = Client::with_config(config).await?;
    let session = client.session(Duration::from_millis(order.ttl_ms))?;
    let mut request = session.lock(order.key.clone());
    if let Some(value) = &order.value {
        request = request.value(value.clone());
    }
    if let Some(wait_ms) = order.wait_ms {
        request = request.wait(Duration::from_millis(wait_ms));
    }
    if order.shared {
        request = request.shared();
    }
    if let Some((permits, limit)) = order.permits {
        request = request.permits(permits, limit);
    }
    request = request.lock_delay(Duration::from_millis(order.lock_delay_ms));
    let guard: Result<Guard, AcquireError> = request.acquire().await;
    Ok((session, guard?))
}

/// Tells the supervisor each new end of validity until it wants the lock given back. Returns the
/// command's group if the supervisor has gone and left it behind.
async fn watch(guard: &Guard, input: &mut Input, ttl: Duration) -> Option<Pid> {
    let mut group = None;
    let mut told = until(guard);
    let mut hold = guard.watch();
    let mut lost = false;
    loop {
        tokio::select! {
            line = input.next_line() => match parse(line) {
                Some(Reply::Group { group: raw }) => group = Pid::from_raw(raw),
                Some(Reply::Release) => return None,
                None => return group,
            },
            change = hold.changed(), if !lost => {
                lost = matches!(change, Some(HoldState::Lost(_)) | None);
                tell_change(change).await;
                if let (true, Some(group)) = (lost, group) {
                    // The supervisor does so too, unless it is stopped.
                    let _ = kill_process_group(group, Signal::KILL);
                }
            }
            () = tokio::time::sleep(ttl / LOOKS_PER_TTL), if !lost => {}
        }
        let until_ns = until(guard);
        // The end is computed from what is left; a little noise is no news.
        if !lost && until_ns > told + 1_000_000 {
            told = until_ns;
            let _ = say(&Word::Until { until_ns }).await;
        }
    }
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

/// The end of validity on the system's clock, which the supervisor shares.
fn until(guard: &Guard) -> u64 {
    super::supervisor::now_ns() + guard.remaining().as_nanos() as u64
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

async fn say(word: &Word) -> Result<(), CliError> {
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
