use super::*;
use proptest::prelude::*;

const TOKENS: usize = 4;

/// A state as llama.cpp writes it: two layers, rows of 6 (K) and 4 (V) bytes, values that name
/// their layer and position.
fn state(first: i32, sequence: i32, cells: &[i32], transposed: bool) -> Vec<u8> {
    let mut bytes = Vec::new();
    for field in [STATE_MAGIC, sequence.cast_unsigned(), 1, u32_of(cells.len())] {
        bytes.extend(field.to_le_bytes());
    }
    for cell in cells {
        bytes.extend((first + cell).to_le_bytes());
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend(sequence.to_le_bytes());
    }
    for field in [u32::from(transposed), 2, 0, 0] {
        bytes.extend(field.to_le_bytes());
    }
    for layer in 0..2_u8 {
        bytes.extend(1_i32.to_le_bytes());
        bytes.extend(6_u64.to_le_bytes());
        for cell in cells {
            bytes.extend([layer, u8::try_from(*cell).unwrap(), 1, 2, 3, 4]);
        }
    }
    for layer in 0..2_u8 {
        bytes.extend(1_i32.to_le_bytes());
        if transposed {
            bytes.extend(2_u32.to_le_bytes());
            bytes.extend(2_u32.to_le_bytes());
            for column in 0..2_u8 {
                for cell in cells {
                    bytes.extend([10 * column + layer, u8::try_from(*cell).unwrap()]);
                }
            }
        } else {
            bytes.extend(4_u64.to_le_bytes());
            for cell in cells {
                bytes.extend([layer, u8::try_from(*cell).unwrap(), 9, 9]);
            }
        }
    }
    bytes
}

fn layout(transposed: bool) -> KvLayout {
    KvLayout::learn(&state(0, 0, &[0, 1, 2, 3], transposed), 4).unwrap()
}

fn normalised(layout: &KvLayout, state: &[u8], first: i64) -> Vec<u8> {
    let mut block = Vec::new();
    layout.normalise(state, first, &mut block).unwrap();
    block
}

#[test]
fn frozen_bytes_of_version_1() {
    // A change here is a new format: raise FORMAT_VERSION and the magic.
    let layout = layout(false);
    let block = normalised(&layout, &state(64, 7, &[0, 1, 2, 3], false), 64);
    let expected = [
        "4c4b5631 04000000 00000000 02000000 00000000 00000000",
        "01000000 0600000000000000 000001020304 000101020304 000201020304 000301020304",
        "01000000 0600000000000000 010001020304 010101020304 010201020304 010301020304",
        "01000000 0400000000000000 00000909 00010909 00020909 00030909",
        "01000000 0400000000000000 01000909 01010909 01020909 01030909",
    ];
    let hex: String = block.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, expected.concat().replace(' ', ""));
    assert_eq!(FORMAT_VERSION, 1);
    assert_eq!(block.len(), layout.block_bytes());
}

#[test]
fn equal_kv_gives_equal_bytes_whatever_its_place() {
    for transposed in [false, true] {
        let layout = layout(transposed);
        let here = normalised(&layout, &state(0, 0, &[0, 1, 2, 3], transposed), 0);
        let there = normalised(&layout, &state(96, 5, &[0, 1, 2, 3], transposed), 96);
        let shuffled = normalised(&layout, &state(96, 5, &[2, 0, 3, 1], transposed), 96);
        assert_eq!(here, there);
        assert_eq!(here, shuffled, "cells out of order, transposed: {transposed}");
    }
}

#[test]
fn a_block_comes_back_as_the_state_of_the_expected_range() {
    for transposed in [false, true] {
        let layout = layout(transposed);
        let block = normalised(&layout, &state(0, 3, &[0, 1, 2, 3], transposed), 0);
        let mut again = Vec::new();
        layout.denormalise(&block, 640, 9, &mut again).unwrap();
        assert_eq!(again, state(640, 9, &[0, 1, 2, 3], transposed));
        assert_eq!(again.len(), layout.state_bytes());
    }
}

#[test]
fn positions_that_are_not_the_blocks_are_refused() {
    let layout = layout(false);
    let mut block = Vec::new();
    for cells in [[0, 1, 2, 4], [0, 1, 1, 2], [-1, 0, 1, 2]] {
        let mut bytes = state(32, 0, &[0, 1, 2, 3], false);
        for (cell, offset) in cells.iter().zip([16, 28, 40, 52]) {
            bytes[offset..offset + 4].copy_from_slice(&(32_i32 + cell).to_le_bytes());
        }
        let refused = layout.normalise(&bytes, 32, &mut block);
        assert!(matches!(refused, Err(FormatError::Cell { .. })), "{cells:?}: {refused:?}");
    }
}

#[test]
fn another_geometry_is_refused_by_the_name_of_the_field() {
    let rows = layout(false);
    let block = normalised(&rows, &state(0, 0, &[0, 1, 2, 3], false), 0);
    let changed = |offset: usize| {
        let mut changed = block.clone();
        changed[offset] ^= 1;
        rows.check(&changed)
    };
    assert_eq!(changed(0), Err(FormatError::Field { field: "block magic", offset: 0 }));
    assert_eq!(changed(4), Err(FormatError::Field { field: "tokens of the block", offset: 4 }));
    assert_eq!(changed(8), Err(FormatError::Field { field: "cache head", offset: 8 }));
    assert_eq!(changed(12), Err(FormatError::Field { field: "cache head", offset: 8 }));
    assert_eq!(changed(24), Err(FormatError::Field { field: "K head", offset: 24 }));
    let v_head = 24 + 2 * (12 + 24);
    assert_eq!(changed(v_head), Err(FormatError::Field { field: "V head", offset: v_head }));
    // Values cannot be checked here.
    assert_eq!(changed(24 + 12), Ok(()));
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..400), cut in 0_usize..400) {
        let layout = layout(false);
        let mut out = Vec::new();
        let _ = layout.check(&bytes);
        let _ = layout.denormalise(&bytes, 0, 0, &mut out);
        let _ = layout.normalise(&bytes, 0, &mut out);
        let _ = KvLayout::learn(&bytes, 4);
        // Damage behind a right head reaches the deeper reads.
        let whole = state(0, 0, &[0, 1, 2, 3], true);
        bytes.splice(..0, whole[..cut.min(whole.len())].iter().copied());
        let _ = KvLayout::learn(&bytes, 4);
    }

    #[test]
    fn every_cell_order_gives_the_same_block(order in Just(vec![0, 1, 2, 3]).prop_shuffle(), transposed: bool) {
        let layout = layout(transposed);
        prop_assert_eq!(layout.block_tokens(), TOKENS);
        let sorted = normalised(&layout, &state(8, 1, &[0, 1, 2, 3], transposed), 8);
        prop_assert_eq!(normalised(&layout, &state(8, 1, &order, transposed), 8), sorted);
    }
}
