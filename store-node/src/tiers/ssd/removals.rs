//! The removal log: copies that were taken back for good, and must not come back with a restart.
//!
//! A file of pages, each written once and synced before the removal is acknowledged, so no page that was
//! acknowledged is ever written over. When a file is full, what still matters of it goes to a new one.

use super::{
    format::{REMOVALS_PER_PAGE, Removal, Unreadable, removal_page, removals_of},
    io::{AlignedBuffer, File, Folder, PAGE, ReadBuffer},
};
use larder_proto::Generation;
use std::{collections::HashSet, io, sync::Arc};
use tokio::sync::Mutex;

/// Pages of a log that are free when it is begun.
const SPARE_PAGES: u64 = 64;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct RemovalLog(Mutex<Log>);

#[derive(Debug, Default)]
struct Log {
    number: u64,
    /// None before the first removal of this life: then the files of earlier ones are `old`.
    file: Option<Arc<dyn File>>,
    next_page: u64,
    live: Vec<Removal>,
    old: Vec<String>,
}

fn log_name(number: u64) -> String {
    format!("removals-{number:06}")
}

/// The number of a log file, if it is one.
pub(super) fn log_number(name: &str) -> Option<u64> {
    let number = name.strip_prefix("removals-")?.parse().ok()?;
    (log_name(number) == name).then_some(number)
}

/// What the logs of a path say.
#[derive(Debug, Default)]
pub(super) struct Removed {
    pub(super) log: RemovalLog,
    pub(super) generations: HashSet<Generation>,
    /// A page in the midst of a log is damaged: what it said is lost, so nothing may be adopted.
    pub(super) damaged: bool,
}

/// Reads all logs of a folder. Waits for the disk.
pub(super) fn read_all(folder: &dyn Folder, mut numbers: Vec<u64>) -> Result<Removed, ReadFailed> {
    numbers.sort_unstable();
    let (mut live, mut damaged) = (Vec::new(), false);
    for number in &numbers {
        let file = folder.open(&log_name(*number))?;
        let mut torn = false;
        for page in 0..file.len() / PAGE as u64 {
            let into: Box<dyn ReadBuffer> = Box::new(AlignedBuffer::zeroed(PAGE));
            let mut got = file.read(page * PAGE as u64, vec![into]).wait()?;
            let mut bytes = got.pop();
            let bytes = bytes.as_mut().map(|bytes| bytes.bytes_mut()).unwrap_or_default();
            match removals_of(bytes) {
                // Only the last page can be torn, and then nobody was told of it.
                Ok(removals) => {
                    damaged |= torn;
                    live.extend(removals);
                }
                Err(Unreadable::Absent(_)) if bytes.iter().all(|byte| *byte == 0) => break,
                Err(newer @ Unreadable::Newer { .. }) => return Err(ReadFailed::Format(newer)),
                Err(_) => torn = true,
            }
        }
    }
    let generations = live.iter().map(|removal| removal.generation).collect();
    let log = Log {
        number: numbers.last().copied().unwrap_or(0),
        live,
        old: numbers.into_iter().map(log_name).collect(),
        ..Log::default()
    };
    Ok(Removed { log: RemovalLog(Mutex::new(log)), generations, damaged })
}

/// Why the logs could not be read.
#[derive(Debug)]
pub(super) enum ReadFailed {
    Io(io::Error),
    Format(Unreadable),
}

impl From<io::Error> for ReadFailed {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl RemovalLog {
    /// Notes removals for good. `newest` is the newest segment there is; removals of copies that lay in
    /// segments older than `oldest` are forgotten when a new file is begun.
    pub(super) async fn append(
        &self,
        folder: &Arc<dyn Folder>,
        gone: Vec<Generation>,
        newest: u64,
        oldest: u64,
    ) -> io::Result<()> {
        let mut log = self.0.lock().await;
        let removals: Vec<Removal> =
            gone.into_iter().map(|generation| Removal { generation, sequence: newest }).collect();
        if removals.is_empty() {
            return Ok(());
        }
        log.live.extend_from_slice(&removals);
        match log.file.clone() {
            Some(file) if log.next_page + pages(&removals) <= file.len() / PAGE as u64 => {
                write_pages(&file, log.next_page, &removals).await?;
                log.next_page += pages(&removals);
                Ok(())
            }
            _ => log.begin_anew(folder, oldest).await,
        }
    }

    /// Removals that are remembered.
    #[cfg(test)]
    pub(super) async fn live(&self) -> usize {
        self.0.lock().await.live.len()
    }
}

impl Log {
    /// Writes what still matters to a new file; the old ones go only when it is safe.
    async fn begin_anew(&mut self, folder: &Arc<dyn Folder>, oldest: u64) -> io::Result<()> {
        self.live.retain(|removal| removal.sequence >= oldest);
        self.number += 1;
        let (name, at) = (log_name(self.number), Arc::clone(folder));
        let len = (pages(&self.live) + SPARE_PAGES) * PAGE as u64;
        let create = {
            let name = name.clone();
            move || at.create(&name, len)
        };
        let file = tokio::task::spawn_blocking(create).await.map_err(io::Error::other)??;
        // A file's space may hold anything: the end of the log has to be seen.
        let blank = AlignedBuffer::zeroed(usize::try_from(len).unwrap_or(usize::MAX)).freeze();
        file.write(0, vec![blank]).await?;
        write_pages(&file, 0, &self.live).await?;
        let (at, old) = (Arc::clone(folder), std::mem::take(&mut self.old));
        let tidy = move || {
            at.sync()?;
            old.iter().try_for_each(|name| at.remove(name))
        };
        tokio::task::spawn_blocking(tidy).await.map_err(io::Error::other)??;
        self.next_page = pages(&self.live);
        self.old = vec![name];
        self.file = Some(file);
        Ok(())
    }
}

fn pages(removals: &[Removal]) -> u64 {
    removals.len().div_ceil(REMOVALS_PER_PAGE) as u64
}

async fn write_pages(file: &Arc<dyn File>, at: u64, removals: &[Removal]) -> io::Result<()> {
    let pieces: Vec<_> =
        removals.chunks(REMOVALS_PER_PAGE).map(|page| removal_page(page).freeze()).collect();
    if !pieces.is_empty() {
        file.write(at * PAGE as u64, pieces).await?;
    }
    file.sync().await
}
