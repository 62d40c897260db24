//! `evict`: shows what would go, and with `--yes` removes it from all nodes.

use crate::{
    blocks::{Chain, chains, read_tokens},
    cli::{EvictArgs, TierName},
    ctl::{Ctl, Names, hex},
    error::{CtlError, Doing},
    models,
    output::{Section, Table, Tone, count, counted, plural, size},
};
use larder_proto::{
    BlockKey, ModelVersion,
    control::{self, EvictFilter, master_client::MasterClient},
    frame::KEYS_LIMIT,
};
use serde::Serialize;
use std::{collections::BTreeMap, time::Duration};

#[derive(Debug, Serialize)]
struct Evicted {
    dry_run: bool,
    blocks: u64,
    bytes: u64,
    nodes: Vec<Node>,
}

#[derive(Debug, Default, Serialize)]
struct Node {
    name: String,
    node: String,
    blocks: u64,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// `larderctl evict`.
pub(crate) async fn evict(ctl: &Ctl, args: &EvictArgs) -> Result<(), CtlError> {
    let filters = filters(ctl, args).await?;
    let node = match &args.node {
        None => Vec::new(),
        Some(name) => {
            let named = ctl.within("find the node", ctl.nodes(Some(name))).await?;
            named.into_iter().flat_map(|node| node.node.to_vec()).collect()
        }
    };
    if !args.yes {
        let would = send(ctl, &filters, &node, true).await?;
        ctl.out.show(&would, for_people)?;
        return all_obeyed(&would);
    }
    let done = send(ctl, &filters, &node, false).await?;
    ctl.out.show(&done, for_people)?;
    all_obeyed(&done)
}

/// The conditions as filters of a master; several where a name stands for several model versions.
async fn filters(ctl: &Ctl, args: &EvictArgs) -> Result<Vec<EvictFilter>, CtlError> {
    if args.descendants && args.key.is_empty() && args.tokens.tokens.is_none() {
        let rule = "--descendants: needs --key or --tokens, of whose blocks they are";
        return Err(CtlError::Usage(rule.to_owned()));
    }
    let unused = args.unused.map(|time| time.get());
    if unused.is_some_and(|time| time < Duration::from_secs(1)) {
        return Err(CtlError::Usage("--unused: must be at least 1s".to_owned()));
    }
    let unused_ms = unused.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    let base = EvictFilter {
        tenant: ctl.tenant().to_string(),
        producer: args.producer.clone().unwrap_or_default(),
        unused_ms,
        tier: args.tier.map_or("", TierName::name).to_owned(),
        descendants: args.descendants,
        ..EvictFilter::default()
    };
    if args.models.model.is_none() {
        // Fingerprints mean what they say, registered or not.
        let content = args.models.content.map(|it| it.as_bytes().to_vec()).unwrap_or_default();
        let layout = args.models.layout.map(|it| it.as_bytes().to_vec()).unwrap_or_default();
        let base = EvictFilter { content: content.into(), layout: layout.into(), ..base };
        return Ok(with_keys(&base, &args.key));
    }
    let tokens = read_tokens(&args.tokens)?;
    let versions = ctl.within("list models", models::select(ctl, &args.models)).await?;
    let of = |ModelVersion { content, layout }: ModelVersion| EvictFilter {
        content: content.as_bytes().to_vec().into(),
        layout: layout.as_bytes().to_vec().into(),
        ..base.clone()
    };
    let Some(tokens) = tokens else {
        let all = versions.iter().flat_map(|version| with_keys(&of(version.id), &args.key));
        return Ok(all.collect());
    };
    let chains = chains(versions, &tokens, &args.tokens.salt)?;
    // What follows the prompt follows its last block; those before it may have other descendants.
    let named = |chain: &Chain| -> Vec<BlockKey> {
        match args.descendants {
            true => chain.keys.last().copied().into_iter().collect(),
            false => chain.keys.clone(),
        }
    };
    let whole = chains.iter().filter(|chain| !chain.keys.is_empty());
    let filters: Vec<EvictFilter> =
        whole.flat_map(|chain| with_keys(&of(chain.version.id), &named(chain))).collect();
    match filters.is_empty() {
        false => Ok(filters),
        true => Err(CtlError::NotFound("the prompt is shorter than one block".to_owned())),
    }
}

/// The filter for these keys, or for all blocks where there are none; in as many as one call may name.
fn with_keys(base: &EvictFilter, keys: &[BlockKey]) -> Vec<EvictFilter> {
    if keys.is_empty() {
        return vec![base.clone()];
    }
    let some = |keys: &[BlockKey]| EvictFilter {
        keys: keys.iter().map(|key| key.as_bytes().to_vec().into()).collect(),
        ..base.clone()
    };
    keys.chunks(KEYS_LIMIT).map(some).collect()
}

async fn send(
    ctl: &Ctl,
    filters: &[EvictFilter],
    node: &[u8],
    dry_run: bool,
) -> Result<Evicted, CtlError> {
    let mut nodes: BTreeMap<String, Node> = BTreeMap::new();
    for filter in filters {
        let filter = Some(EvictFilter { dry_run, ..filter.clone() });
        let request = control::EvictRequest { filter, node: node.to_vec().into() };
        let call = |mut master: MasterClient<_>| {
            let request = request.clone();
            async move { master.evict(request).await }
        };
        // The master waits for the nodes, so it gets all the time that there is.
        let reply = ctl.masters().ask_within(ctl.timeout, call).await.doing("evict")?;
        for result in reply.nodes {
            let id = hex(&result.node);
            let node = nodes.entry(id.clone()).or_default();
            (node.name, node.node) = (result.name, id);
            node.blocks += result.blocks;
            node.bytes += result.bytes;
            if !result.error.is_empty() {
                node.error = Some(result.error);
            }
        }
    }
    let mut nodes: Vec<Node> = nodes.into_values().collect();
    nodes.sort_by(|one, other| (&one.name, &one.node).cmp(&(&other.name, &other.node)));
    Ok(Evicted {
        dry_run,
        blocks: nodes.iter().map(|node| node.blocks).sum(),
        bytes: nodes.iter().map(|node| node.bytes).sum(),
        nodes,
    })
}

fn all_obeyed(evicted: &Evicted) -> Result<(), CtlError> {
    let failed = evicted.nodes.iter().filter_map(|node| {
        let error = node.error.as_ref()?;
        Some(format!("{}: {error}", node.name))
    });
    let failed: Vec<String> = failed.collect();
    match failed.is_empty() {
        true => Ok(()),
        false => {
            let (some, all) = (failed.len(), counted(evicted.nodes.len(), "node"));
            let why = failed.join("; ");
            Err(CtlError::Failed(format!("blocks are kept by {some} of {all}: {why}")))
        }
    }
}

fn for_people(evicted: &Evicted) -> Vec<Section> {
    let Evicted { dry_run, blocks, bytes, nodes } = evicted;
    let names = Names::new(nodes.iter().map(|node| (node.node.clone(), node.name.as_str())));
    let mut table = Table::new(&["node", "blocks>", "size>", "error"], "the master knows no node");
    for node in nodes {
        let tone = if node.error.is_some() { Tone::Bad } else { Tone::Plain };
        let error = node.error.clone().unwrap_or_else(|| "-".to_owned());
        table.row(tone, [names.of_hex(&node.node), count(node.blocks), size(node.bytes), error]);
    }
    let verb = if *dry_run { "would be evicted" } else { "evicted" };
    let mut total = format!("{} block{} {verb}, {}", count(*blocks), plural(*blocks), size(*bytes));
    if *dry_run && *blocks > 0 {
        total.push_str("\nNothing was evicted yet: the same command with --yes does it.");
    }
    vec![Section::Table(table), Section::Text(total)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_keys_than_one_call_may_name_are_sent_in_several() {
        let keys = vec![BlockKey::from_bytes([1; 32]); KEYS_LIMIT + 1];
        let filters = with_keys(&EvictFilter::default(), &keys);
        let lens: Vec<usize> = filters.iter().map(|filter| filter.keys.len()).collect();
        assert_eq!(lens, [KEYS_LIMIT, 1]);
        assert_eq!(with_keys(&EvictFilter::default(), &[]).len(), 1);
    }
}
