//! The serving end of the reference: one task a connection.

use super::{
    CHUNK, HEAD, Head, Op, push_sums,
    slots::{Content, Slots},
    sums_are,
};
use crate::error::BenchError;
use larder_client::{
    connection::{send_with_fds, tune},
    memory::SharedMemory,
};
use larder_proto::checksum::{DEFAULT_CHUNK, RunningSums};
use std::{
    io::{self, IoSlice, Write},
    os::fd::AsFd,
    path::PathBuf,
    sync::Arc,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader},
    net::{TcpListener, UnixListener, UnixStream},
    runtime::Runtime,
    task::JoinSet,
};

/// Room for heads that were read along: a batch of 64 comes with one read.
const HEADS: usize = 64 * HEAD;
/// Bytes that are copied and summed at a time: they fit the first-level cache.
const COPY_STEP: usize = 32 << 10;

/// The hidden command that serves the reference.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Bytes of a part.
    #[arg(long)]
    pub(crate) len: usize,
    /// Slots.
    #[arg(long)]
    pub(crate) count: usize,
    /// Number of the part in slot 0.
    #[arg(long)]
    pub(crate) first_part: u64,
    /// Folder for the two Unix sockets.
    #[arg(long)]
    pub(crate) dir: PathBuf,
}

/// Serves until the process is stopped. Announces `tcp`, `unix` and `shared`, in this order.
pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let slots = Slots::new(args.len, args.count, args.first_part)
        .map_err(BenchError::io("make the slots of the reference"))?;
    let runtime = Runtime::new().map_err(BenchError::io("start the runtime"))?;
    let served = runtime.block_on(serve(Arc::new(slots), args));
    served.map_err(BenchError::io("serve the reference"))
}

async fn serve(slots: Arc<Slots>, args: &Args) -> io::Result<()> {
    let tcp = TcpListener::bind(("127.0.0.1", 0)).await?;
    let (unix, shared) = (args.dir.join("unix"), args.dir.join("shared"));
    let (unix_listener, shared_listener) =
        (UnixListener::bind(&unix)?, UnixListener::bind(&shared)?);
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "listening: tcp {}", tcp.local_addr()?)?;
    writeln!(stdout, "listening: unix {}", unix.display())?;
    writeln!(stdout, "listening: shared {}", shared.display())?;
    stdout.flush()?;
    drop(stdout);
    let mut connections = JoinSet::new();
    loop {
        let slots = Arc::clone(&slots);
        tokio::select! {
            accepted = tcp.accept() => {
                let (stream, _) = accepted?;
                tune(&stream)?;
                connections.spawn(serve_stream(slots, stream));
            }
            accepted = unix_listener.accept() => {
                connections.spawn(serve_stream(slots, accepted?.0));
            }
            accepted = shared_listener.accept() => {
                connections.spawn(serve_shared(slots, accepted?.0));
            }
            Some(ended) = connections.join_next() => match ended? {
                Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(error),
                _ => {}
            },
        }
    }
}

async fn serve_stream<S: AsyncRead + AsyncWrite + Unpin>(
    slots: Arc<Slots>,
    stream: S,
) -> io::Result<()> {
    let mut stream = BufReader::with_capacity(HEADS, stream);
    let (mut head, mut answer) = ([0; HEAD], Vec::new());
    loop {
        stream.read_exact(&mut head).await?;
        match Head::decode(&head) {
            Some(head) if head.op == Op::Get && fits(&slots, &head) => {
                get(&slots, &mut stream, head, &mut answer).await?;
            }
            Some(head) if head.op == Op::Put && fits(&slots, &head) => {
                put(&slots, &mut stream, head).await?;
            }
            _ => return Err(broken("a head that asks for nothing known")),
        }
    }
}

async fn get<S: AsyncRead + AsyncWrite + Unpin>(
    slots: &Slots,
    stream: &mut BufReader<S>,
    asked: Head,
    answer: &mut Vec<u8>,
) -> io::Result<()> {
    let slot = slots.read(asked.slot).ok_or_else(|| broken("a slot that is being written"))?;
    answer.clear();
    slot.with_content(|content| {
        let head = Head { op: Op::Done, part: content.part, ..asked };
        answer.extend_from_slice(&head.encode());
        push_sums(answer, &content.sums);
    });
    let mut chunks = slot.bytes().chunks(CHUNK);
    write_all(stream, [&answer[..], chunks.next().unwrap_or_default(), &[]]).await?;
    for chunk in chunks {
        stream.write_all(chunk).await?;
    }
    Ok(())
}

async fn put<S: AsyncRead + AsyncWrite + Unpin>(
    slots: &Slots,
    stream: &mut BufReader<S>,
    asked: Head,
) -> io::Result<()> {
    let mut slot = slots.write(asked.slot).ok_or_else(|| broken("a slot that is in use"))?;
    let len = slots.len();
    let (mut filled, mut sums) = (0, RunningSums::new(DEFAULT_CHUNK));
    let bytes = slot.bytes();
    while filled < bytes.len() {
        let end = bytes.len().min(filled + CHUNK);
        let n = stream.read(&mut bytes[filled..end]).await?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        sums.update(&bytes[filled.min(len)..(filled + n).min(len)], |_, _| ());
        filled += n;
    }
    let sums = sums.finish(|_, _| ()).sums;
    if !sums_are(&bytes[len..], &sums) {
        return Err(broken("bytes that do not match their sums"));
    }
    slot.commit(Content { part: asked.part, sums });
    stream.write_all(&Head { op: Op::Done, ..asked }.encode()).await
}

/// Hands out the slots, for reading, and a staging area, then locates and takes.
async fn serve_shared(slots: Arc<Slots>, stream: UnixStream) -> io::Result<()> {
    let mut staging = SharedMemory::create("larder-bench-staging", slots.len())?;
    staging.populate(usize::MAX, |_| Ok(()))?;
    let read_only = slots.memory().read_only_fd()?;
    let len = (slots.memory().len() as u64).to_le_bytes();
    send_with_fds(&stream, &len, &[read_only.as_fd(), staging.fd()]).await?;
    let mut stream = BufReader::with_capacity(HEADS, stream);
    let (mut head, mut answers) = ([0; HEAD], Vec::new());
    loop {
        stream.read_exact(&mut head).await?;
        let answer = match Head::decode(&head) {
            Some(head) if head.op == Op::Locate && fits(&slots, &head) => {
                let slot = slots.read(head.slot);
                let slot = slot.ok_or_else(|| broken("a slot that is being written"))?;
                let part = slot.with_content(|content| content.part);
                let offset = slots.offset(head.slot) as u64;
                Head { op: Op::Done, part, len: offset, ..head }
            }
            Some(head) if head.op == Op::Staged && fits(&slots, &head) => {
                take_staged(&slots, &staging, head)?
            }
            _ => return Err(broken("a head that asks for nothing known")),
        };
        answers.extend_from_slice(&answer.encode());
        // Heads that came together are answered together.
        if stream.buffer().len() < HEAD {
            stream.write_all(&answers).await?;
            answers.clear();
        }
    }
}

fn take_staged(slots: &Slots, staging: &SharedMemory, asked: Head) -> io::Result<Head> {
    let mut slot = slots.write(asked.slot).ok_or_else(|| broken("a slot that is in use"))?;
    let mut sums = RunningSums::new(DEFAULT_CHUNK);
    let len = slots.len();
    for (from, into) in (0..).step_by(COPY_STEP).zip(slot.bytes()[..len].chunks_mut(COPY_STEP)) {
        staging.copy_out(from, into);
        sums.update(into, |_, _| ());
    }
    let sums = sums.finish(|_, _| ()).sums;
    slot.commit(Content { part: asked.part, sums });
    Ok(Head { op: Op::Done, ..asked })
}

fn fits(slots: &Slots, head: &Head) -> bool {
    head.len == slots.len() as u64
}

/// Writes up to three pieces, in one call if the socket takes them.
pub(super) async fn write_all<S: AsyncWrite + Unpin>(
    stream: &mut S,
    pieces: [&[u8]; 3],
) -> io::Result<()> {
    let mut slices = pieces.map(IoSlice::new);
    let mut left = &mut slices[..];
    IoSlice::advance_slices(&mut left, 0); // Skips empty pieces.
    while !left.is_empty() {
        match stream.write_vectored(left).await? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            n => IoSlice::advance_slices(&mut left, n),
        }
    }
    Ok(())
}

fn broken(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
