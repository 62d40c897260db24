//! `larderctl put` and `get`: files come back as they were, or not at all.

use crate::support::{BLOCK, Cluster, LIMIT, Run, model, text};
use bytes::Bytes;
use larder_client::{
    cluster::NodeChoice,
    connection::{Identity, PutOutcome},
    local::{LocalSession, PartAttributes},
};
use larder_proto::{PartNumber, block_key::keys_of, part::PartRef};
use std::{fs, path::Path};

fn write(path: &Path, len: usize, seed: u8) -> String {
    let bytes: Vec<u8> = (0..len).map(|at| ((at * 31) >> 3).to_le_bytes()[0] ^ seed).collect();
    fs::write(path, bytes).unwrap();
    text(path)
}

#[tokio::test]
async fn a_file_comes_back_as_it_was() {
    let cluster = Cluster::start(&["node-a", "node-b"]).await;
    let dir = cluster.dir.path();
    for (name, len) in [("empty", 0), ("short", 5), ("one piece", 4 << 20), ("long", (9 << 20) + 1)]
    {
        let (file, copy) = (dir.join("in"), dir.join("out"));
        let path = write(&file, len, 1);
        let put = cluster.ctl(&["put", &path, "--name", name, "-o", "json"]).await.json(0);
        assert_eq!(
            (put["outcome"].as_str(), put["bytes"].as_u64()),
            (Some("stored"), Some(len as u64))
        );
        assert_eq!(put["listed"], true);
        let to = text(&copy);
        let got = cluster.ctl(&["get", name, "-o", &to, "--output", "json"]).await.json(0);
        assert_eq!((&got["verified"], &got["digest"]), (&true.into(), &put["digest"]));
        assert_eq!(fs::read(&file).unwrap(), fs::read(&copy).unwrap(), "{name}");

        let again = cluster.ctl(&["put", &path, "--name", name, "-o", "json"]).await.json(0);
        assert_eq!(again["outcome"], "exists");
    }
    let run = cluster.ctl(&["get", "short", "-o", "-"]).await;
    assert_eq!(run.out.as_bytes(), &fs::read(dir.join("in")).unwrap()[..5]);
    let models = cluster.ctl(&["models", "raw"]).await;
    assert!(models.code == 0 && models.out.contains("larderctl"), "{models:?}");
}

#[tokio::test]
async fn a_name_keeps_its_bytes_until_it_is_evicted() {
    let cluster = Cluster::start(&["node-a", "node-b"]).await;
    let dir = cluster.dir.path();
    let (one, two) = (write(&dir.join("one"), 5000, 1), write(&dir.join("two"), 5000, 2));
    let put = ["put", &one, "--name", "notes", "--node", "node-b", "-o", "json"];
    let stored = cluster.ctl(&put).await.json(0);
    assert_eq!(stored["nodes"], serde_json::json!(["node-b"]));
    let run = cluster.ctl(&["put", &two, "--name", "notes"]).await;
    assert_eq!(run.code, 1, "{run:?}");
    let root = stored["keys"][0].as_str().unwrap();
    assert!(
        run.err.contains(&format!("larderctl evict --key {root} --descendants --yes")),
        "{run:?}"
    );

    let found =
        cluster.ctl(&["lookup", "--model", "raw", "--key", root, "-o", "json"]).await.json(0);
    assert_eq!(found["blocks"][0]["models"][0]["holders"][0]["name"], "node-b");
    let run = cluster.ctl(&["evict", "--key", root, "--yes"]).await;
    assert_eq!(run.code, 0, "{run:?}");
    let gone = |run: &Run| run.code == 3;
    let run = cluster.eventually(&["get", "notes", "-o", "-"], gone).await;
    assert!(run.out.is_empty(), "{run:?}");
    let run = cluster.ctl(&["put", &two, "--name", "notes", "-o", "json"]).await;
    assert_eq!(run.json(0)["outcome"], "stored");
    let copy = text(&dir.join("copy"));
    assert_eq!(cluster.ctl(&["get", "notes", "-o", &copy]).await.code, 0);
    assert_eq!(fs::read(&two).unwrap(), fs::read(&copy).unwrap());
}

#[tokio::test]
async fn a_file_of_which_a_block_is_gone_is_not_found_and_leaves_nothing_behind() {
    let cluster = Cluster::start(&["node-a"]).await;
    let dir = cluster.dir.path();
    let path = write(&dir.join("in"), 5 << 20, 1);
    let put = cluster.ctl(&["put", &path, "--name", "long", "-o", "json"]).await.json(0);
    let last = put["keys"][2].as_str().unwrap();
    assert_eq!(cluster.ctl(&["evict", "--key", last, "--yes"]).await.code, 0);
    let out = dir.join("results");
    fs::create_dir(&out).unwrap();
    let to = text(&out.join("copy"));
    let run = cluster.ctl(&["get", "long", "-o", &to]).await;
    assert_eq!(run.code, 3, "{run:?}");
    assert!(run.err.contains("block 2 of 3 of long"), "{run:?}");
    assert_eq!(fs::read_dir(&out).unwrap().count(), 0, "no half file");
    // The same put brings back what is missing.
    let again = cluster.ctl(&["put", &path, "--name", "long", "-o", "json"]).await.json(0);
    assert_eq!((&again["outcome"], &again["keys"]), (&"stored".into(), &put["keys"]), "{again}");
    assert_eq!(cluster.ctl(&["get", "long", "-o", &to]).await.code, 0);
    assert!(fs::read(&path).unwrap() == fs::read(&to).unwrap());
}

// A file above what a node holds was called stored, took the place of everything else, and was not there.
#[tokio::test]
async fn a_file_that_no_node_can_hold_is_refused_before_it_takes_the_place_of_others() {
    let cluster = Cluster::start(&["node-a", "node-b"]).await;
    let dir = cluster.dir.path();
    let kept = write(&dir.join("kept"), 5 << 20, 1);
    for (name, node) in [("a", "node-a"), ("b", "node-b")] {
        let run = cluster.ctl(&["put", &kept, "--name", name, "--node", node]).await;
        assert_eq!(run.code, 0, "{run:?}");
        assert!(run.out.contains("5.0 MiB in 3 blocks on"), "{run:?}");
    }
    // Above the capacity of 64 MiB; and below it, but above where the node begins to evict.
    for len in [70 << 20, 62 << 20] {
        let path = write(&dir.join("large"), len, 2);
        for more in [&["--node", "node-b"][..], &[]] {
            let run = cluster.ctl(&[&["put", &path, "--name", "large"], more].concat()).await;
            assert_eq!((run.code, run.out.as_str()), (1, ""), "{run:?}");
            let size = format!("the file is {}.0 MiB: must be at most 60.8 MiB", len >> 20);
            for told in [&size, "a capacity of 64.0 MiB", "nothing was put or evicted"] {
                assert!(run.err.contains(told), "{told}: {run:?}");
            }
        }
        assert_eq!(cluster.ctl(&["get", "large", "-o", "-"]).await.code, 3);
    }
    for name in ["a", "b"] {
        let copy = text(&dir.join("copy"));
        assert_eq!(cluster.ctl(&["get", name, "-o", &copy]).await.code, 0, "{name} is held");
    }
}

// A node that makes room lets go of more than it needs, the first blocks of the file among it.
#[tokio::test]
async fn a_file_that_fits_is_stored_whatever_is_evicted_meanwhile() {
    let cluster = Cluster::start(&["node-a"]).await;
    let dir = cluster.dir.path();
    let other = write(&dir.join("other"), 8 << 20, 1);
    assert_eq!(cluster.ctl(&["put", &other, "--name", "other"]).await.code, 0);
    // Below where the node begins to evict (60.8 MiB), above what it evicts to (57.6 MiB).
    let large = write(&dir.join("large"), 60 << 20, 2);
    let run = cluster.ctl(&["put", &large, "--name", "large"]).await;
    assert_eq!(run.code, 0, "{run:?}");
    let copy = text(&dir.join("copy"));
    assert_eq!(cluster.ctl(&["get", "large", "-o", &copy]).await.code, 0);
    assert!(fs::read(&large).unwrap() == fs::read(&copy).unwrap());
}

#[tokio::test]
async fn a_put_of_which_a_block_is_gone_at_its_end_has_failed() {
    let cluster = Cluster::start(&["node-a"]).await;
    let dir = cluster.dir.path();
    // Somebody reads 16 MiB in place: what is left is less than the node could hold.
    let model = model("llama", 1, 1, 1);
    let version = model.version();
    let client = cluster.client("engine");
    client.register_model(&model).await.unwrap();
    let node = client.nodes_for_put(&NodeChoice::MostRoom).await.unwrap().remove(0);
    let key = keys_of(version.content, BLOCK, b"", &[1, 2, 3, 4])[0];
    let part = PartRef { key, layout: version.layout, part: PartNumber(0) };
    let attributes =
        PartAttributes { content: version.content, root: key, parent: None, origin_hash: None };
    let bytes = Bytes::from(vec![3; 16 << 20]);
    let put = client.put(&node, part, &attributes, bytes, LIMIT).await.unwrap();
    assert!(matches!(put, PutOutcome::Stored(_)), "{put:?}");
    let socket = cluster.socket("node-a");
    let session = LocalSession::connect(&socket, &Identity::client("engine")).await.unwrap();
    let _lease = session.lease(part).await.unwrap().unwrap();

    let path = write(&dir.join("file"), 56 << 20, 1);
    let run = cluster.ctl(&["put", &path, "--name", "file"]).await;
    assert_eq!((run.code, run.out.as_str()), (1, ""), "{run:?}");
    assert!(run.err.contains("of 15 of file is gone from node-a whenever it was put"), "{run:?}");
    assert!(run.err.contains("larderctl pins"), "{run:?}");
    let why = |run: &Run| run.err.contains("larderctl evict --key");
    assert!(why(&run), "{run:?}");

    // The same again says that it is not whole, whatever is held of it.
    let again = cluster.ctl(&["put", &path, "--name", "file"]).await;
    assert!(again.code == 1 && why(&again), "{again:?}");
}
