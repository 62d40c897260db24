//! Who may run, who waits, who is refused.
//!
//! Contract: at most `max_requests` run and `max_waiting` wait; the KV cells of those that run sum
//! up to at most `cells`. Waiting is first come, first served, so a large request is not starved
//! by small ones. Everything is given back by dropping [`Admitted`] or the waiting future.

use super::FreeSequences;
use crate::llama::SequenceId;
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Limits of admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionOptions {
    /// Requests that run at once: sequences of the context.
    pub max_requests: u16,
    /// Requests that wait for one of them to end.
    pub max_waiting: u16,
    /// KV cells of the context.
    pub cells: u32,
    /// Most tokens of one sequence, prompt and answer together.
    pub sequence_tokens: u32,
}

/// Why a request is not admitted. The HTTP layer makes an answer of each.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It can never fit.
    #[error(
        "prompt of {prompt_tokens} tokens and max_tokens {max_tokens} need {} tokens of context, \
         the limit is {limit} ({name})",
        u64::from(*prompt_tokens) + u64::from(*max_tokens)
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Most tokens of the answer.
        max_tokens: u32,
        /// Tokens that fit.
        limit: u32,
        /// The setting that says so.
        name: &'static str,
    },
    /// All places are taken, those to wait included.
    #[error("{running} requests run and {waiting} wait, which is the limit; try again later")]
    Busy {
        /// Requests that run.
        running: usize,
        /// Requests that wait.
        waiting: usize,
    },
    /// The engine is stopping or has failed.
    #[error("the engine is stopping")]
    EngineStopped,
}

/// The door. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Admission {
    options: AdmissionOptions,
    /// Requests inside: running or waiting.
    places: Arc<Semaphore>,
    slots: Arc<Semaphore>,
    cells: Arc<Semaphore>,
    sequences: FreeSequences,
}

/// The right to run: a sequence, and cells for all its tokens.
#[derive(Debug)]
#[must_use = "dropping it gives the place to the next"]
pub struct Admitted {
    sequence: SequenceId,
    sequences: FreeSequences,
    _cells: OwnedSemaphorePermit,
    _slot: OwnedSemaphorePermit,
    _place: OwnedSemaphorePermit,
}

impl Admission {
    /// An empty engine's door.
    #[must_use]
    pub fn new(options: AdmissionOptions) -> Self {
        let slots = usize::from(options.max_requests);
        let places = slots + usize::from(options.max_waiting);
        Self {
            options,
            places: Arc::new(Semaphore::new(places)),
            slots: Arc::new(Semaphore::new(slots)),
            cells: Arc::new(Semaphore::new(options.cells as usize)),
            sequences: Arc::new(Mutex::new((0..options.max_requests).rev().collect())),
        }
    }

    /// Waits for a place to run a request of this size. Refuses at once what never fits, and when
    /// the waiting room is full.
    pub async fn admit(&self, prompt_tokens: u32, max_tokens: u32) -> Result<Admitted, Refusal> {
        let needed = self.check_size(prompt_tokens, max_tokens)?;
        let place = match Arc::clone(&self.places).try_acquire_owned() {
            Ok(place) => place,
            Err(tokio::sync::TryAcquireError::NoPermits) => {
                let (running, waiting) = self.load();
                return Err(Refusal::Busy { running, waiting });
            }
            Err(tokio::sync::TryAcquireError::Closed) => return Err(Refusal::EngineStopped),
        };
        let stopped = |_| Refusal::EngineStopped;
        let slot = Arc::clone(&self.slots).acquire_owned().await.map_err(stopped)?;
        // With a slot in hand: who comes first waits first for cells, too.
        let cells = Arc::clone(&self.cells).acquire_many_owned(needed).await.map_err(stopped)?;
        // As many sequences as slots, and each is back before its slot is.
        let sequence = self.sequences.lock().pop().ok_or(Refusal::EngineStopped)?;
        Ok(Admitted {
            sequence: SequenceId(sequence),
            sequences: Arc::clone(&self.sequences),
            _cells: cells,
            _slot: slot,
            _place: place,
        })
    }

    /// Requests that run and that wait.
    #[must_use]
    pub fn load(&self) -> (usize, usize) {
        let slots = usize::from(self.options.max_requests);
        let inside =
            slots + usize::from(self.options.max_waiting) - self.places.available_permits();
        let running = (slots - self.slots.available_permits()).min(inside);
        (running, inside - running)
    }

    /// Refuses everybody from now on, those that wait included.
    pub fn close(&self) {
        for semaphore in [&self.places, &self.slots, &self.cells] {
            semaphore.close();
        }
    }

    /// Cells that the request needs: its last token is never computed on.
    fn check_size(&self, prompt_tokens: u32, max_tokens: u32) -> Result<u32, Refusal> {
        let needed = (u64::from(prompt_tokens) + u64::from(max_tokens)).saturating_sub(1);
        let AdmissionOptions { cells, sequence_tokens, .. } = self.options;
        for (limit, name) in [(cells, "context_tokens"), (sequence_tokens, "the model's context")] {
            if needed > u64::from(limit) {
                return Err(Refusal::TooLong { prompt_tokens, max_tokens, limit, name });
            }
        }
        Ok(u32::try_from(needed).unwrap_or(u32::MAX))
    }
}

impl Admitted {
    /// The sequence to compute in.
    #[must_use]
    pub fn sequence(&self) -> SequenceId {
        self.sequence
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.sequences.lock().push(self.sequence.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn door(max_requests: u16, max_waiting: u16, cells: u32) -> Admission {
        let sequence_tokens = 1000;
        Admission::new(AdmissionOptions { max_requests, max_waiting, cells, sequence_tokens })
    }

    #[tokio::test]
    async fn beyond_the_waiting_room_requests_are_refused_with_the_load() {
        let door = door(1, 1, 100);
        let first = door.admit(10, 10).await.unwrap();
        let mut second = Box::pin(door.admit(10, 10));
        assert!((&mut second).now_or_never().is_none(), "waits");
        let third = door.admit(10, 10).await;
        assert_eq!(third.unwrap_err(), Refusal::Busy { running: 1, waiting: 1 });
        drop(first);
        let second = second.await.unwrap();
        assert_eq!(door.load(), (1, 0));
        drop(second);
        assert_eq!(door.load(), (0, 0));
    }

    #[tokio::test]
    async fn cells_never_exceed_the_context_and_a_large_request_is_not_overtaken() {
        let door = door(4, 4, 100);
        let first = door.admit(60, 1).await.unwrap();
        let mut large = Box::pin(door.admit(80, 1));
        assert!((&mut large).now_or_never().is_none());
        let mut small = Box::pin(door.admit(10, 1));
        assert!((&mut small).now_or_never().is_none(), "it would fit, but came later");
        drop(first);
        let large = large.await.unwrap();
        let small = small.await.unwrap();
        assert_ne!(large.sequence(), small.sequence());
    }

    #[tokio::test]
    async fn what_never_fits_is_refused_by_the_name_of_the_limit() {
        let error = door(1, 0, 100).admit(90, 20).await.unwrap_err();
        assert!(error.to_string().contains("need 110 tokens"), "{error}");
        assert!(error.to_string().contains("limit is 100 (context_tokens)"), "{error}");
        let error = door(1, 0, 5000).admit(990, 20).await.unwrap_err();
        assert!(error.to_string().contains("limit is 1000 (the model's context)"), "{error}");
        assert!(door(1, 0, 100).admit(80, 21).await.is_ok(), "the last token takes no cell");
    }

    #[tokio::test]
    async fn a_dropped_waiter_and_a_closed_door_leave_nothing_behind() {
        let door = door(1, 1, 100);
        let first = door.admit(1, 1).await.unwrap();
        let mut waiting = Box::pin(door.admit(1, 1));
        assert!((&mut waiting).now_or_never().is_none());
        drop(waiting);
        assert_eq!(door.load(), (1, 0));
        let mut waiting = Box::pin(door.admit(1, 1));
        assert!((&mut waiting).now_or_never().is_none());
        door.close();
        assert_eq!(waiting.await.unwrap_err(), Refusal::EngineStopped);
        assert_eq!(door.admit(1, 1).await.unwrap_err(), Refusal::EngineStopped);
        drop(first);
    }
}
