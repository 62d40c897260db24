//! The requests that the kernel has, each in a slot with the memory that it uses.

use super::{
    super::{
        counts::Counts,
        driver_gone,
        progress::Step,
        request::{Request, Work},
    },
    memory::Registered,
    queue::Why,
};
use io_uring::{opcode, squeue::Entry, types};
use std::{io, mem, os::fd::AsRawFd};
use tracing::error;

/// Names one operation: the slot and how many operations it had before. What comes back from the kernel has
/// to be the operation that the slot waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tag {
    slot: u32,
    generation: u32,
}

impl Tag {
    fn to_user_data(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.slot)
    }

    #[expect(clippy::cast_possible_truncation, reason = "the halves of a word")]
    fn of(user_data: u64) -> Self {
        Self { slot: user_data as u32, generation: (user_data >> 32) as u32 }
    }
}

/// What is to be done after an operation.
#[derive(Debug)]
pub(super) enum After {
    /// The slot's next operation is due.
    Again(SlotNumber),
    /// The request has left its slot, with this result.
    Ended(Request, io::Result<()>),
    /// It was not ours.
    Nothing,
}

/// A slot, by number.
pub(super) type SlotNumber = u32;

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    /// Whether the kernel has an operation of it.
    in_kernel: bool,
    request: Option<Request>,
    /// The file's place in the table of the ring.
    place: Option<u32>,
    /// What the operation names. The kernel may read it until the completion.
    vector: Vec<libc::iovec>,
}

/// See the module. Requests leave only through their completion; if this is dropped with some in the kernel,
/// their memory is never freed.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    free: Vec<SlotNumber>,
    /// Most bytes of an operation.
    limit: usize,
    memory: Registered,
}

/// Builds an entry on a file: by its place in the table, or by its descriptor.
macro_rules! on {
    ($place:expr, $file:expr, $fd:ident => $entry:expr) => {
        match $place {
            Some(place) => {
                let $fd = types::Fixed(place);
                $entry
            }
            None => {
                let $fd = types::Fd($file.fd.as_raw_fd());
                $entry
            }
        }
    };
}

impl Slots {
    pub(super) fn new(depth: u32, limit: usize, memory: Registered) -> Self {
        let slots = (0..depth).map(|_| Slot::default()).collect();
        Self { slots, free: (0..depth).rev().collect(), limit, memory }
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Puts a request into a free slot.
    ///
    /// # Panics
    /// When there is none.
    #[expect(clippy::expect_used, reason = "the caller asked for room")]
    pub(super) fn put(&mut self, request: Request, place: Option<u32>) -> SlotNumber {
        let number = self.free.pop().expect("a free slot");
        let slot = &mut self.slots[number as usize];
        (slot.request, slot.place) = (Some(request), place);
        number
    }

    /// The next operation of a slot's request. All memory that it names stays where it is until `completed`
    /// takes the operation's result.
    #[expect(clippy::expect_used, reason = "the caller put the request there")]
    pub(super) fn operation(&mut self, number: SlotNumber) -> Entry {
        let limit = self.limit;
        let slot = &mut self.slots[number as usize];
        debug_assert!(!slot.in_kernel, "one operation a slot");
        slot.generation = slot.generation.wrapping_add(1);
        slot.in_kernel = true;
        let request = slot.request.as_mut().expect("a request in the slot");
        let tag = Tag { slot: number, generation: slot.generation };
        slot.vector.clear();
        let (file, place) = (&request.file, slot.place);
        let entry = match &mut request.work {
            Work::Write { pieces, progress, .. } => {
                slot.vector.extend(progress.pieces(limit).map(|(piece, bytes)| {
                    let bytes = &pieces[piece][bytes];
                    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
                }));
                let at = progress.offset();
                match self.memory.only(&slot.vector) {
                    Some((base, len, index)) => on!(place, file, fd => {
                        opcode::WriteFixed::new(fd, base, len, index).offset(at).build()
                    }),
                    None => on!(place, file, fd => {
                        let (vector, len) = raw(&slot.vector);
                        opcode::Writev::new(fd, vector, len).offset(at).build()
                    }),
                }
            }
            Work::Read { into, progress, .. } => {
                slot.vector.extend(progress.pieces(limit).map(|(piece, bytes)| {
                    let bytes = &mut into[piece].bytes_mut()[bytes];
                    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
                }));
                let at = progress.offset();
                match self.memory.only(&slot.vector) {
                    Some((base, len, index)) => on!(place, file, fd => {
                        opcode::ReadFixed::new(fd, base, len, index).offset(at).build()
                    }),
                    None => on!(place, file, fd => {
                        let (vector, len) = raw(&slot.vector);
                        opcode::Readv::new(fd, vector, len).offset(at).build()
                    }),
                }
            }
            Work::Sync { .. } => on!(place, file, fd => {
                opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build()
            }),
        };
        entry.user_data(tag.to_user_data())
    }

    /// Takes in the result of an operation.
    pub(super) fn completed(&mut self, user_data: u64, result: i32, counts: &Counts) -> After {
        let (tag, limit) = (Tag::of(user_data), self.limit);
        let slot = self.slots.get_mut(tag.slot as usize);
        let expected = slot.filter(|slot| slot.in_kernel && slot.generation == tag.generation);
        let Some(slot) = expected else {
            error!(user_data, result, "the kernel completed an operation that it did not have");
            return After::Nothing;
        };
        slot.in_kernel = false;
        // `-errno` or what was moved.
        let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        let step = match slot.request.as_mut().map(|request| &mut request.work) {
            Some(Work::Write { progress, .. } | Work::Read { progress, .. }) => {
                progress.moved(result, limit)
            }
            Some(Work::Sync { .. }) => result.map_or_else(Step::Failed, |_| Step::Done),
            None => return After::Nothing,
        };
        let result = match step {
            Step::Again(cause) => {
                counts.again(cause);
                return After::Again(tag.slot);
            }
            Step::Done => Ok(()),
            Step::Failed(error) => Err(error),
        };
        let Some(request) = slot.request.take() else { return After::Nothing };
        self.free.push(tag.slot);
        After::Ended(request, result)
    }

    /// Ends all requests because the ring can no longer be used. The kernel may still use the memory of those
    /// that it has.
    pub(super) fn give_up(&mut self, why: &Why) {
        for slot in &mut self.slots {
            let Some(request) = slot.request.take() else { continue };
            if slot.in_kernel {
                mem::forget(mem::take(&mut slot.vector));
                request.abandon(why.error());
            } else {
                request.end(Err(why.error()));
            }
        }
    }
}

/// A vector as the kernel takes it.
#[expect(clippy::cast_possible_truncation, reason = "at most 1024 pieces an operation")]
fn raw(vector: &[libc::iovec]) -> (*const libc::iovec, u32) {
    (vector.as_ptr(), vector.len() as u32)
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.give_up(&Why::new(driver_gone())); // Some are left in a panic alone.
    }
}
