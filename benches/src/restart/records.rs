//! Real records: put, written, the node killed, started again, and everything read back.

use super::{
    Sizes, What,
    node::{Home, Node},
    parts::Parts,
    plain::PlainRead,
    rows::{Row, Warm},
};
use crate::error::BenchError;
use indicatif::ProgressBar;
use std::{path::Path, time::Duration};
use tokio::time::timeout;

/// Records of which the first that is served is the first answer.
const SAMPLE: usize = 16;
/// A node that is not warm by then will not be.
const WARM_WITHIN: Duration = Duration::from_secs(300);

/// Fills a node, kills it, and watches the next life.
pub(super) async fn measure(
    disk: &Path,
    sizes: Sizes,
    bar: &ProgressBar,
) -> Result<Row, BenchError> {
    let home = Home::new(disk, sizes)?;
    bar.set_message(format!("putting {} records", sizes.records));
    let node = Node::start(&home)?;
    let parts = Parts::of(&node, sizes.len).await?;
    parts.put_all(0..sizes.records).await?;
    let had = parts.on_ssd(0..sizes.records).await?;
    if had.is_empty() {
        let answer = "none of the records came there".to_owned();
        return Err(BenchError::Answer { doing: "write to the ssd", answer });
    }
    node.kill()?;
    let plain = PlainRead::of(home.ssd()).map_err(BenchError::io("look at the segments"))?;

    bar.set_message("starting the node again");
    let node = Node::start(&home)?;
    let (first_answer, adopted) =
        within(async { tokio::try_join!(first_answer(&node, sizes.len, &had), node.adopted()) })
            .await?;
    let cpu_seconds = node.cpu_seconds();
    bar.set_message(format!("reading {} records back", had.len()));
    let served = Parts::of(&node, sizes.len).await?.read_all(&had).await?;
    drop(node);
    let warm = Warm { first_answer: Some(first_answer), adopted, cpu_seconds, served };
    let row = Row::new(What::Records, had.len() as u64, sizes, &warm, &plain)?;
    home.remove()?;
    Ok(row)
}

/// The age of the node when it has served one of a few records.
async fn first_answer(node: &Node, len: usize, had: &[u64]) -> Result<Duration, BenchError> {
    let step = had.len().div_ceil(SAMPLE);
    let sample: Vec<u64> = had.iter().rev().step_by(step).copied().collect();
    Parts::of(node, len).await?.first_served(&sample).await?;
    Ok(node.age())
}

/// An end for what waits for a node.
pub(super) async fn within<T>(
    warm: impl Future<Output = Result<T, BenchError>>,
) -> Result<T, BenchError> {
    timeout(WARM_WITHIN, warm).await.unwrap_or_else(|_| {
        let answer = format!("it is not after {} s", WARM_WITHIN.as_secs());
        Err(BenchError::Answer { doing: "wait until the node is warm", answer })
    })
}
