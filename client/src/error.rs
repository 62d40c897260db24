//! What can go wrong between a program and Larder, and what to do about it.

use larder_proto::{
    checksum::Damaged,
    frame::{Code, Failed},
    wire::DecodeError,
};
use std::{io, time::Duration};

/// A request on a data-plane connection that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// The node refused it; the code decides what to do next.
    #[error("{code}: {reason}")]
    Refused {
        /// How.
        code: Code,
        /// Why, for people.
        reason: String,
    },
    /// Bytes arrived that do not match their sums. They were not handed on.
    #[error("damaged on the way or at its source: {0}")]
    Damaged(#[from] Damaged),
    /// The peer broke the protocol; the connection was closed.
    #[error("the peer broke the protocol: {0}")]
    Protocol(#[from] DecodeError),
    /// The connection ended before the answer.
    #[error("connection lost: {0}")]
    Lost(String),
    /// Nothing was heard for longer than the peer's limit.
    #[error("nothing heard from the peer for {0:?}")]
    Silent(Duration),
    /// The peer is not who it was expected to be (F05).
    #[error("{0}")]
    OtherPeer(String),
    /// There is no room to receive into.
    #[error("no room to receive {0} bytes")]
    NoRoom(u64),
    /// The deadline of the request passed.
    #[error("deadline of {0:?} passed")]
    Deadline(Duration),
}

/// What the caller of a transfer should do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaction {
    /// The part is not there: drop what is remembered of it; it is a miss.
    Miss,
    /// Ask another source now; this one may be tried again later.
    TryAnother,
    /// Ask the same source once more with verification at its end, then another.
    VerifyAtSource,
    /// Asking anybody again will not help.
    GiveUp,
}

impl TransferError {
    /// What to do. No `_` arm: a new error has to choose.
    pub fn reaction(&self) -> Reaction {
        match self {
            Self::Refused { code, .. } => match code {
                Code::Miss | Code::Gone | Code::Damaged => Reaction::Miss,
                // What one peer cannot do, being older, full of tenants or wrong, another may.
                Code::Busy
                | Code::Draining
                | Code::Internal
                | Code::Full
                | Code::Layout
                | Code::Limit
                | Code::Version => Reaction::TryAnother,
                Code::Denied => Reaction::GiveUp,
            },
            Self::Damaged(_) => Reaction::VerifyAtSource,
            Self::Protocol(_) | Self::Lost(_) | Self::Silent(_) | Self::OtherPeer(_) => {
                Reaction::TryAnother
            }
            Self::NoRoom(_) | Self::Deadline(_) => Reaction::GiveUp,
        }
    }
}

impl From<Failed> for TransferError {
    fn from(failed: Failed) -> Self {
        Self::Refused { code: failed.code, reason: failed.reason.as_str().to_owned() }
    }
}

impl From<io::Error> for TransferError {
    fn from(error: io::Error) -> Self {
        Self::Lost(error.to_string())
    }
}

/// A call of the client library that did not succeed. A miss is never one.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection to an address.
    #[error("connect to {address}")]
    Connect {
        /// Where to.
        address: String,
        /// Why not.
        source: TransferError,
    },
    /// A request on the data plane failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// No master answered; the last answer of each.
    #[error("no master answered: {}", .0.join("; "))]
    Masters(Vec<String>),
    /// A master or node answered what makes no sense.
    #[error("{who} sent an answer that makes no sense: {source}")]
    Answer {
        /// Who.
        who: String,
        /// What is wrong with it.
        source: DecodeError,
    },
    /// What was asked breaks a rule.
    #[error("{0}")]
    Invalid(String),
    /// A master knows nothing of what was named, or does not allow it.
    #[error("{0}")]
    Refused(String),
}
