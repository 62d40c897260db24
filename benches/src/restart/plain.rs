//! The reference: one thread reads what adoption cannot do without, and looks at nothing.

use larder_store_node::tiers::ssd::{
    format::{SegmentHeader, Trailer},
    io::PAGE,
};
use rustix::fs::{Advice, fadvise};
use std::{
    fs::{self, File},
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::time::Instant;

/// Bytes of one read.
const PIECE: u64 = 1 << 20;

/// What there is to read: header, footer and trailer of segments that were sealed, all of those that were not.
#[derive(Debug)]
pub(super) struct PlainRead {
    pieces: Vec<(PathBuf, Vec<Range<u64>>)>,
}

impl PlainRead {
    /// Finds out, while no node runs. What a node does to its files later does not change it.
    pub(super) fn of(dir: &Path) -> io::Result<Self> {
        let mut pieces = Vec::new();
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            let (file, one) = (File::open(&path)?, PAGE as u64);
            let len = file.metadata()?.len();
            if len < 2 * one {
                continue; // No segment.
            }
            let mut page = [0; PAGE];
            file.read_exact_at(&mut page, 0)?;
            let Ok(header) = SegmentHeader::decode(&page) else { continue };
            file.read_exact_at(&mut page, len - one)?;
            let ranges = match Trailer::decode(&header.nonce, &page) {
                Ok(trailer) => {
                    let closing = (trailer.footer_pages() + 1) * one;
                    vec![0..one, len - closing..len]
                }
                Err(_) => std::iter::once(0..len).collect(),
            };
            pieces.push((path, ranges));
        }
        Ok(Self { pieces })
    }

    /// Bytes of all.
    pub(super) fn bytes(&self) -> u64 {
        let ranges = self.pieces.iter().flat_map(|(_, ranges)| ranges);
        ranges.map(|range| range.end - range.start).sum()
    }

    /// Reads it all, without what the page cache had of it.
    pub(super) fn run(&self) -> io::Result<Duration> {
        let mut buffer = vec![0; usize::try_from(PIECE).unwrap_or(usize::MAX)];
        let began = Instant::now();
        for (path, ranges) in &self.pieces {
            let file = File::open(path)?;
            fadvise(&file, 0, None, Advice::DontNeed)?;
            for range in ranges {
                let mut at = range.start;
                while at < range.end {
                    let len = usize::try_from(PIECE.min(range.end - at)).unwrap_or(usize::MAX);
                    file.read_exact_at(&mut buffer[..len], at)?;
                    at += len as u64;
                }
            }
        }
        Ok(began.elapsed())
    }
}
