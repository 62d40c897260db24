//! Frozen bytes of every format that two processes must agree on.
//!
//! `vectors/v1.txt` holds one `name = hex` a line. It is never regenerated: when a line here differs, a
//! running cluster would break, so the *version* of that format has to change (each mismatch says which)
//! and a `v2.txt` is added beside the old file.
#![expect(clippy::unwrap_used, reason = "helpers of tests: what fails says where")]

use larder_proto::{
    BlockKey, ContentFingerprint, Generation, Incarnation, LayoutFingerprint, ModelVersion, NodeId,
    PartNumber, Tier, TierSet,
    block_key::{Extra, ExtraKind, KeyChain, OriginHash, self_check},
    checksum::{ChunkSums, DEFAULT_CHUNK},
    event::{PartSet, PartSetDef, Record, RecordKind, record_digest},
    fingerprint::{Adapter, ContentDescription, Digest, LayerGroup, LayoutDescription},
    frame::{
        self, Class, Code, Codec, FetchItem, Header, MatchRun, Op, Origin, PartInfo, PeerSource,
        Priority, Role, RunPeer, SessionState, Source,
    },
    ids::TenantName,
    part::{GroupRule, PartRef},
    wire::{ShortBytes, ShortText, Wire},
};
use std::collections::BTreeMap;

const FROZEN: &str = include_str!("../vectors/v1.txt");

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn content() -> ContentDescription {
    ContentDescription {
        weights: Digest::from_bytes([0x11; 32]),
        weight_epoch: 3,
        tokenizer: Digest::from_bytes([0x22; 32]),
        adapter: Some(Adapter {
            weights: Digest::from_bytes([0x33; 32]),
            semantics: "scale=0.5".to_owned(),
        }),
        kv_dtype: "f16".to_owned(),
        kv_scales: None,
    }
}

fn layout() -> LayoutDescription {
    let group = |rule, layers: &[u32]| LayerGroup {
        rule,
        layers: layers.to_vec(),
        dtype: "f16".to_owned(),
        shape: vec![2, 32, 3, 64],
        strides: Vec::new(),
        part_bytes: 24_576,
    };
    LayoutDescription {
        engine_family: "llama.cpp".to_owned(),
        kv_format_version: 1,
        block_tokens: 32,
        groups: vec![
            group(GroupRule::EveryBlock, &[0, 2]),
            group(GroupRule::LastWindow { window_blocks: 4 }, &[1]),
        ],
        parallel: BTreeMap::from([("tp".to_owned(), 2)]),
        options: BTreeMap::from([("flash_attention".to_owned(), "on".to_owned())]),
    }
}

fn fingerprints() -> Vec<(&'static str, String)> {
    vec![
        ("content.encoding", hex(&content().encode())),
        ("content.fingerprint", content().fingerprint().to_string()),
        ("layout.encoding", hex(&layout().encode())),
        ("layout.fingerprint", layout().fingerprint().to_string()),
    ]
}

fn keys() -> Vec<(&'static str, String)> {
    let mut chain = KeyChain::new(content().fingerprint(), 4, b"");
    let root = chain.next(&[1, 2, 3, 4], &[], None);
    let second = chain.next(&[5, 6, 7, 8], &[], None);
    let media = Extra { kind: ExtraKind::Media, value: vec![7; 32] };
    let third = chain.next(&[9, 9, 9, u32::MAX], &[media], None);
    let origin = OriginHash::new(vec![0xab; 32]).unwrap();
    let fourth = chain.next(&[0, 0, 0, 0], &[], Some(&origin));
    let salted = KeyChain::new(content().fingerprint(), 4, b"salt").next(&[1, 2, 3, 4], &[], None);
    vec![
        ("key.root", root.to_string()),
        ("key.second", second.to_string()),
        ("key.with_media", third.to_string()),
        ("key.with_origin_hash", fourth.to_string()),
        ("key.salted_root", salted.to_string()),
        ("key.self_check", self_check().to_string()),
        ("tenant.default", TenantName::default().id().to_string()),
    ]
}

fn part() -> PartRef {
    PartRef {
        key: BlockKey::from_bytes([0xaa; 32]),
        layout: LayoutFingerprint::from_bytes([0xbb; 32]),
        part: PartNumber(5),
    }
}

fn model() -> ModelVersion {
    ModelVersion { content: ContentFingerprint::from_bytes([0xcc; 32]), layout: part().layout }
}

fn info() -> PartInfo {
    PartInfo {
        generation: Generation { incarnation: Incarnation(1_700_000_000_000), counter: 9 },
        len: 300_000,
        codec: Codec::Raw,
        sums: ChunkSums::of(&vec![1; 300_000], DEFAULT_CHUNK),
        origin: Origin {
            content: model().content,
            root: BlockKey::from_bytes([0xdd; 32]),
            parent: Some(BlockKey::from_bytes([0xee; 32])),
            origin_hash: None,
            producer: ShortText::cut("engine-a"),
            producer_incarnation: Incarnation(77),
        },
    }
}

fn reserve() -> frame::Reserve {
    frame::Reserve {
        part: part(),
        len: 300_000,
        codec: Codec::Raw,
        chunk_len: DEFAULT_CHUNK,
        content: model().content,
        root: part().key,
        parent: None,
        origin_hash: Some(OriginHash::new(vec![1, 2, 3]).unwrap()),
    }
}

fn frames() -> Vec<(&'static str, String)> {
    let header = Header {
        payload_len: 4096,
        payload_offset: 8192,
        ..Header::new(Op::Data, 0x0102_0304_0506_0708, 3, 17)
    };
    let hello = frame::Hello {
        version_min: 1,
        version_max: 2,
        features: 4,
        role: Role::Node,
        key_check: self_check(),
        tenant: TenantName::default(),
        capability: ShortBytes::new(vec![9, 8]).unwrap(),
        producer: ShortText::cut("engine-a"),
        producer_incarnation: Incarnation(77),
    };
    let hello_ok = frame::HelloOk {
        version: 1,
        features: 0,
        node: NodeId::from_bytes([0x0a; 16]),
        incarnation: Incarnation(5),
        tenant_slot: 2,
        requests_limit: 256,
        silence_limit_ms: 8000,
    };
    let read = frame::Read {
        part: part(),
        offset: 262_144,
        len: u64::MAX,
        generation: Some(info().generation),
        class: Class::Prefetch,
        verify: true,
        content: model().content,
    };
    let keys = vec![part().key, BlockKey::from_bytes([1; 32])];
    let node = NodeId::from_bytes([0x0a; 16]);
    let leased = frame::Leased {
        item: 1,
        lease: 42,
        offset: 8192,
        source: Source::Peer,
        node,
        info: info(),
    };
    let ask = frame::Match { model: model(), rank: 1, keys: keys.clone(), peers: true };
    let matched = frame::Matched {
        peers: vec![PeerSource { node, incarnation: Incarnation(5) }],
        runs: vec![
            MatchRun { blocks: 2, local: TierSet::of(Tier::Dram), peers: Vec::new() },
            MatchRun {
                blocks: 1,
                local: TierSet::EMPTY,
                peers: vec![RunPeer { peer: 0, tier: Tier::Ssd }],
            },
        ],
        complete: true,
    };
    let fetch = frame::Fetch {
        model: model(),
        items: vec![FetchItem { key: part().key, part: PartNumber(5) }],
        deadline_ms: 1500,
        class: Class::Demand,
    };
    let failed = frame::Failed { code: Code::Damaged, item: 2, reason: ShortText::cut("why") };
    let register = frame::Register {
        display_name: ShortText::cut("SmolLM2"),
        content: ShortBytes::new(content().encode()).unwrap(),
        layout: ShortBytes::new(layout().encode()).unwrap(),
    };
    let hint = frame::ReuseHint {
        layout: part().layout,
        keys: keys.clone(),
        session: SessionState::Closed,
        priority: Priority::High,
        retention_s: 300,
    };
    let lookup = frame::Lookup { layout: part().layout, part: PartNumber(5), keys };
    vec![
        ("frame.header", hex(&header.encode())),
        ("frame.hello", hex(&hello.to_wire())),
        ("frame.hello_ok", hex(&hello_ok.to_wire())),
        ("frame.lookup", hex(&lookup.to_wire())),
        (
            "frame.lookup_ok",
            hex(&frame::LookupOk { tiers: vec![TierSet::of(Tier::Ssd)] }.to_wire()),
        ),
        ("frame.read", hex(&read.to_wire())),
        ("frame.read_ok", hex(&frame::ReadOk { info: info(), offset: 0, len: 300_000 }.to_wire())),
        ("frame.reserve", hex(&reserve().to_wire())),
        ("frame.commit", hex(&frame::Commit { sums: info().sums }.to_wire())),
        ("frame.committed", hex(&frame::Committed { generation: info().generation }.to_wire())),
        ("frame.failed", hex(&failed.to_wire())),
        ("frame.leased", hex(&leased.to_wire())),
        ("frame.release", hex(&frame::Release { leases: vec![42, 43] }.to_wire())),
        (
            "frame.put_staged",
            hex(&frame::PutStaged { put: reserve(), staging_offset: 4096 }.to_wire()),
        ),
        ("frame.match", hex(&ask.to_wire())),
        ("frame.matched", hex(&matched.to_wire())),
        ("frame.fetch", hex(&fetch.to_wire())),
        ("frame.register", hex(&register.to_wire())),
        ("frame.reuse_hint", hex(&hint.to_wire())),
        ("frame.hinted", hex(&frame::Hinted { blocks: 3 }.to_wire())),
    ]
}

fn events() -> Vec<(&'static str, String)> {
    let def = PartSetDef {
        tenant: TenantName::default().id(),
        model: model(),
        parts: PartSet::of([PartNumber(0), PartNumber(9)]).unwrap(),
    };
    let record = Record {
        key: part().key,
        set: 7,
        tiers: TierSet::of(Tier::Dram).with(Tier::Ssd),
        kind: RecordKind::Evicted,
        reserved: 0,
    };
    let digest = record_digest(&def, &part().key, TierSet::of(Tier::Dram));
    vec![
        ("event.part_set", hex(def.parts.as_bytes())),
        ("event.record", hex(&record.to_wire())),
        ("event.digest", format!("{digest:016x}")),
    ]
}

fn hold(made: Vec<(&'static str, String)>, bump: &str) {
    let frozen: BTreeMap<&str, &str> =
        FROZEN.lines().filter_map(|line| line.split_once(" = ")).collect();
    for (name, actual) in made {
        let expected = frozen.get(name).copied().unwrap_or("(no such line)");
        assert_eq!(expected, actual, "\n{name} changed: {bump}\n{name} = {actual}");
    }
}

#[test]
fn fingerprints_are_frozen() {
    hold(fingerprints(), "bump the scheme `larder/content/1` or `larder/layout/1`");
}

#[test]
fn block_keys_are_frozen() {
    hold(keys(), "bump `block_key::KEY_SCHEME`");
}

#[test]
fn frames_are_frozen() {
    hold(frames(), "bump `frame::VERSION` and keep speaking the old one");
}

#[test]
fn inventory_records_are_frozen() {
    hold(events(), "bump `Hello.protocol` of the session and keep taking the old one");
}

#[test]
fn the_frozen_file_has_no_line_that_nobody_checks() {
    let made = [fingerprints(), keys(), frames(), events()].concat();
    let lines: Vec<&str> = FROZEN.lines().filter(|line| !line.starts_with('#')).collect();
    if lines.len() != made.len() {
        let all: String = made.iter().map(|(name, value)| format!("{name} = {value}\n")).collect();
        panic!("{} lines are frozen, {} are made:\n{all}", lines.len(), made.len());
    }
}
