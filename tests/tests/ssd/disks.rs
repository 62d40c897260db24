//! Disks that are full, that fail, and what a node takes of one that does neither.

use crate::bed::{is_exact, keys, physical_bytes, put};
use larder_client::connection::Connection;
use larder_proto::{BlockKey, Tier};
use larder_tests::{
    blocks,
    machine::{freeze, mount, mount_ext4, shut_down, turn_read_only, with_own_mounts},
    node::{Node, adopted, client, evict, lookup, master, on_ssd, ssds, tier, until},
};
use std::{fs, io, os::unix::fs::MetadataExt, path::Path};

/// Puts blocks, and reads each at once.
async fn put_all(at: &Connection, keys: &[BlockKey]) {
    for key in keys {
        assert!(put(at, *key).await);
        assert!(is_exact(at, *key).await);
    }
}

/// How many of these lie on an ssd.
async fn count_on_ssd(at: &Connection, keys: &[BlockKey]) -> usize {
    let tiers = lookup(at, keys.to_vec()).await.unwrap();
    tiers.iter().filter(|tiers| tiers.has(Tier::Ssd)).count()
}

/// How many of these are readable; whatever is, is exact.
async fn count_exact(at: &Connection, keys: &[BlockKey]) -> usize {
    let mut exact = 0;
    for key in keys {
        exact += usize::from(is_exact(at, *key).await);
    }
    exact
}

#[test]
fn a_disk_that_is_full_before_its_capacity_is_used_as_far_as_it_goes_and_again_when_space_returns()
{
    let (dir, on) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    with_own_mounts(async || {
        mount("tmpfs", "size=40m", on.path())?;
        // Somebody else has most of it.
        let foreign = on.path().join("foreign");
        fs::write(&foreign, vec![1; 28 << 20])?;
        let ssd = on.path().join("ssd");
        let mut flags = ssds(&[(&ssd, "64MiB")], "2MiB");
        flags.push("--dram.capacity=16MiB".to_owned());
        let node = Node::start(dir.path(), "a", None, &flags).await;
        let (at, all) = (node.tcp().await, keys(0..600));
        put_all(&at, &all[..300]).await;
        let full = node.ssd().await;
        assert!(full.paths[0].healthy && full.paths[0].disk_full, "{:?}", full.paths[0]);
        let said = node.daemon.logged();
        let less_room = |line: &String| line.contains("less room than the capacity");
        assert_eq!(said.iter().filter(|line| less_room(line)).count(), 1, "{said:?}");
        assert!(full.paths[0].counters["reclaimed_segment"] > 0, "room is made");
        assert!(full.parts > 0 && full.used_bytes <= 12 << 20, "{full:?}");
        let held = count_on_ssd(&at, &all[..300]).await;
        assert!(count_exact(&at, &all[..300]).await >= held, "what is there stays readable");

        fs::remove_file(&foreign)?;
        put_all(&at, &all[300..]).await;
        until("the space is used that has come back", async || {
            let ssd = node.ssd().await;
            ssd.paths[0].healthy && ssd.used_bytes > 16 << 20
        })
        .await;
        Ok(())
    });
}

#[test]
fn a_disk_without_any_room_is_waited_for_while_dram_serves() {
    let (dir, on) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    with_own_mounts(async || {
        mount("tmpfs", "size=32m", on.path())?;
        let foreign = on.path().join("foreign");
        fs::write(&foreign, vec![1; 31 << 20])?;
        let flags = ssds(&[(&on.path().join("ssd"), "64MiB")], "2MiB");
        let node = Node::start(dir.path(), "a", None, &flags).await;
        let (at, all) = (node.tcp().await, keys(0..60));
        put_all(&at, &all[..30]).await;
        until("the full disk is noticed", async || {
            node.daemon.logged().iter().any(|line| line.contains("is full"))
        })
        .await;
        assert_eq!(count_exact(&at, &all[..30]).await, 30, "dram serves");
        let ssd = node.ssd().await;
        assert_eq!((ssd.parts, ssd.used_bytes), (0, 0));
        assert!(ssd.paths[0].healthy, "{:?}", ssd.paths[0]);
        let said = node.daemon.logged();
        let said = said.iter().filter(|line| line.contains("is full")).count();
        assert_eq!(said, 1, "said once, and not for each block");

        fs::remove_file(&foreign)?;
        // Each use offers a block anew.
        until("it is written to as soon as there is room", async || {
            count_exact(&at, &all[..30]).await == 30 && count_on_ssd(&at, &all[..30]).await == 30
        })
        .await;
        put_all(&at, &all[30..]).await;
        on_ssd(&at, &all[30..]).await;
        Ok(())
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_never_take_more_than_the_capacity_whatever_is_put_read_and_removed() {
    const CAPACITY: u64 = 24 << 20;
    let dir = tempfile::tempdir().unwrap();
    let daemon = master(dir.path()).await;
    let master = client(&daemon);
    let ssd = dir.path().join("ssd");
    let mut flags = ssds(&[(&ssd, "24MiB")], "2MiB");
    flags.push("--dram.capacity=16MiB".to_owned());
    let node = Node::start(dir.path(), "a", Some(&daemon), &flags).await;
    adopted(&master).await;
    let (at, all) = (node.tcp().await, keys(0..800));
    for (round, some) in all.chunks(20).enumerate() {
        put_all(&at, some).await;
        evict(&master, &some[..2], false).await.unwrap();
        let (physical, told) = (physical_bytes(&ssd), node.ssd().await);
        assert!(physical <= CAPACITY, "round {round}: {physical} bytes of files");
        assert!(told.used_bytes <= physical, "round {round}: {told:?}, {physical} bytes of files");
        until("what is alive is part of what is used", async || {
            let told = node.ssd().await;
            told.evictable_bytes <= told.used_bytes
        })
        .await;
    }
    let counters = &node.ssd().await.paths[0].counters;
    assert!(counters["reclaimed_segment"] > 10, "{counters:?}");
    // A killed node takes no more when it is back (F12, F13, F16).
    node.daemon.kill().await.unwrap();
    let node = Node::start(dir.path(), "a", Some(&daemon), &flags).await;
    adopted(&master).await;
    put_all(&node.tcp().await, &keys(1000..1200)).await;
    let physical = physical_bytes(&ssd);
    assert!(physical <= CAPACITY, "{physical} bytes of files");
}

/// How many of these threads wait for a disk, where no signal reaches them.
fn waiting_for_disk(tasks: &str) -> usize {
    let threads = fs::read_dir(tasks).unwrap().flatten();
    let stats = threads.filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok());
    // The state stands behind the name, which is in parentheses.
    let state = |stat: String| stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    stats.filter_map(state).filter(|state| *state == 'D').count()
}

#[test]
fn a_disk_that_hangs_at_the_start_keeps_no_node_from_serving_and_is_taken_in_when_it_answers() {
    let (dir, on) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    with_own_mounts(async || {
        mount_ext4(&dir.path().join("image"), 96 << 20, on.path())?;
        let (hung, good) = (on.path().join("ssd"), dir.path().join("ssd"));
        fs::create_dir(&hung)?;
        let frozen = freeze(on.path())?;
        let mut flags = ssds(&[(&hung, "64MiB"), (&good, "64MiB")], "2MiB");
        flags.push("--ssd.deadline=4s".to_owned()); // Of the good one, too.
        let node = Node::start(dir.path(), "a", None, &flags).await;
        let ssd = node.ssd().await;
        let why = &ssd.paths[0].fenced_because;
        assert!(why.contains("did not answer within 4s"), "{why}");
        let (at, all) = (node.tcp().await, keys(0..20));
        put_all(&at, &all).await;
        on_ssd(&at, &all).await; // The other one is written to.

        for _ in 0..2 {
            let late = node.readmit(&hung).await.unwrap_err();
            assert!(late.message().contains("does not answer"), "{late}");
        }
        // One thread of the start, and one of all these tries: whoever tries on and on uses up no threads.
        let tasks = format!("/proc/{}/task", node.daemon.pid().unwrap());
        until("two threads wait for the disk", async || waiting_for_disk(&tasks) == 2).await;
        drop(frozen);
        until("it is taken in", async || node.readmit(&hung).await.is_ok()).await;
        assert!(node.ssd().await.paths[0].healthy);
        Ok(())
    });
}

#[test]
fn a_disk_that_hangs_at_the_start_keeps_what_it_holds_for_the_next_one() {
    let (dir, on) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    with_own_mounts(async || {
        mount_ext4(&dir.path().join("image"), 96 << 20, on.path())?;
        let mut flags = ssds(&[(&on.path().join("ssd"), "64MiB")], "2MiB");
        flags.push("--ssd.deadline=4s".to_owned());
        let all = keys(0..40);
        let node = Node::start(dir.path(), "a", None, &flags).await;
        let at = node.tcp().await;
        put_all(&at, &all).await;
        on_ssd(&at, &all).await;
        node.daemon.kill().await?;

        let frozen = freeze(on.path())?;
        let node = Node::start(dir.path(), "a", None, &flags).await;
        assert!(!node.ssd().await.paths[0].healthy);
        drop(frozen);
        node.daemon.kill().await?;

        let node = Node::start(dir.path(), "a", None, &flags).await;
        let at = node.tcp().await;
        until("all is adopted", async || count_on_ssd(&at, &all).await == all.len()).await;
        assert_eq!(count_exact(&at, &all).await, all.len());
        Ok(())
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_path_that_was_left_out_comes_back_with_all_it_held_unless_something_was_evicted() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = master(dir.path()).await;
    let master = client(&daemon);
    let [away, stays] = ["away", "stays"].map(|name| dir.path().join(name));
    let alone = |path| ssds(&[(path, "64MiB")], "2MiB");
    let both = ssds(&[(&away, "64MiB"), (&stays, "64MiB")], "2MiB");
    let start = async |flags: &[String]| {
        let node = Node::start(dir.path(), "a", Some(&daemon), flags).await;
        adopted(&master).await;
        let at = node.tcp().await;
        (node, at)
    };
    let (held, other) = (keys(0..20), keys(100..120));
    for (flags, keys) in [(alone(&away), &held), (alone(&stays), &other)] {
        let (node, at) = start(&flags).await;
        put_all(&at, keys).await;
        on_ssd(&at, keys).await;
        node.daemon.kill().await.unwrap();
    }
    let (node, at) = start(&both).await;
    until("the path is adopted", async || count_on_ssd(&at, &held).await == held.len()).await;
    node.daemon.kill().await.unwrap();

    // Without any ssd at all, and with a removal that finds nothing on this node.
    let (node, _) = start(&[]).await;
    evict(&master, &held[..1], true).await.unwrap();
    evict(&master, &held[..1], false).await.unwrap();
    node.daemon.kill().await.unwrap();
    let (node, at) = start(&both).await;
    let said = "parts were removed by command while this path could not note it";
    until("both paths say that they are empty", async || {
        node.daemon.logged().iter().filter(|line| line.contains(said)).count() == 2
    })
    .await;
    assert_eq!(count_on_ssd(&at, &held).await + count_on_ssd(&at, &other).await, 0);
}

#[test]
fn a_folder_whose_mount_is_missing_is_fenced_and_left_empty() {
    let (dir, on) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    with_own_mounts(async || {
        let ssd = on.path().join("ssd");
        let flags = ssds(&[(&ssd, "24MiB")], "2MiB");
        let flags: Vec<_> =
            flags.into_iter().map(|flag| flag.replace("}]", ", mounted = true}]")).collect();
        let on_root = fs::metadata("/")?.dev() == fs::metadata(on.path())?.dev();
        if !on_root {
            println!("skipped: {} does not lie on the file system of /", ssd.display());
            return Ok(());
        }
        let node = Node::start(dir.path(), "a", None, &flags).await;
        let why = node.ssd().await.paths[0].fenced_because.clone();
        assert!(why.contains("no disk is mounted at"), "{why}");
        assert!(!ssd.exists(), "nothing is made there");
        assert!(node.readmit(&ssd).await.unwrap_err().message().contains("no disk is mounted"));
        mount("tmpfs", "size=40m", on.path())?;
        // The node sees what is mounted after it started: it has no mounts of its own.
        node.readmit(&ssd).await.unwrap();
        let (at, all) = (node.tcp().await, keys(0..10));
        put_all(&at, &all).await;
        on_ssd(&at, &all).await;
        Ok(())
    });
}

/// One of two paths fails under load, in some way.
fn failing(why: &[&str], fail: fn(&Path) -> io::Result<()>) {
    let (dir, on) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    with_own_mounts(async || {
        mount_ext4(&dir.path().join("image"), 96 << 20, on.path())?;
        fails_under_load(dir.path(), on.path(), why, fail).await
    });
}

async fn fails_under_load(
    dir: &Path,
    on: &Path,
    why: &[&str],
    fail: fn(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let daemon = master(dir).await;
    let master = client(&daemon);
    let (bad, good) = (on.join("ssd"), dir.join("ssd"));
    let mut flags = ssds(&[(&bad, "64MiB"), (&good, "64MiB")], "2MiB");
    flags.push("--dram.capacity=16MiB".to_owned());
    let node = Node::start(dir, "a", Some(&daemon), &flags).await;
    let (at, all) = (node.tcp().await, keys(0..700));
    let (old, new) = all.split_at(300);
    for some in old.chunks(20) {
        put_all(&at, some).await;
        on_ssd(&at, some).await;
    }
    let before = node.ssd().await;
    assert!(before.paths.iter().all(|path| path.used_bytes > 2 << 20), "both: {:?}", before.paths);

    fail(on)?;
    // Puts and reads go on: each is stored, and exact or a miss. Clients notice nothing else.
    let mut fresh = new.iter();
    until("the failed path is fenced", async || {
        let key = fresh.next().expect("it is fenced before long");
        put_all(&at, &[*key]).await;
        for key in old.iter().take(40) {
            is_exact(&at, *key).await;
        }
        !node.ssd().await.paths[0].healthy
    })
    .await;
    let rest: Vec<BlockKey> = fresh.copied().take(60).collect();
    for some in rest.chunks(20) {
        put_all(&at, some).await;
        on_ssd(&at, some).await; // The other path does not wait for the failed one.
    }
    let status = node.status().await;
    let ssd = tier(&status, "ssd");
    let said = &ssd.paths[0].fenced_because;
    assert!(why.iter().any(|why| said.contains(why)), "{:?}", ssd.paths[0]);
    assert!(ssd.paths[1].healthy, "{:?}", ssd.paths[1]);
    assert_eq!(ssd.paths[0].used_bytes, 0);
    let lost = 300 - count_exact(&at, old).await;
    println!("{lost} of 300 blocks were on the failed path alone");
    assert!(lost > 20);
    told_as_it_is(&node, &master, &all).await;

    // The blocks of the other path survive the node's end, too.
    let kept = count_on_ssd(&at, old).await;
    node.daemon.kill().await?;
    let mut flags = ssds(&[(&good, "64MiB")], "2MiB");
    flags.push("--dram.capacity=16MiB".to_owned());
    let node = Node::start(dir, "a", Some(&daemon), &flags).await;
    adopted(&master).await;
    let at = node.tcp().await;
    assert!(kept > 20);
    assert_eq!(count_exact(&at, old).await, kept);
    Ok(())
}

/// Catalog, status, reads and index agree on what is there.
async fn told_as_it_is(
    node: &Node,
    master: &larder_client::cluster::ClusterClient,
    all: &[BlockKey],
) {
    let at = node.tcp().await;
    until("catalog, reads and index agree", async || {
        let tiers = lookup(&at, all.to_vec()).await.unwrap();
        let located = master.locate(blocks::model(), all).await.unwrap();
        let told = located.blocks.iter().map(|holders| holders.first().map(|one| one.tiers));
        told.eq(tiers.iter().map(|tiers| (!tiers.is_empty()).then_some(*tiers)))
            && node.ssd().await.parts == tiers.iter().filter(|it| it.has(Tier::Ssd)).count() as u64
    })
    .await;
    let tiers = lookup(&at, all.to_vec()).await.unwrap();
    let held = tiers.iter().filter(|tiers| !tiers.is_empty()).count();
    assert_eq!(count_exact(&at, all).await, held, "all that is told is readable");
}

#[test]
fn a_disk_that_turns_read_only_under_load_is_fenced_and_the_other_goes_on() {
    // What was under way at that moment fails as if the device had.
    failing(&["Read-only file system", "Input/output error"], turn_read_only);
}

#[test]
fn a_disk_that_fails_under_load_is_fenced_and_the_other_goes_on() {
    failing(&["Input/output error"], shut_down);
}
