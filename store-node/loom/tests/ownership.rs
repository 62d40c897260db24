//! A part's bytes have one writer and then any number of readers; eviction passes over what is read,
//! removal does not, and either way the space is used again only when the last reader is gone.
//!
//! The arena has one page in most tests, so whoever gets space gets *that* space. Each part is filled with
//! its own number; loom besides reports every access to a page that does not come after the last one of
//! its earlier owner.

use larder_proto::{
    BlockKey, ContentFingerprint, Generation, LayoutFingerprint, PartName, PartNumber, Tier,
    frame::{Codec, Reserve},
    ids::{Incarnation, TenantName},
    part::PartRef,
};
use larder_store_node_loom::{
    catalog::{Admission, Catalog, CommitError, Found, PartRead, Producer, Put, Watermarks},
    eviction::Lru,
    inventory::{ChangeLog, PartSets, command::Eviction},
    memory::PAGE,
    tiers::{dram::Arena, ssd::SsdCopy},
    transfer::{
        Process,
        leases::{Leases, Reader},
    },
};
use loom::{model::Builder, thread};
use std::{
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Waker},
};
use tokio::time::Instant;

/// Bytes of a part: less than a page, so that the rest of the page is looked after too.
const LEN: usize = 100;

/// How many interleavings of its threads a test tries.
enum Bound {
    /// All.
    All,
    /// Those that interrupt threads so often at most: three busy threads have millions.
    /// `LOOM_MAX_PREEMPTIONS` says another number.
    Preemptions(usize),
}

/// Tries `body` with a node of so many pages under the interleavings of its threads, and says how many that
/// were. Each ends with an empty node.
fn explore(pages: usize, bound: Bound, body: fn(&Node)) {
    let tried = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&tried);
    let mut model = Builder::new();
    model.preemption_bound = match bound {
        Bound::All => None,
        Bound::Preemptions(bound) => model.preemption_bound.or(Some(bound)),
    };
    model.max_branches = 10_000; // Each step of a test and of its end; not what is explored.
    model.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        let node = Node::new(pages);
        body(&node);
        node.ends_empty();
    });
    println!("{} interleavings", tried.load(Ordering::Relaxed));
}

#[derive(Clone)]
struct Node {
    catalog: Arc<Catalog>,
    leases: Arc<Leases>,
}

impl Node {
    fn new(pages: usize) -> Self {
        let arena = Arena::new(pages * PAGE, |_| Ok(())).unwrap();
        let log = Arc::new(ChangeLog::new(Arc::new(PartSets::new(16)), 16));
        let watermarks = Watermarks { high: 1.0, low: 1.0 };
        let catalog =
            Catalog::new(Incarnation(1), arena, Box::new(Lru::default()), watermarks, log);
        Self { catalog, leases: Arc::default() }
    }

    fn spawn<T: 'static>(&self, body: impl FnOnce(Node) -> T + 'static) -> thread::JoinHandle<T> {
        let node = self.clone();
        thread::spawn(move || body(node))
    }

    fn reserve(&self, n: u8, parent: Option<u8>) -> Option<Put> {
        let wish = Reserve {
            part: name(n).part,
            len: LEN as u64,
            codec: Codec::Raw,
            chunk_len: 4096,
            content: ContentFingerprint::from_bytes([1; 32]),
            root: name(parent.map_or(n, |_| 1)).part.key,
            parent: parent.map(|parent| name(parent).part.key),
            origin_hash: None,
        };
        let producer = Producer { name: String::new(), incarnation: Incarnation(1) };
        match self.catalog.reserve(name(n), &wish, &Arc::new(producer), None, Instant::now()) {
            Admission::Granted(put) => Some(put),
            Admission::Full => None,
            other => panic!("{other:?}"),
        }
    }

    /// Puts a part; `None` when there was no room.
    fn put(&self, n: u8) -> Option<PartRead> {
        let mut put = self.reserve(n, None)?;
        fill(&mut put, n);
        let stored = put.commit(None).unwrap();
        assert!(self.in_dram(n), "its writer has not let go of it");
        holds(&stored, n);
        Some(stored)
    }

    /// Puts a part that fits.
    fn hold(&self, n: u8, parent: Option<u8>) -> Generation {
        let mut put = self.reserve(n, parent).expect("there is room");
        fill(&mut put, n);
        put.commit(None).unwrap().info().generation
    }

    fn remove(&self, n: u8) {
        let removal = Eviction {
            tenant: name(n).tenant,
            content: None,
            layout: None,
            keys: vec![name(n).part.key],
            producer: None,
            descendants: false,
            unused_for: None,
            tier: None,
            dry_run: false,
        };
        self.catalog.remove(&removal);
    }

    fn in_dram(&self, n: u8) -> bool {
        self.catalog.tiers(&name(n)).has(Tier::Dram)
    }

    /// What a process with a lease does, which knows an offset and nothing of the node's handles.
    fn holds_in_place(&self, offset: u64, n: u8) {
        let offset = usize::try_from(offset).unwrap();
        // SAFETY: the lease keeps the range from being written; loom reports it otherwise.
        let bytes = unsafe { self.catalog.arena().memory().bytes(offset, LEN) };
        assert_eq!(bytes, [n; LEN]);
    }

    /// All that is held goes, and with it every byte that is in use.
    fn ends_empty(&self) {
        assert_eq!(self.leases.count(), 0);
        for n in (1..=4).rev() {
            self.remove(n);
            assert!(self.catalog.find(&name(n)).is_none());
        }
        let audit = self.catalog.audit();
        assert_eq!((audit.blocks, audit.empty_parts, audit.miscounted), (0, 0, 0));
        let arena = self.catalog.arena();
        assert_eq!(arena.used_bytes(), 0);
        let len = arena.memory().len();
        let whole = arena.allocate(len).expect("all space is free again, in one piece");
        assert_eq!(arena.used_bytes(), len as u64);
        drop(whole);
    }
}

fn name(n: u8) -> PartName {
    let layout = LayoutFingerprint::from_bytes([9; 32]);
    let part = PartRef { key: BlockKey::from_bytes([n; 32]), layout, part: PartNumber(0) };
    PartName { tenant: TenantName::default().id(), part }
}

fn fill(put: &mut Put, n: u8) {
    put.spare().fill(n);
    put.advance(LEN);
}

/// The bytes are those of part `n`, whatever went on since they were found.
fn holds(read: &PartRead, n: u8) {
    read.verify().unwrap();
    assert_eq!(read.bytes(), [n; LEN]);
}

fn reader(connection: u64) -> Reader {
    Reader { connection, pid: 1, name: "".into() }
}

fn ended(future: Pin<&mut impl Future>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

#[test]
fn what_is_read_is_not_evicted_and_what_was_evicted_is_not_found() {
    explore(1, Bound::All, |node| {
        node.hold(1, None);
        let putter = node.spawn(|node| {
            if let Some(stored) = node.put(2) {
                assert!(node.catalog.find(&name(1)).is_none(), "its space is another's");
                holds(&stored, 2);
            }
        });
        if let Some(read) = node.catalog.read(&name(1)) {
            holds(&read, 1);
            assert!(node.in_dram(1), "it is being read");
            holds(&read, 1);
        } else {
            assert!(node.catalog.find(&name(1)).is_none());
        }
        putter.join().unwrap();
    });
}

#[test]
fn a_read_that_is_passed_on_keeps_its_part_from_eviction_like_the_first() {
    explore(1, Bound::All, |node| {
        node.hold(1, None);
        let read = node.catalog.read(&name(1)).unwrap();
        let other = read.clone(); // Without the lock of the shard.
        let reader = node.spawn(move |node| {
            holds(&other, 1);
            assert!(node.in_dram(1), "it is being read");
        });
        let putter = node.spawn(|node| node.put(2).is_some());
        holds(&read, 1);
        drop(read);
        reader.join().unwrap();
        let evicted = putter.join().unwrap();
        assert_ne!(node.in_dram(1), evicted);
    });
}

#[test]
fn two_puts_that_need_the_same_space_never_share_it() {
    explore(1, Bound::Preemptions(3), |node| {
        node.hold(1, None);
        let puts = [2, 3].map(|n| node.spawn(move |node| _ = node.put(n)));
        if let Some(read) = node.catalog.read(&name(1)) {
            holds(&read, 1);
        }
        puts.into_iter().for_each(|put| put.join().unwrap());
    });
}

#[test]
fn a_removal_takes_what_is_leased_and_its_space_comes_back_with_the_lease() {
    explore(1, Bound::Preemptions(3), |node| {
        node.hold(1, None);
        let remover = node.spawn(|node| {
            node.remove(1);
            assert!(node.catalog.find(&name(1)).is_none(), "it was removed");
        });
        let putter = node.spawn(|node| {
            let stored = node.put(2);
            assert!(node.catalog.arena().used_bytes() <= PAGE as u64, "there is no more");
            drop(stored);
        });
        if let Some(read) = node.catalog.read(&name(1)) {
            let offset = read.arena_offset();
            let lease = node.leases.lease(&reader(1), name(1), read).unwrap();
            node.holds_in_place(offset, 1);
            node.leases.release(&reader(1), &[lease]);
        }
        remover.join().unwrap();
        putter.join().unwrap();
    });
}

#[test]
fn a_reader_that_lost_its_socket_keeps_its_space_until_its_process_is_gone() {
    explore(1, Bound::Preemptions(3), |node| {
        node.hold(1, None);
        let read = node.catalog.read(&name(1)).unwrap();
        let offset = read.arena_offset();
        node.leases.lease(&reader(1), name(1), read).unwrap();
        node.remove(1); // From here on the lease alone keeps it.
        let process = Process::default();
        let putter = node.spawn(|node| _ = node.put(2));
        let client = node.spawn({
            let process = process.clone();
            move |node| {
                node.holds_in_place(offset, 1);
                process.exit();
            }
        });
        let mut closed = pin!(Arc::clone(&node.leases).closed(1, process));
        if !ended(closed.as_mut()) {
            client.join().unwrap();
            assert!(ended(closed.as_mut()), "the process is gone");
        }
        putter.join().unwrap();
    });
}

#[test]
fn a_lease_ends_once_whether_it_is_released_or_its_process_is_gone() {
    explore(1, Bound::All, |node| {
        node.hold(1, None);
        let read = node.catalog.read(&name(1)).unwrap();
        let lease = node.leases.lease(&reader(1), name(1), read).unwrap();
        let closer = node.spawn(|node| {
            let process = Process::default();
            process.exit();
            assert!(ended(pin!(Arc::clone(&node.leases).closed(1, process))));
        });
        let putter = node.spawn(|node| _ = node.put(2));
        // On a new connection of the same process, and on the old one.
        node.leases.release(&reader(2), &[lease]);
        node.leases.release(&reader(1), &[lease]);
        closer.join().unwrap();
        putter.join().unwrap();
    });
}

#[test]
fn a_part_that_is_put_again_is_read_whole_as_it_was_or_as_it_is() {
    explore(1, Bound::All, |node| {
        let old = node.hold(1, None);
        let again = node.spawn(|node| {
            node.remove(1);
            let Some(mut put) = node.reserve(1, None) else { return };
            fill(&mut put, 7);
            assert!(put.commit(None).is_ok());
        });
        for _ in 0..2 {
            if let Some(read) = node.catalog.read(&name(1)) {
                holds(&read, if read.info().generation == old { 1 } else { 7 });
            }
        }
        again.join().unwrap();
    });
}

#[test]
fn what_was_just_committed_stays_until_its_writer_has_seen_it() {
    explore(1, Bound::All, |node| {
        let putter = node.spawn(|node| _ = node.put(2));
        node.put(1);
        putter.join().unwrap();
    });
}

#[test]
fn a_revoked_writer_keeps_its_space_and_publishes_nothing() {
    explore(1, Bound::All, |node| {
        let mut late = node.reserve(1, None).unwrap();
        node.catalog.revoke(&late); // Its deadline passed.
        let writer = node.spawn(move |_| {
            fill(&mut late, 9);
            assert_eq!(late.commit(None).unwrap_err(), CommitError::Revoked);
        });
        node.put(1);
        if let Some(read) = node.catalog.read(&name(1)) {
            holds(&read, 1);
        }
        writer.join().unwrap();
    });
}

#[test]
fn a_put_that_is_dropped_gives_its_space_back_and_leaves_no_entry() {
    explore(1, Bound::All, |node| {
        let mut dropped = node.reserve(1, None).unwrap();
        let writer = node.spawn(move |_| {
            dropped.spare()[..LEN / 2].fill(9);
            dropped.advance(LEN / 2);
        });
        node.put(2);
        assert!(node.catalog.find(&name(1)).is_none(), "it was never committed");
        writer.join().unwrap();
    });
}

#[test]
fn a_damaged_copy_is_withdrawn_once_and_stays_with_those_who_read_it() {
    explore(1, Bound::Preemptions(3), |node| {
        let generation = node.hold(1, None);
        let withdraw = || {
            node.spawn(move |node| {
                let withdrawn = node.catalog.withdraw_damaged(&name(1), generation);
                assert!(node.catalog.find(&name(1)).is_none(), "it is gone before the miss");
                if withdrawn {
                    node.put(2);
                }
                withdrawn
            })
        };
        let by = [withdraw(), withdraw()];
        if let Some(read) = node.catalog.read(&name(1)) {
            holds(&read, 1);
        }
        let withdrawn = by.map(|thread| u8::from(thread.join().unwrap()));
        assert_eq!(withdrawn.iter().sum::<u8>(), 1);
    });
}

#[test]
fn what_has_a_copy_on_an_ssd_leaves_the_arena_and_comes_back_whole() {
    explore(1, Bound::All, |node| {
        let stored = node.put(1).unwrap();
        let info = Arc::clone(stored.info());
        drop(stored);
        assert!(node.catalog.written_to_ssd(&name(1), info.generation, Some(SsdCopy(0))));
        let putter = node.spawn(|node| _ = node.put(2));
        match node.catalog.find(&name(1)).expect("it has a copy, wherever") {
            Found::Here(read) => holds(&read, 1),
            Found::OnSsd(_) => {
                if let Some(mut extent) = node.catalog.make_room_for(LEN as u64) {
                    extent.bytes_mut().fill(1);
                    let read = node.catalog.brought_up(extent.freeze(), (*info).clone());
                    assert!(node.catalog.promote(&name(1), &read));
                    assert!(node.in_dram(1), "it is being read");
                    holds(&read, 1);
                }
            }
        }
        putter.join().unwrap();
    });
}

#[test]
fn all_that_is_in_use_is_counted_whoever_comes_and_goes() {
    explore(3, Bound::Preemptions(3), |node| {
        node.hold(1, None);
        let putters = [2, 3].map(|n| node.spawn(move |node| node.hold(n, None)));
        node.remove(1);
        putters.into_iter().for_each(|putter| _ = putter.join().unwrap());
        assert_eq!(node.catalog.arena().used_bytes(), 2 * PAGE as u64);
    });
}

#[test]
fn a_parent_is_not_evicted_from_under_a_child_that_is_visible() {
    explore(3, Bound::All, |node| {
        node.hold(1, None);
        node.hold(2, Some(1));
        let mut child = node.reserve(3, Some(2)).unwrap();
        let putter = node.spawn(|node| {
            let both = node.in_dram(3) && node.in_dram(2);
            node.put(4);
            assert!(!both || !node.in_dram(3) || node.in_dram(2), "the tail goes first");
        });
        fill(&mut child, 3);
        drop(child.commit(None).unwrap());
        putter.join().unwrap();
        assert_eq!(node.catalog.audit().holes, 0);
    });
}
