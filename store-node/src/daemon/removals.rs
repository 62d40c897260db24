//! Removals by command, remembered over restarts.

use crate::{
    inventory::command::{CommandSink, Evicted, Eviction},
    node::Node,
    state::StateDir,
};
use larder_daemon::run::chain;
use larder_proto::ids::Incarnation;
use parking_lot::Mutex;
use std::{io, sync::Arc};
use tokio::task::spawn_blocking;

/// The node, and that it was told to remove something in this life: an ssd path that takes no part in it cannot
/// note that itself.
pub(super) struct Remembering {
    node: Arc<Node>,
    state: Arc<StateDir>,
    life: Incarnation,
    /// Held while it is noted.
    noting: Arc<Mutex<()>>,
}

impl Remembering {
    pub(super) fn new(node: Arc<Node>, state: Arc<StateDir>, life: Incarnation) -> Self {
        Self { node, state, life, noting: Arc::default() }
    }

    /// Looks each time whether it is noted: whoever takes the file away takes it from one removal at most.
    async fn note(&self) -> io::Result<()> {
        let (state, life, noting) = (Arc::clone(&self.state), self.life, Arc::clone(&self.noting));
        let note = move || {
            let _alone = noting.lock();
            match state.last_removal()? {
                Some(last) if last == life => Ok(()),
                _ => state.note_removal(life),
            }
        };
        spawn_blocking(note).await.map_err(io::Error::other)?
    }
}

impl CommandSink for Remembering {
    async fn evict(&self, eviction: Eviction) -> Result<Evicted, String> {
        if !eviction.dry_run {
            self.note().await.map_err(|error| {
                format!(
                    "nothing was removed: it cannot be remembered over a restart: {}",
                    chain(&error)
                )
            })?;
        }
        self.node.evict(eviction).await
    }
}
