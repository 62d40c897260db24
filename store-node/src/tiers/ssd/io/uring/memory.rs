//! Memory that the ring knows beforehand: its pages are looked up and locked once, not once a request.

use super::super::area::Area;
use io_uring::IoUring;
use rustix::process::{Resource, getrlimit};
use std::{io, ops::Range};

/// The longest piece that the kernel takes.
const PIECE: usize = 1 << 30;
/// The most pieces that it takes.
const PIECES: usize = 1 << 14;

/// The pieces that are registered, by address.
#[derive(Debug, Default)]
pub(super) struct Registered {
    pieces: Vec<Range<usize>>,
    /// Keeps the memory as long as the ring, which is dropped before.
    _areas: Vec<Area>,
}

impl Registered {
    /// Registers all areas, or none and says why: requests then name their memory one by one.
    pub(super) fn with(ring: &IoUring, areas: Vec<Area>) -> (Self, Option<String>) {
        let pieces: Vec<Range<usize>> = areas.iter().flat_map(|area| cut(area.range())).collect();
        if pieces.is_empty() {
            return (Self::default(), None);
        }
        match register(ring, &pieces) {
            Ok(()) => (Self { pieces, _areas: areas }, None),
            Err(error) => {
                let wanted = areas.iter().map(|area| area.range().len()).sum();
                (Self::default(), Some(why_not(wanted, &error)))
            }
        }
    }

    /// The memory of an operation, if it is one stretch and lies in one piece: base, length, and the number of
    /// the piece.
    pub(super) fn only(&self, vector: &[libc::iovec]) -> Option<(*mut u8, u32, u16)> {
        let [memory] = vector else { return None };
        let start = memory.iov_base.addr();
        let holds =
            |piece: &Range<usize>| piece.contains(&start) && memory.iov_len <= piece.end - start;
        let piece = u16::try_from(self.pieces.iter().position(holds)?).ok()?;
        Some((memory.iov_base.cast(), u32::try_from(memory.iov_len).ok()?, piece))
    }
}

fn cut(area: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = area.end;
    area.step_by(PIECE).map(move |start| start..end.min(start.saturating_add(PIECE)))
}

fn register(ring: &IoUring, pieces: &[Range<usize>]) -> io::Result<()> {
    if pieces.len() > PIECES {
        return Err(io::Error::other("the kernel registers at most 16 TiB"));
    }
    let vector: Vec<libc::iovec> = pieces
        .iter()
        .map(|piece| libc::iovec {
            iov_base: std::ptr::without_provenance_mut(piece.start),
            iov_len: piece.len(),
        })
        .collect();
    // SAFETY: each piece lies in an area, whose memory stays until the area is dropped. `Registered` holds
    // the areas, and `RingThread` drops the ring before it.
    #[expect(unsafe_code, reason = "the kernel is told of memory")]
    unsafe {
        ring.submitter().register_buffers(&vector)
    }
}

/// For the operator: what was wanted, what is allowed, and what to do (F49).
fn why_not(wanted: usize, error: &io::Error) -> String {
    let limit = match getrlimit(Resource::Memlock).current {
        Some(bytes) => format!("{} KiB", bytes >> 10),
        None => "unlimited".to_owned(),
    };
    format!(
        "{} KiB of memory were to be locked for the disk, and the limit is {limit} ({error}); requests lock their \
         memory one by one instead, at more CPU. Raise the limit: ulimit -l, LimitMEMLOCK= of systemd, --ulimit \
         memlock= of a container; or allow CAP_IPC_LOCK",
        wanted >> 10
    )
}
