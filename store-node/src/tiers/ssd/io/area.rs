//! Memory that many requests use.

use crate::tiers::dram::Arena;
use std::{any::Any, fmt, ops::Range, sync::Arc};

/// Memory that a driver may lock once for all requests on it. It stays as long as this value.
#[derive(Clone)]
pub struct Area {
    range: Range<usize>,
    _memory: Arc<dyn Any + Send + Sync>,
}

impl Area {
    /// All memory of an arena. The kernel keeps 16 bytes a page of it (4 MiB a GiB).
    pub fn of(arena: &Arc<Arena>) -> Self {
        let memory = arena.memory();
        // SAFETY: an empty range: nothing is read, so nobody can write it meanwhile.
        #[expect(unsafe_code, reason = "asks for the address only")]
        let base = unsafe { memory.bytes(0, 0) }.as_ptr().addr();
        Self { range: base..base + memory.len(), _memory: Arc::clone(arena) as _ }
    }

    /// Its addresses.
    pub(super) fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl fmt::Debug for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Area({:#x}+{})", self.range.start, self.range.len())
    }
}
