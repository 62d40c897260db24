//! Loom's, in the form of those that the node uses.

use loom::sync::atomic::{AtomicUsize, Ordering, fence};
use std::{ops::Deref, sync::Arc};

pub(crate) use loom::sync::{MutexGuard, atomic::AtomicU64};

/// Never poisoned, as the node's.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Counts its owners as `std::sync::Arc` does, order for order. Loom's own `Arc` will not do: it answers
/// `strong_count` exactly and with an acquire, where std's is a relaxed load that may be stale.
#[derive(Debug)]
pub(crate) struct Counted<T> {
    owners: Arc<AtomicUsize>,
    value: Arc<T>,
}

impl<T> Counted<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { owners: Arc::new(AtomicUsize::new(1)), value: Arc::new(value) }
    }

    pub(crate) fn strong_count(this: &Self) -> usize {
        this.owners.load(Ordering::Relaxed)
    }
}

impl<T> Clone for Counted<T> {
    fn clone(&self) -> Self {
        self.owners.fetch_add(1, Ordering::Relaxed);
        Self { owners: Arc::clone(&self.owners), value: Arc::clone(&self.value) }
    }
}

impl<T> Deref for Counted<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for Counted<T> {
    fn drop(&mut self) {
        if self.owners.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
        }
        // `value` goes next. Loom changes threads only at its own operations, and there is none until
        // then: so std's count, which loom does not see, goes down in step with `owners`.
    }
}
