//! Opening the ssd paths, and what their tier needs of this process.
//!
//! No call here that may reach a disk is waited for without end: a disk that hangs when the node starts is one that
//! has failed. A disk that is slow, and goes on, is waited for.

use crate::{
    catalog::Catalog,
    config::{NodeConfig, SsdPathConfig},
    state::StateDir,
    tiering::{Member, PathHost, Tiering},
    tiers::ssd::{
        Adoption, Owner, PathSettings, SsdPath, Steps, UseId, in_steps,
        io::{DiskFolder, DiskOptions, Folder, OpenError},
    },
};
use futures_util::future::join_all;
use larder_daemon::{Context, TaskError, config::ByteSize, run::chain};
use parking_lot::Mutex;
use std::{
    collections::{HashMap, HashSet},
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tracing::{error, warn};

/// Opens all paths at once; what earlier lives left there is adopted while the node serves. A disk that has failed
/// does not keep the others from being used: its path is out, as if it had failed while the node ran. Nothing is
/// changed anywhere before every folder is known to be one of its own.
pub(super) async fn open(
    config: &NodeConfig,
    owner: Owner,
    catalog: &Arc<Catalog>,
    state: &Arc<StateDir>,
    context: &Context,
) -> Result<(Arc<Tiering>, Vec<Adoption>), TaskError> {
    let failed = Arc::new(state.failed_uses()?);
    let all = &config.ssd.path;
    let dirs: Vec<_> = all.iter().map(|one| one.dir.display().to_string()).collect();
    context.health.starting(format!("opening {}", dirs.join(", ")));
    let found = join_all(all.iter().map(|one| {
        let options = config.ssd.disk_options(one, catalog.arena());
        find(one, options, config.ssd.path_settings(one).deadline)
    }));
    let found = found.await;
    all_apart(all, &found, state.path())?;

    let mut paths = HashMap::new();
    let opening = all.iter().zip(found).map(|(one, found)| {
        let options = config.ssd.disk_options(one, catalog.arena());
        paths.insert(one.dir.clone(), options);
        let (failed, settings) = (Arc::clone(&failed), config.ssd.path_settings(one));
        async move {
            let opened = match found.folder {
                Ok(folder) => open_path(owner, folder, settings.clone(), failed).await,
                Err(why) => Err(why),
            };
            (settings, opened)
        }
    });
    let opening: Vec<_> = opening.collect();
    let opened = join_all(opening).await;
    for (index, (settings, opened)) in opened.iter().enumerate() {
        if let Err(NotOpened { why, by_disk: false }) = opened {
            return Err(refusal(index, &settings.name, why).into());
        }
    }
    let (mut members, mut adoptions) = (Vec::new(), Vec::new());
    for (settings, opened) in opened {
        let path = settings.name.display();
        match opened {
            Ok((opened, adoption)) => {
                members.push(Member::from(opened).adopting(&adoption));
                adoptions.push(adoption);
            }
            Err(NotOpened { why, by_disk: _ }) => {
                error!(
                    %path, why,
                    "ssd path fenced: it cannot be opened. A restart that can open it finds what it holds, unless \
                     something is evicted by command before"
                );
                members.push(Member::out(owner, settings, &why));
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

/// Whether each path has a folder of its own. Of folders that lie in each other
/// the outer one's capacity would hold for the inner one too.
fn all_apart(all: &[SsdPathConfig], found: &[Found], state: &Path) -> io::Result<()> {
    let state = place_of(state);
    for (index, (one, this)) in all.iter().zip(found).enumerate() {
        let is_in = |outer: &Path, inner: &Path| inner.starts_with(outer);
        if is_in(&this.place, &state) {
            let why = format!(
                "state_dir ({}) lies in it; give the path a folder of its own",
                state.display()
            );
            return Err(refusal(index, &one.dir, &why));
        }
        let nested = |other: &Found| {
            other.place != this.place
                && (is_in(&other.place, &this.place) || is_in(&this.place, &other.place))
        };
        if let Some(other) = found[..index].iter().position(nested) {
            let of_other = all[other].dir.display();
            let why = format!(
                "it and ssd.path[{other}] ({of_other}) lie in each other; give each path a folder of its own"
            );
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

/// A folder as it was found.
struct Found {
    /// Its one name.
    place: PathBuf,
    /// Device and number: each folder is told from the others by these, as its path may take another way to it.
    identity: Option<(u64, u64)>,
    folder: Result<DiskFolder, NotOpened>,
}

async fn find(one: &SsdPathConfig, options: DiskOptions, limit: Duration) -> Found {
    let (dir, capacity) = (one.dir.clone(), one.capacity);
    let look = move |steps: &Steps| {
        let place = place_of(&dir);
        steps.step();
        let folder = DiskFolder::open(&dir, &options).map_err(|error| {
            let by_disk = error.is_of_the_disk();
            NotOpened { why: chain(&error), by_disk }
        });
        steps.step();
        let identity = fs::metadata(&dir).ok().map(|folder| (folder.dev(), folder.ino()));
        steps.step();
        if let Ok(folder) = &folder {
            say_less_room(folder, &dir, capacity);
        }
        Found { place, identity, folder }
    };
    let not_found = |why| Found { place: one.dir.clone(), identity: None, folder: Err(why) };
    match in_steps(limit, look).await {
        Ok(found) => found,
        Err(late) => not_found(NotOpened { why: chain(&late), by_disk: true }),
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

/// Why a path is not open.
struct NotOpened {
    why: String,
    /// It is not that somebody named the wrong folder.
    by_disk: bool,
}

async fn open_path(
    owner: Owner,
    folder: DiskFolder,
    settings: PathSettings,
    failed: Arc<HashSet<UseId>>,
) -> Result<(Arc<SsdPath>, Adoption), NotOpened> {
    SsdPath::open(owner, Arc::new(folder), settings, failed).await.map_err(|error| {
        let by_disk = error.is_of_the_disk();
        NotOpened { why: chain(&error), by_disk }
    })
}

/// What the ssd tier needs of this process.
struct SsdHost {
    state: Arc<StateDir>,
    /// How each is read and written.
    paths: HashMap<PathBuf, DiskOptions>,
    /// Held while the list of failed uses is read and written.
    noting: Mutex<()>,
}

impl PathHost for SsdHost {
    fn open(&self, dir: &Path) -> io::Result<Arc<dyn Folder>> {
        let options = self.paths.get(dir).ok_or(io::ErrorKind::NotFound)?;
        match DiskFolder::open(dir, options) {
            Ok(folder) => Ok(Arc::new(folder)),
            Err(error @ OpenError::InUse { holder, .. }) => {
                // The lock of a folder is that of its last use until its last request has ended.
                let of_this = holder.is_none_or(|holder| holder == std::process::id());
                let kind = match of_this {
                    true => io::ErrorKind::ResourceBusy,
                    false => io::ErrorKind::AlreadyExists,
                };
                Err(io::Error::new(kind, error))
            }
            Err(error) => Err(io::Error::other(chain(&error))),
        }
    }

    fn note_failed(&self, uses: &[UseId]) -> io::Result<()> {
        let _alone = self.noting.lock();
        self.state.note_failed(uses)
    }
}

/// The one name of a folder, whatever links and detours its path takes: of that part of it which is there.
fn place_of(dir: &Path) -> PathBuf {
    let there = dir.ancestors().find_map(|above| Some((above, fs::canonicalize(above).ok()?)));
    let rest = there.and_then(|(above, place)| Some(place.join(dir.strip_prefix(above).ok()?)));
    // What is all there gets no separator at its end.
    rest.map_or_else(|| dir.to_owned(), |place| place.components().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_lie_in_each_other_are_refused_by_the_names_of_their_keys() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        let found = |name: &str| {
            fs::create_dir_all(root.join(name)).unwrap();
            let meta = fs::metadata(root.join(name)).unwrap();
            let folder = Err(NotOpened { why: String::new(), by_disk: true });
            Found { place: root.join(name), identity: Some((meta.dev(), meta.ino())), folder }
        };
        let said = |names: &[&str], state: &str| {
            let one =
                |name: &&str| SsdPathConfig { dir: root.join(name), ..SsdPathConfig::default() };
            let all: Vec<_> = names.iter().map(one).collect();
            let found: Vec<_> = names.iter().map(|name| found(name)).collect();
            all_apart(&all, &found, &root.join(state)).map_err(|error| error.to_string())
        };
        assert_eq!(said(&["one", "one-more", "state/ssd"], "state"), Ok(()));
        let nested = [(["one", "one/more"], 1), (["one/more", "one"], 1)];
        for (names, at) in nested {
            let why = said(&names, "state").unwrap_err();
            assert!(
                why.contains(&format!("ssd.path[{at}].dir")) && why.contains("ssd.path[0]"),
                "{why}"
            );
        }
        for state in ["one", "one/state"] {
            let why = said(&["one"], state).unwrap_err();
            assert!(why.contains("ssd.path[0].dir") && why.contains("state_dir"), "{why}");
        }
    }
}
