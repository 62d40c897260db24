//! The removal log: copies that were taken back for good, and must not come back with a restart.
//!
//! Two files with the same pages, each page written once and synced in both before the removal is acknowledged,
//! so no page that was acknowledged is ever written over. A page that is bad in one file is read from the other:
//! damage of either brings nothing back. Removals that need several pages are written from the second page on,
//! synced, and then the first: a batch without its first page was never acknowledged, however much of it is
//! there. When a log is full, what still matters of it goes to a new one, and so it does when a write was not seen
//! to its end. A log is made with the path, so that a removal finds its place on a disk that has become full.
//!
//! The last page of a log closes it: it says which life of the node has made it, for which use of the path, and that
//! nobody has cut the file. Each life makes one, so a path also tells in which life it took part last, and whether it is
//! the one of a use that has failed, wherever it lies by then.

use super::{
    format::{REMOVALS_PER_PAGE, Removal, Unreadable, removal_page, removals_of},
    io::{AlignedBuffer, File, Folder, PAGE, ReadBuffer},
    records::taken,
};
use larder_proto::{Generation, ids::Incarnation};
use std::{collections::HashSet, io, sync::Arc};
use tokio::{sync::Mutex, try_join};

/// Pages of a log that are free when it is begun: so many removals, at least, until another one is made.
const SPARE_PAGES: u64 = 128;

/// See the module.
#[derive(Debug)]
pub(super) struct RemovalLog {
    log: Mutex<Log>,
    /// This use of the path, and those whose logs were found.
    uses: Vec<UseId>,
}

/// Names one use of a path, from its opening on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UseId(pub u64);

impl UseId {
    fn draw() -> Self {
        let mut id = [0; 8];
        let drawn = rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty());
        assert_eq!(drawn, Ok(id.len()), "the kernel gives up to 256 random bytes at once");
        Self(u64::from_le_bytes(id))
    }
}

#[derive(Debug)]
struct Log {
    /// Of the node.
    life: Incarnation,
    /// Of the path.
    of: UseId,
    number: u64,
    /// None until a log of this life is begun, and while it is not known whether a write has ended: whoever comes
    /// next begins another one then.
    files: Option<[Arc<dyn File>; 2]>,
    next_page: u64,
    live: Vec<Removal>,
    /// Files to remove when the next log is there.
    old: Vec<String>,
    /// Whether a restart would find a whole one.
    is_there: bool,
}

/// Nobody comes to this number by making one after the other.
const MOST_LOGS: u64 = 1 << 48;
/// Names in a row that somebody else may have taken.
const TAKEN: u64 = 64;

/// The two files of a log.
fn log_names(number: u64) -> [String; 2] {
    [format!("removals-{number:06}"), format!("removals-{number:06}-twin")]
}

/// The number of the log that a file belongs to, if it does.
pub(super) fn log_number(name: &str) -> Option<u64> {
    let number = name.strip_prefix("removals-")?;
    let number = number.strip_suffix("-twin").unwrap_or(number).parse().ok()?;
    let is_ours = number < MOST_LOGS && log_names(number).iter().any(|one| one == name);
    is_ours.then_some(number)
}

/// What the logs of a path say.
#[derive(Debug)]
pub(super) struct Removed {
    pub(super) log: RemovalLog,
    pub(super) generations: HashSet<Generation>,
    /// A page in the midst of a log is damaged: what it said is lost, so nothing may be adopted.
    pub(super) damaged: bool,
    /// The last life that has made a log; none if no log is whole.
    pub(super) made_in: Option<Incarnation>,
    /// The uses that have made the logs that are whole.
    pub(super) uses: Vec<UseId>,
}

/// Reads all logs of a folder; `life` goes on with them. Waits for the disk.
pub(super) fn read_all(
    folder: &dyn Folder,
    mut numbers: Vec<u64>,
    life: Incarnation,
) -> Result<Removed, ReadFailed> {
    numbers.sort_unstable();
    numbers.dedup();
    let (mut live, mut old, mut damaged) = (Vec::new(), Vec::new(), false);
    let (mut made_in, mut uses) = (None, Vec::new());
    for number in &numbers {
        let mut files = Vec::new();
        for name in log_names(*number) {
            match read_file(folder, &name) {
                Ok(bytes) => {
                    files.push(bytes);
                    old.push(name);
                }
                // One that was written before there were twins, or whose twin is lost.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        let pages = files.iter().map(|file| file.len() / PAGE).max().unwrap_or(0);
        let (mut there, mut repaired) = (Vec::with_capacity(pages), 0);
        for at in 0..pages {
            let said: Result<Vec<_>, _> = files.iter().map(|file| said(file, at)).collect();
            let said: Vec<_> = said.map_err(ReadFailed::Format)?.into_iter().flatten().collect();
            repaired += u64::from(!said.is_empty() && said.len() < files.len());
            there.push(!said.is_empty());
            for page in said {
                if let Some((life, of)) = closed_by(&page) {
                    made_in = made_in.max(Some(life));
                    uses.push(of);
                    continue;
                }
                let first = at.saturating_sub(place_in_batch(&page));
                match there[first] {
                    // Whatever lies before an acknowledged page was acknowledged, too.
                    true => damaged |= !there[..first].iter().all(|there| *there),
                    false => continue, // Nobody was told of this batch.
                }
                damaged |= !there[first..at].iter().all(|there| *there);
                live.extend(page.into_iter().filter(|removal| !is_mark(removal)));
            }
        }
        if repaired > 0 {
            tracing::warn!(
                number,
                repaired,
                "pages of a removal log are damaged: read from its twin"
            );
        }
    }
    let generations = live.iter().map(|removal| removal.generation).collect();
    // Of two notes of one copy the one that is remembered longer.
    live.sort_by_key(|removal| std::cmp::Reverse(removal.sequence));
    let mut once = HashSet::new();
    live.retain(|removal| once.insert(removal.generation));
    let number = numbers.last().copied().unwrap_or(0);
    let (of, is_there) = (UseId::draw(), made_in.is_some());
    let log = Log { life, of, number, files: None, next_page: 0, live, old, is_there };
    let log = RemovalLog { log: Mutex::new(log), uses: [&uses[..], &[of]].concat() };
    Ok(Removed { log, generations, damaged, made_in, uses })
}

fn read_file(folder: &dyn Folder, name: &str) -> io::Result<AlignedBuffer> {
    let file = folder.open(name)?;
    let len = usize::try_from(file.len()).map_err(io::Error::other)? / PAGE * PAGE;
    if len == 0 {
        return Ok(AlignedBuffer::zeroed(0));
    }
    let into: Box<dyn ReadBuffer> = Box::new(AlignedBuffer::zeroed(len));
    Ok(taken(file.read(0, vec![into]).wait()?.pop()))
}

/// Stands in each page of a batch but the first: no copy has this generation.
fn mark(place: usize) -> Removal {
    let generation = Generation { incarnation: Incarnation(0), counter: place as u64 };
    Removal { generation, sequence: 0 }
}

/// All that the last page of a log says.
fn closing(life: Incarnation, of: UseId) -> [Removal; 2] {
    let generation = Generation { incarnation: Incarnation(0), counter: u64::MAX };
    [life.0, of.0].map(|sequence| Removal { generation, sequence })
}

/// Which life and which use have made the log, if this is its last page.
fn closed_by(page: &[Removal]) -> Option<(Incarnation, UseId)> {
    let [life, of] = page else { return None };
    let (life, of) = (Incarnation(life.sequence), UseId(of.sequence));
    (page == closing(life, of)).then_some((life, of))
}

fn is_mark(removal: &Removal) -> bool {
    removal.generation.incarnation == Incarnation(0)
}

/// How many pages of its batch lie before a page.
fn place_in_batch(page: &[Removal]) -> usize {
    let mark = page.iter().find(|removal| is_mark(removal));
    mark.map_or(0, |mark| usize::try_from(mark.generation.counter).unwrap_or(0))
}

/// What a page of a file says; nothing if it is blank, damaged or not there. Of a newer format: nobody may go on.
fn said(file: &[u8], at: usize) -> Result<Option<Vec<Removal>>, Unreadable> {
    let Some(bytes) = file.get(at * PAGE..(at + 1) * PAGE) else { return Ok(None) };
    match removals_of(bytes) {
        Ok(removals) => Ok(Some(removals)),
        Err(newer @ Unreadable::Newer { .. }) => Err(newer),
        Err(_) => Ok(None),
    }
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
    /// Notes removals for good. `newest` is the newest segment that the copies may lie in; removals of copies
    /// that lay in segments older than `oldest` are forgotten when a new log is begun.
    pub(super) async fn append(
        &self,
        folder: &Arc<dyn Folder>,
        gone: Vec<Generation>,
        newest: u64,
        oldest: u64,
    ) -> io::Result<()> {
        let mut log = self.log.lock().await;
        let removals: Vec<Removal> =
            gone.into_iter().map(|generation| Removal { generation, sequence: newest }).collect();
        if removals.is_empty() {
            return Ok(());
        }
        log.live.extend_from_slice(&removals);
        let room = |[file, twin]: &[Arc<dyn File>; 2]| file.len().min(twin.len()) / PAGE as u64 - 1;
        // Gone until the write has ended: one that is not waited for may reach its page at any time.
        match log.files.take() {
            Some(files) if !files.iter().all(|file| file.is_whole()) => {
                tracing::warn!("somebody has removed or cut a removal log: another one is written");
                log.begin_anew(folder, oldest).await
            }
            Some(files) if log.next_page + pages(&removals) <= room(&files) => {
                write_both(&files, log.next_page, &removals).await?;
                log.next_page += pages(&removals);
                log.files = Some(files);
                Ok(())
            }
            _ => log.begin_anew(folder, oldest).await,
        }
    }

    /// This use of the path, and those that may still be read from its folder.
    pub(super) fn uses(&self) -> &[UseId] {
        &self.uses
    }

    /// Whether a restart would find a log.
    pub(super) async fn is_there(&self) -> bool {
        self.log.lock().await.is_there
    }

    /// Makes the log of this life, if there is none yet. Arguments as of [`Self::append`].
    pub(super) async fn begin(&self, folder: &Arc<dyn Folder>, oldest: u64) -> io::Result<()> {
        let mut log = self.log.lock().await;
        match log.files {
            Some(_) => Ok(()),
            None => log.begin_anew(folder, oldest).await,
        }
    }

    /// Removals that are remembered.
    #[cfg(test)]
    pub(super) async fn live(&self) -> usize {
        self.log.lock().await.live.len()
    }
}

impl Log {
    /// Writes what still matters to a new file; the old ones go only when it is safe.
    async fn begin_anew(&mut self, folder: &Arc<dyn Folder>, oldest: u64) -> io::Result<()> {
        self.live.retain(|removal| removal.sequence >= oldest);
        let old = self.old.clone();
        let len = (pages(&self.live) + SPARE_PAGES + 1) * PAGE as u64;
        let last = self.number + TAKEN;
        let (new, files) = loop {
            // Counted and to be removed before it is made: one that was cut off half made stands in nobody's way.
            self.number += 1;
            let new = log_names(self.number);
            self.old.extend(new.clone());
            match create(folder, &new, len).await {
                // Somebody else's, which stays where it is.
                Err(error)
                    if error.kind() == io::ErrorKind::AlreadyExists && self.number < last =>
                {
                    self.old.retain(|name| !new.contains(name));
                }
                created => break (new, created?),
            }
        };
        // A file's space may hold anything: the end of the log has to be seen.
        let blank = usize::try_from(len).unwrap_or(usize::MAX) - PAGE;
        let blank = AlignedBuffer::zeroed(blank).freeze();
        let [file, twin] = &files;
        try_join!(file.write(0, vec![blank.clone()]), twin.write(0, vec![blank]))?;
        write_both(&files, 0, &self.live).await?;
        // Last: a log that is closed says all that was said before it.
        write_both(&files, len / PAGE as u64 - 1, &closing(self.life, self.of)).await?;
        let at = Arc::clone(folder);
        let tidy = move || {
            at.sync()?;
            old.iter().try_for_each(|name| match at.remove(name) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            })
        };
        tokio::task::spawn_blocking(tidy).await.map_err(io::Error::other)??;
        self.next_page = pages(&self.live);
        self.old = new.to_vec();
        (self.files, self.is_there) = (Some(files), true);
        Ok(())
    }
}

/// The files of a log, both or none.
async fn create(
    folder: &Arc<dyn Folder>,
    names: &[String; 2],
    len: u64,
) -> io::Result<[Arc<dyn File>; 2]> {
    let (at, [file, twin]) = (Arc::clone(folder), names.clone());
    let create = move || {
        let made = at.create(&file, len)?;
        match at.create(&twin, len) {
            Ok(twin) => Ok([made, twin]),
            Err(error) => {
                let _ = at.remove(&file); // A full disk: it is tried again.
                Err(error)
            }
        }
    };
    tokio::task::spawn_blocking(create).await.map_err(io::Error::other)?
}

/// Removals of each page of a batch; beside them there is room for the mark.
const PER_PAGE: usize = REMOVALS_PER_PAGE - 1;

fn pages(removals: &[Removal]) -> u64 {
    removals.len().div_ceil(PER_PAGE) as u64
}

/// In both files, or the removal is not acknowledged.
async fn write_both(files: &[Arc<dyn File>; 2], at: u64, removals: &[Removal]) -> io::Result<()> {
    let [file, twin] = files;
    try_join!(write_batch(file, at, removals), write_batch(twin, at, removals))?;
    Ok(())
}

async fn write_batch(file: &Arc<dyn File>, at: u64, removals: &[Removal]) -> io::Result<()> {
    let mut pages = removals.chunks(PER_PAGE);
    let first = pages.next().map(|page| removal_page(page).freeze());
    let rest: Vec<_> = (1..)
        .zip(pages)
        .map(|(place, page)| removal_page(&[page, &[mark(place)]].concat()).freeze())
        .collect();
    if !rest.is_empty() {
        file.write((at + 1) * PAGE as u64, rest).await?;
        file.sync().await?;
    }
    if let Some(first) = first {
        file.write(at * PAGE as u64, vec![first]).await?;
    }
    file.sync().await
}
