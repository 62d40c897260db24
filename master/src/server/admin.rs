//! Calls of operators and of starting engines: models, nodes, status, evictions.

use super::Shared;
use crate::{
    answers::{BadRequest, field},
    membership::{Node, NodeState},
    registry::{RegisterError, Registration},
};
use bytes::Bytes;
use futures_util::future::join_all;
use larder_daemon::run::chain;
use larder_proto::{
    BlockKey, ContentFingerprint, LayoutFingerprint,
    block_key::self_check,
    control::{self, command::Command},
    ids::{NodeId, TenantName},
    wire::DecodeError,
};
use std::{collections::HashMap, sync::Arc};
use tokio::{task::spawn_blocking, time::Instant};
use tonic::Status;
use tracing::{info, warn};

/// Bytes of a producer's name in a filter.
const PRODUCER_LIMIT: usize = 256;

/// Registers a model version; durable when it returns.
pub(super) async fn register_model(
    shared: &Arc<Shared>,
    request: control::RegisterModelRequest,
) -> Result<control::RegisterModelReply, Status> {
    let counters = shared.cluster.counters();
    let ours = self_check();
    if !request.key_check.is_empty() && request.key_check.as_ref() != ours.as_bytes() {
        counters.refused_calls.add(1);
        return Err(Status::failed_precondition(format!(
            "key_check: the caller computes other block keys than this master (its check value is not \
             {ours}), so nothing that it stores would be found"
        )));
    }
    let _alone = shared.registering.lock().await;
    let checked = shared.cluster.registry().read().check(
        &request.display_name,
        &request.content,
        &request.layout,
    );
    let Registration { version, model, is_new, changes, other_contents } =
        checked.map_err(|error| {
            counters.refused_calls.add(1);
            let text = chain(&error);
            match error {
                RegisterError::Invalid { .. } => Status::invalid_argument(text),
                RegisterError::Full { .. } => Status::resource_exhausted(text),
            }
        })?;
    if changes {
        let (writer, kept) = (Arc::clone(shared), model.clone());
        let written = spawn_blocking(move || writer.hard_state.put_model(&version, &kept)).await;
        let written = written.map_err(|_| Status::internal("the write was lost"))?;
        written.map_err(|error| Status::internal(chain(&error)))?;
        shared.cluster.register(version, model);
        counters.models_registered.add(u64::from(is_new));
        info!(model = %version, display_name = request.display_name, "model registered");
    }
    for other in &other_contents {
        counters.name_conflicts.add(1);
        warn!(
            display_name = request.display_name,
            content = %version.content,
            other_content = %other,
            "two contents have one display name; they are kept apart"
        );
    }
    Ok(control::RegisterModelReply {
        content: Bytes::copy_from_slice(version.content.as_bytes()),
        layout: Bytes::copy_from_slice(version.layout.as_bytes()),
        is_new,
        other_contents: other_contents
            .iter()
            .map(|other| Bytes::copy_from_slice(other.as_bytes()))
            .collect(),
    })
}

/// One row for every display name of every version.
pub(super) fn list_models(shared: &Shared) -> control::ListModelsReply {
    let mut entries: HashMap<_, u64> = HashMap::new();
    for space in shared.cluster.index().spaces() {
        *entries.entry(space.model).or_default() += space.entries;
    }
    let registry = shared.cluster.registry().read();
    let mut models = Vec::new();
    for (version, model) in registry.iter() {
        models.extend(model.names.iter().map(|name| control::Model {
            display_name: name.clone(),
            content: Bytes::copy_from_slice(version.content.as_bytes()),
            layout: Bytes::copy_from_slice(version.layout.as_bytes()),
            content_description: Bytes::copy_from_slice(&model.content),
            layout_description: Bytes::copy_from_slice(&model.layout),
            entries: entries.get(version).copied().unwrap_or(0),
        }));
    }
    control::ListModelsReply { models }
}

/// All nodes that are not forgotten.
pub(super) fn list_nodes(shared: &Shared) -> control::ListNodesReply {
    let now = Instant::now().into_std();
    let roster = shared.cluster.roster();
    let describe = |node: Node| {
        let Node { identity, life, state, since, vitals } = node;
        let location = life.map(|life| life.location);
        let stats = location.and_then(|at| shared.cluster.index().location_stats(at));
        let source = location.and_then(|at| roster.position(at)).map(|at| &roster.sources()[at]);
        control::NodeInfo {
            node: Bytes::copy_from_slice(identity.node.as_bytes()),
            name: identity.name,
            incarnation: life.map_or(0, |life| life.incarnation.0),
            data_address: identity.data_address,
            control_address: identity.control_address,
            state: state.name().to_owned(),
            since_ms: millis(now.saturating_duration_since(since)),
            entries: stats.map_or(0, |stats| stats.entries),
            capacity_bytes: identity.capacity_bytes,
            used_bytes: vitals.used_bytes,
            seq: source.map_or(0, |source| source.seq()),
            version: identity.version,
            draining: vitals.draining,
        }
    };
    control::ListNodesReply { nodes: shared.cluster.nodes().into_iter().map(describe).collect() }
}

/// Figures of this master.
pub(super) fn status(shared: &Shared) -> control::StatusReply {
    let life = shared.cluster.life();
    let stats = shared.cluster.index().stats();
    let counters = shared.cluster.counters().all();
    control::StatusReply {
        cluster: Bytes::copy_from_slice(life.term.cluster.as_bytes()),
        term: life.term.number,
        master_incarnation: life.incarnation.0,
        role: "single".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        uptime_ms: millis(shared.started.elapsed()),
        entries: stats.entries,
        index_bytes: stats.bytes,
        entries_limit: stats.entries_limit,
        entries_left_out: stats.left_out,
        coverage: Some(shared.cluster.coverage(&shared.cluster.roster())),
        counters: counters
            .into_iter()
            .map(|(name, _, _, value)| (name.to_owned(), value))
            .collect(),
    }
}

/// Holds a filter to the rules that the nodes hold it to, before any of them is asked.
pub(super) fn check_filter(
    shared: &Shared,
    request: control::EvictRequest,
) -> Result<(control::EvictFilter, Option<NodeId>), BadRequest> {
    let node = match request.node.as_ref() {
        [] => None,
        bytes => Some(field("node", NodeId::try_from(bytes))?),
    };
    let filter = request.filter.unwrap_or_default();
    field("filter.tenant", filter.tenant.parse::<TenantName>())?;
    if !filter.content.is_empty() {
        field("filter.content", ContentFingerprint::try_from(filter.content.as_ref()))?;
    }
    if !filter.layout.is_empty() {
        field("filter.layout", LayoutFingerprint::try_from(filter.layout.as_ref()))?;
    }
    let within = |what, value: usize, limit: usize| match value <= limit {
        true => Ok(()),
        false => Err(DecodeError::Limit { what, value: value as u64, limit: limit as u64 }),
    };
    field("filter.keys", within("number of keys", filter.keys.len(), shared.keys_limit))?;
    for key in &filter.keys {
        field("filter.keys", BlockKey::try_from(key.as_ref()))?;
    }
    if filter.descendants && filter.keys.is_empty() {
        let (what, rule) = ("descendants", "must come with keys");
        field("filter.descendants", Err::<(), _>(DecodeError::Text { what, rule }))?;
    }
    if !matches!(filter.tier.as_str(), "" | "dram" | "ssd") {
        let (what, rule) = ("tier", "must be dram or ssd");
        field("filter.tier", Err::<(), _>(DecodeError::Text { what, rule }))?;
    }
    field("filter.producer", within("length", filter.producer.len(), PRODUCER_LIMIT))?;
    Ok((filter, node))
}

/// Asks every node that is not forgotten, or the one that is meant, and says of each what it did or why nothing is known of it.
pub(super) async fn evict(
    shared: &Shared,
    filter: control::EvictFilter,
    only: Option<NodeId>,
) -> control::EvictReply {
    let ask = |node: Node| {
        let filter = filter.clone();
        async move {
            let session = node.life.and_then(|life| life.session);
            let outcome = match session.filter(|_| node.state != NodeState::Down) {
                None => Err(super::desk::CommandError::NoSession),
                Some(session) => {
                    shared.cluster.counters().commands.add(1);
                    let (term, patience) = (shared.cluster.life().term, shared.command_timeout);
                    shared.desk.command(session, term, Command::Evict(filter), patience).await
                }
            };
            let mut result = control::NodeResult {
                node: Bytes::copy_from_slice(node.identity.node.as_bytes()),
                name: node.identity.name,
                ..Default::default()
            };
            match outcome {
                Ok(done) => (result.blocks, result.bytes) = (done.blocks, done.bytes),
                Err(error) => {
                    shared.cluster.counters().failed_commands.add(1);
                    result.error = error.to_string();
                }
            }
            result
        }
    };
    let nodes = shared.cluster.nodes().into_iter();
    let asked = nodes.filter(|node| only.is_none_or(|only| node.identity.node == only));
    control::EvictReply { nodes: join_all(asked.map(ask)).await }
}

fn millis(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
