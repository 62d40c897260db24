//! A TCP or Unix stream, read and written without waiting; waiting is for [`Socket::ready`].

use rustix::{
    fd::OwnedFd,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags},
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd},
};
use tokio::{
    io::{Interest, Ready},
    net::{TcpStream, UnixStream},
};

/// The most descriptors that one message carries.
const FDS_LIMIT: usize = 2;

/// A connected stream.
#[derive(Debug)]
pub enum Socket {
    /// Over a network.
    Tcp(TcpStream),
    /// On this host.
    Unix(UnixStream),
}

impl Socket {
    /// A TCP stream, with small messages sent at once.
    pub fn tcp(stream: TcpStream) -> io::Result<Self> {
        tune(&stream)?;
        Ok(Self::Tcp(stream))
    }

    /// Waits until one of the interests may succeed. Safe to cancel.
    pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        match self {
            Self::Tcp(stream) => stream.ready(interest).await,
            Self::Unix(stream) => stream.ready(interest).await,
        }
    }

    /// Reads what is there, into `first` and what does not fit there into `rest`. Zero bytes mean that the
    /// peer closed.
    ///
    /// A read that does not fill both has emptied the socket, so the next one says `WouldBlock` without
    /// asking the system, until more has come.
    pub fn try_read(&self, first: &mut [u8], rest: &mut [u8]) -> io::Result<usize> {
        let room = first.len() + rest.len();
        let mut into = [IoSliceMut::new(first), IoSliceMut::new(rest)];
        let mut got = 0;
        let mut read = |fd: BorrowedFd<'_>| {
            got = rustix::io::readv(fd, &mut into)?;
            match got < room && got > 0 {
                // Makes tokio wait for the next event; one that came meanwhile is not lost, since the
                // readiness that is taken back is the one from before the read.
                true => Err(io::ErrorKind::WouldBlock.into()),
                false => Ok(()),
            }
        };
        let outcome = match self {
            Self::Tcp(stream) => stream.try_io(Interest::READABLE, || read(stream.as_fd())),
            Self::Unix(stream) => stream.try_io(Interest::READABLE, || read(stream.as_fd())),
        };
        match outcome {
            Err(error) if got == 0 => Err(error),
            _ => Ok(got),
        }
    }

    /// Reads what is there, whether or not the runtime has heard of it yet.
    pub(super) fn read_now(&self, into: &mut [u8]) -> io::Result<usize> {
        let fd = match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        };
        Ok(rustix::io::read(fd, into)?)
    }

    /// Writes what fits.
    pub fn try_write(&self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write_vectored(from),
            Self::Unix(stream) => stream.try_write_vectored(from),
        }
    }

    /// The Unix stream, if it is one: only there can descriptors travel.
    pub fn as_unix(&self) -> Option<&UnixStream> {
        match self {
            Self::Unix(stream) => Some(stream),
            Self::Tcp(_) => None,
        }
    }
}

/// Prepares a stream for frames: small ones are sent at once, and over loopback addresses nothing is paced.
///
/// Where the system's congestion control is BBR it paces on loopback too, though there is no bottleneck to
/// find: 0.6 of CUBIC's throughput at 1.8 times its CPU, measured with one client that puts parts of 1 MiB.
/// So loopback has CUBIC, if the kernel has it.
pub fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    // A peer that is gone already has no address; the connection finds that out by itself.
    if stream.peer_addr().is_ok_and(|peer| peer.ip().to_canonical().is_loopback()) {
        // Only a matter of speed; a kernel may lack or forbid it.
        let _ = rustix::net::sockopt::set_tcp_congestion(stream, "cubic");
    }
    Ok(())
}

/// Sends a short message together with descriptors. Waits for room; not safe to cancel half way, so the
/// caller closes the connection if it does.
pub async fn send_with_fds(
    stream: &UnixStream,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        stream.writable().await?;
        let attempt = stream.try_io(Interest::WRITABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_LIMIT))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if sent == 0 {
                control.push(rustix::net::SendAncillaryMessage::ScmRights(fds));
            }
            let data = [IoSlice::new(&bytes[sent..])];
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            Ok(rustix::net::sendmsg(stream.as_fd(), &data, &mut control, flags)?)
        });
        match attempt {
            Ok(n) => sent += n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Receives exactly `into.len()` bytes and the descriptors that came with them.
pub async fn receive_with_fds(stream: &UnixStream, into: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
    let (mut filled, mut fds) = (0, Vec::new());
    while filled < into.len() {
        stream.readable().await?;
        let attempt = stream.try_io(Interest::READABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_LIMIT))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut data = [IoSliceMut::new(&mut into[filled..])];
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let got = rustix::net::recvmsg(stream.as_fd(), &mut data, &mut control, flags)?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            Ok(got.bytes)
        });
        match attempt {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(fds)
}
