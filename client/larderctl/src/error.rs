//! What goes wrong in a command, and the exit code that says so to a script.

use larder_client::{ClientError, TransferError};
use std::{io, path::PathBuf};

/// Exit code: done.
pub(crate) const EXIT_OK: u8 = 0;
/// Exit code: refused, interrupted or only partly done.
pub(crate) const EXIT_FAILED: u8 = 1;
/// Exit code: the command line is wrong. Nothing was asked or changed.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Exit code: what was named (model, block, file, node) is not there.
pub(crate) const EXIT_NOT_FOUND: u8 = 3;
/// Exit code: no master, or a node that had to be asked, was reached in time; or what was not found may be on a node
/// that is out of sight.
pub(crate) const EXIT_UNREACHABLE: u8 = 4;

/// The exit codes, for `--help`.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0  ok
  1  failed: refused, or only partly done
  2  usage: the command line is wrong; nothing was asked or changed
  3  not found: the named model, block, file or node is not there
  4  unreachable: no master answered in time, or a node that had to be asked, or what was not found
     may be on a node that is out of sight";

/// Why a command ends badly.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CtlError {
    /// The command line asks for what makes no sense.
    #[error("{0}")]
    Usage(String),
    /// What was named is not there.
    #[error("{0}")]
    NotFound(String),
    /// Masters or nodes that had to answer did not.
    #[error("{0}")]
    Unreachable(String),
    /// Refused, or only partly done.
    #[error("{0}")]
    Failed(String),
    /// Masters or data planes.
    #[error("{what}")]
    Client {
        /// What was being done.
        what: String,
        /// What happened.
        source: ClientError,
    },
    /// A file of this host.
    #[error("{what} {}", path.display())]
    File {
        /// What was being done.
        what: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// What a file says.
    #[error("{}: {rule}", path.display())]
    Content {
        /// Which file.
        path: PathBuf,
        /// The place and the rule that it breaks.
        rule: String,
    },
    /// Standard output or input.
    #[error("{what}")]
    Terminal {
        /// What was being done.
        what: &'static str,
        /// What the system says.
        source: io::Error,
    },
}

impl CtlError {
    /// The exit code. No `_` arm: a new error has to choose.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => EXIT_USAGE,
            Self::NotFound(_) => EXIT_NOT_FOUND,
            Self::Unreachable(_) => EXIT_UNREACHABLE,
            Self::Client { source, .. } => code_of(source),
            Self::Failed(_) | Self::File { .. } | Self::Content { .. } | Self::Terminal { .. } => {
                EXIT_FAILED
            }
        }
    }
}

fn code_of(error: &ClientError) -> u8 {
    match error {
        ClientError::Masters(_) | ClientError::Connect { .. } => EXIT_UNREACHABLE,
        ClientError::Transfer(error) => match error {
            TransferError::Lost(_) | TransferError::Silent(_) | TransferError::Deadline(_) => {
                EXIT_UNREACHABLE
            }
            TransferError::Refused { .. }
            | TransferError::Damaged(_)
            | TransferError::Protocol(_)
            | TransferError::OtherPeer(_)
            | TransferError::NoRoom(_) => EXIT_FAILED,
        },
        ClientError::Answer { .. } | ClientError::Invalid(_) | ClientError::Refused(_) => {
            EXIT_FAILED
        }
    }
}

/// Says what was being done when a call of the client library went wrong.
pub(crate) trait Doing<T> {
    /// Names it in the error.
    fn doing(self, what: impl Into<String>) -> Result<T, CtlError>;
}

impl<T> Doing<T> for Result<T, ClientError> {
    fn doing(self, what: impl Into<String>) -> Result<T, CtlError> {
        self.map_err(|source| CtlError::Client { what: what.into(), source })
    }
}
