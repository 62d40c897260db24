//! What can end a bench before its table.

use larder_client::{ClientError, TransferError};
use std::{io, path::PathBuf};

/// Why a bench ended early. A figure that cannot be trusted is never printed: wrong bytes end it too.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    /// A program that the bench starts beside itself is not there.
    #[error("{0} is not built: cargo build --release --workspace")]
    NotBuilt(PathBuf),
    /// A program that the bench measures beside is not on this machine.
    #[error("{program} is not installed, and the bench measures beside it; try: {install}")]
    NotInstalled {
        /// Which.
        program: &'static str,
        /// How to get it.
        install: &'static str,
    },
    /// A child process did not come up, or ended.
    #[error("{what} {state}; the end of its log:\n{log}")]
    Child {
        /// Which.
        what: &'static str,
        /// What it did.
        state: String,
        /// The end of what it wrote to standard error.
        log: String,
    },
    /// Something was received that was not sent.
    #[error("wrong bytes: {0}")]
    WrongBytes(#[from] crate::content::WrongBytes),
    /// Our side answered otherwise than it should.
    #[error("{doing}: {answer}")]
    Answer {
        /// What was asked.
        doing: &'static str,
        /// What came.
        answer: String,
    },
    /// A call of the client library.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A transfer.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// A call of a master.
    #[error("{doing}: {status}")]
    Master {
        /// What was asked.
        doing: &'static str,
        /// What came.
        status: Box<tonic::Status>,
    },
    /// A request trace.
    #[error(transparent)]
    Trace(#[from] crate::replay::TraceError),
    /// A file, socket or process.
    #[error("{doing}")]
    Io {
        /// What was tried.
        doing: String,
        /// Why not.
        source: io::Error,
    },
    /// A task of the bench panicked.
    #[error("a client of the bench")]
    Panicked(#[from] tokio::task::JoinError),
    /// Someone asked for the end.
    #[error("interrupted")]
    Interrupted,
}

impl BenchError {
    /// An IO error with what was tried.
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }
}
