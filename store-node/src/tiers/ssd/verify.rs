//! Verifying a record where it lies, without the arena: piece by piece, no faster than it may.

use super::{SsdCopy, SsdError, SsdPath, io::PAGE, records::prove_header};
use larder_proto::{PartName, frame::PartInfo};
use std::{sync::atomic::Ordering, time::Duration};
use tokio::time::{Instant, sleep_until};

/// Bytes of one read, at most, unless a chunk is longer.
const PIECE: u64 = 1 << 20;
/// The longest that one look at the path's health is put off.
const SLICE: Duration = Duration::from_millis(100);

/// Bytes a second that may be read.
#[derive(Debug)]
pub struct Pace {
    bytes_per_second: Option<u64>,
    /// When the next piece may be read.
    next: Instant,
}

impl Pace {
    /// This many bytes a second; `None` is as fast as it goes.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second: bytes_per_second.filter(|rate| *rate > 0), next: Instant::now() }
    }

    /// These bytes are read now: puts off the next piece.
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^52")]
    fn read(&mut self, bytes: u64) {
        if let Some(rate) = self.bytes_per_second {
            // What was not used meanwhile is not saved up: a burst would disturb readers.
            let from = self.next.max(Instant::now());
            self.next = from + Duration::from_secs_f64(bytes as f64 / rate as f64);
        }
    }

    /// Whether a piece may be read; else this has waited for a while.
    async fn is_due(&self) -> bool {
        if self.bytes_per_second.is_none() || self.next <= Instant::now() {
            return true;
        }
        sleep_until(self.next.min(Instant::now() + SLICE)).await;
        false
    }
}

impl SsdPath {
    /// Reads a whole record and verifies that it is the one that is meant, byte for byte. Safe to cancel.
    ///
    /// # Errors
    /// `Unreadable` or `Damaged`: the copy has to be withdrawn. Otherwise the path is fenced.
    pub async fn verify(
        &self,
        name: &PartName,
        copy: &SsdCopy,
        pace: &mut Pace,
    ) -> Result<(), SsdError> {
        let verified = self.verify_pieces(name, copy, pace).await;
        match &verified {
            Ok(()) => _ = self.counters.scrubbed_records.fetch_add(1, Ordering::Relaxed),
            Err(error) if error.is_of_the_copy() => {
                self.counters.damaged_records.fetch_add(1, Ordering::Relaxed);
            }
            Err(_) => {}
        }
        verified
    }

    async fn verify_pieces(
        &self,
        name: &PartName,
        copy: &SsdCopy,
        pace: &mut Pace,
    ) -> Result<(), SsdError> {
        let header = self.piece(copy, 0, copy.header_bytes() as u64, pace).await?;
        let info = prove_header(name, copy, &header)?;
        let piece = piece_len(&info);
        let mut at = 0;
        while at < info.len {
            let len = piece.min(info.len - at);
            let pages = self.piece(copy, copy.header_bytes() as u64 + at, len, pace).await?;
            let first_chunk = to_usize(at / u64::from(info.sums.chunk_len));
            info.sums.verify(first_chunk, &pages[..to_usize(len)])?;
            at += len;
        }
        Ok(())
    }

    /// Bytes of a record, in whole pages, when they are due.
    async fn piece(
        &self,
        copy: &SsdCopy,
        from: u64,
        len: u64,
        pace: &mut Pace,
    ) -> Result<super::io::AlignedBuffer, SsdError> {
        loop {
            self.must_take_part()?;
            if pace.is_due().await {
                break;
            }
        }
        let len = to_usize(len).next_multiple_of(PAGE);
        pace.read(len as u64);
        let read = self.read_pages(&copy.segment().file, copy.offset() + from, len).await?;
        self.counters.scrubbed_bytes.fetch_add(len as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// Whole chunks, about [`PIECE`] bytes of them. They are whole pages: a chunk is a power of two from 4 KiB on,
/// which the header was held to when it was read.
fn piece_len(info: &PartInfo) -> u64 {
    let chunk = u64::from(info.sums.chunk_len);
    chunk * (PIECE / chunk).max(1)
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
