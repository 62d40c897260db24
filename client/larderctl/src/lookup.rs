//! `lookup`: who holds a prompt's blocks, or a block.

use crate::{
    blocks::{Chain, SHORTER_THAN_A_BLOCK, chains, read_tokens},
    cli::BlockArgs,
    ctl::{Ctl, Names, QUESTIONS},
    error::{CtlError, Doing},
    models::{self, Version},
    output::{Section, Table, Tone, counted, plural, short},
    status::Seen,
};
use futures_util::{StreamExt, TryStreamExt, stream};
use larder_client::cluster::{Located, Prefix};
use larder_proto::{BlockKey, frame::KEYS_LIMIT, part::Tier};
use serde::Serialize;

#[derive(Debug, Serialize)]
struct Matches {
    tokens: usize,
    models: Vec<Match>,
}

#[derive(Debug, Serialize)]
struct Match {
    display_names: Vec<String>,
    content: String,
    layout: String,
    block_tokens: u32,
    /// Whole blocks of the prompt.
    blocks: usize,
    /// Usable from the start of the prompt.
    matched_blocks: usize,
    matched_tokens: usize,
    runs: Vec<Run>,
    coverage: Seen,
    #[serde(skip)]
    title: String,
}

#[derive(Debug, Serialize)]
struct Run {
    first_block: usize,
    blocks: usize,
    sources: Vec<Source>,
}

#[derive(Debug, Serialize)]
struct Source {
    name: String,
    node: String,
    data_address: String,
    tiers: Vec<&'static str>,
    /// Which parts of the block; none where the whole block is meant.
    #[serde(skip_serializing_if = "Option::is_none")]
    parts: Option<usize>,
}

#[derive(Debug, Serialize)]
struct Holders {
    blocks: Vec<Held>,
    /// What an answer could not see, if one could not see all.
    #[serde(skip)]
    unseen: Option<Seen>,
}

#[derive(Debug, Serialize)]
struct Held {
    key: String,
    /// Versions under which somebody holds it.
    models: Vec<HeldUnder>,
}

#[derive(Debug, Serialize)]
struct HeldUnder {
    display_names: Vec<String>,
    content: String,
    layout: String,
    parts_per_block: Option<usize>,
    holders: Vec<Source>,
    coverage: Seen,
}

/// `larderctl lookup`.
pub(crate) async fn lookup(ctl: &Ctl, args: &BlockArgs) -> Result<(), CtlError> {
    match read_tokens(&args.tokens)? {
        Some(tokens) => {
            let chains = async {
                let versions = models::select(ctl, &args.models).await?;
                chains(versions, &tokens, &args.tokens.salt)
            };
            let chains = ctl.within("list models", chains).await?;
            prefixes(ctl, tokens.len(), &chains).await
        }
        None => holders(ctl, args).await,
    }
}

async fn prefixes(ctl: &Ctl, tokens: usize, chains: &[Chain]) -> Result<(), CtlError> {
    let ask = async {
        let names = ctl.names().await?;
        let mut models = Vec::new();
        for chain in chains {
            // A longer prompt is matched as far as one question reaches.
            let keys = &chain.keys[..chain.keys.len().min(KEYS_LIMIT)];
            let prefix = ctl.client.match_prefix(chain.version.id, 0, keys).await;
            models.push(describe_match(chain, &prefix.doing("match the prompt")?, &names));
        }
        Ok(Matches { tokens, models })
    };
    let matches = ctl.within("lookup", ask).await?;
    ctl.out.show(&matches, matches_for_people)?;
    match matches.models.iter().any(|found| found.matched_blocks > 0) {
        true => Ok(()),
        false if matches.models.iter().all(|found| found.blocks == 0) => {
            Err(CtlError::NotFound(SHORTER_THAN_A_BLOCK.to_owned()))
        }
        false => Err(CtlError::NotFound(
            "no block of the prompt is held; `larderctl explain` says why".to_owned(),
        )),
    }
}

fn describe_match(chain: &Chain, prefix: &Prefix, names: &Names) -> Match {
    let mut first_block = 0;
    let runs = prefix.runs.iter().map(|run| {
        let sources = run.sources.iter().map(|(node, tier)| Source {
            name: names.of(&node.node),
            node: node.node.to_string(),
            data_address: node.address.clone(),
            tiers: vec![tier.name()],
            parts: None,
        });
        let described = Run { first_block, blocks: run.blocks, sources: sources.collect() };
        first_block += run.blocks;
        described
    });
    Match {
        display_names: chain.version.names.iter().cloned().collect(),
        content: chain.version.id.content.to_string(),
        layout: chain.version.id.layout.to_string(),
        block_tokens: chain.block_tokens,
        blocks: chain.keys.len(),
        matched_blocks: prefix.blocks,
        matched_tokens: prefix.blocks * chain.block_tokens as usize,
        runs: runs.collect(),
        coverage: prefix.coverage.into(),
        title: chain.version.title(),
    }
}

fn matches_for_people(matches: &Matches) -> Vec<Section> {
    let mut sections = Vec::new();
    for found in &matches.models {
        let title = format!(
            "{}\n{} of {} match: {} of {} of {}",
            found.title,
            found.matched_tokens,
            counted(matches.tokens, "token"),
            found.matched_blocks,
            counted(found.blocks, "whole block"),
            found.block_tokens
        );
        sections.push(Section::Text(title));
        if !found.runs.is_empty() {
            let mut table = Table::new(&["blocks", "best sources"], "");
            for run in &found.runs {
                let last = run.first_block + run.blocks.saturating_sub(1);
                let blocks = range(run.first_block, last);
                table.row(Tone::Plain, [blocks, sources(&run.sources)]);
            }
            sections.push(Section::Table(table));
        }
        sections.extend(found.coverage.note().map(Section::Text));
    }
    sections
}

/// Blocks in a row: `7` or `0-6`.
pub(crate) fn range(first: usize, last: usize) -> String {
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}

fn sources(sources: &[Source]) -> String {
    let source = |source: &Source| format!("{} ({})", source.name, source.tiers.join(", "));
    sources.iter().map(source).collect::<Vec<_>>().join(", ")
}

async fn holders(ctl: &Ctl, args: &BlockArgs) -> Result<(), CtlError> {
    let ask = async {
        let versions = models::select(ctl, &args.models).await?;
        let names = ctl.names().await?;
        let asks = versions.iter().map(|version| ctl.client.locate(version.id, &args.key));
        let found: Result<Vec<_>, _> = stream::iter(asks).buffered(QUESTIONS).try_collect().await;
        let located: Vec<_> = versions.iter().zip(found.doing("locate blocks")?).collect();
        let held = args.key.iter().enumerate().map(|(at, key)| held(at, key, &located, &names));
        let partial = located.iter().map(|(_, found)| found.coverage).find(|seen| !seen.complete);
        Ok(Holders { blocks: held.collect(), unseen: partial.map(Seen::from) })
    };
    let holders = ctl.within("lookup", ask).await?;
    ctl.out.show(&holders, holders_for_people)?;
    let lost = holders.blocks.iter().filter(|held| held.models.is_empty()).count();
    if lost == 0 {
        return Ok(());
    }
    let why = format!(
        "{lost} of {} block{} held by nobody; `larderctl explain --key` says why",
        args.key.len(),
        if args.key.len() == 1 { " is" } else { "s are" },
    );
    Err(match holders.unseen {
        Some(seen) => seen.absent(why),
        None => CtlError::NotFound(why),
    })
}

fn held(at: usize, key: &BlockKey, located: &[(&Version, Located)], names: &Names) -> Held {
    let under = located.iter().filter(|(_, found)| !found.blocks[at].is_empty());
    let under = under.map(|(version, found)| {
        let layout = version.described.as_ref().map(|(_, layout)| layout);
        let parts = layout.map_or(larder_proto::fingerprint::PART_LIMIT, |it| it.part_count());
        let holders = found.blocks[at].iter().map(|holder| {
            let tiers = Tier::ALL.iter().filter(|tier| holder.tiers.has(**tier));
            let held = (0..parts)
                .filter_map(|part| u16::try_from(part).ok())
                .filter(|part| holder.parts.has(larder_proto::PartNumber(*part)));
            Source {
                name: names.of(&holder.node.node),
                node: holder.node.node.to_string(),
                data_address: holder.node.address.clone(),
                tiers: tiers.map(|tier| tier.name()).collect(),
                parts: Some(held.count()),
            }
        });
        HeldUnder {
            display_names: version.names.iter().cloned().collect(),
            content: version.id.content.to_string(),
            layout: version.id.layout.to_string(),
            parts_per_block: layout.map(|layout| layout.part_count()),
            holders: holders.collect(),
            coverage: found.coverage.into(),
        }
    });
    Held { key: key.to_string(), models: under.collect() }
}

fn holders_for_people(holders: &Holders) -> Vec<Section> {
    let columns = ["block", "model", "layout", "node", "tiers", "parts>", "data"];
    let mut table = Table::new(&columns, "nobody holds it");
    let mut notes = Vec::new();
    for held in &holders.blocks {
        for model in &held.models {
            for holder in &model.holders {
                let of = model.parts_per_block.map_or_else(|| "?".to_owned(), |n| n.to_string());
                table.row(
                    Tone::Plain,
                    [
                        short(&held.key),
                        model.display_names.join(", "),
                        short(&model.layout),
                        holder.name.clone(),
                        holder.tiers.join(", "),
                        format!("{} of {of}", holder.parts.unwrap_or(0)),
                        holder.data_address.clone(),
                    ],
                );
            }
            notes.extend(model.coverage.note());
        }
    }
    notes.dedup();
    let mut sections = vec![Section::Table(table)];
    sections.extend(notes.into_iter().map(Section::Text));
    let lost = holders.blocks.iter().filter(|held| held.models.is_empty()).count() as u64;
    if lost > 0 && lost < holders.blocks.len() as u64 {
        sections.push(Section::Text(format!("{lost} block{} held by nobody", plural(lost))));
    }
    sections
}
