//! Mailboxes between cores: one lane of glommio's shared channel for each ordered pair of cores.
//!
//! A full lane refuses at once; what to answer then is the sender's business (*busy*, usually), so
//! two cores can never wait for each other's room. A reply travels the reverse lane as a message
//! like any other.

use std::collections::BTreeMap;
use std::rc::Rc;

use glommio::GlommioError;
use glommio::ResourceType;
use glommio::channels::shared_channel::{
    ConnectedSender, SharedReceiver, SharedSender, new_bounded,
};
use openraft_rt::{AsyncRuntime, MpscReceiver, MpscSender};

use super::channels::{OneshotSender, Receiver, Sender, channel, oneshot};
use super::glommio::GlommioRt;

/// Why a message was not taken; it comes back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum HopError<T> {
    /// The lane holds all it can.
    #[error("the other core's mailbox is full")]
    Full(T),
    /// The other core is gone.
    #[error("the other core is gone")]
    Closed(T),
}

/// One core's ends of all its lanes, before the core runs.
#[derive(Debug)]
pub struct Ports<T: Send> {
    capacity: usize,
    to: BTreeMap<usize, SharedSender<T>>,
    from: BTreeMap<usize, SharedReceiver<T>>,
}

/// Lanes of `capacity` messages between each two of `cores` cores; element *i* is core *i*'s.
pub fn lanes<T: Send + 'static>(cores: usize, capacity: usize) -> Vec<Ports<T>> {
    assert!(capacity > 0, "a lane holds at least one message");
    let empty = |_| Ports { capacity, to: BTreeMap::new(), from: BTreeMap::new() };
    let mut ports: Vec<Ports<T>> = (0..cores).map(empty).collect();
    for source in 0..cores {
        for target in (0..cores).filter(|target| *target != source) {
            let (sender, receiver) = new_bounded(capacity);
            ports[source].to.insert(target, sender);
            ports[target].from.insert(source, receiver);
        }
    }
    ports
}

impl<T: Send + 'static> Ports<T> {
    /// Joins the lanes. Waits until every other core does the same.
    pub async fn connect(self) -> (Outbox<T>, Mailbox<T>) {
        let (arrived, messages) = channel(self.capacity);
        // Both directions at once: a core that waited for its senders before it offered its
        // receivers would wait for ever.
        let mut joined = Vec::new();
        for (source, lane) in self.from {
            let (tell, told) = oneshot();
            drop(GlommioRt::spawn(pump(source, lane, arrived.clone(), tell)));
            joined.push(told);
        }
        let mut lanes = BTreeMap::new();
        for (target, lane) in self.to {
            lanes.insert(target, lane.connect().await);
        }
        for told in joined {
            told.await.expect("a pump joins before it ends");
        }
        (Outbox { lanes: Rc::new(lanes) }, Mailbox { messages })
    }
}

/// One task per lane, because a glommio channel remembers a waker for every poll that found it
/// empty: a task that polled several lanes would leave one behind in each quiet lane.
async fn pump<T: Send + 'static>(
    source: usize,
    lane: SharedReceiver<T>,
    arrived: Sender<(usize, T)>,
    joined: OneshotSender<()>,
) {
    let lane = lane.connect().await;
    // `connect` waits for this; if it was given up, the first message finds nobody.
    let _ = joined.send(());
    while let Some(message) = lane.recv().await {
        if arrived.send((source, message)).await.is_err() {
            return;
        }
    }
}

/// Sends to other cores.
#[derive(Debug)]
pub struct Outbox<T: Send> {
    lanes: Rc<BTreeMap<usize, ConnectedSender<T>>>,
}

impl<T: Send> Clone for Outbox<T> {
    fn clone(&self) -> Self {
        Self { lanes: Rc::clone(&self.lanes) }
    }
}

impl<T: Send + 'static> Outbox<T> {
    /// Puts a message into the lane to another core, without waiting. Panics if `core` is this
    /// core or none.
    pub fn try_send(&self, core: usize, message: T) -> Result<(), HopError<T>> {
        let lane = self.lanes.get(&core).expect("another core");
        match lane.try_send(message) {
            Ok(()) => Ok(()),
            Err(GlommioError::WouldBlock(ResourceType::Channel(message))) => {
                Err(HopError::Full(message))
            }
            Err(GlommioError::Closed(ResourceType::Channel(message))) => {
                Err(HopError::Closed(message))
            }
            Err(other) => unreachable!("a channel is full or closed, not {other}"),
        }
    }
}

/// Receives from all other cores.
#[derive(Debug)]
pub struct Mailbox<T> {
    messages: Receiver<(usize, T)>,
}

impl<T> Mailbox<T> {
    /// The next message and the core that sent it; `None` when all other cores are gone.
    pub async fn recv(&mut self) -> Option<(usize, T)> {
        self.messages.recv().await
    }
}
