//! kill -9 under load, again and again: what was seen on an ssd is there after the restart, whatever is
//! there is exact, and what was removed by command stays removed.

use crate::bed::{exact, len_of};
use larder_client::{
    cluster::ClusterClient,
    connection::{Connection, PutOutcome},
    local::{LocalSession, PartAttributes},
};
use larder_proto::Tier;
use larder_tests::{
    blocks,
    node::{self, Node, adopted, evict, lookup, ssds, within},
    sim::dice::Dice,
};
use parking_lot::Mutex;
use std::{
    collections::BTreeSet,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::sync::watch;

/// What is known of the blocks of all lives of a node, by their numbers.
#[derive(Default)]
struct Known {
    /// Stored, and not named by any removal.
    stored: BTreeSet<u64>,
    /// Of these, those that were seen on an ssd.
    on_ssd: BTreeSet<u64>,
    /// Removed by command, and that was acknowledged.
    removed: BTreeSet<u64>,
}

/// What the clients of a node share.
struct Load {
    next: AtomicU64,
    known: Mutex<Known>,
    /// Blocks stored so far.
    puts: watch::Sender<u64>,
    seed: u64,
}

/// What all lives together have shown.
#[derive(Debug, Default, PartialEq, Eq)]
struct Shown {
    seen_on_ssd: usize,
    readable: usize,
    removed: usize,
    reclaimed: u64,
}

/// How a client reaches the node.
enum Door {
    Tcp(Connection),
    Local(LocalSession),
}

impl Door {
    /// Whether the block was stored; an error when the node is gone.
    async fn put(&self, n: u64) -> Result<bool, ()> {
        let key = blocks::key(n);
        let outcome = match self {
            Self::Tcp(connection) => node::put(connection, key, len_of(&key)).await.map_err(drop),
            Self::Local(session) => {
                let content = blocks::model().content;
                let at = PartAttributes { content, root: key, parent: None, origin_hash: None };
                let bytes = blocks::bytes(&key, len_of(&key));
                session.put(blocks::part(key), &at, &bytes).await.map_err(drop)
            }
        };
        Ok(matches!(outcome?, PutOutcome::Stored(_)))
    }

    /// Reads in place, or over the wire. What comes is exact.
    async fn get(&self, n: u64) -> Result<(), ()> {
        let key = blocks::key(n);
        match self {
            Self::Tcp(connection) => {
                exact(&key, node::get(connection, key).await.map_err(drop)?);
            }
            Self::Local(session) => {
                if let Some(lease) = session.lease(blocks::part(key)).await.map_err(drop)? {
                    exact(&key, Some(lease.to_vec()));
                }
            }
        }
        Ok(())
    }
}

/// Puts new blocks and reads old ones, until the node is gone.
async fn write(load: Arc<Load>, door: Door, who: u64) {
    let mut dice = Dice::new(load.seed ^ who);
    loop {
        let n = load.next.fetch_add(1, Ordering::Relaxed);
        match door.put(n).await {
            Ok(true) => _ = load.known.lock().stored.insert(n),
            Ok(false) => {}
            Err(()) => return,
        }
        load.puts.send_modify(|puts| *puts += 1);
        if dice.chance(40) && door.get(dice.below(n + 1)).await.is_err() {
            return;
        }
    }
}

/// Removes blocks by command, until the node is gone.
async fn remove(load: Arc<Load>, master: ClusterClient) {
    let mut dice = Dice::new(load.seed ^ 77);
    let mut puts = load.puts.subscribe();
    while puts.changed().await.is_ok() {
        let chosen: Vec<u64> = {
            let mut known = load.known.lock();
            let all: Vec<u64> = known.stored.iter().copied().collect();
            let chosen = (0..2).filter(|_| all.len() > 8).map(|_| all[dice.pick(all.len())]);
            let chosen: Vec<u64> = chosen.collect();
            for n in &chosen {
                // From here on nobody can say whether it is there, until the removal is acknowledged.
                known.stored.remove(n);
                known.on_ssd.remove(n);
            }
            chosen
        };
        if chosen.is_empty() {
            continue; // A removal that names no block is one of all.
        }
        let keys: Vec<_> = chosen.iter().copied().map(blocks::key).collect();
        match evict(&master, &keys, false).await.as_deref() {
            Ok([one]) if one.error.is_empty() => load.known.lock().removed.extend(chosen),
            _ => return,
        }
    }
}

/// Notes what lies on an ssd, until the node is gone.
async fn watch_tiers(load: Arc<Load>, at: Connection) {
    loop {
        let asked: Vec<u64> = {
            let known = load.known.lock();
            known.stored.difference(&known.on_ssd).copied().collect()
        };
        let keys = asked.iter().copied().map(blocks::key).collect();
        let Ok(tiers) = lookup(&at, keys).await else { return };
        {
            let mut known = load.known.lock();
            for (n, tiers) in asked.into_iter().zip(tiers) {
                if tiers.has(Tier::Ssd) && known.stored.contains(&n) {
                    known.on_ssd.insert(n);
                }
            }
        }
        tokio::task::yield_now().await;
    }
}

/// Lets the clients loose on a node, and kills it in the midst of that.
async fn live_and_die(load: &Arc<Load>, node: Node, master: ClusterClient, dice: &mut Dice) {
    let doors = [
        Door::Tcp(node.tcp().await),
        Door::Tcp(node.tcp().await),
        Door::Local(node.local().await),
        Door::Local(node.local().await),
    ];
    let watched = node.tcp().await;
    let mut tasks = tokio::task::JoinSet::new();
    for (who, door) in doors.into_iter().enumerate() {
        tasks.spawn(write(Arc::clone(load), door, dice.below(u64::MAX) ^ who as u64));
    }
    tasks.spawn(watch_tiers(Arc::clone(load), watched));
    tasks.spawn(remove(Arc::clone(load), master));
    let mut puts = load.puts.subscribe();
    let at = *puts.borrow() + 40 + dice.below(120);
    within("the node takes puts", puts.wait_for(|puts| *puts >= at)).await.unwrap();
    node.daemon.kill().await.unwrap();
    within("clients of a dead node end", async {
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap(); // A wrong byte panics.
        }
    })
    .await;
}

/// What a restarted node holds is what it has to.
async fn check(load: &Load, node: &Node, roomy: bool, shown: &mut Shown) {
    let at = node.tcp().await;
    let mut readable = BTreeSet::new();
    for n in 0..load.next.load(Ordering::Relaxed) {
        let key = blocks::key(n);
        if exact(&key, node::get(&at, key).await.unwrap()) {
            readable.insert(n);
        }
    }
    let mut known = load.known.lock();
    let back: Vec<_> = known.removed.intersection(&readable).collect();
    assert!(back.is_empty(), "removed by command, and back after the restart: {back:?}");
    let lost: Vec<_> = known.on_ssd.difference(&readable).copied().collect();
    // Where there is little room, some were evicted meanwhile.
    assert!(!roomy || lost.is_empty(), "seen on an ssd, and not readable any more: {lost:?}");
    shown.seen_on_ssd += known.on_ssd.len();
    shown.readable += readable.len();
    shown.removed = known.removed.len();
    lost.iter().for_each(|n| _ = known.on_ssd.remove(n));
    // What was acknowledged and was in the arena alone is gone: that is the promise.
    known.stored.retain(|n| readable.contains(n));
}

/// Kills one node `loops` times.
async fn kill_loops(seed: u64, loops: u32, capacity: &str) -> Shown {
    println!("seed {seed}, capacity {capacity}");
    let roomy = capacity.ends_with("GiB");
    let dir = tempfile::tempdir().unwrap();
    let daemon = node::master(dir.path()).await;
    let master = || node::client(&daemon);
    let mut dice = Dice::new(seed);
    let load = Arc::new(Load {
        next: AtomicU64::new(0),
        known: Mutex::default(),
        puts: watch::Sender::new(0),
        seed,
    });
    let flags = flags(&dir.path().join("ssd"), capacity);
    let mut shown = Shown::default();
    for _ in 0..loops {
        let node = Node::start(dir.path(), "a", Some(&daemon), &flags).await;
        adopted(&master()).await;
        check(&load, &node, roomy, &mut shown).await;
        live_and_die(&load, node, master(), &mut dice).await;
    }
    let node = Node::start(dir.path(), "a", Some(&daemon), &flags).await;
    adopted(&master()).await;
    check(&load, &node, roomy, &mut shown).await;
    shown.reclaimed = node.ssd().await.paths[0].counters["reclaimed_segment"];
    println!("{shown:?}");
    assert!(shown.seen_on_ssd > 0 && shown.readable > 0 && shown.removed > 0, "{shown:?}");
    shown
}

fn flags(dir: &Path, capacity: &str) -> Vec<String> {
    let mut flags = ssds(&[(dir, capacity)], "2MiB");
    flags.push("--dram.capacity=32MiB".to_owned());
    flags
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_seen_on_an_ssd_survives_kills_and_what_was_removed_does_not() {
    kill_loops(1, 5, "1GiB").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_while_segments_are_reclaimed_bring_back_nothing_that_was_removed() {
    kill_loops(2, 3, "16MiB").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes"]
async fn a_hundred_kills_lose_nothing_that_was_seen_on_an_ssd() {
    for seed in 100..114 {
        kill_loops(seed, 5, "1GiB").await;
    }
    for seed in 200..206 {
        kill_loops(seed, 5, "16MiB").await;
    }
}
