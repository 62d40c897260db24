//! Sizes and durations as operators write them: a whole number and a unit.
//!
//! A bare number is refused, because the reader of a file cannot know whether `8` meant bytes or
//! gibibytes. Units are exact: powers of 1024 for sizes (`8GiB`), so that nothing is rounded, and
//! one unit for each value (`90s`, not `1m30s`). `Display` prints the largest unit that divides the
//! value, so a value that was read prints as an equal value.

use std::{fmt, str::FromStr, time::Duration};

/// A number of bytes: `8GiB`, `512MiB`, `4KiB`, `100B`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteSize(u64);

/// A span of time: `250ms`, `5s`, `10m`, `24h`. At most 2^64 nanoseconds (584 years).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct HumanDuration(Duration);

/// A text that is not a whole number followed by a known unit, or a value that does not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// No digits at the start, or a sign, a space or a decimal point among them.
    #[error("it does not start with a whole number")]
    NoNumber,
    /// Digits alone.
    #[error("the unit is missing ({units})")]
    NoUnit {
        /// The units that exist.
        units: &'static str,
    },
    /// Something behind the digits that is no unit.
    #[error("there is no unit {unit:?} ({units})")]
    UnknownUnit {
        /// What stood behind the digits.
        unit: String,
        /// The units that exist.
        units: &'static str,
    },
    /// More than 64 bits.
    #[error("the value is too large")]
    TooLarge,
}

/// Largest unit first: `Display` takes the first that divides.
type Units = [(&'static str, u64)];

const SIZE_UNITS: &Units = &[
    ("PiB", 1 << 50),
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
];
const SIZE_UNIT_NAMES: &str = "B, KiB, MiB, GiB, TiB, PiB";

const DURATION_UNITS: &Units = &[
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];
const DURATION_UNIT_NAMES: &str = "ns, us, ms, s, m, h";

impl ByteSize {
    /// `count` bytes.
    pub const fn bytes(count: u64) -> Self {
        Self(count)
    }

    /// `count` times 1024 bytes. Panics on overflow, which in a constant is a compile error.
    pub const fn kib(count: u64) -> Self {
        Self(count * (1 << 10))
    }

    /// `count` times 1024² bytes. Panics on overflow.
    pub const fn mib(count: u64) -> Self {
        Self(count * (1 << 20))
    }

    /// `count` times 1024³ bytes. Panics on overflow.
    pub const fn gib(count: u64) -> Self {
        Self(count * (1 << 30))
    }

    /// The number of bytes.
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// The number of bytes as a length in memory.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the assertion below holds on every platform we build for"
    )]
    pub const fn as_usize(self) -> usize {
        const { assert!(usize::BITS >= u64::BITS, "a 64-bit platform is needed") };
        self.0 as usize
    }
}

impl HumanDuration {
    /// `count` milliseconds. Panics beyond 2^64 nanoseconds.
    pub const fn from_millis(count: u64) -> Self {
        Self(Duration::from_nanos(count * 1_000_000))
    }

    /// `count` seconds. Panics beyond 2^64 nanoseconds.
    pub const fn from_secs(count: u64) -> Self {
        Self(Duration::from_nanos(count * 1_000_000_000))
    }

    /// The same span for timers and deadlines.
    pub const fn get(self) -> Duration {
        self.0
    }

    /// The span in nanoseconds. Every constructor keeps it within 64 bits.
    fn as_nanos(self) -> u64 {
        u64::try_from(self.0.as_nanos()).unwrap_or(u64::MAX)
    }
}

impl From<HumanDuration> for Duration {
    fn from(span: HumanDuration) -> Self {
        span.0
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_with_unit(f, self.0, SIZE_UNITS, "B")
    }
}

impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_with_unit(f, self.as_nanos(), DURATION_UNITS, "s")
    }
}

impl FromStr for ByteSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        parse_with_unit(text, SIZE_UNITS, SIZE_UNIT_NAMES).map(Self)
    }
}

impl FromStr for HumanDuration {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let nanos = parse_with_unit(text, DURATION_UNITS, DURATION_UNIT_NAMES)?;
        Ok(Self(Duration::from_nanos(nanos)))
    }
}

crate::text_setting!(
    ByteSize,
    "SIZE",
    "a size with a unit (B, KiB, MiB, GiB or TiB), like 8GiB or 512MiB"
);
crate::text_setting!(HumanDuration, "DURATION", "a duration with a unit, like 250ms, 5s or 10m");

fn write_with_unit(
    f: &mut fmt::Formatter<'_>,
    value: u64,
    units: &Units,
    unit_of_zero: &str,
) -> fmt::Result {
    let (unit, factor) = match units.iter().find(|(_, factor)| value.is_multiple_of(*factor)) {
        Some((unit, factor)) if value > 0 => (*unit, *factor),
        _ => (unit_of_zero, 1),
    };
    f.pad(&format!("{}{unit}", value / factor))
}

fn parse_with_unit(text: &str, units: &Units, names: &'static str) -> Result<u64, UnitError> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(UnitError::NoNumber);
    }
    if unit.is_empty() {
        return Err(UnitError::NoUnit { units: names });
    }
    let (_, factor) = units
        .iter()
        .find(|(name, _)| *name == unit)
        .ok_or_else(|| UnitError::UnknownUnit { unit: unit.to_owned(), units: names })?;
    let number: u64 = number.parse().map_err(|_| UnitError::TooLarge)?;
    number.checked_mul(*factor).ok_or(UnitError::TooLarge)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_size_prints_as_a_text_that_reads_as_the_same_size(value: u64, shift in 0u32..64) {
            let size = ByteSize(value >> shift << (shift / 2));
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }

        #[test]
        fn a_duration_prints_as_a_text_that_reads_as_the_same_duration(value: u64, unit in 0usize..6) {
            let factor = DURATION_UNITS[unit].1;
            let span = HumanDuration(Duration::from_nanos(value / factor * factor));
            prop_assert_eq!(span.to_string().parse(), Ok(span));
        }

        #[test]
        fn any_text_is_read_or_refused_without_panic(text in ".{0,24}") {
            let _ = text.parse::<ByteSize>();
            let _ = text.parse::<HumanDuration>();
        }
    }

    #[test]
    fn values_print_in_their_largest_whole_unit() {
        assert_eq!(ByteSize::gib(8).to_string(), "8GiB");
        assert_eq!(ByteSize::kib(1025).to_string(), "1025KiB");
        assert_eq!(ByteSize::bytes(0).to_string(), "0B");
        assert_eq!(HumanDuration::from_millis(250).to_string(), "250ms");
        assert_eq!(HumanDuration::from_secs(600).to_string(), "10m");
        assert_eq!(HumanDuration::from_secs(90).to_string(), "90s");
        assert_eq!(HumanDuration::default().to_string(), "0s");
    }

    #[test]
    fn what_is_no_number_with_a_unit_is_refused_with_the_reason() {
        let size = |text: &str| text.parse::<ByteSize>().unwrap_err().to_string();
        assert_eq!(size("8"), "the unit is missing (B, KiB, MiB, GiB, TiB, PiB)");
        assert_eq!(size("8GB"), "there is no unit \"GB\" (B, KiB, MiB, GiB, TiB, PiB)");
        assert_eq!(size("8 GiB"), "there is no unit \" GiB\" (B, KiB, MiB, GiB, TiB, PiB)");
        assert_eq!(size("GiB"), "it does not start with a whole number");
        assert_eq!(size("-1GiB"), "it does not start with a whole number");
        assert_eq!(size("99999999PiB"), "the value is too large");
        assert_eq!(size("99999999999999999999999B"), "the value is too large");
        assert_eq!(
            "5".parse::<HumanDuration>(),
            Err(UnitError::NoUnit { units: DURATION_UNIT_NAMES })
        );
        assert!("1.5s".parse::<HumanDuration>().is_err());
    }
}
