//! What every command works with: the cluster client, deadlines, and questions to the nodes themselves.

use crate::{
    cli::Global,
    error::{CtlError, Doing},
    output::{Output, counted, short, span},
};
use futures_util::{StreamExt, stream};
use larder_client::{
    cluster::{self, ClusterClient},
    connection::Identity,
    masters::{self, Masters},
};
use larder_proto::{
    control::{self, node_client::NodeClient},
    ids::{NodeId, TenantName},
};
use std::{collections::HashMap, future::Future, time::Duration};
use tokio::time::timeout;
use tonic::{Code, Response, Status, transport::Channel};

/// Who is recorded as the producer of what `larderctl` puts.
const PRODUCER: &str = "larderctl";
/// Questions that are open at a time.
pub(crate) const QUESTIONS: usize = 32;

/// See the module.
#[derive(Debug)]
pub(crate) struct Ctl {
    /// The cluster.
    pub(crate) client: ClusterClient,
    /// Where answers go.
    pub(crate) out: Output,
    /// How long one question or transfer may take.
    pub(crate) timeout: Duration,
}

/// What a node answered, or why it did not.
pub(crate) type NodeAnswer<T> = (control::NodeInfo, Result<T, NotAsked>);

/// Why a node gave no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NotAsked {
    /// Its session is down, so it is not asked: masters leave it out as well.
    Down,
    /// It should have answered and did not.
    Failed(String),
}

impl std::fmt::Display for NotAsked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Down => f.write_str("down"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

impl Ctl {
    /// Connects to nothing yet. Has to be called within a runtime.
    pub(crate) fn new(global: &Global, out: Output) -> Result<Self, CtlError> {
        let Global { masters, tenant, timeout } = global;
        let addresses: Vec<String> = masters.iter().map(ToString::to_string).collect();
        let masters = Masters::new(&addresses).doing("--masters")?;
        let identity = Identity { tenant: tenant.clone(), ..Identity::client(PRODUCER) };
        let timeout = timeout.get();
        if timeout.is_zero() {
            return Err(CtlError::Usage("--timeout = 0s: must be above 0s".to_owned()));
        }
        Ok(Self { client: ClusterClient::new(masters, identity), out, timeout })
    }

    /// The masters.
    pub(crate) fn masters(&self) -> &Masters {
        self.client.masters()
    }

    /// Whose blocks are meant.
    pub(crate) fn tenant(&self) -> &TenantName {
        self.client.tenant()
    }

    /// Holds questions to the time that one may take.
    pub(crate) async fn within<T>(
        &self,
        what: &str,
        work: impl Future<Output = Result<T, CtlError>>,
    ) -> Result<T, CtlError> {
        let late = |_| {
            let limit = span(self.timeout);
            CtlError::Unreachable(format!("{what}: not done within {limit} (--timeout)"))
        };
        timeout(self.timeout, work).await.map_err(late)?
    }

    /// All nodes that a master knows, or the one with this name or id.
    pub(crate) async fn nodes(
        &self,
        chosen: Option<&str>,
    ) -> Result<Vec<control::NodeInfo>, CtlError> {
        let mut nodes = self.client.list_nodes().await.doing("list nodes")?;
        nodes.sort_by(|one, other| (&one.name, &one.node).cmp(&(&other.name, &other.node)));
        match chosen {
            None => Ok(nodes),
            Some(name) => match cluster::named(nodes, name) {
                Ok(node) => Ok(vec![node]),
                Err(error) => Err(CtlError::NotFound(error.to_string())),
            },
        }
    }

    /// Asks the Node service of each of these nodes; answers in the same order.
    pub(crate) async fn ask_nodes<T, F>(
        &self,
        nodes: Vec<control::NodeInfo>,
        call: impl Fn(NodeClient<Channel>) -> F,
    ) -> Vec<NodeAnswer<T>>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let ask = |node: control::NodeInfo| {
            let service = masters::channel(&node.control_address).map(NodeClient::new);
            let asked = service.map(|service| timeout(masters::CALL_DEADLINE, call(service)));
            async move {
                if node.state == "down" {
                    return (node, Err(NotAsked::Down));
                }
                let answer = match asked {
                    Ok(asked) => asked.await,
                    Err(error) => return (node, Err(NotAsked::Failed(error.to_string()))),
                };
                let answer = match answer {
                    Ok(Ok(answer)) => Ok(answer.into_inner()),
                    Ok(Err(status)) => Err(NotAsked::Failed(masters::describe(&status, "a node"))),
                    Err(_) => {
                        let limit = masters::CALL_DEADLINE;
                        Err(NotAsked::Failed(format!("no answer within {limit:?}")))
                    }
                };
                (node, answer)
            }
        };
        stream::iter(nodes.into_iter().map(ask)).buffered(QUESTIONS).collect().await
    }

    /// One node, to ask it.
    pub(crate) async fn node(
        &self,
        name: &str,
    ) -> Result<(control::NodeInfo, NodeClient<Channel>), CtlError> {
        let nodes = self.within("find the node", self.nodes(Some(name))).await?;
        let Some(node) = nodes.into_iter().next() else {
            return Err(CtlError::NotFound(format!("no node is called {name}")));
        };
        if node.state == "down" {
            return Err(CtlError::Unreachable(format!("{}: down", node.name)));
        }
        let service = masters::channel(&node.control_address).map(NodeClient::new);
        Ok((node, service.doing("reach the node")?))
    }

    /// Names of nodes, for holders that a master names by id.
    pub(crate) async fn names(&self) -> Result<Names, CtlError> {
        Ok(Names::of_nodes(&self.nodes(None).await?))
    }
}

/// What people call nodes: by their name, and with the start of their id where several have one name.
#[derive(Debug)]
pub(crate) struct Names(HashMap<String, String>);

impl Names {
    /// Of nodes as a master describes them.
    pub(crate) fn of_nodes(nodes: &[control::NodeInfo]) -> Self {
        Self::new(nodes.iter().map(|node| (hex(&node.node), node.name.as_str())))
    }

    /// Of ids in hex, and names.
    pub(crate) fn new<'a>(nodes: impl Iterator<Item = (String, &'a str)> + Clone) -> Self {
        let mut holders: HashMap<&str, usize> = HashMap::new();
        nodes.clone().for_each(|(_, name)| *holders.entry(name).or_default() += 1);
        let named = |(id, name): (String, &str)| {
            let called = match holders.get(name) {
                Some(0 | 1) | None => name.to_owned(),
                Some(_) => format!("{name} ({})", short(&id)),
            };
            (id, called)
        };
        Self(nodes.map(named).collect())
    }

    /// What a node is called; its id where it is not known.
    pub(crate) fn of(&self, node: &NodeId) -> String {
        self.of_hex(&node.to_string())
    }

    /// The same, of an id in hex.
    pub(crate) fn of_hex(&self, id: &str) -> String {
        self.0.get(id).map_or(id, String::as_str).to_owned()
    }
}

/// What a node's refusal means for whoever asked.
pub(crate) fn refused(node: &str, status: &Status) -> CtlError {
    let why = format!("{node}: {}", masters::describe(status, "a node"));
    match status.code() {
        Code::NotFound => CtlError::NotFound(why),
        Code::InvalidArgument => CtlError::Usage(why),
        Code::Unavailable | Code::DeadlineExceeded => CtlError::Unreachable(why),
        _ => CtlError::Failed(why),
    }
}

/// An error if a node that should have answered did not; its answer is missing in what was shown.
pub(crate) fn all_answered<T>(answers: &[NodeAnswer<T>]) -> Result<(), CtlError> {
    let failed = answers.iter().filter_map(|(node, answer)| match answer {
        Err(NotAsked::Failed(why)) => Some(format!("{}: {why}", node.name)),
        Ok(_) | Err(NotAsked::Down) => None,
    });
    let failed: Vec<String> = failed.collect();
    match failed.is_empty() {
        true => Ok(()),
        false => {
            let (count, all) = (failed.len(), counted(answers.len(), "node"));
            let why = failed.join("; ");
            Err(CtlError::Unreachable(format!("{count} of {all} gave no answer: {why}")))
        }
    }
}

/// Bytes of an id as hex digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_of_one_name_are_told_apart_by_their_ids() {
        let ids = [[1; 16], [2; 16], [3; 16]].map(NodeId::from_bytes);
        let nodes = ids.iter().map(NodeId::to_string).zip(["host", "host", "other"]);
        let names = Names::new(nodes);
        assert_eq!(names.of(&ids[0]), "host (010101010101)");
        assert_eq!(names.of(&ids[1]), "host (020202020202)");
        assert_eq!(names.of(&ids[2]), "other");
        let unknown = NodeId::from_bytes([4; 16]);
        assert_eq!(names.of(&unknown), unknown.to_string());
    }
}
