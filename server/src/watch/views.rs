//! Frozen states for watchers that read one in pages: all pages of one state are at one revision.
//!
//! A view is shared by all who come for one within a second, so that a crowd that lost its history
//! at once costs one, and it goes when nobody asked for it for a while.

use std::collections::VecDeque;
use std::time::Duration;

use leasehold_core::State;
use leasehold_protocol::ids::Revision;

use crate::env::MonoTime;

/// Views at a time; the one that was made first goes for another.
const VIEWS_MAX: usize = 16;
/// How long a view is given to newcomers.
const FRESH: Duration = Duration::from_secs(1);
/// How long a view is kept without a reader.
const KEPT: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct View {
    state: State,
    made: MonoTime,
    used: MonoTime,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Views(VecDeque<View>);

impl Views {
    /// A view for somebody who begins to read; it is at `floor` or above.
    pub(super) fn begin(&mut self, state: &State, floor: Revision, now: MonoTime) -> State {
        let fresh =
            |view: &&mut View| now.since(view.made) < FRESH && view.state.revision() >= floor;
        if let Some(view) = self.0.back_mut().filter(fresh) {
            view.used = now;
            return view.state.clone();
        }
        if self.0.len() >= VIEWS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(View { state: state.clone(), made: now, used: now });
        state.clone()
    }

    /// The view at this very revision, if it is still there.
    pub(super) fn at(&mut self, revision: Revision, now: MonoTime) -> Option<State> {
        let view = self.0.iter_mut().find(|view| view.state.revision() == revision)?;
        view.used = now;
        Some(view.state.clone())
    }

    /// Drops those that nobody reads.
    pub(super) fn sweep(&mut self, now: MonoTime) {
        self.0.retain(|view| now.since(view.used) < KEPT);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
