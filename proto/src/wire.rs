//! Bounded binary encoding of data-plane bodies and inventory records.
//!
//! Little endian, no padding, no self-description: the version in the frame header says what the bytes
//! mean. Every count and length is checked against the bytes that are really there *before* anything is
//! allocated, so a lying peer costs at most the frame it already sent. Decoding never panics.

/// Why bytes could not be decoded. Says what was read, never echoes the bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end before the value does.
    #[error("{what} needs {needed} bytes, {left} are left")]
    Short {
        /// What was being read.
        what: &'static str,
        /// Bytes that the value needs at least.
        needed: usize,
        /// Bytes that are left.
        left: usize,
    },
    /// A value outside its allowed range or set.
    #[error("{what} has no meaning: {value}")]
    Unknown {
        /// What was being read.
        what: &'static str,
        /// The value found.
        value: u64,
    },
    /// A count or length above its limit.
    #[error("{what} of {value} is above the limit of {limit}")]
    Limit {
        /// What was being read.
        what: &'static str,
        /// The value found.
        value: u64,
        /// The largest allowed value.
        limit: u64,
    },
    /// Text that is not UTF-8 or breaks the rule of its type.
    #[error("{what}: {rule}")]
    Text {
        /// What was being read.
        what: &'static str,
        /// The broken rule.
        rule: &'static str,
    },
    /// Bytes are left over after the value.
    #[error("{left} bytes left over after {what}")]
    Trailing {
        /// What was read.
        what: &'static str,
        /// Bytes left over.
        left: usize,
    },
}

/// Reads values from the front of a byte slice.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// A reader over all of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Bytes not read yet.
    pub fn left(&self) -> usize {
        self.rest.len()
    }

    /// The next `len` bytes, borrowed.
    pub fn bytes(&mut self, what: &'static str, len: usize) -> Result<&'a [u8], DecodeError> {
        let short = DecodeError::Short { what, needed: len, left: self.rest.len() };
        let (head, rest) = self.rest.split_at_checked(len).ok_or(short)?;
        self.rest = rest;
        Ok(head)
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], DecodeError> {
        let mut out = [0; N];
        out.copy_from_slice(self.bytes(what, N)?);
        Ok(out)
    }

    /// A `u32` count of items that take at least `min_item_len` bytes each: refused above `limit`, and
    /// above what the remaining bytes can hold.
    pub fn count(
        &mut self,
        what: &'static str,
        min_item_len: usize,
        limit: usize,
    ) -> Result<usize, DecodeError> {
        let count = u32::take(self)? as usize;
        if count > limit {
            return Err(DecodeError::Limit { what, value: count as u64, limit: limit as u64 });
        }
        let needed = count.saturating_mul(min_item_len);
        if needed > self.left() {
            return Err(DecodeError::Short { what, needed, left: self.left() });
        }
        Ok(count)
    }

    /// Ends the reading: nothing may be left over.
    pub fn finish(self, what: &'static str) -> Result<(), DecodeError> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(DecodeError::Trailing { what, left }),
        }
    }
}

/// A value with one binary form.
pub trait Wire: Sized {
    /// The fewest bytes that any value of this type takes; bounds counts before allocation.
    const MIN_LEN: usize;
    /// Appends the value.
    fn put(&self, out: &mut Vec<u8>);
    /// Reads one value.
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError>;

    /// The value as bytes of its own.
    fn to_wire(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.put(&mut out);
        out
    }

    /// Reads one value that fills `bytes` exactly.
    fn from_wire(what: &'static str, bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let value = Self::take(&mut reader)?;
        reader.finish(what)?;
        Ok(value)
    }
}

macro_rules! wire_integer {
    ($($int:ty),*) => {$(
        impl Wire for $int {
            const MIN_LEN: usize = size_of::<$int>();
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
                Ok(<$int>::from_le_bytes(from.array(stringify!($int))?))
            }
        }
    )*};
}
wire_integer!(u8, u16, u32, u64);

impl<const N: usize> Wire for [u8; N] {
    const MIN_LEN: usize = N;
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        from.array("byte array")
    }
}

impl Wire for bool {
    const MIN_LEN: usize = 1;
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        match u8::take(from)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(DecodeError::Unknown { what: "bool", value: u64::from(other) }),
        }
    }
}

impl<T: Wire> Wire for Option<T> {
    const MIN_LEN: usize = 1;
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(if bool::take(from)? { Some(T::take(from)?) } else { None })
    }
}

/// The most items that one list of a body may have. A body is at most 1 MiB, so this is a second fence.
pub const LIST_LIMIT: usize = 65_536;

impl<T: Wire> Wire for Vec<T> {
    const MIN_LEN: usize = 4;
    fn put(&self, out: &mut Vec<u8>) {
        debug_assert!(self.len() <= LIST_LIMIT);
        u32::try_from(self.len()).unwrap_or(u32::MAX).put(out);
        for item in self {
            item.put(out);
        }
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let count = from.count("list", T::MIN_LEN.max(1), LIST_LIMIT)?;
        (0..count).map(|_| T::take(from)).collect()
    }
}

/// Bytes of at most `MAX` length, with a `u16` length in front.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct ShortBytes<const MAX: usize>(Vec<u8>);

impl<const MAX: usize> ShortBytes<MAX> {
    /// Fails when `bytes` is longer than `MAX`.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, DecodeError> {
        let bytes = bytes.into();
        match bytes.len() <= MAX {
            true => Ok(Self(bytes)),
            false => Err(DecodeError::Limit {
                what: "bytes",
                value: bytes.len() as u64,
                limit: MAX as u64,
            }),
        }
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl<const MAX: usize> Wire for ShortBytes<MAX> {
    const MIN_LEN: usize = 2;
    fn put(&self, out: &mut Vec<u8>) {
        u16::try_from(self.0.len()).unwrap_or(u16::MAX).put(out);
        out.extend_from_slice(&self.0);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let len = usize::from(u16::take(from)?);
        if len > MAX {
            return Err(DecodeError::Limit { what: "bytes", value: len as u64, limit: MAX as u64 });
        }
        Ok(Self(from.bytes("bytes", len)?.to_vec()))
    }
}

/// UTF-8 text of at most `MAX` bytes, with a `u16` length in front.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct ShortText<const MAX: usize>(String);

impl<const MAX: usize> ShortText<MAX> {
    /// Text for people: cut at a character boundary when it is longer than `MAX` bytes.
    pub fn cut(text: &str) -> Self {
        Self(text[..text.floor_char_boundary_at(MAX)].to_owned())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// `str::floor_char_boundary` for our minimum Rust version.
trait FloorCharBoundary {
    fn floor_char_boundary_at(&self, index: usize) -> usize;
}

impl FloorCharBoundary for str {
    fn floor_char_boundary_at(&self, index: usize) -> usize {
        let mut at = index.min(self.len());
        while !self.is_char_boundary(at) {
            at -= 1;
        }
        at
    }
}

impl<const MAX: usize> Wire for ShortText<MAX> {
    const MIN_LEN: usize = 2;
    fn put(&self, out: &mut Vec<u8>) {
        u16::try_from(self.0.len()).unwrap_or(u16::MAX).put(out);
        out.extend_from_slice(self.0.as_bytes());
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let bytes = ShortBytes::<MAX>::take(from)?.0;
        String::from_utf8(bytes)
            .map(Self)
            .map_err(|_| DecodeError::Text { what: "text", rule: "must be UTF-8" })
    }
}

/// A value that is encoded already: its bytes, with nothing in front.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Encoded(pub Vec<u8>);

impl Wire for Encoded {
    const MIN_LEN: usize = 0;
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }
    /// Takes all that is left.
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let left = from.left();
        from.bytes("encoded value", left).map(|bytes| Self(bytes.to_vec()))
    }
}

/// Declares a struct whose binary form is its fields in order.
macro_rules! wire_struct {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$fmeta:meta])* pub $field:ident: $ty:ty),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $name { $($(#[$fmeta])* pub $field: $ty),* }

        impl $crate::wire::Wire for $name {
            const MIN_LEN: usize = 0 $(+ <$ty as $crate::wire::Wire>::MIN_LEN)*;
            fn put(&self, out: &mut Vec<u8>) {
                let _ = &out;
                $($crate::wire::Wire::put(&self.$field, out);)*
            }
            fn take(from: &mut $crate::wire::Reader<'_>) -> Result<Self, $crate::wire::DecodeError> {
                let _ = &from;
                Ok(Self { $($field: $crate::wire::Wire::take(from)?),* })
            }
        }
    };
}
pub(crate) use wire_struct;

/// Declares a closed set of codes with a name each and an integer form; other values are refused.
macro_rules! wire_enum {
    ($(#[$meta:meta])* pub enum $name:ident: $repr:ty, $what:literal { $($(#[$vmeta:meta])* $variant:ident = $code:literal => $text:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$vmeta])* $variant),* }

        impl $name {
            /// Every value, in the order of its codes.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The code on the wire.
            pub const fn code(self) -> $repr {
                match self { $(Self::$variant => $code),* }
            }

            /// The value of a code, if it has one.
            pub const fn from_code(code: $repr) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)* _ => None }
            }

            /// The name in messages, metrics labels and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl $crate::wire::Wire for $name {
            const MIN_LEN: usize = size_of::<$repr>();
            fn put(&self, out: &mut Vec<u8>) {
                self.code().put(out);
            }
            fn take(from: &mut $crate::wire::Reader<'_>) -> Result<Self, $crate::wire::DecodeError> {
                let code = <$repr>::take(from)?;
                Self::from_code(code).ok_or($crate::wire::DecodeError::Unknown {
                    what: $what,
                    value: u64::from(code),
                })
            }
        }
    };
}
pub(crate) use wire_enum;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_count_beyond_the_bytes_is_refused_before_allocation() {
        let lie = u32::MAX.to_wire();
        assert!(matches!(Vec::<u64>::from_wire("list", &lie), Err(DecodeError::Limit { .. })));
        let lie = 60_000u32.to_wire();
        assert!(matches!(Vec::<u64>::from_wire("list", &lie), Err(DecodeError::Short { .. })));
    }

    #[test]
    fn text_for_people_is_cut_at_a_character() {
        assert_eq!(ShortText::<4>::cut("aäöü").as_str(), "aä");
    }

    proptest! {
        #[test]
        fn lists_and_options_round_trip(value: Vec<u64>, maybe: Option<u16>, text in ".{0,20}") {
            prop_assert_eq!(&Vec::<u64>::from_wire("list", &value.to_wire()).unwrap(), &value);
            prop_assert_eq!(Option::<u16>::from_wire("option", &maybe.to_wire()).unwrap(), maybe);
            let text = ShortText::<128>::cut(&text);
            prop_assert_eq!(&ShortText::<128>::from_wire("text", &text.to_wire()).unwrap(), &text);
        }

        #[test]
        fn decoding_any_bytes_never_panics(bytes: Vec<u8>) {
            let _ = Vec::<Option<ShortText<16>>>::from_wire("any", &bytes);
            let _ = Vec::<[u8; 3]>::from_wire("any", &bytes);
        }
    }
}
