//! Store nodes as processes: what they do when a peer, a writer or a reader dies or stalls.
#![expect(clippy::unwrap_used, reason = "helpers of tests: what fails says where")]

use larder_client::{
    cluster::ClusterClient,
    connection::{Buffer, Connection, Identity, PutOutcome},
    error::TransferError,
    local::{FetchRequest, LocalSession},
    masters::Masters,
};
use larder_proto::{
    BlockKey, PartNumber,
    control::{ListPinsRequest, NodeStatusReply, StatusRequest, node_client::NodeClient},
    frame::{Class, Code},
};
use larder_tests::{
    blocks,
    demo::await_entries,
    process::{Daemon, binary},
};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

const LONG: Duration = Duration::from_secs(30);
const BLOCK: usize = 300_000;

struct Node {
    daemon: Daemon,
    socket: PathBuf,
}

impl Node {
    async fn start(dir: &Path, name: &str, master: Option<&Daemon>, more: &[&str]) -> Self {
        let socket = dir.join(format!("{name}.sock"));
        let mut args = vec![
            format!("--name={name}"),
            format!("--state_dir={}", dir.join(name).display()),
            format!("--masters={}", master.map_or("", |master| master.address("control"))),
            format!("--local.socket={}", socket.display()),
            "--control.listen=127.0.0.1:0".to_owned(),
            "--metrics.listen=127.0.0.1:0".to_owned(),
            "--log.level=warn".to_owned(),
        ];
        args.extend(more.iter().map(|arg| (*arg).to_owned()));
        for default in ["--data.listen=127.0.0.1:0", "--dram.capacity=64MiB"] {
            let (key, _) = default.split_once('=').unwrap();
            if !more.iter().any(|arg| arg.starts_with(key)) {
                args.push(default.to_owned());
            }
        }
        let daemon =
            Daemon::start("larder-node", &args, &["data", "control", "local"]).await.unwrap();
        Self { daemon, socket }
    }

    async fn tcp(&self) -> Connection {
        let address = self.daemon.address("data");
        Connection::connect(address, &Identity::client("test")).await.unwrap()
    }

    async fn local(&self) -> LocalSession {
        LocalSession::connect(&self.socket, &Identity::client("engine")).await.unwrap()
    }

    async fn status(&self) -> NodeStatusReply {
        let address = format!("http://{}", self.daemon.address("control"));
        let mut client = NodeClient::connect(address).await.unwrap();
        client.status(StatusRequest {}).await.unwrap().into_inner()
    }

    fn signal(&self, name: &str) {
        let pid = self.daemon.pid().unwrap().to_string();
        let sent = std::process::Command::new("kill").args([name, &pid]).status().unwrap();
        assert!(sent.success());
    }
}

async fn master(dir: &Path) -> Daemon {
    master_at(dir, "127.0.0.1:0").await
}

async fn master_at(dir: &Path, listen: &str) -> Daemon {
    let args = [
        format!("--state_dir={}", dir.join("master").display()),
        format!("--control.listen={listen}"),
        "--nodes.heartbeat=200ms".to_owned(),
        "--nodes.ttl=1s".to_owned(),
        "--metrics.listen=127.0.0.1:0".to_owned(),
        "--log.level=warn".to_owned(),
    ];
    Daemon::start("larder-master", &args, &["control"]).await.unwrap()
}

async fn put(to: &Connection, key: BlockKey) -> Result<PutOutcome, TransferError> {
    let bytes = blocks::bytes(&key, BLOCK);
    to.put(&blocks::reserve(key, BLOCK), bytes.into()).await
}

async fn get(from: &Connection, key: BlockKey) -> Result<Vec<u8>, TransferError> {
    let land = |ok: &larder_proto::frame::ReadOk| {
        Ok(Buffer::new(Vec::new(), usize::try_from(ok.len).unwrap()))
    };
    Ok(from.read(&blocks::read(key), land).await?.0.into_bytes())
}

fn fetch_of(keys: impl Iterator<Item = BlockKey>, deadline: Duration) -> FetchRequest {
    let parts = keys.map(|key| (key, PartNumber(0))).collect();
    FetchRequest { model: blocks::model(), parts, deadline, class: Class::Demand }
}

fn code(error: &TransferError) -> Option<Code> {
    match error {
        TransferError::Refused { code, .. } => Some(*code),
        _ => None,
    }
}

/// Every item of a fetch is answered once; those that came are exact. How many came.
async fn drain(session: &LocalSession, fetch: &FetchRequest) -> usize {
    let mut stream = session.fetch(fetch).await.unwrap();
    let (mut seen, mut came) = (BTreeSet::new(), 0);
    while let Some(answer) = stream.next().await {
        let (item, fetched) = answer.unwrap();
        assert!(seen.insert(item), "item {item} was answered twice");
        if let Ok(lease) = fetched {
            assert_eq!(*lease, *blocks::bytes(&fetch.parts[item].0, BLOCK));
            came += 1;
        }
    }
    assert_eq!(seen.len(), fetch.parts.len());
    came
}

/// A `larder-hold` process.
struct Hold {
    child: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
}

impl Hold {
    async fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(binary("larder-hold").unwrap())
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut hold = Self { child, stdin, stdout };
        assert!(hold.line().await.starts_with("holding"));
        hold
    }

    async fn line(&mut self) -> String {
        timeout(LONG, self.stdout.next_line()).await.unwrap().unwrap().unwrap()
    }

    async fn ask(&mut self) -> String {
        self.stdin.write_all(b"\n").await.unwrap();
        self.line().await
    }
}

/// Asks until the node says so.
async fn until(node: &Node, what: impl Fn(&NodeStatusReply) -> bool) {
    let asked = async {
        while !what(&node.status().await) {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, asked).await.expect("the node never came to that state");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_killed_during_a_fetch_leaves_every_part_answered_and_none_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let master = master(dir.path()).await;
    let a = Node::start(dir.path(), "a", Some(&master), &[]).await;
    let b = Node::start(dir.path(), "b", Some(&master), &[]).await;
    let to_a = a.tcp().await;
    for n in 0..100 {
        put(&to_a, blocks::key(n)).await.unwrap();
    }
    await_entries(master.address("control"), 100).await.unwrap();
    let local = b.local().await;
    let fetch = fetch_of((0..100).map(blocks::key), LONG);
    let mut stream = local.fetch(&fetch).await.unwrap();
    let mut leases = Vec::new();
    for _ in 0..5 {
        leases.push(stream.next().await.unwrap().unwrap().1.unwrap());
    }
    a.daemon.kill().await.unwrap();
    let rest = async {
        let mut failed = 0;
        while let Some(answer) = stream.next().await {
            match answer.unwrap() {
                (item, Ok(lease)) => {
                    assert_eq!(*lease, *blocks::bytes(&blocks::key(item as u64), BLOCK));
                }
                (_, Err(_)) => failed += 1,
            }
        }
        failed
    };
    let failed: usize = timeout(LONG, rest).await.expect("the fetch ends");
    assert!(failed > 0, "the node died in the middle");
    drop(leases);
    until(&b, |status| status.leases == 0 && status.writes_in_progress == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_killed_under_load_and_restarted_finds_every_acknowledged_block_again() {
    let dir = tempfile::tempdir().unwrap();
    let first = master(dir.path()).await;
    let address = first.address("control").to_owned();
    let node = Node::start(dir.path(), "a", Some(&first), &["--dram.capacity=256MiB"]).await;
    let to_node = node.tcp().await;
    let mut first = Some(first);
    let mut second = None;
    // Every put is acknowledged by the node, whatever becomes of the master meanwhile (P4).
    for n in 0..300 {
        assert!(matches!(put(&to_node, blocks::key(n)).await.unwrap(), PutOutcome::Stored(_)));
        match n {
            100 => first.take().unwrap().kill().await.unwrap(),
            200 => second = Some(master_at(dir.path(), &address).await),
            _ => {}
        }
    }
    await_entries(second.unwrap().address("control"), 300).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_node_is_out_of_answers_at_once_and_forgotten_after_its_ttl() {
    let dir = tempfile::tempdir().unwrap();
    let master = master(dir.path()).await;
    let node = Node::start(dir.path(), "a", Some(&master), &[]).await;
    put(&node.tcp().await, blocks::key(1)).await.unwrap();
    await_entries(master.address("control"), 1).await.unwrap();
    let masters = Masters::new(&[master.address("control").to_owned()]).unwrap();
    let client = ClusterClient::new(masters, Identity::client("test"));
    let holders = async || {
        let located = client.locate(blocks::model(), &[blocks::key(1)]).await.unwrap();
        located.blocks[0].len()
    };
    assert_eq!(holders().await, 1);
    node.daemon.kill().await.unwrap();
    let gone = async {
        while holders().await > 0 {
            tokio::task::yield_now().await;
        }
        while !client.list_nodes().await.unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, gone).await.expect("left out, then forgotten");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_peer_costs_its_deadline_and_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    let master = master(dir.path()).await;
    let a = Node::start(dir.path(), "a", Some(&master), &[]).await;
    let b = Node::start(dir.path(), "b", Some(&master), &["--data.silence=1s"]).await;
    let to_a = a.tcp().await;
    for n in 0..4 {
        put(&to_a, blocks::key(n)).await.unwrap();
    }
    await_entries(master.address("control"), 4).await.unwrap();
    a.signal("-STOP");
    let local = b.local().await;
    let fetch = fetch_of((0..4).map(blocks::key), Duration::from_millis(500));
    assert_eq!(timeout(LONG, drain(&local, &fetch)).await.expect("the fetch ends"), 0);
    a.signal("-CONT");
    // The peer lives again, and so does the fetch: nothing of the failure is kept for long.
    let again = async {
        while drain(&local, &fetch_of((0..4).map(blocks::key), LONG)).await < 4 {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, again).await.expect("the peer is used again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_restarts_on_its_address_serves_no_byte_of_its_former_life() {
    let dir = tempfile::tempdir().unwrap();
    let first = Node::start(dir.path(), "a", None, &[]).await;
    let to_first = first.tcp().await;
    put(&to_first, blocks::key(1)).await.unwrap();
    let former = to_first.incarnation();
    let listen = format!("--data.listen={}", first.daemon.address("data"));
    first.daemon.kill().await.unwrap();
    let second = Node::start(dir.path(), "a", None, &[&listen]).await;
    assert!(get(&to_first, blocks::key(1)).await.is_err(), "the old connection is over");
    let to_second = second.tcp().await;
    assert_eq!(to_second.node(), to_first.node());
    assert!(to_second.incarnation() > former);
    put(&to_second, blocks::key(2)).await.unwrap();
    let gone = get(&to_second, blocks::key(1)).await.unwrap_err();
    assert_eq!(code(&gone), Some(Code::Miss));
    assert_eq!(
        get(&to_second, blocks::key(2)).await.unwrap(),
        blocks::bytes(&blocks::key(2), BLOCK)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_that_is_killed_in_mid_write_gives_name_and_space_back() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(dir.path(), "a", None, &[]).await;
    let key = blocks::key(1);
    let address = node.daemon.address("data").to_owned();
    let mut writer =
        Hold::start(&["reserve", &address, &key.to_string(), &BLOCK.to_string()]).await;
    until(&node, |status| status.writes_in_progress == 1).await;
    let to_node = node.tcp().await;
    let refused = put(&to_node, key).await.unwrap();
    assert!(matches!(&refused, PutOutcome::InProgress { producer, .. } if producer == "hold"));
    writer.child.kill().await.unwrap();
    until(&node, |status| status.writes_in_progress == 0 && status.tiers[0].used_bytes == 0).await;
    assert!(matches!(put(&to_node, key).await.unwrap(), PutOutcome::Stored(_)));
    assert_eq!(get(&to_node, key).await.unwrap(), blocks::bytes(&key, BLOCK));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_closes_its_socket_and_reads_on_keeps_its_bytes_until_it_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(dir.path(), "a", None, &["--dram.capacity=16MiB"]).await;
    let to_node = node.tcp().await;
    let key = blocks::key(1);
    put(&to_node, key).await.unwrap();
    let socket = node.socket.display().to_string();
    let mut reader = Hold::start(&["lease", &socket, &key.to_string()]).await;
    let first = blocks::bytes(&key, 1)[0];
    assert_eq!(reader.ask().await, format!("detached {first}"));
    until(&node, |status| status.quarantined_bytes == BLOCK as u64).await;
    // Everything else is evicted and written over, again and again; these bytes stay.
    for n in 100..300 {
        put(&to_node, blocks::key(n)).await.unwrap();
        if n % 50 == 0 {
            assert_eq!(reader.ask().await, format!("read {first}"));
        }
    }
    let control = format!("http://{}", node.daemon.address("control"));
    let mut control = NodeClient::connect(control).await.unwrap();
    let pins = control.list_pins(ListPinsRequest {}).await.unwrap().into_inner().pins;
    assert_eq!(pins.len(), 1);
    assert_eq!((pins[0].kind.as_str(), pins[0].owner.as_str()), ("quarantined", "hold"));
    reader.child.kill().await.unwrap();
    until(&node, |status| status.leases == 0 && status.quarantined_bytes == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn looking_up_and_leasing_without_loading_pins_nothing_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(dir.path(), "a", None, &["--dram.capacity=32MiB"]).await;
    let to_node = node.tcp().await;
    for n in 0..100 {
        put(&to_node, blocks::key(n)).await.unwrap();
    }
    // A thousand questions whose askers had the blocks themselves, or went away (F17, F40).
    let local = node.local().await;
    for n in 0..1000u64 {
        let fetch = fetch_of((n % 90..n % 90 + 10).map(blocks::key), LONG);
        drop(local.fetch(&fetch).await.unwrap());
        let keys = (0..100).map(blocks::key).collect();
        local.stored(blocks::model().layout, PartNumber(0), keys).await.unwrap();
    }
    until(&node, |status| status.leases == 0).await;
    for n in 1000..1200 {
        assert!(matches!(put(&to_node, blocks::key(n)).await.unwrap(), PutOutcome::Stored(_)));
    }
}
