use super::{cache::Cache, range::Range, trace::*, *};

fn trace(format: Option<Format>, lines: &[&str]) -> Result<Trace, String> {
    let mut reader = Reader::of(format);
    lines.iter().try_for_each(|line| reader.line(line))?;
    Ok(reader.finish("t".to_owned()))
}

fn plain(lines: &[&str]) -> Trace {
    trace(Some(Format::Plain), lines).unwrap()
}

fn hits(trace: &Trace, blocks: u32, contender: Contender) -> Hits {
    replay(trace, &Range::All.of(trace), blocks, contender, &[], &ProgressBar::hidden())
}

#[test]
fn every_format_says_the_same_and_is_told_from_the_others() {
    let requests = vec![
        Request { seconds: 0.5, blocks: vec![0, 1] },
        Request { seconds: 2.0, blocks: vec![0, 2] },
    ];
    let formats = [
        ["0.5 7 8 7", "2 7 9"],
        [
            r#"{"timestamp": 500, "input_length": 2, "output_length": 1, "hash_ids": [7, 8, 7]}"#,
            r#"{"timestamp": 2000, "input_length": 2, "output_length": 1, "hash_ids": [7, 9]}"#,
        ],
        [
            r#"{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "hash_ids": [7, 8]}"#,
            r#"{"chat_id": 2, "parent_chat_id": 1, "timestamp": 2.0, "hash_ids": [7, 9]}"#,
        ],
    ];
    for lines in formats {
        assert_eq!(trace(None, &lines).unwrap().requests, requests);
    }
}

#[test]
fn requests_are_replayed_in_the_order_of_their_time() {
    let late_first = plain(&["5 1", "3 2", "3 1"]);
    let blocks: Vec<_> = late_first.requests.iter().map(|r| r.blocks.clone()).collect();
    assert_eq!(blocks, [[1], [0], [0]]);
}

#[test]
fn a_malformed_line_is_named_with_its_field() {
    let refused = |format, line| trace(Some(format), &[line]).unwrap_err();
    let cases = [
        (Format::Mooncake, r#"{"timestamp": 1}"#, "hash_ids: missing"),
        (Format::Mooncake, r#"{"timestamp": "1", "hash_ids": []}"#, "timestamp: \"1\" is not a"),
        (Format::Bailian, r#"{"timestamp": 1, "hash_ids": [1, -2]}"#, "hash_ids[1]: -2 is not an"),
        (Format::Bailian, r#"{"timestamp": 1, "hash_ids": 3}"#, "hash_ids: not a list"),
        (Format::Mooncake, "{", "not JSON"),
        (Format::Plain, "now 1", "timestamp: \"now\" is not a number"),
        (Format::Plain, "inf 1", "timestamp: must be finite"),
        (Format::Plain, "1 2 x", "block 2: \"x\" is not an unsigned number"),
    ];
    for (format, line, said) in cases {
        let refusal = refused(format, line);
        assert!(refusal.starts_with(said), "{line}: {refusal}");
    }

    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "1 2\n\n1 x\n").unwrap();
    let refusal = Trace::read(file.path(), None).unwrap_err().to_string();
    assert!(refusal.ends_with(":3: block 1: \"x\" is not an unsigned number"), "{refusal}");
}

#[test]
fn a_range_names_requests_by_time() {
    let trace = plain(&["100 1", "104 1", "106 1", "110 1"]);
    let of = |text: &str| text.parse::<Range>().unwrap().of(&trace);
    assert_eq!((of("all"), of("first-half"), of("second-half")), (0..4, 0..2, 2..4));
    assert_eq!((of("4..10"), of("0..4.5"), of("20..30")), (1..3, 0..2, 4..4));
    for wrong in ["half", "3..2", "-1..2", "1..x"] {
        assert!(wrong.parse::<Range>().is_err(), "{wrong}");
    }
}

#[test]
fn a_later_range_starts_warm() {
    let trace = plain(&["0 1 2", "10 1 2"]);
    let warm = replay(&trace, &(1..2), 4, Contender::Lru, &[], &ProgressBar::hidden());
    assert_eq!(warm, Hits { found: 2, asked: 2 });
}

#[test]
fn only_the_leading_run_counts() {
    // Block 3 came without its ancestors once; a request that lacks those gains nothing by it.
    let trace = plain(&["0 3", "1 1 2 3"]);
    for contender in [Contender::S3Fifo, Contender::Lru, Contender::Gdsf, Contender::Belady] {
        assert_eq!(hits(&trace, 8, contender), Hits { found: 0, asked: 4 });
    }
}

#[test]
fn the_cache_keeps_its_size_and_evicts_tail_first() {
    for name in PolicyName::ALL {
        let mut cache = Cache::new(name.build(), 16, 4);
        assert_eq!(cache.request(&[0, 1, 2, 3]), 0);
        assert_eq!(cache.request(&[8, 9]), 0);
        assert_eq!(cache.held(), 4);
        assert_eq!(cache.request(&[0, 1, 2, 3]), 2, "{name}: the tail went, not the head");
    }
}

#[test]
fn belady_keeps_what_is_asked_for_next_and_lru_does_not() {
    let trace = plain(&["0 1", "1 2", "2 3", "3 1", "4 2", "5 3"]);
    assert_eq!(hits(&trace, 2, Contender::Lru).found, 0);
    assert_eq!(hits(&trace, 2, Contender::Belady).found, 2);
}

#[test]
fn a_session_that_is_known_to_be_over_makes_room_for_one_that_is_not() {
    // Two sessions with a common prompt; the first one is over when a third needs room.
    let trace = plain(&["0 0 1 2", "1 0 3 4", "2 5 6", "3 0 3 4"]);
    let of = |closing: &[bool]| {
        replay(&trace, &(3..4), 5, Contender::Lru, closing, &ProgressBar::hidden()).found
    };
    assert_eq!(of(&[]), 3, "lru takes the older one anyway");
    assert_eq!(of(&[false, true, false, false]), 1, "the one that was called over goes");
    assert_eq!(of(&sessions::last_requests(&trace)), 3);
}
