//! The ring's table of files: the kernel looks a descriptor up once a file, not once an operation.

use super::{
    super::request::OpenFile,
    queue::{Command, Shared},
};
use io_uring::IoUring;
use std::{os::fd::AsRawFd, sync::Arc};

/// Places of the table. Files beyond it are used by their descriptor, which costs a little more.
const PLACES: u32 = 512;

/// A file's place in the table. The kernel keeps the file as long as it is there, so dropping this frees the
/// place: a removed file gives its space back at once.
#[derive(Debug)]
pub(in super::super) struct Registration {
    place: u32,
    shared: Arc<Shared>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.shared.push(Command::Forget(self.place));
    }
}

/// The places that are free.
#[derive(Debug)]
pub(super) struct FileTable {
    free: Vec<u32>,
}

impl FileTable {
    /// An empty table; one without places where the kernel has none (before 5.19, or few descriptors).
    pub(super) fn of(ring: &IoUring) -> Self {
        let places =
            if ring.submitter().register_files_sparse(PLACES).is_ok() { PLACES } else { 0 };
        Self { free: (0..places).rev().collect() }
    }

    /// The file's place, now taken if it had none.
    pub(super) fn place(
        &mut self,
        ring: &IoUring,
        file: &OpenFile,
        shared: &Arc<Shared>,
    ) -> Option<u32> {
        if let Some(registration) = file.registration.get() {
            return Some(registration.place);
        }
        let place = self.free.pop()?;
        if ring.submitter().register_files_update(place, &[file.fd.as_raw_fd()]).is_err() {
            self.free.push(place);
            return None;
        }
        let registration = Registration { place, shared: Arc::clone(shared) };
        Some(file.registration.get_or_init(|| registration).place)
    }

    /// Empties a place. No operation uses it any more: the requests of a file keep it open.
    pub(super) fn forget(&mut self, ring: &IoUring, place: u32) {
        // A place that could not be emptied is not used again.
        if ring.submitter().register_files_update(place, &[-1]).is_ok() {
            self.free.push(place);
        }
    }
}
