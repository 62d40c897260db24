//! What others tell the ring's thread, and how they wake it.

use super::super::{
    counts::Counts,
    request::{Ended, Request},
};
use parking_lot::Mutex;
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::OwnedFd,
};
use std::{io, mem, sync::Arc};

/// What the thread is told.
#[derive(Debug)]
pub(super) enum Command {
    Start(Request),
    /// A file is gone: its place in the table of the ring is free.
    Forget(u32),
}

/// What the thread shares with those who submit.
#[derive(Debug)]
pub(super) struct Shared {
    queue: Mutex<Queue>,
    /// Read by the ring: a write wakes the thread.
    pub(super) wake: OwnedFd,
    pub(super) counts: Counts,
    pub(super) ended: Ended,
    /// Errors that the next submissions meet.
    #[cfg(test)]
    pub(super) faults: Mutex<std::collections::VecDeque<i32>>,
}

/// Bounded by those who submit: each waits for its requests.
#[derive(Debug, Default)]
struct Queue {
    commands: Vec<Command>,
    /// No handle is left, so no request will come.
    stop: bool,
    /// The thread was woken and has not looked since: one system call wakes it for many commands.
    woken: bool,
    /// The thread is gone, and this is what requests are told.
    closed: Option<Why>,
}

impl Shared {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            queue: Mutex::default(),
            // Blocking, or the ring would not wait in it for a write.
            wake: eventfd(0, EventfdFlags::CLOEXEC)?,
            counts: Counts::default(),
            ended: Ended::new(),
            #[cfg(test)]
            faults: Mutex::default(),
        })
    }

    pub(super) fn push(&self, command: Command) {
        let mut queue = self.queue.lock();
        if let Some(why) = queue.closed.clone() {
            drop(queue);
            refuse(command, &why);
            return;
        }
        queue.commands.push(command);
        let wake = !mem::replace(&mut queue.woken, true);
        drop(queue);
        if wake {
            self.wake();
        }
    }

    pub(super) fn stop(&self) {
        let mut queue = self.queue.lock();
        queue.stop = true;
        let wake = !mem::replace(&mut queue.woken, true);
        drop(queue);
        if wake {
            self.wake();
        }
    }

    fn wake(&self) {
        // It fails only when 2^64 - 2 wake-ups were not read yet; the thread is awake then.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Moves all commands into `into`, which is empty, and says whether to stop after them.
    pub(super) fn take(&self, into: &mut Vec<Command>) -> bool {
        let mut queue = self.queue.lock();
        queue.woken = false;
        mem::swap(&mut queue.commands, into);
        queue.stop
    }

    /// Takes no more commands, and refuses those that are there. The first reason stays.
    pub(super) fn close(&self, why: Why) {
        let mut queue = self.queue.lock();
        let why = queue.closed.get_or_insert(why).clone();
        let left = mem::take(&mut queue.commands);
        drop(queue);
        left.into_iter().for_each(|command| refuse(command, &why));
    }
}

/// Why the ring carries out nothing more, told to each request.
#[derive(Debug, Clone)]
pub(super) struct Why(Arc<io::Error>);

impl Why {
    pub(super) fn new(error: io::Error) -> Self {
        Self(Arc::new(error))
    }

    pub(super) fn error(&self) -> io::Error {
        io::Error::new(self.0.kind(), Arc::clone(&self.0))
    }
}

/// A file's place is free anyway once the ring is gone.
fn refuse(command: Command, why: &Why) {
    if let Command::Start(request) = command {
        request.end(Err(why.error()));
    }
}
