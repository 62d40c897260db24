//! The wrapper over llama.cpp with a real context: blocks leave and enter exactly.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use larder_engine::llama::sample::{Sampler, SamplerOptions};
use larder_engine::llama::{
    BatchToken, Context, ContextOptions, KvError, KvType, Model, SequenceId, Token,
};

const BLOCK: u32 = 32;

fn options(kv_type: KvType, flash_attention: bool) -> ContextOptions {
    ContextOptions {
        cells: 1024,
        sequences: 4,
        batch_tokens: 128,
        threads: 1,
        kv_type,
        flash_attention,
        block_tokens: BLOCK,
    }
}

fn tokens(count: u32) -> Vec<Token> {
    (0..count).map(|i| (i * 7919 + i * i * 31 + 13) % 256).collect()
}

/// One call to the model; returns the logits after the last token.
fn decode(
    context: &mut Context<'_>,
    sequence: SequenceId,
    first: u32,
    tokens: &[Token],
) -> Vec<f32> {
    let last = tokens.len() - 1;
    let batch: Vec<BatchToken> = (first..)
        .zip(tokens.iter().enumerate())
        .map(|(position, (index, token))| BatchToken {
            token: *token,
            position,
            sequence,
            logits: index == last,
        })
        .collect();
    context.decode(&batch).unwrap();
    context.logits(last).to_vec()
}

/// Block by block, then the tail: as the scheduler computes a prompt.
fn prefill(
    context: &mut Context<'_>,
    sequence: SequenceId,
    first: u32,
    tokens: &[Token],
) -> Vec<f32> {
    let mut logits = Vec::new();
    let mut at = first as usize;
    while at < tokens.len() {
        let end = (at + BLOCK as usize).min(tokens.len());
        logits = decode(context, sequence, u32::try_from(at).unwrap(), &tokens[at..end]);
        at = end;
    }
    logits
}

fn greedy(
    context: &mut Context<'_>,
    sequence: SequenceId,
    mut at: u32,
    mut logits: Vec<f32>,
) -> (Vec<Token>, Vec<f32>) {
    let mut sampler = Sampler::new(SamplerOptions { temperature: 0.0, top_p: 1.0, seed: 0 });
    let (mut chosen, mut seen) = (Vec::new(), Vec::new());
    for _ in 0..16 {
        let token = sampler.choose(&logits);
        seen.extend_from_slice(&logits);
        chosen.push(token);
        logits = decode(context, sequence, at, &[token]);
        at += 1;
    }
    (chosen, seen)
}

fn export(context: &mut Context<'_>, sequence: SequenceId, blocks: u32) -> Vec<Vec<u8>> {
    (0..blocks)
        .map(|block| {
            let mut bytes = Vec::new();
            context.export_block(sequence, block, &mut bytes).unwrap();
            bytes
        })
        .collect()
}

#[test]
fn an_imported_prefix_gives_the_same_logits_to_the_bit() {
    let model = Model::load(&support::tiny_model(), |_| ()).unwrap();
    let prompt = tokens(5 * BLOCK + 9);
    let cases = [(KvType::F16, true), (KvType::F16, false), (KvType::Q8, true)];
    for (kv_type, flash_attention) in cases {
        let case = format!("{} flash attention {flash_attention}", kv_type.name());
        let sequence = SequenceId(0);
        let mut first = Context::new(&model, options(kv_type, flash_attention)).unwrap();
        let cold = prefill(&mut first, sequence, 0, &prompt);
        let blocks = export(&mut first, sequence, 5);
        let end = u32::try_from(prompt.len()).unwrap();
        let cold = greedy(&mut first, sequence, end, cold);

        for valid in [1, 3, 5] {
            let mut second = Context::new(&model, options(kv_type, flash_attention)).unwrap();
            for (index, bytes) in (0..).zip(&blocks[..valid as usize]) {
                second.import_block(sequence, index, bytes).unwrap();
            }
            let hit = prefill(&mut second, sequence, valid * BLOCK, &prompt);
            let hit = greedy(&mut second, sequence, end, hit);
            assert_eq!(hit.0, cold.0, "{case}, {valid} blocks: tokens");
            assert_eq!(hit.1, cold.1, "{case}, {valid} blocks: logits");
        }
    }
}

#[test]
fn equal_blocks_are_equal_bytes_whatever_cells_they_were_in() {
    let model = Model::load(&support::tiny_model(), |_| ()).unwrap();
    let prompt = tokens(3 * BLOCK);
    let mut context = Context::new(&model, options(KvType::F16, true)).unwrap();
    prefill(&mut context, SequenceId(0), 0, &prompt);
    let alone = export(&mut context, SequenceId(0), 3);
    for bytes in &alone {
        assert_eq!(bytes.len(), context.layout().unwrap().block_bytes());
    }

    // Leave holes, then import into another sequence that has to use them.
    prefill(&mut context, SequenceId(1), 0, &tokens(40));
    context.release(SequenceId(0));
    prefill(&mut context, SequenceId(2), 0, &tokens(20));
    for (index, bytes) in (0..).zip(&alone) {
        context.import_block(SequenceId(3), index, bytes).unwrap();
    }
    assert_eq!(export(&mut context, SequenceId(3), 3), alone);
}

#[test]
fn a_damaged_structure_is_refused_and_leaves_the_sequence_as_it_was() {
    let model = Model::load(&support::tiny_model(), |_| ()).unwrap();
    let mut context = Context::new(&model, options(KvType::F16, true)).unwrap();
    prefill(&mut context, SequenceId(0), 0, &tokens(2 * BLOCK));
    let blocks = export(&mut context, SequenceId(0), 2);
    let target = SequenceId(1);
    context.import_block(target, 0, &blocks[0]).unwrap();

    let mut flipped = blocks[1].clone();
    flipped[12] ^= 1; // The layer count.
    for bad in [&[] as &[u8], &blocks[1][..100], &flipped] {
        let refused = context.import_block(target, 1, bad);
        assert!(matches!(refused, Err(KvError::Format { block: 1, .. })), "{refused:?}");
    }
    let early = context.import_block(target, 2, &blocks[1]);
    assert!(matches!(early, Err(KvError::Position { .. })), "{early:?}");
    assert_eq!(context.end_of(target), i64::from(BLOCK));
    context.import_block(target, 1, &blocks[1]).unwrap();
    assert_eq!(export(&mut context, target, 2), blocks);
    assert!(context.export_block(target, 2, &mut Vec::new()).is_err(), "not computed");
}

#[test]
fn blocks_of_another_kv_type_or_attention_do_not_fit() {
    let model = Model::load(&support::tiny_model(), |_| ()).unwrap();
    let mut plain = Context::new(&model, options(KvType::F16, true)).unwrap();
    prefill(&mut plain, SequenceId(0), 0, &tokens(BLOCK));
    let block = export(&mut plain, SequenceId(0), 1).remove(0);
    for (kv_type, flash_attention) in [(KvType::Q8, true), (KvType::F16, false)] {
        let mut other = Context::new(&model, options(kv_type, flash_attention)).unwrap();
        let refused = other.import_block(SequenceId(0), 0, &block);
        assert!(matches!(refused, Err(KvError::Format { .. })), "{refused:?}");
    }
}

#[test]
fn prompts_and_single_tokens_of_several_sequences_share_a_call() {
    let model = Model::load(&support::tiny_model(), |_| ()).unwrap();
    let mut context = Context::new(&model, options(KvType::F16, true)).unwrap();
    prefill(&mut context, SequenceId(0), 0, &tokens(20));
    let alone = decode(&mut context, SequenceId(0), 20, &[5]);
    context.release(SequenceId(0));
    prefill(&mut context, SequenceId(0), 0, &tokens(20));

    let mut batch =
        vec![BatchToken { token: 5, position: 20, sequence: SequenceId(0), logits: true }];
    batch.extend((0..).zip(tokens(BLOCK)).map(|(position, token)| BatchToken {
        token,
        position,
        sequence: SequenceId(1),
        logits: false,
    }));
    context.decode(&batch).unwrap();
    // The shape of a call decides which kernels run, hence a tolerance.
    let worst = context.logits(0).iter().zip(&alone).map(|(a, b)| (a - b).abs());
    assert!(worst.fold(0.0, f32::max) < 0.1);
}

#[test]
fn the_tokenizer_gives_back_what_it_took() {
    let model = Model::load(&support::tiny_model(), |_| ()).unwrap();
    let text = "the larder\n\u{e4}\u{1f35e}";
    let tokens = model.tokenize(text);
    assert_eq!(tokens.len(), text.len() - 1, "one token a byte, and one for \"th\"");
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| model.piece(*token)).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), text);
    assert!(model.ends_generation(257) && !model.ends_generation(0));
    assert_eq!(model.tokenizer_digest(), model.tokenizer_digest());
}

#[test]
fn a_missing_or_foreign_file_is_refused_with_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("not.gguf");
    let error = Model::load(&path, |_| ()).unwrap_err().to_string();
    assert!(error.contains("not.gguf: No such file"), "{error}");
    for content in [&b"hello"[..], b"", b"GGU"] {
        std::fs::write(&path, content).unwrap();
        let error = Model::load(&path, |_| ()).unwrap_err().to_string();
        assert!(error.contains("not.gguf: it is no GGUF file"), "{error}");
    }
    std::fs::write(&path, b"GGUF and no more").unwrap();
    let error = Model::load(&path, |_| ()).unwrap_err().to_string();
    assert!(error.contains("not.gguf: llama.cpp does not take it: it is cut off"), "{error}");
}
