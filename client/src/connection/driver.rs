//! The task that owns a connection's socket and everything in flight on it.

use super::{
    Incoming, Landing, Outgoing, ReadError, Reply, Socket, Spin, outgoing::WRITE_BYTES, spin::Waits,
};
use crate::error::TransferError;
use bytes::Bytes;
use larder_proto::{
    LayoutFingerprint, PartNumber,
    checksum::{Damaged, RunningSums},
    frame::{Class, Commit, Empty, Header, Lookup, Op, Read, ReadOk, Release, decode_body},
    wire::Encoded,
};
use std::{
    any::Any,
    collections::{HashMap, VecDeque},
    iter,
    pin::pin,
    time::Duration,
};
use tokio::{
    io::Interest,
    sync::{OwnedSemaphorePermit, mpsc, oneshot},
    time::{Instant, sleep_until, timeout},
};

/// Bytes that one turn writes or reads before other tasks of the thread get theirs.
const TURN_BYTES: usize = 4 << 20;
/// Puts that send their bytes by turns; the others wait for one of them to end.
const TURN_UPLOADS: usize = 4;
/// Id of the question that a driver asks last; handles never get that far.
const LAST_QUESTION: u64 = u64::MAX;
/// Bytes of a put that are summed before it is granted: what a round trip within a host has time for.
const SUMMED_AHEAD: usize = 1 << 20;
/// Bytes of one read: summed while they are in the cache.
const READ_BYTES: usize = 256 << 10;

type Land = Box<dyn FnOnce(&ReadOk) -> Result<Box<dyn Landing>, TransferError> + Send>;
type ReadDone = oneshot::Sender<Result<(Box<dyn Landing>, ReadOk), TransferError>>;

/// Who waits for what.
pub(super) enum Answer {
    /// One frame without payload.
    Reply(oneshot::Sender<Result<Reply, TransferError>>),
    /// The same, and something is kept until then.
    Keeping { done: oneshot::Sender<Result<Reply, TransferError>>, _keep: Box<dyn Any + Send> },
    /// A range of a part.
    Read { asked: Read, land: Land, done: ReadDone },
    /// Frames until one with `last`.
    Stream { each: mpsc::UnboundedSender<Result<Reply, TransferError>>, last: Op },
    /// What became of a put.
    Put(Put),
}

/// A put: its bytes, and who waits for what becomes of them.
pub(super) struct Put {
    pub(super) upload: Upload,
    pub(super) done: oneshot::Sender<Result<Reply, TransferError>>,
}

/// The bytes of a put. Each piece is summed right before it is written, so that both find it in the cache;
/// only the first ones of the last put are summed before, in the time that the peer takes to grant.
pub(super) struct Upload {
    payload: Bytes,
    sums: RunningSums,
    summed: usize,
    sent: usize,
}

impl Upload {
    /// # Panics
    /// As [`RunningSums::new`].
    pub(super) fn new(payload: Bytes, chunk_len: u32) -> Self {
        Self { payload, sums: RunningSums::new(chunk_len), summed: 0, sent: 0 }
    }

    fn sum_to(&mut self, end: usize) {
        let end = end.min(self.payload.len());
        if end > self.summed {
            self.sums.update(&self.payload[self.summed..end], |_, _| ());
            self.summed = end;
        }
    }

    /// The next piece, where it lies, and whether it is the last.
    fn next_piece(&mut self) -> (Bytes, usize, bool) {
        let (from, end) = (self.sent, self.payload.len().min(self.sent + WRITE_BYTES));
        self.sum_to(end);
        self.sent = end;
        (self.payload.slice(from..end), from, end == self.payload.len())
    }
}

/// A new request.
pub(super) struct Request {
    pub(super) request: u64,
    pub(super) op: Op,
    pub(super) body: Vec<u8>,
    pub(super) answer: Answer,
    pub(super) permit: OwnedSemaphorePermit,
}

/// What handles ask of the driver.
pub(super) enum Command {
    Request(Request),
    /// Something that is not answered.
    Tell {
        op: Op,
        body: Vec<u8>,
    },
    Cancel(u64),
}

/// A range whose first frame came: where it lands and how it is verified.
struct Arriving {
    landing: Box<dyn Landing>,
    sums: RunningSums,
    ok: ReadOk,
    received: u64,
    damaged: Option<Damaged>,
}

enum State {
    Waiting(Answer),
    Arriving(Arriving, ReadDone),
}

/// A request that is not answered. One that was cancelled is forgotten at once: ids are never used again,
/// so frames of an unknown request are late answers, and are read and thrown away.
struct Pending {
    state: State,
    _permit: OwnedSemaphorePermit,
}

/// See the module.
pub(super) struct Driver {
    socket: Socket,
    tenant_slot: u32,
    inbox: mpsc::UnboundedReceiver<Command>,
    /// Leases in answers that nobody took, at whatever point they were dropped.
    untaken: mpsc::UnboundedReceiver<u64>,
    to_untaken: mpsc::UnboundedSender<u64>,
    incoming: Incoming,
    outgoing: Outgoing,
    /// Bytes that go out when nothing else does, a piece of each in turn.
    uploads: VecDeque<(u64, Upload)>,
    /// A put that was just asked for.
    asked: Option<u64>,
    pending: HashMap<u64, Pending>,
    /// The request whose payload is being read.
    current: Option<(u64, Header)>,
    scrap: Vec<u8>,
    silence_limit: Duration,
    heard: Instant,
    /// When something was last said, so that the peer knows that we live even while it only sends.
    said: Instant,
    /// The socket took no more at the last attempt: what it takes next, the peer made room for.
    blocked: bool,
    spin: Spin,
    waits: Waits,
    /// Something was cancelled: its answer may have been on its way, and may hold a lease.
    cancelled: bool,
    /// What the peer said before it heard the last question has come.
    all_heard: bool,
}

impl Driver {
    pub(super) fn new(
        socket: Socket,
        tenant_slot: u32,
        inbox: mpsc::UnboundedReceiver<Command>,
        silence_limit: Duration,
    ) -> Self {
        let now = Instant::now();
        let (to_untaken, untaken) = mpsc::unbounded_channel();
        Self {
            socket,
            tenant_slot,
            inbox,
            untaken,
            to_untaken,
            incoming: Incoming::default(),
            outgoing: Outgoing::default(),
            uploads: VecDeque::new(),
            asked: None,
            pending: HashMap::new(),
            current: None,
            scrap: Vec::new(),
            silence_limit,
            heard: now,
            said: now,
            blocked: false,
            spin: Spin::default(),
            waits: Waits::default(),
            cancelled: false,
            all_heard: false,
        }
    }

    /// Runs until the connection ends or the last handle is gone and everything it said is sent; then
    /// everybody who waits is told.
    pub(super) async fn run(mut self) {
        let error = self.serve().await;
        self.inbox.close();
        for (_, pending) in self.pending.drain() {
            fail(pending.state, &error);
        }
        while let Ok(command) = self.inbox.try_recv() {
            match command {
                Command::Request(request) => fail(State::Waiting(request.answer), &error),
                Command::Tell { .. } | Command::Cancel(_) => {}
            }
        }
    }

    async fn serve(&mut self) -> TransferError {
        // One timer for the whole connection, set anew only when it rings.
        let mut ask = pin!(sleep_until(self.said + self.silence_limit / 4));
        loop {
            while let Ok(command) = self.inbox.try_recv() {
                self.obey(command);
            }
            let before = self.outgoing.sent_bytes();
            let drained = match self.flush() {
                Ok(drained) => drained,
                Err(error) => return error.into(),
            };
            if self.outgoing.sent_bytes() - before >= TURN_BYTES as u64 {
                tokio::task::yield_now().await; // A peer that keeps up would never make it wait.
            }
            match self.receive() {
                Ok(true) => {
                    tokio::task::yield_now().await;
                    continue;
                }
                // What came may have given us something to say: the bytes of a put.
                Ok(false) if drained && !self.is_quiet() => continue,
                Ok(false) => self.sum_ahead(),
                Err(error) => return error,
            }
            match self.look() {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => return error,
            }
            let interest = match drained {
                true => Interest::READABLE,
                false => Interest::READABLE | Interest::WRITABLE,
            };
            tokio::select! {
                biased;
                ready = self.socket.ready(interest) => if let Err(error) = ready {
                    return error.into();
                },
                command = self.inbox.recv() => match command {
                    Some(command) => self.obey(command),
                    None => return self.farewell().await,
                },
                Some(lease) = self.untaken.recv() => {
                    let release = Release { leases: vec![lease] };
                    self.outgoing.push(Op::Release, 0, self.tenant_slot, &release);
                }
                // Peers close after their limit of silence; so do we. Something is said four times in it.
                () = &mut ask => {
                    let now = Instant::now();
                    if now.duration_since(self.heard) >= self.silence_limit {
                        return TransferError::Silent(self.silence_limit);
                    }
                    if now >= self.said + self.silence_limit / 4 {
                        self.said = now;
                        self.outgoing.push_first(Op::Ping, 0, self.tenant_slot);
                    }
                    ask.as_mut().reset(self.said + self.silence_limit / 4);
                }
            }
        }
    }

    /// The last handle is gone. What it still said goes out first, unless the peer takes nothing: a lease
    /// whose release is not heard stays with this process until it ends. Where something was cancelled,
    /// what the peer had answered before it heard of it is waited for too, since that may be a lease.
    async fn farewell(&mut self) -> TransferError {
        self.all_heard = !self.cancelled;
        if self.cancelled {
            // Answered in its turn, unlike a ping.
            let (layout, part) = (LayoutFingerprint::from_bytes([0; 32]), PartNumber(0));
            let nothing = Lookup { layout, part, keys: Vec::new() };
            self.outgoing.push(Op::Lookup, LAST_QUESTION, self.tenant_slot, &nothing);
        }
        let limit = self.silence_limit;
        match timeout(limit, self.last_words()).await {
            Ok(Ok(())) => TransferError::Lost("closed by its owner".to_owned()),
            Ok(Err(error)) => error,
            Err(_) => TransferError::Silent(limit),
        }
    }

    async fn last_words(&mut self) -> Result<(), TransferError> {
        loop {
            self.flush()?;
            if self.receive()? {
                tokio::task::yield_now().await;
                continue;
            }
            let interest = match (self.flush()?, self.all_heard) {
                (true, true) => return Ok(()),
                (true, false) => Interest::READABLE,
                (false, _) => Interest::READABLE | Interest::WRITABLE,
            };
            self.socket.ready(interest).await?;
        }
    }

    /// Looks for an answer for a moment before going to sleep, where one may come that fast, when nobody
    /// else has something to say: on a Unix socket, and on any while no other connection waits.
    fn look(&mut self) -> Result<bool, TransferError> {
        self.waits.set(!self.pending.is_empty());
        let awaited = (self.socket.as_unix().is_some() || self.waits.alone())
            && self.current.is_none()
            && self.inbox.is_empty()
            && self.is_quiet()
            && !self.pending.is_empty();
        if !awaited || !self.spin.is_worth_it() {
            return Ok(false);
        }
        let found = self.incoming.spin(&self.socket).map_err(read_error)?;
        self.spin.found(found);
        Ok(found)
    }

    /// Whether nothing is left to be sent.
    fn is_quiet(&self) -> bool {
        self.outgoing.is_empty() && self.uploads.is_empty()
    }

    /// Writes what the socket takes; whether nothing is left.
    fn flush(&mut self) -> std::io::Result<bool> {
        self.release_untaken();
        let before = self.outgoing.sent_bytes();
        let mut drained = self.outgoing.flush(&self.socket, TURN_BYTES)?;
        while drained && self.outgoing.sent_bytes() - before < TURN_BYTES as u64 {
            let Some((request, upload)) = self.uploads.pop_front() else { break };
            self.send_piece(request, upload);
            drained = self.outgoing.flush(&self.socket, TURN_BYTES)?;
        }
        if self.outgoing.sent_bytes() > before {
            self.said = Instant::now();
            if std::mem::take(&mut self.blocked) {
                self.heard = self.said; // The peer took what had filled the socket.
            }
        }
        self.blocked |= !drained;
        Ok(drained && self.uploads.is_empty())
    }

    /// The next piece of a put, and after the last one its commit.
    fn send_piece(&mut self, request: u64, mut upload: Upload) {
        let slot = self.tenant_slot;
        let (piece, at, last) = upload.next_piece();
        self.outgoing.push_piece(request, slot, piece, at, last, Class::Demand);
        if last {
            let commit = Commit { sums: upload.sums.finish(|_, _| ()) };
            return self.outgoing.push(Op::Commit, request, slot, &commit);
        }
        // The next of a few: one that is short does not wait for the whole of a long one, and of many under
        // way not all end late together.
        self.uploads.insert(self.uploads.len().min(TURN_UPLOADS - 1), (request, upload));
    }

    /// Sums the first bytes of a put while its peer decides.
    fn sum_ahead(&mut self) {
        let pending = self.asked.take().and_then(|request| self.pending.get_mut(&request));
        if let Some(Pending { state: State::Waiting(Answer::Put(put)), .. }) = pending {
            put.upload.sum_to(SUMMED_AHEAD);
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Request(Request { request, op, body, answer, permit }) => {
                let class = match &answer {
                    Answer::Read { asked, .. } => asked.class,
                    Answer::Reply(_)
                    | Answer::Keeping { .. }
                    | Answer::Stream { .. }
                    | Answer::Put(_) => Class::Demand,
                };
                let body = Encoded(body);
                let slot = self.tenant_slot;
                self.outgoing.push_payload(op, request, slot, &body, Bytes::new(), class);
                if matches!(answer, Answer::Put(_)) {
                    self.asked = Some(request);
                }
                let state = State::Waiting(answer);
                self.pending.insert(request, Pending { state, _permit: permit });
            }
            Command::Tell { op, body } => {
                self.outgoing.push(op, 0, self.tenant_slot, &Encoded(body));
            }
            Command::Cancel(request) => {
                if self.pending.remove(&request).is_some() {
                    self.cancelled = true;
                    self.outgoing.forget(request);
                    self.uploads.retain(|(of, _)| *of != request);
                    self.outgoing.push(Op::Cancel, request, self.tenant_slot, &Empty {});
                }
            }
        }
    }

    /// Takes in what is there; `true` when its turn was used up and there may be more.
    fn receive(&mut self) -> Result<bool, TransferError> {
        let mut taken = 0;
        while taken < TURN_BYTES {
            if let Some((request, header)) = self.current {
                match self.payload(request)? {
                    None => return Ok(false),
                    Some(n) => taken += n,
                }
                if self.incoming.payload_left() == 0 {
                    self.current = None;
                    self.end_frame(request, &header)?;
                }
                continue;
            }
            let head = match self.incoming.head(&self.socket) {
                Ok(Some((header, body))) => (header, body.to_vec()),
                Ok(None) => return Ok(false),
                Err(error) => return Err(read_error(error)),
            };
            self.heard = Instant::now();
            taken += head.1.len() + 1;
            self.frame(head.0, head.1)?;
        }
        Ok(true)
    }

    fn frame(&mut self, header: Header, body: Vec<u8>) -> Result<(), TransferError> {
        let request = header.request;
        match header.op {
            Op::Pong => return Ok(()),
            Op::LookupOk if request == LAST_QUESTION => self.all_heard = true,
            Op::ReadOk => self.begin_read(request, &header, &body)?,
            Op::Data => {}
            op => self.reply(request, Reply::returning(op, body, &self.to_untaken)),
        }
        match header.payload_len {
            0 => self.end_frame(request, &header),
            _ => {
                self.current = Some((request, header));
                Ok(())
            }
        }
    }

    /// The first frame of a read's answer: finds out where the range lands.
    fn begin_read(
        &mut self,
        request: u64,
        header: &Header,
        body: &[u8],
    ) -> Result<(), TransferError> {
        let ok: ReadOk = decode_body("read_ok", body)?;
        let Some(Pending { state, _permit }) = self.pending.remove(&request) else {
            return Ok(());
        };
        let State::Waiting(Answer::Read { asked, land, done }) = state else {
            let error = TransferError::OtherPeer("read_ok for another request".to_owned());
            fail(state, &error);
            return Err(error);
        };
        if let Err(error) = check_range(&asked, &ok, header) {
            let _ = done.send(Err(error.clone()));
            return Err(error);
        }
        match land(&ok) {
            Ok(landing) => {
                let sums = RunningSums::new(ok.info.sums.chunk_len);
                let arriving = Arriving { landing, sums, ok, received: 0, damaged: None };
                let state = State::Arriving(arriving, done);
                self.pending.insert(request, Pending { state, _permit });
            }
            Err(error) => {
                let _ = done.send(Err(error)); // Nobody may wait any more.
                self.outgoing.push(Op::Cancel, request, self.tenant_slot, &Empty {});
            }
        }
        Ok(())
    }

    /// Reads payload of the current frame; how much, or `None` when nothing is there now.
    fn payload(&mut self, request: u64) -> Result<Option<usize>, TransferError> {
        let state = self.pending.get_mut(&request).map(|pending| &mut pending.state);
        let Some(State::Arriving(arriving, _)) = state else {
            self.scrap.resize(READ_BYTES, 0);
            let got = self.incoming.payload(&self.socket, &mut self.scrap).map_err(read_error)?;
            if got.is_some() {
                self.heard = Instant::now();
            }
            return Ok(got);
        };
        let spare = arriving.landing.spare();
        let room = spare.len().min(READ_BYTES);
        if room == 0 {
            return Err(too_long());
        }
        let got = self.incoming.payload(&self.socket, &mut spare[..room]).map_err(read_error)?;
        if let Some(n) = got {
            self.heard = Instant::now(); // A slow peer is not a silent one.
            let first_chunk = chunk_at(&arriving.ok);
            let (sums, damaged) = (&arriving.ok.info.sums, &mut arriving.damaged);
            arriving.sums.update(&spare[..n], |chunk, sum| {
                let verified = sums.verify_sum(first_chunk + chunk, sum);
                *damaged = damaged.or(verified.err());
            });
            arriving.landing.advance(n);
            arriving.received += n as u64;
        }
        Ok(got)
    }

    /// After the payload of a frame: ends the request if this was its last.
    fn end_frame(&mut self, request: u64, header: &Header) -> Result<(), TransferError> {
        if !matches!(header.op, Op::ReadOk | Op::Data) || !header.is_last() {
            return Ok(());
        }
        let Some(pending) = self.pending.remove(&request) else { return Ok(()) };
        let State::Arriving(mut arriving, done) = pending.state else { return Ok(()) };
        if arriving.received != arriving.ok.len {
            return Err(TransferError::OtherPeer(format!(
                "a range of {} bytes ended after {}",
                arriving.ok.len, arriving.received
            )));
        }
        let (first_chunk, sums) = (chunk_at(&arriving.ok), &arriving.ok.info.sums);
        let damaged = &mut arriving.damaged;
        arriving.sums.finish(|chunk, sum| {
            let verified = sums.verify_sum(first_chunk + chunk, sum);
            *damaged = damaged.or(verified.err());
        });
        let answer = match arriving.damaged {
            None => Ok((arriving.landing, arriving.ok)),
            Some(damaged) => Err(damaged.into()),
        };
        let _ = done.send(answer); // Nobody may wait any more.
        Ok(())
    }

    fn reply(&mut self, request: u64, reply: Reply) {
        if reply.op == Op::Granted {
            return self.granted(request, &reply);
        }
        // Nobody may wait any more; a lease in the answer goes back when it is dropped.
        let Some(Pending { state, _permit }) = self.pending.remove(&request) else { return };
        match state {
            State::Waiting(Answer::Stream { each, last }) => {
                let ended = reply.op == last;
                let _ = each.send(Ok(reply));
                if !ended {
                    let state = State::Waiting(Answer::Stream { each, last });
                    self.pending.insert(request, Pending { state, _permit });
                }
            }
            State::Waiting(
                Answer::Reply(done) | Answer::Keeping { done, .. } | Answer::Put(Put { done, .. }),
            ) => {
                // One that was refused while its bytes went out sends no more of them.
                self.uploads.retain(|(of, _)| *of != request);
                let _ = done.send(Ok(reply));
            }
            other => fail(other, &reply.refusal()),
        }
    }

    /// Gives leases that nobody took back.
    fn release_untaken(&mut self) {
        let leases: Vec<u64> = iter::from_fn(|| self.untaken.try_recv().ok()).collect();
        if !leases.is_empty() {
            self.outgoing.push(Op::Release, 0, self.tenant_slot, &Release { leases });
        }
    }

    /// The peer wants the bytes of a put: they go out at once.
    fn granted(&mut self, request: u64, reply: &Reply) {
        let Some(Pending { state, _permit }) = self.pending.remove(&request) else { return };
        let State::Waiting(Answer::Put(Put { upload, done })) = state else {
            return fail(state, &reply.refusal());
        };
        self.uploads.push_back((request, upload));
        let state = State::Waiting(Answer::Reply(done));
        self.pending.insert(request, Pending { state, _permit });
    }
}

/// Index of the first chunk of the range within the part.
fn chunk_at(ok: &ReadOk) -> usize {
    usize::try_from(ok.offset / u64::from(ok.info.sums.chunk_len)).unwrap_or(usize::MAX)
}

/// Holds what a peer says of a range against what was asked and against itself.
fn check_range(asked: &Read, ok: &ReadOk, header: &Header) -> Result<(), TransferError> {
    let chunk_len = ok.info.sums.chunk_len;
    let range = asked.range(ok.info.len, chunk_len);
    let consistent = ok.info.sums.fits(ok.info.len)
        && range == Ok((ok.offset, ok.len))
        && header.payload_offset == 0
        && asked.generation.is_none_or(|generation| generation == ok.info.generation);
    match consistent {
        true => Ok(()),
        false => Err(TransferError::OtherPeer("a read was answered with another range".to_owned())),
    }
}

fn too_long() -> TransferError {
    TransferError::OtherPeer("more bytes came than the range has".to_owned())
}

fn read_error(error: ReadError) -> TransferError {
    match error {
        ReadError::Io(error) => error.into(),
        ReadError::Protocol(error) => error.into(),
    }
}

fn fail(state: State, error: &TransferError) {
    // Whoever waited may be gone: then nobody needs the news.
    match state {
        State::Waiting(
            Answer::Reply(done) | Answer::Keeping { done, .. } | Answer::Put(Put { done, .. }),
        ) => _ = done.send(Err(error.clone())),
        State::Waiting(Answer::Read { done, .. }) | State::Arriving(_, done) => {
            _ = done.send(Err(error.clone()));
        }
        State::Waiting(Answer::Stream { each, .. }) => _ = each.send(Err(error.clone())),
    }
}
