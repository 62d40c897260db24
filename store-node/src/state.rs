//! What a node remembers over restarts: its id, its last incarnation, the highest term it has seen, the uses
//! of ssd paths that have failed, and the last life in which something was removed by command.
//!
//! One small text file each, replaced as a whole (write beside, sync, rename, sync the folder), so a crash
//! leaves the old or the new one. A file that cannot be understood stops the node: guessing an identity
//! would be worse.

use crate::{inventory::terms::TermStore, tiers::ssd::UseId};
use larder_proto::{
    ids::Term,
    ids::{ClusterId, Incarnation, NodeId},
};
use rustix::fs::{FlockOperation, flock};
use std::{
    collections::HashSet,
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
            return text.parse().map_err(|error| {
                bad(&self.path, "node_id", format_args!("must be the id of a node: {error}"))
            });
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
            Some(text) => Some(text.parse().map_err(|error| {
                bad(&self.path, "incarnation", format_args!("must be a whole number: {error}"))
            })?),
            None => None,
        };
        let next = Incarnation::at_start(last.map(Incarnation));
        write(&self.path, "incarnation", &next.to_string())?;
        Ok(next)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The last life in which parts were removed by command, if there was one.
    pub fn last_removal(&self) -> io::Result<Option<Incarnation>> {
        let Some(text) = read(&self.path, "last_removal")? else { return Ok(None) };
        let life = text.parse().map(Incarnation);
        life.map(Some).map_err(|error| {
            bad(&self.path, "last_removal", format_args!("must be a whole number: {error}"))
        })
    }

    /// Parts are about to be removed by command in this life: an ssd path that takes no part in it gives up what
    /// it holds when it comes back.
    pub fn note_removal(&self, life: Incarnation) -> io::Result<()> {
        write(&self.path, "last_removal", &life.to_string())
    }

    /// Uses of ssd paths that have failed: what they left may have been removed since, and must not come back.
    pub fn failed_uses(&self) -> io::Result<HashSet<UseId>> {
        let text = read(&self.path, FAILED)?.unwrap_or_default();
        let uses = text.lines().map(|line| u64::from_str_radix(line, 16).map(UseId));
        uses.collect::<Result<_, _>>().map_err(|error| {
            bad(&self.path, FAILED, format_args!("must be a number in hex each line: {error}"))
        })
    }

    /// Notes uses that have failed, for good: their folders may come back at any time, by any name.
    pub fn note_failed(&self, uses: &[UseId]) -> io::Result<()> {
        let mut failed: Vec<UseId> = self.failed_uses()?.into_iter().collect();
        let known = failed.len();
        failed.extend(uses);
        failed.sort_unstable();
        failed.dedup();
        if failed.len() == known {
            return Ok(());
        }
        let lines: Vec<_> = failed.iter().map(|UseId(id)| format!("{id:016x}")).collect();
        write(&self.path, FAILED, &lines.join("\n"))
    }

    /// Where the highest term is kept.
    pub fn terms(&self) -> Box<dyn TermStore> {
        Box::new(TermFile(self.path.clone()))
    }
}

/// Names failed uses of ssd paths.
const FAILED: &str = "failed_uses";

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
    Ok(read_whole(dir, name)?.map(|text| text.trim().to_owned()))
}

fn read_whole(dir: &Path, name: &str) -> io::Result<Option<String>> {
    match fs::read(dir.join(name)) {
        Ok(bytes) => {
            String::from_utf8(bytes).map(Some).map_err(|_| bad(dir, name, "must be text (UTF-8)"))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let path = dir.join(name);
            Err(io::Error::new(error.kind(), format!("read {}: {error}", path.display())))
        }
    }
}

fn write(dir: &Path, name: &str, text: &str) -> io::Result<()> {
    let beside = dir.join(format!("{name}.new"));
    let written = || {
        let mut file = File::create(&beside)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&beside, dir.join(name))?;
        File::open(dir)?.sync_all()
    };
    written().map_err(|error| {
        let path = dir.join(name);
        io::Error::new(error.kind(), format!("write {} (state_dir): {error}", path.display()))
    })
}

fn bad(dir: &Path, name: &str, rule: impl std::fmt::Display) -> io::Error {
    let path = dir.join(name);
    io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged: {rule}", path.display()))
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

    #[test]
    fn the_last_life_with_a_removal_is_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        assert_eq!(state.last_removal().unwrap(), None);
        for life in [7, 9] {
            state.note_removal(Incarnation(life)).unwrap();
            assert_eq!(state.last_removal().unwrap(), Some(Incarnation(life)));
        }
        fs::write(dir.path().join("last_removal"), "rubbish").unwrap();
        let said = state.last_removal().unwrap_err().to_string();
        assert!(said.contains("must be a whole number"), "{said}");
    }

    #[test]
    fn failed_uses_are_remembered_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        assert!(state.failed_uses().unwrap().is_empty());
        let [one, two, three] = [0x0123_4567_89ab_cdef, 2, u64::MAX].map(UseId);
        state.note_failed(&[one, two]).unwrap();
        state.note_failed(&[two, three]).unwrap();
        assert_eq!(state.failed_uses().unwrap(), [one, two, three].into());
    }

    #[test]
    fn a_damaged_file_is_named_with_its_rule() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        let said = |name: &str, bytes: &[u8]| {
            fs::write(dir.path().join(name), bytes).unwrap();
            let error = match name {
                "incarnation" => state.next_incarnation().unwrap_err(),
                FAILED => state.failed_uses().unwrap_err(),
                _ => state.node_id().unwrap_err(),
            };
            let (said, file) = (error.to_string(), dir.path().join(name).display().to_string());
            said.strip_prefix(&file).unwrap_or_else(|| panic!("{said}")).to_owned()
        };
        assert!(said("incarnation", b"x").contains("must be a whole number"));
        assert!(said("node_id", b"x").contains("must be the id of a node"));
        assert!(said(FAILED, b"/a\xff").contains("must be text"));
        assert!(said(FAILED, b"rubbish").contains("must be a number in hex each line"));
    }
}
