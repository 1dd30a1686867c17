//! `leasehold pipe` against a real cluster: a request, its reply, and news, each within a limit.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use leasehold_bench::cluster::{Cluster, PATIENCE};
use leasehold_bench::process::{Process, binary};
use serde_json::Value;

/// A running pipe, ended when dropped.
pub(crate) struct Pipe {
    process: Process,
    lines: Receiver<Value>,
    /// Lines that were passed over.
    kept: Vec<Value>,
    next_id: u64,
}

impl Pipe {
    /// Over these nodes.
    pub(crate) fn start(cluster: &Cluster, nodes: &[u64]) -> Self {
        let list: Vec<String> = nodes.iter().map(|id| cluster.endpoint(*id).to_string()).collect();
        let mut command = Command::new(binary("leasehold").expect("built"));
        command.args(["pipe", "--label", "by-pipe", "--endpoints"]).arg(list.join(","));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::spawn(command).expect("it starts");
        let out = BufReader::new(process.child().stdout.take().expect("piped"));
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let line = serde_json::from_str(&line).expect("JSON");
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let mut pipe = Self { process, lines, kept: Vec::new(), next_id: 1 };
        pipe.news("ready");
        pipe
    }

    /// Sends a request; its id.
    pub(crate) fn send(&mut self, mut request: Value) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        request["id"] = id.into();
        let input = self.process.child().stdin.as_mut().expect("piped");
        writeln!(input, "{request}").expect("it listens");
        id
    }

    /// The reply to a request.
    pub(crate) fn reply(&mut self, id: u64) -> Value {
        self.until(&format!("a reply to {id}"), |line| line["id"] == id)
    }

    /// Sends a request and waits for its reply.
    pub(crate) fn ask(&mut self, request: Value) -> Value {
        let id = self.send(request);
        self.reply(id)
    }

    /// The same, which must succeed.
    pub(crate) fn done(&mut self, request: Value) -> Value {
        let asked = request.to_string();
        let reply = self.ask(request);
        assert_eq!(reply["ok"], true, "{asked}: {reply}");
        reply
    }

    /// The next news of this kind.
    pub(crate) fn news(&mut self, event: &str) -> Value {
        self.until(event, |line| line["event"] == event)
    }

    /// The next line that fits; others are kept.
    pub(crate) fn until(&mut self, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
        if let Some(index) = self.kept.iter().position(&fits) {
            return self.kept.remove(index);
        }
        loop {
            let line = self.lines.recv_timeout(PATIENCE);
            let line = line.unwrap_or_else(|_| panic!("no {what}; but {:?}", self.kept));
            if fits(&line) {
                return line;
            }
            self.kept.push(line);
        }
    }
}
