//! Peers that speak frames by hand, and one that damages what it hands on.

use super::*;

pub(super) fn raw_hello() -> larder_proto::frame::Hello {
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
pub(super) struct RawPeer {
    pub(super) stream: TcpStream,
}

impl RawPeer {
    pub(super) async fn connect(address: SocketAddr) -> Self {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let hello = raw_hello();
        let op = larder_proto::frame::Op::Hello;
        stream.write_all(&frame(op, 1, 0, &hello, &[])).await.unwrap();
        let mut raw = Self { stream };
        assert_eq!(raw.answer().await.0.op, larder_proto::frame::Op::HelloOk);
        raw
    }

    pub(super) async fn answer(&mut self) -> (larder_proto::frame::Header, Vec<u8>) {
        let mut head = [0; larder_proto::frame::HEADER_LEN];
        self.stream.read_exact(&mut head).await.unwrap();
        let header = larder_proto::frame::Header::decode(&head).unwrap();
        let mut body = vec![0; header.body_len as usize];
        self.stream.read_exact(&mut body).await.unwrap();
        (header, body)
    }

    pub(super) async fn question(
        mut self,
        op: larder_proto::frame::Op,
        request: u64,
        body: &impl larder_proto::wire::Wire,
    ) -> (larder_proto::frame::Header, Vec<u8>) {
        self.stream.write_all(&frame(op, request, 0, body, &[])).await.unwrap();
        self.answer().await
    }

    pub(super) async fn ask(
        &mut self,
        op: larder_proto::frame::Op,
        request: u64,
        body: &impl larder_proto::wire::Wire,
    ) {
        self.stream.write_all(&frame(op, request, 0, body, &[])).await.unwrap();
        assert_eq!(self.answer().await.0.op, larder_proto::frame::Op::Granted);
    }

    pub(super) async fn data(&mut self, request: u64, payload: &[u8]) {
        let empty = larder_proto::frame::Empty {};
        let op = larder_proto::frame::Op::Data;
        self.stream.write_all(&frame(op, request, 0, &empty, payload)).await.unwrap();
    }
}

pub(super) fn frame(
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
pub(super) struct FlippingProxy {
    pub(super) address: SocketAddr,
    _tasks: JoinSet<()>,
}

impl FlippingProxy {
    pub(super) async fn start(to: SocketAddr, flip_at: usize) -> Self {
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
