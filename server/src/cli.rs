//! The command line of `leaseholdd`. Flags of `start` are made from the table of configuration
//! keys, so that file and flags cannot differ.

pub mod dev;
mod restoring;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::ValueParser;
use clap::{Arg, ArgAction, ArgMatches, value_parser};

use crate::config::{Config, ConfigError, Fallback, KEYS, Key, Kind, Settings};
use crate::error::Exit;
use crate::restore;

const AFTER_HELP: &str = "Keys, ranges and exit codes: docs/CONFIG.md.";

/// What the command line asks for.
#[derive(Debug)]
pub enum Action {
    /// Run a node.
    Start(Box<Config>),
    /// Report whether `Start` would find its configuration right; it is.
    CheckConfig(Box<Config>),
    /// Make a data directory for a cluster that takes over from an older one.
    Restore(restore::Request, Box<Config>),
    /// Run a cluster on this machine.
    Dev(dev::Options),
}

/// Reads the command line and the configuration. On `Err` everything that the user should read is
/// written.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Action, Exit> {
    let matches = command().try_get_matches_from(args).map_err(|error| {
        // Help that cannot be written has nobody to read it.
        let _ = error.print();
        if error.use_stderr() { Exit::Usage } else { Exit::Ok }
    })?;
    let (verb, matches) = matches.subcommand().expect("a subcommand is required");
    let action = match verb {
        "dev" => return Ok(Action::Dev(dev_options(matches))),
        "restore" | "recover" => {
            let request = restoring::request(verb, matches);
            return checked(matches).map(|config| Action::Restore(request, config));
        }
        "check-config" => Action::CheckConfig,
        _ => {
            if let Some(parent) = matches.get_one::<u32>("parent-pid") {
                die_with(*parent)?;
            }
            Action::Start
        }
    };
    checked(matches).map(action)
}

fn checked(matches: &ArgMatches) -> Result<Box<Config>, Exit> {
    config(matches).map(Box::new).map_err(|error| {
        eprintln!("leaseholdd: {error}");
        Exit::Usage
    })
}

fn config(matches: &ArgMatches) -> Result<Config, ConfigError> {
    let mut settings = Settings::new();
    if let Some(path) = matches.get_one::<PathBuf>("config") {
        settings.add_file(path)?;
    }
    for key in KEYS {
        if let Some(text) = matches.get_one::<String>(key.name) {
            settings.add_flag(key.name, text);
        }
    }
    Config::resolve(&settings)
}

fn command() -> clap::Command {
    let start = clap::Command::new("start").about("Run a node").args(config_args()).arg(
        Arg::new("parent-pid")
            .long("parent-pid")
            .hide(true)
            .value_parser(value_parser!(u32))
            .help("End when this process ends; used by `dev`"),
    );
    let check = clap::Command::new("check-config")
        .about("Check the arguments of `start`: exit 0, or 2 with everything that is wrong")
        .args(config_args());
    clap::Command::new("leaseholdd")
        .about("Leasehold's server")
        .version(env!("CARGO_PKG_VERSION"))
        .after_help(AFTER_HELP)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands(
            [start, check, dev_command(), restoring::restore(), restoring::recover()]
                .map(|command| command.after_help(AFTER_HELP)),
        )
}

fn config_args() -> Vec<Arg> {
    let config = Arg::new("config")
        .long("config")
        .value_name("FILE")
        .value_parser(value_parser!(PathBuf))
        .help("A TOML file with the keys below; flags win over it");
    std::iter::once(config).chain(KEYS.iter().map(key_arg)).collect()
}

fn key_arg(key: &'static Key) -> Arg {
    let first = key.meaning.split_inclusive(['.', ':', ';']).next().unwrap_or_default();
    let first = first.trim_end_matches(['.', ':', ';']);
    let fallback = match key.fallback {
        Fallback::Required => "required".to_owned(),
        Fallback::Unset(text) => format!("default: {text}"),
        Fallback::Value(value) => format!("default: {value}"),
    };
    let arg = Arg::new(key.name)
        .long(key.name)
        .value_name(key.placeholder)
        .value_parser(ValueParser::string())
        .allow_negative_numbers(key.kind == Kind::Number)
        .help(format!("{first} [{fallback}]"));
    match key.kind {
        Kind::Switch => arg.num_args(0..=1).default_missing_value("true"),
        _ => arg,
    }
}

fn dev_command() -> clap::Command {
    clap::Command::new("dev")
        .about("Run a cluster on this machine, for trying things out; Ctrl-C ends it")
        .arg(
            Arg::new("nodes")
                .long("nodes")
                .value_name("N")
                .default_value("3")
                .value_parser(["1", "3", "5"])
                .help("Number of nodes"),
        )
        .arg(
            Arg::new("dir")
                .long("dir")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .help("Where to keep everything [default: a new directory, removed at the end]"),
        )
        .arg(
            Arg::new("port")
                .long("port")
                .value_name("PORT")
                .default_value("7400")
                .value_parser(value_parser!(u16))
                .action(ArgAction::Set)
                .help("The first of three ports per node; 0 takes any that are free"),
        )
}

fn dev_options(matches: &ArgMatches) -> dev::Options {
    let nodes: &String = matches.get_one("nodes").expect("it has a default");
    dev::Options {
        nodes: nodes.parse().expect("one of the possible values"),
        dir: matches.get_one("dir").cloned(),
        port: *matches.get_one("port").expect("it has a default"),
    }
}

/// Has the kernel end this process when the thread that started it ends.
fn die_with(parent: u32) -> Result<(), Exit> {
    let signal = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(signal).map_err(|error| {
        eprintln!("leaseholdd: --parent-pid: {error}");
        Exit::Internal
    })?;
    // The parent may have ended before the kernel was asked.
    let now = rustix::process::getppid().map(rustix::process::Pid::as_raw_pid);
    if now == i32::try_from(parent).ok() {
        return Ok(());
    }
    eprintln!("leaseholdd: --parent-pid: {parent} is not this process's parent");
    Err(Exit::Usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Result<Action, Exit> {
        parse(line.split(' ').map(OsString::from))
    }

    #[test]
    fn flags_alone_are_a_configuration() {
        let line = "leaseholdd start --node-id 4 --data-dir d --pin-cores false --admin-listen off";
        let Ok(Action::Start(config)) = parse_line(line) else { panic!("not accepted: {line}") };
        assert_eq!(config.process.node_id.0, 4);
        assert_eq!(config.process.admin_listen, None);
    }

    #[test]
    fn a_switch_needs_no_value() {
        let line = "leaseholdd check-config --node-id 4 --pin-cores --data-dir d";
        let Ok(Action::CheckConfig(config)) = parse_line(line) else { panic!("{line}") };
        assert!(config.process.pin_cores);
    }

    #[test]
    fn wrong_lines_exit_with_2() {
        for line in [
            "leaseholdd",
            "leaseholdd stop",
            "leaseholdd start --node-id 1 --data-dir d --shard 2",
            "leaseholdd start --node-id 1 --data-dir d --shards 0",
            "leaseholdd start --node-id 1 --node-id 1 --data-dir d",
            "leaseholdd start --node-id 1",
            "leaseholdd dev --nodes 2",
            "leaseholdd dev --port 70000",
        ] {
            assert_eq!(parse_line(line).unwrap_err(), Exit::Usage, "{line}");
        }
        assert_eq!(parse_line("leaseholdd --version").unwrap_err(), Exit::Ok);
        assert_eq!(parse_line("leaseholdd start --help").unwrap_err(), Exit::Ok);
    }

    #[test]
    fn a_recovery_is_never_forced_by_accident() {
        let line = "leaseholdd recover --from-data old --node-id 1 --data-dir new";
        assert_eq!(parse_line(line).unwrap_err(), Exit::Usage);
        let line = format!("{line} --force-from-one-node --old-cluster-silent-for 2m");
        let Ok(Action::Restore(request, config)) = parse_line(&line) else { panic!("{line}") };
        assert_eq!(request.source, restore::Source::Survivor("old".into()));
        assert_eq!(request.silent_for.as_secs(), 120);
        assert_eq!(config.process.data_dir, PathBuf::from("new"));
        let line = "leaseholdd restore --from b --node-id 1 --data-dir new";
        let Ok(Action::Restore(request, _)) = parse_line(line) else { panic!("{line}") };
        assert_eq!(request.source, restore::Source::Backup("b".into()));
        assert!(request.silent_for.is_zero());
    }

    #[test]
    fn dev_has_defaults() {
        let Ok(Action::Dev(options)) = parse_line("leaseholdd dev") else { panic!("refused") };
        assert_eq!((options.nodes, options.dir, options.port), (3, None, 7400));
    }
}
