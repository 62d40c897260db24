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

use super::Process;
use crate::{catalog::PartRead, sync::Mutex};
use larder_proto::PartName;
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::time::Instant;

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

    /// Ends leases of a reader, those of its process's earlier connections included: a reader that lost
    /// its socket may connect again and release. Ids that are not its process's do nothing.
    pub fn release(&self, reader: &Reader, leases: &[u64]) {
        let mut table = self.held.lock();
        let mut ended = Vec::new();
        let mut left = leases.to_vec();
        let mut take_from = |held: &mut Held| {
            left.retain(|id| match held.leases.remove(id) {
                Some(lease) => {
                    ended.push(lease);
                    false
                }
                None => true,
            });
            held.leases.is_empty()
        };
        if table.get_mut(&reader.connection).is_some_and(&mut take_from) {
            table.remove(&reader.connection);
        }
        // A number is used again only when its process is gone, and its leases with it.
        table.retain(|_, held| {
            !(held.quarantined && held.reader.pid == reader.pid && take_from(held))
        });
        drop(table);
        drop(ended); // Gives space back, without the table's lock.
    }

    /// The socket of a connection closed. Its leases are kept until its process is gone; the future ends
    /// then. Without leases it ends at once.
    pub async fn closed(self: Arc<Self>, connection: u64, process: Process) {
        {
            let mut table = self.held.lock();
            let Some(held) = table.get_mut(&connection) else { return };
            held.quarantined = true;
        }
        process.gone().await;
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
