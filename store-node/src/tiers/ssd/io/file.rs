//! A file of a folder: checks requests and hands them to the driver.

use super::{
    File, PAGE, Pending, ReadBuffer, ReadInto,
    request::{Driver, OpenFile, Request},
};
use bytes::Bytes;
use rustix::fs::{AtFlags, StatxFlags, statx};
use std::{io, sync::Arc};

/// A file on a disk.
#[derive(Debug)]
pub(super) struct DiskFile {
    name: String,
    len: u64,
    open: Arc<OpenFile>,
    driver: Arc<dyn Driver>,
}

impl DiskFile {
    pub(super) fn new(name: &str, len: u64, open: OpenFile, driver: Arc<dyn Driver>) -> Self {
        Self { name: name.to_owned(), len, open: Arc::new(open), driver }
    }

    /// Bytes of the request, if it keeps to the rules of the module and to this file.
    fn check(
        &self,
        what: &str,
        offset: u64,
        pieces: impl Iterator<Item = (*const u8, usize)>,
        past_the_end: io::ErrorKind,
    ) -> io::Result<u64> {
        let refused = |kind, why: String| {
            io::Error::new(kind, format!("{what} {} at offset {offset}: {why}", self.name))
        };
        let mut total = 0u64;
        for (base, len) in pieces {
            total = total.saturating_add(len as u64);
            if !len.is_multiple_of(PAGE) || (len > 0 && !base.addr().is_multiple_of(PAGE)) {
                let why =
                    format!("a piece of {len} bytes at {base:p} is not whole pages of {PAGE}");
                return Err(refused(io::ErrorKind::InvalidInput, why));
            }
        }
        if !offset.is_multiple_of(PAGE as u64) {
            let why = format!("not at a bound of a page of {PAGE}");
            return Err(refused(io::ErrorKind::InvalidInput, why));
        }
        match offset.checked_add(total) {
            Some(end) if end <= self.len => Ok(total),
            _ => {
                let why = format!("{total} bytes are past the end of a file of {}", self.len);
                Err(refused(past_the_end, why))
            }
        }
    }
}

impl File for DiskFile {
    fn len(&self) -> u64 {
        self.len
    }

    fn write(&self, offset: u64, pieces: Vec<Bytes>) -> Pending<()> {
        let memory = pieces.iter().map(|piece| (piece.as_ptr(), piece.len()));
        match self.check("write", offset, memory, io::ErrorKind::InvalidInput) {
            Ok(0) => Pending::ended(Ok(())),
            Ok(_) => {
                let (request, pending) = Request::write(&self.open, offset, pieces);
                self.driver.submit(request);
                pending
            }
            Err(error) => Pending::ended(Err(error)),
        }
    }

    fn read(&self, offset: u64, mut into: Vec<Box<dyn ReadBuffer>>) -> Pending<ReadInto> {
        let memory = into.iter_mut().map(|buffer| {
            let bytes = buffer.bytes_mut();
            (bytes.as_ptr(), bytes.len())
        });
        match self.check("read", offset, memory, io::ErrorKind::UnexpectedEof) {
            Ok(0) => Pending::ended(Ok(into)),
            Ok(_) => {
                let (request, pending) = Request::read(&self.open, offset, into);
                self.driver.submit(request);
                pending
            }
            Err(error) => Pending::ended(Err(error)),
        }
    }

    fn sync(&self) -> Pending<()> {
        let (request, pending) = Request::sync(&self.open);
        self.driver.submit(request);
        pending
    }

    fn is_whole(&self) -> bool {
        // Of what the kernel knows: a file system over a network is not asked.
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = statx(&self.open.fd, "", flags, StatxFlags::NLINK | StatxFlags::SIZE);
        stat.is_ok_and(|stat| stat.stx_nlink > 0 && stat.stx_size == self.len)
    }
}
