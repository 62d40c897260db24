//! The memory of the reference: a fixed table of slots of one length in one memfd.
//!
//! A slot has many readers or one writer. There is nothing to wait for: the bench never asks for both at
//! once, so a slot that is taken is a mistake and closes the connection.

use super::{CHUNK, stride, sums_len};
use crate::content;
use larder_client::memory::{PAGE, SharedMemory};
use larder_proto::checksum::{ChunkSums, DEFAULT_CHUNK};
use std::{
    io,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI32, Ordering},
    },
};

/// What lies in a slot.
#[derive(Debug, Clone, Default)]
pub(crate) struct Content {
    pub(crate) part: u64,
    pub(crate) sums: Vec<u32>,
}

#[derive(Debug, Default)]
struct Slot {
    /// Readers, or -1 for a writer.
    users: AtomicI32,
    content: Mutex<Content>,
}

/// All slots.
#[derive(Debug)]
pub(crate) struct Slots {
    memory: SharedMemory,
    len: usize,
    slots: Box<[Slot]>,
}

impl Slots {
    /// `count` slots of `len` bytes; slot `i` holds part `first_part + i`.
    pub(crate) fn new(len: usize, count: usize, first_part: u64) -> io::Result<Self> {
        let mut memory = SharedMemory::create("larder-bench-slots", count * stride(len))?;
        memory.populate(usize::MAX, |_| Ok(()))?;
        let slots = (0..count).map(|_| Slot::default()).collect();
        let slots = Self { memory, len, slots };
        for (slot, part) in (0u32..).zip(first_part..first_part + count as u64) {
            let mut writing = slots.write(slot).ok_or(io::ErrorKind::InvalidInput)?;
            content::fill(part, &mut writing.bytes()[..len]);
            let sums = ChunkSums::of(&writing.bytes()[..len], DEFAULT_CHUNK).sums;
            writing.commit(Content { part, sums });
        }
        Ok(slots)
    }

    /// Bytes of a part.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The memory, for processes that map it.
    pub(crate) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Where a slot lies in the memory.
    pub(crate) fn offset(&self, slot: u32) -> usize {
        slot as usize * stride(self.len)
    }

    /// A slot for reading; `None` when it is being written, or there is no such slot.
    pub(crate) fn read(&self, number: u32) -> Option<Reading<'_>> {
        let slot = self.slots.get(number as usize)?;
        let more = |users: i32| (users >= 0).then_some(users + 1);
        slot.users.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).ok()?;
        Some(Reading { slots: self, slot, number })
    }

    /// A slot for writing; `None` when it is in use, or there is no such slot.
    pub(crate) fn write(&self, number: u32) -> Option<Writing<'_>> {
        let slot = self.slots.get(number as usize)?;
        slot.users.compare_exchange(0, -1, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(Writing { slots: self, slot, number })
    }
}

/// The right to read a slot.
pub(crate) struct Reading<'a> {
    slots: &'a Slots,
    slot: &'a Slot,
    number: u32,
}

impl Reading<'_> {
    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: within this process a slot is written only through `Writing`, which `Slots::write` gives
        // only while there is no reader; other processes map the memory for reading only.
        unsafe { self.slots.memory.bytes(self.slots.offset(self.number), self.slots.len) }
    }

    /// What lies there.
    pub(crate) fn with_content<T>(&self, look: impl FnOnce(&Content) -> T) -> T {
        look(&self.slot.content.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.slot.users.fetch_sub(1, Ordering::Release);
    }
}

/// The right to write a slot.
pub(crate) struct Writing<'a> {
    slots: &'a Slots,
    slot: &'a Slot,
    number: u32,
}

impl Writing<'_> {
    /// Its bytes, and behind them room for the CRCs.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let len = self.slots.len + sums_len(self.slots.len);
        // SAFETY: `Slots::write` gave the slot to this value alone, and `&mut self` is its only user. Other
        // processes map the memory for reading only; their mappings are never read while a put runs, and
        // what they read is checked in their own copies (`SharedMemory::copy_out`).
        unsafe { self.slots.memory.bytes_mut(self.slots.offset(self.number), len) }
    }

    /// Says what lies there now.
    pub(crate) fn commit(self, content: Content) {
        *self.slot.content.lock().unwrap_or_else(PoisonError::into_inner) = content;
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.slot.users.store(0, Ordering::Release);
    }
}

const _: () = assert!(CHUNK.is_multiple_of(PAGE));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_many_readers_or_one_writer() {
        let slots = Slots::new(PAGE, 2, 40).unwrap();
        let one = slots.read(1).unwrap();
        let other = slots.read(1).unwrap();
        assert_eq!(one.with_content(|content| content.part), 41);
        assert_eq!(content::check(41, other.bytes()), Ok(()));
        assert!(slots.write(1).is_none());
        drop((one, other));
        let writing = slots.write(1).unwrap();
        assert!(slots.read(1).is_none() && slots.write(1).is_none());
        drop(writing);
        assert!(slots.read(1).is_some());
        assert!(slots.read(2).is_none(), "there is no third slot");
    }
}
