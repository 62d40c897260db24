//! Frames on their way in.
//!
//! Heads (header and body) come through a small buffer, so that many small frames cost one read;
//! payloads are read straight into their destination but for the few bytes that came along with a head,
//! and the head behind a payload comes along with its last bytes.

use super::{Socket, spin};
use larder_proto::{
    frame::{HEADER_LEN, Header},
    wire::DecodeError,
};
use std::{io, time::Instant};

/// Bytes of the head buffer: room for many small frames, and little of a payload to copy.
const BUFFER: usize = 2 << 10;

/// Why no more frames come.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The peer closed, or the socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer broke the protocol.
    #[error(transparent)]
    Protocol(#[from] DecodeError),
}

/// Reads frames from a socket, without waiting.
#[derive(Debug)]
pub struct Incoming {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// The head that is being read, once its header is complete.
    header: Option<Header>,
    body: Vec<u8>,
    payload_left: usize,
}

impl Default for Incoming {
    fn default() -> Self {
        Self {
            buffer: vec![0; BUFFER].into(),
            start: 0,
            end: 0,
            header: None,
            body: Vec::new(),
            payload_left: 0,
        }
    }
}

impl Incoming {
    /// Payload bytes of the current frame that were not read yet. The next head comes after them.
    pub fn payload_left(&self) -> usize {
        self.payload_left
    }

    /// The next head, if it is there. Its payload has to be read with [`Self::payload`] next.
    ///
    /// # Panics
    /// When payload of the frame before is left.
    pub fn head(&mut self, socket: &Socket) -> Result<Option<(Header, &[u8])>, ReadError> {
        assert_eq!(self.payload_left, 0, "payload comes before the next head");
        loop {
            if self.header.is_none() && self.buffered() >= HEADER_LEN {
                let mut bytes = [0; HEADER_LEN];
                bytes.copy_from_slice(&self.buffer[self.start..self.start + HEADER_LEN]);
                self.start += HEADER_LEN;
                self.header = Some(Header::decode(&bytes)?);
                self.body.clear();
            }
            if let Some(header) = self.header {
                let missing = header.body_len as usize - self.body.len();
                if self.buffered() == 0 && missing >= BUFFER {
                    if !self.fill_body(socket, missing)? {
                        return Ok(None);
                    }
                    continue;
                }
                let now = missing.min(self.buffered());
                self.body.extend_from_slice(&self.buffer[self.start..self.start + now]);
                self.start += now;
                if missing == now {
                    self.header = None;
                    self.payload_left = header.payload_len as usize;
                    return Ok(Some((header, &self.body)));
                }
            }
            if !self.fill(socket)? {
                return Ok(None);
            }
        }
    }

    /// Reads payload of the current frame into the front of `into`, as much as is there; how much that
    /// was, or `None` when nothing is there now.
    pub fn payload(
        &mut self,
        socket: &Socket,
        into: &mut [u8],
    ) -> Result<Option<usize>, ReadError> {
        let want = into.len().min(self.payload_left);
        let buffered = want.min(self.buffered());
        let got = if buffered > 0 {
            into[..buffered].copy_from_slice(&self.buffer[self.start..self.start + buffered]);
            self.start += buffered;
            buffered
        } else {
            // The read that may end the payload takes the next head along.
            let behind = if want == self.payload_left { &mut self.buffer[..] } else { &mut [] };
            let Some(n) = read(|| socket.try_read(&mut into[..want], behind))? else {
                return Ok(None);
            };
            (self.start, self.end) = (0, n.saturating_sub(want));
            n.min(want)
        };
        self.payload_left -= got;
        Ok(Some(got))
    }

    /// Looks for a moment whether a head begins to come, without going to sleep. To be called when
    /// [`Self::head`] has found nothing.
    #[expect(clippy::disallowed_methods, reason = "a paused clock would never end the looking")]
    pub fn spin(&mut self, socket: &Socket) -> Result<bool, ReadError> {
        let until = Instant::now() + spin::SPIN;
        loop {
            if self.fill_with(|into| socket.read_now(into))? {
                return Ok(true);
            }
            if Instant::now() >= until {
                return Ok(false);
            }
            std::hint::spin_loop();
        }
    }

    /// Reads a long body straight to where it belongs; `false` when nothing is there now.
    fn fill_body(&mut self, socket: &Socket, missing: usize) -> Result<bool, ReadError> {
        let have = self.body.len();
        self.body.resize(have + missing, 0);
        let got = read(|| socket.try_read(&mut self.body[have..], &mut []));
        let n = got.as_ref().map_or(0, |got| got.unwrap_or(0));
        self.body.truncate(have + n);
        Ok(got?.is_some())
    }

    fn buffered(&self) -> usize {
        self.end - self.start
    }

    /// Reads more into the buffer; `false` when nothing is there now.
    fn fill(&mut self, socket: &Socket) -> Result<bool, ReadError> {
        self.fill_with(|into| socket.try_read(into, &mut []))
    }

    fn fill_with(
        &mut self,
        mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<bool, ReadError> {
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.buffered());
        match read(|| receive(&mut self.buffer[self.end..]))? {
            None => Ok(false),
            Some(n) => {
                self.end += n;
                Ok(true)
            }
        }
    }
}

fn read(mut receive: impl FnMut() -> io::Result<usize>) -> Result<Option<usize>, ReadError> {
    loop {
        match receive() {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(n) => return Ok(Some(n)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}
