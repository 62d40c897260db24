//! The metrics of this process, kept by one global recorder.

use std::{future::Future, time::Duration};

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

/// Always 1; its label `version` tells what runs.
pub const BUILD_INFO: &str = "larder_daemon_build_info";

/// Bounds of all histograms whose name ends in `_seconds`: 10 us to 10 s, three a decade. A local
/// hit takes 10 us, a cold prompt seconds.
const SECONDS_BUCKETS: [f64; 19] = [
    0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
    0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
];

/// Bounds of all histograms whose name ends in `_bytes`: 1 KiB to 1 GiB, in steps of 4.
const BYTES_BUCKETS: [f64; 11] = [
    1024.0,
    4096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
    268_435_456.0,
    1_073_741_824.0,
];

/// How often samples of histograms are folded into their buckets. Between two rounds they take
/// memory.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Renders what was counted. Clones share one recorder.
#[derive(Clone, Debug)]
pub struct Metrics {
    handle: PrometheusHandle,
}

/// A recorder cannot be installed.
#[derive(Debug, thiserror::Error)]
#[error("install the recorder of metrics")]
pub struct InstallError(#[from] BuildError);

impl Metrics {
    /// Installs the recorder of this process. Once only.
    ///
    /// # Errors
    /// There is a recorder already.
    pub fn install() -> Result<Self, InstallError> {
        let metrics = Self { handle: builder()?.install_recorder()? };
        metrics::describe_gauge!(BUILD_INFO, "Always 1; the label `version` tells what runs");
        metrics::gauge!(BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
        Ok(metrics)
    }

    /// All metrics as Prometheus text.
    pub fn render(&self) -> String {
        self.handle.render()
    }

    /// Keeps the recorder's memory bounded until `stop`. Its own task, because nobody may scrape.
    pub fn upkeep(&self, stop: CancellationToken) -> impl Future<Output = ()> + Send + 'static {
        let handle = self.handle.clone();
        async move {
            let mut ticks = interval(UPKEEP_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let rounds = async {
                loop {
                    ticks.tick().await;
                    handle.run_upkeep();
                }
            };
            stop.run_until_cancelled(rounds).await;
        }
    }

    #[cfg(test)]
    pub(crate) fn of_test() -> (Self, metrics_exporter_prometheus::PrometheusRecorder) {
        let recorder = builder().unwrap().build_recorder();
        (Self { handle: recorder.handle() }, recorder)
    }
}

fn builder() -> Result<PrometheusBuilder, BuildError> {
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS_BUCKETS)?
        .set_buckets_for_metric(Matcher::Suffix("_bytes".to_owned()), &BYTES_BUCKETS)
}
