//! Long work on a disk: waited for as long as it goes on, however long it takes.

use std::{io, time::Duration};
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{Instant, timeout_at},
};

/// Where work says that it goes on.
#[derive(Debug)]
pub struct Steps(watch::Sender<()>);

impl Steps {
    /// The disk has answered again.
    pub fn step(&self) {
        self.0.send_replace(());
    }
}

/// Does work that waits for a disk on a thread of its own. Cancelled, or given up on, it goes on there alone.
///
/// # Errors
/// `TimedOut`: one of its steps took longer than `limit`.
pub async fn in_steps<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce(&Steps) -> T + Send + 'static,
) -> io::Result<T> {
    let (steps, mut taken) = watch::channel(());
    let mut working = spawn_blocking(move || work(&Steps(steps)));
    let mut until = Instant::now() + limit;
    loop {
        let step = async {
            tokio::select! {
                biased;
                done = &mut working => Some(done),
                Ok(()) = taken.changed() => None, // An error: it is done, and that is told at once.
            }
        };
        match timeout_at(until, step).await {
            Ok(Some(done)) => return done.map_err(io::Error::other),
            Ok(None) => until = Instant::now() + limit,
            Err(_) => {
                let why = format!("its disk did not answer within {limit:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::join;
    use std::sync::mpsc;
    use tokio::{sync::mpsc::unbounded_channel, task::yield_now, time::advance};

    const LIMIT: Duration = Duration::from_secs(1);

    /// A clock that stands still but where it is told: no thread that is slow makes a difference.
    #[tokio::test(start_paused = true)]
    async fn work_may_take_longer_than_its_limit_but_none_of_its_steps_may() {
        let (go_on, wait) = mpsc::channel();
        let (taken, mut was_taken) = unbounded_channel();
        let work = in_steps(LIMIT, move |steps| {
            for () in wait.iter().take(3) {
                steps.step();
                taken.send(()).unwrap();
            }
            wait.recv() // Hangs if it is not told to end.
        });
        let clock = async {
            for _ in 0..3 {
                advance(LIMIT * 3 / 4).await;
                go_on.send(()).unwrap();
                was_taken.recv().await.unwrap();
                yield_now().await;
            }
            let began = Instant::now();
            advance(LIMIT * 3 / 2).await;
            (began, go_on)
        };
        // In this order: what the work has said is seen before the clock goes on.
        let (ended, (began, go_on)) = join(work, clock).await;
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() >= LIMIT, "after all steps, each of them in time");
        drop(go_on); // The thread ends.
    }

    #[tokio::test]
    async fn what_the_work_gives_is_given() {
        let work = in_steps(Duration::from_secs(3600), |steps| {
            steps.step();
            7
        });
        assert_eq!(work.await.unwrap(), 7);
    }
}
