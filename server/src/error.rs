//! How the process ends: the exit codes, one table for code and documents, and the errors of a
//! node's start and run, each of which knows its code.

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::process::ExitCode;

use crate::config::ConfigError;
use crate::identity::{BirthError, DataDirError};
use crate::restore::RestoreError;

macro_rules! exits {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $name:literal, $meaning:literal;)*) => {
        /// Why the process ended. Codes are distinct and never reused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Exit { $(#[doc = $meaning] $variant = $code,)* }

        impl Exit {
            /// Every code, in ascending order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The code's name in documents.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// One sentence for a person.
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning,)* }
            }
        }
    };
}

exits! {
    Ok = 0, "ok", "Stopped as asked, leadership handed over.";
    Usage = 2, "usage", "The command line or the configuration is wrong; standard error names every problem.";
    PortInUse = 3, "port_in_use", "An address to listen on cannot be bound.";
    DataDirInUse = 4, "data_dir_in_use", "Another process uses the data directory; its pid is named.";
    DataDirForeign = 5, "data_dir_foreign", "The data directory belongs to another cluster, node, core count or shard count; both values are named.";
    DataDirUnusable = 6, "data_dir_unusable", "The data directory cannot be read or written, or a file of it is damaged.";
    IoUring = 7, "io_uring_unavailable", "The kernel refuses `io_uring`; the remedy is named.";
    StorageFailed = 8, "storage_failed", "A write or sync failed; the node stopped at once and never retries one.";
    Watchdog = 9, "watchdog", "An executor made no progress for `watchdog-ms`.";
    Clock = 10, "clock", "The wall clock is behind this build's date and no `token-floor` was given, or behind the cluster that is restored.";
    Internal = 11, "internal", "A fault of the server.";
    ForcedStop = 12, "forced_stop", "A second signal came before the orderly stop was finished.";
    ChildFailed = 13, "child_failed", "`leaseholdd dev`: a node of the local cluster could not start.";
    NodeRemoved = 14, "node_removed", "The node was removed from its cluster; its data directory is of no use any more.";
    BackupUnusable = 15, "backup_unusable", "The backup cannot be read or is damaged; what is wrong with it is named.";
}

impl Exit {
    /// The number that the parent process sees.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// Why a node did not start, or stopped without being asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The data directory is in use, foreign or unusable.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// The cluster could not be born, or is not the one that is configured.
    #[error(transparent)]
    Birth(#[from] BirthError),
    /// Nothing was restored.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// An address cannot be bound.
    #[error("{key} {address}: {source}{}", hint(source))]
    Listen {
        /// The configuration key of the address.
        key: &'static str,
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// `io_uring` cannot be used; the text says why and how to enable it.
    #[error("io_uring is not available: {0}")]
    IoUring(String),
    /// The log or a snapshot cannot be read back; the text names file, offset and remedy.
    #[error("{0}")]
    Damaged(String),
    /// A write or a sync failed.
    #[error("storage failed: {0}")]
    Storage(String),
    /// A fault of the server.
    #[error("internal fault: {0}")]
    Internal(String),
}

fn hint(source: &io::Error) -> &'static str {
    if source.kind() == io::ErrorKind::AddrInUse { "; another process listens there" } else { "" }
}

impl NodeError {
    /// A fault of the server, from whatever describes it.
    pub fn internal(what: impl Display) -> Self {
        Self::Internal(what.to_string())
    }

    /// The code to exit with.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Config(_) => Exit::Usage,
            Self::DataDir(error) => error.exit(),
            Self::Birth(error) => error.exit(),
            Self::Restore(error) => error.exit(),
            Self::Listen { .. } => Exit::PortInUse,
            Self::IoUring(_) => Exit::IoUring,
            Self::Damaged(_) => Exit::DataDirUnusable,
            Self::Storage(_) => Exit::StorageFailed,
            Self::Internal(_) => Exit::Internal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_ascending_and_leave_the_shells_alone() {
        assert!(Exit::ALL.windows(2).all(|pair| pair[0].code() < pair[1].code()));
        assert!(Exit::ALL.iter().all(|exit| exit.code() != 1 && exit.code() < 64));
    }

    #[test]
    fn a_bound_port_says_so() {
        let error = NodeError::Listen {
            key: "client-listen",
            address: "127.0.0.1:7400".parse().unwrap(),
            source: io::Error::from(io::ErrorKind::AddrInUse),
        };
        assert_eq!(error.exit(), Exit::PortInUse);
        let text = error.to_string();
        assert!(text.contains("client-listen 127.0.0.1:7400"), "{text}");
        assert!(text.contains("another process listens there"), "{text}");
    }
}
