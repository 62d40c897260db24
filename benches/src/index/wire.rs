//! A real master, asked over the wire.

use super::{
    MODEL, Plan, Row, Where,
    lookups::{Chains, Lookups, Slice},
    node::{SimulatedNode, failed},
};
use crate::{
    child::{self, Child},
    error::BenchError,
};
use indicatif::ProgressBar;
use larder_proto::{
    control::{MatchPrefixRequest, master_client::MasterClient},
    ids::TenantName,
};
use std::time::Duration;
use tokio::{task::JoinSet, time::Instant};
use tonic::transport::{Channel, Endpoint};

/// Entries a second that `--quick` counts on before it has seen any.
const STORED_PER_SECOND: f64 = 500_000.0;

pub(super) async fn measure(
    plan: &Plan<'_>,
    bar: &ProgressBar,
    rows: &mut Vec<Row>,
    notes: &mut Vec<String>,
) -> Result<(), BenchError> {
    let dir = tempfile::tempdir().map_err(BenchError::io("make a folder for state and logs"))?;
    let most = plan.entries.last().copied().unwrap_or(0);
    let args = [
        format!("--state_dir={}", dir.path().join("master").display()),
        "--control.listen=127.0.0.1:0".to_owned(),
        "--metrics.listen=127.0.0.1:0".to_owned(),
        format!("--index.entries_limit={}", most.max(20_000_000)),
        "--log.level=warn".to_owned(),
    ];
    let program = child::sibling("larder-master")?;
    let mut master = Child::start("larder-master", &program, &args, dir.path())?;
    let address = master.announced("control")?;
    let resident_before = master.resident_bytes();
    let mut node = SimulatedNode::connect(connect(&address).await?).await?;
    let (mut stored, mut rate) = (0, STORED_PER_SECOND);
    for (at, entries) in plan.entries.iter().copied().enumerate() {
        let sizes_left = plan.entries.len() - at;
        if !plan
            .budget
            .has(Instant::now(), time_for(entries - stored, rate) + Duration::from_secs(2))
        {
            let left_out = plan.rows_over_wire() * sizes_left;
            notes.push(format!("{entries} entries over the wire did not fit into --quick"));
            bar.inc(left_out as u64);
            break;
        }
        bar.set_message(format!("wire: storing {entries} entries"));
        let (began, cpu_before) = (Instant::now(), master.cpu_seconds());
        node.store_up_to(entries).await?;
        let new = as_f64(entries - stored);
        rate = new / began.elapsed().as_secs_f64();
        notes.push(format!(
            "stored {} entries through a session: {:.2} M entries/s, {:.2} M per CPU second of the master",
            entries - stored,
            rate / 1e6,
            new / (master.cpu_seconds() - cpu_before) / 1e6
        ));
        stored = entries;
        let grown = master.resident_bytes().saturating_sub(resident_before);
        let bytes_per_entry = as_f64(grown) / as_f64(entries);
        let mut rows_left = sizes_left * plan.rows_over_wire();
        for keys in plan.args.keys.iter().copied() {
            for connections in plan.args.connections.iter().copied() {
                bar.set_message(format!(
                    "wire: {entries} entries, {keys} keys a call, {connections} connections"
                ));
                let time = plan.slice(rows_left, time_for(most - stored, rate));
                let asking = Asking { address: &address, entries, keys, connections };
                let lookups = tokio::select! {
                    lookups = asking.lookups(plan, &master, time) => lookups?,
                    never = node.keep_alive() => match never? {},
                };
                rows.push(Row::new(Where::Wire, entries, bytes_per_entry, &lookups));
                rows_left -= 1;
                bar.inc(1);
            }
        }
    }
    Ok(())
}

async fn connect(address: &str) -> Result<MasterClient<Channel>, BenchError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map(|endpoint| endpoint.tcp_nodelay(true));
    let channel = match endpoint {
        Ok(endpoint) => endpoint.connect().await,
        Err(error) => Err(error),
    };
    let failed = |error: tonic::transport::Error| BenchError::Answer {
        doing: "connect to the master",
        answer: error.to_string(),
    };
    Ok(MasterClient::new(channel.map_err(failed)?))
}

/// What one row asks.
struct Asking<'a> {
    address: &'a str,
    entries: u64,
    keys: u32,
    connections: u32,
}

impl Asking<'_> {
    async fn lookups(
        &self,
        plan: &Plan<'_>,
        master: &Child,
        time: Duration,
    ) -> Result<Lookups, BenchError> {
        let mut clients = Vec::new();
        for _ in 0..self.connections {
            clients.push(connect(self.address).await?);
        }
        let (mut slices, mut seed) = (Vec::new(), 0);
        for turn in 0..=plan.args.slices {
            let mut askers = JoinSet::new();
            let (began, cpu_before) = (Instant::now(), master.cpu_seconds());
            let until = began + time;
            for client in &clients {
                for _ in 0..plan.args.in_flight {
                    seed += 1;
                    let chains = Chains::new(self.entries, self.keys, seed);
                    askers.spawn(ask_until(client.clone(), chains, until));
                }
            }
            let mut slice = Slice::default();
            while let Some(asked) = askers.join_next().await {
                let (keys, latencies) = asked??;
                slice.keys += keys;
                slice.latencies.extend(latencies);
            }
            slice.wall = began.elapsed();
            slice.cpu_seconds = master.cpu_seconds() - cpu_before;
            if turn > 0 {
                slices.push(slice); // The first warmed up.
            }
        }
        let Self { keys: keys_per_call, connections, .. } = *self;
        Ok(Lookups { keys_per_call, connections, slices })
    }
}

/// One call after the other.
async fn ask_until(
    mut client: MasterClient<Channel>,
    mut chains: Chains,
    until: Instant,
) -> Result<(u64, Vec<Duration>), BenchError> {
    let (mut matched, mut latencies) = (0, Vec::new());
    let tenant = TenantName::default();
    while Instant::now() < until || latencies.is_empty() {
        let mut keys = Vec::new();
        chains.draw().for_each(|key| keys.extend_from_slice(key.as_bytes()));
        let count = keys.len() / 32;
        let request = MatchPrefixRequest {
            tenant: tenant.as_str().to_owned(),
            content: MODEL.content.as_bytes().to_vec().into(),
            layout: MODEL.layout.as_bytes().to_vec().into(),
            root: keys[..32].to_vec().into(),
            keys: keys.into(),
            ..MatchPrefixRequest::default()
        };
        let asked = Instant::now();
        let reply = client.match_prefix(request).await.map_err(failed("match a chain"))?;
        latencies.push(asked.elapsed());
        let reply = reply.into_inner();
        let complete = reply.coverage.is_some_and(|coverage| coverage.complete);
        if reply.blocks as usize != count || !complete {
            let answer = format!("{} of {count} keys, complete: {complete}", reply.blocks);
            return Err(BenchError::Answer { doing: "match a chain that is held", answer });
        }
        matched += count as u64;
    }
    Ok((matched, latencies))
}

fn time_for(entries: u64, per_second: f64) -> Duration {
    Duration::from_secs_f64(as_f64(entries) / per_second)
}

#[expect(clippy::cast_precision_loss, reason = "counts and bytes of one run")]
fn as_f64(count: u64) -> f64 {
    count as f64
}
