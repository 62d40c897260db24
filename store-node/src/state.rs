//! What a node remembers over restarts: its id, its last incarnation, the highest term it has seen.
//!
//! One small text file each, replaced as a whole (write beside, sync, rename, sync the folder), so a crash
//! leaves the old or the new one. A file that cannot be understood stops the node: guessing an identity
//! would be worse.

use crate::inventory::terms::TermStore;
use larder_proto::{
    ids::Term,
    ids::{ClusterId, Incarnation, NodeId},
};
use rustix::fs::{FlockOperation, flock};
use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// A node's state directory, locked against a second node.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    /// Locked for as long as it is open.
    _lock: File,
}

impl StateDir {
    /// Opens the directory, making it when it is missing.
    pub fn open(path: &Path) -> io::Result<Self> {
        fs::create_dir_all(path)?;
        let lock = File::create(path.join("lock"))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            io::Error::new(io::ErrorKind::ResourceBusy, "in use by another larder-node")
        })?;
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// The node's id: made at the first start.
    pub fn node_id(&self) -> io::Result<NodeId> {
        if let Some(text) = read(&self.path, "node_id")? {
            return text.parse().map_err(|error| bad(&self.path, "node_id", error));
        }
        let mut bytes = [0; 16];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        let id = NodeId::from_bytes(bytes);
        write(&self.path, "node_id", &id.to_string())?;
        Ok(id)
    }

    /// A new life: greater than every one before, and on disk when this returns.
    pub fn next_incarnation(&self) -> io::Result<Incarnation> {
        let last = match read(&self.path, "incarnation")? {
            Some(text) => {
                Some(text.parse().map_err(|error| bad(&self.path, "incarnation", error))?)
            }
            None => None,
        };
        let next = Incarnation::at_start(last.map(Incarnation));
        write(&self.path, "incarnation", &next.to_string())?;
        Ok(next)
    }

    /// Folders that failed in an earlier life: what they hold may have been removed since, and must not
    /// come back.
    pub fn failed_paths(&self) -> io::Result<Vec<PathBuf>> {
        let text = read(&self.path, "failed_paths")?.unwrap_or_default();
        Ok(text.lines().map(PathBuf::from).collect())
    }

    /// Notes a folder that has failed.
    pub fn note_failed(&self, folder: &Path) -> io::Result<()> {
        let mut failed = self.failed_paths()?;
        if !failed.iter().any(|known| known == folder) {
            failed.push(folder.to_owned());
        }
        self.write_failed(&failed)
    }

    /// A folder was emptied, and may be used again.
    pub fn note_emptied(&self, folder: &Path) -> io::Result<()> {
        let mut failed = self.failed_paths()?;
        failed.retain(|known| known != folder);
        self.write_failed(&failed)
    }

    fn write_failed(&self, failed: &[PathBuf]) -> io::Result<()> {
        let lines: Vec<_> = failed.iter().map(|folder| folder.display().to_string()).collect();
        write(&self.path, "failed_paths", &lines.join("\n"))
    }

    /// Where the highest term is kept.
    pub fn terms(&self) -> Box<dyn TermStore> {
        Box::new(TermFile(self.path.clone()))
    }
}

struct TermFile(PathBuf);

impl TermStore for TermFile {
    fn load(&self) -> io::Result<Option<Term>> {
        let Some(text) = read(&self.0, "term")? else { return Ok(None) };
        let parsed = text.split_once(' ').and_then(|(cluster, number)| {
            let cluster: ClusterId = cluster.parse().ok()?;
            Some(Term { cluster, number: number.parse().ok()? })
        });
        parsed.map(Some).ok_or_else(|| bad(&self.0, "term", "must be a cluster id and a number"))
    }

    fn save(&self, term: Term) -> io::Result<()> {
        write(&self.0, "term", &format!("{} {}", term.cluster, term.number))
    }
}

fn read(dir: &Path, name: &str) -> io::Result<Option<String>> {
    match fs::read_to_string(dir.join(name)) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn write(dir: &Path, name: &str, text: &str) -> io::Result<()> {
    let beside = dir.join(format!("{name}.new"));
    let mut file = File::create(&beside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&beside, dir.join(name))?;
    File::open(dir)?.sync_all()
}

fn bad(dir: &Path, name: &str, error: impl std::fmt::Display) -> io::Error {
    let path = dir.join(name);
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_stays_and_lives_grow_over_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        let (id, life) = (state.node_id().unwrap(), state.next_incarnation().unwrap());
        let second = StateDir::open(dir.path()).unwrap_err();
        assert_eq!(second.to_string(), "in use by another larder-node");
        drop(state);
        let state = StateDir::open(dir.path()).unwrap();
        assert_eq!(state.node_id().unwrap(), id);
        assert!(state.next_incarnation().unwrap() > life);
        let term = Term { cluster: ClusterId::from_bytes([3; 16]), number: 7 };
        state.terms().save(term).unwrap();
        assert_eq!(state.terms().load().unwrap(), Some(term));
        fs::write(dir.path().join("node_id"), "rubbish").unwrap();
        assert!(state.node_id().is_err(), "no new identity by accident");
    }
}
