//! An ordered map whose clone is free and shares everything until one side writes: a B+ tree of
//! reference-counted nodes.
//!
//! It is what makes a snapshot a frozen view that costs nothing to take: the clone holds the old
//! nodes, and each later write to the live map copies only the path it touches (a handful of
//! nodes of at most `NODE_LEN_MAX` entries). While nothing is shared, nothing is copied.
//!
//! Never iterates in any other order than the keys'; has no hidden state, so two maps with the
//! same history are the same and two maps with the same content iterate the same.
//!
//! Invariants: a tree has at least two entries; every leaf is equally deep and no node is empty;
//! `Child::first` is a lower bound of
//! its subtree's keys and above all keys of the child before; `Child::len` is the exact number of
//! entries below; a removal that leaves a node small merges it with a neighbour if both fit into
//! one node, so depth stays logarithmic.

use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cmp::Ordering;
use core::ops::Bound;
use core::slice::from_ref;

/// Most entries of a leaf and most children of an inner node.
const NODE_LEN_MAX: usize = 32;
/// A node this small looks for a neighbour to merge with.
const NODE_LEN_SMALL: usize = NODE_LEN_MAX / 4;

/// What an entry can be looked up by: its key, or something that compares with keys the same way.
pub(crate) trait Probe<K> {
    /// How this compares with a key.
    fn cmp_with(&self, key: &K) -> Ordering;
}

impl<K: Ord> Probe<K> for K {
    fn cmp_with(&self, key: &K) -> Ordering {
        self.cmp(key)
    }
}

#[derive(Clone, Debug)]
enum Node<K, V> {
    Leaf(Leaf<K, V>),
    Inner(Vec<Child<K, V>>),
}

/// Keys and values apart: a search touches the keys alone, close together.
#[derive(Clone, Debug)]
struct Leaf<K, V> {
    keys: Vec<K>,
    values: Vec<V>,
}

#[derive(Clone, Debug)]
struct Child<K, V> {
    first: K,
    len: usize,
    node: Rc<Node<K, V>>,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub(crate) struct Map<K, V> {
    root: Root<K, V>,
}

/// Most maps here have no entry or one (a key's holders, a session's holds): those take no
/// memory of their own.
#[derive(Clone, Debug)]
enum Root<K, V> {
    Empty,
    One(K, V),
    Tree(Rc<Node<K, V>>),
}

impl<K, V> Default for Map<K, V> {
    fn default() -> Self {
        Self { root: Root::Empty }
    }
}

impl<K, V> Node<K, V> {
    fn len(&self) -> usize {
        match self {
            Self::Leaf(leaf) => leaf.keys.len(),
            Self::Inner(children) => children.iter().map(|child| child.len).sum(),
        }
    }

    fn width(&self) -> usize {
        match self {
            Self::Leaf(leaf) => leaf.keys.len(),
            Self::Inner(children) => children.len(),
        }
    }
}

/// The child that a key belongs to: the last whose lower bound is not above it.
fn child_index<K, V, Q: Probe<K> + ?Sized>(children: &[Child<K, V>], key: &Q) -> usize {
    children.partition_point(|child| key.cmp_with(&child.first).is_ge()).saturating_sub(1)
}

impl<K, V> Leaf<K, V> {
    fn find<Q: Probe<K> + ?Sized>(&self, key: &Q) -> Result<usize, usize> {
        self.keys.binary_search_by(|other| key.cmp_with(other).reverse())
    }

    fn get(&self, index: usize) -> Option<(&K, &V)> {
        Some((self.keys.get(index)?, self.values.get(index)?))
    }

    /// The entries from an index on.
    fn iter_from(&self, index: usize) -> LeafIter<'_, K, V> {
        self.keys[index..].iter().zip(&self.values[index..])
    }

    /// The right part of a leaf that grew too wide.
    fn split(&mut self) -> Option<Self> {
        let keys = split(&mut self.keys)?;
        let values = split(&mut self.values).expect("as many values as keys");
        Some(Self { keys, values })
    }
}

type LeafIter<'a, K, V> = core::iter::Zip<core::slice::Iter<'a, K>, core::slice::Iter<'a, V>>;

impl<K, V> Map<K, V> {
    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        match &self.root {
            Root::Empty => 0,
            Root::One(..) => 1,
            Root::Tree(root) => root.len(),
        }
    }

    /// True if there is no entry.
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self.root, Root::Empty)
    }

    /// The only entry, if it compares like this with the key.
    fn only(&self, wanted: impl Fn(&K) -> bool) -> Option<(&K, &V)> {
        match &self.root {
            Root::One(key, value) if wanted(key) => Some((key, value)),
            _ => None,
        }
    }

    /// The entry of a key.
    pub(crate) fn get_entry<Q>(&self, key: &Q) -> Option<(&K, &V)>
    where
        Q: Probe<K> + ?Sized,
    {
        let Root::Tree(root) = &self.root else {
            return self.only(|only| key.cmp_with(only).is_eq());
        };
        let mut node = root;
        loop {
            match &**node {
                Node::Inner(children) => node = &children[child_index(children, key)].node,
                Node::Leaf(leaf) => return leaf.get(leaf.find(key).ok()?),
            }
        }
    }

    /// The value of a key.
    pub(crate) fn get<Q>(&self, key: &Q) -> Option<&V>
    where
        Q: Probe<K> + ?Sized,
    {
        self.get_entry(key).map(|(_, value)| value)
    }

    /// Number of entries below a key.
    pub(crate) fn rank<Q>(&self, key: &Q) -> usize
    where
        Q: Probe<K> + ?Sized,
    {
        let Root::Tree(root) = &self.root else {
            return usize::from(self.only(|only| key.cmp_with(only).is_gt()).is_some());
        };
        let mut node = root;
        let mut below = 0;
        loop {
            match &**node {
                Node::Inner(children) => {
                    let index = child_index(children, key);
                    below += children[..index].iter().map(|child| child.len).sum::<usize>();
                    node = &children[index].node;
                }
                Node::Leaf(leaf) => return below + leaf.find(key).unwrap_or_else(|index| index),
            }
        }
    }

    /// The last entry.
    pub(crate) fn last(&self) -> Option<(&K, &V)> {
        let Root::Tree(root) = &self.root else { return self.only(|_| true) };
        let mut node = root;
        loop {
            match &**node {
                Node::Inner(children) => node = &children.last()?.node,
                Node::Leaf(leaf) => return leaf.get(leaf.keys.len() - 1),
            }
        }
    }

    /// The first entry.
    pub(crate) fn first(&self) -> Option<(&K, &V)> {
        let Root::Tree(root) = &self.root else { return self.only(|_| true) };
        let mut node = root;
        loop {
            match &**node {
                Node::Inner(children) => node = &children.first()?.node,
                Node::Leaf(leaf) => return leaf.get(0),
            }
        }
    }

    /// All entries in order.
    pub(crate) fn iter(&self) -> Iter<'_, K, V> {
        let mut iter = Iter { inner: Vec::new(), leaf: [].iter().zip(&[]) };
        match &self.root {
            Root::Empty => {}
            Root::One(key, value) => iter.leaf = from_ref(key).iter().zip(from_ref(value)),
            Root::Tree(root) => iter.descend_first(root),
        }
        iter
    }

    /// The entries from a bound on, in order.
    pub(crate) fn iter_from<Q>(&self, from: Bound<&Q>) -> Iter<'_, K, V>
    where
        Q: Probe<K> + ?Sized,
    {
        let key = match from {
            Bound::Unbounded => return self.iter(),
            Bound::Included(key) | Bound::Excluded(key) => key,
        };
        let mut iter = Iter { inner: Vec::new(), leaf: [].iter().zip(&[]) };
        let Root::Tree(root) = &self.root else {
            let excluded = matches!(from, Bound::Excluded(_));
            let inside = |only: &K| match key.cmp_with(only) {
                Ordering::Less => true,
                Ordering::Equal => !excluded,
                Ordering::Greater => false,
            };
            return if self.only(inside).is_some() { self.iter() } else { iter };
        };
        let mut node = root;
        loop {
            match &**node {
                Node::Inner(children) => {
                    let index = child_index(children, key);
                    iter.inner.push(children[index + 1..].iter());
                    node = &children[index].node;
                }
                Node::Leaf(leaf) => {
                    let index = match leaf.find(key) {
                        Ok(index) if matches!(from, Bound::Excluded(_)) => index + 1,
                        Ok(index) | Err(index) => index,
                    };
                    iter.leaf = leaf.iter_from(index);
                    return iter;
                }
            }
        }
    }
}

impl<K: Ord + Clone, V: Clone> Map<K, V> {
    /// The value of a key, to change it in place.
    pub(crate) fn get_mut<Q>(&mut self, key: &Q) -> Option<&mut V>
    where
        Q: Probe<K> + ?Sized,
    {
        let mut node = match &mut self.root {
            Root::Empty => return None,
            Root::One(only, value) => return key.cmp_with(only).is_eq().then_some(value),
            Root::Tree(root) => root,
        };
        loop {
            match Rc::make_mut(node) {
                Node::Inner(children) => {
                    let index = child_index(children, key);
                    node = &mut children[index].node;
                }
                Node::Leaf(leaf) => {
                    let index = leaf.find(key).ok()?;
                    return Some(&mut leaf.values[index]);
                }
            }
        }
    }

    /// Sets a key's value; returns the former one.
    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        let root = match &mut self.root {
            Root::Empty => {
                self.root = Root::One(key, value);
                return None;
            }
            Root::One(only, former) if *only == key => {
                return Some(core::mem::replace(former, value));
            }
            Root::One(..) => self.plant(),
            Root::Tree(root) => root,
        };
        let (old, split) = insert_below(root, key, value);
        if let Some(right) = split {
            let left = Child { first: first_key(root), len: root.len(), node: Rc::clone(root) };
            self.root = Root::Tree(Rc::new(Node::Inner(alloc::vec![left, right])));
        }
        old
    }

    /// Makes a tree of the only entry.
    fn plant(&mut self) -> &mut Rc<Node<K, V>> {
        let mut leaf = Leaf { keys: Vec::with_capacity(4), values: Vec::with_capacity(4) };
        if let Root::One(key, value) = core::mem::replace(&mut self.root, Root::Empty) {
            leaf.keys.push(key);
            leaf.values.push(value);
        }
        self.root = Root::Tree(Rc::new(Node::Leaf(leaf)));
        match &mut self.root {
            Root::Tree(root) => root,
            _ => unreachable!("it was planted"),
        }
    }

    /// Removes a key; returns its value.
    pub(crate) fn remove<Q>(&mut self, key: &Q) -> Option<V>
    where
        Q: Probe<K> + ?Sized,
    {
        let root = match &mut self.root {
            Root::Tree(root) => root,
            Root::One(only, _) if key.cmp_with(only).is_eq() => {
                let only = core::mem::replace(&mut self.root, Root::Empty);
                return if let Root::One(_, value) = only { Some(value) } else { None };
            }
            _ => return None,
        };
        let removed = remove_below(root, key);
        if root.width() == 1 {
            self.root = match &**root {
                Node::Inner(children) => Root::Tree(Rc::clone(&children[0].node)),
                Node::Leaf(leaf) => Root::One(leaf.keys[0].clone(), leaf.values[0].clone()),
            };
        }
        removed
    }
}

fn first_key<K: Clone, V>(node: &Node<K, V>) -> K {
    match node {
        Node::Leaf(leaf) => leaf.keys[0].clone(),
        Node::Inner(children) => children[0].first.clone(),
    }
}

/// Inserts; returns the former value and, if the node had to be split, its new right neighbour.
fn insert_below<K: Ord + Clone, V: Clone>(
    node: &mut Rc<Node<K, V>>,
    key: K,
    value: V,
) -> (Option<V>, Option<Child<K, V>>) {
    match Rc::make_mut(node) {
        Node::Leaf(leaf) => match leaf.find(&key) {
            Ok(index) => (Some(core::mem::replace(&mut leaf.values[index], value)), None),
            Err(index) => {
                leaf.keys.insert(index, key);
                leaf.values.insert(index, value);
                (None, leaf.split().map(|right| child_of(Node::Leaf(right))))
            }
        },
        Node::Inner(children) => {
            let index = child_index(children, &key);
            let child = &mut children[index];
            if key < child.first {
                child.first = key.clone();
            }
            let (old, right) = insert_below(&mut child.node, key, value);
            child.len += usize::from(old.is_none());
            if let Some(right) = right {
                child.len -= right.len;
                children.insert(index + 1, right);
            }
            (old, split(children).map(|right| child_of(Node::Inner(right))))
        }
    }
}

fn child_of<K: Clone, V>(node: Node<K, V>) -> Child<K, V> {
    Child { first: first_key(&node), len: node.len(), node: Rc::new(node) }
}

/// The right half of what grew too wide.
fn split<T>(items: &mut Vec<T>) -> Option<Vec<T>> {
    if items.len() <= NODE_LEN_MAX {
        return None;
    }
    let mut right = Vec::with_capacity(NODE_LEN_MAX + 1);
    right.extend(items.drain(NODE_LEN_MAX / 2..));
    Some(right)
}

fn remove_below<K, V, Q>(node: &mut Rc<Node<K, V>>, key: &Q) -> Option<V>
where
    K: Clone,
    V: Clone,
    Q: Probe<K> + ?Sized,
{
    match Rc::make_mut(node) {
        Node::Leaf(leaf) => {
            let index = leaf.find(key).ok()?;
            leaf.keys.remove(index);
            Some(leaf.values.remove(index))
        }
        Node::Inner(children) => {
            let index = child_index(children, key);
            let child = &mut children[index];
            let removed = remove_below(&mut child.node, key)?;
            child.len -= 1;
            if child.node.width() < NODE_LEN_SMALL {
                shrink(children, index);
            }
            Some(removed)
        }
    }
}

/// Drops an empty child, or merges a small one with a neighbour if both fit into one node.
fn shrink<K: Clone, V: Clone>(children: &mut Vec<Child<K, V>>, index: usize) {
    if children[index].node.width() == 0 {
        children.remove(index);
        return;
    }
    let fits = |left: usize| {
        left + 1 < children.len()
            && children[left].node.width() + children[left + 1].node.width() <= NODE_LEN_MAX
    };
    let left = if fits(index) {
        index
    } else if index > 0 && fits(index - 1) {
        index - 1
    } else {
        return;
    };
    let right = children.remove(left + 1);
    children[left].len += right.len;
    match (Rc::make_mut(&mut children[left].node), Rc::unwrap_or_clone(right.node)) {
        (Node::Leaf(into), Node::Leaf(mut from)) => {
            into.keys.append(&mut from.keys);
            into.values.append(&mut from.values);
        }
        (Node::Inner(into), Node::Inner(mut from)) => into.append(&mut from),
        _ => unreachable!("all leaves are equally deep"),
    }
}

/// Entries in order.
pub(crate) struct Iter<'a, K, V> {
    inner: Vec<core::slice::Iter<'a, Child<K, V>>>,
    leaf: LeafIter<'a, K, V>,
}

impl<'a, K, V> Iter<'a, K, V> {
    fn descend_first(&mut self, node: &'a Node<K, V>) {
        let mut node = node;
        loop {
            match node {
                Node::Leaf(leaf) => {
                    self.leaf = leaf.iter_from(0);
                    return;
                }
                Node::Inner(children) => {
                    let mut rest = children.iter();
                    let first = rest.next().expect("an inner node has children");
                    self.inner.push(rest);
                    node = &first.node;
                }
            }
        }
    }
}

impl<'a, K, V> Iterator for Iter<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(entry) = self.leaf.next() {
                return Some(entry);
            }
            match self.inner.last_mut()?.next() {
                Some(child) => self.descend_first(&child.node),
                None => drop(self.inner.pop()),
            }
        }
    }
}

/// Entries in order, by value. Each node is given up as soon as its last entry was taken.
pub(crate) struct IntoIter<K, V> {
    inner: Vec<alloc::vec::IntoIter<Child<K, V>>>,
    leaf: Option<Rc<Node<K, V>>>,
    /// Entries taken from the leaf.
    taken: usize,
    only: Option<(K, V)>,
}

impl<K: Clone, V: Clone> IntoIter<K, V> {
    fn descend(&mut self, node: Rc<Node<K, V>>) {
        let mut node = node;
        while let Node::Inner(_) = *node {
            let Node::Inner(children) = Rc::unwrap_or_clone(node) else { unreachable!() };
            let mut rest = children.into_iter();
            node = rest.next().expect("an inner node has children").node;
            self.inner.push(rest);
        }
        self.leaf = Some(node);
        self.taken = 0;
    }

    fn next_of_leaf(&mut self) -> Option<(K, V)> {
        let Node::Leaf(leaf) = &**self.leaf.as_ref()? else { return None };
        let (key, value) = leaf.get(self.taken)?;
        self.taken += 1;
        Some((key.clone(), value.clone()))
    }
}

impl<K: Clone, V: Clone> Iterator for IntoIter<K, V> {
    type Item = (K, V);

    fn next(&mut self) -> Option<(K, V)> {
        loop {
            if let Some(entry) = self.next_of_leaf() {
                return Some(entry);
            }
            self.leaf = None;
            let Some(rest) = self.inner.last_mut() else { return self.only.take() };
            match rest.next() {
                Some(child) => self.descend(child.node),
                None => drop(self.inner.pop()),
            }
        }
    }
}

impl<K: Clone, V: Clone> IntoIterator for Map<K, V> {
    type Item = (K, V);
    type IntoIter = IntoIter<K, V>;

    fn into_iter(self) -> IntoIter<K, V> {
        let mut iter = IntoIter { inner: Vec::new(), leaf: None, taken: 0, only: None };
        match self.root {
            Root::Empty => {}
            Root::One(key, value) => iter.only = Some((key, value)),
            Root::Tree(root) => iter.descend(root),
        }
        iter
    }
}

#[cfg(test)]
#[path = "cow_tests.rs"]
mod tests;
