//! Channels between tasks of one core.
//!
//! They exist because a run of the simulator must repeat: every wake-up happens in the order in
//! which the waiters came, and nothing here depends on a clock, a thread or a random number. No
//! value crosses threads, so there is no lock and no atomic, and a waker is never called while a
//! cell is borrowed: woken code may come straight back.
//!
//! Both runtimes hand these same channels to openraft.

mod mpsc;
mod mutex;
mod notify;
mod oneshot;
mod semaphore;
mod waiters;
mod watch;

pub use mpsc::{LocalMpsc, Receiver, Sender, TrySendError, WeakSender, channel};
pub use mutex::{Guard, Mutex};
pub use notify::{Notified, Notify};
pub use oneshot::{LocalOneshot, OneshotClosed, OneshotReceiver, OneshotSender, oneshot};
pub use semaphore::{Acquire, Closed, Permit, Semaphore};
pub use watch::{LocalWatch, WatchReceiver, WatchSender, watch};
