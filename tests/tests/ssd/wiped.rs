//! Files that vanish or change under a running node.

use crate::bed::{is_exact, keys, put, segments};
use larder_proto::{BlockKey, Tier};
use larder_tests::node::{Node, client, lookup, master, on_ssd, ssds, until};
use std::{fs, path::Path};

/// What befalls the files.
type Wipe = fn(&Path);

/// A node with blocks that lie on its ssd alone loses the files, in some way.
async fn wiped(name: &str, wipe: Wipe, must_miss: bool) {
    let dir = tempfile::tempdir().unwrap();
    let master = master(dir.path()).await;
    let ssd = dir.path().join("ssd");
    let mut flags = ssds(&[(&ssd, "128MiB")], "2MiB");
    flags.extend(["--dram.capacity=16MiB", "--ssd.promote=never"].map(str::to_owned));
    let node = Node::start(dir.path(), "a", Some(&master), &flags).await;
    let (at, all) = (node.tcp().await, keys(0..400));
    for some in all.chunks(20) {
        for key in some {
            assert!(put(&at, *key).await);
        }
        on_ssd(&at, some).await;
    }
    let tiers = lookup(&at, all.clone()).await.unwrap();
    let alone: Vec<BlockKey> = all
        .iter()
        .zip(&tiers)
        .filter(|(_, tiers)| !tiers.has(Tier::Dram))
        .map(|(key, _)| *key)
        .collect();
    assert!(alone.len() > 100, "{} blocks on the ssd alone", alone.len());
    assert!(is_exact(&at, alone[0]).await, "readable before");
    for file in segments(&ssd) {
        wipe(&file);
    }
    let mut missed = Vec::new();
    for key in &alone {
        if !is_exact(&at, *key).await {
            missed.push(*key);
        }
    }
    println!("{name}: {} of {} reads are misses", missed.len(), alone.len());
    assert_eq!(missed.len() == alone.len(), must_miss, "{} of {}", missed.len(), alone.len());
    let tiers = lookup(&at, missed.clone()).await.unwrap();
    assert!(tiers.iter().all(|tiers| tiers.is_empty()), "a miss is gone from the catalog");
    // The index hears of it too.
    let master = client(&master);
    until("the index forgets what is gone", async || {
        let asked = &missed[..missed.len().min(100)];
        let located = master.locate(larder_tests::blocks::model(), asked).await.unwrap();
        located.blocks.iter().all(Vec::is_empty)
    })
    .await;
    for key in missed.iter().take(50) {
        assert!(put(&at, *key).await, "a put of what is gone stores it");
        assert!(is_exact(&at, *key).await);
    }
    // New blocks are stored, whatever has become of the path.
    for key in keys(1000..1050) {
        assert!(put(&at, key).await);
        assert!(is_exact(&at, key).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_are_removed_under_a_node_are_still_read_exactly() {
    wiped("removed", |file| fs::remove_file(file).unwrap(), false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_are_cut_under_a_node_are_misses_and_their_blocks_can_be_put_again() {
    let cut: Wipe =
        |file| fs::OpenOptions::new().write(true).open(file).unwrap().set_len(0).unwrap();
    wiped("cut", cut, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_are_overwritten_under_a_node_are_misses_and_their_blocks_can_be_put_again() {
    let zero: Wipe = |file| {
        let len = usize::try_from(fs::metadata(file).unwrap().len()).unwrap();
        let file = fs::OpenOptions::new().write(true).open(file).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![0; len], 0).unwrap();
        file.sync_all().unwrap();
    };
    wiped("overwritten", zero, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_removed_under_a_stopped_node_is_a_miss_and_the_rest_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let master = master(dir.path()).await;
    let ssd = dir.path().join("ssd");
    let flags = ssds(&[(&ssd, "128MiB")], "1MiB");
    let node = Node::start(dir.path(), "a", Some(&master), &flags).await;
    let (at, all) = (node.tcp().await, keys(0..60));
    for key in &all {
        assert!(put(&at, *key).await);
    }
    on_ssd(&at, &all).await;
    node.stop().await;
    fs::remove_file(&segments(&ssd)[0]).unwrap();
    let node = Node::start(dir.path(), "a", Some(&master), &flags).await;
    larder_tests::node::adopted(&client(&master)).await;
    let (at, mut found) = (node.tcp().await, 0);
    for key in &all {
        found += u64::from(is_exact(&at, *key).await);
    }
    let status = node.status().await;
    let ssd = larder_tests::node::tier(&status, "ssd");
    assert_eq!(ssd.parts, found, "what is told is what is there");
    assert!(found > 0 && found < 60, "{found}");
}
