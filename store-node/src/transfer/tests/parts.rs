//! Parts put, read and cancelled over the data plane.

use super::{raw::RawPeer, *};
use larder_proto::frame::{
    Commit, Failed, KEYS_LIMIT, Op, Priority, ReuseHint, SessionState, decode_body,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_every_size_come_back_as_they_were_put_over_tcp_and_unix() {
    let node = TestNode::start(1, 64 << 20).await;
    let unix = Socket::Unix(tokio::net::UnixStream::connect(&node.socket).await.unwrap());
    let unix = Connection::open(unix, &Identity::client("test")).await.unwrap();
    let tcp = node.tcp().await;
    let sizes = [1, 4095, 4096, 65_536, (1 << 20) - 1, (1 << 20) + 1, (9 << 20) + 3];
    for (n, len) in (1u8..).zip(sizes) {
        let writer = if n % 2 == 0 { &tcp } else { &unix };
        assert!(matches!(put(writer, n, len).await.unwrap(), PutOutcome::Stored(_)));
        assert!(matches!(put(writer, n, len).await.unwrap(), PutOutcome::Exists(_)));
        for reader in [&tcp, &unix] {
            assert_eq!(get(reader, &whole(n)).await.unwrap(), bytes(n, len), "{len} bytes");
        }
    }
    let missing = get(&tcp, &whole(99)).await.unwrap_err();
    assert_eq!(code(&missing), Some(Code::Miss));
    let keys = [1, 99, 2].map(|n| part(n).key).to_vec();
    let lookup = Lookup { layout: model().layout, part: PartNumber(0), keys };
    let tiers = tcp.lookup(&lookup).await.unwrap();
    assert_eq!(tiers.iter().map(|t| t.is_empty()).collect::<Vec<_>>(), [false, true, false]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hint_is_taken_and_is_no_use_of_a_part() {
    let node = TestNode::start(1, 2 << 20).await;
    let tcp = node.tcp().await;
    for n in 1..=8 {
        put(&tcp, n, 256 << 10).await.unwrap();
    }
    for n in [1, 2] {
        get(&tcp, &whole(n)).await.unwrap();
    }
    let hint = |keys| ReuseHint {
        layout: model().layout,
        keys,
        session: SessionState::Closed,
        priority: Priority::Normal,
        retention_s: 0,
    };
    let blocks = tcp.hint(&hint(vec![part(1).key, part(2).key])).await.unwrap();
    assert_eq!(blocks, Some(2));
    put(&tcp, 9, 256 << 10).await.unwrap();
    let left: Vec<u8> = (1..=9).filter(|n| node.held(*n).is_some()).collect();
    assert_eq!(left, [3, 4, 5, 6, 7, 8, 9], "not 3 and 4, which lru would take");

    let too_many = hint(vec![part(1).key; KEYS_LIMIT + 1]);
    assert_eq!(code(&tcp.hint(&too_many).await.unwrap_err()), Some(Code::Limit));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_range_is_verified_by_itself_and_bad_ranges_are_refused() {
    let node = TestNode::start(1, 16 << 20).await;
    let tcp = node.tcp().await;
    let len = (1 << 20) + 77;
    put(&tcp, 1, len).await.unwrap();
    let chunk = u64::from(DEFAULT_CHUNK);
    let all = bytes(1, len);
    for (offset, asked) in [(0, chunk), (chunk, 2 * chunk), (4 * chunk, u64::MAX)] {
        let read = Read { offset, len: asked, ..whole(1) };
        let from = usize::try_from(offset).unwrap();
        let to = len.min(from.saturating_add(usize::try_from(asked).unwrap()));
        assert_eq!(get(&tcp, &read).await.unwrap(), all[from..to]);
    }
    // Lengths at and beyond every limit (F54): a typed answer, and the connection goes on.
    for (offset, asked) in [(1, chunk), (0, 5), (u64::MAX, 2), (chunk, u64::MAX - 1), (0, 1 << 63)]
    {
        let refused = get(&tcp, &Read { offset, len: asked, ..whole(1) }).await.unwrap_err();
        assert_eq!(code(&refused), Some(Code::Limit), "{offset}+{asked}");
    }
    for len in [0, (1 << 30) + 1, u64::MAX] {
        let wish = Reserve { len, ..reserve(2, 0) };
        let refused = tcp.put(&wish, bytes::Bytes::new()).await.unwrap_err();
        assert_eq!(code(&refused), Some(Code::Limit), "a part of {len} bytes");
    }
    assert_eq!(get(&tcp, &whole(1)).await.unwrap(), all);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_at_once_on_one_connection_each_get_their_own_bytes() {
    let node = TestNode::start(1, 64 << 20).await;
    let tcp = node.tcp().await;
    for n in 0..32 {
        put(&tcp, n, 10_000 + usize::from(n) * 40_000).await.unwrap();
    }
    let mut reads = JoinSet::new();
    for round in 0..8 {
        for n in 0..32u8 {
            let (tcp, n) = (tcp.clone(), n.wrapping_add(round) % 32);
            reads.spawn(async move { (n, get(&tcp, &whole(n)).await.unwrap()) });
        }
    }
    while let Some(read) = reads.join_next().await {
        let (n, read) = read.unwrap();
        assert_eq!(read, bytes(n, 10_000 + usize::from(n) * 40_000));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bit_flipped_in_the_arena_is_found_withdrawn_and_replaced_by_a_put() {
    let node = TestNode::start(1, 16 << 20).await;
    let (tcp, local) = (node.tcp().await, node.local().await);
    put(&tcp, 1, 700_000).await.unwrap();
    let leased = local.lease(part(1)).await.unwrap().unwrap();
    assert_eq!(leased.verify(), Ok(()));
    node.held(1).unwrap().copy_for_damage().flip_bit(300_000);
    // The receiver of a transfer finds it, and so does a check on demand.
    assert!(matches!(get(&tcp, &whole(1)).await, Err(TransferError::Damaged(d)) if d.chunk == 1));
    assert!(leased.verify().is_err());
    // Asked to verify, the node withdraws its copy before it answers.
    let asked = get(&tcp, &Read { verify: true, ..whole(1) }).await.unwrap_err();
    assert_eq!(code(&asked), Some(Code::Damaged));
    assert_eq!(code(&get(&tcp, &whole(1)).await.unwrap_err()), Some(Code::Miss));
    assert!(matches!(put(&tcp, 1, 700_000).await.unwrap(), PutOutcome::Stored(_)));
    assert_eq!(get(&tcp, &whole(1)).await.unwrap(), bytes(1, 700_000));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_whose_bytes_are_not_those_it_summed_publishes_nothing() {
    let node = TestNode::start(1, 16 << 20).await;
    let mut sums = ChunkSums::of(&bytes(1, 500_000), DEFAULT_CHUNK);
    sums.sums[1] ^= 1;
    let mut writer = RawPeer::connect(node.address).await;
    writer.ask(Op::Reserve, 2, &reserve(1, 500_000)).await;
    writer.data(2, &bytes(1, 500_000)).await;
    let (_, body) = writer.question(Op::Commit, 2, &Commit { sums }).await;
    let failed: Failed = decode_body("failed", &body).unwrap();
    assert_eq!(failed.code, Code::Damaged);
    assert!(node.held(1).is_none());
    assert_eq!(node.node.catalog().arena().used_bytes(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_that_is_not_committed_in_time_gives_its_name_and_space_back() {
    let limits = Limits { write_deadline: Duration::from_millis(30), ..Limits::default() };
    let node = TestNode::with_limits(1, 1, 16 << 20, limits).await;
    let mut stalled = RawPeer::connect(node.address).await;
    stalled.ask(Op::Reserve, 2, &reserve(1, 100_000)).await;
    let tcp = node.tcp().await;
    let meanwhile = put(&tcp, 1, 100_000).await;
    assert!(meanwhile.is_ok(), "in progress or, once the time was up, stored: {meanwhile:?}");
    wait_until(|| node.node.catalog().writes_in_progress(tokio::time::Instant::now()).is_empty())
        .await;
    let stored = put(&tcp, 1, 100_000).await.unwrap();
    assert!(matches!(stored, PutOutcome::Stored(_) | PutOutcome::Exists(_)));
    assert_eq!(get(&tcp, &whole(1)).await.unwrap(), bytes(1, 100_000));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_that_vanishes_in_mid_write_leaves_nothing() {
    let node = TestNode::start(1, 16 << 20).await;
    for cut in [0, 1, 70_000] {
        let mut writer = RawPeer::connect(node.address).await;
        writer.ask(Op::Reserve, 2, &reserve(1, 100_000)).await;
        writer.data(2, &bytes(1, 100_000)[..cut]).await;
        assert!(node.held(1).is_none());
        drop(writer);
        wait_until(|| node.node.catalog().arena().used_bytes() == 0).await;
    }
    assert!(matches!(put(&node.tcp().await, 1, 100_000).await, Ok(PutOutcome::Stored(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_do_not_see_each_others_parts() {
    let node = TestNode::start(1, 16 << 20).await;
    put(&node.tcp().await, 1, 1000).await.unwrap();
    let other = Identity { tenant: "other".parse().unwrap(), ..Identity::client("test") };
    let other = Connection::connect(&node.address.to_string(), &other).await.unwrap();
    let of_theirs = get(&other, &whole(1)).await.unwrap_err();
    let of_nobody = get(&other, &whole(2)).await.unwrap_err();
    assert_eq!(of_theirs, of_nobody, "identical to a miss");
    assert!(matches!(put(&other, 1, 1000).await.unwrap(), PutOutcome::Stored(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_cancels_leave_no_lease_put_buffer_or_task() {
    use rand::{RngExt, SeedableRng};
    let seed = 20_261_130;
    println!("seed {seed}");
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let node = TestNode::start(1, 32 << 20).await;
    let (tcp, local) = (node.tcp().await, node.local().await);
    for n in 0..16 {
        put(&tcp, n, 200_000).await.unwrap();
    }
    for _ in 0..400 {
        let n: u8 = rng.random_range(0..64);
        let patience = Duration::from_micros(rng.random_range(0..400));
        match rng.random_range(0..4) {
            0 => _ = timeout(patience, get(&tcp, &whole(n))).await,
            1 => _ = timeout(patience, put(&tcp, n, 150_000)).await,
            2 => _ = timeout(patience, local.lease(part(n))).await,
            _ => {
                let parts = (n..n + 8).map(|n| (part(n).key, PartNumber(0))).collect();
                let fetch =
                    FetchRequest { model: model(), parts, deadline: LONG, class: Class::Prefetch };
                let all = async {
                    let mut stream = local.fetch(&fetch).await.unwrap();
                    while stream.next().await.is_some() {}
                };
                _ = timeout(patience, all).await;
            }
        }
    }
    let now = tokio::time::Instant::now;
    wait_until(|| node.node.leases().count() == 0).await;
    wait_until(|| node.node.catalog().writes_in_progress(now()).is_empty()).await;
    let mut stored = 0;
    node.node.catalog().for_each_part(|part, read| {
        assert_eq!(read.bytes(), bytes(part.part.key.as_bytes()[0], read.bytes().len()));
        stored += read.bytes().len().next_multiple_of(4096) as u64;
    });
    assert_eq!(node.node.catalog().arena().used_bytes(), stored);
    wait_until(|| tcp.idle_slots() == node.node.limits().requests as usize).await;
}
