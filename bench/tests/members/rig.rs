//! What the tests of the membership share: the command line, and the load with its verdict.

use std::process::{Command, Stdio};
use std::time::Duration;

use leasehold_bench::check::Needs;
use leasehold_bench::cluster::{Cluster, PATIENCE};
use leasehold_bench::contention::{Contention, Plan};
use leasehold_bench::finals;
use leasehold_bench::history::{Record, Recorder};
use leasehold_bench::judge::judge;
use leasehold_bench::process::{Process, binary};
use serde_json::Value;

/// Longest change of the membership on a busy machine.
pub(crate) const CHANGE_LIMIT: Duration = Duration::from_mins(1);

/// A command of `leasehold` against these nodes.
pub(crate) fn cli(cluster: &Cluster, nodes: &[u64], args: &[&str]) -> Command {
    let list: Vec<String> = nodes.iter().map(|id| cluster.endpoint(*id).to_string()).collect();
    let mut command = Command::new(binary("leasehold").expect("built"));
    command.arg("--endpoints").arg(list.join(",")).arg("--json").args(args);
    command.stdin(Stdio::null());
    command
}

/// Runs it; its object and its exit code.
pub(crate) fn run(cluster: &Cluster, nodes: &[u64], args: &[&str]) -> (Value, i32) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (out, err) = (dir.path().join("out"), dir.path().join("err"));
    let file = |path| std::fs::File::create(path).expect("a file");
    let mut command = cli(cluster, nodes, args);
    command.stdout(file(&out)).stderr(file(&err));
    let mut process = Process::spawn(command).expect("it starts");
    let status = process.wait(CHANGE_LIMIT);
    let text = |path| std::fs::read_to_string(path).unwrap_or_default();
    let status =
        status.unwrap_or_else(|error| panic!("{args:?}: {error}: {} {}", text(&out), text(&err)));
    let object = text(&out).lines().last().and_then(|line| serde_json::from_str(line).ok());
    let object = object.unwrap_or_else(|| panic!("{args:?}: {status}: {}", text(&err)));
    (object, status.code().unwrap_or(-1))
}

/// The same, which must succeed.
pub(crate) fn done(cluster: &Cluster, nodes: &[u64], args: &[&str]) -> Value {
    let (object, code) = run(cluster, nodes, args);
    assert_eq!(code, 0, "{args:?}: {object}");
    object
}

/// The same, which must be refused; the error's name.
pub(crate) fn refused(cluster: &Cluster, nodes: &[u64], args: &[&str]) -> String {
    let (object, code) = run(cluster, nodes, args);
    assert_eq!(code, 123, "{args:?}: {object}");
    object["error"].as_str().unwrap_or_default().to_owned()
}

/// The nodes of a standing.
pub(crate) fn standing(members: &Value, standing: &str) -> Vec<u64> {
    let all = members["members"].as_array().expect("a list");
    let those = all.iter().filter(|member| member["standing"] == standing);
    those.map(|member| member["node"].as_u64().expect("a number")).collect()
}

/// Starts one more node and lets it wait for admission.
pub(crate) fn spare(cluster: &mut Cluster) -> u64 {
    let node = cluster.add_joining().expect("ports");
    cluster.spawn(node).expect("started");
    waits_for_admission(cluster, node);
    node
}

/// Waits until a node that was started waits for admission.
pub(crate) fn waits_for_admission(cluster: &Cluster, node: u64) {
    let waits = || matches!(cluster.admin(node, "/readyz"), Ok((503, text)) if text.contains("waiting for admission"));
    super::bare::until("the new node waits for admission", waits);
}

fn peer(cluster: &Cluster, node: u64) -> String {
    cluster.addresses(node).peer.to_string()
}

/// Adds a node that is started for it.
pub(crate) fn add(cluster: &mut Cluster, ask: &[u64]) -> u64 {
    let node = spare(cluster);
    let peer = peer(cluster, node);
    let members = done(cluster, ask, &["member", "add", &node.to_string(), "--peer", &peer]);
    assert!(standing(&members, "voter").contains(&node), "{members}");
    node
}

/// Replaces a node by one that is started for it.
pub(crate) fn replace(cluster: &mut Cluster, ask: &[u64], old: u64) -> u64 {
    let node = spare(cluster);
    let (peer, new) = (peer(cluster, node), node.to_string());
    let args = ["member", "replace", &old.to_string(), &new, "--peer", &peer];
    let members = done(cluster, ask, &args);
    let voters = standing(&members, "voter");
    assert!(voters.contains(&node) && !voters.contains(&old), "{members}");
    node
}

/// Removes a node, waits until it knows, and ends it.
pub(crate) fn remove(cluster: &mut Cluster, ask: &[u64], node: u64) {
    let members = done(cluster, ask, &["member", "remove", &node.to_string()]);
    assert!(standing(&members, "removed").contains(&node), "{members}");
    bury(cluster, node);
}

/// Waits until a removed node serves nobody, and ends it. Its clients have a while to find that out.
pub(crate) fn bury(cluster: &mut Cluster, node: u64) {
    let out = || matches!(cluster.admin(node, "/readyz"), Ok((503, text)) if text.contains("removed from the cluster"));
    super::bare::until("the removed node knows", out);
    std::thread::sleep(Duration::from_secs(2));
    cluster.terminate(node, PATIENCE).expect("ended");
    cluster.forget(node);
}

/// Recorded clients of both kinds.
pub(crate) struct Load {
    pub(crate) recorder: Recorder,
    pub(crate) load: Contention,
}

impl Load {
    pub(crate) fn start(cluster: &Cluster) -> Self {
        let recorder = Recorder::new();
        let plan = Plan { clients: 6, keys: 3, hold_ms_max: 10, learns: true, ..Plan::default() };
        let mut load = Contention::start(&cluster.endpoints(), &recorder, &plan);
        let library = Plan { clients: 3, first_client: 50, ..plan };
        load.add_library_clients(&cluster.endpoints(), &recorder, &library);
        let load = Self { recorder, load };
        load.goes_on();
        load
    }

    /// Grants are made now.
    pub(crate) fn goes_on(&self) {
        assert!(self.load.progress(30, PATIENCE), "no grants");
    }

    /// No session was lost and no call is stuck, all nodes agree, and no checker objects.
    pub(crate) fn end(self, cluster: &Cluster) {
        let lost = self.load.lost();
        assert_eq!(lost, 0, "lost sessions");
        self.end_after_an_outage(cluster);
    }

    /// The same where there was no majority for a while: sessions may have ended meanwhile.
    pub(crate) fn end_after_an_outage(self, cluster: &Cluster) {
        self.goes_on();
        self.load.freeze();
        let end = finals::read(&cluster.endpoints(), 0, PATIENCE).expect("a final state");
        self.recorder.push(Record::Final(end));
        assert_eq!(self.load.stuck(), 0, "calls without an answer");
        self.load.end();
        let nodes = cluster.ids().count() as u64;
        let needs = Needs { handovers: 50, tokens: 100, acked: 100, nodes, ..Needs::default() };
        let report = judge(&self.recorder, &needs).unwrap_or_else(|report| panic!("\n{report}"));
        println!("{report}");
        super::bare::assert_no_panic(cluster);
    }
}
