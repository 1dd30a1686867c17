//! The README's Rust, as code: each of its blocks is here, word for word, and so compiles.

use std::error::Error;
use std::future::pending;
use std::time::Duration;

use leasehold::{Client, Observed, Session, Token, WatchFrom, WatchItem, WatchTarget};

const README: &str = include_str!("../../../README.md");
const THIS: &str = include_str!("mod.rs");

type Done = Result<(), Box<dyn Error>>;

async fn work(_: Token) {
    pending::<()>().await;
}

async fn lead(_: Token) {
    pending::<()>().await;
}

#[rustfmt::skip]
#[expect(dead_code, reason = "it is there to be compiled")]
async fn lock() -> Done {
    let client = Client::connect("10.0.0.1:7400,10.0.0.2:7400,10.0.0.3:7400").await?;
    let session = client.session(Duration::from_secs(15))?;

    let guard = session.lock("accounts/42").wait(Duration::from_secs(30)).acquire().await?;
    let token = guard.token();                 // goes into every write that the lock protects

    tokio::select! {
        cause = guard.lost() => eprintln!("stop: {}", cause.name()),
        () = work(token) => guard.release().await?,
    }
    Ok(())
}

#[rustfmt::skip]
#[expect(dead_code, reason = "it is there to be compiled")]
async fn election(client: &Client, session: Session) -> Done {
    let election = client.election("elections/eu");
    let leadership = election.campaign(&session, "10.0.0.7:8080").await?;
    leadership.proclaim("10.0.0.7:8081").await?;              // election.leader() shows it, linearizably

    tokio::select! {
        cause = leadership.lost() => eprintln!("stop: {}", cause.name()),
        () = lead(leadership.token()) => leadership.resign().await?,
    }

    let mut observation = election.observe()?;                // anywhere else: every leader, "nobody", "not known"
    while let Observed::Leader(leader) = observation.next().await? {
        println!("{} leads", leader.label);
    }
    Ok(())
}

#[rustfmt::skip]
#[expect(dead_code, reason = "it is there to be compiled")]
async fn watch(client: &Client) -> Done {
    let mut watch = client.watch(&WatchTarget::prefix("jobs/"), &WatchFrom::Now)?;
    loop {
        match watch.next().await? {
            WatchItem::Change { revision, events, .. } => println!("{revision}: {events:?}"),
            WatchItem::State { keys, .. } => println!("something was missed; now: {keys:?}"),
            WatchItem::NoQuorum => println!("what follows may be late"),
            _ => {}
        }
    }
}

/// Without indentation.
fn lines(text: &str) -> String {
    text.lines().map(|line| line.trim().to_owned() + "\n").collect()
}

#[test]
fn the_readmes_rust_compiles() {
    let blocks: Vec<&str> = README
        .split("```rust\n")
        .skip(1)
        .map(|rest| rest.split("```").next().expect("there is a first part"))
        .collect();
    assert!(blocks.len() >= 3, "a lock, an election and a watch");
    for block in blocks {
        assert!(lines(THIS).contains(&lines(block)), "not in this file, word for word:\n{block}");
    }
}
