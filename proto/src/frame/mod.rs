//! The data plane: framed messages over TCP and Unix sockets.
//!
//! A frame is a 64-byte [`Header`], a body (typed, at most [`BODY_LIMIT`]) and a payload (raw bytes of a
//! part, at most [`PAYLOAD_LIMIT`]). Requests carry an id of the asker's choice and may be answered in
//! any order; a long payload comes in several frames with rising offsets, the last one flagged.
//!
//! ```text
//! asker                                   node
//!   Hello  ------------------------------>        version range, features, tenant, who
//!          <------------------------ HelloOk      version, node, incarnation, tenant slot, limits
//!   Read   ------------------------------>
//!          <-------- ReadOk + payload [, Data…]   or Failed
//!   Reserve ----------------------------->
//!          <----------------------- Granted       or Exists, InProgress, Failed: before bytes move
//!   Data… + Commit ---------------------->
//!          <---------------------- Committed      only now is the part visible
//!   Cancel ------------------------------>        no answer; the request ends, whatever its stage
//!   Hint   ------------------------------>        with `features::HINTS` alone
//!          <------------------------ Hinted
//! ```

mod body;
mod header;

pub use body::*;
pub use header::*;

/// The most bytes of a body.
pub const BODY_LIMIT: u32 = 1 << 20;
/// The most payload bytes of one frame.
pub const PAYLOAD_LIMIT: u32 = 4 << 20;
/// The most bytes of one part (1 GiB), far above any block; a length above it is refused unread.
pub const PART_LEN_LIMIT: u64 = 1 << 30;
