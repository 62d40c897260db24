//! `status` and `nodes`: who is there, and what the masters see of it.

use crate::{
    ctl::{Ctl, NodeAnswer, hex},
    error::CtlError,
    output::{Section, Table, Tone, count, counted, plural, share, short, size, time},
};
use larder_proto::control::{self, Coverage};
use serde::Serialize;

#[derive(Debug, Serialize)]
struct Status {
    masters: Vec<Master>,
    /// As the first master that answers knows them.
    nodes: Option<NodeCounts>,
}

#[derive(Debug, Serialize)]
struct Master {
    address: String,
    #[serde(flatten)]
    state: MasterState,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case", tag = "state")]
enum MasterState {
    Up(Box<MasterUp>),
    Unreachable { error: String },
}

#[derive(Debug, Serialize)]
struct MasterUp {
    cluster: String,
    term: u64,
    incarnation: u64,
    role: String,
    version: String,
    uptime_ms: u64,
    index: IndexFigures,
    coverage: Seen,
}

#[derive(Debug, Serialize)]
struct IndexFigures {
    entries: u64,
    entries_limit: u64,
    entries_left_out: u64,
    memory_bytes: u64,
}

/// How much of the cluster an answer could see.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Seen {
    complete: bool,
    nodes_known: u32,
    nodes_synced: u32,
    index_limited: bool,
}

impl From<Coverage> for Seen {
    fn from(coverage: Coverage) -> Self {
        let Coverage { complete, nodes_known, nodes_synced, index_limited } = coverage;
        Self { complete, nodes_known, nodes_synced, index_limited }
    }
}

impl Seen {
    /// Why something is not there, as far as an answer could see: what is out of sight may be there all the same.
    pub(crate) fn absent(&self, why: String) -> CtlError {
        match self.note() {
            None => CtlError::NotFound(why),
            Some(note) => CtlError::Unreachable(format!("{why}. {note} Try again")),
        }
    }

    /// What an answer may lack; nothing where it is complete.
    pub(crate) fn note(&self) -> Option<String> {
        if self.complete {
            return None;
        }
        let mut why = Vec::new();
        if self.nodes_synced < self.nodes_known {
            why.push(format!(
                "only {} of {} in step with the master",
                self.nodes_synced,
                counted(self.nodes_known as usize, "node")
            ));
        }
        if self.index_limited {
            why.push("the index is at its limit and leaves entries out".to_owned());
        }
        if why.is_empty() {
            why.push("nodes came or went meanwhile".to_owned());
        }
        Some(format!("The answer may be incomplete: {}.", why.join("; ")))
    }
}

#[derive(Debug, Default, Serialize)]
struct NodeCounts {
    up: u64,
    syncing: u64,
    down: u64,
    capacity_bytes: u64,
    used_bytes: u64,
}

/// `larderctl status`.
pub(crate) async fn status(ctl: &Ctl) -> Result<(), CtlError> {
    let answers = ctl
        .masters()
        .ask_each(|mut master| async move { master.status(control::StatusRequest {}).await });
    let answers = ctl.within("status", async { Ok(answers.await) }).await?;
    let reached = answers.iter().any(|(_, answer)| answer.is_ok());
    let nodes = match reached {
        true => Some(count_nodes(&ctl.nodes(None).await?)),
        false => None,
    };
    let masters = answers.into_iter().map(|(address, answer)| Master {
        address,
        state: match answer {
            Ok(reply) => MasterState::Up(Box::new(master_up(reply))),
            Err(error) => MasterState::Unreachable { error },
        },
    });
    let status = Status { masters: masters.collect(), nodes };
    ctl.out.show(&status, status_for_people)?;
    match reached {
        true => Ok(()),
        false => Err(CtlError::Unreachable("no master answered".to_owned())),
    }
}

fn master_up(reply: control::StatusReply) -> MasterUp {
    MasterUp {
        cluster: hex(&reply.cluster),
        term: reply.term,
        incarnation: reply.master_incarnation,
        role: reply.role,
        version: reply.version,
        uptime_ms: reply.uptime_ms,
        index: IndexFigures {
            entries: reply.entries,
            entries_limit: reply.entries_limit,
            entries_left_out: reply.entries_left_out,
            memory_bytes: reply.index_bytes,
        },
        coverage: reply.coverage.unwrap_or_default().into(),
    }
}

fn count_nodes(nodes: &[control::NodeInfo]) -> NodeCounts {
    let mut counts = NodeCounts::default();
    for node in nodes {
        match node.state.as_str() {
            "up" => counts.up += 1,
            "down" => counts.down += 1,
            _ => counts.syncing += 1,
        }
        if node.state != "down" {
            counts.capacity_bytes += node.capacity_bytes;
            counts.used_bytes += node.used_bytes;
        }
    }
    counts
}

fn status_for_people(status: &Status) -> Vec<Section> {
    let columns =
        ["master", "state", "role", "term>", "up for>", "version", "nodes", "blocks>", "index>"];
    let mut masters = Table::new(&columns, "no master is configured");
    let mut notes = Vec::new();
    for Master { address, state } in &status.masters {
        match state {
            MasterState::Unreachable { error } => {
                let dash = || "-".to_owned();
                let cells = [dash(), dash(), dash(), dash(), dash(), dash(), dash()];
                let [role, term, uptime, version, nodes, blocks, index] = cells;
                let state = "unreachable".to_owned();
                masters.row(
                    Tone::Bad,
                    [address.clone(), state, role, term, uptime, version, nodes, blocks, index],
                );
                notes.push(Section::Text(format!("{address}: {error}")));
            }
            MasterState::Up(up) => {
                let Seen { complete, nodes_known, nodes_synced, .. } = up.coverage;
                let state = if complete { "complete" } else { "incomplete" };
                masters.row(
                    if complete { Tone::Good } else { Tone::Odd },
                    [
                        address.clone(),
                        state.to_owned(),
                        up.role.clone(),
                        up.term.to_string(),
                        time(up.uptime_ms),
                        up.version.clone(),
                        format!("{nodes_synced} of {nodes_known}"),
                        count(up.index.entries),
                        size(up.index.memory_bytes),
                    ],
                );
                let note =
                    up.coverage.note().map(|note| Section::Text(format!("{address}: {note}")));
                notes.extend(note);
            }
        }
    }
    let mut sections = vec![Section::Table(masters)];
    sections.extend(notes);
    if let Some(NodeCounts { up, syncing, down, capacity_bytes, used_bytes }) = &status.nodes {
        let mut text = format!("{up} node{} up", plural(*up));
        if *syncing > 0 {
            text.push_str(&format!(", {syncing} syncing"));
        }
        if *down > 0 {
            text.push_str(&format!(", {down} down"));
        }
        let (used, capacity) = (size(*used_bytes), size(*capacity_bytes));
        let share = share(*used_bytes, *capacity_bytes);
        text.push_str(&format!(": {used} of {capacity} used ({share})"));
        sections.push(Section::Text(text));
    }
    sections
}

#[derive(Debug, Serialize)]
struct Nodes {
    nodes: Vec<Node>,
}

#[derive(Debug, Serialize)]
struct Node {
    name: String,
    node: String,
    incarnation: u64,
    state: String,
    state_for_ms: u64,
    draining: bool,
    blocks: u64,
    used_bytes: u64,
    capacity_bytes: u64,
    data_address: String,
    control_address: String,
    last_event: u64,
    version: String,
    /// What the node itself says of its ssd paths; none where it was not heard.
    ssd_paths: Option<Vec<SsdPath>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_heard: Option<String>,
}

#[derive(Debug, Serialize)]
struct SsdPath {
    path: String,
    healthy: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    fenced_because: String,
    used_bytes: u64,
    capacity_bytes: u64,
}

impl From<&control::PathStatus> for SsdPath {
    fn from(path: &control::PathStatus) -> Self {
        Self {
            path: path.path.clone(),
            healthy: path.healthy,
            fenced_because: path.fenced_because.clone(),
            used_bytes: path.used_bytes,
            capacity_bytes: path.capacity_bytes,
        }
    }
}

/// `larderctl nodes`.
pub(crate) async fn nodes(ctl: &Ctl, chosen: Option<&str>) -> Result<(), CtlError> {
    let nodes = ctl.within("nodes", ctl.nodes(chosen)).await?;
    // Each node has a bounded time to answer, and what the master says is shown in any case.
    let answers = ctl
        .ask_nodes(nodes, |mut node| async move { node.status(control::StatusRequest {}).await });
    let describe = |(node, answer): NodeAnswer<control::NodeStatusReply>| Node {
        ssd_paths: answer.as_ref().ok().map(|reply| {
            reply.tiers.iter().flat_map(|tier| &tier.paths).map(SsdPath::from).collect()
        }),
        not_heard: answer.err().map(|why| why.to_string()),
        name: node.name,
        node: hex(&node.node),
        incarnation: node.incarnation,
        state: node.state,
        state_for_ms: node.since_ms,
        draining: node.draining,
        blocks: node.entries,
        used_bytes: node.used_bytes,
        capacity_bytes: node.capacity_bytes,
        data_address: node.data_address,
        control_address: node.control_address,
        last_event: node.seq,
        version: node.version,
    };
    let nodes = Nodes { nodes: answers.await.into_iter().map(describe).collect() };
    ctl.out.show(&nodes, |nodes| {
        let mut sections = vec![Section::Table(nodes_for_people(nodes))];
        let notes: Vec<String> = nodes.nodes.iter().flat_map(notes).collect();
        if !notes.is_empty() {
            sections.push(Section::Text(notes.join("\n")));
        }
        sections
    })
}

/// Fenced paths, and why nothing is known of them.
fn notes(node: &Node) -> Vec<String> {
    if let Some(why) = node.not_heard.as_ref().filter(|_| node.state != "down") {
        return vec![format!("{}: its ssd paths are not known: {why}", node.name)];
    }
    let paths = node.ssd_paths.iter().flatten().filter(|path| !path.healthy);
    paths
        .map(|path| format!("{}: {} is fenced: {}", node.name, path.path, path.fenced_because))
        .collect()
}

/// `1 of 2`: paths that take part, of all.
fn ssds(node: &Node) -> String {
    match node.ssd_paths.as_deref() {
        None => "?".to_owned(),
        Some([]) => "-".to_owned(),
        Some(paths) => {
            let healthy = paths.iter().filter(|path| path.healthy).count();
            format!("{healthy} of {}", paths.len())
        }
    }
}

fn nodes_for_people(nodes: &Nodes) -> Table {
    let columns = [
        "node",
        "id",
        "state",
        "for>",
        "blocks>",
        "used>",
        "capacity>",
        "full>",
        "ssds",
        "data",
        "control",
        "version",
    ];
    let mut table = Table::new(&columns, "the master knows no node");
    for node in &nodes.nodes {
        let (state, tone) = match (node.state.as_str(), node.draining) {
            ("down", _) => ("down".to_owned(), Tone::Bad),
            (state, true) => (format!("{state}, draining"), Tone::Odd),
            ("up", false) => ("up".to_owned(), Tone::Good),
            (state, false) => (state.to_owned(), Tone::Odd),
        };
        let fenced = node.ssd_paths.iter().flatten().any(|path| !path.healthy);
        let tone = if fenced && tone == Tone::Good { Tone::Odd } else { tone };
        table.row(
            tone,
            [
                node.name.clone(),
                short(&node.node),
                state,
                time(node.state_for_ms),
                count(node.blocks),
                size(node.used_bytes),
                size(node.capacity_bytes),
                share(node.used_bytes, node.capacity_bytes),
                ssds(node),
                node.data_address.clone(),
                node.control_address.clone(),
                node.version.clone(),
            ],
        );
    }
    table
}
