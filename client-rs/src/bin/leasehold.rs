//! The command line: see `leasehold --help`.
#![deny(unsafe_code)]

#[path = "../cli/mod.rs"]
mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
