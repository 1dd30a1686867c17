//! `Places`: where an acquire waits, as it changes.
//!
//! Nobody is told of a place who did not ask, and no release costs more because somebody did: who
//! asks reads its own place now and then, and several changes in between are told as one.

use std::time::Duration;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::Token;
use leasehold_protocol::reply::Claimed;

use crate::error::{CallError, Failure};
use crate::session::{Place, Ticket};

/// The shortest time between two looks.
const LOOK_MIN: Duration = Duration::from_millis(100);

/// The place of a waiting acquire, as a stream. It claims nothing; dropping it ends it.
#[derive(Debug)]
pub struct Places {
    ticket: Ticket,
    every: Duration,
    looked: bool,
    /// Position, and the tokens of the holders.
    told: Option<(u32, Vec<Token>)>,
}

impl Places {
    pub(crate) fn new(ticket: Ticket, every: Duration) -> Self {
        Self { ticket, every: every.max(LOOK_MIN), looked: false, told: None }
    }

    /// The present place once it waits, then each time that another place or another holder is
    /// seen. `None` when it does not wait any more. While the cluster cannot answer, nothing is
    /// told.
    pub async fn next(&mut self) -> Result<Option<Place>, CallError> {
        while self.ticket.is_pending() {
            if std::mem::replace(&mut self.looked, true) {
                tokio::time::sleep(self.every).await;
            }
            let place = match self.ticket.claim().await.map_err(refused) {
                Ok(Claimed::Waits(waiting)) => Place::furthest(vec![waiting]),
                Ok(Claimed::WaitsAll(all)) => Place::furthest(all),
                Ok(Claimed::Holds(_) | Claimed::HoldsAll(_)) => return Ok(None),
                // It was not sent or not taken in yet, or it is over, which will be known soon.
                Ok(Claimed::Over) | Err(None) => None,
                Err(Some(error)) => return Err(error),
            };
            let Some(place) = place else { continue };
            let tokens = place.holders.iter().map(|holder| holder.token).collect();
            let seen = Some((place.position, tokens));
            if seen != self.told {
                self.told = seen;
                return Ok(Some(place));
            }
        }
        Ok(None)
    }
}

/// An error that another look will not end.
fn refused(failure: Failure) -> Option<CallError> {
    let passing = matches!(failure.code, ErrorCode::NOT_QUEUED | ErrorCode::LEASE_DEAD);
    match CallError::from(failure) {
        error @ CallError::Refused(_) if !passing => Some(error),
        _ => None,
    }
}
