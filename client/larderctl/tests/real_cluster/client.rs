//! The cluster client itself, over a real cluster: what `larderctl` does not show.

use crate::support::{BLOCK, Cluster, LIMIT, Put, Run, model};
use bytes::Bytes;
use larder_client::{
    ClientError, TransferError, cluster::NodeChoice, connection::PutOutcome, local::PartAttributes,
};
use larder_proto::{PartNumber, block_key::keys_of, part::PartRef};
use std::time::Duration;

#[tokio::test]
async fn the_cluster_client_fails_over_to_the_next_holder_and_calls_a_miss_a_miss() {
    let mut cluster = Cluster::start(&["node-a", "node-b"]).await;
    let model = model("llama", 1, 1, 1);
    let tokens = [1, 2, 3, 4];
    let keys = cluster.put(&model, &tokens, &Put::on("node-a")).await;
    cluster.put(&model, &tokens, &Put::on("node-b")).await;
    let key = keys[0].to_string();
    let both =
        |run: &Run| run.code == 0 && run.out.contains("node-a") && run.out.contains("node-b");
    cluster.eventually(&["lookup", "--key", &key], both).await;

    let client = cluster.client("reader");
    let part = PartNumber(0);
    let get = || client.get(model.version(), keys[0], part, LIMIT);
    let first = get().await.unwrap().unwrap();
    assert_eq!(first.bytes, vec![7; 1000]);
    // Whichever gave it dies; what the client remembers still names it.
    let names = cluster.ctl(&["nodes", "-o", "json"]).await.json(0);
    let nodes = names["nodes"].as_array().unwrap().clone();
    let source = nodes.iter().find(|node| node["node"] == first.source.to_string()).unwrap();
    cluster.kill(source["name"].as_str().unwrap()).await;
    let second = get().await.unwrap().unwrap();
    assert_ne!(second.source, first.source);
    assert_eq!(second.bytes, first.bytes);

    let missing = PartNumber(1);
    let none = client.get(model.version(), keys[0], missing, LIMIT).await.unwrap();
    assert_eq!(none, None);
}

#[tokio::test]
async fn a_put_or_get_that_is_given_up_leaves_nothing_behind() {
    let cluster = Cluster::start(&["node-a"]).await;
    let model = model("llama", 1, 1, 1);
    let version = model.version();
    let client = cluster.client("engine");
    client.register_model(&model).await.unwrap();
    let node = client.nodes_for_put(&NodeChoice::MostRoom).await.unwrap().remove(0);
    let key = keys_of(version.content, BLOCK, b"", &[1, 2, 3, 4])[0];
    let part = PartRef { key, layout: version.layout, part: PartNumber(0) };
    let attributes =
        PartAttributes { content: version.content, root: key, parent: None, origin_hash: None };
    let bytes = Bytes::from(vec![3; 8 << 20]);
    let put = |deadline| client.put(&node, part, &attributes, bytes.clone(), deadline);
    let late = |outcome: Result<(), ClientError>| {
        matches!(outcome, Err(ClientError::Transfer(TransferError::Deadline(_))))
    };

    // At any point of the put: before, amid and after its bytes moved.
    for micros in [0, 100, 300, 1000, 3000] {
        let outcome = put(Duration::from_micros(micros)).await;
        assert!(outcome.is_ok() || late(outcome.map(|_| ())), "{micros}");
        let idle = |run: &Run| run.json(0)["pins"] == serde_json::json!([]);
        cluster.eventually(&["pins", "-o", "json"], idle).await;
    }
    let outcome = put(LIMIT).await.unwrap();
    assert!(matches!(outcome, PutOutcome::Stored(_) | PutOutcome::Exists(_)), "{outcome:?}");
    let key_text = key.to_string();
    let listed = |run: &Run| run.code == 0;
    cluster.eventually(&["lookup", "--key", &key_text], listed).await;

    for micros in [0, 100, 1000, 3000] {
        let got = client.get(version, key, PartNumber(0), Duration::from_micros(micros)).await;
        assert!(got.is_ok() || late(got.map(|_| ())), "{micros}");
    }
    let got = client.get(version, key, PartNumber(0), LIMIT).await.unwrap().unwrap();
    assert_eq!(got.bytes, bytes);
}
