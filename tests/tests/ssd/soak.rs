//! A mixed life, and what is left of it: everything that is told is there, and nothing else.

use crate::bed::{LONGEST, exact, is_exact, keys, len_of, physical_bytes};
use larder_client::{cluster::ClusterClient, local::FetchRequest, local::LocalSession};
use larder_proto::{BlockKey, PartNumber, Tier, frame::Class};
use larder_tests::{
    blocks,
    node::{self, LONG, Node, adopted, client, evict, lookup, master, ssds, tier, until},
    process::Daemon,
    sim::dice::Dice,
};
use std::{path::Path, sync::Arc, time::Duration};

const CAPACITY: u64 = 24 << 20;
const BLOCKS: u64 = 600;
const CLIENTS: u64 = 4;
const OPERATIONS: u64 = 700;

/// One client's share of the work.
async fn work(node: Arc<Node>, master: Arc<ClusterClient>, mut dice: Dice) {
    let (tcp, local) = (node.tcp().await, node.local().await);
    for _ in 0..OPERATIONS {
        let key = blocks::key(dice.below(BLOCKS));
        match dice.below(100) {
            0..40 => _ = node::put(&tcp, key, len_of(&key)).await.unwrap(),
            40..65 => _ = is_exact(&tcp, key).await,
            65..75 => {
                if let Some(lease) = local.lease(blocks::part(key)).await.unwrap() {
                    exact(&key, Some(lease.to_vec()));
                }
            }
            75..83 => give_up(node::put(&tcp, key, len_of(&key)), &mut dice).await,
            83..91 => give_up(node::get(&tcp, key), &mut dice).await,
            91..96 => abandon_fetch(&local, &mut dice).await,
            _ => {
                evict(&master, &[key], false).await.unwrap();
            }
        }
    }
}

/// A request that its asker drops, sooner or later.
async fn give_up(request: impl Future, dice: &mut Dice) {
    let patience = Duration::from_micros(dice.below(1500));
    _ = tokio::time::timeout(patience, request).await;
}

/// A fetch of many blocks whose asker goes away after some answers.
async fn abandon_fetch(local: &LocalSession, dice: &mut Dice) {
    let parts = (0..20).map(|_| (blocks::key(dice.below(BLOCKS)), PartNumber(0))).collect();
    let fetch =
        FetchRequest { model: blocks::model(), parts, deadline: LONG, class: Class::Demand };
    let mut stream = local.fetch(&fetch).await.unwrap();
    for _ in 0..dice.below(20) {
        if let Some(Ok((item, Ok(lease)))) = stream.next().await {
            exact(&fetch.parts[item].0, Some(lease.to_vec()));
        }
    }
}

/// Bytes in whole pages.
fn pages(len: usize) -> u64 {
    len.next_multiple_of(4096) as u64
}

/// Waits until what the node tells is what is there, byte for byte.
async fn adds_up(node: &Node, ssd: &Path, all: &[BlockKey]) {
    let at = node.tcp().await;
    let mut last = String::new();
    let agrees = async || {
        let tiers = lookup(&at, all.to_vec()).await.unwrap();
        let of = |tier: Tier, record: u64| {
            let held = all.iter().zip(&tiers).filter(move |(_, tiers)| tiers.has(tier));
            held.fold((0, 0), |(n, bytes), (key, _)| (n + 1, bytes + record + pages(len_of(key))))
        };
        let status = node.status().await;
        let (dram, on_ssd) = (tier(&status, "dram"), tier(&status, "ssd"));
        last = format!("{status:?}");
        status.leases == 0
            && status.writes_in_progress == 0
            && status.quarantined_bytes == 0
            && (dram.parts, dram.used_bytes) == of(Tier::Dram, 0)
            && (on_ssd.parts, on_ssd.evictable_bytes) == of(Tier::Ssd, 4096)
    };
    let asked = tokio::time::timeout(LONG / 2, until("it adds up", agrees)).await;
    assert!(asked.is_ok(), "it does not add up: {last}");
    let (physical, told) = (physical_bytes(ssd), node.ssd().await);
    assert!(told.evictable_bytes <= told.used_bytes, "{told:?}");
    assert!(told.used_bytes <= physical && physical <= CAPACITY, "{told:?}, {physical} bytes");
}

/// A mixed life, at the end of which everything adds up, and is removed by command.
struct Lived {
    dir: tempfile::TempDir,
    master: Daemon,
    flags: Vec<String>,
    node: Node,
}

async fn live(seed: u64) -> Lived {
    println!("seed {seed}, blocks of up to {LONGEST} bytes");
    let dir = tempfile::tempdir().unwrap();
    let daemon = master(dir.path()).await;
    let master = Arc::new(client(&daemon));
    let ssd = dir.path().join("ssd");
    let mut flags = ssds(&[(&ssd, "24MiB")], "2MiB");
    flags.push("--dram.capacity=24MiB".to_owned());
    let node = Arc::new(Node::start(dir.path(), "a", Some(&daemon), &flags).await);
    adopted(&master).await;
    let mut tasks = tokio::task::JoinSet::new();
    for client in 0..CLIENTS {
        let dice = Dice::new(seed + client);
        tasks.spawn(work(Arc::clone(&node), Arc::clone(&master), dice));
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    let all = keys(0..BLOCKS);
    adds_up(&node, &ssd, &all).await;
    let counters = node.ssd().await.paths.remove(0).counters;
    assert!(counters["written"] > 100 && counters["read"] > 0, "{counters:?}");
    assert!(counters["reclaimed_segment"] > 0 && counters["damaged"] == 0, "{counters:?}");

    evict(&master, &[], false).await.unwrap();
    until("nothing is left", async || {
        let status = node.status().await;
        let (dram, ssd) = (tier(&status, "dram"), tier(&status, "ssd"));
        (dram.parts, dram.used_bytes, ssd.parts, ssd.evictable_bytes) == (0, 0, 0, 0)
    })
    .await;
    drop(master);
    Lived { dir, master: daemon, flags, node: Arc::into_inner(node).unwrap() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_mixed_life_memory_files_and_index_hold_what_is_told_and_nothing_else() {
    live(21).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_that_was_removed_by_command_comes_back_from_a_reclaimed_segment() {
    for seed in 30..36 {
        let Lived { dir, master, flags, node } = live(seed).await;
        node.daemon.kill().await.unwrap();
        let node = Node::start(dir.path(), "a", Some(&master), &flags).await;
        adopted(&client(&master)).await;
        assert_eq!(node.ssd().await.parts, 0, "came back");
        let at = node.tcp().await;
        for key in keys(0..BLOCKS) {
            assert!(!is_exact(&at, key).await, "{key} came back");
        }
    }
}
