//! What masters advise changes what nodes let go of first: real processes, one master, two nodes.
#![expect(clippy::unwrap_used, reason = "helpers of tests: what fails says where")]

use larder_client::connection::{Connection, PutOutcome};
use larder_proto::{BlockKey, control::StatusRequest};
use larder_tests::{
    blocks::{bytes, key, reserve},
    demo::await_entries,
    node::{Node, client, evict, lookup, master, master_with, put, until},
    process::Daemon,
};
use std::path::Path;

/// Of a block. A node of 16 MiB holds 30 of them, and with each one more it evicts one.
const BLOCK: usize = 512 << 10;

/// A node that asks often, about whatever was not used within the last second.
async fn start(dir: &Path, name: &str, master: &Daemon) -> Node {
    let flags = [
        "--dram.capacity=16MiB",
        "--dram.policy=lru",
        "--dram.low_watermark=0.94",
        "--advice.interval=1s",
        "--advice.idle=0s",
    ];
    Node::start(dir, name, Some(master), &flags.map(String::from)).await
}

/// Ends when nodes have asked about their blocks twice more, so once from the beginning.
async fn asked_about(blocks: u64, master: &Daemon) {
    let by = client(master);
    let calls = async || {
        let status = by.masters().ask(|mut m| async move { m.status(StatusRequest {}).await });
        status.await.unwrap().counters["advise_keys"]
    };
    let before = calls().await;
    until("masters are asked", async || calls().await >= before + 2 * blocks).await;
}

async fn advised(node: &Node) -> u64 {
    let status = node.status().await;
    status.counters.get("advised_block").copied().unwrap_or(0)
}

async fn holds(node: &Connection, keys: &[BlockKey]) -> Vec<bool> {
    let tiers = lookup(node, keys.to_vec()).await.unwrap();
    tiers.iter().map(|tiers| !tiers.is_empty()).collect()
}

async fn put_all(to: &Connection, numbers: std::ops::Range<u64>) {
    for n in numbers {
        assert!(matches!(put(to, key(n), BLOCK).await, Ok(PutOutcome::Stored(_))));
    }
}

/// Puts a block that follows another one, which is the first of its chain.
async fn put_after(to: &Connection, parent: BlockKey, own: BlockKey) {
    put_follower(to, parent, parent, own).await;
}

async fn put_follower(to: &Connection, root: BlockKey, parent: BlockKey, own: BlockKey) {
    let mut wish = reserve(own, BLOCK);
    (wish.parent, wish.root) = (Some(parent), root);
    let stored = to.put(&wish, bytes(&own, BLOCK).into()).await;
    assert!(matches!(stored, Ok(PutOutcome::Stored(_))), "{stored:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_follows_a_block_that_nobody_holds_any_more_goes_first() {
    let dir = tempfile::tempdir().unwrap();
    let master = master(dir.path()).await;
    let (a, b) = (start(dir.path(), "a", &master).await, start(dir.path(), "b", &master).await);
    let (at_a, at_b) = (a.tcp().await, b.tcp().await);
    put(&at_a, key(1), BLOCK).await.unwrap();
    // Long before its orphans, which are not the ones that lru would take therefore.
    put_all(&at_b, 100..128).await;
    put_after(&at_b, key(1), key(2)).await;
    put_after(&at_b, key(2), key(3)).await;
    await_entries(master.address("control"), 31).await.unwrap();
    asked_about(30, &master).await;
    assert_eq!(advised(&b).await, 0, "the parent is at the other node");
    evict(&client(&master), &[key(1)], false).await.unwrap();
    until("the orphans are advised against", async || advised(&b).await >= 2).await;
    put_all(&at_b, 200..202).await;
    assert_eq!(holds(&at_b, &[key(2), key(3)]).await, [false, false]);
    assert!(holds(&at_b, &[key(100), key(101)]).await.iter().all(|there| *there));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_chain_that_two_nodes_hold_one_keeps_all_and_the_other_lets_go_from_its_end() {
    let dir = tempfile::tempdir().unwrap();
    // A master that takes fewer keys at a time than a node asks about: a question is about one shard, which the
    // first byte of a key decides.
    let master = master_with(dir.path(), &["--control.keys_limit=8"]).await;
    let (a, b) = (start(dir.path(), "a", &master).await, start(dir.path(), "b", &master).await);
    let both = [a.tcp().await, b.tcp().await];
    let of_shard =
        |n: u8| BlockKey::from_bytes([&[9, n][..], &[n; 30]].concat().try_into().unwrap());
    let chain: Vec<BlockKey> = (1..13).map(of_shard).collect();
    for (at, others) in both.iter().zip([100..118, 200..218]) {
        put_all(at, others).await; // Older, so lru alone would take these.
        put(at, chain[0], BLOCK).await.unwrap();
        for (parent, own) in chain.iter().zip(&chain[1..]) {
            put_follower(at, chain[0], *parent, *own).await;
        }
    }
    await_entries(master.address("control"), 60).await.unwrap();
    let all = chain.len() as u64;
    // The count goes on from round to round, and what was advised while the index was still behind was part of it.
    let advised_now = async || [advised(&a).await, advised(&b).await];
    let before = advised_now().await;
    until("one of them is advised against all of it, in a round of its own", async || {
        advised_now().await.iter().zip(before).any(|(count, before)| *count >= before + 3 * all)
    })
    .await;
    put_all(&both[0], 300..306).await;
    put_all(&both[1], 400..406).await;
    let kept = [holds(&both[0], &chain).await, holds(&both[1], &chain).await];
    let counts = kept.each_ref().map(|held| held.iter().filter(|there| **there).count());
    assert!(counts == [12, 6] || counts == [6, 12], "{kept:?}");
    assert!(kept.iter().all(|held| held[..6].iter().all(|there| *there)), "from the end: {kept:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_that_hold_the_same_blocks_do_not_both_let_go_of_one() {
    let dir = tempfile::tempdir().unwrap();
    let master = master(dir.path()).await;
    let (a, b) = (start(dir.path(), "a", &master).await, start(dir.path(), "b", &master).await);
    let both = [a.tcp().await, b.tcp().await];
    for at in &both {
        put_all(at, 1..31).await;
    }
    await_entries(master.address("control"), 60).await.unwrap();
    asked_about(60, &master).await;
    for node in [&a, &b] {
        let before = advised(node).await;
        until("each keeps some, by a hash", async || advised(node).await > before).await;
    }
    // Without advice both let go of blocks 1 and 2, which were stored first.
    put_all(&both[0], 100..102).await;
    put_all(&both[1], 200..202).await;
    let shared: Vec<BlockKey> = (1..31).map(key).collect();
    let [at_a, at_b] = [holds(&both[0], &shared).await, holds(&both[1], &shared).await];
    assert!([&at_a, &at_b].iter().all(|held| held.iter().filter(|there| !**there).count() == 2));
    let lost = at_a.iter().zip(&at_b).filter(|(a, b)| !**a && !**b).count();
    assert_eq!(lost, 0, "{at_a:?} {at_b:?}");
}
