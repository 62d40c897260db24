//! Two engines, two nodes, one master, as processes, on the real model.
#![expect(clippy::unwrap_used, reason = "helpers of tests: what fails says where")]

use larder_tests::demo::{
    await_entries,
    cluster::Cluster,
    document::{handbook, question},
    engine::{Answer, complete},
};
use std::path::PathBuf;

/// Where `scripts/fetch-model.sh` puts the model; `make test` runs it first.
fn model() -> PathBuf {
    let target = std::env::current_exe().unwrap();
    let target = target.ancestors().find(|path| path.join("models").is_dir());
    let target = target.expect("run scripts/fetch-model.sh first: target/models is missing");
    target.join("models/SmolLM2-135M-Instruct.Q4_1.gguf")
}

fn blocks(answer: &Answer) -> u64 {
    (answer.prompt_tokens - 1) / 32
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_comes_from_a_peer_with_the_same_output_and_without_it_when_the_peer_is_dead() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(&model(), folder.path(), |_| ()).await.unwrap();
    let (a, b) =
        (cluster.a.engine.address("http").to_owned(), cluster.b.engine.address("http").to_owned());
    let master = cluster.master.address("control").to_owned();
    let prompt = question(&handbook("test", 4), "Where is the grain?");

    let cold = complete(&a, &prompt, 12, true).await.unwrap();
    assert_eq!((cold.source.as_str(), cold.cached_tokens), ("recomputed", 0));
    await_entries(&master, blocks(&cold)).await.unwrap();

    let peer = complete(&b, &prompt, 12, true).await.unwrap();
    assert_eq!(peer.token_ids, cold.token_ids);
    assert_eq!(peer.source, "peer");
    // All of it, but for the tokens after the last point where a prompt may resume.
    let computed = peer.prompt_tokens - peer.cached_tokens;
    assert!((1..=64).contains(&computed), "{computed} of {} computed", peer.prompt_tokens);

    let local = complete(&b, &prompt, 12, true).await.unwrap();
    assert_eq!((local.source.as_str(), &local.token_ids), ("local", &cold.token_ids));
    let alone = complete(&b, &prompt, 12, false).await.unwrap();
    assert_eq!((alone.source.as_str(), &alone.token_ids), ("recomputed", &cold.token_ids));

    // Something only A holds, and then A's node is dead: computed, and right.
    let only_a = question(&handbook("other", 4), "Where is the honey?");
    let held = complete(&a, &only_a, 12, true).await.unwrap();
    await_entries(&master, blocks(&cold) + blocks(&held)).await.unwrap();
    cluster.a.node.take().unwrap().kill().await.unwrap();
    let recomputed = complete(&b, &only_a, 12, true).await.unwrap();
    assert_eq!(recomputed.token_ids, held.token_ids);
    assert_eq!(recomputed.source, "recomputed");
}
