//! Leases: rights of local processes to read parts in place.
//!
//! ```text
//!          lease                 release, or the process ends
//! (none) --------> Held --------------------------------------> (none): the bytes may go
//!                   | socket closes, process lives                 ^
//!                   +-----------> Quarantined ---------------------+
//! ```
//!
//! A lease holds a [`PartRead`], so the bytes stay where they are. No clock ends one: a reader that lost
//! its socket may still read, so its space is kept until its process is gone (pidfd) (P7). The table *is*
//! the leases; there is no second list that must agree.

use crate::catalog::PartRead;
use larder_proto::PartName;
use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::{
    collections::HashMap,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::{io::Interest, io::unix::AsyncFd, time::Instant};

/// A process that reads in place, through one connection.
#[derive(Debug, Clone)]
pub struct Reader {
    /// Names the connection.
    pub connection: u64,
    /// Its process.
    pub pid: i32,
    /// Who it says it is, for people.
    pub name: Arc<str>,
}

/// One lease.
#[derive(Debug)]
struct Lease {
    part: PartName,
    read: PartRead,
    since: Instant,
}

/// A connection's leases.
#[derive(Debug)]
struct Held {
    reader: Reader,
    quarantined: bool,
    leases: HashMap<u64, Lease>,
}

/// A lease, for people.
#[derive(Debug, Clone)]
pub struct LeaseInfo {
    /// The part.
    pub part: PartName,
    /// Who reads it.
    pub reader: Reader,
    /// Bytes that it keeps in place.
    pub bytes: u64,
    /// For how long.
    pub age: std::time::Duration,
    /// Whether its socket is closed while its process lives.
    pub quarantined: bool,
}

/// All leases of a node.
#[derive(Debug, Default)]
pub struct Leases {
    held: Mutex<HashMap<u64, Held>>,
    next: AtomicU64,
}

impl Leases {
    /// The most leases of one connection: enough for the longest prompt, too few to fill memory.
    pub const PER_CONNECTION: usize = 65_536;

    /// Leases a part to a reader; `None` when the reader has as many as it may.
    pub fn lease(&self, reader: &Reader, part: PartName, read: PartRead) -> Option<u64> {
        let mut held = self.held.lock();
        let held = held.entry(reader.connection).or_insert_with(|| Held {
            reader: reader.clone(),
            quarantined: false,
            leases: HashMap::new(),
        });
        if held.leases.len() >= Self::PER_CONNECTION {
            return None;
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        held.leases.insert(id, Lease { part, read, since: Instant::now() });
        Some(id)
    }

    /// Ends leases of a connection; ids that are not its own do nothing.
    pub fn release(&self, connection: u64, leases: &[u64]) {
        let mut table = self.held.lock();
        let Some(held) = table.get_mut(&connection) else { return };
        let ended: Vec<_> = leases.iter().filter_map(|id| held.leases.remove(id)).collect();
        if held.leases.is_empty() {
            table.remove(&connection);
        }
        drop(table);
        drop(ended); // Gives space back, without the table's lock.
    }

    /// The socket of a connection closed. Its leases are kept until its process is gone; the future ends
    /// then. Without leases it ends at once.
    pub async fn closed(self: Arc<Self>, connection: u64, process: Option<Process>) {
        {
            let mut table = self.held.lock();
            let Some(held) = table.get_mut(&connection) else { return };
            held.quarantined = true;
        }
        if let Some(process) = process {
            process.gone().await;
        }
        let ended = self.held.lock().remove(&connection);
        drop(ended);
    }

    /// Leases that are not ended.
    pub fn count(&self) -> u64 {
        self.held.lock().values().map(|held| held.leases.len() as u64).sum()
    }

    /// Bytes of parts that only readers without a socket keep in place.
    pub fn quarantined_bytes(&self) -> u64 {
        let table = self.held.lock();
        let quarantined = table.values().filter(|held| held.quarantined);
        quarantined.flat_map(|held| held.leases.values()).map(|lease| lease.read.info().len).sum()
    }

    /// All leases, for people.
    pub fn list(&self) -> Vec<LeaseInfo> {
        let now = Instant::now();
        let table = self.held.lock();
        let of_reader = |held: &Held| {
            let Held { reader, quarantined, leases } = held;
            let info = |lease: &Lease| LeaseInfo {
                part: lease.part,
                reader: reader.clone(),
                bytes: lease.read.info().len,
                age: now.saturating_duration_since(lease.since),
                quarantined: *quarantined,
            };
            leases.values().map(info).collect::<Vec<_>>()
        };
        table.values().flat_map(of_reader).collect()
    }
}

/// A process whose end can be awaited.
#[derive(Debug)]
pub struct Process(AsyncFd<OwnedFd>);

impl Process {
    /// The process with this id. A reader that is gone already is no error: `None`.
    pub fn open(pid: i32) -> io::Result<Option<Self>> {
        let Some(pid) = Pid::from_raw(pid) else { return Ok(None) };
        match pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Ok(fd) => {
                // SAFETY: an `OwnedFd` keeps its descriptor open and the same for its whole life, which
                // ends after the registration's: `AsyncFd` owns both.
                #[expect(unsafe_code, reason = "registers a descriptor that this value owns")]
                let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
                Ok(Some(Self(registered.map_err(io::Error::from)?)))
            }
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until the process is gone. A pidfd becomes readable then.
    async fn gone(&self) {
        // The descriptor is registered for as long as `self` lives, so waiting cannot fail but at the
        // shutdown of the runtime, when nothing is left to protect.
        let _ = self.0.readable().await;
    }
}
