//! Publishing whole valid blocks, without making a request wait.
//!
//! Which blocks: every position of the block was imported or computed from valid positions, with
//! the content that the request began with, and the node does not have it yet. A failed import or
//! load takes validity back to its first block; what is computed from there counts again.
//! When: after each step of the engine, so that a cancelled prompt leaves what it had completed.
//! Bounded: the queue to the node holds a fixed number of blocks. When it is full, or the node
//! is, the rest of the request is not published, as a chain with a hole is of no use; counted.

use crate::engine::KvEngine;
use crate::metric::PublishOutcome;
use crate::store::{KvStore, PutAttributes, PutResult, Reuse};
use larder_proto::BlockKey;
use larder_proto::block_key::KeyChain;
use larder_proto::fingerprint::{ContentFingerprint, ModelVersion};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::debug;

/// What is known of a block's need to be published. Written by the publisher, read by the engine's
/// thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Need {
    /// The node has been asked.
    Asked = 0,
    Wanted = 1,
    Present = 2,
    /// There is no node to publish to.
    NoNode = 3,
    /// The node had no space for a block before.
    Full = 4,
}

/// Shared by a request and its jobs in the queue.
#[derive(Debug)]
pub(crate) struct Ledger {
    needs: Box<[AtomicU8]>,
    accepted: AtomicU32,
}

impl Ledger {
    fn new(blocks: usize) -> Self {
        let needs = (0..blocks).map(|_| AtomicU8::new(Need::Asked as u8)).collect();
        Self { needs, accepted: AtomicU32::new(0) }
    }

    fn need(&self, block: u32) -> Need {
        match self.needs.get(block as usize).map(|need| need.load(Ordering::Acquire)) {
            Some(1) => Need::Wanted,
            Some(2) => Need::Present,
            Some(3) => Need::NoNode,
            Some(4) => Need::Full,
            _ => Need::Asked,
        }
    }

    fn set(&self, blocks: impl IntoIterator<Item = (u32, Need)>) {
        for (block, need) in blocks {
            if let Some(slot) = self.needs.get(block as usize) {
                slot.store(need as u8, Ordering::Release);
            }
        }
    }

    fn set_from(&self, first: u32, need: Need) {
        self.set((first..u32::try_from(self.needs.len()).unwrap_or(u32::MAX)).map(|b| (b, need)));
    }
}

/// What the publisher does for a request.
#[derive(Debug)]
pub(crate) enum Job {
    /// Find out which of these blocks the node lacks.
    Ask { version: ModelVersion, first: u32, keys: Vec<BlockKey>, ledger: Arc<Ledger> },
    /// Store one block.
    Put {
        version: ModelVersion,
        block: u32,
        key: BlockKey,
        attributes: PutAttributes,
        bytes: Vec<u8>,
        ledger: Arc<Ledger>,
    },
    /// Say what is known of the future of a chain.
    Hint { version: ModelVersion, keys: Vec<BlockKey>, reuse: Reuse },
}

/// The publishing side of one request, on the engine's thread.
#[derive(Debug)]
pub(crate) struct Publication {
    version: ModelVersion,
    content_now: watch::Receiver<ContentFingerprint>,
    queue: mpsc::Sender<Job>,
    ledger: Arc<Ledger>,
    chain: KeyChain,
    keys: Vec<BlockKey>,
    block_tokens: u32,
    /// First position that is not valid.
    valid_to: u32,
    /// First block that has not been dealt with.
    next: u32,
    /// Blocks beyond this one are not published.
    limit: u32,
    /// Said of the whole chain when the request ends.
    reuse: Reuse,
    /// Why the rest of this request is not published.
    ended: Option<PublishOutcome>,
}

/// What a [`Publication`] starts from.
pub(crate) struct PublicationStart {
    pub(crate) version: ModelVersion,
    pub(crate) content_now: watch::Receiver<ContentFingerprint>,
    pub(crate) queue: mpsc::Sender<Job>,
    /// Behind the last of `keys`.
    pub(crate) chain: KeyChain,
    /// Of the prompt's whole blocks.
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) block_tokens: u32,
    /// Whole blocks of the longest sequence that this request can have and publish.
    pub(crate) limit: u32,
    pub(crate) reuse: Reuse,
}

impl Publication {
    pub(crate) fn new(start: PublicationStart) -> Self {
        let PublicationStart {
            version,
            content_now,
            queue,
            chain,
            keys,
            block_tokens,
            limit,
            reuse,
        } = start;
        let ledger = Arc::new(Ledger::new(limit as usize));
        Self {
            version,
            content_now,
            queue,
            ledger,
            chain,
            keys,
            block_tokens,
            valid_to: 0,
            next: 0,
            limit,
            reuse,
            ended: None,
        }
    }

    /// The first `blocks` blocks came from the store and are valid; of the prompt's others the
    /// node is asked which it lacks.
    pub(crate) fn restored(&mut self, blocks: u32) {
        self.valid_to = blocks * self.block_tokens;
        self.next = blocks;
        let prompt_blocks = u32::try_from(self.keys.len()).unwrap_or(u32::MAX).min(self.limit);
        self.ask(blocks.min(prompt_blocks)..prompt_blocks);
    }

    /// Everything from this block on is not valid, whatever was said before: a load failed.
    pub(crate) fn failed(&mut self, block: u32) {
        self.valid_to = self.valid_to.min(block * self.block_tokens);
        if block < self.next {
            self.next = block;
            self.ledger.set_from(block, Need::Asked);
            let known = u32::try_from(self.keys.len()).unwrap_or(u32::MAX).min(self.limit);
            self.ask(block.min(known)..known);
        }
    }

    /// The engine has computed the positions `range`, from what it held before them. `tokens` are
    /// all tokens of the sequence so far.
    pub(crate) fn computed<E: KvEngine>(
        &mut self,
        engine: &mut E,
        sequence: E::Sequence,
        tokens: &[u32],
        range: Range<u32>,
    ) {
        // Computed on what is not valid: not valid either, however whole it looks.
        if range.start > self.valid_to {
            return;
        }
        self.valid_to = self.valid_to.max(range.end);
        self.extend_keys(tokens);
        self.offer(engine, sequence, false);
    }

    /// The request ends: blocks that the node has not been heard about are offered as they are, and behind
    /// them goes what the client said of the session.
    pub(crate) fn finish<E: KvEngine>(&mut self, engine: &mut E, sequence: E::Sequence) {
        self.offer(engine, sequence, true);
        if self.reuse.is_known() {
            let (version, keys) = (self.version, self.keys[..self.next as usize].to_vec());
            let hint = Job::Hint { version, keys, reuse: std::mem::take(&mut self.reuse) };
            // It is a wish: a queue without room loses it.
            let _ = self.queue.try_send(hint);
        }
    }

    /// A view of the count that outlives this value.
    pub(crate) fn ledger(&self) -> Arc<Ledger> {
        Arc::clone(&self.ledger)
    }

    fn offer<E: KvEngine>(&mut self, engine: &mut E, sequence: E::Sequence, last_call: bool) {
        let whole = (self.valid_to / self.block_tokens).min(self.limit);
        while self.next < whole {
            if *self.content_now.borrow() != self.version.content {
                self.ended = Some(PublishOutcome::Outdated);
            }
            match (self.ended, self.ledger.need(self.next)) {
                (Some(outcome), _) => outcome.count(1),
                (None, Need::Asked) if !last_call => return,
                (None, Need::Asked | Need::Wanted) => {
                    if let Err(outcome) = self.export(engine, sequence) {
                        outcome.count(1);
                        self.ended = Some(outcome);
                    }
                }
                (None, Need::Present) => PublishOutcome::Exists.count(1),
                (None, Need::NoNode) => PublishOutcome::Unavailable.count(1),
                (None, Need::Full) => PublishOutcome::Full.count(1),
            }
            self.next += 1;
        }
    }

    /// Hands block `self.next` to the queue, if it has room.
    fn export<E: KvEngine>(
        &self,
        engine: &mut E,
        sequence: E::Sequence,
    ) -> Result<(), PublishOutcome> {
        let block = self.next;
        // The place in the queue first: a block that would be shed is not copied.
        let place = self.queue.try_reserve().map_err(|error| match error {
            mpsc::error::TrySendError::Full(()) => PublishOutcome::Shed,
            mpsc::error::TrySendError::Closed(()) => PublishOutcome::Unavailable,
        })?;
        let mut bytes = Vec::new();
        engine.export_block(sequence, block, &mut bytes).map_err(|error| {
            debug!(block, error = %error, "block not exported");
            PublishOutcome::ExportFailed
        })?;
        let key = self.keys[block as usize];
        let parent = block.checked_sub(1).map(|parent| self.keys[parent as usize]);
        let attributes = PutAttributes { parent, root: self.keys[0] };
        let (version, ledger) = (self.version, Arc::clone(&self.ledger));
        place.send(Job::Put { version, block, key, attributes, bytes, ledger });
        self.ledger.accepted.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Keys of blocks that have become whole with the answer's tokens.
    fn extend_keys(&mut self, tokens: &[u32]) {
        let known = self.keys.len();
        let block_tokens = self.block_tokens as usize;
        let whole = (tokens.len() / block_tokens).min(self.limit as usize);
        for block in tokens.chunks_exact(block_tokens).take(whole).skip(known) {
            self.keys.push(self.chain.next(block, &[], None));
        }
        if self.keys.len() > known {
            let range = u32::try_from(known).unwrap_or(u32::MAX)
                ..u32::try_from(self.keys.len()).unwrap_or(u32::MAX);
            self.ask(range);
        }
    }

    fn ask(&self, blocks: Range<u32>) {
        if blocks.is_empty() {
            return;
        }
        let keys = self.keys[blocks.start as usize..blocks.end as usize].to_vec();
        let (version, ledger) = (self.version, Arc::clone(&self.ledger));
        // Unasked blocks are offered at the end of the request, so a full queue loses nothing.
        let _ = self.queue.try_send(Job::Ask { version, first: blocks.start, keys, ledger });
    }
}

/// Blocks of a request that the publishing queue has taken.
pub(crate) fn accepted(ledger: &Ledger) -> u32 {
    ledger.accepted.load(Ordering::Relaxed)
}

/// Does the jobs one after the other, until every sender is gone, or until `stop` is cancelled and
/// what was queued by then is done.
pub(crate) async fn run<S: KvStore>(
    mut jobs: mpsc::Receiver<Job>,
    store: watch::Receiver<Option<S>>,
    content_now: watch::Receiver<ContentFingerprint>,
    stop: CancellationToken,
) {
    loop {
        let job = tokio::select! {
            biased;
            () = stop.cancelled(), if !jobs.is_closed() => {
                jobs.close();
                continue;
            }
            job = jobs.recv() => job,
        };
        let Some(job) = job else { return };
        let store = store.borrow().clone();
        match job {
            Job::Ask { version, first, keys, ledger } => {
                ask(store, &version, first, &keys, &ledger).await;
            }
            Job::Put { version, block, key, attributes, bytes, ledger } => {
                let outcome = match store {
                    _ if *content_now.borrow() != version.content => PublishOutcome::Outdated,
                    None => PublishOutcome::Unavailable,
                    Some(store) => match store.put(&version, &key, attributes, &bytes).await {
                        Ok(PutResult::Stored) => PublishOutcome::Stored,
                        Ok(PutResult::Exists) => PublishOutcome::Exists,
                        Ok(PutResult::Full) => PublishOutcome::Full,
                        Err(error) => {
                            debug!(%key, %error, "block not published");
                            PublishOutcome::Unavailable
                        }
                    },
                };
                match outcome {
                    PublishOutcome::Full => ledger.set_from(block, Need::Full),
                    PublishOutcome::Unavailable => ledger.set_from(block, Need::NoNode),
                    _ => {}
                }
                outcome.count(1);
            }
            Job::Hint { version, keys, reuse } => {
                if let Some(store) = store
                    && let Err(error) = store.hint(&version, &keys, reuse).await
                {
                    debug!(%error, "hint not taken");
                }
            }
        }
    }
}

async fn ask<S: KvStore>(
    store: Option<S>,
    version: &ModelVersion,
    first: u32,
    keys: &[BlockKey],
    ledger: &Ledger,
) {
    let stored = match store {
        None => None,
        Some(store) => store.stored(version, keys).await.ok(),
    };
    let need_of = |index: usize| match &stored {
        None => Need::NoNode,
        Some(stored) if stored.get(index).copied().unwrap_or(false) => Need::Present,
        Some(_) => Need::Wanted,
    };
    ledger.set((first..).zip(0..keys.len()).map(|(block, index)| (block, need_of(index))));
}
