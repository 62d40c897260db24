//! How a command of a master arrives: checked, and made what the node understands.

use super::command::Eviction;
use larder_proto::{Tier, control::EvictFilter, ids::TenantName, wire::DecodeError};
use std::time::Duration;

/// Keys that one eviction may name.
const KEYS_LIMIT: usize = 16_384;
/// Bytes of a producer's name in a filter.
const PRODUCER_LIMIT: usize = 256;

impl TryFrom<EvictFilter> for Eviction {
    type Error = DecodeError;

    fn try_from(filter: EvictFilter) -> Result<Self, DecodeError> {
        let EvictFilter {
            tenant,
            content,
            layout,
            keys,
            producer,
            dry_run,
            descendants,
            unused_ms,
            tier,
        } = filter;
        let tier = match tier.as_str() {
            "" => None,
            "dram" => Some(Tier::Dram),
            "ssd" => Some(Tier::Ssd),
            _ => {
                return Err(DecodeError::Text {
                    what: "tier of an eviction",
                    rule: "must be dram or ssd",
                });
            }
        };
        if descendants && keys.is_empty() {
            return Err(DecodeError::Text {
                what: "descendants of an eviction",
                rule: "must come with keys",
            });
        }
        within("keys of an eviction", keys.len(), KEYS_LIMIT)?;
        within("producer of an eviction", producer.len(), PRODUCER_LIMIT)?;
        let set = |bytes: &bytes::Bytes| (!bytes.is_empty()).then(|| bytes.clone());
        Ok(Self {
            tenant: tenant.parse::<TenantName>()?.id(),
            content: set(&content).map(|bytes| bytes.as_ref().try_into()).transpose()?,
            layout: set(&layout).map(|bytes| bytes.as_ref().try_into()).transpose()?,
            keys: keys.iter().map(|key| key.as_ref().try_into()).collect::<Result<_, _>>()?,
            producer: (!producer.is_empty()).then_some(producer),
            descendants,
            unused_for: (unused_ms > 0).then(|| Duration::from_millis(unused_ms)),
            tier,
            dry_run,
        })
    }
}

fn within(what: &'static str, value: usize, limit: usize) -> Result<(), DecodeError> {
    match value <= limit {
        true => Ok(()),
        false => Err(DecodeError::Limit { what, value: value as u64, limit: limit as u64 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_without_a_tenant_or_with_a_cut_key_is_refused() {
        let filter = EvictFilter { tenant: "default".to_owned(), ..EvictFilter::default() };
        assert!(Eviction::try_from(filter.clone()).is_ok());
        let no_tenant = EvictFilter { tenant: String::new(), ..filter.clone() };
        assert!(Eviction::try_from(no_tenant).unwrap_err().to_string().contains("tenant name"));
        let cut = EvictFilter { keys: vec![vec![0; 31].into()], ..filter };
        assert!(Eviction::try_from(cut).unwrap_err().to_string().contains("block key"));
    }
}
