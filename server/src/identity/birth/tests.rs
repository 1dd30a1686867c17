//! The rules one by one, then under random loss, delay, duplication, crashes and wiped disks.

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::DiskId;
use rand::rngs::SmallRng;
use rand::seq::{IndexedRandom, IteratorRandom};
use rand::{RngExt, SeedableRng};

use super::*;

const NOW: Mint = Mint {
    cluster: ClusterId([9; 16]),
    wall_ms: 2000,
    earliest_ms: 1000,
    token_floor: 0,
    restore: None,
};

fn disk(number: u8) -> DiskId {
    DiskId([number; 16])
}

fn member(node: u64, disk_number: u8) -> BirthMember {
    BirthMember {
        node: NodeId(node),
        disk: disk(disk_number),
        peer_addr: format!("p{node}:1"),
        client_addr: format!("c{node}:1"),
    }
}

fn plan(nodes: u64) -> Plan {
    let nodes = (1..=nodes).map(NodeId).collect();
    Plan { name: "red".to_owned(), nodes, shards: 2, key_hash: 1 }
}

fn fresh(node: u64) -> Birth {
    Birth::new(member(node, node as u8), plan(3), None).unwrap()
}

fn answers(births: &[&Birth]) -> BTreeMap<NodeId, BirthAnswer> {
    births.iter().map(|birth| (birth.me.node, birth.answer())).collect()
}

/// Node 1's record of three fresh nodes, promised by node 1 alone.
fn minted() -> (Birth, BirthRecord) {
    let mut first = fresh(1);
    let answers = answers(&[&fresh(2), &fresh(3)]);
    let promise = first.answered(&answers, || NOW).unwrap().expect("all are fresh");
    let record = promise.record.clone();
    first.saved(promise);
    (first, record)
}

fn told(birth: &mut Birth) -> Vec<String> {
    std::iter::from_fn(|| birth.poll_told()).map(|told| told.to_string()).collect()
}

#[test]
fn the_lowest_node_mints_once_all_are_fresh_and_founds_once_all_have_promised() {
    let (mut first, record) = minted();
    assert_eq!(record.token_base, 2000 << 10);
    assert_eq!(record.plan(), plan(3));
    assert_eq!(record.members, [member(1, 1), member(2, 2), member(3, 3)]);
    assert_eq!(first.record(), None, "nobody else has promised");
    let proposal = BirthPropose { record: record.clone() };
    assert_eq!(first.step(), Step::Propose(proposal, vec![NodeId(2), NodeId(3)]));
    assert_eq!(first.replied(NodeId(3), BirthReply::Promised), None);
    let promise = first.replied(NodeId(2), BirthReply::Promised).expect("all have promised");
    assert!(promise.founded);
    first.saved(promise);
    assert_eq!((first.step(), first.record()), (Step::Done, Some(&record)));
}

#[test]
fn nobody_mints_while_one_is_missing_and_only_the_lowest_mints() {
    let mut first = fresh(1);
    assert_eq!(first.answered(&answers(&[&fresh(3)]), || NOW).unwrap(), None);
    assert_eq!(told(&mut first), ["the cluster's birth waits for node 2"]);
    assert_eq!(first.answered(&answers(&[&fresh(3)]), || NOW).unwrap(), None);
    assert_eq!(told(&mut first), [""; 0], "said once");
    let mut second = fresh(2);
    assert_eq!(second.answered(&answers(&[&fresh(1), &fresh(3)]), || NOW).unwrap(), None);
    assert_eq!(second.step(), Step::Ask(vec![NodeId(1), NodeId(3)]));
}

#[test]
fn a_node_alone_founds_at_once() {
    let mut only =
        Birth::new(member(4, 4), Plan { nodes: vec![NodeId(4)], ..plan(1) }, None).unwrap();
    let promise = only.answered(&BTreeMap::new(), || NOW).unwrap().unwrap();
    assert!(promise.founded);
    only.saved(promise);
    assert_eq!(only.step(), Step::Done);
    assert!(only.initialises());
}

#[test]
fn a_node_promises_once_and_tells_why_it_does_not() {
    let (_, record) = minted();
    let mut second = fresh(2);
    let promise = second.proposed(&record).unwrap();
    second.saved(promise);
    assert_eq!(second.proposed(&record), Err(BirthReply::Promised), "again is no other");
    let other = BirthRecord { cluster: ClusterId([8; 16]), ..record.clone() };
    assert_eq!(second.proposed(&other), Err(BirthReply::OtherRecord));
    for (plan, disk_number) in [
        (Plan { shards: 3, ..plan(3) }, 2),
        (Plan { name: "blue".to_owned(), ..plan(3) }, 2),
        (Plan { nodes: [1, 2, 4].map(NodeId).to_vec(), ..plan(3) }, 2),
        (Plan { key_hash: 2, ..plan(3) }, 2),
    ] {
        let birth = Birth::new(member(2, disk_number), plan, None).unwrap();
        assert_eq!(birth.proposed(&record), Err(BirthReply::OtherPlan));
    }
    let wiped = Birth::new(member(2, 200), plan(3), None).unwrap();
    assert_eq!(wiped.proposed(&record), Err(BirthReply::OtherDisk));
    assert_eq!(fresh(1).proposed(&record), Err(BirthReply::OtherDisk), "only it can mint");
    let mut malformed = record.clone();
    malformed.members.swap(0, 1);
    assert_eq!(fresh(2).proposed(&malformed), Err(BirthReply::Malformed));
}

#[test]
fn a_fresh_node_adopts_the_record_that_names_its_disk() {
    let (first, record) = minted();
    let mut third = fresh(3);
    let promise = third.answered(&answers(&[&first]), || NOW).unwrap().unwrap();
    assert_eq!(promise, Promise { record, founded: true, joined: false });
}

#[test]
fn a_wiped_node_waits_for_admission_and_says_so_once() {
    let (first, record) = minted();
    for (node, disk_number) in [(1, 100), (3, 100)] {
        let mut second = fresh(2);
        second.saved(Promise { record: record.clone(), founded: true, joined: false });
        let mut wiped = Birth::new(member(node, disk_number), plan(3), None).unwrap();
        let known = if node == 1 { answers(&[&second]) } else { answers(&[&first, &second]) };
        for _ in 0..2 {
            assert_eq!(wiped.answered(&known, || NOW).unwrap(), None);
        }
        assert!(wiped.waits_for_admission());
        let told = told(&mut wiped);
        let about = |told: &&String| told.starts_with("waits for admission: node 2");
        assert_eq!(told.iter().filter(about).count(), 1, "{told:?}");
        let text = told.join("\n");
        for part in
            [record.cluster.to_string(), disk(node as u8).to_string(), disk(100).to_string()]
        {
            assert!(text.contains(&part), "{text}");
        }
        wiped.answered(&BTreeMap::new(), || NOW).unwrap();
        assert!(!wiped.waits_for_admission(), "nobody says so any more");
    }
}

#[test]
fn differences_are_told_with_both_values_and_stop_the_birth() {
    let mut first = fresh(1);
    let other = Birth::new(member(2, 2), Plan { shards: 5, ..plan(3) }, None).unwrap();
    let answers = answers(&[&other, &fresh(3)]);
    for _ in 0..2 {
        assert_eq!(first.answered(&answers, || NOW).unwrap(), None);
    }
    assert_eq!(told(&mut first), ["node 2 has a shard count of 5, but this node has 2"]);
}

#[test]
fn a_wrong_address_and_a_copied_disk_stop_the_birth() {
    let mut first = fresh(1);
    let mut wrong = answers(&[&fresh(3)]);
    wrong.insert(NodeId(2), fresh(3).answer());
    assert_eq!(first.answered(&wrong, || NOW).unwrap(), None);
    assert_eq!(told(&mut first), ["node 3 answers at the address of node 2"]);
    let copy = Birth::new(member(3, 2), plan(3), None).unwrap();
    for _ in 0..2 {
        assert_eq!(first.answered(&answers(&[&fresh(2), &copy]), || NOW).unwrap(), None);
    }
    assert_eq!(told(&mut first), ["nodes 3 and 2 run on copies of one data directory"]);
}

#[test]
fn a_clock_behind_the_build_is_refused_unless_a_floor_is_given() {
    let all = answers(&[&fresh(2), &fresh(3)]);
    let behind = Mint { wall_ms: 999, ..NOW };
    let error = fresh(1).answered(&all, || behind).unwrap_err();
    assert_eq!(error.exit(), Exit::Clock);
    assert!(error.to_string().contains("999") && error.to_string().contains("1000"), "{error}");
    for (mint, base) in [
        (Mint { token_floor: 5, ..behind }, 999 << 10),
        (Mint { token_floor: 1 << 40, ..behind }, 1 << 40),
        (Mint { token_floor: 5, ..NOW }, 2000 << 10),
    ] {
        let promise = fresh(1).answered(&all, || mint).unwrap().unwrap();
        assert_eq!(promise.record.token_base, base);
    }
    let promise = fresh(1).answered(&all, || Mint { wall_ms: u64::MAX, ..NOW }).unwrap().unwrap();
    assert!(i64::try_from(promise.record.token_base).is_ok());
}

#[test]
fn a_stored_promise_refuses_another_configuration() {
    let (_, record) = minted();
    let promise = |founded| Some(Promise { record: record.clone(), founded, joined: false });
    let stored = promise(true);
    for (stored, plan, text) in [
        (
            stored.clone(),
            Plan { shards: 4, ..plan(3) },
            "a shard count of 2, but a shard count of 4 is configured",
        ),
        (promise(false), plan(5), "the nodes 1,2,3, but the nodes 1,2,3,4,5 is configured"),
    ] {
        let error = Birth::new(member(2, 2), plan, stored).unwrap_err();
        assert_eq!(error.exit(), Exit::DataDirForeign);
        assert!(error.to_string().contains(text), "{error}");
    }
    let error = Birth::new(member(2, 3), plan(3), stored.clone()).unwrap_err();
    assert_eq!(error.exit(), Exit::DataDirForeign);
    assert!(Birth::new(member(2, 2), plan(5), stored).is_ok(), "members come and go once founded");
}

#[test]
fn a_node_that_is_admitted_runs_its_shards_and_initialises_nothing() {
    let (_, record) = minted();
    let mut members = record.members.clone();
    members.push(member(4, 4));
    let record = BirthRecord { members, ..record };
    let admitted = |record: &BirthRecord| JoinAnswer::Admitted(record.clone());
    let plan = Plan { nodes: vec![NodeId(1), NodeId(4)], ..plan(3) };
    let mut fourth = Birth::new(member(4, 4), plan.clone(), None).unwrap();
    let by = NodeId(2);
    assert_eq!(fourth.joined(by, &JoinAnswer::Unknown).unwrap(), None);
    assert!(fourth.waits_for_admission());
    let other_disk =
        Birth::new(member(4, 5), plan.clone(), None).unwrap().joined(by, &admitted(&record));
    assert_eq!(other_disk.unwrap(), None, "the record names another data directory");
    let other_shards = BirthRecord { shards: 4, ..record.clone() };
    assert_eq!(fourth.joined(by, &admitted(&other_shards)).unwrap(), None);
    let promise = fourth.joined(by, &admitted(&record)).unwrap().unwrap();
    assert!(promise.founded && promise.joined);
    fourth.saved(promise.clone());
    assert_eq!(fourth.record(), Some(&record));
    assert!(!fourth.initialises());
    // The lowest of all, after the others were replaced: it did not form the groups either.
    let me = record.members[0].clone();
    let lowest = Birth::new(me, plan, Some(promise)).unwrap();
    assert!(!lowest.initialises());
}

#[test]
fn a_node_that_is_refused_for_good_says_so_and_ends() {
    let plan = Plan { nodes: vec![NodeId(1), NodeId(4)], ..plan(3) };
    let mut fourth = Birth::new(member(4, 4), plan, None).unwrap();
    let answer = JoinAnswer::Refused(ErrorCode::NODE_ID_USED);
    let error = fourth.joined(NodeId(1), &answer).unwrap_err();
    assert_eq!(error.exit(), Exit::DataDirForeign);
}

#[test]
fn a_lost_record_is_an_error_and_not_a_second_birth() {
    let (_, record) = minted();
    let mut second = fresh(2);
    second.saved(Promise { record, founded: true, joined: false });
    let error = fresh(1).answered(&answers(&[&second]), || NOW).unwrap_err();
    assert_eq!(error.exit(), Exit::DataDirUnusable);
}

/// One machine: a durable part, and a process while it is up.
struct Machine {
    me: BirthMember,
    stored: Option<Promise>,
    birth: Option<Birth>,
    /// Counts processes, so that a reply to an earlier one is recognised.
    life: u32,
}

enum Message {
    Answers { to: usize, life: u32, answers: BTreeMap<NodeId, BirthAnswer> },
    Propose { from: usize, life: u32, to: usize, record: BirthRecord },
    Reply { to: usize, life: u32, from: NodeId, reply: BirthReply },
}

struct World {
    rng: SmallRng,
    machines: Vec<Machine>,
    flying: Vec<Message>,
    minted: u8,
    disks: u8,
    /// Records that a lowest node has founded: what it would initialise shards with.
    founded: Vec<BirthRecord>,
}

impl World {
    /// Three nodes, and `twins` further machines that also believe to be node 1.
    fn new(seed: u64, twins: usize) -> Self {
        let nodes = [1, 2, 3].into_iter().chain(std::iter::repeat_n(1, twins));
        let machines: Vec<_> = nodes
            .zip(1..)
            .map(|(node, disk)| Machine {
                me: member(node, disk),
                stored: None,
                birth: None,
                life: 0,
            })
            .collect();
        let disks = machines.len() as u8;
        let rng = SmallRng::seed_from_u64(seed);
        Self { rng, machines, flying: Vec::new(), minted: 0, disks, founded: Vec::new() }
    }

    fn start(&mut self, machine_index: usize) {
        let machine = &mut self.machines[machine_index];
        machine.life += 1;
        machine.birth = Birth::new(machine.me.clone(), plan(3), machine.stored.clone()).ok();
        assert!(machine.birth.is_some(), "a directory refuses its own node");
        self.note_founding(machine_index);
    }

    fn wipe(&mut self, machine: usize) {
        self.disks += 1;
        let machine = &mut self.machines[machine];
        (machine.stored, machine.birth) = (None, None);
        machine.me.disk = disk(self.disks);
    }

    /// Saves a promise, with a crash before or after it if `crashes`. True if it is still up.
    fn save(&mut self, machine: usize, promise: Promise, crashes: bool) -> bool {
        let before = crashes && self.rng.random_bool(0.1);
        let after = crashes && self.rng.random_bool(0.1);
        let this = &mut self.machines[machine];
        if !before {
            let old = this.stored.replace(promise.clone());
            assert!(old.is_none_or(|old| old.record == promise.record), "a promise was replaced");
        }
        if before || after {
            this.birth = None;
            return false;
        }
        this.birth.as_mut().unwrap().saved(promise);
        self.note_founding(machine);
        true
    }

    fn note_founding(&mut self, machine: usize) {
        let birth = self.machines[machine].birth.as_ref().unwrap();
        if let Some(record) = birth.record().filter(|_| birth.initialises()) {
            self.founded.push(record.clone());
        }
    }

    /// A machine that answers for a node, if one is up.
    fn reach(&mut self, node: NodeId) -> Option<usize> {
        let up = |machine: &Machine| machine.me.node == node && machine.birth.is_some();
        let machines = self.machines.iter().enumerate().filter(|(_, machine)| up(machine));
        machines.map(|(index, _)| index).choose(&mut self.rng)
    }

    fn act(&mut self, machine: usize, loss: f64) {
        let this = &self.machines[machine];
        let (life, Some(birth)) = (this.life, &this.birth) else { return };
        match birth.step() {
            Step::Done => {}
            Step::Ask(nodes) => {
                let mut answers = BTreeMap::new();
                for node in nodes {
                    let reached = self.reach(node).filter(|_| !self.rng.random_bool(loss));
                    if let Some(answer) = reached.and_then(|m| self.machines[m].birth.as_ref()) {
                        answers.insert(node, answer.answer());
                    }
                }
                self.flying.push(Message::Answers { to: machine, life, answers });
            }
            Step::Propose(proposal, nodes) => {
                for node in nodes {
                    if let Some(to) = self.reach(node).filter(|_| !self.rng.random_bool(loss)) {
                        let record = proposal.record.clone();
                        self.flying.push(Message::Propose { from: machine, life, to, record });
                    }
                }
            }
        }
    }

    fn deliver(&mut self, message: Message, crashes: bool) {
        match message {
            Message::Answers { to, life, answers } => {
                self.minted += 1;
                let mint = Mint { cluster: ClusterId([self.minted; 16]), ..NOW };
                let Some(birth) = self.alive(to, life) else { return };
                let result = birth.answered(&answers, || mint);
                if let Some(promise) = result.expect("no record is lost and the clock is right") {
                    self.save(to, promise, crashes);
                }
            }
            Message::Propose { from, life, to, record } => {
                let Some(birth) = self.machines[to].birth.as_mut() else { return };
                let reply = match birth.proposed(&record) {
                    Ok(promise) => {
                        if !self.save(to, promise, crashes) {
                            return;
                        }
                        BirthReply::Promised
                    }
                    Err(reply) => reply,
                };
                let node = self.machines[to].me.node;
                self.flying.push(Message::Reply { to: from, life, from: node, reply });
            }
            Message::Reply { to, life, from, reply } => {
                let Some(birth) = self.alive(to, life) else { return };
                if let Some(promise) = birth.replied(from, reply) {
                    self.save(to, promise, crashes);
                }
            }
        }
    }

    fn alive(&mut self, machine: usize, life: u32) -> Option<&mut Birth> {
        let machine = &mut self.machines[machine];
        machine.birth.as_mut().filter(|_| machine.life == life)
    }

    fn chaos(&mut self, steps: u32, wiped: std::ops::Range<usize>) {
        let all: Vec<usize> = (0..self.machines.len()).collect();
        for _ in 0..steps {
            let machine = *all.choose(&mut self.rng).unwrap();
            match self.rng.random_range(0..100) {
                0..3 => self.machines[machine].birth = None,
                3 if wiped.contains(&machine) => self.wipe(machine),
                4..20 if self.machines[machine].birth.is_none() => self.start(machine),
                20..50 => self.act(machine, 0.2),
                _ if self.flying.is_empty() => {}
                roll => {
                    let index = self.rng.random_range(0..self.flying.len());
                    let message = self.flying.swap_remove(index);
                    // The network may lose it after all, and may deliver what is old.
                    if roll < 95 {
                        self.deliver(message, true);
                    }
                }
            }
            self.check();
        }
    }

    /// Nobody crashes or loses anything any more.
    fn calm(&mut self) {
        for machine in 0..self.machines.len() {
            if self.machines[machine].birth.is_none() {
                self.start(machine);
            }
        }
        for _ in 0..6 {
            (0..self.machines.len()).for_each(|machine| self.act(machine, 0.0));
            while let Some(message) = self.flying.pop() {
                self.deliver(message, false);
            }
            self.check();
        }
    }

    fn check(&self) {
        let first = self.founded.first();
        assert!(self.founded.iter().all(|record| Some(record) == first), "two clusters");
    }
}

#[test]
fn crashes_and_loss_never_make_two_clusters_and_end_in_one() {
    let mut crashed_half_way = 0;
    for seed in 0..1000 {
        let mut world = World::new(seed, 0);
        world.chaos(120, 0..0);
        let promised = world.machines.iter().filter(|machine| machine.stored.is_some()).count();
        crashed_half_way += u32::from((1..3).contains(&promised));
        world.calm();
        let record = world.founded.first().unwrap_or_else(|| panic!("seed {seed}: no cluster"));
        for machine in &world.machines {
            let birth = machine.birth.as_ref().unwrap();
            assert_eq!(birth.record(), Some(record), "seed {seed}, node {}", machine.me.node);
        }
    }
    assert!(crashed_half_way > 50, "the runs are too kind: {crashed_half_way}");
}

#[test]
fn wiped_disks_never_make_two_clusters() {
    let mut admission = 0;
    for seed in 0..1000 {
        let mut world = World::new(seed, 0);
        // One disk survives: when all are wiped, another cluster is another cluster.
        world.chaos(300, if seed % 2 == 0 { 0..2 } else { 1..3 });
        world.calm();
        for machine in &world.machines {
            let birth = machine.birth.as_ref().unwrap();
            let stranger = |record: &BirthRecord| {
                record.members.iter().all(|member| member.disk != machine.me.disk)
            };
            if world.founded.first().is_some_and(stranger) {
                assert_eq!(birth.record(), None, "seed {seed}: a wiped node takes part");
                admission += u32::from(birth.waits_for_admission());
            }
        }
    }
    assert!(admission > 50, "the runs are too kind: {admission}");
}

#[test]
fn two_machines_that_believe_to_be_the_lowest_node_never_found_two_clusters() {
    let (mut founded, mut none) = (0, 0);
    for seed in 0..2000 {
        let mut world = World::new(seed, 1);
        world.chaos(200, 0..0);
        world.calm();
        if world.founded.is_empty() { none += 1 } else { founded += 1 }
    }
    assert!(founded > 50 && none > 50, "the runs are too kind: {founded} and {none}");
}

#[test]
fn a_restored_birth_carries_what_it_takes_over_and_needs_a_clock_that_is_not_behind() {
    let restored = leasehold_protocol::birth::Restored {
        from: ClusterId([1; 16]),
        lease_base: 2,
        revision_base: 3,
        quarantine_ms: 4,
    };
    let plan = RestorePlan { old_wall_ms: 2000, token_floor: 3000 << 10, restored };
    let all = answers(&[&fresh(2), &fresh(3)]);
    let mint = Mint { restore: Some(plan), ..NOW };
    let record = fresh(1).answered(&all, || mint).unwrap().unwrap().record;
    assert_eq!((record.restored, record.token_base), (Some(restored), 3000 << 10));
    let later = Mint { wall_ms: 4000, ..mint };
    let record = fresh(1).answered(&all, || later).unwrap().unwrap().record;
    assert_eq!(record.token_base, 4000 << 10, "the clock is ahead by now");
    let behind = Mint { wall_ms: 1999, token_floor: 1, ..mint };
    let error = fresh(1).answered(&all, || behind).unwrap_err();
    assert_eq!(error.exit(), Exit::Clock);
    assert!(error.to_string().contains("1999") && error.to_string().contains("2000"), "{error}");
}
