//! What a peer sent is decoded or refused; it never panics, and what is decoded encodes back.

use bolero::check;
use larder_proto::{
    event::{PartSet, records},
    fingerprint::{ContentDescription, LayoutDescription},
    frame::{self, HEADER_LEN, Header, decode_body},
    wire::Wire,
};

#[test]
fn header() {
    check!().for_each(|input: &[u8]| {
        let Some(bytes) = input.first_chunk::<HEADER_LEN>() else { return };
        // Random bytes rarely have a right checksum: give them one, to get past it.
        let mut bytes = *bytes;
        bytes[..5].copy_from_slice(b"LRDR\x01");
        let sum = larder_proto::checksum::sum(&bytes[..HEADER_LEN - 4]);
        bytes[HEADER_LEN - 4..].copy_from_slice(&sum.to_le_bytes());
        if let Ok(header) = Header::decode(&bytes) {
            assert_eq!(Header::decode(&header.encode()), Ok(header));
            assert!(header.body_len <= frame::BODY_LIMIT);
            assert!(header.payload_len <= frame::PAYLOAD_LIMIT);
        }
    });
}

fn encodes_back<T: Wire>(bytes: &[u8]) {
    if let Ok(value) = decode_body::<T>("fuzzed", bytes) {
        assert_eq!(value.to_wire(), bytes);
    }
}

#[test]
fn bodies() {
    check!().for_each(|input: &[u8]| {
        encodes_back::<frame::Hello>(input);
        encodes_back::<frame::HelloOk>(input);
        encodes_back::<frame::Lookup>(input);
        encodes_back::<frame::LookupOk>(input);
        encodes_back::<frame::Read>(input);
        encodes_back::<frame::ReadOk>(input);
        encodes_back::<frame::Reserve>(input);
        encodes_back::<frame::Commit>(input);
        encodes_back::<frame::Failed>(input);
        encodes_back::<frame::Leased>(input);
        encodes_back::<frame::PutStaged>(input);
        encodes_back::<frame::Match>(input);
        encodes_back::<frame::Matched>(input);
        encodes_back::<frame::Fetch>(input);
        encodes_back::<frame::Register>(input);
        encodes_back::<frame::ReuseHint>(input);
    });
}

#[test]
fn descriptions() {
    check!().for_each(|input: &[u8]| {
        if let Ok(content) = ContentDescription::decode(input) {
            assert_eq!(content.encode(), input);
        }
        if let Ok(layout) = LayoutDescription::decode(input) {
            assert_eq!(layout.encode(), input);
        }
    });
}

#[test]
fn inventory() {
    check!().for_each(|input: &[u8]| {
        records(input).for_each(drop);
        if let Ok(set) = PartSet::from_bytes(input) {
            assert_eq!(set.as_bytes(), input);
        }
    });
}
