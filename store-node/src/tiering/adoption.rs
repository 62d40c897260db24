//! Taking in what an earlier life left, while the node serves.

use super::{Member, Tiering};
use crate::{
    catalog::Producer,
    metrics,
    tiers::ssd::{Adoption, FooterEntry, SsdCopy},
};
use std::{collections::HashSet, sync::Arc};
use tokio::{task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

/// Segments between two lines of progress.
const PROGRESS: usize = 64;
/// Records that a task takes in before it lets others run: less than a millisecond.
const AT_ONCE: usize = 256;

/// Runs until all is adopted, the path fails, or `stop`. A segment is read while the records of the one
/// before are taken in.
pub(super) async fn run(
    tiering: Arc<Tiering>,
    member: Arc<Member>,
    mut adoption: Adoption,
    stop: CancellationToken,
) {
    let (began, total) = (Instant::now(), adoption.left());
    let mut producers = Producers::default();
    let mut next = stop.run_until_cancelled(adoption.next()).await;
    while let Some(Some(records)) = next {
        let records = match records {
            Ok(records) => records,
            Err(error) => {
                tracing::error!(%error, "adoption ended: the path is fenced");
                break;
            }
        };
        let (counts, done) = (adoption.counts(), total - adoption.left());
        (_, next) = tokio::join!(
            take_in(&tiering, &mut producers, records),
            stop.run_until_cancelled(adoption.next())
        );
        member.adoption.lock().counts = counts;
        if done.is_multiple_of(PROGRESS) {
            tracing::info!(done, total, "adopting segments");
        }
    }
    let counts = adoption.counts();
    {
        let mut progress = member.adoption.lock();
        (progress.counts, progress.goes_on) = (counts, false);
    }
    if total > 0 {
        tracing::info!(?counts, took = ?began.elapsed(), "segments adopted");
    }
    if !adoption.path().is_healthy() {
        let _ = tiering.give_up(&member, adoption.path()); // What was taken in after it was fenced.
    }
    drop(adoption);
    tiering.adopting.send_modify(|paths| {
        *paths -= 1;
        metrics::adopting_paths(*paths);
    });
    tiering.members.iter().filter_map(|member| member.path()).for_each(|path| path.nudge());
}

/// Ends when all of a segment is known, so that of two copies the newer one is. A task of its own, so that
/// the next segment is decoded meanwhile. More tasks were measured: more CPU, and no sooner.
async fn take_in(
    tiering: &Arc<Tiering>,
    producers: &mut Producers,
    records: Vec<(FooterEntry, SsdCopy)>,
) {
    let of_entry = |(entry, copy): (FooterEntry, SsdCopy)| {
        let producer = producers.of(entry.producer.as_str(), entry.producer_incarnation);
        (entry, producer, copy)
    };
    let records: Vec<_> = records.into_iter().map(of_entry).collect();
    let catalog = Arc::clone(&tiering.catalog);
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        for (taken, (entry, producer, copy)) in (1usize..).zip(records) {
            catalog.adopt(&entry, &producer, copy);
            if taken.is_multiple_of(AT_ONCE) {
                tokio::task::yield_now().await;
            }
        }
    });
    tasks.join_all().await;
}

/// Each producer once, however many parts it has published.
#[derive(Default)]
struct Producers(HashSet<Arc<Producer>>);

impl Producers {
    fn of(&mut self, name: &str, incarnation: larder_proto::ids::Incarnation) -> Arc<Producer> {
        let producer = Producer { name: name.to_owned(), incarnation };
        if let Some(known) = self.0.get(&producer) {
            return Arc::clone(known);
        }
        let producer = Arc::new(producer);
        self.0.insert(Arc::clone(&producer));
        producer
    }
}
