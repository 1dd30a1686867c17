//! `ping`.

use std::process::ExitCode;

use serde_json::json;

use super::exit::CliError;
use super::options::Options;
use super::say;

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// How many times
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    count: u32,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    for _ in 0..args.count {
        let took = client.ping().await?;
        if options.json {
            say(&json!({ "ok": true, "rtt_us": took.as_micros() as u64 }).to_string())?;
        } else {
            say(&format!("answered in {:.3} ms", took.as_secs_f64() * 1000.0))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
