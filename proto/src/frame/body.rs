//! The bodies of frames, one struct an [`Op`](super::Op).

use super::PART_LEN_LIMIT;
use crate::{
    block_key::{BlockKey, KeyPrefix, OriginHash},
    checksum::ChunkSums,
    fingerprint::{ContentFingerprint, LayoutFingerprint, ModelVersion},
    ids::{Generation, Incarnation, NodeId, TenantName},
    part::{PartNumber, PartRef, Tier, TierSet},
    wire::{DecodeError, Reader, ShortBytes, ShortText, Wire, wire_enum, wire_struct},
};

/// The most keys of one lookup, match or fetch.
pub const KEYS_LIMIT: usize = 16_384;

wire_enum! {
    /// The closed set of failures. What to do about one follows from its code alone; the reason beside
    /// it is for people.
    pub enum Code: u16, "error code" {
        /// The part is not here.
        Miss = 1 => "miss",
        /// It was here in another generation or incarnation than the one asked for.
        Gone = 2 => "gone",
        /// Its bytes do not match their checksums; the copy has been withdrawn.
        Damaged = 3 => "damaged",
        /// The layout is not the one expected.
        Layout = 4 => "layout",
        /// Too much at once; ask again later.
        Busy = 5 => "busy",
        /// No room, and nothing that may be evicted.
        Full = 6 => "full",
        /// A length or count is above its limit, or does not fit the others.
        Limit = 7 => "limit",
        /// Not for this principal.
        Denied = 8 => "denied",
        /// No common version, or peers that would not understand each other.
        Version = 9 => "version",
        /// The node takes no new work.
        Draining = 10 => "draining",
        /// Our mistake, or a broken frame.
        Internal = 11 => "internal",
    }
}

wire_enum! {
    /// Who opens a connection.
    pub enum Role: u8, "role" {
        /// A client or an engine's connector.
        Client = 1 => "client",
        /// Another store node.
        Node = 2 => "node",
    }
}

wire_enum! {
    /// Classes of transfers, most urgent first.
    pub enum Class: u8, "class" {
        /// Somebody waits for it.
        Demand = 0 => "demand",
        /// Somebody may want it soon.
        Prefetch = 1 => "prefetch",
        /// For safety.
        Replication = 2 => "replication",
        /// To empty a node.
        Drain = 3 => "drain",
    }
}

wire_enum! {
    /// How the stored bytes of a part encode its values.
    pub enum Codec: u8, "codec" {
        /// As they are.
        Raw = 0 => "raw",
    }
}

wire_struct! {
    /// Opens a connection.
    pub struct Hello {
        /// Oldest version spoken.
        pub version_min: u8,
        /// Newest version spoken.
        pub version_max: u8,
        /// Feature bits offered; unknown ones are ignored.
        pub features: u64,
        /// Who asks.
        pub role: Role,
        /// [`crate::block_key::self_check`] of the asker; a difference is refused.
        pub key_check: KeyPrefix,
        /// Whose parts.
        pub tenant: TenantName,
        /// What proves it; empty where tenants are not authenticated.
        pub capability: ShortBytes<256>,
        /// The principal recorded as producer of what this connection puts.
        pub producer: ShortText<128>,
        /// The life of the producer.
        pub producer_incarnation: Incarnation,
    }
}

wire_struct! {
    /// Accepts a connection.
    pub struct HelloOk {
        /// The version spoken from here on.
        pub version: u8,
        /// Feature bits in force.
        pub features: u64,
        /// The node that answers.
        pub node: NodeId,
        /// Its life: a reader that expected another one must not use this connection (F05).
        pub incarnation: Incarnation,
        /// Goes into every later header.
        pub tenant_slot: u32,
        /// Open requests that the node allows on this connection.
        pub requests_limit: u32,
        /// The node closes the connection when nothing was heard for this long.
        pub silence_limit_ms: u32,
    }
}

wire_struct! {
    /// Which of these parts are held?
    pub struct Lookup {
        /// The layout of all.
        pub layout: LayoutFingerprint,
        /// The part number of all.
        pub part: PartNumber,
        /// The blocks.
        pub keys: Vec<BlockKey>,
    }
}

wire_struct! {
    /// Tiers of each part asked for, in order; empty for those not held.
    pub struct LookupOk {
        /// One set a key.
        pub tiers: Vec<TierSet>,
    }
}

wire_struct! {
    /// Send `len` bytes of a part from `offset` on; both on chunk bounds, or to the end.
    pub struct Read {
        /// Which part.
        pub part: PartRef,
        /// First byte wanted.
        pub offset: u64,
        /// Bytes wanted; `u64::MAX` for all to the end.
        pub len: u64,
        /// Only this generation will do.
        pub generation: Option<Generation>,
        /// How urgent.
        pub class: Class,
        /// Check the bytes against their sums before sending them: asked again after a transfer arrived
        /// damaged, to find out which end the damage is at. A damaged copy is withdrawn.
        pub verify: bool,
        /// The content that the part is expected to have: names the space in the notice that goes to
        /// masters when the part turns out to be absent.
        pub content: ContentFingerprint,
    }
}

wire_struct! {
    /// What is known of a stored part: enough for the receiver to verify it and to store it as it is.
    pub struct PartInfo {
        /// Which stored copy this is.
        pub generation: Generation,
        /// Bytes of the whole part.
        pub len: u64,
        /// How they encode its values.
        pub codec: Codec,
        /// One sum a chunk, of the whole part.
        pub sums: ChunkSums,
        /// Where it belongs in its chain, and who made it.
        pub origin: Origin,
    }
}

wire_struct! {
    /// Where a part belongs in its chain, and who made it. Travels with every copy.
    pub struct Origin {
        /// What decides the values: with the layout it names the model version.
        pub content: ContentFingerprint,
        /// The first block of the chain.
        pub root: BlockKey,
        /// The block before this one; none for the root.
        pub parent: Option<BlockKey>,
        /// The engine's own hash of the block, opaque to us.
        pub origin_hash: Option<OriginHash>,
        /// Who published it first.
        pub producer: ShortText<128>,
        /// In which of its lives.
        pub producer_incarnation: Incarnation,
    }
}

wire_struct! {
    /// The answer to a read; the payload begins in the same frame.
    pub struct ReadOk {
        /// What is known of the part.
        pub info: PartInfo,
        /// The range that is sent: first byte and length.
        pub offset: u64,
        /// Bytes of the range.
        pub len: u64,
    }
}

wire_struct! {
    /// What a writer says of a part before its bytes move.
    pub struct Reserve {
        /// Which part.
        pub part: PartRef,
        /// Its length in bytes.
        pub len: u64,
        /// How the bytes encode its values.
        pub codec: Codec,
        /// Chunk length of the sums that will come with the commit.
        pub chunk_len: u32,
        /// What decides the values: with the layout it names the model version.
        pub content: ContentFingerprint,
        /// The first block of the chain.
        pub root: BlockKey,
        /// The block before this one; none for the root.
        pub parent: Option<BlockKey>,
        /// The engine's own hash of the block.
        pub origin_hash: Option<OriginHash>,
    }
}

wire_struct! {
    /// All bytes are sent; make the part visible if they add up to these sums.
    pub struct Commit {
        /// As the writer computed them.
        pub sums: ChunkSums,
    }
}

wire_struct! {
    /// The part is visible, or was already.
    pub struct Committed {
        /// The generation it was given.
        pub generation: Generation,
    }
}

wire_struct! {
    /// Somebody else is putting the part.
    pub struct InProgress {
        /// Who.
        pub producer: ShortText<128>,
        /// For how long already.
        pub since_ms: u64,
    }
}

wire_struct! {
    /// The request failed.
    pub struct Failed {
        /// How; decides what to do next.
        pub code: Code,
        /// Which item of a batch; zero for others.
        pub item: u32,
        /// Why, for people.
        pub reason: ShortText<512>,
    }
}

wire_struct! {
    /// Two file descriptors come with this frame: the arena, read-only, and the staging area.
    pub struct Attached {
        /// Bytes of the arena.
        pub arena_len: u64,
        /// Bytes of the staging area.
        pub staging_len: u64,
    }
}

wire_struct! {
    /// Let me read a part in place.
    pub struct Lease {
        /// Which part.
        pub part: PartRef,
    }
}

wire_enum! {
    /// Where the bytes of a leased part came from.
    pub enum Source: u8, "source" {
        /// They were here already.
        Local = 1 => "local",
        /// They were brought from a peer for this request.
        Peer = 2 => "peer",
    }
}

wire_struct! {
    /// A part lies in the arena and stays there until the lease is released or the reader's process is
    /// gone.
    pub struct Leased {
        /// Which item of a fetch; zero for a lease.
        pub item: u32,
        /// Names the lease in [`Release`].
        pub lease: u64,
        /// First byte in the arena.
        pub offset: u64,
        /// Where the bytes came from.
        pub source: Source,
        /// The node they came from.
        pub node: NodeId,
        /// What is known of the part.
        pub info: PartInfo,
    }
}

wire_struct! {
    /// These leases are read no more.
    pub struct Release {
        /// As named in [`Leased`].
        pub leases: Vec<u64>,
    }
}

wire_struct! {
    /// Put a part whose bytes lie in the staging area. Answered by `Committed`, `Exists`, `InProgress` or
    /// `Failed`; after any of them the staging range is free again.
    pub struct PutStaged {
        /// What a writer says of a part.
        pub put: Reserve,
        /// First byte in the staging area.
        pub staging_offset: u64,
    }
}

wire_struct! {
    /// How far does a match of these blocks reach?
    pub struct Match {
        /// Of which model version.
        pub model: ModelVersion,
        /// Which rank asks: its parts decide.
        pub rank: u32,
        /// The chain, from the root on.
        pub keys: Vec<BlockKey>,
        /// Ask masters for what this node does not hold.
        pub peers: bool,
    }
}

wire_struct! {
    /// One node that holds blocks of a match.
    pub struct PeerSource {
        /// Which node.
        pub node: NodeId,
        /// Its life.
        pub incarnation: Incarnation,
    }
}

wire_struct! {
    /// A run of blocks with the same sources.
    pub struct MatchRun {
        /// Blocks in the run.
        pub blocks: u32,
        /// Tiers on this node; empty when the run must come from a peer.
        pub local: TierSet,
        /// Index into [`Matched::peers`] and fastest tier there, best first.
        pub peers: Vec<RunPeer>,
    }
}

wire_struct! {
    /// A peer that holds every block of a run.
    #[derive(Copy)]
    pub struct RunPeer {
        /// Index into [`Matched::peers`].
        pub peer: u16,
        /// The tier it would come from.
        pub tier: Tier,
    }
}

wire_struct! {
    /// How far a match reaches, and from where. Runs are in order and without gaps; their blocks add up
    /// to the match.
    pub struct Matched {
        /// The nodes that runs refer to.
        pub peers: Vec<PeerSource>,
        /// The match.
        pub runs: Vec<MatchRun>,
        /// Whether the index that was asked knew all nodes' inventories; a miss of a partial answer
        /// may be a hit.
        pub complete: bool,
    }
}

wire_struct! {
    /// Bring these parts here and lease them to me.
    pub struct Fetch {
        /// The model version of all.
        pub model: ModelVersion,
        /// Which parts, in the order wanted.
        pub items: Vec<FetchItem>,
        /// Give up after this long.
        pub deadline_ms: u32,
        /// How urgent.
        pub class: Class,
    }
}

wire_struct! {
    /// One part of a fetch.
    #[derive(Copy)]
    pub struct FetchItem {
        /// The block.
        pub key: BlockKey,
        /// Which part of it.
        pub part: PartNumber,
    }
}

wire_struct! {
    /// The model version that an engine runs, as canonical bytes.
    pub struct Register {
        /// What people call it.
        pub display_name: ShortText<512>,
        /// [`crate::fingerprint::ContentDescription::encode`].
        pub content: ShortBytes<16_384>,
        /// [`crate::fingerprint::LayoutDescription::encode`].
        pub layout: ShortBytes<32_768>,
    }
}

wire_enum! {
    /// Whether more is to come in a session.
    pub enum SessionState: u8, "session state" {
        /// It goes on: its blocks are likely to be asked for again.
        Alive = 1 => "alive",
        /// It is over: what only it used is not asked for again.
        Closed = 2 => "closed",
    }
}

wire_enum! {
    /// How much is lost when blocks of a session are gone.
    pub enum Priority: u8, "priority" {
        /// Little: they may go as soon as room is needed, as those of a closed session.
        Low = 1 => "low",
        /// As with any other.
        Normal = 2 => "normal",
        /// Much: they stay while others may go instead.
        High = 3 => "high",
    }
}

wire_struct! {
    /// What is known of the future of a chain. It is no use of a block and no promise: the node does with it
    /// what its own state allows.
    pub struct ReuseHint {
        /// The layout of all.
        pub layout: LayoutFingerprint,
        /// The chain, from the root on; blocks that are not here are passed over.
        pub keys: Vec<BlockKey>,
        /// Whether its session goes on.
        pub session: SessionState,
        /// How much is lost with it.
        pub priority: Priority,
        /// Seconds for which a living session wants its blocks kept; zero for no wish, or with
        /// [`Priority::High`] for [`DEFAULT_RETENTION_S`].
        pub retention_s: u32,
    }
}

/// Seconds for which blocks of high priority are kept unless a hint says how long.
pub const DEFAULT_RETENTION_S: u32 = 600;
/// The longest wish to keep blocks that a node takes, in seconds; longer ones are cut to it.
pub const RETENTION_LIMIT_S: u32 = 3600;

wire_struct! {
    /// A hint arrived.
    #[derive(Copy)]
    pub struct Hinted {
        /// Blocks that it changed anything for.
        pub blocks: u32,
    }
}

wire_struct! {
    /// A body with nothing in it.
    #[derive(Copy)]
    pub struct Empty {}
}

/// Why a requested range of a part cannot be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadRange {
    /// It ends beyond the part, or offset plus length overflows.
    #[error("range {offset}+{len} is outside a part of {part_len} bytes")]
    Outside {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes of the part.
        part_len: u64,
    },
    /// It does not start and end on chunk bounds, so its bytes could not be verified.
    #[error("range {offset}+{len} is not on bounds of {chunk_len} bytes")]
    Unaligned {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes of a chunk.
        chunk_len: u32,
    },
}

impl Read {
    /// The range within a part of `part_len` bytes, as (offset, length). Checked without overflow.
    pub fn range(&self, part_len: u64, chunk_len: u32) -> Result<(u64, u64), BadRange> {
        let (offset, asked) = (self.offset, self.len);
        let outside = BadRange::Outside { offset, len: asked, part_len };
        let rest = part_len.checked_sub(offset).ok_or(outside)?;
        let len = if asked == u64::MAX { rest } else { asked };
        if len > rest {
            return Err(outside);
        }
        let chunk = u64::from(chunk_len);
        if offset % chunk != 0 || (len % chunk != 0 && offset + len != part_len) {
            return Err(BadRange::Unaligned { offset, len, chunk_len });
        }
        Ok((offset, len))
    }
}

impl Reserve {
    /// Holds length and chunking to their limits.
    pub fn check(&self) -> Result<(), DecodeError> {
        crate::checksum::check_chunk_len(self.chunk_len)?;
        let limit =
            PART_LEN_LIMIT.min(u64::from(self.chunk_len) * crate::checksum::CHUNKS_LIMIT as u64);
        match (1..=limit).contains(&self.len) {
            true => Ok(()),
            false => Err(DecodeError::Limit { what: "part length", value: self.len, limit }),
        }
    }
}

/// Decodes the body of a frame, refusing left-over bytes.
pub fn decode_body<T: Wire>(what: &'static str, body: &[u8]) -> Result<T, DecodeError> {
    let mut reader = Reader::new(body);
    let value = T::take(&mut reader)?;
    reader.finish(what)?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(offset: u64, len: u64) -> Read {
        let part = PartRef {
            key: BlockKey::from_bytes([1; 32]),
            layout: LayoutFingerprint::from_bytes([2; 32]),
            part: PartNumber(0),
        };
        Read {
            part,
            offset,
            len,
            generation: None,
            class: Class::Demand,
            verify: false,
            content: ContentFingerprint::from_bytes([3; 32]),
        }
    }

    #[test]
    fn ranges_outside_a_part_or_that_wrap_around_are_refused() {
        let len = 3 * 4096 + 5;
        assert_eq!(read(0, u64::MAX).range(len, 4096), Ok((0, len)));
        assert_eq!(read(8192, u64::MAX).range(len, 4096), Ok((8192, 4101)));
        assert_eq!(read(4096, 4096).range(len, 4096), Ok((4096, 4096)));
        for (offset, len_asked) in [(u64::MAX, 2), (len + 1, 0), (4096, u64::MAX - 1), (0, len + 1)]
        {
            let refused = read(offset, len_asked).range(len, 4096);
            assert!(matches!(refused, Err(BadRange::Outside { .. })), "{offset}+{len_asked}");
        }
        for (offset, len_asked) in [(1, 4096), (0, 4097), (4096, 1)] {
            let refused = read(offset, len_asked).range(len, 4096);
            assert!(matches!(refused, Err(BadRange::Unaligned { .. })), "{offset}+{len_asked}");
        }
    }

    #[test]
    fn an_error_code_of_a_later_version_is_refused() {
        let failed = Failed { code: Code::Miss, item: 0, reason: ShortText::cut("not here") };
        let mut bytes = failed.to_wire();
        assert_eq!(decode_body::<Failed>("failed", &bytes), Ok(failed));
        bytes[0] = 99;
        assert!(decode_body::<Failed>("failed", &bytes).is_err());
    }

    proptest! {
        #[test]
        fn decoding_any_body_never_panics_and_what_decodes_encodes_back(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            macro_rules! try_all { ($($body:ty),*) => {$(
                if let Ok(value) = decode_body::<$body>("any", &bytes) {
                    prop_assert_eq!(&value.to_wire(), &bytes);
                }
            )*} }
            try_all!(Hello, HelloOk, Lookup, LookupOk, Read, ReadOk, Reserve, Commit, Committed,
                InProgress, Failed, Attached, Lease, Leased, Release, PutStaged, Match, Matched,
                Fetch, Register, ReuseHint, Hinted, Empty);
        }
    }
}
