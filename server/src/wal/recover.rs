//! Opening: what the segments on disk add up to, made durable, and a new segment begun.
//!
//! The order is the point, because after a crash what is read may sit in a cache of the device and
//! be gone after the next one:
//!
//! 1. read and judge everything; nothing on disk changes before it is known to be sound;
//! 2. sync the accepted prefix and the newest header;
//! 3. store and sync the header of a new segment, which names the cut;
//! 4. sync the directory, so that the new segment itself stays;
//! 5. store and sync its opening: a checkpoint, and the entries carried forward;
//! 6. only now hand the log out: no vote and no acknowledgement before.
//!
//! The old tail is never appended to. A second crash at any step finds either the old state, or
//! the cut that makes the bytes beyond it irrelevant.
//!
//! Entries of the newest old segments, up to a quarter of a segment in all, are carried into the
//! new one, and their segments become deletable: a node that starts again and again does not leave
//! a segment behind each time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use leasehold_protocol::ids::ShardId;
use leasehold_protocol::planted;

use super::checkpoint::Checkpoint;
use super::config::{WalConfig, WalIdentity};
use super::error::{Failure, WalError, WalFailed};
use super::header::{Cut, HEADER_LEN, segment_name};
use super::inner::Inner;
use super::ledger::Ledger;
use super::record::{Blob, Op, SEAL_LEN};
use super::replay::Replay;
use super::spares::{Spares, make_segment};
use super::survey::{Loaded, Survey, load};
use super::writer::Writer;
use crate::env::{Disk, Env};

/// Segments beyond `segments_max` that starts may add. A log that failed for want of a segment so
/// gets room for the snapshot and the purge that it needs.
const SEGMENTS_RESERVE: usize = 4;

type Entries = BTreeMap<ShardId, VecDeque<(u64, Blob)>>;

/// A log that is ready to be written to.
pub(crate) struct Opened<E: Env> {
    pub(crate) inner: Rc<Inner<E>>,
    pub(crate) writer: Writer<E>,
    pub(crate) entries: Entries,
}

/// See the module.
pub(crate) async fn open<E: Env>(
    config: WalConfig,
    identity: WalIdentity,
    disk: E::Disk,
    salts: Box<dyn FnMut() -> u64>,
) -> Result<Opened<E>, WalError> {
    let problems = config.validate();
    if !problems.is_empty() {
        return Err(WalError::Config(problems));
    }
    let survey = Survey::take(&disk, &identity, config.segment_len).await?;
    let Loaded { replay, head, torn_tail } = load(&disk, &survey).await?;
    let Replay { mut ledger, entries } = replay;
    if let Some(torn_tail) = &torn_tail {
        tracing::warn!(core = identity.core, "the WAL is cut at {torn_tail}, never acknowledged");
    }
    make_durable(&disk, [head.number, survey.newest()]).await?;
    let carry = Carry::choose(&ledger, &entries, carry_len_max(&ledger, config.segment_len));
    let kept = ledger.segments_up_to(carry.base.number);
    let kept_max = config.segments_max + SEGMENTS_RESERVE;
    if kept >= kept_max {
        return Err(WalError::TooManySegments { kept, kept_max });
    }
    let (blank, spares) = take_blank(&disk, &survey, config.segment_len).await?;
    survey.void_segments(&ledger).for_each(|number| ledger.add_void_segment(number));
    let mut inner = Inner::<E>::new(config, identity, disk, salts, ledger, spares);
    inner.torn_tail = torn_tail;
    let inner = Rc::new(inner);
    let writer = begin(&inner, blank, head, &carry, &entries).await.map_err(failed)?;
    Ok(Opened { inner, writer, entries })
}

/// Syncs the segment in which the log ends, and the newest: a process that was killed while it synced
/// a header leaves one that is to be read and can still vanish. Beside the header that is written
/// next, its segment would then look like one that lost its own.
async fn make_durable<D: Disk>(disk: &D, numbers: [u64; 2]) -> Result<(), WalError> {
    for number in BTreeSet::from(numbers) {
        // Planted (G5): what was read may sit in a cache, and be gone after the next crash.
        if number != 0 && !planted!("recovery-without-sync") {
            let name = segment_name(number);
            disk.sync_file(&name).await.map_err(|source| WalError::io("sync", &name, source))?;
        }
    }
    Ok(())
}

/// Bytes of older segments' entries that are copied forward at most: a quarter of a segment, less if
/// the checkpoint leaves less room beside itself and a seal.
fn carry_len_max(ledger: &Ledger, segment_len: u64) -> u64 {
    let checkpoint = Op::Checkpoint(Checkpoint { carried: 0, shards: ledger.shards().clone() });
    let taken = HEADER_LEN + checkpoint.stored_len() + SEAL_LEN;
    segment_len.saturating_sub(taken).min(segment_len / 4)
}

fn failed(failure: Failure) -> WalError {
    WalError::Failed(WalFailed::Failed(failure.into()))
}

async fn begin<E: Env>(
    inner: &Rc<Inner<E>>,
    blank: (u64, <E::Disk as Disk>::Segment),
    head: Cut,
    carry: &Carry,
    entries: &Entries,
) -> Result<Writer<E>, Failure> {
    let mut writer = Writer::begin(inner.clone(), blank, head, carry.base).await?;
    let synced = inner.disk.sync_dir().await;
    synced.map_err(|error| Failure::new("sync the directory of", &writer.name(), &error))?;
    let checkpoint = carry.checkpoint(&inner.ledger.borrow());
    writer.store_opening(checkpoint)?;
    for (shard, index, payload) in carry.entries(entries) {
        let op = Op::Entry { index, payload: payload.clone() };
        assert!(writer.fits(&op), "what is carried fits beside the checkpoint");
        writer.store(shard, op);
    }
    writer.sync().await?;
    Ok(writer)
}

type Blank<D> = (u64, <D as Disk>::Segment);

/// The blank segment to begin with, and the spares behind it. Segment files that were never used
/// and cannot be are deleted.
async fn take_blank<D: Disk>(
    disk: &D,
    survey: &Survey,
    segment_len: u64,
) -> Result<(Blank<D>, Spares<D::Segment>), WalError> {
    for number in &survey.unusable {
        let name = segment_name(*number);
        disk.remove(&name).await.map_err(|source| WalError::io("delete", &name, source))?;
    }
    let mut ready = VecDeque::new();
    for number in &survey.blank {
        let name = segment_name(*number);
        let opened = disk.open_segment(&name).await;
        ready.push_back((*number, opened.map_err(|e| WalError::io("map", &name, e))?));
    }
    let mut next_number = survey.number_max() + 1;
    if ready.is_empty() {
        let name = segment_name(next_number);
        let made = make_segment(disk, next_number, segment_len).await;
        ready.push_back(made.map_err(|source| WalError::io("make", &name, source))?);
        next_number += 1;
    }
    let first = ready.pop_front().expect("there is at least one");
    Ok((first, Spares::new(ready, next_number)))
}

/// Which entries are copied into the new segment.
struct Carry {
    /// The newest older segment that stays needed.
    base: Cut,
    /// First index carried, by shard.
    from: BTreeMap<ShardId, u64>,
}

impl Carry {
    /// Takes whole segments, newest first, while their entries stay within `len_max` bytes.
    fn choose(ledger: &Ledger, entries: &Entries, len_max: u64) -> Self {
        let mut carry = Self { base: Cut::default(), from: BTreeMap::new() };
        let mut len = 0;
        for (cut, spans) in ledger.chain_of_needed() {
            for (shard, (first, last)) in spans {
                len += stored_len(entries, *shard, *first, *last);
            }
            if len > len_max {
                carry.base = cut;
                break;
            }
            carry.from.extend(spans.iter().map(|(shard, (first, _))| (*shard, *first)));
        }
        carry
    }

    fn checkpoint(&self, ledger: &Ledger) -> Checkpoint {
        let mut shards = ledger.shards().clone();
        let mut carried = 0;
        for (shard, from) in &self.from {
            let range = &mut shards.get_mut(shard).expect("a shard with entries is known").range;
            carried += range.next - from;
            range.keep(0, *from);
        }
        Checkpoint { carried: u32::try_from(carried).expect("bounded by a segment"), shards }
    }

    fn entries<'a>(
        &'a self,
        entries: &'a Entries,
    ) -> impl Iterator<Item = (ShardId, u64, &'a Blob)> {
        self.from.iter().flat_map(move |(shard, from)| {
            let carried = entries[shard].iter().filter(move |(index, _)| index >= from);
            carried.map(|(index, payload)| (*shard, *index, payload))
        })
    }
}

fn stored_len(entries: &Entries, shard: ShardId, first: u64, last: u64) -> u64 {
    let entries = entries.get(&shard).into_iter().flatten();
    let wanted = entries.filter(|(index, _)| (first..=last).contains(index));
    wanted
        .map(|(index, payload)| Op::Entry { index: *index, payload: payload.clone() }.stored_len())
        .sum()
}
