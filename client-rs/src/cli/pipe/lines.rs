//! Lines in and lines out. A line that is too long is passed over, whatever its length; what was
//! read of one is never lost.

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Stdin};
use tokio::sync::mpsc;

use super::super::exit::CliError;

/// Longest line of input, in bytes.
pub(super) const LINE_LEN_MAX: u64 = 64 * 1024;

/// Writes lines until all senders are gone. A caller that does not listen any more is no error.
pub(super) async fn write(mut lines: mpsc::Receiver<Value>) -> Result<(), CliError> {
    let mut out = tokio::io::stdout();
    while let Some(line) = lines.recv().await {
        let mut text = line.to_string();
        text.push('\n');
        while let Ok(line) = lines.try_recv() {
            text.push_str(&line.to_string());
            text.push('\n');
        }
        let written = out.write_all(text.as_bytes()).await;
        match written.and(out.flush().await) {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            other => other.map_err(CliError::Io)?,
        }
    }
    Ok(())
}

/// One line of input.
pub(super) enum Line {
    Text(Vec<u8>),
    TooLong,
    End,
}

/// Keeps what it has read of a line when its future is dropped.
#[derive(Default)]
pub(super) struct LineReader {
    partial: Vec<u8>,
    skipping: bool,
}

impl LineReader {
    pub(super) async fn next(&mut self, input: &mut BufReader<Stdin>) -> std::io::Result<Line> {
        loop {
            let room = LINE_LEN_MAX + 1 - self.partial.len() as u64;
            let read = (&mut *input).take(room).read_until(b'\n', &mut self.partial).await?;
            let complete = self.partial.last() == Some(&b'\n');
            if (complete || read == 0) && std::mem::take(&mut self.skipping) {
                self.partial.clear();
                return Ok(Line::TooLong);
            }
            if complete || read == 0 && !self.partial.is_empty() {
                return Ok(Line::Text(std::mem::take(&mut self.partial)));
            }
            if read == 0 {
                return Ok(Line::End);
            }
            if self.partial.len() as u64 > LINE_LEN_MAX {
                self.skipping = true;
                self.partial.clear();
            }
        }
    }
}
