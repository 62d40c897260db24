//! A real master process: killed, restarted, and asked what it knows. Its nodes are real up to their
//! catalog, which keeps names only.
#![expect(clippy::unwrap_used, reason = "helpers of tests: what fails says where")]

use larder_proto::{
    BlockKey, ContentFingerprint, LayoutFingerprint, ModelVersion,
    control::{
        EvictFilter, EvictRequest, ExplainRequest, ListNodesRequest, LocateReply, LocateRequest,
        MatchPrefixRequest, StatusRequest, master_client::MasterClient,
    },
    ids::TenantName,
};
use larder_store_node::inventory::Loss;
use larder_tests::{
    memory_node::{MemoryNode, Names},
    process::Daemon,
};
use std::{future::Future, path::Path, sync::Arc, time::Duration};
use tokio::time::{sleep, timeout};
use tonic::transport::Channel;

type Client = MasterClient<Channel>;

/// No step of a test takes longer than this on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

async fn master(state: &Path, listen: &str) -> Daemon {
    let args = [
        format!("--state_dir={}", state.display()),
        format!("--control.listen={listen}"),
        "--metrics.listen=127.0.0.1:0".to_owned(),
        "--nodes.heartbeat=200ms".to_owned(),
        "--nodes.ttl=2s".to_owned(),
    ];
    Daemon::start("larder-master", &args, &["control", "metrics"]).await.unwrap()
}

async fn client(address: &str) -> Client {
    eventually("a connection", async || {
        MasterClient::connect(format!("http://{address}")).await.ok()
    })
    .await
}

/// Asks again until there is an answer; the pause only keeps the machine free.
async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut ask: impl FnMut() -> F) -> T {
    let answered = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, answered).await.unwrap_or_else(|_| panic!("no {what} within {PATIENCE:?}"))
}

fn model() -> ModelVersion {
    ModelVersion {
        content: ContentFingerprint::from_bytes([1; 32]),
        layout: LayoutFingerprint::from_bytes([2; 32]),
    }
}

fn key(n: u64) -> BlockKey {
    BlockKey::from_bytes(*blake3::hash(&n.to_le_bytes()).as_bytes())
}

fn packed(keys: impl IntoIterator<Item = BlockKey>) -> bytes::Bytes {
    keys.into_iter().flat_map(|key| *key.as_bytes()).collect::<Vec<u8>>().into()
}

fn names() -> Arc<Names> {
    Arc::new(Names::new(TenantName::default().id(), model(), 65_536))
}

async fn locate(client: &Client, keys: std::ops::Range<u64>) -> LocateReply {
    let request = LocateRequest {
        tenant: TenantName::DEFAULT.to_owned(),
        content: model().content.as_bytes().to_vec().into(),
        layout: model().layout.as_bytes().to_vec().into(),
        keys: packed(keys.map(key)),
    };
    client.clone().locate(request).await.unwrap().into_inner()
}

fn is_complete(reply: &LocateReply) -> bool {
    reply.coverage.is_some_and(|coverage| coverage.complete)
}

/// Waits until the master knows everything that its nodes hold.
async fn complete(client: &Client, nodes: u32) -> LocateReply {
    eventually("complete answer", async || {
        let reply = locate(client, 0..1).await;
        let known = reply.coverage.unwrap_or_default().nodes_known;
        (is_complete(&reply) && known == nodes).then_some(reply)
    })
    .await
}

async fn explain(client: &Client, n: u64) -> (String, String) {
    let request = ExplainRequest {
        tenant: TenantName::DEFAULT.to_owned(),
        content: model().content.as_bytes().to_vec().into(),
        layout: model().layout.as_bytes().to_vec().into(),
        key: key(n).as_bytes().to_vec().into(),
    };
    let reply = client.clone().explain(request).await.unwrap().into_inner();
    (reply.reason, reply.detail)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_kill_and_restart_under_load_every_acknowledged_block_is_found_again() {
    let state = tempfile::tempdir().unwrap();
    let first = master(state.path(), "127.0.0.1:0").await;
    let address = first.address("control").to_owned();
    let nodes: Vec<MemoryNode> = (1..=2)
        .map(|number| MemoryNode::start(number, 1, names(), std::slice::from_ref(&address)))
        .collect();
    let asker = client(&address).await;
    let put = |range: std::ops::Range<u64>| {
        range.for_each(|n| nodes[usize::try_from(n % 2).unwrap()].names.put(key(n)));
    };
    put(0..20_000);
    complete(&asker, 2).await;
    let before = asker.clone().status(StatusRequest {}).await.unwrap().into_inner();
    // Under load: some of these are on their way when the master dies, some come while it is dead.
    put(20_000..40_000);
    first.kill().await.unwrap();
    put(40_000..60_000);

    let second = master(state.path(), &address).await;
    let asker = client(&address).await;
    put(60_000..80_000);
    complete(&asker, 2).await;
    for start in (0..80_000).step_by(10_000) {
        let reply = locate(&asker, start..start + 10_000).await;
        assert!(is_complete(&reply));
        for (n, block) in (start..).zip(&reply.blocks) {
            let holder = block.holders.first().unwrap_or_else(|| panic!("block {n} is lost"));
            let node = reply.sources[holder.source as usize].node[0];
            assert_eq!((block.holders.len(), u64::from(node)), (1, 1 + n % 2), "block {n}");
        }
    }
    let after = asker.clone().status(StatusRequest {}).await.unwrap().into_inner();
    assert_eq!(after.cluster, before.cluster);
    assert!(after.term > before.term && after.master_incarnation > before.master_incarnation);
    assert_eq!(after.entries, 80_000);
    let request = MatchPrefixRequest {
        tenant: TenantName::DEFAULT.to_owned(),
        content: model().content.as_bytes().to_vec().into(),
        layout: model().layout.as_bytes().to_vec().into(),
        keys: packed((0..64).map(key)),
        ..MatchPrefixRequest::default()
    };
    let reply = asker.clone().match_prefix(request).await.unwrap().into_inner();
    assert_eq!((reply.blocks, reply.runs.len(), reply.sources.len()), (64, 64, 2));
    second.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_master_says_that_it_is_incomplete_until_nodes_are_back_or_their_ttl_is_over() {
    let state = tempfile::tempdir().unwrap();
    let first = master(state.path(), "127.0.0.1:0").await;
    let address = first.address("control").to_owned();
    let node = MemoryNode::start(1, 1, names(), std::slice::from_ref(&address));
    node.names.put(key(1));
    let asker = client(&address).await;
    complete(&asker, 1).await;
    // The identity is durable soon after the hello, not with it.
    eventually("durable identity", async || {
        let nodes = asker.clone().list_nodes(ListNodesRequest {}).await.unwrap().into_inner().nodes;
        (nodes.len() == 1 && nodes[0].state == "up").then_some(())
    })
    .await;
    sleep(Duration::from_millis(300)).await;
    node.stop().await;
    first.kill().await.unwrap();

    let second = master(state.path(), &address).await;
    let asker = client(&address).await;
    let reply = locate(&asker, 1..2).await;
    assert!(!is_complete(&reply), "the node may be back any moment: {reply:?}");
    assert_eq!(reply.coverage.unwrap().nodes_known, 1);
    // It does not come, and is forgotten.
    complete(&asker, 0).await;
    second.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_node_is_out_of_answers_at_once_and_forgotten_after_its_ttl() {
    let state = tempfile::tempdir().unwrap();
    let daemon = master(state.path(), "127.0.0.1:0").await;
    let address = daemon.address("control").to_owned();
    let asker = client(&address).await;
    let [one, two] =
        [1, 2].map(|number| MemoryNode::start(number, 1, names(), std::slice::from_ref(&address)));
    one.names.put(key(1));
    one.names.put(key(2));
    two.names.put(key(3));
    complete(&asker, 2).await;
    assert_eq!(explain(&asker, 1).await.0, "hit");
    two.names.lose(&key(3), Loss::Evicted);
    eventually("eviction", async || (explain(&asker, 3).await.0 == "evicted").then_some(())).await;
    assert_eq!(explain(&asker, 4).await.0, "never_seen");

    // Its process is gone: tasks and sockets end without a word.
    drop(one);
    eventually("answer without the lost node", async || {
        locate(&asker, 1..3).await.blocks.iter().all(|block| block.holders.is_empty()).then_some(())
    })
    .await;
    let (reason, detail) = explain(&asker, 1).await;
    assert_eq!(reason, "node_down", "{detail}");
    assert!(detail.contains("memory-1"), "{detail}");
    assert!(!is_complete(&locate(&asker, 1..2).await), "it may be back within its ttl");
    complete(&asker, 1).await;
    assert_eq!(explain(&asker, 1).await.0, "never_seen");
    daemon.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_so_quick_that_nobody_noticed_shows_only_the_new_life() {
    // F25, F05, F10
    let state = tempfile::tempdir().unwrap();
    let daemon = master(state.path(), "127.0.0.1:0").await;
    let address = daemon.address("control").to_owned();
    let asker = client(&address).await;
    let old = MemoryNode::start(1, 1, names(), std::slice::from_ref(&address));
    old.names.put(key(1));
    complete(&asker, 1).await;
    // The old life is still in session when the new one says hello.
    let new = MemoryNode::start(1, 2, names(), std::slice::from_ref(&address));
    new.names.put(key(2));
    eventually("answer of the new life", async || {
        let reply = locate(&asker, 1..3).await;
        (!reply.blocks[1].holders.is_empty()).then_some(())
    })
    .await;
    for _ in 0..200 {
        // The old life goes on trying, and is refused.
        old.names.put(key(1));
        let reply = locate(&asker, 1..3).await;
        assert!(reply.blocks[0].holders.is_empty(), "a block of the old life");
        assert!(reply.sources.iter().all(|source| source.incarnation == 2), "{:?}", reply.sources);
    }
    eventually("refusal", async || {
        let error = old.board.links()[0].last_error.clone()?;
        error.contains("incarnation 2").then_some(())
    })
    .await;
    daemon.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eviction_reaches_every_node_and_says_of_each_what_it_did() {
    let state = tempfile::tempdir().unwrap();
    let daemon = master(state.path(), "127.0.0.1:0").await;
    let address = daemon.address("control").to_owned();
    let asker = client(&address).await;
    let nodes = [1, 2, 3]
        .map(|number| MemoryNode::start(number, 1, names(), std::slice::from_ref(&address)));
    nodes[0].names.put(key(1));
    nodes[1].names.put(key(1));
    nodes[1].names.put(key(2));
    complete(&asker, 3).await;
    let filter = EvictFilter {
        tenant: TenantName::DEFAULT.to_owned(),
        keys: vec![key(1).as_bytes().to_vec().into(), key(2).as_bytes().to_vec().into()],
        ..EvictFilter::default()
    };
    let evict_on = |filter, node: Vec<u8>| {
        let mut asker = asker.clone();
        let request = EvictRequest { filter: Some(filter), node: node.into() };
        async move { asker.evict(request).await }
    };
    let evict = |filter| evict_on(filter, Vec::new());
    let reply = evict_on(filter.clone(), [1; 16].to_vec()).await.unwrap();
    let asked: Vec<u8> = reply.into_inner().nodes.iter().map(|node| node.node[0]).collect();
    assert_eq!(asked, [1], "only the node that is meant");
    nodes[0].names.put(key(1));
    let reply = evict(filter.clone()).await.unwrap().into_inner();
    let done: Vec<_> =
        reply.nodes.iter().map(|n| (n.node[0], n.blocks, n.error.as_str())).collect();
    assert_eq!(done, [(1, 1, ""), (2, 2, ""), (3, 0, "")]);
    eventually("removal", async || {
        locate(&asker, 1..3).await.blocks.iter().all(|b| b.holders.is_empty()).then_some(())
    })
    .await;
    assert_eq!(explain(&asker, 1).await.0, "evicted");

    let no_tenant = EvictFilter { tenant: String::new(), ..filter.clone() };
    let refused = evict(no_tenant).await.unwrap_err();
    assert!(refused.message().contains("filter.tenant"), "{refused}");
    let elsewhere = EvictFilter { tier: "tape".to_owned(), ..filter.clone() };
    let refused = evict(elsewhere).await.unwrap_err();
    assert!(refused.message().contains("filter.tier"), "{refused}");
    let of_nothing = EvictFilter { keys: vec![], descendants: true, ..filter.clone() };
    let refused = evict(of_nothing).await.unwrap_err();
    assert!(refused.message().contains("filter.descendants"), "{refused}");
    let by_nothing = EvictFilter { keys: vec![], ..filter };
    let reply = evict(by_nothing).await.unwrap().into_inner();
    assert!(reply.nodes.iter().all(|node| node.error.contains("by key only")), "{reply:?}");
    daemon.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_that_lie_are_refused_by_name_and_unknown_names_are_misses() {
    // F54, P11
    let state = tempfile::tempdir().unwrap();
    let daemon = master(state.path(), "127.0.0.1:0").await;
    let asker = client(daemon.address("control")).await;
    let good = MatchPrefixRequest {
        tenant: "nobody".to_owned(),
        content: vec![7; 32].into(),
        layout: vec![8; 32].into(),
        keys: packed((0..3).map(key)),
        ..MatchPrefixRequest::default()
    };
    let ask = |request| {
        let mut asker = asker.clone();
        async move { asker.match_prefix(request).await }
    };
    let miss = ask(good.clone()).await.unwrap().into_inner();
    assert_eq!((miss.blocks, miss.runs.len()), (0, 0));
    let bad: [(&str, MatchPrefixRequest); 6] = [
        ("tenant", MatchPrefixRequest { tenant: "../x".to_owned(), ..good.clone() }),
        ("content", MatchPrefixRequest { content: vec![7; 31].into(), ..good.clone() }),
        ("layout", MatchPrefixRequest { layout: vec![].into(), ..good.clone() }),
        ("keys", MatchPrefixRequest { keys: vec![0; 33].into(), ..good.clone() }),
        ("keys", MatchPrefixRequest { keys: vec![0; 32 * 16_385].into(), ..good.clone() }),
        ("exclude", MatchPrefixRequest { exclude: vec![1].into(), ..good.clone() }),
    ];
    for (field, request) in bad {
        let refused = ask(request).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        assert!(refused.message().starts_with(field), "{field}: {refused}");
    }
    // Above the limit of a message: refused before it is read, and the next call is served.
    let huge = MatchPrefixRequest { keys: vec![0; 5 << 20].into(), ..good.clone() };
    assert_eq!(ask(huge).await.unwrap_err().code(), tonic::Code::OutOfRange);
    assert!(ask(good).await.is_ok());
    daemon.kill().await.unwrap();
}
