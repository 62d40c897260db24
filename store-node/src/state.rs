//! What a node remembers over restarts: its id, its last incarnation, the highest term it has seen, the ssd paths
//! that have failed, and the last life in which something was removed by command.
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

    /// Folders that failed in an earlier life: what they hold may have been removed since, and must not
    /// come back.
    pub fn failed_paths(&self) -> io::Result<Vec<PathBuf>> {
        let text = read_whole(&self.path, "failed_paths")?.unwrap_or_default();
        let folders: Vec<_> = text.lines().map(PathBuf::from).collect();
        if folders.iter().any(|folder| !folder.is_absolute()) {
            return Err(bad(&self.path, "failed_paths", "must name one absolute folder a line"));
        }
        Ok(folders)
    }

    /// Notes a folder that has failed, by its [`place_of`].
    pub fn note_failed(&self, place: &Path) -> io::Result<()> {
        let mut failed = self.failed_paths()?;
        if !failed.iter().any(|known| known == place) {
            failed.push(place.to_owned());
        }
        self.write_failed(&failed)
    }

    /// A folder was emptied, and may be used again.
    pub fn note_emptied(&self, place: &Path) -> io::Result<()> {
        let mut failed = self.failed_paths()?;
        failed.retain(|known| known != place);
        self.write_failed(&failed)
    }

    /// Remembers these folders as the failed ones, and no others.
    pub fn write_failed(&self, failed: &[PathBuf]) -> io::Result<()> {
        let lines: Option<Vec<_>> = failed.iter().map(|folder| folder.to_str()).collect();
        let lines = lines.filter(|lines| lines.iter().all(|line| is_one_line(line)));
        let lines = lines
            .ok_or_else(|| bad(&self.path, "failed_paths", "a folder's name is no line of text"))?;
        write(&self.path, "failed_paths", &lines.join("\n"))
    }

    /// Where the highest term is kept.
    pub fn terms(&self) -> Box<dyn TermStore> {
        Box::new(TermFile(self.path.clone()))
    }
}

/// The one name of a folder, whatever links and detours its path takes: of that part of it which is there.
pub fn place_of(dir: &Path) -> PathBuf {
    let there = dir.ancestors().find_map(|above| Some((above, fs::canonicalize(above).ok()?)));
    let rest = there.and_then(|(above, place)| Some(place.join(dir.strip_prefix(above).ok()?)));
    // What is all there gets no separator at its end.
    rest.map_or_else(|| dir.to_owned(), |place| place.components().collect())
}

/// Whether a name can be remembered.
pub fn is_one_line(name: &str) -> bool {
    !name.contains(char::is_control)
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
    let mut file = File::create(&beside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&beside, dir.join(name))?;
    File::open(dir)?.sync_all()
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
    fn a_failed_folder_is_known_by_any_name_and_for_as_long_as_it_is_not_emptied() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        let state = StateDir::open(&root.join("state")).unwrap();
        let [real, link, other] = ["real", "link", "other"].map(|name| root.join(name));
        for made in [&real, &other] {
            fs::create_dir(made).unwrap();
        }
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let detour = root.join("other/../real");
        for name in [&real, &link, &detour] {
            assert_eq!(place_of(name), real);
        }
        assert_eq!(place_of(&link.join("new")), real.join("new"), "what is not there yet");

        state.note_failed(&place_of(&link)).unwrap();
        let knows = |name: &Path| state.failed_paths().unwrap().contains(&place_of(name));
        assert!(knows(&real) && knows(&link) && knows(&detour) && !knows(&other));
        state.note_emptied(&place_of(&detour)).unwrap();
        assert!(!knows(&real) && !knows(&link));
        assert!(state.note_failed(Path::new("/two\nlines")).is_err());
    }

    #[test]
    fn a_damaged_file_is_named_with_its_rule() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        let said = |name: &str, bytes: &[u8]| {
            fs::write(dir.path().join(name), bytes).unwrap();
            let error = match name {
                "incarnation" => state.next_incarnation().unwrap_err(),
                "failed_paths" => state.failed_paths().unwrap_err(),
                _ => state.node_id().unwrap_err(),
            };
            let (said, file) = (error.to_string(), dir.path().join(name).display().to_string());
            said.strip_prefix(&file).unwrap_or_else(|| panic!("{said}")).to_owned()
        };
        assert!(said("incarnation", b"x").contains("must be a whole number"));
        assert!(said("node_id", b"x").contains("must be the id of a node"));
        assert!(said("failed_paths", b"/a\xff").contains("must be text"));
        assert!(said("failed_paths", b"rubbish").contains("must name one absolute folder a line"));
    }
}
