//! The configuration of a node: `node.toml`, `LARDER_NODE__*`, flags.

use crate::{
    advice::AdviceOptions,
    catalog::{Admit, Watermarks},
    eviction::PolicyName,
    tiering::{Promote, TieringSettings},
    tiers::{
        dram::Arena,
        ssd::{
            Durability, PathSettings,
            io::{Area, DiskOptions, DriverChoice},
            slots_of,
        },
    },
    transfer::Limits,
};
use larder_daemon::{
    address::{AdvertiseAddress, ListenAddress, check_advertise, check_listen},
    config::{ByteSize, DaemonConfig, DaemonKind, HumanDuration, ProcessSettings, Rules},
    log::LogConfig,
};
use std::{path::PathBuf, sync::Arc};

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
        /// Disks for parts.
        pub ssd: SsdConfig,
        /// What masters are asked about blocks.
        pub advice: AdviceConfig,
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
    /// The `[advice]` table. Masters know which blocks the cluster can miss: those whose ancestors nobody holds any
    /// more, and those that another node keeps. Such blocks go first, if nobody used them lately and nothing that
    /// stays follows them: of a chain that several nodes hold whole, the end.
    pub struct AdviceConfig {
        /// Whether to ask.
        pub enabled: bool = true,
        /// All blocks are asked about once in this time; if there are many, about 4,096 a second. Not while less
        /// than half of `dram.capacity` is in use.
        pub interval: HumanDuration = HumanDuration::from_secs(30),
        /// Blocks that were used within this time are left alone.
        pub idle: HumanDuration = HumanDuration::from_secs(60),
    }
}

larder_daemon::settings! {
    /// The `[ssd]` table.
    pub struct SsdConfig {
        /// Folders that parts are written to, each best on a disk of its own. None: there is no ssd tier. As a
        /// flag: `--ssd.path='[{dir = "/mnt/ssd0", capacity = "500GiB"}]'`.
        pub path: Vec<SsdPathConfig>,
        /// Bytes of a segment: the unit that is preallocated, sealed and reclaimed. A path needs room for
        /// four.
        pub segment: ByteSize = ByteSize::mib(256),
        /// What is written: `second_touch` writes what was used since it was stored, `all` everything at
        /// once, `none` nothing (what is there is still read).
        pub admit: AdmitChoice = AdmitChoice::SecondTouch,
        /// When a part that was read from an ssd is kept in memory again.
        pub promote: PromoteChoice = PromoteChoice::SecondTouch,
        /// Bytes of parts that may wait to be written. What comes beyond is not written, and counted.
        pub write_queue: ByteSize = ByteSize::mib(64),
        /// What a power loss may take. The end of the process takes nothing, whatever this says. `none`
        /// is right for a cache: what is lost is computed again; `segment` syncs each full segment.
        pub durability: DurabilityChoice = DurabilityChoice::None,
        /// A disk that needs longer for one request counts as failed.
        pub deadline: HumanDuration = HumanDuration::from_secs(10),
        /// How disks are read and written: `auto` takes io_uring where it is allowed, and threads
        /// otherwise.
        pub driver: DiskDriver = DiskDriver::Auto,
        /// Most requests that one disk has at a time.
        pub queue_depth: u32 = 64,
        /// Bytes a second that a scrub in the background reads of each path, over and over, to find and
        /// withdraw what is damaged before anybody needs it. `0B`: only `larderctl node scrub` does.
        pub scrub_rate: ByteSize = ByteSize::mib(16),
    }
}

larder_daemon::settings! {
    /// One `[[ssd.path]]`.
    pub struct SsdPathConfig {
        /// The folder. The node alone uses it.
        pub dir: PathBuf,
        /// Bytes that the node may take there, all in. Must be given.
        pub capacity: ByteSize,
        /// Whether the folder lies on a disk of its own that is mounted. If it is `true` and the folder lies on the
        /// file system of `/`, the mount is missing: the path is fenced, and `/` is not filled.
        pub mounted: bool,
    }
}

larder_daemon::choices! {
    /// Which parts are written to ssds.
    pub enum AdmitChoice {
        /// Those that are used again after they were stored.
        SecondTouch = "second_touch",
        /// All.
        All = "all",
        /// None.
        None = "none",
    }
}

larder_daemon::choices! {
    /// When a part comes back to memory.
    pub enum PromoteChoice {
        /// When it is read from an ssd a second time.
        SecondTouch = "second_touch",
        /// At the first read.
        Always = "always",
        /// Never.
        Never = "never",
    }
}

larder_daemon::choices! {
    /// What a power loss may take.
    pub enum DurabilityChoice {
        /// Anything.
        None = "none",
        /// What is not in a full segment.
        Segment = "segment",
    }
}

larder_daemon::choices! {
    /// How disks are read and written.
    pub enum DiskDriver {
        /// The best that is allowed.
        Auto = "auto",
        /// io_uring, or not at all.
        IoUring = "io_uring",
        /// Threads.
        Threads = "threads",
    }
}

larder_daemon::settings! {
    /// The `[metrics]` table.
    pub struct MetricsConfig {
        /// Where `/metrics` and `/health` are served.
        pub listen: ListenAddress = ListenAddress::loopback(7411),
    }
}

impl DramConfig {
    /// What a tier of this capacity holds without evicting.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "the share is in 0..=1 (held by the rules) and capacities are far below 2^52"
    )]
    pub fn holds_bytes(&self, capacity_bytes: u64) -> u64 {
        (capacity_bytes as f64 * self.high_watermark) as u64
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

    /// When masters are asked for advice, if ever.
    pub fn advice(&self) -> Option<AdviceOptions> {
        let AdviceConfig { enabled, interval, idle } = &self.advice;
        let is_asked = *enabled && !self.masters.is_empty();
        is_asked.then(|| AdviceOptions { interval: interval.get(), idle: idle.get() })
    }

    /// When eviction starts and stops.
    pub fn watermarks(&self) -> Watermarks {
        Watermarks { high: self.dram.high_watermark, low: self.dram.low_watermark }
    }
}

impl SsdConfig {
    /// How parts move between the tiers.
    pub fn tiering(&self) -> TieringSettings {
        TieringSettings {
            admit: match self.admit {
                AdmitChoice::SecondTouch => Admit::SecondTouch,
                AdmitChoice::All => Admit::All,
                AdmitChoice::None => Admit::None,
            },
            promote: match self.promote {
                PromoteChoice::SecondTouch => Promote::SecondTouch,
                PromoteChoice::Always => Promote::Always,
                PromoteChoice::Never => Promote::Never,
            },
            queue_bytes: self.write_queue.as_u64(),
            scrub_rate: self.scrub_rate.as_u64(),
        }
    }

    /// How a path is used.
    pub fn path_settings(&self, path: &SsdPathConfig) -> PathSettings {
        PathSettings {
            name: path.dir.clone(),
            capacity: path.capacity.as_u64(),
            segment_bytes: self.segment.as_u64(),
            durability: match self.durability {
                DurabilityChoice::None => Durability::None,
                DurabilityChoice::Segment => Durability::Segment,
            },
            deadline: self.deadline.get(),
        }
    }

    /// What a path needs, in whole MiB.
    fn least_capacity(&self, path: &SsdPathConfig) -> ByteSize {
        let segment = self.segment.min(ByteSize::gib(4)); // A longer one is refused anyhow.
        let mut settings =
            PathSettings { segment_bytes: segment.as_u64(), ..self.path_settings(path) };
        settings.capacity = (4 * settings.segment_bytes).next_multiple_of(1 << 20);
        while slots_of(&settings) < 4 {
            settings.capacity += 1 << 20; // A few times: what is kept beside segments is little.
        }
        ByteSize::bytes(settings.capacity)
    }

    /// How a disk is read and written, by requests that mostly use `arena`.
    pub fn disk_options(&self, path: &SsdPathConfig, arena: &Arc<Arena>) -> DiskOptions {
        DiskOptions {
            mounted: path.mounted,
            driver: match self.driver {
                DiskDriver::Auto => DriverChoice::Auto,
                DiskDriver::IoUring => DriverChoice::IoUring,
                DiskDriver::Threads => DriverChoice::Threads,
            },
            queue_depth: self.queue_depth as usize,
            memory: vec![Area::of(arena)],
        }
    }

    fn validate(&self, dram: &DramConfig, rules: &mut Rules<'_>) {
        let Self {
            path,
            segment,
            admit: _,
            promote: _,
            write_queue,
            durability: _,
            deadline,
            driver: _,
            queue_depth,
            scrub_rate,
        } = self;
        rules
            .key("ssd.segment")
            .must(*segment >= ByteSize::mib(1), "be at least 1MiB")
            .must(*segment <= ByteSize::gib(4), "be at most 4GiB")
            .must(segment.as_u64().is_multiple_of(4096), "be a multiple of 4KiB");
        rules
            .key("ssd.write_queue")
            .must(*write_queue >= ByteSize::mib(1), "be at least 1MiB")
            .must(
                path.is_empty() || write_queue.as_u64() <= dram.capacity.as_u64() / 2,
                "be at most half of dram.capacity, where the parts lie meanwhile",
            );
        rules.key("ssd.deadline").must(deadline.get().as_millis() >= 100, "be at least 100ms");
        let depth = (1..=1024).contains(queue_depth);
        rules.key("ssd.queue_depth").must(depth, "be from 1 to 1024");
        rules.key("ssd.scrub_rate").must(
            scrub_rate.as_u64() == 0 || *scrub_rate >= ByteSize::kib(64),
            "be 0B (no scrub in the background), or at least 64KiB",
        );
        for (i, one) in path.iter().enumerate() {
            rules
                .key(format!("ssd.path[{i}].dir"))
                .must(one.dir.is_absolute(), "be an absolute path")
                .must(
                    one.dir.to_str().is_some_and(|name| !name.contains(char::is_control)),
                    "have no line break or other control character in it",
                )
                .must(
                    path[..i].iter().all(|other| other.dir != one.dir),
                    "be another folder than those before it",
                );
            rules
                .key(format!("ssd.path[{i}].capacity"))
                .must(one.capacity.as_u64() > 0, "be given: the most that the node may take there")
                .must(
                    one.capacity.as_u64() == 0 || slots_of(&self.path_settings(one)) >= 4,
                    format_args!(
                        "be at least {}: room for four segments (ssd.segment), and beside them for 4MiB, or a \
                         256th of it if that is more",
                        self.least_capacity(one)
                    ),
                );
        }
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
            ssd,
            advice,
            metrics,
            log: _,
        } = self;
        let AdviceConfig { enabled: _, interval, idle: _ } = advice;
        rules.key("advice.interval").must(interval.get().as_secs() >= 1, "be at least 1s");
        ssd.validate(dram, rules);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capacity_that_is_named_is_the_least_one() {
        for (segment, least) in [
            (ByteSize::mib(1), ByteSize::mib(8)),
            (ByteSize::mib(256), ByteSize::mib(1029)), // 1 part in 256 is more than 4MiB from here on.
            (ByteSize::gib(4), ByteSize::mib(16_449)),
        ] {
            let path =
                SsdPathConfig { dir: "/ssd".into(), capacity: ByteSize::bytes(1), mounted: false };
            let config = SsdConfig { segment, ..SsdConfig::default() };
            assert_eq!(config.least_capacity(&path), least);
            let slots = |capacity| {
                slots_of(&config.path_settings(&SsdPathConfig { capacity, ..path.clone() }))
            };
            assert!(slots(least) == 4 && slots(ByteSize::bytes(least.as_u64() - (1 << 20))) < 4);
        }
    }
}
