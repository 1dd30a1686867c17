//! `leaseholdd dev`: a cluster of child processes on this machine.
//!
//! Owns the children: it writes their configurations and a random secret, starts them from this
//! very binary, prints the endpoints once all are ready, and stops them when asked. If it is
//! killed itself, the kernel kills them. A node that ends later is reported, not restarted: killing
//! one is what such a cluster is for.

mod cluster;
mod layout;

use std::path::PathBuf;
use std::time::Duration;

use self::cluster::Cluster;
use self::layout::Layout;
use crate::error::Exit;
use crate::shutdown::Shutdown;

/// What `dev` was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Number of nodes.
    pub nodes: u16,
    /// Where to keep everything; `None` for a directory that is removed at the end.
    pub dir: Option<PathBuf>,
    /// The first of three ports per node; 0 for any that are free.
    pub port: u16,
}

/// How often children are looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Runs until a signal, or until every node has ended.
pub fn run(options: &Options, shutdown: &Shutdown) -> Exit {
    match start(options, shutdown) {
        Ok(exit) => exit,
        Err((exit, what)) => {
            eprintln!("leaseholdd dev: {what}");
            exit
        }
    }
}

type Failure = (Exit, String);

fn start(options: &Options, shutdown: &Shutdown) -> Result<Exit, Failure> {
    let layout = Layout::make(options).map_err(|what| (Exit::Usage, what))?;
    let mut cluster = Cluster::start(&layout)?;
    let outcome = supervise(&layout, &mut cluster, shutdown);
    cluster.stop();
    match &outcome {
        Ok(_) => layout.clean(),
        Err(_) => eprintln!("leaseholdd dev: everything is kept in {}", layout.dir.display()),
    }
    outcome
}

fn supervise(layout: &Layout, cluster: &mut Cluster, shutdown: &Shutdown) -> Result<Exit, Failure> {
    while !cluster.all_ready() {
        if let Some(ended) = cluster.ended().pop() {
            let what = format!("node {} ended: {}; {}", ended.node, ended.how, ended.last_line);
            return Err((Exit::ChildFailed, what));
        }
        if shutdown.wait_timeout(LOOK) {
            return Ok(Exit::Ok);
        }
    }
    println!("LEASEHOLD_ENDPOINTS={}", layout.endpoints());
    eprintln!("{} nodes are ready; data and logs: {}", layout.nodes.len(), layout.dir.display());
    while !shutdown.wait_timeout(LOOK) {
        for ended in cluster.ended() {
            eprintln!("node {} ended: {}; {}", ended.node, ended.how, ended.last_line);
            eprintln!("  to start it again: {}", layout.start_line(ended.node));
        }
        if cluster.is_empty() {
            return Err((Exit::ChildFailed, "every node has ended".to_owned()));
        }
    }
    Ok(Exit::Ok)
}
