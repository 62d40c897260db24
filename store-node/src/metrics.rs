//! The node's metrics: names, labels and what they mean.

use crate::{
    eviction::PolicyName,
    node::Node,
    tiering::{Member, Tiering},
    tiers::ssd::Health,
};
use larder_proto::frame::Code;
use metrics::{Counter, Histogram, counter, gauge, histogram};
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
/// `damaged`, `refused_full`, `unannounced`, `demoted` (left dram, stayed on an ssd), `promoted`,
/// `descendant_dropped` (with an ancestor), `found` and `missed` (parts that were asked for), `hint` (of an
/// engine, on the reuse of a chain), `hinted_block` (that a hint changed something for) and `advised_block` (that
/// a master's advice lets go first).
pub const CATALOG_EVENTS_TOTAL: &str = "larder_node_catalog_events_total";
/// How long a master did not know of a change, in seconds: from its entry in the change log to the
/// acknowledgement that covers it. Label `master`: its configured address. Timed are the first change after
/// all were read and at least one in [`TIMED_EVERY`](crate::inventory::log::TIMED_EVERY); those up to the next
/// timed one count with it, though they waited less.
pub const NOTICE_LAG_SECONDS: &str = "larder_node_notice_lag_seconds";

/// What became of parts that were offered to ssds, and of reads from there. Label `event`: `offered`,
/// `committed`, `refused`, of these `queue_full` (`ssd.write_queue`: the disks are slower than what comes), `no_path` (none
/// is healthy with room for it, or writing failed) and `too_long` (for a segment or the queue),
/// `loaded`, `failed_load`, `withdrawn`; and what was taken in of earlier lives: `adopted_record`, `adopted_segment`, `adopted_path` (its adoption has ended).
pub const TIERING_EVENTS_TOTAL: &str = "larder_node_tiering_events_total";
/// Ssd paths of which something of an earlier life may still be taken in: 0 when the node is as warm as it gets.
pub const ADOPTING_PATHS: &str = "larder_node_adopting_paths";
/// Bytes of parts that wait to be written to an ssd.
pub const WRITE_QUEUE_BYTES: &str = "larder_node_write_queue_bytes";
/// Bytes moved by an ssd path, headers included. Labels `path`, `direction`: `read`, `written`, `scrubbed`. With
/// `larder_node_transfer_bytes_total{direction="in"}` it gives the flash bytes written per byte served.
pub const SSD_BYTES_TOTAL: &str = "larder_node_ssd_bytes_total";
/// What happened on an ssd path. Labels `path`, `event`: `read`, `written`, `damaged`,
/// `sealed_segment`, `reclaimed_segment`, `carried`, `scrubbed`.
pub const SSD_EVENTS_TOTAL: &str = "larder_node_ssd_events_total";
/// Whether an ssd path takes part: 1 or 0. Label `path`.
pub const SSD_HEALTHY: &str = "larder_node_ssd_healthy";

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

/// Of the session with the master at this configured address.
pub(crate) fn notice_lag(master: &str) -> Histogram {
    histogram!(NOTICE_LAG_SECONDS, "master" => master.to_owned())
}

/// Says which policy the dram tier runs.
pub(crate) fn policy(name: PolicyName) {
    gauge!(EVICTION_POLICY_INFO, "tier" => "dram", "policy" => name.to_string()).set(1.0);
}

/// Says how many paths are being adopted. Told at once and not with the other gauges: warm is a moment.
#[expect(clippy::cast_precision_loss, reason = "gauges are floats; a node has few paths")]
pub(crate) fn adopting_paths(paths: usize) {
    gauge!(ADOPTING_PATHS).set(paths as f64);
}

/// The catalog's counts, by their label.
pub fn catalog_events(node: &Node) -> [(&'static str, u64); 15] {
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
        ("demoted", value(&counters.demoted_blocks)),
        ("promoted", value(&counters.promoted_parts)),
        ("descendant_dropped", value(&counters.descendants_dropped)),
        ("found", value(&counters.found_parts)),
        ("missed", value(&counters.missed_parts)),
        ("hint", value(&counters.hints)),
        ("hinted_block", value(&counters.hinted_blocks)),
        ("advised_block", value(&counters.advised_blocks)),
    ]
}

/// The ssd tier's counts, by their label.
pub fn tiering_events(tiering: &Tiering) -> [(&'static str, u64); 9] {
    let counters = tiering.counters();
    let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    [
        ("offered", value(&counters.offered)),
        ("committed", value(&counters.committed)),
        ("refused", value(&counters.refused)),
        ("queue_full", value(&counters.queue_full)),
        ("no_path", value(&counters.no_path)),
        ("too_long", value(&counters.too_long)),
        ("loaded", value(&counters.loaded)),
        ("failed_load", value(&counters.failed_loads)),
        ("withdrawn", value(&counters.withdrawn)),
    ]
}

/// What the ssd tier took in of earlier lives, by its label.
pub fn adoption_events(tiering: &Tiering) -> [(&'static str, u64); 3] {
    let (counts, adopting) = tiering.adoption();
    let adopted_paths = tiering.members().len().saturating_sub(adopting) as u64;
    [
        ("adopted_record", counts.records),
        ("adopted_segment", counts.segments),
        ("adopted_path", adopted_paths),
    ]
}

/// The counts of a path, by their label.
pub fn path_events(path: &Member) -> [(&'static str, u64); 7] {
    let counters = path.counters();
    let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    [
        ("read", value(&counters.read_records)),
        ("written", value(&counters.written_records)),
        ("damaged", value(&counters.damaged_records)),
        ("sealed_segment", value(&counters.sealed_segments)),
        ("reclaimed_segment", value(&counters.reclaimed_segments)),
        ("carried", value(&counters.carried_records)),
        ("scrubbed", value(&counters.scrubbed_records)),
    ]
}

#[expect(clippy::cast_precision_loss, reason = "gauges are floats; sizes are far below 2^52")]
fn update_ssds(node: &Node, tiering: &Tiering) {
    let (parts, _) = node.catalog().parts_on_ssd();
    let of_all = |bytes: fn(&Member) -> u64| tiering.members().iter().map(|path| bytes(path)).sum();
    let (capacity, used): (u64, u64) =
        (of_all(|path| path.settings().capacity), of_all(Member::used_bytes));
    gauge!(CAPACITY_BYTES, "tier" => "ssd").set(capacity as f64);
    gauge!(USED_BYTES, "tier" => "ssd").set(used as f64);
    gauge!(PARTS, "tier" => "ssd").set(parts as f64);
    gauge!(WRITE_QUEUE_BYTES).set(tiering.queued_bytes() as f64);
    for (event, value) in tiering_events(tiering).into_iter().chain(adoption_events(tiering)) {
        counter!(TIERING_EVENTS_TOTAL, "event" => event).absolute(value);
    }
    for path in tiering.members() {
        let name = path.settings().name.display().to_string();
        let bytes = |direction: &'static str| counter!(SSD_BYTES_TOTAL, "path" => name.clone(), "direction" => direction);
        let counters = path.counters();
        bytes("read").absolute(counters.read_bytes.load(Ordering::Relaxed));
        bytes("scrubbed").absolute(counters.scrubbed_bytes.load(Ordering::Relaxed));
        bytes("written").absolute(counters.written_bytes.load(Ordering::Relaxed));
        for (event, value) in path_events(path) {
            counter!(SSD_EVENTS_TOTAL, "path" => name.clone(), "event" => event).absolute(value);
        }
        gauge!(SSD_HEALTHY, "path" => name)
            .set(f64::from(u8::from(path.health() == Health::Healthy)));
    }
}

/// Brings the gauges, and the counters that the catalog keeps itself, up to date.
#[expect(clippy::cast_precision_loss, reason = "gauges are floats; sizes are far below 2^52")]
pub fn update(node: &Node) {
    let catalog = node.catalog();
    catalog.tell_time();
    gauge!(CAPACITY_BYTES, "tier" => "dram").set(catalog.arena().capacity_bytes() as f64);
    gauge!(USED_BYTES, "tier" => "dram").set(catalog.arena().used_bytes() as f64);
    gauge!(PARTS, "tier" => "dram").set(catalog.parts_in_dram() as f64);
    gauge!(LEASES).set(node.leases().count() as f64);
    gauge!(STAGING_BYTES).set(node.staging_bytes.load(Ordering::Relaxed) as f64);
    gauge!(QUARANTINED_BYTES).set(node.leases().quarantined_bytes() as f64);
    if let Some(tiering) = node.tiering() {
        update_ssds(node, tiering);
    }
    for (event, value) in catalog_events(node) {
        counter!(CATALOG_EVENTS_TOTAL, "event" => event).absolute(value);
    }
}
