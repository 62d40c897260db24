//! Which requests of a trace belong to one session, as far as their chains say.
//!
//! A request goes on with the session whose last request it extends: it begins with all blocks of that one but,
//! perhaps, the last, which may not have been complete then. Of several the deepest counts. A common prompt alone
//! makes no session, unless somebody asked for no more than it.

use super::trace::Trace;
use std::collections::HashMap;

/// Of each request, whether nothing in the trace goes on from it.
pub(super) fn last_requests(trace: &Trace) -> Vec<bool> {
    let mut is_last = vec![true; trace.requests.len()];
    // By block: the last request of the session that ends there.
    let mut ends: HashMap<u32, usize> = HashMap::new();
    for (at, request) in trace.requests.iter().enumerate() {
        let blocks = &request.blocks;
        if let Some((block, before)) =
            blocks.iter().rev().find_map(|block| Some((*block, *ends.get(block)?)))
        {
            is_last[before] = false;
            ends.remove(&block);
        }
        // The last complete block for sure.
        let end = blocks.len().checked_sub(2).or(blocks.len().checked_sub(1));
        if let Some(end) = end.and_then(|end| blocks.get(end)) {
            ends.insert(*end, at);
        }
    }
    is_last
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::trace::{Format, Reader};

    fn last(lines: &[&str]) -> Vec<bool> {
        let mut reader = Reader::of(Some(Format::Plain));
        lines.iter().for_each(|line| reader.line(line).unwrap());
        last_requests(&reader.finish("test".to_owned()))
    }

    #[test]
    fn a_session_ends_with_the_last_request_that_extends_it() {
        // A common prompt (1), two sessions from there, one of which goes on after its last block was completed.
        let lines = ["0 1 2 3", "1 1 2 4 5", "2 1 6 7", "3 1 2 4 5 8 9"];
        assert_eq!(last(&lines), [false, false, true, true]);
    }

    #[test]
    fn requests_with_a_common_prompt_alone_are_sessions_of_their_own() {
        assert_eq!(last(&["0 1 2 3", "1 1 4 5", "2 1 6 7"]), [true; 3]);
    }

    #[test]
    fn the_same_prompt_again_goes_on_with_the_session() {
        assert_eq!(last(&["0 1", "1 1", "2 1 2"]), [false, false, true]);
    }
}
