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
    use std::sync::mpsc;

    const LIMIT: Duration = Duration::from_millis(200);

    #[tokio::test]
    async fn work_may_take_longer_than_its_limit_but_none_of_its_steps_may() {
        let began = Instant::now();
        let work = in_steps(LIMIT, move |steps| {
            while began.elapsed() < 3 * LIMIT {
                steps.step();
            }
            7
        });
        assert_eq!(work.await.unwrap(), 7);

        let (go_on, wait) = mpsc::channel::<()>();
        let hanging = in_steps(LIMIT, move |steps| {
            steps.step();
            wait.recv()
        });
        assert_eq!(hanging.await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(go_on); // The thread ends.
    }
}
