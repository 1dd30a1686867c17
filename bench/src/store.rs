//! A small store that checks tokens: the resource that a lock protects in the demo and in tests.
//!
//! It keeps the highest token it has seen for each key and refuses writes with a lower one (G2).
//! That is all a resource has to do; it never talks to the lock service.
//!
//! It speaks lines over TCP on loopback: `KEY TOKEN TEXT` is answered with `ok` or with
//! `refused HIGHEST`. One thread serves one connection at a time, so the order of its decisions
//! is the order of its records.

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::clock::now_ns;
use crate::history::{Record, Recorder, StoreWrite};

/// Longest line, in bytes.
const LINE_LEN_MAX: u64 = 4096;
/// A connection that sends nothing for this long is closed.
const LIMIT: Duration = Duration::from_secs(2);

/// A write that the store took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Under this token.
    pub token: u64,
    /// What was written.
    pub text: String,
}

/// What the store answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It took the write.
    Taken,
    /// It has seen this higher token.
    Refused {
        /// The highest token seen.
        highest: u64,
    },
}

type Keys = Arc<Mutex<BTreeMap<String, Taken>>>;

/// A running store.
#[derive(Debug)]
pub struct Store {
    addr: SocketAddr,
    keys: Keys,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Store {
    /// Starts one on a free port; it records every write.
    pub fn start(recorder: Recorder) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let addr = listener.local_addr()?;
        let keys = Keys::default();
        let stop = Arc::new(AtomicBool::new(false));
        let (served, stopped) = (Arc::clone(&keys), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                // A client that breaks off in the middle of a line has written nothing.
                let _ = stream.and_then(|stream| serve(stream, &served, &recorder));
            }
        });
        Ok(Self { addr, keys, stop, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The newest write of a key.
    pub fn newest(&self, key: &str) -> Option<Taken> {
        lock(&self.keys).get(key).cloned()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes the thread out of its accept.
        let woken = TcpStream::connect_timeout(&self.addr, LIMIT).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            let _ = thread.join();
        }
    }
}

fn lock(keys: &Keys) -> MutexGuard<'_, BTreeMap<String, Taken>> {
    keys.lock().expect("no holder of this lock panics")
}

fn serve(stream: TcpStream, keys: &Keys, recorder: &Recorder) -> io::Result<()> {
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    let mut answers = stream.try_clone()?;
    let mut line = String::new();
    BufReader::new(stream.take(LINE_LEN_MAX)).read_line(&mut line)?;
    let answer = match parse(&line) {
        Some((key, token, text)) => match write(keys, recorder, key, token, text) {
            Answer::Taken => "ok\n".to_owned(),
            Answer::Refused { highest } => format!("refused {highest}\n"),
        },
        None => "bad line\n".to_owned(),
    };
    answers.write_all(answer.as_bytes())
}

fn parse(line: &str) -> Option<(&str, u64, &str)> {
    let mut parts = line.strip_suffix('\n')?.splitn(3, ' ');
    Some((parts.next()?, parts.next()?.parse().ok()?, parts.next()?))
}

/// The whole of fencing.
fn write(keys: &Keys, recorder: &Recorder, key: &str, token: u64, text: &str) -> Answer {
    let mut keys = lock(keys);
    let highest = keys.get(key).map_or(0, |taken| taken.token);
    let accepted = token >= highest;
    if accepted {
        keys.insert(key.to_owned(), Taken { token, text: text.to_owned() });
    }
    let at_ns = now_ns();
    recorder.push(Record::Store(StoreWrite {
        client: 0,
        key: key.to_owned(),
        token,
        accepted,
        at_ns,
    }));
    if accepted { Answer::Taken } else { Answer::Refused { highest } }
}

/// Writes to a store.
pub fn put(addr: SocketAddr, key: &str, token: u64, text: &str) -> io::Result<Answer> {
    let mut stream = TcpStream::connect_timeout(&addr, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(format!("{key} {token} {text}\n").as_bytes())?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    match answer.trim_end().split_once(' ') {
        None if answer == "ok\n" => Ok(Answer::Taken),
        Some(("refused", highest)) => {
            let highest = highest.parse().map_err(io::Error::other)?;
            Ok(Answer::Refused { highest })
        }
        _ => Err(io::Error::other(format!("the store answered {answer:?}"))),
    }
}

/// A slow road to the store: takes one write and delivers it only when told to.
#[derive(Debug)]
pub struct SlowRoad {
    listener: TcpListener,
}

impl SlowRoad {
    /// Opens one on a free port.
    pub fn open() -> io::Result<Self> {
        Ok(Self { listener: TcpListener::bind((Ipv4Addr::LOCALHOST, 0))? })
    }

    /// Where it takes a write.
    pub fn addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The write that was handed in, once it is there as a whole. Its sender may be dead by now.
    pub fn take(&self) -> io::Result<Delayed> {
        let (stream, _) = self.listener.accept()?;
        stream.set_read_timeout(Some(LIMIT))?;
        let mut line = String::new();
        BufReader::new(stream.take(LINE_LEN_MAX)).read_line(&mut line)?;
        let bad = || io::Error::other(format!("no write: {line:?}"));
        let (key, token, text) = parse(&line).ok_or_else(bad)?;
        Ok(Delayed { key: key.to_owned(), token, text: text.to_owned() })
    }
}

/// A write on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delayed {
    /// The key.
    pub key: String,
    /// The token it carries.
    pub token: u64,
    /// What it writes.
    pub text: String,
}

impl Delayed {
    /// Lets it arrive.
    pub fn deliver(&self, store: SocketAddr) -> io::Result<Answer> {
        put(store, &self.key, self.token, &self.text)
    }
}

/// Hands a write to a slow road; returns as soon as it is on its way.
pub fn post(road: SocketAddr, key: &str, token: u64, text: &str) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&road, LIMIT)?;
    stream.write_all(format!("{key} {token} {text}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lower_token_is_refused_and_changes_nothing() {
        let recorder = Recorder::new();
        let store = Store::start(recorder.clone()).expect("a store");
        assert_eq!(put(store.addr(), "k", 5, "five").expect("answered"), Answer::Taken);
        assert_eq!(put(store.addr(), "k", 6, "six").expect("answered"), Answer::Taken);
        let stale = put(store.addr(), "k", 5, "five again").expect("answered");
        assert_eq!(stale, Answer::Refused { highest: 6 });
        assert_eq!(put(store.addr(), "other", 1, "one").expect("answered"), Answer::Taken);
        assert_eq!(store.newest("k"), Some(Taken { token: 6, text: "six".into() }));
        assert_eq!(recorder.history().store_writes().count(), 4);
    }

    #[test]
    fn a_delayed_write_arrives_when_told_to() {
        let store = Store::start(Recorder::new()).expect("a store");
        let road = SlowRoad::open().expect("a road");
        post(road.addr().expect("an address"), "k", 5, "late words").expect("posted");
        let delayed = road.take().expect("taken");
        assert_eq!(store.newest("k"), None);
        assert_eq!(delayed.deliver(store.addr()).expect("answered"), Answer::Taken);
        assert_eq!(store.newest("k"), Some(Taken { token: 5, text: "late words".into() }));
    }
}
