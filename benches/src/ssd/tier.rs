//! Our side: the whole ssd tier of a node, on a path of its own.
//!
//! Legs write and read records through the path: headers, checksums, footers, segments that are sealed and
//! used again. A push goes through the catalog as puts do.

use super::plan::{Cell, Op, Plan};
use crate::{child::own_cpu_seconds, content, error::BenchError, figures::Leg};
use larder_proto::{
    ContentFingerprint, Generation, LayoutFingerprint, PartName, PartNumber,
    checksum::{ChunkSums, DEFAULT_CHUNK},
    frame::{Codec, Origin, PartInfo, Reserve},
    ids::{Incarnation, NodeId, TenantName},
    part::PartRef,
    wire::ShortText,
};
use larder_store_node::{
    catalog::{Admission, Admit, Catalog, Found, Producer, Watermarks},
    eviction::Lru,
    inventory::{ChangeLog, PartSets},
    tiering::{PathHost, Promote, Tiering, TieringSettings},
    tiers::{
        dram::{Arena, DramCopy},
        ssd::{
            Durability, Owner, PathSettings, SsdCopy, SsdPath, UseId,
            io::{Area, DiskFolder, DiskOptions, DriverChoice, Folder},
        },
    },
};
use std::{
    collections::VecDeque,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    task::{JoinSet, spawn_blocking},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

/// Of a segment: the default of a node.
pub(super) const SEGMENT: u64 = 256 << 20;
/// Of the arena, beside the memory of the requests of a leg: small, so that nearly all that is pushed lies on
/// the ssd alone.
const ARENA: usize = 192 << 20;
/// Segments of a path, at least.
const SEGMENTS: u64 = 8;
/// The share of the path, in eighths, that holds what is read back. The rest is being reclaimed, written or
/// made ready, and nothing that was pushed is reclaimed before it is read.
const KEPT_EIGHTHS: u64 = 3;
/// The life of the tier.
const LIFE: Incarnation = Incarnation(1);

/// What became of the parts of a push.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pushed {
    /// Parts whose copy on the ssd was announced.
    pub(super) committed: u64,
    /// Parts that the write queue had no room for.
    pub(super) refused: u64,
    /// Of those committed: read from the ssd, and every byte is right.
    pub(super) readable: u64,
    /// GB/s at which they were put.
    pub(super) put_gb_per_s: f64,
    /// GB/s that were written meanwhile.
    pub(super) written_gb_per_s: f64,
}

/// A record that was written.
#[derive(Debug)]
struct Record {
    name: PartName,
    copy: SsdCopy,
}

/// See the module. Its folder is removed when this is dropped.
#[derive(Debug)]
pub(super) struct Tier {
    arena: Arc<Arena>,
    writer: Writer,
    catalog: Arc<Catalog>,
    tiering: Arc<Tiering>,
    /// What a leg reads, round and round.
    records: Arc<VecDeque<Record>>,
    capacity: u64,
    running: JoinSet<()>,
    stop: CancellationToken,
    dir: TempDir,
}

/// Nothing fails here that a restart would have to know.
struct NoHost;

impl PathHost for NoHost {
    fn open(&self, _: &Path) -> io::Result<Arc<dyn Folder>> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn note_failed(&self, _: &[UseId]) -> io::Result<()> {
        Ok(())
    }
}

impl Tier {
    /// Makes an empty path in `dir`. `queue` bytes may wait to be written.
    pub(super) async fn start(
        dir: &Path,
        driver: DriverChoice,
        plan: &Plan,
        queue: usize,
    ) -> Result<Self, BenchError> {
        let doing = || format!("make a folder in {}", dir.display());
        let dir = tempfile::Builder::new().prefix("larder-bench-tier-").tempdir_in(dir);
        let dir = dir.map_err(BenchError::io(doing()))?;
        let capacity = plan.file_len.max(SEGMENTS * SEGMENT) + plan.file_len / 256 + (4 << 20);
        let arena = Arena::new(plan.memory() + ARENA.max(2 * queue), |_| Ok(()));
        let arena = arena.map_err(BenchError::io("take memory"))?;
        let options =
            DiskOptions { driver, memory: vec![Area::of(&arena)], ..DiskOptions::default() };
        let at = dir.path().to_owned();
        let folder = spawn_blocking(move || DiskFolder::open(&at, &options)).await?;
        let folder = folder.map_err(io::Error::other).map_err(BenchError::io("open the path"))?;
        let settings = PathSettings {
            name: dir.path().to_owned(),
            capacity,
            segment_bytes: SEGMENT,
            durability: Durability::None,
            deadline: Duration::from_secs(60),
        };
        let owner = Owner { node: NodeId::from_bytes([9; 16]), life: LIFE, last_removal: None };
        let opened = SsdPath::open(owner, Arc::new(folder), settings, Arc::default()).await;
        let (path, adoption) =
            opened.map_err(io::Error::other).map_err(BenchError::io("open the path"))?;
        let log = Arc::new(ChangeLog::new(Arc::new(PartSets::new(64)), 1 << 16));
        let watermarks = Watermarks { high: 0.95, low: 0.9 };
        let catalog =
            Catalog::new(LIFE, Arc::clone(&arena), Box::new(Lru::default()), watermarks, log);
        let settings = TieringSettings {
            admit: Admit::All,
            promote: Promote::Never,
            queue_bytes: queue as u64,
            scrub_rate: 0,
        };
        let paths = vec![Arc::clone(&path)];
        let tiering = Tiering::new(Arc::clone(&catalog), paths, settings, Arc::new(NoHost));
        let (mut running, stop) = (JoinSet::new(), CancellationToken::new());
        running.spawn(Arc::clone(&tiering).run(vec![adoption], stop.clone()));
        let (next, records) = (Arc::default(), Arc::default());
        let writer = Writer { path, next };
        Ok(Self { arena, writer, catalog, tiering, records, capacity, running, stop, dir })
    }

    /// Records one behind the other, as many at a time as the cell says, until `length` is over. Each of them in a
    /// task of its own, as a node has it: what proves a record keeps no other from being asked for.
    pub(super) async fn leg(&self, cell: Cell, length: Duration) -> Result<Leg, BenchError> {
        let work: Vec<Work> = match cell.op {
            Op::Write => {
                self.templates(cell)?.into_iter().map(|one| Work::Write(Box::new(one))).collect()
            }
            Op::Read => (0..cell.depth).map(|_| Work::Read(Arc::clone(&self.records))).collect(),
        };
        let (begin, cpu) = (Instant::now(), own_cpu_seconds());
        let turn = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        for work in work {
            let (writer, arena, turn) =
                (self.writer.clone(), Arc::clone(&self.arena), Arc::clone(&turn));
            tasks.spawn(async move {
                let mut bytes = 0;
                while begin.elapsed() < length {
                    let at = turn.fetch_add(1, Ordering::Relaxed);
                    writer.one(&work, at, &arena, cell.len).await?;
                    bytes += cell.len as u64;
                }
                Ok::<_, BenchError>(bytes)
            });
        }
        let mut bytes = 0;
        while let Some(done) = tasks.join_next().await {
            bytes += done??;
        }
        let (wall, cpu_seconds) = (begin.elapsed(), own_cpu_seconds() - cpu);
        Ok(Leg { bytes, wall, cpu_seconds, latencies: Vec::new() })
    }

    /// Writes every file once over: a cache disk is full nearly always, and a file that was only set aside
    /// is slower to write and faster to read.
    pub(super) async fn write_once_over(&mut self, cell: Cell) -> Result<(), BenchError> {
        self.write_records(cell, self.capacity / cell.len as u64).await?;
        self.records = Arc::default();
        Ok(())
    }

    /// Writes records for the reads that follow, as many as the path keeps.
    pub(super) async fn fill(&mut self, cell: Cell) -> Result<(), BenchError> {
        self.write_records(cell, self.kept(cell)).await
    }

    async fn write_records(&mut self, cell: Cell, count: u64) -> Result<(), BenchError> {
        self.records = Arc::default();
        let templates = self.templates(Cell { depth: 1, ..cell })?;
        let mut records = VecDeque::new();
        for _ in 0..count {
            let number = self.writer.next.fetch_add(1, Ordering::Relaxed);
            let copy = self.writer.append(number, &templates[0]).await?;
            records.push_back(Record { name: name(number), copy });
            if records.len() as u64 > self.kept(cell) {
                records.pop_front(); // One that is held keeps its segment from being used again.
            }
        }
        self.records = Arc::new(records);
        Ok(())
    }

    /// Records that are there until so many more were written.
    fn kept(&self, cell: Cell) -> u64 {
        (self.capacity / 8 * KEPT_EIGHTHS / cell.len as u64).max(1)
    }

    /// The files of the segments.
    pub(super) fn files(&self) -> Result<Vec<PathBuf>, BenchError> {
        let list = || -> io::Result<Vec<PathBuf>> {
            let mut files = Vec::new();
            for entry in std::fs::read_dir(self.dir.path())? {
                let entry = entry?;
                if entry.metadata()?.len() == SEGMENT {
                    files.push(entry.path());
                }
            }
            files.sort();
            Ok(files)
        };
        list().map_err(BenchError::io("list the files of the tier"))
    }

    /// Puts parts as fast as memory takes them, without a look at the disk, and reads back what was announced.
    pub(super) async fn push(&self, cell: Cell) -> Result<Pushed, BenchError> {
        let count = self.kept(cell);
        let first = self.writer.next.fetch_add(count, Ordering::Relaxed);
        let counters = self.writer.path.counters();
        let written = || counters.written_bytes.load(Ordering::Relaxed);
        let tiering = self.tiering.counters();
        let counts = || {
            let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            (count(&tiering.committed), count(&tiering.refused))
        };
        let (began, before, counted) = (Instant::now(), written(), counts());
        let catalog = Arc::clone(&self.catalog);
        spawn_blocking(move || put_all(&catalog, first..first + count, cell.len)).await??;
        let (took, while_put) = (began.elapsed().as_secs_f64(), written() - before);
        self.tiering.settled().await;
        // By the tier's own counters, not by what is there: a part that was announced and is lost shows.
        let (committed, refused) = (counts().0 - counted.0, counts().1 - counted.1);
        // Others take the place of what still lies in memory too.
        let others = (self.arena.capacity_bytes() / cell.len as u64).max(1);
        let from = self.writer.next.fetch_add(others, Ordering::Relaxed);
        let catalog = Arc::clone(&self.catalog);
        spawn_blocking(move || put_all(&catalog, from..from + others, cell.len)).await??;
        self.tiering.settled().await;
        let mut readable = 0;
        for number in first..first + count {
            let name = name(number);
            if !self.catalog.tiers(&name).has(larder_proto::Tier::Ssd) {
                continue;
            }
            let read = match self.catalog.find(&name) {
                None => continue,
                Some(Found::Here(read)) => read,
                Some(Found::OnSsd(copy)) => match self.tiering.load(&name, &copy).await {
                    Ok(read) => read,
                    Err(_) => continue,
                },
            };
            content::check(number, read.bytes())?;
            readable += 1;
        }
        let put_gb_per_s = gb(count * cell.len as u64) / took;
        let written_gb_per_s = gb(while_put) / took;
        Ok(Pushed { committed, refused, readable, put_gb_per_s, written_gb_per_s })
    }

    fn templates(&self, cell: Cell) -> Result<Vec<Template>, BenchError> {
        (0..cell.depth)
            .map(|_| {
                let mut extent = self.arena.allocate(cell.len).ok_or_else(no_room)?;
                content::fill(0, extent.bytes_mut());
                let part = extent.freeze();
                let info = PartInfo {
                    generation: Generation { incarnation: LIFE, counter: 0 },
                    len: cell.len as u64,
                    codec: Codec::Raw,
                    sums: ChunkSums::of(part.bytes(), DEFAULT_CHUNK),
                    origin: Origin {
                        content: CONTENT,
                        root: content::key(0),
                        parent: None,
                        origin_hash: None,
                        producer: ShortText::cut("larder-bench"),
                        producer_incarnation: LIFE,
                    },
                };
                Ok(Template { part, info })
            })
            .collect()
    }

    /// Ends the tier and removes its folder.
    pub(super) async fn remove(self) -> Result<(), BenchError> {
        let Self { mut running, stop, dir, writer, tiering, records, .. } = self;
        stop.cancel();
        while running.join_next().await.is_some() {}
        drop((records, tiering, writer));
        dir.close().map_err(BenchError::io("remove the folder of the bench"))
    }
}

/// Writes and reads records of the path.
#[derive(Debug, Clone)]
struct Writer {
    path: Arc<SsdPath>,
    next: Arc<AtomicU64>,
}

/// What one of the tasks of a leg does again and again.
#[derive(Debug)]
enum Work {
    Write(Box<Template>),
    /// One of these, each in its turn.
    Read(Arc<VecDeque<Record>>),
}

impl Writer {
    async fn one(
        &self,
        work: &Work,
        at: usize,
        arena: &Arc<Arena>,
        len: usize,
    ) -> Result<(), BenchError> {
        match work {
            Work::Write(template) => {
                let number = self.next.fetch_add(1, Ordering::Relaxed);
                self.append(number, template).await?;
            }
            Work::Read(records) => {
                let Record { name, copy } = &records[at % records.len()];
                let room = arena.allocate(len).ok_or_else(no_room)?;
                // Proves name, place and checksum of the record.
                self.path.read(name, copy, room).await.map_err(failed)?;
            }
        }
        Ok(())
    }

    async fn append(&self, number: u64, template: &Template) -> Result<SsdCopy, BenchError> {
        let Template { part, info } = template;
        let generation = Generation { incarnation: LIFE, counter: u64::MAX - number };
        let info = PartInfo { generation, ..info.clone() };
        self.path.append(&name(number), &info, part).await.map_err(failed)
    }
}

/// What every record of a leg holds, under a name of its own.
#[derive(Debug)]
struct Template {
    part: DramCopy,
    info: PartInfo,
}

const CONTENT: ContentFingerprint = ContentFingerprint::from_bytes([0xbe; 32]);
const LAYOUT: LayoutFingerprint = LayoutFingerprint::from_bytes([0x1a; 32]);

fn name(number: u64) -> PartName {
    let part = PartRef { key: content::key(number), layout: LAYOUT, part: PartNumber(0) };
    PartName { tenant: TenantName::default().id(), part }
}

/// Puts these parts, one after the other. Every one is a chain of its own.
fn put_all(
    catalog: &Arc<Catalog>,
    numbers: std::ops::Range<u64>,
    len: usize,
) -> Result<(), BenchError> {
    let producer = Arc::new(Producer { name: "larder-bench".to_owned(), incarnation: LIFE });
    let mut bytes = vec![0; len];
    content::fill(0, &mut bytes);
    for number in numbers {
        content::stamp(number, &mut bytes);
        let name = name(number);
        let wish = Reserve {
            part: name.part,
            len: len as u64,
            codec: Codec::Raw,
            chunk_len: DEFAULT_CHUNK,
            content: CONTENT,
            root: name.part.key,
            parent: None,
            origin_hash: None,
        };
        match catalog.reserve(name, &wish, &producer, None, Instant::now()) {
            Admission::Granted(mut put) => {
                put.spare().copy_from_slice(&bytes);
                put.advance(len);
                put.commit(None).map_err(failed)?;
            }
            other => {
                return Err(BenchError::Answer {
                    doing: "put a part",
                    answer: format!("{other:?}"),
                });
            }
        }
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "gigabytes of one run")]
fn gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

fn no_room() -> BenchError {
    BenchError::Answer {
        doing: "take memory for a request",
        answer: "the arena is full".to_owned(),
    }
}

fn failed(error: impl std::error::Error) -> BenchError {
    BenchError::Answer { doing: "use the ssd tier", answer: error.to_string() }
}
