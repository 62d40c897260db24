//! The tier over a simulated disk.

use super::{
    format::tests::header,
    io::{
        AlignedBuffer, PAGE,
        simulated::{Crash, Simulated},
    },
    *,
};
use crate::tiers::dram::Arena;
use larder_proto::{
    Generation, PartName,
    frame::PartInfo,
    ids::{Incarnation, NodeId},
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

const SEGMENT: u64 = 64 * PAGE as u64;
const SLOTS: u64 = 6;

fn node() -> NodeId {
    NodeId::from_bytes([9; 16])
}

fn owner() -> Owner {
    Owner { node: node(), life: Incarnation(7), last_removal: None }
}

fn settings(durability: Durability) -> PathSettings {
    PathSettings {
        name: "simulated".into(),
        capacity: SLOTS * SEGMENT + (4 << 20),
        segment_bytes: SEGMENT,
        durability,
        deadline: Duration::from_secs(60),
    }
}

/// Opens the path and adopts everything; what was found, by number.
async fn open(
    device: &Simulated,
    durability: Durability,
) -> (Arc<SsdPath>, BTreeMap<u64, (FooterEntry, SsdCopy)>, AdoptionCounts) {
    let opened =
        SsdPath::open(owner(), device.folder(), settings(durability), Arc::default()).await;
    let (path, mut adoption) = opened.unwrap();
    let mut found = BTreeMap::new();
    while let Some(records) = adoption.next().await {
        for (entry, copy) in records.unwrap() {
            found.entry(entry.generation.counter).or_insert((entry, copy));
        }
    }
    (path, found, adoption.counts())
}

/// A part of a few pages that only `n` decides.
fn part(n: u64) -> (PartName, PartInfo, Vec<u8>) {
    let mut rng = ChaCha8Rng::seed_from_u64(n);
    let mut bytes = vec![0; rng.random_range(1..6 * PAGE)];
    rng.fill(&mut bytes[..]);
    let header = header([0; 16], n, &bytes);
    (header.name, header.info, bytes)
}

async fn put(path: &Arc<SsdPath>, n: u64) -> Result<SsdCopy, SsdError> {
    let (name, info, bytes) = part(n);
    path.append_bytes(&name, &info, AlignedBuffer::copy_of(&bytes).freeze()).await
}

/// Reads a part and holds it against what was put.
async fn get(
    path: &Arc<SsdPath>,
    arena: &Arc<Arena>,
    n: u64,
    copy: &SsdCopy,
) -> Result<(), SsdError> {
    let (name, info, bytes) = part(n);
    let extent = arena.allocate(bytes.len()).unwrap();
    let (read, found) = path.read(&name, copy, extent).await?;
    assert_eq!((read.bytes(), found), (&bytes[..], info), "wrong bytes for {n}");
    Ok(())
}

fn generation(n: u64) -> Generation {
    part(n).1.generation
}

/// Lets go of the oldest segment when nothing else is left.
async fn make_ready(
    path: &Arc<SsdPath>,
    held: &mut BTreeMap<u64, SsdCopy>,
) -> Result<(), SsdError> {
    while !path.prepare().await? {
        let Some(oldest) = path.oldest() else { return Ok(()) };
        held.retain(|_, copy| !Arc::ptr_eq(copy.segment(), &oldest));
    }
    Ok(())
}

fn arena() -> Arc<Arena> {
    Arena::new(64 * PAGE, |_| Ok(())).unwrap()
}

#[tokio::test]
async fn what_was_written_is_read_back_after_a_restart_and_what_was_removed_is_not() {
    let (device, arena) = (Simulated::new(1, 64 << 20), arena());
    let (path, found, _) = open(&device, Durability::None).await;
    assert!(found.is_empty());
    let mut held = BTreeMap::new();
    for n in 0..60 {
        make_ready(&path, &mut held).await.unwrap();
        held.insert(n, put(&path, n).await.unwrap());
    }
    for (n, copy) in &held {
        get(&path, &arena, *n, copy).await.unwrap();
    }
    path.remove(vec![generation(3), generation(59)]).await.unwrap();
    drop(path);
    for round in 0..2 {
        let (path, found, counts) = open(&device, Durability::None).await;
        let expected: Vec<u64> = held.keys().copied().filter(|n| ![3, 59].contains(n)).collect();
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), expected, "round {round}");
        assert_eq!(counts.records, expected.len() as u64);
        assert_eq!(counts.removed_records, 2);
        assert_eq!(counts.unsealed_segments, u64::from(round == 0), "sealed by the first recovery");
        for (n, (_, copy)) in &found {
            get(&path, &arena, *n, copy).await.unwrap();
        }
    }
}

#[tokio::test]
async fn old_segments_make_room_for_new_ones_within_the_capacity() {
    let (device, arena) = (Simulated::new(2, 64 << 20), arena());
    let (path, ..) = open(&device, Durability::Segment).await;
    let mut held = BTreeMap::new();
    for n in 0..600 {
        make_ready(&path, &mut held).await.unwrap();
        held.insert(n, put(&path, n).await.unwrap());
        assert!(device.used() <= settings(Durability::None).capacity);
    }
    assert!(held.len() > 40 && held.len() < 200, "{} records", held.len());
    assert!(held.contains_key(&599) && !held.contains_key(&0));
    for (n, copy) in &held {
        get(&path, &arena, *n, copy).await.unwrap();
    }
    assert!(path.counters().reclaimed_segments.load(std::sync::atomic::Ordering::Relaxed) > 5);
}

#[tokio::test]
async fn a_reader_keeps_its_segment_and_its_bytes() {
    let (device, arena) = (Simulated::new(3, 64 << 20), arena());
    let (path, ..) = open(&device, Durability::None).await;
    let mut held = BTreeMap::new();
    make_ready(&path, &mut held).await.unwrap();
    let kept = put(&path, 0).await.unwrap();
    for n in 1..400 {
        make_ready(&path, &mut held).await.unwrap();
        match put(&path, n).await {
            Ok(copy) => _ = held.insert(n, copy),
            Err(error) => assert!(matches!(error, SsdError::Busy), "{error}"),
        }
    }
    get(&path, &arena, 0, &kept).await.unwrap();
}

#[tokio::test]
async fn a_hot_record_is_carried_on_and_its_removal_holds_for_both_places() {
    let (device, arena) = (Simulated::new(4, 64 << 20), arena());
    let (path, ..) = open(&device, Durability::None).await;
    path.prepare().await.unwrap();
    let (first, (name, ..)) = (put(&path, 1).await.unwrap(), part(1));
    let carried = path.carry(&name, &first).await.unwrap();
    assert!(!carried.is_same(&first));
    get(&path, &arena, 1, &carried).await.unwrap();
    path.remove(vec![generation(1)]).await.unwrap();
    let (_, found, counts) = open(&device, Durability::None).await;
    assert!(found.is_empty(), "{found:?}");
    assert_eq!(counts.removed_records, 2);
}

#[tokio::test]
async fn every_flipped_bit_of_a_record_is_found() {
    let (device, arena) = (Simulated::new(5, 64 << 20), arena());
    let (path, ..) = open(&device, Durability::None).await;
    path.prepare().await.unwrap();
    let (copy, (name, info, bytes)) = (put(&path, 7).await.unwrap(), part(7));
    let at = usize::try_from(copy.footprint_bytes()).unwrap();
    assert_eq!(at, bytes.len().next_multiple_of(PAGE) + PAGE);
    let header_len = u32::from_le_bytes(
        device.bytes("segment-000000")[PAGE + 12..PAGE + 16].try_into().unwrap(),
    ) as usize
        + 20;
    let bits = (0..header_len * 8).chain(PAGE * 8..(PAGE + bytes.len()) * 8);
    let bits: Vec<usize> = bits.collect();
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for _ in 0..400 {
        let bit = PAGE * 8 + bits[rng.random_range(0..bits.len())];
        device.flip("segment-000000", bit);
        let extent = arena.allocate(bytes.len()).unwrap();
        let error = path.read(&name, &copy, extent).await.unwrap_err();
        assert!(error.is_of_the_copy(), "bit {bit}: {error}");
        device.flip("segment-000000", bit);
    }
    assert_eq!(info.generation, copy.generation());
    get(&path, &arena, 7, &copy).await.unwrap();
}

#[tokio::test]
async fn a_newer_format_is_refused_and_nothing_is_touched() {
    let device = Simulated::new(6, 64 << 20);
    let (path, ..) = open(&device, Durability::None).await;
    path.prepare().await.unwrap();
    put(&path, 1).await.unwrap();
    drop(path);
    device.poke("segment-000000", 8, &(format::FORMAT + 1).to_le_bytes());
    let before: Vec<_> = device.names().iter().map(|name| device.bytes(name)).collect();
    let refused =
        SsdPath::open(owner(), device.folder(), settings(Durability::None), Arc::default())
            .await
            .unwrap_err();
    assert!(matches!(refused, OpenError::Newer { .. }), "{refused}");
    let other = NodeId::from_bytes([1; 16]);
    device.poke("segment-000000", 8, &format::FORMAT.to_le_bytes());
    let refused = SsdPath::open(
        Owner { node: other, ..owner() },
        device.folder(),
        settings(Durability::None),
        Arc::default(),
    )
    .await
    .unwrap_err();
    assert!(matches!(refused, OpenError::OfAnotherNode { .. }), "{refused}");
    device.poke("segment-000000", 8, &(format::FORMAT + 1).to_le_bytes());
    let after: Vec<_> = device.names().iter().map(|name| device.bytes(name)).collect();
    assert!(before == after);
}

#[tokio::test]
async fn one_bad_file_does_not_stop_the_others() {
    let (device, arena) = (Simulated::new(7, 64 << 20), arena());
    let (path, ..) = open(&device, Durability::None).await;
    let mut held = BTreeMap::new();
    for n in 0..60 {
        make_ready(&path, &mut held).await.unwrap();
        held.insert(n, put(&path, n).await.unwrap());
    }
    drop(path);
    device.flip("segment-000000", 9 * 8 + 80); // The header of one,
    let footer = usize::try_from(SEGMENT).unwrap() - 2 * PAGE;
    device.flip("segment-000002", footer * 8 + 9); // the footer of another.
    let (path, found, counts) = open(&device, Durability::None).await;
    assert_eq!((counts.damaged_segments, counts.unsealed_segments), (1, 2), "{counts:?}");
    let expected: Vec<u64> =
        held.iter().filter(|(_, copy)| copy.segment().slot != 0).map(|(n, _)| *n).collect();
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), expected);
    assert!(!expected.is_empty() && expected.len() < held.len());
    for (n, (_, copy)) in &found {
        get(&path, &arena, *n, copy).await.unwrap();
    }
}

#[tokio::test]
async fn what_somebody_else_puts_in_the_place_of_a_segment_is_left_alone() {
    let (device, arena) = (Simulated::new(18, 64 << 20), arena());
    let (path, ..) = open(&device, Durability::None).await;
    let of_others = device.folder();
    of_others.create("segment-000001", SEGMENT).unwrap();
    of_others.create("segment-000002", PAGE as u64).unwrap();
    let mut held = BTreeMap::new();
    for n in 0..60 {
        make_ready(&path, &mut held).await.unwrap();
        held.insert(n, put(&path, n).await.unwrap());
    }
    let slots: BTreeSet<u32> = held.values().map(|copy| copy.segment().slot).collect();
    assert!(slots.is_disjoint(&[1, 2].into()) && slots.len() > 2, "{slots:?}");
    for (n, copy) in &held {
        get(&path, &arena, *n, copy).await.unwrap();
    }
    assert_eq!(of_others.open("segment-000002").unwrap().len(), PAGE as u64);
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_fails_or_stalls_is_fenced_and_asked_no_more() {
    let device = Simulated::new(8, 64 << 20);
    let (path, ..) = open(&device, Durability::None).await;
    path.prepare().await.unwrap();
    let copy = put(&path, 1).await.unwrap();
    device.fail(true);
    assert!(matches!(put(&path, 2).await.unwrap_err(), SsdError::Io(_)));
    device.fail(false);
    assert!(matches!(put(&path, 2).await.unwrap_err(), SsdError::Fenced(_)));
    let arena = arena();
    assert!(matches!(get(&path, &arena, 1, &copy).await.unwrap_err(), SsdError::Fenced(_)));
    assert!(matches!(path.remove(vec![generation(1)]).await, Err(SsdError::Fenced(_))));

    let (path, found, _) = open(&device, Durability::None).await;
    device.stall();
    let error = get(&path, &arena, 1, &found[&1].1).await.unwrap_err();
    assert!(matches!(error, SsdError::Io(_)), "{error}");
    assert!(matches!(path.health(), Health::Fenced(why) if why.contains("deadline")));
}

#[tokio::test]
async fn a_disk_that_is_full_below_the_capacity_is_written_in_turns_and_leaves_nothing_behind() {
    // Room for a removal log, without which nothing is written, and two files.
    let room = 2 * SEGMENT + 2 * 129 * PAGE as u64;
    let (device, arena) = (Simulated::new(9, room), arena());
    let (path, ..) = open(&device, Durability::None).await;
    assert!(path.prepare().await.unwrap());
    let first = put(&path, 1).await.unwrap();
    assert!(path.prepare().await.unwrap());
    let mut refused = 2;
    while put(&path, refused).await.is_ok() {
        refused += 1;
    }
    assert!(!path.prepare().await.unwrap(), "no room for a third file");
    assert!(matches!(put(&path, refused).await.unwrap_err(), SsdError::Busy));
    assert!(path.is_healthy());
    assert_eq!(device.used(), room);
    get(&path, &arena, 1, &first).await.unwrap();
    drop((first, path.oldest().unwrap()));
    assert!(path.prepare().await.unwrap(), "the oldest file is written anew");
    put(&path, refused).await.unwrap();
    assert_eq!(device.used(), room);
}

#[tokio::test]
async fn a_disk_without_room_for_a_removal_log_takes_no_records() {
    let device = Simulated::new(24, 200 * PAGE as u64);
    let (path, ..) = open(&device, Durability::None).await;
    assert!(!path.prepare().await.unwrap());
    assert!(matches!(put(&path, 1).await.unwrap_err(), SsdError::Busy));
    assert!(path.is_healthy() && path.disk_is_full());
    assert_eq!(device.used(), 0, "and nothing is left behind");
}

#[tokio::test]
async fn forgotten_removals_leave_the_log_when_their_segments_are_overwritten() {
    let device = Simulated::new(10, 64 << 20);
    let (path, ..) = open(&device, Durability::None).await;
    let mut held = BTreeMap::new();
    for n in 0..6000 {
        make_ready(&path, &mut held).await.unwrap();
        held.insert(n, put(&path, n).await.unwrap());
        path.remove(vec![generation(n)]).await.unwrap();
        held.remove(&n);
    }
    assert!(path.removals.live().await < 600, "{}", path.removals.live().await);
    assert!(device.used() <= settings(Durability::None).capacity);
    let (_, found, _) = open(&device, Durability::None).await;
    assert!(found.is_empty());
}

#[tokio::test]
async fn no_damage_to_one_file_of_the_removal_log_brings_anything_back() {
    type Damage = fn(&Simulated, &str);
    let damages: [(&str, Damage); 6] = [
        ("a bit of the first page", |device, log| device.flip(log, 30 * 8)),
        ("a bit of the last page", |device, log| device.flip(log, (2 * PAGE + 30) * 8)),
        ("a page of zeroes", |device, log| device.poke(log, 0, &[0; PAGE])),
        ("cut off", |device, log| device.truncate(log, PAGE)),
        ("empty", |device, log| device.truncate(log, 0)),
        ("gone", Simulated::lose),
    ];
    for (damage, of) in damages {
        for file in 0..2 {
            let device = Simulated::new(13, 64 << 20);
            let (path, ..) = open(&device, Durability::None).await;
            path.prepare().await.unwrap();
            for n in 1..=4 {
                put(&path, n).await.unwrap();
            }
            for n in 1..=3 {
                path.remove(vec![generation(n)]).await.unwrap();
            }
            drop(path);
            let logs = logs(&device);
            assert_eq!(logs.len(), 2, "{logs:?}");
            of(&device, &logs[file]);
            // And the next start, which begins a log of its own, knows it too.
            for round in 0..2 {
                let (path, found, _) = open(&device, Durability::None).await;
                let found: Vec<u64> = found.into_keys().collect();
                assert_eq!(found, [4], "{damage} in {}, round {round}", logs[file]);
                path.prepare().await.unwrap();
            }
        }
    }
}

/// A part was removed while it waited to be written, and was written all the same, to a segment that was begun
/// later: the removal has to be remembered until that one goes.
#[tokio::test]
async fn a_removal_outlives_the_segments_of_its_time_if_the_copy_was_not_written_yet() {
    let device = Simulated::new(16, 64 << 20);
    let (path, ..) = open(&device, Durability::None).await;
    let mut held = BTreeMap::new();
    path.prepare().await.unwrap();
    held.insert(100, put(&path, 100).await.unwrap());
    path.remove_unwritten(vec![generation(1)]).await.unwrap();
    let mut n = 101;
    while path.sealed_up_to(u64::MAX) < 3 {
        make_ready(&path, &mut held).await.unwrap();
        held.insert(n, put(&path, n).await.unwrap());
        n += 1;
    }
    make_ready(&path, &mut held).await.unwrap();
    put(&path, 1).await.unwrap();
    // All segments of before are written anew.
    while let Some(oldest) = path.oldest() {
        path.disown(&oldest, &[]).await.unwrap();
        held.retain(|_, copy| !Arc::ptr_eq(copy.segment(), &oldest));
    }
    for _ in 0..4 {
        make_ready(&path, &mut held).await.unwrap();
        while let Ok(copy) = put(&path, n).await {
            held.insert(n, copy);
            n += 1;
        }
    }
    drop((path, held));
    for round in 0..3 {
        let (path, found, _) = open(&device, Durability::None).await;
        assert!(!found.contains_key(&1), "round {round}");
        path.prepare().await.unwrap(); // Begins a log, which forgets what is over.
    }
}

#[tokio::test]
async fn a_log_that_is_damaged_in_both_files_gives_the_path_up() {
    type Damage = fn(&Simulated, &str);
    let damages: [(&str, Damage); 5] = [
        ("a bit of a page in the midst", |device, log| device.flip(log, (PAGE + 30) * 8)),
        ("cut within what it said", |device, log| device.truncate(log, 2 * PAGE)),
        ("cut behind what it said", |device, log| device.truncate(log, 9 * PAGE)),
        ("empty", |device, log| device.truncate(log, 0)),
        ("gone", Simulated::lose),
    ];
    for (damage, of) in damages {
        let device = Simulated::new(14, 64 << 20);
        let (path, ..) = open(&device, Durability::None).await;
        path.prepare().await.unwrap();
        for n in 1..=4 {
            put(&path, n).await.unwrap();
        }
        for n in 1..=3 {
            path.remove(vec![generation(n)]).await.unwrap();
        }
        drop(path);
        for log in logs(&device) {
            of(&device, &log);
        }
        for round in 0..2 {
            let (path, found, _) = open(&device, Durability::None).await;
            assert!(found.is_empty(), "{damage}, round {round}");
            path.prepare().await.unwrap();
        }
    }
}

/// The files of the removal logs.
fn logs(device: &Simulated) -> Vec<String> {
    device.names().into_iter().filter(|name| name.starts_with("removals-")).collect()
}

#[tokio::test]
async fn what_somebody_puts_in_the_place_of_a_log_is_left_alone() {
    let device = Simulated::new(26, 64 << 20);
    device.folder().create("removals-18446744073709551615", PAGE as u64).unwrap();
    let (path, ..) = open(&device, Durability::None).await;
    for name in ["removals-000001", "removals-000002-twin"] {
        device.folder().create(name, PAGE as u64).unwrap();
    }
    path.prepare().await.unwrap();
    for n in 1..=2 {
        put(&path, n).await.unwrap();
    }
    path.remove(vec![generation(1)]).await.unwrap();
    let all = logs(&device);
    for name in ["removals-000001", "removals-000002-twin", "removals-18446744073709551615"] {
        assert!(all.iter().any(|there| there == name), "{all:?}");
    }
    drop(path);
    let (_, found, _) = open(&device, Durability::None).await;
    assert_eq!(found.into_keys().collect::<Vec<_>>(), [2]);
}

#[tokio::test]
async fn a_log_that_somebody_takes_away_or_cuts_while_it_is_used_is_written_anew() {
    type Damage = fn(&Simulated, &str);
    let damages: [(&str, Damage); 2] =
        [("gone", Simulated::lose), ("cut", |device, log| device.truncate(log, PAGE))];
    for (damage, of) in damages {
        let device = Simulated::new(22, 64 << 20);
        let (path, ..) = open(&device, Durability::None).await;
        path.prepare().await.unwrap();
        for n in 1..=3 {
            put(&path, n).await.unwrap();
        }
        path.remove(vec![generation(1)]).await.unwrap();
        for log in logs(&device) {
            of(&device, &log);
        }
        path.remove(vec![generation(2)]).await.unwrap();
        drop(path);
        let (_, found, _) = open(&device, Durability::None).await;
        assert_eq!(found.into_keys().collect::<Vec<_>>(), [3], "{damage}");
        assert_eq!(logs(&device).len(), 2, "{damage}");
    }
}

#[tokio::test]
async fn nothing_more_is_written_to_a_segment_that_somebody_has_taken_away() {
    let (device, arena) = (Simulated::new(25, 64 << 20), arena());
    let (path, ..) = open(&device, Durability::None).await;
    path.prepare().await.unwrap();
    let first = put(&path, 1).await.unwrap();
    path.prepare().await.unwrap(); // Another one is ready.
    for name in device.names().iter().filter(|name| name.starts_with("segment-")) {
        device.lose(name);
    }
    for n in 2..6 {
        path.prepare().await.unwrap();
        while let Err(error) = put(&path, n).await {
            assert!(matches!(error, SsdError::Busy), "{error}");
            path.prepare().await.unwrap();
        }
    }
    drop((path, first));
    let (path, found, _) = open(&device, Durability::None).await;
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), [2, 3, 4, 5]);
    for (n, (_, copy)) in &found {
        get(&path, &arena, *n, copy).await.unwrap();
    }
}

#[tokio::test]
async fn a_segment_that_somebody_cuts_loses_what_was_cut_off_and_nothing_else() {
    let (device, arena) = (Simulated::new(23, 64 << 20), arena());
    let (path, ..) = open(&device, Durability::None).await;
    let mut held = BTreeMap::new();
    for n in 0..60 {
        make_ready(&path, &mut held).await.unwrap();
        held.insert(n, put(&path, n).await.unwrap());
    }
    let cut = usize::try_from(SEGMENT).unwrap() / 2;
    device.truncate("segment-000001", cut);
    let mut lost = 0;
    for (n, copy) in &held {
        let ends = copy.offset() + copy.footprint_bytes();
        let is_cut_off = copy.segment().slot == 1 && ends > cut as u64;
        match get(&path, &arena, *n, copy).await {
            Ok(()) => assert!(!is_cut_off, "{n}"),
            Err(error) => assert!(is_cut_off && error.is_of_the_copy(), "{n}: {error}"),
        }
        lost += usize::from(is_cut_off);
    }
    assert!(lost > 0 && path.is_healthy());
    // Its place is used again, by a whole file.
    for n in 60..200 {
        make_ready(&path, &mut held).await.unwrap();
        held.insert(n, put(&path, n).await.unwrap());
    }
    assert_eq!(device.bytes("segment-000001").len() as u64, SEGMENT);
    for (n, copy) in held.iter().filter(|(n, _)| **n >= 60) {
        get(&path, &arena, *n, copy).await.unwrap();
    }
}

#[tokio::test]
async fn a_part_that_no_segment_can_hold_keeps_no_other_one_out() {
    let device = Simulated::new(15, 64 << 20);
    let (path, ..) = open(&device, Durability::None).await;
    path.prepare().await.unwrap();
    put(&path, 1).await.unwrap();
    let pages = usize::try_from(SEGMENT).unwrap() / PAGE;
    // Header, footer and trailer take a page each, and the record's header another.
    for (n, len, fits) in [(2, pages, false), (3, pages - 3, false), (4, pages - 4, true)] {
        let (name, info, _) = part(n);
        let info = PartInfo { len: (len * PAGE) as u64, ..info };
        let bytes = AlignedBuffer::zeroed(len * PAGE).freeze();
        path.prepare().await.unwrap();
        match path.append_bytes(&name, &info, bytes).await {
            Ok(_) => assert!(fits, "{len} pages"),
            Err(error) => assert!(!fits && matches!(error, SsdError::TooLong), "{len}: {error}"),
        }
        path.prepare().await.unwrap();
        put(&path, 100 + n).await.unwrap();
    }
}

/// One life after the other, each ended by a crash at a random request; what each life acknowledged is
/// held against what the next one finds.
async fn crashes(seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let durability = if rng.random_bool(0.5) { Durability::None } else { Durability::Segment };
    let (device, arena) = (Simulated::new(seed, 64 << 20), arena());
    let mut next = 0;
    let mut removed = BTreeSet::new();
    // Acknowledged, and neither reclaimed nor removed.
    let mut held: BTreeMap<u64, SsdCopy> = BTreeMap::new();
    for life in 0..4 {
        let context = format!("seed {seed}, life {life}, {durability:?}");
        let crash = if rng.random_bool(0.5) { Crash::Process } else { Crash::Power };
        let (path, found, _) = open(&device, durability).await;
        for n in std::mem::take(&mut held).keys() {
            let (_, copy) = found.get(n).unwrap_or_else(|| panic!("{n} is lost: {context}"));
            get(&path, &arena, *n, copy).await.unwrap();
        }
        for (n, (_, copy)) in found {
            assert!(!removed.contains(&n), "{n} came back: {context}");
            match get(&path, &arena, n, &copy).await {
                Ok(()) => _ = held.insert(n, copy),
                // After a power loss a footer may name what never reached the disk.
                Err(error) => assert!(error.is_of_the_copy(), "{error}: {context}"),
            }
        }
        device.crash_after(rng.random_range(1..300));
        while !device.is_dead() {
            let step = async {
                make_ready(&path, &mut held).await?;
                match rng.random_range(0..10) {
                    0 if !held.is_empty() => {
                        let n = *held.keys().nth(rng.random_range(0..held.len())).unwrap();
                        held.remove(&n); // If it fails either is right.
                        let mut gone = vec![generation(n)];
                        if rng.random_bool(0.3) {
                            // With many others, so that the log takes several pages for them.
                            let incarnation = larder_proto::ids::Incarnation(77);
                            let other = |counter| Generation { incarnation, counter };
                            gone.extend((0..600).map(other));
                        }
                        path.remove(gone).await?;
                        removed.insert(n);
                    }
                    1 if !held.is_empty() => {
                        let n = *held.keys().nth(rng.random_range(0..held.len())).unwrap();
                        match path.carry(&part(n).0, &held[&n]).await {
                            Ok(copy) => _ = held.insert(n, copy),
                            Err(error) if error.is_of_the_copy() => _ = held.remove(&n),
                            Err(SsdError::Busy) => {}
                            Err(error) => return Err(error),
                        }
                    }
                    _ => {
                        next += 1;
                        match put(&path, next).await {
                            Ok(copy) => _ = held.insert(next, copy),
                            Err(SsdError::Busy) => {}
                            Err(error) => return Err(error),
                        }
                    }
                }
                Ok::<(), SsdError>(())
            };
            if let Err(error) = step.await {
                assert!(device.is_dead(), "{error}: {context}");
            }
        }
        let sealed: BTreeSet<u64> = path.sealed_sequences().into_iter().collect();
        held.retain(|_, copy| match crash {
            Crash::Process => true,
            Crash::Power => {
                durability == Durability::Segment && sealed.contains(&copy.segment().sequence)
            }
        });
        device.restart(crash);
    }
}

#[tokio::test]
async fn after_any_crash_what_was_promised_is_there_and_what_was_removed_is_not() {
    for seed in 0..50 {
        crashes(seed).await;
    }
}

/// Run by `make test-long`.
#[tokio::test]
#[ignore = "minutes"]
async fn after_a_thousand_crashes_too() {
    for seed in 1000..2000 {
        crashes(seed).await;
    }
}
