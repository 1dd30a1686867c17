//! Newtypes for every number that travels, so that the compiler catches a mix-up.

use core::fmt;

use rkyv::{Archive, Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd,
            Ord, Hash,
        )]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// One server process. Never reused, never 0.
    NodeId(u64)
);
number!(
    /// One Raft group, owner of a slice of the key space; `0..shards`.
    ShardId(u32)
);
number!(
    /// A lease within its shard. Minted by the shard's counter, never reused, never 0.
    LeaseId(u64)
);
number!(
    /// The fencing token of a grant. Tokens of one key strictly increase in grant order (G2).
    Token(u64)
);
number!(
    /// A shard's change counter: +1 per command that changes its state.
    Revision(u64)
);
number!(
    /// The number of one client command within its lease. Starts at 1; a retry keeps its number.
    Number(u64)
);
number!(
    /// A lease's hold-set version: raised when a grant to it, or a forced end of one of its holds,
    /// is applied; never by its own releases.
    HoldSetVersion(u64)
);
number!(
    /// Pairs a reply with its request on one connection. Chosen by the client, never 0: the id 0
    /// marks an error that belongs to no request.
    RequestId(u64)
);

/// A hold's mode as it travels. The low byte is its kind: 0 exclusive, 1 shared, 2 permits of a
/// semaphore, whose number is in the upper 24 bits. Other values are refused with
/// `unsupported_mode`.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mode(pub u32);

impl Mode {
    /// One holder at a time.
    pub const EXCLUSIVE: Self = Self(0);
    /// Any number of holders at a time, all of them shared.
    pub const SHARED: Self = Self(1);

    /// So many permits of a semaphore. What does not fit the field is out of range anyway.
    pub const fn permits(count: u32) -> Self {
        let most = u32::MAX >> 8;
        Self(if count > most { most } else { count } << 8 | 2)
    }

    /// How many permits, if it is a semaphore's mode.
    pub const fn permit_count(self) -> Option<u32> {
        if self.0 & 0xff == 2 { Some(self.0 >> 8) } else { None }
    }
}

/// 128 bits chosen at random by the client at `open`; whoever knows it may use the lease.
/// Never listed, never logged: its `Debug` prints nothing of it.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Default, PartialEq, Eq)]
pub struct Secret(pub [u8; 16]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Archive, Serialize, Deserialize, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord,
            Hash,
        )]
        pub struct $name(pub [u8; 16]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl $name {
            /// All zero: "not known yet" in a handshake.
            pub const UNKNOWN: Self = Self([0; 16]);
        }
    };
}

random_id!(
    /// Random identity of a cluster, minted at its birth, by restore and by forced recovery.
    ClusterId
);
random_id!(
    /// Random identity of one data directory.
    DiskId
);
