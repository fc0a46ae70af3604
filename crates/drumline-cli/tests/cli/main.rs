//! The command `drumline`, as a user calls it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bench;
mod check;
mod closed;
mod ending;
mod first;
mod hangs;
mod launch;
mod left;
mod monitoring;
mod nodes;
mod options;
mod predict;
mod restarts;
mod run;
mod trace;
