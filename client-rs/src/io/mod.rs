//! Drivers: what joins the core to sockets, timers and waiting callers.

pub(crate) mod conn;
pub(crate) mod shared;
