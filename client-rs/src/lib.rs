//! The client of Leasehold, a distributed lock service with leases and fencing tokens.
//!
//! ```no_run
//! # async fn example() -> Result<(), leasehold::Error> {
//! use std::time::Duration;
//! use leasehold::{Client, HoldState};
//!
//! let client = Client::connect("10.0.0.1:7101,10.0.0.2:7101,10.0.0.3:7101").await?;
//! let session = client.session(Duration::from_secs(15))?;
//!
//! let guard = session.lock("accounts/42").value("worker-7").acquire().await?;
//! let token = guard.token(); // goes into every write that the lock protects
//! if let HoldState::Lost(cause) = guard.state() {
//!     println!("stop: {} was lost ({})", guard.key(), cause.name());
//! }
//! tokio::select! {
//!     cause = guard.lost() => println!("lost: {}", cause.name()),
//!     () = work(token) => guard.release().await?,
//! }
//! # Ok(())
//! # }
//! # async fn work(_: leasehold::Token) {}
//! ```
//!
//! # What a holder may believe
//!
//! A hold is *held*, *at risk* (renewals are overdue or its end is decided; the cause and the time
//! left are told), or *lost*. Validity is counted from before the send of the last acknowledged
//! renewal, less a margin, on a clock that runs through suspend, and compared at each call. A hold
//! that was lost never comes back, and nothing renews it.
//!
//! What a lock alone cannot give: a process that is paused between looking at its guard and acting
//! acts late. Only a resource that checks tokens is safe from that.
//!
//! That check is one comparison. Whatever the lock protects keeps the highest token that it has
//! seen, next to its data and changed with it, and refuses what comes with a lower one:
//!
//! ```
//! use leasehold::Token;
//!
//! #[derive(Default)]
//! struct Store {
//!     highest: Token,
//!     value: String,
//! }
//!
//! impl Store {
//!     fn write(&mut self, token: Token, value: &str) -> Result<(), Token> {
//!         if token < self.highest {
//!             return Err(self.highest);
//!         }
//!         self.highest = token;
//!         self.value = value.to_owned();
//!         Ok(())
//!     }
//! }
//!
//! let mut store = Store::default();
//! let (old_holder, new_holder) = (Token(41), Token(42));
//! store.write(old_holder, "from the old holder")?;
//! store.write(new_holder, "from the new holder")?;
//! // The old holder was paused, lost the lock, and wakes.
//! assert_eq!(store.write(old_holder, "too late"), Err(Token(42)));
//! assert_eq!(store.value, "from the new holder");
//! # Ok::<(), Token>(())
//! ```
//!
//! # Retries
//!
//! Every command has a number; a retry repeats it and gets the outcome of the first execution. So
//! calls here hide the loss of connections, nodes and leaders until their deadline, and an acquire
//! that waits keeps its place in the queue.
#![forbid(unsafe_code)]

mod backup;
mod client;
mod clock;
mod config;
mod core;
mod election;
mod error;
mod guard;
mod handover;
mod io;
mod members;
mod observe;
mod places;
mod session;
mod several;
mod watch;
mod yields;

pub use leasehold_protocol::error::{ErrorClass, ErrorCode};
pub use leasehold_protocol::event::{EndReason, EventKind};
pub use leasehold_protocol::ids::{
    ClusterId, DiskId, LeaseId, Mode, NodeId, Revision, ShardId, Token,
};
pub use leasehold_protocol::member::{
    MemberChange, MemberInfo, MemberOperation, MemberPhase, MembersReply, NewMember, ShardProgress,
    Standing,
};
pub use leasehold_protocol::outcome::{Grant, Outcome};
pub use leasehold_protocol::peer::MemberEntry;
pub use leasehold_protocol::reply::{
    BackupReply, BackupShard, Delay, Holder, KeyInfo, KeysReply, LastEnd, NodeStatus, Role,
    SessionInfo, SessionsReply, ShardStatus, StatusReply, Waiter,
};
pub use leasehold_protocol::request::Freshness;
pub use leasehold_protocol::watch::WatchEvent;

pub use crate::client::{Client, Forced, KeyRead, Listing};
pub use crate::config::{Config, parse_endpoints};
pub use crate::core::{HoldState, LossCause, RiskCause};
pub use crate::election::{Campaign, Election, Leader, Leadership};
pub use crate::error::{
    AcquireError, CallError, ChangeError, CloseError, ConfigError, ConnectError, Error, Failure,
    ReleaseError, RenewError, SessionError,
};
pub use crate::guard::{Guard, HoldWatch, slots_of};
pub use crate::handover::Handover;
pub use crate::members::Spread;
pub use crate::observe::{Observation, Observed};
pub use crate::places::Places;
pub use crate::session::{Acquiring, LockRequest, Place, Session, Ticket};
pub use crate::several::{AcquiringAll, LockAllRequest, LockEachRequest, MultiGuard};
pub use crate::watch::{Cursor, Watch, WatchFrom, WatchItem, WatchTarget};
pub use crate::yields::{YieldAsked, Yields};
