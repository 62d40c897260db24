//! Between a serving engine and its local store node: what of a prompt can be reused, whether
//! fetching it pays, and what to publish.
//!
//! One request, in order (DESIGN section 8):
//!
//! ```text
//! prepare(tokens): match -> plan -> fetch       RequestKv: the leading blocks that landed
//! RequestKv::restore(engine)                    imported in position order: exactly N valid blocks
//! engine computes the rest, chunk by chunk      RequestKv::computed(from, to) after each step
//!                                               whole valid blocks are exported and offered
//! ```
//!
//! Promises: the engine is told exactly which blocks are valid; the cache costs a request at most
//! [`PlannerOptions::max_slowdown`] times recomputing, whatever fails (P8); nothing computed on a failed
//! block, and nothing computed with other weights than at the request's start, is published;
//! publishing never makes a request wait; dropping a future or a [`RequestKv`] at any point
//! releases its leases and cancels its transfers (P10).
//! Not here: how an engine computes (see `engine/` for the bundled one), where parts live.
#![forbid(unsafe_code)]

mod connector;
mod engine;
mod estimate;
mod fetch;
mod local;
pub mod metric;
mod planner;
mod publish;
mod report;
mod request;
mod session;
mod store;

pub use connector::{BlockShape, Connector, ConnectorTasks, Options};
pub use engine::{KvEngine, PrefillRate};
pub use estimate::Estimate;
pub use local::{LocalFetch, LocalNode, LocalStore};
pub use planner::{Plan, Planner, PlannerOptions, PromptShape, Verdict, Watch};
pub use report::{KvReport, ReuseSource, SkipReason};
pub use request::{PublishedBlocks, RequestKv};
pub use store::{
    BlockSource, Connect, Delivered, Fetch, FetchFailure, KvStore, PutAttributes, PutResult, Reuse,
    StoreError,
};
