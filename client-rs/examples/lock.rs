//! Does some work under a lock and stops as soon as the lock is lost.
//!
//! `cargo run --example lock -- 127.0.0.1:7400 jobs/nightly`

use std::error::Error;
use std::time::Duration;

use leasehold::{Client, Guard, HoldState};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let endpoints = arguments.next().unwrap_or_else(|| "127.0.0.1:7400".to_owned());
    let key = arguments.next().unwrap_or_else(|| "example".to_owned());

    let client = Client::connect(&endpoints).await?;
    let session = client.session(Duration::from_secs(10))?;
    println!("waiting for {key}");
    let guard = session.lock(key).wait(Duration::from_secs(60)).acquire().await?;
    println!("holding {} under token {}", guard.key(), guard.token());

    tokio::select! {
        cause = guard.lost() => {
            // Nothing that depends on the lock may be done any more.
            println!("lost: {}", cause.name());
            return Ok(());
        }
        () = work(&guard) => {}
    }
    guard.release().await?;
    session.close().await?;
    println!("done");
    Ok(())
}

/// Work in small steps, each with the token in it.
async fn work(guard: &Guard) {
    for step in 1..=5 {
        if let HoldState::AtRisk { cause, remaining } = guard.state() {
            println!("at risk ({}), {} ms left", cause.name(), remaining.as_millis());
        }
        println!("step {step}, written with token {}", guard.token());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
