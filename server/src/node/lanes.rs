//! The lanes between cores, as the router sees them.

use crate::net::{Hop, Hops};
use crate::rt::hop::{HopError, Outbox};

impl Hops for Outbox<Hop> {
    fn send(&self, core: usize, hop: Hop) -> Result<(), Hop> {
        self.try_send(core, hop).map_err(|error| match error {
            HopError::Full(hop) | HopError::Closed(hop) => hop,
        })
    }
}
