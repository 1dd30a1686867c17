//! `elect NAME VALUE [-- CMD ARGS…]`: leads an election while a command runs, or until a signal.
//!
//! With a command it is `lock` with a value: the command is gone before the leadership's validity
//! is.

use std::ffi::OsString;
use std::process::ExitCode;

use leasehold::{HoldState, Leadership};
use rustix::process::Signal;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::exit::{CliError, LOST};
use super::lock::{self, Job, Term};
use super::options::Options;
use super::say;

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// The election
    name: String,
    /// What all see while this candidate leads: its address, say; at most 4096 bytes
    value: String,
    #[command(flatten)]
    term: Term,
    /// Runs as long as this candidate leads; without it, leads until INT or TERM
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    if args.command.is_empty() {
        return lead(options, args).await;
    }
    let job = Job {
        key: args.name,
        also: Vec::new(),
        each: false,
        value: Some(args.value),
        shared: false,
        permits: None,
        show_place: false,
        term: args.term,
        command: args.command,
    };
    lock::run_job(options, job).await
}

async fn lead(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let mut int = signal(SignalKind::interrupt()).map_err(CliError::Io)?;
    let mut term = signal(SignalKind::terminate()).map_err(CliError::Io)?;
    let mut stopped = std::pin::pin!(async {
        tokio::select! {
            _ = int.recv() => Signal::INT,
            _ = term.recv() => Signal::TERM,
        }
    });
    let client = options.connect().await?;
    let session = client.session(args.term.ttl())?;
    let mut campaign = client
        .election(args.name)
        .campaign(&session, args.value)
        .lock_delay(args.term.lock_delay());
    if let Some(wait) = args.term.wait() {
        campaign = campaign.wait(wait);
    }
    let leadership = tokio::select! {
        elected = campaign => elected?,
        signal = &mut stopped => {
            session.close().await?;
            return Ok(ExitCode::from(128 + signal.as_raw() as u8));
        }
    };
    let (name, token) = (leadership.name().to_owned(), leadership.token().0);
    let elected = json!({ "event": "elected", "name": name, "token": token });
    tell(options.json, &elected, &format!("leads {name} under token {token}"))?;
    let mut yields = if args.term.yields() { Some(leadership.yields()?) } else { None };
    tokio::select! {
        () = follow(options.json, &leadership) => return Ok(ExitCode::from(LOST)),
        asked = lock::next_yield(&mut yields) => {
            let (who, why) = (asked.who, asked.why);
            let object = json!({ "event": "yield", "who": who, "why": why });
            tell(options.json, &object, &format!("{who} asks to yield: {why}"))?;
        }
        _ = &mut stopped => {}
    }
    leadership.resign().await?;
    session.close().await?;
    let resigned = json!({ "event": "resigned", "name": name, "token": token });
    tell(options.json, &resigned, &format!("resigned from {name}"))?;
    Ok(ExitCode::SUCCESS)
}

/// Tells of risks until the leadership is lost.
async fn follow(json: bool, leadership: &Leadership) {
    let mut watch = leadership.watch();
    // What cannot be written any more is no reason to resign.
    while let Some(state) = watch.changed().await {
        match state {
            HoldState::AtRisk { cause, remaining } => {
                let (cause, left) = (cause.name(), remaining.as_millis() as u64);
                let object = json!({ "event": "at_risk", "cause": cause, "remaining_ms": left });
                let _ = tell(json, &object, &format!("at risk ({cause}); {left} ms left"));
            }
            HoldState::Lost(cause) => {
                let object = json!({ "event": "lost", "cause": cause.name() });
                let _ = tell(json, &object, &format!("lost ({})", cause.name()));
                return;
            }
            _ => {
                let _ = tell(json, &json!({ "event": "held" }), "safe again");
            }
        }
    }
}

fn tell(json: bool, object: &serde_json::Value, text: &str) -> Result<(), CliError> {
    if json { say(&object.to_string()) } else { say(text) }
}
