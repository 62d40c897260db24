//! A session with the node of this host: leases in place, staged puts, matches and fetches.
//!
//! The session maps the node's arena for reading and shares a staging area with it. A [`LeasedPart`] *is*
//! the bytes in the arena; dropping it releases the lease. A put copies its bytes once into the staging
//! area, from where the node copies and sums them.

use crate::{
    ClientError, TransferError,
    connection::{
        CONNECT_DEADLINE, CancelOnDrop, Connection, Identity, PutOutcome, Reply, Socket, hello,
        put_outcome, receive_with_fds,
    },
    memory::SharedMemory,
};
use larder_proto::{
    BlockKey, ContentFingerprint, Generation, LayoutFingerprint, ModelVersion, PartNumber, TierSet,
    block_key::OriginHash,
    checksum::{DEFAULT_CHUNK, Damaged},
    fingerprint::ModelDescription,
    frame::{
        Attached, Class, Codec, Empty, Failed, Fetch, FetchItem, HEADER_LEN, Header, Lease, Leased,
        Lookup, Match, Matched, Op, PartInfo, PutStaged, Register, Release, Reserve, ReuseHint,
        Source,
    },
    ids::NodeId,
    part::PartRef,
    wire::{ShortBytes, ShortText},
};
use std::{ops::Deref, path::Path, sync::Arc, time::Duration};
use tokio::{
    net::UnixStream,
    sync::{Mutex, mpsc},
    time::timeout,
};

/// Where a part belongs: what a put says besides name and bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartAttributes {
    /// What decides the values.
    pub content: ContentFingerprint,
    /// The first block of the chain.
    pub root: BlockKey,
    /// The block before this one; none for the root.
    pub parent: Option<BlockKey>,
    /// The engine's own hash of the block.
    pub origin_hash: Option<OriginHash>,
}

/// Parts to bring and lease.
#[derive(Debug, Clone)]
pub struct FetchRequest {
    /// The model version of all.
    pub model: ModelVersion,
    /// Block and part of each, in the order wanted.
    pub parts: Vec<(BlockKey, PartNumber)>,
    /// Give up after this long.
    pub deadline: Duration,
    /// How urgent.
    pub class: Class,
}

/// Where the bytes of a leased part came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseSource {
    /// The node of this host held them.
    Local,
    /// They were brought from this node.
    Peer(NodeId),
}

/// A session with the local node; clones share it. It ends with the last clone and the last lease.
#[derive(Debug, Clone)]
pub struct LocalSession {
    connection: Connection,
    arena: Arc<SharedMemory>,
    staging: Arc<Mutex<SharedMemory>>,
}

impl LocalSession {
    /// Connects to the node's socket, says hello and maps the arena.
    pub async fn connect(socket: &Path, identity: &Identity) -> Result<Self, ClientError> {
        let error = |source| ClientError::Connect { address: socket.display().to_string(), source };
        let connect = Self::attach(socket, identity);
        let late = |_| error(TransferError::Deadline(CONNECT_DEADLINE));
        timeout(CONNECT_DEADLINE, connect).await.map_err(late)?.map_err(error)
    }

    async fn attach(socket: &Path, identity: &Identity) -> Result<Self, TransferError> {
        let socket = Socket::Unix(UnixStream::connect(socket).await?);
        let peer = hello(&socket, identity).await?;
        let Socket::Unix(stream) = &socket else { unreachable!("made above") };
        let ask = Header::new(Op::Attach, 1, peer.tenant_slot, 0).encode();
        crate::connection::send_with_fds(stream, &ask, &[]).await?;

        let mut head = [0; HEADER_LEN];
        let mut fds = receive_with_fds(stream, &mut head).await?;
        let header = Header::decode(&head)?;
        let mut body = vec![0; header.body_len as usize];
        fds.extend(receive_with_fds(stream, &mut body).await?);
        let attached: Attached = Reply::new(header.op, body).expect(Op::Attached)?;
        let Ok([arena, staging]) = <[_; 2]>::try_from(fds) else {
            return Err(TransferError::OtherPeer("the node sent no arena".to_owned()));
        };
        let len = |len: u64| usize::try_from(len).unwrap_or(usize::MAX);
        let arena = SharedMemory::open(arena, len(attached.arena_len), false)?;
        let staging = SharedMemory::open(staging, len(attached.staging_len), true)?;
        Ok(Self {
            connection: Connection::start(socket, peer),
            arena: Arc::new(arena),
            staging: Arc::new(Mutex::new(staging)),
        })
    }

    /// The local node.
    pub fn node(&self) -> NodeId {
        self.connection.node()
    }

    /// Whether the session has ended: connect anew.
    pub fn is_closed(&self) -> bool {
        self.connection.is_closed()
    }

    /// Ends when the session has ended. Safe to cancel.
    pub async fn closed(&self) {
        self.connection.closed().await;
    }

    /// The longest part that [`Self::put`] takes.
    pub async fn staging_bytes(&self) -> usize {
        self.staging.lock().await.len()
    }

    /// Tells the node, and through it the masters, which model version is run here. Idempotent.
    pub async fn register_model(&self, model: &ModelDescription) -> Result<(), ClientError> {
        let register = Register {
            display_name: ShortText::cut(&model.display_name),
            content: ShortBytes::new(model.content.encode()).map_err(TransferError::from)?,
            layout: ShortBytes::new(model.layout.encode()).map_err(TransferError::from)?,
        };
        let reply = self.connection.call(Op::Register, &register).await?;
        reply.expect::<Empty>(Op::Done)?;
        Ok(())
    }

    /// How far a match of a chain reaches, and from where.
    pub async fn match_prefix(&self, ask: &Match) -> Result<Matched, ClientError> {
        let matched: Matched = self.connection.call(Op::Match, ask).await?.expect(Op::Matched)?;
        let blocks: u64 = matched.runs.iter().map(|run| u64::from(run.blocks)).sum();
        match blocks <= ask.keys.len() as u64 {
            true => Ok(matched),
            false => Err(TransferError::OtherPeer("a match longer than asked".to_owned()).into()),
        }
    }

    /// Tiers of the local node that hold each of these parts. Renews nothing.
    pub async fn stored(
        &self,
        layout: LayoutFingerprint,
        part: PartNumber,
        keys: Vec<BlockKey>,
    ) -> Result<Vec<TierSet>, ClientError> {
        Ok(self.connection.lookup(&Lookup { layout, part, keys }).await?)
    }

    /// Tells the node what is known of the future of a chain; see [`Connection::hint`].
    pub async fn hint(&self, hint: &ReuseHint) -> Result<Option<u32>, ClientError> {
        Ok(self.connection.hint(hint).await?)
    }

    /// A part of the local node, in place; `None` is a miss.
    pub async fn lease(&self, part: PartRef) -> Result<Option<LeasedPart>, ClientError> {
        let reply = self.connection.call(Op::Lease, &Lease { part }).await?;
        match reply.expect::<Leased>(Op::Leased) {
            Ok(leased) => Ok(Some(self.leased(leased)?)),
            Err(TransferError::Refused { code: larder_proto::frame::Code::Miss, .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Brings parts here and leases them; answers come in any order, as parts land.
    pub async fn fetch(&self, fetch: &FetchRequest) -> Result<FetchStream, ClientError> {
        let (each, answers) = mpsc::unbounded_channel();
        let item = |(key, part): &(BlockKey, PartNumber)| FetchItem { key: *key, part: *part };
        let body = Fetch {
            model: fetch.model,
            items: fetch.parts.iter().map(item).collect(),
            deadline_ms: u32::try_from(fetch.deadline.as_millis()).unwrap_or(u32::MAX),
            class: fetch.class,
        };
        let cancel = self.connection.stream(Op::Fetch, &body, Op::FetchDone, each).await?;
        let left = fetch.parts.len();
        Ok(FetchStream { session: self.clone(), answers, left, cancel: Some(cancel) })
    }

    /// Puts a part. Returns when it is visible, or need not be put.
    pub async fn put(
        &self,
        part: PartRef,
        attributes: &PartAttributes,
        bytes: &[u8],
    ) -> Result<PutOutcome, ClientError> {
        let PartAttributes { content, root, parent, origin_hash } = attributes.clone();
        let put = Reserve {
            part,
            len: bytes.len() as u64,
            codec: Codec::Raw,
            chunk_len: DEFAULT_CHUNK,
            content,
            root,
            parent,
            origin_hash,
        };
        let staging = Arc::clone(&self.staging).lock_owned().await;
        if self.connection.is_closed() {
            // The node may still read an earlier put from this staging area.
            return Err(TransferError::Lost("the session has ended".to_owned()).into());
        }
        if bytes.len() > staging.len() {
            let (len, limit) = (bytes.len(), staging.len());
            let why = format!("a part of {len} bytes does not fit the staging area of {limit}");
            return Err(ClientError::Invalid(why));
        }
        // SAFETY: the lock on the staging area is held, so no other put of this process writes it. The
        // node reads the range only between `PutStaged` and its answer, and the lock is kept until the
        // answer came (`call_keeping`), even if this future is dropped. A session that ends without the
        // answer gives the lock back too, but only after it counts as closed (checked above, under the
        // lock), so the range is never written again.
        #[expect(unsafe_code, reason = "the staging area is shared with the node")]
        unsafe { staging.bytes_mut(0, bytes.len()) }.copy_from_slice(bytes);
        let body = PutStaged { put, staging_offset: 0 };
        let reply = self.connection.call_keeping(Op::PutStaged, &body, Box::new(staging)).await?;
        Ok(put_outcome(reply)?)
    }

    fn leased(&self, leased: Leased) -> Result<LeasedPart, TransferError> {
        let end = leased.offset.checked_add(leased.info.len);
        if end.is_none_or(|end| end > self.arena.len() as u64) {
            return Err(TransferError::OtherPeer("a lease outside the arena".to_owned()));
        }
        let index = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Ok(LeasedPart {
            lease: leased.lease,
            offset: index(leased.offset),
            len: index(leased.info.len),
            source: match leased.source {
                Source::Local => LeaseSource::Local,
                Source::Peer => LeaseSource::Peer(leased.node),
            },
            info: leased.info,
            arena: Arc::clone(&self.arena),
            session: Some(self.connection.clone()),
        })
    }
}

/// A part in the node's arena. Its bytes were verified when they were committed, nobody but the node can
/// write the arena, and the node leaves them in place until this is dropped.
#[must_use = "dropping the lease lets the part be evicted"]
#[derive(Debug)]
pub struct LeasedPart {
    lease: u64,
    offset: usize,
    len: usize,
    source: LeaseSource,
    info: PartInfo,
    arena: Arc<SharedMemory>,
    /// Hears of the release.
    session: Option<Connection>,
}

impl LeasedPart {
    /// Which stored copy this is.
    pub fn generation(&self) -> Generation {
        self.info.generation
    }

    /// What is known of the part.
    pub fn info(&self) -> &PartInfo {
        &self.info
    }

    /// Where the bytes came from.
    pub fn source(&self) -> LeaseSource {
        self.source
    }

    /// Checks the bytes against their sums again.
    pub fn verify(&self) -> Result<(), Damaged> {
        self.info.sums.verify(0, self)
    }

    /// Keeps the bytes without the session: the lease is never released, and the node keeps the range
    /// until this process ends. For a reader that reads on when its event loop is gone.
    pub fn detach(&mut self) {
        self.session = None;
    }
}

impl Deref for LeasedPart {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the node keeps the range unchanged while the lease is open (P7): until `Release`,
        // which only `drop` sends, or the end of this process. `leased` checked that it is inside.
        #[expect(unsafe_code, reason = "the lease is the proof")]
        unsafe {
            self.arena.bytes(self.offset, self.len)
        }
    }
}

impl Drop for LeasedPart {
    fn drop(&mut self) {
        if let Some(session) = &self.session {
            // If the session has ended, the node keeps the range until this process ends.
            let _ = session.tell(Op::Release, &Release { leases: vec![self.lease] });
        }
    }
}

/// The answers of a fetch. Dropping it cancels what has not come and releases what came and was not taken.
#[derive(Debug)]
pub struct FetchStream {
    session: LocalSession,
    answers: mpsc::UnboundedReceiver<Result<Reply, TransferError>>,
    left: usize,
    cancel: Option<CancelOnDrop>,
}

/// One part of a fetch: which, and its lease or why it did not come.
pub type Fetched = (usize, Result<LeasedPart, TransferError>);

impl FetchStream {
    /// The next answer; `None` when every part is answered. An error ends the stream. Safe to cancel.
    pub async fn next(&mut self) -> Option<Result<Fetched, TransferError>> {
        if self.left == 0 {
            return None;
        }
        let reply = match self.answers.recv().await? {
            Ok(reply) => reply,
            Err(error) => return self.end(error),
        };
        let fetched = match reply.op {
            Op::Leased => reply.expect::<Leased>(Op::Leased).and_then(|leased| {
                let item = leased.item as usize;
                Ok((item, Ok(self.session.leased(leased)?)))
            }),
            Op::FetchDone => {
                let why = "the node ended the fetch before every part was answered".to_owned();
                return self.end(TransferError::OtherPeer(why));
            }
            Op::Failed => reply
                .expect::<Failed>(Op::Failed)
                .map(|failed| (failed.item as usize, Err(failed.into()))),
            _ => Err(reply.refusal()),
        };
        match fetched {
            Ok(fetched) => {
                self.left -= 1;
                if self.left == 0
                    && let Some(cancel) = self.cancel.take()
                {
                    cancel.disarm();
                }
                Some(Ok(fetched))
            }
            Err(error) => self.end(error),
        }
    }

    fn end(&mut self, error: TransferError) -> Option<Result<Fetched, TransferError>> {
        self.left = 0;
        Some(Err(error))
    }
}
