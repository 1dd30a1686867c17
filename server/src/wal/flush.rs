//! The flush task: group commit.
//!
//! One flush in flight. While it runs, the next batch grows in staging; there is no timer to wait
//! for more. A batch is copied into the map, synced, and only then are its callbacks called, in
//! order, for all shards. The task owns the writer and is never cancelled: a sync whose result is
//! lost could not be trusted.

use std::rc::Rc;

use leasehold_protocol::ids::ShardId;
use leasehold_protocol::planted;
use openraft::AsyncRuntime;
use openraft_rt::Select2;

use super::error::Failure;
use super::inner::Inner;
use super::record::Op;
use super::writer::Writer;
use crate::env::Env;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    Batch,
    Seal,
    Stop,
}

/// Runs until the log is closed or fails.
pub(crate) async fn run<E: Env>(inner: Rc<Inner<E>>, mut writer: Writer<E>) {
    loop {
        let work = next_work(&inner, writer.is_sealed()).await;
        if inner.has_failed() {
            return;
        }
        if let Err(failure) = flush(&inner, &mut writer, work).await {
            inner.fail(failure);
            return;
        }
        if work == Work::Stop {
            inner.closed.set(true);
            inner.notify_all();
            return;
        }
    }
}

async fn next_work<E: Env>(inner: &Inner<E>, sealed: bool) -> Work {
    let is_due = || !inner.staging.borrow().is_empty() || inner.closing.get() || inner.has_failed();
    if sealed {
        // A commit position alone is worth a seal, once the log has been quiet for a while.
        inner.work.until(|| is_due() || inner.staging.borrow().has_committed()).await;
    }
    if !is_due() {
        let pause = E::Rt::sleep(inner.config.seal_after);
        if let Select2::Second(()) = E::Rt::select2(inner.work.until(is_due), pause).await {
            return Work::Seal;
        }
    }
    if inner.staging.borrow().is_empty() { Work::Stop } else { Work::Batch }
}

async fn flush<E: Env>(
    inner: &Rc<Inner<E>>,
    writer: &mut Writer<E>,
    work: Work,
) -> Result<(), Failure> {
    let batch = inner.staging.borrow_mut().begin_batch(inner.config.batch_len_max);
    let mut stored = 0;
    let mut switched = false;
    for (shard, op) in batch {
        if let Some(op) = op {
            if !writer.fits(&op) {
                sync_and_complete(inner, writer, std::mem::take(&mut stored)).await?;
                writer.switch().await?;
                switched = true;
                if !writer.fits(&op) {
                    return Err(no_room(writer));
                }
            }
            writer.store(shard, op);
        }
        stored += 1;
    }
    if work != Work::Batch && !writer.is_sealed() {
        writer.store(ShardId(0), Op::Seal);
    }
    sync_and_complete(inner, writer, stored).await?;
    if switched {
        inner.report_pins();
    }
    Ok(())
}

async fn sync_and_complete<E: Env>(
    inner: &Inner<E>,
    writer: &mut Writer<E>,
    stored: usize,
) -> Result<(), Failure> {
    // Planted (G5): the callbacks are called first, the sync comes after.
    if planted!("ack-before-sync") {
        let early = inner.staging.borrow_mut().complete(stored);
        for done in early {
            done(Ok(()));
        }
        inner.progress.notify();
        return if writer.is_dirty() { writer.sync().await } else { Ok(()) };
    }
    if writer.is_dirty() {
        writer.sync().await?;
    }
    // An upkeep task may have latched a failure meanwhile and told every callback so.
    if let Some(failure) = inner.failure() {
        return Err((*failure).clone());
    }
    let durable = inner.staging.borrow_mut().complete(stored);
    for done in durable {
        done(Ok(()));
    }
    inner.progress.notify();
    Ok(())
}

fn no_room<E: Env>(writer: &Writer<E>) -> Failure {
    let error = std::io::Error::other("an entry does not fit beside the checkpoint");
    Failure::new("write to", &writer.name(), &error)
}
