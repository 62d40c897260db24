//! Opening the ssd paths, and what their tier needs of this process.
//!
//! No call here that may reach a disk is waited for without end: a disk that hangs when the node starts is one that
//! has failed.

use crate::{
    catalog::Catalog,
    config::{NodeConfig, SsdPathConfig},
    state::{StateDir, is_one_line, place_of},
    tiering::{Member, PathHost, Tiering},
    tiers::ssd::{
        Adoption, PathSettings, SsdPath,
        io::{DiskFolder, DiskOptions, Folder, OpenError},
    },
};
use futures_util::future::join_all;
use larder_daemon::{Context, TaskError, config::ByteSize, run::chain};
use larder_proto::ids::NodeId;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{task::spawn_blocking, time::timeout};
use tracing::{error, warn};

/// Reading a page of each file takes many requests: so many deadlines of one.
const DEADLINES: u32 = 10;

/// Opens all paths at once; what earlier lives left there is adopted while the node serves. A disk that has failed
/// does not keep the others from being used: its path is out, as if it had failed while the node ran. Nothing is
/// changed anywhere before every folder is known to be one of its own.
pub(super) async fn open(
    config: &NodeConfig,
    id: NodeId,
    catalog: &Arc<Catalog>,
    state: &Arc<StateDir>,
    context: &Context,
) -> Result<(Arc<Tiering>, Vec<Adoption>), TaskError> {
    let failed = settle_failed(state, config.ssd.deadline.get()).await?;
    let all = &config.ssd.path;
    let dirs: Vec<_> = all.iter().map(|one| one.dir.display().to_string()).collect();
    context.health.starting(format!("opening {}", dirs.join(", ")));
    let found = join_all(all.iter().map(|one| {
        let options = config.ssd.disk_options(one, catalog.arena());
        find(one, options, config.ssd.path_settings(one).deadline)
    }));
    let found = found.await;
    all_apart(all, &found)?;

    let mut paths = HashMap::new();
    let opening = all.iter().zip(found).map(|(one, found)| {
        let options = config.ssd.disk_options(one, catalog.arena());
        paths.insert(one.dir.clone(), HostPath { place: found.place.clone(), options });
        let (keep, settings) = (!failed.contains(&found.place), config.ssd.path_settings(one));
        async move {
            let opened = match found.folder {
                Ok(folder) => open_path(id, folder, settings.clone(), keep).await,
                Err(why) => Err(why),
            };
            (found.place, keep, settings, opened)
        }
    });
    let opening: Vec<_> = opening.collect();
    let (mut members, mut adoptions) = (Vec::new(), Vec::new());
    for (index, (place, keep, settings, opened)) in (0..).zip(join_all(opening).await) {
        let path = settings.name.display();
        match opened {
            Ok((opened, adoption)) => {
                if !keep {
                    warn!(%path, "the path had failed: it starts empty");
                    state.note_emptied(&place)?;
                }
                members.push(Member::from(opened).adopting(&adoption));
                adoptions.push(adoption);
            }
            Err(NotOpened { why, by_disk: true }) => {
                error!(%path, why, "ssd path fenced: it cannot be opened");
                // Nothing that is removed from now on can be noted there.
                state.note_failed(&place)?;
                members.push(Member::out(id, settings, &why));
            }
            Err(NotOpened { why, by_disk: false }) => {
                return Err(refusal(index, &settings.name, &why).into());
            }
        }
    }
    let host = SsdHost { state: Arc::clone(state), paths, noting: Mutex::default() };
    let settings = config.ssd.tiering();
    let tiering = Tiering::new(Arc::clone(catalog), members, settings, Arc::new(host));
    Ok((tiering, adoptions))
}

fn refusal(index: usize, dir: &Path, why: &str) -> io::Error {
    io::Error::other(format!("open ssd.path[{index}].dir = {}: {why}", dir.display()))
}

/// Whether each path has a folder of its own, with a name that can be remembered.
fn all_apart(all: &[SsdPathConfig], found: &[Found]) -> io::Result<()> {
    for (index, (one, this)) in all.iter().zip(found).enumerate() {
        if !this.place.to_str().is_some_and(is_one_line) {
            let why = format!("it leads to {:?}, whose name is no line of text", this.place);
            return Err(refusal(index, &one.dir, &why));
        }
        let is_same = |other: &Found| this.identity.is_some() && other.identity == this.identity;
        if let Some(other) = found[..index].iter().position(is_same) {
            let of_other = all[other].dir.display();
            let why = format!(
                "it is the folder of ssd.path[{other}] ({of_other}); give each path a folder of its own"
            );
            return Err(refusal(index, &one.dir, &why));
        }
    }
    Ok(())
}

/// The folders that have failed in earlier lives, each by its one name where its disk tells that now. An earlier
/// version remembered them as the configuration called them, and so does this one where a disk does not answer.
async fn settle_failed(state: &StateDir, limit: Duration) -> io::Result<Vec<PathBuf>> {
    let known = state.failed_paths()?;
    let mut settled = Vec::new();
    for dir in &known {
        let of = dir.clone();
        let place = timeout(limit, spawn_blocking(move || place_of(&of))).await;
        settled.push(place.ok().and_then(Result::ok).unwrap_or_else(|| dir.clone()));
    }
    if settled != known {
        state.write_failed(&settled)?;
    }
    Ok(settled)
}

/// A folder as it was found.
struct Found {
    /// Its one name: by this it is known when it fails, so it is asked for while the disk still tells.
    place: PathBuf,
    /// Device and number: each folder is told from the others by these, as its path may take another way to it.
    identity: Option<(u64, u64)>,
    folder: Result<DiskFolder, NotOpened>,
}

async fn find(one: &SsdPathConfig, options: DiskOptions, limit: Duration) -> Found {
    let (dir, capacity) = (one.dir.clone(), one.capacity);
    let look = move || {
        let place = place_of(&dir);
        let folder = DiskFolder::open(&dir, &options).map_err(|error| {
            let by_disk = error.is_of_the_disk();
            NotOpened { why: chain(&error), by_disk }
        });
        let identity = fs::metadata(&dir).ok().map(|folder| (folder.dev(), folder.ino()));
        if let Ok(folder) = &folder {
            say_less_room(folder, &dir, capacity);
        }
        Found { place, identity, folder }
    };
    let not_found = |why| Found { place: one.dir.clone(), identity: None, folder: Err(why) };
    match timeout(limit, spawn_blocking(look)).await {
        Ok(Ok(found)) => found,
        Ok(Err(panicked)) => not_found(NotOpened { why: chain(&panicked), by_disk: false }),
        Err(_) => not_found(late(limit)),
    }
}

/// A capacity that the file system cannot give is no error: others may take and free room at any time.
fn say_less_room(folder: &DiskFolder, dir: &Path, capacity: ByteSize) {
    let (Ok(space), Ok(own)) = (folder.space(), folder.physical_bytes()) else { return };
    let room = ByteSize::bytes(space.free_bytes.saturating_add(own));
    if room.as_u64() < capacity.as_u64() {
        let path = dir.display();
        warn!(%path, %room, %capacity, "the disk has less room than the capacity of the path, which takes what there is");
    }
}

fn late(limit: Duration) -> NotOpened {
    NotOpened { why: format!("its disk did not answer within {limit:?}"), by_disk: true }
}

/// Why a path is not open.
struct NotOpened {
    why: String,
    /// It is not that somebody named the wrong folder.
    by_disk: bool,
}

async fn open_path(
    id: NodeId,
    folder: DiskFolder,
    settings: PathSettings,
    keep: bool,
) -> Result<(Arc<SsdPath>, Adoption), NotOpened> {
    let limit = settings.deadline * DEADLINES;
    let opened = timeout(limit, SsdPath::open(id, Arc::new(folder), settings, keep)).await;
    opened.map_err(|_| late(limit))?.map_err(|error| {
        let by_disk = error.is_of_the_disk();
        NotOpened { why: chain(&error), by_disk }
    })
}

/// What the ssd tier needs of this process.
struct SsdHost {
    state: Arc<StateDir>,
    /// By their names.
    paths: HashMap<PathBuf, HostPath>,
    /// Held while the list of failed paths is read and written.
    noting: Mutex<()>,
}

struct HostPath {
    /// Where it was found to be when the node started.
    place: PathBuf,
    options: DiskOptions,
}

impl PathHost for SsdHost {
    fn open(&self, dir: &Path) -> io::Result<Arc<dyn Folder>> {
        match DiskFolder::open(dir, &self.path(dir)?.options) {
            Ok(folder) => Ok(Arc::new(folder)),
            Err(error @ OpenError::InUse { .. }) => {
                Err(io::Error::new(io::ErrorKind::ResourceBusy, error))
            }
            Err(error) => Err(io::Error::other(chain(&error))),
        }
    }

    fn note_failed(&self, dir: &Path) -> io::Result<()> {
        let _alone = self.noting.lock();
        self.state.note_failed(&self.path(dir)?.place)
    }

    fn note_emptied(&self, dir: &Path) -> io::Result<()> {
        let _alone = self.noting.lock();
        // Its disk has just answered: a name that it had in an earlier life is known now.
        self.state.note_emptied(&place_of(dir))?;
        self.state.note_emptied(&self.path(dir)?.place)
    }
}

impl SsdHost {
    fn path(&self, dir: &Path) -> io::Result<&HostPath> {
        self.paths.get(dir).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failed_folder_is_known_however_an_earlier_life_called_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        let state = StateDir::open(&root.join("state")).unwrap();
        let (real, link) = (root.join("real"), root.join("link"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        state.note_failed(&link).unwrap(); // As configured: its disk did not tell.
        let settled = settle_failed(&state, Duration::from_secs(60)).await.unwrap();
        assert_eq!(settled, std::slice::from_ref(&real));
        state.note_emptied(&real).unwrap();
        assert!(state.failed_paths().unwrap().is_empty());
    }
}
