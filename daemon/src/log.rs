//! Logs: `tracing` events to standard error, as text for people or as JSON for machines.

use std::{fmt, io, io::IsTerminal, panic, str::FromStr};

use tracing_subscriber::{EnvFilter, fmt as format, util::TryInitError};
use tracing_subscriber::{Layer, Registry, layer::SubscriberExt, util::SubscriberInitExt};

use crate::run::panic_message;

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
        /// `debug,h2=info`.
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
    "a level (error, warn, info, debug, trace, off) or a list like debug,h2=info"
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
        let message = panic_message(panic.payload());
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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// What was logged.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(config: &LogConfig, work: impl FnOnce()) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let layer = layer(config, move || writer.clone(), false);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), work);
        let bytes = lines.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn the_filter_decides_by_level_and_module() {
        let level = "warn,larder_daemon::log=debug".parse().unwrap();
        let config = LogConfig { level, ..LogConfig::default() };
        let text = logged(&config, || {
            tracing::debug!("in this module");
            tracing::info!(target: "elsewhere", "too much");
            tracing::warn!(target: "elsewhere", "worth a look");
        });
        assert!(text.contains("in this module") && text.contains("worth a look"), "{text}");
        assert!(!text.contains("too much"), "{text}");
    }

    #[test]
    fn json_is_one_object_a_line_with_fields_of_their_own() {
        let config = LogConfig { format: LogFormat::Json, ..LogConfig::default() };
        let text = logged(&config, || tracing::info!(node = 7, "listening"));
        let event: serde_json::Value = serde_json::from_str(text.trim_end()).unwrap();
        assert_eq!((&event["node"], &event["message"]), (&7.into(), &"listening".into()));
        assert_eq!(event["level"], "INFO");
    }

    #[test]
    fn a_misspelt_level_is_refused_instead_of_silencing_the_log() {
        for text in ["inof", "info,larder_store_node", "larder=verbose", "", "info,"] {
            assert!(text.parse::<LogFilter>().is_err(), "{text:?}");
        }
        for text in ["info", "off", "info,larder_store_node=debug", "larder[put{key=1}]=trace"] {
            assert_eq!(text.parse::<LogFilter>().unwrap().to_string(), text);
        }
    }
}
