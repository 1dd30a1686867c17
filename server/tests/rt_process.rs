//! What concerns a whole process: the watchdog's end, limits on memory and descriptors, idle cost.
//!
//! Each case runs in a process of its own, started by the test of the same name without `child_`.

use std::fs;
use std::io::Read;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::process::{Command, Output};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use leasehold_server::rt::blocking;
use leasehold_server::rt::executor::{ExecutorConfig, ProbeError, probe, start};
use leasehold_server::rt::glommio::GlommioRt;
use leasehold_server::rt::inbox::inbox;
use leasehold_server::rt::net::{Acceptor, Listener, adopt};
use openraft_rt::AsyncRuntime;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

const STALL_EXIT_CODE: i32 = 71;

fn run_child(name: &str) -> Output {
    let this = std::env::current_exe().expect("a test has a file");
    let child = Command::new(this).args([name, "--exact", "--ignored", "--nocapture"]).output();
    child.expect("the test's own file runs")
}

fn assert_passed(output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert!(text.contains("1 passed"), "the child's test exists: {text}");
}

fn limit(resource: Resource, current: u64) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: Some(current), maximum }).expect("lowering is allowed");
}

#[test]
fn a_core_that_stands_still_ends_the_process() {
    let output = run_child("child_core_that_stands_still");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(STALL_EXIT_CODE), "{errors}");
    assert!(errors.contains("core 1 made no progress for 300ms"), "{errors}");
}

#[test]
#[ignore = "run by its parent"]
fn child_core_that_stands_still() {
    let config = ExecutorConfig {
        stall_limit: Duration::from_millis(300),
        ..ExecutorConfig::new(STALL_EXIT_CODE)
    };
    let executors = start(&config, vec![(), ()], |core, ()| async move {
        if core.id == 1 {
            thread::park();
        }
        std::future::pending::<()>().await;
    });
    executors.expect("io_uring is available").join();
}

#[test]
fn too_little_lockable_memory_is_refused_with_both_numbers() {
    assert_passed(&run_child("child_with_little_lockable_memory"));
}

#[test]
#[ignore = "run by its parent"]
fn child_with_little_lockable_memory() {
    limit(Resource::Memlock, 100_000);
    let error = probe(1).expect_err("too little");
    assert!(matches!(error, ProbeError::LockedMemory { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("100000 bytes") && text.contains("ulimit -l 512"), "{text}");
}

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("Linux").count()
}

#[test]
fn running_out_of_descriptors_delays_connections_and_loses_none() {
    assert_passed(&run_child("child_without_descriptors"));
}

#[test]
#[ignore = "run by its parent"]
fn child_without_descriptors() {
    let listener = Listener::bind("127.0.0.1:0").expect("a free port");
    let addr = listener.local_addr().expect("bound");
    let (accepted, sockets) = crossbeam_channel::bounded::<OwnedFd>(8);
    let deliver = move |fd, _| accepted.send(fd).expect("the test receives");
    let acceptor = Acceptor::start(listener, "test", deliver).expect("a thread");
    let counters = acceptor.counters();
    // The clients' own descriptors come first, then every other one is taken.
    let [first, second] = [client_socket(), client_socket()];
    limit(Resource::Nofile, open_descriptors() as u64 + 8);
    let mut hoard = Vec::new();
    while let Ok(file) = fs::File::open("/dev/null") {
        hoard.push(file);
    }
    for client in [&first, &second] {
        client.connect(&addr.into()).expect("the kernel accepts for the listener");
    }
    while counters.failed.load(Ordering::Relaxed) < 3 {
        thread::yield_now();
    }
    // An accept that was waiting already had reserved its descriptor: one may have got through.
    assert!(sockets.len() <= 1, "{} accepted", sockets.len());
    drop(hoard);
    for _ in 0..2 {
        drop(sockets.recv().expect("accepted once there was a descriptor"));
    }
    assert_eq!(counters.accepted.load(Ordering::Relaxed), 2);
    let mut second = TcpStream::from(second);
    assert_eq!(second.read(&mut [0; 1]).expect("an orderly end"), 0);
}

fn client_socket() -> socket2::Socket {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
    socket.expect("a descriptor is free")
}

#[test]
fn connections_leave_no_descriptors_behind() {
    assert_passed(&run_child("child_with_many_connections"));
}

#[test]
#[ignore = "run by its parent"]
fn child_with_many_connections() {
    let listener = Listener::bind("127.0.0.1:0").expect("a free port");
    let addr = listener.local_addr().expect("bound");
    let (post, mut sockets) = inbox::<OwnedFd>(1);
    // Sockets that find the mailbox full are dropped, which closes them.
    let deliver = move |fd, _| drop(post.try_send(fd));
    let acceptor = Acceptor::start(listener, "test", deliver).expect("a thread");
    GlommioRt::run(async move {
        let mut before = 0;
        for round in 0..2_000 {
            let mut client = TcpStream::connect(addr).expect("listening");
            let socket = sockets.recv().await.expect("accepted");
            match round % 3 {
                // Never adopted, half dropped first, dropped together.
                0 => drop(socket),
                1 => {
                    let (reader, writer) = adopt(socket);
                    drop(reader);
                    GlommioRt::sleep(Duration::from_micros(1)).await;
                    drop(writer);
                }
                _ => drop(adopt(socket)),
            }
            // Off this thread: a polled socket is closed in the core's next turn.
            let end = blocking::run(move || client.read(&mut [0; 1])).await;
            assert_eq!(end.expect("a thread").expect("an orderly end"), 0);
            if round == 100 {
                before = open_descriptors();
            }
        }
        assert!(open_descriptors() <= before + 2, "{before} then {}", open_descriptors());
    });
    acceptor.stop();
}

fn cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).expect("positive")
}

#[test]
#[ignore = "a measurement of 20 s"]
fn idle_cost() {
    let executors = start(&ExecutorConfig::new(STALL_EXIT_CODE), vec![()], |core, ()| async move {
        GlommioRt::sleep(Duration::from_secs(1)).await;
        let (cpu_before, beats_before) = (cpu(), core.gauges.beats());
        let span = Duration::from_secs(20);
        GlommioRt::sleep(span).await;
        let used = cpu().saturating_sub(cpu_before);
        let beats = core.gauges.beats() - beats_before;
        let share = used.as_secs_f64() / span.as_secs_f64() * 100.0;
        println!("idle core and watchdog: {used:?} in {span:?}, {share:.3} %, {beats} ticks");
    });
    executors.expect("io_uring is available").join();
}
