//! Where the nodes of a `dev` cluster live: directories, ports, configurations.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::Options;

/// Ports of one node: clients, peers, operators.
const PORTS: u16 = 3;
/// Draws of a first port before giving up.
const PORT_TRIES: u32 = 100;

/// One node's place.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) node: u16,
    pub(super) config: PathBuf,
    pub(super) log: PathBuf,
    client: u16,
    peer: u16,
    pub(super) admin: u16,
}

/// The whole cluster's.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) dir: PathBuf,
    pub(super) nodes: Vec<Place>,
    temporary: bool,
}

impl Layout {
    /// Makes the directory, the secret and the configurations. An existing directory is used
    /// again, with its data and its secret.
    pub(super) fn make(options: &Options) -> Result<Self, String> {
        let dir = options.dir.clone().unwrap_or_else(temporary);
        let ports = ports(options)?;
        let named = |error| format!("{}: {error}", dir.display());
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(named)?;
        let dir = fs::canonicalize(&dir).map_err(named)?;
        let place = |(index, ports): (usize, &[u16])| {
            let node = index as u16 + 1;
            Place {
                node,
                config: dir.join(format!("node-{node}.toml")),
                log: dir.join(format!("node-{node}.log")),
                client: ports[0],
                peer: ports[1],
                admin: ports[2],
            }
        };
        let nodes = ports.chunks_exact(PORTS.into()).enumerate().map(place).collect();
        let layout = Self { dir, nodes, temporary: options.dir.is_none() };
        layout.write().map_err(|error| format!("{}: {error}", layout.dir.display()))?;
        Ok(layout)
    }

    /// The clients' addresses, as `LEASEHOLD_ENDPOINTS` takes them.
    pub(super) fn endpoints(&self) -> String {
        let addresses: Vec<_> =
            self.nodes.iter().map(|place| format!("127.0.0.1:{}", place.client)).collect();
        addresses.join(",")
    }

    /// The command that starts a node by hand.
    pub(super) fn start_line(&self, node: u16) -> String {
        let place = self.nodes.iter().find(|place| place.node == node);
        let place = place.expect("only nodes of this cluster end");
        format!("leaseholdd start --config {}", place.config.display())
    }

    /// Removes the directory if it was made for this run only.
    pub(super) fn clean(&self) {
        if self.temporary
            && let Err(error) = fs::remove_dir_all(&self.dir)
        {
            eprintln!("leaseholdd dev: {}: {error}", self.dir.display());
        }
    }

    fn write(&self) -> io::Result<()> {
        let secret = self.dir.join("secret");
        if !secret.exists() {
            write_secret(&secret)?;
        }
        for place in &self.nodes {
            fs::write(&place.config, self.config(place, &secret)?)?;
        }
        Ok(())
    }

    fn config(&self, place: &Place, secret: &Path) -> io::Result<String> {
        let peers: Vec<_> = self
            .nodes
            .iter()
            .map(|place| format!("\"{}=127.0.0.1:{}\"", place.node, place.peer))
            .collect();
        let Place { node, client, peer, admin, .. } = place;
        let data = quoted(&self.dir.join(format!("node-{node}")))?;
        let secret = quoted(secret)?;
        Ok(format!(
            "cluster = \"dev\"\nnode-id = {node}\ndata-dir = {data}\nsecret-file = {secret}\n\
             peers = [{}]\nclient-listen = \"127.0.0.1:{client}\"\n\
             peer-listen = \"127.0.0.1:{peer}\"\nadmin-listen = \"127.0.0.1:{admin}\"\n",
            peers.join(", "),
        ))
    }
}

/// A path as a TOML string.
fn quoted(path: &Path) -> io::Result<String> {
    let text = path.to_str().ok_or_else(|| io::Error::other("the path is not UTF-8"))?;
    Ok(toml::Value::from(text).to_string())
}

fn temporary() -> PathBuf {
    std::env::temp_dir().join(format!("leasehold-dev-{}", hex(&random::<8>())))
}

fn write_secret(path: &Path) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    writeln!(file, "{}", hex(&random::<32>()))
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the kernel has random bytes");
    bytes
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn ports(options: &Options) -> Result<Vec<u16>, String> {
    let count = options.nodes * PORTS;
    if options.port != 0 {
        return consecutive(options.port, count)
            .ok_or_else(|| format!("--port {}: {count} ports do not fit", options.port));
    }
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (0..PORT_TRIES)
        .filter_map(|_| consecutive(random_port(), count))
        .find(|ports| ports.iter().all(is_free))
        .ok_or_else(|| format!("--port 0: found no {count} free ports"))
}

fn consecutive(first: u16, count: u16) -> Option<Vec<u16>> {
    Some((first..=first.checked_add(count - 1)?).collect())
}

/// Below the range from which the kernel takes the ports of outgoing connections: one of those
/// could otherwise take a port between the look and the node's start.
fn random_port() -> u16 {
    10_000 + u16::from_le_bytes(random()) % 20_000
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Settings};

    fn load(place: &Place) -> Config {
        let mut settings = Settings::new();
        settings.add_file(&place.config).unwrap();
        Config::resolve(&settings).unwrap()
    }

    #[test]
    fn configurations_are_right_and_the_secret_stays() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("with \"quotes\", \\ and blanks");
        let options = Options { nodes: 3, dir: Some(dir.clone()), port: 0 };
        let layout = Layout::make(&options).unwrap();
        let configs: Vec<_> = layout.nodes.iter().map(load).collect();
        assert!(configs.iter().all(|config| config.cluster == configs[0].cluster));
        let endpoints: Vec<_> =
            configs.iter().map(|config| config.client_advertise().to_string()).collect();
        assert_eq!(layout.endpoints(), endpoints.join(","));
        let secret = configs[0].secret().unwrap();
        layout.clean();
        let again = Layout::make(&options).unwrap();
        assert_eq!(load(&again.nodes[2]).secret().unwrap(), secret);
    }

    #[test]
    fn a_temporary_directory_is_removed() {
        let layout = Layout::make(&Options { nodes: 1, dir: None, port: 0 }).unwrap();
        assert!(layout.dir.join("secret").exists());
        layout.clean();
        assert!(!layout.dir.exists());
    }

    #[test]
    fn ports_are_consecutive_and_must_fit() {
        let options = |port| Options { nodes: 3, dir: None, port };
        assert_eq!(ports(&options(7400)).unwrap(), (7400..=7408).collect::<Vec<_>>());
        assert!(ports(&options(65528)).unwrap_err().contains("65528"));
    }
}
