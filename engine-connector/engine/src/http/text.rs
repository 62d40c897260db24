//! From tokens' bytes to the text of an answer: whole characters, and nothing from a stop text on.
//!
//! Pure. Text that may turn out to be the start of a stop text, or of a character, is held back
//! until that is decided.

/// The text of one answer in the making.
#[derive(Debug)]
pub(super) struct TextStream {
    stops: Vec<String>,
    /// The start of a character whose rest is missing.
    bytes: Vec<u8>,
    /// Whole characters that may be the start of a stop text.
    held: String,
    stopped: bool,
}

impl TextStream {
    /// An empty answer that ends before the first of `stops`.
    #[must_use]
    pub(super) fn new(stops: Vec<String>) -> Self {
        Self { stops, bytes: Vec::new(), held: String::new(), stopped: false }
    }

    /// Takes the bytes of one token; returns the text that is now certain.
    pub(super) fn push(&mut self, bytes: &[u8]) -> String {
        if self.stopped {
            return String::new();
        }
        self.bytes.extend_from_slice(bytes);
        let whole = take_characters(&mut self.bytes);
        self.held.push_str(&whole);
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = found {
            self.stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let certain = self.held.len() - self.possible_stop();
        let rest = self.held.split_off(certain);
        std::mem::replace(&mut self.held, rest)
    }

    /// Whether a stop text was found: no token changes the answer any more.
    #[must_use]
    pub(super) fn stopped(&self) -> bool {
        self.stopped
    }

    /// The answer is complete: what was held back is text after all.
    pub(super) fn finish(&mut self) -> String {
        if self.stopped {
            return String::new();
        }
        let mut rest = std::mem::take(&mut self.held);
        rest.push_str(&String::from_utf8_lossy(&std::mem::take(&mut self.bytes)));
        rest
    }

    /// Bytes at the end of the held text that begin a stop text.
    fn possible_stop(&self) -> usize {
        let begins = |stop: &String, len: usize| {
            self.held.is_char_boundary(self.held.len() - len)
                && stop.as_bytes().starts_with(&self.held.as_bytes()[self.held.len() - len..])
        };
        let longest = |stop: &String| {
            let most = self.held.len().min(stop.len() - 1);
            (1..=most).rev().find(|len| begins(stop, *len)).unwrap_or(0)
        };
        self.stops.iter().map(longest).max().unwrap_or(0)
    }
}

/// Takes all whole characters off the front; bytes that are none become U+FFFD.
fn take_characters(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut at = 0;
    while at < bytes.len() {
        match std::str::from_utf8(&bytes[at..]) {
            Ok(rest) => {
                text.push_str(rest);
                at = bytes.len();
            }
            Err(error) => {
                let valid = &bytes[at..at + error.valid_up_to()];
                text.push_str(&String::from_utf8_lossy(valid));
                at += error.valid_up_to();
                match error.error_len() {
                    // The rest of the character may be in the next token.
                    None => break,
                    Some(len) => {
                        text.push(char::REPLACEMENT_CHARACTER);
                        at += len;
                    }
                }
            }
        }
    }
    bytes.drain(..at);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stream(stops: &[&str], pieces: &[&[u8]]) -> (Vec<String>, bool) {
        let mut text = TextStream::new(stops.iter().map(|stop| (*stop).to_owned()).collect());
        let mut out: Vec<String> = pieces.iter().map(|piece| text.push(piece)).collect();
        out.push(text.finish());
        (out, text.stopped())
    }

    #[test]
    fn a_character_is_sent_when_its_last_byte_is_there() {
        let bread = "\u{1f35e}".as_bytes();
        let (out, _) = stream(&[], &[&bread[..1], &bread[1..3], &bread[3..], b"!"]);
        assert_eq!(out, ["", "", "\u{1f35e}", "!", ""]);
        let (out, _) = stream(&[], &[b"a\xff", &bread[..2]]);
        assert_eq!(out, ["a\u{fffd}", "", "\u{fffd}"]);
    }

    #[test]
    fn a_stop_text_and_what_follows_never_leave() {
        let (out, stopped) = stream(&["END"], &[b"abE", b"N", b"Dxy", b"z"]);
        assert_eq!((out.concat(), stopped), ("ab".into(), true));
        assert_eq!(out[0], "ab", "what cannot be a stop text is sent at once");
        let (out, stopped) = stream(&["END"], &[b"abE", b"N", b"O"]);
        assert_eq!((out.concat(), stopped), ("abENO".into(), false));
        let (out, _) = stream(&["b", "ab"], &[b"xab"]);
        assert_eq!(out.concat(), "x", "the earliest stop wins");
    }

    proptest! {
        #[test]
        fn any_split_gives_the_text_before_the_first_stop(
            text in "[ab\u{e4}\u{1f35e}]{0,20}", stops in prop::collection::vec("[ab\u{e4}]{1,3}", 0..3),
            cuts in prop::collection::vec(0_usize..80, 0..6),
        ) {
            let bytes = text.as_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.push(bytes.len());
            cuts.sort_unstable();
            let mut stream = TextStream::new(stops.clone());
            let (mut from, mut out) = (0, String::new());
            for cut in cuts {
                out.push_str(&stream.push(&bytes[from..cut]));
                from = cut;
            }
            out.push_str(&stream.finish());
            prop_assert!(text.starts_with(&out));
            prop_assert!(stops.iter().all(|stop| !out.contains(stop.as_str())));
            if stops.iter().all(|stop| !text.contains(stop.as_str())) {
                prop_assert_eq!(out, text);
            }
        }
    }
}
