//! The numbers of one session's commands, as far as a load of many short holds needs them.
//!
//! Invariant: the floor is below every number whose outcome has not arrived, and no number is
//! beyond the window above the floor.

use std::collections::VecDeque;

use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, Token};
use leasehold_protocol::limits::WINDOW;

/// Numbers that an acquire takes: itself, its cancel, its release.
const STEP: u64 = 3;

/// One session's lease and numbers.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) lease: LeaseId,
    pub(super) secret: Secret,
    /// The next acquire's number.
    next: u64,
    /// Whether each cycle is over, oldest first; the first one's number is `next - 3 * len`.
    cycles: VecDeque<bool>,
}

impl Session {
    pub(super) fn new(lease: LeaseId, secret: Secret) -> Self {
        Self { lease, secret, next: 1, cycles: VecDeque::new() }
    }

    /// The number of a new acquire; `None` while the window has no room for it.
    pub(super) fn begin(&mut self) -> Option<Number> {
        let number = self.next;
        if number + STEP > self.floor() + WINDOW {
            return None;
        }
        self.next += STEP;
        self.cycles.push_back(false);
        Some(Number(number))
    }

    /// The outcomes of that acquire and of its release have arrived.
    pub(super) fn end(&mut self, number: Number) {
        let oldest = self.next - STEP * self.cycles.len() as u64;
        let index = (number.0 - oldest) / STEP;
        self.cycles[index as usize] = true;
        while self.cycles.front() == Some(&true) {
            self.cycles.pop_front();
        }
    }

    fn floor(&self) -> u64 {
        self.next - STEP * self.cycles.len() as u64 - 1
    }

    fn caller(&self, number: u64) -> Caller {
        Caller {
            lease: self.lease,
            secret: self.secret,
            number: Number(number),
            floor: Number(self.floor()),
            acks: Vec::new(),
        }
    }

    /// An acquire that waits as long as it must.
    pub(super) fn acquire(&self, number: Number, key: &[u8], value: &[u8]) -> Command {
        Command::Acquire {
            caller: self.caller(number.0),
            key: key.to_vec(),
            mode: Mode::EXCLUSIVE,
            own: None,
            value: value.to_vec(),
            wait_ms: u32::MAX,
        }
    }

    /// The release of that acquire's hold.
    pub(super) fn release(&self, number: Number, key: &[u8], token: Token) -> Command {
        Command::Release { caller: self.caller(number.0 + 2), key: key.to_vec(), token }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_follows_the_oldest_open_cycle() {
        let mut session = Session::new(LeaseId(1), Secret([0; 16]));
        let [a, b, c] = [(); 3].map(|()| session.begin().expect("the window is empty"));
        assert_eq!((a, b, c), (Number(1), Number(4), Number(7)));
        assert_eq!(session.floor(), 0);
        session.end(b);
        assert_eq!(session.floor(), 0);
        session.end(a);
        assert_eq!(session.floor(), 6);
        session.end(c);
        assert_eq!(session.floor(), 9);
        assert_eq!(session.begin(), Some(Number(10)));
    }

    #[test]
    fn the_window_is_never_left() {
        let mut session = Session::new(LeaseId(1), Secret([0; 16]));
        let mut last = None;
        while let Some(number) = session.begin() {
            last = Some(number);
        }
        assert!(last.expect("some fit").0 + 2 <= WINDOW);
        session.end(Number(1));
        assert!(session.begin().is_some());
    }
}
