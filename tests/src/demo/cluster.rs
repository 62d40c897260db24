//! The processes of the demo: one master, two nodes, two engines, all on loopback and on ports that the
//! system picks. Their state lies in a temporary folder; they end with this value.

use crate::process::Daemon;
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
    _folder: tempfile::TempDir,
}

impl Cluster {
    /// Starts everything; `said` hears what is being started.
    pub async fn start(model: &Path, mut said: impl FnMut(&str)) -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        said("starting the master (RocksDB)");
        let args = [
            flag("state_dir", folder.path().join("master").display()),
            flag("control.listen", "127.0.0.1:0"),
            flag("metrics.listen", "127.0.0.1:0"),
            flag("log.level", "warn"),
        ];
        let master = Daemon::start("larder-master", &args, &["control"]).await?;
        let mut hosts = Vec::new();
        for name in ["a", "b"] {
            said(&format!("starting node {name} (512 MiB) and engine {name}"));
            hosts.push(host(name, folder.path(), master.address("control"), model).await?);
        }
        let (b, a) = (hosts.pop(), hosts.pop());
        match (a, b) {
            (Some(a), Some(b)) => Ok(Self { master, a, b, _folder: folder }),
            _ => Err(io::Error::other("two hosts were started")),
        }
    }
}

async fn host(name: &str, folder: &Path, master: &str, model: &Path) -> io::Result<Host> {
    let socket: PathBuf = folder.join(format!("{name}.sock"));
    let node = [
        flag("name", name),
        flag("state_dir", folder.join(format!("node-{name}")).display()),
        flag("masters", master),
        flag("local.socket", socket.display()),
        flag("data.listen", "127.0.0.1:0"),
        flag("control.listen", "127.0.0.1:0"),
        flag("metrics.listen", "127.0.0.1:0"),
        flag("dram.capacity", "512MiB"),
        flag("log.level", "warn"),
    ];
    let node = Daemon::start("larder-node", &node, &["data", "control", "local"]).await?;
    let engine = [
        flag("http.listen", "127.0.0.1:0"),
        flag("model.path", model.display()),
        flag("node.socket", socket.display()),
        flag("node.producer", format!("engine-{name}")),
        flag("log.level", "error"),
    ];
    let engine = Daemon::start("larder-engine", &engine, &["http"]).await?;
    Ok(Host { node: Some(node), engine })
}

fn flag(key: &str, value: impl std::fmt::Display) -> String {
    format!("--{key}={value}")
}
