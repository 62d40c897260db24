//! The reference: `fio`, a process of its own a leg.

use super::plan::Cell;
use crate::{child::TIED, error::BenchError, figures::Leg};
use serde::Deserialize;
use std::{io, path::PathBuf, process::Stdio, time::Duration};
use tokio::process::Command;

/// Its memory lies in huge pages (glibc since 2.35), as that of the tier does: with small ones both were measured to
/// reach about 0.6 of that.
const HUGE_PAGES: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");

/// `fio`, found.
#[derive(Debug)]
pub(super) struct Fio {
    version: String,
}

/// What is used of its report.
#[derive(Debug, Deserialize)]
struct Report {
    jobs: Vec<Job>,
}

#[derive(Debug, Deserialize)]
struct Job {
    error: i32,
    read: Moved,
    write: Moved,
    /// Per cent of the run time.
    usr_cpu: f64,
    sys_cpu: f64,
}

#[derive(Debug, Deserialize)]
struct Moved {
    io_bytes: u64,
    /// Milliseconds.
    runtime: u64,
}

impl Fio {
    /// Asks for its version.
    pub(super) async fn find() -> Result<Self, BenchError> {
        let asked = Command::new("fio").arg("--version").stdin(Stdio::null()).output().await;
        match asked {
            Ok(output) if output.status.success() => {
                Ok(Self { version: String::from_utf8_lossy(&output.stdout).trim().to_owned() })
            }
            Ok(output) => Err(failed(&output.stderr)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let (program, install) = ("fio", "apt-get install fio");
                Err(BenchError::NotInstalled { program, install })
            }
            Err(error) => Err(BenchError::io("run fio")(error)),
        }
    }

    /// For people.
    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// The same requests as ours, on these files of together `size` bytes, one file after the other.
    pub(super) async fn leg(
        &self,
        cell: Cell,
        length: Duration,
        files: &[PathBuf],
        size: u64,
    ) -> Result<Leg, BenchError> {
        let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        let Cell { op, len, depth } = cell;
        let this = std::env::current_exe().map_err(BenchError::io("find this program"))?;
        let running = Command::new(this)
            .args([TIED, "fio", "--name=larder-bench", "--ioengine=io_uring", "--direct=1"])
            .args(["--thread", "--time_based", "--allow_file_create=0", "--output-format=json"])
            .arg("--file_service_type=sequential")
            .arg(format!("--filename={}", files.join(":")))
            .arg(format!("--size={size}"))
            .arg(format!("--rw={}", op.name()))
            .arg(format!("--bs={len}"))
            .arg(format!("--iodepth={depth}"))
            .arg(format!("--runtime={}ms", length.as_millis()))
            .env(HUGE_PAGES.0, HUGE_PAGES.1)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = running.await.map_err(BenchError::io("run fio"))?;
        if !output.status.success() {
            return Err(failed(&output.stderr));
        }
        // Remarks may come before the report.
        let begin = output.stdout.iter().position(|byte| *byte == b'{').unwrap_or(0);
        let report: Report = serde_json::from_slice(&output.stdout[begin..])
            .map_err(|error| BenchError::io("read the report of fio")(error.into()))?;
        match report.jobs.as_slice() {
            [job] if job.error == 0 => Ok(job.leg()),
            _ => Err(failed(&output.stderr)),
        }
    }
}

impl Job {
    fn leg(&self) -> Leg {
        let wall = Duration::from_millis(self.read.runtime.max(self.write.runtime));
        Leg {
            bytes: self.read.io_bytes + self.write.io_bytes,
            wall,
            cpu_seconds: (self.usr_cpu + self.sys_cpu) / 100.0 * wall.as_secs_f64(),
            latencies: Vec::new(),
        }
    }
}

fn failed(stderr: &[u8]) -> BenchError {
    let log = String::from_utf8_lossy(stderr).trim().to_owned();
    BenchError::Child { what: "fio", state: "failed".to_owned(), log }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_gives_bytes_time_and_cpu() {
        let text = r#"{"fio version": "fio-3.33", "jobs": [{"jobname": "x", "error": 0,
            "read": {"io_bytes": 3000000000, "runtime": 1500, "bw": 9}, "write": {"io_bytes": 0, "runtime": 0},
            "usr_cpu": 4.0, "sys_cpu": 16.0}]}"#;
        let report: Report = serde_json::from_str(text).unwrap();
        let leg = report.jobs[0].leg();
        assert_eq!(leg.gb_per_second(), 2.0);
        assert!((leg.cpu_seconds - 0.3).abs() < 1e-9);
    }
}
