//! Requests carried out by io_uring: one ring and one thread a folder.
//!
//! ```text
//! submit -> queue -> waiting -> slot -> kernel -> completion -> answered
//! ```
//!
//! The thread sleeps in one system call that hands over all new operations and waits for the next
//! completion; an eventfd that the ring reads wakes it when requests come. At most `depth` requests are in
//! slots, the others wait. All memory of a request is its slot's until the completion of its last operation,
//! and is lost, never freed, if the ring fails before (F15).

mod files;
mod memory;
mod queue;
mod ring;
mod slots;
#[cfg(test)]
mod tests;

pub(super) use files::Registration;

use super::{
    Area, Pending,
    counts::CountsSoFar,
    lock::FolderLock,
    request::{Driver, Request},
};
use queue::{Command, Shared};
use std::{io, sync::Arc, thread};

/// See the module.
#[derive(Debug)]
pub(super) struct Uring {
    shared: Arc<Shared>,
}

impl Uring {
    /// Sets a ring up on a thread of its own. The folder stays locked until the thread has ended. Says why
    /// `memory` is not registered, if so.
    pub(super) fn start(
        depth: usize,
        limit: usize,
        memory: &[Area],
        lock: &Arc<FolderLock>,
    ) -> io::Result<(Self, Option<String>)> {
        let shared = Arc::new(Shared::new()?);
        let (ready, started) = Pending::new();
        let (of_thread, lock) = (Arc::clone(&shared), Arc::clone(lock));
        let setup = ring::Setup { depth, limit, memory: memory.to_vec() };
        let run = move || ring::run(&of_thread, lock, setup, ready);
        thread::Builder::new().name("larder-ssd-ring".to_owned()).spawn(run)?;
        let not_locked = started.wait()?;
        Ok((Self { shared }, not_locked))
    }
}

impl Driver for Uring {
    fn submit(&self, request: Request) {
        self.shared.counts.request();
        self.shared.push(Command::Start(request));
    }

    fn counts(&self) -> CountsSoFar {
        self.shared.counts.so_far()
    }

    fn ended(&self) -> Pending<()> {
        self.shared.ended.watch()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.shared.stop();
    }
}
