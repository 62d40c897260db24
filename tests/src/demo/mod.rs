//! The demo: the main job of Larder with a real model, on one machine.
//!
//! Two hosts, A and B, each a store node and an engine, and one master. A long prompt is computed on A;
//! B answers the same prompt from A's blocks; then A's node is killed, and B still answers; then B's node
//! is killed and started again, and serves the prompt from its disk. Every answer is compared, token by
//! token, with the same prompt recomputed.

pub mod cluster;
pub mod document;
pub mod engine;

use cluster::{Cluster, Host};
use comfy_table::{CellAlignment, Table, presets::UTF8_HORIZONTAL_ONLY};
use engine::{Answer, complete, sessions};
use indicatif::{ProgressBar, ProgressStyle};
use larder_client::masters::Masters;
use larder_proto::control::{StatusRequest, node_client::NodeClient};
use serde::Serialize;
use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};
use tokio::{process::Command, time::Instant};

/// Sections of a handbook: about 2,000 tokens.
const SECTIONS: usize = 46;
/// Tokens of an answer.
const ANSWER_TOKENS: u32 = 64;
/// Tokens of a block of the bundled engine.
const BLOCK_TOKENS: u64 = 32;
/// How long published blocks may take to be known to the master.
const INDEX_LIMIT: Duration = Duration::from_secs(30);

/// A line of the demo's table, and of `demo.json`.
#[derive(Debug, Clone, Serialize)]
pub struct Step {
    /// Which step.
    pub step: &'static str,
    /// recomputed, local, peer or mixed.
    pub source: String,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Of these, tokens whose KV was not computed.
    pub cached_tokens: u64,
    /// Waiting for blocks.
    pub fetch_ms: f64,
    /// Until the first token.
    pub ttft_ms: f64,
    /// Whether the token ids are those of the same prompt recomputed.
    pub output_equal: bool,
}

/// Runs the demo with the model at `model` and writes its steps to `report`. Dropping the future ends
/// its processes; their state lies in `folder`.
///
/// # Errors
/// A process does not start, an engine does not answer, or blocks do not become known.
pub async fn run(model: &Path, folder: &Path, report: &Path) -> io::Result<Vec<Step>> {
    let spinner = ProgressBar::new_spinner();
    let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
    spinner.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    spinner.enable_steady_tick(Duration::from_millis(120));
    let said = |text: &str| match spinner.is_hidden() {
        true => eprintln!("demo: {text}"),
        false => spinner.set_message(text.to_owned()),
    };
    let mut demo = Demo {
        cluster: Cluster::start(model, folder, said).await?,
        recomputed: HashMap::new(),
        steps: Vec::new(),
        published: 0,
        folder: folder.to_owned(),
    };
    demo.play(&said).await?;
    spinner.finish_and_clear();
    let json = serde_json::to_string_pretty(&demo.steps).map_err(io::Error::other)?;
    std::fs::write(report, json + "\n")?;
    println!("{}", table(&demo.steps));
    demo.show_larderctl().await?;
    let Demo { cluster, steps, .. } = demo;
    stop(cluster).await?;
    Ok(steps)
}

struct Demo {
    cluster: Cluster,
    /// Token ids of each prompt without any reuse.
    recomputed: HashMap<String, Vec<u64>>,
    steps: Vec<Step>,
    /// Entries that the master's index has to hold by now.
    published: u64,
    /// Where the processes keep their state.
    folder: PathBuf,
}

impl Demo {
    async fn play(&mut self, said: &impl Fn(&str)) -> io::Result<()> {
        let shared = document::handbook("northern", SECTIONS);
        let only_a = document::handbook("southern", SECTIONS);
        let first = document::question(&shared, "What is kept on shelf 2, and in what?");
        let second = document::question(&shared, "When does the keeper look at the honey?");
        let third = document::question(&only_a, "Which shelf holds the lamp oil?");

        said("cold_a: engine A computes the whole prompt");
        let cold =
            complete(self.cluster.a.engine.address("http"), &first, ANSWER_TOKENS, true).await?;
        self.know(&cold).await?;
        self.finish("cold_a", &first, cold, said).await?;

        said("warm_a: the same prompt on A again");
        let warm =
            complete(self.cluster.a.engine.address("http"), &first, ANSWER_TOKENS, true).await?;
        self.finish("warm_a", &first, warm, said).await?;

        said("peer_b: the same prompt on B, whose node has to fetch it from A's");
        let peer =
            complete(self.cluster.b.engine.address("http"), &first, ANSWER_TOKENS, true).await?;
        self.finish("peer_b", &first, peer, said).await?;

        said("shared_b: the same document, another question, on B");
        let other =
            complete(self.cluster.b.engine.address("http"), &second, ANSWER_TOKENS, true).await?;
        // What was used again is written to B's disk.
        let blocks = other.cached_tokens / BLOCK_TOKENS;
        self.finish("shared_b", &second, other, said).await?;

        said("a prompt that only A will hold");
        let held = complete(self.cluster.a.engine.address("http"), &third, 1, true).await?;
        self.know(&held).await?;
        if let Some(node) = self.cluster.a.node.take() {
            node.kill().await?;
        }
        said("after_kill_b: A's node was killed; B is asked for what only A held");
        let alone =
            complete(self.cluster.b.engine.address("http"), &third, ANSWER_TOKENS, true).await?;
        self.finish("after_kill_b", &third, alone, said).await?;

        said("restart_b: B's node is killed and started again; its disk is all that is left");
        let opened = sessions(self.cluster.b.engine.address("http")).await?;
        if let Some(node) = self.cluster.b.node.take() {
            await_parts(node.address("control"), "ssd", blocks).await?;
            node.kill().await?;
        }
        let node = cluster::node("b", &self.folder, self.cluster.master.address("control")).await?;
        await_parts(node.address("control"), "ssd", blocks).await?;
        self.cluster.b.node = Some(node);
        let address = self.cluster.b.engine.address("http");
        await_session(address, opened + 1).await?;
        let again = complete(address, &first, ANSWER_TOKENS, true).await?;
        self.finish("restart_b", &first, again, said).await
    }

    /// Waits until the master's index knows the whole blocks of a prompt that was computed.
    async fn know(&mut self, computed: &Answer) -> io::Result<()> {
        self.published += computed.prompt_tokens.saturating_sub(1) / BLOCK_TOKENS;
        await_entries(self.cluster.master.address("control"), self.published).await
    }

    /// Compares an answer with the recomputed one and notes the step.
    async fn finish(
        &mut self,
        step: &'static str,
        prompt: &str,
        answer: Answer,
        said: &impl Fn(&str),
    ) -> io::Result<()> {
        if !self.recomputed.contains_key(prompt) {
            said(&format!("{step}: recomputing the prompt without any cache, to compare"));
            let address = self.cluster.b.engine.address("http");
            let reference = complete(address, prompt, ANSWER_TOKENS, false).await?;
            self.recomputed.insert(prompt.to_owned(), reference.token_ids);
        }
        let output_equal = self.recomputed.get(prompt) == Some(&answer.token_ids);
        self.steps.push(Step {
            step,
            source: answer.source,
            prompt_tokens: answer.prompt_tokens,
            cached_tokens: answer.cached_tokens,
            fetch_ms: answer.fetch_ms,
            ttft_ms: answer.ttft_ms,
            output_equal,
        });
        Ok(())
    }

    async fn show_larderctl(&self) -> io::Result<()> {
        let master = self.cluster.master.address("control");
        for command in ["status", "stats"] {
            println!("\n$ larderctl {command}");
            let status = Command::new(crate::process::binary("larderctl")?)
                .args(["--masters", master, command])
                .stdin(Stdio::null())
                .status()
                .await?;
            if !status.success() {
                return Err(io::Error::other(format!("larderctl {command} ended with {status}")));
            }
        }
        Ok(())
    }
}

/// Waits until a master's index holds `entries` entries: publishing is not part of a request.
///
/// # Errors
/// The master does not answer, or the entries do not come.
pub async fn await_entries(master: &str, entries: u64) -> io::Result<()> {
    let masters = Masters::new(&[master.to_owned()]).map_err(io::Error::other)?;
    let deadline = Instant::now() + INDEX_LIMIT;
    loop {
        let status = masters.ask(|mut master| async move { master.status(StatusRequest {}).await });
        let known = status.await.map_err(io::Error::other)?.entries;
        if known >= entries {
            return Ok(());
        }
        if Instant::now() > deadline {
            let text = format!("the index knows {known} of {entries} blocks after {INDEX_LIMIT:?}");
            return Err(io::Error::other(text));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until an engine has opened a session with its node for the `count`th time: without one it computes.
async fn await_session(engine: &str, count: u64) -> io::Result<()> {
    let deadline = Instant::now() + INDEX_LIMIT;
    while sessions(engine).await? < count {
        if Instant::now() > deadline {
            let text = format!("the engine has not found its node again after {INDEX_LIMIT:?}");
            return Err(io::Error::other(text));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Waits until a node holds `parts` parts in a tier: writing to a disk is not part of a request, and
/// neither is adopting what is there.
///
/// # Errors
/// The node does not answer, or the parts do not come.
pub async fn await_parts(control: &str, tier: &str, parts: u64) -> io::Result<()> {
    let deadline = Instant::now() + INDEX_LIMIT;
    let mut node =
        NodeClient::connect(format!("http://{control}")).await.map_err(io::Error::other)?;
    loop {
        let status = node.status(StatusRequest {}).await.map_err(io::Error::other)?.into_inner();
        let held = status.tiers.iter().find(|status| status.tier == tier);
        let held = held.map_or(0, |status| status.parts);
        if held >= parts {
            return Ok(());
        }
        if Instant::now() > deadline {
            let text =
                format!("the node holds {held} of {parts} parts on {tier} after {INDEX_LIMIT:?}");
            return Err(io::Error::other(text));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn stop(cluster: Cluster) -> io::Result<()> {
    let Cluster { master, a, b } = cluster;
    for Host { node, engine } in [a, b] {
        engine.kill().await?;
        if let Some(node) = node {
            node.kill().await?;
        }
    }
    master.kill().await
}

fn table(steps: &[Step]) -> Table {
    let cold = steps.first().map_or(f64::NAN, |step| step.ttft_ms);
    let mut table = Table::new();
    table.load_style(UTF8_HORIZONTAL_ONLY).set_header([
        "step",
        "source",
        "prompt",
        "cached",
        "fetch ms",
        "TTFT ms",
        "vs cold_a",
        "output equal",
    ]);
    for step in steps {
        table.add_row([
            step.step.to_owned(),
            step.source.clone(),
            step.prompt_tokens.to_string(),
            step.cached_tokens.to_string(),
            format!("{:.1}", step.fetch_ms),
            format!("{:.0}", step.ttft_ms),
            format!("{:.1} x", cold / step.ttft_ms),
            if step.output_equal { "yes" } else { "NO" }.to_owned(),
        ]);
    }
    for column in 2..7 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
