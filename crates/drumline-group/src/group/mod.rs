//! Process groups: the ranks that work together, and what they can do.

mod ask;
mod at_exit;
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
mod metrics;
#[cfg(feature = "objects")]
pub(crate) mod objects;
mod points;
mod process_group;
mod registered;
mod regroup;
mod round;
mod subgroups;

pub use default_group::{default_group, is_initialized};
pub(crate) use drive::Driven;
pub use init::{connect_members, init_process_group, init_with_store};
pub use metrics::metrics_text;
pub(crate) use process_group::Inner;
pub use process_group::ProcessGroup;
pub use registered::RegisteredBuffer;
pub use regroup::{Line, Loss};
pub use subgroups::GroupOptions;
