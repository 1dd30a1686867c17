//! Scenario scripts: readable input and recorded output, one file a subject (`scripts/*.txt`).
//!
//! A script is a sequence of blocks: input lines, a line `----`, the recorded output, an empty
//! line. `UPDATE=1` rewrites the outputs; the diff is the review. After every line the state's
//! invariants are checked and all its events must carry its revision; after every block the state
//! goes through a snapshot. Lines that start with `#` are kept as they are.
//!
//! Lines (`{a*i+b}` is replaced within `times`):
//!
//! ```text
//! begin BASE
//! open NAME [ttl=MS] [label=TEXT]               names the new lease
//! acquire NAME NUMBER KEY [wait=MS] [value=TEXT] [own=TTL] [mode=MODE]
//! cancel NAME NUMBER [release]
//! release NAME NUMBER KEY TOKEN
//!     acquire, acquire-all, cancel, release, convert and set-value take [floor=N] [acks=N,N] [secret=bad]
//! release-own LEASE KEY TOKEN [secret=bad]
//! close LEASE [secret=bad] | expire LEASE | time-out LEASE NUMBER
//! acquire-all NAME NUMBER KEY MODE [wait=MS] [value=TEXT] [own=TTL] [delay=MS] [reentrant]
//! acquire-several NAME NUMBER KEY MODE [KEY MODE]… [the options of acquire-all]
//! release-all NAME NUMBER ACQUIRE
//! set-value NAME NUMBER KEY TOKEN TEXT | ask-yield KEY TOKEN [who=TEXT] [why=TEXT] [within=MS]
//! set-limit KEY LIMIT [who=TEXT] | end-delay KEY TOKEN
//! convert NAME NUMBER KEY TOKEN MODE
//! force KEY TOKEN [who=TEXT] [why=TEXT] [now] | end-forced KEY TOKEN
//! times COUNT LINE                              prints how often each outcome came
//! get KEY | ls [PREFIX [AFTER [LIMIT]]] | sessions | holds LEASE | result LEASE NUMBER | claim LEASE NUMBER | why KEY | state
//! ```
//!
//! MODE is `exclusive`, `shared`, `N/LIMIT` for permits, or a number. `TEXT*N` is TEXT repeated, `-` is empty, `0xHH…` are bytes. LEASE is a name or `#ID`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use leasehold_core::snapshot::{Decoder, Encoder};
use leasehold_core::{State, invariants};
use leasehold_protocol::command::{Caller, Command, OwnLease, Want};
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, ShardId, Token};
use leasehold_protocol::outcome::Outcome;

#[path = "scripts/print.rs"]
mod print;

/// The wall clock of every command: display only, so any value will do.
const WALL_MS: u64 = 1_000;
const SECRET: Secret = Secret([7; 16]);
const BAD_SECRET: Secret = Secret([8; 16]);

struct World {
    state: State,
    names: BTreeMap<String, LeaseId>,
    /// Input lines of the present block.
    pending: Vec<String>,
}

/// One line, split into words and `name=value` options.
struct Line<'a> {
    words: Vec<&'a str>,
    options: BTreeMap<&'a str, &'a str>,
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Self {
        let mut words = Vec::new();
        let mut options = BTreeMap::new();
        for part in line.split_whitespace() {
            match part.split_once('=') {
                Some((name, value)) => drop(options.insert(name, value)),
                None => words.push(part),
            }
        }
        Self { words, options }
    }

    fn word(&self, index: usize) -> &'a str {
        self.words.get(index).unwrap_or_else(|| panic!("word {index} missing: {:?}", self.words))
    }

    fn number(&self, index: usize) -> u64 {
        parse_number(self.word(index))
    }

    fn option(&self, name: &str, default: u64) -> u64 {
        self.options.get(name).map_or(default, |text| parse_number(text))
    }

    fn has(&self, word: &str) -> bool {
        self.words.contains(&word)
    }

    fn secret(&self) -> Secret {
        if self.options.contains_key("secret") { BAD_SECRET } else { SECRET }
    }
}

fn parse_number(text: &str) -> u64 {
    match text {
        "max" => u64::MAX,
        text => text.parse().unwrap_or_else(|_| panic!("not a number: {text}")),
    }
}

fn mode(text: &str) -> Mode {
    match text {
        "exclusive" => Mode::EXCLUSIVE,
        "shared" => Mode::SHARED,
        number => Mode(parse_number(number) as u32),
    }
}

fn bytes(text: &str) -> Vec<u8> {
    if text == "-" {
        return Vec::new();
    }
    if let Some(hex) = text.strip_prefix("0x") {
        let pair = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex digits");
        return (0..hex.len()).step_by(2).map(pair).collect();
    }
    match text.split_once('*') {
        Some((text, count)) => text.repeat(count.parse().expect("a count")).into_bytes(),
        None => text.as_bytes().to_vec(),
    }
}

impl World {
    fn new() -> Self {
        Self { state: State::new(ShardId(0)), names: BTreeMap::new(), pending: Vec::new() }
    }

    fn lease(&self, name: &str) -> LeaseId {
        match name.strip_prefix('#') {
            Some(id) => LeaseId(parse_number(id)),
            None => *self.names.get(name).unwrap_or_else(|| panic!("no lease {name}")),
        }
    }

    fn caller(&self, line: &Line<'_>) -> Caller {
        let acks = line.options.get("acks").map_or(Vec::new(), |list| {
            list.split(',').map(|number| Number(parse_number(number))).collect()
        });
        Caller {
            lease: self.lease(line.word(1)),
            secret: line.secret(),
            number: Number(line.number(2)),
            floor: Number(line.option("floor", 0)),
            acks,
        }
    }

    fn acquire_all(&self, line: &Line<'_>) -> Command {
        let reentrant = line.has("reentrant");
        let wanted = line.words[3..].iter().filter(|word| **word != "reentrant");
        let wanted: Vec<_> = wanted.copied().collect();
        let wants = wanted.chunks(2).map(|want| {
            let (mode, limit) = match want[1].split_once('/') {
                Some((permits, limit)) => {
                    (Mode::permits(parse_number(permits) as u32), parse_number(limit) as u32)
                }
                None => (mode(want[1]), 0),
            };
            Want { key: bytes(want[0]), mode, limit, reentrant }
        });
        let own = line.options.get("own");
        Command::AcquireAll {
            caller: self.caller(line),
            wants: wants.collect(),
            own: own.map(|ttl| OwnLease { ttl_ms: parse_number(ttl) as u32, secret: SECRET }),
            value: bytes(line.options.get("value").unwrap_or(&"-")),
            wait_ms: line.option("wait", 0) as u32,
            delay_ms: line.option("delay", 0) as u32,
        }
    }

    fn command(&self, line: &Line<'_>) -> Option<Command> {
        let text = |name: &str| bytes(line.options.get(name).unwrap_or(&"-"));
        Some(match line.word(0) {
            "begin-restored" => Command::BeginRestored {
                token_base: Token(line.number(1)),
                lease_base: line.option("leases", 0),
                revision_base: line.option("revisions", 0),
                quarantine_ms: line.option("quarantine", 0) as u32,
            },
            "end-quarantine" => Command::EndQuarantine,
            "begin" => Command::Begin { token_base: Token(line.number(1)) },
            "open" => Command::Open {
                ttl_ms: line.option("ttl", 5_000) as u32,
                secret: SECRET,
                label: text("label"),
            },
            "acquire" => Command::Acquire {
                caller: self.caller(line),
                key: bytes(line.word(3)),
                mode: line.options.get("mode").map_or(Mode::EXCLUSIVE, |text| mode(text)),
                own: line
                    .options
                    .get("own")
                    .map(|ttl| OwnLease { ttl_ms: parse_number(ttl) as u32, secret: SECRET }),
                value: text("value"),
                wait_ms: line.option("wait", 0) as u32,
            },
            "cancel" => Command::Cancel {
                caller: self.caller(line),
                release_if_granted: line.has("release"),
            },
            "release" => Command::Release {
                caller: self.caller(line),
                key: bytes(line.word(3)),
                token: Token(line.number(4)),
            },
            "convert" => Command::Convert {
                caller: self.caller(line),
                key: bytes(line.word(3)),
                token: Token(line.number(4)),
                mode: mode(line.word(5)),
            },
            "acquire-all" | "acquire-several" => self.acquire_all(line),
            "release-all" => {
                Command::ReleaseAll { caller: self.caller(line), acquire: Number(line.number(3)) }
            }
            "release-own" => Command::ReleaseOwn {
                lease: self.lease(line.word(1)),
                secret: line.secret(),
                key: bytes(line.word(2)),
                token: Token(line.number(3)),
            },
            "close" => Command::Close { lease: self.lease(line.word(1)), secret: line.secret() },
            "expire" => Command::Expire { lease: self.lease(line.word(1)) },
            "time-out" => {
                Command::TimeOut { lease: self.lease(line.word(1)), number: Number(line.number(2)) }
            }
            "force" => Command::ForceRelease {
                key: bytes(line.word(1)),
                token: Token(line.number(2)),
                who: text("who"),
                why: text("why"),
                now: line.has("now"),
            },
            "end-forced" => {
                Command::EndForced { key: bytes(line.word(1)), token: Token(line.number(2)) }
            }
            _ => return self.option_command(line),
        })
    }

    fn option_command(&self, line: &Line<'_>) -> Option<Command> {
        let text = |name: &str| bytes(line.options.get(name).unwrap_or(&"-"));
        Some(match line.word(0) {
            "set-value" => Command::SetValue {
                caller: self.caller(line),
                key: bytes(line.word(3)),
                token: Token(line.number(4)),
                value: bytes(line.word(5)),
            },
            "ask-yield" => Command::AskYield {
                key: bytes(line.word(1)),
                token: Token(line.number(2)),
                who: text("who"),
                why: text("why"),
                within_ms: line.option("within", 0) as u32,
            },
            "set-limit" => Command::SetLimit {
                key: bytes(line.word(1)),
                limit: line.number(2) as u32,
                who: text("who"),
            },
            "end-delay" => {
                Command::EndDelay { key: bytes(line.word(1)), token: Token(line.number(2)) }
            }
            _ => return None,
        })
    }

    fn apply(&mut self, line: &Line<'_>, command: &Command, out: &mut String) -> Outcome {
        let mut events = Vec::new();
        let before = (self.state.revision(), self.state.digest());
        let outcome = self.state.apply(WALL_MS, command, &mut events);
        let after = (self.state.revision(), self.state.digest());
        invariants::check(&self.state).unwrap_or_else(|text| panic!("{:?}: {text}", line.words));
        assert_eq!(before.0 == after.0, before.1 == after.1, "digest without revision");
        assert!(events.iter().all(|event| event.revision == after.0), "{events:?}");
        if let Outcome::Opened { lease, .. } = outcome {
            self.names.insert(line.word(1).to_owned(), lease);
        }
        print::outcome(&self.names, &outcome, out);
        for event in &events {
            print::event(&self.names, event, out);
        }
        outcome
    }

    fn run(&mut self, text: &str, out: &mut String) {
        if let Some(rest) = text.strip_prefix("times ") {
            return self.times(rest, out);
        }
        let line = Line::parse(text);
        if let Some(command) = self.command(&line) {
            self.apply(&line, &command, out);
        } else {
            self.read(&line, out);
        }
    }

    /// `COUNT LINE`: the same line for i = 0, 1, …, with the outcomes counted.
    fn times(&mut self, text: &str, out: &mut String) {
        let (count, template) = text.split_once(' ').expect("times COUNT LINE");
        let mut counts = BTreeMap::<String, usize>::new();
        for i in 0..parse_number(count) {
            let text = expand(template, i);
            let line = Line::parse(&text);
            let command = self.command(&line).expect("times repeats commands");
            let mut events = Vec::new();
            let outcome = self.state.apply(WALL_MS, &command, &mut events);
            *counts.entry(print::name(&outcome)).or_default() += 1;
        }
        invariants::check(&self.state).expect("invariants after times");
        for (name, count) in counts {
            writeln!(out, "{count} x {name}").expect("a string takes everything");
        }
    }

    fn read(&self, line: &Line<'_>, out: &mut String) {
        let names = &self.names;
        match line.word(0) {
            "get" => print::key(names, &self.state.key_info(&bytes(line.word(1))), out),
            "why" => print::why(names, &self.state.key_info(&bytes(line.word(1))), out),
            "ls" => {
                let argument = |index: usize| bytes(line.words.get(index).unwrap_or(&"-"));
                let limit = line.words.get(3).map_or(10, |text| parse_number(text) as usize);
                let (keys, more) = self.state.list(&argument(1), &argument(2), limit);
                for key in &keys {
                    print::key(names, key, out);
                }
                writeln!(out, "more={more}").expect("a string takes everything");
            }
            "sessions" => print::sessions(names, &self.state.sessions(LeaseId(0), 100).0, out),
            "holds" => print::holds(self.state.holds(self.lease(line.word(1))), out),
            "result" => {
                let lease = self.lease(line.word(1));
                match self.state.wait_result(lease, Number(line.number(2))) {
                    Some(outcome) => print::outcome(names, &outcome, out),
                    None => out.push_str("nothing\n"),
                }
            }
            "claim" => {
                let lease = self.lease(line.word(1));
                print::claim(names, self.state.claim(lease, Number(line.number(2))), out);
            }
            "state" => print::state(&self.state, out),
            word => panic!("unknown line: {word}"),
        }
    }

    fn through_snapshot(&mut self) {
        let mut decoder = Decoder::new();
        for chunk in Encoder::new(&self.state) {
            decoder.feed(&chunk).expect("an own snapshot");
        }
        let copy = decoder.finish().expect("an own snapshot");
        assert_eq!(copy.digest(), self.state.digest());
        self.state = copy;
    }
}

/// Replaces `{a*i+b}`, `{i+b}` and `{i}`.
fn expand(template: &str, i: u64) -> String {
    let mut text = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('{') {
        let (term, after) = after.split_once('}').expect("a closing brace");
        let (product, sum) = term.split_once('+').unwrap_or((term, "0"));
        let factor = product.strip_suffix("*i").map_or(1, parse_number);
        text.push_str(before);
        write!(text, "{}", factor * i + parse_number(sum)).expect("a string takes everything");
        rest = after;
    }
    text + rest
}

/// Runs a script; returns it with the outputs that came.
fn replay(script: &str) -> String {
    let mut world = World::new();
    let mut result = String::new();
    let mut lines = script.lines();
    while let Some(line) = lines.next() {
        if line != "----" {
            result.push_str(line);
            result.push('\n');
            if !line.is_empty() && !line.starts_with('#') {
                world.pending.push(line.to_owned());
            }
            continue;
        }
        let mut out = String::new();
        for text in std::mem::take(&mut world.pending) {
            world.run(&text, &mut out);
        }
        world.through_snapshot();
        result.push_str("----\n");
        result.push_str(&out);
        for recorded in lines.by_ref() {
            if recorded.is_empty() {
                break;
            }
        }
        result.push('\n');
    }
    assert!(world.pending.is_empty(), "the last block has no ----");
    result
}

fn scripts() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts");
    let entries = std::fs::read_dir(folder).expect("the scripts' folder");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "txt"));
    paths.sort();
    paths
}

#[test]
fn every_script_gives_its_recorded_output() {
    let update = std::env::var_os("UPDATE").is_some();
    let mut wrong = Vec::new();
    let paths = scripts();
    assert!(paths.len() >= 15, "only {} scripts", paths.len());
    for path in paths {
        let script = std::fs::read_to_string(&path).expect("a script");
        let result = replay(&script);
        if update {
            std::fs::write(&path, result).expect("a script can be written");
        } else if let Some((line, (recorded, came))) =
            script.lines().zip(result.lines()).enumerate().find(|(_, (a, b))| a != b)
        {
            wrong.push(format!("{}:{}\n  - {recorded}\n  + {came}", path.display(), line + 1));
        } else if script != result {
            wrong.push(format!("{}: more or fewer lines came", path.display()));
        }
    }
    assert!(wrong.is_empty(), "\n{}\n(UPDATE=1 records anew)", wrong.join("\n"));
}
