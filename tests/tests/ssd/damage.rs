//! Bits that turn over on the disk while the node is stopped.

use crate::bed::{OnDisk, flip, is_exact, keys, on_disk, put};
use larder_proto::BlockKey;
use larder_tests::{
    node::{Node, adopted, client, lookup, master, on_ssd, ssds, tier, until},
    process::Daemon,
    sim::dice::Dice,
};
use std::{collections::BTreeSet, fs, path::Path};

const BLOCKS: u64 = 60;

/// A stopped node whose ssd holds [`BLOCKS`] blocks, each in one record.
struct Stopped {
    dir: tempfile::TempDir,
    master: Daemon,
    flags: Vec<String>,
    keys: Vec<BlockKey>,
    segments: Vec<OnDisk>,
}

impl Stopped {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let master = master(dir.path()).await;
        let flags = ssds(&[(&dir.path().join("ssd"), "64MiB")], "1MiB");
        let node = Node::start(dir.path(), "a", Some(&master), &flags).await;
        let (to, keys) = (node.tcp().await, keys(0..BLOCKS));
        for key in &keys {
            assert!(put(&to, *key).await);
        }
        on_ssd(&to, &keys).await;
        node.stop().await;
        let segments = on_disk(&dir.path().join("ssd"));
        let found = segments.iter().flat_map(|segment| &segment.records).map(|record| record.key);
        let found: Vec<BlockKey> = found.collect();
        assert_eq!(found.len(), keys.len(), "each block is in one record");
        assert_eq!(found.iter().collect::<BTreeSet<_>>(), keys.iter().collect());
        Self { dir, master, flags, keys, segments }
    }

    async fn start(&self) -> Node {
        let node = Node::start(self.path(), "a", Some(&self.master), &self.flags).await;
        adopted(&client(&self.master)).await;
        node
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn sealed(&self) -> impl Iterator<Item = &OnDisk> {
        self.segments.iter().filter(|segment| segment.footer.is_some())
    }
}

/// How many of these are readable; whatever is, is exact.
async fn readable(node: &Node, keys: &[BlockKey]) -> usize {
    let (at, mut readable) = (node.tcp().await, 0);
    for key in keys {
        readable += usize::from(is_exact(&at, *key).await);
    }
    readable
}

/// All of these can be put anew, are readable then, and again after another restart.
async fn replaceable(stopped: &Stopped, node: Node, keys: &[BlockKey]) {
    let at = node.tcp().await;
    for key in keys {
        assert!(put(&at, *key).await, "block {key} is dead for ever");
    }
    assert_eq!(readable(&node, keys).await, keys.len());
    on_ssd(&at, keys).await;
    node.stop().await;
    let node = stopped.start().await;
    assert_eq!(readable(&node, keys).await, keys.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_with_a_flipped_bit_is_a_miss_counted_withdrawn_and_replaceable() {
    let (stopped, seed) = (Stopped::new().await, 11);
    println!("seed {seed}");
    let mut dice = Dice::new(seed);
    for segment in &stopped.segments {
        for record in &segment.records {
            let (from, len) = if dice.chance(50) { record.header } else { record.payload };
            flip(&segment.file, from, dice.below(len * 8));
        }
    }
    let sealed: usize = stopped.sealed().map(|segment| segment.records.len()).sum();
    assert!(sealed > 20 && sealed < stopped.keys.len(), "{sealed} records in sealed segments");

    let node = stopped.start().await;
    // Footers are believed until a record is read; records without one prove themselves at once.
    assert_eq!(node.ssd().await.parts, sealed as u64);
    assert_eq!(readable(&node, &stopped.keys).await, 0);
    let at = node.tcp().await;
    let tiers = lookup(&at, stopped.keys.clone()).await.unwrap();
    assert!(tiers.iter().all(|tiers| tiers.is_empty()), "{tiers:?}");
    let status = node.status().await;
    assert_eq!(status.counters["damaged"], sealed as u64);
    let ssd = tier(&status, "ssd");
    assert_eq!((ssd.parts, ssd.evictable_bytes), (0, 0));
    assert_eq!(ssd.paths[0].counters["damaged"], sealed as u64);
    assert!(ssd.paths[0].healthy, "a damaged record is not a failed disk");
    replaceable(&stopped, node, &stopped.keys).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_footer_with_a_flipped_bit_costs_nothing() {
    let (stopped, seed) = (Stopped::new().await, 12);
    println!("seed {seed}");
    let mut dice = Dice::new(seed);
    for segment in stopped.sealed() {
        let (from, len) = segment.footer.unwrap();
        flip(&segment.file, from, dice.below(len * 8));
    }
    assert!(stopped.sealed().count() > 2);
    for _ in 0..2 {
        let node = stopped.start().await;
        assert_eq!(readable(&node, &stopped.keys).await, stopped.keys.len());
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_segment_whose_header_is_damaged_is_given_up_and_the_others_are_not() {
    let stopped = Stopped::new().await;
    let damaged = stopped.sealed().next().unwrap();
    flip(&damaged.file, 20, 3); // Behind magic, format and length.
    let lost: Vec<BlockKey> = damaged.records.iter().map(|record| record.key).collect();
    assert!(!lost.is_empty());
    let node = stopped.start().await;
    assert_eq!(readable(&node, &lost).await, 0);
    assert_eq!(readable(&node, &stopped.keys).await, stopped.keys.len() - lost.len());
    replaceable(&stopped, node, &lost).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_a_start_drops_are_counted_by_reason() {
    let dir = tempfile::tempdir().unwrap();
    let ssd = dir.path().join("ssd");
    let start = async |capacity: &str, segment: &str| {
        Node::start(dir.path(), "a", None, &ssds(&[(&ssd, capacity)], segment)).await
    };
    let node = start("64MiB", "1MiB").await;
    let (at, all) = (node.tcp().await, keys(0..120));
    for key in &all {
        assert!(put(&at, *key).await);
    }
    on_ssd(&at, &all).await;
    drop(at);
    node.stop().await;
    let files: Vec<_> = on_disk(&ssd).into_iter().map(|on| on.file).collect();
    assert!(files.len() > 8, "{files:?}");
    flip(&files[0], 16, 3); // Its header.
    let longer = fs::File::options().write(true).open(&files[1]).unwrap();
    longer.set_len(3 << 20).unwrap();
    let lines = |node: &Node| {
        let lines = node.daemon.logged().into_iter();
        lines.filter(|line| line.contains("are dropped")).collect::<Vec<_>>()
    };
    let said = async |node: &Node| {
        until("it is in the log", async || !lines(node).is_empty()).await;
        let lines = lines(node);
        assert_eq!(lines.len(), 1, "{lines:?}");
        format!("{} ", lines[0])
    };
    let has = |said: &str, words: &[&str]| {
        words.iter().for_each(|word| assert!(said.contains(word), "{word} in {said:?}"));
    };
    let node = start("64MiB", "1MiB").await;
    has(
        &said(&node).await,
        &["WARN", " files=2 ", " wrong_length=1 ", " damaged_header=1 ", " other_length=0 "],
    );
    node.stop().await;
    let node = start("9MiB", "1MiB").await; // Room for five.
    let line = said(&node).await;
    assert!(line.contains(" damaged_header=0 ") && !line.contains(" beyond_capacity=0 "), "{line}");
    node.stop().await;
    let left = on_disk(&ssd).len();
    assert!(left > 0);
    let node = start("64MiB", "2MiB").await;
    has(&said(&node).await, &[&format!(" files={left} "), &format!(" other_length={left} ")]);
    node.stop().await;
    let node = start("64MiB", "2MiB").await;
    assert_eq!(lines(&node), [""; 0]);
}
