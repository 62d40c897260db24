//! What a single master must not forget: cluster id, term, the nodes it knew, registered models.
//!
//! Kept in RocksDB under the state directory; every write is synced before it counts. Block entries
//! never go here: nodes tell them again. One process at a time: RocksDB's own lock refuses a second.
//!
//! ```text
//! <state dir>/FORMAT        "larder master state 1": read before anything is opened or written
//! <state dir>/hard-state/   RocksDB: meta/*, node/<node id>, model/<content fingerprint><layout fingerprint>
//! ```
//!
//! A state of a newer format is refused with nothing touched, so that a rollback loses nothing.

use crate::{
    membership::Identity,
    registry::{RegisterError, Registered},
};
use larder_proto::{
    ClusterId, Incarnation, ModelVersion, NodeId, Term,
    canonical::{Decoder, Encoder},
    wire::{DecodeError, Wire},
};
use rocksdb::{DB, Direction, IteratorMode, Options, WriteBatch, WriteOptions};
use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

/// Version of the on-disk form.
pub const FORMAT: u32 = 1;
const FORMAT_FILE: &str = "FORMAT";
const FORMAT_WORDS: &str = "larder master state ";
const DB_DIR: &str = "hard-state";

const CLUSTER: &[u8] = b"meta/cluster";
const TERM: &[u8] = b"meta/term";
const INCARNATION: &[u8] = b"meta/incarnation";
const NODE: &[u8] = b"node/";
const MODEL: &[u8] = b"model/";
const NODE_SCHEME: &str = "larder/master/node/1";

/// Why hard state cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HardStateError {
    /// The directory was written by a newer program.
    #[error(
        "{} has state format {found}, this program knows up to {FORMAT}: start the newer program, or point \
         state_dir to another directory",
        path.display()
    )]
    Newer {
        /// The state directory.
        path: PathBuf,
        /// Its format.
        found: u64,
    },
    /// The directory holds something else.
    #[error("{} is no state directory of a master: {why}", path.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// What is wrong.
        why: &'static str,
    },
    /// Another master uses the directory.
    #[error(
        "{} is in use by another larder-master (--state_dir names another place)",
        path.display()
    )]
    InUse {
        /// The state directory.
        path: PathBuf,
    },
    /// The system gives no random bytes.
    #[error("draw a cluster id")]
    Random(#[source] io::Error),
    /// The file system refuses.
    #[error("use {} (--state_dir names another place)", path.display())]
    Io {
        /// Which file or directory.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// RocksDB refuses.
    #[error("{what} the hard state")]
    Db {
        /// What was being done.
        what: &'static str,
        /// What RocksDB said.
        source: rocksdb::Error,
    },
    /// An entry cannot be read.
    #[error("{what} in the hard state is damaged")]
    Damaged {
        /// Which entry.
        what: &'static str,
        /// What is wrong with it.
        source: DecodeError,
    },
    /// A model cannot be read.
    #[error("a model in the hard state is damaged")]
    Model(#[source] RegisterError),
}

/// This life of the master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    /// Cluster and term under which commands are given.
    pub term: Term,
    /// Greater than that of every earlier life.
    pub incarnation: Incarnation,
}

/// See the module.
#[derive(Debug)]
pub struct HardState {
    db: DB,
}

impl HardState {
    /// Opens the state of the single master of a cluster and begins a life: the term is raised, and a
    /// cluster id is made at the first start. Blocks on the disk.
    ///
    /// # Errors
    /// The state is of a newer format, foreign, damaged, in use, or cannot be written.
    pub fn open(state_dir: &Path) -> Result<(Self, Life), HardStateError> {
        check_format(state_dir)?;
        let mut options = Options::default();
        options.create_if_missing(true);
        // A few MiB at most: small buffers, few files.
        options.set_write_buffer_size(1 << 20);
        options.set_max_open_files(64);
        options.set_keep_log_file_num(2);
        let db = DB::open(&options, state_dir.join(DB_DIR)).map_err(|error| {
            match is_locked(&error) {
                true => HardStateError::InUse { path: state_dir.to_owned() },
                false => db_error("open")(error),
            }
        })?;
        let state = Self { db };
        let life = state.begin_life()?;
        Ok((state, life))
    }

    fn begin_life(&self) -> Result<Life, HardStateError> {
        let cluster = match self.get::<[u8; 16]>("cluster id", CLUSTER)? {
            Some(bytes) => ClusterId::from_bytes(bytes),
            None => ClusterId::from_bytes(random_id()?),
        };
        let number = self.get::<u64>("term", TERM)?.unwrap_or(0) + 1;
        let last = self.get::<u64>("incarnation", INCARNATION)?.map(Incarnation);
        let incarnation = Incarnation::at_start(last);
        let mut batch = WriteBatch::default();
        batch.put(CLUSTER, cluster.as_bytes());
        batch.put(TERM, number.to_wire());
        batch.put(INCARNATION, incarnation.0.to_wire());
        self.write(batch)?;
        Ok(Life { term: Term { cluster, number }, incarnation })
    }

    /// The nodes that are known.
    ///
    /// # Errors
    /// The disk, or a damaged entry.
    pub fn nodes(&self) -> Result<Vec<Identity>, HardStateError> {
        let damaged = |source| HardStateError::Damaged { what: "a node", source };
        self.with_prefix(NODE, |value| decode_identity(value).map_err(damaged))
    }

    /// Keeps a node.
    ///
    /// # Errors
    /// The disk.
    pub fn put_node(&self, identity: &Identity) -> Result<(), HardStateError> {
        let mut batch = WriteBatch::default();
        batch.put(key(NODE, identity.node.as_bytes()), encode_identity(identity));
        self.write(batch)
    }

    /// Drops a node.
    ///
    /// # Errors
    /// The disk.
    pub fn remove_node(&self, node: &NodeId) -> Result<(), HardStateError> {
        let mut batch = WriteBatch::default();
        batch.delete(key(NODE, node.as_bytes()));
        self.write(batch)
    }

    /// The registered models.
    ///
    /// # Errors
    /// The disk, or a damaged entry.
    pub fn models(&self) -> Result<Vec<(ModelVersion, Registered)>, HardStateError> {
        self.with_prefix(MODEL, |value| Registered::decode(value).map_err(HardStateError::Model))
    }

    /// Keeps a model.
    ///
    /// # Errors
    /// The disk.
    pub fn put_model(
        &self,
        version: &ModelVersion,
        model: &Registered,
    ) -> Result<(), HardStateError> {
        let mut batch = WriteBatch::default();
        batch.put(key(MODEL, &version.to_wire()), model.encode());
        self.write(batch)
    }

    fn write(&self, batch: WriteBatch) -> Result<(), HardStateError> {
        let mut durable = WriteOptions::default();
        durable.set_sync(true);
        self.db.write_opt(batch, &durable).map_err(db_error("write"))
    }

    fn get<T: Wire>(&self, what: &'static str, key: &[u8]) -> Result<Option<T>, HardStateError> {
        let Some(value) = self.db.get(key).map_err(db_error("read"))? else { return Ok(None) };
        let value = T::from_wire(what, &value);
        value.map(Some).map_err(|source| HardStateError::Damaged { what, source })
    }

    fn with_prefix<T>(
        &self,
        prefix: &[u8],
        decode: impl Fn(&[u8]) -> Result<T, HardStateError>,
    ) -> Result<Vec<T>, HardStateError> {
        let mut found = Vec::new();
        for entry in self.db.iterator(IteratorMode::From(prefix, Direction::Forward)) {
            let (key, value) = entry.map_err(db_error("read"))?;
            if !key.starts_with(prefix) {
                break;
            }
            found.push(decode(&value)?);
        }
        Ok(found)
    }
}

/// Reads or writes the format file; nothing else is touched before its format is known.
fn check_format(state_dir: &Path) -> Result<(), HardStateError> {
    let path = state_dir.join(FORMAT_FILE);
    let foreign = |why| HardStateError::Foreign { path: state_dir.to_owned(), why };
    match fs::read_to_string(&path) {
        Ok(text) => {
            let found =
                text.strip_prefix(FORMAT_WORDS).and_then(|number| number.trim().parse().ok());
            match found.ok_or(foreign("its FORMAT file says something else"))? {
                found if found <= u64::from(FORMAT) => Ok(()),
                found => Err(HardStateError::Newer { path: state_dir.to_owned(), found }),
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if state_dir.join(DB_DIR).exists() {
                return Err(foreign("it has a hard state and no FORMAT file"));
            }
            write_format(state_dir, &path)
        }
        Err(source) => Err(HardStateError::Io { path, source }),
    }
}

fn write_format(state_dir: &Path, path: &Path) -> Result<(), HardStateError> {
    let written = || {
        fs::create_dir_all(state_dir)?;
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        writeln!(file, "{FORMAT_WORDS}{FORMAT}")?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        File::open(state_dir)?.sync_all()
    };
    written().map_err(|source| HardStateError::Io { path: path.to_owned(), source })
}

fn random_id() -> Result<[u8; 16], HardStateError> {
    let mut id = [0; 16];
    let read = File::open("/dev/urandom").and_then(|mut source| source.read_exact(&mut id));
    read.map_err(HardStateError::Random)?;
    Ok(id)
}

/// RocksDB has no code of its own for a directory that is in use; it names its lock file.
fn is_locked(error: &rocksdb::Error) -> bool {
    error.kind() == rocksdb::ErrorKind::IOError && error.to_string().contains("/LOCK: ")
}

fn db_error(what: &'static str) -> impl Fn(rocksdb::Error) -> HardStateError {
    move |source| HardStateError::Db { what, source }
}

fn key(prefix: &[u8], id: &[u8]) -> Vec<u8> {
    [prefix, id].concat()
}

fn encode_identity(identity: &Identity) -> Vec<u8> {
    let Identity { node, name, data_address, control_address, version, capacity_bytes } = identity;
    let mut out = Encoder::with_scheme(NODE_SCHEME);
    out.field(1, node.as_bytes()).field(2, name.as_bytes()).field(3, data_address.as_bytes());
    out.field(4, control_address.as_bytes()).field(5, version.as_bytes());
    out.number(6, *capacity_bytes);
    out.finish()
}

fn decode_identity(bytes: &[u8]) -> Result<Identity, DecodeError> {
    let mut from = Decoder::with_scheme(NODE_SCHEME, bytes)?;
    let identity = Identity {
        node: NodeId::from_bytes(from.array(1)?),
        name: from.text(2)?,
        data_address: from.text(3)?,
        control_address: from.text(4)?,
        version: from.text(5)?,
        capacity_bytes: from.number(6)?,
    };
    from.finish()?;
    Ok(identity)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::tests::descriptions;
    use std::collections::BTreeSet;

    fn identity(node: u8) -> Identity {
        Identity {
            node: NodeId::from_bytes([node; 16]),
            name: "a".to_owned(),
            data_address: "127.0.0.1:1".to_owned(),
            control_address: "127.0.0.1:2".to_owned(),
            version: "0".to_owned(),
            capacity_bytes: 3,
        }
    }

    #[test]
    fn each_life_has_a_higher_term_and_incarnation_in_the_same_cluster() {
        let dir = tempfile::tempdir().unwrap();
        let (state, first) = HardState::open(dir.path()).unwrap();
        drop(state);
        let (_state, second) = HardState::open(dir.path()).unwrap();
        assert_eq!(second.term.cluster, first.term.cluster);
        assert_eq!(second.term.number, first.term.number + 1);
        assert!(second.incarnation > first.incarnation);
    }

    #[test]
    fn nodes_and_models_are_there_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let (content, layout) = descriptions(1);
        let names = BTreeSet::from(["m".to_owned()]);
        let (version, model) = Registered::new(names, &content.encode(), &layout.encode()).unwrap();
        {
            let (state, _) = HardState::open(dir.path()).unwrap();
            state.put_node(&identity(1)).unwrap();
            state.put_node(&identity(2)).unwrap();
            state.remove_node(&identity(1).node).unwrap();
            state.put_model(&version, &model).unwrap();
        }
        let (state, _) = HardState::open(dir.path()).unwrap();
        assert_eq!(state.nodes().unwrap(), [identity(2)]);
        assert_eq!(state.models().unwrap(), [(version, model)]);
    }

    #[test]
    fn a_second_master_on_the_same_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let _first = HardState::open(dir.path()).unwrap();
        let error = HardState::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("is in use by another larder-master (--state_dir"), "{error}");
    }

    #[test]
    fn a_newer_format_is_refused_and_nothing_is_touched() {
        let dir = tempfile::tempdir().unwrap();
        drop(HardState::open(dir.path()).unwrap());
        fs::write(dir.path().join(FORMAT_FILE), "larder master state 2\n").unwrap();
        let tree = |path: &Path| {
            let mut files: Vec<_> = fs::read_dir(path)
                .unwrap()
                .map(|entry| {
                    let entry = entry.unwrap();
                    let meta = entry.metadata().unwrap();
                    (entry.path(), meta.len(), meta.modified().unwrap())
                })
                .collect();
            files.sort();
            files
        };
        let (outer, inner) = (tree(dir.path()), tree(&dir.path().join(DB_DIR)));
        let error = HardState::open(dir.path()).unwrap_err();
        assert!(matches!(error, HardStateError::Newer { found: 2, .. }));
        assert_eq!((tree(dir.path()), tree(&dir.path().join(DB_DIR))), (outer, inner));
    }

    #[test]
    fn a_directory_of_something_else_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FORMAT_FILE), "larder node state 1\n").unwrap();
        assert!(matches!(HardState::open(dir.path()), Err(HardStateError::Foreign { .. })));
    }
}
