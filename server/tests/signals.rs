//! Signals of a whole process. This program is its own child: without a test harness, because the
//! switch must be bound before any other thread exists.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};

use leasehold_server::error::Exit;
use leasehold_server::shutdown::Shutdown;
use rustix::process::{Pid, Signal, kill_process};

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("child-that-stops") => child(true),
        Some("child-that-hangs") => child(false),
        _ => {
            other_signals_do_nothing_and_one_request_stops_in_order(Signal::TERM);
            other_signals_do_nothing_and_one_request_stops_in_order(Signal::INT);
            a_second_request_ends_a_stop_that_hangs();
            println!("signals: 3 cases ok");
            ExitCode::SUCCESS
        }
    }
}

fn child(stops: bool) -> ExitCode {
    let shutdown = Shutdown::on_signals().expect("signals can be blocked");
    println!("ready");
    shutdown.wait();
    println!("stopping");
    if stops {
        return Exit::Ok.into();
    }
    loop {
        std::thread::park();
    }
}

struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(what: &str) -> Self {
        let program = std::env::current_exe().expect("it runs");
        let mut child = Command::new(program)
            .arg(what)
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program can be started again");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut process = Self { child, lines };
        process.expect("ready");
        process
    }

    fn expect(&mut self, line: &str) {
        let read = self.lines.next().expect("it goes on").expect("it is text");
        assert_eq!(read, line);
    }

    fn send(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("it lives");
    }
}

fn other_signals_do_nothing_and_one_request_stops_in_order(stop: Signal) {
    let mut process = Process::start("child-that-stops");
    for signal in [Signal::USR1, Signal::USR2, Signal::HUP, Signal::PIPE, Signal::WINCH] {
        process.send(signal);
    }
    process.send(stop);
    process.expect("stopping");
    assert_eq!(process.child.wait().expect("it ends").code(), Some(0));
}

fn a_second_request_ends_a_stop_that_hangs() {
    let mut process = Process::start("child-that-hangs");
    process.send(Signal::TERM);
    process.expect("stopping");
    process.send(Signal::TERM);
    let code = process.child.wait().expect("it ends").code();
    assert_eq!(code, Some(i32::from(Exit::ForcedStop.code())));
}
