//! The two calls of llama.cpp that move a sequence's state as bytes: all `unsafe` of this crate.

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::session::LlamaStateSeqFlags;

/// Copies the whole state of `sequence` into `into`, which is cleared first. False when llama.cpp
/// wrote another number of bytes than it had announced; `into` is empty then.
///
/// Takes the context exclusively, so that nothing can change between the two calls.
pub(super) fn read(context: &mut LlamaContext<'_>, sequence: i32, into: &mut Vec<u8>) -> bool {
    into.clear();
    let announced = context.state_seq_get_size_ext(sequence, LlamaStateSeqFlags::empty());
    into.reserve_exact(announced);
    // SAFETY: `into` owns at least `announced` writable bytes (`reserve_exact` above, on an empty
    // vector). llama.cpp computes that size by running the same serialiser on the same cells
    // (`llama_context::state_seq_get_size`), and the exclusive borrow keeps the cells as they
    // were, so it writes no more than that.
    let written = unsafe {
        context.state_seq_get_data_ext(into.as_mut_ptr(), sequence, LlamaStateSeqFlags::empty())
    };
    if written != announced {
        return false;
    }
    // SAFETY: the capacity is at least `announced` (above), and llama.cpp has just said that it
    // wrote exactly that many bytes from the start of the buffer.
    unsafe { into.set_len(announced) };
    true
}

/// Replaces the state of `sequence` by `state`. False when llama.cpp refused it, and then the
/// sequence is empty.
///
/// `state` comes from `KvLayout::denormalise` alone: head made by us, structure checked.
pub(super) fn write(context: &mut LlamaContext<'_>, sequence: i32, state: &[u8]) -> bool {
    // SAFETY: llama.cpp reads `state` through a reader that knows its length and refuses to go
    // beyond it (`llama_io_read_host`), and copies rows only after comparing type and row size
    // with its own. Any bytes are therefore memory-safe; what they mean was checked before.
    unsafe { context.state_seq_set_data_ext(state, sequence, LlamaStateSeqFlags::empty()) }
}
