//! Which source a part is read from: one after the other, until one gives it.
//!
//! A source that has not got the part is forgotten for it. One whose bytes arrive damaged is asked once
//! more to verify its own copy first, which withdraws the copy if the damage is there (P1); if the second
//! answer is no better, the damage is on the way and the next source is tried. The order, the number of
//! attempts and what an error leads to are decided here alone; how one attempt is made is the caller's.

use crate::{
    error::{Reaction, TransferError},
    peers::NodeAddress,
};
use larder_proto::frame::Code;
use std::{future::Future, sync::Arc};

/// One attempt to read a part.
#[derive(Debug, Clone)]
pub struct Attempt {
    /// From where.
    pub source: Arc<NodeAddress>,
    /// Whether the source shall check its bytes against their sums before it sends them.
    pub verify: bool,
    /// Sources that could still be tried after this one: an attempt must leave them time.
    pub others: usize,
}

/// Reads from the first source that can give the part; what was read, and from which one.
///
/// `forget` hears of each source that turned out not to hold a sound copy. Dropping the future drops the
/// attempt in progress.
///
/// # Errors
/// No source gave it. That is a miss (by its [reaction](TransferError::reaction)) only if every source
/// said so: one that could not be asked may hold it.
pub async fn first_of<T, F>(
    sources: Vec<Arc<NodeAddress>>,
    mut forget: impl FnMut(&NodeAddress),
    mut read: impl FnMut(Attempt) -> F,
) -> Result<(T, Arc<NodeAddress>), TransferError>
where
    F: Future<Output = Result<T, TransferError>>,
{
    let mut failure = None;
    let mut others = sources.len();
    for source in sources {
        others -= 1;
        let mut outcome =
            read(Attempt { source: Arc::clone(&source), verify: false, others }).await;
        if let Err(error) = &outcome
            && error.reaction() == Reaction::VerifyAtSource
        {
            outcome = read(Attempt { source: Arc::clone(&source), verify: true, others }).await;
        }
        let error = match outcome {
            Ok(got) => return Ok((got, source)),
            Err(error) => error,
        };
        tracing::debug!(node = %source.node, %error, "source");
        match error.reaction() {
            Reaction::GiveUp => return Err(error),
            Reaction::Miss => {
                forget(&source);
                failure.get_or_insert(error);
            }
            Reaction::VerifyAtSource => {
                forget(&source);
                failure = Some(error);
            }
            Reaction::TryAnother => failure = Some(error),
        }
    }
    Err(failure.unwrap_or_else(|| TransferError::Refused {
        code: Code::Miss,
        reason: "no node is known to hold the part".to_owned(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_proto::{
        checksum::Damaged,
        ids::{Incarnation, NodeId},
    };
    use std::collections::VecDeque;

    fn source(n: u8) -> Arc<NodeAddress> {
        let node = NodeId::from_bytes([n; 16]);
        Arc::new(NodeAddress { node, incarnation: Incarnation(1), address: format!("host-{n}:1") })
    }

    fn refused(code: Code) -> TransferError {
        TransferError::Refused { code, reason: String::new() }
    }

    fn damaged() -> TransferError {
        Damaged { chunk: 0, expected: 1, actual: 2 }.into()
    }

    fn lost() -> TransferError {
        TransferError::Lost("gone".to_owned())
    }

    struct Run {
        outcome: Result<u8, TransferError>,
        attempts: Vec<(u8, bool)>,
        forgotten: Vec<u8>,
    }

    /// Sources 1, 2, ... with these answers, in the order in which they are asked.
    async fn run(sources: u8, answers: Vec<Result<(), TransferError>>) -> Run {
        let mut answers = VecDeque::from(answers);
        let (mut attempts, mut forgotten) = (Vec::new(), Vec::new());
        let outcome = first_of(
            (1..=sources).map(source).collect(),
            |node| forgotten.push(node.node.as_bytes()[0]),
            |attempt| {
                attempts.push((attempt.source.node.as_bytes()[0], attempt.verify));
                let answer = answers.pop_front().unwrap();
                async move { answer }
            },
        )
        .await;
        let outcome = outcome.map(|((), source)| source.node.as_bytes()[0]);
        assert!(answers.is_empty(), "not asked: {answers:?}");
        Run { outcome, attempts, forgotten }
    }

    #[tokio::test]
    async fn a_source_without_the_part_is_forgotten_and_the_next_one_gives_it() {
        let run = run(2, vec![Err(refused(Code::Miss)), Ok(())]).await;
        assert_eq!(run.outcome, Ok(2));
        assert_eq!((run.attempts, run.forgotten), (vec![(1, false), (2, false)], vec![1]));
    }

    #[tokio::test]
    async fn a_damaged_answer_is_asked_for_again_with_verification_at_the_source() {
        let run = run(1, vec![Err(damaged()), Ok(())]).await;
        assert_eq!(run.outcome, Ok(1));
        assert_eq!((run.attempts, run.forgotten), (vec![(1, false), (1, true)], vec![]));
    }

    #[tokio::test]
    async fn a_source_that_withdraws_its_damaged_copy_is_forgotten() {
        let run = run(2, vec![Err(damaged()), Err(refused(Code::Damaged)), Ok(())]).await;
        assert_eq!((run.outcome, run.forgotten), (Ok(2), vec![1]));
    }

    #[tokio::test]
    async fn it_is_a_miss_only_if_every_source_said_so() {
        let miss = || Err(refused(Code::Miss));
        assert_eq!(run(2, vec![miss(), miss()]).await.outcome, Err(refused(Code::Miss)));
        for answers in [vec![Err(lost()), miss()], vec![miss(), Err(lost())]] {
            let run = run(2, answers).await;
            assert_eq!((run.outcome, run.forgotten.len()), (Err(lost()), 1));
        }
        let nobody = run(0, vec![]).await;
        assert_eq!(nobody.outcome.unwrap_err().reaction(), Reaction::Miss);
    }

    #[tokio::test]
    async fn what_no_source_can_mend_ends_the_search() {
        let run = run(3, vec![Err(refused(Code::Denied))]).await;
        assert_eq!(run.outcome, Err(refused(Code::Denied)));
    }
}
