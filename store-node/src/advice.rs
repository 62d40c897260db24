//! Asks masters which of the node's blocks the cluster would miss least.
//!
//! Shard by shard, round and round, at a bounded rate; a round begins no sooner than the last one's interval is
//! over, and not while memory is far from full. What comes of an answer is the catalog's to judge. The answer
//! of any master will do; one that does not know such questions, or none, costs nothing but the advice.

use crate::{
    catalog::{Advice, Question},
    node::Node,
};
use bytes::Bytes;
use larder_client::{ClientError, masters::packed_keys};
use larder_proto::{control, event::SHARDS, event::Shard};
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

/// Most blocks of one question: 128 KiB, and as many again for parents.
const BLOCKS: usize = 4096;
/// After so many blocks: about as many a second, at most.
const PAUSE: Duration = Duration::from_secs(1);
/// What a question costs besides its blocks, in blocks: many small model versions are many questions.
const QUESTION: usize = 64;
/// Advice is followed for this long, or for two rounds if those take longer.
const HOLDS: Duration = Duration::from_secs(600);

/// When masters are asked.
#[derive(Debug, Clone, Copy)]
pub struct AdviceOptions {
    /// From the beginning of one round through all blocks to that of the next, at least.
    pub interval: Duration,
    /// Blocks that were used within this time are not asked about.
    pub idle: Duration,
}

/// Runs until `stop`.
pub async fn run(node: Arc<Node>, options: AdviceOptions, stop: CancellationToken) {
    stop.run_until_cancelled(rounds(&node, options)).await;
}

async fn rounds(node: &Node, options: AdviceOptions) {
    let (mut told, mut blocks, mut told_limit) = (false, BLOCKS, false);
    let mut holds = HOLDS.max(options.interval * 2);
    loop {
        let began = Instant::now();
        let next = began + options.interval;
        let arena = node.catalog().arena();
        if arena.used_bytes() > arena.capacity_bytes() / 2 {
            match round(node, options, blocks, holds).await {
                Ok(()) => {
                    told = false;
                    holds = holds.max(began.elapsed() * 2);
                    blocks = (blocks * 2).min(BLOCKS); // Another master may allow more.
                }
                // Its limit is the master's to choose (`control.keys_limit`), and may be lower than ours.
                Err(ClientError::Invalid(why)) if blocks > 1 => {
                    blocks /= 2;
                    if !std::mem::replace(&mut told_limit, true) {
                        tracing::info!(
                            why,
                            blocks,
                            "a master refused a question about blocks: fewer are asked about at a time \
                             (its control.keys_limit)"
                        );
                    }
                    continue;
                }
                Err(error) if !std::mem::replace(&mut told, true) => {
                    tracing::info!(%error, "no advice from masters");
                }
                Err(_) => {}
            }
        }
        sleep_until(next).await;
    }
}

/// Asks about every block once.
async fn round(
    node: &Node,
    options: AdviceOptions,
    blocks: usize,
    holds: Duration,
) -> Result<(), ClientError> {
    let idle = options.idle;
    let mut asked = 0;
    for shard in 0..SHARDS {
        let Ok(shard) = u8::try_from(shard) else { break };
        node.catalog().tell_time();
        for question in node.catalog().questions(Shard(shard), idle, blocks) {
            let advice = ask(node, &question).await?;
            node.catalog().take_advice(&question, &advice, idle, holds);
            asked += question.held.len() + QUESTION;
            if asked >= BLOCKS {
                asked = 0;
                sleep(PAUSE).await;
            }
        }
    }
    Ok(())
}

async fn ask(node: &Node, question: &Question) -> Result<Advice, ClientError> {
    let Question { tenant, model, held, chains, parents } = question;
    let request = control::AdviseRequest {
        node: Bytes::copy_from_slice(node.id().as_bytes()),
        tenant: Bytes::copy_from_slice(tenant.as_bytes()),
        content: Bytes::copy_from_slice(model.content.as_bytes()),
        layout: Bytes::copy_from_slice(model.layout.as_bytes()),
        keys: packed_keys(held),
        parents: packed_keys(parents),
        chains: chains.clone(),
    };
    let call = |mut master: control::master_client::MasterClient<_>| {
        let request = request.clone();
        async move { master.advise(request).await }
    };
    let control::AdviseReply { gone, broken, spare, .. } = node.masters.ask(call).await?;
    Ok(Advice { gone, broken, spare })
}
