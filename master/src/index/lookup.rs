//! Lookups: how far a match reaches, and who holds what.
//!
//! Keys are read in groups: first every bucket is touched, then every home slot, then each key is read. The
//! loads of a group overlap that way (there is no prefetch in safe Rust, but the processor runs ahead), which
//! is what makes a batch several times faster than its keys one by one.

use super::{
    Index, IndexSetId, SpaceId, entry::Meta, locations::State, spaces::SpaceView, table::Probe,
};
use larder_proto::{
    BlockKey, Location, Tier, TierSet,
    event::{PartSet, Shard},
    part::{GroupRule, longest_match},
};
use smallvec::SmallVec;
use std::{cell::Cell, cmp::Reverse, hint::black_box, ops::ControlFlow, sync::Arc};

/// The most holders of one block that an answer considers, those with the lowest numbers.
pub const HOLDER_LIMIT: usize = 64;
/// The most sources of a run, the best ones.
pub const SOURCE_LIMIT: usize = 8;
/// Keys whose loads overlap. By measurement 64 are no faster.
const GROUP: usize = 32;
/// Records that [`Index::warm`] looks ahead.
pub const WARM_LIMIT: usize = GROUP;

/// How far a prefix can be used, and from where.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Match {
    /// Blocks from the root on that are usable by the group rules.
    pub blocks: usize,
    /// Those blocks, in order.
    pub runs: Vec<Run>,
    /// Entries were left out of the index, so there may be more than it says (F18).
    pub limited: bool,
}

/// Blocks of which the same locations hold all that the match needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// How many, at least one.
    pub blocks: usize,
    /// The layer groups, one bit each, whose parts of these blocks the match needs. Zero: the match needs
    /// nothing of these blocks (they lie before every window), so there is no source either.
    pub groups: u64,
    /// Who holds those parts, all of them, for every block of the run; best first, [`SOURCE_LIMIT`] at most.
    /// Empty though groups are needed: the parts are there, but no single location has them all; ask
    /// [`Index::locate`].
    pub sources: Vec<Source>,
}

/// One who holds a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// Who.
    pub location: Location,
    /// The fastest tier of the run's first block there.
    pub tier: Tier,
}

/// What a location holds of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Who.
    pub location: Location,
    /// Which parts.
    pub parts: Arc<PartSet>,
    /// In which tiers.
    pub tiers: TierSet,
}

/// The holders of a list of blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Located {
    holders: Vec<Holder>,
    /// Of each block, where its holders end.
    ends: Vec<usize>,
}

impl Located {
    /// The holders of each block, in the order of the question; of one block by rising location.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[Holder]> {
        self.ends.iter().enumerate().map(|(block, end)| {
            let start = if block == 0 { 0 } else { self.ends[block - 1] };
            &self.holders[start..*end]
        })
    }

    /// The holders of all blocks in one list.
    pub fn into_holders(self) -> Vec<Holder> {
        self.holders
    }
}

/// The sources of a run before the best are chosen, by rising location.
type Sources = SmallVec<[(Location, TierSet); 4]>;

struct Draft {
    blocks: usize,
    groups: u64,
    sources: Sources,
}

impl Index {
    /// How many blocks of a chain, from its root on, `rank` can use, and from where. Counts what shown
    /// locations hold, but not `exclude` (the asker, who knows its own). A space that is gone or unknown
    /// matches nothing, and so does a rank that its layout does not have.
    ///
    /// Usable is what the group rules say of the parts of all locations together. A run's sources each hold
    /// every part of `rank` that the match needs of its blocks; better is a faster tier, then more
    /// blocks on from here; equals are told apart by the asker, so that not all go to the same one.
    pub fn match_prefix(
        &self,
        space: SpaceId,
        rank: u32,
        exclude: Option<Location>,
        keys: &[BlockKey],
    ) -> Match {
        let limited = self.limited();
        let Some(space) = self.spaces.read().view(space) else {
            return Match { limited, ..Match::default() };
        };
        let masks = Masks::new(self, &space, rank);
        let keep = |meta: Meta| {
            let location = meta.location();
            self.locations.is(location, State::Shown)
                && Some(location) != exclude
                && masks.of(meta) != 0
        };
        let drafts = match space.rules.groups.as_slice() {
            [GroupRule::EveryBlock] => self.match_one_group(&space, keys, keep),
            _ => self.match_groups(&space, &masks, keys, keep),
        };
        let blocks = drafts.iter().map(|draft| draft.blocks).sum();
        Match { blocks, runs: choose(drafts, exclude), limited }
    }

    /// The match of a layout with one group that needs every block: the common case, in one pass.
    fn match_one_group(
        &self,
        space: &SpaceView,
        keys: &[BlockKey],
        keep: impl Fn(Meta) -> bool,
    ) -> Vec<Draft> {
        let mut drafts = Vec::new();
        let mut found = Vec::with_capacity(HOLDER_LIMIT);
        let _ = self.each(space, keys, |probe| {
            found.clear();
            probe.read(&self.pool, &keep, HOLDER_LIMIT, &mut found);
            if found.is_empty() {
                return ControlFlow::Break(());
            }
            extend(&mut drafts, 1, &found);
            ControlFlow::Continue(())
        });
        drafts
    }

    /// The match of any layout: first what is there, then how far that reaches, then who has it.
    fn match_groups(
        &self,
        space: &SpaceView,
        masks: &Masks<'_>,
        keys: &[BlockKey],
        keep: impl Fn(Meta) -> bool,
    ) -> Vec<Draft> {
        let rules = &space.rules.groups;
        let bits = |of: &dyn Fn(&GroupRule) -> bool| {
            rules
                .iter()
                .enumerate()
                .fold(0, |bits, (group, rule)| bits | u64::from(of(rule)) << group)
        };
        let every_block = bits(&|rule| *rule == GroupRule::EveryBlock);
        let mut found = Vec::with_capacity(keys.len());
        let mut blocks: Vec<Held> = Vec::with_capacity(keys.len());
        let _ = self.each(space, keys, |probe| {
            let first = found.len();
            probe.read(&self.pool, &keep, HOLDER_LIMIT, &mut found);
            let groups = found[first..].iter().fold(0, |bits, meta| bits | masks.of(*meta));
            if groups & every_block != every_block {
                return ControlFlow::Break(()); // No match reaches beyond this block.
            }
            blocks.push(Held { groups, end: found.len() });
            ControlFlow::Continue(())
        });
        let present = |group: usize, block: usize| blocks[block].groups >> group & 1 == 1;
        let reach = longest_match(rules, blocks.len(), present);
        let mut drafts = Vec::new();
        let mut whole = Vec::with_capacity(HOLDER_LIMIT);
        let mut start = 0;
        for (block, held) in blocks[..reach].iter().enumerate() {
            let groups = bits(&|rule| rule.first_needed(reach) <= block);
            let has_all = |meta: &&Meta| groups != 0 && masks.of(**meta) & groups == groups;
            whole.clear();
            whole.extend(found[start..held.end].iter().filter(has_all));
            extend(&mut drafts, groups, &whole);
            start = held.end;
        }
        drafts
    }

    /// Who holds each of these blocks, among shown locations: [`HOLDER_LIMIT`] at most of each.
    pub fn locate(&self, space: SpaceId, keys: &[BlockKey]) -> Located {
        self.locate_in(space, keys, State::Shown)
    }

    pub(super) fn locate_in(&self, id: SpaceId, keys: &[BlockKey], state: State) -> Located {
        let mut located = Located { holders: Vec::new(), ends: vec![0; keys.len()] };
        let Some(space) = self.spaces.read().view(id) else { return located };
        let mut found = Vec::with_capacity(keys.len());
        let mut ends = Vec::with_capacity(keys.len());
        let keep = |meta: Meta| self.locations.is(meta.location(), state);
        let _ = self.each(&space, keys, |probe| {
            probe.read(&self.pool, keep, HOLDER_LIMIT, &mut found);
            ends.push(found.len());
            ControlFlow::Continue(())
        });
        let spaces = self.spaces.read();
        let mut start = 0;
        for (end, out) in ends.into_iter().zip(&mut located.ends) {
            located.holders.extend(found[start..end].iter().filter_map(|meta| {
                let parts = Arc::clone(spaces.parts_in(id, meta.set())?);
                Some(Holder { location: meta.location(), parts, tiers: meta.tiers() })
            }));
            *out = located.holders.len();
            start = end;
        }
        located
    }

    /// Calls `read` for one key after the other, each when its loads are under way or done.
    #[inline]
    fn each<'a>(
        &'a self,
        space: &SpaceView,
        keys: &[BlockKey],
        mut read: impl FnMut(Probe<'a>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        for keys in keys.chunks(GROUP) {
            let probe = |key: &BlockKey| self.table(Shard::of(key)).probe(space.mixer.mix(key));
            let probes: SmallVec<[Probe<'a>; GROUP]> = keys.iter().map(probe).collect();
            self.touch(&probes);
            for probe in &probes {
                read(*probe)?;
            }
        }
        ControlFlow::Continue(())
    }

    /// Loads the lines where the next records have their places, so that a batch of them does not wait for
    /// memory one by one. Changes nothing; of a long list only the first [`WARM_LIMIT`] count.
    pub fn warm<'a>(&self, records: impl IntoIterator<Item = (IndexSetId, &'a BlockKey)>) {
        let spaces = self.spaces.read();
        let probe = |(set, key): (IndexSetId, &BlockKey)| {
            let mixer = spaces.space_of(set)?.mixer;
            Some(self.table(Shard::of(key)).probe(mixer.mix(key)))
        };
        let records = records.into_iter().take(WARM_LIMIT);
        let probes: SmallVec<[Probe<'_>; GROUP]> = records.filter_map(probe).collect();
        drop(spaces);
        self.touch(&probes);
    }

    #[inline]
    fn touch(&self, probes: &[Probe<'_>]) {
        black_box(probes.iter().fold(0, |all, probe| all ^ probe.touch()));
        black_box(probes.iter().fold(0, |all, probe| all ^ probe.touch_home(&self.pool)));
    }
}

/// What was found of one block.
struct Held {
    /// Groups whose part of the rank somebody holds.
    groups: u64,
    /// Where its holders end in the list of all.
    end: usize,
}

/// Adds a block to the last run if its sources are the same, or begins a run.
#[inline]
fn extend(drafts: &mut Vec<Draft>, groups: u64, sources: &[Meta]) {
    if let Some(last) = drafts.last_mut()
        && last.groups == groups
        && last.sources.len() == sources.len()
        && last.sources.iter().zip(sources).all(|(last, now)| last.0 == now.location())
    {
        last.blocks += 1;
        return;
    }
    let sources = sources.iter().map(|meta| (meta.location(), meta.tiers())).collect();
    drafts.push(Draft { blocks: 1, groups, sources });
}

/// Chooses the best sources of each run.
fn choose(drafts: Vec<Draft>, asker: Option<Location>) -> Vec<Run> {
    let spread = |location: Location| {
        let asker = asker.map_or(0, |asker| u64::from(asker.0) + 1);
        super::entry::finalise(asker << 32 | u64::from(location.0))
    };
    // Blocks that each source of the following run holds from there on, by rising location.
    let mut ahead: SmallVec<[(Location, usize); 4]> = SmallVec::new();
    let mut runs: Vec<Run> = Vec::with_capacity(drafts.len());
    for Draft { blocks, groups, sources } in drafts.into_iter().rev() {
        let further = |location: Location| {
            let at = ahead.binary_search_by_key(&location, |source| source.0);
            at.map_or(0, |at| ahead[at].1)
        };
        let here: SmallVec<[(Location, usize); 4]> =
            sources.iter().map(|source| (source.0, blocks + further(source.0))).collect();
        let mut ranked: SmallVec<[_; 4]> = sources
            .iter()
            .zip(&here)
            .filter_map(|((location, tiers), (_, reach))| {
                Some((tiers.fastest()?, Reverse(*reach), spread(*location), *location))
            })
            .collect();
        ranked.sort_unstable();
        ranked.truncate(SOURCE_LIMIT);
        let source = |(tier, _, _, location)| Source { location, tier };
        runs.push(Run { blocks, groups, sources: ranked.into_iter().map(source).collect() });
        ahead = here;
    }
    runs.reverse();
    runs
}

/// The layer groups that part sets hold for a rank: worked out once a set, remembered for a few.
struct Masks<'a> {
    index: &'a Index,
    space: &'a SpaceView,
    rank: u32,
    known: [Cell<(u32, u64)>; MASKS],
}

const MASKS: usize = 8;

impl<'a> Masks<'a> {
    fn new(index: &'a Index, space: &'a SpaceView, rank: u32) -> Self {
        Self { index, space, rank, known: [const { Cell::new((u32::MAX, 0)) }; MASKS] }
    }

    #[inline]
    fn of(&self, meta: Meta) -> u64 {
        let set = meta.set();
        let known = &self.known[set as usize % MASKS];
        if known.get().0 != set {
            known.set((set, self.work_out(set)));
        }
        known.get().1
    }

    /// Zero for a set of another space, as it is read when a writer came between.
    #[cold]
    fn work_out(&self, set: u32) -> u64 {
        // Recursive: the caller may hold the lock of a bucket (`Bucket::read_alone`), which somebody with a
        // read lock on the spaces waits for, so a writer that waits for that one must not stop us.
        let spaces = self.index.spaces.read_recursive();
        let parts = spaces.parts_in(self.space.id, set);
        parts.map_or(0, |parts| self.space.rules.groups_held(parts, self.rank))
    }
}
