//! Where sessions are reached from outside: their mailboxes, and the commands that await answers.

use crate::membership::SessionId;
use larder_proto::{Term, control};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

/// Messages that wait in one mailbox; a session that does not take them is not sent more.
const MAILBOX: usize = 32;

/// Something for a session to do.
#[derive(Debug)]
pub(super) enum Order {
    /// End: another session speaks for the node.
    Close,
    /// Send this command.
    Command(Box<control::Command>),
}

/// Why a command has no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum CommandError {
    #[error("the node has no session")]
    NoSession,
    #[error("the node does not take further commands now")]
    Busy,
    #[error("the session ended before the node answered")]
    Ended,
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    #[error("{0}")]
    Refused(String),
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Desk {
    last_session: AtomicU64,
    last_command: AtomicU64,
    mailboxes: Mutex<HashMap<SessionId, mpsc::Sender<Order>>>,
    /// Dropping the sender tells the waiting call that no answer will come.
    waiting: Mutex<HashMap<u64, (SessionId, oneshot::Sender<control::CommandResult>)>>,
}

impl Desk {
    /// A new session and its mailbox.
    pub(super) fn open(&self) -> (SessionId, mpsc::Receiver<Order>) {
        let session = SessionId(self.last_session.fetch_add(1, Relaxed) + 1);
        let (mailbox, orders) = mpsc::channel(MAILBOX);
        self.mailboxes.lock().insert(session, mailbox);
        (session, orders)
    }

    /// A session has ended: its commands get no answers any more.
    pub(super) fn closed(&self, session: SessionId) {
        self.mailboxes.lock().remove(&session);
        self.waiting.lock().retain(|_, (of, _)| *of != session);
    }

    /// Asks a session to end.
    pub(super) fn close(&self, session: SessionId) {
        if let Some(mailbox) = self.mailboxes.lock().remove(&session) {
            // A full mailbox is dropped, which ends the session as well.
            mailbox.try_send(Order::Close).ok();
        }
    }

    /// A node answered.
    pub(super) fn answered(&self, session: SessionId, result: control::CommandResult) {
        let mut waiting = self.waiting.lock();
        let of_session = waiting.get(&result.id).is_some_and(|(of, _)| *of == session);
        // An answer after the deadline, or to somebody else's command, is nobody's.
        if of_session && let Some((_, call)) = waiting.remove(&result.id) {
            call.send(result).ok();
        }
    }

    /// Sends a command and waits for its answer. Dropping the future forgets the answer; the node obeys all
    /// the same.
    pub(super) async fn command(
        &self,
        session: SessionId,
        term: Term,
        command: control::command::Command,
        patience: Duration,
    ) -> Result<control::CommandResult, CommandError> {
        let id = self.last_command.fetch_add(1, Relaxed) + 1;
        let mailbox = self.mailboxes.lock().get(&session).cloned();
        let mailbox = mailbox.ok_or(CommandError::NoSession)?;
        let (call, answer) = oneshot::channel();
        self.waiting.lock().insert(id, (session, call));
        let waiting = Waiting { desk: self, id };
        let cluster = bytes::Bytes::copy_from_slice(term.cluster.as_bytes());
        let command = control::Command { id, cluster, term: term.number, command: Some(command) };
        mailbox.try_send(Order::Command(Box::new(command))).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => CommandError::Busy,
            mpsc::error::TrySendError::Closed(_) => CommandError::NoSession,
        })?;
        drop(mailbox);
        let answer = timeout(patience, answer).await;
        drop(waiting);
        match answer {
            Err(_) => Err(CommandError::Timeout(patience)),
            Ok(Err(_)) => Err(CommandError::Ended),
            Ok(Ok(result)) if result.refused.is_empty() => Ok(result),
            Ok(Ok(result)) => Err(CommandError::Refused(result.refused)),
        }
    }
}

/// Takes the entry of a call out, however the call ends.
struct Waiting<'a> {
    desk: &'a Desk,
    id: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.desk.waiting.lock().remove(&self.id);
    }
}
