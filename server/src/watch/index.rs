//! Who watches what: exact keys in one map, prefixes in another that is asked once for each length
//! that occurs in it.

use std::collections::BTreeMap;

use leasehold_protocol::planted;

use super::WatchName;

/// What is watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// One key.
    Key(Vec<u8>),
    /// All keys that begin so.
    Prefix(Vec<u8>),
}

impl Target {
    /// Whether an event of `key` is watched.
    pub fn matches(&self, key: &[u8]) -> bool {
        match self {
            Self::Key(own) => own == key,
            // Planted (G6): who catches up is told of keys beside its prefix.
            Self::Prefix(prefix) if planted!("prefix-too-wide") => {
                key.starts_with(&prefix[..prefix.len().saturating_sub(1)])
            }
            Self::Prefix(prefix) => key.starts_with(prefix),
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Index {
    keys: BTreeMap<Vec<u8>, Vec<WatchName>>,
    prefixes: BTreeMap<Vec<u8>, Vec<WatchName>>,
    /// How many different prefixes have this length.
    lengths: BTreeMap<usize, usize>,
}

impl Index {
    pub(super) fn insert(&mut self, target: &Target, name: WatchName) {
        match target {
            Target::Key(key) => self.keys.entry(key.clone()).or_default().push(name),
            Target::Prefix(prefix) => {
                let watches = self.prefixes.entry(prefix.clone()).or_default();
                if watches.is_empty() {
                    *self.lengths.entry(prefix.len()).or_default() += 1;
                }
                watches.push(name);
            }
        }
    }

    pub(super) fn remove(&mut self, target: &Target, name: WatchName) {
        match target {
            Target::Key(key) => {
                take_out(&mut self.keys, key, name);
            }
            Target::Prefix(prefix) => {
                if take_out(&mut self.prefixes, prefix, name)
                    && let Some(count) = self.lengths.get_mut(&prefix.len())
                {
                    *count -= 1;
                    if *count == 0 {
                        self.lengths.remove(&prefix.len());
                    }
                }
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.prefixes.is_empty()
    }

    /// Those who watch `key`, each once.
    pub(super) fn matching<'a>(&'a self, key: &'a [u8]) -> impl Iterator<Item = WatchName> + 'a {
        let exact = self.keys.get(key);
        let longest = key.len() - usize::from(planted!("prefix-is-not-its-own"));
        let lengths = self.lengths.range(..=longest);
        let longer = lengths.filter_map(move |(length, _)| self.prefixes.get(&key[..*length]));
        exact.into_iter().chain(longer).flatten().copied()
    }
}

/// Removes one name; true if its entry went with it.
fn take_out(map: &mut BTreeMap<Vec<u8>, Vec<WatchName>>, key: &[u8], name: WatchName) -> bool {
    let Some(names) = map.get_mut(key) else { return false };
    // Many may watch one key: their order does not matter.
    if let Some(at) = names.iter().position(|other| *other == name) {
        names.swap_remove(at);
    }
    if !names.is_empty() {
        return false;
    }
    map.remove(key);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(id: u64) -> WatchName {
        WatchName { core: 0, id }
    }

    fn found(index: &Index, key: &[u8]) -> Vec<u64> {
        let mut found: Vec<u64> = index.matching(key).map(|name| name.id).collect();
        found.sort_unstable();
        found
    }

    #[test]
    fn a_key_is_found_by_itself_and_by_each_of_its_prefixes() {
        let mut index = Index::default();
        let targets = [
            (1, Target::Key(b"jobs/a".to_vec())),
            (2, Target::Prefix(b"jobs/".to_vec())),
            (3, Target::Prefix(b"".to_vec())),
            (4, Target::Prefix(b"jobs/a".to_vec())),
            (5, Target::Prefix(b"jobs/ab".to_vec())),
            (6, Target::Key(b"jobs/".to_vec())),
            (7, Target::Prefix(b"jobs/".to_vec())),
            (8, Target::Prefix(b"other".to_vec())),
        ];
        for (id, target) in &targets {
            index.insert(target, name(*id));
        }
        assert_eq!(found(&index, b"jobs/a"), [1, 2, 3, 4, 7]);
        assert_eq!(found(&index, b"jobs/"), [2, 3, 6, 7]);
        assert_eq!(found(&index, b"jobs/abc"), [2, 3, 4, 5, 7]);
        assert_eq!(found(&index, b"x"), [3]);
        for (id, target) in &targets {
            assert_eq!(target.matches(b"jobs/a"), found(&index, b"jobs/a").contains(id));
        }
        for (id, target) in &targets {
            index.remove(target, name(*id));
            index.remove(target, name(*id));
            assert!(!found(&index, b"jobs/abc").contains(id));
        }
        assert!(index.is_empty() && index.lengths.is_empty());
    }
}
