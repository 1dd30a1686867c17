//! Drives `Birth` over a transport: the thin asynchronous part.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_protocol::birth::{
    BirthAnswer, BirthRecord, BirthReply, JoinAnswer, KIND_JOIN, KIND_PROPOSE, KIND_QUERY,
    TEXT_LEN_MAX,
};
use leasehold_protocol::ids::NodeId;
use rkyv::rancor;

use super::birth::{Birth, BirthError, BirthStore, Mint, Promise, Step, pack};
use super::told::Told;

/// Between two rounds of a birth under way.
const PAUSE: Duration = Duration::from_millis(100);
/// Between two rounds of a node that waits for admission.
const PAUSE_ADMISSION: Duration = Duration::from_secs(5);

/// How nodes reach each other before they are a cluster.
#[allow(async_fn_in_trait, reason = "one thread per core: no future here is ever Send")]
pub trait BirthTransport {
    /// Sends one message and returns the body of its reply; `None` for any failure, which the
    /// transport logs itself. Ends within a bounded time.
    async fn ask(&self, node: NodeId, kind: u8, body: Vec<u8>) -> Option<Vec<u8>>;
    /// Waits.
    async fn pause(&self, duration: Duration);
}

/// Returns the cluster's record once this node may run its shards; until then it asks and
/// proposes. `Birth::serve` must be running beside it for the other nodes.
pub async fn found<T: BirthTransport, S: BirthStore>(
    birth: &RefCell<Birth>,
    store: &RefCell<S>,
    transport: &T,
    mint: impl Fn() -> Mint,
) -> Result<BirthRecord, BirthError> {
    loop {
        let step = birth.borrow().step();
        let promise = match step {
            Step::Done => {
                let birth = birth.borrow();
                return Ok(birth.record().expect("done means founded").clone());
            }
            Step::Ask(nodes) => {
                let answers = ask_all(transport, nodes).await;
                birth.borrow_mut().answered(&answers, &mint)?
            }
            Step::Propose(proposal, nodes) => {
                propose_all(birth, transport, &pack(&proposal), nodes).await
            }
        };
        log(birth);
        match promise {
            Some(promise) => save(birth, store, promise)?,
            None if birth.borrow().step() == Step::Done => {}
            None => {
                // Bound first: a borrow must not last over the wait.
                let duration = pause(&birth.borrow());
                transport.pause(duration).await;
            }
        }
    }
}

/// Waits until the cluster that `nodes` belong to admits this node, and returns its record.
pub async fn join<T: BirthTransport, S: BirthStore>(
    birth: &RefCell<Birth>,
    store: &RefCell<S>,
    transport: &T,
    nodes: &[NodeId],
) -> Result<BirthRecord, BirthError> {
    let me = birth.borrow().me().clone();
    let body = pack(&me);
    loop {
        if let Some(record) = birth.borrow().record() {
            return Ok(record.clone());
        }
        let others = nodes.iter().copied().filter(|node| *node != me.node);
        let body = &body;
        let asks = others.map(|node| async move {
            let body = transport.ask(node, KIND_JOIN, body.clone()).await?;
            Some((node, rkyv::from_bytes::<JoinAnswer, rancor::Error>(&body).ok()?))
        });
        for (node, answer) in futures_util::future::join_all(asks).await.into_iter().flatten() {
            let promise = birth.borrow_mut().joined(node, &answer)?;
            if let Some(promise) = promise {
                save(birth, store, promise)?;
            }
        }
        log(birth);
        if birth.borrow().record().is_none() {
            transport.pause(PAUSE).await;
        }
    }
}

fn save<S: BirthStore>(
    birth: &RefCell<Birth>,
    store: &RefCell<S>,
    promise: Promise,
) -> Result<(), BirthError> {
    store.borrow_mut().save(&promise)?;
    birth.borrow_mut().saved(promise);
    Ok(())
}

async fn ask_all<T: BirthTransport>(
    transport: &T,
    nodes: Vec<NodeId>,
) -> BTreeMap<NodeId, BirthAnswer> {
    let asks = nodes.into_iter().map(|node| async move {
        let body = transport.ask(node, KIND_QUERY, Vec::new()).await?;
        let answer = rkyv::from_bytes::<BirthAnswer, rancor::Error>(&body).ok()?;
        is_bounded(&answer).then_some((node, answer))
    });
    futures_util::future::join_all(asks).await.into_iter().flatten().collect()
}

async fn propose_all<T: BirthTransport>(
    birth: &RefCell<Birth>,
    transport: &T,
    body: &[u8],
    nodes: Vec<NodeId>,
) -> Option<Promise> {
    let asks = nodes.into_iter().map(|node| async move {
        let body = transport.ask(node, KIND_PROPOSE, body.to_vec()).await?;
        Some((node, rkyv::from_bytes::<BirthReply, rancor::Error>(&body).ok()?))
    });
    let replies = futures_util::future::join_all(asks).await;
    let mut birth = birth.borrow_mut();
    replies.into_iter().flatten().filter_map(|(node, reply)| birth.replied(node, reply)).last()
}

/// What a well-formed peer never exceeds; the rest is checked by `BirthRecord::is_well_formed`.
fn is_bounded(answer: &BirthAnswer) -> bool {
    answer.member.peer_addr.len() <= TEXT_LEN_MAX && answer.member.client_addr.len() <= TEXT_LEN_MAX
}

fn pause(birth: &Birth) -> Duration {
    if birth.waits_for_admission() { PAUSE_ADMISSION } else { PAUSE }
}

fn log(birth: &RefCell<Birth>) {
    while let Some(told) = birth.borrow_mut().poll_told() {
        match told {
            Told::WaitsFor(_) => tracing::info!("{told}"),
            Told::WaitsForAdmission { .. } => tracing::error!("{told}"),
            _ => tracing::warn!("{told}"),
        }
    }
}

#[cfg(test)]
mod tests;
