//! The ssd tier: parts on disks, in a log of segments.

pub mod io;
