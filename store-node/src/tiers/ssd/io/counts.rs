//! What a driver has done, for those who watch it.

use super::progress::Cause;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counted by the driver's threads.
#[derive(Debug, Default)]
pub(super) struct Counts {
    requests: AtomicU64,
    operations: AtomicU64,
    submissions: AtomicU64,
    splits: AtomicU64,
    shorts: AtomicU64,
    retries: AtomicU64,
}

/// What a driver did since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CountsSoFar {
    /// Requests that were taken over.
    pub requests: u64,
    /// Operations given to the kernel: at least one a request.
    pub operations: u64,
    /// System calls that gave them to it: one may give many.
    pub submissions: u64,
    /// Operations more because a request was longer than the kernel takes at once.
    pub splits: u64,
    /// Operations more because the one before moved fewer bytes than it was asked to.
    pub shorts: u64,
    /// Operations and submissions that the kernel asked to try again.
    pub retries: u64,
}

impl Counts {
    pub(super) fn so_far(&self) -> CountsSoFar {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        CountsSoFar {
            requests: get(&self.requests),
            operations: get(&self.operations),
            submissions: get(&self.submissions),
            splits: get(&self.splits),
            shorts: get(&self.shorts),
            retries: get(&self.retries),
        }
    }

    pub(super) fn request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn operation(&self) {
        self.operations.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn submission(&self) {
        self.submissions.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn again(&self, cause: Cause) {
        let count = match cause {
            Cause::Split => &self.splits,
            Cause::Short => &self.shorts,
            Cause::Retry => &self.retries,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}
