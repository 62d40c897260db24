//! The parts of the bench as a client puts, reads and looks for them.

use super::node::{Node, QUEUE_MIB};
use crate::{content, error::BenchError};
use futures_util::{StreamExt, TryStreamExt, stream};
use larder_client::{
    TransferError,
    connection::{Buffer, Connection},
};
use larder_proto::{
    BlockKey, ContentFingerprint, LayoutFingerprint, ModelVersion, PartNumber, Tier,
    checksum::DEFAULT_CHUNK,
    frame::{Class, Code, Codec, KEYS_LIMIT, Lookup, Read, Reserve},
    part::PartRef,
};
use std::{ops::Range, time::Duration};
use tokio::time::{Instant, sleep};

/// The model version of all parts.
pub(super) const MODEL: ModelVersion = ModelVersion {
    content: ContentFingerprint::from_bytes([0xbe; 32]),
    layout: LayoutFingerprint::from_bytes([0x4e; 32]),
};
/// Blocks of a chain: prompts of a few thousand tokens.
const CHAIN: u64 = 64;
/// Puts or reads in flight.
const IN_FLIGHT: usize = 16;
/// How long what was put may take to be written; what is not by then is left out.
const WRITTEN_WITHIN: Duration = Duration::from_secs(5);
/// How long to wait before asking for the same again.
const AGAIN: Duration = Duration::from_millis(1);

/// Part number `number`.
pub(super) fn name(number: u64) -> PartRef {
    PartRef { key: content::key(number), layout: MODEL.layout, part: PartNumber(0) }
}

/// The first block of its chain, and the block before it.
pub(super) fn place_in_chain(number: u64) -> (BlockKey, Option<BlockKey>) {
    let first = number - number % CHAIN;
    (content::key(first), (number > first).then(|| content::key(number - 1)))
}

/// A connection, and how long each part is.
#[derive(Debug)]
pub(super) struct Parts {
    connection: Connection,
    /// Bytes.
    len: usize,
}

impl Parts {
    pub(super) async fn of(node: &Node, len: usize) -> Result<Self, BenchError> {
        Ok(Self { connection: node.connect().await?, len })
    }

    /// Puts parts, no faster than they are written: no more at a time than half of what may wait.
    pub(super) async fn put_all(&self, all: Range<u64>) -> Result<(), BenchError> {
        let at_a_time = ((QUEUE_MIB << 20) / 2 / self.len as u64).clamp(1, KEYS_LIMIT as u64);
        let mut first = all.start;
        while first < all.end {
            let some = first..all.end.min(first + at_a_time);
            let puts = stream::iter(some.clone().map(|number| self.put(number)));
            puts.buffer_unordered(IN_FLIGHT).try_collect::<()>().await?;
            let began = Instant::now();
            while self.on_ssd(some.clone()).await?.len() < usize_of(some.end - some.start)
                && began.elapsed() < WRITTEN_WITHIN
            {
                sleep(AGAIN).await;
            }
            first = some.end;
        }
        Ok(())
    }

    async fn put(&self, number: u64) -> Result<(), BenchError> {
        let mut bytes = vec![0; self.len];
        content::fill(number, &mut bytes);
        let (root, parent) = place_in_chain(number);
        let reserve = Reserve {
            part: name(number),
            len: self.len as u64,
            codec: Codec::Raw,
            chunk_len: DEFAULT_CHUNK,
            content: MODEL.content,
            root,
            parent,
            origin_hash: None,
        };
        self.connection.put(&reserve, bytes.into()).await?;
        Ok(())
    }

    /// Those that a lookup finds on the ssd.
    pub(super) async fn on_ssd(&self, all: Range<u64>) -> Result<Vec<u64>, BenchError> {
        let mut found = Vec::new();
        for first in all.clone().step_by(KEYS_LIMIT) {
            let some = first..all.end.min(first + KEYS_LIMIT as u64);
            let keys = some.clone().map(content::key).collect();
            let lookup = Lookup { layout: MODEL.layout, part: PartNumber(0), keys };
            let tiers = self.connection.lookup(&lookup).await?;
            let on_ssd = some.zip(tiers).filter(|(_, tiers)| tiers.has(Tier::Ssd));
            found.extend(on_ssd.map(|(number, _)| number));
        }
        Ok(found)
    }

    /// Reads all of these; how many were served. Every byte of them is compared.
    pub(super) async fn read_all(&self, numbers: &[u64]) -> Result<u64, BenchError> {
        let reads = stream::iter(numbers.iter().map(|number| self.is_served(*number)));
        let count = async |served, is_served| Ok(served + u64::from(is_served));
        reads.buffer_unordered(IN_FLIGHT).try_fold(0, count).await
    }

    /// Asks for these in turn until one is served.
    pub(super) async fn first_served(&self, numbers: &[u64]) -> Result<(), BenchError> {
        loop {
            for number in numbers {
                if self.is_served(*number).await? {
                    return Ok(());
                }
            }
            sleep(AGAIN).await;
        }
    }

    /// Whether a read is answered with the bytes that were put; `false`: it is a miss.
    async fn is_served(&self, number: u64) -> Result<bool, BenchError> {
        let read = Read {
            part: name(number),
            offset: 0,
            len: u64::MAX,
            generation: None,
            class: Class::Demand,
            verify: false,
            content: MODEL.content,
        };
        let len = self.len;
        match self.connection.read(&read, move |_| Ok(Buffer::new(Vec::new(), len))).await {
            Ok((landed, _)) => {
                content::check(number, &landed.into_bytes())?;
                Ok(true)
            }
            Err(TransferError::Refused { code: Code::Miss, .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

fn usize_of(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}
