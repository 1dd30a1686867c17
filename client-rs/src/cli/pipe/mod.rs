//! `pipe`: one session over standard input and output, for scripts and for languages without a
//! binding. A JSON object a line in each direction.
//!
//! Requests have an `id` (a number or a string, chosen by the caller; it must not be one that is
//! still open) and an `op`:
//!
//! ```text
//! {"id":1,"op":"acquire","key":"k","wait_ms":5000,"value":"v","ttl_ms":10000}
//! {"id":2,"op":"release","key":"k","token":7}
//! {"id":3,"op":"get","key":"k"}
//! {"id":4,"op":"renew","key":"k"}
//! {"id":5,"op":"remaining","key":"k"}
//! {"id":6,"op":"cancel","target":1}
//! {"id":11,"op":"watch","key":"k","from":"now"}
//! ```
//!
//! `wait_ms` 0 does not wait; without it the wait has no limit. `value` is optional. With `ttl_ms`
//! the hold has a lease of its own, which only `renew` renews. `token` is optional; if it is not
//! the present one, the request is refused with `not_owner`. `cancel` ends the acquire (or the
//! `watch`) whose id is `target`, which then fails with `cancelled`.
//!
//! Each request gets one reply with its `id`, as soon as it is decided: a waiting acquire holds
//! nothing up.
//!
//! ```text
//! {"id":1,"ok":true,"key":"k","token":7,"remaining_ms":9950}
//! {"id":2,"ok":false,"error":"not_owner","class":"not_applied","message":"…"}
//! ```
//!
//! A line without an `id` is news:
//!
//! ```text
//! {"event":"ready","protocol":1,"ttl_ms":10000}
//! {"event":"at_risk","key":"k","token":7,"cause":"no_quorum","remaining_ms":4000}
//! {"event":"held","key":"k","token":7,"remaining_ms":9900}
//! {"event":"lost","key":"k","token":7,"cause":"expired"}
//! ```
//!
//! `watch` watches a `key`, all keys with a `prefix`, or, without both, everything; `from` is `now`,
//! `state`, or the `cursor` of a former line. It stays open until `cancel` or until it is cut off,
//! and its reply is an error then. What it tells has its id as `watch`:
//!
//! ```text
//! {"event":"change","watch":11,"shard":0,"revision":8,"events":[{"kind":"granted",…}],"cursor":"…"}
//! {"event":"state","watch":11,"shard":0,"revision":8,"first":true,"last":true,"keys":[…],"cursor":"…"}
//! {"event":"progress","watch":11,"shard":0,"revision":9,"cursor":"…"}
//! {"event":"no_quorum","watch":11}
//! {"event":"quorum","watch":11}
//! ```
//!
//! `lost` comes once for a hold. At the end of input everything is given back, the session is
//! closed, and the exit code is 0.
//!
//! Limits: a line has at most 64 KiB, at most 4096 requests are open at a time; what goes beyond
//! is answered (`malformed`, `busy`) and changes nothing. If the caller does not read, nothing more
//! is read from it; renewals go on.

mod ask;
mod request;
mod serve;

use std::process::ExitCode;
use std::time::Duration;

use super::exit::CliError;
use super::options::{Options, ttl};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// Time to live of the session, 1s to 10m
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = ttl)]
    ttl: Duration,
    /// Shown in listings
    #[arg(long)]
    label: Option<String>,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let session = match args.label {
        Some(label) => client.labelled_session(args.ttl, label)?,
        None => client.session(args.ttl)?,
    };
    serve::run(client, session, args.ttl).await?;
    Ok(ExitCode::SUCCESS)
}
