//! A real cluster on loopback, `larderctl` as a process, and blocks to look at.

use bytes::Bytes;
use larder_client::{
    cluster::{ClusterClient, NodeChoice},
    connection::{Identity, PutOutcome},
    local::PartAttributes,
    masters::Masters,
};
use larder_proto::{
    BlockKey, ModelVersion, PartNumber,
    block_key::keys_of,
    fingerprint::{ContentDescription, Digest, LayerGroup, LayoutDescription, ModelDescription},
    part::{GroupRule, PartRef},
};
use larder_tests::process::Daemon;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};
use tempfile::TempDir;
use tokio::{io::AsyncWriteExt, process::Command, time::timeout};

/// Far above what anything here takes.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);
/// Tokens of a block.
pub(crate) const BLOCK: u32 = 4;

/// A master and nodes; they end when it is dropped.
pub(crate) struct Cluster {
    pub(crate) dir: TempDir,
    master: Daemon,
    nodes: BTreeMap<String, Daemon>,
}

/// What a run of `larderctl` left behind.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Run {
    /// The answer as JSON, of a run with this exit code.
    pub(crate) fn json(&self, code: i32) -> Value {
        assert_eq!(self.code, code, "{self:?}");
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl Cluster {
    /// Starts a master that remembers nodes that are down, and nodes with these names.
    pub(crate) async fn start(names: &[&str]) -> Self {
        Self::start_with(names, |_| Vec::new()).await
    }

    /// The same, whose nodes write all that is put to two ssd paths: the folders `NODE-ssd-0` and `-1`. Nothing
    /// is scrubbed unasked.
    pub(crate) async fn start_with_ssds(names: &[&str]) -> Self {
        let path = |dir: PathBuf| format!("{{ dir = \"{}\", capacity = \"24MiB\" }}", text(&dir));
        let args = |dirs: [PathBuf; 2]| {
            vec![
                format!("--ssd.path=[{}]", dirs.map(path).join(", ")),
                "--ssd.write_queue=16MiB".to_owned(),
                "--ssd.segment=1MiB".to_owned(),
                "--ssd.admit=all".to_owned(),
                "--ssd.scrub_rate=0B".to_owned(),
            ]
        };
        Self::start_with(names, args).await
    }

    async fn start_with(names: &[&str], more: impl Fn([PathBuf; 2]) -> Vec<String>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let args = [
            format!("--state_dir={}", dir.path().join("master").display()),
            "--control.listen=127.0.0.1:0".to_owned(),
            "--metrics.listen=127.0.0.1:0".to_owned(),
            "--nodes.ttl=10m".to_owned(),
            "--log.level=warn".to_owned(),
        ];
        let master = Daemon::start("larder-master", &args, &["control", "metrics"]).await.unwrap();
        let mut cluster = Self { dir, master, nodes: BTreeMap::new() };
        for name in names {
            let more = more([0, 1].map(|n| cluster.ssd(name, n)));
            cluster.start_node(name, more).await;
        }
        let all = names.len() as u64;
        let synced = |run: &Run| {
            let nodes = &run.json(0)["nodes"];
            nodes["up"].as_u64() == Some(all) && nodes["down"] == 0
        };
        cluster.eventually(&["status", "-o", "json"], synced).await;
        cluster
    }

    async fn start_node(&mut self, name: &str, more: Vec<String>) {
        let mut args = vec![
            format!("--name={name}"),
            format!("--state_dir={}", self.dir.path().join(name).display()),
            format!("--masters={}", self.master.address("control")),
            format!("--local.socket={}", self.socket(name).display()),
            "--data.listen=127.0.0.1:0".to_owned(),
            "--control.listen=127.0.0.1:0".to_owned(),
            "--metrics.listen=127.0.0.1:0".to_owned(),
            "--dram.capacity=64MiB".to_owned(),
            "--log.level=warn".to_owned(),
        ];
        args.extend(more);
        let node = Daemon::start("larder-node", &args, &["data", "control", "local", "metrics"])
            .await
            .unwrap();
        self.nodes.insert((*name).to_owned(), node);
    }

    /// The folder of an ssd path of a node.
    pub(crate) fn ssd(&self, name: &str, number: u32) -> PathBuf {
        self.dir.path().join(format!("{name}-ssd-{number}"))
    }

    /// The metrics address of a node.
    pub(crate) fn metrics(&self, name: &str) -> &str {
        self.nodes[name].address("metrics")
    }

    /// Sends a signal to a node.
    pub(crate) fn signal(&self, name: &str, signal: &str) {
        let pid = self.nodes[name].pid().unwrap().to_string();
        let kill = std::process::Command::new("kill").args(["-s", signal, &pid]).status();
        assert!(kill.unwrap().success());
    }

    /// The socket of a node.
    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.sock"))
    }

    /// Where the master listens.
    pub(crate) fn master(&self) -> &str {
        self.master.address("control")
    }

    /// Where somebody listens who is no master: a master's metrics, a node's control and data plane.
    pub(crate) fn no_masters(&self, node: &str) -> [&str; 3] {
        let node = &self.nodes[node];
        [self.master.address("metrics"), node.address("control"), node.address("data")]
    }

    /// SIGKILL to a node.
    pub(crate) async fn kill(&mut self, name: &str) {
        self.nodes.remove(name).unwrap().kill().await.unwrap();
    }

    /// Runs `larderctl` against this cluster.
    pub(crate) async fn ctl(&self, args: &[&str]) -> Run {
        self.ctl_with(args, "").await
    }

    /// The same, with this on its standard input.
    pub(crate) async fn ctl_with(&self, args: &[&str], input: &str) -> Run {
        let masters = format!("--masters={}", self.master());
        let mut all = vec![masters.as_str()];
        all.extend(args);
        ctl(&all, &[], input).await
    }

    /// Runs it until the answer is as wanted: what masters know lags behind a little.
    pub(crate) async fn eventually(&self, args: &[&str], wanted: impl Fn(&Run) -> bool) -> Run {
        let mut last = None;
        let asking = async {
            loop {
                let run = self.ctl(args).await;
                if wanted(&run) {
                    return run;
                }
                last = Some(run);
            }
        };
        let found = timeout(LIMIT, asking).await;
        found.unwrap_or_else(|_| panic!("{args:?}: still {last:?}"))
    }

    /// The client library, as `producer`.
    pub(crate) fn client(&self, producer: &str) -> ClusterClient {
        let masters = Masters::new(&[self.master().to_owned()]).unwrap();
        ClusterClient::new(masters, Identity::client(producer))
    }

    /// Registers a model and puts a part of each whole block of `tokens` on a node.
    pub(crate) async fn put(
        &self,
        model: &ModelDescription,
        tokens: &[u32],
        on: &Put<'_>,
    ) -> Vec<BlockKey> {
        let client = self.client(on.producer);
        client.register_model(model).await.unwrap();
        let node = client.nodes_for_put(&NodeChoice::Named(on.node.to_owned())).await.unwrap();
        let ModelVersion { content, layout } = model.version();
        let keys = keys_of(content, BLOCK, b"", tokens);
        for (at, key) in keys.iter().enumerate() {
            let parent = at.checked_sub(1).map(|at| keys[at]);
            let attributes = PartAttributes { content, root: keys[0], parent, origin_hash: None };
            for part in on.parts {
                let part = PartRef { key: *key, layout, part: PartNumber(*part) };
                let bytes = Bytes::from(vec![7; 1000]);
                let put = client.put(&node[0], part, &attributes, bytes, LIMIT).await.unwrap();
                assert!(matches!(put, PutOutcome::Stored(_)), "{put:?}");
            }
        }
        keys
    }

    /// Writes tokens to a file.
    pub(crate) fn tokens(&self, tokens: &[u32]) -> String {
        let name: Vec<String> = tokens.iter().map(ToString::to_string).collect();
        let path = self.dir.path().join(format!("tokens-{}", name.join("-")));
        std::fs::write(&path, name.join(" ")).unwrap();
        text(&path)
    }
}

/// How blocks are put.
pub(crate) struct Put<'a> {
    pub(crate) node: &'a str,
    pub(crate) producer: &'a str,
    pub(crate) parts: &'a [u16],
}

impl<'a> Put<'a> {
    /// Part 0 of each block.
    pub(crate) fn on(node: &'a str) -> Self {
        Self { node, producer: "engine", parts: &[0] }
    }
}

/// A path as an argument.
pub(crate) fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Runs `larderctl` with nothing of the surroundings but `env`.
pub(crate) async fn ctl(args: &[&str], env: &[(&str, &str)], input: &str) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larderctl"));
    for (variable, _) in std::env::vars_os() {
        if variable.to_string_lossy().starts_with("LARDER_") {
            command.env_remove(variable);
        }
    }
    command.args(args).envs(env.iter().copied()).kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // A command that reads nothing may have closed it.
    let _ = stdin.write_all(input.as_bytes()).await;
    drop(stdin);
    let output = timeout(LIMIT, child.wait_with_output()).await.unwrap().unwrap();
    Run {
        code: output.status.code().unwrap(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A model version: `weights` decides the content, `format` and the number of groups the layout.
pub(crate) fn model(name: &str, weights: u8, format: u32, groups: usize) -> ModelDescription {
    let group = LayerGroup {
        rule: GroupRule::EveryBlock,
        layers: vec![0],
        dtype: "f16".to_owned(),
        shape: vec![500],
        strides: vec![],
        part_bytes: 1000,
    };
    ModelDescription {
        display_name: name.to_owned(),
        content: ContentDescription {
            weights: Digest::from_bytes([weights; 32]),
            weight_epoch: 0,
            tokenizer: Digest::from_bytes([1; 32]),
            adapter: None,
            kv_dtype: "f16".to_owned(),
            kv_scales: None,
        },
        layout: LayoutDescription {
            engine_family: "test".to_owned(),
            kv_format_version: format,
            block_tokens: BLOCK,
            groups: vec![group; groups],
            parallel: BTreeMap::new(),
            options: BTreeMap::new(),
        },
    }
}
