//! Shared immutable bytes: keys, values, labels. Cheap to clone, so that a copied tree node does
//! not copy what its entries carry.

use alloc::rc::Rc;
use alloc::string::String;

/// A key, shared by every table that names it.
pub(crate) type Key = Rc<[u8]>;

/// Bytes that may be empty; empty ones take no allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Blob(Option<Rc<[u8]>>);

impl Blob {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        Self(if bytes.is_empty() { None } else { Some(bytes.into()) })
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }

    /// The bytes as text. What is kept was checked to be UTF-8, except values.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(self.as_slice()).into_owned()
    }
}
