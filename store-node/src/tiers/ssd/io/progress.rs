//! How far a request has come. Pure: it knows lengths and results, neither files nor memory.

use super::PAGE;
use std::{io, ops::Range};

/// The most bytes of one operation: the kernel cuts longer ones to `INT_MAX`, rounded down to a page.
pub(super) const MAX_OPERATION: usize = 0x7fff_f000;
/// The most pieces of one operation (`UIO_MAXIOV`).
const MAX_PIECES: usize = 1024;
/// How often in a row an operation may move nothing before that is an error. Picked by eye: a signal or a
/// want of memory is over long before.
const MAX_FRUITLESS: u32 = 100;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// What is to be done after an operation.
#[derive(Debug)]
pub(super) enum Step {
    /// The rest, by another operation.
    Again(Cause),
    /// All bytes were moved.
    Done,
    Failed(io::Error),
}

/// Why another operation is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// The request is longer than an operation may be.
    Split,
    /// The operation moved fewer bytes than it named.
    Short,
    /// The kernel said "try again".
    Retry,
}

/// A request over pieces of memory that lie one behind the other in the file.
#[derive(Debug)]
pub(super) struct Progress {
    direction: Direction,
    /// Bytes of each piece, whole pages.
    lens: Vec<usize>,
    /// Where the first byte that was not moved belongs.
    offset: u64,
    /// The piece that holds this byte, and where in it.
    piece: usize,
    within: usize,
    /// Bytes that were not moved.
    left: u64,
    fruitless: u32,
}

impl Progress {
    pub(super) fn new(direction: Direction, offset: u64, lens: Vec<usize>) -> Self {
        let left = lens.iter().map(|len| *len as u64).sum();
        Self { direction, lens, offset, piece: 0, within: 0, left, fruitless: 0 }
    }

    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The next operation, of at most `limit` bytes: pieces by number, and which bytes of each.
    pub(super) fn pieces(&self, limit: usize) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let mut room = limit;
        let rest = self.lens.iter().enumerate().skip(self.piece).take(MAX_PIECES);
        rest.map_while(move |(piece, len)| {
            let from = if piece == self.piece { self.within } else { 0 };
            let to = from + (len - from).min(room);
            room -= to - from;
            (room > 0 || to > from).then_some((piece, from..to))
        })
    }

    /// Takes in the result of the operation that `pieces(limit)` named.
    pub(super) fn moved(&mut self, result: io::Result<usize>, limit: usize) -> Step {
        let bytes = match result {
            Ok(bytes) => bytes,
            Err(error) if self.may_retry(&error) => return Step::Again(Cause::Retry),
            Err(error) => return Step::Failed(error),
        };
        let asked: usize = self.pieces(limit).map(|(_, bytes)| bytes.len()).sum();
        assert!(bytes <= asked, "the kernel moved {bytes} of {asked} bytes");
        // Direct I/O goes on at a page's bound only, so the last, incomplete page is moved again.
        let pages = bytes - bytes % PAGE;
        self.advance(pages);
        if self.left == 0 {
            return Step::Done;
        }
        if bytes == 0 || (pages == 0 && self.is_stuck()) {
            return Step::Failed(self.nothing_more());
        }
        Step::Again(if bytes == asked { Cause::Split } else { Cause::Short })
    }

    fn advance(&mut self, bytes: usize) {
        if bytes > 0 {
            self.fruitless = 0;
        }
        self.offset += bytes as u64;
        self.left -= bytes as u64;
        self.within += bytes;
        while self.lens.get(self.piece).is_some_and(|len| *len <= self.within) {
            self.within -= self.lens[self.piece];
            self.piece += 1;
        }
    }

    fn may_retry(&mut self, error: &io::Error) -> bool {
        let again = matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN));
        again && !self.is_stuck()
    }

    fn is_stuck(&mut self) -> bool {
        self.fruitless += 1;
        self.fruitless > MAX_FRUITLESS
    }

    fn nothing_more(&self) -> io::Error {
        let (kind, done) = match self.direction {
            Direction::Read => (io::ErrorKind::UnexpectedEof, "read"),
            Direction::Write => (io::ErrorKind::WriteZero, "written"),
        };
        let (left, offset) = (self.left, self.offset);
        io::Error::new(
            kind,
            format!("nothing more was {done} at offset {offset}, with {left} bytes to go"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An answer of the kernel: the share of the operation that it moves, or an error.
    fn answer() -> impl Strategy<Value = Result<u8, i32>> {
        prop_oneof![
            6 => (1u8..=255).prop_map(Ok),
            1 => prop_oneof![Just(libc::EINTR), Just(libc::EAGAIN)].prop_map(Err),
        ]
    }

    proptest! {
        #[test]
        fn every_byte_is_moved_once_and_in_order_however_short_the_operations_are(
            pages in prop::collection::vec(0usize..6, 1..40),
            limit_pages in 1usize..9,
            answers in prop::collection::vec(answer(), 1..30),
        ) {
            let lens: Vec<usize> = pages.iter().map(|pages| pages * PAGE).collect();
            let (start, limit) = (7 * PAGE as u64, limit_pages * PAGE);
            let total: usize = lens.iter().sum();
            prop_assume!(total > 0);
            let mut progress = Progress::new(Direction::Write, start, lens.clone());
            // The model: one byte behind the other.
            let flat: Vec<(usize, usize)> = (0..lens.len())
                .flat_map(|piece| (0..lens[piece]).map(move |at| (piece, at)))
                .collect();
            let mut at = 0;
            for answer in answers.iter().cycle() {
                prop_assert_eq!(progress.offset(), start + at as u64);
                let named: Vec<(usize, usize)> = progress
                    .pieces(limit)
                    .flat_map(|(piece, bytes)| bytes.map(move |byte| (piece, byte)))
                    .collect();
                prop_assert_eq!(&named[..], &flat[at..(at + limit).min(total)]);
                let result = match answer {
                    Ok(share) => Ok((named.len() * usize::from(*share)).div_ceil(255)),
                    Err(error) => Err(io::Error::from_raw_os_error(*error)),
                };
                let whole = result.as_ref().map_or(0, |bytes| bytes - bytes % PAGE);
                match progress.moved(result, limit) {
                    Step::Again(_) => at += whole,
                    Step::Done => {
                        prop_assert_eq!(at + whole, total);
                        break;
                    }
                    // Answers that never move a page end it, and do not go on for ever.
                    Step::Failed(_) => {
                        let moves = answers.contains(&Ok(255));
                        prop_assert!(!moves, "gave up though the kernel moved bytes");
                        break;
                    }
                }
            }
        }
    }

    #[test]
    fn an_operation_names_no_more_pieces_than_the_kernel_takes() {
        let progress = Progress::new(Direction::Read, 0, vec![PAGE; 3000]);
        assert_eq!(progress.pieces(MAX_OPERATION).count(), MAX_PIECES);
    }

    #[test]
    fn an_end_that_comes_too_early_says_where_and_how_much_is_missing() {
        let cases = [
            (Direction::Read, io::ErrorKind::UnexpectedEof),
            (Direction::Write, io::ErrorKind::WriteZero),
        ];
        for (direction, kind) in cases {
            let mut progress = Progress::new(direction, 0, vec![2 * PAGE]);
            let step = progress.moved(Ok(PAGE + 512), MAX_OPERATION);
            assert!(matches!(step, Step::Again(Cause::Short)), "{step:?}");
            let Step::Failed(error) = progress.moved(Ok(0), MAX_OPERATION) else {
                panic!("went on")
            };
            assert_eq!(error.kind(), kind);
            assert!(
                error.to_string().ends_with("at offset 4096, with 4096 bytes to go"),
                "{error}"
            );
        }
    }

    #[test]
    fn another_error_is_not_tried_again() {
        let mut progress = Progress::new(Direction::Write, 0, vec![PAGE]);
        let step = progress.moved(Err(io::Error::from_raw_os_error(libc::EIO)), MAX_OPERATION);
        assert!(matches!(step, Step::Failed(error) if error.raw_os_error() == Some(libc::EIO)));
    }
}
