//! A llama of 0.7 million random weights with a byte-level tokenizer: 3 MB, written in an instant.
//!
//! Every byte is a token, "th" is one more, so the token count of a text is known beforehand. The
//! answers are noise, but the same noise every time.

use super::gguf::{Gguf, Value};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::io;
use std::path::Path;

const EMBEDDING: usize = 128;
const LAYERS: usize = 4;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = EMBEDDING / HEADS;
const FEED_FORWARD: usize = 256;
const VOCABULARY: usize = 512;
const BOS: u32 = 256;
const EOS: u32 = 257;
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// Writes the model whose weights come from `seed`.
pub(crate) fn write(path: &Path, seed: u64) -> io::Result<()> {
    let mut file = Gguf::default();
    hyper_parameters(&mut file);
    tokenizer(&mut file);
    weights(&mut file, &mut ChaCha8Rng::seed_from_u64(seed));
    file.write(path)
}

fn hyper_parameters(file: &mut Gguf) {
    let numbers = [
        ("llama.context_length", 8192),
        ("llama.embedding_length", EMBEDDING),
        ("llama.block_count", LAYERS),
        ("llama.feed_forward_length", FEED_FORWARD),
        ("llama.attention.head_count", HEADS),
        ("llama.attention.head_count_kv", KV_HEADS),
        ("llama.rope.dimension_count", HEAD),
        ("llama.vocab_size", VOCABULARY),
    ];
    file.value("general.architecture", Value::Text("llama".into()));
    file.value("general.name", Value::Text("tiny".into()));
    for (key, number) in numbers {
        file.value(key, Value::U32(u32::try_from(number).unwrap()));
    }
    file.value("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
    file.value("llama.rope.freq_base", Value::F32(10_000.0));
}

fn tokenizer(file: &mut Gguf) {
    let mut tokens: Vec<String> = (0..=255_u8).map(|byte| printable(byte).to_string()).collect();
    let mut kinds = vec![NORMAL; 256];
    for (text, kind) in [("<|bos|>", CONTROL), ("<|eos|>", CONTROL), ("th", NORMAL)] {
        tokens.push(text.into());
        kinds.push(kind);
    }
    while tokens.len() < VOCABULARY {
        tokens.push(format!("<|r{}|>", tokens.len()));
        kinds.push(USER_DEFINED);
    }
    file.value("tokenizer.ggml.model", Value::Text("gpt2".into()));
    file.value("tokenizer.ggml.pre", Value::Text("gpt-2".into()));
    file.value("tokenizer.ggml.tokens", Value::Texts(tokens));
    file.value("tokenizer.ggml.token_type", Value::I32s(kinds));
    file.value("tokenizer.ggml.merges", Value::Texts(vec!["t h".into()]));
    file.value("tokenizer.ggml.bos_token_id", Value::U32(BOS));
    file.value("tokenizer.ggml.eos_token_id", Value::U32(EOS));
    file.value("tokenizer.ggml.add_bos_token", Value::Bool(false));
}

/// GPT-2's alphabet: bytes that print stand for themselves, the others for what follows U+00FF.
fn printable(byte: u8) -> char {
    let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if prints(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|other| !prints(*other)).count();
    char::from_u32(0x100 + u32::try_from(rank).unwrap()).unwrap()
}

fn weights(file: &mut Gguf, random: &mut ChaCha8Rng) {
    let mut matrix = |file: &mut Gguf, name: &str, columns: usize, rows: usize, scale: f32| {
        let elements = (0..rows * columns).map(|_| scale * normal(random)).collect();
        file.tensor(name, &[columns, rows], elements);
    };
    let ones = |file: &mut Gguf, name: &str| {
        file.tensor(name, &[EMBEDDING], vec![1.0; EMBEDDING]);
    };
    let scale = |inputs: usize| 1.6 / f32::from(u16::try_from(inputs).unwrap()).sqrt();
    matrix(file, "token_embd.weight", EMBEDDING, VOCABULARY, 1.0);
    ones(file, "output_norm.weight");
    matrix(file, "output.weight", EMBEDDING, VOCABULARY, scale(EMBEDDING));
    for layer in 0..LAYERS {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        ones(file, &name("attn_norm"));
        ones(file, &name("ffn_norm"));
        let kv = KV_HEADS * HEAD;
        for (part, inputs, outputs) in [
            ("attn_q", EMBEDDING, EMBEDDING),
            ("attn_k", EMBEDDING, kv),
            ("attn_v", EMBEDDING, kv),
            ("attn_output", EMBEDDING, EMBEDDING),
            ("ffn_gate", EMBEDDING, FEED_FORWARD),
            ("ffn_up", EMBEDDING, FEED_FORWARD),
            ("ffn_down", FEED_FORWARD, EMBEDDING),
        ] {
            matrix(file, &name(part), inputs, outputs, scale(inputs));
        }
    }
}

/// A normally distributed number (Box and Muller).
fn normal(random: &mut ChaCha8Rng) -> f32 {
    let (radius, angle) = (1.0 - random.random::<f32>(), random.random::<f32>());
    (-2.0 * radius.ln()).sqrt() * (std::f32::consts::TAU * angle).cos()
}
