//! Keeping a path ready: the next segment prepared, the oldest reclaimed in time, and everything
//! withdrawn from a path that has failed.

use super::{Member, Tiering};
use crate::tiers::ssd::{FooterEntry, Segment, SsdCopy, SsdError, SsdPath};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// A reclaimed segment may carry on this share of its bytes, at most: room is made for sure.
const CARRIED_SHARE: u64 = 4;

/// How long a path that cannot be made ready is left alone.
const AGAIN: Duration = Duration::from_secs(1);

/// What becomes of a record of a segment that is reclaimed.
enum Fate {
    /// It lies in this segment now.
    Carried(Arc<Segment>),
    /// The catalog has no copy there any more.
    Gone,
    /// It is to be evicted.
    Cold,
}

/// Runs until `stop`.
pub(super) async fn run(tiering: Arc<Tiering>, member: Arc<Member>, stop: CancellationToken) {
    loop {
        let step = async {
            let Some(path) = member.path() else { return member.changed().await };
            match tiering.keep(&path).await {
                Ok(true) => {}
                // A disk that was full may have room again, and tells nobody.
                Ok(false) => _ = timeout(AGAIN, path.changed()).await,
                Err(_) => {
                    let _ = tiering.give_up(&member, &path);
                    path.changed().await;
                }
            }
        };
        if stop.run_until_cancelled(step).await.is_none() {
            break;
        }
    }
    if let Some(path) = member.path() {
        path.stop_waiting();
    }
}

impl Tiering {
    /// One step; whether another may be needed at once.
    pub(super) async fn keep(&self, path: &Arc<SsdPath>) -> Result<bool, SsdError> {
        let is_ready = path.prepare().await?;
        if is_ready && path.has_spare_slot() {
            return Ok(false);
        }
        // Segments are adopted newest first: until all are, the oldest one here is not the oldest.
        if *self.adopting.borrow() > 0 {
            return Ok(false);
        }
        let Some(oldest) = path.oldest() else { return Ok(false) };
        self.reclaim(path, oldest).await?;
        Ok(true)
    }

    /// Lets go of all that lies in a segment; its file comes back when its last reader is done.
    async fn reclaim(&self, path: &Arc<SsdPath>, segment: Arc<Segment>) -> Result<(), SsdError> {
        let records = match path.records(&segment).await {
            Ok(records) => records,
            Err(error) if error.is_of_the_copy() => {
                tracing::warn!(?segment, %error, "a footer is damaged: its segment is given up");
                path.disown(&segment, &[]).await?;
                self.withdraw_all(|copy| Arc::ptr_eq(copy.segment(), &segment));
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let mut budget = path.settings().segment_bytes / CARRIED_SHARE;
        let (mut cold, mut carried_to) = (Vec::new(), Vec::<Arc<Segment>>::new());
        for record in records {
            let copy = SsdCopy::of(Arc::clone(&segment), &record);
            match self.carry(path, &record, &copy, &mut budget).await? {
                Fate::Carried(to) if carried_to.iter().all(|known| !Arc::ptr_eq(known, &to)) => {
                    carried_to.push(to);
                }
                Fate::Carried(_) | Fate::Gone => {}
                Fate::Cold => cold.push((record.name, copy)),
            }
        }
        path.disown(&segment, &carried_to).await?;
        for (name, copy) in &cold {
            self.catalog.evict_from_ssd(name, copy);
        }
        // Descendants that went with them lie in other segments.
        let _ = self.forget().await; // Said in the log; nobody was told that they are gone for good.
        Ok(())
    }

    /// Carries a record on, if it is hot.
    async fn carry(
        &self,
        path: &Arc<SsdPath>,
        record: &FooterEntry,
        copy: &SsdCopy,
        budget: &mut u64,
    ) -> Result<Fate, SsdError> {
        let name = &record.name;
        let Some(is_hot) = self.catalog.ssd_use(name, copy) else { return Ok(Fate::Gone) };
        let bytes = copy.footprint_bytes();
        if !is_hot || bytes > *budget {
            return Ok(Fate::Cold);
        }
        match path.carry(name, copy).await {
            Ok(carried) => {
                *budget -= bytes;
                let to = Arc::clone(carried.segment());
                self.catalog.moved_on_ssd(name, copy, carried);
                Ok(Fate::Carried(to))
            }
            Err(SsdError::Busy) => Ok(Fate::Cold),
            Err(error) if error.is_of_the_copy() => {
                self.withdraw(path, name, copy, &error).await;
                Ok(Fate::Gone)
            }
            Err(error) => Err(error),
        }
    }

    /// A path is fenced: nothing of it is offered to anybody any more. How many copies were withdrawn, and
    /// whether that is remembered over a restart.
    pub(super) fn give_up(
        &self,
        member: &Member,
        path: &Arc<SsdPath>,
    ) -> (u64, std::io::Result<()>) {
        let remembered = self.note_failed(member, path.uses());
        let is_of = |copy: &SsdCopy| copy.segment().is_of(path);
        let withdrawn = self.withdraw_all(is_of);
        self.catalog.drop_left_behind(is_of);
        if withdrawn > 0 {
            let path = path.settings().name.display();
            tracing::warn!(%path, withdrawn, "parts withdrawn from a fenced path");
        }
        (withdrawn, remembered)
    }

    pub(super) fn withdraw_all(&self, is_of: impl Fn(&SsdCopy) -> bool) -> u64 {
        let withdrawn = self.catalog.withdraw_from_ssd(is_of);
        self.counters.withdrawn.fetch_add(withdrawn, Ordering::Relaxed);
        withdrawn
    }
}
