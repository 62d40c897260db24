//! Records of a path: written, read, carried on to a newer segment, and removed for good.
//!
//! Each is proved whenever it is read: its header says what it is, and its sums what its bytes are. Which segment
//! takes the next one, and which goes, is the path's own business (`path`).

use super::{
    SsdError,
    format::{FooterEntry, RecordHeader, Trailer, Unreadable},
    io::{AlignedBuffer, File, PAGE, ReadBuffer},
    path::{Health, SsdPath},
    segment::{Place, Segment, SsdCopy},
};
use crate::tiers::dram::{DramCopy, WritableExtent};
use bytes::Bytes;
use larder_proto::{Generation, PartName, frame::PartInfo};
use std::sync::{Arc, atomic::Ordering};

/// Segments that may be begun before a part is written that waits for it now. It waits no longer than all that
/// is queued before it (`ssd.write_queue`): so many segments of the default length hold 16 TiB, and of the
/// shortest 64 GiB.
const SEGMENTS_AHEAD: u64 = 1 << 16;

impl SsdPath {
    /// Writes a part that lies in the arena. It is there, and readable, when this returns. Waits for a
    /// segment that is being made ready; how much may wait is the caller's to bound.
    ///
    /// # Errors
    /// `TooLong`; `Busy` at the end of the tier; otherwise the disk failed, and the path is fenced.
    pub async fn append(
        self: &Arc<Self>,
        name: &PartName,
        info: &PartInfo,
        part: &DramCopy,
    ) -> Result<SsdCopy, SsdError> {
        let payload = Bytes::from_owner(Pages(part.clone()));
        loop {
            let ready = self.ready.notified();
            match self.append_bytes(name, info, payload.clone()).await {
                Err(SsdError::Busy) if !self.stopping.load(Ordering::Acquire) => ready.await,
                outcome => return outcome,
            }
        }
    }

    /// The same, and `Busy` when no segment is ready: nothing was written.
    pub(super) async fn append_bytes(
        self: &Arc<Self>,
        name: &PartName,
        info: &PartInfo,
        payload: Bytes,
    ) -> Result<SsdCopy, SsdError> {
        let (segment, place) = self.place(name, info).await?;
        let header = RecordHeader { nonce: segment.nonce, name: *name, info: info.clone() };
        let page = u32::try_from(place.page).unwrap_or(u32::MAX);
        let entry = FooterEntry::of(&header, page, place.header_pages);
        let copy = SsdCopy::of(Arc::clone(&segment), &entry);
        let bytes = copy.footprint_bytes();
        let pieces = vec![header.encode().freeze(), payload];
        let written = self.in_time(segment.file.write(copy.offset(), pieces)).await;
        segment.written(written.is_ok().then_some(entry));
        written?;
        self.counters.written_records.fetch_add(1, Ordering::Relaxed);
        self.counters.written_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.seal_if_full(&segment).await?;
        // A path that was fenced meanwhile has withdrawn what it holds, and shall hold nothing new.
        match self.is_healthy() {
            true => Ok(copy),
            false => Err(self.fenced()),
        }
    }

    /// Space in the open segment, or in the next one.
    async fn place(
        self: &Arc<Self>,
        name: &PartName,
        info: &PartInfo,
    ) -> Result<(Arc<Segment>, Place), SsdError> {
        if !Segment::can_hold(self.settings.segment_bytes, name, info) {
            return Err(SsdError::TooLong); // And the open segment stays as it is.
        }
        loop {
            let (segment, place) = {
                let mut state = self.state.lock();
                if state.health != Health::Healthy {
                    drop(state);
                    return Err(self.fenced());
                }
                if state.open.is_none() {
                    state.open = state.prepared.take();
                    self.changed.notify_one();
                }
                let Some(open) = state.open.clone() else { return Err(SsdError::Busy) };
                if !open.file.is_whole() && open.take_no_more() {
                    let path = self.settings.name.display();
                    tracing::warn!(
                        %path, segment = ?open,
                        "somebody has removed or cut a segment file: a restart will not find all that is in it"
                    );
                }
                let place = open.place(name, info);
                if place.is_none() {
                    state.open = None;
                }
                (open, place)
            };
            match place {
                Some(place) => return Ok((segment, place)),
                None => self.seal_if_full(&segment).await?,
            }
        }
    }

    /// The records of a sealed segment.
    ///
    /// # Errors
    /// The disk failed, and the path is fenced, or the footer is damaged.
    pub async fn records(&self, segment: &Arc<Segment>) -> Result<Vec<FooterEntry>, SsdError> {
        let read = |page: u64, pages: u64| {
            let len = usize::try_from(pages).unwrap_or(usize::MAX).saturating_mul(PAGE);
            self.read_pages(&segment.file, page * PAGE as u64, len)
        };
        let last = segment.file.len() / PAGE as u64 - 1;
        let trailer = Trailer::decode(&segment.nonce, &read(last, 1).await?)?;
        let pages = trailer.footer_pages();
        if pages == 0 {
            return Ok(Vec::new());
        }
        let from = last.checked_sub(pages).ok_or(Unreadable::Sum("footer"))?;
        Ok(trailer.entries(&read(from, pages).await?)?)
    }

    pub(super) async fn read_pages(
        &self,
        file: &Arc<dyn File>,
        offset: u64,
        len: usize,
    ) -> Result<AlignedBuffer, SsdError> {
        let into: Box<dyn ReadBuffer> = Box::new(AlignedBuffer::zeroed(len));
        let mut got = self.in_time(file.read(offset, vec![into])).await?;
        Ok(taken(got.pop()))
    }

    /// Reads a part into an extent of the arena and verifies that it is the one that is asked for, byte
    /// for byte.
    ///
    /// # Errors
    /// `Unreadable` or `Damaged`: the copy has to be withdrawn. Otherwise the disk failed, and the path
    /// is fenced.
    pub async fn read(
        &self,
        name: &PartName,
        copy: &SsdCopy,
        extent: WritableExtent,
    ) -> Result<(DramCopy, PartInfo), SsdError> {
        if !self.is_healthy() {
            return Err(self.fenced());
        }
        let header: Box<dyn ReadBuffer> = Box::new(AlignedBuffer::zeroed(copy.header_bytes()));
        let into = vec![header, Box::new(extent)];
        let mut got = self.in_time(copy.segment().file.read(copy.offset(), into)).await?;
        let part = taken::<WritableExtent>(got.pop()).freeze();
        let header = taken::<AlignedBuffer>(got.pop());
        self.counters.read_records.fetch_add(1, Ordering::Relaxed);
        self.counters.read_bytes.fetch_add(copy.footprint_bytes(), Ordering::Relaxed);
        let proved = prove(name, copy, &header, part.bytes());
        if proved.is_err() {
            self.counters.damaged_records.fetch_add(1, Ordering::Relaxed);
        }
        Ok((part, proved?))
    }

    /// Writes a record of another segment of this path on to the open one. The bytes are verified on the
    /// way.
    ///
    /// # Errors
    /// As of [`Self::read`] and [`Self::append`].
    pub async fn carry(
        self: &Arc<Self>,
        name: &PartName,
        copy: &SsdCopy,
    ) -> Result<SsdCopy, SsdError> {
        let len = usize::try_from(copy.footprint_bytes()).unwrap_or(usize::MAX);
        let record = self.read_pages(&copy.segment().file, copy.offset(), len).await?;
        let (header, payload) = record.split_at(copy.header_bytes());
        let part_len = usize::try_from(copy.len()).unwrap_or(usize::MAX);
        let info = prove(name, copy, header, &payload[..part_len])?;
        let payload = record.freeze().slice(copy.header_bytes()..);
        let carried = self.append_bytes(name, &info, payload).await?;
        self.counters.carried_records.fetch_add(1, Ordering::Relaxed);
        Ok(carried)
    }

    /// Notes for good that these copies are gone. They do not come back once this has returned.
    ///
    /// # Errors
    /// The disk failed, and the path is fenced.
    pub async fn remove(self: &Arc<Self>, gone: Vec<Generation>) -> Result<(), SsdError> {
        self.note_removed(gone, 0).await
    }

    /// The same of copies that may yet be written here, to whatever segment.
    ///
    /// # Errors
    /// The disk failed, and the path is fenced.
    pub async fn remove_unwritten(self: &Arc<Self>, gone: Vec<Generation>) -> Result<(), SsdError> {
        self.note_removed(gone, SEGMENTS_AHEAD).await
    }

    async fn note_removed(
        self: &Arc<Self>,
        gone: Vec<Generation>,
        ahead: u64,
    ) -> Result<(), SsdError> {
        if !self.is_healthy() {
            return Err(self.fenced());
        }
        let (newest, oldest) = {
            let state = self.state.lock();
            (state.last_sequence, state.oldest_use())
        };
        let newest = newest.saturating_add(ahead);
        self.in_time(self.removals.append(&self.folder, gone, newest, oldest)).await
    }
}

/// Whether a record is the part that is asked for.
fn prove(
    name: &PartName,
    copy: &SsdCopy,
    header: &[u8],
    payload: &[u8],
) -> Result<PartInfo, SsdError> {
    let info = prove_header(name, copy, header)?;
    info.sums.verify(0, payload)?;
    Ok(info)
}

/// Whether the header of a record names the part that is asked for.
pub(super) fn prove_header(
    name: &PartName,
    copy: &SsdCopy,
    header: &[u8],
) -> Result<PartInfo, SsdError> {
    let header = RecordHeader::decode(&copy.segment().nonce, header)?;
    let is_it = header.name == *name
        && header.info.generation == copy.generation()
        && header.info.len == copy.len();
    match is_it {
        true => Ok(header.info),
        false => Err(Unreadable::Stale.into()),
    }
}

/// A buffer that a driver gave back.
pub(super) fn taken<T: 'static>(buffer: Option<Box<dyn ReadBuffer>>) -> T {
    match buffer.map(|buffer| buffer.into_any().downcast::<T>()) {
        Some(Ok(buffer)) => *buffer,
        _ => unreachable!("a driver gives back the buffers it got"),
    }
}

/// The pages of a part, for a device to write.
struct Pages(DramCopy);

impl AsRef<[u8]> for Pages {
    fn as_ref(&self) -> &[u8] {
        self.0.pages()
    }
}
