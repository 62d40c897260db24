//! Where tests of a folder lie, and what they write.

use super::super::{
    AlignedBuffer, DiskFolder, DiskOptions, DriverKind, File, Folder, OpenError, PAGE, ReadBuffer,
    start::Way,
};
use bytes::Bytes;
use parking_lot::Mutex;
use std::{any::Any, sync::Arc};
use tempfile::TempDir;

/// A folder that is removed with its files.
pub(in super::super) struct Bed {
    pub(super) dir: TempDir,
    way: Way,
}

impl Bed {
    /// Beside the build, which is on a disk where `/tmp` may not be.
    pub(in super::super) fn new(way: Way) -> Self {
        let target = std::env::current_exe().unwrap();
        Self { dir: tempfile::tempdir_in(target.parent().unwrap()).unwrap(), way }
    }

    /// `None` where this machine forbids the way; nothing can be tested then, and that is said.
    pub(in super::super) fn open(&self) -> Option<DiskFolder> {
        match DiskFolder::open_by(self.dir.path(), &DiskOptions::default(), &[self.way]) {
            Ok(folder) => {
                assert_eq!(
                    (folder.driver().kind, folder.driver().direct),
                    (self.way.kind, self.way.direct)
                );
                Some(folder)
            }
            // A ring that works elsewhere on this machine has to work here.
            Err(OpenError::NoDriver { tried, .. }) if !(self.is_ring() && rings_work()) => {
                println!("skipped: {}", tried.join("; "));
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn is_ring(&self) -> bool {
        self.way.kind == DriverKind::IoUring
    }
}

fn rings_work() -> bool {
    io_uring::IoUring::new(1).is_ok()
}

/// Bytes that tell their place: a page that lands elsewhere is seen.
pub(in super::super) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let word =
        |at: usize| (seed << 32 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..len / 8).flat_map(word).collect()
}

/// The same, as a device wants it.
pub(in super::super) fn pages(seed: u64, len: usize) -> Bytes {
    AlignedBuffer::copy_of(&pattern(seed, len)).freeze()
}

pub(in super::super) fn buffers(lens: &[usize]) -> Vec<Box<dyn ReadBuffer>> {
    lens.iter().map(|len| Box::new(AlignedBuffer::zeroed(*len)) as Box<dyn ReadBuffer>).collect()
}

/// All that a file holds.
pub(in super::super) fn content(file: &dyn File) -> Vec<u8> {
    let len = usize::try_from(file.len()).unwrap();
    let mut read = file.read(0, buffers(&[len])).wait().unwrap();
    read[0].bytes_mut().to_vec()
}

/// What was in a buffer when it was freed, told to those who look.
#[derive(Clone, Default)]
pub(in super::super) struct Seen(Arc<Mutex<Vec<Vec<u8>>>>);

impl Seen {
    pub(in super::super) fn buffer(&self, len: usize) -> Box<dyn ReadBuffer> {
        Box::new(Observed { seen: self.clone(), buffer: AlignedBuffer::zeroed(len) })
    }

    pub(in super::super) fn bytes(&self, from: &[u8]) -> Bytes {
        Bytes::from_owner(Observed { seen: self.clone(), buffer: AlignedBuffer::copy_of(from) })
    }

    pub(in super::super) fn at_drop(&self) -> Vec<Vec<u8>> {
        self.0.lock().clone()
    }
}

struct Observed {
    seen: Seen,
    buffer: AlignedBuffer,
}

impl ReadBuffer for Observed {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

impl AsRef<[u8]> for Observed {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        self.seen.0.lock().push(self.buffer.to_vec());
    }
}

/// A buffer that is not at a page's bound.
pub(in super::super) struct Skewed {
    pub(super) buffer: AlignedBuffer,
    pub(super) by: usize,
    pub(super) len: usize,
}

impl Skewed {
    pub(in super::super) fn new(by: usize, len: usize) -> Self {
        Self { buffer: AlignedBuffer::zeroed(len + PAGE), by, len }
    }
}

impl ReadBuffer for Skewed {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[self.by..self.by + self.len]
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

/// A file with a pattern in it.
pub(in super::super) fn filled(
    folder: &DiskFolder,
    name: &str,
    seed: u64,
    len: usize,
) -> Arc<dyn File> {
    let file = folder.create(name, len as u64).unwrap();
    file.write(0, vec![pages(seed, len)]).wait().unwrap();
    file
}
