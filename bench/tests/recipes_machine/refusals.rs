//! Machines that forbid `io_uring` or lock little memory, and signals that mean nothing.

use std::process::{Command, Output, Stdio};

use leasehold_bench::clock::Deadline;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::deny::deny;
use leasehold_bench::process::{self, POLL, binary};
use leasehold_bench::worker::{Event, Order, Settings, Worker};
use rustix::process::Signal;

use crate::bare::{self, until};

const TTL_MS: u32 = 600_000;
/// The documented exit code.
const IO_URING: i32 = 7;

fn alone(spec: Spec) -> Spec {
    Spec { nodes: 1, ..spec }
}

/// Runs a node that is expected to end by itself at its start.
fn run(cluster: &Cluster, change: impl FnOnce(&mut Command)) -> Output {
    let mut command = cluster.command(1).expect("a command");
    change(&mut command);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    let deadline = Deadline::after(PATIENCE);
    while child.try_wait().expect("a child").is_none() {
        if deadline.passed() {
            child.kill().expect("killed");
            panic!("it serves: {:?}", child.wait_with_output());
        }
        std::thread::sleep(POLL);
    }
    child.wait_with_output().expect("ended")
}

fn refused(output: &Output, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(IO_URING), "{} {said}", output.status);
    let last = said.lines().last().unwrap_or_default();
    assert!(words.iter().all(|word| last.contains(word)), "not {words:?}: {said}");
    assert!(!said.contains("panicked") && !said.contains("backtrace"), "{said}");
    println!("{last}");
}

/// B125: where `io_uring` is forbidden, a server says so in one line with the remedy, whichever of
/// its calls is denied and however. Clients do without.
#[test]
fn a_machine_without_io_uring_is_told_so_and_clients_work_there() {
    let _alone = process::alone();
    let cluster = Cluster::prepare(alone(Spec::default())).expect("directories");
    for (call, errno, words) in [
        (libc::SYS_io_uring_setup, libc::EPERM, ["seccomp", "kernel.io_uring_disabled=0"]),
        (libc::SYS_io_uring_setup, libc::ENOSYS, ["kernel", "5.15"]),
        (libc::SYS_io_uring_setup, libc::ENOMEM, ["memory", "ulimit -l"]),
        (libc::SYS_io_uring_enter, libc::EPERM, ["seccomp", "io_uring_enter"]),
        (libc::SYS_io_uring_register, libc::EPERM, ["seccomp", "io_uring_register"]),
        (libc::SYS_io_uring_register, libc::EINVAL, ["io_uring", "5.15"]),
    ] {
        refused(&run(&cluster, |command| deny(command, call, errno)), &words);
    }
    drop(cluster);

    let cluster = Cluster::start(alone(Spec::default())).expect("a cluster");
    let mut command = Command::new(binary("leasehold").expect("built"));
    command.env("LEASEHOLD_ENDPOINTS", cluster.endpoint_list());
    command.args(["lock", "k", "--ttl", "10s", "--", "true"]);
    for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter] {
        deny(&mut command, call, libc::EPERM);
    }
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
}

/// Behind a limit on locked memory that is in force for a superuser's process, too.
fn limited(command: &Command, kib: u64) -> Command {
    let mut limited = Command::new("setpriv");
    limited.args(["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "sh", "-c"]);
    limited.arg(format!("ulimit -l {kib}; exec \"$0\" \"$@\""));
    limited.arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
    limited
}

/// B126: too little lockable memory is told with what is needed; what the text calls enough is.
#[test]
fn lockable_memory_is_refused_or_enough() {
    let _alone = process::alone();
    let cluster = Cluster::prepare(alone(Spec::default())).expect("directories");
    let small = |command: &mut Command| *command = limited(command, 64);
    refused(&run(&cluster, small), &["65536 bytes", "524288", "ulimit -l 512"]);
    let spec = Spec { shards: 8, ..alone(Spec::default()) }.flag("cores", 8);
    let cluster = Cluster::prepare(spec).expect("directories");
    let many = |command: &mut Command| *command = limited(command, 512);
    refused(&run(&cluster, many), &["524288 bytes", "1572864", "ulimit -l 1536"]);

    for (cores, kib) in [(1, 512), (8, 1_536)] {
        let spec = Spec { shards: cores, ..alone(Spec::default()) }.flag("cores", cores);
        let mut cluster = Cluster::prepare(spec).expect("directories");
        let command = limited(&cluster.command(1).expect("a command"), kib);
        cluster.spawn_as(1, command).expect("started");
        cluster.wait_ready(PATIENCE).expect("enough");
        let mut wires: Vec<_> =
            (0..200).map(|_| bare::connect(cluster.addresses(1).client)).collect();
        for wire in &mut wires {
            bare::open_lease(wire, TTL_MS);
        }
        println!("{cores} cores serve {} connections with {kib} KiB", wires.len());
    }
}

/// B129: signals without a meaning change nothing at a server under load, and stops in order.
#[test]
fn signals_without_a_meaning_change_nothing() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(alone(Spec::default())).expect("a cluster");
    let mut wire = bare::connect(cluster.addresses(1).client);
    let mut lease = bare::open_lease(&mut wire, TTL_MS);
    let pid = cluster.pid(1);
    for round in 0..200 {
        for signal in [Signal::USR1, Signal::USR2, Signal::HUP, Signal::PIPE, Signal::WINCH] {
            cluster.signal(1, signal).expect("it lives");
        }
        let number = 1 + 3 * round;
        let grant = bare::grant(&mut wire, &lease, number, "k");
        bare::outcome(&mut wire, &lease.release(number + 2, "k", grant.token));
        lease.floor = number + 2;
    }
    assert_eq!((cluster.pid(1), bare::term(&cluster)), (pid, 1), "another process or election");

    // A program with the client in it: PIPE is ignored by Rust programs, WINCH by default.
    let store = leasehold_bench::store::Store::start(leasehold_bench::history::Recorder::new());
    let settings = Settings {
        name: "signalled".into(),
        endpoints: cluster.endpoint_list(),
        key: "w".into(),
        ttl_ms: 5_000,
        store: store.as_ref().expect("a store").addr(),
        slow_road: store.as_ref().expect("a store").addr(),
    };
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_demo"));
    let mut worker = Worker::start(program, &settings).expect("a worker");
    let held = |event: &Event| match event {
        Event::State { held, .. } => Some(*held),
        _ => None,
    };
    until("granted", || matches!(worker.event(PATIENCE), Ok(Event::Granted { .. })));
    for _ in 0..20 {
        worker.signal(Signal::PIPE).expect("it lives");
        worker.signal(Signal::WINCH).expect("it lives");
        assert!(worker.ask(&Order::Check, PATIENCE, held).expect("it answers"));
    }
    worker.finish(PATIENCE).expect("in order");
    let status = cluster.terminate(1, PATIENCE).expect("it ends");
    assert!(status.success(), "{status}: {}", cluster.log(1));
    bare::assert_no_panic(&cluster);
}
