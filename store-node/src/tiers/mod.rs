//! Where a node keeps the bytes of parts.
//!
//! A tier hands out *copies*: owned handles that keep their bytes in place until the last one is
//! dropped. The catalog holds one copy a tier and part; a reader holds another for as long as it reads.
//! A tier knows nothing of names, policies or visibility.

pub mod dram;
pub mod ssd;
