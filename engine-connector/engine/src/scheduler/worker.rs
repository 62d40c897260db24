//! The engine's thread: takes requests, runs steps, tells what came of them.

use super::batch::{Share, Step, next_step};
use super::engine::{EngineShape, LlamaEngine};
use super::slot::{Event, FinishReason, Slot, Start};
use crate::llama::{ContextOptions, LlamaError, Model};
use crate::metric;
use larder_engine_connector::{KvEngine, PrefillRate, PromptShape};
use metrics::{counter, gauge, histogram};
use std::collections::VecDeque;
use std::time::Duration;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tracing::{error, warn};

/// Why the engine's thread ended other than by being asked to.
#[derive(Debug, thiserror::Error)]
pub enum EngineFailure {
    /// No context.
    #[error(transparent)]
    Start(#[from] LlamaError),
    /// A bug of ours or of llama.cpp.
    #[error("the engine thread panicked")]
    Panicked,
}

type Ready = oneshot::Sender<Result<(EngineShape, watch::Receiver<PrefillRate>), LlamaError>>;

/// Runs until the queue is closed and every request has ended.
pub(super) fn run(
    model: &Model,
    options: ContextOptions,
    step_blocks: u32,
    queue: mpsc::Receiver<Start>,
    ready: Ready,
) -> Result<(), EngineFailure> {
    let step_tokens = options.block_tokens * step_blocks;
    let engine = match LlamaEngine::new(model, options, step_tokens) {
        Ok(engine) => engine,
        Err(error) => {
            let _ = ready.send(Err(error));
            return Ok(());
        }
    };
    let (rate, rate_now) = watch::channel(engine.prefill_rate());
    let shape = PromptShape {
        tokens: 0,
        block_tokens: options.block_tokens,
        step_blocks,
        block_bytes: engine.block_bytes(),
    };
    if ready.send(Ok((engine.shape(), rate_now))).is_err() {
        return Ok(());
    }
    let slots = VecDeque::new();
    Worker { model, engine, shape, queue, rate, slots }.serve();
    Ok(())
}

struct Worker<'m> {
    model: &'m Model,
    engine: LlamaEngine<'m>,
    shape: PromptShape,
    queue: mpsc::Receiver<Start>,
    rate: watch::Sender<PrefillRate>,
    /// In order of arrival.
    slots: VecDeque<Slot>,
}

impl Worker<'_> {
    fn serve(mut self) {
        while self.take_requests() {
            self.drop_cancelled();
            let step = next_step(&self.slots);
            if step.batch.is_empty() {
                continue;
            }
            let began = Instant::now();
            let outcome = self.engine.context.decode(&step.batch);
            let took = began.elapsed();
            match outcome {
                Ok(()) => self.book(&step, took),
                Err(error) => self.fail(&step, &error),
            }
            gauge!(metric::RUNNING).set(self.slots.len() as f64);
        }
    }

    /// Takes in what waits; with nothing to compute, waits for it. False when all is over.
    fn take_requests(&mut self) -> bool {
        if self.slots.is_empty() {
            match self.queue.blocking_recv() {
                Some(start) => self.begin(start),
                None => return false,
            }
        }
        loop {
            match self.queue.try_recv() {
                Ok(start) => self.begin(start),
                Err(TryRecvError::Empty) => return true,
                // Requests under way are still finished.
                Err(TryRecvError::Disconnected) => return !self.slots.is_empty(),
            }
        }
    }

    /// Imports what landed. A cancelled request is not even begun.
    fn begin(&mut self, start: Start) {
        let mut slot = Slot::new(start, self.shape, Instant::now());
        if slot.is_cancelled() {
            return;
        }
        let sequence = slot.sequence();
        let valid = slot.kv.restore(&mut self.engine, sequence);
        slot.computed = valid * self.shape.block_tokens;
        slot.cached_tokens = slot.computed;
        slot.prefill_began = Instant::now();
        self.slots.push_back(slot);
    }

    fn drop_cancelled(&mut self) {
        while let Some(index) = self.slots.iter().position(Slot::is_cancelled) {
            counter!(metric::CANCELLED_TOTAL).increment(1);
            self.end(index);
        }
    }

    /// Publishes what is left to publish, frees the cells, then the place. Whoever hears of the end
    /// after that finds a free place.
    fn end(&mut self, index: usize) -> Option<mpsc::Sender<Event>> {
        let Slot { mut kv, events, admitted, .. } = self.slots.remove(index)?;
        kv.finish(&mut self.engine, admitted.sequence());
        self.engine.context.release(admitted.sequence());
        Some(events)
    }

    /// Every request of the step goes on, or ends.
    fn book(&mut self, step: &Step, took: Duration) {
        histogram!(metric::STEP_SECONDS).record(took.as_secs_f64());
        self.engine.saw_step(step.batch.len(), step.prompt_tokens, took);
        self.rate.send_replace(self.engine.prefill_rate());
        counter!(metric::PROMPT_TOKENS_TOTAL).increment(step.prompt_tokens as u64);
        let mut ended = Vec::new();
        for share in &step.shares {
            if let Some(reason) = self.advance(share) {
                ended.push((share.slot, reason));
            }
        }
        // From the back, so that the indices in front stay right.
        for (index, reason) in ended.into_iter().rev() {
            if let Some(events) = self.end(index) {
                let _ = events.try_send(Event::Finished(reason));
            }
        }
    }

    fn advance(&mut self, share: &Share) -> Option<FinishReason> {
        let slot = &mut self.slots[share.slot];
        let sequence = slot.sequence();
        slot.computed = share.positions.end;
        let first = slot.answered() == 0;
        let chosen =
            share.logits.map(|index| slot.sampler.choose(self.engine.context.logits(index)));
        // The client first: publishing copies a block.
        let reason = chosen.and_then(|token| {
            if first {
                let report = slot.prefill_report(Instant::now());
                histogram!(metric::PREFILL_SECONDS).record(report.prefill_time.as_secs_f64());
                report.kv.count_blocks(report.recomputed_blocks);
                slot.tell(Event::Prefilled(report));
            }
            if self.model.ends_generation(token) {
                return Some(FinishReason::EndToken);
            }
            counter!(metric::ANSWER_TOKENS_TOTAL).increment(1);
            slot.tokens.push(token);
            slot.tell(Event::Token(token));
            (slot.answered() >= slot.max_tokens).then_some(FinishReason::Length)
        });
        slot.kv.computed(&mut self.engine, sequence, &slot.tokens, share.positions.clone());
        reason
    }

    /// What a failed call has written is unknown: its requests end, the others go on.
    fn fail(&mut self, step: &Step, failure: &LlamaError) {
        error!(error = %failure, requests = step.shares.len(), "a step of the model failed");
        for share in step.shares.iter().rev() {
            self.slots[share.slot].tell(Event::Failed(failure.to_string()));
            counter!(metric::FAILED_TOTAL).increment(1);
            if let Some(slot) = self.slots.remove(share.slot) {
                self.engine.context.release(slot.sequence());
            }
        }
        if self.slots.is_empty() {
            warn!("no request is left after the failed step");
        }
    }
}
