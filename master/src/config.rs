//! The configuration of a master: `master.toml`, `LARDER_MASTER__*`, flags.

use larder_daemon::{
    address::{ListenAddress, check_listen},
    config::{ByteSize, DaemonConfig, DaemonKind, HumanDuration, ProcessSettings, Rules},
    log::LogConfig,
};
use std::path::PathBuf;

larder_daemon::settings! {
    /// The configuration of a master.
    pub struct MasterConfig {
        /// Where the hard state lies: cluster id, term, known nodes, registered models.
        pub state_dir: PathBuf = PathBuf::from("/var/lib/larder/master"),
        /// How long a stop may take.
        pub stop_grace: HumanDuration = HumanDuration::from_secs(10),
        /// Allows listening beyond loopback without TLS.
        pub insecure: bool = false,
        /// The gRPC service for nodes, clients and larderctl.
        pub control: ControlConfig,
        /// Nodes and their sessions.
        pub nodes: NodesConfig,
        /// The table of who holds what.
        pub index: IndexConfig,
        /// Metrics and health.
        pub metrics: MetricsConfig,
        /// Logs.
        pub log: LogConfig,
    }
}

larder_daemon::settings! {
    /// The `[control]` table.
    pub struct ControlConfig {
        /// Where to listen.
        pub listen: ListenAddress = ListenAddress::loopback(7400),
        /// Largest message taken.
        pub message_limit: ByteSize = ByteSize::mib(4),
        /// Most block keys of one call.
        pub keys_limit: u32 = 16_384,
        /// Most calls in progress on one connection; further ones wait there.
        pub calls_limit: u32 = 256,
        /// How long an eviction waits for the answers of nodes.
        pub command_timeout: HumanDuration = HumanDuration::from_secs(10),
    }
}

larder_daemon::settings! {
    /// The `[nodes]` table.
    pub struct NodesConfig {
        /// Most nodes known at a time.
        pub limit: u32 = 4096,
        /// How often a node says that it lives. A node that is silent for three beats has no session
        /// any more and is left out of answers.
        pub heartbeat: HumanDuration = HumanDuration::from_secs(1),
        /// A node without a session is forgotten after this time.
        pub ttl: HumanDuration = HumanDuration::from_secs(5),
    }
}

larder_daemon::settings! {
    /// The `[index]` table.
    pub struct IndexConfig {
        /// Most entries: blocks times the nodes that hold them. Further ones are left out, and answers
        /// say so. An entry takes about 48 bytes.
        pub entries_limit: u64 = 64_000_000,
        /// Most registered model versions.
        pub models_limit: u32 = 4096,
    }
}

larder_daemon::settings! {
    /// The `[metrics]` table.
    pub struct MetricsConfig {
        /// Where `/metrics` and `/health` are served.
        pub listen: ListenAddress = ListenAddress::loopback(7410),
    }
}

impl DaemonConfig for MasterConfig {
    const KIND: DaemonKind = DaemonKind::Master;
    const ABOUT: &'static str = "Knows which node holds which block, and answers lookups";

    fn validate(&self, rules: &mut Rules<'_>) {
        let Self { state_dir, stop_grace, insecure, control, nodes, index, metrics, log: _ } = self;
        rules.key("state_dir").must(!state_dir.as_os_str().is_empty(), "not be empty");
        rules.key("stop_grace").must(!stop_grace.get().is_zero(), "be above 0s");
        check_listen(rules, "control.listen", &control.listen, false, *insecure);
        check_listen(rules, "metrics.listen", &metrics.listen, false, *insecure);
        rules
            .key("control.message_limit")
            .must(control.message_limit >= ByteSize::mib(4), "be at least 4MiB, which nodes send")
            .must(control.message_limit <= ByteSize::mib(64), "be at most 64MiB");
        rules
            .key("control.keys_limit")
            .must((1..=65_536).contains(&control.keys_limit), "be from 1 to 65536");
        rules.key("control.calls_limit").must(control.calls_limit > 0, "be above 0");
        rules
            .key("control.command_timeout")
            .must(!control.command_timeout.get().is_zero(), "be above 0s");
        rules.key("nodes.limit").must(nodes.limit > 0, "be above 0");
        let beat = nodes.heartbeat.get();
        rules
            .key("nodes.heartbeat")
            .must(beat.as_millis() >= 10, "be at least 10ms")
            .must(beat.as_secs() <= 60, "be at most 60s");
        rules.key("nodes.ttl").must(nodes.ttl.get() >= beat, "be at least nodes.heartbeat");
        rules.key("index.entries_limit").must(index.entries_limit > 0, "be above 0");
        rules.key("index.models_limit").must(index.models_limit > 0, "be above 0");
    }

    fn process(&self) -> ProcessSettings<'_> {
        ProcessSettings {
            log: &self.log,
            metrics_listen: Some(&self.metrics.listen),
            stop_grace: self.stop_grace.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_daemon::config::check_values;

    /// One test a rule: the message names the key.
    #[test]
    fn every_broken_rule_names_its_key() {
        check_values(&MasterConfig::default()).unwrap();
        type Break = fn(&mut MasterConfig);
        let broken: [(&str, Break); 10] = [
            ("state_dir", |c| c.state_dir = PathBuf::new()),
            ("stop_grace", |c| c.stop_grace = HumanDuration::from_secs(0)),
            ("control.listen", |c| c.control.listen = "0.0.0.0:7400".parse().unwrap()),
            ("metrics.listen", |c| c.metrics.listen = "0.0.0.0:7410".parse().unwrap()),
            ("control.message_limit", |c| c.control.message_limit = ByteSize::mib(1)),
            ("control.keys_limit", |c| c.control.keys_limit = 0),
            ("control.command_timeout", |c| {
                c.control.command_timeout = HumanDuration::from_secs(0)
            }),
            ("nodes.heartbeat", |c| c.nodes.heartbeat = HumanDuration::from_secs(61)),
            ("nodes.ttl", |c| c.nodes.ttl = HumanDuration::from_secs(0)),
            ("index.entries_limit", |c| c.index.entries_limit = 0),
        ];
        for (key, break_it) in broken {
            let mut config = MasterConfig::default();
            break_it(&mut config);
            let error = check_values(&config).unwrap_err().to_string();
            assert!(error.contains(key), "{key}: {error}");
        }
    }
}
