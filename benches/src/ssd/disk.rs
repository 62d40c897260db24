//! Our side: the driver of the ssd tier on a file of its own.

use super::plan::{Cell, Op, Plan};
use crate::{child::own_cpu_seconds, content::WrongBytes, error::BenchError, figures::Leg};
use bytes::Bytes;
use futures_util::{StreamExt, stream::FuturesUnordered};
use larder_store_node::tiers::{
    dram::{Arena, DramCopy},
    ssd::io::{
        AlignedBuffer, Area, DiskFolder, DiskOptions, DriverChoice, File, Folder, PAGE, ReadBuffer,
    },
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tempfile::TempDir;
use tokio::{task::spawn_blocking, time::Instant};

/// The file that both sides read and write.
const FILE: &str = "segment";
/// The file is filled and compared in pieces of this length.
const PIECE: usize = 4 << 20;
/// One page in so many that a measured read looks at.
const LOOK_EVERY: usize = 64;

/// See the module. Its folder is removed when this is dropped.
#[derive(Debug)]
pub(super) struct Disk {
    /// There but for a moment in `reopen`.
    open: Option<Opened>,
    file_len: u64,
    options: DiskOptions,
    arena: Arc<Arena>,
    dir: TempDir,
}

#[derive(Debug)]
struct Opened {
    file: Arc<dyn File>,
    folder: DiskFolder,
}

impl Disk {
    /// Makes the file and writes it once over.
    pub(super) async fn start(
        dir: &Path,
        driver: DriverChoice,
        register: bool,
        plan: &Plan,
    ) -> Result<Self, BenchError> {
        let doing = || format!("make a folder in {}", dir.display());
        let dir = tempfile::Builder::new().prefix("larder-bench-ssd-").tempdir_in(dir);
        let dir = dir.map_err(BenchError::io(doing()))?;
        let arena = Arena::new(plan.memory(), |_| Ok(())).map_err(BenchError::io("take memory"))?;
        let memory = if register { vec![Area::of(&arena)] } else { Vec::new() };
        let options = DiskOptions { driver, memory, ..DiskOptions::default() };
        let mut this = Self { open: None, file_len: plan.file_len, options, arena, dir };
        this.open(|folder, len| folder.create(FILE, len)).await?;
        this.fill().await?;
        Ok(this)
    }

    /// Opens the same file by a driver that gives the kernel so many requests at a time.
    pub(super) async fn reopen(&mut self, depth: usize) -> Result<(), BenchError> {
        self.close().await?;
        self.options.queue_depth = depth;
        self.open(|folder, _| folder.open(FILE)).await
    }

    async fn open(
        &mut self,
        file: impl FnOnce(&DiskFolder, u64) -> io::Result<Arc<dyn File>> + Send + 'static,
    ) -> Result<(), BenchError> {
        let (path, options, len) =
            (self.dir.path().to_owned(), self.options.clone(), self.file_len);
        let opened = spawn_blocking(move || {
            let folder = DiskFolder::open(&path, &options).map_err(io::Error::other)?;
            io::Result::Ok(Opened { file: file(&folder, len)?, folder })
        });
        self.open = Some(opened.await?.map_err(BenchError::io("open the file"))?);
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BenchError> {
        let Some(Opened { file, folder }) = self.open.take() else { return Ok(()) };
        let ended = folder.ended();
        drop((file, folder));
        ended.await.map_err(BenchError::io("end the driver"))
    }

    #[expect(clippy::expect_used, reason = "only `reopen` closes it, and opens it again or fails")]
    fn opened(&self) -> &Opened {
        self.open.as_ref().expect("an open file")
    }

    fn file(&self) -> &dyn File {
        &*self.opened().file
    }

    /// Of the file.
    pub(super) fn path(&self) -> PathBuf {
        self.dir.path().join(FILE)
    }

    /// How it is read and written, for people.
    pub(super) fn driver(&self) -> String {
        let in_use = self.opened().folder.driver();
        let direct = if in_use.direct { "direct I/O" } else { "no direct I/O" };
        let why = in_use.refused.iter().chain(&in_use.not_locked).map(|why| format!("; {why}"));
        format!("{}, {direct}{}", in_use.kind, why.collect::<String>())
    }

    /// Writes every page with the stamp of its place, and compares them all.
    pub(super) async fn fill(&self) -> Result<(), BenchError> {
        let mut buffer = AlignedBuffer::zeroed(PIECE);
        for offset in (0..self.file().len()).step_by(PIECE) {
            for (page, bytes) in pages(offset, &mut buffer) {
                crate::content::fill(page, bytes);
            }
            // A copy, because the driver owns what it writes until it has.
            let piece = AlignedBuffer::copy_of(&buffer).freeze();
            let write = self.file().write(offset, vec![piece.slice(..self.until_end(offset))]);
            write.await.map_err(BenchError::io("write the file"))?;
        }
        self.file().sync().await.map_err(BenchError::io("write the file"))?;
        for offset in (0..self.file().len()).step_by(PIECE) {
            let into: Box<dyn ReadBuffer> = Box::new(AlignedBuffer::zeroed(self.until_end(offset)));
            let read = self.file().read(offset, vec![into]).await;
            let mut read = read.map_err(BenchError::io("read the file"))?;
            for (page, bytes) in pages(offset, read[0].bytes_mut()) {
                crate::content::check(page, bytes)?;
            }
        }
        Ok(())
    }

    fn until_end(&self, offset: u64) -> usize {
        usize::try_from(self.file().len() - offset).unwrap_or(PIECE).min(PIECE)
    }

    /// Requests one behind the other, from the begin of the file and round again, until `length` is over.
    pub(super) async fn leg(&self, cell: Cell, length: Duration) -> Result<Leg, BenchError> {
        match cell.op {
            Op::Write => {
                let mut memory = Vec::new();
                for _ in 0..cell.depth {
                    memory.push(self.block_to_write(cell.len)?);
                }
                let write = async |offset, block: Bytes| {
                    self.file().write(offset, vec![block.clone()]).await?;
                    Ok(block)
                };
                self.run(cell, length, memory, write).await
            }
            Op::Read => {
                let mut memory: Vec<Vec<Box<dyn ReadBuffer>>> = Vec::new();
                for _ in 0..cell.depth {
                    let extent = self.arena.allocate(cell.len).ok_or_else(no_room)?;
                    memory.push(vec![Box::new(extent)]);
                }
                let read = async |offset, block| {
                    let mut block = self.file().read(offset, block).await?;
                    look(offset, block[0].bytes_mut()).map_err(io::Error::other)?;
                    Ok(block)
                };
                self.run(cell, length, memory, read).await
            }
        }
    }

    fn block_to_write(&self, len: usize) -> Result<Bytes, BenchError> {
        let mut extent = self.arena.allocate(len).ok_or_else(no_room)?;
        crate::content::fill(0, extent.bytes_mut());
        Ok(Bytes::from_owner(Pages(extent.freeze())))
    }

    /// Keeps as many requests in flight as there are pieces of memory.
    async fn run<M>(
        &self,
        cell: Cell,
        length: Duration,
        memory: Vec<M>,
        request: impl AsyncFn(u64, M) -> io::Result<M>,
    ) -> Result<Leg, BenchError> {
        let (len, mut next) = (cell.len as u64, 0);
        let mut place = || {
            let offset = if next + len > self.file().len() { 0 } else { next };
            next = offset + len;
            offset
        };
        let (begin, cpu) = (Instant::now(), own_cpu_seconds());
        let mut bytes = 0;
        let mut in_flight = FuturesUnordered::new();
        in_flight.extend(memory.into_iter().map(|memory| request(place(), memory)));
        while let Some(done) = in_flight.next().await {
            let memory = done.map_err(BenchError::io(cell.to_string()))?;
            bytes += len;
            if begin.elapsed() < length {
                in_flight.push(request(place(), memory));
            }
        }
        let (wall, cpu_seconds) = (begin.elapsed(), own_cpu_seconds() - cpu);
        Ok(Leg { bytes, wall, cpu_seconds, latencies: Vec::new() })
    }

    /// Removes the folder, once the driver has let go of it.
    pub(super) async fn remove(mut self) -> Result<(), BenchError> {
        self.close().await?;
        self.dir.close().map_err(BenchError::io("remove the folder of the bench"))
    }
}

/// Whole pages of a part in the arena, as the tier writes them.
struct Pages(DramCopy);

impl AsRef<[u8]> for Pages {
    fn as_ref(&self) -> &[u8] {
        self.0.pages()
    }
}

fn no_room() -> BenchError {
    BenchError::Answer {
        doing: "take memory for a request",
        answer: "the arena is full".to_owned(),
    }
}

/// Pages of the file from `offset` on, by number.
fn pages(offset: u64, bytes: &mut [u8]) -> impl Iterator<Item = (u64, &mut [u8])> {
    (offset / PAGE as u64..).zip(bytes.chunks_mut(PAGE))
}

fn look(offset: u64, bytes: &[u8]) -> Result<(), WrongBytes> {
    let first = offset / PAGE as u64;
    let mut some = (first..).zip(bytes.chunks(PAGE)).step_by(LOOK_EVERY);
    some.try_for_each(|(page, bytes)| crate::content::look(page, bytes))
}
