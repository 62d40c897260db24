//! The node's metrics: names, labels and what they mean.

use crate::{eviction::PolicyName, node::Node};
use larder_proto::frame::Code;
use metrics::{Counter, counter, gauge};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of parts moved by this node over its data plane. Label `direction`: `in`, `out`.
pub const TRANSFER_BYTES_TOTAL: &str = "larder_node_transfer_bytes_total";
/// Requests that were refused. Label `code`: the closed set of the data plane.
pub const REFUSED_TOTAL: &str = "larder_node_refused_total";
/// Leases that were granted to local readers.
pub const LEASES_TOTAL: &str = "larder_node_leases_total";
/// Leases that are open.
pub const LEASES: &str = "larder_node_leases";
/// Bytes kept for readers whose socket is gone while their process lives.
pub const QUARANTINED_BYTES: &str = "larder_node_quarantined_bytes";
/// Bytes of all staging areas, beside the arena.
pub const STAGING_BYTES: &str = "larder_node_staging_bytes";
/// Parts brought from peers. Label `result`: `brought`, `joined` (another pull brought it), `failed`.
pub const PULLS_TOTAL: &str = "larder_node_pulls_total";
/// Bytes of a tier. Label `tier`.
pub const CAPACITY_BYTES: &str = "larder_node_capacity_bytes";
/// Bytes in use, whole pages. Label `tier`.
pub const USED_BYTES: &str = "larder_node_used_bytes";
/// Stored parts. Label `tier`.
pub const PARTS: &str = "larder_node_parts";
/// 1 for the eviction policy that runs. Labels `tier`, `policy`.
pub const EVICTION_POLICY_INFO: &str = "larder_node_eviction_policy_info";
/// What became of puts and blocks. Label `event`: `committed`, `aborted`, `late_commit`, `evicted`,
/// `damaged`, `refused_full`, `unannounced`.
pub const CATALOG_EVENTS_TOTAL: &str = "larder_node_catalog_events_total";

/// Which way bytes moved.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Direction {
    In,
    Out,
}

pub(crate) fn transfer_bytes(direction: Direction) -> Counter {
    let direction = match direction {
        Direction::In => "in",
        Direction::Out => "out",
    };
    counter!(TRANSFER_BYTES_TOTAL, "direction" => direction)
}

pub(crate) fn refusals(code: Code) -> Counter {
    counter!(REFUSED_TOTAL, "code" => code.name())
}

pub(crate) fn leases_granted() -> Counter {
    counter!(LEASES_TOTAL)
}

/// What became of a pull.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pulled {
    Brought,
    Joined,
    Failed,
}

pub(crate) fn pulls(pulled: Pulled) -> Counter {
    let result = match pulled {
        Pulled::Brought => "brought",
        Pulled::Joined => "joined",
        Pulled::Failed => "failed",
    };
    counter!(PULLS_TOTAL, "result" => result)
}

/// Says which policy the dram tier runs.
pub(crate) fn policy(name: PolicyName) {
    gauge!(EVICTION_POLICY_INFO, "tier" => "dram", "policy" => name.to_string()).set(1.0);
}

/// The catalog's counts, by their label.
pub fn catalog_events(node: &Node) -> [(&'static str, u64); 7] {
    let counters = node.catalog().counters();
    let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    [
        ("committed", value(&counters.commits)),
        ("aborted", value(&counters.aborts)),
        ("late_commit", value(&counters.late_commits)),
        ("evicted", value(&counters.evicted_blocks)),
        ("damaged", value(&counters.damaged_parts)),
        ("refused_full", value(&counters.refused_full)),
        ("unannounced", value(&counters.unannounced_blocks)),
    ]
}

/// Brings the gauges, and the counters that the catalog keeps itself, up to date.
#[expect(clippy::cast_precision_loss, reason = "gauges are floats; sizes are far below 2^52")]
pub fn update(node: &Node) {
    let catalog = node.catalog();
    gauge!(CAPACITY_BYTES, "tier" => "dram").set(catalog.arena().capacity_bytes() as f64);
    gauge!(USED_BYTES, "tier" => "dram").set(catalog.arena().used_bytes() as f64);
    gauge!(PARTS, "tier" => "dram").set(catalog.part_count() as f64);
    gauge!(LEASES).set(node.leases().count() as f64);
    gauge!(STAGING_BYTES).set(node.staging_bytes.load(Ordering::Relaxed) as f64);
    gauge!(QUARANTINED_BYTES).set(node.leases().quarantined_bytes() as f64);
    for (event, value) in catalog_events(node) {
        counter!(CATALOG_EVENTS_TOTAL, "event" => event).absolute(value);
    }
}
