//! When two states are the same for this search: when their keys show the same but for names.
//!
//! Left out are revision, tokens (of which a key keeps the order, by which its holds and delays are
//! listed), the names of leases (every renaming is tried, the least reading counts), and numbers,
//! of which it matters only which holds and waits are of one acquire. Retry memory is read only of
//! clients that read late (`memory`): the others use every number once and have read every outcome.

use std::collections::BTreeMap;

use leasehold_protocol::ids::{LeaseId, Number};

use super::rules::{KeyView, View};
use super::world::World;
use super::{Profile, memory};

pub(crate) fn of(world: &World, profile: &Profile) -> Vec<u8> {
    let view = View::of(&world.state, profile);
    let live: Vec<LeaseId> = world.sessions.keys().copied().collect();
    let orders = permutations(live.len()).into_iter();
    let readings = orders.map(|order| {
        let names = live.iter().zip(&order).map(|(lease, name)| (*lease, *name));
        reading(world, &view, profile, &names.collect())
    });
    let mut least = readings.min().unwrap_or_default();
    least.push(live.len() as u8);
    least
}

fn permutations(count: usize) -> Vec<Vec<u8>> {
    let mut all = vec![Vec::new()];
    for next in 0..count as u8 {
        let longer = all.iter().flat_map(|order: &Vec<u8>| {
            (0..=order.len()).map(move |at| {
                let mut order = order.clone();
                order.insert(at, next);
                order
            })
        });
        all = longer.collect();
    }
    all
}

fn reading(
    world: &World,
    view: &View,
    profile: &Profile,
    names: &BTreeMap<LeaseId, u8>,
) -> Vec<u8> {
    let mut groups = BTreeMap::new();
    let mut bytes = Vec::with_capacity(64);
    for key in profile.keys {
        let entry = view.keys.get(*key).cloned().unwrap_or_default();
        read_key(&entry, names, &mut groups, &mut bytes);
        bytes.push(255);
    }
    if profile.reads_late {
        let mut order: Vec<_> = names.iter().map(|(lease, name)| (*name, *lease)).collect();
        order.sort_unstable();
        for (_, lease) in order {
            let group = |lease, number| {
                let next = groups.len() as u8;
                *groups.entry((lease, number)).or_insert(next)
            };
            memory::read(world, view, lease, group, &mut bytes);
        }
    }
    bytes
}

fn read_key(
    entry: &KeyView,
    names: &BTreeMap<LeaseId, u8>,
    groups: &mut BTreeMap<(LeaseId, Number), u8>,
    bytes: &mut Vec<u8>,
) {
    let mut group = |lease, number| {
        let next = groups.len() as u8;
        *groups.entry((lease, number)).or_insert(next)
    };
    bytes.push(entry.limit as u8);
    for one in &entry.holders {
        bytes.extend([1, names[&one.lease], one.mode.0 as u8, (one.mode.0 >> 8) as u8]);
        bytes.extend([group(one.lease, one.number), one.entries as u8, u8::from(one.forced)]);
        bytes.push(one.slots.first().copied().unwrap_or(0));
        bytes.push(one.value.first().copied().unwrap_or(0));
        bytes.push(one.asked.as_ref().map_or(0, |why| why.as_bytes()[0]));
        bytes.push(u8::from(one.delay_ms > 0));
    }
    for (mode, _) in entry.delays.values() {
        bytes.extend([2, mode.0 as u8, (mode.0 >> 8) as u8]);
    }
    for one in &entry.queue {
        bytes.extend([3, names[&one.lease], one.mode.0 as u8, (one.mode.0 >> 8) as u8]);
        bytes.push(group(one.lease, one.number));
    }
}
