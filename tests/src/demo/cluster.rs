//! The processes of the demo: one master, two nodes, two engines, all on loopback and on ports that the
//! system picks. Their state lies in a folder of the demo's; they end with this value.

use crate::process::{Daemon, Logs};
use std::{
    io,
    path::{Path, PathBuf},
};

/// A host of the demo: a store node and an engine beside it.
#[derive(Debug)]
pub struct Host {
    /// The node, until it is killed.
    pub node: Option<Daemon>,
    /// The engine.
    pub engine: Daemon,
}

/// See the module.
#[derive(Debug)]
pub struct Cluster {
    /// The master.
    pub master: Daemon,
    /// Host A.
    pub a: Host,
    /// Host B.
    pub b: Host,
}

impl Cluster {
    /// Starts everything, with its state in `folder`; `said` hears what is being started.
    pub async fn start(
        model: &Path,
        folder: &Path,
        mut said: impl FnMut(&str),
    ) -> io::Result<Self> {
        said("starting the master (RocksDB)");
        let args = [
            flag("state_dir", folder.join("master").display()),
            flag("control.listen", "127.0.0.1:0"),
            flag("metrics.listen", "127.0.0.1:0"),
        ];
        let master = start("the master", "larder-master", &args, &["control"]).await?;
        let mut hosts = Vec::new();
        for name in ["a", "b"] {
            said(&format!("starting node {name} (512 MiB, and 1 GiB of disk) and engine {name}"));
            hosts.push(host(name, folder, master.address("control"), model).await?);
        }
        let (b, a) = (hosts.pop(), hosts.pop());
        match (a, b) {
            (Some(a), Some(b)) => Ok(Self { master, a, b }),
            _ => Err(io::Error::other("two hosts were started")),
        }
    }
}

async fn host(name: &str, folder: &Path, master: &str, model: &Path) -> io::Result<Host> {
    let node = node(name, folder, master).await?;
    let engine = [
        flag("http.listen", "127.0.0.1:0"),
        flag("model.path", model.display()),
        flag("node.socket", socket(name, folder).display()),
        flag("node.producer", format!("engine-{name}")),
    ];
    let engine = start(&format!("engine {name}"), "larder-engine", &engine, &["http"]).await?;
    Ok(Host { node: Some(node), engine })
}

/// Starts the node of a host, for the first time or again.
///
/// # Errors
/// It does not start.
pub async fn node(name: &str, folder: &Path, master: &str) -> io::Result<Daemon> {
    let ssd = folder.join(format!("ssd-{name}"));
    let node = [
        flag("name", name),
        flag("state_dir", folder.join(format!("node-{name}")).display()),
        flag("masters", master),
        flag("local.socket", socket(name, folder).display()),
        flag("data.listen", "127.0.0.1:0"),
        flag("control.listen", "127.0.0.1:0"),
        flag("metrics.listen", "127.0.0.1:0"),
        flag("dram.capacity", "512MiB"),
        flag("ssd.segment", "32MiB"),
        flag(
            "ssd.path",
            format!("[{{dir = {:?}, capacity = \"1GiB\"}}]", ssd.display().to_string()),
        ),
    ];
    let sockets = ["data", "control", "local"];
    start(&format!("node {name}"), "larder-node", &node, &sockets).await
}

fn socket(name: &str, folder: &Path) -> PathBuf {
    folder.join(format!("{name}.sock"))
}

/// Starts a daemon; an error says which of them it was.
async fn start(who: &str, name: &str, args: &[String], sockets: &[&str]) -> io::Result<Daemon> {
    let started = Daemon::start_with(Logs::Kept, name, args, sockets).await;
    started.map_err(|error| io::Error::new(error.kind(), format!("{who}: {error}")))
}

fn flag(key: &str, value: impl std::fmt::Display) -> String {
    format!("--{key}={value}")
}
