//! Who is who: nodes, their lives, clusters, terms, tenants.
//!
//! Every id is a type of its own, so that two of them cannot be swapped. Ids that people meet print as
//! lower-case hex and parse back.

use crate::wire::{DecodeError, Reader, Wire};
use std::{fmt, str::FromStr, time::SystemTime};

/// A text that is not the hex form of an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} must be {digits} hex digits")]
pub struct BadHex {
    what: &'static str,
    digits: usize,
}

/// Declares a newtype over bytes with hex `Display`, `FromStr` and a binary form.
macro_rules! hex_id {
    ($(#[$meta:meta])* pub struct $name:ident([u8; $len:literal]), $what:literal) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name([u8; $len]);

        impl $name {
            /// The value with these bytes.
            pub const fn from_bytes(bytes: [u8; $len]) -> Self {
                Self(bytes)
            }

            /// The value as bytes.
            pub const fn as_bytes(&self) -> &[u8; $len] {
                &self.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::ids::BadHex;
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                $crate::ids::parse_hex($what, text).map(Self)
            }
        }

        impl TryFrom<&[u8]> for $name {
            type Error = $crate::wire::DecodeError;
            fn try_from(bytes: &[u8]) -> Result<Self, Self::Error> {
                $crate::wire::Wire::from_wire($what, bytes)
            }
        }

        impl $crate::wire::Wire for $name {
            const MIN_LEN: usize = $len;
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.0);
            }
            fn take(from: &mut $crate::wire::Reader<'_>) -> Result<Self, $crate::wire::DecodeError> {
                from.array($what).map(Self)
            }
        }
    };
}
pub(crate) use hex_id;

/// Parses exactly `2 * N` hex digits.
pub(crate) fn parse_hex<const N: usize>(what: &'static str, text: &str) -> Result<[u8; N], BadHex> {
    let bad = BadHex { what, digits: 2 * N };
    let digits: Option<Vec<u8>> =
        text.chars().map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok())).collect();
    let digits = digits.filter(|digits| digits.len() == 2 * N).ok_or(bad)?;
    let mut out = [0; N];
    for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Ok(out)
}

hex_id! {
    /// A store node, the same over all its restarts. Made once, kept in the node's state directory.
    pub struct NodeId([u8; 16]), "node id"
}
hex_id! {
    /// A cluster. Terms of different clusters do not compare; changing it is an explicit admin act.
    pub struct ClusterId([u8; 16]), "cluster id"
}
hex_id! {
    /// A tenant: the first 16 bytes of BLAKE3 over its name. Part of every part name, so knowing a
    /// key grants nothing to another tenant (P11).
    pub struct TenantId([u8; 16]), "tenant id"
}

/// The name of a tenant: 1 to 64 bytes of `a-z 0-9 . _ -`, starting with a letter or digit. It is never
/// used as a path (F55) and never compared but through [`TenantId`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantName(String);

impl TenantName {
    /// The tenant of those who name none.
    pub const DEFAULT: &'static str = "default";

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id that stands for this name in part names.
    pub fn id(&self) -> TenantId {
        let mut id = [0; 16];
        id.copy_from_slice(&blake3::hash(self.0.as_bytes()).as_bytes()[..16]);
        TenantId(id)
    }
}

impl Default for TenantName {
    fn default() -> Self {
        Self(Self::DEFAULT.to_owned())
    }
}

impl fmt::Display for TenantName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for TenantName {
    type Err = DecodeError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let starts = text.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c);
        if starts && text.len() <= 64 && text.chars().all(allowed) {
            return Ok(Self(text.to_owned()));
        }
        Err(DecodeError::Text {
            what: "tenant name",
            rule: "must be 1 to 64 of a-z 0-9 . _ - and start with a letter or digit",
        })
    }
}

impl Wire for TenantName {
    const MIN_LEN: usize = 2;
    fn put(&self, out: &mut Vec<u8>) {
        crate::wire::ShortText::<64>::cut(&self.0).put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        crate::wire::ShortText::<64>::take(from)?.as_str().parse()
    }
}

/// One life of a node (or of an engine, or of a master): later lives are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Incarnation(pub u64);

impl Incarnation {
    /// The incarnation of a process that starts now: `max(last + 1, unix time in ms)`. With the last
    /// one persisted it grows even when the clock goes back; without it the clock alone decides.
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place where wall-clock time enters; it orders lives and never frees memory"
    )]
    pub fn at_start(last_persisted: Option<Self>) -> Self {
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now_ms = since_epoch.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX));
        Self(now_ms.max(last_persisted.map_or(0, |last| last.0.saturating_add(1))))
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Given to every stored part and never reused: equal generations mean equal bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation {
    /// The life of the node that stored the part.
    pub incarnation: Incarnation,
    /// Counts the parts stored in that life, from 1.
    pub counter: u64,
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.incarnation, self.counter)
    }
}

/// Stands, inside one master, for a node's current incarnation or for a shared store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Location(pub u32);

/// Fences commands of masters: a node obeys a term only if it is at least the highest it has seen from
/// the same cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Term {
    /// The cluster that the number counts in.
    pub cluster: ClusterId,
    /// Grows with every change of leader.
    pub number: u64,
}

impl Term {
    /// Whether a receiver that has seen `self` may obey a command of `other`.
    pub fn admits(&self, other: &Term) -> bool {
        self.cluster == other.cluster && other.number >= self.number
    }
}

impl Wire for Incarnation {
    const MIN_LEN: usize = 8;
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        u64::take(from).map(Self)
    }
}

impl Wire for Generation {
    const MIN_LEN: usize = 16;
    fn put(&self, out: &mut Vec<u8>) {
        self.incarnation.put(out);
        self.counter.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { incarnation: Incarnation::take(from)?, counter: u64::take(from)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_print_as_hex_and_parse_back() {
        let id = NodeId::from_bytes(*b"0123456789abcdef");
        assert_eq!(id.to_string(), "30313233343536373839616263646566");
        assert_eq!(id.to_string().parse(), Ok(id));
        assert!("3031".parse::<NodeId>().is_err());
        assert!("zz313233343536373839616263646566".parse::<NodeId>().is_err());
    }

    #[test]
    fn an_incarnation_grows_even_if_the_clock_went_back() {
        let future = Incarnation(u64::MAX - 10);
        assert_eq!(Incarnation::at_start(Some(future)), Incarnation(u64::MAX - 9));
        assert!(Incarnation::at_start(None) > Incarnation(1_600_000_000_000));
    }

    #[test]
    fn tenant_names_that_look_like_paths_are_refused() {
        for bad in
            ["", ".", "..", "../x", "/etc/x", "a/../../b", "a\0", "a\n", "A", &"x".repeat(65)]
        {
            assert!(bad.parse::<TenantName>().is_err(), "{bad:?}");
        }
        assert!("team-a.prod_1".parse::<TenantName>().is_ok());
    }

    #[test]
    fn a_term_of_another_cluster_or_an_older_one_is_not_admitted() {
        let (a, b) = (ClusterId::from_bytes([1; 16]), ClusterId::from_bytes([2; 16]));
        let seen = Term { cluster: a, number: 5 };
        assert!(seen.admits(&Term { cluster: a, number: 5 }));
        assert!(!seen.admits(&Term { cluster: a, number: 4 }));
        assert!(!seen.admits(&Term { cluster: b, number: 9 }));
    }
}
