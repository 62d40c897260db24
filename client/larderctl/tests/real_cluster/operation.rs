//! Operating ssd paths of real nodes, and watching them.

use crate::support::{Cluster, Put, Run, ctl, model, text};
use serde_json::Value;
use std::{fs::File, os::unix::fs::FileExt};

/// More than one segment on each path.
const TOKENS: std::ops::Range<u32> = 0..2400;
const SEALED: &str = "sealed_segment";

fn paths(node: &Value) -> Vec<Value> {
    let tiers = node["tiers"].as_array().unwrap();
    let ssd = tiers.iter().find(|tier| tier["tier"] == "ssd").unwrap();
    ssd["paths"].as_array().unwrap().clone()
}

/// A node with parts on both of its ssds; the names of these.
async fn filled() -> (Cluster, [String; 2]) {
    let cluster = Cluster::start_with_ssds(&["node-a"]).await;
    let tokens: Vec<u32> = TOKENS.collect();
    cluster.put(&model("llama", 1, 1, 1), &tokens, &Put::on("node-a")).await;
    let sealed = |run: &Run| {
        let sealed = |path: &Value| path["counters"][SEALED].as_u64().unwrap() > 0;
        paths(&run.json(0)["nodes"][0]).iter().all(sealed)
    };
    cluster.eventually(&["stats", "-o", "json"], sealed).await;
    let dirs = [0, 1].map(|n| text(&cluster.ssd("node-a", n)));
    (cluster, dirs)
}

#[tokio::test]
async fn an_audit_finds_the_hole_that_a_removal_in_mid_chain_leaves() {
    let cluster = Cluster::start(&["node-a"]).await;
    let tokens: Vec<u32> = (0..12).collect();
    let keys = cluster.put(&model("llama", 1, 1, 1), &tokens, &Put::on("node-a")).await;
    let audit = ["node", "audit", "node-a", "-o", "json"];
    let clean = cluster.ctl(&audit).await.json(0);
    assert_eq!(clean["blocks"], keys.len(), "{clean}");
    assert_eq!([&clean["holes"], &clean["empty_parts"], &clean["miscounted"]], [0, 0, 0]);

    let middle = keys[1].to_string();
    let evict = ["evict", "--key", &middle, "--yes"];
    cluster.eventually(&evict, |run| run.out.contains("1 block evicted")).await;
    let found = cluster.ctl(&audit).await.json(1);
    assert_eq!(found["holes"], 1, "{found}");
    let run = cluster.ctl(&["node", "audit", "node-a"]).await;
    assert!(run.code == 1 && run.err.contains("1 found that must not be"), "{run:?}");
}

#[tokio::test]
async fn a_scrub_finds_damage_says_so_and_finds_it_once() {
    let (cluster, [dir, _]) = filled().await;
    let scrub = ["node", "scrub", "node-a", "-o", "json"];
    let clean = cluster.ctl(&scrub).await.json(0);
    let records = |run: &Value| -> u64 {
        run["paths"].as_array().unwrap().iter().map(|path| path["records"].as_u64().unwrap()).sum()
    };
    assert_eq!(clean["paths"].as_array().unwrap().len(), 2, "{clean}");
    assert!(records(&clean) > 200, "{clean}");

    // The first record of a segment: its payload lies behind the headers of segment and record.
    let segment = File::options().write(true).open(format!("{dir}/segment-000000")).unwrap();
    segment.write_all_at(b"damage", 2 * 4096 + 10).unwrap();
    segment.sync_all().unwrap();
    let run = cluster.ctl(&["node", "scrub", "node-a", "--path", &dir, "--rate", "64MiB"]).await;
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.err.contains("damage was found and withdrawn: 1 record, 0 footers"), "{run:?}");
    assert!(run.out.contains("DAMAGED RECORDS") && run.out.contains(&dir), "{run:?}");
    let again = cluster.ctl(&scrub).await.json(0);
    assert_eq!(records(&again), records(&clean) - 1, "{again}");

    let run = cluster.ctl(&["node", "scrub", "node-a", "--path", "/no/path"]).await;
    assert_eq!(run.code, 3, "{run:?}");
    assert!(run.err.contains(&dir), "it names the paths that there are: {run:?}");
    assert_eq!(cluster.ctl(&["node", "scrub", "node-x"]).await.code, 3);
    let run = cluster.ctl(&["node", "scrub", "node-a", "--rate", "0B"]).await;
    assert_eq!(run.code, 2, "{run:?}");
}

#[tokio::test]
async fn a_path_is_fenced_shown_and_taken_in_again_empty() {
    let (cluster, [first, second]) = filled().await;
    let nodes = cluster.ctl(&["nodes"]).await;
    assert!(nodes.out.contains("2 of 2") && !nodes.out.contains("fenced"), "{nodes:?}");
    let fence = ["node", "path", "fence", "node-a", &first, "--reason", "smart errors"];
    let run = cluster.ctl(&fence).await;
    assert!(run.code == 2 && run.err.contains("--yes"), "{run:?}");
    let fence = [&fence[..], &["--yes"]].concat();
    let run = cluster.ctl(&[&fence[..], &["-o", "json"]].concat()).await;
    assert!(run.json(0)["withdrawn_copies"].as_u64().unwrap() > 100, "{run:?}");
    assert_eq!(cluster.ctl(&fence).await.code, 0, "once more changes nothing");

    let nodes = cluster.ctl(&["nodes"]).await;
    assert!(nodes.code == 0 && nodes.out.contains("1 of 2"), "{nodes:?}");
    assert!(nodes.out.contains(&format!("node-a: {first} is fenced: smart errors")), "{nodes:?}");
    let stats = cluster.ctl(&["stats"]).await;
    assert!(stats.out.contains("fenced: smart errors") && stats.out.contains(&second), "{stats:?}");
    let scrub = cluster.ctl(&["node", "scrub", "node-a"]).await;
    assert!(scrub.code == 1 && scrub.err.contains("fenced: smart errors"), "{scrub:?}");

    let readmit = ["node", "path", "readmit", "node-a", &first];
    let run = cluster.ctl(&readmit).await;
    assert!(run.code == 2 && run.err.contains("--yes"), "{run:?}");
    let readmit = [&readmit[..], &["--yes"]].concat();
    let run = cluster.ctl(&readmit).await;
    assert!(run.code == 0 && run.out.contains("in use again"), "{run:?}");
    let run = cluster.ctl(&readmit).await;
    assert!(run.code == 1 && run.err.contains("is not fenced"), "{run:?}");
    let node = &cluster.ctl(&["nodes", "-o", "json"]).await.json(0)["nodes"][0];
    let back = &node["ssd_paths"][0];
    assert_eq!((&back["healthy"], &back["used_bytes"]), (&true.into(), &0.into()), "{node}");
    // It is written to again: what comes next is spread over both.
    let written = |run: &Run| paths(&run.json(0)["nodes"][0])[0]["used_bytes"].as_u64() > Some(0);
    let more: Vec<u32> = (10_000..10_400).collect();
    cluster.put(&model("llama", 1, 1, 1), &more, &Put::on("node-a")).await;
    cluster.eventually(&["stats", "-o", "json"], written).await;
}

#[tokio::test]
async fn evict_takes_one_tier_and_what_follows_a_block() {
    let (cluster, _) = filled().await;
    let blocks = u64::from(TOKENS.end / 4);
    let evict = async |args: &[&str]| {
        let run = cluster.ctl(&[&["evict"], args, &["-o", "json"]].concat()).await;
        run.json(0)["blocks"].as_u64().unwrap()
    };
    let on_ssd = |run: &Run| run.json(0)["blocks"].as_u64() == Some(blocks);
    cluster.eventually(&["evict", "--tier", "ssd", "-o", "json"], on_ssd).await;
    // The first ten blocks; what follows the tenth is nearly all.
    let prefix: Vec<u32> = TOKENS.take(40).collect();
    let file = cluster.tokens(&prefix[..4]);
    let prompt = ["--model", "llama", "--tokens", &file];
    assert_eq!(evict(&prompt).await, 1);
    assert_eq!(evict(&[&prompt[..], &["--descendants"]].concat()).await, blocks);
    assert_eq!(evict(&[&prompt[..], &["--tier", "dram", "--yes"]].concat()).await, 1);
    assert_eq!(evict(&["--all"]).await, blocks, "its copy on the ssd is still there");
    assert_eq!(evict(&["--all", "--tier", "dram"]).await, blocks - 1);
    assert_eq!(evict(&["--all", "--tier", "ssd", "--yes"]).await, blocks);
    assert_eq!(evict(&["--all"]).await, blocks - 1, "the others are in memory");
    let run = cluster.ctl(&["evict", "--model", "llama", "--descendants"]).await;
    assert_eq!(run.code, 2, "{run:?}");
}

#[tokio::test]
async fn top_shows_rates_and_a_node_that_does_not_answer_spoils_nothing() {
    let cluster = Cluster::start_with_ssds(&["node-a", "node-b"]).await;
    let once = ["top", "--once", "--interval", "100ms"];
    let run = cluster.ctl(&[&once[..], &["-o", "json"]].concat()).await.json(0);
    let node = &run["nodes"][0];
    assert_eq!(node["dram_capacity_bytes"], 64 << 20, "{run}");
    assert_eq!((&node["ssd_paths"], &node["hits_per_second"]), (&2.into(), &0.0.into()), "{run}");
    let table = cluster.ctl(&once).await;
    assert!(table.out.contains("HITS/S") && !table.out.contains('\x1b'), "{table:?}");
    let refused = cluster.ctl(&["top", "--once", "--interval", "1ms"]).await;
    assert_eq!(refused.code, 2, "{refused:?}");

    // Stopped, not gone: it accepts connections and says nothing.
    cluster.signal("node-b", "STOP");
    let nodes = cluster.ctl(&["nodes", "-o", "json"]).await.json(0);
    let silent = nodes["nodes"].as_array().unwrap().iter().find(|node| node["name"] == "node-b");
    let silent = silent.unwrap();
    assert_eq!(silent["ssd_paths"], Value::Null, "{nodes}");
    assert!(silent["not_heard"].is_string(), "{nodes}");
    cluster.signal("node-b", "CONT");
}

#[tokio::test]
async fn what_changes_state_is_not_on_the_metrics_port() {
    let (cluster, [dir, _]) = filled().await;
    let metrics = cluster.metrics("node-a");
    let mut client = larder_proto::control::node_client::NodeClient::new(
        larder_client::masters::channel(metrics).unwrap(),
    );
    let request = larder_proto::control::FencePathRequest { path: dir, reason: "x".to_owned() };
    client.fence_path(request).await.unwrap_err();
    let nodes = cluster.ctl(&["nodes"]).await;
    assert!(nodes.out.contains("2 of 2"), "{nodes:?}");
    assert_eq!(ctl(&["node"], &[], "").await.code, 2);
}
