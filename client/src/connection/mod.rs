//! One data-plane connection: pipelined, multiplexed, verified, watched.
//!
//! A [`Connection`] is a handle; a task of its own (`driver`) owns the socket and everything in
//! flight. Requests may be answered in any order. Bytes of a read land in a buffer that the driver owns
//! until they are all there and verified, so dropping the future of a request never leaves a buffer
//! behind that somebody still writes (P10): the request is cancelled, what still comes is thrown away.
//!
//! A peer that says nothing is asked (`Ping`), and given up after its limit of silence, so a half-open
//! connection ends within seconds and not after the retries of TCP (F19).

mod driver;
mod incoming;
mod outgoing;
mod socket;
mod spin;

pub use incoming::{Incoming, ReadError};
pub use outgoing::Outgoing;
pub use socket::{Socket, receive_with_fds, send_with_fds, tune};
pub use spin::Spin;

use crate::error::TransferError;
use bytes::Bytes;
use driver::{Answer, Command, Driver, Put, Request, Upload};
use larder_proto::{
    block_key,
    frame::{
        Code, Committed, Failed, HEADER_LEN, Header, Hello, HelloOk, Hinted, InProgress, Leased,
        Lookup, LookupOk, Op, Read, ReadOk, Reserve, ReuseHint, Role, VERSION, decode_body,
        features,
    },
    ids::{Generation, Incarnation, NodeId, TenantName},
    part::TierSet,
    wire::{ShortBytes, ShortText, Wire},
};
use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::Interest,
    net::TcpStream,
    sync::{Semaphore, mpsc, oneshot},
    task::JoinSet,
    time::timeout,
};

/// Who opens a connection, and for whom.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Client or node.
    pub role: Role,
    /// Whose parts.
    pub tenant: TenantName,
    /// What proves it; empty where tenants are not authenticated.
    pub capability: Vec<u8>,
    /// The principal recorded as producer of what is put.
    pub producer: String,
    /// Its life.
    pub producer_incarnation: Incarnation,
}

impl Identity {
    /// A client of the default tenant.
    pub fn client(producer: impl Into<String>) -> Self {
        Self {
            role: Role::Client,
            tenant: TenantName::default(),
            capability: Vec::new(),
            producer: producer.into(),
            producer_incarnation: Incarnation::at_start(None),
        }
    }

    fn hello(&self) -> Result<Hello, TransferError> {
        Ok(Hello {
            version_min: VERSION,
            version_max: VERSION,
            features: features::ALL,
            role: self.role,
            key_check: block_key::self_check(),
            tenant: self.tenant.clone(),
            capability: ShortBytes::new(self.capability.clone())?,
            producer: ShortText::cut(&self.producer),
            producer_incarnation: self.producer_incarnation,
        })
    }
}

/// How long connecting and the hello may take.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(3);

/// Where the bytes of a read land: an owned buffer of exactly the range's length.
pub trait Landing: Send + 'static {
    /// The bytes that are not filled yet.
    fn spare(&mut self) -> &mut [u8];
    /// The next `n` bytes of [`Self::spare`] are filled, and verified once their chunk is complete.
    fn advance(&mut self, n: usize);
    /// The landing itself, to hand it back as what it was.
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// A landing in ordinary memory. A buffer that is used again is not cleared in between.
#[derive(Debug)]
pub struct Buffer {
    bytes: Vec<u8>,
    filled: usize,
}

impl Buffer {
    /// A landing for `len` bytes in `reused`, which keeps its memory.
    pub fn new(mut reused: Vec<u8>, len: usize) -> Self {
        reused.resize(len, 0);
        Self { bytes: reused, filled: 0 }
    }

    /// The bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

impl Landing for Buffer {
    fn spare(&mut self) -> &mut [u8] {
        &mut self.bytes[self.filled..]
    }
    fn advance(&mut self, n: usize) {
        self.filled += n;
    }
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

/// What became of a put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PutOutcome {
    /// It is visible under this generation.
    Stored(Generation),
    /// It was there already, under this one.
    Exists(Generation),
    /// Somebody else is writing it.
    InProgress {
        /// Who.
        producer: String,
        /// For how long.
        since: Duration,
    },
}

/// An answer without payload: its op and body.
///
/// An answer that leases something and is dropped before anybody took it, at whatever point a future was
/// cancelled, releases the lease (P10).
#[derive(Debug)]
pub struct Reply {
    /// What it says.
    pub op: Op,
    body: Vec<u8>,
    /// Hears of the lease in it if nobody takes that.
    untaken: Option<mpsc::UnboundedSender<u64>>,
}

impl Reply {
    pub(crate) fn new(op: Op, body: Vec<u8>) -> Self {
        Self { op, body, untaken: None }
    }

    /// An answer whose lease, if it holds one, goes back through `untaken`.
    fn returning(op: Op, body: Vec<u8>, untaken: &mpsc::UnboundedSender<u64>) -> Self {
        let untaken = (op == Op::Leased).then(|| untaken.clone());
        Self { op, body, untaken }
    }

    /// The body, which must belong to `op`; a refusal becomes an error.
    pub fn expect<T: Wire>(mut self, op: Op) -> Result<T, TransferError> {
        if self.op == op {
            let value = decode_body(op.name(), &self.body)?;
            self.untaken = None; // The caller has it now.
            return Ok(value);
        }
        Err(self.refusal())
    }

    /// What a reply that is not the expected one means.
    pub fn refusal(&self) -> TransferError {
        match self.op {
            Op::Failed => match decode_body::<Failed>("failed", &self.body) {
                Ok(failed) => failed.into(),
                Err(error) => error.into(),
            },
            other => TransferError::OtherPeer(format!("the peer answered with {other}")),
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(untaken) = self.untaken.take()
            && let Ok(leased) = decode_body::<Leased>("leased", &self.body)
        {
            let _ = untaken.send(leased.lease); // Without a driver there is no session to say it on.
        }
    }
}

#[derive(Debug)]
struct Shared {
    peer: HelloOk,
    commands: mpsc::UnboundedSender<Command>,
    /// Open requests; every request and the commands it may cause are bounded by it.
    permits: Arc<Semaphore>,
    next_request: AtomicU64,
    /// Ends by itself after the last handle, when what that still said is sent.
    driver: JoinSet<()>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.driver.detach_all();
    }
}

/// A handle of a connection; clones share it. The connection closes with the last one.
#[derive(Debug, Clone)]
pub struct Connection {
    shared: Arc<Shared>,
}

impl Connection {
    /// Connects over TCP and says hello.
    pub async fn connect(address: &str, identity: &Identity) -> Result<Self, TransferError> {
        let connect = async {
            let stream = TcpStream::connect(address).await?;
            Self::open(Socket::tcp(stream)?, identity).await
        };
        let deadline = TransferError::Deadline(CONNECT_DEADLINE);
        timeout(CONNECT_DEADLINE, connect).await.map_err(|_| deadline)?
    }

    /// Says hello on a connected socket.
    pub async fn open(socket: Socket, identity: &Identity) -> Result<Self, TransferError> {
        let peer = hello(&socket, identity).await?;
        Ok(Self::start(socket, peer))
    }

    /// Starts the driver of a socket on which hello was said.
    pub(crate) fn start(socket: Socket, peer: HelloOk) -> Self {
        let (commands, inbox) = mpsc::unbounded_channel();
        let permits = Arc::new(Semaphore::new(peer.requests_limit.clamp(1, 4096) as usize));
        let mut driver = JoinSet::new();
        let silence = Duration::from_millis(u64::from(peer.silence_limit_ms).max(100));
        driver.spawn(Driver::new(socket, peer.tenant_slot, inbox, silence).run());
        let next_request = AtomicU64::new(2); // 1 was the hello.
        let shared = Shared { peer, commands, permits, next_request, driver };
        Self { shared: Arc::new(shared) }
    }

    /// The node at the other end.
    pub fn node(&self) -> NodeId {
        self.shared.peer.node
    }

    /// Its life.
    pub fn incarnation(&self) -> Incarnation {
        self.shared.peer.incarnation
    }

    /// Whether the connection has ended: every request on it would fail.
    pub fn is_closed(&self) -> bool {
        self.shared.commands.is_closed()
    }

    /// Ends when the connection has ended. Safe to cancel.
    pub async fn closed(&self) {
        self.shared.commands.closed().await;
    }

    /// Requests that could be opened now.
    pub fn idle_slots(&self) -> usize {
        self.shared.permits.available_permits()
    }

    /// Tiers that hold each of these parts.
    pub async fn lookup(&self, lookup: &Lookup) -> Result<Vec<TierSet>, TransferError> {
        let answer: LookupOk = self.call(Op::Lookup, lookup).await?.expect(Op::LookupOk)?;
        match answer.tiers.len() == lookup.keys.len() {
            true => Ok(answer.tiers),
            false => Err(TransferError::OtherPeer("a lookup answered other keys".to_owned())),
        }
    }

    /// Tells the peer what is known of the future of a chain. Blocks that it changed something for there; `None`
    /// from a peer that takes no hints.
    pub async fn hint(&self, hint: &ReuseHint) -> Result<Option<u32>, TransferError> {
        if self.shared.peer.features & features::HINTS == 0 {
            return Ok(None);
        }
        let answer: Hinted = self.call(Op::Hint, hint).await?.expect(Op::Hinted)?;
        Ok(Some(answer.blocks))
    }

    /// Reads a range of a part into a landing that `land` makes once the range is known. Every chunk is
    /// verified before the landing is handed back.
    pub async fn read<L: Landing>(
        &self,
        read: &Read,
        land: impl FnOnce(&ReadOk) -> Result<L, TransferError> + Send + 'static,
    ) -> Result<(L, ReadOk), TransferError> {
        let (done, answer) = oneshot::channel();
        let land = Box::new(move |ok: &ReadOk| {
            land(ok).map(|landing| Box::new(landing) as Box<dyn Landing>)
        });
        let asked = Answer::Read { asked: read.clone(), land, done };
        let guard = self.send(Op::Read, read.to_wire(), asked).await?;
        let answer = answer.await;
        guard.disarm();
        let (landing, ok) = answer.map_err(|_| self.lost())??;
        match landing.into_any().downcast() {
            Ok(landing) => Ok((*landing, ok)),
            Err(_) => unreachable!("the driver hands back what `land` made"),
        }
    }

    /// Puts a part: asks first, sends the bytes only if they are wanted, summed on their way, and returns
    /// when they are visible.
    ///
    /// # Panics
    /// When `reserve.chunk_len` breaks the rule of
    /// [`check_chunk_len`](larder_proto::checksum::check_chunk_len).
    pub async fn put(
        &self,
        reserve: &Reserve,
        payload: Bytes,
    ) -> Result<PutOutcome, TransferError> {
        let (done, answer) = oneshot::channel();
        let upload = Upload::new(payload, reserve.chunk_len);
        let asked = Answer::Put(Put { upload, done });
        let guard = self.send(Op::Reserve, reserve.to_wire(), asked).await?;
        let answer = answer.await;
        guard.disarm();
        put_outcome(answer.map_err(|_| self.lost())??)
    }

    /// Asks something whose answer has no payload.
    pub async fn call(&self, op: Op, body: &impl Wire) -> Result<Reply, TransferError> {
        let (done, answer) = oneshot::channel();
        let guard = self.send(op, body.to_wire(), Answer::Reply(done)).await?;
        let answer = answer.await;
        guard.disarm();
        answer.map_err(|_| self.lost())?
    }

    /// Asks something and keeps `keep` until the answer came, even if this future is dropped: for a
    /// request that uses memory which must not be used again before. It cannot be cancelled.
    pub(crate) async fn call_keeping(
        &self,
        op: Op,
        body: &impl Wire,
        keep: Box<dyn Any + Send>,
    ) -> Result<Reply, TransferError> {
        let (done, answer) = oneshot::channel();
        let asked = Answer::Keeping { done, _keep: keep };
        self.send(op, body.to_wire(), asked).await?.disarm();
        answer.await.map_err(|_| self.lost())?
    }

    /// Asks something that is answered item by item; `each` hears the answers until `last` came. The
    /// guard cancels the request when it is dropped.
    pub(crate) async fn stream(
        &self,
        op: Op,
        body: &impl Wire,
        last: Op,
        each: mpsc::UnboundedSender<Result<Reply, TransferError>>,
    ) -> Result<CancelOnDrop, TransferError> {
        self.send(op, body.to_wire(), Answer::Stream { each, last }).await
    }

    /// Says something that is not answered.
    pub(crate) fn tell(&self, op: Op, body: &impl Wire) -> Result<(), TransferError> {
        self.command(Command::Tell { op, body: body.to_wire() })
    }

    async fn send(
        &self,
        op: Op,
        body: Vec<u8>,
        answer: Answer,
    ) -> Result<CancelOnDrop, TransferError> {
        let permits = Arc::clone(&self.shared.permits);
        let permit = permits.acquire_owned().await.map_err(|_| self.lost())?;
        let request = self.shared.next_request.fetch_add(1, Ordering::Relaxed);
        self.command(Command::Request(Request { request, op, body, answer, permit }))?;
        Ok(CancelOnDrop { request, commands: self.shared.commands.clone() })
    }

    fn command(&self, command: Command) -> Result<(), TransferError> {
        self.shared.commands.send(command).map_err(|_| self.lost())
    }

    fn lost(&self) -> TransferError {
        TransferError::Lost("the connection has ended".to_owned())
    }
}

/// Cancels a request when it is dropped before it was answered.
#[derive(Debug)]
pub(crate) struct CancelOnDrop {
    request: u64,
    commands: mpsc::UnboundedSender<Command>,
}

impl CancelOnDrop {
    /// The request was answered: nothing is left to cancel.
    pub(crate) fn disarm(mut self) {
        self.request = 0; // Never a request's id.
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if self.request != 0 {
            // A driver that is gone has nothing left to cancel.
            let _ = self.commands.send(Command::Cancel(self.request));
        }
    }
}

/// What a reply to a put says.
pub(crate) fn put_outcome(reply: Reply) -> Result<PutOutcome, TransferError> {
    Ok(match reply.op {
        Op::Committed => PutOutcome::Stored(reply.expect::<Committed>(Op::Committed)?.generation),
        Op::Exists => PutOutcome::Exists(reply.expect::<Committed>(Op::Exists)?.generation),
        Op::InProgress => {
            let InProgress { producer, since_ms } = reply.expect(Op::InProgress)?;
            let since = Duration::from_millis(since_ms);
            PutOutcome::InProgress { producer: producer.as_str().to_owned(), since }
        }
        _ => return Err(reply.refusal()),
    })
}

/// Says hello on a fresh socket and reads the answer.
pub(crate) async fn hello(socket: &Socket, identity: &Identity) -> Result<HelloOk, TransferError> {
    let mut out = Outgoing::default();
    out.push(Op::Hello, 1, 0, &identity.hello()?);
    while !out.flush(socket, usize::MAX)? {
        socket.ready(Interest::WRITABLE).await?;
    }
    let mut head = [0; HEADER_LEN];
    read_exact(socket, &mut head).await?;
    let header = Header::decode(&head)?;
    let mut body = vec![0; header.body_len as usize];
    read_exact(socket, &mut body).await?;
    let peer: HelloOk = Reply::new(header.op, body).expect(Op::HelloOk)?;
    match peer.version {
        VERSION => Ok(peer),
        other => Err(TransferError::Refused {
            code: Code::Version,
            reason: format!("the peer chose version {other}, which was not offered"),
        }),
    }
}

async fn read_exact(socket: &Socket, into: &mut [u8]) -> Result<(), TransferError> {
    let mut filled = 0;
    while filled < into.len() {
        socket.ready(Interest::READABLE).await?;
        match socket.try_read(&mut into[filled..], &mut []) {
            Ok(0) => return Err(TransferError::Lost("closed during the hello".to_owned())),
            Ok(n) => filled += n,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
