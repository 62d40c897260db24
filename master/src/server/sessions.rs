//! The transport of sessions: a stream of a node's messages in, a stream of the master's out.
//!
//! The outgoing stream drives the session: it is polled by the connection, reads, steps the state machine
//! and yields replies. So a session needs no task and no queue of its own, a node that does not read its
//! acknowledgements is not read either, and whatever ends the connection drops the session.

use super::{Shared, desk::Order};
use crate::session::{Session, SessionError, refusal};
use futures_util::{Stream, stream};
use larder_daemon::run::chain;
use larder_proto::control::{MasterMessage, NodeMessage, master_message};
use std::{collections::VecDeque, sync::Arc, time::Duration};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};
use tonic::{Status, Streaming};
use tracing::{debug, info, warn};

/// How long a connection may take to say who it is.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// Beats of silence after which a session is over.
const SILENT_BEATS: u32 = 3;

/// The answers to a node, for as long as its session lasts.
pub(super) fn run(
    shared: Arc<Shared>,
    incoming: Streaming<NodeMessage>,
) -> impl Stream<Item = Result<MasterMessage, Status>> + Send {
    let (id, orders) = shared.desk.open();
    let deadline = Instant::now() + HELLO_LIMIT;
    let session = Ending { session: Session::new(id), shared: Arc::clone(&shared) };
    let driver =
        Driver { incoming, orders, session, shared, deadline, replies: VecDeque::new(), end: None };
    stream::unfold(Some(driver), |driver| async {
        let mut driver = driver?;
        match driver.next().await {
            Ok(message) => Some((Ok(message), Some(driver))),
            Err(Some(status)) => Some((Err(status), None)),
            Err(None) => None,
        }
    })
}

struct Driver {
    incoming: Streaming<NodeMessage>,
    orders: mpsc::Receiver<Order>,
    session: Ending,
    shared: Arc<Shared>,
    /// The session is over unless the node says something before.
    deadline: Instant,
    replies: VecDeque<MasterMessage>,
    /// How the session ends once all replies are out.
    end: Option<Option<Status>>,
}

#[expect(clippy::large_enum_variant, reason = "made and taken apart at once, never kept")]
enum Event {
    Message(Result<Option<NodeMessage>, Status>),
    Order(Option<Order>),
    Silent,
    Stop,
}

impl Driver {
    /// The next message for the node; an error ends the session.
    async fn next(&mut self) -> Result<MasterMessage, Option<Status>> {
        loop {
            if let Some(reply) = self.replies.pop_front() {
                return Ok(reply);
            }
            if let Some(end) = self.end.take() {
                return Err(end);
            }
            let event = tokio::select! {
                biased;
                () = self.shared.stop.cancelled() => Event::Stop,
                order = self.orders.recv() => Event::Order(order),
                message = self.incoming.message() => Event::Message(message),
                () = sleep_until(self.deadline) => Event::Silent,
            };
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Stop => self.end = Some(Some(Status::unavailable("the master stops"))),
            Event::Order(Some(Order::Command(command))) => {
                let message = Some(master_message::Message::Command(*command));
                self.replies.push_back(MasterMessage { message });
            }
            Event::Order(Some(Order::Close) | None) => {
                self.end = Some(Some(Status::aborted("another session speaks for the node")));
            }
            Event::Silent => {
                self.shared.cluster.counters().silent_sessions.add(1);
                warn!(session = self.session.session.id().0, node = self.node(), "node is silent");
                self.end = Some(Some(Status::deadline_exceeded("the node was silent too long")));
            }
            Event::Message(Ok(Some(message))) => self.receive(message),
            Event::Message(Ok(None)) => self.end = Some(None),
            Event::Message(Err(status)) => {
                debug!(%status, "connection of a node ended");
                self.end = Some(None);
            }
        }
    }

    fn receive(&mut self, message: NodeMessage) {
        let now = Instant::now();
        self.deadline = now + self.shared.heartbeat * SILENT_BEATS;
        let greeting = self.session.session.source().is_none();
        match self.session.session.step(now.into_std(), message, &self.shared.cluster) {
            Ok(output) => {
                self.replies.extend(output.replies);
                if let Some(result) = output.result {
                    self.shared.desk.answered(self.session.session.id(), result);
                }
                if greeting && self.session.session.source().is_some() {
                    self.shared.settle();
                    info!(node = self.node(), "session with node open");
                }
            }
            Err(SessionError::Refused(reason)) => {
                warn!(reason, "session refused");
                self.shared.cluster.counters().refused_sessions.add(1);
                self.replies.push_back(refusal(&self.shared.cluster, reason));
                self.end = Some(None);
            }
            Err(error) => {
                let error = chain(&error);
                warn!(node = self.node(), error, "node broke the protocol");
                self.shared.cluster.counters().broken_sessions.add(1);
                self.end = Some(Some(Status::invalid_argument(error)));
            }
        }
    }

    fn node(&self) -> String {
        self.session.session.source().map(|source| source.node.to_string()).unwrap_or_default()
    }
}

/// Tells the cluster when the session ends, however it ends.
struct Ending {
    session: Session,
    shared: Arc<Shared>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.shared.desk.closed(self.session.id());
        if let Some(source) = self.session.source() {
            info!(node = %source.node, "session with node ended");
            self.shared.cluster.ended(Instant::now().into_std(), self.session.id());
            self.shared.settle();
        }
    }
}
