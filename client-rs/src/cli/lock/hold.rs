//! What the command runs under: one hold, several at once, or several one after the other.

use std::time::Duration;

use leasehold::{
    AcquireError, CallError, Client, Config, Guard, HoldWatch, LockAllRequest, MultiGuard, Place,
    Session, Ticket, Yields,
};

use super::super::beside;
use super::super::exit::CliError;
use super::keeper::say;
use super::{Order, OrderMode, Word};

/// How often the place in the queue is looked at.
const PLACES_EVERY: Duration = Duration::from_millis(500);

pub(super) enum Hold {
    One(Guard),
    /// Granted in one step, lost together.
    Several(MultiGuard),
    /// Each by itself.
    Each(Vec<Guard>),
}

impl Hold {
    pub(super) fn watches(&self) -> Vec<HoldWatch> {
        match self {
            Self::One(guard) => vec![guard.watch()],
            Self::Several(guard) => vec![guard.watch()],
            Self::Each(guards) => guards.iter().map(Guard::watch).collect(),
        }
    }

    /// The tokens, in the order of the request.
    pub(super) fn tokens(&self, order: &Order) -> Vec<u64> {
        match self {
            Self::One(guard) => vec![guard.token().0],
            Self::Several(guard) => guard.holds().iter().map(|(_, token)| token.0).collect(),
            Self::Each(guards) => {
                let of = |key: &String| guards.iter().find(|guard| guard.key() == key.as_str());
                order.keys().filter_map(of).map(|guard| guard.token().0).collect()
            }
        }
    }

    /// Requests to yield any of the keys.
    pub(super) fn yields(&self) -> Vec<Yields> {
        match self {
            Self::One(guard) => guard.yields().into_iter().collect(),
            Self::Several(guard) => guard.yields().unwrap_or_default(),
            Self::Each(guards) => guards.iter().filter_map(|guard| guard.yields().ok()).collect(),
        }
    }

    /// The slots that the permits took.
    pub(super) async fn slots(&self, order: &Order) -> Result<Vec<u32>, CallError> {
        match self {
            Self::One(guard) if order.takes_permits() => guard.slots().await,
            _ => Ok(Vec::new()),
        }
    }

    pub(super) async fn release(self) {
        // Lost or given back: it is not held either way.
        match self {
            Self::One(guard) => drop(guard.release().await),
            Self::Several(guard) => drop(guard.release().await),
            Self::Each(guards) => {
                for guard in guards {
                    let _ = guard.release().await;
                }
            }
        }
    }
}

pub(super) async fn acquire(order: &Order) -> Result<(Session, Hold), CliError> {
    let config = Config::new(&order.endpoints)?
        .call_timeout(Duration::from_millis(order.timeout_ms))
        .label(order.label.clone());
    let client = Client::with_config(config).await?;
    let session = client.session(Duration::from_millis(order.ttl_ms))?;
    let hold = if order.each {
        Hold::Each(acquire_each(&session, order).await?)
    } else if order.also.is_empty() {
        Hold::One(acquire_one(&session, order).await?)
    } else {
        Hold::Several(acquire_several(&session, order).await?)
    };
    Ok((session, hold))
}

async fn acquire_one(session: &Session, order: &Order) -> Result<Guard, AcquireError> {
    let mut request = session.lock(order.key.clone());
    if let Some(value) = &order.value {
        request = request.value(value.clone());
    }
    if let Some(wait) = order.wait() {
        request = request.wait(wait);
    }
    request = match order.mode {
        OrderMode::Exclusive => request,
        OrderMode::Shared => request.shared(),
        OrderMode::Permits { permits, limit } => request.permits(permits, limit),
    };
    let acquiring = request.lock_delay(order.lock_delay()).begin()?;
    let ticket = acquiring.ticket();
    beside(acquiring.granted(), tell_places(order, &ticket)).await
}

async fn acquire_several(session: &Session, order: &Order) -> Result<MultiGuard, AcquireError> {
    let keys = order.keys().cloned();
    let mut request = if order.mode == OrderMode::Shared {
        keys.fold(session.lock_all::<String>([]), LockAllRequest::and_shared)
    } else {
        session.lock_all(keys)
    };
    if let Some(value) = &order.value {
        request = request.value(value.clone());
    }
    if let Some(wait) = order.wait() {
        request = request.wait(wait);
    }
    let acquiring = request.lock_delay(order.lock_delay()).begin()?;
    let ticket = acquiring.ticket();
    beside(acquiring.granted(), tell_places(order, &ticket)).await
}

async fn acquire_each(session: &Session, order: &Order) -> Result<Vec<Guard>, AcquireError> {
    let mut request = session.lock_each(order.keys().cloned()).lock_delay(order.lock_delay());
    if let Some(value) = &order.value {
        request = request.value(value.clone());
    }
    if let Some(wait) = order.wait() {
        request = request.wait(wait);
    }
    request.acquire().await
}

/// Tells the supervisor the place in the queue as it changes, if that is wanted.
async fn tell_places(order: &Order, ticket: &Ticket) {
    if !order.show_place {
        return;
    }
    let mut places = ticket.places(PLACES_EVERY);
    while let Ok(Some(place)) = places.next().await {
        let Place { position, waiters_total, holders } = place;
        let held_by = holders.first().map(|holder| (holder.label.clone(), holder.token.0));
        let _ = say(&Word::Place { position, waiters_total, held_by }).await;
    }
}
