//! `put` and `get`: files as blocks, to try a cluster out.
//!
//! A file is a chain of blocks of one model version, each with one part: first a manifest whose key
//! comes from the name alone, then the pieces, whose keys hang on the digest of the file. Pieces are put
//! before the manifest, so a manifest that is seen means that all pieces were stored; and pieces of two files
//! never mix, whatever became of an earlier file of the same name. A name keeps its bytes for as long as
//! its manifest is held.

mod manifest;
mod room;

use crate::{
    ctl::{Ctl, Names},
    error::{CtlError, Doing},
    output::{Section, counted, print, size, span},
    status::Seen,
};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use larder_client::{
    ClientError,
    cluster::{Fetched, NodeChoice, address_of},
    connection::PutOutcome,
    error::Reaction,
    local::PartAttributes,
    peers::NodeAddress,
};
use larder_proto::{BlockKey, ModelVersion, NodeId, PartNumber, part::PartRef};
use manifest::{FILE_LIMIT, Manifest, PIECE_LEN, model, root_of};
use serde::Serialize;
use std::{
    collections::BTreeSet,
    fs::{File, Permissions},
    io::{self, Read, Write},
    os::unix::fs::PermissionsExt,
    path::Path,
    time::Duration,
};
use tokio::time::{Instant, MissedTickBehavior, interval};

/// Pieces that are fetched ahead.
const AHEAD: usize = 4;
/// How long `put` waits for masters to learn of the blocks; the bound of P5 many times over.
const LISTED_WITHIN: Duration = Duration::from_secs(2);
/// The same of blocks that were there before: what is not listed by then is put again.
const LISTED_SOON: Duration = Duration::from_millis(200);
/// How often blocks that a node evicts meanwhile are put again. The first of them takes the place of what others had
/// there; what is gone after the second is gone for a reason that lasts.
const ROUNDS: usize = 2;
const PART: PartNumber = PartNumber(0);

#[derive(Debug, Serialize)]
struct Stored {
    name: String,
    /// `stored`, or `exists` where the very file was there already.
    outcome: &'static str,
    bytes: u64,
    digest: String,
    /// The nodes that hold it, as far as this command knows.
    nodes: Vec<String>,
    /// Whether a master lists all of it already.
    listed: bool,
    model: String,
    keys: Vec<String>,
}

/// `larderctl put`.
pub(crate) async fn put(
    ctl: &Ctl,
    path: &Path,
    name: &str,
    node: Option<&str>,
) -> Result<(), CtlError> {
    let at_file = |source| CtlError::File { what: "read", path: path.to_owned(), source };
    let manifest = describe(path, name).map_err(at_file)?;
    let choice = match node {
        None => NodeChoice::MostRoom,
        Some(node) => {
            let found = ctl.within("find the node", ctl.nodes(Some(node))).await?;
            let ids = found.iter().map(|node| address_of(node).doing("read the master's answer"));
            let ids = ids.collect::<Result<Vec<_>, _>>()?;
            NodeChoice::Named(ids.first().map(|it| it.node.to_string()).unwrap_or_default())
        }
    };
    let stored = match held(ctl, name).await? {
        Some((held, source)) if held == manifest => exists(ctl, path, &manifest, source).await?,
        Some((held, _)) => return Err(taken(&held)),
        None => store(ctl, path, &manifest, &choice).await?,
    };
    ctl.out.show(&stored, stored_for_people)
}

fn taken(held: &Manifest) -> CtlError {
    let (_, root) = root_of(&held.name);
    CtlError::Failed(format!(
        "the name {} is taken by another file of {}; `larderctl evict --key {root} --descendants --yes` \
         frees it, and what it takes",
        held.name,
        size(held.len)
    ))
}

/// Reads a file once, for its length and digest.
fn describe(path: &Path, name: &str) -> io::Result<Manifest> {
    let mut hasher = blake3::Hasher::new();
    let mut file = File::open(path)?;
    let (mut buffer, mut len) = (vec![0; 1 << 20], 0u64);
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => {
                hasher.update(&buffer[..n]);
                len += n as u64;
            }
        }
        if len > FILE_LIMIT {
            let limit = size(FILE_LIMIT);
            return Err(io::Error::other(format!("the file is longer than {limit}, the limit")));
        }
    }
    Ok(Manifest { name: name.to_owned(), len, digest: hasher.finalize(), piece_len: PIECE_LEN })
}

/// The manifest that is held under a name, and who gave it.
async fn held(ctl: &Ctl, name: &str) -> Result<Option<(Manifest, NodeId)>, CtlError> {
    let (_, root) = root_of(name);
    let got = ctl.client.get(model().version(), root, PART, ctl.timeout).await;
    let Some(Fetched { bytes, source, .. }) = got.doing(format!("look for {name}"))? else {
        return Ok(None);
    };
    let manifest = Manifest::decode(&bytes).map_err(|error| {
        CtlError::Failed(format!("what is held under {name} is no file of this program: {error}"))
    })?;
    match manifest.name == name {
        true => Ok(Some((manifest, source))),
        false => Err(CtlError::Failed(format!("what is held under {name} has another name"))),
    }
}

/// Puts a file on the first node of the choice that takes all of it.
async fn store(
    ctl: &Ctl,
    path: &Path,
    manifest: &Manifest,
    choice: &NodeChoice,
) -> Result<Stored, CtlError> {
    let ready = async {
        let nodes = room::candidates(ctl, manifest, choice).await?;
        ctl.client.register_model(&model()).await.doing("register the model raw")?;
        Ok(nodes)
    };
    let mut refused = None;
    for node in ctl.within("prepare the put", ready).await? {
        match store_on(ctl, path, manifest, &node.address).await {
            Ok(()) => {
                complete(ctl, path, manifest, &node).await?;
                let listed = all_listed(ctl, &manifest.keys(), LISTED_WITHIN).await?;
                return stored(ctl, manifest, "stored", node.address.node, listed).await;
            }
            Err(error) if may_fit_elsewhere(&error) => refused = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(refused.unwrap_or_else(|| CtlError::Failed("no node takes puts".to_owned())))
}

/// Puts again what the node has evicted of the file meanwhile: a node that makes room lets go of more than it needs,
/// and may well choose what came first.
async fn complete(
    ctl: &Ctl,
    path: &Path,
    manifest: &Manifest,
    node: &room::Candidate,
) -> Result<(), CtlError> {
    let mut gone = room::gone(ctl, manifest, node).await?;
    for _ in 0..ROUNDS {
        if gone.is_empty() {
            return Ok(());
        }
        put_blocks(ctl, path, manifest, &node.address, &gone).await?;
        gone = room::gone(ctl, manifest, node).await?;
    }
    room::all_there(manifest, node, &gone)
}

/// The very file is held under its name already. What is not held of it any more is put where its manifest is.
async fn exists(
    ctl: &Ctl,
    path: &Path,
    manifest: &Manifest,
    node: NodeId,
) -> Result<Stored, CtlError> {
    if all_listed(ctl, &manifest.keys(), LISTED_SOON).await? {
        return stored(ctl, manifest, "exists", node, true).await;
    }
    let choice = NodeChoice::Named(node.to_string());
    let found = ctl.within("prepare the put", room::candidates(ctl, manifest, &choice)).await?;
    for there in found {
        complete(ctl, path, manifest, &there).await?;
    }
    let listed = all_listed(ctl, &manifest.keys(), LISTED_WITHIN).await?;
    stored(ctl, manifest, "stored", node, listed).await
}

/// Whether another node may take what this one did not.
fn may_fit_elsewhere(error: &CtlError) -> bool {
    match error {
        CtlError::Client { source: ClientError::Connect { .. }, .. } => true,
        CtlError::Client { source: ClientError::Transfer(error), .. } => {
            error.reaction() == Reaction::TryAnother
        }
        _ => false,
    }
}

/// Puts all pieces of a file, then its manifest.
async fn store_on(
    ctl: &Ctl,
    path: &Path,
    manifest: &Manifest,
    node: &NodeAddress,
) -> Result<(), CtlError> {
    let all: Vec<usize> = (0..manifest.keys().len()).collect();
    put_blocks(ctl, path, manifest, node, &all).await
}

/// Puts these blocks, the manifest last: who finds it finds the file. The whole file is read, so that a change of it is
/// seen.
async fn put_blocks(
    ctl: &Ctl,
    path: &Path,
    manifest: &Manifest,
    node: &NodeAddress,
    blocks: &[usize],
) -> Result<(), CtlError> {
    let at_file = |source| CtlError::File { what: "read", path: path.to_owned(), source };
    let mut file = File::open(path).map_err(at_file)?;
    let mut hasher = blake3::Hasher::new();
    let keys = manifest.keys();
    for piece in 0..manifest.pieces() {
        let len = usize::try_from(manifest.len_of(piece)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; len];
        file.read_exact(&mut bytes).map_err(at_file)?;
        hasher.update(&bytes);
        if blocks.contains(&(piece + 1)) {
            put_block(ctl, node, &keys, piece + 1, bytes.into()).await?;
        }
    }
    if hasher.finalize() != manifest.digest {
        let path = path.to_owned();
        return Err(CtlError::Content { path, rule: "must not change while it is put".to_owned() });
    }
    match blocks.contains(&0) {
        true => put_block(ctl, node, &keys, 0, manifest.encode().into()).await,
        false => Ok(()),
    }
}

async fn put_block(
    ctl: &Ctl,
    node: &NodeAddress,
    keys: &[BlockKey],
    block: usize,
    bytes: Bytes,
) -> Result<(), CtlError> {
    let ModelVersion { content, layout } = model().version();
    let part = PartRef { key: keys[block], layout, part: PART };
    let parent = block.checked_sub(1).map(|parent| keys[parent]);
    let attributes = PartAttributes { content, root: keys[0], parent, origin_hash: None };
    let what = || format!("put block {block} of {} on {}", keys.len(), node.address);
    let put = ctl.client.put(node, part, &attributes, bytes, ctl.timeout).await;
    match put.doing(what())? {
        PutOutcome::Stored(_) => Ok(()),
        // A piece is named after its bytes. A manifest of another file came between: say so.
        PutOutcome::Exists(_) if block > 0 => Ok(()),
        PutOutcome::Exists(_) => Err(CtlError::Failed(
            "the name was taken meanwhile; put again to see by what".to_owned(),
        )),
        PutOutcome::InProgress { producer, since } => Err(CtlError::Failed(format!(
            "{}: {producer} has been putting it for {}",
            what(),
            span(since)
        ))),
    }
}

async fn stored(
    ctl: &Ctl,
    manifest: &Manifest,
    outcome: &'static str,
    node: NodeId,
    listed: bool,
) -> Result<Stored, CtlError> {
    let keys = manifest.keys();
    let names = ctl.names().await?;
    Ok(Stored {
        name: manifest.name.clone(),
        outcome,
        bytes: manifest.len,
        digest: manifest.digest.to_hex().to_string(),
        nodes: vec![names.of(&node)],
        listed,
        model: model().version().to_string(),
        keys: keys.iter().map(ToString::to_string).collect(),
    })
}

/// Waits until a master knows who holds the blocks, so that a `get` right after finds them; whether it knows.
async fn all_listed(ctl: &Ctl, keys: &[BlockKey], within: Duration) -> Result<bool, CtlError> {
    let until = Instant::now() + within.min(ctl.timeout);
    let mut ticks = interval(Duration::from_millis(20));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let located = ctl.client.locate(model().version(), keys).await.doing("locate the file")?;
        let all = located.blocks.iter().all(|holders| !holders.is_empty());
        if all || Instant::now() >= until {
            return Ok(all);
        }
    }
}

fn stored_for_people(stored: &Stored) -> Vec<Section> {
    let Stored { name, outcome, bytes, nodes, listed, keys, digest, .. } = stored;
    let verb = if *outcome == "exists" { "is held already" } else { "is stored" };
    let on = nodes.join(", ");
    let blocks = counted(keys.len(), "block");
    let mut text = format!("{name} {verb}: {} in {blocks} on {on}\n", size(*bytes));
    text.push_str(&format!("digest {digest}\n"));
    if let Some(root) = keys.first() {
        text.push_str(&format!("key    {root}\n"));
    }
    if !listed {
        text.push_str("no master lists all of it yet: `larderctl status` shows what is wrong\n");
    }
    text.push_str(&format!("try    larderctl get {name} -o FILE"));
    vec![Section::Text(text)]
}

#[derive(Debug, Serialize)]
struct Brought {
    name: String,
    file: String,
    bytes: u64,
    digest: String,
    verified: bool,
    nodes: Vec<String>,
}

/// `larderctl get`.
pub(crate) async fn get(ctl: &Ctl, name: &str, to: &Path) -> Result<(), CtlError> {
    let Some((manifest, source)) = held(ctl, name).await? else {
        let tenant = ctl.tenant();
        let why = format!("no file is held under the name {name} (tenant {tenant})");
        return Err(absent(ctl, root_of(name).1, why).await);
    };
    let names = ctl.names().await?;
    let mut nodes = BTreeSet::from([names.of(&source)]);
    if to.as_os_str() == "-" {
        // Each piece was verified when it came; the report would only be in the way.
        return bring(ctl, &manifest, &mut nodes, &names, print).await;
    }
    let at_file = |source| CtlError::File { what: "write", path: to.to_owned(), source };
    let beside = to.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let Ok(there) = std::fs::symlink_metadata(to)
        && !there.is_file()
    {
        // The file takes the place of what is there; a device, link or folder is not replaced.
        let why = "it exists and is not a regular file; `-` writes to standard output";
        return Err(at_file(std::io::Error::new(std::io::ErrorKind::AlreadyExists, why)));
    }
    // Whoever may read what this user makes may read this, too, as with any program.
    let mut temporary = tempfile::Builder::new();
    temporary.permissions(Permissions::from_mode(0o666)); // Less the umask.
    let mut file = temporary.tempfile_in(beside).map_err(|error| {
        at_file(io::Error::new(
            error.kind(),
            format!("make a file in {}: {}", beside.display(), error.kind()),
        ))
    })?;
    bring(ctl, &manifest, &mut nodes, &names, |bytes| file.write_all(bytes).map_err(at_file))
        .await?;
    file.persist(to).map_err(|error| at_file(error.error))?;
    let brought = Brought {
        name: name.to_owned(),
        file: to.display().to_string(),
        bytes: manifest.len,
        digest: manifest.digest.to_hex().to_string(),
        verified: true,
        nodes: nodes.into_iter().collect(),
    };
    ctl.out.show(&brought, |brought| {
        let Brought { name, file, bytes, digest, nodes, .. } = brought;
        let (bytes, nodes) = (size(*bytes), nodes.join(", "));
        vec![Section::Text(format!(
            "{name} is in {file}: {bytes} from {nodes}, verified\ndigest {digest}"
        ))]
    })
}

/// Brings all pieces in order and holds the whole to its digest.
async fn bring(
    ctl: &Ctl,
    manifest: &Manifest,
    nodes: &mut BTreeSet<String>,
    names: &Names,
    mut write: impl FnMut(&[u8]) -> Result<(), CtlError>,
) -> Result<(), CtlError> {
    let name = &manifest.name;
    let keys = manifest.keys();
    let fetches = keys[1..].iter().enumerate().map(|(piece, key)| async move {
        let got = ctl.client.get(model().version(), *key, PART, ctl.timeout).await;
        let of = keys_of(manifest);
        let fetched = got.doing(format!("bring block {} of {of} of {name}", piece + 1))?;
        let Some(fetched) = fetched else {
            let block = piece + 1;
            let why = format!("block {block} of {of} of {name} is not held any more");
            return Err(absent(ctl, *key, why).await);
        };
        match fetched.bytes.len() as u64 == manifest.len_of(piece) {
            true => Ok(fetched),
            false => Err(CtlError::Failed(format!("block {} has a wrong length", piece + 1))),
        }
    });
    let mut hasher = blake3::Hasher::new();
    let mut fetches = stream::iter(fetches).buffered(AHEAD);
    while let Some(fetched) = fetches.try_next().await? {
        nodes.insert(names.of(&fetched.source));
        hasher.update(&fetched.bytes);
        write(&fetched.bytes)?;
    }
    match hasher.finalize() == manifest.digest {
        true => Ok(()),
        false => {
            Err(CtlError::Failed(format!("the digest of {name} is not the one it was put with")))
        }
    }
}

/// Why a block was not found: nobody holds it, or whoever may hold it is out of sight.
async fn absent(ctl: &Ctl, key: BlockKey, why: String) -> CtlError {
    match ctl.client.locate(model().version(), &[key]).await {
        Ok(located) => Seen::from(located.coverage).absent(why),
        Err(_) => CtlError::NotFound(why), // Masters answered a moment ago.
    }
}

/// Blocks of a file: its pieces and its manifest.
fn keys_of(manifest: &Manifest) -> usize {
    manifest.pieces() + 1
}
