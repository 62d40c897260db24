//! From a prompt's tokens to the keys of its blocks.
//!
//! A key depends on the content, so every model version of a name has keys of its own for the same prompt.

use crate::{cli::TokenArgs, error::CtlError, models::Version};
use larder_proto::{BlockKey, block_key::keys_of};
use serde::Deserialize;
use std::{fs, io, path::Path};

/// The most bytes of a file of tokens: far above any prompt.
const FILE_LIMIT: u64 = 64 << 20;

/// Of a prompt without a key.
pub(crate) const SHORTER_THAN_A_BLOCK: &str =
    "the prompt is shorter than one block: only whole blocks are kept";

/// A prompt's whole blocks in one model version.
#[derive(Debug, Clone)]
pub(crate) struct Chain {
    /// The version.
    pub(crate) version: Version,
    /// Tokens of a block.
    pub(crate) block_tokens: u32,
    /// One key a block, from the root on.
    pub(crate) keys: Vec<BlockKey>,
}

impl Chain {
    /// Tokens that lie in whole blocks.
    pub(crate) fn covered_tokens(&self) -> usize {
        self.keys.len() * self.block_tokens as usize
    }
}

/// The chains of a prompt, one for each version.
pub(crate) fn chains(
    versions: Vec<Version>,
    tokens: &[u32],
    salt: &str,
) -> Result<Vec<Chain>, CtlError> {
    let chain = |version: Version| {
        let block_tokens = version.block_tokens()?;
        let keys = keys_of(version.id.content, block_tokens, salt.as_bytes(), tokens);
        Ok(Chain { version, block_tokens, keys })
    };
    versions.into_iter().map(chain).collect()
}

/// The tokens of the prompt that the arguments name; none where they name no prompt.
pub(crate) fn read_tokens(args: &TokenArgs) -> Result<Option<Vec<u32>>, CtlError> {
    let Some(path) = &args.tokens else { return Ok(None) };
    let text = read_text(path).map_err(|source| CtlError::File {
        what: "read tokens from",
        path: path.clone(),
        source,
    })?;
    let tokens =
        parse_tokens(&text).map_err(|rule| CtlError::Content { path: path.clone(), rule })?;
    Ok(Some(tokens))
}

fn read_text(path: &Path) -> io::Result<String> {
    if path.as_os_str() == "-" {
        return bounded(io::stdin().lock());
    }
    bounded(fs::File::open(path)?)
}

fn bounded(from: impl io::Read) -> io::Result<String> {
    let mut text = String::new();
    let read = io::Read::read_to_string(&mut from.take(FILE_LIMIT + 1), &mut text)?;
    match read as u64 > FILE_LIMIT {
        true => Err(io::Error::other(format!("longer than {FILE_LIMIT} bytes"))),
        false => Ok(text),
    }
}

/// What `/tokenize` of an engine answers, as far as it matters here.
#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<u32>,
}

/// Reads `[1, 2, 3]`, `{"tokens": [1, 2, 3]}`, `1 2 3` or `1,2,3`. The error is the rule that the text
/// breaks.
fn parse_tokens(text: &str) -> Result<Vec<u32>, String> {
    let text = text.trim();
    let tokens = match text.chars().next() {
        Some('[') => Some(serde_json::from_str(text)),
        Some('{') => Some(serde_json::from_str(text).map(|Tokenized { tokens }| tokens)),
        _ => None,
    };
    if let Some(tokens) = tokens {
        return tokens.map_err(|error| {
            format!(
                "must be a JSON list of token ids, or an object with one as \"tokens\": {error}"
            )
        });
    }
    let words = text.split(|c: char| c.is_whitespace() || c == ',').filter(|word| !word.is_empty());
    let token = |(at, word): (usize, &str)| {
        word.parse::<u32>().map_err(|_| {
            let word: String = word.chars().take(20).collect();
            format!("token {at} = {word:?}: must be a number from 0 to {}", u32::MAX)
        })
    };
    let tokens = words.enumerate().map(token).collect::<Result<Vec<_>, _>>()?;
    match tokens.is_empty() {
        true => Err("must hold at least one token id".to_owned()),
        false => Ok(tokens),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_from_json_and_from_plain_numbers() {
        let tokenized = r#"{"count": 3, "tokens": [1, 2, 3]}"#;
        for text in ["[1, 2,3]", tokenized, "1 2 3\n", "1,2,3", " 1\n2\t3 "] {
            assert_eq!(parse_tokens(text), Ok(vec![1, 2, 3]), "{text}");
        }
    }

    #[test]
    fn what_is_no_token_is_named_with_its_place() {
        assert!(parse_tokens("1 2 x3").unwrap_err().starts_with("token 2 = \"x3\": must be"));
        assert!(parse_tokens("1 -2").unwrap_err().starts_with("token 1"));
        assert!(parse_tokens("[1, 2.5]").unwrap_err().contains("JSON list"));
        assert!(parse_tokens(r#"{"error": {}}"#).unwrap_err().contains("missing field `tokens`"));
        assert!(parse_tokens(" \n").unwrap_err().contains("at least one"));
    }
}
