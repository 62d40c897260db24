//! Synthetic segments: sparse files with valid header, footer and trailer, for a node to adopt.

use super::{
    Sizes, What,
    node::{Home, Node},
    parts::{self, MODEL, Parts},
    plain::PlainRead,
    records::within,
    rows::{Row, Warm},
};
use crate::{content, error::BenchError};
use indicatif::ProgressBar;
use larder_proto::{
    Generation, PartName,
    checksum::{ChunkSums, DEFAULT_CHUNK},
    frame::{Codec, Origin, PartInfo},
    ids::{Incarnation, NodeId, TenantName},
    wire::ShortText,
};
use larder_store_node::tiers::ssd::{
    FooterEntry,
    format::{Nonce, RecordHeader, SegmentHeader, Trailer, closing_pages},
    io::PAGE,
    slot_name,
};
use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};
use tokio::task::spawn_blocking;

/// Writes the segments and watches a node adopt them.
pub(super) async fn measure(
    disk: &Path,
    sizes: Sizes,
    bar: &ProgressBar,
) -> Result<Row, BenchError> {
    let home = Home::new(disk, sizes)?;
    bar.set_message(format!("writing footers of {} records", sizes.records));
    // A first life, for the node id that segments carry, and for a removal log: without one nothing is adopted.
    let first = Node::start(&home)?;
    let id = first.connect().await?.node();
    within(first.writes(home.ssd())).await?;
    first.kill()?;
    let dir = home.ssd().to_owned();
    let write = move || {
        remove_segments(&dir)?;
        Synthetic::new(dir, id, sizes).write_all()
    };
    let written = spawn_blocking(write).await?;
    written.map_err(BenchError::io("write synthetic segments"))?;
    let plain = PlainRead::of(home.ssd()).map_err(BenchError::io("look at the segments"))?;

    bar.set_message("starting the node");
    let node = Node::start(&home)?;
    let adopted = within(node.adopted()).await?;
    let cpu_seconds = node.cpu_seconds();
    bar.set_message(format!("looking {} records up", sizes.records));
    let known = Parts::of(&node, sizes.len).await?.on_ssd(0..sizes.records).await?;
    drop(node);
    let warm = Warm { first_answer: None, adopted, cpu_seconds, served: known.len() as u64 };
    let row = Row::new(What::Footers, sizes.records, sizes, &warm, &plain)?;
    home.remove()?;
    Ok(row)
}

/// Those that a life made ready and nobody filled.
fn remove_segments(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("segment-") {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Segments as a node would have filled them, one record behind the other.
struct Synthetic {
    dir: PathBuf,
    node: NodeId,
    sizes: Sizes,
    /// Of the next record; name and place in the chain are set anew for each.
    header: RecordHeader,
}

impl Synthetic {
    fn new(dir: PathBuf, node: NodeId, sizes: Sizes) -> Self {
        let origin = Origin {
            content: MODEL.content,
            root: content::key(0),
            parent: Some(content::key(0)),
            origin_hash: None,
            producer: ShortText::cut("larder-bench"),
            producer_incarnation: Incarnation(1),
        };
        let info = PartInfo {
            generation: Generation { incarnation: Incarnation(1), counter: 0 },
            len: sizes.len as u64,
            codec: Codec::Raw,
            // Of no bytes that are there: a footer keeps only how many there are.
            sums: ChunkSums::of(&vec![0; sizes.len], DEFAULT_CHUNK),
            origin,
        };
        let name = PartName { tenant: TenantName::default().id(), part: parts::name(0) };
        Self { dir, node, sizes, header: RecordHeader { nonce: Nonce::default(), name, info } }
    }

    fn write_all(mut self) -> io::Result<()> {
        let (mut next, mut slot) = (0, 0);
        while next < self.sizes.records {
            let entries = self.entries(next);
            if entries.is_empty() {
                return Err(io::Error::other("a record does not fit a segment"));
            }
            next += entries.len() as u64;
            self.write(slot, &entries)?;
            slot += 1;
        }
        Ok(())
    }

    /// As many records as fit a segment, from number `first` on.
    fn entries(&mut self, first: u64) -> Vec<FooterEntry> {
        let header_pages = RecordHeader::pages(&self.header.name, &self.header.info);
        let header_pages = u16::try_from(header_pages).unwrap_or(u16::MAX);
        let pages = self.sizes.segment_bytes / PAGE as u64;
        let (mut page, mut entries) = (1, Vec::new());
        for number in first..self.sizes.records {
            let (root, parent) = parts::place_in_chain(number);
            self.header.name.part = parts::name(number);
            self.header.info.generation.counter = number;
            (self.header.info.origin.root, self.header.info.origin.parent) = (root, parent);
            let at = u32::try_from(page).unwrap_or(u32::MAX);
            let entry = FooterEntry::of(&self.header, at, header_pages);
            page += entry.pages();
            if page + closing_pages(entries.len() as u64 + 1) > pages {
                break;
            }
            entries.push(entry);
        }
        entries
    }

    fn write(&self, slot: u32, entries: &[FooterEntry]) -> io::Result<()> {
        let (sequence, segment_bytes) = (u64::from(slot) + 1, self.sizes.segment_bytes);
        let mut nonce = Nonce::default();
        nonce[..8].copy_from_slice(&content::mix(sequence).to_le_bytes());
        let header = SegmentHeader { node: self.node, nonce, sequence, segment_bytes };
        let closing = Trailer::close(nonce, entries);
        let file = File::create_new(self.dir.join(slot_name(slot)))?;
        file.set_len(segment_bytes)?;
        file.write_all_at(&header.encode(), 0)?;
        file.write_all_at(&closing, segment_bytes - closing.len() as u64)?;
        file.sync_all() // So that neither side pays for writing it.
    }
}
