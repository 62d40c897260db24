//! `larder-demo MODEL.gguf REPORT.json`: see `larder_tests::demo`.
//!
//! However it ends, Ctrl-C included, no process and no folder of it is left.
#![forbid(unsafe_code)]

use larder_tests::demo::{self, Step};
use std::{io, path::Path, process::ExitCode, time::Duration};
use tokio::signal::unix::{SignalKind, signal};

const ADVICE: &str = "\
demo: nothing is left running. The demo takes about 2 GiB of memory and two cores: on a busy machine try
demo: again when it is idle; otherwise the lines above say what is wrong.";

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, report] = arguments.as_slice() else {
        eprintln!("usage: larder-demo MODEL.gguf REPORT.json (make demo does all the set-up)");
        return ExitCode::from(2);
    };
    match run(Path::new(model), Path::new(report)).await {
        Ok(None) => {
            eprintln!("demo: interrupted");
            ExitCode::from(130)
        }
        Ok(Some(steps)) if steps.iter().all(|step| step.output_equal) => ExitCode::SUCCESS,
        Ok(Some(_)) => {
            eprintln!("demo: an output differs from the recomputed one");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("demo: {error}\n{ADVICE}");
            ExitCode::FAILURE
        }
    }
}

/// The steps; none when it was interrupted.
async fn run(model: &Path, report: &Path) -> io::Result<Option<Vec<Step>>> {
    let (mut interrupt, mut terminate) =
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    // Removed after the processes that write to it, which end with the demo's future.
    let folder = tempfile::tempdir()?;
    let outcome = tokio::select! {
        steps = demo::run(model, folder.path(), report) => steps.map(Some),
        _ = interrupt.recv() => Ok(None),
        _ = terminate.recv() => Ok(None),
    };
    remove(&folder.keep()).await?;
    outcome
}

/// Removes a folder. A process that was killed may end a moment later, and until then write there.
async fn remove(folder: &Path) -> io::Result<()> {
    let mut tries = 0;
    loop {
        match std::fs::remove_dir_all(folder) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && tries < 100 => {
                tries += 1;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            outcome => return outcome,
        }
    }
}
