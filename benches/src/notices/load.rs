//! Clients that put chains of blocks, root first, as fast as the node takes them.

use super::{Args, MODEL};
use crate::{content, error::BenchError};
use larder_client::{
    ClientError, TransferError,
    connection::{Identity, PutOutcome},
    local::{LocalSession, PartAttributes},
};
use larder_proto::{PartNumber, frame::Code, part::PartRef};
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{task::JoinSet, time::sleep};

/// The pause of a client whose put the node had no room for.
const NO_ROOM: Duration = Duration::from_millis(1);

/// Clients that are putting.
#[derive(Debug)]
pub(super) struct Load {
    shared: Arc<Shared>,
    clients: JoinSet<Result<(), BenchError>>,
}

/// What was put in a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Put {
    /// Blocks: those of the numbers below.
    pub(super) blocks: u64,
    /// Puts that the node had no room for, and that were tried again.
    pub(super) refused: u64,
}

#[derive(Debug)]
struct Shared {
    chain: u64,
    len: usize,
    next_chain: AtomicU64,
    blocks: AtomicU64,
    refused: AtomicU64,
    stop: AtomicBool,
}

impl Load {
    /// Connects all clients and lets them put.
    pub(super) async fn start(args: &Args, socket: &Path) -> Result<Self, BenchError> {
        let shared = Arc::new(Shared {
            chain: args.chain,
            len: args.block_kib as usize * 1024,
            next_chain: AtomicU64::new(0),
            blocks: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let mut clients = JoinSet::new();
        for _ in 0..args.clients {
            let identity = Identity::client("larder-bench");
            let session = LocalSession::connect(socket, &identity).await?;
            clients.spawn(Arc::clone(&shared).put_chains(session));
        }
        Ok(Self { shared, clients })
    }

    /// Blocks put so far.
    pub(super) fn blocks(&self) -> u64 {
        self.shared.blocks.load(Ordering::Relaxed)
    }

    /// Clients end before they are told to only by an error.
    pub(super) fn check(&mut self) -> Result<(), BenchError> {
        match self.clients.try_join_next() {
            Some(ended) => ended?,
            None => Ok(()),
        }
    }

    /// Lets the clients end the chains that they are at.
    pub(super) async fn stop(mut self) -> Result<Put, BenchError> {
        self.shared.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.clients.join_next().await {
            ended??;
        }
        Ok(Put { blocks: self.blocks(), refused: self.shared.refused.load(Ordering::Relaxed) })
    }
}

impl Shared {
    async fn put_chains(self: Arc<Self>, session: LocalSession) -> Result<(), BenchError> {
        let mut bytes = vec![0; self.len];
        content::fill(0, &mut bytes);
        while !self.stop.load(Ordering::Relaxed) {
            let first = self.next_chain.fetch_add(1, Ordering::Relaxed) * self.chain;
            for number in first..first + self.chain {
                content::stamp(number, &mut bytes);
                let attributes = PartAttributes {
                    content: MODEL.content,
                    root: content::key(first),
                    parent: (number > first).then(|| content::key(number - 1)),
                    origin_hash: None,
                };
                self.put(&session, number, &attributes, &bytes).await?;
                self.blocks.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Until the node takes it: a chain with a block left out would be no chain.
    async fn put(
        &self,
        session: &LocalSession,
        number: u64,
        attributes: &PartAttributes,
        bytes: &[u8],
    ) -> Result<(), BenchError> {
        let key = content::key(number);
        let part = PartRef { key, layout: MODEL.layout, part: PartNumber(0) };
        loop {
            match session.put(part, attributes, bytes).await {
                Ok(PutOutcome::Stored(_)) => return Ok(()),
                Ok(other) => {
                    let answer = format!("{other:?}");
                    return Err(BenchError::Answer { doing: "put a fresh block", answer });
                }
                Err(ClientError::Transfer(TransferError::Refused { code: Code::Full, .. })) => {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                    sleep(NO_ROOM).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}
