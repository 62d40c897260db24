//! The data plane's serving side: TCP for peers and clients, a Unix socket for processes of this host.
//!
//! `connection` is the loop that owns a socket; `requests` answers what needs no waiting, and
//! `waiting` what does. `leases` lets local readers read in place.

mod connection;
mod leases;
#[expect(unsafe_code, reason = "socket options and pidfds; each block has its proof")]
mod process;
mod requests;
mod waiting;

pub use leases::{LeaseInfo, Leases, Reader};
pub use process::Process;

use crate::node::Node;
use connection::Served;
use larder_client::connection::Socket;
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{
    net::{TcpListener, UnixListener},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// Bounds of the serving side.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at a time; another one is closed at once.
    pub connections: usize,
    /// Open requests of one connection.
    pub requests: u32,
    /// A connection on which nothing is heard for this long is closed.
    pub silence: Duration,
    /// A put has to be committed within this time.
    pub write_deadline: Duration,
    /// Bytes of one local connection's staging area.
    pub staging_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            requests: 256,
            silence: Duration::from_secs(10),
            write_deadline: Duration::from_secs(30),
            staging_bytes: 64 << 20,
        }
    }
}

/// A listening socket of the data plane.
#[derive(Debug)]
pub enum Listener {
    /// For peers and remote clients.
    Tcp(TcpListener),
    /// For processes of this host; its file is removed at the end.
    Unix(UnixListener, SocketFile),
}

/// The file of a Unix socket; removed when dropped.
#[derive(Debug)]
pub struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0); // Somebody may have tidied up already.
    }
}

impl Listener {
    /// Binds a Unix socket. A file that is left over from a node that is gone is replaced; one that
    /// still answers is not.
    pub fn unix(path: &Path) -> io::Result<Self> {
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            let why = "it is the socket of a node that is running";
            return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
        }
        match std::fs::symlink_metadata(path) {
            Ok(meta) if std::os::unix::fs::FileTypeExt::is_socket(&meta.file_type()) => {
                std::fs::remove_file(path)?;
            }
            Ok(_) => {
                let why = "it exists and is not a socket";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(Self::Unix(UnixListener::bind(path)?, SocketFile(path.to_owned())))
    }

    async fn accept(&self) -> io::Result<Socket> {
        match self {
            Self::Tcp(listener) => Socket::tcp(listener.accept().await?.0),
            Self::Unix(listener, _) => Ok(Socket::Unix(listener.accept().await?.0)),
        }
    }
}

/// Pause after an `accept` that failed: out of descriptors, every attempt fails at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves a listener until `stop`. Connections then end as soon as nothing is open on them; requests that
/// run go on for as long as `stop`'s owner waits.
pub async fn serve(node: Arc<Node>, listener: Listener, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    let mut failing = false;
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(ended) = connections.join_next() => {
                if let Err(error) = ended && error.is_panic() {
                    warn!(%error, "connection task panicked");
                }
            }
            accepted = listener.accept() => match accepted {
                Ok(socket) if connections.len() < node.limits().connections => {
                    failing = false;
                    let served = Served::new(Arc::clone(&node), socket);
                    connections.spawn(served.run(stop.clone()));
                }
                Ok(_) => warn!(limit = node.limits().connections, "connection refused: limit"),
                // Out of descriptors or a peer that went away: neither ends the node.
                Err(error) => {
                    if !failing {
                        warn!(%error, "accept");
                    }
                    failing = true;
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

#[cfg(test)]
mod tests;
