//! Checks, drawings and replays of the algorithms of the table.
#![allow(clippy::unwrap_used, clippy::panic)]

mod algorithms;
mod drawings;
mod faults;
mod hosts;
mod many_hosts;
mod measured;
mod races;
mod replay;
