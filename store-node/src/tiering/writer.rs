//! Writing what the catalog offers: bounded by bytes, spread over the healthy paths by their speed.

use super::{Member, Tiering, TieringCounters};
use crate::{
    catalog::Offer,
    tiers::ssd::{SsdCopy, SsdError, SsdPath},
};
use parking_lot::Mutex;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::JoinSet,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

/// The budget counts in these, so that any queue fits the semaphore.
const UNIT: u64 = 4096;
/// Bytes a second that a path is taken to write before it was measured: it is tried first. Finite, so
/// that what is under way counts, and a burst is spread over paths that nobody has measured yet.
const UNMEASURED: f64 = 1e15;
/// What a path that was not chosen is taken to be faster the next time: one slow write is not held
/// against it for ever.
const FORGIVEN: f64 = 1.02;
/// How much slower a full path counts than an empty one: what is written to the emptier one is kept longer.
const FULL: f64 = 4.0;
/// Weight of the newest measurement.
const NEWEST: f64 = 0.1;

/// An offer that holds its share of the queue.
type Queued = (Offer, OwnedSemaphorePermit);

/// See the module.
#[derive(Debug)]
pub(super) struct Writer {
    budget: Arc<Semaphore>,
    units: usize,
    queue: mpsc::UnboundedSender<Queued>,
    inbox: Mutex<Option<mpsc::UnboundedReceiver<Queued>>>,
    loads: Box<[Load]>,
}

/// What a path has to do, and how fast it does it.
#[derive(Debug)]
struct Load {
    in_flight: AtomicU64,
    bytes_per_second: Mutex<f64>,
}

impl Writer {
    pub(super) fn new(queue_bytes: u64, paths: usize) -> Self {
        let units = usize::try_from(queue_bytes / UNIT).unwrap_or(usize::MAX);
        let units = units.min(u32::MAX as usize);
        // Bounded by the budget: every message holds its bytes' share of it.
        let (queue, inbox) = mpsc::unbounded_channel();
        let load =
            |_| Load { in_flight: AtomicU64::new(0), bytes_per_second: Mutex::new(UNMEASURED) };
        Self {
            budget: Arc::new(Semaphore::new(units)),
            units,
            queue,
            inbox: Mutex::new(Some(inbox)),
            loads: (0..paths).map(load).collect(),
        }
    }

    pub(super) fn queued_bytes(&self) -> u64 {
        (self.units - self.budget.available_permits()) as u64 * UNIT
    }

    pub(super) async fn settled(&self) {
        let all = u32::try_from(self.units).unwrap_or(u32::MAX);
        let _ = self.budget.acquire_many(all).await; // Never closed.
    }

    /// Takes an offer, or refuses it: never waits.
    pub(super) fn take(&self, offer: Offer, counters: &TieringCounters) -> bool {
        counters.offered.fetch_add(1, Ordering::Relaxed);
        let len = offer.info.len;
        let units = u32::try_from(len.div_ceil(UNIT).max(1)).unwrap_or(u32::MAX);
        let reason = match Arc::clone(&self.budget).try_acquire_many_owned(units) {
            Ok(permit) => match self.queue.send((offer, permit)) {
                Ok(()) => return true,
                Err(_) => &counters.no_path, // The tier has ended.
            },
            Err(_) if units as usize > self.units => {
                say_too_long(counters, len, "for the queue (ssd.write_queue)");
                &counters.too_long
            }
            Err(_) => &counters.queue_full,
        };
        counters.refused.fetch_add(1, Ordering::Relaxed);
        reason.fetch_add(1, Ordering::Relaxed);
        false
    }
}

/// Writes until `stop`, and ends what has begun.
pub(super) async fn run(tiering: Arc<Tiering>, stop: CancellationToken) {
    let Some(mut inbox) = tiering.writer.inbox.lock().take() else { return };
    let mut writes = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(ended) = writes.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "a write to an ssd panicked");
                }
            }
            queued = inbox.recv() => match queued {
                Some((offer, permit)) => _ = writes.spawn(write(Arc::clone(&tiering), offer, permit)),
                None => break,
            },
        }
    }
    while writes.join_next().await.is_some() {}
}

async fn write(tiering: Arc<Tiering>, offer: Offer, permit: OwnedSemaphorePermit) {
    let Offer { name, copy: dram, info } = offer;
    let generation = info.generation;
    let (mut tried, mut too_long) = (vec![false; tiering.members.len()], false);
    let written = loop {
        let Some((index, path)) = tiering.best_path(info.len, &tried) else { break None };
        tried[index] = true;
        let load = &tiering.writer.loads[index];
        load.in_flight.fetch_add(info.len, Ordering::Relaxed);
        let began = Instant::now();
        let appended = path.append(&name, &info, &dram).await;
        let before = load.in_flight.fetch_sub(info.len, Ordering::Relaxed);
        match appended {
            Ok(copy) => {
                load.measured(before, began.elapsed().as_secs_f64());
                break Some((path, copy));
            }
            Err(SsdError::TooLong) => {
                too_long = true;
            }
            Err(SsdError::Busy | SsdError::Fenced(_)) => {}
            Err(error) => tracing::debug!(%error, part = %name, "write to an ssd"),
        }
    };
    drop(dram); // Evictable from here on.
    let counters = &tiering.counters;
    match written {
        Some((path, copy)) => tiering.attach(&name, &path, &copy),
        None => {
            counters.refused.fetch_add(1, Ordering::Relaxed);
            if too_long {
                say_too_long(counters, info.len, "for a segment (ssd.segment)");
            }
            let reason = if too_long { &counters.too_long } else { &counters.no_path };
            reason.fetch_add(1, Ordering::Relaxed);
            tiering.catalog.written_to_ssd(&name, generation, None);
        }
    }
    drop(permit);
}

impl Load {
    /// `bytes` that were under way together took this long.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    fn measured(&self, bytes: u64, seconds: f64) {
        if seconds > 0.0 {
            let (mut speed, now) = (self.bytes_per_second.lock(), bytes as f64 / seconds);
            *speed = if *speed < UNMEASURED { *speed + NEWEST * (now - *speed) } else { now };
        }
    }

    /// When a part that is given to it now would be written.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    fn seconds_for(&self, bytes: u64) -> f64 {
        (self.in_flight.load(Ordering::Relaxed) + bytes) as f64
            / self.bytes_per_second.lock().max(1.0)
    }
}

impl Tiering {
    /// The healthy path, not tried yet, that would have it soonest.
    fn best_path(&self, len: u64, tried: &[bool]) -> Option<(usize, Arc<SsdPath>)> {
        let paths = self.members.iter().enumerate().filter(|(index, _)| !tried[*index]);
        let paths = paths.filter_map(|(index, member)| Some((index, member.path()?)));
        let healthy: Vec<_> = paths.filter(|(_, path)| path.is_healthy()).collect();
        let cost = |(index, path): &(usize, Arc<SsdPath>)| {
            let full = share(path.used_bytes(), path.settings().capacity);
            self.writer.loads[*index].seconds_for(len) * (1.0 + (FULL - 1.0) * full)
        };
        let best = healthy.iter().min_by(|a, b| cost(a).total_cmp(&cost(b)))?.clone();
        for (index, _) in healthy.iter().filter(|(index, _)| *index != best.0) {
            let mut speed = self.writer.loads[*index].bytes_per_second.lock();
            *speed = (*speed * FORGIVEN).min(UNMEASURED);
        }
        Some(best)
    }

    /// A path is taken in again: what its disk did before says nothing of it now.
    pub(super) fn measure_anew(&self, member: &Member) {
        let of = |other: &Arc<Member>| std::ptr::eq(&raw const **other, member);
        if let Some(index) = self.members.iter().position(of) {
            *self.writer.loads[index].bytes_per_second.lock() = UNMEASURED;
        }
    }

    /// Makes a written copy part of the catalog.
    fn attach(&self, name: &larder_proto::PartName, path: &Arc<SsdPath>, copy: &SsdCopy) {
        let generation = copy.generation();
        if !self.catalog.written_to_ssd(name, generation, Some(copy.clone())) {
            // Gone meanwhile. If it was removed by command, that was noted already.
            return;
        }
        self.counters.committed.fetch_add(1, Ordering::Relaxed);
        if !path.is_healthy() {
            self.catalog.evict_from_ssd(name, copy);
        }
    }
}

/// A part is too long for what it has to go through: said once, and about to be counted.
fn say_too_long(counters: &TieringCounters, len: u64, what: &str) {
    if counters.too_long.load(Ordering::Relaxed) == 0 {
        tracing::warn!(len, "a part is too long {what}: such parts stay off ssds");
    }
}

#[expect(clippy::cast_precision_loss, reason = "an estimate")]
fn share(of: u64, all: u64) -> f64 {
    of as f64 / (all as f64).max(1.0)
}
