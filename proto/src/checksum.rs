//! Checksums of a part: one CRC-32 per chunk, so that a piece can be verified before the last byte is
//! there.
//!
//! The CRC finds damage on the way and at rest (P1). It is no identity: that is the block key.

use crate::wire::{DecodeError, Reader, Wire, wire_enum};

wire_enum! {
    /// How the chunks are summed.
    pub enum Algorithm: u8, "checksum algorithm" {
        /// CRC-32 (IEEE 802.3), reflected, as in zlib and `crc32fast`.
        Crc32 = 1 => "crc32",
    }
}

/// The longest chunk: a receiver verifies at least this often.
pub const CHUNK_LIMIT: u32 = 1 << 20;
/// The chunk length of a node's own choice: one socket write of the data plane.
pub const DEFAULT_CHUNK: u32 = 256 << 10;
/// The most chunks of one part (1 GiB in default chunks).
pub const CHUNKS_LIMIT: usize = 4096;

/// One CRC for each `chunk_len` bytes of a part; the last chunk may be shorter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkSums {
    /// How the chunks are summed.
    pub algorithm: Algorithm,
    /// Bytes of a chunk: a power of two from 4 KiB to [`CHUNK_LIMIT`].
    pub chunk_len: u32,
    /// The sums, in order.
    pub sums: Vec<u32>,
}

/// A chunk whose bytes do not match its sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("chunk {chunk} is damaged: crc {actual:#010x}, expected {expected:#010x}")]
pub struct Damaged {
    /// Index of the chunk within the part.
    pub chunk: usize,
    /// The sum it was committed with.
    pub expected: u32,
    /// The sum of the bytes at hand.
    pub actual: u32,
}

/// Sums a part while its bytes arrive in order, in pieces of any length.
#[derive(Debug, Clone)]
pub struct RunningSums {
    chunk_len: u32,
    in_chunk: u32,
    hasher: crc32fast::Hasher,
    sums: Vec<u32>,
}

impl RunningSums {
    /// Starts at the first byte of a chunk.
    ///
    /// # Panics
    /// When `chunk_len` breaks the rule of [`check_chunk_len`]: what came from outside is checked before.
    pub fn new(chunk_len: u32) -> Self {
        assert!(check_chunk_len(chunk_len).is_ok(), "chunk length {chunk_len}");
        Self { chunk_len, in_chunk: 0, hasher: crc32fast::Hasher::new(), sums: Vec::new() }
    }

    /// Adds the next bytes; `sealed` hears the sum of each chunk that they complete.
    pub fn update(&mut self, mut bytes: &[u8], mut sealed: impl FnMut(usize, u32)) {
        while !bytes.is_empty() {
            let room = (self.chunk_len - self.in_chunk) as usize;
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.hasher.update(now);
            // At most `room`, which came from a u32.
            self.in_chunk += u32::try_from(now.len()).unwrap_or(u32::MAX);
            bytes = later;
            if self.in_chunk == self.chunk_len {
                self.seal(&mut sealed);
            }
        }
    }

    /// Ends the part: the last, shorter chunk is summed too.
    pub fn finish(mut self, mut sealed: impl FnMut(usize, u32)) -> ChunkSums {
        if self.in_chunk > 0 {
            self.seal(&mut sealed);
        }
        ChunkSums { algorithm: Algorithm::Crc32, chunk_len: self.chunk_len, sums: self.sums }
    }

    fn seal(&mut self, sealed: &mut impl FnMut(usize, u32)) {
        let sum = std::mem::take(&mut self.hasher).finalize();
        sealed(self.sums.len(), sum);
        self.sums.push(sum);
        self.in_chunk = 0;
    }
}

/// The sum of one chunk.
pub fn sum(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

impl ChunkSums {
    /// Sums `bytes` in chunks of `chunk_len`.
    pub fn of(bytes: &[u8], chunk_len: u32) -> Self {
        let sums = bytes.chunks(chunk_len as usize).map(sum).collect();
        Self { algorithm: Algorithm::Crc32, chunk_len, sums }
    }

    /// Chunks of a part of `len` bytes.
    pub fn chunks_of(len: u64, chunk_len: u32) -> usize {
        usize::try_from(len.div_ceil(u64::from(chunk_len))).unwrap_or(usize::MAX)
    }

    /// Whether the form is valid and there is one sum for each chunk of `len` bytes.
    pub fn fits(&self, len: u64) -> bool {
        check_chunk_len(self.chunk_len).is_ok()
            && self.sums.len() == Self::chunks_of(len, self.chunk_len)
    }

    /// Verifies the bytes of the chunks from `first_chunk` on. `bytes` starts at a chunk bound and ends
    /// at one or at the end of the part.
    pub fn verify(&self, first_chunk: usize, bytes: &[u8]) -> Result<(), Damaged> {
        for (i, piece) in bytes.chunks(self.chunk_len as usize).enumerate() {
            self.verify_sum(first_chunk + i, sum(piece))?;
        }
        Ok(())
    }

    /// Compares the sum of one chunk. A chunk that the part does not have is damaged.
    pub fn verify_sum(&self, chunk: usize, actual: u32) -> Result<(), Damaged> {
        match self.sums.get(chunk) {
            Some(expected) if *expected == actual => Ok(()),
            expected => {
                let expected = expected.copied().unwrap_or_default();
                Err(Damaged { chunk, expected, actual })
            }
        }
    }
}

/// Holds `chunk_len` to the limits of [`ChunkSums::chunk_len`].
pub fn check_chunk_len(chunk_len: u32) -> Result<(), DecodeError> {
    match chunk_len.is_power_of_two() && (4096..=CHUNK_LIMIT).contains(&chunk_len) {
        true => Ok(()),
        false => Err(DecodeError::Unknown { what: "chunk length", value: u64::from(chunk_len) }),
    }
}

impl Wire for ChunkSums {
    const MIN_LEN: usize = 9;
    fn put(&self, out: &mut Vec<u8>) {
        self.algorithm.put(out);
        self.chunk_len.put(out);
        self.sums.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (algorithm, chunk_len) = (Algorithm::take(from)?, u32::take(from)?);
        check_chunk_len(chunk_len)?;
        let count = from.count("checksums", 4, CHUNKS_LIMIT)?;
        let sums = (0..count).map(|_| u32::take(from)).collect::<Result<_, _>>()?;
        Ok(Self { algorithm, chunk_len, sums })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_flipped_bit_is_found_in_its_chunk() {
        let mut bytes = vec![7u8; 10_000];
        let sums = ChunkSums::of(&bytes, 4096);
        assert!(sums.fits(10_000) && !sums.fits(12_289) && !sums.fits(8192));
        assert_eq!(sums.verify(0, &bytes), Ok(()));
        bytes[9_999] ^= 0x10;
        assert_eq!(sums.verify(0, &bytes[..8192]), Ok(()));
        assert_eq!(sums.verify(2, &bytes[8192..]).unwrap_err().chunk, 2);
        assert!(sums.verify(3, &bytes[..1]).is_err(), "a chunk beyond the end");
    }

    #[test]
    fn sums_do_not_depend_on_the_pieces_in_which_bytes_arrive() {
        let bytes: Vec<u8> = (0..20_000u32).map(|i| i.to_le_bytes()[0] ^ 0x55).collect();
        for piece in [1, 7, 4096, 5000, 20_000] {
            let mut running = RunningSums::new(4096);
            let mut heard = Vec::new();
            bytes.chunks(piece).for_each(|b| running.update(b, |i, sum| heard.push((i, sum))));
            let sums = running.finish(|i, sum| heard.push((i, sum)));
            assert_eq!(sums, ChunkSums::of(&bytes, 4096), "pieces of {piece}");
            assert_eq!(heard, sums.sums.into_iter().enumerate().collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_chunk_length_of_zero_or_not_a_power_of_two_is_refused() {
        for bad in [0, 1, 4095, 5000, 2 << 20] {
            assert!(check_chunk_len(bad).is_err(), "{bad}");
        }
    }
}
