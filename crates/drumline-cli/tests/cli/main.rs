//! The command `drumline`, as a user calls it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bench;
mod check;
mod closed;
mod ending;
mod error_files;
mod first;
mod foreign;
mod guards;
mod hangs;
mod hosts;
mod launch;
mod left;
mod logs;
mod lost;
mod monitoring;
mod nodes;
mod options;
mod report;
mod restarts;
mod run;
mod trace;
mod unread;
