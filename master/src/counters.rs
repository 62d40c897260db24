//! What a master counts. Plain atomics: the state machines count without knowing of any recorder, and
//! [`crate::metrics`] publishes them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Counts `n` more.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// The count.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $field:ident = $metric:literal;)*) => {
        /// Everything that a master counts, from its start on.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[doc = $doc])* pub $field: Counter,)*
        }

        impl Counters {
            /// Short name, metric name, description and value of each.
            pub fn all(&self) -> Vec<(&'static str, &'static str, &'static str, u64)> {
                vec![$((stringify!($field), $metric, concat!($($doc),*).trim_ascii(), self.$field.get()),)*]
            }
        }
    };
}

counters! {
    /// Sessions that nodes opened.
    sessions = "larder_master_sessions_total";
    /// Sessions that were refused.
    refused_sessions = "larder_master_sessions_refused_total";
    /// Sessions that ended because the node broke a rule of the protocol.
    broken_sessions = "larder_master_sessions_broken_total";
    /// Sessions that ended because the node was silent.
    silent_sessions = "larder_master_sessions_silent_total";
    /// Events of nodes applied.
    events = "larder_master_events_total";
    /// Events that had been applied before.
    repeated_events = "larder_master_events_repeated_total";
    /// Heartbeats and snapshots that came again or late.
    repeated_messages = "larder_master_messages_repeated_total";
    /// Messages of sessions that no longer spoke for their node.
    superseded_messages = "larder_master_messages_superseded_total";
    /// Gaps in the numbers of events.
    gaps = "larder_master_event_gaps_total";
    /// Shards that differed and were asked for.
    resync_shards = "larder_master_resync_shards_total";
    /// Snapshots of shards applied.
    snapshots = "larder_master_snapshots_total";
    /// Records of snapshots applied.
    snapshot_records = "larder_master_snapshot_records_total";
    /// Nodes forgotten.
    nodes_forgotten = "larder_master_nodes_forgotten_total";
    /// Sessions that ended because another one spoke for their node.
    superseded_sessions = "larder_master_sessions_superseded_total";
    /// MatchPrefix calls answered.
    match_calls = "larder_master_match_prefix_calls_total";
    /// Keys in MatchPrefix calls.
    match_keys = "larder_master_match_prefix_keys_total";
    /// Blocks that MatchPrefix calls could use.
    match_blocks = "larder_master_match_prefix_blocks_total";
    /// Locate calls answered.
    locate_calls = "larder_master_locate_calls_total";
    /// Keys in Locate calls.
    locate_keys = "larder_master_locate_keys_total";
    /// Advise calls answered.
    advise_calls = "larder_master_advise_calls_total";
    /// Keys in Advise calls.
    advise_keys = "larder_master_advise_keys_total";
    /// Blocks that nodes were told can be missed: without a parent or a part in the cluster, or kept by another.
    advised_blocks = "larder_master_advised_blocks_total";
    /// Calls refused because a field broke its rule.
    refused_calls = "larder_master_calls_refused_total";
    /// Commands sent to nodes.
    commands = "larder_master_commands_total";
    /// Commands that a node refused or did not answer.
    failed_commands = "larder_master_commands_failed_total";
    /// Model versions registered.
    models_registered = "larder_master_models_registered_total";
    /// Registrations under a display name that another content has.
    name_conflicts = "larder_master_model_name_conflicts_total";
}
