//! Tasks with an owner, and a stop that ends.
//!
//! Contract: every task has a name and belongs to a [`Tasks`]. When one fails, panics or ends on
//! its own, all are asked to stop: half a daemon is worse than none. [`Tasks::run`] returns after
//! every task has ended; those that do not end within the grace are aborted and named in the error.
//! The first SIGTERM or SIGINT asks for a stop, a second one ends the process on the spot.

use std::{
    any::Any, borrow::Cow, collections::HashMap, convert::Infallible, error::Error, future::Future,
    time::Duration,
};

use tokio::{
    signal::unix::{SignalKind, signal},
    task::{Id, JoinError, JoinSet},
    time::{Instant, sleep_until, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

/// What a task may fail with: the error of whatever crate it runs.
pub type TaskError = Box<dyn Error + Send + Sync>;

/// An aborted task ends at its next await; one that does not within this time is blocked.
const ABORT_LIMIT: Duration = Duration::from_secs(1);

/// Why a set of tasks ended other than by being asked to.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A task returned an error.
    #[error("task {task} failed")]
    Failed {
        /// Its name.
        task: String,
        /// What it said.
        source: TaskError,
    },
    /// A task panicked.
    #[error("task {task} panicked: {message}")]
    Panicked {
        /// Its name.
        task: String,
        /// What it panicked with.
        message: String,
    },
    /// A task that runs until the stop ended without one.
    #[error("task {task} ended on its own")]
    Ended {
        /// Its name.
        task: String,
    },
    /// Tasks had to be aborted because they did not end in time.
    #[error("did not stop within {grace:?}: {}", tasks.join(", "))]
    Overdue {
        /// How long they had.
        grace: Duration,
        /// Their names.
        tasks: Vec<String>,
    },
}

/// The tasks of a daemon or of a part of it. Dropping it aborts them.
#[derive(Debug)]
pub struct Tasks {
    set: JoinSet<Result<(), TaskError>>,
    running: HashMap<Id, Task>,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Task {
    name: String,
    may_end: bool,
}

impl Tasks {
    /// No tasks yet. They are asked to end by `stop`, and their end cancels it.
    pub fn new(stop: CancellationToken) -> Self {
        Self { set: JoinSet::new(), running: HashMap::new(), stop }
    }

    /// What asks the tasks to end.
    pub fn stop(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Starts a task that runs until the stop.
    pub fn spawn<E: Into<TaskError>>(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        task: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        self.start(name.into(), false, task);
    }

    /// Starts a task that may end well before the stop: loading, warming up.
    pub fn spawn_job<E: Into<TaskError>>(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        task: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        self.start(name.into(), true, task);
    }

    fn start<E: Into<TaskError>>(
        &mut self,
        name: Cow<'static, str>,
        may_end: bool,
        task: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        let handle = self.set.spawn(async move { task.await.map_err(Into::into) });
        self.running.insert(handle.id(), Task { name: name.into_owned(), may_end });
    }

    /// Waits until all tasks have ended, for `grace` at most once the stop is asked for. Without
    /// any task left it returns, stop or not.
    ///
    /// # Errors
    /// The first thing that went wrong. Later ones are logged.
    pub async fn run(mut self, grace: Duration) -> Result<(), RunError> {
        let mut outcome = Ok(());
        let stop = self.stop.clone();
        let overdue = async {
            stop.cancelled().await;
            sleep_until(Instant::now() + grace).await;
        };
        let mut overdue = std::pin::pin!(overdue);
        loop {
            tokio::select! {
                joined = self.set.join_next_with_id() => match joined {
                    Some(joined) => keep_first(&mut outcome, self.end_of_task(joined)),
                    None => return outcome,
                },
                () = &mut overdue => break,
            }
        }
        keep_first(&mut outcome, self.abort(grace).await);
        outcome
    }

    /// Books the end of one task, and asks all others to stop unless it was meant to end.
    fn end_of_task(
        &mut self,
        joined: Result<(Id, Result<(), TaskError>), JoinError>,
    ) -> Result<(), RunError> {
        let id = joined.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let Some(Task { name: task, may_end }) = self.running.remove(&id) else { return Ok(()) };
        let outcome = match joined {
            Ok((_, Ok(()))) if may_end || self.stop.is_cancelled() => {
                debug!(task, "task ended");
                return Ok(());
            }
            Ok((_, Ok(()))) => RunError::Ended { task },
            Ok((_, Err(source))) => RunError::Failed { task, source },
            Err(error) => match error.try_into_panic() {
                Ok(panic) => {
                    RunError::Panicked { task, message: panic_message(&*panic).to_owned() }
                }
                // Only `abort` aborts, and books nothing.
                Err(_) => RunError::Ended { task },
            },
        };
        self.stop.cancel();
        Err(outcome)
    }

    async fn abort(mut self, grace: Duration) -> Result<(), RunError> {
        let mut tasks: Vec<_> = self.running.into_values().map(|task| task.name).collect();
        tasks.sort();
        self.set.abort_all();
        let all_ended = async { while self.set.join_next().await.is_some() {} };
        if timeout_at(Instant::now() + ABORT_LIMIT, all_ended).await.is_err() {
            warn!("some tasks are blocked and go on until the process ends");
        }
        Err(RunError::Overdue { grace, tasks })
    }
}

/// The first error is the cause, later ones mostly follow from it.
fn keep_first(outcome: &mut Result<(), RunError>, next: Result<(), RunError>) {
    if let Err(error) = next {
        if outcome.is_ok() {
            *outcome = Err(error);
        } else {
            error!(error = chain(&error), "another task ended badly");
        }
    }
}

/// Turns signals into a stop.
#[derive(Debug)]
pub struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    /// Nobody waits for it. A file that would grow beyond the limit of the process (RLIMIT_FSIZE) is an error of
    /// that write then, where it would end the process without a word.
    _too_large: tokio::signal::unix::Signal,
}

impl Signals {
    /// From here on SIGTERM and SIGINT no longer end the process by themselves.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            _too_large: signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?,
        })
    }

    /// The name of the next signal. Safe to cancel.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }

    /// Cancels `stop` at the first signal, after calling `on_stop` with its name; ends the process
    /// with code 1 at the second.
    pub async fn drive(
        mut self,
        stop: CancellationToken,
        on_stop: impl FnOnce(&'static str),
    ) -> Infallible {
        let first = self.next().await;
        info!(signal = first, "stopping");
        on_stop(first);
        stop.cancel();
        let second = self.next().await;
        eprintln!("{second} after {first}: ending at once, without waiting for tasks");
        std::process::exit(1);
    }
}

/// An error and its causes on one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// What a panic said, if it said it in words.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> &str {
    let borrowed = payload.downcast_ref::<&'static str>().copied();
    borrowed
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(5);

    async fn until(stop: CancellationToken) -> Result<(), TaskError> {
        stop.cancelled().await;
        Ok(())
    }

    async fn miscount() -> Result<(), TaskError> {
        panic!("counted {} twice", 3)
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_ends_all_tasks_well() {
        let stop = CancellationToken::new();
        let mut tasks = Tasks::new(stop.clone());
        tasks.spawn("one", until(stop.clone()));
        tasks.spawn("two", until(stop.clone()));
        stop.cancel();
        assert!(tasks.run(GRACE).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn one_task_down_takes_all_down_and_is_named() {
        let mut tasks = Tasks::new(CancellationToken::new());
        tasks.spawn("listener", until(tasks.stop()));
        tasks.spawn("evictor", async { Err::<(), _>(TaskError::from("disk full")) });
        let error = tasks.run(GRACE).await.unwrap_err();
        assert_eq!(chain(&error), "task evictor failed: disk full");
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_takes_all_down_and_is_quoted() {
        let mut tasks = Tasks::new(CancellationToken::new());
        tasks.spawn("listener", until(tasks.stop()));
        tasks.spawn("evictor", miscount());
        let error = tasks.run(GRACE).await.unwrap_err();
        assert_eq!(error.to_string(), "task evictor panicked: counted 3 twice");
    }

    #[tokio::test(start_paused = true)]
    async fn a_job_may_end_and_a_service_may_not() {
        let mut tasks = Tasks::new(CancellationToken::new());
        let stop = tasks.stop();
        tasks.spawn_job("warm-up", async { Ok::<(), TaskError>(()) });
        tasks.spawn("listener", until(stop.clone()));
        tasks.spawn("evictor", async { Ok::<(), TaskError>(()) });
        let error = tasks.run(GRACE).await.unwrap_err();
        assert_eq!(error.to_string(), "task evictor ended on its own");
        assert!(stop.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_error_is_kept_while_others_follow() {
        let mut tasks = Tasks::new(CancellationToken::new());
        let stop = tasks.stop();
        tasks.spawn("follower", async move {
            stop.cancelled().await;
            Err::<(), _>(TaskError::from("peer gone"))
        });
        tasks.spawn("cause", async { Err::<(), _>(TaskError::from("disk full")) });
        assert_eq!(chain(&tasks.run(GRACE).await.unwrap_err()), "task cause failed: disk full");
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_ignores_the_stop_is_aborted_after_the_grace() {
        let mut tasks = Tasks::new(CancellationToken::new());
        tasks.stop().cancel();
        tasks.spawn("deaf", std::future::pending::<Result<(), TaskError>>());
        let began = Instant::now();
        let error = tasks.run(GRACE).await.unwrap_err();
        assert_eq!(error.to_string(), "did not stop within 5s: deaf");
        assert_eq!(began.elapsed().as_secs(), GRACE.as_secs());
    }
}
