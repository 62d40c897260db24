//! Answers that need others: matches, fetches, registrations. Each runs in a task of its connection.

use super::{
    Reader,
    connection::{Served, TaskAnswer, Untold},
    requests::Tenancy,
};
use crate::{
    catalog::{Found, PartRead},
    node::Node,
    pull::Wanted,
};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use larder_client::{error::TransferError, locations::Sources};
use larder_proto::{
    BlockKey, PartName,
    control::LocateRequest,
    frame::{
        Class, Code, Empty, Failed, Fetch, FetchItem, KEYS_LIMIT, Leased, Match, Op, Read, ReadOk,
        Register, Source,
    },
    part::PartRef,
    wire::{ShortText, Wire},
};
use std::{collections::HashMap, future::Future, sync::Arc, time::Duration};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};

/// Why a read or lease fails that finds nothing.
pub(super) const MISS: &str = "the part is not here";
/// Why a lease is not granted.
pub(super) const TOO_MANY_LEASES: &str = "as many leases are open as may be";
/// Parts that one fetch brings at a time: enough to fill a link, few enough to keep the order wanted.
const PULLS_AT_A_TIME: usize = 8;
/// The longest deadline of a fetch.
const DEADLINE_LIMIT: Duration = Duration::from_secs(120);

/// Where a task sends its answers.
struct Answers {
    request: u64,
    to: mpsc::Sender<TaskAnswer>,
}

impl Answers {
    /// An answer that the connection does not take is dropped with what it holds: the connection is gone,
    /// and its tasks end with it.
    async fn send(&self, op: Op, body: Vec<u8>, last: bool) {
        let request = self.request;
        let answer = TaskAnswer { request, op, body, payload: None, lease: None, last };
        let _ = self.to.send(answer).await;
    }

    /// The same with a payload, as the last.
    async fn send_payload(&self, op: Op, body: Vec<u8>, payload: Bytes, class: Class) {
        let (request, payload) = (self.request, Some((payload, class)));
        let answer = TaskAnswer { request, op, body, payload, lease: None, last: true };
        let _ = self.to.send(answer).await;
    }

    /// The same with a lease, which ends if its reader is never told of it.
    async fn send_lease(&self, node: &Arc<Node>, reader: &Reader, leased: &Leased, last: bool) {
        let (request, lease) = (self.request, Some(Untold::new(node, reader, leased.lease)));
        let (op, body) = (Op::Leased, leased.to_wire());
        let _ = self.to.send(TaskAnswer { request, op, body, payload: None, lease, last }).await;
    }

    async fn fail(&self, code: Code, reason: &str, item: u32, last: bool) {
        let failed = Failed { code, item, reason: ShortText::cut(reason) };
        self.send(Op::Failed, failed.to_wire(), last).await;
    }
}

impl Served {
    pub(super) fn start_match(&mut self, request: u64, ask: Match) {
        if ask.keys.len() > KEYS_LIMIT {
            let reason = format!("{} keys, at most {KEYS_LIMIT} in a call", ask.keys.len());
            return self.fail(request, 0, Code::Limit, &reason);
        }
        self.start(request, |node, tenancy, _, answers| async move {
            match node.match_prefix(&tenancy.name, &ask).await {
                Some(matched) => answers.send(Op::Matched, matched.to_wire(), true).await,
                None => {
                    let reason = format!("the layout has no rank {}", ask.rank);
                    answers.fail(Code::Layout, &reason, 0, true).await;
                }
            }
        });
    }

    pub(super) fn start_register(&mut self, request: u64, register: Register) {
        self.start(request, |node, _, _, answers| async move {
            match node.models().register(&register) {
                Ok((model, _)) => {
                    if let Err(error) = node.masters.register(&model).await
                        && !node.masters.is_empty()
                    {
                        // The registrar goes on trying; blocks are stored and announced meanwhile.
                        tracing::info!(%error, "model version not yet known to every master");
                    }
                    answers.send(Op::Done, Empty {}.to_wire(), true).await;
                }
                Err(error) => answers.fail(Code::Limit, &error.to_string(), 0, true).await,
            }
        });
    }

    pub(super) fn start_fetch(&mut self, request: u64, fetch: Fetch) {
        if fetch.items.len() > KEYS_LIMIT {
            let reason = format!("{} parts, at most {KEYS_LIMIT} in a call", fetch.items.len());
            self.fail(request, 0, Code::Limit, &reason);
            return self.done(Op::FetchDone, request);
        }
        if self.tasks.len() >= self.node.limits().requests as usize {
            self.fail(request, 0, Code::Busy, "as many requests are open as may be");
            return self.done(Op::FetchDone, request);
        }
        self.start(request, |node, tenancy, reader, answers| async move {
            let Some(reader) = reader else { return };
            let fetching = Fetching { node, tenancy, reader, fetch, answers };
            fetching.run().await;
        });
    }

    /// Reads a part that lies on an ssd alone.
    pub(super) fn start_read(&mut self, request: u64, read: Read, name: PartName) {
        self.start(request, |node, _, _, answers| async move {
            match node.bring_up_in_turn(&name).await {
                None => answers.fail(Code::Miss, MISS, 0, true).await,
                Some(part) => match range_of(&node, &name, &read, part) {
                    Ok((ok, payload)) => {
                        node.count_sent(ok.len);
                        let class = read.class;
                        answers.send_payload(Op::ReadOk, ok.to_wire(), payload, class).await;
                    }
                    Err((code, reason)) => answers.fail(code, &reason, 0, true).await,
                },
            }
        });
    }

    /// Leases a part that lies on an ssd alone.
    pub(super) fn start_lease(&mut self, request: u64, name: PartName) {
        self.start(request, |node, _, reader, answers| async move {
            let Some(reader) = reader else { return };
            let Some(part) = node.bring_up_in_turn(&name).await else {
                return answers.fail(Code::Miss, MISS, 0, true).await;
            };
            match node.lease(&reader, name, part, 0, Source::Local, node.id()) {
                Some(leased) => answers.send_lease(&node, &reader, &leased, true).await,
                None => answers.fail(Code::Busy, TOO_MANY_LEASES, 0, true).await,
            }
        });
    }

    fn start<F>(
        &mut self,
        request: u64,
        task: impl FnOnce(Arc<Node>, Tenancy, Option<Reader>, Answers) -> F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let Some(tenancy) = self.tenancy.clone() else { return };
        // Tasks that were cancelled count until they have ended.
        if self.tasks.len() >= self.node.limits().requests as usize {
            return self.fail(request, 0, Code::Busy, "as many requests are open as may be");
        }
        let reader = self.local.as_ref().map(|local| local.reader.clone());
        let answers = Answers { request, to: self.answers.clone() };
        let handle = self.tasks.spawn(task(Arc::clone(&self.node), tenancy, reader, answers));
        self.running.insert(request, handle);
    }
}

/// A fetch under way: parts of this node first, the others as they land.
struct Fetching {
    node: Arc<Node>,
    tenancy: Tenancy,
    reader: Reader,
    fetch: Fetch,
    answers: Answers,
}

impl Fetching {
    async fn run(&self) {
        let limit = Duration::from_millis(u64::from(self.fetch.deadline_ms));
        let deadline = Instant::now() + limit.min(DEADLINE_LIMIT);
        let (mut missing, mut on_ssd) = (Vec::new(), Vec::new());
        for (item, wanted) in self.fetch.items.iter().enumerate() {
            let name = self.name(wanted);
            match self.node.catalog().find(&name) {
                Some(Found::Here(read)) => {
                    self.answer(item, name, Ok((read, self.node.id()))).await;
                }
                Some(Found::OnSsd(_)) => on_ssd.push((item, name)),
                None => missing.push((item, name)),
            }
        }
        if !missing.is_empty() || !on_ssd.is_empty() {
            let located = timeout_at(deadline, self.locate(&missing)).await.unwrap_or_default();
            let pulls = on_ssd.into_iter().chain(missing).map(|(item, name)| {
                let sources = located.get(&name.part.key).cloned().unwrap_or_default();
                self.bring(item, name, sources, deadline, limit)
            });
            let mut landed = stream::iter(pulls).buffer_unordered(PULLS_AT_A_TIME);
            while landed.next().await.is_some() {}
        }
        self.answers.send(Op::FetchDone, Empty {}.to_wire(), true).await;
    }

    async fn bring(
        &self,
        item: usize,
        name: PartName,
        sources: Sources,
        deadline: Instant,
        limit: Duration,
    ) {
        let wanted = Wanted {
            tenant: self.tenancy.name.clone(),
            model: self.fetch.model,
            name,
            class: self.fetch.class,
            deadline,
        };
        let pull = self.node.pull(&wanted, &sources);
        let brought = timeout_at(deadline, pull).await;
        let brought = brought.unwrap_or(Err(TransferError::Deadline(limit)));
        self.answer(item, name, brought).await;
    }

    async fn answer(
        &self,
        item: usize,
        name: PartName,
        brought: Result<crate::pull::Brought, TransferError>,
    ) {
        let item = u32::try_from(item).unwrap_or(u32::MAX);
        let (read, from) = match brought {
            Ok(brought) => brought,
            Err(TransferError::Refused { code, reason }) => {
                return self.answers.fail(code, &reason, item, false).await;
            }
            Err(error) => {
                let code = code_of(&error);
                return self.answers.fail(code, &error.to_string(), item, false).await;
            }
        };
        let source = if from == self.node.id() { Source::Local } else { Source::Peer };
        match self.node.lease(&self.reader, name, read, item, source, from) {
            Some(leased) => {
                self.answers.send_lease(&self.node, &self.reader, &leased, false).await;
            }
            None => self.answers.fail(Code::Busy, TOO_MANY_LEASES, item, false).await,
        }
    }

    fn name(&self, item: &FetchItem) -> PartName {
        let layout = self.fetch.model.layout;
        let part = PartRef { key: item.key, layout, part: item.part };
        PartName { tenant: self.tenancy.tenant, part }
    }

    /// Sources of the missing blocks: from the cache, and from one question for the rest.
    async fn locate(&self, missing: &[(usize, PartName)]) -> HashMap<BlockKey, Sources> {
        let (tenant, model) = (self.tenancy.tenant, self.fetch.model);
        let cached = |key: &BlockKey| self.node.locations.get(tenant, model, key);
        let unknown: Vec<BlockKey> = missing
            .iter()
            .map(|(_, name)| name.part.key)
            .filter(|key| cached(key).is_none())
            .collect();
        if !unknown.is_empty() && !self.node.masters.is_empty() {
            let mut keys = Vec::with_capacity(unknown.len() * 32);
            unknown.iter().for_each(|key| key.put(&mut keys));
            let request = LocateRequest {
                tenant: self.tenancy.name.as_str().to_owned(),
                content: model.content.as_bytes().to_vec().into(),
                layout: model.layout.as_bytes().to_vec().into(),
                keys: keys.into(),
            };
            let asked = self.node.masters.ask(|mut master| {
                let request = request.clone();
                async move { master.locate(request).await }
            });
            let learned = asked.await.map_err(|error| error.to_string()).and_then(|reply| {
                let learned = self.node.locations.learn_located(tenant, model, &unknown, &reply);
                learned.map_err(|error| error.to_string())
            });
            if let Err(error) = learned {
                tracing::debug!(error, "locate");
            }
        }
        let keys = missing.iter().map(|(_, name)| name.part.key);
        keys.filter_map(|key| Some((key, cached(&key)?))).collect()
    }
}

/// The range of a part that a read asks for, and what is said of it.
pub(super) fn range_of(
    node: &Node,
    name: &PartName,
    read: &Read,
    part: PartRead,
) -> Result<(ReadOk, Bytes), (Code, String)> {
    let info = Arc::clone(part.info());
    if read.generation.is_some_and(|generation| generation != info.generation) {
        let reason = format!("the part is here as generation {}", info.generation);
        return Err((Code::Gone, reason));
    }
    let (offset, len) = read
        .range(info.len, info.sums.chunk_len)
        .map_err(|error| (Code::Limit, error.to_string()))?;
    if read.verify
        && let Err(damaged) = part.verify()
    {
        // Withdrawn before the miss is answered, so that a recompute can replace it (P1).
        node.catalog().withdraw_damaged(name, info.generation);
        return Err((Code::Damaged, damaged.to_string()));
    }
    let answer = ReadOk { info: (*info).clone(), offset, len };
    let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
    let bytes = Bytes::from_owner(InPlace(part));
    Ok((answer, bytes.slice(index(offset)..index(offset + len))))
}

/// A part as the owner of its payload.
struct InPlace(PartRead);

impl AsRef<[u8]> for InPlace {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

/// The code for an error that no peer stated.
fn code_of(error: &TransferError) -> Code {
    match error {
        TransferError::Refused { code, .. } => *code,
        TransferError::Damaged(_) => Code::Damaged,
        TransferError::NoRoom(_) => Code::Full,
        TransferError::OtherPeer(_) => Code::Gone,
        TransferError::Protocol(_)
        | TransferError::Lost(_)
        | TransferError::Silent(_)
        | TransferError::Deadline(_) => Code::Busy,
    }
}
