//! The macros that declare a configuration: a plain serde struct, its defaults and its doc text, all
//! written once.

/// Declares one table of a configuration: a public struct with `Default`, `Clone`, `Debug`,
/// `PartialEq`, serde and [`Setting`](crate::config::Setting). The doc comments are what `--help`
/// prints. A field without `=` takes the default of its type: right for nested tables, lists and
/// optional keys.
///
/// ```
/// use larder_daemon::config::ByteSize;
///
/// larder_daemon::settings! {
///     /// The `[dram]` table.
///     pub struct DramConfig {
///         /// Host memory for parts. Touched at start, so that it is really there.
///         pub capacity: ByteSize = ByteSize::gib(2),
///         /// Eviction starts above this share of `capacity`.
///         pub high_watermark: f64 = 0.95,
///         /// NUMA node to allocate on. Not set: the kernel chooses.
///         pub numa_node: Option<u32>,
///     }
/// }
///
/// assert_eq!(DramConfig::default().capacity.to_string(), "2GiB");
/// ```
#[macro_export]
macro_rules! settings {
    (
        $(#[doc = $table_doc:expr])*
        $vis:vis struct $name:ident {
            $(
                $(#[doc = $doc:expr])*
                $field_vis:vis $field:ident : $type:ty $(= $default:expr)?
            ),* $(,)?
        }
    ) => {
        $(#[doc = $table_doc])*
        #[derive(
            ::std::fmt::Debug,
            ::std::clone::Clone,
            ::std::cmp::PartialEq,
            $crate::macro_support::serde::Serialize,
            $crate::macro_support::serde::Deserialize,
        )]
        #[serde(crate = "larder_daemon::macro_support::serde", default)]
        $vis struct $name {
            $(
                $(#[doc = $doc])*
                $field_vis $field: $type,
            )*
        }

        impl ::std::default::Default for $name {
            fn default() -> Self {
                Self { $( $field: $crate::setting_default!($($default)?), )* }
            }
        }

        impl $crate::config::Setting for $name {
            fn shape() -> $crate::config::Shape {
                $crate::config::Shape::Table(::std::vec![$(
                    $crate::config::Field {
                        name: ::std::stringify!($field),
                        docs: $crate::macro_support::join_docs(&[$($doc),*]),
                        shape: <$type as $crate::config::Setting>::shape(),
                    },
                )*])
            }
        }
    };
}

/// The default of one field of [`settings!`](crate::settings).
#[doc(hidden)]
#[macro_export]
macro_rules! setting_default {
    () => {
        ::std::default::Default::default()
    };
    ($default:expr) => {
        $default
    };
}

/// Declares a setting that is one of a few words: an enum with `Display`, serde and
/// [`Setting`](crate::config::Setting). The first variant is the default of the type.
///
/// ```
/// larder_daemon::choices! {
///     /// Where the leader keeps its hard state.
///     pub enum StateStore {
///         /// On the local disk: one master.
///         RocksDb = "rocksdb",
///         /// In etcd: highly available.
///         Etcd = "etcd",
///     }
/// }
///
/// assert_eq!(StateStore::default().to_string(), "rocksdb");
/// ```
#[macro_export]
macro_rules! choices {
    (
        $(#[doc = $enum_doc:expr])*
        $vis:vis enum $name:ident {
            $(#[doc = $first_doc:expr])* $first:ident = $first_word:literal
            $(, $(#[doc = $doc:expr])* $variant:ident = $word:literal)* $(,)?
        }
    ) => {
        $(#[doc = $enum_doc])*
        #[derive(
            ::std::fmt::Debug,
            ::std::clone::Clone,
            ::std::marker::Copy,
            ::std::cmp::PartialEq,
            ::std::cmp::Eq,
            ::std::default::Default,
            $crate::macro_support::serde::Serialize,
            $crate::macro_support::serde::Deserialize,
        )]
        #[serde(crate = "larder_daemon::macro_support::serde")]
        $vis enum $name {
            $(#[doc = $first_doc])*
            #[default]
            #[serde(rename = $first_word)]
            $first,
            $( $(#[doc = $doc])* #[serde(rename = $word)] $variant, )*
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.pad(match self {
                    Self::$first => $first_word,
                    $( Self::$variant => $word, )*
                })
            }
        }

        impl $crate::config::Setting for $name {
            fn shape() -> $crate::config::Shape {
                use $crate::config::{Leaf, Shape};
                let form = ::std::concat!("one of ", $first_word $(, ", ", $word)*);
                Shape::Leaf(Leaf::text::<Self>(Leaf::CHOICE, form))
            }
        }
    };
}

/// Makes a type with `Display` and `FromStr` a setting that is written as a text. The last argument
/// completes "must be ...".
#[macro_export]
macro_rules! text_setting {
    ($type:ty, $placeholder:literal, $form:literal) => {
        impl $crate::macro_support::serde::Serialize for $type {
            fn serialize<S: $crate::macro_support::serde::Serializer>(
                &self,
                serializer: S,
            ) -> ::std::result::Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> $crate::macro_support::serde::Deserialize<'de> for $type {
            fn deserialize<D: $crate::macro_support::serde::Deserializer<'de>>(
                deserializer: D,
            ) -> ::std::result::Result<Self, D::Error> {
                use $crate::macro_support::serde::{Deserialize, de::Error};
                let text = <::std::string::String as Deserialize>::deserialize(deserializer)?;
                text.parse().map_err(D::Error::custom)
            }
        }

        impl $crate::config::Setting for $type {
            fn shape() -> $crate::config::Shape {
                $crate::config::Shape::Leaf($crate::config::Leaf::text::<Self>($placeholder, $form))
            }
        }
    };
}

/// What the macros above expand to. Not for use by hand.
#[doc(hidden)]
pub mod macro_support {
    pub use serde;

    /// The lines of a doc comment as one text; a blank line becomes a line break.
    pub fn join_docs(lines: &[&str]) -> String {
        let mut text = String::new();
        for line in lines {
            let line = line.trim();
            if line.is_empty() {
                text.push('\n');
                continue;
            }
            if !text.is_empty() && !text.ends_with('\n') {
                text.push(' ');
            }
            text.push_str(line);
        }
        text
    }
}
