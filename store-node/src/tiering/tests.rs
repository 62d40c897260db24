//! Catalog and paths together, over simulated disks.

use super::*;
use crate::{
    catalog::{Admission, Audit, BlockId, Found, Producer, Watermarks},
    eviction::Lru,
    inventory::{ChangeLog, Inventory, PartSets, command::Eviction},
    tiers::{
        dram::Arena,
        ssd::{
            Durability, Owner, PathSettings,
            io::{Folder, simulated::Simulated},
        },
    },
};
use larder_client::memory::PAGE;
use larder_proto::{
    BlockKey, ContentFingerprint, LayoutFingerprint, PartNumber, Tier, TierSet,
    event::Shard,
    frame::{Codec, Reserve},
    ids::{Incarnation, NodeId, TenantName},
    part::PartRef,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{io, ops::Range, path::Path, sync::atomic::AtomicBool, task::Poll, time::Duration};
use tokio::{task::JoinSet, time::Instant};

const PART: usize = 3 * PAGE + 17;
const SEGMENT: u64 = 64 * PAGE as u64;

/// A node's tiers in one of its lives.
struct Life {
    catalog: Arc<Catalog>,
    tiering: Arc<Tiering>,
    failures: Arc<parking_lot::Mutex<Vec<UseId>>>,
    forgetful: Arc<AtomicBool>,
    /// Numbers of parts that only take room.
    others: AtomicU64,
    _writer: JoinSet<()>,
}

/// Disks by number, and the paths of which it is remembered that they failed.
struct Host {
    disks: Vec<Simulated>,
    failures: Arc<parking_lot::Mutex<Vec<UseId>>>,
    /// Nothing more can be remembered.
    forgetful: Arc<AtomicBool>,
}

impl PathHost for Host {
    fn open(&self, dir: &Path) -> io::Result<Arc<dyn Folder>> {
        let named = |(n, _): &(usize, &Simulated)| Path::new(&format!("disk {n}")) == dir;
        self.disks.iter().enumerate().find(named).unwrap().1.open_alone()
    }

    fn note_failed(&self, uses: &[UseId]) -> io::Result<()> {
        if self.forgetful.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.failures.lock().extend(uses);
        Ok(())
    }
}

struct Options {
    life: u64,
    last_removal: Option<u64>,
    failed: Vec<UseId>,
    arena_pages: usize,
    admit: Admit,
    promote: Promote,
    queue_bytes: u64,
    /// Whether what earlier lives left is taken in before the test goes on.
    adopts: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            life: 1,
            last_removal: None,
            failed: Vec::new(),
            arena_pages: 64,
            admit: Admit::SecondTouch,
            promote: Promote::SecondTouch,
            queue_bytes: 1 << 20,
            adopts: true,
        }
    }
}

impl Life {
    /// Opens the disks and adopts all that is there.
    async fn begin(disks: &[&Simulated], options: Options) -> Self {
        let arena = Arena::new(options.arena_pages * PAGE, |_| Ok(())).unwrap();
        let log = Arc::new(ChangeLog::new(Arc::new(PartSets::new(1024)), 1024));
        let watermarks = Watermarks { high: 1.0, low: 1.0 };
        let incarnation = Incarnation(options.life);
        let catalog = Catalog::new(incarnation, arena, Box::new(Lru::default()), watermarks, log);
        let failures = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let host = Host {
            disks: disks.iter().map(|disk| (*disk).clone()).collect(),
            failures: Arc::clone(&failures),
            forgetful: Arc::default(),
        };
        let forgetful = Arc::clone(&host.forgetful);
        let (mut paths, mut adoptions) = (Vec::new(), Vec::new());
        for (n, disk) in disks.iter().enumerate() {
            let settings = PathSettings {
                name: format!("disk {n}").into(),
                capacity: 6 * SEGMENT + (4 << 20),
                segment_bytes: SEGMENT,
                durability: Durability::None,
                deadline: Duration::from_secs(3),
            };
            let owner = Owner {
                node: NodeId::from_bytes([9; 16]),
                life: incarnation,
                last_removal: options.last_removal.map(Incarnation),
            };
            let failed = Arc::new(options.failed.iter().copied().collect());
            match SsdPath::open(owner, disk.folder(), settings.clone(), failed).await {
                Ok((path, adoption)) => {
                    paths.push(Member::from(path).adopting(&adoption));
                    adoptions.push(adoption);
                }
                Err(error) => paths.push(Member::out(owner, settings, &error.to_string())),
            }
        }
        let settings = TieringSettings {
            admit: options.admit,
            promote: options.promote,
            queue_bytes: options.queue_bytes,
            scrub_rate: 0,
        };
        let tiering = Tiering::new(Arc::clone(&catalog), paths, settings, Arc::new(host));
        for adoption in adoptions.into_iter().filter(|_| options.adopts) {
            let member = tiering.member(&adoption.path().settings().name).unwrap();
            let stop = CancellationToken::new();
            adoption::run(Arc::clone(&tiering), Arc::clone(member), adoption, stop).await;
        }
        let mut writer = JoinSet::new();
        writer.spawn(writer::run(Arc::clone(&tiering), CancellationToken::new()));
        let others = AtomicU64::new(1_000_000);
        let life = Self { catalog, tiering, failures, forgetful, others, _writer: writer };
        life.keep().await;
        life
    }

    /// Does what the keepers have to do.
    async fn keep(&self) {
        for path in self.paths() {
            loop {
                match self.tiering.keep(&path).await {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(_) => {
                        let member = self.tiering.member(&path.settings().name).unwrap();
                        let _ = self.tiering.give_up(member, &path);
                        break;
                    }
                }
            }
        }
    }

    /// Waits until what was offered is written, and keeps the paths ready meanwhile.
    async fn settled(&self) {
        let mut settled = std::pin::pin!(self.tiering.settled());
        for _ in 0..20_000 {
            self.keep().await;
            // Polled, so that a simulated clock moves on while a disk stalls.
            tokio::select! {
                biased;
                () = &mut settled => return,
                () = tokio::time::sleep(Duration::from_millis(1)) => {}
            }
        }
        panic!("{} bytes stay queued; {:?}", self.tiering.queued_bytes(), self.tiering);
    }

    /// The paths that are in.
    fn paths(&self) -> Vec<Arc<SsdPath>> {
        self.tiering.members().iter().filter_map(|member| member.path()).collect()
    }

    /// By what a path is known when it has failed.
    fn uses(&self, member: usize) -> Vec<UseId> {
        self.tiering.members()[member].path().unwrap().uses().to_vec()
    }

    fn put(&self, n: u64, parent: Option<u64>) -> bool {
        let producer =
            Arc::new(Producer { name: format!("engine-{}", n % 3), incarnation: Incarnation(3) });
        let wish = Reserve {
            part: name(n).part,
            len: PART as u64,
            codec: Codec::Raw,
            chunk_len: 4096,
            content: ContentFingerprint::from_bytes([1; 32]),
            root: key(parent.unwrap_or(n)),
            parent: parent.map(key),
            origin_hash: None,
        };
        match self.catalog.reserve(name(n), &wish, &producer, None, Instant::now()) {
            Admission::Granted(mut put) => {
                put.spare().copy_from_slice(&bytes(n));
                put.advance(PART);
                put.commit(None).unwrap();
                true
            }
            Admission::Full => false,
            other => panic!("{other:?}"),
        }
    }

    /// Puts a part and has it written.
    async fn put_on_ssd(&self, n: u64, parent: Option<u64>) {
        assert!(self.put(n, parent));
        let _ = self.catalog.find(&name(n)); // A second touch, where that is needed.
        self.settled().await;
        assert!(self.tiers(n).has(Tier::Ssd), "{n} was not written: {:?}", self.tiering);
    }

    /// Puts parts in a life in which a disk is the only one: where a node with several writes a part
    /// depends on how fast they are just then.
    async fn fill_alone(life: u64, disk: &Simulated, numbers: Range<u64>) {
        let life = Self::begin(&[disk], Options { life, ..Options::default() }).await;
        for n in numbers {
            life.put_on_ssd(n, None).await;
        }
    }

    fn tiers(&self, n: u64) -> TierSet {
        self.catalog.tiers(&name(n))
    }

    /// Reads a part as a request does; its bytes are held against what was put.
    async fn get(&self, n: u64) -> bool {
        let read = match self.catalog.find(&name(n)) {
            None => return false,
            Some(Found::Here(read)) => read,
            Some(Found::OnSsd(copy)) => match self.tiering.load(&name(n), &copy).await {
                Ok(read) => read,
                Err(error) => {
                    let (used, evictable) =
                        (self.catalog.arena().used_bytes(), self.catalog.evictable_bytes());
                    let queued = self.tiering.queued_bytes();
                    eprintln!("{n}: {error}; {used} used, {evictable} evictable, {queued} queued");
                    return false;
                }
            },
        };
        assert!(read.bytes() == bytes(n), "wrong bytes for {n}");
        true
    }

    /// Fills the arena with other parts, so that `n` is in it no more.
    fn push_out(&self, n: u64) {
        while self.tiers(n).has(Tier::Dram) {
            assert!(self.put(self.others.fetch_add(1, Ordering::Relaxed), None));
        }
    }

    async fn remove(&self, filter: Eviction) -> u64 {
        let evicted = self.catalog.remove(&filter);
        self.tiering.forget().await.unwrap();
        evicted.blocks
    }

    fn counter(&self, of: fn(&TieringCounters) -> &AtomicU64) -> u64 {
        of(self.tiering.counters()).load(Ordering::Relaxed)
    }
}

/// Polls a future so often, and cancels it if it has not ended then.
async fn cancelled_after<T>(polls: usize, future: impl Future<Output = T>) -> Option<T> {
    let mut future = std::pin::pin!(future);
    for _ in 0..polls {
        let polled = std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context)));
        if let Poll::Ready(output) = polled.await {
            return Some(output);
        }
    }
    None
}

fn key(n: u64) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    BlockKey::from_bytes(bytes)
}

fn name(n: u64) -> PartName {
    let layout = LayoutFingerprint::from_bytes([9; 32]);
    let part = PartRef { key: key(n), layout, part: PartNumber(0) };
    PartName { tenant: TenantName::default().id(), part }
}

fn bytes(n: u64) -> Vec<u8> {
    let mut bytes = vec![0; PART];
    ChaCha8Rng::seed_from_u64(n).fill(&mut bytes[..]);
    bytes
}

fn all() -> Eviction {
    Eviction {
        tenant: TenantName::default().id(),
        content: None,
        layout: None,
        keys: Vec::new(),
        producer: None,
        descendants: false,
        unused_for: None,
        tier: None,
        dry_run: false,
    }
}

fn disk(seed: u64) -> Simulated {
    Simulated::new(seed, 64 << 20)
}

mod operation;

#[tokio::test]
async fn what_is_used_once_is_not_written_and_an_existence_check_is_no_use() {
    let life = Life::begin(&[&disk(1)], Options::default()).await;
    assert!(life.put(1, None) && life.put(2, None));
    for _ in 0..5 {
        assert_eq!(life.tiers(2), TierSet::of(Tier::Dram));
        assert!(life.catalog.holds(&BlockId::of(&name(2)), &[PartNumber(0)]));
    }
    assert!(life.get(1).await);
    life.settled().await;
    assert_eq!(life.tiers(1), TierSet::of(Tier::Dram).with(Tier::Ssd));
    assert_eq!(life.tiers(2), TierSet::of(Tier::Dram));
    assert_eq!(life.counter(|c| &c.committed), 1);
}

#[tokio::test]
async fn a_part_leaves_the_arena_for_the_ssd_and_comes_back_on_its_second_touch() {
    let life = Life::begin(&[&disk(2)], Options::default()).await;
    life.put_on_ssd(1, None).await;
    life.push_out(1);
    assert_eq!(life.tiers(1), TierSet::of(Tier::Ssd));
    assert!(life.get(1).await);
    assert_eq!(life.tiers(1), TierSet::of(Tier::Ssd), "one read does not push others out");
    assert!(life.get(1).await);
    assert_eq!(life.tiers(1), TierSet::of(Tier::Dram).with(Tier::Ssd));
    let loaded = life.counter(|c| &c.loaded);
    assert!(life.get(1).await);
    assert_eq!((loaded, life.counter(|c| &c.loaded)), (2, 2), "the third read needs no disk");
}

#[tokio::test]
async fn a_middle_block_may_leave_the_arena_when_it_stays_on_an_ssd() {
    let life = Life::begin(&[&disk(3)], Options::default()).await;
    life.put_on_ssd(1, None).await;
    life.put_on_ssd(2, Some(1)).await;
    life.push_out(1);
    assert_eq!(life.tiers(1), TierSet::of(Tier::Ssd));
    assert!(life.get(1).await && life.get(2).await);
    assert_eq!(life.catalog.audit().holes, 0);
}

#[tokio::test]
async fn a_restart_finds_what_was_written_and_masters_hear_of_it() {
    let disk = disk(4);
    let life = Life::begin(&[&disk], Options::default()).await;
    for n in 1..=20 {
        life.put_on_ssd(n, (n > 1).then_some(n - 1)).await;
    }
    assert!(life.put(21, Some(20)));
    drop(life);
    let life = Life::begin(&[&disk], Options { life: 2, ..Options::default() }).await;
    for n in 1..=20 {
        assert_eq!(life.tiers(n), TierSet::of(Tier::Ssd), "{n}");
        assert!(life.get(n).await, "{n}");
    }
    assert!(!life.get(21).await);
    let told: usize = (0..=255).map(|shard| life.catalog.snapshot(Shard(shard)).1.len()).sum();
    assert_eq!(told, 20);
    assert_eq!(life.catalog.audit(), Audit { blocks: 20, ..Audit::default() });
    assert_eq!(life.tiering.adoption().0.records, 20);
}

#[tokio::test]
async fn what_was_removed_by_command_does_not_come_back() {
    let disk = disk(5);
    let life = Life::begin(&[&disk], Options::default()).await;
    for n in 1..=9 {
        life.put_on_ssd(n, None).await;
    }
    let of_producer = Eviction { producer: Some("engine-1".to_owned()), ..all() };
    assert_eq!(life.remove(of_producer).await, 3);
    drop(life);
    let life = Life::begin(&[&disk], Options { life: 2, ..Options::default() }).await;
    for n in 1..=9 {
        assert_eq!(life.get(n).await, n % 3 != 1, "{n}");
    }
    // The producer is known after a restart too.
    let of_producer = Eviction { producer: Some("engine-2".to_owned()), ..all() };
    assert_eq!(life.remove(of_producer).await, 3);
    let life = Life::begin(&[&disk], Options { life: 3, ..Options::default() }).await;
    let left: Vec<u64> = (1..=9).filter(|n| !life.tiers(*n).is_empty()).collect();
    assert_eq!(left, [3, 6, 9]);
}

#[tokio::test]
async fn a_part_that_is_removed_while_it_is_written_does_not_come_back() {
    let disk = disk(6);
    let life = Life::begin(&[&disk], Options::default()).await;
    assert!(life.put(1, None) && life.put(2, None));
    assert!(life.get(1).await && life.get(2).await); // Offered; the writer has not run yet.
    assert_eq!(life.remove(Eviction { keys: vec![key(1)], ..all() }).await, 1);
    life.settled().await;
    assert!(life.tiers(1).is_empty());
    drop(life);
    let life = Life::begin(&[&disk], Options { life: 2, ..Options::default() }).await;
    assert!(life.tiers(1).is_empty() && life.get(2).await);
}

#[tokio::test]
async fn a_part_that_is_removed_after_its_segment_was_reclaimed_does_not_come_back() {
    let disk = disk(12);
    let life = Life::begin(&[&disk], Options { arena_pages: 2048, ..Options::default() }).await;
    life.put_on_ssd(1, None).await;
    let mut others = 0;
    while life.tiers(1).has(Tier::Ssd) {
        others += 1;
        assert!(others < 500, "its segment is reclaimed in its turn");
        life.put_on_ssd(1000 + others, None).await;
        life.keep().await;
    }
    assert_eq!(life.tiers(1), TierSet::of(Tier::Dram), "it is in the arena alone now");
    assert_eq!(life.remove(Eviction { keys: vec![key(1)], ..all() }).await, 1);
    drop(life);
    let life = Life::begin(&[&disk], Options { life: 2, ..Options::default() }).await;
    assert!(life.tiers(1).is_empty());
    assert!(life.tiers(1000 + others).has(Tier::Ssd), "the newest is there");
}

#[tokio::test]
async fn a_copy_that_a_crash_left_in_two_segments_is_kept_by_every_restart() {
    let disk = disk(13);
    let life = Life::begin(&[&disk], Options::default()).await;
    life.put_on_ssd(1, None).await;
    life.push_out(1);
    let Some(Found::OnSsd(copy)) = life.catalog.peek(&name(1)) else { panic!("pushed out") };
    life.paths()[0].carry(&name(1), &copy).await.unwrap();
    drop((life, copy)); // Before its old segment was disowned.
    for generation in 2..5 {
        let life = Life::begin(&[&disk], Options { life: generation, ..Options::default() }).await;
        assert!(life.get(1).await, "life {generation}");
        life.tiering.forget().await.unwrap(); // As with the next removal by command.
    }
}

#[tokio::test]
async fn a_removal_that_nobody_can_remember_is_not_acknowledged() {
    let disk = disk(14);
    let life = Life::begin(&[&disk], Options::default()).await;
    life.put_on_ssd(1, None).await;
    disk.fail(true);
    life.forgetful.store(true, Ordering::Relaxed);
    life.catalog.remove(&Eviction { keys: vec![key(1)], ..all() });
    let forgotten = life.tiering.forget().await;
    assert_eq!(forgotten.unwrap_err().kind(), io::ErrorKind::StorageFull);
}

#[tokio::test]
async fn nor_is_one_whose_path_had_failed_before_when_nobody_can_remember_that() {
    let disk = disk(14);
    let life = Life::begin(&[&disk], Options::default()).await;
    life.put_on_ssd(1, None).await;
    disk.fail(true);
    life.forgetful.store(true, Ordering::Relaxed);
    assert!(life.tiering.fence(Path::new("disk 0"), "by command").is_err());
    life.keep().await; // All that it held is withdrawn, so a removal finds nothing there to note.
    life.catalog.remove(&Eviction { keys: vec![key(1)], ..all() });
    let forgotten = life.tiering.forget().await;
    assert_eq!(forgotten.unwrap_err().kind(), io::ErrorKind::StorageFull);
    life.forgetful.store(false, Ordering::Relaxed);
    life.tiering.forget().await.unwrap();
    assert_eq!(*life.failures.lock(), life.uses(0));
}

#[tokio::test]
async fn a_removal_whose_command_is_cancelled_is_noted_before_the_next_one_is_acknowledged() {
    for polls in 0..3 {
        let disk = disk(20);
        let life = Life::begin(&[&disk], Options::default()).await;
        for n in 1..4 {
            life.put_on_ssd(n, None).await;
        }
        // The session of a command ends at any time after the catalog has let go.
        life.catalog.remove(&Eviction { keys: vec![key(1)], ..all() });
        let _ = cancelled_after(polls, life.tiering.forget()).await;
        assert_eq!(life.remove(Eviction { keys: vec![key(1)], ..all() }).await, 0);
        assert_eq!(life.remove(Eviction { keys: vec![key(2)], ..all() }).await, 1);
        drop(life);
        let life = Life::begin(&[&disk], Options { life: 2, ..Options::default() }).await;
        assert!(life.tiers(1).is_empty() && life.tiers(2).is_empty(), "after {polls} polls");
        assert!(life.tiers(3).has(Tier::Ssd));
    }
}

#[tokio::test]
async fn a_path_that_took_no_part_in_a_life_with_removals_comes_back_empty() {
    for last_removal in [None, Some(1), Some(2), Some(3)] {
        let (here, away) = (disk(21), disk(22));
        Life::fill_alone(1, &here, 1..2).await;
        Life::fill_alone(2, &away, 2..3).await;
        let options = |life, last_removal| Options { life, last_removal, ..Options::default() };
        drop(Life::begin(&[&here], options(3, None)).await);
        let life = Life::begin(&[&here, &away], options(4, last_removal)).await;
        assert!(life.tiers(1).has(Tier::Ssd), "{last_removal:?}: the other took part");
        let kept = last_removal != Some(3);
        assert_eq!(life.tiers(2).has(Tier::Ssd), kept, "{last_removal:?}");
        drop(life);
        let life = Life::begin(&[&here, &away], options(5, last_removal)).await;
        assert_eq!(life.tiers(2).has(Tier::Ssd), kept, "{last_removal:?}: for good");
    }
}

#[tokio::test]
async fn a_failure_that_nobody_remembers_keeps_no_removal_from_being_noted_elsewhere() {
    let (bad, good) = (disk(16), disk(17));
    Life::fill_alone(1, &bad, 1..2).await;
    Life::fill_alone(2, &good, 2..4).await;
    let life = Life::begin(&[&bad, &good], Options { life: 3, ..Options::default() }).await;
    bad.fail(true);
    life.forgetful.store(true, Ordering::Relaxed);
    for n in 1..3 {
        life.catalog.remove(&Eviction { keys: vec![key(n)], ..all() });
        assert!(life.tiering.forget().await.is_err(), "not acknowledged: {n}");
    }
    // The second one is noted where it lay, so it does not come back when the retry is acknowledged.
    life.forgetful.store(false, Ordering::Relaxed);
    life.tiering.forget().await.unwrap();
    assert_eq!(*life.failures.lock(), life.uses(0));
    drop(life);
    let life = Life::begin(&[&good], Options { life: 4, ..Options::default() }).await;
    assert!(life.tiers(2).is_empty());
    assert!(life.tiers(3).has(Tier::Ssd), "the other one is there");
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_is_told_to_stop_waits_for_no_segment() {
    let disk = disk(15);
    // All that is put goes to the ssd, which has no room that nobody makes.
    let options = Options { admit: Admit::All, arena_pages: 256, ..Options::default() };
    let life = Life::begin(&[&disk], options).await;
    let (tiering, stop) = (Arc::clone(&life.tiering), CancellationToken::new());
    for n in 1..=40 {
        assert!(life.put(n, None));
    }
    for _ in 0..100 {
        tokio::task::yield_now().await; // Until writes wait for a segment.
    }
    assert!(tiering.queued_bytes() > 0);
    stop.cancel();
    for member in tiering.members() {
        keeper::run(Arc::clone(&tiering), Arc::clone(member), stop.clone()).await;
    }
    tokio::time::timeout(Duration::from_secs(60), tiering.settled()).await.expect("it ends");
    assert!(tiering.counters().refused.load(Ordering::Relaxed) > 0, "and says what it left out");
}

#[tokio::test]
async fn a_damaged_record_is_a_miss_is_withdrawn_and_can_be_replaced() {
    let disk = disk(7);
    let life = Life::begin(&[&disk], Options::default()).await;
    life.put_on_ssd(1, None).await;
    life.push_out(1);
    disk.flip("segment-000000", (2 * PAGE + 100) * 8);
    assert!(!life.get(1).await);
    assert!(life.tiers(1).is_empty(), "withdrawn before the miss is answered");
    life.put_on_ssd(1, None).await;
    assert!(life.get(1).await);
    drop(life);
    let life = Life::begin(&[&disk], Options { life: 2, ..Options::default() }).await;
    assert!(life.get(1).await, "the new one");
    assert_eq!(life.tiering.adoption().0.unproved_records, 1, "the old one");
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_stalls_holds_up_neither_puts_nor_evictions() {
    let disk = disk(8);
    let options =
        Options { queue_bytes: 32 * PAGE as u64, admit: Admit::All, ..Options::default() };
    let life = Life::begin(&[&disk], options).await;
    disk.stall();
    for n in 0..500 {
        assert!(life.put(n, None), "{n}");
        tokio::task::yield_now().await;
    }
    assert!(life.tiering.queued_bytes() <= 32 * PAGE as u64);
    assert!(life.counter(|c| &c.refused) > 400);
    life.settled().await; // Its deadline passes.
    assert!(!life.paths()[0].is_healthy());
    life.keep().await;
    assert!(!life.failures.lock().is_empty(), "it is remembered");
}

#[tokio::test(start_paused = true)]
async fn what_comes_at_once_is_spread_over_disks_that_nobody_has_measured() {
    let disks = [disk(18), disk(19)];
    let options = Options { admit: Admit::All, ..Options::default() };
    let life = Life::begin(&[&disks[0], &disks[1]], options).await;
    disks.iter().for_each(Simulated::stall);
    for n in 0..8 {
        assert!(life.put(n, None));
    }
    for _ in 0..100 {
        tokio::task::yield_now().await; // Until they are under way.
    }
    assert_eq!(disks.map(|disk| disk.stalled()), [4, 4]);
}

#[tokio::test(start_paused = true)]
async fn who_cannot_wait_for_an_adoption_hears_how_far_it_is() {
    let disk = disk(20);
    Life::fill_alone(1, &disk, 0..3).await;
    let life =
        Life::begin(&[&disk], Options { life: 2, adopts: false, ..Options::default() }).await;
    let limit = Duration::from_secs(5);
    let error = life.tiering.adopted_within(limit).await.unwrap_err().to_string();
    assert!(error.contains("1 of its ssd paths are still being read: 0 of 2 segments"), "{error}");
    drop(life);
    let life = Life::begin(&[&disk], Options { life: 3, ..Options::default() }).await;
    life.tiering.adopted_within(limit).await.unwrap();
}

#[tokio::test]
async fn of_two_disks_one_may_fail() {
    let (good, bad) = (disk(9), disk(10));
    // Few enough for one of them alone: no segment is reclaimed here.
    let on_bad = 12..24;
    Life::fill_alone(1, &good, 0..12).await;
    Life::fill_alone(2, &bad, on_bad.clone()).await;
    let options = Options { life: 3, admit: Admit::All, ..Options::default() };
    let life = Life::begin(&[&good, &bad], options).await;
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    life.settled().await; // What takes room in the arena is written, and may go.
    bad.fail(true);
    assert!(!life.get(on_bad.start).await);
    life.keep().await; // Withdraws the rest.
    for n in 0..24 {
        assert_eq!(life.tiers(n).is_empty(), on_bad.contains(&n), "{n}");
        assert_eq!(life.get(n).await, !on_bad.contains(&n), "{n}");
    }
    for n in 100..110 {
        life.put_on_ssd(n, Some(rng.random_range(0..24))).await;
    }
    assert!(life.failures.lock().iter().all(|failed| life.uses(1).contains(failed)));
    let audit = life.catalog.audit();
    assert_eq!((audit.empty_parts, audit.miscounted), (0, 0));
}

#[tokio::test]
async fn old_segments_make_room_without_leaving_holes_and_hot_parts_stay() {
    let disk = disk(11);
    let options = Options { promote: Promote::Never, arena_pages: 48, ..Options::default() };
    let life = Life::begin(&[&disk], options).await;
    // A hot prompt of three blocks, and chains of five that come once and again.
    for n in 0..3 {
        life.put_on_ssd(n, (n > 0).then(|| n - 1)).await;
    }
    for chain in 0..60u64 {
        for block in 0..5 {
            let n = 1000 + chain * 5 + block;
            life.put_on_ssd(n, Some(if block == 0 { 2 } else { n - 1 })).await;
            for hot in 0..3 {
                assert!(life.get(hot).await, "hot {hot} after {n}");
            }
        }
        let audit = life.catalog.audit();
        let wrong = (audit.holes, audit.empty_parts, audit.miscounted);
        assert_eq!(wrong, (0, 0, 0), "after chain {chain}");
    }
    let written = life.counter(|c| &c.committed);
    assert_eq!(written, 303);
    let readable: Vec<u64> = (1000..1300).filter(|n| !life.tiers(*n).is_empty()).collect();
    assert!(readable.len() > 20 && readable.len() < 250, "{}", readable.len());
    for n in &readable {
        assert!(life.get(*n).await, "{n} is listed and cannot be read");
    }
    let carried = &life.tiering.members()[0].counters().carried_records;
    assert!(carried.load(Ordering::Relaxed) >= 3);
}
