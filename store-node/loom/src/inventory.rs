//! What the catalog tells, without those who listen.

#[path = "../../src/inventory/command.rs"]
pub mod command;
#[path = "../../src/inventory/log.rs"]
pub mod log;
#[path = "../../src/inventory/part_sets.rs"]
pub mod part_sets;
#[path = "../../src/inventory/view.rs"]
pub mod view;

pub use log::{Change, ChangeLog};
pub use part_sets::{BlockState, PartSets};
pub use view::{Inventory, Vitals};
