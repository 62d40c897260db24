//! What the tests of the ssd tier share: blocks of all lengths, and the files of a folder.

use larder_client::connection::{Connection, PutOutcome};
use larder_proto::BlockKey;
use larder_store_node::tiers::ssd::{
    format::{RecordHeader, SegmentHeader, Trailer},
    io::PAGE,
};
use larder_tests::{blocks, node};
use std::{
    fs,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
};

/// The longest block.
pub(crate) const LONGEST: usize = 200_000;

/// How long the block of a key is: from one byte to [`LONGEST`].
pub(crate) fn len_of(key: &BlockKey) -> usize {
    let bytes = key.as_bytes();
    1 + u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize % LONGEST
}

/// Whether the block is stored now, and was not before.
pub(crate) async fn put(to: &Connection, key: BlockKey) -> bool {
    let put = node::put(to, key, len_of(&key)).await.unwrap();
    matches!(put, PutOutcome::Stored(_))
}

/// Whether the block is here. If it is, it is exact.
pub(crate) async fn is_exact(at: &Connection, key: BlockKey) -> bool {
    exact(&key, node::get(at, key).await.unwrap())
}

/// Whether it is not a miss. If it is not, it is exact.
pub(crate) fn exact(key: &BlockKey, got: Option<Vec<u8>>) -> bool {
    let Some(bytes) = got else { return false };
    assert!(bytes == blocks::bytes(key, len_of(key)), "wrong bytes of block {key}");
    true
}

/// Keys of blocks.
pub(crate) fn keys(numbers: std::ops::Range<u64>) -> Vec<BlockKey> {
    numbers.map(blocks::key).collect()
}

/// The segment files of a folder.
pub(crate) fn segments(dir: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let is_segment = |path: &PathBuf| {
        path.file_name().unwrap().to_str().is_some_and(|name| name.starts_with("segment-"))
    };
    let mut segments: Vec<_> = files.filter(is_segment).collect();
    segments.sort();
    segments
}

/// Bytes that a folder and its files take on the device.
pub(crate) fn physical_bytes(dir: &Path) -> u64 {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
    (files.map(|file| file.blocks()).sum::<u64>() + fs::metadata(dir).unwrap().blocks()) * 512
}

/// A segment file as it lies on the disk.
pub(crate) struct OnDisk {
    pub file: PathBuf,
    /// Whole records, in order.
    pub records: Vec<Record>,
    /// Where the footer begins, and how long it is; none in a segment that was open.
    pub footer: Option<(u64, u64)>,
}

/// A record as it lies on the disk.
pub(crate) struct Record {
    pub key: BlockKey,
    /// Where its header begins, and how many bytes of it mean something.
    pub header: (u64, u64),
    pub payload: (u64, u64),
}

/// All segments that are in use.
pub(crate) fn on_disk(dir: &Path) -> Vec<OnDisk> {
    segments(dir).iter().filter_map(|file| read_segment(file)).collect()
}

fn read_segment(path: &Path) -> Option<OnDisk> {
    let bytes = fs::read(path).unwrap();
    let nonce = SegmentHeader::decode(&bytes[..PAGE]).ok()?.nonce;
    let last = bytes.len() - PAGE;
    let footer = Trailer::decode(&nonce, &bytes[last..]).ok().map(|trailer| {
        let pages = usize::try_from(trailer.footer_pages()).unwrap() * PAGE;
        ((last - pages) as u64, u64::from(trailer.footer_bytes))
    });
    let (mut at, mut records) = (PAGE, Vec::new());
    while at < bytes.len() {
        let pages = RecordHeader::pages_from_front(&bytes[at..at + PAGE]);
        match RecordHeader::decode(&nonce, &bytes[at..bytes.len().min(at + pages * PAGE)]) {
            Ok(header) => {
                let body = u32::from_le_bytes(bytes[at + 12..at + 16].try_into().unwrap());
                let payload = at + pages * PAGE;
                records.push(Record {
                    key: header.name.part.key,
                    header: (at as u64, u64::from(body) + 20), // Magic, format, length; the sum.
                    payload: (payload as u64, header.info.len),
                });
                let len = usize::try_from(header.info.len).unwrap();
                at = payload + len.next_multiple_of(PAGE);
            }
            Err(_) => at += PAGE,
        }
    }
    Some(OnDisk { file: path.to_owned(), records, footer })
}

/// Flips one bit of a file: the `bit`th after `from`.
pub(crate) fn flip(file: &Path, from: u64, bit: u64) {
    let file = fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, from + bit / 8).unwrap();
    byte[0] ^= 1 << (bit % 8);
    file.write_all_at(&byte, from + bit / 8).unwrap();
}
