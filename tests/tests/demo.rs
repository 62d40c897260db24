//! How the demo ends when it cannot go on.
#![expect(clippy::unwrap_used, reason = "helpers of tests: what fails says where")]

use larder_tests::process::binary;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    time::timeout,
};

/// Far above what anything here takes.
const LIMIT: Duration = Duration::from_secs(120);

/// The demo, with its temporary files in `temp` and a model that is none.
fn start(temp: &Path, model: &Path) -> Child {
    let mut command = Command::new(binary("larder-demo").unwrap());
    command.args([model, &temp.with_extension("json")]).env("TMPDIR", temp);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.kill_on_drop(true).spawn().unwrap()
}

async fn end(child: Child) -> Output {
    timeout(LIMIT, child.wait_with_output()).await.unwrap().unwrap()
}

/// A folder for the demo's temporary files and one for the model.
fn folders() -> (TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (temp, model) = (dir.path().join("temp"), dir.path().join("model.gguf"));
    fs::create_dir(&temp).unwrap();
    (dir, temp, model)
}

/// Waits until no process has `text` in its command line: who was killed may take a moment to end.
async fn no_process_names(text: &str) {
    let names = || {
        let processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        let mut lines =
            processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
        lines.any(|line| String::from_utf8_lossy(&line).contains(text))
    };
    let ended = async {
        while names() {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, ended).await.unwrap();
}

#[tokio::test]
async fn a_demo_that_cannot_start_says_which_process_and_why_and_leaves_nothing() {
    let (_dir, temp, model) = folders();
    fs::write(&model, "no model").unwrap();
    let output = end(start(&temp, &model)).await;
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("demo: engine a: larder-engine did not start: it ended"), "{told}");
    assert!(told.contains("before it listened for http; the last it logged:\n"), "{told}");
    assert!(told.contains("it is no GGUF file"), "{told}");
    assert!(told.contains("demo: nothing is left running"), "{told}");
    assert_eq!(fs::read_dir(&temp).unwrap().count(), 0);
    no_process_names(temp.to_str().unwrap()).await;
}

#[tokio::test]
async fn an_interrupted_demo_leaves_no_process_and_no_folder() {
    let (_dir, temp, model) = folders();
    // An engine that opens it waits for a writer for ever.
    assert!(Command::new("mkfifo").arg(&model).status().await.unwrap().success());
    let mut demo = start(&temp, &model);
    let mut told = BufReader::new(demo.stderr.take().unwrap()).lines();
    let started = async { while !told.next_line().await.unwrap().unwrap().contains("engine a") {} };
    timeout(LIMIT, started).await.unwrap();
    assert_eq!(fs::read_dir(&temp).unwrap().count(), 1, "it has a folder now");

    let pid = demo.id().unwrap().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().await.unwrap().success());
    let output = end(demo).await;
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(fs::read_dir(&temp).unwrap().count(), 0);
    no_process_names(temp.to_str().unwrap()).await;
}
