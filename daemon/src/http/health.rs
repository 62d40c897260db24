//! Whether a daemon is fit for work, and what it is doing about it.
//!
//! ```text
//! starting --> ok --> draining --> failed        failed is final; draining leads to failed alone
//! ```
//!
//! A start that finishes after the stop began must not report `ok` again: late calls are ignored.

use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use tokio::time::Instant;

/// The state of a daemon as `/health` tells it. Clones share one state.
#[derive(Debug, Clone)]
pub struct Health {
    started: Instant,
    state: Arc<Mutex<(HealthStatus, String)>>,
}

/// Where a daemon is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum HealthStatus {
    /// It prepares: touches memory, loads a model, reads a checkpoint.
    Starting,
    /// It does its work.
    Ok,
    /// It ends what is in progress and takes nothing new.
    Draining,
    /// It cannot work, and is about to end.
    Failed,
}

/// The body of `/health`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HealthReport {
    /// Where the daemon is in its life.
    pub status: HealthStatus,
    /// Progress or reason, for people.
    pub detail: String,
    /// Seconds since the daemon started.
    pub uptime_seconds: f64,
}

impl Health {
    /// A daemon that begins to start now.
    pub fn new() -> Self {
        let state = (HealthStatus::Starting, String::new());
        Self { started: Instant::now(), state: Arc::new(Mutex::new(state)) }
    }

    /// Still starting; `progress` says how far: `touching memory: 40 %`.
    pub fn starting(&self, progress: impl Into<String>) {
        self.set(HealthStatus::Starting, progress.into());
    }

    /// Fit for work.
    pub fn ok(&self) {
        self.set(HealthStatus::Ok, String::new());
    }

    /// Stopping; `reason` says why or how far.
    pub fn draining(&self, reason: impl Into<String>) {
        self.set(HealthStatus::Draining, reason.into());
    }

    /// Unfit for work; `reason` says why.
    pub fn failed(&self, reason: impl Into<String>) {
        self.set(HealthStatus::Failed, reason.into());
    }

    /// The state now.
    pub fn report(&self) -> HealthReport {
        let (status, detail) = self.lock().clone();
        HealthReport { status, detail, uptime_seconds: self.started.elapsed().as_secs_f64() }
    }

    fn set(&self, status: HealthStatus, detail: String) {
        let mut state = self.lock();
        if state.0 < HealthStatus::Draining || state.0 <= status {
            *state = (status, detail);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (HealthStatus, String)> {
        // Nothing panics while it is held, and a half-written report does not exist.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Health {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(health: &Health) -> (HealthStatus, String) {
        let HealthReport { status, detail, .. } = health.report();
        (status, detail)
    }

    #[test]
    fn a_stop_that_began_is_never_taken_back() {
        let health = Health::new();
        health.starting("reading");
        assert_eq!(status(&health), (HealthStatus::Starting, "reading".to_owned()));
        health.ok();
        health.starting("reading again");
        health.ok();
        health.draining("SIGTERM");
        health.ok();
        health.starting("late");
        assert_eq!(status(&health), (HealthStatus::Draining, "SIGTERM".to_owned()));
        health.failed("disk");
        health.draining("SIGTERM");
        assert_eq!(status(&health), (HealthStatus::Failed, "disk".to_owned()));
    }
}
