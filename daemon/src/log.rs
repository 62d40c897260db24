//! Logs: `tracing` events to standard error, as text for people or as JSON for machines.

use std::{fmt, io, io::IsTerminal, panic, str::FromStr};

use tracing_subscriber::{EnvFilter, fmt as format, util::TryInitError};
use tracing_subscriber::{Layer, Registry, layer::SubscriberExt, util::SubscriberInitExt};

crate::choices! {
    /// How a log event is written.
    pub enum LogFormat {
        /// One line for people, in colour on a terminal.
        Text = "text",
        /// One JSON object a line.
        Json = "json",
    }
}

crate::settings! {
    /// The `[log]` table: what is logged, and how. Logs go to standard error.
    pub struct LogConfig {
        /// Least severe level to log (error, warn, info, debug, trace, off); also by module, as in
        /// `info,larder_store_node=debug`.
        pub level: LogFilter = LogFilter::info(),
        /// `text` for people, `json` for machines.
        pub format: LogFormat = LogFormat::Text,
    }
}

/// Which events are logged: a level, or levels by module, in the syntax of `RUST_LOG`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFilter(String);

/// A text that is no filter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no level (error, warn, info, debug, trace, off) and no module=level")]
pub struct FilterError(String);

const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

impl LogFilter {
    /// Everything from `info` on.
    pub fn info() -> Self {
        Self("info".to_owned())
    }
}

impl FromStr for LogFilter {
    type Err = FilterError;

    /// Stricter than the filter itself, which reads a misspelt level (`inof`) as the name of a
    /// module and then logs nothing else.
    fn from_str(text: &str) -> Result<Self, FilterError> {
        for directive in text.split(',') {
            let level = directive.rsplit('=').next().unwrap_or(directive);
            if !LEVELS.contains(&level) {
                return Err(FilterError(directive.to_owned()));
            }
        }
        EnvFilter::try_new(text).map_err(|_| FilterError(text.to_owned()))?;
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

crate::text_setting!(
    LogFilter,
    "LEVEL",
    "a level (error, warn, info, debug, trace, off) or a list like info,larder_store_node=debug"
);

/// Sends the events of this process, and panics as error events, to standard error.
///
/// # Errors
/// Somebody installed a subscriber before.
pub fn install(config: &LogConfig) -> Result<(), TryInitError> {
    let layer = layer(config, io::stderr, io::stderr().is_terminal());
    tracing_subscriber::registry().with(layer).try_init()?;
    panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let message = panic.payload_as_str().unwrap_or("(no message)");
        tracing::error!(place, message, "panicked");
    }));
    Ok(())
}

fn layer<W>(config: &LogConfig, writer: W, colours: bool) -> impl Layer<Registry>
where
    W: for<'w> format::MakeWriter<'w> + Send + Sync + 'static,
{
    let base = format::layer().with_writer(writer).with_ansi(colours);
    let layer = match config.format {
        LogFormat::Text => base.boxed(),
        LogFormat::Json => base.json().flatten_event(true).boxed(),
    };
    layer.with_filter(EnvFilter::new(&config.level.0))
}
