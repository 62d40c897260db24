//! The tasks that keep a session with every configured master.
//!
//! One task a master: it connects, drives a [`Publisher`], hands commands to the node and, when the
//! session ends, connects again after a back-off with jitter. Sessions are independent: a master that is
//! slow, gone or refusing delays no other.
//!
//! A dead connection is found by HTTP/2 pings within [`PING_INTERVAL`] plus [`PING_LIMIT`], below the 10 s
//! within which a half-open connection has to end (F19).
//!
//! Cancellation: a stopped task drops its connection; commands in progress are dropped with it.

use super::{
    command::{CommandSink, Eviction},
    log::{Age, ChangeLog},
    publisher::{Action, Identity, Input, Limits, Progress, Publisher, SessionError},
    terms::{Refusal, TermGate},
    view::Inventory,
};
use crate::metrics::notice_lag;
use futures_util::FutureExt;
use larder_client::masters::describe;
use larder_daemon::run::chain;
use larder_proto::{
    Term,
    control::{self, master_client::MasterClient},
};
use metrics::Histogram;
use parking_lot::Mutex;
use std::{fmt, sync::Arc, time::Duration};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Streaming, transport::Endpoint};
use tracing::{debug, info, warn};

/// How often an idle connection is pinged.
pub const PING_INTERVAL: Duration = Duration::from_secs(4);
/// How long the answer to a ping may take.
pub const PING_LIMIT: Duration = Duration::from_secs(4);
/// How long connecting and being welcomed may take together.
const GREETING_LIMIT: Duration = Duration::from_secs(5);
/// Messages on their way to the transport. Small: a message is up to 1 MiB.
const OUTGOING: usize = 4;
/// Changes that come within this time of each other travel together: far below the 100 ms of lag that
/// masters may have, and enough to make batches of a busy node large.
const LINGER: Duration = Duration::from_millis(2);
/// Back-off between attempts: doubles from the first to the last.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// What all sessions of a node share.
pub struct Shared<S> {
    /// What is said in greetings.
    pub identity: Identity,
    /// Bounds of each session.
    pub limits: Limits,
    /// Every change of the catalog.
    pub log: Arc<ChangeLog>,
    /// The catalog.
    pub inventory: Arc<dyn Inventory>,
    /// Who obeys commands.
    pub sink: Arc<S>,
    /// Which commands are obeyed.
    pub gate: Arc<TermGate>,
}

/// How all sessions stand, for status pages. Clones show the same.
#[derive(Debug, Clone, Default)]
pub struct LinkBoard(Arc<Vec<Mutex<LinkState>>>);

/// How one session stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkState {
    /// The master's configured address.
    pub address: String,
    /// The session.
    pub progress: Progress,
    /// Sessions that were opened.
    pub sessions: u64,
    /// Why the last session or attempt ended.
    pub last_error: Option<String>,
}

impl LinkBoard {
    /// All links, in the order of the configuration.
    pub fn links(&self) -> Vec<LinkState> {
        self.0.iter().map(|link| link.lock().clone()).collect()
    }
}

impl From<LinkState> for control::MasterLink {
    fn from(link: LinkState) -> Self {
        let LinkState { address, progress, sessions: _, last_error } = link;
        let state = match last_error.filter(|_| progress.state != "open") {
            Some(error) => format!("{}: {error}", progress.state),
            None => progress.state.to_owned(),
        };
        Self { address, state, seq_sent: progress.sent, seq_acked: progress.acked }
    }
}

/// The session with one master. [`Link::run`] it.
pub struct Link<S> {
    shared: Arc<Shared<S>>,
    publisher: Publisher,
    board: LinkBoard,
    at: usize,
    address: String,
    lag: Histogram,
}

/// One link for every address (`host:port`), and the board that shows them.
pub fn links<S: CommandSink>(
    shared: Arc<Shared<S>>,
    addresses: &[String],
) -> (Vec<Link<S>>, LinkBoard) {
    let state = |address: &String| {
        let progress = Progress { state: "down", ..Progress::default() };
        Mutex::new(LinkState { address: address.clone(), progress, sessions: 0, last_error: None })
    };
    let board = LinkBoard(Arc::new(addresses.iter().map(state).collect()));
    let link = |(at, address): (usize, &String)| Link {
        shared: Arc::clone(&shared),
        publisher: Publisher::new(shared.identity.clone(), shared.limits),
        board: board.clone(),
        at,
        address: address.clone(),
        lag: notice_lag(address),
    };
    (addresses.iter().enumerate().map(link).collect(), board)
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
enum EndError {
    #[error("{0:?} is no address of a master")]
    Address(String),
    #[error("connect to the master")]
    Connect(#[source] tonic::transport::Error),
    #[error("no welcome within {GREETING_LIMIT:?}")]
    Silent,
    #[error("the connection ended: {}", describe(status, "a master"))]
    Stream { status: tonic::Status },
    #[error("the master ended the session")]
    Closed,
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Refusal(#[from] Refusal),
}

type Obeying = JoinSet<control::CommandResult>;

impl<S: CommandSink> Link<S> {
    /// Keeps the session until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut back_off = BackOff::new(&self.shared.identity, self.at);
        while let Some(end) = stop.run_until_cancelled(self.session()).await {
            let welcomed = self.publisher.progress().state == "open";
            self.step(Input::Ended).ok();
            if welcomed {
                back_off.restart();
            }
            let wait = back_off.next();
            let error = chain(&end);
            // Said once when the state changes, then only in detail.
            let first = self.note_end(&error);
            match first {
                true => warn!(master = self.address, error, "session with master ended"),
                false => debug!(master = self.address, error, ?wait, "master not reached"),
            }
            if stop.run_until_cancelled(sleep(wait)).await.is_none() {
                break;
            }
        }
        self.step(Input::Ended).ok();
        self.note_progress();
    }

    /// One session, from connecting to its end.
    async fn session(&mut self) -> EndError {
        match self.try_session().await {
            Ok(()) => EndError::Closed,
            Err(error) => error,
        }
    }

    async fn try_session(&mut self) -> Result<(), EndError> {
        let (outgoing, messages) = mpsc::channel(OUTGOING);
        self.step(Input::Connected { seen: self.shared.gate.seen() })?;
        let (log, inventory) = (&self.shared.log, &*self.shared.inventory);
        if let Some(hello) = self.publisher.poll(Instant::now().into_std(), log, inventory) {
            // The channel is new and holds more than one.
            outgoing.try_send(hello).map_err(|_| EndError::Closed)?;
        }
        let opening = async {
            let mut client = MasterClient::new(
                endpoint(&self.address)?.connect().await.map_err(EndError::Connect)?,
            );
            let reply = client.session(ReceiverStream::new(messages)).await;
            let mut incoming = reply.map_err(|status| EndError::Stream { status })?.into_inner();
            let welcome = incoming.message().await.map_err(|status| EndError::Stream { status })?;
            Ok::<_, EndError>((welcome.ok_or(EndError::Closed)?, incoming))
        };
        let (welcome, incoming) =
            timeout(GREETING_LIMIT, opening).await.map_err(|_| EndError::Silent)??;
        let mut obeying = Obeying::new();
        self.receive(welcome, &mut obeying)?;
        self.note_open();
        self.drive(outgoing, incoming, obeying).await
    }

    /// Sends what the publisher has to say and feeds it what happens.
    async fn drive(
        &mut self,
        outgoing: mpsc::Sender<control::NodeMessage>,
        mut incoming: Streaming<control::MasterMessage>,
        mut obeying: Obeying,
    ) -> Result<(), EndError> {
        let log = Arc::clone(&self.shared.log);
        let mut next = None;
        loop {
            // Before the poll, so that what is appended after it is not missed.
            let mut grown = Box::pin(log.grown());
            grown.as_mut().enable();
            if next.is_none() {
                let now = Instant::now().into_std();
                next = self.publisher.poll(now, &log, &*self.shared.inventory);
                self.note_progress();
            }
            let wake_at = self.publisher.wake_at().map(Instant::from_std);
            let event = tokio::select! {
                message = incoming.message() => Event::Received(Box::new(message)),
                Some(done) = obeying.join_next() => Event::Obeyed(done),
                permit = outgoing.reserve(), if next.is_some() => match permit {
                    Ok(permit) => Event::Room(permit),
                    Err(_) => return Err(EndError::Closed),
                },
                () = grown.then(|()| sleep(LINGER)), if next.is_none() => Event::Due,
                () = until(wake_at), if next.is_none() => Event::Due,
            };
            match event {
                Event::Received(message) => match *message {
                    Ok(Some(message)) => self.receive(message, &mut obeying)?,
                    Ok(None) => return Ok(()),
                    Err(status) => return Err(EndError::Stream { status }),
                },
                Event::Obeyed(Ok(result)) => {
                    self.step(Input::Finished(result))?;
                }
                // A command that panicked has no answer; the master's call ends by its deadline.
                Event::Obeyed(Err(error)) => warn!(%error, "a command panicked"),
                Event::Room(permit) => {
                    if let Some(message) = next.take() {
                        permit.send(message);
                    }
                }
                Event::Due => {}
            }
        }
    }

    fn step(&mut self, input: Input) -> Result<Option<Action>, SessionError> {
        self.publisher.step(Instant::now().into_std(), input, &self.shared.log)
    }

    fn receive(
        &mut self,
        message: control::MasterMessage,
        obeying: &mut Obeying,
    ) -> Result<(), EndError> {
        match self.step(Input::Received(message))? {
            None => {}
            Some(Action::Greet(term)) => self.shared.gate.greet(term)?,
            Some(Action::Lags(lags)) => {
                for Age { age, changes } in lags {
                    let changes = usize::try_from(changes).unwrap_or(usize::MAX);
                    self.lag.record_many(age.as_secs_f64(), changes);
                }
            }
            Some(Action::Obey { id, term, filter }) => {
                let shared = Arc::clone(&self.shared);
                obeying.spawn(async move { obey(&shared, id, term, filter).await });
            }
        }
        Ok(())
    }

    fn note_open(&self) {
        let mut state = self.board.0[self.at].lock();
        state.sessions += 1;
        state.last_error = None;
        info!(master = self.address, "session with master open");
    }

    fn note_progress(&self) {
        self.board.0[self.at].lock().progress = self.publisher.progress();
    }

    /// Whether this is news.
    fn note_end(&self, error: &str) -> bool {
        let mut state = self.board.0[self.at].lock();
        state.progress = self.publisher.progress();
        state.last_error.replace(error.to_owned()).as_deref() != Some(error)
    }
}

enum Event<'a> {
    Received(Box<Result<Option<control::MasterMessage>, tonic::Status>>),
    Obeyed(Result<control::CommandResult, tokio::task::JoinError>),
    Room(mpsc::Permit<'a, control::NodeMessage>),
    Due,
}

async fn obey<S: CommandSink>(
    shared: &Shared<S>,
    id: u64,
    term: Term,
    filter: control::EvictFilter,
) -> control::CommandResult {
    let refused =
        |reason: String| control::CommandResult { id, refused: reason, ..Default::default() };
    if let Err(refusal) = shared.gate.admit(term) {
        return refused(chain(&refusal));
    }
    let eviction = match Eviction::try_from(filter) {
        Ok(eviction) => eviction,
        Err(error) => return refused(error.to_string()),
    };
    match shared.sink.evict(eviction).await {
        Ok(done) => {
            let (blocks, bytes) = (done.blocks, done.bytes);
            control::CommandResult { id, blocks, bytes, ..Default::default() }
        }
        Err(reason) => refused(reason),
    }
}

async fn until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

fn endpoint(address: &str) -> Result<Endpoint, EndError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|_| EndError::Address(address.to_owned()))?;
    Ok(endpoint
        .connect_timeout(GREETING_LIMIT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_LIMIT)
        .keep_alive_while_idle(true))
}

/// Grows from attempt to attempt; the jitter keeps the nodes of a cluster from reconnecting in step
/// when their master comes back.
#[derive(Debug)]
struct BackOff {
    base: Duration,
    state: u64,
}

impl BackOff {
    fn new(identity: &Identity, at: usize) -> Self {
        let id = identity.node.as_bytes().iter();
        let seed = id.fold(identity.incarnation.0 ^ at as u64, |seed, byte| {
            seed.wrapping_mul(0x0000_0100_0000_01b3) ^ u64::from(*byte)
        });
        Self { base: BACK_OFF.0, state: seed | 1 }
    }

    fn restart(&mut self) {
        self.base = BACK_OFF.0;
    }

    /// Half to all of the base, which then doubles.
    fn next(&mut self) -> Duration {
        // Xorshift (Marsaglia 2003): only has to differ from node to node.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let jitter = u32::try_from(self.state % 512).unwrap_or(0);
        let wait = self.base * (512 + jitter) / 1024;
        self.base = (self.base * 2).min(BACK_OFF.1);
        wait
    }
}

impl<S> fmt::Debug for Link<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("address", &self.address).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_proto::{Incarnation, NodeId};

    #[test]
    fn attempts_get_rarer_up_to_a_limit_and_differ_between_nodes() {
        let identity = |node: u8| Identity {
            node: NodeId::from_bytes([node; 16]),
            incarnation: Incarnation(1),
            name: String::new(),
            data_address: String::new(),
            control_address: String::new(),
            capacity_bytes: 0,
            version: String::new(),
        };
        let waits = |node| {
            let mut back_off = BackOff::new(&identity(node), 0);
            (0..12).map(|_| back_off.next()).collect::<Vec<_>>()
        };
        let one = waits(1);
        assert!(one[0] >= BACK_OFF.0 / 2 && one[0] <= BACK_OFF.0);
        assert!(one[11] >= BACK_OFF.1 / 2 && one[11] <= BACK_OFF.1);
        assert_ne!(one, waits(2));
    }
}
