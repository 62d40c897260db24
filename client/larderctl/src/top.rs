//! `top`: what nodes are doing, per second, from the difference of two looks at their counters.

use crate::{
    cli::{Format, TopArgs},
    ctl::{Ctl, Names, NodeAnswer, all_answered, hex},
    error::CtlError,
    output::{Section, Table, Tone, print, share, size},
};
use larder_proto::control::{self, NodeStatusReply};
use serde::Serialize;
use std::{
    collections::HashMap,
    io::{self, IsTerminal},
    time::Duration,
};
use tokio::time::{Instant, sleep_until};

/// A shorter one would measure the asking.
const SHORTEST: Duration = Duration::from_millis(100);
/// Home, and nothing below: what is drawn over needs no flicker.
const REDRAW: &str = "\x1b[H\x1b[J";

type Answers = Vec<NodeAnswer<NodeStatusReply>>;

#[derive(Debug, Serialize)]
struct Top {
    over_ms: u64,
    nodes: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    node: String,
    #[serde(skip)]
    called: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_heard: Option<String>,
    #[serde(flatten)]
    figures: Option<Figures>,
}

#[derive(Debug, Default, Serialize)]
struct Figures {
    dram_used_bytes: u64,
    dram_capacity_bytes: u64,
    ssd_used_bytes: u64,
    ssd_capacity_bytes: u64,
    ssd_queued_bytes: u64,
    ssd_paths: usize,
    ssd_paths_fenced: Vec<String>,
    leases: u64,
    /// None at the first look at a life of the node.
    #[serde(flatten)]
    rates: Option<Rates>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Rates {
    hits_per_second: f64,
    misses_per_second: f64,
    commits_per_second: f64,
    evictions_per_second: f64,
    sent_bytes_per_second: f64,
    received_bytes_per_second: f64,
    ssd_read_bytes_per_second: f64,
    ssd_written_bytes_per_second: f64,
}

/// `larderctl top`.
pub(crate) async fn top(ctl: &Ctl, args: &TopArgs) -> Result<(), CtlError> {
    let every = args.interval.get();
    if every < SHORTEST {
        let rule = format!("--interval = {}: must be at least 100ms", args.interval);
        return Err(CtlError::Usage(rule));
    }
    let redraws = io::stdout().is_terminal() && ctl.out.format() == Format::Table && !args.once;
    let (mut before, mut since) = (look(ctl, args).await?, Instant::now());
    loop {
        sleep_until(since + every).await;
        let now = look(ctl, args).await?;
        let over = since.elapsed();
        since = Instant::now();
        let answer = compare(&before, &now, over);
        if redraws {
            print(REDRAW.as_bytes())?;
        }
        match args.once {
            true => {
                ctl.out.show(&answer, for_people)?;
                return all_answered(&now);
            }
            false if ctl.out.show_next(&answer, for_people)? => {}
            false => return Ok(()), // `| head` has seen enough.
        }
        before = now;
    }
}

async fn look(ctl: &Ctl, args: &TopArgs) -> Result<Answers, CtlError> {
    let asked =
        async {
            let nodes = ctl.nodes(args.node.as_deref()).await?;
            let answers = ctl.ask_nodes(nodes, |mut node| async move {
                node.status(control::StatusRequest {}).await
            });
            Ok(answers.await)
        };
    ctl.within("top", asked).await
}

fn compare(before: &Answers, now: &Answers, over: Duration) -> Top {
    let earlier: HashMap<_, _> = before
        .iter()
        .filter_map(|(node, answer)| Some((node.node.clone(), answer.as_ref().ok()?)))
        .collect();
    let names = Names::new(now.iter().map(|(node, _)| (hex(&node.node), node.name.as_str())));
    let row = |(info, answer): &NodeAnswer<NodeStatusReply>| {
        let node = hex(&info.node);
        let (figures, not_heard) = match answer {
            Ok(reply) => (Some(figures(earlier.get(&info.node).copied(), reply, over)), None),
            Err(why) => (None, Some(why.to_string())),
        };
        Row { name: info.name.clone(), called: names.of_hex(&node), node, not_heard, figures }
    };
    let over_ms = u64::try_from(over.as_millis()).unwrap_or(u64::MAX);
    Top { over_ms, nodes: now.iter().map(row).collect() }
}

fn figures(before: Option<&NodeStatusReply>, now: &NodeStatusReply, over: Duration) -> Figures {
    let mut figures = Figures { leases: now.leases, ..Figures::default() };
    for tier in &now.tiers {
        match tier.tier.as_str() {
            "dram" => {
                figures.dram_used_bytes = tier.used_bytes;
                figures.dram_capacity_bytes = tier.capacity_bytes;
            }
            "ssd" => {
                figures.ssd_used_bytes = tier.used_bytes;
                figures.ssd_capacity_bytes = tier.capacity_bytes;
                figures.ssd_queued_bytes = tier.queued_bytes;
                figures.ssd_paths = tier.paths.len();
                let fenced = tier.paths.iter().filter(|path| !path.healthy);
                figures.ssd_paths_fenced = fenced.map(|path| path.path.clone()).collect();
            }
            _ => {}
        }
    }
    // Counters of another life begin anew.
    let before = before.filter(|before| before.incarnation == now.incarnation);
    figures.rates = before.map(|before| rates(before, now, over));
    figures
}

fn rates(before: &NodeStatusReply, now: &NodeStatusReply, over: Duration) -> Rates {
    #[expect(clippy::cast_precision_loss, reason = "rates for people")]
    let per_second = |before: u64, now: u64| {
        now.saturating_sub(before) as f64 / over.as_secs_f64().max(f64::MIN_POSITIVE)
    };
    let of_node = |name: &str| {
        let value = |reply: &NodeStatusReply| reply.counters.get(name).copied().unwrap_or(0);
        per_second(value(before), value(now))
    };
    let of_paths = |name: &str| {
        let value = |reply: &NodeStatusReply| {
            let paths = reply.tiers.iter().flat_map(|tier| &tier.paths);
            paths.map(|path| path.counters.get(name).copied().unwrap_or(0)).sum()
        };
        per_second(value(before), value(now))
    };
    Rates {
        hits_per_second: of_node("found"),
        misses_per_second: of_node("missed"),
        commits_per_second: of_node("committed"),
        evictions_per_second: of_node("evicted"),
        sent_bytes_per_second: of_node("sent_bytes"),
        received_bytes_per_second: of_node("received_bytes"),
        ssd_read_bytes_per_second: of_paths("read_bytes"),
        ssd_written_bytes_per_second: of_paths("written_bytes"),
    }
}

fn for_people(top: &Top) -> Vec<Section> {
    let columns = [
        "node",
        "dram>",
        "full>",
        "ssd>",
        "full>",
        "queue>",
        "hits/s>",
        "misses/s>",
        "commits/s>",
        "sent/s>",
        "received/s>",
        "ssd read/s>",
        "ssd written/s>",
        "leases>",
    ];
    let mut table = Table::new(&columns, "the master knows no node");
    let mut notes = Vec::new();
    for row in &top.nodes {
        let Some(figures) = &row.figures else {
            notes.push(format!("{}: {}", row.called, row.not_heard.as_deref().unwrap_or_default()));
            continue;
        };
        let fenced = &figures.ssd_paths_fenced;
        notes.extend(fenced.iter().map(|path| format!("{}: {path} is fenced", row.called)));
        let has_ssd = figures.ssd_paths > 0;
        let of_ssd = |text: String| if has_ssd { text } else { "-".to_owned() };
        let rate = |of: fn(&Rates) -> f64| {
            figures
                .rates
                .as_ref()
                .map_or_else(|| "-".to_owned(), |rates| format!("{:.1}", of(rates)))
        };
        let bytes = |of: fn(&Rates) -> f64| {
            figures.rates.as_ref().map_or_else(|| "-".to_owned(), |rates| size(whole(of(rates))))
        };
        table.row(
            if fenced.is_empty() { Tone::Plain } else { Tone::Odd },
            [
                row.called.clone(),
                size(figures.dram_used_bytes),
                share(figures.dram_used_bytes, figures.dram_capacity_bytes),
                of_ssd(size(figures.ssd_used_bytes)),
                of_ssd(share(figures.ssd_used_bytes, figures.ssd_capacity_bytes)),
                of_ssd(size(figures.ssd_queued_bytes)),
                rate(|rates| rates.hits_per_second),
                rate(|rates| rates.misses_per_second),
                rate(|rates| rates.commits_per_second),
                bytes(|rates| rates.sent_bytes_per_second),
                bytes(|rates| rates.received_bytes_per_second),
                of_ssd(bytes(|rates| rates.ssd_read_bytes_per_second)),
                of_ssd(bytes(|rates| rates.ssd_written_bytes_per_second)),
                figures.leases.to_string(),
            ],
        );
    }
    let mut sections = vec![Section::Table(table)];
    if !notes.is_empty() {
        sections.push(Section::Text(notes.join("\n")));
    }
    sections
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates are not negative and far below 2^63"
)]
fn whole(rate: f64) -> u64 {
    rate as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(incarnation: u64, found: u64, sent: u64) -> NodeStatusReply {
        let counters = [("found".to_owned(), found), ("sent_bytes".to_owned(), sent)].into();
        NodeStatusReply { incarnation, counters, ..NodeStatusReply::default() }
    }

    #[test]
    fn rates_are_over_the_time_between_looks_and_never_over_two_lives() {
        let over = Duration::from_secs(2);
        let rates = figures(Some(&reply(1, 10, 1000)), &reply(1, 16, 5096), over).rates.unwrap();
        assert_eq!((rates.hits_per_second, rates.sent_bytes_per_second), (3.0, 2048.0));
        assert_eq!(rates.misses_per_second, 0.0);
        assert_eq!(figures(Some(&reply(1, 10, 0)), &reply(2, 16, 0), over).rates, None);
        assert_eq!(figures(None, &reply(2, 16, 0), over).rates, None);
    }
}
