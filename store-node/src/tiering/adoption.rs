//! Taking in what an earlier life left, while the node serves.

use super::Tiering;
use crate::{catalog::Producer, tiers::ssd::Adoption};
use std::{collections::HashSet, sync::Arc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Segments between two lines of progress.
const PROGRESS: usize = 64;

/// Runs until all is adopted, the path fails, or `stop`.
pub(super) async fn run(
    tiering: Arc<Tiering>,
    path: usize,
    mut adoption: Adoption,
    stop: CancellationToken,
) {
    let (began, total) = (Instant::now(), adoption.left());
    let mut producers = Producers::default();
    while let Some(Some(records)) = stop.run_until_cancelled(adoption.next()).await {
        let records = match records {
            Ok(records) => records,
            Err(error) => {
                tracing::error!(%error, "adoption ended: the path is fenced");
                break;
            }
        };
        for (entry, copy) in records {
            let producer = producers.of(entry.producer.as_str(), entry.producer_incarnation);
            tiering.catalog.adopt(&entry, &producer, copy);
        }
        tiering.adopted.lock()[path] = adoption.counts();
        let done = total - adoption.left();
        if done.is_multiple_of(PROGRESS) {
            tracing::info!(done, total, "adopting segments");
        }
        tokio::task::yield_now().await;
    }
    let counts = adoption.counts();
    if total > 0 {
        tracing::info!(?counts, took = ?began.elapsed(), "segments adopted");
    }
    if !adoption.path().is_healthy() {
        let _ = tiering.give_up(adoption.path()); // What was taken in after it was fenced.
    }
    drop(adoption);
    tiering.adopting.send_modify(|paths| *paths -= 1);
    tiering.members.iter().filter_map(|member| member.path()).for_each(|path| path.nudge());
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
