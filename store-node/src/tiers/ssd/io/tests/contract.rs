//! The contract of a file, kept by every way.

use super::{
    super::{
        CountsSoFar, DiskFolder, DriverKind, File, Folder, PAGE, Pending, ReadInto, start::Way,
    },
    bed::{Bed, Seen, Skewed, buffers, content, filled, pages, pattern},
};
use rand::{Rng, RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use std::{
    hash::{BuildHasher, RandomState},
    io,
    ops::Range,
    sync::Arc,
};

/// The tests below, in a module for each way, so that a failure names it.
macro_rules! contract {
    ($($way:ident: $value:expr, [$($test:ident)*];)*) => {
        $(mod $way {
            $(#[test]
            fn $test() {
                let bed = super::Bed::new($value);
                if let Some(folder) = bed.open() {
                    super::$test(&bed, folder);
                }
            })*
        })*
    };
    ($($way:ident: $value:expr;)*) => {
        contract! { $($way: $value, [
            requests_side_by_side_agree_with_a_model
            many_small_pieces_lie_one_behind_the_other
            unaligned_requests_are_refused_and_change_nothing
            requests_past_the_end_are_refused_and_the_file_stays_as_long_as_it_was
            a_file_that_somebody_cut_ends_too_early
            memory_of_a_dropped_request_is_kept_until_the_request_has_ended
            a_dropped_folder_ends_what_was_asked_and_only_then_unlocks
            a_removed_file_is_used_on_until_its_last_handle_is_gone
            a_folder_can_be_dropped_on_a_runtime_that_must_not_wait
            nothing_asked_is_answered_at_once
        ]; )* }
    };
}

/// Three pages an operation: nearly every request is split, as those above 2 GiB are.
const fn split(way: Way) -> Way {
    Way { limit: 3 * PAGE, ..way }
}

contract! {
    ring: super::Way::new(super::DriverKind::IoUring, true);
    ring_split: super::split(super::Way::new(super::DriverKind::IoUring, true));
    threads_direct: super::Way::new(super::DriverKind::Threads, true);
    threads_direct_split: super::split(super::Way::new(super::DriverKind::Threads, true));
    threads_buffered: super::Way::new(super::DriverKind::Threads, false);
}

/// A fresh seed each time, printed for the case that the test fails; `IO_SEED` brings it back.
fn dice() -> ChaCha8Rng {
    let given = std::env::var("IO_SEED").ok().map(|seed| seed.parse().unwrap());
    let seed = given.unwrap_or_else(|| RandomState::new().hash_one(0));
    println!("seed {seed}");
    ChaCha8Rng::seed_from_u64(seed)
}

/// Lengths of whole pages that add up to `pages` pages.
fn cut(dice: &mut ChaCha8Rng, mut pages: usize) -> Vec<usize> {
    let mut lens = Vec::new();
    while pages > 0 {
        let len = dice.random_range(1..=pages);
        lens.push(len * PAGE);
        pages -= len;
    }
    lens
}

/// Ranges of pages that cover `0..pages`, in any order.
fn disjoint(dice: &mut ChaCha8Rng, pages: usize) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < pages {
        let len = dice.random_range(1..=40).min(pages - at);
        ranges.push(at..at + len);
        at += len;
    }
    ranges.shuffle(dice);
    ranges
}

fn requests_side_by_side_agree_with_a_model(_: &Bed, folder: DiskFolder) {
    const PAGES: usize = 512;
    let mut dice = dice();
    let file = filled(&folder, "segment", 1, PAGES * PAGE);
    let mut model = pattern(1, PAGES * PAGE);
    for round in 0..30 {
        let mut writes: Vec<Pending<()>> = Vec::new();
        let mut reads: Vec<(Range<usize>, Pending<ReadInto>)> = Vec::new();
        for range in disjoint(&mut dice, PAGES) {
            let lens = cut(&mut dice, range.len());
            let offset = (range.start * PAGE) as u64;
            let bytes = range.start * PAGE..range.end * PAGE;
            if dice.random() {
                let mut at = bytes.start;
                let pieces = lens.iter().map(|len| {
                    let piece = pages(dice.next_u64() >> 32, *len);
                    model[at..at + len].copy_from_slice(&piece);
                    at += len;
                    piece
                });
                let pieces = pieces.collect();
                writes.push(file.write(offset, pieces));
            } else {
                reads.push((bytes, file.read(offset, buffers(&lens))));
            }
        }
        writes.into_iter().for_each(|write| write.wait().unwrap());
        for (bytes, read) in reads {
            let read: Vec<u8> = read
                .wait()
                .unwrap()
                .iter_mut()
                .flat_map(|buffer| buffer.bytes_mut().to_vec())
                .collect();
            assert!(read == model[bytes.clone()], "bytes {bytes:?} in round {round}");
        }
        if round % 10 == 0 {
            file.sync().wait().unwrap();
        }
    }
    assert!(content(&*file) == model);
}

fn many_small_pieces_lie_one_behind_the_other(_: &Bed, folder: DiskFolder) {
    const PIECES: usize = 2100; // The kernel takes 1024 at once.
    let file = folder.create("segment", (PIECES * PAGE) as u64).unwrap();
    let all = pages(3, PIECES * PAGE);
    let pieces = (0..PIECES).map(|piece| all.slice(piece * PAGE..(piece + 1) * PAGE)).collect();
    file.write(0, pieces).wait().unwrap();
    let mut read = file.read(0, buffers(&[PAGE; PIECES])).wait().unwrap();
    for (piece, buffer) in read.iter_mut().enumerate() {
        assert!(*buffer.bytes_mut() == all[piece * PAGE..(piece + 1) * PAGE], "piece {piece}");
    }
}

fn unaligned_requests_are_refused_and_change_nothing(_: &Bed, folder: DiskFolder) {
    let file = filled(&folder, "segment", 5, 4 * PAGE);
    let other = pages(6, 3 * PAGE);
    let writes = [
        (1, other.clone()),
        (512, other.clone()),
        (0, other.slice(..100)),
        (0, other.slice(..PAGE + 512)),
        (0, other.slice(512..PAGE + 512)),
    ];
    for (offset, piece) in writes {
        let error = file.write(offset, vec![piece]).wait().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().contains("write segment at offset"), "{error}");
    }
    let error = file.read(512, buffers(&[PAGE])).wait().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    for (by, len) in [(0, 512), (512, PAGE), (8, 2 * PAGE)] {
        let error = file.read(0, vec![Box::new(Skewed::new(by, len))]).wait().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }
    assert!(content(&*file) == pattern(5, 4 * PAGE));
}

fn requests_past_the_end_are_refused_and_the_file_stays_as_long_as_it_was(
    bed: &Bed,
    folder: DiskFolder,
) {
    let file = filled(&folder, "segment", 7, 4 * PAGE);
    let last = u64::MAX - (u64::MAX % PAGE as u64);
    for offset in [3 * PAGE as u64, 4 * PAGE as u64, last] {
        let error = file.read(offset, buffers(&[2 * PAGE])).wait().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
        let error = file.write(offset, vec![pages(8, 2 * PAGE)]).wait().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }
    assert_eq!(bed.dir.path().join("segment").metadata().unwrap().len(), 4 * PAGE as u64);
    assert!(content(&*file) == pattern(7, 4 * PAGE));
}

fn a_file_that_somebody_cut_ends_too_early(bed: &Bed, folder: DiskFolder) {
    let file = filled(&folder, "segment", 9, 8 * PAGE);
    let cut = std::fs::OpenOptions::new().write(true).open(bed.dir.path().join("segment")).unwrap();
    cut.set_len(5 * PAGE as u64).unwrap();
    let error = file.read(0, buffers(&[2 * PAGE, 6 * PAGE])).wait().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
    let mut read = file.read(0, buffers(&[5 * PAGE])).wait().unwrap();
    assert!(*read[0].bytes_mut() == pattern(9, 5 * PAGE));
}

/// What a buffer holds when it is freed shows whether the read had ended.
fn memory_of_a_dropped_request_is_kept_until_the_request_has_ended(_: &Bed, folder: DiskFolder) {
    const LEN: usize = 16 * PAGE;
    const REQUESTS: u64 = 300;
    let mut dice = dice();
    let file = filled(&folder, "old", 11, LEN);
    let new = folder.create("new", REQUESTS * LEN as u64).unwrap();
    let (read, written) = (Seen::default(), Seen::default());
    let mut kept = Vec::new();
    for request in 0..REQUESTS {
        let into = vec![read.buffer(4 * PAGE), read.buffer(12 * PAGE)];
        let reading = file.read(0, into);
        let piece = written.bytes(&pattern(request, LEN));
        let writing = new.write(request * LEN as u64, vec![piece]);
        if dice.random() {
            kept.push((reading, writing));
        }
    }
    for (reading, writing) in kept {
        reading.wait().unwrap();
        writing.wait().unwrap();
    }
    let ended = folder.ended();
    for request in 0..REQUESTS {
        // Behind all others in the queue, though not behind them on the disk.
        let mut piece = new.read(request * LEN as u64, buffers(&[LEN])).wait().unwrap();
        assert!(*piece[0].bytes_mut() == pattern(request, LEN) || request >= REQUESTS - 128);
    }
    drop((folder, file, new));
    ended.wait().unwrap();
    let (read, written) = (read.at_drop(), written.at_drop());
    assert_eq!(
        (read.len() as u64, written.len() as u64),
        (2 * REQUESTS, REQUESTS),
        "all are freed"
    );
    let expected = pattern(11, LEN);
    let whole = |bytes: &Vec<u8>| match bytes.len() / PAGE {
        4 => *bytes == expected[..4 * PAGE],
        _ => *bytes == expected[4 * PAGE..],
    };
    assert!(read.iter().all(whole), "freed before it was filled");
}

fn a_dropped_folder_ends_what_was_asked_and_only_then_unlocks(bed: &Bed, folder: DiskFolder) {
    const LEN: usize = 64 * PAGE;
    let file = folder.create("segment", 50 * LEN as u64).unwrap();
    for at in 0..50 {
        let _not_waited_for = file.write(at * LEN as u64, vec![pages(at, LEN)]);
    }
    let ended = folder.ended();
    drop(folder);
    drop(file);
    ended.wait().unwrap();
    let folder = bed.open().expect("it is free again");
    let file = folder.open("segment").unwrap();
    let content = content(&*file);
    for at in 0..50 {
        let from = usize::try_from(at).unwrap() * LEN;
        assert!(content[from..from + LEN] == pattern(at, LEN), "write {at}");
    }
}

fn a_removed_file_is_used_on_until_its_last_handle_is_gone(_: &Bed, folder: DiskFolder) {
    let file = filled(&folder, "segment", 13, 8 * PAGE);
    let before = folder.physical_bytes().unwrap();
    let writing = file.write(0, vec![pages(14, 8 * PAGE)]);
    folder.remove("segment").unwrap();
    writing.wait().unwrap();
    assert!(content(&*file) == pattern(14, 8 * PAGE));
    assert!(folder.physical_bytes().unwrap() <= before - 8 * PAGE as u64);
    assert_eq!(folder.list().unwrap(), []);
    let again = filled(&folder, "segment", 15, 4 * PAGE);
    assert!(content(&*file) == pattern(14, 8 * PAGE), "another file of the same name");
    drop(file);
    assert!(content(&*again) == pattern(15, 4 * PAGE));
}

fn a_folder_can_be_dropped_on_a_runtime_that_must_not_wait(_: &Bed, folder: DiskFolder) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let file = folder.create("segment", 64 * PAGE as u64).unwrap();
        file.write(0, vec![pages(17, 64 * PAGE)]).await.unwrap();
        let ended = folder.ended();
        let reading = file.read(0, buffers(&[64 * PAGE]));
        drop((folder, file));
        assert!(*reading.await.unwrap()[0].bytes_mut() == pattern(17, 64 * PAGE));
        ended.await.unwrap();
    });
}

fn nothing_asked_is_answered_at_once(_: &Bed, folder: DiskFolder) {
    let file: Arc<dyn File> = folder.create("segment", PAGE as u64).unwrap();
    let done = |counts: CountsSoFar| (counts.requests, counts.operations);
    let before = done(folder.counts());
    file.write(0, Vec::new()).wait().unwrap();
    assert_eq!(file.read(PAGE as u64, Vec::new()).wait().unwrap().len(), 0);
    // Submissions are not compared: the one of the creation may be counted late.
    assert_eq!(done(folder.counts()), before);
}
