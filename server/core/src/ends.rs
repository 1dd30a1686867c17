//! The last end of each key: what is left to tell of a hold that is over.
//!
//! A table of bounded size beside the keys, for most keys are vacant when somebody asks why. The
//! oldest end makes room. Nothing is ever decided by it.

use alloc::rc::Rc;

use leasehold_protocol::event::EndReason;
use leasehold_protocol::ids::{LeaseId, Revision};
use leasehold_protocol::limits::LAST_ENDS_MAX;
use leasehold_protocol::reply::LastEnd;

use crate::blob::{Blob, Key, KeyRef};
use crate::digest;
use crate::state::{State, Step};
use crate::table::{End, Hold};

impl State {
    /// Remembers the end of a hold, instead of the key's former one.
    pub(crate) fn remember_end(
        &mut self,
        step: &Step<'_>,
        (key, holder, label): (&Key, LeaseId, &Blob),
        hold: &Hold,
        reason: &EndReason,
    ) {
        let end = End {
            lease: holder,
            label: label.clone(),
            token: hold.token,
            mode: hold.mode,
            reason: reason.clone(),
            revision: self.revision,
            at_ms: step.wall_ms,
        };
        self.forget_end(key);
        if self.ends.len() >= LAST_ENDS_MAX {
            let oldest = self.ends_in_order.first().map(|(_, key)| key.clone());
            self.forget_end(&oldest.expect("the table is full"));
        }
        self.sum.add(digest::end(key, &end));
        self.put_end(key, end);
    }

    fn forget_end(&mut self, key: &Key) {
        if let Some(end) = self.ends.remove(key) {
            self.sum.sub(digest::end(key, &end));
            self.ends_in_order.remove(&(end.revision, end.token.0));
        }
    }

    /// Puts an end into both tables; false if the key or the place was taken.
    pub(crate) fn put_end(&mut self, key: &Key, end: End) -> bool {
        let place = (end.revision, end.token.0);
        let former = self.ends.insert(key.clone(), Rc::new(end));
        former.is_none() & self.ends_in_order.insert(place, key.clone()).is_none()
    }

    /// How the key's last hold ended, if that is remembered.
    pub(crate) fn last_end(&self, key: &[u8]) -> Option<LastEnd> {
        let end = self.ends.get(&KeyRef::new(key))?;
        Some(LastEnd {
            lease: end.lease,
            label: end.label.text(),
            token: end.token,
            mode: end.mode,
            reason: end.reason.clone(),
            revision: Revision(end.revision),
            at_ms: end.at_ms,
        })
    }
}
