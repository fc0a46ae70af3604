//! Process groups: the ranks that work together, and what they can do.

mod ask;
mod at_exit;
pub mod blocks;
mod collectives;
mod connect;
mod default_group;
mod drive;
pub mod driving;
mod explain;
mod family;
mod foreign;
mod guard;
mod init;
mod members;
pub mod metrics;
#[cfg(feature = "objects")]
pub(crate) mod objects;
mod points;
mod process_group;
mod registered;
pub mod regroup;
mod round;
mod subgroups;

pub use connect::{connect, local_world, local_world_with};
pub use default_group::{default_group, is_initialized};
pub(crate) use drive::Driven;
pub use explain::{explain, shares_memory};
pub use init::{connect_members, init_process_group, init_with_store};
#[cfg(feature = "objects")]
pub use objects::Objects;
pub(crate) use process_group::Inner;
pub use process_group::ProcessGroup;
pub use registered::RegisteredBuffer;
pub use subgroups::GroupOptions;
