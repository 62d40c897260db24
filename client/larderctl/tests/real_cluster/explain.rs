//! `larderctl explain` and `lookup` over a real cluster: each reason, by tokens and by key.

use crate::support::{Cluster, Put, Run, model};
use serde_json::Value;

/// The reason of each group of the model version with this layout.
fn reasons(run: &Run, layout: &str) -> Vec<String> {
    let json = run.json(0);
    let of_layout = |model: &&Value| model["layout"] == layout;
    let models = json["models"].as_array().unwrap();
    let model = models.iter().find(of_layout).unwrap_or_else(|| panic!("{json}"));
    let groups = model["groups"].as_array().unwrap();
    groups.iter().map(|group| group["reason"].as_str().unwrap().to_owned()).collect()
}

fn first_reason(run: &Run) -> String {
    run.json(0)["models"][0]["groups"][0]["reason"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn blocks_that_are_held_evicted_unseen_laid_out_otherwise_or_on_a_dead_node_are_told_apart() {
    let mut cluster = Cluster::start(&["node-a", "node-b"]).await;
    let (one, two) = (model("llama", 1, 1, 1), model("llama", 1, 2, 1));
    let layout =
        |model: &larder_proto::fingerprint::ModelDescription| model.version().layout.to_string();
    let (layout_one, layout_two) = (layout(&one), layout(&two));
    let prompt: Vec<u32> = (1..=10).collect(); // Two whole blocks and a rest.
    let far: Vec<u32> = (101..=108).collect();
    let (file, far_file) = (cluster.tokens(&prompt), cluster.tokens(&far));
    let unseen = cluster.tokens(&[9, 9, 9, 9]);
    let keys = cluster.put(&one, &prompt, &Put::on("node-a")).await;
    cluster.put(&one, &far, &Put::on("node-b")).await;
    cluster.client("engine").register_model(&two).await.unwrap();
    let ask = |file| ["explain", "--model", "llama", "--tokens", file, "-o", "json"];

    // Held: one group of both blocks. The same content in another layout is no hit there.
    let run = cluster.eventually(&ask(&file), |run| reasons(run, &layout_one) == ["hit"]).await;
    assert_eq!(reasons(&run, &layout_two), ["other_layout"]);
    let group = run.json(0)["models"]
        .as_array()
        .unwrap()
        .iter()
        .find(|model| model["layout"] == layout_one.as_str())
        .map(|model| model["groups"][0].clone())
        .unwrap();
    assert_eq!((group["first_block"].as_u64(), group["last_block"].as_u64()), (Some(0), Some(1)));
    assert_eq!(group["holders"][0]["name"], "node-a");
    assert_eq!(group["keys"][1], keys[1].to_string());

    // Never seen.
    let run = cluster.ctl(&ask(&unseen)).await;
    assert_eq!(reasons(&run, &layout_one), ["never_seen"]);

    // Evicted: only the tail of the prompt.
    let tail = keys[1].to_string();
    let run = cluster.ctl(&["evict", "--key", &tail, "--yes", "-o", "json"]).await;
    assert_eq!(run.json(0)["blocks"], 1);
    let gone = |run: &Run| reasons(run, &layout_one) == ["hit", "evicted"];
    cluster.eventually(&ask(&file), gone).await;
    let by_key = cluster.ctl(&["explain", "--key", &tail, "-o", "json"]).await;
    assert_eq!(first_reason(&by_key), "evicted");
    let table = cluster.ctl(&ask(&file)[..5]).await;
    assert!(table.out.contains("evicted") && table.out.contains("removed by command"), "{table:?}");

    // The node of a block is dead.
    cluster.eventually(&ask(&far_file), |run| reasons(run, &layout_one) == ["hit"]).await;
    cluster.kill("node-b").await;
    let down = |run: &Run| reasons(run, &layout_one) == ["node_down"];
    let run = cluster.eventually(&ask(&far_file), down).await;
    assert!(run.out.contains("node-b"), "the detail names it: {run:?}");
}

#[tokio::test]
async fn missing_parts_other_contents_and_other_tenants_are_told_apart() {
    let cluster = Cluster::start(&["node-a"]).await;
    let tokens = [1, 2, 3, 4];
    let file = cluster.tokens(&tokens);

    // One of two parts.
    let half = model("half", 1, 1, 2);
    let keys = cluster.put(&half, &tokens, &Put::on("node-a")).await;
    let ask = ["explain", "--model", "half", "--tokens", &file, "-o", "json"];
    let run = cluster.eventually(&ask, |run| first_reason(run) == "incomplete").await;
    assert!(run.out.contains("part 1"), "{run:?}");

    // The same tokens under other weights of the same name.
    let (old, new) = (model("llama", 2, 1, 1), model("llama", 3, 1, 1));
    cluster.put(&old, &tokens, &Put::on("node-a")).await;
    cluster.client("engine").register_model(&new).await.unwrap();
    let content = new.version().content.to_string();
    let ask = ["explain", "--model", "llama", "--tokens", &file, "-o", "json"];
    let of_new = |run: &Run| {
        let json = run.json(0);
        let models = json["models"].as_array().unwrap();
        let model = models.iter().find(|model| model["content"] == content.as_str()).unwrap();
        model["groups"][0]["reason"].as_str().unwrap().to_owned()
    };
    cluster.eventually(&ask, |run| of_new(run) == "other_content").await;

    // A key of another content, asked for by key; and by a tenant who has none of it.
    let key = keys[0].to_string();
    let ask = ["explain", "--key", &key, "--content", &content, "-o", "json"];
    assert_eq!(first_reason(&cluster.ctl(&ask).await), "other_content");
    let ask = ["--tenant", "acme", "explain", "--key", &key, "-o", "json"];
    assert_eq!(first_reason(&cluster.ctl(&ask).await), "not_yours");
}

#[tokio::test]
async fn lookup_shows_how_far_a_prompt_matches_and_who_holds_a_block() {
    let cluster = Cluster::start(&["node-a", "node-b"]).await;
    let model = model("llama", 1, 1, 1);
    let prompt: Vec<u32> = (1..=12).collect();
    cluster.put(&model, &prompt, &Put::on("node-a")).await;
    let keys = cluster.put(&model, &prompt[..4], &Put::on("node-b")).await;
    let longer: Vec<u32> = (1..=17).collect();
    let file = cluster.tokens(&longer);
    let ask = ["lookup", "--model", "llama", "--tokens", &file, "-o", "json"];
    let matched = |run: &Run| run.code == 0 && run.json(0)["models"][0]["matched_blocks"] == 3;
    let run = cluster.eventually(&ask, matched).await;
    let found = run.json(0)["models"][0].clone();
    assert_eq!((found["blocks"].as_u64(), found["matched_tokens"].as_u64()), (Some(4), Some(12)));
    assert_eq!(found["coverage"]["complete"], true);
    let runs = found["runs"].as_array().unwrap();
    let blocks: u64 = runs.iter().map(|run| run["blocks"].as_u64().unwrap()).sum();
    assert_eq!(blocks, 3);
    let table = cluster.ctl(&ask[..5]).await;
    assert!(table.out.contains("12 of 17 tokens match"), "{table:?}");

    // From standard input; and what is not held is not found.
    let ask = ["lookup", "--model", "llama", "--tokens", "-", "-o", "json"];
    let run = cluster.ctl_with(&ask, "[9, 9, 9, 9]").await;
    assert_eq!(run.json(3)["models"][0]["matched_blocks"], 0);

    let key = keys[0].to_string();
    let ask = ["lookup", "--key", &key, "-o", "json"];
    let two = |run: &Run| {
        let held = run.json(0)["blocks"][0]["models"][0]["holders"].clone();
        held.as_array().unwrap().len() == 2
    };
    cluster.eventually(&ask, two).await;
    let nobody = "ab".repeat(32);
    let run = cluster.ctl(&["lookup", "--key", &nobody]).await;
    assert_eq!(run.code, 3, "{run:?}");
}
