//! Bytes that say whose they are: a fixed pattern by offset, and in every page a stamp of part and offset.
//!
//! A part in place of another, a chunk at a wrong offset and a flipped bit are all found. Making the bytes of
//! a fresh part from those of the last one costs one store a page, so it hardly counts beside a transfer.

use larder_proto::BlockKey;

/// Distance of the stamps.
const PAGE: usize = 4096;
/// Distance of the stamps that a measured get looks at: every chunk of the data plane.
const LOOK_EVERY: usize = 256 << 10;

/// What was found, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("part {part} of {len} bytes differs at offset {offset}")]
pub(crate) struct WrongBytes {
    part: u64,
    len: usize,
    offset: usize,
}

/// The bytes of part number `part`, all of them.
pub(crate) fn fill(part: u64, bytes: &mut [u8]) {
    for (word, into) in (0u64..).zip(bytes.chunks_mut(8)) {
        into.copy_from_slice(&mix(word).to_le_bytes()[..into.len()]);
    }
    stamp(part, bytes);
}

/// Makes the bytes of `part` from those of any other part of the same length.
pub(crate) fn stamp(part: u64, bytes: &mut [u8]) {
    for (offset, page) in (0..).step_by(PAGE).zip(bytes.chunks_mut(PAGE)) {
        let stamp = stamp_at(part, offset);
        let len = page.len().min(stamp.len());
        page[..len].copy_from_slice(&stamp[..len]);
    }
}

/// Looks at one stamp a chunk: enough to tell parts and chunks apart inside a measured loop.
pub(crate) fn look(part: u64, bytes: &[u8]) -> Result<(), WrongBytes> {
    let chunks = (0..).step_by(LOOK_EVERY).zip(bytes.chunks(LOOK_EVERY));
    for (offset, chunk) in chunks {
        let stamp = stamp_at(part, offset);
        let len = chunk.len().min(stamp.len());
        if chunk[..len] != stamp[..len] {
            return Err(WrongBytes { part, len: bytes.len(), offset });
        }
    }
    Ok(())
}

/// Looks at the first byte of each chunk: all that a reader in place touches in a measured loop. `byte_at`
/// gives the byte at an offset.
pub(crate) fn touch(
    part: u64,
    len: usize,
    byte_at: impl Fn(usize) -> u8,
) -> Result<(), WrongBytes> {
    let mut offsets = (0..len).step_by(LOOK_EVERY);
    match offsets.find(|offset| byte_at(*offset) != stamp_at(part, *offset)[0]) {
        None => Ok(()),
        Some(offset) => Err(WrongBytes { part, len, offset }),
    }
}

/// Compares every byte.
pub(crate) fn check(part: u64, bytes: &[u8]) -> Result<(), WrongBytes> {
    for (word, found) in (0u64..).zip(bytes.chunks(8)) {
        let offset = usize::try_from(word * 8).unwrap_or(usize::MAX);
        let expected = match offset % PAGE {
            0 => stamp_at(part, offset),
            _ => mix(word).to_le_bytes(),
        };
        if found != &expected[..found.len()] {
            return Err(WrongBytes { part, len: bytes.len(), offset });
        }
    }
    Ok(())
}

/// The key of block number `number`: uniform, and the same in every run.
pub(crate) fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 32];
    for (lane, into) in (1u64..).zip(bytes.chunks_mut(8)) {
        into.copy_from_slice(&mix(number.wrapping_mul(4).wrapping_add(lane)).to_le_bytes());
    }
    BlockKey::from_bytes(bytes)
}

fn stamp_at(part: u64, offset: usize) -> [u8; 8] {
    mix(part.rotate_left(32) ^ offset as u64).to_le_bytes()
}

/// SplitMix64 (Steele, Lea, Flood 2014): cheap, and no two inputs give the same output.
pub(crate) fn mix(input: u64) -> u64 {
    let x = input.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restamped_buffer_is_that_of_the_other_part() {
        let (mut one, mut two) = (vec![0; 3 * PAGE + 5], vec![0; 3 * PAGE + 5]);
        fill(1, &mut one);
        fill(2, &mut two);
        assert_ne!(one, two);
        stamp(2, &mut one);
        assert_eq!(one, two);
        assert_eq!(check(2, &one), Ok(()));
        assert_eq!(look(2, &one), Ok(()));
    }

    #[test]
    fn another_part_a_moved_page_and_a_flipped_bit_are_found() {
        let mut bytes = vec![0; 2 * PAGE];
        fill(7, &mut bytes);
        assert!(check(8, &bytes).is_err() && look(8, &bytes).is_err());
        bytes[PAGE + 100] ^= 4;
        assert_eq!(check(7, &bytes).unwrap_err().offset, PAGE + 96);
        bytes[PAGE + 100] ^= 4;
        bytes.copy_within(..PAGE, PAGE);
        assert_eq!(check(7, &bytes).unwrap_err().offset, PAGE);
    }
}
