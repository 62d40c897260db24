//! One use of a segment file: records are appended until it is full, then it is sealed, read for as long
//! as anybody keeps a copy in it, and given back.
//!
//! ```text
//! prepared -> open -> full (no room left; writes under way) -> sealed -> given back by its last owner
//! ```
//!
//! A [`SsdCopy`] keeps its segment as a [`DramCopy`](crate::tiers::dram::DramCopy) keeps its extent: the
//! file is used again only when the last copy, reader and list that holds the segment has let go.

use super::{
    format::{FooterEntry, Nonce, RecordHeader, closing_pages},
    io::{File, PAGE},
    path::{SsdPath, slot_name},
};
use larder_proto::{Generation, PartName, frame::PartInfo};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// See the module.
pub struct Segment {
    /// Gets the file back. Weak: the path lists its segments.
    path: Weak<SsdPath>,
    pub(super) slot: u32,
    pub(super) nonce: Nonce,
    pub(super) sequence: u64,
    pub(super) file: Arc<dyn File>,
    fill: Mutex<Fill>,
}

/// How far a segment is filled.
#[derive(Debug, Default)]
struct Fill {
    next_page: u64,
    /// Records that are written; kept until the segment is sealed, and read from its footer then.
    entries: Vec<FooterEntry>,
    records: u64,
    in_flight: u64,
    full: bool,
    closing: bool,
}

impl std::fmt::Debug for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Segment({} in {})", self.sequence, slot_name(self.slot))
    }
}

/// Space for a record in an open segment.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) page: u64,
    pub(super) header_pages: u16,
}

impl Segment {
    /// A segment whose header is written, with nothing in it.
    pub(super) fn begun(
        path: Weak<SsdPath>,
        slot: u32,
        nonce: Nonce,
        sequence: u64,
        file: Arc<dyn File>,
    ) -> Arc<Self> {
        let fill = Mutex::new(Fill { next_page: 1, ..Fill::default() });
        Arc::new(Self { path, slot, nonce, sequence, file, fill })
    }

    /// Whether the segment belongs to this path.
    pub fn is_of(&self, path: &Arc<SsdPath>) -> bool {
        std::ptr::eq(self.path.as_ptr(), Arc::as_ptr(path))
    }

    /// The path that it lies in, if the tier is still there.
    pub fn path(&self) -> Option<Arc<SsdPath>> {
        self.path.upgrade()
    }

    /// Whether a segment of so many bytes can hold a record of this part.
    pub(super) fn can_hold(segment_bytes: u64, name: &PartName, info: &PartInfo) -> bool {
        let record = RecordHeader::pages(name, info) as u64 + info.len.div_ceil(PAGE as u64);
        1 + record + closing_pages(1) <= segment_bytes / PAGE as u64
    }

    /// Space for a record, or `None`: the segment takes no more.
    pub(super) fn place(&self, name: &PartName, info: &PartInfo) -> Option<Place> {
        let header_pages = RecordHeader::pages(name, info);
        let pages = header_pages as u64 + info.len.div_ceil(PAGE as u64);
        let mut fill = self.fill.lock();
        let end = fill.next_page + pages + closing_pages(fill.records + 1);
        if fill.full || end > self.file.len() / PAGE as u64 {
            fill.full = true;
            return None;
        }
        let page = fill.next_page;
        fill.next_page += pages;
        fill.records += 1;
        fill.in_flight += 1;
        Some(Place { page, header_pages: u16::try_from(header_pages).unwrap_or(u16::MAX) })
    }

    /// A write has ended: `entry` is there now, if it succeeded.
    pub(super) fn written(&self, entry: Option<FooterEntry>) {
        let mut fill = self.fill.lock();
        fill.in_flight -= 1;
        fill.entries.extend(entry);
    }

    /// No more records. Whether it took some until now.
    pub(super) fn take_no_more(&self) -> bool {
        !std::mem::replace(&mut self.fill.lock().full, true)
    }

    /// No more records: those of an earlier life are all there are.
    pub(super) fn fill_with(&self, entries: Vec<FooterEntry>) {
        let mut fill = self.fill.lock();
        (fill.records, fill.full) = (entries.len() as u64, true);
        fill.entries = entries;
    }

    /// The records to seal, once: when the segment is full and no write is under way any more.
    pub(super) fn take_to_seal(&self) -> Option<Vec<FooterEntry>> {
        let mut fill = self.fill.lock();
        if !fill.full || fill.in_flight > 0 || fill.closing {
            return None;
        }
        fill.closing = true;
        let mut entries = fill.entries.clone();
        entries.sort_unstable_by_key(|entry| entry.page);
        Some(entries)
    }

    /// It is sealed: its footer names the records from now on.
    pub(super) fn closed(&self) {
        self.fill.lock().entries = Vec::new();
    }

    /// The order in which segments of a path were begun.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The records that are there, of a segment that is not sealed yet; none of one that is.
    pub fn entries(&self) -> Vec<FooterEntry> {
        self.fill.lock().entries.clone()
    }

    /// Pages in use, header included.
    pub(super) fn used_pages(&self) -> u64 {
        self.fill.lock().next_page
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if let Some(path) = self.path.upgrade() {
            path.given_back(self.slot);
        }
    }
}

/// A part on a disk: stays where it is until the last clone is dropped.
#[derive(Debug, Clone)]
pub struct SsdCopy {
    segment: Arc<Segment>,
    page: u32,
    header_pages: u16,
    len: u64,
    generation: Generation,
}

impl SsdCopy {
    /// The copy that a footer names.
    pub fn of(segment: Arc<Segment>, entry: &FooterEntry) -> Self {
        let FooterEntry { page, header_pages, len, generation, .. } = *entry;
        Self { segment, page, header_pages, len, generation }
    }

    /// The segment that it lies in.
    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Which stored copy it is.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Bytes of the part.
    #[expect(clippy::len_without_is_empty, reason = "the length of a part, not of a collection")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Bytes that it takes on the disk.
    pub fn footprint_bytes(&self) -> u64 {
        self.pages() * PAGE as u64
    }

    /// Whether both are the same copy at the same place.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.segment, &other.segment) && self.page == other.page
    }

    pub(super) fn offset(&self) -> u64 {
        u64::from(self.page) * PAGE as u64
    }

    pub(super) fn header_bytes(&self) -> usize {
        usize::from(self.header_pages) * PAGE
    }

    fn pages(&self) -> u64 {
        u64::from(self.header_pages) + self.len.div_ceil(PAGE as u64)
    }
}
