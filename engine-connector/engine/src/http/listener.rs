//! Serving on a bounded number of connections.
//!
//! Connections may be silent for long: an answer that is not streamed says nothing until it is
//! complete, and a long prompt takes minutes. So there is no idle limit; the kernel's keep-alive
//! finds peers that have vanished.

use axum::Router;
use axum::serve::Listener;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

/// Silence after which the kernel asks whether the peer is still there.
const KEEP_ALIVE: Duration = Duration::from_secs(30);

/// Serves until `stop`, then lets the requests in progress end. Beyond `max_connections`, clients
/// wait in the socket's backlog.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    max_connections: usize,
    stop: CancellationToken,
) -> io::Result<()> {
    let listener = Limited { inner: listener, places: Arc::new(Semaphore::new(max_connections)) };
    axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await
}

struct Limited {
    inner: TcpListener,
    places: Arc<Semaphore>,
}

impl Listener for Limited {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let Ok(place) = Arc::clone(&self.places).acquire_owned().await else {
            unreachable!("the semaphore is never closed")
        };
        // Failed accepts (a client gone already, no descriptor left) are waited out in there.
        let (stream, peer) = Listener::accept(&mut self.inner).await;
        // Without these two a connection still works, only less well.
        let _ = stream.set_nodelay(true);
        let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
        let _ = rustix::net::sockopt::set_tcp_keepidle(&stream, KEEP_ALIVE);
        (Connection { stream, _place: place }, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

struct Connection {
    stream: TcpStream,
    _place: OwnedSemaphorePermit,
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
