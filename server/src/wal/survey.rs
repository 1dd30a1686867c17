//! Reads what is on disk and judges it, changing nothing.
//!
//! `Survey` looks at first pages; `load` follows the links from the newest segment and reads only
//! the segments that count.

use std::collections::BTreeMap;

use super::config::WalIdentity;
use super::error::{TornTail, WalError};
use super::header::{
    COUNTER_MAX, Cut, FirstPage, HEADER_LEN, Header, segment_name, segment_number,
};
use super::ledger::Ledger;
use super::replay::Replay;
use super::scan::{Scan, scan};
use crate::env::Disk;

/// The segment files by what their first page says.
pub(crate) struct Survey {
    headers: BTreeMap<u64, Header>,
    /// Made ahead, never used, of the right length; ascending.
    pub(crate) blank: Vec<u64>,
    /// Never used and no longer usable: of another length, or with a header torn by a crash.
    pub(crate) unusable: Vec<u64>,
}

impl Survey {
    /// Looks at every segment file.
    pub(crate) async fn take<D: Disk>(
        disk: &D,
        identity: &WalIdentity,
        segment_len: u64,
    ) -> Result<Self, WalError> {
        let names = disk.list().await;
        let names = names.map_err(|source| WalError::io("list", "the directory", source))?;
        let mut survey = Self { headers: BTreeMap::new(), blank: Vec::new(), unusable: Vec::new() };
        for number in names.iter().filter_map(|name| segment_number(name)) {
            survey.add(disk, identity, segment_len, number).await?;
        }
        survey.blank.sort_unstable();
        survey.check_order()?;
        Ok(survey)
    }

    async fn add<D: Disk>(
        &mut self,
        disk: &D,
        identity: &WalIdentity,
        segment_len: u64,
        number: u64,
    ) -> Result<(), WalError> {
        let file = segment_name(number);
        let page = disk.read_at(&file, 0, HEADER_LEN as usize).await;
        match Header::decode(&page.map_err(|source| WalError::io("read", &file, source))?) {
            FirstPage::Valid(header) => {
                check_identity(&file, identity, &header.identity)?;
                check_links(&file, number, &header)?;
                self.headers.insert(number, *header);
            }
            FirstPage::Version(found) => return Err(WalError::Version { file, found }),
            page @ (FirstPage::Blank | FirstPage::Bad) => {
                let len = require_blank_body(disk, &file).await?;
                let usable = page == FirstPage::Blank && len == segment_len;
                if usable { &mut self.blank } else { &mut self.unusable }.push(number);
            }
        }
        Ok(())
    }

    /// A segment without a header was made ahead, so nothing written can be newer.
    fn check_order(&self) -> Result<(), WalError> {
        let Some((newest, _)) = self.headers.last_key_value() else { return Ok(()) };
        let unused = self.blank.iter().chain(&self.unusable);
        match unused.min() {
            Some(number) if number < newest => Err(WalError::Damaged {
                file: segment_name(*number),
                offset: 0,
                reason: "it has no header, though a newer segment has one".into(),
            }),
            _ => Ok(()),
        }
    }

    /// The newest segment with a header; 0 if there is none.
    pub(crate) fn newest(&self) -> u64 {
        self.headers.last_key_value().map_or(0, |(number, _)| *number)
    }

    /// The highest number that any segment file has; 0 if there is none.
    pub(crate) fn number_max(&self) -> u64 {
        let newest = self.headers.keys().last();
        self.blank.iter().chain(&self.unusable).chain(newest).copied().max().unwrap_or(0)
    }

    /// Segments with a header that the log no longer reaches.
    pub(crate) fn void_segments(&self, ledger: &Ledger) -> impl Iterator<Item = u64> + use<> {
        let void: Vec<u64> =
            self.headers.keys().copied().filter(|number| !ledger.has_segment(*number)).collect();
        void.into_iter()
    }
}

/// Reads a file without a header to its end; errors unless nothing was ever written behind the
/// first page. Returns its length.
async fn require_blank_body<D: Disk>(disk: &D, file: &str) -> Result<u64, WalError> {
    let bytes = disk.read(file).await.map_err(|source| WalError::io("read", file, source))?;
    let body = bytes.get(HEADER_LEN as usize..).unwrap_or_default();
    match body.iter().position(|byte| *byte != 0) {
        None => Ok(bytes.len() as u64),
        Some(position) => Err(WalError::Damaged {
            file: file.to_owned(),
            offset: 0,
            reason: format!(
                "its header is not valid, though records were written behind it (offset {})",
                HEADER_LEN + position as u64
            ),
        }),
    }
}

fn check_identity(file: &str, expected: &WalIdentity, found: &WalIdentity) -> Result<(), WalError> {
    let pairs = [
        ("cluster", found.cluster.to_string(), expected.cluster.to_string()),
        ("node", found.node.to_string(), expected.node.to_string()),
        ("disk", found.disk.to_string(), expected.disk.to_string()),
        ("core count", found.cores.to_string(), expected.cores.to_string()),
        ("core", found.core.to_string(), expected.core.to_string()),
    ];
    match pairs.into_iter().find(|(_, found, expected)| found != expected) {
        None => Ok(()),
        Some((what, found, expected)) => {
            Err(WalError::Foreign { file: file.to_owned(), what, found, expected })
        }
    }
}

fn check_links(file: &str, number: u64, header: &Header) -> Result<(), WalError> {
    let renamed = header.number != number;
    let backwards = header.prev.number < number && header.base.number <= header.prev.number;
    let counts = [number, header.first_seq, header.prev.next_seq, header.base.next_seq];
    if !renamed && backwards && counts.iter().all(|count| *count <= COUNTER_MAX) {
        return Ok(());
    }
    Err(WalError::Damaged {
        file: file.to_owned(),
        offset: 0,
        reason: format!(
            "its header says segment {} with record {} after {} and {}",
            header.number, header.first_seq, header.prev.number, header.base.number
        ),
    })
}

/// What the segments that count add up to.
#[derive(Default)]
pub(crate) struct Loaded {
    pub(crate) replay: Replay,
    /// Where the log ends.
    pub(crate) head: Cut,
    /// What is behind that end and was never whole.
    pub(crate) torn_tail: Option<TornTail>,
}

/// Reads the segments that count.
pub(crate) async fn load<D: Disk>(disk: &D, survey: &Survey) -> Result<Loaded, WalError> {
    let mut replay = Replay::default();
    let Some((_, newest)) = survey.headers.last_key_value() else {
        return Ok(Loaded::default());
    };
    let newest_scan = scan_segment(disk, newest, None).await?;
    // An opening that is not all there was never relied on: the log still ends where it did.
    let whole = newest_scan.opening_len().is_some();
    let (head, torn_tail) = if whole {
        let Scan { end, next_seq, torn_len, .. } = newest_scan;
        let file = segment_name(newest.number);
        let torn_tail = TornTail { file, offset: end, seq: next_seq, len: torn_len };
        (Cut { number: newest.number, end, next_seq }, (torn_len > 0).then_some(torn_tail))
    } else {
        (newest.prev, None)
    };
    let mut newest_scan = whole.then_some(newest_scan);
    for (header, cut) in chain(survey, head)?.into_iter().rev() {
        let scan = match newest_scan.take_if(|_| header.number == newest.number) {
            Some(scan) => scan,
            None => scan_segment(disk, header, Some(cut)).await?,
        };
        if scan.opening_len().is_none() {
            return Err(damaged(header, HEADER_LEN, "it does not begin with a checkpoint".into()));
        }
        replay.add(header, scan)?;
    }
    replay.check_complete()?;
    Ok(Loaded { replay, head, torn_tail })
}

/// The segments that count, newest first, each with where it ends.
fn chain(survey: &Survey, top: Cut) -> Result<Vec<(&Header, Cut)>, WalError> {
    let mut chain: Vec<(&Header, Cut)> = Vec::new();
    let mut cut = top;
    while cut.number != 0 {
        let Some(header) = survey.headers.get(&cut.number) else {
            // A base may be gone once its entries are dead, but deletion goes oldest first.
            let oldest = survey.headers.keys().next().is_some_and(|oldest| *oldest < cut.number);
            if oldest || chain.is_empty() {
                let reason = "the file is missing".into();
                return Err(WalError::Damaged {
                    file: segment_name(cut.number),
                    offset: 0,
                    reason,
                });
            }
            break;
        };
        chain.push((header, cut));
        cut = header.base;
    }
    Ok(chain)
}

async fn scan_segment<D: Disk>(
    disk: &D,
    header: &Header,
    cut: Option<Cut>,
) -> Result<Scan, WalError> {
    let file = segment_name(header.number);
    let bytes = disk.read(&file).await.map_err(|source| WalError::io("read", &file, source))?;
    scan(&bytes, header, cut).map_err(|damage| damaged(header, damage.offset, damage.reason))
}

fn damaged(header: &Header, offset: u64, reason: String) -> WalError {
    WalError::Damaged { file: segment_name(header.number), offset, reason }
}
