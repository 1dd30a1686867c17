//! The proxies of a cluster: one in front of each node's client port, and one for each direction
//! in which two nodes connect to each other.
//!
//! Invariant: a link that is cut holds what is sent on it, as a broken cable does under TCP, and
//! delivers it when it heals; nothing is lost but by `reset`.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;

use crate::proxy::{Proxy, Rules, Way};

/// See the module. Nodes are named by their ids.
#[derive(Debug, Default)]
pub struct Links {
    clients: BTreeMap<u64, Proxy>,
    /// By who connects and to whom.
    peers: BTreeMap<(u64, u64), Proxy>,
}

impl Links {
    /// Puts a proxy in front of a node's client port.
    pub(crate) fn add_client(&mut self, id: u64, client: SocketAddr) -> io::Result<()> {
        self.clients.insert(id, Proxy::start(client)?);
        Ok(())
    }

    /// Puts a proxy between `from` and the peer port of `to`.
    pub(crate) fn add_peer(&mut self, from: u64, to: u64, peer: SocketAddr) -> io::Result<()> {
        self.peers.insert((from, to), Proxy::start(peer)?);
        Ok(())
    }

    /// Where `from` reaches `to`, if there is a proxy between them.
    pub(crate) fn peer_addr(&self, from: u64, to: u64) -> Option<SocketAddr> {
        self.peers.get(&(from, to)).map(Proxy::addr)
    }

    /// The proxy in front of a node's client port, if there is one.
    pub fn client(&self, id: u64) -> Option<&Proxy> {
        self.clients.get(&id)
    }

    /// The proxies in front of client ports.
    pub fn clients(&self) -> impl Iterator<Item = &Proxy> {
        self.clients.values()
    }

    /// Sets one rule for all of those.
    pub fn set_clients(&self, rules: Rules) {
        self.clients().for_each(|proxy| proxy.set(rules));
    }

    /// Nothing passes between two nodes.
    pub fn cut(&self, a: u64, b: u64) {
        self.cut_way(a, b);
        self.cut_way(b, a);
    }

    /// Nothing passes from `from` to `to`; the other way is as it was.
    pub fn cut_way(&self, from: u64, to: u64) {
        let there = self.peer(from, to);
        there.set(Rules { to_server: Way::Hold, ..there.rules() });
        let back = self.peer(to, from);
        back.set(Rules { to_client: Way::Hold, ..back.rules() });
    }

    /// Cuts a node off from all others.
    pub fn isolate(&self, id: u64) {
        let others: Vec<u64> =
            self.peers.keys().map(|(_, to)| *to).filter(|to| *to != id).collect();
        for other in others {
            self.cut(id, other);
        }
    }

    /// Every link between nodes is whole again, and what was held is delivered.
    pub fn heal(&self) {
        self.peers.values().for_each(|proxy| proxy.set(Rules::default()));
    }

    /// Resets all connections between nodes.
    pub fn reset(&self) {
        self.peers.values().for_each(Proxy::reset_all);
    }

    fn peer(&self, from: u64, to: u64) -> &Proxy {
        self.peers.get(&(from, to)).expect("the cluster has proxies between its nodes")
    }
}
