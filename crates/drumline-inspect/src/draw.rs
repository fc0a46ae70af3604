//! Draws an algorithm: a lane for every rank, time downwards, an arrow for every message.
//!
//! An arrow is in the round in which its receiver takes the message. The number of the round is the number of
//! messages in the longest chain up to then. Flushes are not drawn.
//!
//! Where ranks share memory, posts and waits are diamonds, and a wait begins a round like a message. A dashed
//! line is an access to the memory of neighbours: it has a dot where it reads, and an arrowhead or a ring
//! where it writes.

mod events;
mod legend;
mod marks;
mod picture;
mod story;

pub use picture::svg;
