//! Frames and connections that go wrong.

use super::{
    raw::{FlippingProxy, RawPeer, frame, raw_hello},
    *,
};

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
    let hint = larder_proto::frame::ReuseHint {
        layout: model().layout,
        keys: Vec::new(),
        session: larder_proto::frame::SessionState::Closed,
        priority: larder_proto::frame::Priority::Normal,
        retention_s: 0,
    };
    assert_eq!(connection.hint(&hint).await.unwrap(), None, "not sent to a peer that has no hints");
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
