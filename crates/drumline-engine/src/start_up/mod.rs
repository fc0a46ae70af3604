//! How a rank that knows the store becomes a member of a connected group.
//!
//! The code here performs nothing itself. [`Steps`] hands out its questions: to the store, to call a peer, to
//! let peers in. It goes on with the answers. `drumline-group` answers with real stores and sockets, the
//! simulator on virtual time.
//!
//! | module | what it decides |
//! |---|---|
//! | [`claim`] | whether a rank may join the job whose store it has found |
//! | [`meet`] | which ranks are in this life of the group |
//! | [`board`] | what all ranks say on a subject, and whose failure ends the others' waits |
//! | [`mesh`] | which peers are near, whom a rank dials, whom it expects |
//! | [`memory`] | which ranks share memory |
//! | [`watch`] | whether the process of a rank has ended meanwhile |

pub mod board;
pub mod card;
pub mod claim;
mod failure;
pub mod meet;
pub mod memory;
pub mod mesh;
pub mod steps;
mod store;
pub mod watch;

pub use self::{
    failure::Failure,
    steps::{Answer, Answered, Ask, Desk, Dialled, Outside, Step, Steps},
};
