//! A node as a master sees it: one real session with events, digests and heartbeats, and nothing behind it.

use super::MODEL;
use crate::{content::key, error::BenchError};
use futures_util::stream;
use larder_proto::{
    BlockKey, PartNumber, Tier, TierSet,
    block_key::self_check,
    control::{
        self, MasterMessage, NodeMessage, Welcome, master_client::MasterClient, master_message,
        node_message::Message,
    },
    event::{self, PartSet, PartSetDef, Record, RecordKind, SHARDS, SetDigester, Shard},
    ids::{Incarnation, TenantName},
};
use std::time::Duration;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};
use tonic::{Streaming, transport::Channel};

/// Records of one message: 640 KiB, what a node sends.
const RECORDS: u64 = 16_384;
/// Messages that may wait for their acknowledgement.
const WINDOW: u64 = 8;
/// The number of the one part set.
const SET: u32 = 1;

/// See the module. Block `n` (from 0) is event `n + 1`.
#[derive(Debug)]
pub(super) struct SimulatedNode {
    to_master: mpsc::Sender<NodeMessage>,
    from_master: Streaming<MasterMessage>,
    heartbeat: Duration,
    next_beat: Instant,
    sent: u64,
    acknowledged: u64,
    digester: SetDigester,
    digests: [u64; SHARDS],
}

impl SimulatedNode {
    /// Opens a session.
    pub(super) async fn connect(mut master: MasterClient<Channel>) -> Result<Self, BenchError> {
        let (to_master, mut outgoing) = mpsc::channel(2);
        let outgoing = stream::poll_fn(move |cx| outgoing.poll_recv(cx));
        let session = master.session(outgoing);
        let hello = control::Hello {
            protocol: 1,
            node: vec![0x5b; 16].into(),
            incarnation: Incarnation::at_start(None).0,
            name: "larder-bench".to_owned(),
            data_address: "127.0.0.1:1".to_owned(),
            control_address: "127.0.0.1:1".to_owned(),
            key_check: self_check().as_bytes().to_vec().into(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..control::Hello::default()
        };
        send(&to_master, Message::Hello(hello)).await?;
        let from_master = session.await.map_err(failed("open a session"))?.into_inner();
        let set = definition()?;
        let mut node = Self {
            to_master,
            from_master,
            heartbeat: Duration::from_secs(1),
            next_beat: Instant::now(),
            sent: 0,
            acknowledged: 0,
            digester: SetDigester::new(&set),
            digests: [0; SHARDS],
        };
        let welcome = node.welcome().await?;
        node.heartbeat = Duration::from_millis(u64::from(welcome.heartbeat_ms) / 2);
        let sets = vec![control::PartSetDef {
            set: SET,
            tenant: set.tenant.as_bytes().to_vec().into(),
            content: MODEL.content.as_bytes().to_vec().into(),
            layout: MODEL.layout.as_bytes().to_vec().into(),
            parts: set.parts.as_bytes().to_vec().into(),
        }];
        let define = control::Events { first_seq: 1, sets, ..control::Events::default() };
        send(&node.to_master, Message::Events(define)).await?;
        Ok(node)
    }

    async fn welcome(&mut self) -> Result<Welcome, BenchError> {
        match self.receive().await? {
            Some(master_message::Message::Welcome(welcome)) if welcome.refused.is_empty() => {
                Ok(welcome)
            }
            other => Err(odd("open a session", &other)),
        }
    }

    /// Stores blocks until there are `entries`; returns when the master has applied them all and its digests
    /// agree with ours.
    pub(super) async fn store_up_to(&mut self, entries: u64) -> Result<(), BenchError> {
        while self.sent < entries {
            let first = self.sent;
            self.sent = entries.min(first + RECORDS);
            let mut records = Vec::with_capacity(event::RECORD_LEN * usize_of(RECORDS));
            for number in first..self.sent {
                let (key, tiers) = (key(number), TierSet::of(Tier::Dram));
                self.digests[usize::from(Shard::of(&key).0)] ^= self.digester.digest(&key, tiers);
                event::push_record(&mut records, &stored(key, tiers));
            }
            let events = control::Events {
                first_seq: first + 1,
                records: records.into(),
                ..control::Events::default()
            };
            send(&self.to_master, Message::Events(events)).await?;
            while self.sent - self.acknowledged > WINDOW * RECORDS {
                self.take_ack().await?;
            }
        }
        while self.acknowledged < self.sent {
            self.take_ack().await?;
        }
        self.beat().await?;
        // Its acknowledgement; a `Resync` after it would say that digests differ.
        self.take_ack().await
    }

    /// Keeps the session alive until an error.
    pub(super) async fn keep_alive(&mut self) -> Result<std::convert::Infallible, BenchError> {
        loop {
            match timeout_at(self.next_beat, self.take_ack()).await {
                Ok(taken) => taken?,
                Err(_) => self.beat().await?,
            }
        }
    }

    async fn take_ack(&mut self) -> Result<(), BenchError> {
        match self.receive().await? {
            Some(master_message::Message::Ack(ack)) => {
                self.acknowledged = ack.seq;
                Ok(())
            }
            other => Err(odd("store blocks", &other)),
        }
    }

    async fn beat(&mut self) -> Result<(), BenchError> {
        let digests: Vec<u8> = self.digests.iter().flat_map(|d| d.to_le_bytes()).collect();
        let beat = control::Heartbeat {
            seq: self.sent,
            digests: digests.into(),
            blocks: self.sent,
            ..control::Heartbeat::default()
        };
        self.next_beat = Instant::now() + self.heartbeat;
        send(&self.to_master, Message::Heartbeat(beat)).await
    }

    async fn receive(&mut self) -> Result<Option<master_message::Message>, BenchError> {
        let message = self.from_master.message().await.map_err(failed("hear from the master"))?;
        Ok(message.and_then(|message| message.message))
    }
}

fn definition() -> Result<PartSetDef, BenchError> {
    let parts = PartSet::of([PartNumber(0)]).map_err(larder_client::TransferError::from)?;
    Ok(PartSetDef { tenant: TenantName::default().id(), model: MODEL, parts })
}

fn stored(key: BlockKey, tiers: TierSet) -> Record {
    Record { key, set: SET, tiers, kind: RecordKind::Stored, reserved: 0 }
}

async fn send(to: &mpsc::Sender<NodeMessage>, message: Message) -> Result<(), BenchError> {
    let sent = to.send(NodeMessage { message: Some(message) }).await;
    sent.map_err(|_| odd("send to the master", &None))
}

/// A failed call, with what was asked.
pub(super) fn failed(doing: &'static str) -> impl FnOnce(tonic::Status) -> BenchError {
    move |status| BenchError::Master { doing, status: Box::new(status) }
}

fn odd(doing: &'static str, message: &Option<master_message::Message>) -> BenchError {
    let answer = match message {
        Some(message) => format!("{message:?}"),
        None => "the session ended".to_owned(),
    };
    BenchError::Answer { doing, answer }
}

fn usize_of(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}
