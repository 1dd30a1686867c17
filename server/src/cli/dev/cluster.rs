//! The child processes of a `dev` cluster.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::layout::{Layout, Place};
use super::{Failure, LOOK};
use crate::error::Exit;

/// Looks at children that were asked to stop, before they are killed: 10 s.
const STOP_LOOKS: u32 = 100;
/// Longest wait for a child's answer.
const ASK_TIMEOUT: Duration = Duration::from_millis(500);

struct Running {
    place: Place,
    child: Child,
}

/// A child that ended.
pub(super) struct Ended {
    pub(super) node: u16,
    pub(super) how: String,
    pub(super) last_line: String,
}

/// The children that run.
pub(super) struct Cluster {
    running: Vec<Running>,
}

impl Cluster {
    /// Starts every node. If one cannot be started, those before it are killed.
    pub(super) fn start(layout: &Layout) -> Result<Self, Failure> {
        let mut cluster = Self { running: Vec::new() };
        for place in &layout.nodes {
            match spawn(place) {
                Ok(child) => cluster.running.push(Running { place: place.clone(), child }),
                Err(error) => {
                    cluster.kill();
                    return Err((Exit::ChildFailed, format!("node {}: {error}", place.node)));
                }
            }
        }
        Ok(cluster)
    }

    /// True if every node says that it is ready.
    pub(super) fn all_ready(&self) -> bool {
        self.running.iter().all(|running| is_ready(running.place.admin))
    }

    /// The children that ended since the last call.
    pub(super) fn ended(&mut self) -> Vec<Ended> {
        let mut ended = Vec::new();
        self.running.retain_mut(|running| match running.child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                ended.push(report(&running.place, status));
                false
            }
            // Only a child that is not ours cannot be waited for.
            Err(error) => panic!("node {}: {error}", running.place.node),
        });
        ended
    }

    /// True if none runs.
    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Asks every child to stop, waits, and kills those that do not.
    pub(super) fn stop(&mut self) {
        for running in &self.running {
            let pid = i32::try_from(running.child.id()).ok().and_then(Pid::from_raw);
            if let Some(pid) = pid {
                // A child that has just ended needs no signal.
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        for _ in 0..STOP_LOOKS {
            self.ended();
            if self.is_empty() {
                return;
            }
            sleep(LOOK);
        }
        self.kill();
    }

    fn kill(&mut self) {
        for running in &mut self.running {
            eprintln!("leaseholdd dev: node {} is killed", running.place.node);
            // It may have ended meanwhile; either way it is gone after the wait.
            let _ = running.child.kill();
            let _ = running.child.wait();
        }
        self.running.clear();
    }
}

fn spawn(place: &Place) -> io::Result<Child> {
    let log = File::options().create(true).append(true).open(&place.log)?;
    Command::new(std::env::current_exe()?)
        .arg("start")
        .arg("--config")
        .arg(&place.config)
        .arg("--parent-pid")
        .arg(std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        // The terminal's Ctrl-C reaches `dev` alone, which stops the nodes in order.
        .process_group(0)
        .spawn()
}

fn report(place: &Place, status: ExitStatus) -> Ended {
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => {
            let known = Exit::ALL.iter().find(|exit| i32::from(exit.code()) == code);
            format!("exit code {code} ({})", known.map_or("unknown", |exit| exit.name()))
        }
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown".to_owned(),
    };
    let log = fs::read_to_string(&place.log).unwrap_or_default();
    let last_line = log.lines().last().unwrap_or("its log is empty").to_owned();
    Ended { node: place.node, how, last_line }
}

fn is_ready(port: u16) -> bool {
    let ask = || -> io::Result<bool> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let mut stream = TcpStream::connect_timeout(&address, ASK_TIMEOUT)?;
        stream.set_read_timeout(Some(ASK_TIMEOUT))?;
        stream
            .write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        Ok(&status == b"HTTP/1.1 200")
    };
    // A node that does not answer is not ready yet.
    ask().unwrap_or(false)
}
