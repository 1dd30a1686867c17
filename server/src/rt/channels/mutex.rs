//! A mutex that is held across awaits. First come, first served.

use std::cell::{RefCell, RefMut};
use std::ops::{Deref, DerefMut};

use super::semaphore::{Permit, Semaphore};

/// See the module.
#[derive(Debug)]
pub struct Mutex<T> {
    turn: Semaphore,
    value: RefCell<T>,
}

impl<T> Mutex<T> {
    /// An unlocked mutex.
    pub fn new(value: T) -> Self {
        Self { turn: Semaphore::new(1), value: RefCell::new(value) }
    }

    /// Waits for the lock.
    pub async fn lock(&self) -> Guard<'_, T> {
        let turn = self.turn.acquire().await.expect("nobody closes a mutex");
        Guard { value: self.value.borrow_mut(), _turn: turn }
    }
}

impl<T: 'static> openraft_rt::Mutex<T> for Mutex<T> {
    type Guard<'a> = Guard<'a, T>;

    fn new(value: T) -> Self {
        Mutex::new(value)
    }

    async fn lock(&self) -> Guard<'_, T> {
        Mutex::lock(self).await
    }
}

/// The held lock.
#[derive(Debug)]
pub struct Guard<'a, T> {
    // Declared first, so dropped first: the next holder borrows the value at once.
    value: RefMut<'a, T>,
    _turn: Permit<'a>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}
