//! `stats` and `pins`: what the nodes say of themselves, and the counters of all.

use crate::{
    ctl::{Ctl, Names, NodeAnswer, all_answered, hex},
    error::CtlError,
    output::{Section, Table, Tone, count, plural, share, size, time},
};
use larder_proto::control;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

type Counters = BTreeMap<String, u64>;

#[derive(Debug, Serialize)]
struct Stats {
    masters: Vec<Master>,
    nodes: Vec<Node>,
}

#[derive(Debug, Serialize)]
struct Master {
    address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    counters: Counters,
}

#[derive(Debug, Serialize)]
struct Node {
    name: String,
    /// Differs from the name where several nodes have it.
    #[serde(skip)]
    called: String,
    node: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(flatten)]
    figures: Option<NodeFigures>,
}

#[derive(Debug, Serialize)]
struct NodeFigures {
    uptime_ms: u64,
    leases: u64,
    writes_in_progress: u64,
    quarantined_bytes: u64,
    tiers: Vec<Tier>,
    masters: Vec<Link>,
    counters: Counters,
}

#[derive(Debug, Serialize)]
struct Tier {
    tier: String,
    capacity_bytes: u64,
    used_bytes: u64,
    evictable_bytes: u64,
    parts: u64,
    queued_bytes: u64,
    paths: Vec<TierPath>,
}

#[derive(Debug, Serialize)]
struct TierPath {
    path: String,
    healthy: bool,
    fenced_because: String,
    capacity_bytes: u64,
    used_bytes: u64,
    driver: String,
    driver_because: String,
    adopted_segments: u64,
    segments_to_adopt: u64,
    disk_full: bool,
    counters: Counters,
}

impl TierPath {
    fn state(&self) -> (Tone, String) {
        if !self.healthy {
            return (Tone::Bad, format!("fenced: {}", self.fenced_because));
        }
        let (mut tone, mut state) = (Tone::Plain, "in use".to_owned());
        if self.segments_to_adopt > 0 {
            let all = self.adopted_segments + self.segments_to_adopt;
            tone = Tone::Odd;
            state.push_str(&format!(
                "; {} of {all} segments read after the restart",
                self.adopted_segments
            ));
        }
        if self.disk_full {
            tone = Tone::Odd;
            state.push_str("; the disk is full below the capacity");
        }
        (tone, state)
    }
}

impl From<&control::PathStatus> for TierPath {
    fn from(path: &control::PathStatus) -> Self {
        Self {
            path: path.path.clone(),
            healthy: path.healthy,
            fenced_because: path.fenced_because.clone(),
            capacity_bytes: path.capacity_bytes,
            used_bytes: path.used_bytes,
            driver: path.driver.clone(),
            driver_because: path.driver_because.clone(),
            adopted_segments: path.adopted_segments,
            segments_to_adopt: path.segments_to_adopt,
            disk_full: path.disk_full,
            counters: path.counters.iter().map(|(name, value)| (name.clone(), *value)).collect(),
        }
    }
}

#[derive(Debug, Serialize)]
struct Link {
    address: String,
    state: String,
    sent: u64,
    acknowledged: u64,
}

/// `larderctl stats`.
pub(crate) async fn stats(ctl: &Ctl, chosen: Option<&str>) -> Result<(), CtlError> {
    let (masters, answers) = ctl
        .within("stats", async {
            let nodes = ctl.nodes(chosen).await?;
            let masters = ctl.masters().ask_each(|mut master| async move {
                master.status(control::StatusRequest {}).await
            });
            let answers = ctl.ask_nodes(nodes, |mut node| async move {
                node.status(control::StatusRequest {}).await
            });
            Ok((masters.await, answers.await))
        })
        .await?;
    // Whoever names one node wants to see that one.
    let masters = masters.into_iter().filter(|_| chosen.is_none()).map(|(address, answer)| {
        let (counters, error) = match answer {
            Ok(reply) => (reply.counters.into_iter().collect(), None),
            Err(error) => (Counters::new(), Some(error)),
        };
        Master { address, error, counters }
    });
    let names = Names::new(answers.iter().map(|(node, _)| (hex(&node.node), node.name.as_str())));
    let nodes = answers.iter().map(|answer| describe(answer, &names));
    let stats = Stats { masters: masters.collect(), nodes: nodes.collect() };
    ctl.out.show(&stats, for_people)?;
    all_answered(&answers)
}

fn describe((info, answer): &NodeAnswer<control::NodeStatusReply>, names: &Names) -> Node {
    let (name, node) = (info.name.clone(), hex(&info.node));
    let called = names.of_hex(&node);
    let reply = match answer {
        Ok(reply) => reply,
        Err(why) => {
            return Node { name, called, node, error: Some(why.to_string()), figures: None };
        }
    };
    let tier = |tier: &control::TierStatus| Tier {
        tier: tier.tier.clone(),
        capacity_bytes: tier.capacity_bytes,
        used_bytes: tier.used_bytes,
        evictable_bytes: tier.evictable_bytes,
        parts: tier.parts,
        queued_bytes: tier.queued_bytes,
        paths: tier.paths.iter().map(TierPath::from).collect(),
    };
    let link = |link: &control::MasterLink| Link {
        address: link.address.clone(),
        state: link.state.clone(),
        sent: link.seq_sent,
        acknowledged: link.seq_acked,
    };
    let figures = NodeFigures {
        uptime_ms: reply.uptime_ms,
        leases: reply.leases,
        writes_in_progress: reply.writes_in_progress,
        quarantined_bytes: reply.quarantined_bytes,
        tiers: reply.tiers.iter().map(tier).collect(),
        masters: reply.masters.iter().map(link).collect(),
        counters: reply.counters.iter().map(|(name, value)| (name.clone(), *value)).collect(),
    };
    Node { name, called, node, error: None, figures: Some(figures) }
}

fn for_people(stats: &Stats) -> Vec<Section> {
    let mut memory = Table::new(
        &[
            "node",
            "tier",
            "used>",
            "capacity>",
            "full>",
            "evictable>",
            "parts>",
            "leases>",
            "writes>",
            "quarantined>",
            "up for>",
        ],
        "no node",
    )
    .titled("Memory");
    let columns = ["node", "master", "state", "events sent>", "not acknowledged>"];
    let mut links = Table::new(&columns, "no node has a session").titled("Sessions");
    let mut silent = Vec::new();
    for node in &stats.nodes {
        let Some(figures) = &node.figures else {
            let why = node.error.as_deref().unwrap_or_default();
            silent.push(Section::Text(format!("{}: {why}", node.called)));
            continue;
        };
        for tier in &figures.tiers {
            memory.row(
                Tone::Plain,
                [
                    node.called.clone(),
                    tier.tier.clone(),
                    size(tier.used_bytes),
                    size(tier.capacity_bytes),
                    share(tier.used_bytes, tier.capacity_bytes),
                    size(tier.evictable_bytes),
                    count(tier.parts),
                    count(figures.leases),
                    count(figures.writes_in_progress),
                    size(figures.quarantined_bytes),
                    time(figures.uptime_ms),
                ],
            );
        }
        for link in &figures.masters {
            links.row(
                Tone::Plain,
                [
                    node.called.clone(),
                    link.address.clone(),
                    link.state.clone(),
                    count(link.sent),
                    count(link.sent.saturating_sub(link.acknowledged)),
                ],
            );
        }
    }
    let mut sections = vec![Section::Table(memory)];
    sections.extend(silent);
    sections.extend(paths(stats));
    sections.push(Section::Table(links));
    let of_nodes = stats.nodes.iter().filter_map(|node| {
        node.figures.as_ref().map(|figures| (node.called.as_str(), &figures.counters))
    });
    sections.push(counters("Counters of nodes, since their start", of_nodes));
    if !stats.masters.is_empty() {
        let of_masters =
            stats.masters.iter().map(|master| (master.address.as_str(), &master.counters));
        sections.push(counters("Counters of masters, since their start", of_masters));
    }
    sections
}

/// Ssd paths, where there are any, and why they are not used in the best way.
fn paths(stats: &Stats) -> Vec<Section> {
    let columns = [
        "node",
        "path",
        "used>",
        "capacity>",
        "full>",
        "read>",
        "written>",
        "scrubbed>",
        "damaged>",
        "driver",
        "state",
    ];
    let mut table =
        Table::new(&columns, "no ssd path").titled("Ssd paths, since the start of their node");
    let mut notes = Vec::new();
    for node in &stats.nodes {
        let tiers = node.figures.iter().flat_map(|figures| &figures.tiers);
        for path in tiers.flat_map(|tier| &tier.paths) {
            let counter = |name: &str| path.counters.get(name).copied().unwrap_or(0);
            let (tone, state) = path.state();
            if !path.driver_because.is_empty() {
                let TierPath { path, driver, driver_because, .. } = path;
                notes.push(format!("{}, {path}: {driver}, because: {driver_because}", node.called));
            }
            table.row(
                tone,
                [
                    node.called.clone(),
                    path.path.clone(),
                    size(path.used_bytes),
                    size(path.capacity_bytes),
                    share(path.used_bytes, path.capacity_bytes),
                    size(counter("read_bytes")),
                    size(counter("written_bytes")),
                    size(counter("scrubbed_bytes")),
                    count(counter("damaged")),
                    if path.driver.is_empty() { "-".to_owned() } else { path.driver.clone() },
                    state,
                ],
            );
        }
    }
    if table.is_empty() {
        return Vec::new();
    }
    [Section::Table(table)].into_iter().chain(notes.into_iter().map(Section::Text)).collect()
}

/// One row for each counter of each process. Counters that are zero are left out: JSON has them all.
fn counters<'a>(title: &str, of: impl Iterator<Item = (&'a str, &'a Counters)> + Clone) -> Section {
    let mut table = Table::new(&["counter", "of", "value>"], "all are zero").titled(title);
    let names: BTreeSet<&String> = of.clone().flat_map(|(_, counters)| counters.keys()).collect();
    for name in names {
        for (who, counters) in of.clone() {
            match counters.get(name) {
                Some(value) if *value > 0 => {
                    table.row(Tone::Plain, [name.clone(), who.to_owned(), count(*value)]);
                }
                Some(_) | None => {}
            }
        }
    }
    Section::Table(table)
}

#[derive(Debug, Serialize)]
struct Pins {
    pins: Vec<Pin>,
    /// Nodes whose pins are not known.
    not_asked: BTreeMap<String, String>,
}

#[derive(Debug, Serialize)]
struct Pin {
    node: String,
    kind: String,
    owner: String,
    pid: Option<u64>,
    part: String,
    bytes: u64,
    age_ms: u64,
}

/// `larderctl pins`.
pub(crate) async fn pins(ctl: &Ctl, chosen: Option<&str>) -> Result<(), CtlError> {
    let answers = ctl
        .within("pins", async {
            let nodes = ctl.nodes(chosen).await?;
            let ask = ctl.ask_nodes(nodes, |mut node| async move {
                node.list_pins(control::ListPinsRequest {}).await
            });
            Ok(ask.await)
        })
        .await?;
    let names = Names::new(answers.iter().map(|(node, _)| (hex(&node.node), node.name.as_str())));
    let mut pins = Pins { pins: Vec::new(), not_asked: BTreeMap::new() };
    for (node, answer) in &answers {
        let called = names.of_hex(&hex(&node.node));
        let reply = match answer {
            Ok(reply) => reply,
            Err(why) => {
                pins.not_asked.insert(called, why.to_string());
                continue;
            }
        };
        pins.pins.extend(reply.pins.iter().map(|pin| Pin {
            node: called.clone(),
            kind: pin.kind.clone(),
            owner: pin.owner.clone(),
            pid: (pin.pid > 0).then_some(pin.pid),
            part: pin.part.clone(),
            bytes: pin.bytes,
            age_ms: pin.age_ms,
        }));
    }
    ctl.out.show(&pins, pins_for_people)?;
    all_answered(&answers)
}

fn pins_for_people(pins: &Pins) -> Vec<Section> {
    let columns = ["node", "kind", "owner", "pid>", "part", "size>", "for>"];
    let mut table = Table::new(&columns, "nothing is in use");
    let mut bytes = 0;
    for pin in &pins.pins {
        bytes += pin.bytes;
        let tone = if pin.kind == "quarantined" { Tone::Odd } else { Tone::Plain };
        table.row(
            tone,
            [
                pin.node.clone(),
                pin.kind.clone(),
                pin.owner.clone(),
                pin.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
                pin.part.clone(),
                size(pin.bytes),
                time(pin.age_ms),
            ],
        );
    }
    let mut sections = vec![Section::Table(table)];
    if !pins.pins.is_empty() {
        let number = pins.pins.len() as u64;
        let text = format!("{number} pin{}, {}", plural(number), size(bytes));
        sections.push(Section::Text(text));
    }
    for (node, why) in &pins.not_asked {
        sections.push(Section::Text(format!("{node}: not asked: {why}")));
    }
    sections
}
