//! A simulated node: a small catalog that changes as the real one does, the real change log, one real
//! publisher for every master, and the real gate of terms.

use super::{
    dice::Dice,
    world::{KEYS, SPACES, Universe},
};
use larder_proto::{
    BlockKey, Incarnation, NodeId, Term, Tier, TierSet,
    event::{PartSet, PartSetDef, Shard},
    part::PartNumber,
};
use larder_store_node::inventory::{
    BlockState, Change, ChangeLog, Identity, Inventory, Loss, PartSets, TermGate, TermStore,
    Vitals,
    publisher::{Limits, Publisher},
};
use parking_lot::Mutex;
use std::{collections::BTreeMap, io, sync::Arc};

/// A block of one space, as the catalog names it.
pub(super) type BlockName = (usize, BlockKey);
/// What a node holds of a block: parts and tiers.
pub(super) type Held = (PartSet, TierSet);

/// The truth about one life of a node.
pub(super) struct Catalog {
    pub(super) log: ChangeLog,
    universe: Arc<Universe>,
    blocks: Mutex<BTreeMap<BlockName, BlockState>>,
    /// What each change said, by its number from 1.
    history: Mutex<Vec<(BlockName, Option<BlockState>)>>,
}

impl Catalog {
    fn new(universe: Arc<Universe>, ring: usize) -> Self {
        let log = ChangeLog::new(Arc::new(PartSets::new(PartSets::DEFAULT_LIMIT)), ring);
        Self { log, universe, blocks: Mutex::default(), history: Mutex::default() }
    }

    fn append(&self, name: BlockName, after: Option<BlockState>, change: Change) {
        self.log.append(change);
        self.history.lock().push((name, after));
    }

    /// Stores other parts, or in other tiers, than before.
    pub(super) fn store(&self, dice: &mut Dice) {
        let space = dice.pick(SPACES);
        let key = self.universe.keys[dice.pick(KEYS)];
        let (tenant, model) = self.universe.spaces[space];
        let all = [vec![0], vec![1], vec![0, 1]];
        let parts = all[dice.pick(3)].iter().map(|part| PartNumber(*part));
        let parts = PartSet::of(parts).expect("parts 0 and 1 are parts");
        let set = self.log.sets().intern(&PartSetDef { tenant, model, parts });
        let tiers = match dice.below(3) {
            0 => TierSet::of(Tier::Dram),
            1 => TierSet::of(Tier::Ssd),
            _ => TierSet::of(Tier::Dram).with(Tier::Ssd),
        };
        let after = BlockState { set: set.expect("there is room for few sets"), tiers };
        let mut blocks = self.blocks.lock();
        let before = blocks.insert((space, key), after);
        self.append((space, key), Some(after), Change::stored(key, before, after));
    }

    /// Loses one block for one of the reasons there are.
    pub(super) fn lose(&self, dice: &mut Dice) {
        let mut blocks = self.blocks.lock();
        let names: Vec<BlockName> = blocks.keys().copied().collect();
        if names.is_empty() {
            return;
        }
        let name = names[dice.pick(names.len())];
        let loss = [Loss::Evicted, Loss::Removed, Loss::Damaged][dice.pick(3)];
        if let Some(before) = blocks.remove(&name) {
            self.append(name, None, Change::lost(name.1, before, loss));
        }
    }

    /// Removes all blocks of a space, as a command asks for.
    pub(super) fn remove_space(&self, space: usize) -> u64 {
        let mut blocks = self.blocks.lock();
        let gone: Vec<BlockName> = blocks.keys().filter(|name| name.0 == space).copied().collect();
        for name in &gone {
            if let Some(before) = blocks.remove(name) {
                self.append(*name, None, Change::lost(name.1, before, Loss::Removed));
            }
        }
        gone.len() as u64
    }

    /// Is asked for a block that it does not hold.
    pub(super) fn miss(&self, dice: &mut Dice) {
        let name = (dice.pick(SPACES), self.universe.keys[dice.pick(KEYS)]);
        let blocks = self.blocks.lock();
        if !blocks.contains_key(&name) {
            let (tenant, model) = self.universe.spaces[name.0];
            let space = self.log.sets().space(tenant, model).expect("there is room for few sets");
            self.append(name, None, Change::absent(name.1, space));
        }
    }

    /// Everything held when change `seq` had happened.
    pub(super) fn at(&self, seq: u64) -> BTreeMap<BlockName, Held> {
        let seq = usize::try_from(seq).unwrap_or(usize::MAX);
        let mut held = BTreeMap::new();
        for (name, state) in self.history.lock().iter().take(seq) {
            match state {
                Some(state) => held.insert(*name, self.held(*state)),
                None => held.remove(name),
            };
        }
        held
    }

    /// Everything held now.
    pub(super) fn now(&self) -> BTreeMap<BlockName, Held> {
        self.blocks.lock().iter().map(|(name, state)| (*name, self.held(*state))).collect()
    }

    fn held(&self, state: BlockState) -> Held {
        (self.log.sets().def(state.set).parts.clone(), state.tiers)
    }
}

impl Inventory for Catalog {
    fn snapshot(&self, shard: Shard) -> (u64, Vec<(BlockKey, BlockState)>) {
        let blocks = self.blocks.lock();
        let of_shard = blocks.iter().filter(|(name, _)| Shard::of(&name.1) == shard);
        (self.log.head(), of_shard.map(|(name, state)| (name.1, *state)).collect())
    }

    fn vitals(&self) -> Vitals {
        Vitals { blocks: self.blocks.lock().len() as u64, ..Vitals::default() }
    }
}

/// One life of a node.
pub(super) struct Life {
    pub(super) incarnation: Incarnation,
    pub(super) catalog: Arc<Catalog>,
    /// One for every master, with its connection and the time of the next attempt.
    pub(super) links: Vec<Link>,
}

pub(super) struct Link {
    pub(super) publisher: Publisher,
    pub(super) connection: Option<u64>,
    pub(super) retry_at: u64,
}

/// A node over its lives.
pub(super) struct Node {
    pub(super) id: NodeId,
    pub(super) gate: TermGate,
    pub(super) life: Option<Life>,
    pub(super) last_incarnation: u64,
    /// Every life, for those who check what was said of it.
    pub(super) lives: BTreeMap<Incarnation, Arc<Catalog>>,
    /// The term of the last command obeyed, over all lives.
    pub(super) obeyed: u64,
}

impl Node {
    pub(super) fn new(number: u8) -> Self {
        let gate = TermGate::open(Box::new(Disk::default())).expect("the disk is in memory");
        Self {
            id: NodeId::from_bytes([number; 16]),
            gate,
            life: None,
            last_incarnation: 0,
            lives: BTreeMap::new(),
            obeyed: 0,
        }
    }

    /// Begins a life. With `adopts`, about half of what the life before held is found on disk again.
    pub(super) fn start(
        &mut self,
        dice: &mut Dice,
        universe: &Arc<Universe>,
        masters: usize,
        ring: usize,
        adopts: bool,
    ) {
        self.last_incarnation += 1 + dice.below(3);
        let incarnation = Incarnation(self.last_incarnation);
        let catalog = Arc::new(Catalog::new(Arc::clone(universe), ring));
        if let Some((_, before)) = self.lives.last_key_value().filter(|_| adopts) {
            for (name, (parts, tiers)) in before.now() {
                if dice.chance(50) {
                    let (tenant, model) = universe.spaces[name.0];
                    let set = catalog.log.sets().intern(&PartSetDef { tenant, model, parts });
                    let after = BlockState { set: set.expect("there is room for few sets"), tiers };
                    catalog.blocks.lock().insert(name, after);
                    catalog.append(name, Some(after), Change::stored(name.1, None, after));
                }
            }
        }
        self.lives.insert(incarnation, Arc::clone(&catalog));
        let limits = Limits { window: 16, batch_records: 5, batch_sets: 2, commands: 2 };
        let link = |_| Link {
            publisher: Publisher::new(self.identity(incarnation), limits),
            connection: None,
            retry_at: 0,
        };
        self.life = Some(Life { incarnation, catalog, links: (0..masters).map(link).collect() });
    }

    fn identity(&self, incarnation: Incarnation) -> Identity {
        Identity {
            node: self.id,
            incarnation,
            name: format!("node-{}", self.id.as_bytes()[0]),
            data_address: "127.0.0.1:1".to_owned(),
            control_address: "127.0.0.1:2".to_owned(),
            capacity_bytes: 1,
            version: "0".to_owned(),
        }
    }
}

/// The part of a node's disk that keeps its term.
#[derive(Debug, Default)]
struct Disk(Mutex<Option<Term>>);

impl TermStore for Disk {
    fn load(&self) -> io::Result<Option<Term>> {
        Ok(*self.0.lock())
    }

    fn save(&self, term: Term) -> io::Result<()> {
        *self.0.lock() = Some(term);
        Ok(())
    }
}
