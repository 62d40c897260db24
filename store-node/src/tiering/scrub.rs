//! Looking for damage before anybody reads it: every record that is there when the scrub comes by, header and sums.
//!
//! What is damaged is withdrawn for good, so that a recompute can replace it. Records that nobody could get
//! any more (removed, or replaced) are passed over. No segment is kept longer than one of its records is
//! read, and bytes go through memory of the scrub, so neither writes nor the arena wait for it.

use super::{Member, Tiering};
use crate::tiers::ssd::{FooterEntry, Health, Pace, Segment, SsdCopy, SsdError, SsdPath};
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Before each round in the background, and between two looks at a path that is fenced.
const BETWEEN_ROUNDS: Duration = Duration::from_secs(60);

/// How far a scrub has come, and what it found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScrubCounts {
    /// Segments that were gone through.
    pub segments: u64,
    /// Segments that there are to go through.
    pub segments_total: u64,
    /// Records that were verified.
    pub records: u64,
    /// Bytes of these on the disk, headers included.
    pub bytes: u64,
    /// Records that were damaged. They are withdrawn.
    pub damaged_records: u64,
    /// Segments whose footer was damaged. What they held is withdrawn; a restart finds what is whole in them.
    pub damaged_segments: u64,
}

impl ScrubCounts {
    /// Whether anything was damaged.
    pub fn found_damage(&self) -> bool {
        self.damaged_records + self.damaged_segments > 0
    }
}

/// Why a scrub did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum ScrubError {
    /// Another one, on demand, has not ended.
    #[error("{} is being scrubbed already", .0.display())]
    InProgress(PathBuf),
    /// The path does not take part.
    #[error("the path is fenced: {0}")]
    Fenced(Arc<str>),
    /// The disk failed.
    #[error(transparent)]
    Ssd(#[from] SsdError),
}

/// Scrubs a path over and over, slowly, until `stop`. Waits until all paths are adopted, and while this one is fenced.
pub(super) async fn run(tiering: Arc<Tiering>, member: Arc<Member>, stop: CancellationToken) {
    let rounds = async {
        // A restart reads every footer already, and is to be over soon.
        tiering.adopted().await;
        loop {
            sleep(BETWEEN_ROUNDS).await;
            let mut pace = Pace::new(Some(tiering.settings.scrub_rate));
            let path = member.path().filter(|path| path.is_healthy());
            if let Some(path) = path {
                let ended = tiering.scrub_path(&path, &mut pace, |_| ()).await;
                let name = path.settings().name.display();
                match ended {
                    Ok(counts) if counts.found_damage() => {
                        tracing::warn!(path = %name, ?counts, "a scrub found damage, and withdrew it");
                    }
                    Ok(counts) => tracing::debug!(path = %name, ?counts, "scrubbed"),
                    Err(error) => tracing::debug!(path = %name, %error, "a scrub ended early"),
                }
            }
        }
    };
    stop.run_until_cancelled(rounds).await;
}

impl Tiering {
    /// Scrubs a path on demand, telling `progress` after every record. Safe to cancel.
    ///
    /// # Errors
    /// It takes no part, or its disk failed meanwhile.
    pub async fn scrub(
        &self,
        member: &Member,
        bytes_per_second: Option<u64>,
        progress: impl FnMut(&ScrubCounts),
    ) -> Result<ScrubCounts, ScrubError> {
        let name = &member.settings().name;
        let Ok(_only) = member.scrub.try_lock() else {
            return Err(ScrubError::InProgress(name.clone()));
        };
        if let Health::Fenced(why) = member.health() {
            return Err(ScrubError::Fenced(why));
        }
        let path = member.path().ok_or_else(|| ScrubError::Fenced("taken out".into()))?;
        Ok(self.scrub_path(&path, &mut Pace::new(bytes_per_second), progress).await?)
    }

    pub(super) async fn scrub_path(
        &self,
        path: &Arc<SsdPath>,
        pace: &mut Pace,
        mut progress: impl FnMut(&ScrubCounts),
    ) -> Result<ScrubCounts, SsdError> {
        // Those that are begun meanwhile are for the next round, so that this one ends.
        let (newest, mut open) = (path.last_sequence(), path.open_segment());
        let segments_total = path.sealed_up_to(newest) as u64 + u64::from(open.is_some());
        let mut counts = ScrubCounts { segments_total, ..ScrubCounts::default() };
        progress(&counts);
        let mut last = 0;
        loop {
            while let Some((sequence, segment)) = path.sealed_after(last)
                && sequence <= newest
            {
                last = sequence;
                self.scrub_sealed(path, &segment, pace, &mut counts, &mut progress).await?;
                counts.segments += 1;
                progress(&counts);
            }
            let Some(open) = open.take().filter(|open| open.sequence() > last) else { break };
            let records = open.entries();
            if records.is_empty() {
                continue; // Sealed just now.
            }
            self.scrub_records(path, (&open, records), pace, &mut counts, &mut progress).await?;
            counts.segments += 1;
            progress(&counts);
        }
        path.must_take_part()?; // One that is fenced lists no segments.
        Ok(counts)
    }

    async fn scrub_sealed(
        &self,
        path: &Arc<SsdPath>,
        segment: &Arc<Segment>,
        pace: &mut Pace,
        counts: &mut ScrubCounts,
        progress: &mut impl FnMut(&ScrubCounts),
    ) -> Result<(), SsdError> {
        match path.records(segment).await {
            Ok(records) => {
                self.scrub_records(path, (segment, records), pace, counts, progress).await?;
            }
            Err(error) if error.is_of_the_copy() => {
                // Once: when all is withdrawn there is nothing left that is damaged.
                if self.withdraw_all(|copy| Arc::ptr_eq(copy.segment(), segment)) > 0 {
                    tracing::warn!(?segment, %error, "a footer is damaged: its segment is withdrawn");
                    counts.damaged_segments += 1;
                }
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn scrub_records(
        &self,
        path: &Arc<SsdPath>,
        (segment, records): (&Arc<Segment>, Vec<FooterEntry>),
        pace: &mut Pace,
        counts: &mut ScrubCounts,
        progress: &mut impl FnMut(&ScrubCounts),
    ) -> Result<(), SsdError> {
        for record in records {
            let copy = SsdCopy::of(Arc::clone(segment), &record);
            if self.catalog.ssd_use(&record.name, &copy).is_none() {
                continue;
            }
            match path.verify(&record.name, &copy, pace).await {
                Ok(()) => {}
                Err(error) if error.is_of_the_copy() => {
                    counts.damaged_records += 1;
                    self.withdraw(path, &record.name, &copy, &error).await;
                }
                Err(error) => return Err(error),
            }
            counts.records += 1;
            counts.bytes += copy.footprint_bytes();
            progress(counts);
            // A disk in memory never waits; others on this thread want to run too.
            tokio::task::yield_now().await;
        }
        Ok(())
    }
}
