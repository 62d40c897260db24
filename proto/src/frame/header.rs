//! The 64-byte header in front of every frame.
//!
//! ```text
//!  0  magic "LRDR"          16  request id u64        40  payload offset u64
//!  4  version u8            24  tenant slot u32       48  reserved, zero
//!  5  op u8                 28  body length u32       60  CRC-32 of bytes 0..60
//!  6  flags u16             32  payload length u32
//!  8  reserved, zero        36  reserved, zero
//! ```
//!
//! The CRC makes a flipped length an error instead of a long read; it is checked before any field is
//! believed.

use super::{BODY_LIMIT, PAYLOAD_LIMIT};
use crate::{checksum, wire::DecodeError, wire::Reader, wire::Wire, wire::wire_enum};

/// Bytes of a header.
pub const HEADER_LEN: usize = 64;
/// The data-plane version that this code speaks.
pub const VERSION: u8 = 1;

const MAGIC: [u8; 4] = *b"LRDR";

wire_enum! {
    /// What a frame says. Odd codes of 1 to 63 are questions, even ones answers; see the module docs.
    pub enum Op: u8, "op" {
        /// Opens a connection.
        Hello = 1 => "hello",
        /// Accepts it.
        HelloOk = 2 => "hello_ok",
        /// Which of these parts are held?
        Lookup = 3 => "lookup",
        /// Tiers of each.
        LookupOk = 4 => "lookup_ok",
        /// Send a range of a part.
        Read = 5 => "read",
        /// What is known of it, and its first bytes.
        ReadOk = 6 => "read_ok",
        /// May I put this part?
        Reserve = 7 => "reserve",
        /// Yes: send its bytes.
        Granted = 8 => "granted",
        /// All bytes are sent; make it visible.
        Commit = 9 => "commit",
        /// It is visible.
        Committed = 10 => "committed",
        /// Are you there? Answered even while long requests run.
        Ping = 11 => "ping",
        /// Yes.
        Pong = 12 => "pong",
        /// Not needed: the part is held already.
        Exists = 14 => "exists",
        /// Not now: somebody else is putting it.
        InProgress = 16 => "in_progress",
        /// The request failed; the code says how.
        Failed = 18 => "failed",
        /// More payload of a request, in either direction.
        Data = 20 => "data",
        /// The asker wants no answer any more.
        Cancel = 21 => "cancel",
        /// Hand me your arena and a staging area (Unix sockets only).
        Attach = 33 => "attach",
        /// Here they are, as file descriptors.
        Attached = 34 => "attached",
        /// Let me read a part in place.
        Lease = 35 => "lease",
        /// Where it lies.
        Leased = 36 => "leased",
        /// I no longer read these. Not answered.
        Release = 37 => "release",
        /// Put a part whose bytes lie in my staging area.
        PutStaged = 39 => "put_staged",
        /// How far does a match of these blocks reach, and from where?
        Match = 41 => "match",
        /// So far, and from there.
        Matched = 42 => "matched",
        /// Bring these parts here and lease them to me; each is answered by `Leased` or `Failed`.
        Fetch = 43 => "fetch",
        /// All parts of a fetch are answered.
        FetchDone = 44 => "fetch_done",
        /// This is the model version that I run.
        Register = 45 => "register",
        /// Done; nothing to say.
        Done = 46 => "done",
        /// What is known of the future of these blocks. Only to a node that has [`features::HINTS`].
        Hint = 47 => "hint",
        /// So many of them are here and were marked.
        Hinted = 48 => "hinted",
    }
}

/// What a peer may lack that speaks the same version: each side offers its bits, and those of both are in force.
pub mod features {
    /// It takes [`Op::Hint`](super::Op::Hint).
    pub const HINTS: u64 = 1;
    /// All that this code has.
    pub const ALL: u64 = HINTS;
}

/// Flags of a frame.
pub mod flags {
    /// No further payload of this request follows in this direction.
    pub const LAST: u16 = 1;
    /// All flags of this version; others are refused.
    pub const ALL: u16 = LAST;
}

/// A decoded header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What the frame says.
    pub op: Op,
    /// See [`flags`].
    pub flags: u16,
    /// Chosen by the asker, repeated in every frame of the request; unique among its open requests.
    pub request: u64,
    /// The slot that hello gave to the connection's tenant; a frame with another is refused.
    pub tenant_slot: u32,
    /// Bytes of the body.
    pub body_len: u32,
    /// Bytes of the payload.
    pub payload_len: u32,
    /// Where the payload lies within the requested range.
    pub payload_offset: u64,
}

impl Header {
    /// A frame without payload.
    pub fn new(op: Op, request: u64, tenant_slot: u32, body_len: u32) -> Self {
        Self {
            op,
            flags: flags::LAST,
            request,
            tenant_slot,
            body_len,
            payload_len: 0,
            payload_offset: 0,
        }
    }

    /// Whether this is the last payload of its request in its direction.
    pub fn is_last(&self) -> bool {
        self.flags & flags::LAST != 0
    }

    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = self.op.code();
        bytes[6..8].copy_from_slice(&self.flags.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.request.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.tenant_slot.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.payload_len.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.payload_offset.to_le_bytes());
        let sum = checksum::sum(&bytes[..HEADER_LEN - 4]);
        bytes[HEADER_LEN - 4..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a header and holds its lengths to their limits.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, DecodeError> {
        let from = &mut Reader::new(bytes);
        let unknown = |what, value: u64| Err(DecodeError::Unknown { what, value });
        if from.array("magic")? != MAGIC {
            return Err(DecodeError::Text { what: "magic", rule: "this is not a Larder peer" });
        }
        let (sum_bytes, said) = bytes.split_at(HEADER_LEN - 4);
        if u32::from_wire("header checksum", said)? != checksum::sum(sum_bytes) {
            return Err(DecodeError::Text { what: "header", rule: "its checksum does not match" });
        }
        let version = u8::take(from)?;
        if version != VERSION {
            return unknown("data-plane version", u64::from(version));
        }
        let (op, flags) = (Op::take(from)?, u16::take(from)?);
        if flags & !flags::ALL != 0 {
            return unknown("flags", u64::from(flags));
        }
        from.bytes("reserved", 8)?;
        let (request, tenant_slot) = (u64::take(from)?, u32::take(from)?);
        let (body_len, payload_len) = (u32::take(from)?, u32::take(from)?);
        let within = |what, value: u32, limit: u32| match value <= limit {
            true => Ok(()),
            false => Err(DecodeError::Limit { what, value: value.into(), limit: limit.into() }),
        };
        within("body", body_len, BODY_LIMIT)?;
        within("payload", payload_len, PAYLOAD_LIMIT)?;
        from.bytes("reserved", 4)?;
        let payload_offset = u64::take(from)?;
        Ok(Self { op, flags, request, tenant_slot, body_len, payload_len, payload_offset })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> impl Strategy<Value = Header> {
        let op = prop::sample::select(Op::ALL);
        let lens = (0..=BODY_LIMIT, 0..=PAYLOAD_LIMIT, any::<u64>());
        (op, 0..=flags::ALL, any::<u64>(), any::<u32>(), lens).prop_map(
            |(op, flags, request, tenant_slot, (body_len, payload_len, payload_offset))| Header {
                op,
                flags,
                request,
                tenant_slot,
                body_len,
                payload_len,
                payload_offset,
            },
        )
    }

    proptest! {
        #[test]
        fn headers_round_trip_and_no_flipped_bit_goes_unseen(h in header(), bit in 0usize..512) {
            let mut bytes = h.encode();
            prop_assert_eq!(Header::decode(&bytes), Ok(h));
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Header::decode(&bytes).is_err());
        }

        #[test]
        fn decoding_any_64_bytes_never_panics(bytes: [u8; 32], tail: [u8; 32]) {
            let mut all = [0; 64];
            all[..32].copy_from_slice(&bytes);
            all[32..].copy_from_slice(&tail);
            let _ = Header::decode(&all);
        }
    }

    #[test]
    fn lengths_above_their_limits_are_refused() {
        for (body_len, payload_len) in [(BODY_LIMIT + 1, 0), (u32::MAX, 0), (0, PAYLOAD_LIMIT + 1)]
        {
            let header = Header { payload_len, ..Header::new(Op::Read, 1, 0, body_len) };
            assert!(matches!(Header::decode(&header.encode()), Err(DecodeError::Limit { .. })));
        }
    }
}
