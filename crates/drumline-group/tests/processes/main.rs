//! Ranks that are processes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod deaths;
mod guard;
mod rendezvous;
mod start;
mod start_deaths;

use drumline_testing as common;
