//! The last step before the command: asks the kernel for its death with the supervisor, then
//! becomes the command.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::super::exit::{CANNOT_RUN, CliError, NOT_FOUND};

#[derive(clap::Args, Debug)]
pub(in super::super) struct ExecArgs {
    /// The supervisor
    parent: u32,
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Does not return if the command starts.
pub(in super::super) fn exec(args: &ExecArgs) -> Result<ExitCode, CliError> {
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|e| CliError::Io(e.into()))?;
    // The supervisor may have died before the kernel was asked.
    let parent = getppid().map(|pid| pid.as_raw_nonzero().get().cast_unsigned());
    if parent != Some(args.parent) {
        let text = "the supervisor is gone".to_owned();
        return Err(CliError::Command { code: CANNOT_RUN, text });
    }
    let (program, arguments) = args.command.split_first().expect("clap requires one");
    let error = Command::new(program).args(arguments).exec();
    let code = if error.kind() == ErrorKind::NotFound { NOT_FOUND } else { CANNOT_RUN };
    Err(CliError::Command { code, text: format!("{}: {error}", program.display()) })
}
