//! How parts lie on a disk.
//!
//! ```text
//! segment file   [ segment header | record | record | ...        | footer | trailer ]
//!                  one page         from page 1 on                          the last page
//! record         [ header, whole pages | payload, whole pages ]
//! ```
//!
//! Everything is little endian, in whole pages, and ends in a CRC-32 over what stands before it. A
//! segment's `nonce` is drawn anew each time the file is used; records and trailer repeat it, so what an
//! earlier use left behind means nothing, and nobody who puts a part can forge a record inside of it.
//! Footer and removal log say what is alive; a record's own header proves what it is, at the latest when
//! it is read.

use super::io::{AlignedBuffer, PAGE};
use larder_proto::{
    BlockKey, Generation, PartName,
    checksum::CHUNKS_LIMIT,
    fingerprint::ContentFingerprint,
    frame::PartInfo,
    ids::{Incarnation, NodeId},
    wire::{DecodeError, Reader, ShortText, Wire},
};

/// The version of this format. A higher one on disk is refused, and nothing is touched.
pub const FORMAT: u32 = 1;

/// Names one use of a segment file.
pub type Nonce = [u8; 16];

const SEGMENT_MAGIC: [u8; 8] = *b"LRDRSEGM";
const RECORD_MAGIC: [u8; 8] = *b"LRDRRECD";
const TRAILER_MAGIC: [u8; 8] = *b"LRDRTRLR";
const REMOVALS_MAGIC: [u8; 8] = *b"LRDRREMV";
/// Magic, format and the length of the body.
const PREFIX: usize = 16;
const CRC: usize = 4;

/// The most pages of a record's header: one sum for each chunk of the longest part, and the rest.
pub const HEADER_PAGES_LIMIT: usize = (CHUNKS_LIMIT * 4).div_ceil(PAGE) + 1;

/// Why bytes on a disk are not what they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// Nothing of ours begins here.
    #[error("there is no {0} here")]
    Absent(&'static str),
    /// A later Larder wrote it.
    #[error("format {found} is newer than {FORMAT}, the newest that this node reads")]
    Newer {
        /// The format found.
        found: u32,
    },
    /// It is ours, and damaged.
    #[error("the {0} is damaged: its checksum does not match")]
    Sum(&'static str),
    /// It is whole, and makes no sense.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// It belongs to another use of the file.
    #[error("it belongs to an earlier use of the file")]
    Stale,
}

/// Puts a body behind magic, format and length, and a sum behind it; in whole pages.
fn frame(magic: [u8; 8], body: &[u8]) -> AlignedBuffer {
    let mut bytes = Vec::with_capacity(PREFIX + body.len() + CRC);
    bytes.extend_from_slice(&magic);
    FORMAT.put(&mut bytes);
    u32::try_from(body.len()).unwrap_or(u32::MAX).put(&mut bytes);
    bytes.extend_from_slice(body);
    crc32fast::hash(&bytes).put(&mut bytes);
    AlignedBuffer::copy_of(&bytes)
}

/// The body of what [`frame`] made.
fn unframe<'a>(
    what: &'static str,
    magic: [u8; 8],
    bytes: &'a [u8],
) -> Result<&'a [u8], Unreadable> {
    let absent = Unreadable::Absent(what);
    let mut reader = Reader::new(bytes);
    if reader.array::<8>(what).map_err(|_| absent.clone())? != magic {
        return Err(absent);
    }
    // The format comes first: a later one may sum in another way.
    let format = u32::take(&mut reader)?;
    let len = u32::take(&mut reader)? as usize;
    let end = PREFIX.saturating_add(len);
    let summed = bytes.get(..end).ok_or(Unreadable::Sum(what));
    let sum = bytes.get(end..end.saturating_add(CRC)).and_then(|sum| sum.try_into().ok());
    let intact = |summed: &[u8], sum: [u8; CRC]| crc32fast::hash(summed) == u32::from_le_bytes(sum);
    match (format, summed, sum) {
        (format, ..) if format > FORMAT => Err(Unreadable::Newer { found: format }),
        (FORMAT, Ok(summed), Some(sum)) if intact(summed, sum) => Ok(&summed[PREFIX..]),
        _ => Err(Unreadable::Sum(what)),
    }
}

/// The first page of a segment file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Whose it is.
    pub node: NodeId,
    /// Names this use of the file.
    pub nonce: Nonce,
    /// Rises with each use of any file of the path: the order in which segments were begun.
    pub sequence: u64,
    /// Bytes of the file.
    pub segment_bytes: u64,
}

impl SegmentHeader {
    /// As it is written: one page.
    pub fn encode(&self) -> AlignedBuffer {
        let mut body = Vec::new();
        self.node.put(&mut body);
        self.nonce.put(&mut body);
        self.sequence.put(&mut body);
        self.segment_bytes.put(&mut body);
        frame(SEGMENT_MAGIC, &body)
    }

    /// Reads the first page.
    ///
    /// # Errors
    /// It is not a whole header of a format that we read.
    pub fn decode(page: &[u8]) -> Result<Self, Unreadable> {
        let mut body = Reader::new(unframe("segment header", SEGMENT_MAGIC, page)?);
        let header = Self {
            node: NodeId::take(&mut body)?,
            nonce: Nonce::take(&mut body)?,
            sequence: u64::take(&mut body)?,
            segment_bytes: u64::take(&mut body)?,
        };
        body.finish("segment header")?;
        Ok(header)
    }
}

/// What stands before a part's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordHeader {
    /// Of the segment.
    pub nonce: Nonce,
    /// The full name.
    pub name: PartName,
    /// Generation, length, sums, and where the part belongs.
    pub info: PartInfo,
}

impl RecordHeader {
    /// Pages of a header for this part, whatever the segment.
    pub fn pages(name: &PartName, info: &PartInfo) -> usize {
        let nonce = [0; 16];
        Self { nonce, name: *name, info: info.clone() }.encode().len() / PAGE
    }

    /// As it is written: whole pages.
    pub fn encode(&self) -> AlignedBuffer {
        let mut body = Vec::with_capacity(512 + 4 * self.info.sums.sums.len());
        self.nonce.put(&mut body);
        self.name.put(&mut body);
        self.info.put(&mut body);
        frame(RECORD_MAGIC, &body)
    }

    /// Reads a header from the front of `pages`.
    ///
    /// # Errors
    /// It is not a whole header of this use of the segment.
    pub fn decode(nonce: &Nonce, pages: &[u8]) -> Result<Self, Unreadable> {
        let mut body = Reader::new(unframe("record header", RECORD_MAGIC, pages)?);
        if Nonce::take(&mut body)? != *nonce {
            return Err(Unreadable::Stale);
        }
        let header =
            Self { nonce: *nonce, name: Wire::take(&mut body)?, info: Wire::take(&mut body)? };
        body.finish("record header")?;
        match header.info.sums.fits(header.info.len) {
            true => Ok(header),
            false => Err(Unreadable::Sum("record header")),
        }
    }

    /// Whether a header may begin here.
    pub fn may_begin(page: &[u8]) -> bool {
        page.starts_with(&RECORD_MAGIC)
    }

    /// Pages that a header takes whose first page begins with these bytes; 1 if it is none.
    pub fn pages_from_front(page: &[u8]) -> usize {
        let len =
            page.get(12..16).and_then(|len| len.try_into().ok()).map_or(0, u32::from_le_bytes);
        (PREFIX + len as usize + CRC).div_ceil(PAGE).clamp(1, HEADER_PAGES_LIMIT)
    }
}

/// What a footer keeps of a record: enough to find it and to know where its block belongs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FooterEntry {
    /// The full name.
    pub name: PartName,
    /// Which stored copy.
    pub generation: Generation,
    /// What decides the values.
    pub content: ContentFingerprint,
    /// The first block of the chain.
    pub root: BlockKey,
    /// The block before this one.
    pub parent: Option<BlockKey>,
    /// Where the record begins in the file, in pages.
    pub page: u32,
    /// Pages of its header.
    pub header_pages: u16,
    /// Bytes of its payload.
    pub len: u64,
    /// Who published it first.
    pub producer: ShortText<128>,
    /// In which of its lives.
    pub producer_incarnation: Incarnation,
}

impl FooterEntry {
    /// What a footer keeps of a record at `page`.
    pub fn of(header: &RecordHeader, page: u32, header_pages: u16) -> Self {
        let RecordHeader { nonce: _, name, info } = header;
        Self {
            name: *name,
            generation: info.generation,
            content: info.origin.content,
            root: info.origin.root,
            parent: info.origin.parent,
            page,
            header_pages,
            len: info.len,
            producer: info.origin.producer.clone(),
            producer_incarnation: info.origin.producer_incarnation,
        }
    }

    /// Pages of the whole record.
    pub fn pages(&self) -> u64 {
        u64::from(self.header_pages) + self.len.div_ceil(PAGE as u64)
    }
}

impl Wire for FooterEntry {
    const MIN_LEN: usize = PartName::MIN_LEN
        + Generation::MIN_LEN
        + ContentFingerprint::MIN_LEN
        + BlockKey::MIN_LEN
        + 1
        + 4
        + 2
        + 8
        + 2
        + 8;

    fn put(&self, out: &mut Vec<u8>) {
        self.name.put(out);
        self.generation.put(out);
        self.content.put(out);
        self.root.put(out);
        self.parent.put(out);
        self.page.put(out);
        self.header_pages.put(out);
        self.len.put(out);
        self.producer.put(out);
        self.producer_incarnation.put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            name: Wire::take(from)?,
            generation: Wire::take(from)?,
            content: Wire::take(from)?,
            root: Wire::take(from)?,
            parent: Wire::take(from)?,
            page: Wire::take(from)?,
            header_pages: Wire::take(from)?,
            len: Wire::take(from)?,
            producer: Wire::take(from)?,
            producer_incarnation: Wire::take(from)?,
        })
    }
}

/// The longest form of an entry.
const ENTRY_BYTES: u64 = (FooterEntry::MIN_LEN + BlockKey::MIN_LEN + 128) as u64;

/// Pages that footer and trailer of `records` records take.
pub fn closing_pages(records: u64) -> u64 {
    (records * ENTRY_BYTES).div_ceil(PAGE as u64) + 1
}

/// The last page of a sealed segment: where its footer is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trailer {
    /// Of the segment.
    pub nonce: Nonce,
    /// Records in the footer.
    pub records: u32,
    /// Bytes of the footer's entries; it ends at the page before this one.
    pub footer_bytes: u32,
    /// Their sum.
    pub footer_crc: u32,
}

impl Trailer {
    /// Footer and trailer, as they are written: whole pages that end with the file.
    ///
    /// # Panics
    /// With more entries than any segment has pages.
    #[expect(clippy::expect_used, reason = "a segment has fewer pages than a u32 counts")]
    pub fn close(nonce: Nonce, entries: &[FooterEntry]) -> AlignedBuffer {
        let mut footer = Vec::with_capacity(entries.len() * FooterEntry::MIN_LEN);
        entries.iter().for_each(|entry| entry.put(&mut footer));
        let mut body = Vec::new();
        let len = |len: usize| u32::try_from(len).expect("fits a segment");
        nonce.put(&mut body);
        len(entries.len()).put(&mut body);
        len(footer.len()).put(&mut body);
        crc32fast::hash(&footer).put(&mut body);
        let trailer = frame(TRAILER_MAGIC, &body);
        let pages = footer.len().next_multiple_of(PAGE);
        let mut closing = AlignedBuffer::zeroed(pages + PAGE);
        closing[..footer.len()].copy_from_slice(&footer);
        closing[pages..].copy_from_slice(&trailer);
        closing
    }

    /// Reads the last page.
    ///
    /// # Errors
    /// It is not a whole trailer of this use of the segment: the segment was never sealed, or is damaged.
    pub fn decode(nonce: &Nonce, page: &[u8]) -> Result<Self, Unreadable> {
        let mut body = Reader::new(unframe("trailer", TRAILER_MAGIC, page)?);
        let trailer = Self {
            nonce: Wire::take(&mut body)?,
            records: Wire::take(&mut body)?,
            footer_bytes: Wire::take(&mut body)?,
            footer_crc: Wire::take(&mut body)?,
        };
        body.finish("trailer")?;
        match trailer.nonce == *nonce {
            true => Ok(trailer),
            false => Err(Unreadable::Stale),
        }
    }

    /// Pages of the footer alone.
    pub fn footer_pages(&self) -> u64 {
        u64::from(self.footer_bytes).div_ceil(PAGE as u64)
    }

    /// Reads the footer's entries from its pages.
    ///
    /// # Errors
    /// They are damaged.
    pub fn entries(&self, pages: &[u8]) -> Result<Vec<FooterEntry>, Unreadable> {
        let footer = pages.get(..self.footer_bytes as usize).ok_or(Unreadable::Sum("footer"))?;
        if crc32fast::hash(footer) != self.footer_crc {
            return Err(Unreadable::Sum("footer"));
        }
        let mut reader = Reader::new(footer);
        let possible = footer.len() / FooterEntry::MIN_LEN;
        let mut entries = Vec::with_capacity(possible.min(self.records as usize));
        for _ in 0..self.records {
            entries.push(FooterEntry::take(&mut reader)?);
        }
        reader.finish("footer")?;
        Ok(entries)
    }
}

/// A stored copy that was taken back for good. A copy that was carried on may lie in several segments,
/// so the removal names the copy and not the place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Removal {
    /// Which stored copy.
    pub generation: Generation,
    /// The newest segment that was there then: the copy lies in none that is newer, so the removal may be
    /// forgotten once all that are older or equal are overwritten.
    pub sequence: u64,
}

impl Wire for Removal {
    const MIN_LEN: usize = Generation::MIN_LEN + 8;

    fn put(&self, out: &mut Vec<u8>) {
        self.generation.put(out);
        self.sequence.put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { generation: Wire::take(from)?, sequence: Wire::take(from)? })
    }
}

/// Removals that one page of the log holds.
pub const REMOVALS_PER_PAGE: usize = (PAGE - PREFIX - CRC - 4) / Removal::MIN_LEN;

/// One page of the removal log.
///
/// # Panics
/// With more removals than a page holds.
pub fn removal_page(removals: &[Removal]) -> AlignedBuffer {
    assert!(removals.len() <= REMOVALS_PER_PAGE, "{} removals in a page", removals.len());
    frame(REMOVALS_MAGIC, &removals.to_vec().to_wire())
}

/// The removals of a page.
///
/// # Errors
/// It is not a whole page of the log: the log ends here, or is damaged.
pub fn removals_of(page: &[u8]) -> Result<Vec<Removal>, Unreadable> {
    Ok(Wire::from_wire("removals", unframe("removal page", REMOVALS_MAGIC, page)?)?)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use larder_proto::{
        LayoutFingerprint, PartNumber,
        checksum::ChunkSums,
        frame::{Codec, Origin},
        ids::TenantName,
        part::PartRef,
    };
    use proptest::prelude::*;

    /// A record's header for `payload`.
    pub(in super::super) fn header(nonce: Nonce, n: u64, payload: &[u8]) -> RecordHeader {
        let mut key = [7; 32];
        key[..8].copy_from_slice(&n.to_le_bytes());
        let part = PartRef {
            key: BlockKey::from_bytes(key),
            layout: LayoutFingerprint::from_bytes([2; 32]),
            part: PartNumber(0),
        };
        let origin = Origin {
            content: ContentFingerprint::from_bytes([3; 32]),
            root: BlockKey::from_bytes([4; 32]),
            parent: (n % 2 == 1).then(|| BlockKey::from_bytes([5; 32])),
            origin_hash: None,
            producer: ShortText::cut("engine"),
            producer_incarnation: Incarnation(9),
        };
        let info = PartInfo {
            generation: Generation { incarnation: Incarnation(1), counter: n },
            len: payload.len() as u64,
            codec: Codec::Raw,
            sums: ChunkSums::of(payload, 4096),
            origin,
        };
        RecordHeader { nonce, name: PartName { tenant: TenantName::default().id(), part }, info }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back_and_no_flipped_bit_goes_unnoticed(
            n: u64, len in 1usize..60_000, nonce: Nonce, flip: prop::sample::Index,
        ) {
            let record = header(nonce, n, &vec![1; len]);
            let bytes = record.encode();
            prop_assert_eq!(&RecordHeader::decode(&nonce, &bytes).unwrap(), &record);
            prop_assert_eq!(RecordHeader::pages_from_front(&bytes[..PAGE]) * PAGE, bytes.len());
            let segment = SegmentHeader {
                node: NodeId::from_bytes([1; 16]), nonce, sequence: n, segment_bytes: 1 << 20,
            };
            prop_assert_eq!(&SegmentHeader::decode(&segment.encode()).unwrap(), &segment);

            let entries = vec![FooterEntry::of(&record, 1, 1); 40];
            let closing = Trailer::close(nonce, &entries);
            prop_assert!(closing.len() as u64 <= closing_pages(40) * PAGE as u64);
            let (footer, last) = closing.split_at(closing.len() - PAGE);
            let trailer = Trailer::decode(&nonce, last).unwrap();
            prop_assert_eq!(&trailer.entries(footer).unwrap(), &entries);

            let body = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
            let mut damaged = AlignedBuffer::copy_of(&bytes);
            let bit = flip.index((PREFIX + body + CRC) * 8);
            damaged[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(RecordHeader::decode(&nonce, &damaged).is_err());
            let mut damaged = footer.to_vec();
            let bit = flip.index(trailer.footer_bytes as usize * 8);
            damaged[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(trailer.entries(&damaged).is_err());
        }

        #[test]
        fn decoding_any_page_never_panics(mut page in prop::collection::vec(any::<u8>(), PAGE), magic in 0..4usize) {
            page[..8].copy_from_slice(&[SEGMENT_MAGIC, RECORD_MAGIC, TRAILER_MAGIC, REMOVALS_MAGIC][magic]);
            page[8..12].copy_from_slice(&FORMAT.to_le_bytes());
            prop_assert!(SegmentHeader::decode(&page).is_err());
            prop_assert!(RecordHeader::decode(&[0; 16], &page).is_err());
            prop_assert!(Trailer::decode(&[0; 16], &page).is_err());
            prop_assert!(removals_of(&page).is_err());
        }
    }

    #[test]
    fn a_record_of_another_use_of_the_file_is_stale() {
        let record = header([1; 16], 1, b"bytes").encode();
        assert_eq!(RecordHeader::decode(&[2; 16], &record), Err(Unreadable::Stale));
        let closing = Trailer::close([1; 16], &[]);
        assert_eq!(Trailer::decode(&[2; 16], &closing), Err(Unreadable::Stale));
    }

    #[test]
    fn a_newer_format_is_told_from_damage() {
        let mut page = header([1; 16], 1, b"bytes").encode();
        page[8..12].copy_from_slice(&(FORMAT + 1).to_le_bytes());
        let newer = Unreadable::Newer { found: FORMAT + 1 };
        assert_eq!(RecordHeader::decode(&[1; 16], &page), Err(newer));
    }

    #[test]
    fn a_page_of_removals_holds_as_many_as_it_says() {
        let removal = |counter| Removal {
            generation: Generation { incarnation: Incarnation(2), counter },
            sequence: 7,
        };
        let removals: Vec<_> = (0..REMOVALS_PER_PAGE as u64).map(removal).collect();
        let page = removal_page(&removals);
        assert_eq!(page.len(), PAGE);
        assert_eq!(removals_of(&page).unwrap(), removals);
        assert_eq!(
            removals_of(&AlignedBuffer::zeroed(PAGE)),
            Err(Unreadable::Absent("removal page"))
        );
    }
}
