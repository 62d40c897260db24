//! `explain`: why blocks are, or are not, a hit.
//!
//! A master gives one reason a key. It cannot know that the same *tokens* are held under another content,
//! because they have another key there: that is found here, by asking all model versions of a name.

use crate::{
    blocks::{Chain, SHORTER_THAN_A_BLOCK, chains, read_tokens},
    cli::BlockArgs,
    ctl::{Ctl, Names, QUESTIONS, hex},
    error::{CtlError, Doing},
    lookup::range,
    models,
    output::{Section, Table, Tone, counted, short},
};
use futures_util::{StreamExt, TryStreamExt, stream};
use larder_proto::{
    BlockKey, ContentFingerprint, LayoutFingerprint, NodeId,
    control::{self, master_client::MasterClient},
    explain::Reason,
};
use serde::{Serialize, Serializer};
use std::collections::BTreeSet;

fn tone(reason: Reason) -> Tone {
    match reason {
        Reason::Hit => Tone::Good,
        Reason::NodeDown | Reason::Damaged | Reason::Incomplete => Tone::Bad,
        Reason::Evicted | Reason::OtherLayout | Reason::OtherContent | Reason::NotYours => {
            Tone::Odd
        }
        Reason::NeverSeen => Tone::Plain,
    }
}

/// What is said of one block.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Answer {
    reason: Reason,
    detail: String,
    content: ContentFingerprint,
    holders: Vec<Holder>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Holder {
    name: String,
    node: String,
    data_address: String,
}

#[derive(Debug, Serialize)]
struct Explained {
    /// Tokens of the prompt, where one was given.
    tokens: Option<usize>,
    models: Vec<Model>,
}

#[derive(Debug, Serialize)]
struct Model {
    display_names: Vec<String>,
    content: Option<String>,
    layout: Option<String>,
    block_tokens: Option<u32>,
    groups: Vec<Group>,
    #[serde(skip)]
    title: String,
}

/// Blocks in a row of which the same is said.
#[derive(Debug, Serialize)]
struct Group {
    /// Places in the prompt; counted through where keys were given.
    first_block: usize,
    last_block: usize,
    #[serde(serialize_with = "by_name")]
    reason: Reason,
    detail: String,
    content: String,
    holders: Vec<Holder>,
    keys: Vec<String>,
}

fn by_name<S: Serializer>(reason: &Reason, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(reason.name())
}

/// `larderctl explain`.
pub(crate) async fn explain(ctl: &Ctl, args: &BlockArgs) -> Result<(), CtlError> {
    let tokens = read_tokens(&args.tokens)?;
    let ask = async {
        let names = ctl.names().await?;
        let models = match &tokens {
            Some(tokens) => {
                let versions = models::select(ctl, &args.models).await?;
                let chains = chains(versions, tokens, &args.tokens.salt)?;
                explain_chains(ctl, &chains, &names).await?
            }
            None => vec![explain_keys(ctl, args, &names).await?],
        };
        Ok(Explained { tokens: tokens.as_ref().map(Vec::len), models })
    };
    let explained = ctl.within("explain", ask).await?;
    ctl.out.show(&explained, for_people)
}

async fn explain_chains(
    ctl: &Ctl,
    chains: &[Chain],
    names: &Names,
) -> Result<Vec<Model>, CtlError> {
    let mut answers = Vec::new();
    for Chain { version, keys, .. } in chains {
        let asks = keys
            .iter()
            .map(|key| ask(ctl, names, *key, version.id.content, Some(version.id.layout)));
        answers.push(stream::iter(asks).buffered(QUESTIONS).try_collect::<Vec<_>>().await?);
    }
    point_to_other_contents(chains, &mut answers);
    let model = |(chain, answers): (&Chain, &Vec<Answer>)| Model {
        display_names: chain.version.names.iter().cloned().collect(),
        content: Some(chain.version.id.content.to_string()),
        layout: Some(chain.version.id.layout.to_string()),
        block_tokens: Some(chain.block_tokens),
        groups: group(&chain.keys, answers, true),
        title: format!(
            "{}\n{} tokens in {} of {}",
            chain.version.title(),
            chain.covered_tokens(),
            counted(chain.keys.len(), "whole block"),
            chain.block_tokens
        ),
    };
    Ok(chains.iter().zip(&answers).map(model).collect())
}

/// A block that was never seen, while the same tokens are held under another content of the same name.
fn point_to_other_contents(chains: &[Chain], answers: &mut [Vec<Answer>]) {
    let hits: Vec<Vec<bool>> = answers
        .iter()
        .map(|of_chain| of_chain.iter().map(|answer| answer.reason == Reason::Hit).collect())
        .collect();
    for (chain, of_chain) in chains.iter().zip(answers) {
        for (block, answer) in of_chain.iter_mut().enumerate() {
            if answer.reason != Reason::NeverSeen {
                continue;
            }
            let holds = |(other, hits): &(&Chain, &Vec<bool>)| {
                other.version.id.content != chain.version.id.content
                    && other.block_tokens == chain.block_tokens
                    && hits.get(block) == Some(&true)
            };
            if let Some((other, _)) = chains.iter().zip(&hits).find(holds) {
                answer.reason = Reason::OtherContent;
                answer.detail =
                    format!("the same tokens are held under content {}", other.version.id.content);
            }
        }
    }
}

/// Keys without a prompt: of each, the most telling answer over the contents that may be meant.
async fn explain_keys(ctl: &Ctl, args: &BlockArgs, names: &Names) -> Result<Model, CtlError> {
    let registered = models::registered(ctl).await?;
    let mut asked: BTreeSet<(ContentFingerprint, Option<LayoutFingerprint>)> = BTreeSet::new();
    if args.models.model.is_some() || (args.models.content.is_none() && !registered.is_empty()) {
        let versions = match args.models.model {
            Some(_) => models::select(ctl, &args.models).await?,
            None => registered,
        };
        let of = |version: &models::Version| {
            // A model means its layouts; otherwise any layout will do, unless one is named.
            let layout = args.models.model.as_ref().map(|_| version.id.layout);
            (version.id.content, layout.or(args.models.layout))
        };
        asked.extend(versions.iter().map(of));
    } else {
        // Without any registered content the question still finds out who else holds the key.
        let content = args.models.content.unwrap_or(ContentFingerprint::from_bytes([0; 32]));
        asked.insert((content, args.models.layout));
    }
    let best_of = |key: BlockKey| {
        let asks =
            asked.iter().map(move |(content, layout)| ask(ctl, names, key, *content, *layout));
        async move {
            let answers: Vec<Answer> = stream::iter(asks).buffered(QUESTIONS).try_collect().await?;
            answers
                .into_iter()
                .min_by_key(|answer| answer.reason)
                .ok_or_else(|| CtlError::NotFound("no model version is registered".to_owned()))
        }
    };
    let mut answers = Vec::new();
    for key in &args.key {
        answers.push(best_of(*key).await?);
    }
    Ok(Model {
        display_names: args.models.model.iter().cloned().collect(),
        content: args.models.content.map(|content| content.to_string()),
        layout: args.models.layout.map(|layout| layout.to_string()),
        block_tokens: None,
        groups: group(&args.key, &answers, false),
        title: String::new(),
    })
}

async fn ask(
    ctl: &Ctl,
    names: &Names,
    key: BlockKey,
    content: ContentFingerprint,
    layout: Option<LayoutFingerprint>,
) -> Result<Answer, CtlError> {
    let request = control::ExplainRequest {
        tenant: ctl.tenant().to_string(),
        content: content.as_bytes().to_vec().into(),
        layout: layout.map(|layout| layout.as_bytes().to_vec()).unwrap_or_default().into(),
        key: key.as_bytes().to_vec().into(),
    };
    let call = |mut master: MasterClient<_>| {
        let request = request.clone();
        async move { master.explain(request).await }
    };
    let reply = ctl.masters().ask(call).await.doing(format!("explain block {key}"))?;
    let reason = Reason::from_name(&reply.reason).ok_or_else(|| {
        let text = &reply.reason;
        CtlError::Failed(format!("the master gave a reason that is not on the list: {text:?}"))
    })?;
    let holder = |source: &control::Source| Holder {
        name: NodeId::try_from(source.node.as_ref())
            .map_or_else(|_| hex(&source.node), |node| names.of(&node)),
        node: hex(&source.node),
        data_address: source.data_address.clone(),
    };
    let holders = reply.holders.iter().map(holder).collect();
    Ok(Answer { reason, detail: reply.detail, content, holders })
}

/// Puts blocks in a row together when the same is said of them.
fn group(keys: &[BlockKey], answers: &[Answer], together: bool) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut last: Option<&Answer> = None;
    for (block, (key, answer)) in keys.iter().zip(answers).enumerate() {
        match groups.last_mut().filter(|_| together && last == Some(answer)) {
            Some(group) => {
                group.last_block = block;
                group.keys.push(key.to_string());
            }
            None => groups.push(Group {
                first_block: block,
                last_block: block,
                reason: answer.reason,
                detail: answer.detail.clone(),
                content: answer.content.to_string(),
                holders: answer.holders.clone(),
                keys: vec![key.to_string()],
            }),
        }
        last = Some(answer);
    }
    groups
}

fn for_people(explained: &Explained) -> Vec<Section> {
    let mut sections = Vec::new();
    for model in &explained.models {
        if !model.title.is_empty() {
            sections.push(Section::Text(model.title.clone()));
        }
        let by_place = model.block_tokens.is_some();
        let mut table = Table::new(
            &[if by_place { "blocks" } else { "block" }, "reason", "nodes", "detail"],
            SHORTER_THAN_A_BLOCK,
        );
        for group in &model.groups {
            let block = match by_place {
                true => range(group.first_block, group.last_block),
                false => group.keys.first().map(|key| short(key)).unwrap_or_default(),
            };
            let holders: Vec<&str> =
                group.holders.iter().map(|holder| holder.name.as_str()).collect();
            let nodes = if holders.is_empty() { "-".to_owned() } else { holders.join(", ") };
            let reason = group.reason.name().to_owned();
            table.row(tone(group.reason), [block, reason, nodes, group.detail.clone()]);
        }
        sections.push(Section::Table(table));
    }
    sections
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::tests::version;

    fn chain(content: u8, keys: usize) -> Chain {
        let key = |at: usize| BlockKey::from_bytes([u8::try_from(at).unwrap(); 32]);
        Chain {
            version: version("llama", content, 1),
            block_tokens: 16,
            keys: (0..keys).map(key).collect(),
        }
    }

    fn answer(reason: Reason) -> Answer {
        let content = ContentFingerprint::from_bytes([1; 32]);
        Answer { reason, detail: String::new(), content, holders: Vec::new() }
    }

    #[test]
    fn blocks_in_a_row_with_one_reason_are_one_group() {
        let reasons = [Reason::Hit, Reason::Hit, Reason::Evicted, Reason::Hit];
        let answers = reasons.map(answer);
        let keys = chain(1, 4).keys;
        let spans = |together| -> Vec<(usize, usize)> {
            let groups = group(&keys, &answers, together);
            groups.iter().map(|group| (group.first_block, group.last_block)).collect()
        };
        assert_eq!(spans(true), [(0, 1), (2, 2), (3, 3)]);
        assert_eq!(spans(false).len(), 4);
    }

    #[test]
    fn unseen_tokens_that_another_content_holds_are_told_from_those_that_nobody_holds() {
        let chains = [chain(1, 3), chain(2, 2)];
        let mut answers = vec![
            [Reason::NeverSeen, Reason::Evicted, Reason::NeverSeen].map(answer).to_vec(),
            [Reason::Hit, Reason::Hit].map(answer).to_vec(),
        ];
        point_to_other_contents(&chains, &mut answers);
        let reasons: Vec<Reason> = answers[0].iter().map(|answer| answer.reason).collect();
        assert_eq!(reasons, [Reason::OtherContent, Reason::Evicted, Reason::NeverSeen]);
        assert!(answers[0][0].detail.contains(&chains[1].version.id.content.to_string()));
    }
}
