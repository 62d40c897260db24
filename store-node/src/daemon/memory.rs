//! Taking the memory of the dram tier for real, before anybody is promised any of it.

use crate::{config::NodeConfig, tiers::dram::Arena};
use larder_daemon::{Context, TaskError, config::ByteSize};
use std::{fs, io, sync::Arc};
use tokio::task::spawn_blocking;
use tracing::{info, warn};

/// For the operator, whose disks and network could be faster.
const NOT_HUGE: &str = "some of the dram tier lies in small pages, which costs the ssd tier and transfers speed and \
    processor time. If the error is that there is no memory, the host has too few stretches of 2 MiB left: \
    `echo 1 > /proc/sys/vm/compact_memory`, and restart the node. Otherwise the kernel does not make them (Linux \
    before 6.1, or told not to): `echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`";

/// Takes the memory of the arena page by page, on a thread of its own; progress goes to `/health` and the log.
/// `None`: the node was told to stop meanwhile.
pub(super) async fn take(
    config: &NodeConfig,
    context: &Context,
) -> Result<Option<Arc<Arena>>, TaskError> {
    let capacity = config.dram.capacity;
    let refuse = |kind: io::ErrorKind, why: &dyn std::fmt::Display| {
        io::Error::new(kind, format!("take dram.capacity = {capacity} of memory: {why}"))
    };
    if let Some((there, what)) = available()
        && there < capacity.as_u64()
    {
        let why = format!("must be at most {}, which is {what}", ByteSize::mib(there >> 20));
        return Err(refuse(io::ErrorKind::OutOfMemory, &why).into());
    }
    let (health, stop) = (context.health.clone(), context.stop.clone());
    let touch = move || {
        Arena::new(capacity.as_usize(), |touched| {
            if stop.is_cancelled() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let touched = ByteSize::bytes(touched as u64);
            health.starting(format!("touching memory: {touched} of {capacity}"));
            info!(%touched, %capacity, "touching memory");
            Ok(())
        })
    };
    match spawn_blocking(touch).await? {
        Ok(arena) => {
            match arena.memory().not_huge() {
                None => info!("the dram tier lies in huge pages"),
                Some(error) => warn!(%error, "{NOT_HUGE}"),
            }
            Ok(Some(arena))
        }
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
        Err(error) => Err(refuse(error.kind(), &error).into()),
    }
}

/// Bytes that could be taken now without another process losing its own, as far as the kernel tells: what the machine
/// has, or what the control group of the process is allowed.
fn available() -> Option<(u64, &'static str)> {
    let machine = fs::read_to_string("/proc/meminfo").ok();
    let machine = machine.and_then(|text| kib_of(&text, "MemAvailable:"));
    let group = fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let group = group.and_then(|text| text.trim().parse().ok()); // "max" is no number: no limit.
    let machine = machine.map(|bytes| (bytes, "what is free on this machine (MemAvailable)"));
    let group = group.map(|bytes| (bytes, "what the control group allows (memory.max)"));
    machine.into_iter().chain(group).min_by_key(|(bytes, _)| *bytes)
}

/// The bytes that a line of `/proc/meminfo` states.
fn kib_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_that_is_free_is_read_as_the_kernel_states_it() {
        let text = "MemTotal:       24683536 kB\nMemFree:  1 kB\nMemAvailable:   22001024 kB\n";
        assert_eq!(kib_of(text, "MemAvailable:"), Some(22_001_024 << 10));
        assert_eq!(kib_of(text, "SwapFree:"), None);
        let (there, _) = available().unwrap();
        assert!(there > 0);
    }
}
