//! Readers in place, their leases and fetches.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_local_reader_reads_in_place_and_what_it_puts_is_seen_by_peers() {
    let node = TestNode::start(1, 16 << 20).await;
    let (tcp, local) = (node.tcp().await, node.local().await);
    let attributes =
        PartAttributes { content: content(), root: part(1).key, parent: None, origin_hash: None };
    let stored = local.put(part(1), &attributes, &bytes(1, 300_001)).await.unwrap();
    assert!(matches!(stored, PutOutcome::Stored(_)));
    assert_eq!(get(&tcp, &whole(1)).await.unwrap(), bytes(1, 300_001));
    let leased = local.lease(part(1)).await.unwrap().unwrap();
    assert_eq!(*leased, *bytes(1, 300_001));
    assert_eq!(leased.source(), LeaseSource::Local);
    assert_eq!(node.node.leases().count(), 1);
    assert!(local.lease(part(2)).await.unwrap().is_none());
    drop(leased);
    // The release travels on the same connection as this question, before it.
    local.stored(model().layout, PartNumber(0), vec![part(1).key]).await.unwrap();
    assert_eq!(node.node.leases().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_that_is_dropped_at_any_point_leaves_no_lease_behind() {
    let node = TestNode::start(1, 16 << 20).await;
    let (tcp, local) = (node.tcp().await, node.local().await);
    for n in 0..20 {
        put(&tcp, n, 100_000).await.unwrap();
    }
    let parts: Vec<_> = (0..40).map(|n| (part(n).key, PartNumber(0))).collect();
    for taken in 0..20 {
        let fetch = FetchRequest {
            model: model(),
            parts: parts.clone(),
            deadline: LONG,
            class: Class::Demand,
        };
        let mut stream = local.fetch(&fetch).await.unwrap();
        let mut leases = Vec::new();
        for _ in 0..taken {
            let (item, fetched) = stream.next().await.unwrap().unwrap();
            if let Ok(lease) = fetched {
                assert_eq!(*lease, *bytes(u8::try_from(item).unwrap(), 100_000));
                leases.push(lease);
            }
        }
        drop(stream);
        // A lease whose question is dropped before its answer is released as well.
        let _ = timeout(Duration::ZERO, local.lease(part(1))).await;
    }
    wait_until(|| node.node.leases().count() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_lost_its_socket_keeps_its_space_until_its_process_is_gone() {
    let node = TestNode::start(1, 4 << 20).await;
    let tcp = node.tcp().await;
    put(&tcp, 1, 3 << 20).await.unwrap();
    let mut process = tokio::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let pid = i32::try_from(process.id().unwrap()).unwrap();
    let reader = Reader { connection: 77, pid, name: "engine".into() };
    let read = node.held(1).unwrap();
    let leases = node.node.leases();
    leases.lease(&reader, name(1), read).unwrap();
    node.node.keep_until_gone(&reader, Process::open(pid).unwrap());
    wait_until(|| leases.quarantined_bytes() == 3 << 20).await;
    let refused = put(&tcp, 2, 3 << 20).await.unwrap_err();
    assert_eq!(code(&refused), Some(Code::Full), "the space is still read");
    process.kill().await.unwrap();
    wait_until(|| leases.count() == 0).await;
    assert!(matches!(put(&tcp, 2, 3 << 20).await.unwrap(), PutOutcome::Stored(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_and_fetches_that_are_dropped_together_with_their_session_are_released() {
    let node = TestNode::start(1, 16 << 20).await;
    let tcp = node.tcp().await;
    for n in 0..20 {
        put(&tcp, n, 100_000).await.unwrap();
    }
    for taken in 0..20 {
        let local = node.local().await;
        let mut leases = Vec::new();
        for n in 0..3 {
            leases.push(local.lease(part(n)).await.unwrap().unwrap());
        }
        let parts = (0..20).map(|n| (part(n).key, PartNumber(0))).collect();
        let fetch = FetchRequest { model: model(), parts, deadline: LONG, class: Class::Demand };
        let mut stream = local.fetch(&fetch).await.unwrap();
        drop(local);
        for _ in 0..taken {
            leases.push(stream.next().await.unwrap().unwrap().1.unwrap());
        }
        // Which of them is the last handle must not matter.
        match taken % 2 {
            0 => drop((leases, stream)),
            _ => drop((stream, leases)),
        }
        wait_until(|| node.node.leases().count() == 0).await;
    }
}
