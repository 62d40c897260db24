//! The configuration of a node: `node.toml`, `LARDER_NODE__*`, flags.

use crate::{catalog::Watermarks, eviction::PolicyName, transfer::Limits};
use larder_daemon::{
    address::{AdvertiseAddress, ListenAddress, check_advertise, check_listen},
    config::{ByteSize, DaemonConfig, DaemonKind, HumanDuration, ProcessSettings, Rules},
    log::LogConfig,
};
use std::path::PathBuf;

larder_daemon::settings! {
    /// The configuration of a store node.
    pub struct NodeConfig {
        /// What people call this node. Not set: its host's name.
        pub name: Option<String>,
        /// Where the node keeps its id, its last life and the highest term it has seen.
        pub state_dir: PathBuf = PathBuf::from("/var/lib/larder/node"),
        /// Addresses (`host:port`) of all masters. None: the node serves its own host alone.
        pub masters: Vec<String> = vec!["127.0.0.1:7400".to_owned()],
        /// How long a stop may take.
        pub stop_grace: HumanDuration = HumanDuration::from_secs(10),
        /// Allows listening beyond loopback without TLS.
        pub insecure: bool = false,
        /// The socket for engines of this host.
        pub local: LocalConfig,
        /// The data plane for peers and remote clients.
        pub data: DataConfig,
        /// The gRPC service for larderctl.
        pub control: ControlConfig,
        /// Memory for parts.
        pub dram: DramConfig,
        /// Metrics and health.
        pub metrics: MetricsConfig,
        /// Logs.
        pub log: LogConfig,
    }
}

larder_daemon::settings! {
    /// The `[local]` table.
    pub struct LocalConfig {
        /// The Unix socket. Whoever may open it may read and put parts.
        pub socket: PathBuf = PathBuf::from("/run/larder/node.sock"),
        /// Memory that each connection gets to hand parts over; the longest part that can be put.
        pub staging: ByteSize = ByteSize::mib(64),
    }
}

larder_daemon::settings! {
    /// The `[data]` table.
    pub struct DataConfig {
        /// Where to listen.
        pub listen: ListenAddress = ListenAddress::loopback(7402),
        /// What others dial. Not set: where the node listens.
        pub advertise: Option<AdvertiseAddress>,
        /// Most connections at a time; another one is closed at once.
        pub connections: u32 = 1024,
        /// Most open requests of one connection.
        pub requests: u32 = 256,
        /// A connection on which nothing is heard for this long is closed.
        pub silence: HumanDuration = HumanDuration::from_secs(8),
        /// A put that is not committed within this time is aborted.
        pub write_deadline: HumanDuration = HumanDuration::from_secs(30),
    }
}

larder_daemon::settings! {
    /// The `[control]` table.
    pub struct ControlConfig {
        /// Where to listen.
        pub listen: ListenAddress = ListenAddress::loopback(7401),
        /// What others dial. Not set: where the node listens.
        pub advertise: Option<AdvertiseAddress>,
    }
}

larder_daemon::settings! {
    /// The `[dram]` table.
    pub struct DramConfig {
        /// Host memory for parts. Touched at start, so that it is really there.
        pub capacity: ByteSize = ByteSize::gib(2),
        /// Eviction starts above this share of `capacity`.
        pub high_watermark: f64 = 0.95,
        /// Eviction stops below this share. A wider gap evicts in larger, rarer batches; a narrow one
        /// keeps more and works more often.
        pub low_watermark: f64 = 0.90,
        /// What is evicted first: `s3fifo` keeps what was used again over what was used once, `lru` what
        /// was used last, `gdsf` what is used often for its size. `larder-bench replay` compares them.
        pub policy: PolicyName = PolicyName::S3Fifo,
    }
}

larder_daemon::settings! {
    /// The `[metrics]` table.
    pub struct MetricsConfig {
        /// Where `/metrics` and `/health` are served.
        pub listen: ListenAddress = ListenAddress::loopback(7411),
    }
}

impl NodeConfig {
    /// Bounds of the serving side.
    pub fn limits(&self) -> Limits {
        Limits {
            connections: self.data.connections as usize,
            requests: self.data.requests,
            silence: self.data.silence.get(),
            write_deadline: self.data.write_deadline.get(),
            staging_bytes: self.local.staging.as_usize(),
        }
    }

    /// When eviction starts and stops.
    pub fn watermarks(&self) -> Watermarks {
        Watermarks { high: self.dram.high_watermark, low: self.dram.low_watermark }
    }
}

impl DaemonConfig for NodeConfig {
    const KIND: DaemonKind = DaemonKind::Node;
    const ABOUT: &'static str =
        "Keeps KV blocks of this host and moves them to those who need them";

    fn validate(&self, rules: &mut Rules<'_>) {
        let Self {
            name,
            state_dir,
            masters,
            stop_grace,
            insecure,
            local,
            data,
            control,
            dram,
            metrics,
            log: _,
        } = self;
        let short = |name: &String| (1..=64).contains(&name.len());
        rules.key("name").must(name.as_ref().is_none_or(short), "be 1 to 64 bytes long");
        rules.key("state_dir").must(!state_dir.as_os_str().is_empty(), "not be empty");
        for (i, master) in masters.iter().enumerate() {
            let known = master.parse::<larder_daemon::address::HostPort>().is_ok();
            rules.key(format!("masters[{i}]")).must(known, "be host:port");
        }
        rules.key("stop_grace").must(!stop_grace.get().is_zero(), "be above 0s");
        rules
            .key("local.socket")
            .must(local.socket.is_absolute(), "be an absolute path")
            .must(local.socket.as_os_str().len() < 108, "be shorter than 108 bytes");
        rules
            .key("local.staging")
            .must(local.staging >= ByteSize::mib(1), "be at least 1MiB")
            .must(local.staging <= ByteSize::gib(1), "be at most 1GiB, the longest part");
        check_listen(rules, "data.listen", &data.listen, false, *insecure);
        check_listen(rules, "control.listen", &control.listen, false, *insecure);
        check_listen(rules, "metrics.listen", &metrics.listen, false, *insecure);
        check_advertise(
            rules,
            "data.advertise",
            data.advertise.as_ref(),
            "data.listen",
            &data.listen,
        );
        let advertised = control.advertise.as_ref();
        check_advertise(rules, "control.advertise", advertised, "control.listen", &control.listen);
        rules.key("data.connections").must(data.connections > 0, "be above 0");
        rules.key("data.requests").must((1..=4096).contains(&data.requests), "be from 1 to 4096");
        let silence = data.silence.get();
        rules.key("data.silence").must(silence.as_millis() >= 100, "be at least 100ms");
        rules
            .key("data.write_deadline")
            .must(data.write_deadline.get().as_millis() >= 10, "be at least 10ms");
        rules.key("dram.capacity").must(dram.capacity >= ByteSize::mib(16), "be at least 16MiB");
        rules.key("dram.high_watermark").must(
            dram.high_watermark > 0.0 && dram.high_watermark <= 1.0,
            "be above 0 and at most 1",
        );
        rules
            .key("dram.low_watermark")
            .must(dram.low_watermark > 0.0, "be above 0")
            .must(dram.low_watermark < dram.high_watermark, "be below dram.high_watermark");
    }

    fn process(&self) -> ProcessSettings<'_> {
        ProcessSettings {
            log: &self.log,
            metrics_listen: Some(&self.metrics.listen),
            stop_grace: self.stop_grace.get(),
        }
    }
}
