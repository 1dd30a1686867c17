//! The verdict on a run with its report, and the history kept if it is not `Ok`.

use std::io;
use std::path::PathBuf;

use crate::check::{self, Needs, Verdict};
use crate::history::Recorder;

/// Every checker's report, or, if the verdict is not `Ok`, the same with the path of the kept
/// history.
pub fn judge(recorder: &Recorder, needs: &Needs) -> Result<String, String> {
    let history = recorder.history();
    let reports = check::all(&history, needs);
    let text = check::text(&reports);
    if check::worst(&reports) == Verdict::Ok {
        return Ok(text);
    }
    Err(match keep(&history) {
        Ok(path) => format!("{text}the history is kept in {}", path.display()),
        Err(error) => format!("{text}the history could not be kept: {error}"),
    })
}

fn keep(history: &crate::history::History) -> io::Result<PathBuf> {
    let dir = tempfile::Builder::new().prefix("leasehold-history-").tempdir()?.keep();
    let path = dir.join("history.jsonl");
    history.save(&path)?;
    Ok(path)
}
