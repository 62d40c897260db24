//! Bringing a part from a peer into this node's arena.
//!
//! The peer's bytes land in a reserved extent and are verified chunk by chunk on the way; the part
//! becomes visible here when all are there, under a generation of this node, with the origin that the
//! peer recorded. Which source is tried when is decided by [`larder_client::failover`].

use crate::{
    catalog::{Admission, CommitError, PartRead, Producer, Put},
    metrics::{self, Pulled},
    node::Node,
};
use larder_client::{
    connection::Landing,
    error::TransferError,
    failover::{Attempt, first_of},
    locations::Sources,
    peers::NodeAddress,
};
use larder_proto::{
    ModelVersion, PartName,
    frame::{Class, Code, Read, ReadOk, Reserve},
    ids::{NodeId, TenantName},
};
use parking_lot::Mutex;
use std::{
    any::Any,
    collections::HashMap,
    sync::{Arc, Weak},
};
use tokio::{
    sync::Mutex as TurnLock,
    time::{Instant, timeout},
};

/// A part to bring.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) tenant: TenantName,
    pub(crate) model: ModelVersion,
    pub(crate) name: PartName,
    pub(crate) class: Class,
    /// When it is of no use any more.
    pub(crate) deadline: Instant,
}

/// A part that is here now, and where it came from (this node, if it was here already).
pub(crate) type Brought = (PartRead, NodeId);

impl Node {
    /// Brings a part from the first source that can give it.
    pub(crate) async fn pull(
        self: &Arc<Self>,
        wanted: &Wanted,
        sources: &Sources,
    ) -> Result<Brought, TransferError> {
        // One pull of a part at a time; those who come later find it here.
        let turn = self.turns.of(&wanted.name);
        let _turn = turn.lock().await;
        if let Some(read) = self.bring_up(&wanted.name).await {
            metrics::pulls(Pulled::Joined).increment(1);
            return Ok((read, self.id()));
        }
        let mut others = sources.to_vec();
        others.retain(|source| source.node != self.id());
        let forget = |source: &NodeAddress| {
            let key = &wanted.name.part.key;
            self.locations.drop_source(wanted.tenant.id(), wanted.model, key, source.node);
        };
        match first_of(others, forget, |attempt| self.attempt(wanted, attempt)).await {
            Ok((read, source)) => {
                metrics::pulls(Pulled::Brought).increment(1);
                self.count_received(read.info().len);
                Ok((read, source.node))
            }
            Err(error) => {
                tracing::debug!(key = %wanted.name, %error, "pull");
                metrics::pulls(Pulled::Failed).increment(1);
                Err(error)
            }
        }
    }

    /// One attempt. It may take an equal share of the time that is left, so that a source that stalls
    /// leaves the others theirs.
    async fn attempt(
        self: &Arc<Self>,
        wanted: &Wanted,
        attempt: Attempt,
    ) -> Result<PartRead, TransferError> {
        let left = wanted.deadline.saturating_duration_since(Instant::now());
        let share = left / u32::try_from(attempt.others + 1).unwrap_or(u32::MAX);
        let node = attempt.source.node;
        match timeout(share, self.read_from(wanted, attempt)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(TransferError::Lost(format!("node {node} took more than {share:?}"))),
        }
    }

    async fn read_from(
        self: &Arc<Self>,
        wanted: &Wanted,
        Attempt { source, verify, others: _ }: Attempt,
    ) -> Result<PartRead, TransferError> {
        let connection = self.peers.connection(&wanted.tenant, &source).await?;
        let read = Read {
            part: wanted.name.part,
            offset: 0,
            len: u64::MAX,
            generation: None,
            class: wanted.class,
            verify,
            content: wanted.model.content,
        };
        let (node, name, content) = (Arc::clone(self), wanted.name, wanted.model.content);
        let land = move |ok: &ReadOk| {
            if ok.info.origin.content != content {
                let reason = "the peer's part has another content".to_owned();
                return Err(TransferError::Refused { code: Code::Layout, reason });
            }
            node.land(name, ok)
        };
        let (landed, ok) = connection.read(&read, land).await?;
        landed.0.commit(Some(&ok.info.sums)).map_err(|error| match error {
            CommitError::Damaged(damaged) => damaged.into(),
            other => TransferError::Lost(other.to_string()),
        })
    }

    /// Reserves the place where a peer's part lands.
    fn land(&self, name: PartName, ok: &ReadOk) -> Result<PutLanding, TransferError> {
        let origin = &ok.info.origin;
        let reserve = Reserve {
            part: name.part,
            len: ok.info.len,
            codec: ok.info.codec,
            chunk_len: ok.info.sums.chunk_len,
            content: origin.content,
            root: origin.root,
            parent: origin.parent,
            origin_hash: origin.origin_hash.clone(),
        };
        reserve.check()?;
        let producer = Arc::new(Producer {
            name: origin.producer.as_str().to_owned(),
            incarnation: origin.producer_incarnation,
        });
        let copy_of = Some(origin.clone());
        let now = Instant::now();
        match self.catalog().reserve(name, &reserve, &producer, copy_of, now) {
            Admission::Granted(put) => Ok(PutLanding(put)),
            Admission::Full => Err(TransferError::NoRoom(ok.info.len)),
            Admission::Draining => Err(TransferError::Refused {
                code: Code::Draining,
                reason: "this node is about to leave".to_owned(),
            }),
            // Somebody of this host is putting the very part: it will be here without us.
            Admission::Exists(_) | Admission::InProgress { .. } => Err(TransferError::Refused {
                code: Code::Busy,
                reason: "the part is being put here at this moment".to_owned(),
            }),
        }
    }
}

/// A put as the landing of a transfer.
struct PutLanding(Put);

impl Landing for PutLanding {
    fn spare(&mut self) -> &mut [u8] {
        self.0.spare()
    }
    fn advance(&mut self, n: usize) {
        self.0.advance(n);
    }
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

/// One lock for each part that is being brought; those that nobody holds are gone.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    locks: Mutex<HashMap<PartName, Weak<TurnLock<()>>>>,
}

impl Turns {
    pub(crate) fn of(&self, name: &PartName) -> Arc<TurnLock<()>> {
        let mut locks = self.locks.lock();
        if locks.len() > 64 && locks.len().is_power_of_two() {
            locks.retain(|_, lock| lock.strong_count() > 0);
        }
        let held = locks.get(name).and_then(Weak::upgrade);
        held.unwrap_or_else(|| {
            let lock = Arc::new(TurnLock::new(()));
            locks.insert(*name, Arc::downgrade(&lock));
            lock
        })
    }
}
