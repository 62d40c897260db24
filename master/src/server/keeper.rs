//! What a master does on its own: forgets nodes in time, sweeps the index, keeps node identities durable.

use super::Shared;
use crate::{cluster::Effect, hard_state::HardStateError, metrics};
use larder_daemon::TaskError;
use std::{sync::Arc, time::Duration};
use tokio::{
    task::{spawn_blocking, yield_now},
    time::{Instant, MissedTickBehavior, interval},
};
use tracing::info;

/// Entries looked at in one slice of sweeping: about a millisecond.
const SWEEP_SLICE: u64 = 32_768;
/// The slowest tick; nodes are forgotten that much late at most.
const SLOWEST_TICK: Duration = Duration::from_millis(250);

/// Runs until the stop.
///
/// # Errors
/// The hard state cannot be written: without it the master would forget after a restart.
pub(super) async fn run(shared: Arc<Shared>) -> Result<(), TaskError> {
    let mut ticks = interval((shared.heartbeat / 4).min(SLOWEST_TICK));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = shared.stop.cancelled() => break,
            () = shared.unsettled.notified() => {}
            _ = ticks.tick() => {
                shared.cluster.tick(Instant::now().into_std());
                metrics::publish(&shared.cluster);
            }
        }
        keep(&shared).await?;
        while !shared.cluster.index().sweep(SWEEP_SLICE).done {
            yield_now().await;
            if shared.stop.is_cancelled() {
                break;
            }
        }
    }
    // What the ends of sessions left behind.
    keep(&shared).await
}

/// Makes durable what membership asks for.
async fn keep(shared: &Arc<Shared>) -> Result<(), TaskError> {
    let effects = shared.take_durable_effects();
    if effects.is_empty() {
        return Ok(());
    }
    let writer = Arc::clone(shared);
    let write = move || -> Result<(), HardStateError> {
        for effect in effects {
            match effect {
                Effect::Remember(identity) => writer.hard_state.put_node(&identity)?,
                Effect::Dismiss(node) => {
                    info!(%node, "node forgotten with all that it held: not heard of for nodes.ttl");
                    writer.hard_state.remove_node(&node)?;
                }
                Effect::Close(session) => writer.desk.close(session),
            }
        }
        Ok(())
    };
    spawn_blocking(write).await??;
    Ok(())
}
