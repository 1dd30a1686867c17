//! Entering a hold once more: the same lease acquires a key that it holds.
//!
//! Each entry is a claim under its acquire's number, so each has its own cancel and release and is
//! given up once. The hold goes under the number of one of them (`Hold::number`) and lists the
//! others (`Hold::again`, in the order of their coming); it ends with the last. All entries share
//! the token, and no entry raises the hold-set version: the lease holds what it held.

use leasehold_protocol::ids::{HoldSetVersion, LeaseId, Number, Revision, Token};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::planted;

use crate::blob::Key;
use crate::digest;
use crate::state::{State, Step};
use crate::table::{Claim, Hold};

impl State {
    /// Enters the lease's hold of the key once more, under this acquire's number.
    pub(crate) fn reenter(
        &mut self,
        step: &mut Step<'_>,
        key: &Key,
        lease: LeaseId,
        number: Number,
    ) -> Grant {
        let revision = self.raise(step);
        self.claims += 1;
        self.edit_hold(key, lease, |hold| hold.again.push(number.0));
        let owner = self.leases.lease_mut(lease).expect("the caller was admitted");
        owner.claims.insert((number.0, 0), Claim::Again(key.clone()));
        owner.again += 1;
        let version = HoldSetVersion(owner.version);
        let entry = self.keys.get(key).expect("a held key is in the table");
        let hold = entry.holds.get(&lease).expect("the caller knows the hold");
        Grant {
            lease,
            token: hold.token,
            revision,
            version_before: version,
            version_after: version,
            floor: entry.floor_of(hold),
        }
    }

    /// Gives one entry of a hold up: that of the acquire `number` if there is one, else the last.
    /// `None` if there is only one, with which the hold ends: that is the caller's to do.
    pub(crate) fn leave(
        &mut self,
        step: &mut Step<'_>,
        key: &Key,
        lease: LeaseId,
        number: Number,
    ) -> Option<(Number, Outcome)> {
        let entry = self.keys.get(key).expect("a held key is in the table");
        let hold = entry.holds.get(&lease).expect("the caller knows the hold");
        let (first, part, token) = (hold.number, hold.part, hold.token);
        // Planted (G1): the first release ends a hold that was entered more than once.
        if planted!("entry-released-for-all") {
            return None;
        }
        let last = *hold.again.last()?;
        let (left, heir) = if number == first {
            (number, Some(hold.again[0]))
        } else if hold.again.contains(&number.0) {
            (number, None)
        } else {
            (Number(last), None)
        };
        self.raise(step);
        self.claims -= 1;
        self.edit_hold(key, lease, |hold| {
            if let Some(heir) = heir {
                (hold.number, hold.part) = (Number(heir), 0);
            }
            let gone = heir.unwrap_or(left.0);
            hold.again.retain(|other| *other != gone);
        });
        let owner = self.leases.lease_mut(lease).expect("a holder is live");
        owner.again -= 1;
        let id = (left.0, if heir.is_some() { part } else { 0 });
        owner.claims.remove(&id).expect("a lease knows its entries");
        if let Some(heir) = heir {
            owner.claims.insert((heir, 0), Claim::Hold(key.clone()));
        }
        Some((left, Outcome::Changed { token, revision: Revision(self.revision) }))
    }

    /// Changes a hold in place and keeps the digest in step.
    pub(crate) fn edit_hold(&mut self, key: &Key, lease: LeaseId, edit: impl FnOnce(&mut Hold)) {
        let entry = self.keys.entry_mut(key).expect("a held key is in the table");
        let hold = entry.holds.get_mut(&lease).expect("the caller knows the hold");
        self.sum.sub(digest::hold(key, lease, hold));
        edit(hold);
        self.sum.add(digest::hold(key, lease, hold));
    }

    /// The token under which a lease holds a key, or 0.
    pub(crate) fn token_of(&self, key: &Key, lease: LeaseId) -> Token {
        let hold = self.keys.get(key).and_then(|entry| entry.holds.get(&lease));
        hold.map_or(Token(0), |hold| hold.token)
    }
}
