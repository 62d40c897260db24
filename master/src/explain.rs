//! Why a block is, or is not, a hit: one of a closed list of reasons, with a sentence for people.
//!
//! A question of operators. `not_yours` tells that another tenant holds the block, so whoever may ask is
//! whoever may administer the master; lookups never tell (P11).

use crate::{
    answers::{BadRequest, field},
    cluster::Cluster,
    index::{Holder, SpaceId},
};
use larder_proto::{
    BlockKey, ContentFingerprint, LayoutFingerprint, Location, ModelVersion, control,
    event::RecordKind, explain::Reason, ids::TenantName,
};

/// The question, read.
struct Question {
    tenant: larder_proto::ids::TenantId,
    content: ContentFingerprint,
    layout: Option<LayoutFingerprint>,
    key: BlockKey,
}

/// Answers a question.
///
/// # Errors
/// A field breaks its rule.
pub fn explain(
    cluster: &Cluster,
    request: &control::ExplainRequest,
) -> Result<control::ExplainReply, BadRequest> {
    let layout = match request.layout.is_empty() {
        true => None,
        false => Some(field("layout", request.layout.as_ref().try_into())?),
    };
    let question = Question {
        tenant: field("tenant", request.tenant.parse::<TenantName>())?.id(),
        content: field("content", request.content.as_ref().try_into())?,
        layout,
        key: field("key", request.key.as_ref().try_into())?,
    };
    let (reason, detail, holders) = reason(cluster, &question);
    let roster = cluster.roster();
    let source = |location: Location| {
        let source = &roster.sources()[roster.position(location)?];
        Some(source.describe(source.seq()))
    };
    let holders = holders.iter().filter_map(|holder| source(holder.location)).collect();
    Ok(control::ExplainReply { reason: reason.name().to_owned(), detail, holders })
}

fn reason(cluster: &Cluster, question: &Question) -> (Reason, String, Vec<Holder>) {
    let Question { tenant, content, layout, key } = question;
    let index = cluster.index();
    let asked = |model: &ModelVersion| {
        model.content == *content && layout.is_none_or(|layout| layout == model.layout)
    };
    let (mine, others): (Vec<_>, Vec<_>) =
        index.spaces_of(tenant).into_iter().partition(|(_, model)| asked(model));

    let mut incomplete = None;
    for (space, model) in &mine {
        let holders = holders(cluster, *space, key);
        if holders.is_empty() {
            continue;
        }
        let missing = index.missing_parts(*space, key).unwrap_or_default();
        if missing.is_empty() {
            let nodes = nodes(holders.len());
            let detail = format!("held by {nodes} in layout {}", model.layout);
            return (Reason::Hit, detail, holders);
        }
        let parts: Vec<String> = missing.iter().take(16).map(|part| part.0.to_string()).collect();
        let more = if missing.len() > 16 { ", ..." } else { "" };
        let detail = format!("no node in session holds part {}{more}", parts.join(", "));
        incomplete = Some((Reason::Incomplete, detail, holders));
    }
    if let Some(incomplete) = incomplete {
        return incomplete;
    }
    let hidden: Vec<Holder> =
        mine.iter().flat_map(|(space, _)| index.holders_hidden(*space, key)).collect();
    if !hidden.is_empty() {
        let names: Vec<String> =
            hidden.iter().map(|holder| name(cluster, holder.location)).collect();
        let detail = format!("held by {}, which is not in session", names.join(", "));
        return (Reason::NodeDown, detail, Vec::new());
    }
    match mine.iter().find_map(|(space, _)| index.recall(*space, key)) {
        Some(RecordKind::Evicted) => {
            return (Reason::Evicted, "evicted to make room".to_owned(), Vec::new());
        }
        Some(RecordKind::Removed) => {
            return (Reason::Evicted, "removed by command".to_owned(), Vec::new());
        }
        Some(RecordKind::Damaged) => {
            let detail = "a copy was found damaged and withdrawn".to_owned();
            return (Reason::Damaged, detail, Vec::new());
        }
        Some(RecordKind::Stored | RecordKind::Absent) | None => {}
    }
    for (space, model) in &others {
        let holders = holders(cluster, *space, key);
        if holders.is_empty() {
            continue;
        }
        let same_content = model.content == *content;
        let (reason, detail) = match same_content {
            true => (Reason::OtherLayout, format!("held in layout {}", model.layout)),
            false => (Reason::OtherContent, format!("held under content {}", model.content)),
        };
        return (reason, detail, holders);
    }
    let foreign = index.spaces().into_iter().filter(|space| space.tenant != *tenant);
    for space in foreign {
        if !holders(cluster, space.space, key).is_empty() {
            return (Reason::NotYours, "held for another tenant".to_owned(), Vec::new());
        }
    }
    (Reason::NeverSeen, never_seen(cluster), Vec::new())
}

fn holders(cluster: &Cluster, space: SpaceId, key: &BlockKey) -> Vec<Holder> {
    cluster.index().locate(space, std::slice::from_ref(key)).into_holders()
}

/// What cannot be told apart from a block that never was.
fn never_seen(cluster: &Cluster) -> String {
    let coverage = cluster.coverage(&cluster.roster());
    let mut detail = "no node in session holds it and no removal of it is remembered".to_owned();
    if coverage.nodes_synced < coverage.nodes_known {
        let (synced, known) = (coverage.nodes_synced, nodes(coverage.nodes_known as usize));
        detail.push_str(&format!("; {synced} of {known} in step with this master"));
    }
    if coverage.index_limited {
        detail.push_str("; the index is at its limit and leaves entries out");
    }
    detail
}

fn nodes(count: usize) -> String {
    format!("{count} node{}", if count == 1 { "" } else { "s" })
}

fn name(cluster: &Cluster, location: Location) -> String {
    let of_location =
        |node: &crate::membership::Node| node.life.is_some_and(|life| life.location == location);
    let node = cluster.nodes().into_iter().find(of_location);
    node.map_or_else(
        || "a node".to_owned(),
        |node| format!("node {} ({})", node.identity.node, node.identity.name),
    )
}
