//! What both sides have in common: a client does one thing at a time, and a leg is clients doing it together.

use super::{BATCH, Op};
use crate::{child, content, error::BenchError, figures::Leg};
use bytes::Bytes;
use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{sync::Barrier, task::JoinSet, time::Instant};

/// One part: its number decides key and bytes; the slot is where the reference keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) number: u64,
    pub(crate) slot: u32,
    pub(crate) len: usize,
}

/// One client of one side. Every call verifies what it gets.
pub(crate) trait Client: Send + 'static {
    /// Brings a part.
    fn get(&mut self, part: Part) -> impl Future<Output = Result<(), BenchError>> + Send;
    /// Puts a part that is not there yet.
    fn put(&mut self, part: Part) -> impl Future<Output = Result<(), BenchError>> + Send;
    /// Brings many parts in one call.
    fn batch_get(&mut self, parts: &[Part]) -> impl Future<Output = Result<(), BenchError>> + Send;
    /// Brings a part, as a get does, and compares every byte.
    fn check(&mut self, part: Part) -> impl Future<Output = Result<(), BenchError>> + Send;
}

/// The bytes to put, in memory that is used again.
#[derive(Debug, Default)]
pub(crate) struct Payload(Bytes);

impl Payload {
    /// The bytes of `part`.
    pub(crate) fn of(&mut self, part: Part) -> Bytes {
        let reused = std::mem::take(&mut self.0).try_into_mut();
        self.0 = match reused {
            Ok(mut bytes) if bytes.len() == part.len => {
                content::stamp(part.number, &mut bytes);
                bytes.freeze()
            }
            // The first, or one that is still being sent.
            _ => {
                let mut bytes = vec![0; part.len];
                content::fill(part.number, &mut bytes);
                bytes.into()
            }
        };
        self.0.clone()
    }
}

/// Which parts the clients of a leg move.
#[derive(Debug, Clone)]
pub(super) struct Parts {
    /// Bytes of each.
    pub(super) len: usize,
    /// Number of what the reference has in its first slot; one more in each of the next.
    pub(super) first: u64,
    /// Slots of the reference: they take as much memory as our arena, so that puts of both sides land in
    /// memory that was not touched for as long.
    pub(super) slots: usize,
    /// Parts that gets go round in: those of the last slots.
    pub(super) count: usize,
    /// The next number that was never put.
    pub(super) fresh: Arc<AtomicU64>,
}

impl Parts {
    /// Part `i` of those that are there, over and over.
    fn there(&self, i: usize) -> Part {
        self.at(self.slots - self.count + i % self.count)
    }

    /// A part that was never put, for a slot that no other client uses.
    fn fresh(&self, i: usize) -> Part {
        let number = self.fresh.fetch_add(1, Ordering::Relaxed);
        Part { number, ..self.at(i % self.slots) }
    }

    fn at(&self, slot: usize) -> Part {
        let number = self.first + slot as u64;
        Part { number, slot: u32::try_from(slot).unwrap_or(u32::MAX), len: self.len }
    }
}

/// A client, and a part of its last call.
#[derive(Debug)]
pub(super) struct Member<C> {
    client: C,
    last: Option<Part>,
}

impl<C> From<C> for Member<C> {
    fn from(client: C) -> Self {
        Self { client, last: None }
    }
}

/// Compares every byte of the part that each client moved last.
pub(super) async fn check<C: Client>(members: &mut [Member<C>]) -> Result<(), BenchError> {
    for Member { client, last } in members {
        if let Some(part) = last {
            client.check(*part).await?;
        }
    }
    Ok(())
}

/// Lets all clients do `op` at the same time. CPU time is that of this process and of `server`.
pub(super) async fn run_leg<C: Client>(
    members: &mut Vec<Member<C>>,
    server: &child::Child,
    op: Op,
    parts: &Parts,
    time: Duration,
) -> Result<Leg, BenchError> {
    let count = members.len();
    let start = Arc::new(Barrier::new(count + 1));
    let mut tasks = JoinSet::new();
    for (index, member) in members.drain(..).enumerate() {
        let (start, parts) = (Arc::clone(&start), parts.clone());
        let work = Work { client: member.client, op, parts, index, count, time };
        tasks.spawn(async move {
            start.wait().await;
            work.run().await
        });
    }
    let cpu_before = child::own_cpu_seconds() + server.cpu_seconds();
    let began = Instant::now();
    start.wait().await;
    let mut leg = Leg::default();
    while let Some(done) = tasks.join_next().await {
        let done = done??;
        leg.bytes += done.bytes;
        leg.latencies.extend(done.latencies);
        members.push(Member { client: done.client, last: Some(done.last) });
    }
    leg.wall = began.elapsed();
    leg.cpu_seconds = child::own_cpu_seconds() + server.cpu_seconds() - cpu_before;
    Ok(leg)
}

/// One client's share of a leg.
struct Work<C> {
    client: C,
    op: Op,
    parts: Parts,
    index: usize,
    count: usize,
    /// Of the leg; a call that has begun is ended.
    time: Duration,
}

/// What became of it.
struct Done<C> {
    client: C,
    latencies: Vec<Duration>,
    bytes: u64,
    /// A part of the last call.
    last: Part,
}

impl<C: Client> Work<C> {
    async fn run(mut self) -> Result<Done<C>, BenchError> {
        let began = Instant::now();
        let mut latencies = Vec::with_capacity(4096);
        let (mut bytes, mut last) = (0, self.parts.there(self.index));
        while latencies.is_empty() || began.elapsed() < self.time {
            let at = latencies.len() * self.count + self.index;
            let parts = match self.op {
                Op::Get => vec![self.parts.there(at)],
                Op::Put => vec![self.parts.fresh(at)],
                Op::BatchGet => (at * BATCH..).take(BATCH).map(|i| self.parts.there(i)).collect(),
            };
            last = parts[0];
            let asked = Instant::now();
            match self.op {
                Op::Get => self.client.get(last).await?,
                Op::Put => self.client.put(last).await?,
                Op::BatchGet => self.client.batch_get(&parts).await?,
            }
            latencies.push(asked.elapsed());
            bytes += parts.iter().map(|part| part.len as u64).sum::<u64>();
        }
        Ok(Done { client: self.client, latencies, bytes, last })
    }
}
