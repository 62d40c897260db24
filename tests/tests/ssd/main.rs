//! The ssd tier of real nodes over real files: what a kill, damage, a disk that is full or fails, and a
//! machine that forbids things leave of it.
#![expect(clippy::unwrap_used, reason = "helpers of tests: what fails says where")]

mod bed;
mod damage;
mod disks;
mod kills;
mod limits;
mod soak;
mod wiped;
