//! The metrics of a master. Counters are kept by [`crate::counters`] and published by every beat of the
//! keeper; a scrape is at most that old.

use crate::{cluster::Cluster, membership::NodeState};

/// Nodes. Label `state`: syncing, up, down.
pub const NODES: &str = "larder_master_nodes";
/// Entries of the index.
pub const INDEX_ENTRIES: &str = "larder_master_index_entries";
/// The most entries of the index.
pub const INDEX_ENTRIES_LIMIT: &str = "larder_master_index_entries_limit";
/// Entries left out of the index at its limit.
pub const INDEX_ENTRIES_LEFT_OUT: &str = "larder_master_index_entries_left_out";
/// Entries of forgotten nodes that wait to be swept.
pub const INDEX_ENTRIES_TO_SWEEP: &str = "larder_master_index_entries_to_sweep";
/// Memory of the index.
pub const INDEX_MEMORY: &str = "larder_master_index_memory_bytes";
/// 1 when answers are complete.
pub const COMPLETE: &str = "larder_master_answers_complete";
/// Registered model versions.
pub const MODELS: &str = "larder_master_models";
/// The term under which commands are given.
pub const TERM: &str = "larder_master_term";

/// Tells the recorder what each metric is.
pub fn describe(cluster: &Cluster) {
    for (_, name, text, _) in cluster.counters().all() {
        metrics::describe_counter!(name, text);
    }
    metrics::describe_gauge!(NODES, "Nodes by state: syncing, up, down");
    metrics::describe_gauge!(INDEX_ENTRIES, "Entries of the index");
    metrics::describe_gauge!(INDEX_ENTRIES_LIMIT, "The most entries of the index");
    metrics::describe_gauge!(INDEX_ENTRIES_LEFT_OUT, "Entries left out of the index at its limit");
    metrics::describe_gauge!(INDEX_ENTRIES_TO_SWEEP, "Entries of forgotten nodes, not swept yet");
    metrics::describe_gauge!(INDEX_MEMORY, metrics::Unit::Bytes, "Memory of the index");
    metrics::describe_gauge!(COMPLETE, "1 when answers are complete");
    metrics::describe_gauge!(MODELS, "Registered model versions");
    metrics::describe_gauge!(TERM, "The term under which commands are given");
}

/// Publishes all figures.
pub fn publish(cluster: &Cluster) {
    for (_, name, _, value) in cluster.counters().all() {
        metrics::counter!(name).absolute(value);
    }
    let nodes = cluster.nodes();
    for state in [NodeState::Syncing, NodeState::Up, NodeState::Down] {
        let count = nodes.iter().filter(|node| node.state == state).count();
        metrics::gauge!(NODES, "state" => state.name()).set(gauge(count as u64));
    }
    let stats = cluster.index().stats();
    metrics::gauge!(INDEX_ENTRIES).set(gauge(stats.entries));
    metrics::gauge!(INDEX_ENTRIES_LIMIT).set(gauge(stats.entries_limit));
    metrics::gauge!(INDEX_ENTRIES_LEFT_OUT).set(gauge(stats.left_out));
    metrics::gauge!(INDEX_ENTRIES_TO_SWEEP).set(gauge(stats.to_sweep));
    metrics::gauge!(INDEX_MEMORY).set(gauge(stats.bytes));
    let complete = cluster.coverage(&cluster.roster()).complete;
    metrics::gauge!(COMPLETE).set(if complete { 1.0 } else { 0.0 });
    metrics::gauge!(MODELS).set(gauge(cluster.registry().read().iter().count() as u64));
    metrics::gauge!(TERM).set(gauge(cluster.life().term.number));
}

/// Exact up to 2^53, which is more than any of these figures.
fn gauge(value: u64) -> f64 {
    value as f64
}
