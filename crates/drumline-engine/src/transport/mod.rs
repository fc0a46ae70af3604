//! What carries a group's messages.

mod broken;
mod control_link;
mod data_link;
mod duplex;
mod interface;
mod later;
mod peer;
mod points;
mod streams;
mod striped;
mod waits;
mod wire;

pub use broken::is_silence;
pub use duplex::Duplex;
pub use interface::{Connections, Transport};
pub use peer::{Bundle, Channel, Opening};
pub use points::{Content, Direction, Ended, Message, Outcome, Point, PointCall};
#[doc(hidden)]
pub use points::{frame_again, messages_of};
pub use streams::{Interest, StreamKind, Streams};
pub use striped::Striped;
pub use waits::{InCall, Lack, Seeker, Waits};
pub use wire::Control;
