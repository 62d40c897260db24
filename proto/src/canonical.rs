//! Canonical, length-framed, field-tagged encoding: what fingerprints and block keys are hashed over.
//!
//! Form (little endian): scheme text framed as field 0, then each field as `tag u16, length u64, bytes`.
//! Tags rise strictly within one value, so every value has one encoding and no two values share one.
//! A nested value is a field whose bytes are an encoding of its own, without a scheme.
//!
//! The scheme text carries the version: a change of meaning is a new scheme, never a new reading of an
//! old one.

use crate::wire::{DecodeError, Reader, Wire};

/// Collects fields in rising tag order.
#[derive(Debug)]
pub struct Encoder {
    bytes: Vec<u8>,
    last_tag: Option<u16>,
}

impl Encoder {
    /// Starts a value of its own, under `scheme`.
    pub fn with_scheme(scheme: &str) -> Self {
        let mut encoder = Self::nested();
        encoder.field(0, scheme.as_bytes());
        encoder
    }

    /// Starts a value that will be a field of another.
    pub fn nested() -> Self {
        Self { bytes: Vec::new(), last_tag: None }
    }

    /// Appends a field.
    ///
    /// # Panics
    /// When `tag` does not rise: that is a mistake in our own code.
    pub fn field(&mut self, tag: u16, value: &[u8]) -> &mut Self {
        assert!(self.last_tag.is_none_or(|last| tag > last), "tag {tag} does not rise");
        self.last_tag = Some(tag);
        tag.put(&mut self.bytes);
        (value.len() as u64).put(&mut self.bytes);
        self.bytes.extend_from_slice(value);
        self
    }

    /// Appends a field with an integer.
    pub fn number(&mut self, tag: u16, value: u64) -> &mut Self {
        self.field(tag, &value.to_le_bytes())
    }

    /// Appends a field with a list: a count, then each item with its length.
    pub fn list<I: AsRef<[u8]>>(
        &mut self,
        tag: u16,
        items: impl IntoIterator<Item = I>,
    ) -> &mut Self {
        let mut inner = Vec::new();
        let mut count = 0u64;
        for item in items {
            let item = item.as_ref();
            (item.len() as u64).put(&mut inner);
            inner.extend_from_slice(item);
            count += 1;
        }
        let mut value = count.to_le_bytes().to_vec();
        value.append(&mut inner);
        self.field(tag, &value)
    }

    /// The encoding.
    pub fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

/// Reads fields in rising tag order; refuses anything that [`Encoder`] would not have written.
#[derive(Debug)]
pub struct Decoder<'a> {
    reader: Reader<'a>,
}

impl<'a> Decoder<'a> {
    /// Reads a value of its own and checks its scheme.
    pub fn with_scheme(scheme: &str, bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let mut decoder = Self::nested(bytes);
        if decoder.field(0)? != scheme.as_bytes() {
            return Err(DecodeError::Text { what: "scheme", rule: "is not the expected one" });
        }
        Ok(decoder)
    }

    /// Reads a value that was a field of another.
    pub fn nested(bytes: &'a [u8]) -> Self {
        Self { reader: Reader::new(bytes) }
    }

    /// The bytes of the next field, which must have this tag.
    pub fn field(&mut self, tag: u16) -> Result<&'a [u8], DecodeError> {
        let found = u16::take(&mut self.reader)?;
        if found != tag {
            return Err(DecodeError::Unknown { what: "field tag", value: u64::from(found) });
        }
        let len = u64::take(&mut self.reader)?;
        self.reader.bytes("field", usize::try_from(len).unwrap_or(usize::MAX))
    }

    /// The next field as a fixed number of bytes.
    pub fn array<const N: usize>(&mut self, tag: u16) -> Result<[u8; N], DecodeError> {
        <[u8; N]>::from_wire("field", self.field(tag)?)
    }

    /// The next field as an integer.
    pub fn number(&mut self, tag: u16) -> Result<u64, DecodeError> {
        u64::from_wire("field", self.field(tag)?)
    }

    /// The next field as an integer that fits `u32`.
    pub fn number_u32(&mut self, tag: u16) -> Result<u32, DecodeError> {
        let value = self.number(tag)?;
        u32::try_from(value).map_err(|_| DecodeError::Limit {
            what: "field",
            value,
            limit: u64::from(u32::MAX),
        })
    }

    /// The next field as text.
    pub fn text(&mut self, tag: u16) -> Result<String, DecodeError> {
        String::from_utf8(self.field(tag)?.to_vec())
            .map_err(|_| DecodeError::Text { what: "field", rule: "must be UTF-8" })
    }

    /// The items of the next field.
    pub fn list(&mut self, tag: u16) -> Result<Vec<&'a [u8]>, DecodeError> {
        let mut inner = Reader::new(self.field(tag)?);
        let count = u64::take(&mut inner)?;
        // Each item takes at least its length field, so this bounds the list before it is allocated.
        let most = (inner.left() / 8) as u64;
        if count > most {
            return Err(DecodeError::Limit { what: "list", value: count, limit: most });
        }
        let items = (0..count)
            .map(|_| {
                let len = u64::take(&mut inner)?;
                inner.bytes("list item", usize::try_from(len).unwrap_or(usize::MAX))
            })
            .collect::<Result<_, _>>()?;
        inner.finish("list")?;
        Ok(items)
    }

    /// Ends the reading: nothing may be left over.
    pub fn finish(self) -> Result<(), DecodeError> {
        self.reader.finish("canonical value")
    }
}
