//! What a node tells its masters about its catalog.
//!
//! [`log`] numbers every change of the catalog once; [`publisher`] decides, for one master, what is sent
//! of it and when (a state machine without IO); [`session`] is the task that connects, sends and obeys.
//! [`terms`] keeps commands of deposed masters out, over all sessions of the node.
//!
//! There is one session for every configured master. They share the log and nothing else, so a slow
//! master delays nobody, and no code here asks which of them leads.

pub mod command;
mod filter;
pub mod log;
pub mod part_sets;
pub mod publisher;
pub mod session;
pub mod terms;
pub mod view;

pub use command::{CommandSink, Evicted, Eviction};
pub use log::{Age, Change, ChangeLog, Loss};
pub use part_sets::{BlockState, PartSets, SetId, SetsFull};
pub use publisher::Identity;
pub use session::{LinkBoard, Shared, links};
pub use terms::{TermGate, TermStore};
pub use view::{Inventory, Vitals};
