//! One served connection: reads frames, answers them, watches deadlines.
//!
//! A single task owns the socket. Requests that need no waiting are answered in place; others run in
//! tasks of the connection, which end with it, and hand their answers back through a bounded queue. When
//! answers pile up the connection is not read any further, so a peer that asks without listening is
//! held back by its own socket (P9).

use super::{
    leases::Reader,
    process::Process,
    requests::{self, Tenancy},
};
use crate::{catalog::Put, node::Node};
use bytes::Bytes;
use larder_client::{
    connection::{Incoming, Outgoing, ReadError, Socket, Spin, send_with_fds},
    memory::SharedMemory,
};
use larder_proto::{
    frame::{Class, Code, Empty, Failed, HEADER_LEN, Header, Hello, Op, decode_body},
    wire::{DecodeError, Encoded, ShortText, Wire},
};
use std::{
    collections::HashMap,
    io,
    os::fd::AsFd,
    pin::{Pin, pin},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::{
    io::Interest,
    sync::mpsc,
    task::{JoinError, JoinSet},
    time::{Instant, Sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// Bytes that one turn reads or writes before other connections get theirs.
const TURN_BYTES: usize = 4 << 20;
/// Frames that may wait to be sent before the connection is not read any further.
const WAITING_FRAMES: usize = 1024;
/// Bytes of one read of payload: summed while they are in the cache.
const READ_BYTES: usize = 256 << 10;

/// An answer of a task to a request.
#[derive(Debug)]
pub(super) struct TaskAnswer {
    pub(super) request: u64,
    pub(super) op: Op,
    pub(super) body: Vec<u8>,
    /// Bytes that go with it, and how urgent they are.
    pub(super) payload: Option<(Bytes, Class)>,
    /// What `body` leases.
    pub(super) lease: Option<Untold>,
    /// The request has no further answers.
    pub(super) last: bool,
}

/// A lease that its reader has not been told of: it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Untold {
    node: Arc<Node>,
    reader: Reader,
    lease: Option<u64>,
}

impl Untold {
    pub(super) fn new(node: &Arc<Node>, reader: &Reader, lease: u64) -> Self {
        Self { node: Arc::clone(node), reader: reader.clone(), lease: Some(lease) }
    }

    /// The answer is on its way: the lease is the reader's to release. If the connection ends before the
    /// answer went out, the lease ends with the reader's process.
    fn told(mut self) {
        self.lease = None;
    }
}

impl Drop for Untold {
    fn drop(&mut self) {
        if let Some(lease) = self.lease {
            self.node.leases().release(&self.reader, &[lease]);
        }
    }
}

/// A put on this connection.
#[derive(Debug)]
pub(super) struct OpenPut {
    pub(super) put: Put,
    pub(super) deadline: Instant,
}

/// What a local process shares with the node.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) reader: Reader,
    pub(super) staging: Option<Staging>,
    process: Process,
}

/// A staging area; the node reports the memory of all.
#[derive(Debug)]
pub(super) struct Staging {
    pub(super) memory: SharedMemory,
    node: Arc<Node>,
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.node.staging_bytes.fetch_sub(self.memory.len() as u64, Ordering::Relaxed);
    }
}

/// See the module.
pub(super) struct Served {
    pub(super) node: Arc<Node>,
    socket: Socket,
    incoming: Incoming,
    pub(super) outgoing: Outgoing,
    /// Set by the hello.
    pub(super) tenancy: Option<Tenancy>,
    pub(super) local: Option<Local>,
    pub(super) puts: HashMap<u64, OpenPut>,
    /// Tasks of requests that wait for others; ended with the connection.
    pub(super) tasks: JoinSet<()>,
    pub(super) running: HashMap<u64, tokio::task::AbortHandle>,
    pub(super) answers: mpsc::Sender<TaskAnswer>,
    inbox: mpsc::Receiver<TaskAnswer>,
    current: Option<(u64, Header)>,
    scrap: Vec<u8>,
    heard: Instant,
    /// The socket took no more at the last attempt: what it takes next, the peer made room for.
    blocked: bool,
    spin: Spin,
    /// Nothing new is begun; the connection ends when nothing is open.
    stopping: bool,
    /// Set when the peer asked for the arena: its answer goes out with descriptors.
    pub(super) attach: Option<u64>,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("the peer closed")]
    Closed,
    #[error(transparent)]
    Io(io::Error),
    #[error("the peer broke the protocol: {0}")]
    Protocol(#[from] DecodeError),
    #[error("nothing heard for {0:?}")]
    Silent(Duration),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Closed,
            _ => Self::Io(error),
        }
    }
}

impl From<ReadError> for End {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Io(error) => error.into(),
            ReadError::Protocol(error) => error.into(),
        }
    }
}

impl Served {
    pub(super) fn new(node: Arc<Node>, socket: Socket) -> Self {
        let (answers, inbox) = mpsc::channel(64);
        Self {
            node,
            socket,
            incoming: Incoming::default(),
            outgoing: Outgoing::default(),
            tenancy: None,
            local: None,
            puts: HashMap::new(),
            tasks: JoinSet::new(),
            running: HashMap::new(),
            answers,
            inbox,
            current: None,
            scrap: Vec::new(),
            heard: Instant::now(),
            blocked: false,
            spin: Spin::default(),
            stopping: false,
            attach: None,
        }
    }

    /// Serves until the peer leaves or breaks the protocol, or `stop`. Everything that the connection
    /// held is given back then, but for leases of a process that lives on.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        if let Err(end) = self.serve(&stop).await {
            match end {
                End::Closed => {}
                // The peer learns why, if it still listens.
                End::Protocol(error) => {
                    self.fail(0, 0, Code::Internal, &error.to_string());
                    let _ = self.outgoing.flush(&self.socket, TURN_BYTES);
                    debug!(%error, "connection closed");
                }
                other => debug!(%other, "connection closed"),
            }
        }
        let Self { node, local, mut tasks, inbox, .. } = self;
        // They may lease until they have ended, so they end before the leases are looked at.
        tasks.shutdown().await;
        drop(inbox); // Leases that the reader was not told of end.
        if let Some(Local { reader, process, .. }) = local {
            node.keep_until_gone(&reader, process);
        }
    }

    async fn serve(&mut self, stop: &CancellationToken) -> Result<(), End> {
        // One timer for the whole connection, set anew only when it rings or something is due before.
        let mut due = pin!(sleep_until(self.due_at()));
        loop {
            let said = self.outgoing.sent_bytes();
            // Answers of tasks wait in their bounded queue while the peer does not listen.
            while self.outgoing.len() < WAITING_FRAMES
                && let Ok(answer) = self.inbox.try_recv()
            {
                self.take(answer);
            }
            let drained = self.flush()?;
            self.end_overdue_puts(Instant::now());
            if self.stopping && self.is_idle() {
                return Ok(());
            }
            if drained && let Some(request) = self.attach.take() {
                self.hand_over(request).await?;
            }
            let held_back = self.outgoing.len() >= WAITING_FRAMES;
            if !held_back && self.receive()? {
                tokio::task::yield_now().await;
                continue;
            }
            let answers = !self.outgoing.is_empty() && drained;
            if answers || (self.attach.is_some() && self.outgoing.is_empty()) {
                continue; // Something to say to what just came.
            }
            let quiet = drained && self.outgoing.is_empty();
            if quiet && self.outgoing.sent_bytes() > said && self.look()? {
                continue;
            }
            self.wait(quiet, held_back, stop, due.as_mut()).await?;
        }
    }

    /// Looks for the next request for a moment before going to sleep, after something was answered on a
    /// Unix socket: a reader that takes part after part asks again within microseconds.
    fn look(&mut self) -> Result<bool, End> {
        let likely = self.local.is_some() && self.current.is_none() && self.running.is_empty();
        if !likely || !self.spin.is_worth_it() {
            return Ok(false);
        }
        let found = self.incoming.spin(&self.socket)?;
        self.spin.found(found);
        Ok(found)
    }

    /// When the silence of the peer, or an open put, is over its time.
    fn due_at(&self) -> Instant {
        let silent_at = self.heard + self.node.limits().silence;
        let overdue_at = self.puts.values().map(|open| open.deadline).min();
        overdue_at.map_or(silent_at, |at| at.min(silent_at))
    }

    /// Waits until there is something to do. Changes nothing but what a timer or an answer says.
    async fn wait(
        &mut self,
        nothing_to_send: bool,
        held_back: bool,
        stop: &CancellationToken,
        mut due: Pin<&mut Sleep>,
    ) -> Result<(), End> {
        let interest = match (nothing_to_send, held_back) {
            (true, _) => Interest::READABLE,
            (false, true) => Interest::WRITABLE,
            (false, false) => Interest::READABLE | Interest::WRITABLE,
        };
        let due_at = self.due_at();
        if due_at < due.deadline() {
            due.as_mut().reset(due_at);
        }
        tokio::select! {
            biased;
            ready = self.socket.ready(interest) => { ready?; }
            () = stop.cancelled(), if !self.stopping => self.stopping = true,
            Some(answer) = self.inbox.recv(), if !held_back => self.take(answer),
            Some(ended) = self.tasks.join_next_with_id() => self.task_ended(ended),
            () = &mut due => {
                let (now, silence) = (Instant::now(), self.node.limits().silence);
                if now >= self.heard + silence {
                    return Err(End::Silent(silence));
                }
                self.end_overdue_puts(now);
                due.as_mut().reset(self.due_at());
            }
        }
        Ok(())
    }

    /// Writes what the socket takes; whether nothing is left.
    fn flush(&mut self) -> io::Result<bool> {
        let before = self.outgoing.sent_bytes();
        let drained = self.outgoing.flush(&self.socket, TURN_BYTES)?;
        if self.outgoing.sent_bytes() > before && std::mem::take(&mut self.blocked) {
            self.heard = Instant::now(); // The peer took what had filled the socket.
        }
        self.blocked |= !drained;
        Ok(drained)
    }

    fn is_idle(&self) -> bool {
        self.outgoing.is_empty() && self.running.is_empty() && self.puts.is_empty()
    }

    /// A task that panicked answers nothing by itself.
    fn task_ended(&mut self, ended: Result<(tokio::task::Id, ()), JoinError>) {
        let Err(error) = ended else { return };
        let request = self.running.iter().find(|(_, task)| task.id() == error.id());
        if let (true, Some((request, _))) = (error.is_panic(), request) {
            let request = *request;
            warn!(%error, "request panicked");
            self.running.remove(&request);
            self.fail(request, 0, Code::Internal, "the node failed to answer; it has logged why");
        }
    }

    /// A put that is not committed in time loses its name and, since only this task writes it, its space.
    fn end_overdue_puts(&mut self, now: Instant) {
        let overdue: Vec<u64> = self
            .puts
            .iter()
            .filter(|(_, open)| open.deadline <= now)
            .map(|(request, _)| *request)
            .collect();
        for request in overdue {
            self.puts.remove(&request);
            let reason = "the put was not committed before its deadline";
            self.fail(request, 0, Code::Gone, reason);
        }
    }

    fn take(&mut self, answer: TaskAnswer) {
        let TaskAnswer { request, op, body, payload, lease, last } = answer;
        if !self.running.contains_key(&request) {
            return; // It was cancelled; a lease ends here.
        }
        if last {
            self.running.remove(&request);
        }
        if let Some(lease) = lease {
            lease.told();
        }
        let slot = self.slot();
        let (payload, class) = payload.unwrap_or((Bytes::new(), Class::Demand));
        self.outgoing.push_payload(op, request, slot, &Encoded(body), payload, class);
    }

    /// Takes in what is there; `true` when its turn was used up and there may be more.
    fn receive(&mut self) -> Result<bool, End> {
        let mut taken = 0;
        while taken < TURN_BYTES {
            if let Some((request, _)) = self.current {
                match self.payload(request)? {
                    None => return Ok(false),
                    Some(n) => taken += n,
                }
                if self.incoming.payload_left() == 0 {
                    self.current = None;
                }
                continue;
            }
            let Some((header, body)) = self.incoming.head(&self.socket)? else { return Ok(false) };
            let body = body.to_vec();
            self.heard = Instant::now();
            taken += HEADER_LEN + body.len();
            self.frame(&header, &body)?;
            if header.payload_len > 0 {
                self.current = Some((header.request, header));
            }
            if self.outgoing.len() >= WAITING_FRAMES || self.attach.is_some() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn frame(&mut self, header: &Header, body: &[u8]) -> Result<(), End> {
        match (&self.tenancy, header.op) {
            (_, op) if header.payload_len > 0 && op != Op::Data => {
                Err(broken("only data frames carry payload to a node"))
            }
            (None, Op::Hello) => {
                let hello: Hello = decode_body("hello", body)?;
                match requests::greet(&self.node, &hello) {
                    Ok((tenancy, answer)) => {
                        self.local = self.find_process(&tenancy)?;
                        self.outgoing.push(Op::HelloOk, header.request, 0, &answer);
                        self.tenancy = Some(tenancy);
                    }
                    Err((code, reason)) => self.fail(header.request, 0, code, &reason),
                }
                Ok(())
            }
            (None, _) => Err(broken("the first frame must be a hello")),
            (Some(_), Op::Hello) => Err(broken("hello was said already")),
            (Some(tenancy), _) if tenancy.slot != header.tenant_slot => {
                Err(broken("the tenant slot is not the one that hello gave"))
            }
            (Some(_), Op::Data) => self.begin_data(header),
            (Some(_), op)
                if self.is_open(header.request) && !matches!(op, Op::Commit | Op::Cancel) =>
            {
                Err(broken("the request id is in use"))
            }
            (Some(_), _) => Ok(self.answer(header, body)?),
        }
    }

    fn is_open(&self, request: u64) -> bool {
        self.running.contains_key(&request) || self.puts.contains_key(&request)
    }

    /// Payload of a put: it has to go on where the last piece ended.
    fn begin_data(&mut self, header: &Header) -> Result<(), End> {
        let Some(open) = self.puts.get_mut(&header.request) else { return Ok(()) };
        let filled = (open.put.part_len() - open.put.spare().len()) as u64;
        let fits = header.payload_len as usize <= open.put.spare().len();
        if header.payload_offset != filled || !fits {
            self.puts.remove(&header.request);
            let reason = "a put's bytes must come in order and not be more than was announced";
            self.fail(header.request, 0, Code::Limit, reason);
        }
        Ok(())
    }

    /// Reads payload: into its put, or away.
    fn payload(&mut self, request: u64) -> Result<Option<usize>, End> {
        let Some(open) = self.puts.get_mut(&request) else {
            self.scrap.resize(READ_BYTES, 0);
            let got = self.incoming.payload(&self.socket, &mut self.scrap)?;
            if got.is_some() {
                self.heard = Instant::now();
            }
            return Ok(got);
        };
        let spare = open.put.spare();
        let room = spare.len().min(READ_BYTES);
        let got = self.incoming.payload(&self.socket, &mut spare[..room])?;
        if let Some(n) = got {
            open.put.advance(n);
            self.heard = Instant::now(); // A slow writer is not a silent one.
        }
        Ok(got)
    }

    /// Who is at the other end of a Unix socket.
    fn find_process(&self, tenancy: &Tenancy) -> Result<Option<Local>, End> {
        let Some(stream) = self.socket.as_unix() else { return Ok(None) };
        let process = Process::of_peer(stream)?;
        let connection = self.node.next_connection();
        let pid = process.pid();
        let reader = Reader { connection, pid, name: tenancy.producer.name.as_str().into() };
        Ok(Some(Local { reader, staging: None, process }))
    }

    /// Sends the arena, for reading, and a staging area, for writing. Everything before it has gone out.
    async fn hand_over(&mut self, request: u64) -> Result<(), End> {
        let slot = self.slot();
        let (Some(stream), Some(local)) = (self.socket.as_unix(), &mut self.local) else {
            return Ok(());
        };
        let staging = SharedMemory::create("larder-staging", self.node.limits().staging_bytes)?;
        self.node.staging_bytes.fetch_add(staging.len() as u64, Ordering::Relaxed);
        let staging = Staging { memory: staging, node: Arc::clone(&self.node) };
        let arena = self.node.catalog().arena().memory();
        let attached = larder_proto::frame::Attached {
            arena_len: arena.len() as u64,
            staging_len: staging.memory.len() as u64,
        };
        let body = attached.to_wire();
        let len = u32::try_from(body.len()).unwrap_or(u32::MAX);
        let mut message = Header::new(Op::Attached, request, slot, len).encode().to_vec();
        message.extend_from_slice(&body);
        let read_only = arena.read_only_fd()?;
        send_with_fds(stream, &message, &[read_only.as_fd(), staging.memory.fd()]).await?;
        local.staging = Some(staging);
        Ok(())
    }

    pub(super) fn slot(&self) -> u32 {
        self.tenancy.as_ref().map_or(0, |tenancy| tenancy.slot)
    }

    /// Answers with a failure.
    pub(super) fn fail(&mut self, request: u64, item: u32, code: Code, reason: &str) {
        self.node.count_refusal(code);
        let failed = Failed { code, item, reason: ShortText::cut(reason) };
        let slot = self.slot();
        self.outgoing.push(Op::Failed, request, slot, &failed);
    }

    /// Answers with nothing to say.
    pub(super) fn done(&mut self, op: Op, request: u64) {
        let slot = self.slot();
        self.outgoing.push(op, request, slot, &Empty {});
    }
}

fn broken(rule: &'static str) -> End {
    DecodeError::Text { what: "frame", rule }.into()
}
