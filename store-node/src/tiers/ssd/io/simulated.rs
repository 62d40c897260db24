//! A disk in memory that crashes, tears, flips, fills up and stalls, by a seed.

use super::{
    AlignedBuffer, Completion, DriverInUse, File, Folder, PAGE, Pending, ReadBuffer, ReadInto,
};
use bytes::Bytes;
use parking_lot::Mutex;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Weak},
};

/// What a crash does to what was written and not synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Crash {
    /// The process ends: the device keeps everything that it has taken.
    Process,
    /// The power goes: of each page that was not synced either the old or the new bytes are kept.
    Power,
}

/// A simulated device; clones are the same one.
#[derive(Debug, Clone)]
pub(crate) struct Simulated(Arc<Mutex<Device>>);

#[derive(Debug)]
struct Device {
    files: BTreeMap<String, Content>,
    rng: ChaCha8Rng,
    capacity: u64,
    /// Requests that still succeed; then one is torn, and all later ones fail.
    left: Option<u64>,
    dead: bool,
    failing: bool,
    stalling: bool,
    /// Requests that do not end before [`Simulated::recover`], with what keeps the folder locked.
    stalled: Vec<(Completion<()>, Arc<()>)>,
    /// The lock of the folder: kept by whoever uses it, by its files and their requests.
    lock: Weak<()>,
}

#[derive(Debug, Clone)]
struct Content {
    now: Vec<u8>,
    /// What a power loss would go back to, page by page; pages that were not synced.
    synced: Vec<u8>,
    dirty: BTreeSet<usize>,
}

impl Simulated {
    pub(crate) fn new(seed: u64, capacity: u64) -> Self {
        let device = Device {
            files: BTreeMap::new(),
            rng: ChaCha8Rng::seed_from_u64(seed),
            capacity,
            left: None,
            dead: false,
            failing: false,
            stalling: false,
            stalled: Vec::new(),
            lock: Weak::new(),
        };
        Self(Arc::new(Mutex::new(device)))
    }

    pub(crate) fn folder(&self) -> Arc<dyn Folder> {
        let mut device = self.0.lock();
        // Lives of a node that are dropped later than the next one begins share one lock.
        let lock = device.lock.upgrade().unwrap_or_default();
        device.lock = Arc::downgrade(&lock);
        Arc::new(SimulatedFolder { device: self.clone(), lock })
    }

    /// Opens the folder as a disk does: not before its last use has ended.
    pub(crate) fn open_alone(&self) -> io::Result<Arc<dyn Folder>> {
        let in_use = self.0.lock().lock.upgrade().is_some();
        match in_use {
            true => Err(io::ErrorKind::ResourceBusy.into()),
            false => Ok(self.folder()),
        }
    }

    /// The node crashes in the midst of the request after `requests` more.
    pub(crate) fn crash_after(&self, requests: u64) {
        self.0.lock().left = Some(requests);
    }

    /// Whether the crash has come.
    pub(crate) fn is_dead(&self) -> bool {
        self.0.lock().dead
    }

    /// What the next life finds.
    pub(crate) fn restart(&self, crash: Crash) {
        let mut device = self.0.lock();
        let Device { files, rng, .. } = &mut *device;
        for content in files.values_mut() {
            if crash == Crash::Power {
                for page in std::mem::take(&mut content.dirty) {
                    let range = page * PAGE..(page + 1) * PAGE;
                    if rng.random_bool(0.5) {
                        content.now[range.clone()].copy_from_slice(&content.synced[range]);
                    }
                }
            }
            content.synced = content.now.clone();
            content.dirty.clear();
        }
        (device.left, device.dead, device.failing) = (None, false, false);
    }

    /// From now on every request fails, or not.
    pub(crate) fn fail(&self, failing: bool) {
        self.0.lock().failing = failing;
    }

    /// From now on no request ends.
    pub(crate) fn stall(&self) {
        self.0.lock().stalling = true;
    }

    /// How many requests wait since [`Self::stall`].
    pub(crate) fn stalled(&self) -> usize {
        self.0.lock().stalled.len()
    }

    /// Requests end again; those that were stalled fail, late.
    pub(crate) fn recover(&self) {
        let stalled = {
            let mut device = self.0.lock();
            device.stalling = false;
            std::mem::take(&mut device.stalled)
        };
        drop(stalled);
    }

    /// Flips one bit of a file.
    pub(crate) fn flip(&self, name: &str, bit: usize) {
        let mut device = self.0.lock();
        let content = device.files.get_mut(name).unwrap();
        content.now[bit / 8] ^= 1 << (bit % 8);
        content.synced[bit / 8] ^= 1 << (bit % 8);
    }

    /// Sets bytes of a file.
    pub(crate) fn poke(&self, name: &str, at: usize, bytes: &[u8]) {
        let mut device = self.0.lock();
        let content = device.files.get_mut(name).unwrap();
        content.now[at..at + bytes.len()].copy_from_slice(bytes);
        content.synced[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Cuts a file off.
    pub(crate) fn truncate(&self, name: &str, len: usize) {
        let mut device = self.0.lock();
        let content = device.files.get_mut(name).unwrap();
        content.now.truncate(len);
        content.synced.truncate(len);
    }

    /// Takes a file away.
    pub(crate) fn lose(&self, name: &str) {
        self.0.lock().files.remove(name).unwrap();
    }

    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        self.0.lock().files[name].now.clone()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.0.lock().files.keys().cloned().collect()
    }

    /// Bytes of all files.
    pub(crate) fn used(&self) -> u64 {
        self.0.lock().files.values().map(|content| content.now.len() as u64).sum()
    }

    fn io(&self, metadata: bool) -> io::Result<()> {
        let mut device = self.0.lock();
        if device.dead || device.failing {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if metadata && let Some(left) = &mut device.left {
            if *left == 0 {
                device.dead = true;
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            *left -= 1;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct SimulatedFolder {
    device: Simulated,
    lock: Arc<()>,
}

impl Folder for SimulatedFolder {
    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        self.device.io(false)?;
        let device = self.device.0.lock();
        Ok(device.files.iter().map(|(name, c)| (name.clone(), c.now.len() as u64)).collect())
    }

    fn create(&self, name: &str, len: u64) -> io::Result<Arc<dyn File>> {
        self.device.io(true)?;
        if self.device.used() + len > self.device.0.lock().capacity {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let mut device = self.device.0.lock();
        if device.files.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        // What a file system gives may hold anything.
        let mut now = vec![0; usize::try_from(len).unwrap()];
        device.rng.fill(&mut now[..]);
        let synced = now.clone();
        device.files.insert(name.to_owned(), Content { now, synced, dirty: BTreeSet::new() });
        drop(device);
        self.open(name)
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        self.device.io(false)?;
        let device = self.device.0.lock();
        let content = device.files.get(name).ok_or(io::ErrorKind::NotFound)?;
        let len = content.now.len() as u64;
        let (device, lock) = (self.device.clone(), Arc::clone(&self.lock));
        Ok(Arc::new(SimulatedFile { device, lock, name: name.to_owned(), len }))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.device.io(true)?;
        let gone = self.device.0.lock().files.remove(name);
        gone.map(|_| ()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn sync(&self) -> io::Result<()> {
        self.device.io(true)
    }

    fn driver_in_use(&self) -> Option<&DriverInUse> {
        None
    }

    fn physical_bytes(&self) -> io::Result<u64> {
        Ok(self.device.used())
    }
}

#[derive(Debug)]
struct SimulatedFile {
    device: Simulated,
    lock: Arc<()>,
    name: String,
    len: u64,
}

impl SimulatedFile {
    /// Runs a request, or stalls it. `torn` is set for the one in whose midst the node crashes.
    fn run<T>(&self, act: impl FnOnce(&mut Device, bool) -> io::Result<T>) -> Pending<T> {
        let mut device = self.device.0.lock();
        if device.stalling {
            let (done, pending) = Pending::new();
            let (kept, _) = Pending::<()>::new();
            device.stalled.push((kept, Arc::clone(&self.lock)));
            std::mem::forget(done); // As a device that never answers.
            return pending;
        }
        if device.dead || device.failing {
            return Pending::ended(Err(io::Error::from_raw_os_error(libc::EIO)));
        }
        let torn = device.left == Some(0);
        device.left = device.left.map(|left| left.saturating_sub(1));
        let result = act(&mut device, torn);
        device.dead |= torn;
        drop(device);
        Pending::ended(result)
    }

    fn check(&self, offset: u64, len: usize) -> io::Result<usize> {
        let aligned = offset.is_multiple_of(PAGE as u64) && len.is_multiple_of(PAGE) && len > 0;
        match aligned && offset + len as u64 <= self.len {
            true => Ok(usize::try_from(offset).unwrap()),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

impl File for SimulatedFile {
    fn len(&self) -> u64 {
        self.len
    }

    fn write(&self, offset: u64, pieces: Vec<Bytes>) -> Pending<()> {
        let bytes = pieces.concat();
        let at = match self.check(offset, bytes.len()) {
            Ok(at) => at,
            Err(error) => return Pending::ended(Err(error)),
        };
        self.run(|device, torn| {
            let Device { files, rng, .. } = device;
            // A file that has no name any more takes what nobody will find.
            let Some(content) = files.get_mut(&self.name) else { return Ok(()) };
            for (page, bytes) in (at / PAGE..).zip(bytes.chunks(PAGE)) {
                if !torn || rng.random_bool(0.5) {
                    let end = content.now.len().max((page + 1) * PAGE);
                    content.now.resize(end, 0); // One that was cut grows again.
                    content.synced.resize(end, 0);
                    content.now[page * PAGE..(page + 1) * PAGE].copy_from_slice(bytes);
                    content.dirty.insert(page);
                }
            }
            if torn { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
        })
    }

    fn read(&self, offset: u64, mut into: Vec<Box<dyn ReadBuffer>>) -> Pending<ReadInto> {
        let len = into.iter_mut().map(|buffer| buffer.bytes_mut().len()).sum();
        let at = match self.check(offset, len) {
            Ok(at) => at,
            Err(error) => return Pending::ended(Err(error)),
        };
        self.run(move |device, torn| {
            let content = device.files.get(&self.name).ok_or(io::ErrorKind::NotFound)?;
            let mut at = at;
            for buffer in &mut into {
                let buffer = buffer.bytes_mut();
                let there = content.now.get(at..at + buffer.len());
                buffer.copy_from_slice(there.ok_or(io::ErrorKind::UnexpectedEof)?);
                at += buffer.len();
            }
            if torn { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(into) }
        })
    }

    fn sync(&self) -> Pending<()> {
        self.run(|device, torn| {
            if torn {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            let Some(content) = device.files.get_mut(&self.name) else { return Ok(()) };
            content.synced.clone_from(&content.now);
            content.dirty.clear();
            Ok(())
        })
    }

    fn is_whole(&self) -> bool {
        let device = self.device.0.lock();
        device.files.get(&self.name).is_some_and(|content| content.now.len() as u64 == self.len)
    }
}

#[test]
fn a_power_loss_takes_only_what_was_not_synced() {
    let device = Simulated::new(5, 1 << 20);
    let file = device.folder().create("f", 64 * PAGE as u64).unwrap();
    let page = |n: u8| AlignedBuffer::copy_of(&[n; PAGE]).freeze();
    file.write(0, vec![page(1); 64]).wait().unwrap();
    file.sync().wait().unwrap();
    file.write(32 * PAGE as u64, vec![page(2); 32]).wait().unwrap();
    device.restart(Crash::Power);
    let bytes = device.bytes("f");
    assert!(bytes[..32 * PAGE].iter().all(|byte| *byte == 1));
    let kept = bytes.chunks(PAGE).filter(|page| page[0] == 2).count();
    assert!((1..32).contains(&kept), "{kept}");
}
