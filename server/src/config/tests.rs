use std::fs;
use std::path::Path;

use super::*;

fn from_toml(text: &str, flags: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    let secret = dir.path().join("secret");
    fs::write(&secret, "0123456789abcdef\n").unwrap();
    let file = dir.path().join("leasehold.toml");
    fs::write(&file, text.replace("SECRET", secret.to_str().unwrap())).unwrap();
    let mut settings = Settings::new();
    settings.add_file(&file)?;
    for (name, value) in flags {
        settings.add_flag(name, value);
    }
    Config::resolve(&settings)
}

const THREE: &str = "
    node-id = 2
    data-dir = \"d\"
    peers = [\"1=a:7401\", \"2=b:7401\", \"3=c:7401\"]
    secret-file = \"SECRET\"
";

/// The problems of `THREE` with a line added, as `key: what`.
fn problems(line: &str) -> Vec<String> {
    match from_toml(&format!("{THREE}\n{line}"), &[]) {
        Err(ConfigError::Problems(list)) => list.iter().map(ToString::to_string).collect(),
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn two_keys_are_enough_for_a_single_node() {
    let config = from_toml("node-id = 7\ndata-dir = \"d\"", &[]).unwrap();
    assert_eq!(config.cluster.shards, 1);
    assert_eq!(config.peer_advertise().to_string(), "127.0.0.1:7401");
    assert_eq!(config.client_advertise().to_string(), "127.0.0.1:7400");
    assert_eq!(config.cluster.peers.keys().copied().collect::<Vec<_>>(), [NodeId(7)]);
    assert_eq!(config.snapshot_keep_entries(), 20_000);
    assert_eq!(config.secret().unwrap(), None);
    assert!(config.process.client_listen.ip().is_loopback());
    assert!(config.process.peer_listen.ip().is_loopback());
    assert!(config.process.admin_listen.unwrap().ip().is_loopback());
}

#[test]
fn three_nodes_take_their_advertised_address_from_the_list() {
    let line =
        "client-listen = \"0.0.0.0:1\"\nclient-advertise = \"b:1\"\npeer-listen = \"0.0.0.0:2\"";
    let config = from_toml(&format!("{THREE}{line}"), &[]).unwrap();
    assert_eq!(config.peer_advertise().to_string(), "b:7401");
    assert_eq!(config.client_advertise().to_string(), "b:1");
}

#[test]
fn a_flag_wins_over_the_file() {
    let config = from_toml(&format!("{THREE}shards = 4"), &[("shards", "8")]).unwrap();
    assert_eq!(config.cluster.shards, 8);
    let config = from_toml(THREE, &[("admin-listen", "off"), ("pin-cores", "true")]).unwrap();
    assert_eq!(config.process.admin_listen, None);
    assert!(config.process.pin_cores);
}

#[test]
fn the_secret_is_read_without_its_line_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("secret");
    fs::write(&path, " 0123456789abcdef \r\n").unwrap();
    assert_eq!(check::read_secret(&path).unwrap(), b" 0123456789abcdef");
    fs::write(&path, "0123456789abcde \n").unwrap();
    let error = check::read_secret(&path).unwrap_err();
    assert!(error.contains("15 bytes") && error.contains("16..=1024"), "{error}");
}

#[test]
fn every_problem_is_reported_at_once() {
    let list = problems("shard = 3\nheartbeat-ms = 0\nlog-format = \"xml\"\ncores = \"two\"");
    let keys: Vec<_> = list.iter().map(|line| line.split(':').next().unwrap()).collect();
    assert_eq!(keys, ["cores", "shard", "heartbeat-ms", "log-format"]);
    let text = ConfigError::Problems(vec![
        Problem { key: "a".into(), what: "b".into() },
        Problem { key: "c".into(), what: "d".into() },
    ])
    .to_string();
    assert!(text.ends_with("2 problem(s):\n  a: b\n  c: d"), "{text}");
}

#[test]
fn problems_name_the_source_and_the_rule() {
    for (line, parts) in [
        ("shard = 3", &["shard: no such key", "leasehold.toml"][..]),
        ("shards = 65", &["shards: \"65\"", "1..=64", "leasehold.toml"]),
        ("shards = -1", &["shards: \"-1\"", "1..=64"]),
        ("shards = \"2\"", &["shards: expected a whole number, found string"]),
        ("pin-cores = 1", &["pin-cores: expected true or false, found integer"]),
        ("cluster = \"a b\"", &["cluster: \"a b\""]),
        ("log-level = \"loud=nonsense\"", &["log-level: \"loud=nonsense\""]),
        ("heartbeat-ms = 34", &["heartbeat-ms: 34", "third of election-min-ms (100)"]),
        ("election-min-ms = 150", &["election-min-ms: 150", "below election-max-ms (150)"]),
        ("election-max-ms = 2501", &["election-max-ms", "16..=2500"]),
        ("watchdog-ms = 3000\nelection-max-ms = 1500", &["watchdog-ms: 3000", "twice"]),
        ("client-listen = \"0.0.0.0:1\"", &["client-advertise: 0.0.0.0:1"]),
        ("peer-advertise = \"0.0.0.0:1\"", &["peer-advertise: 0.0.0.0:1"]),
        ("admin-listen = \"0.0.0.0:7401\"", &["admin-listen: 0.0.0.0:7401", "peer-listen"]),
        (
            "admin-listen = \"example.org:1\"",
            &["admin-listen: \"example.org:1\"", "not a host name"],
        ),
    ] {
        let list = problems(line).join("\n");
        for part in parts {
            assert!(list.contains(part), "{line}: {list}");
        }
    }
}

#[test]
fn member_lists_that_cannot_work_are_refused() {
    for (text, part) in [
        ("node-id = 1\ndata-dir = \"d\"\npeers = \"\"", "peers: the list is empty"),
        ("node-id = 9\ndata-dir = \"d\"\npeers = \"1=a:1\"", "node-id: 9 is not among"),
        ("node-id = 1\ndata-dir = \"d\"\npeers = \"1=a:1,2=b:1\"", "peers: 2 nodes"),
        ("node-id = 1\ndata-dir = \"d\"\npeers = \"1=a:1,2=b:1,3=c:1\"", "secret-file: required"),
        ("node-id = 1\ndata-dir = \"d\"\nsecret-file = \"/no/such\"", "secret-file: /no/such"),
        ("node-id = 1\ndata-dir = \"d\"\npeers = [1]", "peers: expected an array of strings"),
        ("data-dir = \"d\"", "node-id: required"),
    ] {
        let error = from_toml(text, &[]).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn a_missing_or_broken_file_is_named() {
    let error = Settings::new().add_file(Path::new("/no/such.toml")).unwrap_err().to_string();
    assert!(error.contains("/no/such.toml"), "{error}");
    let error = from_toml("node-id = ", &[]).unwrap_err().to_string();
    assert!(error.contains("is not TOML") && error.contains("line 1"), "{error}");
}

#[test]
fn warnings_name_what_is_probably_not_meant() {
    let line = "cores = 64\nclient-listen = \"0.0.0.0:1\"\nclient-advertise = \"b:1\"";
    let text = from_toml(&format!("{THREE}{line}"), &[]).unwrap().warnings().join("\n");
    assert!(text.contains("only 1 of 64") && text.contains("not authenticated"), "{text}");
    let warnings = |max| from_toml(&format!("{THREE}election-max-ms = {max}"), &[]);
    let warnings = |max| warnings(max).unwrap().warnings().join("\n");
    assert!(warnings(501).contains("up to 1002 ms"), "{}", warnings(501));
    assert_eq!(warnings(500), "");
    assert!(from_toml(THREE, &[]).unwrap().warnings().is_empty());
}

#[test]
fn every_default_is_accepted_by_its_own_key() {
    for key in KEYS {
        if let Fallback::Value(value) = key.fallback {
            assert_eq!((key.put)(&mut Config::blank(), value), Ok(()), "{}", key.name);
        }
    }
    let mut names: Vec<_> = KEYS.iter().map(|key| key.name).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
}

#[test]
fn the_document_is_what_the_table_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/CONFIG.md");
    if std::env::var_os("UPDATE").is_some() {
        fs::write(path, markdown()).unwrap();
    }
    let page = fs::read_to_string(path).unwrap();
    assert!(page == markdown(), "docs/CONFIG.md is stale: run the test with UPDATE=1");
}
