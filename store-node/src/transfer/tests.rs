use super::*;
use crate::{
    catalog::{Catalog, PartRead, Watermarks},
    eviction::Lru,
    inventory::{ChangeLog, PartSets},
    tiers::dram::Arena,
};
use larder_client::{
    connection::{Buffer, Connection, Identity, PutOutcome},
    error::TransferError,
    local::{FetchRequest, LeaseSource, LocalSession, PartAttributes},
    masters::Masters,
    peers::{NodeAddress, Peers},
};
use larder_proto::{
    BlockKey, ContentFingerprint, LayoutFingerprint, ModelVersion, PartName, PartNumber,
    checksum::{ChunkSums, DEFAULT_CHUNK},
    frame::{Class, Code, Codec, Lookup, Read, Reserve, Role},
    ids::{Incarnation, NodeId, TenantName},
    part::PartRef,
};
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

const LONG: Duration = Duration::from_secs(20);

/// A node with real sockets, without masters; everything ends when it is dropped.
struct TestNode {
    node: Arc<Node>,
    address: SocketAddr,
    socket: PathBuf,
    stop: CancellationToken,
    tasks: JoinSet<()>,
    _dir: tempfile::TempDir,
}

impl TestNode {
    async fn start(id: u8, arena_bytes: usize) -> Self {
        Self::with_limits(id, 1, arena_bytes, Limits::default()).await
    }

    async fn with_limits(id: u8, life: u64, arena_bytes: usize, limits: Limits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("node.sock");
        let arena = Arena::new(arena_bytes, |_| ()).unwrap();
        let log = Arc::new(ChangeLog::new(Arc::new(PartSets::new(64)), 1024));
        let watermarks = Watermarks { high: 1.0, low: 0.9 };
        let incarnation = Incarnation(life);
        let catalog = Catalog::new(incarnation, arena, Box::new(Lru::default()), watermarks, log);
        let identity = Identity { role: Role::Node, ..Identity::client("peer") };
        let (masters, peers) = (Masters::new(&[]).unwrap(), Peers::new(identity));
        let id = NodeId::from_bytes([id; 16]);
        let node = Node::new(id, limits, catalog, None, masters, peers);
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        for listener in [Listener::Tcp(tcp), Listener::unix(&socket).unwrap()] {
            tasks.spawn(serve(Arc::clone(&node), listener, stop.clone()));
        }
        Self { node, address, socket, stop, tasks, _dir: dir }
    }

    async fn tcp(&self) -> Connection {
        Connection::connect(&self.address.to_string(), &Identity::client("test")).await.unwrap()
    }

    async fn local(&self) -> LocalSession {
        LocalSession::connect(&self.socket, &Identity::client("engine")).await.unwrap()
    }

    fn held(&self, n: u8) -> Option<PartRead> {
        self.node.catalog().read(&name(n))
    }

    async fn stop(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

fn content() -> ContentFingerprint {
    ContentFingerprint::from_bytes([5; 32])
}

fn model() -> ModelVersion {
    ModelVersion { content: content(), layout: LayoutFingerprint::from_bytes([6; 32]) }
}

fn part(n: u8) -> PartRef {
    let key = BlockKey::from_bytes([n; 32]);
    PartRef { key, layout: model().layout, part: PartNumber(0) }
}

fn name(n: u8) -> PartName {
    PartName { tenant: TenantName::default().id(), part: part(n) }
}

/// Bytes made from key and offset, so that foreign, old or cut bytes are recognised.
fn bytes(n: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| n ^ i.to_le_bytes()[0] ^ i.to_le_bytes()[1]).collect()
}

fn reserve(n: u8, len: usize) -> Reserve {
    Reserve {
        part: part(n),
        len: len as u64,
        codec: Codec::Raw,
        chunk_len: DEFAULT_CHUNK,
        content: content(),
        root: part(n).key,
        parent: None,
        origin_hash: None,
    }
}

async fn put(connection: &Connection, n: u8, len: usize) -> Result<PutOutcome, TransferError> {
    let payload = bytes(n, len);
    let sums = ChunkSums::of(&payload, DEFAULT_CHUNK);
    connection.put(&reserve(n, len), payload.into(), || sums).await
}

fn whole(n: u8) -> Read {
    Read {
        part: part(n),
        offset: 0,
        len: u64::MAX,
        generation: None,
        class: Class::Demand,
        verify: false,
        content: content(),
    }
}

async fn get(connection: &Connection, read: &Read) -> Result<Vec<u8>, TransferError> {
    let land =
        |ok: &larder_proto::frame::ReadOk| Ok(Buffer::new(Vec::new(), ok.len.try_into().unwrap()));
    Ok(connection.read(read, land).await?.0.into_bytes())
}

fn code(error: &TransferError) -> Option<Code> {
    match error {
        TransferError::Refused { code, .. } => Some(*code),
        _ => None,
    }
}

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
        let sums = ChunkSums::of(&[], DEFAULT_CHUNK);
        let refused = tcp.put(&wish, bytes::Bytes::new(), || sums).await.unwrap_err();
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
    let tcp = node.tcp().await;
    let mut sums = ChunkSums::of(&bytes(1, 500_000), DEFAULT_CHUNK);
    sums.sums[1] ^= 1;
    let refused =
        tcp.put(&reserve(1, 500_000), bytes(1, 500_000).into(), || sums).await.unwrap_err();
    assert_eq!(code(&refused), Some(Code::Damaged));
    assert!(node.held(1).is_none());
    assert_eq!(node.node.catalog().arena().used_bytes(), 0);
}

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

/// Polls a condition that other tasks bring about; fails after long.
async fn wait_until(condition: impl Fn() -> bool) {
    let poll = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, poll).await.expect("the condition never came true");
}

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_that_is_not_committed_in_time_gives_its_name_and_space_back() {
    let limits = Limits { write_deadline: Duration::from_millis(30), ..Limits::default() };
    let node = TestNode::with_limits(1, 1, 16 << 20, limits).await;
    let mut stalled = RawPeer::connect(node.address).await;
    stalled.ask(larder_proto::frame::Op::Reserve, 2, &reserve(1, 100_000)).await;
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
        writer.ask(larder_proto::frame::Op::Reserve, 2, &reserve(1, 100_000)).await;
        writer.data(2, &bytes(1, 100_000)[..cut]).await;
        assert!(node.held(1).is_none());
        drop(writer);
        wait_until(|| node.node.catalog().arena().used_bytes() == 0).await;
    }
    assert!(matches!(put(&node.tcp().await, 1, 100_000).await, Ok(PutOutcome::Stored(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_peer_is_given_up_and_a_lively_one_is_not() {
    let limits = Limits { silence: Duration::from_millis(120), ..Limits::default() };
    let node = TestNode::with_limits(1, 1, 16 << 20, limits).await;
    let lively = node.tcp().await;
    let mut silent = RawPeer::connect(node.address).await;
    // Both said hello; only one goes on asking, by itself, whether the other end is there.
    let closed = timeout(LONG, silent.stream.read(&mut [0; 1])).await.expect("closed in time");
    assert!(matches!(closed, Ok(0) | Err(_)));
    assert!(!lively.is_closed());
    assert_eq!(code(&get(&lively, &whole(1)).await.unwrap_err()), Some(Code::Miss));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_open_connection_ends_for_the_asker_within_the_limit_of_silence() {
    let empty = larder_proto::frame::Empty {};
    let late = frame(larder_proto::frame::Op::Data, 77, 0, &empty, &[7; 1000]);
    // Nothing after the hello, and half of a frame that is thrown away.
    for said in [&[][..], &late[..late.len() / 2]] {
        half_open_connection_ends(said.to_vec()).await;
    }
}

/// A peer that accepts, says hello and `said`, and then nothing, as a host that vanished would.
async fn half_open_connection_ends(said: Vec<u8>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut dead = JoinSet::new();
    dead.spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = [0; larder_proto::frame::HEADER_LEN];
        stream.read_exact(&mut head).await.unwrap();
        let header = larder_proto::frame::Header::decode(&head).unwrap();
        stream.read_exact(&mut vec![0; header.body_len as usize]).await.unwrap();
        let ok = larder_proto::frame::HelloOk {
            version: 1,
            features: 0,
            node: NodeId::from_bytes([1; 16]),
            incarnation: Incarnation(1),
            tenant_slot: 0,
            requests_limit: 4,
            silence_limit_ms: 150,
        };
        stream.write_all(&frame(larder_proto::frame::Op::HelloOk, 1, 0, &ok, &[])).await.unwrap();
        stream.write_all(&said).await.unwrap();
        std::future::pending::<()>().await;
    });
    let connection = Connection::connect(&address, &Identity::client("test")).await.unwrap();
    let ended = timeout(LONG, get(&connection, &whole(1))).await.expect("ends by itself");
    assert!(matches!(ended, Err(TransferError::Silent(_))), "{ended:?}");
    wait_until(|| connection.is_closed()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bits_flipped_on_the_wire_never_reach_the_reader() {
    let node = TestNode::start(1, 16 << 20).await;
    put(&node.tcp().await, 1, 400_000).await.unwrap();
    for at in [3, 30, 61, 70, 100, 200, 1_000, 399_999] {
        let proxy = FlippingProxy::start(node.address, at).await;
        let identity = Identity::client("test");
        let read = async {
            let connection = Connection::connect(&proxy.address.to_string(), &identity).await?;
            get(&connection, &whole(1)).await
        };
        match timeout(LONG, read).await.expect("ends") {
            // A flip in the hello's reserved or harmless fields may change nothing that matters.
            Ok(read) => assert_eq!(read, bytes(1, 400_000), "flipped at {at}"),
            Err(error) => assert_ne!(code(&error), Some(Code::Miss), "{error}"),
        }
    }
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
async fn frames_out_of_place_end_their_connection_and_no_other() {
    use larder_proto::frame::{Empty, HEADER_LEN, Op};
    let node = TestNode::start(1, 16 << 20).await;
    let good = node.tcp().await;
    put(&good, 1, 1000).await.unwrap();
    let refusals: [Vec<u8>; 4] = [
        b"GET / HTTP/1.1\r\nHost: larder\r\n\r\n................................................"
            .to_vec(),
        frame(Op::Committed, 2, 0, &Empty {}, &[]),
        frame(Op::Ping, 2, 99, &Empty {}, &[]),
        vec![0xff; HEADER_LEN * 2],
    ];
    for rubbish in refusals {
        let mut bad = RawPeer::connect(node.address).await;
        bad.stream.write_all(&rubbish).await.unwrap();
        let mut rest = Vec::new();
        let end = timeout(LONG, bad.stream.read_to_end(&mut rest)).await;
        assert!(end.is_ok(), "the connection has to end");
    }
    let remote = RawPeer::connect(node.address).await;
    let answer = remote.question(Op::Attach, 5, &Empty {}).await;
    assert_eq!(answer.0.op, Op::Failed, "the arena is for this host's processes");
    assert_eq!(get(&good, &whole(1)).await.unwrap(), bytes(1, 1000));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_computes_other_keys_or_speaks_no_common_version_is_told_so_at_hello() {
    let node = TestNode::start(1, 16 << 20).await;
    let other_keys = larder_proto::frame::Hello {
        key_check: larder_proto::block_key::KeyPrefix::from_bytes([0; 16]),
        ..raw_hello()
    };
    let other_version =
        larder_proto::frame::Hello { version_min: 7, version_max: 9, ..raw_hello() };
    for (hello, word) in [(other_keys, "block keys"), (other_version, "speaks")] {
        let mut raw = RawPeer { stream: TcpStream::connect(node.address).await.unwrap() };
        let op = larder_proto::frame::Op::Hello;
        raw.stream.write_all(&frame(op, 1, 0, &hello, &[])).await.unwrap();
        let (header, body) = raw.answer().await;
        assert_eq!(header.op, larder_proto::frame::Op::Failed);
        let failed: larder_proto::frame::Failed =
            larder_proto::frame::decode_body("failed", &body).unwrap();
        assert_eq!(failed.code, Code::Version);
        assert!(failed.reason.as_str().contains(word), "{:?}", failed.reason);
    }
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

fn raw_hello() -> larder_proto::frame::Hello {
    larder_proto::frame::Hello {
        version_min: 1,
        version_max: 1,
        features: 0,
        role: Role::Client,
        key_check: larder_proto::block_key::self_check(),
        tenant: TenantName::default(),
        capability: larder_proto::wire::ShortBytes::default(),
        producer: larder_proto::wire::ShortText::cut("raw"),
        producer_incarnation: Incarnation(1),
    }
}

/// A peer that speaks frames by hand.
struct RawPeer {
    stream: TcpStream,
}

impl RawPeer {
    async fn connect(address: SocketAddr) -> Self {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let hello = raw_hello();
        let op = larder_proto::frame::Op::Hello;
        stream.write_all(&frame(op, 1, 0, &hello, &[])).await.unwrap();
        let mut raw = Self { stream };
        assert_eq!(raw.answer().await.0.op, larder_proto::frame::Op::HelloOk);
        raw
    }

    async fn answer(&mut self) -> (larder_proto::frame::Header, Vec<u8>) {
        let mut head = [0; larder_proto::frame::HEADER_LEN];
        self.stream.read_exact(&mut head).await.unwrap();
        let header = larder_proto::frame::Header::decode(&head).unwrap();
        let mut body = vec![0; header.body_len as usize];
        self.stream.read_exact(&mut body).await.unwrap();
        (header, body)
    }

    async fn question(
        mut self,
        op: larder_proto::frame::Op,
        request: u64,
        body: &impl larder_proto::wire::Wire,
    ) -> (larder_proto::frame::Header, Vec<u8>) {
        self.stream.write_all(&frame(op, request, 0, body, &[])).await.unwrap();
        self.answer().await
    }

    async fn ask(
        &mut self,
        op: larder_proto::frame::Op,
        request: u64,
        body: &impl larder_proto::wire::Wire,
    ) {
        self.stream.write_all(&frame(op, request, 0, body, &[])).await.unwrap();
        assert_eq!(self.answer().await.0.op, larder_proto::frame::Op::Granted);
    }

    async fn data(&mut self, request: u64, payload: &[u8]) {
        let empty = larder_proto::frame::Empty {};
        let op = larder_proto::frame::Op::Data;
        self.stream.write_all(&frame(op, request, 0, &empty, payload)).await.unwrap();
    }
}

fn frame(
    op: larder_proto::frame::Op,
    request: u64,
    tenant_slot: u32,
    body: &impl larder_proto::wire::Wire,
    payload: &[u8],
) -> Vec<u8> {
    let body = body.to_wire();
    let header = larder_proto::frame::Header {
        payload_len: u32::try_from(payload.len()).unwrap(),
        ..larder_proto::frame::Header::new(
            op,
            request,
            tenant_slot,
            u32::try_from(body.len()).unwrap(),
        )
    };
    [&header.encode()[..], &body, payload].concat()
}

/// Hands bytes on and flips one bit of what the node answers.
struct FlippingProxy {
    address: SocketAddr,
    _tasks: JoinSet<()>,
}

impl FlippingProxy {
    async fn start(to: SocketAddr, flip_at: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let (client, _) = listener.accept().await.unwrap();
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_node, mut to_node) = TcpStream::connect(to).await.unwrap().into_split();
            let up = async { _ = tokio::io::copy(&mut from_client, &mut to_node).await };
            let down = async {
                let (mut seen, mut buffer) = (0, vec![0; 65_536]);
                while let Ok(n @ 1..) = from_node.read(&mut buffer).await {
                    if (seen..seen + n).contains(&flip_at) {
                        buffer[flip_at - seen] ^= 0x20;
                    }
                    seen += n;
                    if to_client.write_all(&buffer[..n]).await.is_err() {
                        return;
                    }
                }
                let _ = to_client.shutdown().await;
            };
            tokio::join!(up, down);
        });
        Self { address, _tasks: tasks }
    }
}
