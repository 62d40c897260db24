//! A listener with a bounded number of connections, each closed when it moves no byte for long.
//!
//! Why here: `axum::serve` offers neither bound, and a client that opens connections and says
//! nothing would hold memory and descriptors for ever.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep},
};

/// Accepts while fewer than a number of its connections are open.
pub(super) struct LimitedListener {
    inner: TcpListener,
    slots: Arc<Semaphore>,
    idle_limit: Duration,
}

impl LimitedListener {
    pub(super) fn new(inner: TcpListener, max_connections: usize, idle_limit: Duration) -> Self {
        Self { inner, slots: Arc::new(Semaphore::new(max_connections)), idle_limit }
    }
}

impl Listener for LimitedListener {
    type Io = LimitedStream;
    type Addr = SocketAddr;

    /// Safe to cancel: a permit that was taken is given back.
    async fn accept(&mut self) -> (LimitedStream, SocketAddr) {
        let slot = match Arc::clone(&self.slots).acquire_owned().await {
            Ok(slot) => slot,
            Err(_) => unreachable!("the semaphore is never closed"),
        };
        // Accept errors (a client gone already, no descriptor left) are waited out in there.
        let (stream, peer) = Listener::accept(&mut self.inner).await;
        (LimitedStream::new(stream, self.idle_limit, slot), peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

/// A connection that fails with `TimedOut` when it moves no byte for the idle limit.
pub(super) struct LimitedStream {
    inner: TcpStream,
    idle_limit: Duration,
    deadline: Pin<Box<Sleep>>,
    _slot: OwnedSemaphorePermit,
}

impl LimitedStream {
    fn new(inner: TcpStream, idle_limit: Duration, slot: OwnedSemaphorePermit) -> Self {
        Self { inner, idle_limit, deadline: Box::pin(sleep(idle_limit)), _slot: slot }
    }

    /// Passes on what is ready and puts the deadline off; while nothing is, watches the deadline.
    fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.deadline.as_mut().reset(Instant::now() + self.idle_limit);
            return polled;
        }
        self.deadline.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for LimitedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_read(cx, buf);
        self.watch(cx, polled)
    }
}

impl AsyncWrite for LimitedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.watch(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.watch(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
