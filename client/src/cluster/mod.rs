//! The cluster seen from a host without a node: questions to masters, bytes straight from and to data
//! planes.
//!
//! A read asks the location cache, then a master, and takes the part from the first node that gives it
//! ([`crate::failover`]). A cached location that proves wrong costs one round trip and is asked for again
//! before anything is called a miss (P5). Bytes arrive in buffers that the caller owns, every chunk
//! verified (P1). Every call has a deadline; dropping its future cancels it and leaks nothing (P10).
//!
//! Not here: where a part *should* be stored. [`ClusterClient::nodes_for_put`] merely prefers room.

mod answers;

pub use answers::{Holder, Located, Prefix, PrefixRun};

use crate::{
    ClientError, TransferError,
    connection::{Buffer, Identity, PutOutcome},
    error::Reaction,
    failover::{Attempt, first_of},
    local::PartAttributes,
    locations::Locations,
    masters::{Masters, packed_keys, registration},
    peers::{NodeAddress, Peers},
};
use answers::{read_located, read_prefix};
use bytes::Bytes;
use larder_proto::{
    BlockKey, ContentFingerprint, LayoutFingerprint, ModelVersion, PartNumber, TierSet,
    checksum::DEFAULT_CHUNK,
    control,
    fingerprint::ModelDescription,
    frame::{Class, Code, Codec, KEYS_LIMIT, Lookup, PartInfo, Read, ReadOk, Reserve},
    ids::{Incarnation, NodeId, TenantName},
    part::PartRef,
    wire::DecodeError,
};
use std::{future::Future, sync::Arc, time::Duration};
use tokio::time::timeout;

/// A handle of the cluster; clones share its connections and its location cache.
#[derive(Debug, Clone)]
pub struct ClusterClient {
    masters: Masters,
    peers: Peers,
    locations: Locations,
    tenant: TenantName,
}

/// A part, brought and verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// All of it.
    pub bytes: Vec<u8>,
    /// What its node knows of it.
    pub info: PartInfo,
    /// Which node gave it.
    pub source: NodeId,
}

/// Which node a put goes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeChoice {
    /// Whichever has most room.
    MostRoom,
    /// The one with this id or, unless another one has the same, this name.
    Named(String),
}

impl ClusterClient {
    /// A client that asks these masters, and says hello to data planes as `identity`.
    pub fn new(masters: Masters, identity: Identity) -> Self {
        let tenant = identity.tenant.clone();
        Self { masters, peers: Peers::new(identity), locations: Locations::default(), tenant }
    }

    /// The masters.
    pub fn masters(&self) -> &Masters {
        &self.masters
    }

    /// Whose blocks are asked for and put.
    pub fn tenant(&self) -> &TenantName {
        &self.tenant
    }

    /// Brings one part; `None` is a miss: every node that was said to hold it does not.
    ///
    /// # Errors
    /// Nobody could be asked, the deadline passed, or a node that may hold the part did not give it.
    pub async fn get(
        &self,
        model: ModelVersion,
        key: BlockKey,
        part: PartNumber,
        deadline: Duration,
    ) -> Result<Option<Fetched>, ClientError> {
        within(deadline, self.find(model, key, part)).await
    }

    async fn find(
        &self,
        model: ModelVersion,
        key: BlockKey,
        part: PartNumber,
    ) -> Result<Option<Fetched>, ClientError> {
        if let Some(sources) = self.locations.get(self.tenant.id(), model, &key) {
            match self.read(model, key, part, sources.iter().cloned()).await {
                Ok(fetched) => return Ok(Some(fetched)),
                Err(error) if error.reaction() == Reaction::GiveUp => return Err(error.into()),
                // What was remembered may be old: only a master's answer of now makes a miss.
                Err(_) => {}
            }
        }
        let mut holders = self.locate(model, &[key]).await?.blocks.pop().unwrap_or_default();
        holders.retain(|holder| holder.parts.has(part));
        holders.sort_by_key(|holder| holder.tiers.fastest());
        let sources = holders.into_iter().map(|holder| holder.node);
        match self.read(model, key, part, sources).await {
            Ok(fetched) => Ok(Some(fetched)),
            Err(error) if error.reaction() == Reaction::Miss => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn read(
        &self,
        model: ModelVersion,
        key: BlockKey,
        part: PartNumber,
        sources: impl Iterator<Item = Arc<NodeAddress>>,
    ) -> Result<Fetched, TransferError> {
        let name = PartRef { key, layout: model.layout, part };
        let forget = |source: &NodeAddress| {
            self.locations.drop_source(self.tenant.id(), model, &key, source.node);
        };
        let (read, source) =
            first_of(sources.collect(), forget, |attempt| self.read_once(model, name, attempt))
                .await?;
        let (bytes, info) = read;
        Ok(Fetched { bytes, info, source: source.node })
    }

    async fn read_once(
        &self,
        model: ModelVersion,
        part: PartRef,
        Attempt { source, verify, others: _ }: Attempt,
    ) -> Result<(Vec<u8>, PartInfo), TransferError> {
        let connection = self.peers.connection(&self.tenant, &source).await?;
        let read = Read {
            part,
            offset: 0,
            len: u64::MAX,
            generation: None,
            class: Class::Demand,
            verify,
            content: model.content,
        };
        let land = move |ok: &ReadOk| match ok.info.origin.content == model.content {
            true => land(ok.len),
            false => Err(TransferError::Refused {
                code: Code::Layout,
                reason: "the node's part has another content".to_owned(),
            }),
        };
        let (buffer, ok) = connection.read(&read, land).await?;
        Ok((buffer.into_bytes(), ok.info))
    }

    /// Puts one part on one node. Returns when it is visible there, or need not be put.
    ///
    /// # Errors
    /// The node cannot be reached or refuses, or the deadline passed: then nothing of it is visible.
    pub async fn put(
        &self,
        to: &NodeAddress,
        part: PartRef,
        attributes: &PartAttributes,
        bytes: Bytes,
        deadline: Duration,
    ) -> Result<PutOutcome, ClientError> {
        let PartAttributes { content, root, parent, origin_hash } = attributes.clone();
        let reserve = Reserve {
            part,
            len: bytes.len() as u64,
            codec: Codec::Raw,
            chunk_len: DEFAULT_CHUNK,
            content,
            root,
            parent,
            origin_hash,
        };
        reserve.check().map_err(|error| ClientError::Invalid(format!("part: {error}")))?;
        let put = async {
            let connection =
                self.peers.connection(&self.tenant, to).await.map_err(|source| {
                    ClientError::Connect { address: to.address.clone(), source }
                })?;
            match connection.put(&reserve, bytes.clone()).await {
                // The node found bytes that differ from their sums: they changed on the way.
                Err(TransferError::Refused { code: Code::Damaged, .. }) => {
                    Ok(connection.put(&reserve, bytes.clone()).await?)
                }
                outcome => Ok(outcome?),
            }
        };
        within(deadline, put).await
    }

    /// Which of these blocks a node holds now, by its own word: masters may not know yet. At most
    /// [`KEYS_LIMIT`].
    ///
    /// # Errors
    /// The node cannot be reached or refuses, or the deadline passed.
    pub async fn held_by(
        &self,
        node: &NodeAddress,
        layout: LayoutFingerprint,
        part: PartNumber,
        keys: &[BlockKey],
        deadline: Duration,
    ) -> Result<Vec<bool>, ClientError> {
        let ask = async {
            let connection = self.peers.connection(&self.tenant, node).await;
            let connection = connection
                .map_err(|source| ClientError::Connect { address: node.address.clone(), source })?;
            let lookup = Lookup { layout, part, keys: keys.to_vec() };
            let tiers = connection.lookup(&lookup).await?;
            Ok(tiers.into_iter().map(|tiers| tiers != TierSet::EMPTY).collect())
        };
        within(deadline, ask).await
    }

    /// Nodes that a put may go to, best first; at least one.
    ///
    /// # Errors
    /// No master answers, or no node fits the choice.
    pub async fn nodes_for_put(
        &self,
        choice: &NodeChoice,
    ) -> Result<Vec<NodeAddress>, ClientError> {
        let mut nodes = self.list_nodes().await?;
        if let NodeChoice::Named(name) = choice {
            nodes = vec![named(nodes, name)?];
        }
        nodes.retain(|node| node.state != "down" && !node.draining);
        nodes.sort_by_key(|node| {
            std::cmp::Reverse(node.capacity_bytes.saturating_sub(node.used_bytes))
        });
        match (nodes.is_empty(), choice) {
            (false, _) => nodes.iter().map(address_of).collect(),
            (true, NodeChoice::MostRoom) => {
                let why = "no node is in session with the master that would take a put";
                Err(ClientError::Invalid(why.to_owned()))
            }
            (true, NodeChoice::Named(name)) => Err(ClientError::Invalid(format!(
                "node {name} takes no puts now: it is down or draining"
            ))),
        }
    }

    /// The nodes that a master knows, as it describes them.
    ///
    /// # Errors
    /// No master answers.
    pub async fn list_nodes(&self) -> Result<Vec<control::NodeInfo>, ClientError> {
        let ask = |mut master: control::master_client::MasterClient<_>| async move {
            master.list_nodes(control::ListNodesRequest {}).await
        };
        Ok(self.masters.ask(ask).await?.nodes)
    }

    /// Who holds each of these blocks, as a master knows it.
    ///
    /// # Errors
    /// No master answers, or there are more than [`KEYS_LIMIT`] keys.
    pub async fn locate(
        &self,
        model: ModelVersion,
        keys: &[BlockKey],
    ) -> Result<Located, ClientError> {
        let request = control::LocateRequest {
            tenant: self.tenant.to_string(),
            content: model.content.as_bytes().to_vec().into(),
            layout: model.layout.as_bytes().to_vec().into(),
            keys: packed(keys)?,
        };
        let ask = |mut master: control::master_client::MasterClient<_>| {
            let request = request.clone();
            async move { master.locate(request).await }
        };
        let reply = self.masters.ask(ask).await?;
        let tenant = self.tenant.id();
        self.locations.learn_located(tenant, model, keys, &reply).map_err(answer)?;
        read_located(&reply, keys.len()).map_err(answer)
    }

    /// How far a match of a chain reaches, from its root on, for one rank of the layout.
    ///
    /// # Errors
    /// No master answers, or there are more than [`KEYS_LIMIT`] keys.
    pub async fn match_prefix(
        &self,
        model: ModelVersion,
        rank: u32,
        keys: &[BlockKey],
    ) -> Result<Prefix, ClientError> {
        let request = control::MatchPrefixRequest {
            tenant: self.tenant.to_string(),
            content: model.content.as_bytes().to_vec().into(),
            layout: model.layout.as_bytes().to_vec().into(),
            root: keys.first().map(|root| root.as_bytes().to_vec()).unwrap_or_default().into(),
            keys: packed(keys)?,
            rank,
            exclude: Bytes::new(),
        };
        let ask = |mut master: control::master_client::MasterClient<_>| {
            let request = request.clone();
            async move { master.match_prefix(request).await }
        };
        let reply = self.masters.ask(ask).await?;
        let tenant = self.tenant.id();
        self.locations.learn_match(tenant, model, keys, &reply).map_err(answer)?;
        read_prefix(&reply, keys.len()).map_err(answer)
    }

    /// Tells all masters of a model version; which other contents have the same display name (F02).
    /// Idempotent. A master that is down learns it from whoever registers next.
    ///
    /// # Errors
    /// No master took it.
    pub async fn register_model(
        &self,
        model: &ModelDescription,
    ) -> Result<Vec<ContentFingerprint>, ClientError> {
        let request = registration(model);
        let told = self.masters.ask_each(|mut master| {
            let request = request.clone();
            async move { master.register_model(request).await }
        });
        let (mut errors, mut reply) = (Vec::new(), None);
        for (address, answer) in told.await {
            match answer {
                Ok(taken) => reply = Some(taken),
                Err(error) => errors.push(format!("{address}: {error}")),
            }
        }
        let reply = reply.ok_or(ClientError::Masters(errors))?;
        let others = reply.other_contents.iter().map(|content| content.as_ref().try_into());
        others.collect::<Result<_, _>>().map_err(answer)
    }
}

/// The data plane of a node that a master described.
///
/// # Errors
/// The master's answer makes no sense.
pub fn address_of(node: &control::NodeInfo) -> Result<NodeAddress, ClientError> {
    Ok(NodeAddress {
        node: node.node.as_ref().try_into().map_err(answer)?,
        incarnation: Incarnation(node.incarnation),
        address: node.data_address.clone(),
    })
}

/// The one node with this id or name.
///
/// # Errors
/// There is none, or several have the name.
pub fn named(nodes: Vec<control::NodeInfo>, name: &str) -> Result<control::NodeInfo, ClientError> {
    let id = name.parse::<NodeId>().ok();
    let is_meant = |node: &control::NodeInfo| match id {
        Some(id) => node.node.as_ref() == id.as_bytes() || node.name == name,
        None => node.name == name,
    };
    let mut meant: Vec<_> = nodes.into_iter().filter(is_meant).collect();
    match meant.len() {
        1 => Ok(meant.remove(0)),
        0 => Err(ClientError::Invalid(format!("no node is called {name} or has that id"))),
        several => Err(ClientError::Invalid(format!(
            "{several} nodes are called {name}: name one by its id"
        ))),
    }
}

/// A buffer for a part. A length that there is no memory for is an answer, not an abort (P9).
fn land(len: u64) -> Result<Buffer, TransferError> {
    let no_room = TransferError::NoRoom(len);
    let Ok(len) = usize::try_from(len) else { return Err(no_room) };
    let mut memory = Vec::new();
    match memory.try_reserve_exact(len) {
        Ok(()) => Ok(Buffer::new(memory, len)),
        Err(_) => Err(no_room),
    }
}

async fn within<T>(
    deadline: Duration,
    work: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, ClientError> {
    let late = |_| TransferError::Deadline(deadline);
    timeout(deadline, work).await.map_err(late)?
}

fn packed(keys: &[BlockKey]) -> Result<Bytes, ClientError> {
    if keys.len() > KEYS_LIMIT {
        let why = format!("{} keys in one question: must be at most {KEYS_LIMIT}", keys.len());
        return Err(ClientError::Invalid(why));
    }
    Ok(packed_keys(keys))
}

fn answer(source: DecodeError) -> ClientError {
    ClientError::Answer { who: "a master".to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_several_nodes_have_is_refused() {
        let node = |id: u8, name: &str| control::NodeInfo {
            node: vec![id; 16].into(),
            name: name.to_owned(),
            ..Default::default()
        };
        let nodes = || vec![node(1, "a"), node(2, "b"), node(3, "b")];
        assert_eq!(named(nodes(), "a").unwrap().node[0], 1);
        let id = NodeId::from_bytes([3; 16]).to_string();
        assert_eq!(named(nodes(), &id).unwrap().node[0], 3);
        assert!(named(nodes(), "b").unwrap_err().to_string().contains("by its id"));
        assert!(named(nodes(), "c").unwrap_err().to_string().contains("no node"));
    }

    /// A compile-time check: owners spawn these into a `JoinSet`.
    #[expect(dead_code, reason = "it is enough that it compiles")]
    fn calls_can_be_spawned(client: &ClusterClient, model: &ModelVersion, key: BlockKey) {
        fn spawned(_: impl Send) {}
        let (part, deadline) = (PartNumber(0), Duration::ZERO);
        spawned(client.get(*model, key, part, deadline));
        spawned(async move { client.get(*model, key, part, deadline).await });
        spawned(client.match_prefix(*model, 0, &[]));
        spawned(client.nodes_for_put(&NodeChoice::MostRoom));
    }

    #[test]
    fn a_length_without_memory_is_an_answer() {
        assert!(matches!(land(u64::MAX), Err(TransferError::NoRoom(u64::MAX))));
        assert_eq!(land(3).unwrap().into_bytes().len(), 3);
    }
}
