//! The configuration of an engine: `engine.toml`, `LARDER_ENGINE__*`, flags.

use crate::llama::{ContextOptions, KvType};
use crate::scheduler::AdmissionOptions;
use larder_daemon::address::{ListenAddress, check_listen};
use larder_daemon::config::{
    ByteSize, DaemonConfig, DaemonKind, HumanDuration, ProcessSettings, Rules,
};
use larder_daemon::log::{LogConfig, LogFilter};
use larder_engine_connector::{Options, PlannerOptions};
use std::path::PathBuf;
use std::thread::available_parallelism;

larder_daemon::settings! {
    /// The configuration of an engine.
    pub struct EngineConfig {
        /// Threads that compute. Not set: all cores but one, because threads that wait for each
        /// other on a busy machine lose more than one core gives.
        pub threads: Option<u16>,
        /// KV cells: tokens of all running requests together, prompts and answers.
        pub context_tokens: u32 = 8192,
        /// Requests that run at once.
        pub max_requests: u16 = 4,
        /// Requests that wait for a place; further ones are refused with 429.
        pub max_waiting: u16 = 64,
        /// Element type of the KV cells. Blocks of different types are different blocks.
        pub kv_type: KvTypeChoice,
        /// Fused attention: faster, and needed by `q8_0`. Decides the layout of blocks.
        pub flash_attention: bool = true,
        /// Tokens of a block. Engines share blocks of equal length only.
        pub block_tokens: u32 = 32,
        /// Tokens of a prompt that one step computes; a multiple of `block_tokens`. Prompts resume
        /// at multiples of it, or at their last whole block. Attention on CPUs slows down below 64.
        pub prefill_step_tokens: u32 = 64,
        /// How long a stop may take; requests in progress end within it.
        pub stop_grace: HumanDuration = HumanDuration::from_secs(30),
        /// Allows listening beyond loopback without TLS.
        pub insecure: bool = false,
        /// The HTTP interface.
        pub http: HttpConfig,
        /// The model.
        pub model: ModelConfig,
        /// The local store node.
        pub node: NodeConfig,
        /// Reuse and publishing of prompts' KV.
        pub cache: CacheConfig,
        /// Logs.
        pub log: LogConfig = quiet_library(),
    }
}

larder_daemon::choices! {
    /// Element type of the KV cells.
    pub enum KvTypeChoice {
        /// 16-bit floats.
        F16 = "f16",
        /// 8-bit integers with scales: half the memory, slightly lossy.
        Q8 = "q8_0",
    }
}

larder_daemon::settings! {
    /// The `[http]` table.
    pub struct HttpConfig {
        /// Where to listen, for requests, health and metrics.
        pub listen: ListenAddress = ListenAddress::loopback(8000),
        /// Open connections; further ones wait in the socket's backlog.
        pub max_connections: u32 = 1024,
    }
}

larder_daemon::settings! {
    /// The `[model]` table.
    pub struct ModelConfig {
        /// The GGUF file.
        pub path: PathBuf,
        /// The name under which it is served. Not set: the file's name without its ending. Decides
        /// nothing about which blocks can be shared: the file's content does.
        pub name: Option<String>,
        /// Raised when the weights behind an unchanged file are others, as in online training.
        pub weight_epoch: u64 = 0,
    }
}

larder_daemon::settings! {
    /// The `[node]` table.
    pub struct NodeConfig {
        /// The local node's socket. `""`: there is none, everything is computed.
        pub socket: PathBuf = PathBuf::from("/run/larder/node.sock"),
        /// The name under which this engine's blocks are recorded, so that they can be withdrawn.
        pub producer: String = "larder-engine".to_owned(),
    }
}

larder_daemon::settings! {
    /// The `[cache]` table.
    pub struct CacheConfig {
        /// Whether prompts' KV is reused and published at all.
        pub enabled: bool = true,
        /// Fewer reusable blocks than this are computed: they are not worth the question.
        pub min_reuse_blocks: u32 = 1,
        /// A request waits for the cache only as long as it then still ends within this many times
        /// what computing everything takes.
        pub max_slowdown: f64 = 1.2,
        /// What is known about a source's speed is forgotten after this time without use.
        pub forget_after: HumanDuration = HumanDuration::from_secs(30),
        /// Whether computed blocks are published.
        pub publish: bool = true,
        /// Whether blocks that hold tokens of answers are published too: for prompts that go on
        /// where an answer ended.
        pub publish_generated: bool = true,
        /// Blocks that wait for the node. When it is full, blocks are not published; requests never
        /// wait for it.
        pub publish_queue: ByteSize = ByteSize::mib(64),
        /// Engines with different salts share nothing.
        pub salt: String,
    }
}

/// llama.cpp tells a hundred lines about every model, as `info`.
fn quiet_library() -> LogConfig {
    let level = "info,llama-cpp-2=warn".parse().unwrap_or_else(|_| LogFilter::info());
    LogConfig { level, ..LogConfig::default() }
}

impl DaemonConfig for EngineConfig {
    const KIND: DaemonKind = DaemonKind::Engine;
    const ABOUT: &'static str =
        "Serves a model, and reuses the KV of prompts through the local node";
    const REQUIRED: &'static [&'static str] = &["model.path"];

    fn validate(&self, rules: &mut Rules<'_>) {
        let Self { http, cache, node, .. } = self;
        let Self { threads, context_tokens, max_requests, kv_type, .. } = self;
        let Self { flash_attention, block_tokens, prefill_step_tokens, stop_grace, .. } = self;
        check_listen(rules, "http.listen", &http.listen, false, self.insecure);
        rules.key("http.max_connections").must(http.max_connections > 0, "be at least 1");
        rules
            .key("threads")
            .must(threads.is_none_or(|threads| (1..=1024).contains(&threads)), "be 1 to 1024");
        rules
            .key("max_requests")
            // llama.cpp has 256 sequences, one of which moves blocks.
            .must((1..=255).contains(max_requests), "be 1 to 255");
        let power = block_tokens.is_power_of_two() && (16..=1024).contains(block_tokens);
        rules.key("block_tokens").must(power, "be a power of two from 16 to 1024");
        let step = *prefill_step_tokens;
        let whole = step > 0 && power && step.is_multiple_of(*block_tokens) && step <= 8192;
        rules.key("prefill_step_tokens").must(whole, "be a multiple of block_tokens, at most 8192");
        rules
            .key("context_tokens")
            .must(*context_tokens >= step, "be at least prefill_step_tokens")
            .must(*context_tokens <= 16 << 20, "be at most 16777216");
        rules.key("kv_type").must(
            *kv_type == KvTypeChoice::F16 || *flash_attention,
            "be f16 without flash_attention",
        );
        rules.key("stop_grace").must(!stop_grace.get().is_zero(), "be above 0s");
        rules
            .key("node.producer")
            .must((1..=64).contains(&node.producer.len()), "have 1 to 64 bytes");
        rules.key("cache.min_reuse_blocks").must(cache.min_reuse_blocks > 0, "be at least 1");
        rules
            .key("cache.max_slowdown")
            .must(cache.max_slowdown > 1.0 && cache.max_slowdown <= 10.0, "be above 1, at most 10");
        rules
            .key("cache.publish_queue")
            .must(cache.publish_queue <= ByteSize::gib(64), "be at most 64GiB");
    }

    fn process(&self) -> ProcessSettings<'_> {
        // Health and metrics are on the engine's own port, as with other engines.
        let stop_grace = self.stop_grace.get();
        ProcessSettings { log: &self.log, metrics_listen: None, stop_grace }
    }
}

impl EngineConfig {
    /// How the KV context is made.
    #[must_use]
    pub fn context(&self) -> ContextOptions {
        ContextOptions {
            cells: self.context_tokens,
            sequences: self.max_requests,
            batch_tokens: self.prefill_step_tokens + u32::from(self.max_requests),
            threads: self.threads.unwrap_or_else(default_threads),
            kv_type: match self.kv_type {
                KvTypeChoice::F16 => KvType::F16,
                KvTypeChoice::Q8 => KvType::Q8,
            },
            flash_attention: self.flash_attention,
            block_tokens: self.block_tokens,
        }
    }

    /// Who may run and wait, on a context of `cells` cells for a model trained on `trained` tokens.
    #[must_use]
    pub fn admission(&self, cells: u32, trained: u32) -> AdmissionOptions {
        AdmissionOptions {
            max_requests: self.max_requests,
            max_waiting: self.max_waiting,
            cells,
            sequence_tokens: if trained == 0 { cells } else { trained },
        }
    }

    /// How the connector behaves.
    #[must_use]
    pub fn connector(&self) -> Options {
        let CacheConfig { min_reuse_blocks, max_slowdown, forget_after, .. } = self.cache;
        Options {
            planner: PlannerOptions {
                min_reuse_blocks,
                max_slowdown,
                forget_after: forget_after.get(),
            },
            publish: self.cache.publish,
            publish_generated: self.cache.publish_generated,
            publish_queue_bytes: self.cache.publish_queue.as_usize(),
            root_salt: self.cache.salt.clone().into_bytes(),
        }
    }

    /// The name under which the model is served.
    #[must_use]
    pub fn served_name(&self) -> String {
        let stem = || {
            let stem = self.model.path.file_stem();
            stem.map_or_else(|| "model".to_owned(), |stem| stem.to_string_lossy().into_owned())
        };
        self.model.name.clone().unwrap_or_else(stem)
    }
}

fn default_threads() -> u16 {
    let cores = available_parallelism().map_or(1, std::num::NonZero::get);
    u16::try_from(cores.saturating_sub(1).max(1)).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_daemon::config::check_values;

    fn valid() -> EngineConfig {
        let path = PathBuf::from("model.gguf");
        EngineConfig {
            model: ModelConfig { path, ..ModelConfig::default() },
            ..EngineConfig::default()
        }
    }

    #[test]
    fn the_defaults_need_a_model_and_nothing_else() {
        check_values(&valid()).unwrap();
        let error = check_values(&EngineConfig::default()).unwrap_err().to_string();
        assert!(error.contains("model.path") && error.contains("must be given"), "{error}");
        assert_eq!(valid().served_name(), "model");
    }

    #[test]
    fn each_rule_names_its_key() {
        type Break = fn(&mut EngineConfig);
        let cases: [(&str, Break); 12] = [
            ("http.listen", |c| c.http.listen = "0.0.0.0:8000".parse().unwrap()),
            ("http.max_connections", |c| c.http.max_connections = 0),
            ("threads", |c| c.threads = Some(0)),
            ("max_requests", |c| c.max_requests = 256),
            ("block_tokens", |c| c.block_tokens = 33),
            ("prefill_step_tokens", |c| c.prefill_step_tokens = 48),
            ("context_tokens", |c| c.context_tokens = 10),
            ("kv_type", |c| (c.kv_type, c.flash_attention) = (KvTypeChoice::Q8, false)),
            ("stop_grace", |c| c.stop_grace = HumanDuration::from_secs(0)),
            ("node.producer", |c| c.node.producer = String::new()),
            ("cache.min_reuse_blocks", |c| c.cache.min_reuse_blocks = 0),
            ("cache.max_slowdown", |c| c.cache.max_slowdown = 1.0),
        ];
        for (key, break_it) in cases {
            let mut config = valid();
            break_it(&mut config);
            let error = check_values(&config).unwrap_err().to_string();
            assert!(error.contains(key), "{key}: {error}");
        }
    }
}
