//! `docs/CONFIG.md`, made from the tables in code: keys, exit codes and metrics.

use std::fmt::Write;

use super::{Fallback, KEYS, Key, Kind, Scope};
use crate::admin;
use crate::error::Exit;

/// The whole page.
pub fn markdown() -> String {
    let mut page = String::from(INTRO);
    for (scope, title) in [
        (Scope::Cluster, "Cluster keys: the same on every node"),
        (Scope::Process, "Process keys: each node's own"),
    ] {
        section(&mut page, scope, title);
    }
    page.push_str(EXAMPLE);
    exits(&mut page);
    page.push_str(METRICS);
    page.push_str(&admin::catalogue());
    page
}

const INTRO: &str = "\
# Configuration of `leaseholdd`

This page is made from the table in `server/src/config/keys.rs`; a test compares it
(`UPDATE=1 cargo test -p leasehold-server --lib config` writes it anew).

`leaseholdd start` reads a TOML file (`--config FILE`) and flags. Every key is also a flag of the
same name (`node-id = 1` is `--node-id 1`), and a flag wins over the file. An unknown key, a wrong
type, a value out of range or an impossible combination is refused with exit code 2; everything
that is wrong is named at once. `leaseholdd check-config` does only that: exit 0 if the same
arguments would start. Relative paths are relative to the working directory.
";

const EXAMPLE: &str = "
## Example

```toml
node-id = 1
data-dir = \"/var/lib/leasehold\"
cluster = \"orders\"
peers = [\"1=lock-a:7401\", \"2=lock-b:7401\", \"3=lock-c:7401\"]
secret-file = \"/etc/leasehold/secret\"
client-listen = \"0.0.0.0:7400\"
client-advertise = \"lock-a:7400\"
peer-listen = \"0.0.0.0:7401\"
```
";

const METRICS: &str = "
## Metrics

`GET /metrics` on `admin-listen`, in Prometheus' text format; times in seconds. `GET /livez` answers
200 while the process lives, `GET /readyz` 200 while every shard has a leader, has begun and is
applied up to what is known to be committed, else 503 with the reasons.

| name | type | labels | meaning |
|---|---|---|---|
";

fn section(page: &mut String, scope: Scope, title: &str) {
    let _ = writeln!(page, "\n## {title}");
    for key in KEYS.iter().filter(|key| key.scope == scope) {
        entry(page, key);
    }
}

fn entry(page: &mut String, key: &Key) {
    let kind = match key.kind {
        Kind::Number => "whole number",
        Kind::Switch => "true or false",
        Kind::Text => "string",
        Kind::List => "string with commas, or array of strings",
    };
    let unit = if key.unit.is_empty() { String::new() } else { format!(", in {}", key.unit) };
    let fallback = match key.fallback {
        Fallback::Required => "none; required".to_owned(),
        Fallback::Unset(text) => format!("unset: {text}"),
        Fallback::Value(value) => format!("`{value}`"),
    };
    let _ = writeln!(page, "\n### `{}`\n\n{}\n", key.name, key.meaning);
    let _ = writeln!(page, "- Type: {kind}{unit}\n- Range: {}\n- Default: {fallback}", key.range);
}

fn exits(page: &mut String) {
    page.push_str("\n## Exit codes\n\n| code | name | meaning |\n|---|---|---|\n");
    for exit in Exit::ALL {
        let _ = writeln!(page, "| {} | {} | {} |", exit.code(), exit.name(), exit.meaning());
    }
}
