//! Looking again for a moment before going to sleep.
//!
//! Waking a sleeping thread costs some 5 us on each side, and ten times that when its core has gone to
//! sleep too: more than all the rest of a lease. Between processes of one host an answer comes within a
//! few microseconds, so whoever waits for one looks again for a moment first. Where looking does not pay
//! (a busy peer, one core for both), it soon stops.

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// How long to look: what waking a thread on a sleeping core takes (measured: 60 us finds nearly every
/// answer that 100 us does, and 20 us half of them), so that a look in vain at most doubles a wait.
pub(super) const SPIN: Duration = Duration::from_micros(60);
/// The most waits without looking between two tries: what is looked at in vain stays below a fifteenth
/// of the waits.
const REST_LIMIT: u32 = 16;

/// Whether another core can answer while this one looks.
static OTHER_CORES: LazyLock<bool> =
    LazyLock::new(|| std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1));

/// Connections of this process that wait for an answer.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Whether a connection waits for an answer, among all of this process: where several do, a thread that
/// looks at one of them keeps the answers of the others waiting.
#[derive(Debug, Default)]
pub(super) struct Waits(bool);

impl Waits {
    pub(super) fn set(&mut self, waits: bool) {
        match (std::mem::replace(&mut self.0, waits), waits) {
            (false, true) => _ = WAITING.fetch_add(1, Ordering::Relaxed),
            (true, false) => _ = WAITING.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
    }

    /// It waits, and no other does.
    pub(super) fn alone(&self) -> bool {
        self.0 && WAITING.load(Ordering::Relaxed) == 1
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.set(false);
    }
}

/// Decides when looking is worth it: not after it was in vain, for twice as many waits each time.
#[derive(Debug, Default)]
pub struct Spin {
    rest: u32,
    resting: u32,
}

impl Spin {
    /// Whether to look before the next wait.
    pub fn is_worth_it(&mut self) -> bool {
        self.resting = self.resting.saturating_sub(1);
        self.resting == 0 && *OTHER_CORES
    }

    /// What came of it.
    pub fn found(&mut self, something: bool) {
        self.rest = match something {
            true => 0,
            false => (self.rest * 2).clamp(1, REST_LIMIT),
        };
        self.resting = self.rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looking_in_vain_becomes_rare_and_a_success_brings_it_back() {
        let mut spin = Spin::default();
        let looks = |spin: &mut Spin, waits: usize, something: bool| {
            let look = |_: &usize| {
                let look = spin.is_worth_it();
                if look {
                    spin.found(something);
                }
                look
            };
            (0..waits).filter(look).count()
        };
        if !*OTHER_CORES {
            assert_eq!(looks(&mut spin, 1000, true), 0);
            return;
        }
        assert_eq!(looks(&mut spin, 1000, true), 1000);
        let vain = looks(&mut spin, 10_000, false);
        assert!((500..1000).contains(&vain), "{vain}");
        assert!(looks(&mut spin, 2 * REST_LIMIT as usize, true) >= REST_LIMIT as usize);
    }
}
