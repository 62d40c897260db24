//! The simulated cluster: nodes, masters, the connections between them, and time.

use super::{
    dice::Dice,
    master::Master,
    node::{Link, Node},
};
use larder_master::{membership::SessionId, registry::Registered};
use larder_proto::{
    BlockKey, ModelVersion,
    control::{EvictFilter, MasterMessage, NodeMessage, master_message, node_message},
    fingerprint::{ContentDescription, Digest, LayerGroup, LayoutDescription},
    ids::{TenantId, TenantName},
    part::GroupRule,
};
use larder_store_node::inventory::publisher::{Action, Input};
use prost::Message;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

/// Spaces: two tenants, and two models of the first.
pub(super) const SPACES: usize = 3;
/// Blocks of the one chain that every space has.
pub(super) const KEYS: usize = 24;
/// How often a node says that it lives, in ms.
const HEARTBEAT: u64 = 1_000;
/// Messages of a node that may be on their way.
const IN_FLIGHT: usize = 4;

/// What all know: keys, spaces, models.
#[derive(Debug)]
pub(super) struct Universe {
    pub(super) keys: Vec<BlockKey>,
    pub(super) tenants: Vec<TenantName>,
    pub(super) spaces: Vec<(TenantId, ModelVersion)>,
    /// Which tenant each space belongs to.
    pub(super) tenant_of: Vec<usize>,
    pub(super) models: Vec<(ModelVersion, Registered)>,
}

impl Universe {
    fn new() -> Self {
        let key = |n: usize| BlockKey::from_bytes(*blake3::hash(&n.to_le_bytes()).as_bytes());
        let tenants: Vec<TenantName> =
            ["a", "b"].iter().map(|name| name.parse().expect("a name")).collect();
        let models: Vec<_> = (0..2).map(model).collect();
        let tenant_of = vec![0, 0, 1];
        let model_of = [0, 1, 0];
        let spaces = tenant_of.iter().zip(model_of);
        let spaces =
            spaces.map(|(tenant, model)| (tenants[*tenant].id(), models[model].0)).collect();
        Self { keys: (0..KEYS).map(key).collect(), tenants, spaces, tenant_of, models }
    }
}

/// A model of two ranks and one group, whose blocks are whole with parts 0 and 1.
fn model(weights: u8) -> (ModelVersion, Registered) {
    let content = ContentDescription {
        weights: Digest::from_bytes([weights; 32]),
        weight_epoch: 0,
        tokenizer: Digest::from_bytes([0; 32]),
        adapter: None,
        kv_dtype: "f16".to_owned(),
        kv_scales: None,
    };
    let group = LayerGroup {
        rule: GroupRule::EveryBlock,
        layers: vec![0],
        dtype: "f16".to_owned(),
        shape: vec![1],
        strides: vec![],
        part_bytes: 2,
    };
    let layout = LayoutDescription {
        engine_family: "sim".to_owned(),
        kv_format_version: 1,
        block_tokens: 16,
        groups: vec![group],
        parallel: BTreeMap::from([("tp".to_owned(), 2)]),
        options: BTreeMap::new(),
    };
    let names = std::iter::once(format!("model-{weights}")).collect();
    Registered::new(names, &content.encode(), &layout.encode()).expect("a model")
}

/// What one run does.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Nodes.
    pub nodes: usize,
    /// Masters of one cluster, each with a term of its own.
    pub masters: usize,
    /// Steps with faults; a quiet time follows.
    pub steps: usize,
    /// Changes that the ring of a node's log keeps.
    pub ring: usize,
    /// Single messages get lost though the connection stands.
    pub lossy: bool,
    /// Entries of an index; few enough to be met in some runs.
    pub entries: u64,
}

/// What a run met, so that a test can see that it met something.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Met {
    /// Answers that were checked.
    pub answers: u64,
    /// Of these, such that claimed to be complete.
    pub complete: u64,
    /// Gaps that masters noticed.
    pub gaps: u64,
    /// Snapshots that masters applied.
    pub snapshots: u64,
    /// Events that masters had applied before.
    pub repeated: u64,
    /// Messages of superseded sessions that masters ignored.
    pub superseded: u64,
    /// Commands obeyed and refused for their term.
    pub obeyed: u64,
    /// Commands refused for their term.
    pub fenced: u64,
    /// Runs in which an index was at its limit.
    pub limited: u64,
}

impl Met {
    /// Both runs together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            answers: self.answers + other.answers,
            complete: self.complete + other.complete,
            gaps: self.gaps + other.gaps,
            snapshots: self.snapshots + other.snapshots,
            repeated: self.repeated + other.repeated,
            superseded: self.superseded + other.superseded,
            obeyed: self.obeyed + other.obeyed,
            fenced: self.fenced + other.fenced,
            limited: self.limited + other.limited,
        }
    }
}

/// One connection of one life of a node with one life of a master.
struct Connection {
    node: usize,
    master: usize,
    /// Nothing that is said from now on arrives; what was said before still may, late.
    broken: bool,
    up: VecDeque<(u64, NodeMessage)>,
    down: VecDeque<(u64, MasterMessage)>,
    /// When an end that is still there notices that it is alone.
    node_notices: Option<u64>,
    master_notices: Option<u64>,
    last_heard: u64,
}

/// A promise was broken.
#[derive(Debug, thiserror::Error)]
#[error("at {at_ms} ms: {what}")]
pub struct Broken {
    /// In virtual time.
    pub at_ms: u64,
    /// Which promise, and how.
    pub what: String,
}

/// Everything there is.
pub(super) struct World {
    pub(super) plan: Plan,
    pub(super) dice: Dice,
    pub(super) universe: Arc<Universe>,
    pub(super) nodes: Vec<Node>,
    pub(super) masters: Vec<Master>,
    pub(super) met: Met,
    connections: BTreeMap<u64, Connection>,
    last_connection: u64,
    last_term: u64,
    pub(super) now: u64,
    start: Instant,
    trace: blake3::Hasher,
    faults: bool,
}

impl World {
    pub(super) fn new(seed: u64, plan: Plan) -> Self {
        let universe = Arc::new(Universe::new());
        let mut world = Self {
            plan,
            dice: Dice::new(seed),
            universe,
            nodes: (1..).take(plan.nodes).map(Node::new).collect(),
            masters: Vec::new(),
            met: Met::default(),
            connections: BTreeMap::new(),
            last_connection: 0,
            last_term: 0,
            now: 0,
            start: tokio::time::Instant::now().into_std(),
            trace: blake3::Hasher::new(),
            faults: true,
        };
        for at in 0..plan.masters {
            world.last_term += 1;
            let master = Master::new(at, world.last_term, &world.universe, plan.entries);
            world.masters.push(master);
        }
        for node in 0..plan.nodes {
            world.start_node(node);
        }
        world
    }

    pub(super) fn instant(&self) -> Instant {
        self.start + Duration::from_millis(self.now)
    }

    pub(super) fn broken(&self, what: impl Into<String>) -> Broken {
        Broken { at_ms: self.now, what: what.into() }
    }

    pub(super) fn trace(&self) -> blake3::Hash {
        self.trace.finalize()
    }

    fn note(&mut self, what: &str, a: usize, b: u64, bytes: &[u8]) {
        self.trace.update(format!("{} {what} {a} {b} {}\n", self.now, bytes.len()).as_bytes());
        self.trace.update(bytes);
    }

    fn node_number(&self, node: usize) -> u64 {
        self.nodes[node].last_incarnation
    }

    // ---- what happens ----------------------------------------------------------------------------

    /// One step with faults.
    pub(super) fn step(&mut self) -> Result<(), Broken> {
        let time = self.dice.below(40);
        self.pass(time)?;
        let node = self.dice.pick(self.nodes.len());
        match self.dice.below(100) {
            0..45 => self.change(node, 1),
            45..50 => self.evict_by_command(),
            50..58 => self.break_connection(),
            58..60 => self.crash_node(node),
            60..62 => {
                // So quick that nobody noticed (F25).
                self.crash_node(node);
                self.start_node(node);
            }
            62..70 => self.start_node(node),
            70..72 => self.crash_master(),
            72..75 => {
                let time = self.dice.below(3_000);
                self.pass(time)?;
            }
            75..77 => self.change(node, 60),
            _ => self.check_answers()?,
        }
        Ok(())
    }

    /// No faults any more; everybody is back, and time passes until all must agree.
    pub(super) fn quiet(&mut self) -> Result<(), Broken> {
        self.faults = false;
        for node in 0..self.nodes.len() {
            self.start_node(node);
        }
        // A lost request for a shard is made again after a minute.
        self.pass(if self.plan.lossy { 90_000 } else { 15_000 })
    }

    fn change(&mut self, node: usize, changes: usize) {
        let Some(life) = &self.nodes[node].life else { return };
        let catalog = Arc::clone(&life.catalog);
        for _ in 0..changes {
            match self.dice.below(10) {
                0..6 => catalog.store(&mut self.dice),
                6..9 => catalog.lose(&mut self.dice),
                _ => catalog.miss(&mut self.dice),
            }
        }
        self.note("change", node, catalog.log.head(), &[]);
    }

    fn start_node(&mut self, node: usize) {
        if self.nodes[node].life.is_some() {
            return;
        }
        let adopts = self.dice.chance(30);
        let Self { nodes, dice, universe, plan, .. } = self;
        nodes[node].start(dice, universe, plan.masters, plan.ring, adopts);
        self.note("start", node, self.node_number(node), &[]);
    }

    fn crash_node(&mut self, node: usize) {
        if self.nodes[node].life.take().is_none() {
            return;
        }
        self.note("crash", node, self.node_number(node), &[]);
        let (now, dice) = (self.now, &mut self.dice);
        for connection in self.connections.values_mut().filter(|c| c.node == node && !c.broken) {
            connection.broken = true;
            connection.down.clear();
            connection.master_notices = Some(now + dice.below(3_000));
        }
    }

    fn crash_master(&mut self) {
        let master = self.dice.pick(self.masters.len());
        self.last_term += 1;
        let down_for = self.dice.below(3_000);
        self.note("crash master", master, self.last_term, &[]);
        let (now, start) = (self.now + down_for, self.instant());
        self.masters[master].restart(self.last_term, &self.universe, now, start, self.plan.entries);
        let (now, dice) = (self.now, &mut self.dice);
        for connection in self.connections.values_mut().filter(|c| c.master == master) {
            connection.broken = true;
            connection.up.clear();
            connection.master_notices = None;
            connection.node_notices.get_or_insert(now + dice.below(1_000));
        }
    }

    fn break_connection(&mut self) {
        let whole: Vec<u64> =
            self.connections.iter().filter(|(_, c)| !c.broken).map(|(id, _)| *id).collect();
        if whole.is_empty() {
            return;
        }
        let id = whole[self.dice.pick(whole.len())];
        self.note("break", 0, id, &[]);
        let (now, dice) = (self.now, &mut self.dice);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.broken = true;
            // Some of what was on its way arrives, perhaps after a new session has begun.
            let (up, down) = (dice.pick(IN_FLIGHT + 1), dice.pick(IN_FLIGHT + 1));
            connection.up.truncate(up);
            connection.down.truncate(down);
            let late = dice.below(4_000);
            connection.up.iter_mut().for_each(|(due, _)| *due += late);
            connection.node_notices = Some(now + dice.below(2_000));
            connection.master_notices = Some(now + late + dice.below(2_000));
        }
    }

    fn evict_by_command(&mut self) {
        let open: Vec<u64> =
            self.connections.iter().filter(|(_, c)| !c.broken).map(|(id, _)| *id).collect();
        if open.is_empty() {
            return;
        }
        let id = open[self.dice.pick(open.len())];
        let space = self.dice.pick(SPACES);
        let (_, model) = self.universe.spaces[space];
        let tenant = &self.universe.tenants[self.universe.tenant_of[space]];
        let filter = EvictFilter {
            tenant: tenant.to_string(),
            content: model.content.as_bytes().to_vec().into(),
            layout: model.layout.as_bytes().to_vec().into(),
            ..EvictFilter::default()
        };
        let master = self.connections[&id].master;
        if self.masters[master].in_session(id) {
            let command = self.masters[master].command(filter);
            self.send_down(id, command);
        }
    }

    // ---- time and messages -----------------------------------------------------------------------

    /// Lets time pass in small steps; everything that is due happens.
    pub(super) fn pass(&mut self, ms: u64) -> Result<(), Broken> {
        let end = self.now + ms;
        loop {
            self.pump()?;
            if self.now >= end {
                return Ok(());
            }
            self.now = (self.now + 25).min(end);
        }
    }

    fn pump(&mut self) -> Result<(), Broken> {
        for at in 0..self.masters.len() {
            let now = self.instant();
            self.masters[at].tick(now);
        }
        for node in 0..self.nodes.len() {
            for master in 0..self.masters.len() {
                self.connect(node, master);
                self.publish(node, master)?;
            }
        }
        while let Some((id, upwards)) = self.next_due() {
            if upwards { self.deliver_up(id)? } else { self.deliver_down(id)? }
        }
        self.notice()
    }

    fn link(&mut self, node: usize, master: usize) -> Option<&mut Link> {
        self.nodes[node].life.as_mut().map(|life| &mut life.links[master])
    }

    fn connect(&mut self, node: usize, master: usize) {
        let (now, up) = (self.now, self.masters[master].is_up(self.now));
        let instant = self.instant();
        let seen = self.nodes[node].gate.seen();
        let Some(life) = &mut self.nodes[node].life else { return };
        let link = &mut life.links[master];
        if link.connection.is_some() || now < link.retry_at || !up {
            return;
        }
        self.last_connection += 1;
        let id = self.last_connection;
        link.connection = Some(id);
        let greeted = link.publisher.step(instant, Input::Connected { seen }, &life.catalog.log);
        assert_eq!(greeted, Ok(None), "connecting asks for nothing");
        let connection = Connection {
            node,
            master,
            broken: false,
            up: VecDeque::new(),
            down: VecDeque::new(),
            node_notices: None,
            master_notices: None,
            last_heard: now,
        };
        self.connections.insert(id, connection);
        self.masters[master].open(SessionId(id));
        self.note("connect", node, id, &[]);
    }

    /// Sends what the publisher of one link has to say.
    fn publish(&mut self, node: usize, master: usize) -> Result<(), Broken> {
        let instant = self.instant();
        loop {
            let Some(life) = &mut self.nodes[node].life else { return Ok(()) };
            let link = &mut life.links[master];
            let Some(id) = link.connection else { return Ok(()) };
            let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
            if connection.up.len() >= IN_FLIGHT {
                return Ok(());
            }
            let catalog = Arc::clone(&life.catalog);
            let Some(message) = link.publisher.poll(instant, &catalog.log, &*catalog) else {
                return Ok(());
            };
            if connection.broken {
                continue;
            }
            let hello = matches!(message.message, Some(node_message::Message::Hello(_)));
            if self.faults && self.plan.lossy && !hello && self.dice.chance(2) {
                continue;
            }
            let times = if self.faults && !hello && self.dice.chance(4) { 2 } else { 1 };
            for _ in 0..times {
                let due = self.now + self.dice.below(if self.faults { 60 } else { 5 });
                let due = connection.up.back().map_or(due, |(last, _)| due.max(*last));
                connection.up.push_back((due, message.clone()));
            }
        }
    }

    fn send_down(&mut self, id: u64, message: MasterMessage) {
        let Some(connection) = self.connections.get_mut(&id).filter(|c| !c.broken) else { return };
        let welcome = matches!(message.message, Some(master_message::Message::Welcome(_)));
        if self.faults && self.plan.lossy && !welcome && self.dice.chance(2) {
            return;
        }
        let due = self.now + self.dice.below(if self.faults { 60 } else { 5 });
        let due = connection.down.back().map_or(due, |(last, _)| due.max(*last));
        connection.down.push_back((due, message));
    }

    /// The connection whose next message is due first, and whether that one goes up.
    fn next_due(&self) -> Option<(u64, bool)> {
        let heads = self.connections.iter().flat_map(|(id, connection)| {
            let up = connection.up.front().map(|(due, _)| (*due, *id, true));
            let down = connection.down.front().map(|(due, _)| (*due, *id, false));
            up.into_iter().chain(down)
        });
        let (due, id, upwards) = heads.min()?;
        (due <= self.now).then_some((id, upwards))
    }

    fn deliver_up(&mut self, id: u64) -> Result<(), Broken> {
        let instant = self.instant();
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        let (node, master) = (connection.node, connection.master);
        let Some((_, message)) = connection.up.pop_front() else { return Ok(()) };
        connection.last_heard = self.now;
        self.note("up", node, id, &message.encode_to_vec());
        let (replies, end) = match self.masters[master].receive(instant, id, message) {
            Ok(replies) => (replies, false),
            Err((error, _)) if !self.plan.lossy && !error.is_refusal() => {
                return Err(self.broken(format!("the master ended a session: {error}")));
            }
            Err((_, farewell)) => (farewell.map(|farewell| *farewell).into_iter().collect(), true),
        };
        for reply in replies {
            self.send_down(id, reply);
        }
        if end {
            self.master_ends(id);
        }
        for closed in self.masters[master].take_closed() {
            // Asked to end, and does so when it gets to it: until then its messages still come.
            let at = self.now + self.dice.below(2_000);
            if let Some(connection) = self.connections.get_mut(&closed.0) {
                connection.master_notices =
                    Some(connection.master_notices.map_or(at, |set| set.min(at)));
            }
        }
        Ok(())
    }

    fn deliver_down(&mut self, id: u64) -> Result<(), Broken> {
        let instant = self.instant();
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        let (node, master) = (connection.node, connection.master);
        let Some((_, message)) = connection.down.pop_front() else { return Ok(()) };
        self.note("down", node, id, &message.encode_to_vec());
        if self.link(node, master).is_none_or(|link| link.connection != Some(id)) {
            return Ok(());
        }
        let outcome = {
            let Some(life) = &mut self.nodes[node].life else { return Ok(()) };
            let link = &mut life.links[master];
            link.publisher.step(instant, Input::Received(message), &life.catalog.log)
        };
        match outcome {
            Ok(None | Some(Action::Lags(_))) => {}
            Ok(Some(Action::Greet(term))) => {
                if let Err(refusal) = self.nodes[node].gate.greet(term) {
                    return Err(
                        self.broken(format!("a master of the cluster is refused: {refusal}"))
                    );
                }
            }
            Ok(Some(Action::Obey { id, term, filter })) => {
                let result = self.obey(node, id, term, &filter)?;
                let Some(life) = &mut self.nodes[node].life else { return Ok(()) };
                let link = &mut life.links[master];
                let done = link.publisher.step(instant, Input::Finished(result), &life.catalog.log);
                done.map_err(|error| self.broken(error.to_string()))?;
            }
            Err(error) if self.plan.lossy => {
                let text = error.to_string();
                self.note("node ends", node, id, text.as_bytes());
                self.node_ends(id);
            }
            Err(error) => return Err(self.broken(format!("a live node ended a session: {error}"))),
        }
        Ok(())
    }

    fn obey(
        &mut self,
        node: usize,
        id: u64,
        term: larder_proto::Term,
        filter: &EvictFilter,
    ) -> Result<larder_proto::control::CommandResult, Broken> {
        let mut result = larder_proto::control::CommandResult { id, ..Default::default() };
        if let Err(refusal) = self.nodes[node].gate.admit(term) {
            self.met.fenced += 1;
            result.refused = refusal.to_string();
            return Ok(result);
        }
        if term.number < self.nodes[node].obeyed {
            return Err(
                self.broken(format!("a command of the deposed term {} was obeyed", term.number))
            );
        }
        self.nodes[node].obeyed = term.number;
        self.met.obeyed += 1;
        let named = |space: &usize| {
            let (_, model) = self.universe.spaces[*space];
            let tenant = &self.universe.tenants[self.universe.tenant_of[*space]];
            tenant.as_str() == filter.tenant && filter.content.as_ref() == model.content.as_bytes()
        };
        let space = (0..SPACES).find(named);
        if let (Some(space), Some(life)) = (space, &self.nodes[node].life) {
            result.blocks = life.catalog.remove_space(space);
        }
        Ok(result)
    }

    /// Ends notice that the other one is gone.
    fn notice(&mut self) -> Result<(), Broken> {
        let now = self.now;
        let ids: Vec<u64> = self.connections.keys().copied().collect();
        for id in ids {
            let Some(connection) = self.connections.get(&id) else { continue };
            let silent = now > connection.last_heard + 3 * HEARTBEAT;
            let master_notices = connection.master_notices.is_some_and(|at| at <= now);
            if (silent || master_notices) && self.masters[connection.master].has(SessionId(id)) {
                // A lost acknowledgement may close the window for good: then silence is how it ends.
                if silent && !connection.broken && !self.plan.lossy {
                    return Err(self.broken("a node in session was silent for three beats"));
                }
                self.master_ends(id);
            }
            if self.connections[&id].node_notices.is_some_and(|at| at <= now) {
                self.node_ends(id);
            }
            let Some(connection) = self.connections.get(&id) else { continue };
            let (node, master) = (connection.node, connection.master);
            let node_here = self.link(node, master).is_some_and(|link| link.connection == Some(id));
            if !node_here && !self.masters[master].has(SessionId(id)) {
                self.connections.remove(&id);
            }
        }
        Ok(())
    }

    /// The master's end is closed.
    fn master_ends(&mut self, id: u64) {
        let instant = self.instant();
        let notices = self.now + self.dice.below(500);
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.broken = true;
        connection.up.clear();
        connection.master_notices = None;
        connection.node_notices.get_or_insert(notices);
        let (node, master) = (connection.node, connection.master);
        self.masters[master].ended(instant, SessionId(id));
        self.note("master ends", node, id, &[]);
    }

    /// The node's end is closed.
    fn node_ends(&mut self, id: u64) {
        let (instant, now) = (self.instant(), self.now);
        let (retry_at, notices) = (now + 20 + self.dice.below(400), now + self.dice.below(1_000));
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.broken = true;
        connection.down.clear();
        connection.node_notices = None;
        connection.master_notices.get_or_insert(notices);
        let (node, master) = (connection.node, connection.master);
        if let Some(life) = &mut self.nodes[node].life {
            let link = &mut life.links[master];
            if link.connection == Some(id) {
                link.connection = None;
                link.retry_at = retry_at;
                let ended = link.publisher.step(instant, Input::Ended, &life.catalog.log);
                assert_eq!(ended, Ok(None), "an end asks for nothing");
            }
        }
        self.note("node ends", node, id, &[]);
    }
}
