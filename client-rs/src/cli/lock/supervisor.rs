//! The supervisor: starts the command, ends its group in time. See the parent module.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::signal::unix::{SignalKind, signal};

use super::super::exit::{CliError, FAILED, LOST};
use super::super::tty::Foreground;
use super::report::note;
use super::{EXEC, KEEPER, Order, Reply, Word};

/// Longest time between two looks at the clock: a machine that slept past the end is noticed
/// within this time after it wakes.
const LOOK: Duration = Duration::from_millis(100);
/// KILL comes this much before the end of validity, so that the processes are gone at it.
const KILL_LEAD: Duration = Duration::from_millis(20);
/// How long the keeper may take to give the lock back.
const GOODBYE: Duration = Duration::from_secs(12);
/// How long it may take when the validity is over and nothing depends on it any more.
const GOODBYE_LOST: Duration = Duration::from_millis(500);

/// The system's clock that runs through suspend, in nanoseconds.
pub(super) fn now_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The keeper as the supervisor sees it.
struct Keeper {
    child: Child,
    input: ChildStdin,
    words: Lines<BufReader<ChildStdout>>,
}

impl Keeper {
    /// Started in a group of its own, so that a terminal's signals do not reach it.
    async fn start(order: &Order) -> Result<Self, CliError> {
        let mut child = itself()?
            .arg(KEEPER)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(CliError::Io)?;
        let input = child.stdin.take().expect("it was piped");
        let words = BufReader::new(child.stdout.take().expect("it was piped")).lines();
        let mut keeper = Self { child, input, words };
        keeper.write(&serde_json::to_string(order).expect("an order is plain")).await;
        Ok(keeper)
    }

    async fn say(&mut self, reply: &Reply) {
        self.write(&serde_json::to_string(reply).expect("a reply is plain")).await;
    }

    /// A keeper that has gone is found out by its closed output.
    async fn write(&mut self, line: &str) {
        let _ = self.input.write_all(format!("{line}\n").as_bytes()).await;
    }

    /// Its next word; `None` when it has gone.
    async fn word(&mut self) -> Option<Word> {
        let line = self.words.next_line().await.ok()??;
        serde_json::from_str(&line).ok()
    }

    /// Lets it give the lock back and end; ends it if that takes longer.
    async fn dismiss(mut self, patience: Duration) {
        self.say(&Reply::Release).await;
        let goodbye = async {
            while self.word().await.is_some() {}
            let _ = self.child.wait().await;
        };
        if tokio::time::timeout(patience, goodbye).await.is_err() {
            // The command's group is gone; what the keeper holds ends with its TTL.
            let _ = self.child.kill().await;
        }
    }
}

fn itself() -> Result<Command, CliError> {
    Ok(Command::new(std::env::current_exe().map_err(CliError::Io)?))
}

/// The signals that are passed on to the command.
struct Signals {
    int: tokio::signal::unix::Signal,
    term: tokio::signal::unix::Signal,
    quit: tokio::signal::unix::Signal,
    hup: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> Result<Self, CliError> {
        let catch = |kind| signal(kind).map_err(CliError::Io);
        Ok(Self {
            int: catch(SignalKind::interrupt())?,
            term: catch(SignalKind::terminate())?,
            quit: catch(SignalKind::quit())?,
            hup: catch(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.int.recv() => Signal::INT,
            _ = self.term.recv() => Signal::TERM,
            _ = self.quit.recv() => Signal::QUIT,
            _ = self.hup.recv() => Signal::HUP,
        }
    }
}

pub(super) async fn run(
    order: &Order,
    command: &[OsString],
    grace: Duration,
    json: bool,
) -> Result<ExitCode, CliError> {
    let mut signals = Signals::new()?;
    let mut keeper = Keeper::start(order).await?;
    let word = loop {
        let word = tokio::select! {
            word = keeper.word() => word,
            // Not granted yet: the keeper cancels when its input closes.
            signal = signals.next() => return Ok(ExitCode::from(128 + signal.as_raw() as u8)),
        };
        match word {
            Some(Word::Place { position, waiters_total, held_by }) => {
                show_place(json, position, waiters_total, held_by);
            }
            word => break word,
        }
    };
    let (tokens, until_ns, slots) = match word {
        Some(Word::Held { tokens, until_ns, slots }) => (tokens, until_ns, slots),
        Some(Word::Failed { error, class, message, exit }) => {
            let object = json!({ "ok": false, "error": error, "class": class, "message": message });
            note(json, &object, &format!("{error}: {message}"));
            return Ok(ExitCode::from(exit));
        }
        _ => {
            note(json, &json!({ "ok": false, "error": "internal" }), "the keeper has ended");
            return Ok(ExitCode::from(FAILED));
        }
    };
    let child = match start(command, order, &tokens, &slots) {
        Ok(child) => child,
        Err(error) => {
            keeper.dismiss(GOODBYE).await;
            return Err(error);
        }
    };
    let group = Pid::from_raw(child.id().expect("it was not waited for").cast_signed());
    let group = group.expect("a process id is not 0");
    keeper.say(&Reply::Group { group: group.as_raw_nonzero().get() }).await;
    let terminal = Foreground::give_to(group);
    let watch = Watch { until_ns, grace, group, json, ending: Ending::No, keeper_gone: false };
    let code = watch.run(child, &mut keeper, &mut signals).await;
    drop(terminal);
    keeper.dismiss(if code == LOST { GOODBYE_LOST } else { GOODBYE }).await;
    Ok(ExitCode::from(code))
}

fn show_place(json: bool, position: u32, waiters_total: u32, held_by: Option<(String, u64)>) {
    let (label, token) = held_by.clone().unzip();
    let object = json!({
        "event": "place", "position": position, "waiters_total": waiters_total,
        "holder_label": label, "holder_token": token,
    });
    let held = held_by.map_or_else(
        || "nobody holds it now".to_owned(),
        |(label, token)| format!("{label} holds it, token {token}"),
    );
    note(json, &object, &format!("waits, {position} before it of {waiters_total} in all; {held}"));
}

/// The command, by way of `exec`, in a group of its own.
fn start(
    command: &[OsString],
    order: &Order,
    tokens: &[u64],
    slots: &[u32],
) -> Result<Child, CliError> {
    let tokens: Vec<_> = tokens.iter().map(u64::to_string).collect();
    let slots: Vec<_> = slots.iter().map(u32::to_string).collect();
    let mut start = itself()?;
    if order.takes_permits() {
        start.env("LEASEHOLD_SLOTS", slots.join(" "));
    }
    start
        .arg(EXEC)
        .arg(std::process::id().to_string())
        .arg("--")
        .args(command)
        .env("LEASEHOLD_KEY", &order.key)
        .env("LEASEHOLD_TOKEN", &tokens[0])
        .env("LEASEHOLD_TOKENS", tokens.join(" "))
        .process_group(0)
        .spawn()
        .map_err(CliError::Io)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Ending {
    No,
    /// TERM was sent because the lock is at its end.
    Asked,
    /// KILL was sent because the validity is over.
    Forced,
}

/// A running command and the end of its lock.
struct Watch {
    until_ns: u64,
    grace: Duration,
    group: Pid,
    json: bool,
    ending: Ending,
    keeper_gone: bool,
}

impl Watch {
    /// Runs until the command and its group are gone; returns the exit code.
    async fn run(mut self, mut child: Child, keeper: &mut Keeper, signals: &mut Signals) -> u8 {
        let status = loop {
            let next = self.act();
            tokio::select! {
                // The keeper says that the lock is lost before it kills the group: heard in that order.
                biased;
                word = keeper.word(), if !self.keeper_gone => self.hear(word),
                status = child.wait() => break status,
                signal = signals.next() => {
                    let _ = kill_process_group(self.group, signal);
                }
                () = tokio::time::sleep(next) => {}
            }
        };
        let lost = self.ending != Ending::No;
        self.sweep(keeper).await;
        match status {
            _ if lost => LOST,
            Ok(status) => code_of_status(status),
            Err(_) => FAILED,
        }
    }

    /// Does what the clock demands; returns how long nothing more is due.
    fn act(&mut self) -> Duration {
        let left = Duration::from_nanos(self.until_ns.saturating_sub(now_ns()));
        if left <= KILL_LEAD {
            self.end(Ending::Forced, Signal::KILL, "the lock's validity is over");
            return LOOK;
        }
        if left <= self.grace {
            self.end(Ending::Asked, Signal::TERM, "the lock is at its end");
            return left.saturating_sub(KILL_LEAD).min(LOOK);
        }
        left.saturating_sub(self.grace).min(LOOK)
    }

    /// Signals the group, once for each degree.
    fn end(&mut self, ending: Ending, signal: Signal, why: &str) {
        if self.ending >= ending {
            return;
        }
        self.ending = ending;
        let name = if ending == Ending::Forced { "KILL" } else { "TERM" };
        let object = json!({ "event": "ending", "signal": name, "message": why });
        note(self.json, &object, &format!("{why}: the command gets {name}"));
        let _ = kill_process_group(self.group, signal);
    }

    fn hear(&mut self, word: Option<Word>) {
        match word {
            Some(Word::Until { until_ns }) => self.until_ns = self.until_ns.max(until_ns),
            Some(Word::Lost { cause }) => {
                note(
                    self.json,
                    &json!({ "event": "lost", "cause": cause }),
                    &format!("the lock was lost ({cause})"),
                );
                self.until_ns = 0;
            }
            Some(Word::AtRisk { cause, remaining_ms }) => note(
                self.json,
                &json!({ "event": "at_risk", "cause": cause, "remaining_ms": remaining_ms }),
                &format!("the lock is at risk ({cause}); {remaining_ms} ms left"),
            ),
            Some(Word::Yield { who, why, within_ms }) => {
                let object = json!({
                    "event": "yield", "who": who, "why": why, "within_ms": within_ms,
                });
                let text = format!("{who} asks to yield within {within_ms} ms: {why}");
                note(self.json, &object, &format!("{text}: the command gets TERM"));
                let _ = kill_process_group(self.group, Signal::TERM);
            }
            Some(_) => {}
            None => {
                self.keeper_gone = true;
                let text = "the keeper has ended; the lock is not renewed any more";
                note(self.json, &json!({ "event": "keeper_gone", "message": text }), text);
            }
        }
    }

    /// Ends what the command left behind in its group: TERM, then KILL after the grace, or at the
    /// end of validity if that comes first.
    async fn sweep(&mut self, keeper: &mut Keeper) {
        if test_kill_process_group(self.group).is_err() {
            return;
        }
        if self.ending == Ending::No {
            let _ = kill_process_group(self.group, Signal::TERM);
        }
        let patience = self.grace.as_nanos() as u64;
        let kill_at = (now_ns() + patience).min(self.until_ns);
        let give_up_at = now_ns() + patience + 2_000_000_000;
        let mut killed = false;
        while test_kill_process_group(self.group).is_ok() && now_ns() < give_up_at {
            let over = now_ns() + KILL_LEAD.as_nanos() as u64 >= kill_at.min(self.until_ns);
            if over && !std::mem::replace(&mut killed, true) {
                let _ = kill_process_group(self.group, Signal::KILL);
            }
            tokio::select! {
                word = keeper.word(), if !self.keeper_gone => self.hear(word),
                () = tokio::time::sleep(Duration::from_millis(10)) => {}
            }
        }
    }
}

/// The command's own code, or 128 and the signal that ended it.
fn code_of_status(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128 + signal as u8,
        (None, None) => FAILED,
    }
}
