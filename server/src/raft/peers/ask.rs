//! One question to a node that the book does not know, at an address that it does not keep.
//!
//! Owns a connection for as long as the question takes. Whether the node is one of the cluster's is
//! decided by whoever asks; until then nothing of it is remembered here.

use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::NodeId;
use openraft::AsyncRuntime;

use super::identity::Class;
use super::lane::{CONNECT_TIMEOUT, read_answers};
use super::{HandshakeError, PeerError, Peers};
use crate::env::{Clock, Env};

impl<E: Env> Peers<E> {
    /// Asks `node` at `addr` over a connection of its own; connects within a second, and then waits
    /// for the answer as long as `timeout`.
    pub async fn ask_at(
        self: &Rc<Self>,
        node: NodeId,
        addr: &str,
        kind: u8,
        body: &[u8],
        timeout: Duration,
    ) -> Result<Vec<u8>, PeerError> {
        let made = E::Rt::timeout(CONNECT_TIMEOUT, self.dial(node, Class::Forward, addr)).await;
        let Ok(made) = made else {
            let text = format!("not connected within {CONNECT_TIMEOUT:?}");
            return Err(PeerError::Unreachable(text));
        };
        let (connection, inbox) = made.map_err(refused)?;
        let asked =
            connection.request(kind, self.clock.now(), None, |out| out.extend_from_slice(body));
        let reading = connection.clone();
        drop(E::Rt::spawn(async move {
            read_answers(&reading, inbox).await;
            reading.fail_all();
        }));
        let answered = match asked {
            Ok(answer) => E::Rt::timeout(timeout, answer).await,
            Err(error) => Ok(Err(error)),
        };
        connection.fail_all();
        answered.unwrap_or(Err(PeerError::TimedOut))
    }
}

fn refused(error: HandshakeError) -> PeerError {
    match error {
        HandshakeError::Refused { code, message, .. }
        | HandshakeError::RefusedByPeer { code, message } => PeerError::Refused { code, message },
        HandshakeError::Broken(_) | HandshakeError::Malformed(_) => {
            PeerError::Unreachable(error.to_string())
        }
    }
}
