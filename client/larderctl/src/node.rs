//! `node`: audits of a node's catalog, scrubs of its ssd paths, and taking a path out of use and in again.

use crate::{
    cli::{AuditArgs, NodeCommand, PathCommand, ScrubArgs},
    ctl::{Ctl, refused},
    error::CtlError,
    output::{Section, Table, Tone, count, counted, plural, size, span},
};
use larder_proto::control::{self, ScrubProgress};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    io::{self, IsTerminal},
    path::Path,
    time::Duration,
};
use tokio::time::{Instant, timeout};

/// Between two lines of progress where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// `larderctl node`.
pub(crate) async fn node(ctl: &Ctl, command: &NodeCommand) -> Result<(), CtlError> {
    match command {
        NodeCommand::Audit(args) => audit(ctl, args).await,
        NodeCommand::Scrub(args) => scrub(ctl, args).await,
        NodeCommand::Path { command: PathCommand::Fence { node, dir, reason, yes, .. } } => {
            fence(ctl, node, dir, reason, *yes).await
        }
        NodeCommand::Path { command: PathCommand::Readmit { node, dir, yes, .. } } => {
            readmit(ctl, node, dir, *yes).await
        }
    }
}

#[derive(Debug, Serialize)]
struct Audited {
    node: String,
    blocks: u64,
    holes: u64,
    empty_parts: u64,
    miscounted: u64,
}

async fn audit(ctl: &Ctl, args: &AuditArgs) -> Result<(), CtlError> {
    let AuditArgs { node, output: _ } = args;
    let (info, mut service) = ctl.node(node).await?;
    let reply = answer(ctl, &info.name, service.audit(control::AuditRequest {})).await?;
    let control::AuditReply { blocks, holes, empty_parts, miscounted } = reply;
    let audited = Audited { node: info.name, blocks, holes, empty_parts, miscounted };
    ctl.out.show(&audited, |audited| {
        let headers = ["node", "blocks>", "holes>", "empty parts>", "miscounted>"];
        let mut table = Table::new(&headers, "nothing was audited");
        let Audited { node, blocks, holes, empty_parts, miscounted } = audited;
        let tone = if holes + empty_parts + miscounted == 0 { Tone::Good } else { Tone::Bad };
        let counts = [blocks, holes, empty_parts, miscounted].map(|n| count(*n));
        let [blocks, holes, empty_parts, miscounted] = counts;
        table.row(tone, [node.clone(), blocks, holes, empty_parts, miscounted]);
        vec![Section::Table(table)]
    })?;
    match holes + empty_parts + miscounted {
        0 => Ok(()),
        found => Err(CtlError::Failed(format!("{}: {found} found that must not be", audited.node))),
    }
}

#[derive(Debug, Serialize)]
struct Scrubbed {
    node: String,
    paths: Vec<ScrubbedPath>,
}

#[derive(Debug, Serialize)]
struct ScrubbedPath {
    path: String,
    segments: u64,
    segments_total: u64,
    records: u64,
    bytes: u64,
    damaged_records: u64,
    damaged_segments: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl From<ScrubProgress> for ScrubbedPath {
    fn from(progress: ScrubProgress) -> Self {
        Self {
            path: progress.path,
            segments: progress.segments,
            segments_total: progress.segments_total,
            records: progress.records,
            bytes: progress.bytes,
            damaged_records: progress.damaged_records,
            damaged_segments: progress.damaged_segments,
            error: (!progress.error.is_empty()).then_some(progress.error),
        }
    }
}

async fn scrub(ctl: &Ctl, args: &ScrubArgs) -> Result<(), CtlError> {
    let ScrubArgs { node, path, rate, output: _ } = args;
    let bytes_per_second = rate.map_or(0, |rate| rate.as_u64());
    if rate.is_some() && bytes_per_second == 0 {
        return Err(CtlError::Usage("--rate = 0B: must be above 0B".to_owned()));
    }
    let path = path.as_ref().map(|path| text(path)).transpose()?.unwrap_or_default();
    let (info, mut service) = ctl.node(node).await?;
    let late = || {
        let limit = span(ctl.timeout);
        CtlError::Unreachable(format!("{}: heard nothing for {limit} (--timeout)", info.name))
    };
    let asked = service.scrub(control::ScrubRequest { path, bytes_per_second });
    let answer = timeout(ctl.timeout, asked).await.map_err(|_| late())?;
    let mut stream = answer.map_err(|status| refused(&info.name, &status))?.into_inner();
    let mut paths: BTreeMap<String, ScrubProgress> = BTreeMap::new();
    let mut shown = Shown::default();
    loop {
        // A node says how far it is every half second, whatever the rate.
        let next = timeout(ctl.timeout, stream.message()).await.map_err(|_| late())?;
        let Some(progress) = next.map_err(|status| refused(&info.name, &status))? else { break };
        shown.show(&progress);
        paths.insert(progress.path.clone(), progress);
    }
    shown.end();
    let ended = paths.values().filter(|path| path.done).count();
    let of_all = counted(paths.len(), "path");
    let paths = paths.into_values().map(ScrubbedPath::from).collect();
    let scrubbed = Scrubbed { node: info.name.clone(), paths };
    ctl.out.show(&scrubbed, scrubbed_for_people)?;
    if ended < scrubbed.paths.len() {
        let why = format!("{}: it stopped after {ended} of {of_all}", info.name);
        return Err(CtlError::Failed(why));
    }
    verdict(&scrubbed)
}

/// Whether all is well.
fn verdict(scrubbed: &Scrubbed) -> Result<(), CtlError> {
    let records: u64 = scrubbed.paths.iter().map(|path| path.damaged_records).sum();
    let segments: u64 = scrubbed.paths.iter().map(|path| path.damaged_segments).sum();
    let mut why = Vec::new();
    if records + segments > 0 {
        let (records_s, segments_s) = (plural(records), plural(segments));
        why.push(format!(
            "damage was found and withdrawn: {records} record{records_s}, {segments} footer{segments_s}"
        ));
    }
    let errors = scrubbed.paths.iter().filter_map(|path| Some((path, path.error.as_ref()?)));
    why.extend(errors.map(|(path, error)| format!("{}: {error}", path.path)));
    match why.is_empty() {
        true => Ok(()),
        false => Err(CtlError::Failed(why.join("; "))),
    }
}

/// Progress on standard error, so that the answer stays alone on standard output.
#[derive(Debug, Default)]
struct Shown {
    last_line: Option<Instant>,
    drawn: bool,
}

impl Shown {
    fn show(&mut self, progress: &ScrubProgress) {
        let line = progress_line(progress);
        if io::stderr().is_terminal() {
            eprint!("\r\x1b[K{line}");
            self.drawn = true;
        } else if self.last_line.is_some_and(|last| last.elapsed() >= LINE_EVERY) {
            eprintln!("{line}");
            self.last_line = Some(Instant::now());
        } else {
            self.last_line.get_or_insert_with(Instant::now);
        }
    }

    fn end(&self) {
        if self.drawn {
            eprint!("\r\x1b[K");
        }
    }
}

fn progress_line(progress: &ScrubProgress) -> String {
    const WIDTH: u64 = 20;
    let ScrubProgress { path, segments, segments_total, bytes, .. } = progress;
    let done = if *segments_total == 0 { WIDTH } else { segments * WIDTH / segments_total };
    let bar: String = (0..WIDTH).map(|at| if at < done { '#' } else { '.' }).collect();
    let damaged = progress.damaged_records + progress.damaged_segments;
    let (bytes, path) = (size(*bytes), path.replace(char::is_control, "?"));
    format!("{path} [{bar}] {segments} of {segments_total} segments, {bytes}, {damaged} damaged")
}

fn scrubbed_for_people(scrubbed: &Scrubbed) -> Vec<Section> {
    let columns =
        ["path", "segments>", "records>", "size>", "damaged records>", "damaged footers>", "ended"];
    let mut table = Table::new(&columns, "the node has no ssd path");
    for path in &scrubbed.paths {
        let tone = match (path.damaged_records + path.damaged_segments, &path.error) {
            (0, None) => Tone::Good,
            _ => Tone::Bad,
        };
        let segments = format!("{} of {}", count(path.segments), count(path.segments_total));
        table.row(
            tone,
            [
                path.path.clone(),
                segments,
                count(path.records),
                size(path.bytes),
                count(path.damaged_records),
                count(path.damaged_segments),
                path.error.clone().unwrap_or_else(|| "complete".to_owned()),
            ],
        );
    }
    vec![Section::Table(table)]
}

#[derive(Debug, Serialize)]
struct Fenced {
    node: String,
    path: String,
    fenced_because: String,
    withdrawn_copies: u64,
}

async fn fence(ctl: &Ctl, node: &str, dir: &Path, reason: &str, yes: bool) -> Result<(), CtlError> {
    let path = text(dir)?;
    if !yes {
        return Err(CtlError::Usage(format!(
            "all copies on {path} are given up when it is fenced; say --yes to do it"
        )));
    }
    let (info, mut service) = ctl.node(node).await?;
    let request = control::FencePathRequest { path: path.clone(), reason: reason.to_owned() };
    let reply = answer(ctl, &info.name, service.fence_path(request)).await?;
    let control::FencePathReply { withdrawn, fenced_because } = reply;
    let fenced = Fenced { node: info.name, path, fenced_because, withdrawn_copies: withdrawn };
    ctl.out.show(&fenced, |fenced| {
        let Fenced { node, path, fenced_because, withdrawn_copies: withdrawn } = fenced;
        let copies = if *withdrawn == 1 { "copy" } else { "copies" };
        let withdrawn = count(*withdrawn);
        vec![Section::Text(format!(
            "{path} of {node} is fenced ({fenced_because}); {withdrawn} {copies} withdrawn"
        ))]
    })
}

#[derive(Debug, Serialize)]
struct Readmitted {
    node: String,
    path: String,
}

async fn readmit(ctl: &Ctl, node: &str, dir: &Path, yes: bool) -> Result<(), CtlError> {
    let path = text(dir)?;
    if !yes {
        return Err(CtlError::Usage(format!(
            "{path} is emptied when it is taken in again; say --yes to do it"
        )));
    }
    let (info, mut service) = ctl.node(node).await?;
    let request = control::ReadmitPathRequest { path: path.clone() };
    answer(ctl, &info.name, service.readmit_path(request)).await?;
    let readmitted = Readmitted { node: info.name, path };
    ctl.out.show(&readmitted, |Readmitted { node, path }| {
        vec![Section::Text(format!("{path} of {node} is in use again, and empty"))]
    })
}

async fn answer<T>(
    ctl: &Ctl,
    node: &str,
    asked: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, CtlError> {
    let asked = async { asked.await.map_err(|status| refused(node, &status)) };
    Ok(ctl.within(node, asked).await?.into_inner())
}

/// A folder, as it is named on the wire.
fn text(dir: &Path) -> Result<String, CtlError> {
    let name = dir.to_str().map(str::to_owned);
    name.ok_or_else(|| CtlError::Usage(format!("{}: must be UTF-8", dir.display())))
}
