//! Segments ahead of need, and segments nobody needs: two tasks beside the flush task.
//!
//! The flush task takes spares and never makes one. A disk that is full when a spare is made ahead
//! is not yet a failure: the log has room left, and a deletion may free some; it is one when the
//! segment is needed. Every other error is final at once.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use super::error::Failure;
use super::header::segment_name;
use super::inner::Inner;
use crate::env::{Disk, Env};

/// Blank segments, ready.
pub(crate) struct Spares<S> {
    ready: VecDeque<(u64, S)>,
    /// The number of the next segment to be made.
    next_number: u64,
    /// The flush task waits for one.
    demanded: bool,
    /// Making one ahead of need met a full disk.
    disk_full: bool,
}

impl<S> Spares<S> {
    /// `ready` in ascending order; `next_number` is above all of them.
    pub(crate) fn new(ready: VecDeque<(u64, S)>, next_number: u64) -> Self {
        Self { ready, next_number, demanded: false, disk_full: false }
    }
}

impl<E: Env> Inner<E> {
    /// The next blank segment; waits until there is one.
    pub(crate) async fn take_spare(&self) -> Result<(u64, <E::Disk as Disk>::Segment), Failure> {
        self.spares.borrow_mut().demanded = true;
        self.upkeep.notify();
        self.upkeep.until(|| self.has_failed() || !self.spares.borrow().ready.is_empty()).await;
        if let Some(failure) = self.failure() {
            return Err((*failure).clone());
        }
        let mut spares = self.spares.borrow_mut();
        spares.demanded = false;
        let spare = spares.ready.pop_front().expect("waited for it");
        drop(spares);
        self.upkeep.notify();
        Ok(spare)
    }

    fn wants_spare(&self) -> bool {
        let spares = self.spares.borrow();
        let short = spares.ready.len() < self.config.spare_segments;
        short && (spares.demanded || !spares.disk_full)
    }

    fn has_ended(&self) -> bool {
        self.has_failed() || self.closed.get()
    }
}

/// Makes a blank segment and maps it.
pub(crate) async fn make_segment<D: Disk>(
    disk: &D,
    number: u64,
    len: u64,
) -> io::Result<(u64, D::Segment)> {
    let name = segment_name(number);
    disk.create_segment(&name, len).await?;
    Ok((number, disk.open_segment(&name).await?))
}

/// Keeps spares ready until the log ends.
pub(crate) async fn make_spares<E: Env>(inner: Rc<Inner<E>>) {
    loop {
        inner.upkeep.until(|| inner.has_ended() || inner.wants_spare()).await;
        if inner.has_ended() {
            return;
        }
        let number = inner.spares.borrow().next_number;
        let made = make_segment(&inner.disk, number, inner.config.segment_len).await;
        let mut spares = inner.spares.borrow_mut();
        match made {
            Ok(segment) => {
                spares.disk_full = false;
                spares.next_number += 1;
                spares.ready.push_back(segment);
                inner.counters.borrow_mut().made_segment(inner.config.segment_len);
            }
            Err(error) if error.kind() == io::ErrorKind::StorageFull && !spares.demanded => {
                tracing::warn!(%error, "no room for the WAL's next segment");
                spares.disk_full = true;
            }
            Err(error) => {
                drop(spares);
                inner.fail(Failure::new("make", &segment_name(number), &error));
                return;
            }
        }
        drop(spares);
        inner.upkeep.notify();
    }
}

/// Deletes segments that nobody needs, oldest first, until the log ends.
pub(crate) async fn delete_segments<E: Env>(inner: Rc<Inner<E>>) {
    loop {
        let deletable = || inner.ledger.borrow().deletable();
        inner.upkeep.until(|| inner.has_ended() || deletable().is_some()).await;
        let Some(number) = deletable().filter(|_| !inner.has_ended()) else { return };
        if let Err(error) = inner.disk.remove(&segment_name(number)).await {
            inner.fail(Failure::new("delete", &segment_name(number), &error));
            return;
        }
        inner.ledger.borrow_mut().forget_segment(number);
        // Room again: a spare that met a full disk may be tried once more.
        inner.spares.borrow_mut().disk_full = false;
        inner.upkeep.notify();
    }
}
