//! Keeps one session with the local node: opens it, hands it out, opens the next one.

use crate::metric;
use crate::store::{Connect, KvStore};
use larder_proto::fingerprint::ModelDescription;
use metrics::counter;
use std::time::Duration;
use tokio::sync::watch;
use tracing::{info, warn};

/// Pause between attempts. One costs a system call on this host, and requests are computed whole meanwhile,
/// so a node that comes back is looked for often.
const PAUSE: Duration = Duration::from_millis(100);
/// No fetch is of use for longer, however slow the engine is.
pub(crate) const LONGEST_FETCH: Duration = Duration::from_secs(600);

/// Runs until dropped. While there is no session, `store` holds `None` and requests go without.
pub(crate) async fn keep<C: Connect>(
    connect: C,
    mut model: watch::Receiver<ModelDescription>,
    store: watch::Sender<Option<C::Store>>,
) {
    let mut told = false;
    loop {
        let description = model.borrow_and_update().clone();
        match connect.connect(&description).await {
            Ok(session) => {
                info!(version = %description.version(), "connected to the local node");
                counter!(metric::SESSIONS_TOTAL).increment(1);
                told = false;
                store.send_replace(Some(session.clone()));
                tokio::select! {
                    () = session.closed() => warn!("the local node is gone; computing without it"),
                    // A new content has to be registered, which opening a session does.
                    changed = model.changed() => if changed.is_err() { return },
                }
                store.send_replace(None);
            }
            Err(error) => {
                if !std::mem::replace(&mut told, true) {
                    warn!(%error, "no local node; computing without it and trying again");
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
