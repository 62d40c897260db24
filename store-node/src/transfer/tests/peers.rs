//! Nodes that bring parts from one another.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_is_brought_from_a_peer_and_kept_with_its_producer() {
    let (a, b) = (TestNode::start(1, 16 << 20).await, TestNode::start(2, 16 << 20).await);
    put(&a.tcp().await, 1, 3 << 20).await.unwrap();
    let of_a = NodeAddress {
        node: a.node.id(),
        incarnation: Incarnation(1),
        address: a.address.to_string(),
    };
    b.node.locations.put(name(1).tenant, model(), &part(1).key, Arc::new([Arc::new(of_a)]));
    let local = b.local().await;
    let parts = vec![(part(1).key, PartNumber(0)), (part(2).key, PartNumber(0))];
    let fetch = FetchRequest { model: model(), parts, deadline: LONG, class: Class::Demand };
    let mut stream = local.fetch(&fetch).await.unwrap();
    let mut answers = std::collections::BTreeMap::new();
    while let Some(answer) = stream.next().await {
        let (item, fetched) = answer.unwrap();
        answers.insert(item, fetched);
    }
    let brought = answers.remove(&0).unwrap().unwrap();
    assert_eq!(*brought, *bytes(1, 3 << 20));
    assert_eq!(brought.source(), LeaseSource::Peer(a.node.id()));
    assert_eq!(brought.info().origin.producer.as_str(), "test", "the first producer stays");
    assert_eq!(code(&answers.remove(&1).unwrap().unwrap_err()), Some(Code::Miss));
    // It is here now: the next fetch does not need the peer.
    a.stop().await;
    let mut again = local.fetch(&fetch).await.unwrap();
    let first = again.next().await.unwrap().unwrap();
    assert_eq!(first.1.unwrap().source(), LeaseSource::Local);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_fetches_its_own_parts_from_a_peer_and_nobody_elses() {
    let (a, b) = (TestNode::start(1, 16 << 20).await, TestNode::start(2, 16 << 20).await);
    let acme = Identity { tenant: "acme".parse().unwrap(), ..Identity::client("test") };
    let to_a = Connection::connect(&a.address.to_string(), &acme).await.unwrap();
    put(&to_a, 1, 100_000).await.unwrap();
    put(&a.tcp().await, 2, 100_000).await.unwrap();
    let of_a = NodeAddress {
        node: a.node.id(),
        incarnation: Incarnation(1),
        address: a.address.to_string(),
    };
    let sources: larder_client::locations::Sources = Arc::new([Arc::new(of_a)]);
    for n in [1, 2] {
        b.node.locations.put(acme.tenant.id(), model(), &part(n).key, Arc::clone(&sources));
    }
    let local = LocalSession::connect(&b.socket, &acme).await.unwrap();
    let parts = vec![(part(1).key, PartNumber(0)), (part(2).key, PartNumber(0))];
    let fetch = FetchRequest { model: model(), parts, deadline: LONG, class: Class::Demand };
    let mut stream = local.fetch(&fetch).await.unwrap();
    while let Some(answer) = stream.next().await {
        match answer.unwrap() {
            (0, fetched) => assert_eq!(*fetched.unwrap(), *bytes(1, 100_000)),
            (_, fetched) => assert_eq!(code(&fetched.unwrap_err()), Some(Code::Miss)),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_restarted_under_its_old_address_is_not_mistaken_for_its_former_life() {
    let a = TestNode::with_limits(1, 2, 16 << 20, Limits::default()).await;
    put(&a.tcp().await, 1, 100_000).await.unwrap();
    let former = NodeAddress {
        node: a.node.id(),
        incarnation: Incarnation(1),
        address: a.address.to_string(),
    };
    let peers = Peers::new(Identity::client("test"));
    assert!(matches!(
        peers.connection(&TenantName::default(), &former).await,
        Err(TransferError::OtherPeer(_))
    ));
    let current = NodeAddress { incarnation: Incarnation(2), ..former };
    assert!(peers.connection(&TenantName::default(), &current).await.is_ok());
}
