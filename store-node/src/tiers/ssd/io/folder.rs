//! A folder on a disk.

use super::{
    Area, File, Folder, PAGE, Pending,
    counts::CountsSoFar,
    file::DiskFile,
    is_of_the_disk,
    lock::{FolderLock, LOCK_FILE, NotLocked},
    request::{Driver, OpenFile},
    start::{self, DriverChoice, DriverInUse},
};
use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{
        AtFlags, Dir, FallocateFlags, FileType, Mode, OFlags, Stat, fallocate, fstat, fstatvfs,
        fsync, openat, statat, unlinkat,
    },
    io::{Errno, retry_on_intr},
};
use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};
use tracing::warn;

/// Zeroes are written in pieces of this length where a file system cannot set space aside.
const ZEROES: usize = 1 << 20;

/// How a folder is to be read and written.
#[derive(Debug, Clone)]
pub struct DiskOptions {
    /// By what.
    pub driver: DriverChoice,
    /// Most requests of the folder that the kernel has at a time. Default: 64. Others wait.
    pub queue_depth: usize,
    /// Memory that most requests will use. Default: none. It is locked once for all of them where that is
    /// allowed; that serves requests on one stretch of it. Measured at 1 MiB, depth 8, on a quiet machine: a
    /// quarter to half of the CPU less, and 0.98 to 1.06 of fio's GB/s instead of 0.84 to 1.03.
    pub memory: Vec<Area>,
    /// The folder must lie on another file system than `/`. Default: no.
    pub mounted: bool,
}

impl Default for DiskOptions {
    fn default() -> Self {
        Self { driver: DriverChoice::Auto, queue_depth: 64, memory: Vec::new(), mounted: false }
    }
}

/// Why a folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Two nodes in one folder would overwrite each other's files.
    #[error(
        "{} is in use by another node{}; give each node a folder of its own, or stop the other one",
        path.display(),
        holder.map(|pid| format!(" (process {pid})")).unwrap_or_default()
    )]
    InUse {
        /// Of the folder.
        path: PathBuf,
        /// The other one, as it called itself.
        holder: Option<u32>,
    },
    /// No way to read and write works here, or not the one that was asked for.
    #[error("no way to read and write files in {} works: {}", path.display(), tried.join("; "))]
    NoDriver {
        /// Of the folder.
        path: PathBuf,
        /// Each way, and what it said.
        tried: Vec<String>,
        /// Whether one of them got as far as the disk, and that has failed.
        by_disk: bool,
    },
    /// It was to lie on a disk of its own.
    #[error(
        "no disk is mounted at {}: it lies on the file system of /, and `mounted` is set for it",
        path.display()
    )]
    NotMounted {
        /// Of the folder.
        path: PathBuf,
    },
    /// Something else has its name.
    #[error("{} is no folder: it is a file, or a link that leads nowhere", path.display())]
    NoFolder {
        /// What was named.
        path: PathBuf,
    },
    /// The folder itself.
    #[error("{doing} {}", path.display())]
    Disk {
        /// What was tried.
        doing: &'static str,
        /// Of the folder.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl OpenError {
    /// Whether the disk has failed, and not whoever chose the folder.
    pub fn is_of_the_disk(&self) -> bool {
        match self {
            Self::InUse { .. } | Self::NoFolder { .. } => false,
            Self::NotMounted { .. } => true,
            Self::NoDriver { by_disk, .. } => *by_disk,
            Self::Disk { source, .. } => is_of_the_disk(source),
        }
    }
}

/// Bytes of the file system that a folder lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// What a node may still take.
    pub free_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
}

/// A folder that this node alone uses.
#[derive(Debug)]
pub struct DiskFolder {
    path: PathBuf,
    folder: OwnedFd,
    in_use: DriverInUse,
    driver: Arc<dyn Driver>,
    _lock: Arc<FolderLock>,
}

impl DiskFolder {
    /// Makes the folder if it is missing, locks it, and finds out how it can be read and written, which is
    /// said once in the log. Waits for the disk.
    ///
    /// # Errors
    /// Another node uses it, it may not be used, or nothing works.
    pub fn open(path: &Path, options: &DiskOptions) -> Result<Self, OpenError> {
        Self::open_by(path, options, &start::ways(options.driver))
    }

    /// As [`Self::open`], by the first of `ways` that works.
    pub(super) fn open_by(
        path: &Path,
        options: &DiskOptions,
        ways: &[start::Way],
    ) -> Result<Self, OpenError> {
        let disk = |doing| {
            let path = path.to_owned();
            move |source| OpenError::Disk { doing, path, source }
        };
        if options.mounted && !is_mounted(path).map_err(disk("look for the disk of"))? {
            return Err(OpenError::NotMounted { path: path.to_owned() });
        }
        fs::create_dir_all(path).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => OpenError::NoFolder { path: path.to_owned() },
            _ => disk("make the folder")(error),
        })?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|error| disk("open the folder")(error.into()))?;
        let lock = Arc::new(FolderLock::take(&folder).map_err(|why| match why {
            NotLocked::Held(holder) => OpenError::InUse { path: path.to_owned(), holder },
            NotLocked::Io(source) => disk("lock the folder")(source),
        })?);
        let (driver, in_use) = start::first_that_works(folder.as_fd(), &lock, options, ways)
            .map_err(|tried| OpenError::NoDriver {
                path: path.to_owned(),
                by_disk: tried.iter().any(|(_, error)| is_of_the_disk(error)),
                tried: tried.iter().map(start::said).collect(),
            })?;
        in_use.say(path);
        Ok(Self { path: path.to_owned(), folder, in_use, driver, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How it is read and written, and why not better.
    pub fn driver(&self) -> &DriverInUse {
        &self.in_use
    }

    /// What the driver did so far.
    pub fn counts(&self) -> CountsSoFar {
        self.driver.counts()
    }

    /// Ends when all requests have ended and the folder is free for another node, which takes that this value
    /// and all files of it are dropped first.
    pub fn ended(&self) -> Pending<()> {
        self.driver.ended()
    }

    /// Room in the file system.
    ///
    /// # Errors
    /// The file system does not say.
    pub fn space(&self) -> io::Result<Space> {
        let stat = fstatvfs(&self.folder)?;
        Ok(Space {
            free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
            total_bytes: stat.f_blocks.saturating_mul(stat.f_frsize),
        })
    }

    /// Every regular file that a node could have made, with what the file system says of it.
    fn files(&self) -> io::Result<Vec<(String, Stat)>> {
        let mut files = Vec::new();
        for entry in Dir::read_from(&self.folder)? {
            let entry = entry?;
            let Some(name) = entry.file_name().to_str().ok().filter(|name| is_plain(name)) else {
                continue;
            };
            match statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_file() => {
                    files.push((name.to_owned(), stat));
                }
                // Removed meanwhile, or a folder of somebody else (`lost+found`).
                Ok(_) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(files)
    }

    fn open_file(&self, name: &str, more: OFlags) -> io::Result<OwnedFd> {
        refuse_unless_plain(name)?;
        open_in(&self.folder, name, self.in_use.direct, more)
    }

    fn file(&self, name: &str, fd: OwnedFd, len: u64) -> Arc<dyn File> {
        let open = OpenFile::new(fd, self.in_use.direct);
        Arc::new(DiskFile::new(name, len, open, Arc::clone(&self.driver)))
    }
}

impl Folder for DiskFolder {
    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        let files = self.files()?.into_iter().filter(|(name, _)| name != LOCK_FILE);
        files.map(|(name, stat)| Ok((name, length(&stat)?))).collect()
    }

    fn create(&self, name: &str, len: u64) -> io::Result<Arc<dyn File>> {
        if len == 0 || !len.is_multiple_of(PAGE as u64) {
            let why = format!("create {name}: {len} bytes are not whole pages of {PAGE}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let fd = self.open_file(name, OFlags::CREATE | OFlags::EXCL)?;
        if let Err(error) = set_aside(&fd, len) {
            if let Err(left) = unlinkat(&self.folder, name, AtFlags::empty()) {
                warn!(path = %self.path.display(), name, %left, "unfinished file is left behind");
            }
            return Err(error);
        }
        Ok(self.file(name, fd, len))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        let fd = self.open_file(name, OFlags::empty())?;
        let len = length(&fstat(&fd)?)?;
        Ok(self.file(name, fd, len))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        refuse_unless_plain(name)?;
        Ok(unlinkat(&self.folder, name, AtFlags::empty())?)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(fsync(&self.folder)?)
    }

    fn physical_bytes(&self) -> io::Result<u64> {
        let files = self.files()?;
        let blocks = |stat: &Stat| u64::try_from(stat.st_blocks).unwrap_or(0);
        let of_files: u64 = files.iter().map(|(_, stat)| blocks(stat)).sum();
        Ok((of_files + blocks(&fstat(&self.folder)?)) * 512) // The unit of `st_blocks`, always.
    }

    fn driver_in_use(&self) -> Option<&DriverInUse> {
        Some(&self.in_use)
    }
}

/// Whether a folder, or what is there of the way to it, lies on another file system than `/`.
fn is_mounted(path: &Path) -> io::Result<bool> {
    for above in path.ancestors() {
        match fs::metadata(above) {
            Ok(there) => return Ok(there.dev() != fs::metadata("/")?.dev()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error), // Its disk may be there, and have failed.
        }
    }
    Ok(false)
}

/// Opens a file for reading and writing, past the page cache or not.
pub(super) fn open_in(
    folder: impl AsFd,
    name: &str,
    direct: bool,
    more: OFlags,
) -> io::Result<OwnedFd> {
    let direct = if direct { OFlags::DIRECT } else { OFlags::empty() };
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | direct | more;
    Ok(openat(folder, name, flags, Mode::RUSR | Mode::WUSR)?)
}

/// Takes all space of a file now, so that no write runs out of it.
fn set_aside(file: &OwnedFd, len: u64) -> io::Result<()> {
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, len)) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => write_zeroes(file, len),
        Err(error) => Err(error.into()),
    }
}

fn write_zeroes(file: &OwnedFd, len: u64) -> io::Result<()> {
    let zeroes = super::AlignedBuffer::zeroed(ZEROES);
    let mut at = 0;
    while at < len {
        let piece = usize::try_from(len - at).unwrap_or(ZEROES).min(ZEROES);
        match retry_on_intr(|| rustix::io::pwrite(file, &zeroes[..piece], at))? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => at += written as u64,
        }
    }
    Ok(())
}

fn length(stat: &Stat) -> io::Result<u64> {
    u64::try_from(stat.st_size).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Whether a name is a single plain file name: letters, digits, `.`, `-` and `_`, and not hidden.
fn is_plain(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    (1..=255).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(plain)
}

fn refuse_unless_plain(name: &str) -> io::Result<()> {
    if is_plain(name) && name != LOCK_FILE {
        return Ok(());
    }
    let why = format!("{name:?} is no name for a file of the ssd tier");
    Err(io::Error::new(io::ErrorKind::InvalidInput, why))
}
