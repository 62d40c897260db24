//! Leases, and the processes of their readers.

#[path = "../../src/transfer/leases.rs"]
pub mod leases;

use loom::sync::atomic::{AtomicBool, Ordering};
use std::{future::poll_fn, sync::Arc, task::Poll};

/// A reader's process. A test polls when it wants to know: nobody is woken.
#[derive(Debug, Clone, Default)]
pub struct Process(Arc<AtomicBool>);

impl Process {
    pub fn exit(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub async fn gone(&self) {
        let is_gone = || self.0.load(Ordering::Acquire);
        poll_fn(|_| if is_gone() { Poll::Ready(()) } else { Poll::Pending }).await;
    }
}
