//! Tasks and their wakers.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::thread::{self, ThreadId};

use super::domain::DomainId;

/// Never used twice in a world, so that a stale waker wakes nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TaskId(pub(super) u64);

impl TaskId {
    /// The future that `block_on` drives.
    pub(super) const MAIN: Self = Self(0);
}

/// A spawned future without an output of its own.
pub(super) type BoxedTask = Pin<Box<dyn Future<Output = ()>>>;

/// One spawned task.
pub(super) struct Task {
    pub(super) domain: DomainId,
    pub(super) waker: Arc<TaskWaker>,
    /// Absent while the task is being polled.
    pub(super) future: Option<BoxedTask>,
}

/// The tasks that can run now, each at most once. A waker must be `Send` in type, hence the lock;
/// it is never contended.
#[derive(Clone, Debug, Default)]
pub(super) struct ReadyList {
    tasks: Arc<Mutex<Vec<TaskId>>>,
}

impl ReadyList {
    pub(super) fn push(&self, task: TaskId) {
        self.tasks.lock().expect("one thread").push(task);
    }

    pub(super) fn len(&self) -> usize {
        self.tasks.lock().expect("one thread").len()
    }

    /// Takes out the task at `index`; which one comes to stand there is of no meaning.
    pub(super) fn take(&self, index: usize) -> TaskId {
        self.tasks.lock().expect("one thread").swap_remove(index)
    }
}

/// Puts its task on the ready list.
pub(super) struct TaskWaker {
    task: TaskId,
    queued: AtomicBool,
    ready: ReadyList,
    home: ThreadId,
}

impl TaskWaker {
    pub(super) fn new(task: TaskId, ready: ReadyList) -> Arc<Self> {
        let home = thread::current().id();
        Arc::new(Self { task, queued: AtomicBool::new(false), ready, home })
    }

    /// From here on a wake-up puts the task on the list again.
    pub(super) fn taken(&self) {
        self.queued.store(false, Ordering::Relaxed);
    }

    pub(super) fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(Arc::clone(self))
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        assert_eq!(thread::current().id(), self.home, "a simulated run has one thread");
        if !self.queued.swap(true, Ordering::Relaxed) {
            self.ready.push(self.task);
        }
    }
}
