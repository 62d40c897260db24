//! A seeded simulation of sessions, membership and index.
//!
//! Real parts: change log, publisher, gate of terms, session, membership, cluster, index, answers.
//! Simulated: catalogs, connections (delay, break, late and repeated messages), crashes, time. One seed
//! decides everything: the same seed gives the same trace, byte for byte.
//!
//! Promises that are checked: see `check`; and that a deposed master is not obeyed, that no rule of the
//! protocol is broken between the two ends while messages are not lost, and that no node falls silent.

mod check;
pub mod dice;
mod master;
mod node;
mod world;

use world::World;
pub use world::{Broken, Met, Plan};

/// What a run came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Hash over everything that happened.
    pub trace: blake3::Hash,
    /// What it met.
    pub met: Met,
}

impl Plan {
    /// The plan of a seed: neighbouring seeds differ in size, loss and limits.
    pub fn of_seed(seed: u64) -> Self {
        let small = |n: u64| usize::try_from(n).unwrap_or(0);
        Self {
            nodes: small(1 + seed % 4),
            masters: small(1 + seed / 4 % 2),
            steps: 300,
            ring: if seed.is_multiple_of(3) { 24 } else { 1_000 },
            lossy: seed.is_multiple_of(5),
            entries: if seed.is_multiple_of(7) { 40 } else { 10_000 },
        }
    }
}

/// Runs a seed.
///
/// # Errors
/// A promise was broken.
pub fn run(seed: u64, plan: Plan) -> Result<Outcome, Broken> {
    let mut world = World::new(seed, plan);
    for _ in 0..plan.steps {
        world.step()?;
    }
    world.quiet()?;
    world.check_agreement()?;
    for master in &world.masters {
        let [gaps, snapshots, repeated, superseded] = master.counts();
        world.met.gaps += gaps;
        world.met.snapshots += snapshots;
        world.met.repeated += repeated;
        world.met.superseded += superseded;
    }
    Ok(Outcome { trace: world.trace(), met: world.met })
}
