//! Shared immutable bytes: keys, values, labels. Cheap to clone, so that a copied tree node does
//! not copy what its entries carry.

use alloc::rc::Rc;
use alloc::string::String;
use core::cmp::Ordering;
use core::ops::Deref;

use crate::cow::Probe;
use crate::hash::Mix;

/// A key's bytes, in their own order.
pub(crate) type Name = Rc<[u8]>;

impl Probe<Name> for [u8] {
    fn cmp_with(&self, name: &Name) -> Ordering {
        self.cmp(name)
    }
}

/// A key, shared by every table that names it. Ordered by a hash first, so that a look-up compares
/// words at hand and not bytes elsewhere; listings have a table of names in their own order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    hash: u64,
    name: Name,
}

/// A key that is looked for.
#[derive(Clone, Copy)]
pub(crate) struct KeyRef<'a> {
    hash: u64,
    name: &'a [u8],
}

impl<'a> KeyRef<'a> {
    pub(crate) fn new(name: &'a [u8]) -> Self {
        Self { hash: Mix::new(0).bytes(name).done(), name }
    }

    pub(crate) fn to_key(self) -> Key {
        Key { hash: self.hash, name: self.name.into() }
    }
}

impl Probe<Key> for KeyRef<'_> {
    fn cmp_with(&self, key: &Key) -> Ordering {
        self.hash.cmp(&key.hash).then_with(|| self.name.cmp(&key.name))
    }
}

impl Key {
    pub(crate) fn name(&self) -> &Name {
        &self.name
    }
}

impl Deref for Key {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.name
    }
}

/// Bytes that may be empty; empty ones take no allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Blob(Option<Rc<[u8]>>);

impl Blob {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        Self(if bytes.is_empty() { None } else { Some(bytes.into()) })
    }

    /// The bytes themselves, shared; `None` if there are none.
    pub(crate) fn share(&self) -> Option<Rc<[u8]>> {
        self.0.clone()
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }

    /// The bytes as text. What is kept was checked to be UTF-8, except values.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(self.as_slice()).into_owned()
    }
}
