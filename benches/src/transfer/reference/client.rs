//! The asking end of the reference.

use super::{CHUNK, HEAD, Head, Op, push_sums, server::write_all, sums_are, sums_len};
use crate::{
    content,
    error::BenchError,
    transfer::client::{Client, Part, Payload},
};
use larder_client::{
    connection::{receive_with_fds, tune},
    memory::SharedMemory,
};
use larder_proto::checksum::{DEFAULT_CHUNK, RunningSums, sum};
use std::{io, path::Path};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpStream, UnixStream},
};

/// A client over a stream.
#[derive(Debug)]
pub(crate) struct OverStream<S> {
    stream: S,
    /// Answers, head and all: used again and again.
    buffers: Vec<Vec<u8>>,
    payload: Payload,
    heads: Vec<u8>,
}

impl OverStream<TcpStream> {
    pub(crate) async fn tcp(address: &str) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        tune(&stream)?;
        Ok(Self::new(stream))
    }
}

impl OverStream<UnixStream> {
    pub(crate) async fn unix(socket: &Path) -> io::Result<Self> {
        Ok(Self::new(UnixStream::connect(socket).await?))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> OverStream<S> {
    fn new(stream: S) -> Self {
        let payload = Payload::default();
        Self { stream, buffers: Vec::new(), payload, heads: Vec::new() }
    }

    /// Reads the answer to a get into buffer `at`, verifying each chunk while it is in the cache.
    async fn receive(&mut self, at: usize, part: Part) -> Result<(), BenchError> {
        let front = HEAD + sums_len(part.len);
        let total = front + part.len;
        if self.buffers.len() <= at {
            self.buffers.resize_with(at + 1, Vec::new);
        }
        let buffer = &mut self.buffers[at];
        buffer.resize(total, 0);
        let (mut filled, mut sums) = (0, RunningSums::new(DEFAULT_CHUNK));
        while filled < total {
            let end = total.min(filled.max(front) + CHUNK);
            let n = self.stream.read(&mut buffer[filled..end]).await.map_err(lost)?;
            if n == 0 {
                return Err(lost(io::ErrorKind::UnexpectedEof.into()));
            }
            sums.update(&buffer[filled.max(front)..(filled + n).max(front)], |_, _| ());
            filled += n;
        }
        let sums = sums.finish(|_, _| ()).sums;
        answered(buffer[..HEAD].first_chunk(), part)?;
        match sums_are(&buffer[HEAD..front], &sums) {
            true => Ok(content::look(part.number, &buffer[front..])?),
            false => Err(wrong("bytes that do not match their sums")),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Client for OverStream<S> {
    async fn get(&mut self, part: Part) -> Result<(), BenchError> {
        let asked = head(Op::Get, part).encode();
        self.stream.write_all(&asked).await.map_err(lost)?;
        self.receive(0, part).await
    }

    async fn put(&mut self, part: Part) -> Result<(), BenchError> {
        let bytes = self.payload.of(part);
        let head = head(Op::Put, part).encode();
        let mut trailer = Vec::with_capacity(sums_len(part.len));
        let chunks = bytes.chunks(CHUNK);
        let last = chunks.len() - 1;
        for (i, chunk) in chunks.enumerate() {
            push_sums(&mut trailer, &[sum(chunk)]);
            let front: &[u8] = if i == 0 { &head } else { &[] };
            let back: &[u8] = if i == last { &trailer } else { &[] };
            write_all(&mut self.stream, [front, chunk, back]).await.map_err(lost)?;
        }
        let mut answer = [0; HEAD];
        self.stream.read_exact(&mut answer).await.map_err(lost)?;
        answered(Some(&answer), part)
    }

    async fn batch_get(&mut self, parts: &[Part]) -> Result<(), BenchError> {
        self.heads.clear();
        parts.iter().for_each(|part| self.heads.extend_from_slice(&head(Op::Get, *part).encode()));
        self.stream.write_all(&self.heads).await.map_err(lost)?;
        for (at, part) in parts.iter().enumerate() {
            self.receive(at, *part).await?;
        }
        Ok(())
    }

    async fn check(&mut self, part: Part) -> Result<(), BenchError> {
        self.get(part).await?;
        let bytes =
            self.buffers.first().map_or(&[][..], |buffer| &buffer[HEAD + sums_len(part.len)..]);
        Ok(content::check(part.number, bytes)?)
    }
}

/// A client that shares memory with the reference.
#[derive(Debug)]
pub(crate) struct OverMemory {
    stream: UnixStream,
    slots: SharedMemory,
    staging: SharedMemory,
    /// Gets copy into `buffer`, without asking where; otherwise they ask and touch.
    copying: bool,
    stride: usize,
    buffers: Vec<Vec<u8>>,
    payload: Payload,
}

impl OverMemory {
    /// `copying`: a get is one copy out of memory whose place is known, the most that any service could reach.
    /// Otherwise it asks for the place and touches the bytes there.
    pub(crate) async fn connect(socket: &Path, len: usize, copying: bool) -> io::Result<Self> {
        let stream = UnixStream::connect(socket).await?;
        let mut slots_len = [0; 8];
        let fds = receive_with_fds(&stream, &mut slots_len).await?;
        let [slots, staging] = fds.try_into().map_err(|_| io::ErrorKind::InvalidData)?;
        let slots_len = usize::try_from(u64::from_le_bytes(slots_len)).unwrap_or(usize::MAX);
        let slots = SharedMemory::open(slots, slots_len, false)?;
        let staging = SharedMemory::open(staging, len, true)?;
        let stride = super::stride(len);
        let payload = Payload::default();
        Ok(Self { stream, slots, staging, copying, stride, buffers: Vec::new(), payload })
    }

    /// The last field of the answer: where the part lies, for a `Locate`.
    async fn ask(&mut self, op: Op, part: Part) -> Result<usize, BenchError> {
        self.stream.write_all(&head(op, part).encode()).await.map_err(lost)?;
        let mut answer = [0; HEAD];
        self.stream.read_exact(&mut answer).await.map_err(lost)?;
        located(&answer, part)
    }

    fn copy(&mut self, at: usize, part: Part) -> Result<(), BenchError> {
        if self.buffers.len() <= at {
            self.buffers.resize_with(at + 1, Vec::new);
        }
        let buffer = &mut self.buffers[at];
        buffer.resize(part.len, 0);
        self.slots.copy_out(part.slot as usize * self.stride, buffer);
        Ok(content::look(part.number, buffer)?)
    }

    fn touch(&self, part: Part, at: usize) -> Result<(), BenchError> {
        let byte_at = |offset: usize| {
            let mut byte = [0];
            self.slots.copy_out(at + offset, &mut byte);
            byte[0]
        };
        Ok(content::touch(part.number, part.len, byte_at)?)
    }
}

impl Client for OverMemory {
    async fn get(&mut self, part: Part) -> Result<(), BenchError> {
        if self.copying {
            return self.copy(0, part);
        }
        let at = self.ask(Op::Locate, part).await?;
        self.touch(part, at)
    }

    async fn put(&mut self, part: Part) -> Result<(), BenchError> {
        let bytes = self.payload.of(part);
        // SAFETY: the staging area belongs to this connection alone; the server reads it only between a
        // `Staged` and its answer, and `&mut self` waits for that answer before it writes again.
        #[expect(unsafe_code, reason = "the staging area is shared with the reference")]
        unsafe { self.staging.bytes_mut(0, part.len) }.copy_from_slice(&bytes);
        self.ask(Op::Staged, part).await?;
        Ok(())
    }

    async fn batch_get(&mut self, parts: &[Part]) -> Result<(), BenchError> {
        if self.copying {
            for (at, part) in parts.iter().enumerate() {
                self.copy(at, *part)?;
            }
            return Ok(());
        }
        let heads: Vec<u8> =
            parts.iter().flat_map(|part| head(Op::Locate, *part).encode()).collect();
        self.stream.write_all(&heads).await.map_err(lost)?;
        let mut answers = vec![0; heads.len()];
        self.stream.read_exact(&mut answers).await.map_err(lost)?;
        for (part, answer) in parts.iter().zip(answers.as_chunks().0) {
            self.touch(*part, located(answer, *part)?)?;
        }
        Ok(())
    }

    async fn check(&mut self, part: Part) -> Result<(), BenchError> {
        self.copy(0, part)?;
        Ok(content::check(part.number, &self.buffers[0])?)
    }
}

fn head(op: Op, part: Part) -> Head {
    Head { op, slot: part.slot, part: part.number, len: part.len as u64 }
}

fn answered(head: Option<&[u8; HEAD]>, part: Part) -> Result<(), BenchError> {
    match head.and_then(Head::decode) {
        Some(head) if head.op == Op::Done && head.part == part.number => Ok(()),
        _ => Err(wrong("another part")),
    }
}

fn located(answer: &[u8; HEAD], part: Part) -> Result<usize, BenchError> {
    answered(Some(answer), part)?;
    let at = Head::decode(answer).map(|head| head.len);
    at.and_then(|at| usize::try_from(at).ok()).ok_or_else(|| wrong("no place"))
}

fn lost(error: io::Error) -> BenchError {
    BenchError::io("talk to the reference")(error)
}

fn wrong(answer: &str) -> BenchError {
    BenchError::Answer { doing: "ask the reference", answer: answer.to_owned() }
}
