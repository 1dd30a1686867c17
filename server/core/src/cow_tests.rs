//! The map against `BTreeMap`, with clones kept alive so that every write meets shared nodes.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Bound;

use proptest::prelude::*;

use super::*;

/// Depth if the tree is well-formed: equally deep, no empty node, bounds and counts right.
fn depth<V>(node: &Node<u16, V>, from: Option<u16>, below: Option<u16>) -> usize {
    let inside =
        |key: u16| from.is_none_or(|from| from <= key) && below.is_none_or(|below| key < below);
    match node {
        Node::Leaf(leaf) => {
            let keys = &leaf.keys;
            assert!(!keys.is_empty() && keys.len() <= NODE_LEN_MAX);
            assert_eq!(keys.len(), leaf.values.len());
            assert!(keys.iter().all(|key| inside(*key)));
            assert!(keys.is_sorted_by(|a, b| a < b));
            1
        }
        Node::Inner(children) => {
            assert!(!children.is_empty() && children.len() <= NODE_LEN_MAX);
            let depths: Vec<_> = children
                .iter()
                .enumerate()
                .map(|(index, child)| {
                    assert_eq!(child.len, child.node.len());
                    let from = if index == 0 { from } else { Some(child.first) };
                    let next = children.get(index + 1).map(|next| next.first);
                    depth(&child.node, from, next.or(below))
                })
                .collect();
            assert!(depths.windows(2).all(|pair| pair[0] == pair[1]), "unequal depths");
            depths[0] + 1
        }
    }
}

fn check(map: &Map<u16, u32>, model: &BTreeMap<u16, u32>) {
    assert_eq!(map.len(), model.len());
    assert_eq!(map.is_empty(), model.is_empty());
    assert!(map.iter().eq(model.iter()));
    assert!(map.clone().into_iter().eq(model.clone()));
    assert_eq!(map.first(), model.first_key_value());
    assert_eq!(map.last(), model.last_key_value());
    if let Root::Tree(root) = &map.root {
        assert!(map.len() > 1, "a single entry needs no tree");
        let depth = depth(root, None, None);
        assert!(depth <= 4, "depth {depth} for {} entries", map.len());
    }
}

fn check_lookups(map: &Map<u16, u32>, model: &BTreeMap<u16, u32>, key: u16) {
    assert_eq!(map.get(&key), model.get(&key));
    assert_eq!(map.get_entry(&key), model.get_key_value(&key));
    assert_eq!(map.rank(&key), model.range(..key).count());
    for from in [Bound::Included(&key), Bound::Excluded(&key)] {
        let expected = model.range((from, Bound::Unbounded));
        assert!(map.iter_from(from).eq(expected));
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Insert(u16),
    InsertRun(u16, u8),
    Remove(u16),
    RemoveRun(u16, u8),
    Change(u16),
    Clone,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let key = || 0_u16..2_000;
    let op = prop_oneof![
        4 => key().prop_map(Op::Insert),
        2 => (key(), any::<u8>()).prop_map(|(key, len)| Op::InsertRun(key, len)),
        4 => key().prop_map(Op::Remove),
        2 => (key(), any::<u8>()).prop_map(|(key, len)| Op::RemoveRun(key, len)),
        2 => key().prop_map(Op::Change),
        1 => Just(Op::Clone),
    ];
    prop::collection::vec(op, 1..150)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..Default::default() })]

    #[test]
    fn does_what_a_sorted_map_does_and_leaves_clones_alone(ops in ops()) {
        let mut map = Map::default();
        let mut model = BTreeMap::new();
        let mut clones = Vec::new();
        for (step, op) in ops.into_iter().enumerate() {
            let value = step as u32;
            let key = match op {
                Op::Insert(key) => {
                    assert_eq!(map.insert(key, value), model.insert(key, value));
                    key
                }
                Op::InsertRun(key, len) => {
                    for key in key..key + u16::from(len) {
                        assert_eq!(map.insert(key, value), model.insert(key, value));
                    }
                    key
                }
                Op::Remove(key) => {
                    assert_eq!(map.remove(&key), model.remove(&key));
                    key
                }
                Op::RemoveRun(key, len) => {
                    for key in key..key + u16::from(len) {
                        assert_eq!(map.remove(&key), model.remove(&key));
                    }
                    key
                }
                Op::Change(key) => {
                    let (one, other) = (map.get_mut(&key), model.get_mut(&key));
                    assert_eq!(one.is_some(), other.is_some());
                    if let (Some(one), Some(other)) = (one, other) {
                        (*one, *other) = (value, value);
                    }
                    key
                }
                Op::Clone => {
                    clones.push((map.clone(), model.clone()));
                    0
                }
            };
            check_lookups(&map, &model, key);
        }
        check(&map, &model);
        for (map, model) in &clones {
            check(map, model);
        }
    }
}

/// Ids only rise and most die: the tree must not keep nearly empty nodes for ever.
#[test]
fn stays_compact_when_old_keys_go() {
    let mut map = Map::default();
    for key in 0..20_000_u16 {
        map.insert(key, 0_u32);
        if key >= 100 && !(key - 100).is_multiple_of(50) {
            map.remove(&(key - 100));
        }
    }
    let leaves = |map: &Map<u16, u32>| {
        fn count(node: &Node<u16, u32>) -> usize {
            match node {
                Node::Leaf(_) => 1,
                Node::Inner(children) => children.iter().map(|child| count(&child.node)).sum(),
            }
        }
        if let Root::Tree(root) = &map.root { count(root) } else { 0 }
    };
    let (entries, leaves) = (map.len(), leaves(&map));
    assert!(leaves * 4 <= entries, "{leaves} leaves for {entries} entries");
}
