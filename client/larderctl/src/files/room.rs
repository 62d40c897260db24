//! Whether a file fits a node, and whether the node still holds it after it was put.
//!
//! A node makes room by evicting. A file that is larger than what it holds would take the place of
//! everything else there, and in the end that of its own blocks: it is refused before any byte moves.

use super::{
    PART,
    manifest::{Manifest, model},
};
use crate::{
    ctl::{Ctl, Names},
    error::{CtlError, Doing},
    output::{counted, size},
};
use larder_client::{
    cluster::{NodeChoice, address_of},
    peers::NodeAddress,
};
use larder_proto::control::{StatusRequest, TierStatus};

/// A node, and what it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    /// Its data plane.
    pub(super) address: NodeAddress,
    name: String,
    capacity_bytes: u64,
    /// What it holds without evicting.
    holds_bytes: u64,
}

/// The nodes of the choice that can hold all of a file, best first; at least one.
pub(super) async fn candidates(
    ctl: &Ctl,
    manifest: &Manifest,
    choice: &NodeChoice,
) -> Result<Vec<Candidate>, CtlError> {
    let wanted = ctl.client.nodes_for_put(choice).await.doing("choose a node")?;
    let infos = ctl.nodes(None).await?;
    let names = Names::of_nodes(&infos);
    let ask = ctl.ask_nodes(infos, |mut node| async move { node.status(StatusRequest {}).await });
    let mut nodes = Vec::new();
    for (info, answer) in ask.await {
        let address = address_of(&info).doing("read the master's answer")?;
        let tiers = answer.map(|status| status.tiers).unwrap_or_default();
        let capacity_bytes = info.capacity_bytes;
        let holds_bytes = holds_bytes(&tiers).unwrap_or(capacity_bytes);
        nodes.push(Candidate {
            name: names.of(&address.node),
            address,
            capacity_bytes,
            holds_bytes,
        });
    }
    let place = |node: &Candidate| wanted.iter().position(|it| it.node == node.address.node);
    nodes.retain(|node| place(node).is_some());
    nodes.sort_by_key(place);
    fitting(manifest, nodes)
}

/// What the tiers that parts are put into hold without evicting, if the node tells it.
fn holds_bytes(tiers: &[TierStatus]) -> Option<u64> {
    Some(tiers.iter().map(|tier| tier.holds_bytes).sum()).filter(|told| *told > 0)
}

fn fitting(manifest: &Manifest, nodes: Vec<Candidate>) -> Result<Vec<Candidate>, CtlError> {
    let needed = manifest.len.saturating_add(manifest.encode().len() as u64);
    let Some(largest) = nodes.iter().max_by_key(|node| node.holds_bytes).cloned() else {
        return Err(CtlError::Failed("no node takes puts".to_owned()));
    };
    let fit: Vec<Candidate> = nodes.into_iter().filter(|node| node.holds_bytes >= needed).collect();
    if !fit.is_empty() {
        return Ok(fit);
    }
    let Candidate { name, capacity_bytes, holds_bytes, .. } = largest;
    Err(CtlError::Failed(format!(
        "the file is {}: must be at most {}, which is what {name} holds in memory before it evicts (of a \
         capacity of {}), because a file goes to one node whole; nothing was put or evicted",
        size(needed),
        size(holds_bytes),
        size(capacity_bytes)
    )))
}

/// The blocks of a file that was put there which the node holds no more.
pub(super) async fn gone(
    ctl: &Ctl,
    manifest: &Manifest,
    node: &Candidate,
) -> Result<Vec<usize>, CtlError> {
    let Candidate { address, name, .. } = node;
    let keys = manifest.keys();
    let layout = model().version().layout;
    let held = ctl.client.held_by(address, layout, PART, &keys, ctl.timeout).await;
    let held = held.doing(format!("ask {name} whether it holds the file"))?;
    Ok((0..keys.len()).filter(|at| held.get(*at) != Some(&true)).collect())
}

/// Whether the node holds all of a file, of which it let these blocks go again and again.
pub(super) fn all_there(
    manifest: &Manifest,
    node: &Candidate,
    gone: &[usize],
) -> Result<(), CtlError> {
    let Some(first) = gone.first() else { return Ok(()) };
    let Candidate { name, holds_bytes, .. } = node;
    let keys = manifest.keys();
    Err(CtlError::Failed(format!(
        "block {first} of {} of {} is gone from {name} whenever it was put ({} in all): most likely it is \
         evicted, because what is in use there, or is put there meanwhile, leaves too little of the {} that it \
         holds; `larderctl pins` shows what is in use, `larderctl evict --key {} --descendants --yes` takes back \
         the rest",
        keys.len(),
        manifest.name,
        counted(gone.len(), "block"),
        size(*holds_bytes),
        keys[0]
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::manifest::PIECE_LEN;
    use larder_proto::{Incarnation, NodeId};

    fn node(id: u8, capacity_bytes: u64, holds_bytes: u64) -> Candidate {
        let node = NodeId::from_bytes([id; 16]);
        let address =
            NodeAddress { node, incarnation: Incarnation(1), address: "127.0.0.1:1".to_owned() };
        Candidate { address, name: format!("node-{id}"), capacity_bytes, holds_bytes }
    }

    fn file(len: u64) -> Manifest {
        let digest = blake3::hash(b"");
        Manifest { name: "notes".to_owned(), len, digest, piece_len: PIECE_LEN }
    }

    #[test]
    fn only_nodes_that_hold_the_whole_file_are_tried_in_their_order() {
        let nodes = vec![node(1, 100 << 20, 90 << 20), node(2, 300 << 20, 290 << 20)];
        let small = fitting(&file(80 << 20), nodes.clone()).unwrap();
        assert_eq!(small, nodes);
        assert_eq!(fitting(&file(200 << 20), nodes.clone()).unwrap(), nodes[1..]);
        let error = fitting(&file(700 << 20), nodes).unwrap_err().to_string();
        for told in ["700.0 MiB", "290.0 MiB", "node-2", "300.0 MiB"] {
            assert!(error.contains(told), "{told}: {error}");
        }
    }

    #[test]
    fn a_node_that_does_not_tell_what_it_holds_is_taken_at_its_capacity() {
        let tier = |holds_bytes| TierStatus { holds_bytes, ..TierStatus::default() };
        assert_eq!(holds_bytes(&[tier(7), tier(5)]), Some(12));
        assert_eq!(holds_bytes(&[tier(7), tier(0)]), Some(7), "an ssd takes no puts");
        assert_eq!(holds_bytes(&[tier(0)]), None);
        assert_eq!(holds_bytes(&[]), None);
    }
}
