//! Every way to read and write a folder keeps the same contract.

pub(super) mod bed;
mod contract;
mod folder;
mod forbidden;
mod limits;
