//! Machines that forbid things, and folders that are taken.

use crate::bed::{is_exact, keys, on_disk, put};
use larder_proto::control::{FencePathRequest, NodeStatusReply};
use larder_tests::{
    machine::{mount, with_own_mounts, without_io_uring},
    node::{Node, adopted, client, evict, master, on_ssd, ssds, tier},
};
use std::{
    fs, io,
    os::unix::{fs::symlink, net::UnixListener},
    path::Path,
};
use tonic::Code;

/// What a node says in its log of a disk that it cannot use as it wants.
const WORSE: &str = "not in the best way";

/// A node here serves, writes to its ssd, and reads from there after a restart. What both lives said of
/// how they read and write.
async fn serves(dir: &Path, ssd: &Path, by: &[&str]) -> [Vec<String>; 2] {
    let master = master(dir).await;
    let flags = ssds(&[(ssd, "64MiB")], "1MiB");
    let node = Node::start_by(by, dir, "a", Some(&master), &flags).await.unwrap();
    let (at, all) = (node.tcp().await, keys(0..30));
    for key in &all {
        assert!(put(&at, *key).await);
    }
    on_ssd(&at, &all).await;
    let first = node.daemon.logged();
    // F48: what the log said once, status says as long as it is so.
    let path = &node.ssd().await.paths[0];
    let logged = |why: &str| first.iter().any(|line| line.contains(why));
    assert!(!path.driver.is_empty() && logged(&path.driver_because), "{path:?}\n{first:#?}");
    assert!(!logged(WORSE) || !path.driver_because.is_empty(), "{path:?}\n{first:#?}");
    node.daemon.kill().await.unwrap();
    let node = Node::start_by(by, dir, "a", Some(&master), &flags).await.unwrap();
    adopted(&client(&master)).await;
    let at = node.tcp().await;
    for key in &all {
        assert!(is_exact(&at, *key).await);
    }
    let ssd = node.ssd().await;
    assert_eq!(ssd.paths[0].counters["read"], 30, "they came from the ssd");
    [first, node.daemon.logged()]
}

/// It is said once a life, with why.
fn said_once(lives: &[Vec<String>; 2], words: &[&str]) {
    for life in lives {
        let said: Vec<_> = life.iter().filter(|line| line.contains(WORSE)).collect();
        assert_eq!(said.len(), 1, "{life:#?}");
        for word in words {
            assert!(said[0].contains(word), "{word:?} in {}", said[0]);
        }
    }
}

#[test]
fn a_node_that_may_not_use_io_uring_says_so_once_and_serves() {
    let dirs = [libc::EPERM, libc::ENOSYS, libc::ENOMEM].map(|e| (e, tempfile::tempdir().unwrap()));
    for (errno, dir) in &dirs {
        without_io_uring(*errno, async || {
            let why = io::Error::from_raw_os_error(*errno).to_string();
            let lives = serves(dir.path(), &dir.path().join("ssd"), &[]).await;
            said_once(&lives, &["threads", "io_uring", &why]);
            Ok(())
        });
    }
}

#[test]
fn a_file_system_without_direct_io_is_used_and_that_is_said_once() {
    let (dir, on) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    with_own_mounts(async || {
        mount("ramfs", "", on.path())?;
        let lives = serves(dir.path(), on.path(), &[]).await;
        said_once(&lives, &["direct=false", "Invalid argument"]);
        Ok(())
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_may_lock_no_memory_serves() {
    let by = ["prlimit", "--memlock=65536:65536", "setpriv", "--bounding-set=-ipc_lock"];
    let able = std::process::Command::new(by[0]).args(&by[1..]).arg("true").status();
    if !able.as_ref().is_ok_and(|status| status.success()) {
        println!("skipped: this machine does not permit it: {able:?}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let lives = serves(dir.path(), &dir.path().join("ssd"), &by).await;
    // Nothing needs locked memory here; where a kernel charges rings, that is said.
    for life in &lives {
        let said = life.iter().filter(|line| line.contains(WORSE)).count();
        assert!(said <= 1, "{life:#?}");
    }
}

// It was touched page by page until the kernel killed somebody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_the_machine_does_not_have_is_refused_before_it_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["--dram.capacity=15TiB".to_owned()];
    let refused = Node::start_by(&[], dir.path(), "a", None, &flags).await.unwrap_err();
    let why = refused.to_string();
    for word in ["take dram.capacity = 15TiB", "must be at most", "free on this machine"] {
        assert!(why.contains(word), "{word:?} in {why}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_in_use_is_refused_by_its_name_and_left_alone() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let ssd = dir.path().join("ssd");
    let flags = ssds(&[(&ssd, "64MiB")], "1MiB");
    let node = Node::start(dir.path(), "a", None, &flags).await;
    let (at, all) = (node.tcp().await, keys(0..20));
    for key in &all {
        assert!(put(&at, *key).await);
    }
    on_ssd(&at, &all).await;
    let pid = node.daemon.pid().unwrap().to_string();
    let refused = Node::start_by(&[], other.path(), "b", None, &flags).await.unwrap_err();
    let why = refused.to_string();
    for word in [ssd.to_str().unwrap(), "in use by another node", &pid] {
        assert!(why.contains(word), "{word:?} in {why}");
    }
    // Nor may it be taken over once it is free: it holds the parts of another node.
    node.stop().await;
    let refused = Node::start_by(&[], other.path(), "b", None, &flags).await.unwrap_err();
    assert!(refused.to_string().contains("belongs to node"), "{refused}");
    let node = Node::start(dir.path(), "a", None, &flags).await;
    let at = node.tcp().await;
    on_ssd(&at, &all).await;
    for key in &all {
        assert!(is_exact(&at, *key).await);
    }
}

/// F12: the limit of the process stood below what a file was to be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_on_file_sizes_costs_the_path_and_not_the_node() {
    let (dir, ssd) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut flags = ssds(&[(ssd.path(), "200MiB")], "32MiB");
    flags.push("--dram.capacity=16MiB".to_owned());
    let limit = ["prlimit", "--fsize=25165824"]; // Room for the arena, and not for a segment.
    let node = Node::start_by(&limit, dir.path(), "a", None, &flags).await.unwrap();
    let fenced = |status: &NodeStatusReply| {
        let why = tier(status, "ssd").paths[0].fenced_because.clone();
        why.contains("File too large")
    };
    node.until(fenced).await;
    let at = node.tcp().await;
    let key = larder_tests::blocks::key(1);
    assert!(put(&at, key).await && is_exact(&at, key).await);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_is_gone_at_the_start_is_fenced_and_comes_back_empty_if_something_was_evicted()
{
    let dir = tempfile::tempdir().unwrap();
    let daemon = master(dir.path()).await;
    let master = client(&daemon);
    let [first, second] = ["ssd0", "ssd1"].map(|name| dir.path().join(name));
    let flags = ssds(&[(&first, "64MiB"), (&second, "64MiB")], "1MiB");
    let start = async || Node::start(dir.path(), "a", Some(&daemon), &flags).await;
    let node = start().await;
    let (at, all) = (node.tcp().await, keys(0..60));
    for key in &all {
        assert!(put(&at, *key).await);
    }
    on_ssd(&at, &all).await;
    let lost: Vec<_> =
        on_disk(&first).iter().flat_map(|on| on.records.iter().map(|record| record.key)).collect();
    assert!(!lost.is_empty() && lost.len() < all.len(), "{} of {}", lost.len(), all.len());
    let others: Vec<_> = all.iter().copied().filter(|key| !lost.contains(key)).collect();
    drop(at);
    node.stop().await;

    for evicts in [false, true] {
        // Opening a socket gives the same error as opening a device that is gone.
        fs::remove_file(first.join("LOCK")).unwrap();
        let gone = UnixListener::bind(first.join("LOCK")).unwrap();
        let node = start().await;
        adopted(&master).await;
        let paths = node.ssd().await.paths;
        assert!(!paths[0].healthy && paths[1].healthy, "{paths:?}");
        let why = &paths[0].fenced_because;
        assert!(why.contains("lock the folder") && why.contains("No such device"), "{why}");
        let at = node.tcp().await;
        on_ssd(&at, &others).await;
        for key in &all {
            assert_eq!(is_exact(&at, *key).await, !lost.contains(key), "{key}");
        }
        let again = node.readmit(&first).await.unwrap_err();
        let cause = again.message().contains("No such device");
        assert!(again.code() == Code::FailedPrecondition && cause, "{again}");
        if evicts {
            evict(&master, &lost[..1], false).await.unwrap();
        }
        node.stop().await;

        // The disk is back with all that it held, some of which may have been removed meanwhile.
        drop(gone);
        fs::remove_file(first.join("LOCK")).unwrap();
        let node = start().await;
        adopted(&master).await;
        assert!(node.ssd().await.paths[0].healthy);
        let at = node.tcp().await;
        on_ssd(&at, &others).await;
        for key in &lost {
            assert_eq!(is_exact(&at, *key).await, !evicts, "{key}, evicts: {evicts}");
        }
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_folder_is_no_two_paths_and_stays_failed_by_any_name() {
    let dir = tempfile::tempdir().unwrap();
    let [real, link] = ["real", "link"].map(|name| dir.path().join(name));
    fs::create_dir(&real).unwrap();
    symlink(&real, &link).unwrap();
    let detour = dir.path().join("link/../real");
    let start = async |paths: &[&Path]| {
        let paths: Vec<_> = paths.iter().map(|path| (*path, "64MiB")).collect();
        Node::start_by(&[], dir.path(), "a", None, &ssds(&paths, "1MiB")).await
    };
    for name in [&link, &detour] {
        let why = start(&[&real, name]).await.unwrap_err().to_string();
        for word in ["ssd.path[1].dir", name.to_str().unwrap(), "folder of ssd.path[0]"] {
            assert!(why.contains(word), "{word:?} in {why}");
        }
    }
    let why = start(&[&dir.path().join("a\nb")]).await.unwrap_err().to_string();
    assert!(why.contains("ssd.path[0].dir") && why.contains("no line break"), "{why}");

    let small = ssds(&[(&real, "7MiB")], "1MiB");
    let why = Node::start_by(&[], dir.path(), "a", None, &small).await.unwrap_err().to_string();
    assert!(why.contains("ssd.path[0].capacity") && why.contains("be at least 8MiB"), "{why}");

    let node = start(&[&link]).await.unwrap();
    let (at, all) = (node.tcp().await, keys(0..20));
    for key in &all {
        assert!(put(&at, *key).await);
    }
    on_ssd(&at, &all).await;
    let path = link.display().to_string();
    let fence = FencePathRequest { path, reason: "test".to_owned() };
    assert_eq!(node.control().await.fence_path(fence).await.unwrap().into_inner().withdrawn, 20);
    drop(at);
    node.stop().await;
    // Another folder takes its name in between, and then it is back.
    let away = dir.path().join("away");
    fs::rename(&real, &away).unwrap();
    fs::create_dir(&real).unwrap();
    start(&[&link]).await.unwrap().stop().await;
    fs::remove_dir_all(&real).unwrap();
    fs::rename(&away, &real).unwrap();
    let node = start(&[&detour]).await.unwrap();
    assert!(node.daemon.logged().iter().any(|line| line.contains("the path had failed")));
    let at = node.tcp().await;
    for key in &all {
        assert!(!is_exact(&at, *key).await, "{key}");
    }
}
