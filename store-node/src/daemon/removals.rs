//! Removals by command, remembered over restarts.

use crate::{
    inventory::command::{CommandSink, Evicted, Eviction},
    node::Node,
    state::StateDir,
};
use larder_daemon::run::chain;
use larder_proto::ids::Incarnation;
use std::{io, sync::Arc};
use tokio::{sync::OnceCell, task::spawn_blocking};

/// The node, and that it was told to remove something in this life: an ssd path that takes no part in it cannot
/// note that itself.
pub(super) struct Remembering {
    node: Arc<Node>,
    state: Arc<StateDir>,
    life: Incarnation,
    noted: OnceCell<()>,
}

impl Remembering {
    pub(super) fn new(node: Arc<Node>, state: Arc<StateDir>, life: Incarnation) -> Self {
        Self { node, state, life, noted: OnceCell::new() }
    }

    async fn note(&self) -> io::Result<()> {
        let (state, life) = (Arc::clone(&self.state), self.life);
        spawn_blocking(move || state.note_removal(life)).await.map_err(io::Error::other)?
    }
}

impl CommandSink for Remembering {
    async fn evict(&self, eviction: Eviction) -> Result<Evicted, String> {
        if !eviction.dry_run {
            let noted = self.noted.get_or_try_init(|| self.note()).await;
            noted.map_err(|error| {
                format!(
                    "nothing was removed: it cannot be remembered over a restart: {}",
                    chain(&error)
                )
            })?;
        }
        self.node.evict(eviction).await
    }
}
