//! Moving parts between the tiers of this node.
//!
//! ```text
//!            offer (admission)            append
//! catalog  --------------------> writer ---------> path      dram copy goes, by the policy, when it must
//!    ^                                              |
//!    |  load: verified, promoted on second touch    |  reclaim: hot records carried on, the rest evicted
//!    +----------------------------------------------+  with their descendants
//! ```
//!
//! The catalog decides what is offered and is told what became of it; a path knows places only. What is
//! offered beyond [`TieringSettings::queue_bytes`] is refused and counted, so neither puts nor evictions
//! ever wait for a disk.

mod adoption;
mod keeper;
mod paths;
mod scrub;
mod writer;

pub use paths::{AdoptionProgress, Member, PathError, PathHost};
pub use scrub::{ScrubCounts, ScrubError};

use crate::{
    catalog::{Admit, Catalog, OnSsd, PartRead},
    metrics,
    tiers::ssd::{Adoption, AdoptionCounts, SsdCopy, SsdError, SsdPath, UseId},
};
use larder_proto::{Generation, PartName};
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{sync::watch, time::timeout};
use tokio_util::sync::CancellationToken;
use writer::Writer;

/// When a part that was read from an ssd is kept in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promote {
    /// At once.
    Always,
    /// When it is read again: one read of a long prompt does not push out what is used every minute.
    SecondTouch,
    /// Never.
    Never,
}

/// How parts move.
#[derive(Debug, Clone, Copy)]
pub struct TieringSettings {
    /// What is written to ssds.
    pub admit: Admit,
    /// What comes back to the arena.
    pub promote: Promote,
    /// Bytes of parts that may wait to be written, at most. They stay in the arena meanwhile.
    pub queue_bytes: u64,
    /// Bytes a second that the scrubber in the background reads of each path; 0: there is none.
    pub scrub_rate: u64,
}

/// Counts since the start of the node.
#[derive(Debug, Default)]
#[expect(missing_docs, reason = "the names are those of the metrics they feed, documented there")]
pub struct TieringCounters {
    pub offered: AtomicU64,
    pub committed: AtomicU64,
    pub refused: AtomicU64,
    pub queue_full: AtomicU64,
    pub no_path: AtomicU64,
    pub too_long: AtomicU64,
    pub loaded: AtomicU64,
    pub failed_loads: AtomicU64,
    pub withdrawn: AtomicU64,
}

/// The ssd tier of a node.
pub struct Tiering {
    catalog: Arc<Catalog>,
    members: Vec<Arc<Member>>,
    settings: TieringSettings,
    writer: Writer,
    counters: TieringCounters,
    /// Paths whose adoption has not ended.
    adopting: watch::Sender<usize>,
    /// Held while what the catalog has left behind is noted.
    forgetting: tokio::sync::Mutex<()>,
    host: Arc<dyn PathHost>,
}

/// Copies that are being noted as removed. What is in here when it is dropped was not, and is for the next one.
struct LeftBehind<'a> {
    of: &'a Catalog,
    copies: Vec<OnSsd>,
}

impl Drop for LeftBehind<'_> {
    fn drop(&mut self) {
        self.of.leave_behind(std::mem::take(&mut self.copies));
    }
}

impl std::fmt::Debug for Tiering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tiering").field("paths", &self.members).finish_non_exhaustive()
    }
}

/// A part that could not be brought up: a miss.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// There is no room for it in the arena.
    #[error("no room in the arena for {0} bytes")]
    NoRoom(u64),
    /// The copy was not readable, and is withdrawn.
    #[error(transparent)]
    Ssd(#[from] SsdError),
}

/// Not all of what earlier lives left is known yet.
#[derive(Debug, Default, thiserror::Error)]
#[error(
    "the node was restarted, and {paths} of its ssd paths are still being read: {done} of {segments} segments"
)]
pub struct StillAdopting {
    paths: u64,
    done: u64,
    segments: u64,
}

impl Tiering {
    /// Joins a catalog and its paths. What is put and used from now on is offered; nothing is written
    /// before [`Self::run`]. `host` remembers a path that has failed, before anything is acknowledged that
    /// the path could not note. Paths that are out have no adoption.
    pub fn new(
        catalog: Arc<Catalog>,
        paths: Vec<impl Into<Member>>,
        settings: TieringSettings,
        host: Arc<dyn PathHost>,
    ) -> Arc<Self> {
        let members: Vec<Arc<Member>> =
            paths.into_iter().map(|path| Arc::new(path.into())).collect();
        let writer = Writer::new(settings.queue_bytes, members.len());
        let paths_in = members.iter().filter(|member| member.path().is_some()).count();
        let (adopting, _) = watch::channel(paths_in);
        metrics::adopting_paths(paths_in);
        let tiering = Arc::new(Self {
            catalog,
            members,
            settings,
            writer,
            counters: TieringCounters::default(),
            adopting,
            forgetting: tokio::sync::Mutex::default(),
            host,
        });
        let to = Arc::downgrade(&tiering);
        tiering.catalog.offer_to(settings.admit, move |offer| {
            to.upgrade().is_some_and(|tiering| tiering.writer.take(offer, &tiering.counters))
        });
        tiering
    }

    /// Adopts what earlier lives left (one adoption a path), writes what is offered, and keeps every path
    /// ready, until `stop`. What has begun to be written is ended.
    pub async fn run(self: Arc<Self>, adoptions: Vec<Adoption>, stop: CancellationToken) {
        let mut tasks = tokio::task::JoinSet::new();
        for adoption in adoptions {
            let of =
                |member: &&Arc<Member>| member.settings().name == adoption.path().settings().name;
            let Some(member) = self.members.iter().find(of).map(Arc::clone) else { continue };
            tasks.spawn(adoption::run(Arc::clone(&self), member, adoption, stop.clone()));
        }
        for member in &self.members {
            tasks.spawn(keeper::run(Arc::clone(&self), Arc::clone(member), stop.clone()));
            if self.settings.scrub_rate > 0 {
                tasks.spawn(scrub::run(Arc::clone(&self), Arc::clone(member), stop.clone()));
            }
        }
        tasks.spawn(writer::run(Arc::clone(&self), stop.clone()));
        while let Some(ended) = tasks.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "a task of the ssd tier panicked");
            }
        }
    }

    /// Counts since the start.
    pub fn counters(&self) -> &TieringCounters {
        &self.counters
    }

    /// What was adopted so far, and on how many paths it goes on.
    pub fn adoption(&self) -> (AdoptionCounts, usize) {
        let counts = self.members.iter().map(|member| member.adoption().counts);
        (counts.fold(AdoptionCounts::default(), AdoptionCounts::plus), *self.adopting.borrow())
    }

    /// Ends when every path is adopted. Safe to cancel.
    pub async fn adopted(&self) {
        let mut adopting = self.adopting.subscribe();
        let _ = adopting.wait_for(|paths| *paths == 0).await; // The sender is `self`.
    }

    /// As [`Self::adopted`], for whoever cannot wait for long.
    ///
    /// # Errors
    /// It goes on.
    pub async fn adopted_within(&self, limit: Duration) -> Result<(), StillAdopting> {
        timeout(limit, self.adopted()).await.map_err(|_| {
            let progress = self.members.iter().map(|member| member.adoption());
            progress.filter(|path| path.goes_on).fold(StillAdopting::default(), |sum, path| {
                StillAdopting {
                    paths: sum.paths + 1,
                    done: sum.done + path.counts.segments,
                    segments: sum.segments + path.segments,
                }
            })
        })
    }

    /// Bytes of parts that wait to be written.
    pub fn queued_bytes(&self) -> u64 {
        self.writer.queued_bytes()
    }

    /// Ends when all that was taken by then is written or refused. Safe to cancel.
    pub async fn settled(&self) {
        self.writer.settled().await;
    }

    /// Brings a part into the arena, verified, for reading. A copy that is bad is withdrawn before this
    /// returns, so a recompute can replace it.
    ///
    /// # Errors
    /// The part is not readable here: a miss.
    pub async fn load(&self, name: &PartName, copy: &SsdCopy) -> Result<PartRead, LoadError> {
        let room = self.catalog.make_room_for(copy.len()).ok_or(LoadError::NoRoom(copy.len()))?;
        let Some(path) = copy.segment().path() else {
            return Err(SsdError::Fenced("the tier has ended".into()).into());
        };
        match path.read(name, copy, room).await {
            Ok((bytes, info)) => {
                self.counters.loaded.fetch_add(1, Ordering::Relaxed);
                let read = self.catalog.brought_up(bytes, info);
                let promoted = match self.settings.promote {
                    Promote::Always => true,
                    Promote::SecondTouch => self.catalog.uses(name) > 1,
                    Promote::Never => false,
                };
                if promoted {
                    self.catalog.promote(name, &read);
                }
                Ok(read)
            }
            Err(error) => {
                self.counters.failed_loads.fetch_add(1, Ordering::Relaxed);
                self.withdraw(&path, name, copy, &error).await;
                Err(error.into())
            }
        }
    }

    /// Takes a copy back that could not be read.
    async fn withdraw(&self, path: &Arc<SsdPath>, name: &PartName, copy: &SsdCopy, why: &SsdError) {
        self.counters.withdrawn.fetch_add(1, Ordering::Relaxed);
        if !why.is_of_the_copy() {
            self.catalog.evict_from_ssd(name, copy);
            return;
        }
        let segment = copy.segment();
        tracing::warn!(part = %name, ?segment, error = %why, "a record on an ssd is withdrawn");
        self.catalog.withdraw_damaged_on_ssd(name, copy);
        // If it cannot be noted the path is fenced, and not adopted again.
        let _ = path.remove(vec![copy.generation()]).await;
    }

    /// Makes removals by command durable: no copy comes back that the catalog has left behind by now. A path
    /// that fails meanwhile is fenced, and what it holds is never adopted again. Safe to cancel: the next call
    /// notes what this one did not, and waits until its requests have ended.
    ///
    /// # Errors
    /// A path could not note it, and the node cannot remember that: a restart would bring the copies back.
    pub async fn forget(&self) -> io::Result<()> {
        // One at a time: nothing is acknowledged while what was taken for another one is on its way.
        let _alone = self.forgetting.lock().await;
        // Earlier ones that nobody could remember: their copies are named by nobody any more.
        let earlier = self.members.iter().map(|member| self.remember_failure(member));
        let mut all = earlier.fold(Ok(()), Result::and);
        let mut gone = LeftBehind { of: &self.catalog, copies: self.catalog.take_left_behind() };
        let mut of_path: HashMap<usize, (Vec<_>, Vec<_>)> = HashMap::new();
        for OnSsd { generation, copy } in &gone.copies {
            for (index, member) in self.members.iter().enumerate() {
                let is_there =
                    |copy: &SsdCopy| member.path().is_some_and(|path| copy.segment().is_of(&path));
                // One that was being written may come to lie anywhere.
                if copy.as_ref().is_none_or(is_there) {
                    let (placed, unplaced): &mut (Vec<_>, Vec<_>) =
                        of_path.entry(index).or_default();
                    if copy.is_none() { unplaced } else { placed }.push(*generation);
                }
            }
        }
        for (index, (placed, unplaced)) in of_path {
            all = all.and(self.forget_on(&self.members[index], &placed, &unplaced).await);
        }
        gone.copies.clear(); // Noted, or given up with their path.
        all
    }

    /// Notes that a path has failed, if that is still to be noted.
    fn remember_failure(&self, member: &Member) -> io::Result<()> {
        let left = member.not_remembered.lock().clone();
        if left.is_empty() { Ok(()) } else { self.note_failed(member, &left) }
    }

    /// Remembers that what these uses of a path hold is given up. Until that has succeeded no removal is
    /// acknowledged.
    fn note_failed(&self, member: &Member, uses: &[UseId]) -> io::Result<()> {
        let noted = self.host.note_failed(uses);
        let mut left = member.not_remembered.lock();
        left.retain(|one| !uses.contains(one));
        if let Err(error) = &noted {
            left.extend(uses);
            let path = member.settings().name.display();
            tracing::error!(%error, %path, "a failed path cannot be remembered");
        }
        noted
    }

    /// `unplaced` may yet be written to this path, or to what takes its place.
    async fn forget_on(
        &self,
        member: &Member,
        placed: &[Generation],
        unplaced: &[Generation],
    ) -> io::Result<()> {
        loop {
            // Kept to the end: while it is, nothing takes its place.
            let Some(path) = member.path() else {
                match member.missed(unplaced, true) {
                    true => return Ok(()),
                    false => continue, // It was taken in meanwhile.
                }
            };
            let noted = match path.remove(placed.to_vec()).await {
                Ok(()) => path.remove_unwritten(unplaced.to_vec()).await,
                failed => failed,
            };
            if let Err(error) = noted {
                tracing::warn!(%error, "removals could not be noted on a path");
                member.missed(unplaced, false);
                return self.note_failed(member, path.uses());
            }
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests;
