//! The reference: the least work that a service can do which moves the same bytes and verifies them.
//!
//! Same runtime, same kind of memory (a memfd), same chunks of 256 KiB summed with CRC-32. One task a
//! connection and no channels; a fixed table of slots instead of a catalog; writes go out straight from a
//! slot, reads land in a buffer that is used again. Nothing is named, admitted, evicted, leased or announced,
//! and there is no way to cancel. It runs as a process of its own, one for each size.
//!
//! ```text
//! head    op u8 · 3 x 0 · slot u32 · part u64 · len u64 · 8 x 0          32 bytes, both ways
//! get     head                       ->  head · one CRC a chunk · bytes
//! put     head · bytes · one CRC a chunk  ->  head                        the server compares the CRCs
//! locate  head                       ->  head with an offset in shared memory in place of len
//! staged  head                       ->  head, after the server copied and summed the staging area
//! ```

pub(super) mod client;
pub(crate) mod server;
#[expect(
    unsafe_code,
    reason = "slots lie in memory that two processes share; each block has its proof"
)]
pub(super) mod slots;

use larder_client::memory::PAGE;
use larder_proto::checksum::DEFAULT_CHUNK;

/// Bytes that are written, read and summed at a time.
pub(super) const CHUNK: usize = DEFAULT_CHUNK as usize;
/// Bytes of a head.
pub(super) const HEAD: usize = 32;

/// What a head asks for, or answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Op {
    Get = 1,
    Put = 2,
    Locate = 3,
    Staged = 4,
    Done = 5,
}

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) op: Op,
    pub(super) slot: u32,
    pub(super) part: u64,
    pub(super) len: u64,
}

impl Head {
    pub(super) fn encode(&self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[0] = self.op as u8;
        bytes[4..8].copy_from_slice(&self.slot.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.part.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// `None` when the op is none of ours.
    pub(super) fn decode(bytes: &[u8; HEAD]) -> Option<Self> {
        let op = [Op::Get, Op::Put, Op::Locate, Op::Staged, Op::Done];
        let op = op.into_iter().find(|op| *op as u8 == bytes[0])?;
        let word = |at: usize| bytes[at..].first_chunk().map(|word| u64::from_le_bytes(*word));
        let slot = bytes[4..].first_chunk().map(|word| u32::from_le_bytes(*word))?;
        Some(Self { op, slot, part: word(8)?, len: word(16)? })
    }
}

/// Bytes of the CRCs of `len` bytes.
pub(super) fn sums_len(len: usize) -> usize {
    4 * len.div_ceil(CHUNK)
}

/// Distance of slots for parts of `len` bytes: the CRCs that arrive behind the bytes of a put land there too.
pub(super) fn stride(len: usize) -> usize {
    (len + sums_len(len)).next_multiple_of(PAGE)
}

/// Appends CRCs as they travel.
pub(super) fn push_sums(out: &mut Vec<u8>, sums: &[u32]) {
    sums.iter().for_each(|sum| out.extend_from_slice(&sum.to_le_bytes()));
}

/// Whether CRCs that travelled are these.
pub(super) fn sums_are(travelled: &[u8], sums: &[u32]) -> bool {
    travelled.len() == 4 * sums.len()
        && travelled.chunks_exact(4).zip(sums).all(|(bytes, sum)| bytes == sum.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_comes_back_as_it_was() {
        let head = Head { op: Op::Put, slot: 7, part: u64::MAX - 1, len: 16 << 20 };
        assert_eq!(Head::decode(&head.encode()), Some(head));
        assert_eq!(Head::decode(&[0; HEAD]), None);
    }
}
