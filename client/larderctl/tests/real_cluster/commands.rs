//! Every other command over a real cluster: what it shows, in both forms, and how it ends.

use crate::support::{Cluster, Put, Run, ctl, model};
use larder_client::{connection::Identity, local::LocalSession};
use larder_proto::{PartNumber, part::PartRef};
use serde_json::Value;

fn list<'a>(json: &'a Value, name: &str) -> &'a Vec<Value> {
    json[name].as_array().unwrap_or_else(|| panic!("{name} in {json}"))
}

#[tokio::test]
async fn every_question_is_answered_as_a_table_and_as_json() {
    let cluster = Cluster::start(&["node-a", "node-b"]).await;
    let llama = model("llama", 1, 1, 1);
    let tokens = [1, 2, 3, 4];
    cluster.put(&llama, &tokens, &Put::on("node-a")).await;
    let counted = |run: &Run| run.json(0)["masters"][0]["index"]["entries"] == 1;
    let status = cluster.eventually(&["status", "-o", "json"], counted).await.json(0);
    assert_eq!(status["masters"][0]["state"], "up");
    assert_eq!(status["masters"][0]["coverage"]["complete"], true);
    assert_eq!(status["nodes"]["capacity_bytes"], 128 << 20, "exact in JSON");

    let nodes = cluster.ctl(&["nodes", "-o", "json"]).await.json(0);
    let names: Vec<&Value> = list(&nodes, "nodes").iter().map(|node| &node["name"]).collect();
    assert!(names.contains(&&Value::from("node-a")) && names.len() == 2, "{nodes}");
    let one = cluster.ctl(&["nodes", "node-b", "-o", "json"]).await.json(0);
    assert_eq!(list(&one, "nodes").len(), 1);
    let id = one["nodes"][0]["node"].as_str().unwrap();
    let by_id = cluster.ctl(&["nodes", id, "-o", "json"]).await.json(0);
    assert_eq!(by_id["nodes"][0]["name"], "node-b");

    let models = cluster.ctl(&["models", "llama", "-o", "json"]).await.json(0);
    let described = &models["models"][0];
    assert_eq!(described["content"], llama.version().content.to_string());
    assert_eq!(described["description"]["block_tokens"], 4);

    let stats = cluster.ctl(&["stats", "-o", "json"]).await.json(0);
    let memory: u64 = list(&stats, "nodes")
        .iter()
        .flat_map(|node| list(node, "tiers"))
        .map(|tier| tier["used_bytes"].as_u64().unwrap())
        .sum();
    assert!(memory >= 1000, "{stats}");
    assert!(!stats["masters"][0]["counters"].as_object().unwrap().is_empty());

    let config = cluster.ctl(&["config", "-o", "json"]).await.json(0);
    assert_eq!(config["settings"][0]["value"], cluster.master());
    assert_eq!(config["settings"][0]["from"], "--masters");
    assert_eq!(config["masters"][0]["reachable"], true);

    for (command, heading) in [
        ("status", "MASTER"),
        ("nodes", "CAPACITY"),
        ("models", "TOKENS A BLOCK"),
        ("stats", "EVICTABLE"),
        ("pins", "nothing is in use"),
        ("config", "SETTING"),
    ] {
        let run = cluster.ctl(&[command]).await;
        assert_eq!((run.code, run.err.as_str()), (0, ""), "{run:?}");
        assert!(run.out.contains(heading), "{run:?}");
        assert!(!run.out.contains('\x1b'), "no colour beside a terminal: {run:?}");
    }
    let table = cluster.ctl(&["nodes"]).await;
    assert!(table.out.contains("64.0 MiB"), "rounded in tables: {table:?}");
}

#[tokio::test]
async fn pins_show_who_reads_in_place() {
    let cluster = Cluster::start(&["node-a"]).await;
    let llama = model("llama", 1, 1, 1);
    let keys = cluster.put(&llama, &[1, 2, 3, 4], &Put::on("node-a")).await;
    let reader = Identity::client("engine-7");
    let session = LocalSession::connect(&cluster.socket("node-a"), &reader).await.unwrap();
    let part = PartRef { key: keys[0], layout: llama.version().layout, part: PartNumber(0) };
    let lease = session.lease(part).await.unwrap().unwrap();

    let pins = cluster.ctl(&["pins", "-o", "json"]).await.json(0);
    let pin = &list(&pins, "pins")[0];
    assert_eq!((&pin["kind"], &pin["bytes"]), (&Value::from("lease"), &Value::from(1000)));
    assert_eq!(pin["pid"], std::process::id());
    assert!(pin["part"].as_str().unwrap().starts_with(&keys[0].to_string()));
    let table = cluster.ctl(&["pins", "node-a"]).await;
    assert!(table.out.contains("1 pin, 1000 B"), "{table:?}");

    drop(lease);
    let none = |run: &Run| list(&run.json(0), "pins").is_empty();
    cluster.eventually(&["pins", "-o", "json"], none).await;
}

#[tokio::test]
async fn evict_shows_what_would_go_and_removes_only_what_was_meant_and_only_with_yes() {
    let mut cluster = Cluster::start(&["node-a", "node-b"]).await;
    let llama = model("llama", 1, 1, 1);
    let (ours, theirs) = ([1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9, 9]);
    cluster.put(&llama, &ours, &Put::on("node-a")).await;
    let bad = Put { producer: "engine-bad", ..Put::on("node-b") };
    cluster.put(&llama, &theirs, &bad).await;
    let count = async |args: &[&str]| {
        let all = [args, &["--dry-run", "-o", "json"]].concat();
        cluster.ctl(&all).await.json(0)["blocks"].as_u64().unwrap()
    };
    let file = cluster.tokens(&ours);
    assert_eq!(count(&["evict", "--model", "llama"]).await, 3);
    assert_eq!(count(&["evict", "--model", "llama", "--tokens", &file]).await, 2);
    assert_eq!(count(&["evict", "--producer", "engine-bad"]).await, 1);
    assert_eq!(count(&["--tenant", "acme", "evict", "--all"]).await, 0, "another tenant's");

    let prompt = ["evict", "--model", "llama", "--tokens", &file];
    let run = cluster.ctl_with(&prompt, "y\n").await;
    assert_eq!((run.code, run.err.as_str()), (0, ""), "{run:?}");
    assert!(run.out.contains("2 blocks would be evicted, 2.0 KiB"), "{run:?}");
    assert!(run.out.contains("the same command with --yes"), "{run:?}");
    assert_eq!(count(&["evict", "--all", "--node", "node-b"]).await, 1);
    assert_eq!(count(&["evict", "--all", "--tier", "ssd"]).await, 0);
    assert_eq!(count(&["evict", "--unused", "1h"]).await, 0);
    assert_eq!(count(&["evict", "--all"]).await, 3, "nothing went");

    let run = cluster.ctl(&[&prompt[..], &["--yes"]].concat()).await;
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.out.contains("2 blocks evicted, 2.0 KiB"), "{run:?}");
    assert_eq!(count(&["evict", "--all"]).await, 1, "the other prompt stayed");
    let run = cluster.ctl(&["evict", "--producer", "engine-bad", "--yes", "-o", "json"]).await;
    assert_eq!(
        (run.json(0)["blocks"].as_u64(), run.json(0)["bytes"].as_u64()),
        (Some(1), Some(1000))
    );
    let run = cluster.ctl(&["evict", "--all"]).await;
    assert!(run.code == 0 && run.out.contains("0 blocks would be evicted"), "{run:?}");
    assert!(!run.out.contains("--yes"), "there is nothing to do: {run:?}");
    // Not only after the next heartbeat.
    let status = cluster.ctl(&["status", "-o", "json"]).await.json(0);
    assert_eq!(status["nodes"]["used_bytes"], 0, "{status}");

    cluster.kill("node-b").await;
    let down = |run: &Run| run.json(0)["nodes"][0]["state"] == "down";
    cluster.eventually(&["nodes", "node-b", "-o", "json"], down).await;
    let run = cluster.ctl(&["evict", "--all", "--yes", "-o", "json"]).await;
    assert_eq!(run.code, 1, "a node kept its blocks: {run:?}");
    assert!(run.err.contains("node-b"), "{run:?}");
}

#[tokio::test]
async fn the_exit_code_tells_what_went_wrong() {
    let cluster = Cluster::start(&["node-a"]).await;
    let not_found: [&[&str]; 6] = [
        &["nodes", "node-x"],
        &["models", "lama"],
        &["stats", "node-x"],
        &["explain", "--model", "lama", "--tokens", "-"],
        &["evict", "--model", "lama", "--yes"],
        &["get", "nothing", "-o", "-"],
    ];
    for args in not_found {
        let run = cluster.ctl_with(args, "1 2 3 4").await;
        assert_eq!(run.code, 3, "{args:?}: {run:?}");
        assert_eq!(run.err.lines().count(), 1, "one line: {run:?}");
    }
    let usage: [&[&str]; 5] =
        [&["evict"], &["explain"], &["no-such-command"], &["--timeout", "5", "status"], &[]];
    for args in usage {
        assert_eq!(ctl(args, &[], "").await.code, 2, "{args:?}");
    }
    let failed = cluster.ctl_with(&["models", "-o", "json"], "").await;
    assert_eq!(failed.json(0), serde_json::json!({ "models": [] }));
    let run = cluster.ctl(&["put", "/no/such/file", "--name", "x"]).await;
    assert!(run.code == 1 && run.err.contains("read /no/such/file: No such file"), "{run:?}");

    // A port that nobody listens on.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let dead = listener.local_addr().unwrap().to_string();
    drop(listener);
    let commands: [&[&str]; 4] = [&["status"], &["nodes"], &["stats"], &["lookup", "--key", KEY]];
    for args in commands {
        let run = ctl(args, &[("LARDER_MASTERS", &dead)], "").await;
        assert_eq!(run.code, 4, "{args:?}: {run:?}");
    }
    // Ports of somebody else.
    for address in cluster.no_masters("node-a") {
        for args in [&["status"][..], &["nodes"]] {
            let run = ctl(args, &[("LARDER_MASTERS", address)], "").await;
            assert_eq!(run.code, 4, "{address} {args:?}: {run:?}");
            let told = format!("{}{}", run.out, run.err);
            assert!(told.contains("this is not a master"), "{run:?}");
        }
    }
    // One of two masters is enough.
    let both = format!("{dead},{}", cluster.master());
    let run = ctl(&["status", "-o", "json"], &[("LARDER_MASTERS", &both)], "").await;
    assert_eq!(run.json(0)["masters"][0]["state"], "unreachable");
    let config = ctl(&["config"], &[("LARDER_MASTERS", &dead)], "").await;
    assert!(config.code == 0 && config.out.contains("LARDER_MASTERS"), "{config:?}");
}

const KEY: &str = "abababababababababababababababababababababababababababababababab";

#[tokio::test]
async fn help_and_completions_need_no_cluster() {
    let help = ctl(&["--help"], &[], "").await;
    assert!(help.code == 0 && help.out.contains("4  unreachable"), "{help:?}");
    let help = ctl(&["help", "explain"], &[], "").await;
    assert!(help.code == 0 && help.out.contains("other_layout"), "{help:?}");
    for shell in ["bash", "zsh", "fish"] {
        let script = ctl(&["completions", shell], &[], "").await;
        assert!(script.code == 0 && script.out.contains("explain"), "{shell}");
    }
}
