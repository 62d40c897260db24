//! Scrubs, fences and paths that are taken in again.

use super::*;
use crate::tiers::ssd::Health;
use std::task::Poll;

const DISK: &str = "disk 0";

impl Life {
    async fn scrub(&self) -> ScrubCounts {
        self.tiering.scrub(&self.tiering.members()[0], None, |_| ()).await.unwrap()
    }

    fn health(&self) -> Health {
        self.tiering.members()[0].health()
    }

    /// Takes parts out of the arena; what came in their place is written too, so that it can go again.
    async fn leave_on_ssd(&self, numbers: &[u64]) {
        for n in numbers {
            self.push_out(*n);
            self.settled().await;
            self.keep().await;
        }
    }

    /// Puts parts until this many segments are sealed; the numbers of the parts.
    async fn fill_segments(&self, first: u64, segments: usize) -> Vec<u64> {
        let mut numbers = Vec::new();
        while self.paths()[0].sealed_up_to(u64::MAX) < segments {
            let n = first + numbers.len() as u64;
            self.put_on_ssd(n, None).await;
            numbers.push(n);
        }
        numbers
    }
}

fn everything() -> Options {
    Options { admit: Admit::All, ..Options::default() }
}

#[tokio::test]
async fn a_scrub_withdraws_what_is_damaged_for_good_and_nothing_else() {
    let disk = disk(21);
    let life = Life::begin(&[&disk], everything()).await;
    let numbers = life.fill_segments(1, 2).await;
    life.leave_on_ssd(&numbers).await;
    let clean = life.scrub().await;
    assert!(clean.segments == clean.segments_total && clean.segments >= 2, "{clean:?}");
    assert!(clean.records > 20 && clean.bytes >= clean.records * PART as u64, "{clean:?}");
    assert!(!clean.found_damage());

    // The header of the first record, and the last byte of the second.
    let (damaged, second) = ([1, 2], 1 + 1 + PART.div_ceil(PAGE));
    disk.flip("segment-000000", (PAGE + 9) * 8);
    disk.flip("segment-000000", ((second + 1) * PAGE + PART - 1) * 8);
    let counts = life.scrub().await;
    assert_eq!((counts.damaged_records, counts.damaged_segments), (2, 0), "{counts:?}");
    assert_eq!(counts.records, clean.records);
    for n in &numbers {
        assert_eq!(life.tiers(*n).is_empty(), damaged.contains(n), "{n}");
    }
    let again = life.scrub().await;
    assert!(!again.found_damage(), "what is withdrawn is not found again: {again:?}");
    assert_eq!(again.records, clean.records - 2);
    assert!(life.put(1, None) && life.get(1).await, "a recompute can replace it");
    life.settled().await;
    drop(life);
    let life = Life::begin(&[&disk], Options { life: 2, ..everything() }).await;
    assert!(life.tiers(2).is_empty(), "withdrawn for good");
    assert!(life.get(1).await, "the new one");
    assert_eq!(life.scrub().await.damaged_records, 0);
}

// It said that all was whole, and had looked at nothing.
#[tokio::test]
async fn a_scrub_goes_through_what_is_not_sealed_yet() {
    let disk = disk(25);
    let life = Life::begin(&[&disk], everything()).await;
    let numbers: Vec<u64> = (1..=3).collect();
    for n in &numbers {
        assert!(life.put(*n, None));
    }
    life.settled().await;
    let clean = life.scrub().await;
    assert_eq!((clean.segments, clean.segments_total, clean.records), (1, 1, 3), "{clean:?}");
    assert!(!clean.found_damage());
    disk.flip("segment-000000", (PAGE + 9) * 8);
    let counts = life.scrub().await;
    assert_eq!((counts.damaged_records, counts.damaged_segments), (1, 0), "{counts:?}");
    let on_ssd = |n| life.tiers(n).has(larder_proto::Tier::Ssd);
    assert!(!on_ssd(1) && on_ssd(2) && on_ssd(3));
}

#[tokio::test]
async fn a_damaged_footer_costs_its_segment_until_the_restart() {
    let disk = disk(22);
    let life = Life::begin(&[&disk], everything()).await;
    let numbers = life.fill_segments(1, 2).await;
    life.leave_on_ssd(&numbers).await;
    let last_page = usize::try_from(SEGMENT).unwrap() - PAGE;
    disk.flip("segment-000000", (last_page + 3) * 8);
    let counts = life.scrub().await;
    assert_eq!((counts.damaged_records, counts.damaged_segments), (0, 1), "{counts:?}");
    assert!(!life.get(1).await);
    assert!(!life.scrub().await.found_damage());
    drop(life);
    let life = Life::begin(&[&disk], Options { life: 2, ..everything() }).await;
    assert!(life.get(1).await, "its records prove themselves");
}

#[tokio::test(start_paused = true)]
async fn a_scrub_keeps_to_its_rate() {
    let disk = disk(23);
    let life = Life::begin(&[&disk], everything()).await;
    life.fill_segments(1, 3).await;
    let began = Instant::now();
    let member = &life.tiering.members()[0];
    let counts = life.tiering.scrub(member, Some(64 << 10), |_| ()).await.unwrap();
    let took = began.elapsed().as_secs_f64();
    let due = counts.bytes as f64 / f64::from(64 << 10);
    // The last piece is not waited for; timers are exact to a millisecond.
    assert!(took > 0.9 * due - 0.5 && took < 1.1 * due + 0.5, "{took} s, {due} s are due");
    assert_eq!(member.counters().scrubbed_records.load(Ordering::Relaxed), counts.records);
}

#[tokio::test(start_paused = true)]
async fn a_scrub_in_the_background_goes_round_and_waits_while_the_path_is_fenced() {
    let disk = disk(24);
    let life = Life::begin(&[&disk], everything()).await;
    let numbers = life.fill_segments(1, 2).await;
    life.leave_on_ssd(&numbers).await;
    let member = Arc::clone(&life.tiering.members()[0]);
    let scrubbed = || member.counters().scrubbed_records.load(Ordering::Relaxed);
    let mut tasks = JoinSet::new();
    let stop = CancellationToken::new();
    tasks.spawn(scrub::run(Arc::clone(&life.tiering), Arc::clone(&member), stop.clone()));
    // Time is simulated: it moves on when everybody waits.
    let until = async |wanted: &dyn Fn() -> bool| {
        for _ in 0..1000 {
            if wanted() {
                return;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        panic!("not within the time");
    };
    until(&|| scrubbed() > 0).await;
    let first = scrubbed();
    disk.flip("segment-000000", (2 * PAGE + 100) * 8);
    until(&|| life.tiers(1).is_empty()).await;
    assert_eq!(member.counters().damaged_records.load(Ordering::Relaxed), 1);
    assert!(first >= 20);
    life.tiering.fence(Path::new(DISK), "maintenance").unwrap();
    let before = scrubbed();
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(scrubbed(), before);
    life.tiering.readmit(Path::new(DISK)).await.unwrap();
    life.keep().await;
    life.fill_segments(1000, 1).await;
    until(&|| scrubbed() > before).await;
    stop.cancel();
    assert!(tasks.join_next().await.unwrap().is_ok());
}

#[tokio::test]
async fn a_fence_withdraws_is_remembered_and_readmission_begins_empty() {
    let disk = disk(25);
    let life = Life::begin(&[&disk], everything()).await;
    let numbers = life.fill_segments(1, 2).await;
    life.leave_on_ssd(&numbers).await;
    let dir = Path::new(DISK);
    let error = life.tiering.readmit(dir).await.unwrap_err().to_string();
    assert_eq!(error, "disk 0 is not fenced");
    let error = life.tiering.fence(Path::new("disk 9"), "x").unwrap_err().to_string();
    assert_eq!(error, "disk 9 is no ssd path of this node; its paths: disk 0");

    let held = numbers.len() as u64 + life.others_on_ssd();
    assert_eq!(life.tiering.fence(dir, "smells").unwrap(), held);
    assert_eq!(life.tiering.fence(dir, "again").unwrap(), 0);
    assert_eq!(life.health(), Health::Fenced("smells".into()), "the first reason stays");
    let failed = life.uses(0);
    assert!(life.failures.lock().iter().all(|one| failed.contains(one)));
    assert!(failed.iter().all(|one| life.failures.lock().contains(one)));
    for n in &numbers {
        assert!(life.tiers(*n).is_empty() && !life.get(*n).await, "{n}");
    }
    life.settled().await;
    assert!(life.put(5000, None));
    life.settled().await;
    assert_eq!(life.tiers(5000), TierSet::of(Tier::Dram), "nothing is written there");
    assert!(matches!(
        life.tiering.scrub(&life.tiering.members()[0], None, |_| ()).await,
        Err(ScrubError::Fenced(why)) if &*why == "smells"
    ));

    life.tiering.readmit(dir).await.unwrap();
    assert_eq!(life.health(), Health::Healthy);
    assert!(!failed.contains(life.uses(0).last().unwrap()), "it is another use");
    assert_eq!(life.tiering.members()[0].used_bytes(), 0);
    life.put_on_ssd(6000, None).await;
    life.leave_on_ssd(&[6000]).await;
    assert!(life.get(6000).await);
    drop(life);
    let life = Life::begin(&[&disk], Options { life: 2, failed, ..everything() }).await;
    assert!(life.get(6000).await, "what came after it is kept");
    assert!(numbers.iter().all(|n| life.tiers(*n).is_empty()), "what was before it is not");
    assert_eq!(life.tiering.adoption().0.records, 1 + life.others_on_ssd());
}

#[tokio::test]
async fn a_disk_that_fails_at_the_start_keeps_no_other_out_and_may_come_back() {
    let (dead, disk) = (disk(31), disk(32));
    Life::fill_alone(1, &dead, 0..12).await;
    Life::fill_alone(2, &disk, 12..24).await;
    dead.fail(true);
    let life = Life::begin(&[&dead, &disk], Options { life: 3, ..everything() }).await;
    life.tiering.adopted().await;
    let member = &life.tiering.members()[0];
    assert!(matches!(member.health(), Health::Fenced(why) if !why.is_empty()));
    for n in 0..24 {
        assert_eq!(life.tiers(n).is_empty(), n < 12, "{n}");
    }
    life.put_on_ssd(50, None).await;
    let dir = Path::new(DISK);
    life.tiering.readmit(dir).await.unwrap_err();
    dead.fail(false);
    life.tiering.readmit(dir).await.unwrap();
    assert_eq!(member.health(), Health::Healthy);
    for n in 0..12 {
        assert!(!life.get(n).await, "{n}");
    }
}

impl Life {
    /// Parts that only took room, and are on an ssd.
    fn others_on_ssd(&self) -> u64 {
        (1_000_000..1_001_000).filter(|n| self.tiers(*n).has(Tier::Ssd)).count() as u64
    }
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_still_owes_answers_is_not_taken_in_until_it_has_given_them() {
    let disk = disk(26);
    let life = Life::begin(&[&disk], everything()).await;
    life.put_on_ssd(1, None).await;
    disk.stall();
    assert!(life.put(2, None));
    life.settled().await; // Its deadline passes, and the path is fenced.
    life.keep().await;
    let dir = Path::new(DISK);
    let late = life.tiering.readmit(dir).await.unwrap_err();
    assert!(matches!(late, PathError::NotEnded(_)), "{late}");
    assert!(matches!(life.health(), Health::Fenced(why) if why.contains("deadline")));
    disk.recover();
    life.tiering.readmit(dir).await.unwrap();
    life.put_on_ssd(3, None).await;
    life.leave_on_ssd(&[3]).await;
    assert!(life.get(3).await);
}

#[tokio::test]
async fn a_removal_while_the_path_is_out_holds_for_what_is_written_after_it_is_back() {
    let disk = disk(27);
    let life = Life::begin(&[&disk], Options::default()).await;
    let dir = Path::new(DISK);
    life.tiering.fence(dir, "test").unwrap();
    assert!(life.put(1, None) && life.put(2, None));
    assert!(life.get(1).await && life.get(2).await); // Offered; the writer has not run yet.
    assert_eq!(life.remove(Eviction { keys: vec![key(1)], ..all() }).await, 1);
    let member = &life.tiering.members()[0];
    let missed = || member.missed_count();
    assert_eq!(missed(), 1);
    // The writer may choose the path as soon as it is in.
    life.tiering.readmit(dir).await.unwrap();
    assert_eq!(missed(), 0);
    let generation = life.paths()[0].removed_generations().await;
    assert_eq!(generation, 1, "noted by the path before it takes part");
}

#[tokio::test]
async fn requests_of_all_kinds_go_on_while_a_path_is_fenced_and_taken_in_again() {
    let disk = disk(28);
    let life = Arc::new(Life::begin(&[&disk], everything()).await);
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let member = Arc::clone(&life.tiering.members()[0]);
    tasks.spawn(keeper::run(Arc::clone(&life.tiering), member, stop.clone()));
    let dir = Path::new(DISK);
    let mut rng = ChaCha8Rng::seed_from_u64(28);
    let mut kept = 0;
    for round in 0..40u64 {
        let base = 10_000 + round * 100;
        for n in 0..30 {
            let _ = life.put(base + n, None);
            // Bytes are compared: what a late request of the old use did would show.
            kept += u64::from(life.get(base + rng.random_range(0..=n)).await);
            if n == round % 30 {
                life.tiering.fence(dir, "test").unwrap();
                let back = life.tiering.readmit(dir);
                tokio::pin!(back);
                let mut others = base;
                let in_again = std::future::poll_fn(|context| {
                    let _ = life.put(others + 50, None);
                    others += 1;
                    match back.as_mut().poll(context) {
                        Poll::Ready(done) => Poll::Ready(done),
                        Poll::Pending => Poll::Pending,
                    }
                });
                in_again.await.unwrap();
            }
            tokio::task::yield_now().await;
        }
        life.settled().await;
        let scrubbed = life.scrub().await;
        assert!(!scrubbed.found_damage(), "round {round}: {scrubbed:?}");
    }
    assert!(kept > 100, "{kept}");
    assert_eq!(life.counter(|c| &c.failed_loads), 0, "no listed copy was unreadable");
    assert_eq!(life.catalog.audit().empty_parts, 0);
    stop.cancel();
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
}

#[tokio::test]
async fn a_removal_from_one_tier_leaves_the_copy_in_the_other() {
    let disk = disk(29);
    let life = Life::begin(&[&disk], Options::default()).await;
    for n in 1..=4 {
        life.put_on_ssd(n, None).await;
    }
    assert!(life.put(5, None), "in the arena alone");
    let of = |tier, keys: &[u64]| Eviction {
        tier: Some(tier),
        keys: keys.iter().map(|n| key(*n)).collect(),
        ..all()
    };
    let dry = Eviction { dry_run: true, ..of(Tier::Ssd, &[1, 2, 5]) };
    assert_eq!(life.remove(dry).await, 2);
    assert_eq!(life.remove(of(Tier::Ssd, &[1, 2, 5])).await, 2);
    assert_eq!(life.tiers(1), TierSet::of(Tier::Dram));
    assert_eq!(life.remove(of(Tier::Dram, &[3, 5])).await, 2);
    assert_eq!(life.tiers(3), TierSet::of(Tier::Ssd));
    assert!(life.tiers(5).is_empty());
    assert_eq!(life.catalog.audit().empty_parts, 0);
    for n in 1..=4 {
        assert!(life.get(n).await, "{n}");
    }
    drop(life);
    let life = Life::begin(&[&disk], Options { life: 2, ..Options::default() }).await;
    let back: Vec<u64> = (1..=5).filter(|n| !life.tiers(*n).is_empty()).collect();
    assert_eq!(back, [3, 4], "removals of ssd copies are durable");
}
